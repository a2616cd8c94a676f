"""The checkpoint that training goes on from: written whole, read back with plain values only."""

import logging
import pickle
import zipfile
from pathlib import Path

import torch

from rsnakit.files import replacing

NAMES = ("last.pt", "previous.pt")  # the newest, and the one before in case the newest does not load


def save(folder: Path, state: dict) -> None:
    """Writes a state of tensors and plain Python values to `last.pt`; the one before stays as `previous.pt`."""
    newest, before = (folder / name for name in NAMES)
    with replacing(newest) as temporary:
        torch.save(state, temporary)
        if newest.exists():
            newest.replace(before)  # a kill between this and the next rename leaves `previous.pt`, which is whole


def load(folder: Path) -> dict | None:
    """The newest state that loads, or None where there is none.

    Raises:
        RuntimeError: there are checkpoints and none can be read; going on would silently begin anew.
    """
    there = [folder / name for name in NAMES if (folder / name).exists()]
    for path in there:
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, OSError, EOFError, KeyError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
            logging.getLogger(__name__).warning("%s cannot be read (%s); the one before is tried", path, error)
    if there:
        names = ", ".join(path.name for path in there)
        raise RuntimeError(f"{folder}: none of {names} can be read. Delete the folder to begin anew.")
    return None
