"""A /dev/shm of little room, as containers have it."""

import shutil
import subprocess

import pytest


def command_in(size: str, *words: str) -> list[str]:
    """A command with a /dev/shm of its own of a size such as 4m; skips the test where the system mounts none for us."""
    mount = f"mount -t tmpfs -o size={size} tmpfs /dev/shm"
    if (
        not shutil.which("unshare")
        or subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode
    ):
        pytest.skip("no right to mount a small /dev/shm")
    return ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", *words]
