"""Where this runs (Kaggle, Colab, Paperspace, local): data, work folder, device, precision, cores, each with a reason.

Nothing else in the kit asks where it is. What looks at the machine takes `environ` and `root`, so that a test can be
any place; torch is imported only by what needs it.
"""

from __future__ import annotations

import errno
import importlib.metadata
import math
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import rsnakit
from rsnakit import mounts
from rsnakit.device import Choice, choose_compile, choose_device, choose_precision
from rsnakit.fields import check_all
from rsnakit.params import setting

__all__ = [
    "Choice", "Data", "Place", "RunConfig", "check_disk", "choose_compile", "choose_device", "choose_precision", "cores",
    "describe", "find_data", "is_rerun", "submission_folder", "where", "work_folder",
]  # fmt: skip

REPOSITORY = Path(__file__).resolve().parents[1]
ROOT = Path(os.environ.get("RSNAKIT_ROOT", "/"))  # what stands for / of Kaggle, Colab and Paperspace in a rehearsal
Environ = Mapping[str, str] | None  # os.environ if None
LOW_DISK = 5.0  # GB; Kaggle ends a notebook that writes more than its 20
TABLES = ("train.csv", "test.csv")  # a folder with either is taken for a competition

# Variables that a place sets for its notebooks. Keys to its API don't count: people carry those elsewhere.
KAGGLE_VARIABLES = ("KAGGLE_KERNEL_RUN_TYPE",)
COLAB_VARIABLES = ("COLAB_RELEASE_TAG", "COLAB_GPU", "COLAB_BACKEND_VERSION")
PAPERSPACE_VARIABLES = (
    "PAPERSPACE_NOTEBOOK_REPO_ID",
    "PAPERSPACE_NOTEBOOK_ID",
    "PAPERSPACE_CLUSTER_ID",
    "PAPERSPACE_FQDN",
)


@dataclass(frozen=True)
class RunConfig:
    """Where a notebook runs and for how long. Nothing here shapes pixels; `fold` and `debug` alone decide results."""

    data_dir: str = ""  # folder of the competition; "": searched for; "demo": the synthetic one
    work_dir: str = ""  # where everything is written; "": work/ in the repository, /kaggle/working/work on Kaggle
    store_dir: str = ""  # packed image store; "": named after its settings, in work_dir/stores
    # block8: 9 bits a pixel; raw16: 16 and exact; png16 and png8: files that others read too, slower
    store_format: str = setting("block8", choices=("block8", "raw16", "png16", "png8"))
    run: str = ""  # name of the run, a folder name; "": named after the hash of what decides its result
    fold: str = "0"  # a number, or "all"
    device: str = "auto"  # auto, cpu, cuda, cuda:N, mps
    precision: str = setting("auto", choices=("auto", "fp32", "bf16", "fp16"))
    n_jobs: int = setting(0, low=0)  # processes that decode images; 0: all cores
    num_workers: int = setting(-1, low=-1)  # data loader processes; -1: chosen by the device
    max_hours: float = setting(0.0, low=0.0)  # hours after which a run saves and stops; 0: no limit
    debug: bool = False  # a few patients, in under a minute

    def __post_init__(self):
        check_all(self)
        if self.fold != "all" and not re.fullmatch(r"\d+", self.fold):
            raise ValueError(f"fold: got {self.fold!r}, expected a number such as '0', or 'all'")
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", self.device):
            raise ValueError(f"device: got {self.device!r}, expected auto, cpu, cuda, cuda:N or mps")
        if self.run in (".", "..") or re.search(r"[/\\]", self.run):
            raise ValueError(
                f"run: got {self.run!r}, expected a name without / or \\: it becomes a folder in work_dir/runs"
            )


@dataclass(frozen=True)
class Place:
    """`name` is kaggle, colab, paperspace or local; `reason` says what gave it away."""

    name: str
    reason: str


@dataclass(frozen=True)
class Data:
    """`path` is the folder of a competition, or None where the synthetic one is meant, which the caller makes."""

    path: Path | None
    reason: str

    @property
    def is_demo(self) -> bool:
        return self.path is None


