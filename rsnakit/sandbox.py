"""A command in a place of its own: no network, inputs that cannot be written to, and nothing of this repository.

Linux lets a process leave the machine's network and have mounts of its own (namespaces), root or not, unless a container
forbids it. Where it does, Python's sockets are blocked and files lose their permission to be written to; `Isolation` says
which it was. What is done inside stands in `confined`.
"""

import contextlib
import dataclasses
import functools
import json
import os
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil  # of ipykernel's

POLL_S = 0.5  # memory and disk are looked at so often
END_S = 10.0  # what is told to end has so long to end what it started
KEPT = ("PATH", "LANG", "LC_", "TZ", "LD_LIBRARY_PATH", "CUDA_", "NVIDIA_", "OMP_", "MKL_", "SYSTEMROOT")
# What a Python needs of its folder, where that is one to be hidden: a virtual environment made at a repository's top.
OF_PYTHON = ("bin", "etc", "include", "lib", "lib64", "libexec", "pyvenv.cfg", "share", "ssl")
FIRST = Path(__file__).with_name("confined.py")
NOWHERE = "http://127.0.0.1:9"  # a proxy that nobody answers at: for programs that are not Python
# Put first on Python's path where there is no namespace: connections and names of other machines are refused, and that proxy.
GUARD = """
import errno, socket

def _refuse(address):
    host = address[0] if isinstance(address, tuple) else None
    here = host in (None, "", "localhost", "::1") or str(host).startswith("127.")
    if not here or address == ("127.0.0.1", 9):
        raise OSError(errno.ENETUNREACH, f"no network here: the sandbox refuses {'a proxy' if here else host}")

def _guard(name, place):
    original = getattr(socket.socket, name)
    def guarded(self, *arguments):
        if len(arguments) > place or place < 0:
            _refuse(arguments[place])
        return original(self, *arguments)
    setattr(socket.socket, name, guarded)

for name, place in (("connect", 0), ("connect_ex", 0), ("sendto", -1), ("sendmsg", 3)):
    _guard(name, place)

def _resolver(original):
    def resolve(host, *arguments, **named):
        name = host.decode() if isinstance(host, bytes) else host
        try:
            _refuse((name or "",))
        except OSError as error:
            raise socket.gaierror(socket.EAI_AGAIN, str(error)) from None
        return original(host, *arguments, **named)
    return resolve

for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex"):
    setattr(socket, name, _resolver(getattr(socket, name)))
"""


class SandboxError(OSError):
    """The place could not be made, or is not what it should be; the message says why."""


