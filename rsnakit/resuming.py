"""Whether a fold's training can be gone on with from what is in its folder; else it says why."""

import hashlib
from pathlib import Path

import pandas as pd

from rsnakit import data, distributed, runs
from rsnakit.store import Store

PARTS = {"epoch", "updates", "processors", "settings", "fold", "seen"}  # what a checkpoint has to say of itself
KEPT = ("best.safetensors", "model.json", "oof.csv")


def seen(store: Store, train: data.Side, valid: data.Side) -> dict:
    """What a checkpoint says of the images it was trained and scored on: how they are stored, how many there are, and which."""
    ids = {"to train on": train.images["image_id"], "to score": valid.images["image_id"]}
    which = {f"images {side}": hashlib.sha256(",".join(of).encode()).hexdigest()[:8] for side, of in ids.items()}
    return {
        "store_format": store.manifest["format"],
        **{f"number {side}": len(of) for side, of in ids.items()},
        **which,
    }


def check(state: dict | None, folder: Path, fold: int, settings: dict, seen: dict) -> None:
    """Refuses what cannot be gone on with: a checkpoint of another run, fold or set of images, or that not all processors see,
    and a fold whose checkpoints or weights are gone. Every processor has to call this.

    Args:
        state: as `checkpoint.load` gives it.
        folder: of the fold.
        settings: of the run (`runs.read_config`).
        seen: see `seen`.

    Raises:
        rsnakit.runs.RunError: what differs or is missing, and what to do.
    """
    path = folder / "last.pt"
    if state is not None and not (isinstance(state, dict) and state.keys() >= PARTS):
        raise runs.RunError(
            f"{path}: not written by this version of the kit. Delete it to go on from one before it, if there is one, or "
            f"{folder} to begin anew."
        )
    done = state and [state["processors"][0]["tally"][name] for name in ("taken", "skipped")]
    found = distributed.gather(state and (state["epoch"], state["updates"], done))
    if any(other != found[0] for other in found):
        raise runs.RunError(
            f"{folder}: the processors see different checkpoints here; all machines have to share this folder"
        )
    there = {name for name in KEPT if (folder / name).exists()}
    if state is None:
        # The first epoch's weights may be there already: a kill may come between them and the first checkpoint.
        epochs = len(pd.read_csv(folder / "history.csv")) if (folder / "history.csv").exists() else 0
        if epochs > 1 or (len(there) == 3 and runs.read_model(folder)["epoch"] > 1):
            raise runs.RunError(
                f"{folder}: there are weights of a training, but no last.pt to go on from. Give another run or seed, or delete "
                "the folder to train it anew."
            )
        return
    differences = runs.compare(
        {**state["settings"], "fold": state["fold"], **state["seen"]}, {**settings, "fold": fold, **seen}
    )
    differences.pop(runs.MAY_GROW, None)
    if differences:
        names = ", ".join(f"{name}: {before!r}, not {now!r}" for name, (before, now) in differences.items())
        raise runs.RunError(
            f"{path}: a checkpoint of another run, fold or set of images ({names}). Delete {folder} to begin anew."
        )
    if state["epoch"] and len(there) < 3:
        missing = [name for name in KEPT if name not in there]
        raise runs.RunError(
            f"{folder}: at epoch {state['epoch']}, but without {', '.join(missing)}. Delete it to train it anew."
        )
