"""In which order items, images or breasts, come in an epoch, and how it is cut into batches and optimiser steps."""

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from torch.utils.data import Sampler

NEGATIVE, POSITIVE, ANY, WITHIN = range(4)  # kinds of random order; each has its own numbers


class BalancedSampler(Sampler[tuple[int, int, int]]):
    """An epoch in which every negative comes once and positives as often as a ratio says; in another order each epoch.

    Yields (row, epoch, position). Negatives are one endless stream, all of them in one random order after another, and
    epochs are cut from it: none comes again before all were seen. So are positives. What an epoch contains depends on the
    seed and its number alone: a training that goes on needs no state of the sampler.

    All batches of an epoch have the same number of rows, or the last ones a row less, and positives are spread evenly over
    them. Every step has `accumulate` batches; only an epoch too small to give each batch two rows, one of them negative, is
    one step of fewer. Where batches hold two or three rows, or little more than one negative, the last step may need more
    rows to be whole: these are the next of the streams, at most 2 * accumulate.

    Args:
        labels: (N,) 0 or 1.
        negatives_per_positive: 7 means one positive to seven negatives; 0 takes every row once, in random order. A batch
            keeps at least `min_positives` positives and one negative, whatever this says.
        batch_size: rows of the largest batch, at least 2.
        min_positives: in every batch, where balanced.
        seed: of the run, not negative; with the epoch (`set_epoch`) it decides the order.
        accumulate: batches of an optimiser step, on all processors together.
        negatives_per_epoch: negatives in an epoch, where balanced; 0: each once.

    Attributes:
        steps: the rows that each batch of each step has; the same in every epoch.
        batches: the same, without steps.
        balanced: whether positives come by a ratio.

    Raises:
        ValueError: a label is neither 0 nor 1, balancing is asked for and there are no positives or no negatives, the batch
            has no room for `min_positives` and a negative, or a number is too small.
    """

    def __init__(
        self,
        labels: Sequence[int],
        negatives_per_positive: float,
        batch_size: int,
        min_positives: int = 1,
        seed: int = 0,
        accumulate: int = 1,
        negatives_per_epoch: int = 0,
    ) -> None:
        labels = np.asarray(labels)
        if not np.isin(labels, (0, 1)).all():
            raise ValueError(f"labels are {np.unique(labels)[:4].tolist()} ..., expected 0 and 1 alone")
        for name, value, low in (
            ("negatives_per_positive", negatives_per_positive, 0), ("batch_size", batch_size, 2), ("seed", seed, 0),
            ("accumulate", accumulate, 1), ("negatives_per_epoch", negatives_per_epoch, 0),
        ):  # fmt: skip
            if not value >= low:
                raise ValueError(f"{name} is {value}, expected at least {low}")
        self.balanced = negatives_per_positive > 0
        self.seed, self.epoch, self.accumulate = seed, 0, accumulate
        self.rows = {
            NEGATIVE: np.flatnonzero(labels == 0), POSITIVE: np.flatnonzero(labels == 1), ANY: np.arange(len(labels))
        }  # fmt: skip
        if self.balanced:
            positives, negatives = len(self.rows[POSITIVE]), len(self.rows[NEGATIVE])
            if not (positives and negatives):
                raise ValueError(f"balancing {positives} positives and {negatives} negatives: both are needed")
            if not 0 <= min_positives < batch_size:
                raise ValueError(
                    f"at least {min_positives} positives in batches of {batch_size}: a negative has to fit in too"
                )
            negatives = negatives_per_epoch or negatives
            sizes, self.positives = _balanced(negatives, negatives_per_positive, batch_size, min_positives, accumulate)
        else:
            if negatives_per_epoch:
                raise ValueError("negatives_per_epoch: with negatives_per_positive=0 an epoch is every row once")
            sizes = _plain(len(labels), batch_size, accumulate)
        self.batches = sizes.tolist()
        self.steps = [self.batches[i : i + accumulate] for i in range(0, len(sizes), accumulate)]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return sum(self.batches)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        epoch = self.epoch
        rows = self._balanced_rows() if self.balanced else self._next(ANY, len(self))
        return zip(rows.tolist(), [epoch] * len(rows), range(len(rows)), strict=True)

    def _balanced_rows(self) -> np.ndarray:
        """Rows in the epoch's order: each batch has its positives and negatives mixed."""
        sizes = np.array(self.batches)
        batch = np.repeat(np.arange(len(sizes)), sizes)
        place = np.arange(len(batch)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        positive = place < self.positives[batch]
        rows = np.empty(len(batch), np.int64)
        rows[positive] = self._next(POSITIVE, int(positive.sum()))
        rows[~positive] = self._next(NEGATIVE, int((~positive).sum()))
        return rows[np.lexsort((self._rng(self.epoch, WITHIN).random(len(rows)), batch))]

    def _next(self, kind: int, count: int) -> np.ndarray:
        """The epoch's `count` rows of a kind's endless stream."""
        rows = self.rows[kind]
        if len(rows) <= 1 or not count:
            return np.repeat(rows, count)
        start, stop = self.epoch * count, (self.epoch + 1) * count
        first, last = start // len(rows), -(-stop // len(rows))
        stream = np.concatenate([self._rng(number, kind).permutation(rows) for number in range(first, last)])
        return stream[start - first * len(rows) :][:count]

    def _rng(self, number: int, kind: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, number, kind])


