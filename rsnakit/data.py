"""Dataset and samplers: what is trained on, and in which order it comes. Tables and folds are those of `tables`."""

import math
from collections.abc import Callable, Iterator, Sequence

import cv2
import numpy as np
import pandas as pd
import torch
from torch.utils.data import Dataset, Sampler

from rsnakit.store import Store
from rsnakit.tables import TableError, check_folds, count_folds, debug_subset, fingerprint, load_table, make_folds

__all__ = [
    "BalancedSampler", "MammogramDataset", "TableError", "check_folds", "count_folds", "debug_subset", "fingerprint",
    "load_table", "make_folds", "one_thread", "sample_seed", "usable",
]  # fmt: skip


class MammogramDataset(Dataset):
    """Images of a store with their labels, for a loader; float32 in [0, 1].

    An item is asked for by its row in the table, or by (row, epoch, position) as the samplers give it. Augmentation is
    drawn from seed, epoch and position alone: the same with any number of workers, and another each time a row comes up.

    Args:
        table: as `load_table` gives it; without a column `cancer` the labels are NaN.
        store: the store that holds its images. Rows whose image has no pixels must be dropped before (`usable`).
        augment: (H, W) float32 and a seed to (H, W) float32, as `augment.build` makes it, or None.
        unit: `image`.
        seed: of the run.
    """

    def __init__(
        self,
        table: pd.DataFrame,
        store: Store,
        augment: Callable[[np.ndarray, int], np.ndarray] | None = None,
        unit: str = "image",
        seed: int = 0,
    ) -> None:
        if unit != "image":
            raise ValueError(f"unit {unit!r}: this data set gives single images, unit='image'")
        # Arrays, not frames: Python objects that workers touch are copied page by page, and memory climbs with the epoch.
        self.image_ids = np.array(table["image_id"].tolist(), dtype=np.str_)
        self.rows = store.rows_of(self.image_ids.tolist())
        self.labels = (
            table["cancer"].to_numpy(np.float32) if "cancer" in table else np.full(len(table), np.nan, np.float32)
        )
        self.store = store
        self.augment = augment
        self.seed = seed

    def __len__(self) -> int:
        return len(self.rows)

    def __getstate__(self) -> dict:
        # A spawned worker opens the store itself: its index is not sent, and is by then perhaps a longer one.
        return {**self.__dict__, "store": self.store.path, "rows": None}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.store = Store(self.store)
        self.rows = self.store.rows_of(self.image_ids.tolist())

    def __getitem__(self, item: int | tuple[int, int, int]) -> dict[str, torch.Tensor]:
        """`image` (1, H, W) float32, `cancer` () float32, and `item` () int64, the row in the table."""
        row, epoch, position = item if isinstance(item, tuple) else (item, 0, 0)
        image = self.store[int(self.rows[row])].astype(np.float32) / 4095
        if self.augment is not None:
            image = self.augment(image, sample_seed(self.seed, epoch, position))
        return {
            "image": torch.from_numpy(image)[None],
            "cancer": torch.tensor(self.labels[row]),
            "item": torch.tensor(int(row)),
        }


def one_thread(_: int) -> None:
    """What a loader's worker begins with: OpenCV's threads and forked workers lock each other up, and the workers are the
    parallelism."""
    cv2.setNumThreads(0)
    torch.set_num_threads(1)


def sample_seed(seed: int, epoch: int, position: int) -> int:
    """A seed of 32 bits for one sample, from the run's seed, the epoch and the sample's place in the epoch's order."""
    return int(np.random.SeedSequence([seed, epoch, position]).generate_state(1)[0])


