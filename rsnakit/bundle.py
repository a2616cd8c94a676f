"""A run, the package and the inference notebook as what goes to Kaggle: a data set and a notebook with their metadata.

work/dist/dataset/  dataset-metadata.json, bundle.json, requirements.txt, rsnakit/, runs/<name>/, wheels/
          kernel/   kernel-metadata.json, 04_inference.ipynb

It is always the whole set, since a new version of a data set drops what it lacks. What inference does not need stays here:
patients' scores, checkpoints, the paths of this machine. Two bundles of one run are the same bytes.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

import rsnakit
from rsnakit import calling, env, infer, params, parcel, runs, slugs, wheels
from rsnakit.demo import DemoConfig
from rsnakit.env import RunConfig
from rsnakit.files import Lock, LockedError, read_json, write_atomic, write_json
from rsnakit.infer import InferConfig
from rsnakit.mounts import MANIFEST, SLUG
from rsnakit.parcel import BundleError

__all__ = ["Bundle", "BundleError", "make", "read"]

NOTEBOOK = "04_inference.ipynb"
DATA_SET_METADATA, KERNEL_METADATA = "dataset-metadata.json", "kernel-metadata.json"
GPU = "NvidiaTeslaT4"
# Parameters that are folders, and below which one they can be on Kaggle.
FOLDERS = {"data_dir": "/kaggle/input/", "work_dir": "/kaggle/working/", "store_dir": "/kaggle/working/"}


@dataclass(frozen=True)
class Bundle:
    """What `make` made.

    Attributes:
        folder: `work/dist`.
        run: the run's name.
        owner: user name on Kaggle.
        slug, kernel_slug: of the data set and of the notebook.
        files: by path relative to the data set's folder, its `bytes` and `sha256`.
        notes: sentences that whoever sends it should read.
    """

    folder: Path
    run: str
    owner: str
    slug: str
    kernel_slug: str
    files: Mapping[str, Mapping]
    notes: tuple[str, ...] = ()

    @property
    def dataset(self) -> Path:
        return self.folder / "dataset"

    @property
    def kernel(self) -> Path:
        return self.folder / "kernel"

    @property
    def size(self) -> int:
        """Bytes of the data set."""
        return sum(entry["bytes"] for entry in self.files.values())

    def table(self) -> pd.DataFrame:
        """A table of contents: a row a file, the package's in one. Indexed by `path`: files, MB."""
        rows: dict[str, list] = {}
        for path, entry in sorted(self.files.items()):
            row = rows.setdefault("rsnakit/*.py" if path.startswith("rsnakit/") else path, [0, 0.0])
            row[0], row[1] = row[0] + 1, row[1] + entry["bytes"] / 1e6
        return pd.DataFrame.from_dict(rows, "index", columns=["files", "MB"]).rename_axis("path").round(3)


def make(
    run: Path,
    owner: str,
    dist: Path,
    title: str = "",
    parameters: Mapping[str, object] | None = None,
    wheels_folder: Path | None = None,
    kernel_title: str = "",
    repository: Path = env.REPOSITORY,
) -> Bundle:
    """Makes the bundle of a run anew, and puts it in the old one's place once it is whole.

    Args:
        run: the run's folder; its finished folds travel (see `runs.trained_folds`).
        owner: user name on Kaggle.
        dist: where it comes; what is there must be a bundle, and is replaced.
        title: of the data set, 6 to 50 characters; empty: made of the run's name.
        parameters: for the notebook, by name, as papermill would put them in.
        wheels_folder: all its wheels travel (see `wheels.take`); None: none do.
        kernel_title: of the notebook; empty: the data set's with "inference" behind it.
        repository: where requirements.txt and the notebook are.

    Raises:
        BundleError: the run has no fold with weights, or damaged ones; 04_inference would stop on Kaggle with these
            parameters; something would travel that must not; it is larger than Kaggle takes or the disk has room for; or
            another process bundles.
        rsnakit.slugs.SlugError: owner or titles, see `slugs`.
        rsnakit.wheels.WheelError: the wheels are no set that installs.
    """
    slugs.check_owner(owner)
    name = _run_name(run)
    title = title or _shortened(f"rsnakit {name}", slugs.LENGTHS["data set"][1])
    kernel_title = kernel_title or f"{_shortened(title, slugs.LENGTHS['notebook'][1] - 10)} inference"
    slug, kernel_slug = slugs.check_title(title, "data set"), slugs.check_title(kernel_title, "notebook")
    with _plain_errors():
        given, config = _checked(run, name, parameters or {})
        calling.check_threshold(config, run)
        nets = infer.load_ensemble(run).models
        parcel.check_finite(run, nets)
    taken = wheels.check(wheels_folder.glob("*.whl")) if wheels_folder else []
    if wheels_folder and not taken:
        raise BundleError(f"{wheels_folder}: no wheels in it; leave them out, or have them taken with internet")
    with _plain_errors(), _building(dist) as new:
        data_set, kernel = new / "dataset", new / "kernel"
        weights = [folder / "best.safetensors" for folder in runs.trained_folds(run).values()]
        env.check_disk(new, sum(path.stat().st_size for path in (*weights, *taken)) + 1e7, "the bundle")
        parcel.write_package(data_set / "rsnakit")
        (data_set / "requirements.txt").write_bytes(parcel.read_file(repository / "requirements.txt"))
        parcel.write_run(run, data_set / "runs" / name, nets)
        for path in taken:
            (data_set / "wheels").mkdir(exist_ok=True)
            shutil.copyfile(path, data_set / "wheels" / path.name)
        described = {
            "run": name, "owner": owner, "slug": slug, "rsnakit": rsnakit.__version__, "folds": list(nets),
            "notes": _notes(run, taken), "files": parcel.listed(data_set),
        }  # fmt: skip
        write_json(data_set / MANIFEST, described)
        about = {"title": title, "id": f"{owner}/{slug}", "licenses": [{"name": "other"}]}
        write_json(data_set / DATA_SET_METADATA, about)
        kernel.mkdir()
        write_json(kernel / KERNEL_METADATA, _kernel_metadata(owner, slug, kernel_slug, kernel_title))
        write_atomic(kernel / NOTEBOOK, parcel.notebook_text(repository / "notebooks" / NOTEBOOK, given))
        parcel.refuse_secrets(new)
        parcel.check_limits(described["files"])
    return _bundle(dist, described, kernel_slug)


