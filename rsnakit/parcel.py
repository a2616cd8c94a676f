"""What of a run, the package and the notebook goes into a bundle: cleaned of all that inference does not need, and looked
through for what must not travel."""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PureWindowsPath

import torch

import rsnakit
from rsnakit import models, runs
from rsnakit.files import read_json, write_json

# What inference reads of a run's files. All else stays here: counts of the rows held out, and what later versions may add.
CONFIG = ("preprocess", "model", "train", "data", "is_demo", "debug")
MODEL = ("model", "versions", "preprocess", "prior", "epoch", "select")
SUMMARY = (
    "aggregate", "folds", "epochs", "unfinished", "select", "prior", "threshold", "percentile", "by_aggregate", "nested",
    "nested_note", "epoch_choice", "scores",
)  # fmt: skip
ABSOLUTE = re.compile(r"[/~\\]|[A-Za-z]:[/\\]|file:")  # how a path that means something on one machine alone begins
SECRETS = {
    "a key of Kaggle": r"""KGAT_\w{16}|["']key["']\s*:\s*["'][0-9a-f]{32}["']|KAGGLE_KEY\W{1,4}[0-9a-f]{32}""",
    "a token of GitHub, Hugging Face or a cloud": r"gh[pousr]_\w{30}|github_pat_\w{20}|hf_\w{30}|AKIA[0-9A-Z]{16}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY",
}
SECRET_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSW", re.IGNORECASE)  # of variables whose values must not travel
BINARY = (".safetensors", ".whl")
LIMIT_GB, LIMIT_TOP = 200.0, 50  # of a data set, and of files and folders at its top: kaggle.com/docs/datasets


class BundleError(ValueError):
    """What should go to Kaggle cannot, or is not what was bundled; the message says which file and what to do."""


def write_package(folder: Path) -> None:
    """Copies the modules of the running package, and nothing that Python has made of them."""
    folder.mkdir(parents=True)
    for path in sorted(Path(rsnakit.__file__).parent.glob("*.py")):
        (folder / path.name).write_bytes(path.read_bytes())


def write_run(run: Path, folder: Path, nets: Mapping[int, torch.nn.Module]) -> None:
    """Writes of a run what inference reads: settings, summary, and of each fold weights, `model.json` and history.

    Args:
        run: its folder.
        folder: made.
        nets: the folds' models with their weights, on the CPU.

    Raises:
        BundleError: a setting is a path of this machine, other than that of the weights that training began from, of which
            the file's name is kept.
    """
    folders, config = runs.trained_folds(run), read_json(run / "config.json")
    config["settings"] = {name: config["settings"][name] for name in CONFIG if name in config["settings"]}
    _write_clean(config, ("settings", "versions", "git"), run / "config.json", folder)
    if (summary := runs.read_summary(run)) is not None:
        _write_clean(summary, SUMMARY, run / "summary.json", folder)
    for fold, net in nets.items():
        source, out = folders[fold], folder / f"fold{fold}"
        _write_clean(runs.read_model(source), MODEL, source / "model.json", out)
        models.save_weights(net, out / "best.safetensors")
        if (history := runs.read_history(source)) is not None:  # by its length a fold is finished
            history.select_dtypes(["number", "bool"]).to_csv(out / "history.csv", index=False)


def check_finite(run: Path, nets: Mapping[int, torch.nn.Module]) -> None:
    """Refuses (BundleError) weights with NaN or infinite numbers, by the name of their file."""
    for fold, net in nets.items():
        odd = [name for name, tensor in net.state_dict().items() if not tensor.isfinite().all()]
        if odd:
            path = runs.trained_folds(run)[fold] / "best.safetensors"
            raise BundleError(f"{path}: {len(odd)} tensors are not finite, such as {odd[0]}. Train this fold again.")


def notebook_text(path: Path, parameters: Mapping[str, object]) -> str:
    """A notebook without outputs and with papermill's own cell of parameters, where there are any; the same text each time.

    Args:
        path: of the notebook.
        parameters: plain values by name.
    """
    import nbformat
    from papermill.iorw import load_notebook_node
    from papermill.parameterize import parameterize_notebook

    read_file(path)
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


def read_file(path: Path) -> bytes:
    """A file of the repository.

    Raises:
        BundleError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise BundleError(
            f"{path}: cannot be read ({error.strerror}); a bundle is made in the kit's repository"
        ) from error


def listed(folder: Path) -> dict[str, dict]:
    """All files of a folder by relative path, with `bytes` and `sha256`.

    Raises:
        BundleError: one is a link.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise BundleError(f"{path}: is a link, and what it leads to would not travel. Bundle again.")
        if path.is_file():
            with open(path, "rb") as f:
                digest = hashlib.file_digest(f, "sha256").hexdigest()
            found[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": digest}
    return found


def check_limits(files: Mapping[str, Mapping]) -> None:
    """Refuses (BundleError) files of a data set that Kaggle would not take, or keep apart."""
    size, top = sum(entry["bytes"] for entry in files.values()) / 1e9, {path.split("/")[0] for path in files}
    if size > LIMIT_GB or len(top) > LIMIT_TOP:
        raise BundleError(
            f"{size:.1f} GB, and {len(top)} files and folders at the top: Kaggle takes data sets of up to {LIMIT_GB:g} GB "
            f"with {LIMIT_TOP}. Bundle fewer folds."
        )
    # A folder goes up as an archive of its name; and some disks do not tell upper from lower case.
    archives = {f"{path.split('/')[0].lower()}.zip" for path in files if "/" in path}
    twins = [name for name, count in Counter([*map(str.lower, files), *archives]).items() if count > 1]
    if twins:
        raise BundleError(f"{twins[0]}: two files would have this name on Kaggle; rename one of them")


def refuse_secrets(folder: Path) -> None:
    """Refuses (BundleError, which does not repeat it) what looks like a key in a file of text, the value of a variable that is
    named like one, and the home folder of who bundles."""
    own = {f"the value of ${name}": value for name, value in os.environ.items() if SECRET_NAMES.search(name)}
    own = {what: value for what, value in own.items() if len(value) >= 12}
    home = str(Path.home())
    if len(home) > 1:
        own["this machine's home folder"] = home + os.sep
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.suffix in BINARY:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        found = [what for what, value in own.items() if value in text]
        found += [what for what, pattern in SECRETS.items() if re.search(pattern, text)]
        if found:
            name = path.relative_to(folder).as_posix()
            raise BundleError(
                f"{name}: holds {found[0]}, which must not travel. Take it out where the file comes from."
            )


def _write_clean(values: Mapping, names: tuple[str, ...], source: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: _without_paths(values[name], name, source) for name in names if name in values}
    write_json(folder / source.name, kept)


def _without_paths(value: object, name: str, source: Path) -> object:
    if isinstance(value, dict):
        return {key: _without_paths(part, key, source) for key, part in value.items()}
    if isinstance(value, list):
        return [_without_paths(part, name, source) for part in value]
    if name == "weights" and isinstance(value, str):
        return PureWindowsPath(value).name  # it splits at both kinds of slash
    if isinstance(value, str) and ABSOLUTE.match(value):
        raise BundleError(f"{source}: {name} is {value!r}, a path of this machine, which must not travel")
    return value
