"""Files that survive a kill: written whole or not at all, and one writer to a folder.

`write_atomic` and `replacing` give a file that is either the old one or the new one, never half of one; `Lock` refuses a
second writer of a folder and takes over from one that has died. What a killed writer left is cleared by the next one.
"""

import contextlib
import errno
import glob
import json
import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

HEARTBEAT_S = 20.0  # a living writer touches its lock this often
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a full disk, a quota that is used up, a limit on a file's size
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
STALE_S = 120.0  # a lock of another machine that was not touched for so long belongs to a session that is gone


class LockedError(RuntimeError):
    """Another process is writing to the folder."""


@contextlib.contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Gives a temporary path beside `path`; what is written there takes its place once it is whole and on the disk.

    Where the block raises, the old file stays as it was and the temporary one is removed; so is one that an earlier
    writer of `path` left when it was killed.

    Raises:
        OSError: of a full disk, with the file's name and the room there is.
    """
    path = Path(path)
    _remove_leftovers(path)
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb+") as f:
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno not in FULL:
            raise
        temporary.unlink(missing_ok=True)
        raise OSError(
            error.errno, f"{path} cannot be written: {os.strerror(error.errno)}. {free_mb(path.parent)} MB are free; what was "
            "there before is as it was."
        ) from error  # fmt: skip
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path | str, content: str | bytes) -> None:
    """Writes text (as UTF-8) or bytes to `path`, whole or not at all."""
    data = content.encode() if isinstance(content, str) else content
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path | str, value: object) -> None:
    """Writes plain Python values as indented JSON, whole or not at all; NaN is refused (ValueError)."""
    write_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path | str) -> dict:
    """Reads what `write_json` wrote.

    Raises:
        ValueError: it is no JSON; the message names the file.
        FileNotFoundError: there is none.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: cut short or damaged, it cannot be read as JSON ({error})") from error


def open_regular(path: str, flags: int) -> int:
    """An opener for `open`: what is no regular file is refused (OSError), where a named pipe would be waited for for ever."""
    number = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(number).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # folders are refused by `open`
        os.close(number)
        raise OSError(errno.EINVAL, "not a regular file, but a pipe, a socket or a device", path)
    return number


def free_mb(folder: Path) -> str:
    """The room on a folder's disk, in megabytes, for a message."""
    return f"{shutil.disk_usage(folder).free / 1e6:,.1f}"


class Lock:
    """The right to write to a folder, as a context manager: `with Lock(folder, "fold 0 of run x"): ...`.

    The file `lock.json` names host, process and its start; a thread touches it while the holder lives. A lock whose
    process is gone, or that another machine has not touched for `STALE_S` seconds (sessions in the cloud come back with
    another host name), is taken over.

    Raises:
        LockedError: on entering, where a living process holds the folder.
        OSError: on entering, where the folder cannot be made or written to (EROFS, EACCES, EPERM).
    """

    def __init__(self, folder: Path | str, what: str) -> None:
        self.path = Path(folder) / "lock.json"
        self.what = what
        self._stop = threading.Event()

    def __enter__(self) -> "Lock":
        try:
            self._take()
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise
            raise OSError(
                error.errno,
                f"{self.what}: {self.path.parent} cannot be written to: {os.strerror(error.errno)}. Give another folder, or "
                "make it one that may be written to.",
            ) from error
        self._pid = os.getpid()
        self._stop.clear()
        threading.Thread(target=self._beat, daemon=True, name="lock-heartbeat").start()
        return self

    def _take(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._text = json.dumps({"host": _machine(), "pid": os.getpid(), "started": process_start(os.getpid())})
        for _ in range(3):
            try:
                with open(self.path, "x", encoding="utf-8") as f:
                    f.write(self._text)
                break
            except FileExistsError:
                self._remove_if_stale()
        else:
            raise LockedError(f"{self.path}: could not be taken; other processes are taking it at the same moment")

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        # A forked child that unwinds must not give back its parent's lock, nor a writer that slept one taken over since.
        if os.getpid() == self._pid and self._is_mine():
            self.path.unlink(missing_ok=True)

    def _is_mine(self) -> bool:
        try:
            return self.path.read_text(encoding="utf-8") == self._text
        except (OSError, ValueError):
            return False

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            if self._is_mine():
                with contextlib.suppress(OSError):
                    os.utime(self.path)

    def _remove_if_stale(self) -> None:
        try:
            age = time.time() - self.path.stat().st_mtime
            text = self.path.read_bytes()
        except FileNotFoundError:
            return  # given back meanwhile
        holder = _holder(text)
        if holder.get("host") == _machine():
            alive = process_start(holder["pid"]) == holder["started"]
        else:
            alive = age < STALE_S
        if alive:
            host = holder["host"].split()[0] if holder else "an unknown machine"
            who = f"process {holder.get('pid', '?')} on {host}"
            raise LockedError(
                f"{self.what}: {who} is writing to {self.path.parent} (lock touched {age:.0f} s ago). Wait for it, or stop "
                f"it; a dead one's lock is taken over by itself, one of another machine after {STALE_S:.0f} s."
            )
        # Moved aside and looked at again: of two processes that found it stale, the slower one may have moved away the
        # lock that the faster one has just made, and puts it back.
        aside = self.path.with_name(f".lock.{os.getpid()}.stale")
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.path, aside)
            if aside.read_bytes() == text:
                aside.unlink()
            else:
                os.replace(aside, self.path)


def _holder(text: bytes) -> dict:
    """What a lock says of its holder; nothing where that cannot be read.

    Its writer is between creating and filling it, or was killed there, or something else wrote the file.
    """
    try:
        holder = json.loads(text)
    except ValueError:
        return {}
    whole = isinstance(holder, dict) and {"pid", "started"} <= holder.keys() and isinstance(holder.get("host"), str)
    return holder if whole else {}


def _remove_leftovers(path: Path) -> None:
    """Removes temporary files of `path` whose writer is dead: by its number on this machine, by their age elsewhere."""
    here = socket.gethostname()
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        host, _, pid = leftover.name[len(path.name) + 2 : -len(".tmp")].rpartition(".")
        with contextlib.suppress(OSError):  # its writer, or another, was quicker
            if host == here and pid.isdecimal():
                gone = process_start(int(pid)) is None
            else:
                gone = time.time() - leftover.stat().st_mtime > STALE_S
            if gone:
                leftover.unlink()


def _machine() -> str:
    """What process numbers are told apart within: the host, and in a container the container's own numbering."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no /proc (macOS)
        return socket.gethostname()


def process_start(pid: int) -> str | None:
    """When a process of this machine began, None where there is none: tells a process from a later one of its number."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    except OSError:
        return None
    else:
        fields = text.rpartition(")")[2].split()  # the name in brackets may hold spaces
        return None if fields[0] in "ZX" else fields[19]  # a zombie writes no more
    try:  # no /proc (macOS): the number alone has to do
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "unknown"
