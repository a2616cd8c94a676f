"""Files as batches of prepared images, read on all cores; a file that kills its process, or hangs it, costs itself alone."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from rsnakit.reading import Files, over_files
from rsnakit.workers import ProcessDied

LATE_S = 5  # what is decoded waits no longer for a file that is slow, or hangs


def in_batches(
    paths: Sequence[Path | str],
    read: Callable[[str], np.ndarray],
    shape: tuple[int, int],
    batch_size: int,
    n_jobs: int,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[dict]:
    """Reads files, and yields them in batches.

    Nothing is read ahead but while the next batch is asked for, and then no more than the batches of the `reading.IN_HAND`
    files that each process has been given: memory stays flat, however many files there are. A file over which a process dies
    or hangs (`reading.HUNG_S`) is put off; the others go on, and at the end it is read once more, alone.

    Args:
        paths: the files.
        read: a file's image, (height, width) uint16 of 12 bits; can be pickled, except on Linux, where processes are forked.
            Whatever it raises costs that file.
        shape: (height, width); a file that can't be read is a black image of that shape.
        batch_size: images a batch.
        n_jobs: processes; 0 reads in this one, where a crash or a file that hangs is nobody's to catch.
        stop: asked before each file, and every few seconds while none is done; it ends where this says True.

    Yields:
        Dicts of `image` (B, 1, height, width) uint16, `item` (B,) the places in `paths`, and the lists `status` (`ok`, `blank`
        or `failed`), `reason` and `seconds`. Each file comes once, in batches of `batch_size` that follow one another in
        `paths`, and a batch comes when all its files are there: nearly in order. A file that is `LATE_S` behind the others of
        its batch holds them up no longer, and comes by itself.
    """
    files, again = Files(paths, read, shape), []
    groups, missing, since = {}, {}, {}  # by batch: samples by item; how many are to come; when the last one came,
    waited, begun = 0.0, time.monotonic()  # in seconds that were spent waiting for files, and not for whoever asks
    with contextlib.closing(over_files(files, range(len(files)), n_jobs, stop)) as found:
        for each in found:
            waited += time.monotonic() - begun
            if each is not None:
                number = each[0] // batch_size
                _add(groups.setdefault(number, {}), again, *each)
                missing[number] = missing.get(number, min(batch_size, len(files) - number * batch_size)) - 1
                since[number] = waited
            for number in [number for number in groups if not missing[number] or waited - since[number] > LATE_S]:
                if group := groups.pop(number):
                    yield _collate(group)
            begun = time.monotonic()
    with contextlib.closing(over_files(files, again, min(n_jobs, 1), stop)) as found:
        for item, sample in filter(None, found):
            if isinstance(sample, ProcessDied):
                sample = files.failed(ProcessDied(f"{sample}, twice"))
            yield _collate({item: sample})


def _add(group: dict[int, dict], again: list[int], item: int, sample: dict | ProcessDied) -> None:
    if isinstance(sample, ProcessDied):
        again.append(item)
    else:
        group[item] = sample


def _collate(samples: dict[int, dict]) -> dict:
    """Samples by item as a batch, in their order."""
    items = sorted(samples)
    batch = {name: [samples[item][name] for item in items] for name in ("status", "reason", "seconds")}
    return {**batch, "image": np.stack([samples[item]["image"] for item in items])[:, None], "item": np.array(items)}
