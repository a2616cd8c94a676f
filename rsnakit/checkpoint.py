"""The checkpoint that training goes on from: written whole, read back with plain values only.

`last.pt` is the newest, `previous.pt` the one before, `previous2.pt` the one before that. A kill at any moment leaves one
that loads and is at most one save old.
"""

import contextlib
import logging
import os
import pickle
import random
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from rsnakit.files import free_mb, replacing

DAMAGE = (RuntimeError, OSError, EOFError, KeyError, ValueError, pickle.UnpicklingError, zipfile.BadZipFile)


class CheckpointError(RuntimeError):
    """No checkpoint can be gone on with although there are some; the message says why and what to do."""


def save(folder: Path, state: dict, keep_last: int = 2) -> None:
    """Writes a state of tensors and plain Python values to `last.pt`, and keeps the `keep_last - 1` that were written before.

    Raises:
        OSError: it cannot be written, of a full disk for one; the message says how much was to be written and how much is
            free. Nothing half-written stays, and the checkpoints there were are whole.
        TypeError: `load` would refuse a value of the state.
    """
    folder = Path(folder)
    newest = folder / _name(0)
    try:
        with replacing(newest) as temporary:
            _write(state, temporary)
            # From the oldest on, and only up to the first gap, which a kill between two of these renames leaves.
            places = range(keep_last - 1)
            moved = next((k for k in places if not (folder / _name(k)).exists()), keep_last - 1)
            for place in reversed(range(moved)):
                (folder / _name(place)).replace(folder / _name(place + 1))
    except OSError as error:
        before = "the checkpoint before is whole" if list_all(folder) else "there was none before"
        raise OSError(
            error.errno,
            f"{newest} cannot be written: {os.strerror(error.errno or 0)}. It takes {_bytes_of(state) / 1e6:,.1f} MB beside "
            f"those there are, and {free_mb(folder)} MB are free. Nothing half-written stays; {before}. Make room, or keep "
            "fewer checkpoints (keep_last), and give the same command again.",
        ) from error
    for path in list_all(folder)[keep_last:]:
        path.unlink()
    (folder / "damaged.pt").unlink(missing_ok=True)


def load(folder: Path) -> dict | None:
    """The newest state that loads, or None where there is none.

    A damaged file is told by the checksums in it, and passed over with a warning; where an older one loads instead it is
    moved out of the way, to `damaged.pt`, so that the next save does not put it in place of the one that is whole.

    Raises:
        CheckpointError: there are checkpoints and none can be read, or one holds what is not read for safety's sake; going
            on would silently begin anew.
    """
    folder, damaged = Path(folder), []
    for path in list_all(folder):
        try:
            state = _read(path)
        except (CheckpointError, PermissionError):
            raise
        except DAMAGE as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            logging.getLogger(__name__).warning("%s cannot be read (%s); the one before is tried", path, reason)
            damaged.append(path)
            continue
        for bad in damaged:
            with contextlib.suppress(FileNotFoundError):  # another rank was quicker
                bad.replace(folder / "damaged.pt")
        return state
    if damaged:
        names = ", ".join(path.name for path in damaged)
        raise CheckpointError(f"{folder}: none of {names} can be read. Delete the folder to begin anew.")
    return None


def list_all(folder: Path) -> list[Path]:
    """The checkpoints of a folder, newest first."""
    found = {re.fullmatch(r"previous(\d*)\.pt", path.name): path for path in folder.glob("previous*.pt")}
    older = sorted((int(match[1] or 1), path) for match, path in found.items() if match)
    return [path for path in (folder / _name(0), *(path for _, path in older)) if path.exists()]


def epochs_done(folder: Path) -> int:
    """Whole epochs that the newest checkpoint knows of; 0 where none can be read. Nothing is moved, tensors are not read."""
    for path in list_all(folder):
        with contextlib.suppress(TypeError, *DAMAGE):
            return int(torch.load(path, map_location="cpu", weights_only=True, mmap=True)["epoch"])
    return 0


def rng_state(device: str) -> dict:
    """Where the random numbers of torch (CPU and `device`), numpy's global generator and `random` stand, in plain values."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    version, numbers, next_gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": (str(name), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)),
        "random": (version, torch.tensor(numbers), next_gauss),
    }
    kind = torch.device(device).type
    if kind == "cuda":
        state[kind] = torch.cuda.get_rng_state(device)
    elif kind == "mps":
        state[kind] = torch.mps.get_rng_state()
    return state


def set_rng_state(state: dict, device: str) -> None:
    """Puts the generators back to where `rng_state` found them. One that went on another kind of device has nothing for this
    one: that generator stays as it is."""
    torch.set_rng_state(state["torch"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    version, numbers, next_gauss = state["random"]
    random.setstate((version, tuple(numbers.tolist()), next_gauss))
    kind = torch.device(device).type
    if kind == "cuda" and kind in state:
        torch.cuda.set_rng_state(state[kind], device)
    elif kind == "mps" and kind in state:
        torch.mps.set_rng_state(state[kind])


def _name(place: int) -> str:
    """Of the newest (0), the one before (1) and so on."""
    return ("last.pt", "previous.pt")[place] if place < 2 else f"previous{place}.pt"


def _write(state: dict, path: Path) -> None:
    with open(path, "wb") as f:
        try:
            torch.save(state, f)
        except RuntimeError as error:  # torch's zip writer trips over what the file told it
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        f.flush()
        os.fsync(f.fileno())
    refused = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    if refused:
        raise TypeError(f"a checkpoint holds tensors and plain Python values only; in this one are {_listed(refused)}")


def _read(path: Path) -> dict:
    with zipfile.ZipFile(path) as archive:  # torch does not look at the checksums that it writes
        bad = archive.testzip()
    if bad:
        raise zipfile.BadZipFile(f"{bad} does not match its checksum")
    refused = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    if refused:
        raise CheckpointError(
            f"{path}: is whole, but holds {_listed(refused)}, and only tensors and plain Python values are read, since others "
            "may run code. It was not written by this version of the kit; delete the folder to begin anew."
        )
    return torch.load(path, map_location="cpu", weights_only=True)


def _listed(names: list[str]) -> str:
    return ", ".join(sorted(names))


def _bytes_of(state: object) -> int:
    """Of the storages that a state's tensors lie in, each once."""
    storages = [tensor.untyped_storage() for tensor in _tensors(state)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _tensors(state: object) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors(value)