def requirements(run: Path) -> tuple[str, ...]:
    """What `wheels.take` is to take for a run: `wheels.NEEDED`, timm in the version it was trained with where that is later.

    Raises:
        rsnakit.runs.RunError: the run's `config.json` is damaged.
    """
    runs.read_config(run)
    trained = read_json(run / "config.json").get("versions", {}).get("timm", "")
    return tuple(wheels.at_least(trained, one) if one.startswith("timm==") else one for one in wheels.NEEDED)


def read(dist: Path) -> Bundle:
    """The bundle in a folder, checked: every file is there, whole and listed, and the metadata are of this bundle.

    Raises:
        BundleError: there is none, or it is not what `make` made.
        rsnakit.slugs.SlugError: an id or title was changed to what Kaggle would refuse.
    """
    if not dist.exists() and (_aside(dist) / "old").exists():  # `make` was killed just there
        with contextlib.suppress(LockedError), Lock(_aside(dist), "bundle"):
            _put_back(dist)
    data_set, kernel = dist / "dataset", dist / "kernel"
    if not (data_set / MANIFEST).is_file():
        raise BundleError(f"{dist}: no bundle here; `python -m rsnakit.kaggle bundle RUN --owner NAME` makes one")
    for file in (data_set / DATA_SET_METADATA, kernel / KERNEL_METADATA, kernel / NOTEBOOK):
        if not file.is_file():
            raise BundleError(f"{file}: is not there. Bundle again.")
    with _plain_errors():
        described, about = read_json(data_set / MANIFEST), read_json(data_set / DATA_SET_METADATA)
        notebook, code = read_json(kernel / KERNEL_METADATA), read_json(kernel / NOTEBOOK)
        id, ids = f"{described['owner']}/{described['slug']}", (about["id"], notebook["dataset_sources"])
        if ids != (id, [id]):
            raise BundleError(f"{dist}: the metadata name the data sets {ids[0]} and {ids[1]}, and the bundle is {id}")
        slugs.check_pair(about["id"], about["title"], "data set")
        kernel_slug = slugs.check_pair(notebook["id"], notebook["title"], "notebook")
        made = _kernel_metadata(described["owner"], described["slug"], kernel_slug, notebook["title"]) | {
            "id": notebook["id"]
        }
        for name in sorted(made.keys() | notebook.keys()):  # whose notebook it is, `publishing` asks
            if made.get(name) != notebook.get(name):
                raise BundleError(
                    f"{kernel / KERNEL_METADATA}: {name} is {notebook.get(name)!r}, and was bundled as {made.get(name)!r}. "
                    "Bundle again."
                )
        if not all(isinstance(cell["source"], str | list) for cell in code["cells"]):
            raise BundleError(f"{kernel / NOTEBOOK}: is no notebook. Bundle again.")
        found, files = parcel.listed(data_set), described["files"]
        found = {path: entry for path, entry in found.items() if path not in (MANIFEST, DATA_SET_METADATA)}
        for what, paths in (
            ("missing", files.keys() - found.keys()),
            ("not of this bundle", found.keys() - files.keys()),
            ("not as bundled", {path for path in found if found[path] != files.get(path)}),
        ):
            if paths:
                raise BundleError(f"{data_set}: {len(paths)} {what}: {', '.join(sorted(paths)[:3])}. Bundle again.")
        return _bundle(dist, described, kernel_slug)


