"""The wheels that Kaggle's image may lack, taken for its Pythons: there a notebook without internet installs from these alone.

They are kept in a folder, so that the next bundle has the same bytes and needs no internet. To have them anew, delete it.
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from email import message_from_bytes
from email.message import Message
from pathlib import Path

from packaging.requirements import Requirement
from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from rsnakit import packages

# What 04_inference imports and Kaggle's image may lack, in versions that were seen to work together and with the image's NumPy:
# later imagecodecs ask for NumPy 2. Exact, for the same bundle from every machine; all are within requirements.txt.
NEEDED = ("imagecodecs==2026.1.14", "pydicom==3.0.2", "timm==1.0.31", "torchinfo==1.8.0")

# What of inference the image is sure to have, and what the wheels need of it: the lower of the versions that two public lists
# name, that of Colab's packages (googlecolab/backend-info, pip-freeze.gpu.txt), from whose image Kaggle's is made, and that of
# what is put on top (Kaggle/docker-python, kaggle_requirements.txt).
IMAGE = {
    "albumentations": "2.0.8", "cloudpickle": "3.1.2", "huggingface-hub": "1.17.0", "joblib": "1.5.3", "matplotlib": "3.7.5",
    "numpy": "1.26.4", "opencv-python-headless": "4.13.0.92", "packaging": "26.2", "pandas": "2.2.2", "pillow": "11.3.0",
    "pyyaml": "6.0.3", "safetensors": "0.7.0", "scikit-learn": "1.2.2", "scipy": "1.16.3", "tensorboard": "2.20.0",
    "torch": "2.11.0", "torchvision": "0.26.0", "tqdm": "4.67.3",
}  # fmt: skip
NEVER = (*packages.NEVER, "numpy")  # nor what begins with nvidia-: another one would break what is there
PYTHONS = ("3.12", "3.13")
GLIBC = 28  # of the image's 2.28 or later; wheels for an older one work too
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC, 4, -1)),
    *(f"manylinux{year}_x86_64" for year in ("2014", "2010", "1")),
)  # pip takes no older one by itself


class WheelError(ValueError):
    """Wheels that cannot be had, or are no set that installs; the message says what to do."""


def take(folder: Path, requirements: Sequence[str] = NEEDED, pythons: Sequence[str] = PYTHONS) -> list[Path]:
    """The wheels of some requirements for each Python, from the folder where they are kept or by `pip download`.

    pip's own settings count (an index of one's own, a proxy), those in variables too.

    Args:
        folder: where they are kept; where its wheels are not just these, they are replaced.
        requirements: such as `pydicom==3.0.2`; what they need themselves must be among them or in IMAGE.
        pythons: such as `3.12`.

    Raises:
        WheelError: pip cannot reach or find one, or together they would not install (see `check`).
    """
    kept, why = sorted(folder.glob("*.whl")), ""
    try:
        return check(kept, requirements, pythons)
    except WheelError as error:
        why = f" What is in {folder} does not do: {error}" if kept else ""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        fresh = Path(temporary) / "wheels"
        for python in pythons:
            _download(requirements, python, fresh, folder, why)
        check(sorted(fresh.glob("*.whl")), requirements, pythons)
        folder.mkdir(exist_ok=True)
        for path in kept:
            path.unlink()
        for path in fresh.glob("*.whl"):
            path.replace(folder / path.name)
    return sorted(folder.glob("*.whl"))


def check(
    wheels: Iterable[Path], requirements: Sequence[str] | None = None, pythons: Sequence[str] = PYTHONS
) -> list[Path]:
    """Wheels that install on Kaggle with `pip install --no-index --no-deps`, and then work; returned in order.

    Args:
        wheels: their files.
        requirements: what they have to be, and nothing more; None: any.
        pythons: each has to find a wheel of every distribution.

    Raises:
        WheelError: one is damaged, of another platform, or one that must never be installed there; one needs what neither
            another wheel nor IMAGE has; one that is required is missing, or one is too many.
    """
    described = {path: _metadata(path) for path in sorted(wheels, key=lambda path: path.name)}
    wanted = None if requirements is None else [Requirement(text) for text in requirements]
    for python in pythons:
        fitting = [path for path in described if _fits(path, python)]
        there = {_name(described[path]): described[path]["Version"] for path in fitting}
        if len(there) < len(fitting):
            raise WheelError(f"two wheels of one distribution for Python {python} among {_names(fitting)}; delete one")
        if refused := [name for name in there if name in NEVER or name.startswith("nvidia-")]:
            raise WheelError(f"{refused[0]}: is never installed on Kaggle, whose own fits its GPUs; delete its wheel")
        if missing := {_name(found) for found in described.values()} - there.keys():
            raise WheelError(f"of {', '.join(sorted(missing))} there is no wheel for Python {python} on Linux")
        for path in fitting:
            for text in described[path].get_all("Requires-Dist", []):
                _check_met(Requirement(text), IMAGE | there, python, path.name)
        for requirement in wanted or ():
            _check_met(requirement, there, python, "the list")
        if wanted is not None and (more := there.keys() - {canonicalize_name(one.name) for one in wanted}):
            raise WheelError(f"{', '.join(sorted(more))}: not asked for")
    return list(described)


def at_least(version: str, requirement: str) -> str:
    """A requirement such as `timm==1.0.31`, of that version where it is a release and later than the one it names."""
    wanted = Requirement(requirement)
    try:
        given = Version(version)
    except InvalidVersion:  # "not installed"
        return requirement
    exact = Version(next(iter(wanted.specifier)).version)
    return requirement if given.is_devrelease or given.local or given <= exact else f"{wanted.name}=={given}"


def _download(requirements: Sequence[str], python: str, out: Path, folder: Path, why: str) -> None:
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check", "--retries", "2",
        "--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python, "--dest", str(out),
    ]  # fmt: skip
    for platform in PLATFORMS:
        command += ["--platform", platform]
    result = subprocess.run([*command, *requirements], capture_output=True, text=True)
    if result.returncode:
        errors = [line.removeprefix("ERROR: ") for line in result.stderr.splitlines() if line.startswith("ERROR:")]
        errors = [line for line in errors if line != "Exception:"]  # whose last line has the cause
        said = (
            errors[0] if errors else (result.stderr.strip().splitlines() or [f"it ended with {result.returncode}"])[-1]
        )
        if re.search("connection broken|Failed to establish|Name or service not known|timed out", result.stderr):
            said = "it could not connect to its index of packages"
        raise WheelError(
            f"pip could not take the wheels for Python {python}: {said}. With internet, or an index that pip is told of, they "
            f"are taken once and kept in {folder}, which may also be copied from another machine. A bundle without wheels "
            f"(--no-wheels) works where Kaggle's image has all that inference imports.{why}"
        )


def _metadata(path: Path) -> Message:
    """What a wheel says of itself, its Name, Version and Requires-Dist among it; all of it is read, and so checked."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
            damaged = archive.testzip()
            if damaged or len(names) != 1:
                raise zipfile.BadZipFile(f"damaged at {damaged}" if damaged else "it has no METADATA")
            return message_from_bytes(archive.read(names[0]))
    except (OSError, zipfile.BadZipFile) as error:
        raise WheelError(f"{path}: cannot be read as a wheel ({error}). Delete it, and have it taken again.") from error


