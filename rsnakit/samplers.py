"""In which order items, images or breasts, come in an epoch."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler


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