class StepBatches(Sampler[list[tuple[int, int, int]]]):
    """One processor's share of an epoch, for a loader's `batch_sampler`.

    Of the batches of each step, processor r of n takes numbers r, r + n, ...: all together take what one takes alone, and
    each has a batch in every step.

    Args:
        sampler: set its epoch before this is iterated.
        rank, world: this processor's number, and how many there are.

    Attributes:
        start: the first step that is given, for a training that goes on within an epoch; stays until it is set again.

    Raises:
        ValueError: the batches of a step cannot be shared evenly, or the epoch is so small that a processor would get none.
    """

    def __init__(self, sampler: BalancedSampler, rank: int = 0, world: int = 1) -> None:
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world} processors: expected 0 to {world - 1}")
        if sampler.accumulate % world:
            more = -(-sampler.accumulate // world) * world
            raise ValueError(
                f"accumulate: {sampler.accumulate} batches a step cannot be shared evenly by {world} processors; the next "
                f"number that can is {more}"
            )
        if sampler.batches and len(sampler.steps[0]) < world:
            raise ValueError(
                f"an epoch of {len(sampler)} rows is {len(sampler.batches)} batches of two and more: too few for {world} "
                "processors; take fewer of them"
            )
        self.sampler, self.rank, self.world, self.start = sampler, rank, world, 0

    def __len__(self) -> int:
        return sum(len(step[self.rank :: self.world]) for step in self.sampler.steps[self.start :])

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        items = iter(self.sampler)
        for number, step in enumerate(self.sampler.steps):
            for place, size in enumerate(step):
                batch = list(islice(items, size))
                if number >= self.start and place % self.world == self.rank:
                    yield batch


def _plain(count: int, batch_size: int, accumulate: int) -> np.ndarray:
    """Sizes of the batches that `count` rows make."""
    batches = _whole_steps(-(-count // batch_size), count // 2, accumulate)
    return _even(max(count, 2 * batches) if count > 1 else count, batches)


def _balanced(
    negatives: int, ratio: float, batch_size: int, least: int, accumulate: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sizes of the batches, and how many positives each has."""
    positives = round(min(negatives / ratio, negatives * (batch_size - 1)))  # a batch has one negative at least
    fewest = max(-(-(negatives + positives) // batch_size), -(-negatives // (batch_size - least)))
    batches = _whole_steps(fewest, negatives if least else min(negatives, (negatives + positives) // 2), accumulate)
    negatives = max(negatives, batches)
    positives = max(positives, least * batches, 2 * batches - negatives)

    sizes, rest = _even(negatives + positives, batches), positives % batches
    # Where a batch has room for no positive but its share, those left over go to the larger batches.
    tight = sizes[-1] - 1 < -(-positives // batches)
    room = (negatives + positives) % batches if tight else batches
    extra = np.zeros(batches, np.int64)
    extra[:room] = np.diff(np.arange(room + 1) * rest // max(1, room))
    return sizes, positives // batches + extra


def _whole_steps(fewest: int, most: int, accumulate: int) -> int:
    """How many batches an epoch has: whole steps; where it is less than one, as many as there are rows for."""
    if fewest < accumulate:
        return max(fewest, min(accumulate, most))
    return -(-fewest // accumulate) * accumulate


def _even(count: int, parts: int) -> np.ndarray:
    """Parts of a number that differ by at most one, the larger first."""
    return count // max(1, parts) + (np.arange(parts) < count % max(1, parts))