def _fits(path: Path, python: str) -> bool:
    """Whether a wheel can be installed by this Python on Linux with Kaggle's glibc."""
    version = tuple(map(int, python.split(".")))
    try:
        tags = parse_wheel_filename(path.name)[3]
    except InvalidWheelFilename as error:
        raise WheelError(f"{path}: this is no name of a wheel ({error})") from error
    pure = compatible_tags(version, f"cp{version[0]}{version[1]}", PLATFORMS)
    return not tags.isdisjoint({*cpython_tags(version, platforms=PLATFORMS), *pure})


def _check_met(requirement: Requirement, there: Mapping[str, str], python: str, by: str) -> None:
    """Refuses (WheelError) a requirement of a wheel, or of the list, that no version among these meets."""
    place = {
        "python_version": python, "python_full_version": f"{python}.0", "implementation_name": "cpython", "extra": "",
        "platform_python_implementation": "CPython", "os_name": "posix", "sys_platform": "linux",
        "platform_system": "Linux", "platform_machine": "x86_64",
    }  # fmt: skip
    version = there.get(canonicalize_name(requirement.name))
    if requirement.marker and not requirement.marker.evaluate(place):
        return
    if version is None or not requirement.specifier.contains(version, prereleases=True):
        found = f"version {version} is there" if version else "it is neither among the wheels nor in Kaggle's image"
        raise WheelError(f"{by} asks for {requirement} on Python {python}, and {found}")


def _name(found: Message) -> str:
    return canonicalize_name(found["Name"])


def _names(paths: Iterable[Path]) -> str:
    return ", ".join(path.name for path in paths)