def usable(table: pd.DataFrame, store: Store) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rows whose image has pixels in the store, and those without, with `status` and `reason`."""
    index = store.index.iloc[store.rows_of(table["image_id"])]
    table = table.assign(status=index["status"].to_numpy(), reason=index["reason"].to_numpy())
    ok = table["status"] == "ok"
    return table[ok].drop(columns=["status", "reason"]).reset_index(drop=True), table[~ok].reset_index(drop=True)


class BalancedSampler(Sampler):
    """An epoch in which every negative comes once and positives as often as a ratio says; in another order each epoch.

    Yields (row, epoch, position). Positives are spread evenly, at least `min_positives` in every batch; each is drawn as
    often as any other, give or take one. Where the ratio asks for fewer than there are, only some of them come.

    Args:
        labels: (N,) 0 or 1.
        negatives_per_positive: 7 means one positive to seven negatives; 0 takes every row once, in random order. A batch keeps
            at least `min_positives` positives and one negative, whatever this says.
        batch_size: the batches that the loader cuts the epoch into.
        min_positives: in every batch.
        seed: of the run; with the epoch (`set_epoch`) it decides the order.

    Raises:
        ValueError: a label is neither 0 nor 1, balancing is asked for and there are no positives or no negatives, or the
            batch has no room for `min_positives` and a negative.
    """

    def __init__(
        self,
        labels: Sequence[int],
        negatives_per_positive: float,
        batch_size: int,
        min_positives: int = 1,
        seed: int = 0,
    ) -> None:
        labels = np.asarray(labels)
        if not np.isin(labels, (0, 1)).all():
            raise ValueError(f"labels are {np.unique(labels)[:4].tolist()} ..., expected 0 and 1 alone")
        self.positives, self.negatives = np.flatnonzero(labels == 1), np.flatnonzero(labels == 0)
        self.balanced = negatives_per_positive > 0
        if self.balanced and not (len(self.positives) and len(self.negatives)):
            raise ValueError(
                f"balancing {len(self.positives)} positives and {len(self.negatives)} negatives: both are needed"
            )
        self.seed, self.epoch = seed, 0
        self.positives_per_batch = self._plan(negatives_per_positive, batch_size, min_positives)
        self.batch_size = batch_size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        if not self.balanced:
            return len(self.positives) + len(self.negatives)
        return int(self.positives_per_batch.sum()) + len(self.negatives)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        rng = np.random.default_rng([self.seed, self.epoch])
        rows = self._balanced_order(rng) if self.balanced else rng.permutation(np.r_[self.positives, self.negatives])
        yield from ((int(row), self.epoch, position) for position, row in enumerate(rows))

    def _plan(self, ratio: float, batch_size: int, min_positives: int) -> np.ndarray:
        """How many positives each batch gets, until the negatives are used up."""
        if not self.balanced:
            return np.zeros(0, np.int64)
        if not 0 <= min_positives < batch_size:
            raise ValueError(
                f"at least {min_positives} positives in batches of {batch_size}: a negative has to fit in too"
            )
        share, owed, left, plan = batch_size / (1 + ratio), 0.0, len(self.negatives), []
        while left > 0:
            owed += share
            n = min(batch_size - 1, max(min_positives, math.floor(owed + 1e-9)))
            owed -= n if n > min_positives else min(n, owed)
            if left < batch_size - n:  # the last batch: what the ratio still lacks over the whole epoch
                lacking = round(len(self.negatives) / ratio) - sum(plan)
                n = min(batch_size - left, max(min_positives, lacking))
            left -= batch_size - n
            plan.append(n)
        return np.array(plan)

    def _balanced_order(self, rng: np.random.Generator) -> np.ndarray:
        needed = int(self.positives_per_batch.sum())
        rounds = max(1, -(-needed // len(self.positives)))
        positives = np.concatenate([rng.permutation(self.positives) for _ in range(rounds)])[:needed]
        negatives = rng.permutation(self.negatives)
        order, taken_p, taken_n = [], 0, 0
        for n in self.positives_per_batch:
            m = min(self.batch_size - n, len(negatives) - taken_n)
            batch = np.r_[positives[taken_p : taken_p + n], negatives[taken_n : taken_n + m]]
            order.append(rng.permutation(batch))
            taken_p, taken_n = taken_p + n, taken_n + m
        return np.concatenate(order)
