"""A run, the package and the inference notebook as what goes to Kaggle: a data set and a notebook with their metadata.

work/dist/dataset/  dataset-metadata.json, bundle.json, requirements.txt, rsnakit/, runs/<name>/, wheels/
          kernel/   kernel-metadata.json, 04_inference.ipynb

It is always the whole set, since a new version of a data set drops what it lacks. What inference does not need stays here:
patients' scores, checkpoints, the paths of this machine. Two bundles of one run are the same bytes.
"""

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath

import pandas as pd
import torch

import rsnakit
from rsnakit import calling, env, infer, models, params, runs, slugs, wheels
from rsnakit.demo import DemoConfig
from rsnakit.env import RunConfig
from rsnakit.files import Lock, LockedError, read_json, write_atomic, write_json
from rsnakit.infer import InferConfig
from rsnakit.mounts import MANIFEST, SLUG

NOTEBOOK = "04_inference.ipynb"
DATA_SET_METADATA, KERNEL_METADATA = "dataset-metadata.json", "kernel-metadata.json"
GPU = "NvidiaTeslaT4"
LIMIT_GB, LIMIT_TOP = 100.0, 50  # of a data set on Kaggle: its size, and the files and folders at its top
# What inference reads of a run's files. All else stays here: counts of the rows held out, and what later versions may add.
CONFIG = ("preprocess", "model", "train", "data", "is_demo", "debug")
MODEL = ("model", "versions", "preprocess", "prior", "epoch", "select")
SUMMARY = (
    "aggregate", "folds", "epochs", "unfinished", "select", "prior", "threshold", "percentile", "by_aggregate", "nested",
    "nested_note", "epoch_choice", "scores",
)  # fmt: skip
FOLDERS = ("data_dir", "work_dir", "store_dir")  # parameters that are folders
ABSOLUTE = re.compile(r"(?:[/~\\]|[A-Za-z]:[/\\]|file:)")
SECRETS = {
    "a key of Kaggle": r"""KGAT_\w{16}|["']key["']\s*:\s*["'][0-9a-f]{32}["']|KAGGLE_KEY\W{1,4}[0-9a-f]{32}""",
    "a token of GitHub, Hugging Face or a cloud": r"gh[pousr]_\w{30}|hf_\w{30}|AKIA[0-9A-Z]{16}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY",
}
SECRET_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSW", re.IGNORECASE)  # of variables whose values must not travel
BINARY = (".safetensors", ".whl")


