"""Starting the processes of a training with torchrun from a notebook, and ending them: `launch` and `command` for who starts
them, `end_with_parent` for the processes themselves."""

import contextlib
import faulthandler
import json
import multiprocessing
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import IO

import joblib
import torch

from rsnakit.files import process_start, write_atomic
from rsnakit.progress import LAUNCHER, Follower
from rsnakit.stopping import Stop

REPOSITORY = Path(__file__).resolve().parents[1]
WATCH_S = 0.5
TAIL = 30  # lines shown of a process that did not say itself what it failed of
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun's: where a process writes what it fails of
FIRST = "[default0]:"  # torchrun's, before the lines of the first process's stderr
# torchrun's table of failures.
EXIT = re.compile(r"rank\s*: (\d+) \(local_rank.*\n\s*exitcode\s*: (-?\d+) \(pid: (\d+)\)")
ENDED = re.compile(r"Sending process (\d+) closing signal")
SIGNALLED = re.compile(
    r"SignalException: Process \d+ got signal: (\d+)"
)  # torchrun, and it ends its processes with SIGTERM
# What a process fails of when another one has ended.
LOST = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Connection refused|remote process exited|recv.*failed|send.*failed|"
    r"NCCL communicator was aborted"
)


def command(plan: Path | str) -> str:
    """The line that trains what a plan file says on several machines, once on each, with the same HOST, one of them."""
    gpus = max(1, torch.cuda.device_count())
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in _quiet(gpus).items())
    return (
        f"PYTHONPATH={shlex.quote(str(REPOSITORY))} {settings} torchrun --nnodes 2 --nproc-per-node {gpus} --rdzv-backend "
        f"c10d --rdzv-endpoint HOST:29500 -m rsnakit.engine {shlex.quote(str(plan))}"
    )