def describe() -> str:
    """A few lines: where this runs, with what versions, on what device and in what precision, and why."""
    place = where()
    lines = [
        f"rsnakit {rsnakit.__version__} on {place.name} ({place.reason})",
        f"Python {platform.python_version()}, {_versions('torch', 'timm', 'numpy', 'pandas')}, {cores()} cores",
        *(() if place.name == "local" else _found(place.name)),
    ]
    try:
        device = choose_device()
        precision = choose_precision(device.value)
        lines.append(f"device {device.value}: {device.reason}")
        lines.append(f"precision {precision.value}: {precision.reason}")
    except ImportError as error:
        lines.append(f"no device: torch cannot be imported ({error}); pip install -r requirements.txt")
    return "\n".join(lines)


def _found(place: str, root: Path = ROOT, repository: Path = REPOSITORY) -> list[str]:
    """Lines on where a place that is not one's own has the package, the competition and runs, and whether room is scarce."""
    lines = [f"package: {repository}"]
    if place == "kaggle":
        folders = [mounts.competition_folder(root, layout) for layout in mounts.LAYOUTS]
        mounted = next(filter(_has_table, folders), f"none is mounted; add {mounts.SLUG} to the notebook's inputs")
        runs = [str(run) for bundle in mounts.bundles(root) for run in sorted((bundle / "runs").glob("*/"))]
        lines += [f"competition: {mounted}", f"runs: {', '.join(runs) or 'none is mounted'}"]
    if (free := shutil.disk_usage(".").free / 1e9) < LOW_DISK:
        lines.append(f"NOTE: only {free:.1f} GB of disk are free in {Path.cwd()}")
    return lines


def where(environ: Environ = None, root: Path = ROOT) -> Place:
    """The place this runs in. Kaggle is looked for before Colab, whose image Kaggle's derives from."""
    environ = os.environ if environ is None else environ
    signs = (
        ("kaggle", KAGGLE_VARIABLES, ("kaggle/working", "kaggle/input")),
        ("colab", COLAB_VARIABLES, ("content/sample_data",)),
        ("paperspace", PAPERSPACE_VARIABLES, ("notebooks", "storage")),
    )
    for name, variables, folders in signs:
        for variable in variables:
            if environ.get(variable):
                return Place(name, f"${variable} is set")
        if all((root / folder).is_dir() for folder in folders):
            return Place(name, f"there is {' and '.join(f'/{folder}' for folder in folders)}")
    return Place("local", "no sign of Kaggle, Colab or Paperspace")


def is_rerun(environ: Environ = None) -> bool:
    """Whether Kaggle is scoring a submission: nobody looks on, what is not written in the end scores nothing."""
    return bool((os.environ if environ is None else environ).get("KAGGLE_IS_COMPETITION_RERUN"))


def find_data(data_dir: str = "", environ: Environ = None, root: Path = ROOT, repository: Path = REPOSITORY) -> Data:
    """The folder of the competition: `data_dir`, $RSNA_DATA, Kaggle's mounts, data/ in the repository, else the demo.

    Args:
        data_dir: a folder, relative to the current one or to the repository; "demo"; or "" to search.

    Raises:
        FileNotFoundError: a folder was named and isn't there or holds neither train.csv nor test.csv (the demo never
            stands in for it), or Kaggle is scoring a submission and the competition isn't mounted.
    """
    environ = os.environ if environ is None else environ
    for named, source in ((data_dir, "data_dir"), (environ.get("RSNA_DATA", ""), "$RSNA_DATA")):
        if named == "demo":
            return Data(None, f"{source} is 'demo'")
        if named:
            return Data(_named_folder(named, source, repository), f"named by {source}")
    candidates = (
        *((mounts.competition_folder(root, layout), "Kaggle's mount") for layout in mounts.LAYOUTS),
        (repository / "data", "data/ in the repository"),
        (repository / "data" / mounts.SLUG, "data/ in the repository"),
    )
    for folder, source in candidates:
        if _has_table(folder):
            return Data(folder, source)
    looked = "\n  ".join(str(folder) for folder, _ in candidates)
    if is_rerun(environ):
        raise FileNotFoundError(
            f"the competition is not mounted, and a submission can't use the demo; looked in\n  {looked}"
        )
    return Data(None, f"no train.csv or test.csv in\n  {looked}\nName a folder with data_dir or $RSNA_DATA.")


