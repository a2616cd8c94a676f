"""A run's folder: named after its settings, opened and found again. What is read of it stands in `runfiles`.

work/runs/<name>/config.json          settings that decide the result, versions, git revision
                 fold<k>/             best.safetensors, model.json, oof.csv, history.csv, last.pt, events.*
                 summary.json         scores with intervals, out-of-fold threshold and percentile
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rsnakit.files import write_json
from rsnakit.oof import OOF_COLUMNS
from rsnakit.runfiles import (
    RunError,
    begun_folds,
    read_config,
    read_fold_oof,
    read_history,
    read_model,
    read_oof,
    read_summary,
    trained_folds,
    unfinished_folds,
)
from rsnakit.store import config_hash
from rsnakit.versions import git_revision, versions

__all__ = [
    "OOF_COLUMNS", "RunError", "begun_folds", "check_settings", "compare", "differences_in_kind", "find_run", "open_run",
    "read_config", "read_fold_oof", "read_history", "read_model", "read_oof", "read_summary", "rebuild", "run_name",
    "settings_of", "trained_folds", "unfinished_folds", "versions",
]  # fmt: skip

KIND = ("is_demo", "debug")  # settings that say which data a run is for
MAY_GROW = "train.epochs"  # the one setting of a run that may change: to more
NO_RESULT = (
    "grad_checkpointing"  # the one setting of a model that decides no result, and is no part of a run's settings
)


def settings_of(preprocess: object, model: object, train: object, data: str, is_demo: bool, debug: bool) -> dict:
    """What decides a run's result, as plain values: the configs, the data's fingerprint, demo and debug.

    Gradient checkpointing is not among them: whoever runs out of memory turns it on and goes on with the same run.
    """
    return _plain(preprocess=preprocess, model=model, train=train, data=data, is_demo=is_demo, debug=debug)


def _plain(**parts: object) -> dict:
    """Parts of the settings as JSON has them, tuples being lists."""
    plain = {name: dataclasses.asdict(part) if dataclasses.is_dataclass(part) else part for name, part in parts.items()}
    if "model" in plain:
        plain["model"] = {name: value for name, value in plain["model"].items() if name != NO_RESULT}
    return json.loads(json.dumps(plain))


def run_name(settings: dict) -> str:
    """The name that a run gets by itself; another setting makes another name."""
    marks = [mark for mark, there in (("demo", settings["is_demo"]), ("debug", settings["debug"])) if there]
    backbone = settings["model"]["backbone"].replace("/", "_")
    return "-".join([*marks, backbone, config_hash(settings)[:8]])


def open_run(work: Path, name: str, settings: dict) -> Path:
    """The folder of a run, made or gone on with.

    Args:
        work: the work folder.
        name: of the run; empty: `run_name`.
        settings: as `settings_of` makes them.

    Raises:
        RunError: a run of this name was trained with other settings; each difference is shown.
    """
    folder = work / "runs" / (name or run_name(settings))
    path = folder / "config.json"
    if path.exists():
        before = read_config(folder)
        differences = compare(before, settings)
        epochs = differences.pop(MAY_GROW, None)
        if epochs and (not epochs[0] or epochs[1] < epochs[0]):
            differences[MAY_GROW] = epochs
        if differences:
            other = " by another version of the kit, and" if any(None in pair for pair in differences.values()) else ""
            raise RunError(
                f"{folder}: this run was begun{other} with other settings:\n{_show(differences)}\n"
                "Give another name with run=, or leave run empty to have it named after its settings."
            )
        if epochs:  # kept, so that the next call with these settings finds nothing changed
            _write_config(folder, settings)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        _write_config(folder, settings)
    return folder


def compare(before: Mapping, now: Mapping, prefix: str = "") -> dict[str, tuple]:
    """Settings that differ, by dotted name: (before, now); None where one side has none."""
    differences = {}
    for name in sorted({*before, *now}):
        a, b = before.get(name), now.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            differences |= compare(a, b, f"{prefix}{name}.")
        elif a != b:
            differences[prefix + name] = (a, b)
    return differences


def _show(differences: dict[str, tuple]) -> str:
    def said(value: object) -> str:
        return "not there" if value is None else repr(value)

    return "\n".join(f"  {name}: {said(before)} before, {said(now)} now" for name, (before, now) in differences.items())


def rebuild(config: type, saved: Mapping, where: Path) -> object:
    """A config as a run saved it.

    Raises:
        RunError: the run was trained by a version of the kit whose config has other settings, which would then be guessed,
            or a setting's value is refused.
    """
    names = {field.name for field in dataclasses.fields(config)}
    if names != saved.keys():
        missing, unknown = sorted(names - saved.keys()), sorted(saved.keys() - names)
        raise RunError(
            f"{where}: trained by another version of the kit: its {config.__name__} lacks {missing or 'nothing'} and has "
            f"{unknown or 'nothing'} that this version does not know. Use that version, or train again."
        )
    try:
        return config(**{name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()})
    except ValueError as error:
        raise RunError(f"{where}: {error}") from error


def find_run(work: Path, name: str, is_demo: bool, bundles: Sequence[Path] = ()) -> Path:
    """The folder of a trained run: the named one, else that of a mounted bundle, else the one last written to.

    Args:
        work: the work folder.
        name: a run's name in it or in a bundle, or empty. Without a name a bundle's run is taken whatever its data was, for
            who mounted the bundle chose it; in the work folder debug runs count only on the demo, and runs of the demo
            never for a real competition.
        is_demo: whether the data is the demo's.
        bundles: folders of mounted bundles, as `mounts.bundles` finds them, each with `runs/<name>/`.

    Raises:
        RunError: there is none, or several bundles and no name; the message lists those there are; or the one to take has a
            damaged `config.json`. Where none is named, one in the work folder with a damaged one is passed over, with a
            line that says so.
    """
    bundled = [run for bundle in bundles for run in _trained_runs(bundle)]
    if name:
        return _named(work, name, bundled, bundles)
    if len(bundled) > 1:
        listed = "".join(f"\n  {run}" for run in bundled)
        raise RunError(f"{len(bundled)} runs are mounted: name one with run=, or detach the other data sets:{listed}")
    if bundled:
        read_config(bundled[0], *KIND)
        return bundled[0]
    for bundle in bundles:
        print(f"NOTE: {bundle}: no run with a trained fold is in its runs/: upload this data set anew")
    readable = {}
    for folder in _trained_runs(work):
        try:
            readable[folder] = read_config(folder, *KIND)
        except RunError as error:
            print(f"NOTE: run {folder.name} is passed over: {error}")
    fitting = [p for p, found in readable.items() if is_demo == found["is_demo"] and (is_demo or not found["debug"])]
    if not fitting:
        names = ", ".join(p.name for p in readable)
        others = f" Runs of another kind of data, to be named with run=: {names}." if names else ""
        what = "demo" if is_demo else "real competition"
        raise RunError(
            f"{work / 'runs'}: no run trained on a {what} yet.{others} `papermill 03_train.ipynb` makes one."
        )
    # One with a summary before one that was killed in its first epoch; of several, the one last written to.
    return max(fitting, key=lambda p: ((p / "summary.json").exists(), _last_written(p)))


def _named(work: Path, name: str, bundled: Sequence[Path], bundles: Sequence[Path]) -> Path:
    """The run of a name in the work folder, else among those of the bundles."""
    own = _trained_runs(work)
    found = [run for run in own if run.name == name] or [run for run in bundled if run.name == name]
    if not found:
        folders = " or ".join(str(folder / "runs" / name) for folder in (work, *bundles))
        listed = ", ".join(run.name for run in (*own, *bundled)) or "none"
        raise RunError(f"{folders}: no run with a trained fold here; runs there are: {listed}. 03_train makes one.")
    if len(found) > 1:
        listed = "".join(f"\n  {run}" for run in found)
        raise RunError(f"run {name} is mounted {len(found)} times: detach all but one of these data sets:{listed}")
    read_config(found[0], *KIND)
    return found[0]


def _trained_runs(folder: Path) -> list[Path]:
    """The runs in a work folder or a bundle that have a fold with weights."""
    return sorted(path.parent for path in (folder / "runs").glob("*/config.json") if begun_folds(path.parent))


def _last_written(run: Path) -> float:
    return max((folder / "model.json").stat().st_mtime for folder in begun_folds(run).values())


def differences_in_kind(run: Path, is_demo: bool) -> str:
    """A sentence on a run that was not trained for this kind of data: on the demo or not, on a few patients; else ""."""
    settings, notes = read_config(run, *KIND), []
    if settings["is_demo"] != is_demo:
        trained, here = ("the demo", "real data") if settings["is_demo"] else ("real data", "the demo")
        notes.append(f"it was trained on {trained}, and this is {here}")
    if settings["debug"]:
        notes.append("it was trained on a few patients, with debug")
    return f"NOTE on run {run.name}: {'; '.join(notes)}." if notes else ""


def check_settings(run: Path, **now: object) -> None:
    """Stops (RunError) where parts of the settings (`train=...`, a config or plain value) are not those of `config.json`:
    in a notebook, a parameter was changed and the cell that opens the run was not run again."""
    plain, before = _plain(**now), read_config(run)
    differences = compare({name: before[name] for name in plain}, plain)
    if differences:
        raise RunError(
            f"{run}: not the settings that this run was opened with:\n{_show(differences)}\n"
            "Run the cell with open_run again: it takes them into this run, or begins another."
        )


def _write_config(folder: Path, settings: dict) -> None:
    write_json(folder / "config.json", {"settings": settings, "versions": versions(), "git": git_revision()})