def _quiet(n_procs: int) -> dict[str, str]:
    """Variables without which torchrun warns of threads, and torch that it looks for parameters that a pass does not use."""
    settings = {"OMP_NUM_THREADS": str(max(1, joblib.cpu_count() // n_procs)), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return {name: os.environ.get(name) or value for name, value in settings.items()}


def launch(plan: Path | str, n_procs: int, module: str = "rsnakit.engine") -> str:
    """Trains what a plan file says in several processes of this machine, and shows here what the first one shows.

    Ctrl-C and SIGTERM are sent on, and the processes save before they end; a second Ctrl-C ends them at once. They also
    end with this process, however that ends.

    Args:
        plan: the file that says what to train.
        module: what each of them runs, with the plan as argument.

    Returns:
        Why it was told to stop (`Ctrl-C`, `SIGTERM`); empty where it came to its end.

    Raises:
        RuntimeError: a process failed; the message is its own traceback, or says by what signal it, or torchrun, was
            ended.
    """
    environment = {
        **os.environ,
        **_quiet(n_procs),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
        LAUNCHER: f"{os.getpid()} {process_start(os.getpid())}",
    }
    with Stop() as stop, tempfile.TemporaryDirectory(prefix="rsnakit-", ignore_cleanup_errors=True) as logs:
        line = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
            "--nproc-per-node", str(n_procs), "--log-dir", logs, "--tee", "2", "--local-ranks-filter", "0",
            "-m", module, str(plan),
        ]  # fmt: skip
        # In a session of its own: Ctrl-C in a terminal, or a kernel's interrupt, comes to this process alone.
        torchrun = subprocess.Popen(
            line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        try:
            said = _follow(torchrun, stop, Path(logs), n_procs)
        finally:
            torchrun.kill()
            for pid in _ranks(Path(logs)):
                _send(pid, signal.SIGKILL)
            status = torchrun.wait()
        if status and (failure := _failure(said, Path(logs), stop.asked(), status)):
            raise RuntimeError(failure)
        return stop.reason


def _follow(torchrun: subprocess.Popen, stop: Stop, logs: Path, n_procs: int) -> list[str]:
    """Shows what the first process says until torchrun ends, and has the processes stop when asked to.

    Returns:
        The lines of torchrun itself.
    """
    lines: queue.SimpleQueue[tuple[bool, str | None]] = queue.SimpleQueue()
    for stream in (torchrun.stdout, torchrun.stderr):
        threading.Thread(target=_read, args=(stream, stream is torchrun.stderr, lines), daemon=True).start()
    follower, said, open_streams, asked = Follower(), [], 2, False
    try:
        while open_streams:
            if stop.asked() and not asked:
                asked = True
                follower.feed(f"{stop.reason}: {n_procs} processes finish their step and save")
                pids = _ranks(logs)
                # Not by torchrun, which would send it to the loaders' workers too and kill what is not done after 30 s.
                for pid in pids if len(pids) == n_procs else [torchrun.pid]:
                    _send(pid, signal.SIGTERM)
            try:
                is_error, line = lines.get(timeout=WATCH_S)
            except queue.Empty:
                if torchrun.poll() is None:
                    continue
                break  # a process that outlived torchrun holds the stream, and is killed next
            if line is None:
                open_streams -= 1
            elif is_error and not line.startswith(FIRST):
                said.append(line)
            else:
                follower.feed(line.removeprefix(FIRST))
        torchrun.wait()
    finally:
        follower.close()
    return said


def _read(stream: IO[bytes], is_error: bool, lines: queue.SimpleQueue) -> None:
    for line in stream:
        lines.put((is_error, line.decode(errors="replace").rstrip("\r\n")))
    lines.put((is_error, None))


def _ranks(logs: Path) -> list[int]:
    """The numbers of the processes that have begun and are there still."""
    told = [path.read_text().split() for path in logs.glob("**/pid")]
    return [int(pid) for pid, started in told if process_start(int(pid)) == started]


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _failure(said: list[str], logs: Path, stopped: bool, torchrun: int) -> str:
    """What made torchrun fail, of all that happened in its wake; empty where it was only stopped.

    Args:
        torchrun: its exit status, that of `subprocess`.
    """
    text = "\n".join(said)
    told = {}  # what processes said themselves, the earliest first
    for path in sorted(logs.glob("**/error.json"), key=lambda path: path.stat().st_mtime_ns):
        told[int(path.parent.name)] = json.loads(path.read_text())["message"]["extraInfo"]["py_callstack"]
    ended = ENDED.findall(text)  # by torchrun, after one had failed
    exits = [(int(number), int(status), pid) for number, status, pid in EXIT.findall(text) if pid not in ended]
    for number, status, pid in exits:
        if status < 0 and not (stopped and status == -signal.SIGTERM):
            return f"process {number} (pid {pid}) was killed by {_signal(-status)}\n{_tail(logs, number)}".rstrip()
    for number, error in told.items():
        if not LOST.search(error):
            return f"process {number} failed\n{error}"
    for number, status, _ in exits:
        if status > 0 and number not in told:
            return f"process {number} ended with status {status}\n{_tail(logs, number)}"
    if torchrun < 0 and not (stopped and torchrun == -signal.SIGTERM):
        return f"torchrun was killed by {_signal(-torchrun)}\nThe same command goes on from the last checkpoint."
    if stopped:
        return ""
    if found := SIGNALLED.search(text):
        name = signal.Signals(int(found[1])).name
        return (
            f"torchrun was ended by {name}. It had its processes save first, and the same command goes on from there."
        )
    for number, error in told.items():
        return f"process {number} failed\n{error}"
    return "torchrun failed\n" + "\n".join(said[-TAIL:])


def _signal(number: int) -> str:
    """A signal that killed a process, and who sends it as a rule."""
    why = ": as a rule the system does so when memory runs out" if number == signal.SIGKILL else ""
    return signal.Signals(number).name + why


def _tail(logs: Path, number: int) -> str:
    lines = [path.read_text(errors="replace").splitlines()[-TAIL:] for path in logs.glob(f"**/{number}/stderr.log")]
    return "\n".join(line for part in lines for line in part)


def end_with_parent() -> None:
    """Has this process, if torchrun started it, end within a second once torchrun is gone or the notebook that launched it.

    It ends on the spot, so that nothing is written any more, and its loader's workers with it. The same goes for an
    exception that nothing catches, once it is told: what would wait for the other processes in an ordinary exit, a GPU's
    collective, would hide from torchrun that this one has failed.
    """
    if not by_torchrun():
        return
    faulthandler.enable()
    parent = os.getppid()
    watched = [(parent, process_start(parent))]
    if launcher := os.environ.get(LAUNCHER):
        pid, started = launcher.split(" ", 1)
        watched.append((int(pid), started))
        write_atomic(Path(os.environ[ERROR_FILE]).with_name("pid"), f"{os.getpid()} {process_start(os.getpid())}")

    def watch() -> None:
        while os.getppid() == parent and all(process_start(pid) == started for pid, started in watched):
            time.sleep(WATCH_S)
        _end(1)

    threading.Thread(target=watch, daemon=True, name="end-with-parent").start()
    sys.excepthook = _tell_and_end


def by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and "LOCAL_RANK" in os.environ


def _tell_and_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What a rank does with an exception that nothing caught: as `sys.excepthook`."""
    text = "".join(traceback.format_exception(kind, error, trace))
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    try:
        # As torchrun's own `record` writes it, who shows it at the end.
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        told = {"message": {"message": f"{kind.__name__}: {error}", "extraInfo": extra}}
        write_atomic(os.environ[ERROR_FILE], json.dumps(told))
        shown = LAUNCHER in os.environ  # by `launch`, of the one process that failed first
    except Exception:  # a full disk
        shown = False
    if not shown:
        print(text, file=sys.__stderr__, flush=True)
    _end(1)


def _end(status: int) -> None:
    with contextlib.suppress(Exception):  # of a set that changes while it is gone through: this may be another thread
        for child in multiprocessing.active_children():
            child.kill()
    os._exit(status)
