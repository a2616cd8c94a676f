"""Versions of what a result depends on, as runs and weights keep them."""

import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import rsnakit

PACKAGES = ("torch", "timm", "numpy", "pandas", "albumentations", "pydicom")


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    found = {"rsnakit": rsnakit.__version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def git_revision() -> str:
    """The kit's git revision, with a mark where files were changed since."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"  # a zip or a data set, without git
