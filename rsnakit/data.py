"""Datasets and their batches: what is trained on. Tables and folds are those of `tables` and `folds`, the order is that of
`samplers`."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import cv2
import numpy as np
import pandas as pd
import torch
from torch.utils.data import Dataset, default_collate, get_worker_info

from rsnakit.folds import check_folds, count_folds, debug_subset, make_folds
from rsnakit.samplers import BalancedSampler
from rsnakit.shared import Lent, Pool
from rsnakit.store import Store
from rsnakit.tables import TableError, fingerprint, load_table
from rsnakit.targets import target_values, view_ids

__all__ = [
    "BalancedSampler", "MammogramDataset", "Side", "TableError", "check_folds", "collate", "count_folds", "debug_subset",
    "fingerprint", "grouped", "load_table", "make_folds", "per_breast", "sample_seed", "side", "usable", "worker_init",
]  # fmt: skip

UNITS = ("image", "breast")
MEMORY = Pool()  # of this process, where it is a loader's worker
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
OF_VIEWS = ("image", "view_mask", "view_id")  # what a breast has one of for each view, and a batch pads


class MammogramDataset(Dataset):
    """Images of a store, or breasts seen in several of them, with their labels, for a loader; float32 in [0, 1].

    An item is asked for by its number, or by (number, epoch, position) as the samplers give it. Which views are drawn, and
    augmentation, depend on seed, epoch and position alone: the same with any number of workers, and another each time an
    item comes up.

    Args:
        table: as `load_table` gives it; without a column `cancer` the labels are NaN.
        store: the store that holds its images. Rows whose image has no pixels must be dropped before (`usable`).
        augment: (H, W) float32 and a seed to (H, W) float32, as `augment.build` makes it, or None. Each view has its own seed.
        unit: `image`: an item is a row of the table; `breast`: one is a breast, in first-seen order.
        seed: of the run.
        aux: names of auxiliary targets (`targets.AUXILIARY`) that come with each item.
        draw: of a breast, take one view of each kind at random, as training does; else all its images come, in their order.

    Attributes:
        labels: (N,) float32, `cancer` of each item.

    Raises:
        ValueError: another unit, or an auxiliary target that the table has no column for.
        rsnakit.store.StoreError: an image is not in the store.
    """

    def __init__(
        self,
        table: pd.DataFrame,
        store: Store,
        augment: Callable[[np.ndarray, int], np.ndarray] | None = None,
        unit: str = "image",
        seed: int = 0,
        aux: Sequence[str] = (),
        draw: bool = False,
    ) -> None:
        if unit not in UNITS:
            raise ValueError(f"unit {unit!r}: expected one of {', '.join(UNITS)}")
        # Arrays, not frames: Python objects that workers touch are copied page by page, and memory climbs with the epoch.
        self.image_ids = np.array(table["image_id"].tolist(), dtype=np.str_)
        self.rows = store.rows_of(self.image_ids.tolist())
        self.labels = (
            table["cancer"].to_numpy(np.float32) if "cancer" in table else np.full(len(table), np.nan, np.float32)
        )
        self.aux = tuple(aux)
        self.targets = np.stack([target_values(table, name) for name in aux]) if aux else np.zeros((0, len(table)))
        self.members, self.view_ids = None, None
        if unit == "breast":
            codes, _ = pd.factorize(table["breast_id"])
            self.members, self.view_ids = grouped(codes), view_ids(table["view"])
            self.labels = self.labels[self.members[:, 0]]
            self.targets = _one_a_group(self.targets, codes)
        self.store = store
        self.augment = augment
        self.seed = seed
        self.draw = draw

    def __len__(self) -> int:
        return len(self.labels)

    def __getstate__(self) -> dict:
        # A spawned worker opens the store itself: its index is not sent, and is by then perhaps a longer one.
        return {**self.__dict__, "store": self.store.path, "rows": None}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.store = Store(self.store)
        self.rows = self.store.rows_of(self.image_ids.tolist())

    def __getitem__(self, item: int | tuple[int, int, int]) -> dict[str, torch.Tensor]:
        """An item as tensors.

        Returns:
            `image` (1, H, W) float32, `cancer` () float32, `item` () int64, its number, and each auxiliary target () float32
            under its name, a class number or NaN. Of a breast, `image` is (V, 1, H, W), and `view_mask` (V,) bool, all True,
            and `view_id` (V,) int64 come with it.
        """
        return self._samples([item], lend=False)[0]

    def __getitems__(self, items: Sequence[int | tuple[int, int, int]]) -> "Samples":
        """Several items, as a loader asks for a batch; their images lie in one tensor, where `collate` finds them."""
        # Elsewhere than on Linux a GPU may be reading still what the parent has let go of (MPS: it copies later).
        return self._samples(items, lend=get_worker_info() is not None and sys.platform == "linux")

    def _samples(self, items: Sequence[int | tuple[int, int, int]], lend: bool) -> "Samples":
        """Several items; `lend`: their images lie in memory that goes to the parent."""
        drawn = [self._draw(item) for item in items]
        most = max(len(images) for images, _ in drawn)
        shape = len(items), most, 1, *self.store.shape
        # New memory is slow, as the system has to bring it page by page: images are put where they stay.
        lent = MEMORY.lend(shape) if lend else None
        batch = torch.from_numpy(np.empty(shape, np.float32)) if lent is None else lent.values
        for place, (images, _) in zip(batch, drawn, strict=True):
            for view, (row, seed) in zip(place, images, strict=False):
                self._load(row, seed, view[0].numpy())
            place[len(images) :] = 0
        if self.members is None:
            batch = batch[:, 0]
            samples = [{"image": place, **labels} for place, (_, labels) in zip(batch, drawn, strict=True)]
        else:
            samples = [
                {"image": place[: len(images)], **labels} for place, (images, labels) in zip(batch, drawn, strict=True)
            ]
        return Samples(samples, batch if lent is None else lent.take(batch))

    def _draw(self, item: int | tuple[int, int, int]) -> tuple[list[tuple[int, int]], dict[str, torch.Tensor]]:
        """What an item is made of: (row of the table, seed of its augmentation) of each image, and all but the images."""
        number, epoch, position = item if isinstance(item, tuple) else (item, 0, 0)
        labels = {"cancer": torch.tensor(self.labels[number]), "item": torch.tensor(int(number))}
        for name, values in zip(self.aux, self.targets, strict=True):
            labels[name] = torch.tensor(values[number], dtype=torch.float32)
        seed = sample_seed(self.seed, epoch, position)
        if self.members is None:
            return [(number, seed)], labels
        rng = np.random.default_rng(seed)
        views = self._views(number, rng)
        of_views = {
            "view_mask": torch.ones(len(views), dtype=torch.bool), "view_id": torch.from_numpy(self.view_ids[views])
        }  # fmt: skip
        return [(row, int(rng.integers(2**32))) for row in views], {**of_views, **labels}

    def _views(self, number: int, rng: np.random.Generator) -> list[int]:
        """Rows of the table that show a breast: all of them, or one of each kind."""
        rows = self.members[number]
        rows = rows[rows >= 0]
        if self.draw:
            kinds = self.view_ids[rows]
            rows = [rng.choice(rows[kinds == kind]) for kind in np.unique(kinds)]
        return list(rows)

    def _load(self, row: int, seed: int, out: np.ndarray) -> None:
        """Puts the image of a row of the table, augmented, into (H, W) float32."""
        np.divide(self.store[int(self.rows[row])], np.float32(4095), out=out)
        if self.augment is not None:
            out[...] = self.augment(out, seed)


class Samples(list):
    """Samples of a batch, and `images`: the tensor (N, ...) that theirs are parts of, padded as `collate` pads, or in a worker
    what becomes of it in the parent."""

    def __init__(self, samples: list[dict[str, torch.Tensor]], images: torch.Tensor | Lent) -> None:
        super().__init__(samples)
        self.images = images


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Samples of `MammogramDataset` as a batch. Breasts are padded to as many views as the one with the most has: with zeros,
    and False in `view_mask`. What a worker makes of samples that it was asked for together has a `Lent` as its `image`, which
    arrives as a tensor."""
    images = getattr(samples, "images", None)
    if images is None:
        return _stacked(samples)
    rest = [{name: value for name, value in sample.items() if name != "image"} for sample in samples]
    return {"image": images, **_stacked(rest)}  # in one tensor already