def _bundle(dist: Path, described: Mapping, kernel_slug: str) -> Bundle:
    names = {name: described[name] for name in ("run", "owner", "slug", "files")}
    return Bundle(folder=dist, **names, kernel_slug=kernel_slug, notes=tuple(described["notes"]))


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """What the parts refuse, as BundleError; their messages name file and cause."""
    try:
        yield
    except (BundleError, slugs.SlugError):
        raise
    except (KeyError, TypeError, AttributeError) as error:
        raise BundleError(f"the metadata are not those that were bundled ({error!r}). Bundle again.") from error
    except (LockedError, OSError, ValueError) as error:
        raise BundleError(str(error)) from error


def _run_name(run: Path) -> str:
    name = Path(os.path.abspath(run)).name
    if not re.fullmatch(r"\w[\w.+=, -]*", name, re.ASCII):
        raise BundleError(
            f"{run}: Kaggle may store this name as another one; rename the folder in letters, digits, dashes"
        )
    return name


def _shortened(title: str, length: int) -> str:
    """A title of so many characters: its middle is left out, for the end of a run's name tells it from others."""
    half = length // 2 - 1
    return title if len(title) <= length else f"{title[:half]} {title[-half:]}"


def _checked(run: Path, name: str, parameters: Mapping[str, object]) -> tuple[dict, InferConfig]:
    """The notebook's parameters with their types, and the settings of inference that they make."""
    configs = params.from_mapping(parameters, RunConfig, DemoConfig, InferConfig)
    known = {setting: value for config in configs for setting, value in vars(config).items()}
    given = {setting: known.get(setting, value) for setting, value in parameters.items()}
    given = {setting: list(value) if isinstance(value, tuple) else value for setting, value in given.items()}
    infer.refuse_other_settings(run, {setting: given[setting] for setting in given if setting not in known})
    for setting, top in FOLDERS.items():
        value = str(given.get(setting, ""))
        if value and not os.path.normpath(value).startswith(top):
            raise BundleError(
                f"{setting}: {value!r} is a folder of this machine, and on Kaggle it is in {top}; leave it out"
            )
    if given.get("device", "auto") not in ("auto", "cuda", "cuda:0", "cuda:1"):
        raise BundleError(
            f"device: {given['device']!r} makes no use of Kaggle's two GPUs, which are asked for; leave it out"
        )
    if given.get("debug"):
        raise BundleError("debug: the notebook would score a few breasts, and write no submission.csv; leave it out")
    if given.get("run", "") not in ("", name):
        raise BundleError(f"run: {given['run']!r} stays here, and {name} is the one that travels; leave it out")
    return given, configs[2]


def _notes(run: Path, taken: list[Path]) -> list[str]:
    settings, trained, notes = runs.read_config(run, *runs.KIND), runs.trained_folds(run), []
    if settings["is_demo"]:
        notes.append("this run was trained on the demo: good for a rehearsal, and worth nothing on real mammograms")
    if settings["debug"]:
        notes.append("this run was trained on a few patients, with debug")
    for fold, state in runs.unfinished_folds(run).items():
        left = "taken as it is, as none is finished" if fold in trained else "left out"
        notes.append(f"fold {fold} is not finished, {state}, and is {left}")
    if not taken:
        notes.append("no wheels travel: what Kaggle's image lacks cannot be installed there without internet")
    return notes


def _kernel_metadata(owner: str, slug: str, kernel_slug: str, title: str) -> dict:
    return {
        "id": f"{owner}/{kernel_slug}", "title": title, "code_file": NOTEBOOK, "language": "python",
        "kernel_type": "notebook", "is_private": True, "enable_gpu": True, "enable_internet": False, "machine_shape": GPU,
        "dataset_sources": [f"{owner}/{slug}"], "competition_sources": [SLUG], "kernel_sources": [], "model_sources": [],
    }  # fmt: skip


# ---- the place of a bundle


@contextlib.contextmanager
def _building(dist: Path) -> Iterator[Path]:
    """An empty folder that takes `dist`'s place where the block ends well. A kill leaves the old one or the new one: between
    the two renames the old one lies aside, and `read` and the next `make` put it back."""
    aside = _aside(dist)
    new, old = aside / "new", aside / "old"
    try:
        with Lock(aside, "the bundle"):
            _put_back(dist)
            if dist.exists() and not (dist / "dataset" / MANIFEST).is_file() and not _is_empty(dist):
                raise BundleError(
                    f"{dist}: is no bundle, and would be replaced; give a folder that is empty or not there"
                )
            for leftover in (new, old):
                shutil.rmtree(leftover, ignore_errors=True)
            new.mkdir()
            yield new
            if dist.exists():
                os.replace(dist, old)
            os.replace(new, dist)
            shutil.rmtree(old, ignore_errors=True)
    except LockedError:
        raise
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    finally:
        with contextlib.suppress(OSError):  # of another process, which is using it
            aside.rmdir()


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def _aside(dist: Path) -> Path:
    return dist.with_name(f".{dist.name}")


def _put_back(dist: Path) -> None:
    if not dist.exists() and (_aside(dist) / "old").exists():
        os.replace(_aside(dist) / "old", dist)