class BundleError(ValueError):
    """What should go to Kaggle cannot, or is not what was bundled; the message says which file and what to do."""


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
        dist: where it comes; what was there must be a bundle, and is replaced.
        title: of the data set, 6 to 50 characters; empty: made of the run's name.
        parameters: for the notebook, by name, as papermill would put them in.
        wheels_folder: all its wheels travel (see `wheels.take`); None: none do.
        kernel_title: of the notebook; empty: the data set's with "inference" behind it.
        repository: where requirements.txt and the notebook are.

    Raises:
        BundleError: the run has no fold with weights, or damaged ones; 04_inference would stop on Kaggle with these
            parameters; something would travel that must not; it is larger than Kaggle takes; or another process bundles.
        rsnakit.slugs.SlugError: owner or titles, see `slugs`.
        rsnakit.wheels.WheelError: the wheels are no set that installs.
    """
    slugs.check_owner(owner)
    name = _run_name(run)
    title = title or _shortened("rsnakit " + name, slugs.LENGTHS["data set"][1])
    kernel_title = kernel_title or _shortened(title, slugs.LENGTHS["notebook"][1] - len(" inference")) + " inference"
    slug, kernel_slug = slugs.check_title(title, "data set"), slugs.check_title(kernel_title, "notebook")
    with _plain_errors():
        given, config = _checked(run, parameters or {})
        calling.choose_threshold(
            config, run, pd.DataFrame({"score": [0.0, 1.0]})
        )  # where 04_inference would stop, after hours
        ensemble = infer.load_ensemble(run)
        _check_finite(run, ensemble.models)
    taken = wheels.check(sorted(wheels_folder.glob("*.whl"))) if wheels_folder else []
    _refuse_foreign(dist)
    with _building(dist) as new:
        data_set, kernel = new / "dataset", new / "kernel"
        for folder in (kernel, data_set / "rsnakit"):
            folder.mkdir(parents=True)
        for path in sorted(Path(rsnakit.__file__).parent.glob("*.py")):
            (data_set / "rsnakit" / path.name).write_bytes(path.read_bytes())
        (data_set / "requirements.txt").write_bytes(_read(repository / "requirements.txt"))
        _write_run(run, data_set / "runs" / name, ensemble.models)
        for path in taken:
            (data_set / "wheels").mkdir(exist_ok=True)
            shutil.copyfile(path, data_set / "wheels" / path.name)
        described = {
            "run": name, "owner": owner, "slug": slug, "rsnakit": rsnakit.__version__, "folds": list(ensemble.models),
            "notes": _notes(run, taken), "files": _listed(data_set),
        }  # fmt: skip
        write_json(data_set / MANIFEST, described)
        about = {"title": title, "id": f"{owner}/{slug}", "licenses": [{"name": "other"}]}
        write_json(data_set / DATA_SET_METADATA, about)
        write_json(kernel / KERNEL_METADATA, _kernel_metadata(owner, slug, kernel_slug, kernel_title))
        write_atomic(kernel / NOTEBOOK, _notebook(repository / "notebooks" / NOTEBOOK, given))
        _refuse_secrets(new)
        _check_limits(described["files"])
    return _bundle(dist, described, kernel_slug)


def read(dist: Path) -> Bundle:
    """The bundle in a folder, checked: every file is there, whole and listed, and the metadata are of this bundle.

    Raises:
        BundleError: there is none, or it is not what `make` made.
        rsnakit.slugs.SlugError: an id or title was changed to what Kaggle would refuse.
    """
    _recover(dist)
    data_set, kernel = dist / "dataset", dist / "kernel"
    with _plain_errors():
        if not (data_set / MANIFEST).is_file():
            raise BundleError(f"{dist}: no bundle here; `python -m rsnakit.kaggle bundle RUN --owner NAME` makes one")
        described, about = read_json(data_set / MANIFEST), read_json(data_set / DATA_SET_METADATA)
        notebook = read_json(kernel / KERNEL_METADATA)
        read_json(kernel / NOTEBOOK)
        id, ids = f"{described['owner']}/{described['slug']}", (about["id"], notebook["dataset_sources"])
        if ids != (id, [id]):
            raise BundleError(f"{dist}: the metadata name the data sets {ids[0]} and {ids[1]}, and the bundle is {id}")
        slugs.check_pair(about["id"], about["title"], "data set")
        kernel_slug = slugs.check_pair(notebook["id"], notebook["title"], "notebook")
        found = _listed(data_set)
    for what, paths in (
        ("are missing", described["files"].keys() - found.keys()),
        ("are not of this bundle", found.keys() - described["files"].keys()),
        ("are not as they were bundled", {path for path in found if found[path] != described["files"].get(path)}),
    ):
        if paths:
            raise BundleError(f"{data_set}: {len(paths)} files {what}: {', '.join(sorted(paths)[:3])}. Bundle again.")
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
    except (OSError, KeyError, ValueError) as error:
        missing = f"{error} is missing in the metadata; bundle again" if isinstance(error, KeyError) else str(error)
        raise BundleError(missing) from error


# ---- what is checked before


def _run_name(run: Path) -> str:
    name = run.resolve().name
    if not re.fullmatch(r"\w[\w.+=, -]*", name, re.ASCII):
        raise BundleError(
            f"{run}: Kaggle may store this name as another one; rename the folder in letters, digits and dashes"
        )
    return name


def _shortened(title: str, length: int) -> str:
    """A title of so many characters: its middle is left out, for the end of a run's name tells it from others."""
    half = length // 2 - 1
    return title if len(title) <= length else f"{title[:half]} {title[-half:]}"