def _stacked(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    if "view_mask" in samples[0]:
        most = max(len(sample["view_mask"]) for sample in samples)
        samples = [
            {name: _padded(value, most) if name in OF_VIEWS else value for name, value in sample.items()}
            for sample in samples
        ]
    return default_collate(samples)


def _padded(value: torch.Tensor, length: int) -> torch.Tensor:
    lacking = length - len(value)
    return torch.cat([value, value.new_zeros(lacking, *value.shape[1:])]) if lacking else value


def grouped(codes: np.ndarray) -> np.ndarray:
    """Positions of each group's members, in their order.

    Args:
        codes: (N,) group numbers, each from 0 to G - 1 at least once, as `pandas.factorize` gives them.

    Returns:
        (G, V) int64, V being the size of the largest group; -1 where a group has fewer.
    """
    counts = np.bincount(codes)
    order = np.argsort(codes, kind="stable")
    place = np.arange(len(codes)) - np.repeat(np.cumsum(counts) - counts, counts)
    members = np.full((len(counts), counts.max(initial=0)), -1, np.int64)
    members[codes[order], place] = order
    return members


def _one_a_group(values: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Values (A, N) of members as (A, G) of groups; NaN where all are missing, or those present differ."""
    groups = pd.DataFrame(values.T).groupby(codes)
    low, high = groups.min(), groups.max()
    return low.where(low == high).to_numpy(np.float32).T.copy()


def worker_init(_: int) -> None:
    """What a loader's worker begins with.

    One thread, since OpenCV's threads and forked workers lock each other up, and the workers are the parallelism. Ctrl-C,
    which in a terminal reaches every process, is the parent's to answer: it may still want batches, to end cleanly. A
    parent's handler of SIGTERM is not inherited: torch has put its own in place by now, at which a worker dies; that of
    a torchrun, which goes to the parent's whole group of processes, must therefore not reach it.
    """
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    keep_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(AttributeError, OSError):  # not on Windows
        os.setpgid(0, 0)


def keep_memory() -> None:
    """Has the C library keep what pictures were freed for the next ones: it would give them back to the system, to have their
    memory brought again page by page, which takes longer than augmenting does. For glibc; elsewhere nothing happens."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 32 << 20)
        mallopt(M_TRIM_THRESHOLD, 128 << 20)


def sample_seed(seed: int, epoch: int, position: int) -> int:
    """A seed of 32 bits for one sample, from the run's seed, the epoch and the sample's place in the epoch's order."""
    return int(np.random.SeedSequence([seed, epoch, position]).generate_state(1)[0])


def usable(table: pd.DataFrame, store: Store) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rows whose image has pixels in the store, and those without, with `status` and `reason`."""
    index = store.index.iloc[store.rows_of(table["image_id"])]
    table = table.assign(status=index["status"].to_numpy(), reason=index["reason"].to_numpy())
    ok = table["status"] == "ok"
    return table[ok].drop(columns=["status", "reason"]).reset_index(drop=True), table[~ok].reset_index(drop=True)


def per_breast(table: pd.DataFrame) -> pd.DataFrame:
    """A row a breast, in first-seen order, as `MammogramDataset(unit="breast")` numbers them: its first image's row with an
    empty image_id."""
    return table.drop_duplicates("breast_id").assign(image_id="").reset_index(drop=True)


class Side(NamedTuple):
    """What a fold is trained on, or scored on: `images` with pixels; `items`, which are these or their breasts; and `bad`,
    images without pixels, or breasts none of whose images has any."""

    images: pd.DataFrame
    items: pd.DataFrame
    bad: pd.DataFrame


def side(table: pd.DataFrame, store: Store, unit: str, what: str) -> Side:
    """The rows of one side of a fold in their parts.

    Args:
        unit: `image` or `breast`.
        what: the side's name in a message.

    Raises:
        TableError: no item with pixels is positive, or none is negative.
    """
    images, bad = usable(table, store)
    items = images
    if unit == "breast":
        items, bad = per_breast(images), per_breast(bad[~bad["breast_id"].isin(images["breast_id"])])
    positive = int(items["cancer"].sum())
    if not 0 < positive < len(items):
        raise TableError(f"{what}: {positive} of {len(items)} {unit}s with pixels are positive; both kinds are needed")
    return Side(images, items, bad)
