"""The first process of a sandbox, from inside: makes the place, runs the command, and outlives all that it started.

`sandbox.run` runs this file by its path, with the standard library alone. It leaves the machine's network and takes mounts
of its own (namespaces of Linux's), which who is not root may do as the master of a namespace of users.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# Of <linux/sched.h>, <sys/mount.h>, <sys/prctl.h>, <linux/sockios.h> and <net/if.h>.
NEW_MOUNTS, NEW_USER, NEW_NETWORK = 0x20000, 0x10000000, 0x40000000
READ_ONLY, NO_SUID, NO_DEVICES, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
DIES_WITH_PARENT, ADOPTS_ORPHANS = 1, 36
GET_FLAGS, SET_FLAGS, IS_UP = 0x8913, 0x8914, 1


def _inside(spec: dict) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "linux":
        _call(libc.prctl, ADOPTS_ORPHANS, 1, 0, 0, 0)
        _call(libc.prctl, DIES_WITH_PARENT, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != spec["parent"]:
            return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    own_mounts = bool(spec["mounts"] or spec["hide"])
    _unshare(libc, spec["network"] * NEW_NETWORK | own_mounts * NEW_MOUNTS)
    if spec["network"]:
        _raise_loopback()
    if own_mounts:
        os.chdir("/")  # out of what is hidden
        _call(libc.mount, b"none", b"/", None, RECURSIVE | PRIVATE, None)
        for folder in sorted(spec["hide"], key=len):
            _hide(libc, folder, spec["keep"])
        for folder in map(os.fsencode, spec["mounts"]):
            _call(libc.mount, folder, folder, None, BIND, None)
            _make_read_only(libc, folder)
    own = Path(spec["own"])
    try:
        child = subprocess.Popen(spec["command"], cwd=spec["folder"], env=spec["environ"])
        (own / "ready").touch()
        status = child.wait()
        (own / "status").write_text(str(status))
    finally:
        _end_children()
        if os.getppid() != spec["parent"]:  # it was killed, and can clean up no more
            shutil.rmtree(own, ignore_errors=True)


def _unshare(libc: ctypes.CDLL, flags: int) -> None:
    """Leaves what the flags name; who is not allowed to becomes, for that, its own user's namespace's master."""
    if not flags:
        return
    try:
        _call(libc.unshare, flags)
    except PermissionError:
        user, group = os.geteuid(), os.getegid()
        _call(libc.unshare, flags | NEW_USER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", name).write_text(text)


def _raise_loopback() -> None:
    """A new network's loopback is down, and Jupyter's kernels talk over it."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        asked = fcntl.ioctl(s, GET_FLAGS, struct.pack("16sh14x", b"lo", 0))
        flags = struct.unpack("16sh14x", asked)[1]
        fcntl.ioctl(s, SET_FLAGS, struct.pack("16sh14x", b"lo", flags | IS_UP))


def _hide(libc: ctypes.CDLL, folder: str, keep: Sequence[str]) -> None:
    """Mounts an empty folder over a folder, in which nothing but what is to be kept is where it was."""
    kept = sorted(path for path in keep if os.path.exists(path) and Path(path).is_relative_to(folder))
    if not os.path.isdir(folder) or folder in kept:  # hidden with another one
        return
    kept = [path for path in kept if not any(other in Path(path).parents for other in map(Path, kept))]
    opened = [(path, os.path.isdir(path), os.open(path, os.O_PATH)) for path in kept]
    _call(libc.mount, b"none", os.fsencode(folder), b"tmpfs", NO_SUID | NO_DEVICES, b"mode=755")
    for path, is_folder, number in opened:
        os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
        if not is_folder:
            Path(path).touch()
        _call(libc.mount, f"/proc/self/fd/{number}".encode(), os.fsencode(path), None, BIND | RECURSIVE, None)
        os.close(number)
    _make_read_only(libc, os.fsencode(folder))


def _make_read_only(libc: ctypes.CDLL, folder: bytes) -> None:
    """Takes the right to write from a mount, for whoever has this namespace."""
    # What the file system was mounted with has to be said again: a user's namespace may not take it away.
    kept = os.statvfs(folder).f_flag & (os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC)
    _call(libc.mount, None, folder, None, REMOUNT | BIND | READ_ONLY | kept, None)
    if not os.statvfs(folder).f_flag & os.ST_RDONLY:
        raise OSError(f"{os.fsdecode(folder)} is not read-only")


def _call(function: object, *arguments: object) -> None:
    numbers = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
    if function(*numbers):
        number = ctypes.get_errno()
        raise OSError(number, f"{function.__name__}: {os.strerror(number)}")


def _end_children() -> None:
    """Ends all that there is below this process: who loses its parent becomes its child."""
    while True:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(entry.read_text(errors="replace").rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(entry.parent.name))
    return found


if __name__ == "__main__":
    try:
        _inside(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    except OSError as error:
        sys.exit(str(error))
