"""What requirements.txt asks for and is not installed, and installing just that; torch is never touched.

For Kaggle, Colab and Paperspace, whose images bring most of it along, torch for their GPU above all.
"""

import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rsnakit.mounts import MANIFEST

try:
    from packaging.requirements import Requirement
except ImportError:  # pip carries one
    from pip._vendor.packaging.requirements import Requirement

# Neither installed nor changed, nor what begins with nvidia- or cuda-: a place's own fit its driver and each other.
NEVER = ("torch", "torchvision", "torchaudio", "triton", "pytorch-triton")
# Changed under a running session, these break it: compiled modules are built against NumPy, and the kernel is the others.
HELD = ("numpy", "ipykernel", "ipython", "jupyter-client", "pyzmq", "tornado", "traitlets")
INSTALLERS = ("pip", "setuptools", "wheel")  # a newer one of these disturbs no session
SERVERS = ("jupyterlab",)  # each place has its own notebook server
# What a notebook needs that only scores, as on Kaggle without internet.
SCORING = (
    "timm", "torchinfo", "numpy", "pandas", "scikit-learn", "matplotlib", "pydicom", "imagecodecs", "pillow", "joblib",
    "safetensors", "tqdm",
)  # fmt: skip

TORCH = (
    "The right one depends on the GPU: pip install torch torchvision, or as pytorch.org says; then run this cell again."
)
ONLINE = "Turn the internet on if it is off, or install these by hand, and run this cell again."
BUNDLE = (
    "`python -m rsnakit.kaggle bundle RUN --owner NAME`, run where there is internet, puts the wheels for Kaggle's Python "
    "into the data set. Or turn this notebook's internet on, which a submission does not allow."
)
CONFLICT = "The conflict is caused by:"  # says pip before the requirements that cannot all be met
STAYS = "what stays is"  # of our constraints among these


class PackageError(RuntimeError):
    """A package that is needed and cannot be had, or needs a restart; the message says what to do."""


@dataclass(frozen=True)
class Missing:
    """A requirement that is not met.

    Attributes:
        name: of the distribution, as pip writes it: lower case, with hyphens.
        wanted: name and versions as pip takes them, such as `timm>=1.0.15`.
        installed: the version that is there and does not do; "" if there is none.
    """

    name: str
    wanted: str
    installed: str = ""

    def __str__(self) -> str:
        return f"{self.wanted} ({f'{self.installed} is installed' if self.installed else 'not installed'})"


def missing(requirements: Path) -> list[Missing]:
    """What requirements.txt asks for and is not installed, or in a version that does not do, in its order."""
    lines = (line.partition("#")[0].strip() for line in requirements.read_text(encoding="utf-8").splitlines())
    return _unmet(filter(None, lines), _versions())


def install(wanted: Sequence[Missing], wheels: Path | None = None) -> list[str]:
    """Installs requirements with pip; what is in NEVER is passed over, and stays as it is.

    Args:
        wanted: as `missing` gives them.
        wheels: a folder of wheels, from which alone they are taken, without what they depend on and without a network;
            None: from pip's index, with what they depend on, but for NEVER and HELD.

    Returns:
        Modules that were imported before a new version of them was installed: the session has to be restarted.

    Raises:
        PackageError: some cannot be had; each is named with pip's reason. All others are installed.
    """
    wanted = [one for one in wanted if not _is_never(one.name)]
    if not wanted:
        return []
    before = _versions()
    with tempfile.TemporaryDirectory() as folder:
        options = ["--no-index", "--no-deps", "--find-links", str(wheels)]
        if wheels is None:
            constraints = Path(folder) / "constraints.txt"
            constraints.write_text("\n".join(_constraints(before, wanted)), encoding="utf-8")
            options = ["--constraint", str(constraints)]
        problems = {}
        if _pip([*options, *(one.wanted for one in wanted)]):  # then one by one: which are they?
            problems = {one: _alone(one.wanted, options, wheels is None) for one in wanted}
    importlib.invalidate_caches()
    after = _versions()
    changed = {name for name, version in before.items() if after.get(name) != version and name not in INSTALLERS}
    if touched := sorted(filter(_is_never, changed)):
        raise PackageError(f"pip changed {', '.join(touched)}, which was to stay as it is: start a new session")
    failed = [f"\n  {one}: {problem}" for one, problem in problems.items() if problem]
    if failed:
        left = ", ".join(f"{name} {before[name]}" for name in (*NEVER, "numpy") if name in before)
        raise PackageError(f"not to be had {f'from {wheels}' if wheels else f'beside {left}'}:{''.join(failed)}")
    return _imported(changed)