def _checked(run: Path, parameters: Mapping[str, object]) -> tuple[dict, InferConfig]:
    """The notebook's parameters with their types, and those of inference."""
    configs = params.from_mapping(parameters, RunConfig, DemoConfig, InferConfig)
    known = {name: value for config in configs for name, value in vars(config).items()}
    given = {name: known.get(name, value) for name, value in parameters.items()}
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
    infer.refuse_other_settings(run, {name: value for name, value in given.items() if name not in known})
    for name in FOLDERS:
        if ABSOLUTE.match(str(given.get(name, ""))) and not str(given[name]).startswith("/kaggle/"):
            raise BundleError(
                f"{name}: {given[name]!r} is a folder of this machine; on Kaggle there is /kaggle/ alone. Leave it out"
            )
    if given.get("run", run.name) not in ("", run.resolve().name):
        raise BundleError(f"run: {given['run']!r}, and the run that travels is {run.resolve().name}; leave it out")
    return given, configs[2]


def _check_finite(run: Path, nets: Mapping[int, torch.nn.Module]) -> None:
    for fold, net in nets.items():
        odd = [name for name, tensor in net.state_dict().items() if not tensor.isfinite().all()]
        if odd:
            path = runs.trained_folds(run)[fold] / "best.safetensors"
            raise BundleError(f"{path}: {len(odd)} tensors are not finite, such as {odd[0]}. Train this fold again.")


def _refuse_foreign(dist: Path) -> None:
    if dist.exists() and not (dist / "dataset" / MANIFEST).is_file() and (not dist.is_dir() or any(dist.iterdir())):
        raise BundleError(
            f"{dist}: is no bundle, and would be replaced; give an empty folder, or one that is not there"
        )


# ---- what is written


