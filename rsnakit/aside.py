"""A process beside this one: what it begins with, so that it disturbs nobody and outlives nobody, and how it is ended."""

import contextlib
import os
import signal
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil  # of ipykernel's
from tqdm import tqdm

WATCH_S = 0.5  # so long after its parent a process ends
KILL = 9  # signal.SIGKILL, which Windows has not
END_S = 10  # a process that was killed is gone by then


def settle(log: str = os.devnull) -> None:
    """Makes this a process that nobody hears, that Ctrl-C does not reach, and that neither outlives its parent nor, where
    memory runs out, lets it die first.

    Args:
        log: file that takes what it says. Its name is taken away, where the system allows that, so that it goes with the last
            process that has it open.
    """
    number = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(number, stream)
    if log != os.devnull:
        with contextlib.suppress(OSError):  # Windows
            os.unlink(log)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(AttributeError, OSError):  # not on Windows
        os.setpgid(0, 0)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a killed process would leave behind
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def end(process: BaseProcess) -> None:
    """Ends a process that has settled, in whatever state it is, and what it started with it."""
    if process.pid is None:
        return
    family = []
    with contextlib.suppress(psutil.Error):
        family = psutil.Process(process.pid).children(recursive=True)  # a loader's workers have groups of their own
    with contextlib.suppress(AttributeError, OSError):  # Windows, or it had not got so far
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    for child in family:
        with contextlib.suppress(psutil.Error):
            child.kill()
    process.join(END_S)


def how_it_ended(code: int, last: str = "") -> str:
    """The end of a process in a sentence.

    Args:
        code: its exit code, as `subprocess` has it: minus the number of the signal that ended it.
        last: what it said at the end, if that is known.
    """
    if code == -KILL:
        return "its process was killed, as the system does when the main memory is used up"
    said = f" ({last})" if last else ""
    if code < 0:
        return f"its process crashed with {signal.Signals(-code).name}{said}"
    return f"its process ended with exit code {code}{said}"


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    if hasattr(os, "killpg") and os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)  # compilers, too
    os._exit(1)
