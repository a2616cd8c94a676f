"""rsnakit.batches: every file comes once, in order, and one that kills its process is named."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from rsnakit.dicom import DicomError

SHAPE = (2, 3)


def for_each_batch(*arguments) -> None:
    """Imported only here: processes that are begun anew for a file import this module, and need no torch."""
    from rsnakit import batches

    batches.for_each_batch(*arguments)


def number(path: str) -> np.ndarray:
    """A file's image: its number in every pixel; files that end in 7 can't be read."""
    if path.endswith("7"):
        raise DicomError(path, "cut short")
    return np.full(SHAPE, int(Path(path).name), np.uint16)


def number_or_die(path: str) -> np.ndarray:
    if path.endswith("13"):
        os.kill(os.getpid(), signal.SIGKILL)  # as a decoder's crash does
    return number(path)


def collect(read, count: int, batch_size: int, n_jobs: int) -> dict[int, tuple]:
    found = {}

    def use(batch: dict) -> None:
        assert batch["image"].shape == (len(batch["item"]), 1, *SHAPE)
        for item, image, status, reason in zip(
            batch["item"], batch["image"], batch["status"], batch["reason"], strict=True
        ):
            assert item not in found
            found[int(item)] = (round(float(image.max()) * 4095), status, reason)

    for_each_batch([Path("folder") / str(i) for i in range(count)], read, SHAPE, use, batch_size, n_jobs)
    return found


@pytest.mark.parametrize(("count", "batch_size", "n_jobs"), [(23, 4, 0), (23, 4, 2), (5, 8, 2), (0, 4, 0)])
def test_every_file_comes_once(count, batch_size, n_jobs):
    found = collect(number, count, batch_size, n_jobs)
    assert sorted(found) == list(range(count))
    for item, (value, status, reason) in found.items():
        expected = (0, "failed", "cut short") if item % 10 == 7 else (item, "ok", "")
        assert (value, status, reason) == expected


def test_a_file_that_kills_its_process_costs_itself_alone():  # D17
    found = collect(number_or_die, 60, 4, 2)
    assert sorted(found) == list(range(60))
    assert found[13][1] == "failed" and "killed" in found[13][2]
    assert all(found[item] == (item, "ok", "") for item in found if item % 10 != 7 and item != 13)


def test_what_the_caller_raises_comes_through():
    def use(batch: dict) -> None:
        raise RuntimeError("no memory on the GPU")

    with pytest.raises(RuntimeError, match="no memory"):
        for_each_batch(["1", "2"], number, SHAPE, use, 1, 0)