@contextlib.contextmanager
def _building(dist: Path) -> Iterator[Path]:
    """An empty folder that takes `dist`'s place where the block ends well. A kill leaves the old one or the new one: between
    the two renames the old one lies aside, where `_recover` finds it."""
    aside = _aside(dist)
    new, old = aside / "new", aside / "old"
    try:
        with Lock(aside, "bundle"):
            try:
                _put_back(dist)
                for leftover in (new, old):
                    shutil.rmtree(leftover, ignore_errors=True)
                new.mkdir()
                yield new
                if dist.exists():
                    os.replace(dist, old)
                os.replace(new, dist)
            finally:
                shutil.rmtree(new, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
    except LockedError as error:
        raise BundleError(str(error)) from error
    with contextlib.suppress(OSError):
        aside.rmdir()


def _aside(dist: Path) -> Path:
    return dist.with_name(f".{dist.name}")


def _recover(dist: Path) -> None:
    if not dist.exists() and (_aside(dist) / "old").exists():
        with contextlib.suppress(LockedError), Lock(_aside(dist), "bundle"):
            _put_back(dist)


def _put_back(dist: Path) -> None:
    if not dist.exists() and (_aside(dist) / "old").exists():
        os.replace(_aside(dist) / "old", dist)


def _write_run(run: Path, out: Path, nets: Mapping[int, torch.nn.Module]) -> None:
    folders = runs.trained_folds(run)
    config = read_json(run / "config.json")
    config["settings"] = {name: config["settings"][name] for name in CONFIG if name in config["settings"]}
    _write_clean(config, ("settings", "versions", "git"), run / "config.json", out)
    if (run / "summary.json").exists():
        _write_clean(read_json(run / "summary.json"), SUMMARY, run / "summary.json", out)
    for fold, net in nets.items():
        folder = out / f"fold{fold}"
        _write_clean(runs.read_model(folders[fold]), MODEL, folders[fold] / "model.json", folder)
        models.save_weights(net, folder / "best.safetensors")
        if runs.read_history(folders[fold]) is not None:
            (folder / "history.csv").write_bytes((folders[fold] / "history.csv").read_bytes())


def _write_clean(values: Mapping, names: tuple[str, ...], source: Path, folder: Path) -> None:
    """Writes what inference reads of a JSON file; the weights that training began from lose their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: _without_paths(values[name], name, source) for name in names if name in values}
    write_json(folder / source.name, kept)


def _without_paths(value: object, name: str, source: Path) -> object:
    if isinstance(value, dict):
        return {key: _without_paths(part, key, source) for key, part in value.items()}
    if isinstance(value, list):
        return [_without_paths(part, name, source) for part in value]
    if name == "weights" and isinstance(value, str):
        return PureWindowsPath(value).name  # which splits at both kinds of slash
    if isinstance(value, str) and ABSOLUTE.match(value):
        raise BundleError(f"{source}: {name} is {value!r}, a path of this machine, which must not travel")
    return value


def _kernel_metadata(owner: str, slug: str, kernel_slug: str, title: str) -> dict:
    return {
        "id": f"{owner}/{kernel_slug}", "title": title, "code_file": NOTEBOOK, "language": "python",
        "kernel_type": "notebook", "is_private": True, "enable_gpu": True, "enable_internet": False, "machine_shape": GPU,
        "dataset_sources": [f"{owner}/{slug}"], "competition_sources": [SLUG], "kernel_sources": [], "model_sources": [],
    }  # fmt: skip


def _notebook(path: Path, parameters: Mapping[str, object]) -> str:
    """The notebook without outputs, with papermill's own cell of parameters where there are any."""
    import nbformat
    from papermill.iorw import load_notebook_node
    from papermill.parameterize import parameterize_notebook

    _read(path)
    notebook = load_notebook_node(str(path))
    if parameters:
        notebook = parameterize_notebook(notebook, dict(parameters))
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            if "injected-parameters" in (tags or ()):
                cell.id = hashlib.sha256(cell.source.encode()).hexdigest()[:8]  # papermill draws one
    kept = {name: notebook.metadata[name] for name in ("kernelspec", "language_info") if name in notebook.metadata}
    notebook.metadata = nbformat.from_dict(kept)
    return nbformat.writes(notebook) + "\n"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BundleError(
            f"{path}: cannot be read ({error.strerror}); a bundle is made from the kit's repository"
        ) from error


def _notes(run: Path, taken: list[Path]) -> list[str]:
    settings, notes = runs.read_config(run, *runs.KIND), []
    if settings["is_demo"]:
        notes.append("this run was trained on the demo: good for a rehearsal, and worth nothing on real mammograms")
    if settings["debug"]:
        notes.append("this run was trained on a few patients, with debug")
    trained = runs.trained_folds(run)
    for fold, state in runs.unfinished_folds(run).items():
        left = "taken as it is, as none is finished" if fold in trained else "left out"
        notes.append(f"fold {fold} is not finished, {state}, and is {left}")
    if not taken:
        notes.append("no wheels travel: what Kaggle's image lacks cannot be installed there without internet")
    return notes


def _listed(data_set: Path) -> dict[str, dict]:
    """All files of the data set but the two that describe it, by relative path: bytes and sha256."""
    found = {}
    for path in sorted(data_set.rglob("*")):
        relative = path.relative_to(data_set).as_posix()
        if path.is_symlink():
            raise BundleError(f"{path}: is a link, which does not travel. Bundle again.")
        if path.is_file() and relative not in (MANIFEST, DATA_SET_METADATA):
            with open(path, "rb") as f:
                found[relative] = {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(f, "sha256").hexdigest()}
    return found


def _check_limits(files: Mapping[str, Mapping]) -> None:
    size, top = sum(entry["bytes"] for entry in files.values()) / 1e9, {path.split("/")[0] for path in files}
    if size > LIMIT_GB or len(top) > LIMIT_TOP:
        raise BundleError(
            f"{size:.1f} GB in {len(top)} files and folders: Kaggle takes data sets of up to {LIMIT_GB:g} GB and {LIMIT_TOP}"
        )
    twins = pd.Series([path.lower() for path in files])
    if twins.duplicated().any():
        raise BundleError(
            f"{twins[twins.duplicated()].iloc[0]}: two files of this name, but for upper and lower case; rename one"
        )


def _refuse_secrets(folder: Path) -> None:
    """Stops where a file holds what looks like a key, the value of a variable that is named like one, or the home folder."""
    own = {
        f"the value of ${name}": value
        for name, value in os.environ.items()
        if SECRET_NAMES.search(name) and len(value) >= 12
    }
    if len(home := str(Path.home())) > 5:
        own["this machine's home folder"] = home
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix not in BINARY:
            text = path.read_text(encoding="utf-8", errors="replace")
            found = [what for what, value in own.items() if value in text] + [
                what for what, like in SECRETS.items() if re.search(like, text)
            ]
            if found:
                raise BundleError(
                    f"{path.relative_to(folder)}: holds {found[0]}, which must not travel; take it out where it comes from"
                )