def bring(place: str, repository: Path) -> None:
    """Installs what requirements.txt beside the package asks for and a place lacks, and prints what.

    From a bundle on Kaggle only what scoring needs, out of its folder of wheels, whose versions are then the oldest that do:
    the run may need what an older timm has not. torch is left to whoever chose the machine.

    Args:
        place: as `env.where` names it.
        repository: the folder that the package is in.

    Raises:
        PackageError: something that is needed cannot be had; or it was imported already in another version, and the session
            has to be restarted.
    """
    requirements, bundled = repository / "requirements.txt", (repository / MANIFEST).is_file()
    if not requirements.is_file():
        print(f"NOTE: there is no {requirements}: nobody looked whether all packages are installed")
        return
    wheels = repository / "wheels"
    there = {one.name: one for one in (*missing(requirements), *(_older_than(wheels) if bundled else ()))}
    wanted = _for_place(list(there.values()), bundled)
    if not wanted:
        return
    print(f"installing {', '.join(map(str, wanted))}")
    try:
        imported = install(wanted, wheels if bundled and wheels.is_dir() else None)
    except PackageError as error:
        text = f"{error}\n{BUNDLE if place == 'kaggle' else ONLINE}"
        if place != "kaggle" or any(one.name in SCORING for one in missing(requirements)):
            raise PackageError(text) from None
        print(f"NOTE: scoring needs none of these, other notebooks do: {text}")
        return
    if imported:
        text = f"{', '.join(imported)}: imported before it was upgraded; restart the session and run this cell again"
        if place != "kaggle":
            raise PackageError(text)
        # A version that Kaggle saves or scores begins anew each time, and would stop here each time.
        print(f"NOTE: {text}")


def _older_than(wheels: Path) -> list[Missing]:
    """What of a folder of wheels is installed in an older version, or not at all."""
    parts = sorted({tuple(path.name.split("-")[:2]) for path in wheels.glob("*.whl")})
    return _unmet([f"{name}>={version}" for name, version in parts], _versions())


def _for_place(there: Sequence[Missing], bundled: bool) -> list[Missing]:
    """What of the missing has to be installed; prints what is left out. PackageError where torch is missing."""
    for one in filter(lambda one: _is_never(one.name), there):
        if not one.installed:
            raise PackageError(f"{one.name} is not installed. {TORCH}")
        print(f"NOTE: {one}: older than what the kit is tested with, and left as it is")
    there = [one for one in there if not _is_never(one.name) and one.name not in SERVERS]
    wanted = [one for one in there if not bundled or one.name in SCORING]
    if left := [str(one) for one in there if one not in wanted]:
        print(f"not installed, as scoring needs none of it: {', '.join(left)}")
    return wanted


def _alone(wanted: str, options: Sequence[str], with_needs: bool) -> str:
    """Installs one requirement; why it failed, or "".

    What pip takes for a conflict may be torch's own: an image's torch often lacks some of what it says it needs (CUDA comes
    from elsewhere there), and whatever depends on torch could then not be installed. So a second try looks only at what the
    requirement itself says it needs.
    """
    options = [*options, "--retries", "0"]
    problem = _pip([*options, wanted])
    if STAYS not in problem or not with_needs:
        return problem
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        if _pip(["--dry-run", "--no-deps", "--retries", "0", "--report", str(report), wanted]):
            return problem
        metadata = json.loads(report.read_text(encoding="utf-8"))["install"][0]["metadata"]
    needs = _unmet(metadata.get("requires_dist", ()), _versions())
    if any(_is_never(one.name) or one.name in HELD for one in needs):
        return problem
    return (needs and _pip([*options, *(one.wanted for one in needs)])) or _pip(["--no-deps", wanted])


def _pip(arguments: Sequence[str]) -> str:
    """Runs `pip install` of this Python. Why it failed, or "" if it did not."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    if CONFLICT in lines:  # two lines, or more, up to pip's advice
        lines = lines[lines.index(CONFLICT) + 1 :]
        causes = lines[: next((i for i, line in enumerate(lines) if line.startswith("To fix this")), 2)]
        return ", but ".join(causes).replace("The user requested (constraint)", STAYS)
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return " ".join(errors or lines[-1:]) or f"pip ended with status {done.returncode}"


def _constraints(installed: Mapping[str, str], wanted: Sequence[Missing]) -> list[str]:
    """pip's constraints that keep NEVER and HELD as they are; of one that is wanted newer, its major version.

    What is absent of NEVER stays so, with whatever torch says that it needs and the image has from elsewhere.
    """
    newer, lines = {one.name for one in wanted}, []
    for name, version in installed.items():
        if _is_never(name) or name in HELD:
            lines.append(f"{name}<{int(version.split('.')[0]) + 1}" if name in newer else f"{name}=={version}")
    theirs = [one for one in importlib.metadata.distributions() if _is_never(_normal(one.metadata["Name"] or ""))]
    needs = {_normal(Requirement(need).name) for one in theirs for need in one.requires or ()}
    return lines + [f"{name}<0" for name in sorted({*NEVER, *filter(_is_never, needs)}) if name not in installed]


def _unmet(requirements: Iterable[str], installed: Mapping[str, str]) -> list[Missing]:
    """Those of some requirements that hold for this Python and are not met."""
    found = []
    for one in map(Requirement, requirements):
        name = _normal(one.name)
        version = installed.get(name, "")
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        if not version or not one.specifier.contains(version, prereleases=True):
            found.append(Missing(name, f"{one.name}{one.specifier}", version))
    return found


def _is_never(name: str) -> bool:
    return name in NEVER or name.startswith(("nvidia-", "cuda-"))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _versions() -> dict[str, str]:
    """The version of every installed distribution, the first where there are several."""
    found = {}
    for one in importlib.metadata.distributions():
        if one.metadata["Name"] and one.version:  # not what an interrupted pip left
            found.setdefault(_normal(one.metadata["Name"]), one.version)
    return found


def _imported(distributions: Collection[str]) -> list[str]:
    """The modules of distributions that this session has imported."""
    of = importlib.metadata.packages_distributions()
    return sorted(name for name, its in of.items() if name in sys.modules and {*map(_normal, its)} & {*distributions})
