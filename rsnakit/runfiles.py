"""What a run's folder holds, read and checked: settings, summary, which folds are finished, their histories and scores."""

import re
from pathlib import Path

import pandas as pd

from rsnakit import checkpoint, oof
from rsnakit.files import read_json

WEIGHTS = ("model.json", "best.safetensors")


class RunError(ValueError):
    """A run that cannot be gone on with, or is not there; the message says what differs and what to do."""


def trained_folds(run: Path) -> dict[int, Path]:
    """The folders of the folds whose weights are to be used, by fold number: those that are finished, or, as long as none
    is, those that were begun."""
    begun, unfinished = begun_folds(run), unfinished_folds(run)
    return {fold: folder for fold, folder in begun.items() if fold not in unfinished} or begun


def begun_folds(run: Path) -> dict[int, Path]:
    """The folders of all folds that have weights, by fold number."""
    folders = _fold_folders(run)
    return {fold: folder for fold, folder in folders.items() if all((folder / name).exists() for name in WEIGHTS)}


def _fold_folders(run: Path) -> dict[int, Path]:
    named = {re.fullmatch(r"fold(\d+)", folder.name): folder for folder in run.glob("fold*")}
    return {fold: folder for fold, folder in sorted((int(name[1]), folder) for name, folder in named.items() if name)}


def unfinished_folds(run: Path) -> dict[int, str]:
    """Folds that are not finished, with what they have: `epoch 1 of 3`, 0 where training was stopped within the first one and
    left a checkpoint; or with what is gone of a fold that had weights."""
    planned = read_config(run, "train")["train"]["epochs"]
    states = {fold: _state(folder, planned) for fold, folder in _fold_folders(run).items()}
    return {fold: state for fold, state in states.items() if state}


def _state(folder: Path, planned: int) -> str:
    """What an unfinished fold has, in words; "" where it is finished, or was never begun."""
    there = {name for name in (*WEIGHTS, "oof.csv", "last.pt") if (folder / name).exists()}
    history = read_history(folder)
    if gone := [name for name in WEIGHTS if name not in there]:
        # Written one after the other: best.safetensors, model.json, oof.csv, history.csv.
        if history is not None or there & {"model.json", "oof.csv"}:
            return f"{' and '.join(gone)} {'is' if len(gone) == 1 else 'are'} not there"
        return f"epoch 0 of {planned}" if "last.pt" in there else ""
    if history is not None:
        return f"epoch {len(history)} of {planned}" if len(history) < planned else ""
    # A kill may have come between the weights and the first history, or it was lost. The weights may be an earlier epoch's.
    done = max(read_model(folder)["epoch"], checkpoint.epochs_done(folder))
    return f"epoch {done} of {planned}, history.csv is not there" if done < planned else ""


def read_history(folder: Path) -> pd.DataFrame | None:
    """`history.csv` of a fold's folder, a row an epoch; None where there is none.

    Raises:
        RunError: it cannot be read.
    """
    path = folder / "history.csv"
    try:
        return pd.read_csv(path) if path.exists() else None
    except ValueError as error:  # pandas' own kinds of it
        raise RunError(
            f"{path}: cannot be read as csv ({str(error).strip()}). Delete it: it shows how training went, and "
            "no score needs it."
        ) from error


def read_config(run: Path, *needed: str) -> dict:
    """The settings a run was trained with.

    Args:
        run: its folder.
        needed: names of settings that have to be among them.

    Raises:
        RunError: `config.json` is not there, damaged, or lacks one of those.
    """
    path, advice = run / "config.json", "Copy the run here anew, delete it, or name another one with run=."
    try:
        found = read_json(path)
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}. {advice}") from error
    except ValueError as error:
        raise RunError(f"{error}. {advice}") from error
    settings = found.get("settings") if isinstance(found, dict) else None
    missing = [name for name in needed if name not in settings] if isinstance(settings, dict) else ["settings"]
    if missing:
        raise RunError(f"{path}: has no {', '.join(missing)}, which every run of the kit writes there. {advice}")
    return settings


def read_model(folder: Path) -> dict:
    """What `model.json` of a fold's folder says of its weights.

    Raises:
        RunError: it is damaged, or says nothing of the model.
    """
    path = folder / "model.json"
    try:
        found = read_json(path)
    except ValueError as error:
        raise RunError(str(error)) from error
    if not isinstance(found, dict) or not isinstance(found.get("model"), dict):
        raise RunError(f"{path}: has no settings under the name 'model', as models.save_model writes them")
    return found


def read_summary(run: Path) -> dict | None:
    """What `summary.json` of a run says; None where there is none."""
    path = run / "summary.json"
    return read_json(path) if path.exists() else None


def read_oof(run: Path) -> pd.DataFrame:
    """Out-of-fold scores of the run's folds: patient_id, laterality, image_id (empty where a row is a breast), fold, cancer,
    score.

    Raises:
        RunError: a fold's oof.csv is not as `read_fold_oof` expects it, or a patient is in those of two folds.
    """
    frames = [read_fold_oof(folder) for folder in trained_folds(run).values()]
    rows = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=oof.OOF_COLUMNS)
    folds = rows.groupby("patient_id")["fold"].unique()
    if (of_two := folds[folds.str.len() > 1]).size:
        raise RunError(
            f"{run}: {len(of_two)} patients are in oof.csv of several folds, {of_two.index[0]} in those of folds "
            f"{', '.join(map(str, of_two.iloc[0]))}: these folds are of several trainings. Delete those that are another's, "
            "and train them again."
        )
    return rows


def read_fold_oof(folder: Path) -> pd.DataFrame:
    """Out-of-fold scores of a fold's folder (see `oof.read`).

    Raises:
        RunError: oof.csv is not there, not whole, or a value in it is not as training writes it.
    """
    path, number = folder / "oof.csv", int(folder.name.removeprefix("fold"))
    try:
        return oof.read(path, number, read_model(folder).get("oof_rows"))
    except ValueError as error:
        raise RunError(f"{path}: {error}. Delete {folder} and train this fold again.") from error
