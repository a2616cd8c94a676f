"""Files as batches of prepared images, read by loader processes; a file that kills its process costs itself alone."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset

from rsnakit import failures, workers
from rsnakit.data import worker_init
from rsnakit.reading import Files

PREFETCH = 2  # batches that each process reads ahead


def for_each_batch(
    paths: Sequence[Path | str],
    read: Callable[[str], np.ndarray],
    shape: tuple[int, int],
    use: Callable[[dict], None],
    batch_size: int,
    n_jobs: int,
) -> None:
    """Reads files, and calls `use` with one batch after another.

    Args:
        paths: the files.
        read: a file's image, (height, width) uint16 of 12 bits; can be pickled. Whatever it raises costs that file.
        shape: (height, width); a file that can't be read is a black image of that shape.
        use: gets a dict of `image` (B, 1, height, width) float32 in [0, 1], `item` (B,) the places in `paths`, and the lists
            `status` (`ok`, `blank` or `failed`), `reason` and `seconds`. Where a process dies while it is called, it is called
            again with the same batch.
        batch_size: images a batch.
        n_jobs: processes; 0 reads in this one, where a crash is nobody's to catch.
    """
    files = Files(paths, read, shape)
    left = list(range(len(files)))
    while left:
        ahead = PREFETCH if n_jobs else None
        loader = DataLoader(
            Subset(files, left), batch_size, num_workers=n_jobs, collate_fn=_collate, worker_init_fn=worker_init,
            prefetch_factor=ahead,
        )  # fmt: skip
        try:
            for batch in loader:
                use(batch)
                left = left[len(batch["item"]) :]
        except (RuntimeError, ConnectionError, EOFError) as error:
            if not failures.death_of_worker(error):
                raise
            # One of the files under way killed its process: each is read in a process of its own, then it goes on.
            suspects = batch_size * n_jobs * (PREFETCH + 1)
            for item, found in workers.over_items(files.__getitem__, left[:suspects], max(2, n_jobs)):
                use(_collate([files.failed(item, found) if isinstance(found, workers.ProcessDied) else found]))
            left = left[suspects:]


def _collate(samples: list[dict]) -> dict:
    batch = {name: [sample[name] for sample in samples] for name in samples[0]}
    return {**batch, "image": torch.from_numpy(np.stack(batch["image"])), "item": np.array(batch["item"])}
