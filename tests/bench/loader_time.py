"""How many samples a second the training loader gives, by image size, augmentation and number of workers.

    python tests/bench/loader_time.py [--out work/bench] [--samples 240] [--rounds 5]

The loader is the one that training uses: balanced batches of 16 from a store of drawn breasts, which lies in the page cache.
0 workers load in this process, on one thread; 2 are two processes beside it, started before the clock. Both take turns; a
ratio is of one round, and its median, smallest and largest over the rounds are told. Takes about three minutes on two cores.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import build_time
import cv2
import pandas as pd
import samples
import table
import torch
import turns
from torch.utils.data import DataLoader

from rsnakit import augment, data, preprocess
from rsnakit.preprocess import PreprocessConfig
from rsnakit.samplers import BalancedSampler, StepBatches
from rsnakit.store import Store

SIZES = ((256, 128), (1024, 512))
AUGMENTS = ("none", "light", "heavy", "first_place")
WORKERS = (0, 2)
DRAWN, BATCH = 8, 16  # images in the store; samples in a batch


def make_store(folder: Path, size: tuple[int, int]) -> Store:
    """A store of drawn breasts that are somewhat larger than what they are reduced to."""
    (folder / "files").mkdir(parents=True)
    paths = samples.write_drawn(folder / "files", DRAWN, (size[0] * 5 // 4, size[1] * 2))
    config = PreprocessConfig(height=size[0], width=size[1])
    return preprocess.build_store(build_time.images_of(paths, DRAWN), config, folder / "store", n_jobs=1)


def loader_of(store: Store, name: str, workers: int, count: int) -> tuple[DataLoader, BalancedSampler]:
    """Batches of an epoch of `count` samples, one in four positive, and the sampler that has to be told the epoch."""
    ids = [str(number % DRAWN) for number in range(count)]
    images = pd.DataFrame({"image_id": ids, "cancer": [int(number % 4 == 0) for number in range(count)]})
    dataset = data.MammogramDataset(images, store, augment.build(name, *store.shape))
    sampler = BalancedSampler(dataset.labels, 3.0, BATCH)
    loader = DataLoader(
        dataset, batch_sampler=StepBatches(sampler), num_workers=workers, collate_fn=data.collate,
        worker_init_fn=data.worker_init, persistent_workers=workers > 0,
    )  # fmt: skip
    return loader, sampler


def rate(loader: DataLoader, sampler: BalancedSampler, epoch: int) -> float:
    """Samples a second over an epoch."""
    sampler.set_epoch(epoch)
    begun = time.perf_counter()
    count = sum(len(batch["item"]) for batch in loader)
    return count / (time.perf_counter() - begun)


def measure(store: Store, name: str, count: int, rounds: int) -> tuple[dict, dict]:
    """A row for one size and augmentation, and the rates of the rounds by number of workers."""
    loaders = {workers: loader_of(store, name, workers, count) for workers in WORKERS}
    rates: dict[int, list[float]] = {workers: [] for workers in WORKERS}
    for epoch in range(rounds + 1):
        for workers in WORKERS[:: 1 if epoch % 2 else -1]:
            found = rate(*loaders[workers], epoch)
            if epoch:  # the first starts the workers
                rates[workers].append(found)
    gain = turns.ratio(rates[2], rates[0])
    row = {
        "size": "x".join(map(str, store.shape)),
        "augment": name,
        "samples/s, 0 workers": statistics.median(rates[0]),
        "2 workers": statistics.median(rates[2]),
        "ratio": gain.median,
        "from": gain.low,
        "to": gain.high,
    }
    return row, rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=table.OUT)
    parser.add_argument("--samples", type=int, default=240)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    cv2.setNumThreads(1)
    torch.set_num_threads(1)
    rows, details = [], {}
    with tempfile.TemporaryDirectory() as temporary:
        for size in SIZES:
            store = make_store(Path(temporary) / str(size[0]), size)
            for name in AUGMENTS:
                row, rates = measure(store, name, options.samples, options.rounds)
                rows.append(row)
                details[f"{row['size']}, {name}"] = rates
    table.save(options.out, "loader_time", {f"Training loader, batches of {BATCH}": rows}, details)


if __name__ == "__main__":
    main()