@dataclasses.dataclass(frozen=True)
class Isolation:
    """By what means a command is kept apart.

    Attributes:
        network: `namespace`: a network of its own, with nothing but the loopback; `blocked`: Python's sockets refuse.
        inputs: `mount`: mounted read-only, and folders can be hidden; `chmod`: without permission to write, which root is
            not stopped by, and nothing is hidden.
        reasons: why it is not the stronger one of each, empty where it is.
    """

    network: str = "namespace"
    inputs: str = "mount"
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = {
            "namespace": "no network: a network namespace with nothing but the loopback",
            "blocked": "no network: Python's sockets are blocked; other programs get a proxy that does not answer",
            "mount": "inputs are mounted read-only",
            "chmod": "nothing of this machine is hidden; inputs have no permission to be written to"
            + (", which does not stop root: what is changed is only found afterwards" if _is_root() else ""),
        }
        why = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        return f"{said[self.network]}; {said[self.inputs]}{why}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a command went.

    Attributes:
        status: its exit status; minus the signal's number where one ended it.
        timed_out: it was ended because its time was up.
        seconds: from start to end.
        peak_memory: bytes of all its processes together, pages that several share counted once (Linux; elsewhere in
            each), the most that was seen, looked at every `POLL_S`.
        peak_disk: bytes of the files in its working folder, the most that was seen.
        log: file with what it printed.
    """

    status: int
    timed_out: bool
    seconds: float
    peak_memory: int
    peak_disk: int
    log: Path

    def tail(self, lines: int = 15) -> str:
        """The last lines that it printed."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def run(
    command: Sequence[str],
    folder: Path,
    log: Path,
    read_only: Sequence[Path] = (),
    environ: Mapping[str, str] | None = None,
    timeout_s: float = 9 * 3600,
    isolation: Isolation | None = None,
    hide: Iterable[Path] = (),
    keep: Iterable[Path] = (),
) -> Outcome:
    """Runs a command without network, and ends all that it started, whatever happens.

    It sees PATH, locale, time zone, and variables of CUDA and of threads of this process's environment, an empty HOME and
    a TMPDIR of its own, and nothing else: no PYTHONPATH of this process, no credentials. What pip installs in it goes with it.

    Args:
        command: program and arguments.
        folder: its working folder.
        log: file that gets what it prints.
        read_only: folders that it cannot write to. By `chmod` they stay without permissions afterwards.
        environ: variables to set beside those.
        timeout_s: seconds after which it is ended.
        isolation: by what means; the strongest that `strongest` finds, if not given.
        hide: folders that are empty inside and cannot be written to, but for what is in `keep` and this Python (see
            `python_in`). Where nothing can be mounted they stay as they are.
        keep: files and folders inside of these that are seen as they are; `folder` is one of them.

    Raises:
        SandboxError: the place could not be made.
    """
    isolation = isolation or strongest()
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rsnakit-", ignore_cleanup_errors=True) as name:
        own = Path(name)
        for part in ("home", "tmp", "guard", "packages"):
            (own / part).mkdir()
        variables = _environment(own, isolation) | dict(environ or {})
        if isolation.inputs == "chmod":
            hide = ()
            for place in read_only:
                _forbid_writing(place)
        hide = [place.resolve() for place in hide]
        spec = {
            "command": list(map(str, command)), "folder": str(folder), "environ": variables, "parent": os.getpid(),
            "network": isolation.network == "namespace", "own": str(own),
            "mounts": [str(place) for place in read_only] if isolation.inputs == "mount" else [],
            "hide": [str(place) for place in hide if place != place.parent],  # all of / cannot be
            "keep": [*map(str, python_in(hide)), *(str(place.resolve()) for place in (*keep, folder, own))],
        }  # fmt: skip
        (own / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
        inside = [sys.executable, "-I", "-S", str(FIRST), str(own / "spec.json")]
        begun = time.monotonic()
        with open(log, "wb") as out:
            process = subprocess.Popen(
                inside, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
            memory, disk, timed_out = _watch(process, folder, begun + timeout_s)
        seconds, told = time.monotonic() - begun, own / "status"
        status = int(told.read_text()) if told.exists() else process.returncode
        status = -signal.SIGKILL if timed_out else status
        outcome = Outcome(status, timed_out, seconds, memory, disk, log)
        if not (own / "ready").exists() and not timed_out:
            raise SandboxError(f"the sandbox could not be made: {outcome.tail(1) or f'status {status}'}")
    return outcome


@functools.cache
def strongest() -> Isolation:
    """The strongest means that this machine allows, found by trying."""
    network, inputs, reasons = "blocked", "chmod", []
    with tempfile.TemporaryDirectory(prefix="rsnakit-") as name:
        folder, nothing = Path(name), [sys.executable, "-I", "-S", "-c", ""]
        try:
            run(nothing, folder, folder / "log", isolation=Isolation("namespace", "chmod"))
            network = "namespace"
        except SandboxError as error:
            reasons.append(str(error))
        try:
            (folder / "hidden").mkdir()
            run(
                nothing, folder.parent, folder / "log", [folder], isolation=Isolation(network, "mount"),
                hide=[folder / "hidden"],
            )  # fmt: skip
            inputs = "mount"
        except SandboxError as error:
            reasons.append(str(error))
    return Isolation(network, inputs, tuple(dict.fromkeys(reasons)))


def python_in(folders: Iterable[Path]) -> list[Path]:
    """What the running Python has in these folders: it is not hidden with them."""
    folders = [folder.resolve() for folder in folders]
    needed = [*map(Path, (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.executable, *site.getsitepackages()))]
    needed += [path.resolve() for path in needed]
    needed += [path / name for path in needed for name in OF_PYTHON if path in folders]
    inside = {
        path for path in needed for f in folders if path not in folders and path.is_relative_to(f) and path.exists()
    }
    return sorted(path for path in inside if not inside.intersection(path.parents))


def refuse_package(name: str, folder: Path, isolation: Isolation | None = None) -> None:
    """Stops (SandboxError) where a package can be imported inside though nothing has put it there."""
    with tempfile.TemporaryDirectory(prefix="rsnakit-") as scratch:
        code = (
            f"import importlib.util as u; s = u.find_spec({name!r}); print(s and (s.origin or s.name)); exit(bool(s))"
        )
        outcome = run([sys.executable, "-c", code], folder, Path(scratch) / "log", isolation=isolation)
        if outcome.status:
            raise SandboxError(
                f"{name} can be imported where nothing but the bundle should have it: {outcome.tail(1)}. "
                "Uninstall it from this environment, or rehearse in another one."
            )


def _environment(own: Path, isolation: Isolation) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name.startswith(KEPT)}
    kept |= {"HOME": str(own / "home"), "TMPDIR": str(own / "tmp")}
    kept |= {"PIP_TARGET": str(own / "packages"), "PYTHONPATH": str(own / "packages")}  # not into this Python's own
    if isolation.inputs == "chmod":  # root would write into the inputs what is compiled of their modules
        kept["PYTHONDONTWRITEBYTECODE"] = "1"
    if isolation.network == "blocked":
        (own / "guard" / "sitecustomize.py").write_text(GUARD, encoding="utf-8")
        proxies = ("http_proxy", "https_proxy", "ftp_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
        kept |= dict.fromkeys(proxies, NOWHERE) | {"no_proxy": "127.0.0.1,localhost"}
        kept["PYTHONPATH"] = os.pathsep.join((str(own / "guard"), kept["PYTHONPATH"]))
    return kept


def _is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


def _forbid_writing(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & ~0o222)


# ---- from outside: measured and ended


def _watch(process: subprocess.Popen, folder: Path, deadline: float) -> tuple[int, int, bool]:
    """Waits for a process: the most memory and disk that were seen, and whether it was ended at the deadline."""
    memory = disk = 0
    seen: set[psutil.Process] = set()
    try:
        while True:
            try:
                process.wait(POLL_S)
                return memory, max(disk, _size(folder)), False
            except subprocess.TimeoutExpired:
                pass
            with contextlib.suppress(psutil.NoSuchProcess):
                living = psutil.Process(process.pid).children(recursive=True)
                seen.update(living)
                memory = max(memory, sum(map(_memory, living)))
            disk = max(disk, _size(folder))
            if time.monotonic() > deadline:
                return memory, disk, True
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for other in seen:  # where the first process could not end them, being killed itself
            with contextlib.suppress(psutil.Error):
                other.kill()


def _memory(process: psutil.Process) -> int:
    """Bytes of a process, of pages that n processes share the n-th part; where that is not told, all it holds."""
    try:
        with open(f"/proc/{process.pid}/smaps_rollup", encoding="ascii") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("Pss:"))
    except (OSError, StopIteration):
        with contextlib.suppress(psutil.Error):
            return process.memory_info().rss
    return 0


def _size(folder: Path) -> int:
    """Bytes of a folder's files. Files that come and go meanwhile are no error."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total