def work_folder(work_dir: str = "", environ: Environ = None, root: Path = ROOT, repository: Path = REPOSITORY) -> Path:
    """The folder that everything is written to, made and tried out.

    `work_dir` (relative to the current folder), else $RSNAKIT_WORK, else /kaggle/working/work on Kaggle, where the
    repository may be a read-only data set, else work/ in the repository.

    Raises:
        OSError: nothing can be written there, or it is on a Google Drive that is not mounted.
    """
    environ = os.environ if environ is None else environ
    if work_dir:
        folder = Path(work_dir)
    elif environ.get("RSNAKIT_WORK"):
        folder = Path(environ["RSNAKIT_WORK"])
    elif where(environ, root).name == "kaggle":
        folder = root / "kaggle/working/work"
    else:
        folder = repository / "work"
    folder = folder.expanduser().absolute()
    drive = root / "content/drive"
    if folder.is_relative_to(drive) and not os.path.ismount(drive):
        raise OSError(
            errno.ENOENT,
            f"work folder {folder}: the drive is not mounted, and what is written there would be lost with this machine. First "
            "run: from google.colab import drive; drive.mount('/content/drive')",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        message = (
            f"cannot write to the work folder {folder} ({error.strerror}); name another: work_dir or $RSNAKIT_WORK"
        )
        raise OSError(error.errno, message) from error
    return folder


def submission_folder(work: Path, run: RunConfig, name: str, environ: Environ = None, root: Path = ROOT) -> Path:
    """Where submission.csv goes: /kaggle/working on Kaggle, which looks for it there, else a folder in `work` for the run.

    With `run.debug`, which scores a few breasts only, a folder of its own everywhere, never in the place of a real one.

    Args:
        work: the work folder.
        name: of the run that scores.
    """
    if run.debug:
        return work / "submissions" / f"debug-{name}"
    return root / "kaggle/working" if where(environ, root).name == "kaggle" else work / "submissions" / name


def cores(root: Path = ROOT) -> int:
    """CPU cores that this process may use: fewer than the machine has under an affinity mask or a container's quota."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    quota = _cpu_quota(root)
    return max(1, min(count, math.ceil(quota))) if quota else count


def check_disk(folder: str | Path, needed_bytes: float, what: str) -> None:
    """Refuse to begin what won't fit.

    Args:
        folder: where `what` will be written; it need not exist yet.
        needed_bytes: its size.
        what: what is written, for the message.

    Raises:
        OSError: with errno ENOSPC, where less is free.
    """
    folder = Path(folder).expanduser().absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        need, have = needed_bytes / 1e9, free / 1e9
        message = f"{what} needs {need:.2f} GB and {existing} has {have:.2f} GB free; free some or name another folder"
        raise OSError(errno.ENOSPC, message)


def _has_table(folder: Path) -> bool:
    return any((folder / table).is_file() for table in TABLES)


def _named_folder(named: str, source: str, repository: Path) -> Path:
    """The folder that was named, if it holds a table; else FileNotFoundError with the folders around it."""
    folders = (Path(named).expanduser().absolute(), repository / named)
    folder = next((other for other in folders if other.exists()), folders[0])
    if _has_table(folder):
        return folder
    fault = "holds neither train.csv nor test.csv" if folder.is_dir() else "is not a folder"
    existing = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    inside = sorted(child for child in existing.iterdir() if child.is_dir())[:50]  # not all of 11,913 patients
    fitting = [other for other in (existing.parent, *inside) if _has_table(other)]
    names = ", ".join(child.name for child in inside[:8]) or "no folders"
    hint = f"did you mean {fitting[0]}?" if fitting else "name the folder that holds train.csv and train_images/"
    raise FileNotFoundError(f"{source} is {named!r}, but {folder} {fault}; {existing} holds {names}; {hint}")


def _cpu_quota(root: Path) -> float | None:
    """Cores that the container's control group allows, by its interface 2 or 1; None where it sets no limit."""
    group = root / "sys/fs/cgroup"
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu/cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    except OSError:
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)


def _versions(*packages: str) -> str:
    found = []
    for package in packages:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)
