"""Intervals of scores: patients drawn again, differences on the same draws, and Wilson's interval of a rate.

A patient's breasts are no independent cases, so whole patients are drawn (groups below). Such an interval knows the noise
of these patients, not that of training again, and is somewhat narrow with few positives.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from rsnakit.scoring import Points, best_of, checked, operating_points

Statistic = Callable[[np.ndarray, np.ndarray], float]
BLOCK = 64  # resamples drawn before they are written across memory
N_NUMBERS = 2**24  # of an array over resamples; more are taken in parts


@dataclass(frozen=True)
class Interval:
    """A statistic with its interval; unpacks as `value, low, high`."""

    value: float
    low: float
    high: float
    left_out: int = 0  # resamples in which the statistic was not finite

    def __iter__(self):
        return iter((self.value, self.low, self.high))


@dataclass(frozen=True)
class Difference(Interval):
    """A statistic of some scores minus that of others, with its interval."""

    probability: float = math.nan  # share of the resamples in which the first is higher; equal ones count half


class Draws(NamedTuple):
    """Groups drawn again: how often each is drawn, (G, n) int32, and the row of `times` that each row's group has, (N,)."""

    times: np.ndarray
    codes: np.ndarray


def bootstrap(
    labels: ArrayLike,
    scores: ArrayLike,
    groups: ArrayLike,
    statistic: Statistic,
    n: int = 1000,
    seed: int = 0,
    level: float = 0.95,
    stratified: bool = False,
) -> Interval:
    """Percentile interval of a statistic when whole groups (patients) are drawn again, with replacement.

    The interval lies between the (1 - level) / 2 and (1 + level) / 2 quantiles of the resampled values (Efron &
    Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13). The same seed draws the same patients for every
    statistic, whatever the order of rows.

    Args:
        labels, scores: (N,).
        groups: (N,) the patient of each row.
        statistic: maps labels and scores to a float; must not depend on the order of rows. Those of `scoring` and
            `operating` are fast; any other is called n times on the rows drawn.
        n, seed: number of resamples, and seed of the draws.
        level: coverage aimed at, in (0, 1).
        stratified: draw patients with any positive row and those without one separately, so that every resample has as
            many of either.

    Returns:
        The statistic on all rows and its interval. Resamples in which it is NaN or infinite (AUC with no positive
        drawn) are left out and counted in `left_out`; low and high are NaN where none remains.

    Raises:
        ValueError: also where a group is missing, n < 1, or level is outside (0, 1).
    """
    labels, scores = checked(labels, scores)
    draws = draw_for(labels, groups, n, seed, level, stratified)
    values = bootstrap_values(labels, scores, draws, statistic)
    kept = values[np.isfinite(values)]
    return Interval(float(statistic(labels, scores)), *limits(kept, level), n - len(kept))


def compare(
    labels: ArrayLike,
    scores: ArrayLike,
    others: ArrayLike,
    groups: ArrayLike,
    statistic: Statistic,
    n: int = 1000,
    seed: int = 0,
    level: float = 0.95,
    stratified: bool = False,
) -> Difference:
    """Paired difference of a statistic between two runs' scores of the same rows, on the same resamples of patients.

    Args:
        labels, scores, others: (N,); the difference is the statistic of `scores` minus that of `others`.
        groups, statistic, n, seed, level, stratified: as of `bootstrap`.

    Returns:
        The difference, its percentile interval, and the share of resamples in which `scores` has the higher statistic
        (better, but for `brier` and `calibration_error`); NaN where no resample remains.
    """
    labels, scores = checked(labels, scores)
    _, others = checked(labels, others)
    draws = draw_for(labels, groups, n, seed, level, stratified)
    ours, theirs = (bootstrap_values(labels, each, draws, statistic) for each in (scores, others))
    both = np.isfinite(ours) & np.isfinite(theirs)
    kept = ours[both] - theirs[both]
    value = float(statistic(labels, scores)) - float(statistic(labels, others))
    probability = float(((kept > 0) + (kept == 0) / 2).mean()) if len(kept) else math.nan
    return Difference(value, *limits(kept, level), n - len(kept), probability)


def draw(groups: ArrayLike, n: int = 1000, seed: int = 0, strata: ArrayLike | None = None) -> Draws:
    """Draws as many groups as there are, with replacement, n times; the same for the same names, whatever their order.

    Args:
        groups: (N,) the group of each row.
        n, seed: number of resamples, and seed of the draws.
        strata: (N,) 0 or 1; groups with any 1 and those without are drawn separately. None draws among all.

    Raises:
        ValueError: a group is missing, or n < 1.
    """
    if n < 1:
        raise ValueError(f"n is {n}; expected at least 1 resample")
    groups = pd.Series(groups)
    if groups.isna().any():
        raise ValueError(f"{groups.isna().sum()} of {len(groups)} groups are missing; expected one for every row")
    codes, names = pd.factorize(groups, sort=True)
    sizes = [len(names)]
    if strata is not None:
        without = np.bincount(codes, weights=np.asarray(strata, dtype=float), minlength=len(names)) == 0
        codes = np.argsort(np.argsort(without, kind="stable"))[codes]  # groups with any come first
        sizes = [int((~without).sum()), int(without.sum())]
    rng = np.random.default_rng(seed)
    times = np.empty((len(names), n), np.int32)
    for first in range(0, n, BLOCK):
        block = np.empty((min(BLOCK, n - first), len(names)), np.int32)
        begin = 0
        for size in filter(None, sizes):
            for row, drawn in zip(block, rng.integers(size, size=(len(block), size)), strict=True):
                row[begin : begin + size] = np.bincount(drawn, minlength=size)
            begin += size
        times[:, first : first + len(block)] = block.T
    return Draws(times, codes)


def bootstrap_values(labels: ArrayLike, scores: ArrayLike, draws: Draws, statistic: Statistic) -> np.ndarray:
    """(n,) the statistic in each resample, NaN where there are no rows to draw; `statistic` as of `bootstrap`."""
    labels, scores = checked(labels, scores)
    n_groups, n = draws.times.shape
    if not n_groups:
        return np.full(n, math.nan)
    if hasattr(statistic, "of_sums"):
        rows = statistic.rows(labels, scores)
        width, of = n_groups, lambda times: statistic.of_sums(group_sums(rows, draws.codes, times))
    elif hasattr(statistic, "of_best"):
        width, of = n_groups, lambda times: _best(labels, scores, draws.codes, times)[statistic.of_best]
    elif hasattr(statistic, "of_points"):
        thresholds = operating_points(labels, scores).thresholds
        width = max(n_groups, len(thresholds))
        of = lambda times: statistic.of_points(_points(labels, scores, draws.codes, times, thresholds))  # noqa: E731
    elif hasattr(statistic, "of_weights"):
        of_weights = statistic.of_weights(labels, scores)
        return np.array([of_weights(np.ascontiguousarray(times)[draws.codes]) for times in draws.times.T])
    else:
        return _one_by_one(labels, scores, draws, statistic)
    step = max(1, N_NUMBERS // width)
    return np.concatenate([of(draws.times[:, first : first + step]) for first in range(0, n, step)])


def counts(
    labels: np.ndarray, scores: np.ndarray, codes: np.ndarray, times: np.ndarray, thresholds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """True positives and all called, `scores >= threshold`, at each threshold in each resample: (K, n) int32 both.

    Rows are sorted into bins between the thresholds once; how many of a bin each resample has is a sparse product.

    Args:
        labels, scores: (N,) bool and float64, as `checked` gives them; a part of the rows that were drawn from will do.
        codes, times: (N,) of these rows, and (G, n); the two of `Draws`.
        thresholds: (K,) distinct, falling.
    """
    if not len(thresholds):
        return np.zeros((2, 0, times.shape[1]), np.int32)
    called = scores >= thresholds[-1]
    labels, scores, codes = labels[called], scores[called], codes[called]
    bins = np.searchsorted(-thresholds, -scores)  # of the highest threshold that calls the row
    called = _drawn(bins, codes, times, len(thresholds))
    true_positives = _drawn(bins[labels], codes[labels], times, len(thresholds))
    return np.cumsum(true_positives, axis=0, out=true_positives), np.cumsum(called, axis=0, out=called)


def wilson(k: ArrayLike, n: ArrayLike, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Wilson's score interval of a rate of k in n (E. B. Wilson, JASA 22, 1927, 209-212), for scalars or arrays.

    Unlike rate +- z * error it stays in [0, 1] and has a width at k = 0 and k = n. With n = 0 it is (0, 1): nothing is
    known. Returns (low, high) in the shape that k and n broadcast to.

    Raises:
        ValueError: k is not in 0 to n, n is not finite, or level is outside (0, 1).
    """
    _check_level(level)
    k, n = np.broadcast_arrays(np.asarray(k, dtype=float), np.asarray(n, dtype=float))
    if not ((k >= 0) & (k <= n) & np.isfinite(n)).all():
        raise ValueError("expected counts 0 <= k <= n with finite n; some k or n is outside, or NaN")
    z = NormalDist().inv_cdf((1 + level) / 2)
    centre = (k + z**2 / 2) / (n + z**2)
    half = z / (n + z**2) * np.sqrt(k * (n - k) / np.where(n > 0, n, 1) + z**2 / 4)
    # At the ends the bound is 0 or 1 but for rounding.
    return np.where(k == 0, 0.0, centre - half)[()], np.where(k == n, 1.0, centre + half)[()]


def limits(values: np.ndarray, level: float) -> tuple[float, float]:
    """Percentile interval of resampled values (n,); NaN where there are none."""
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2]) if len(values) else (math.nan, math.nan)
    return float(low), float(high)


def draw_for(labels: np.ndarray, groups: ArrayLike, n: int, seed: int, level: float, stratified: bool = False) -> Draws:
    """The draws of `bootstrap`, its arguments checked."""
    _check_level(level)
    if len(groups) != len(labels):
        raise ValueError(f"{len(groups)} groups for {len(labels)} rows; expected one for every row")
    return draw(groups, n, seed, labels if stratified else None)


def _one_by_one(labels: np.ndarray, scores: np.ndarray, draws: Draws, statistic: Statistic) -> np.ndarray:
    order = np.argsort(-scores, kind="stable")  # resamples of ranked rows come out ranked: statistics sort them fast
    labels, scores, codes = labels[order].astype(np.int64), scores[order], draws.codes[order]
    drawn = (np.repeat(np.arange(len(codes)), np.ascontiguousarray(times)[codes]) for times in draws.times.T)
    return np.array([statistic(labels[rows], scores[rows]) for rows in drawn], dtype=float)


def _points(
    labels: np.ndarray, scores: np.ndarray, codes: np.ndarray, times: np.ndarray, thresholds: np.ndarray
) -> Points:
    """The points of `scoring.operating_points` in each resample, at the scores of all positives."""
    true_positives, called = counts(labels, scores, codes, times, thresholds)
    positives, rows = (group_sums(each[None], codes, times)[0] for each in (labels, np.ones_like(labels)))
    scores, codes = scores[np.isin(scores, thresholds)], codes[np.isin(scores, thresholds)]
    tied = _drawn(np.searchsorted(-thresholds, -scores), codes, times, len(thresholds))
    return Points(thresholds, true_positives, called, tied, positives, rows - positives)


def _best(labels: np.ndarray, scores: np.ndarray, codes: np.ndarray, times: np.ndarray) -> np.ndarray:
    """(2, n) threshold and F1 of `scoring.best_of`; exact, though most resamples are settled by the highest thresholds.

    F1 = 2 TP / (P + called) is at most 2 P / (P + called), and the lower a threshold, the more it calls: if the best so far
    reaches that bound at the last threshold counted, none below is better. So few rows in a hundred are ever counted.
    """
    points = operating_points(labels, scores)
    settled = 2 * points.positives / max(float(best_of(points)[1]), 1e-9)  # P + called, in the rows as they are
    n_top = np.searchsorted(points.positives + points.called, 1.5 * settled) + 1  # and more, since resamples differ
    found, left = np.empty((2, times.shape[1])), np.arange(times.shape[1])
    for thresholds in (points.thresholds[:n_top], points.thresholds):
        drawn = times if len(left) == times.shape[1] else times[:, left]
        positives = group_sums(labels[None], codes, drawn)[0]
        true_positives, called = counts(labels, scores, codes, drawn, thresholds)
        found[:, left] = best_of(Points(thresholds, true_positives, called, None, positives, None))
        if len(thresholds) == len(points.thresholds):
            break
        left = left[2 * positives / np.maximum(positives + called[-1], 1) > found[1, left]]
        if not len(left):
            break
    return found


def group_sums(rows: np.ndarray, codes: np.ndarray, times: np.ndarray) -> np.ndarray:
    """(S, n) sums of (S, N) over the rows that each resample has; whole numbers stay whole."""
    from scipy import sparse  # not above: importing metrics stays light

    sums = np.stack([np.bincount(codes, weights=row, minlength=len(times)) for row in rows])
    return sparse.csr_matrix(sums.astype(np.int32 if rows.dtype == bool else float)) @ times


def _drawn(bins: np.ndarray, codes: np.ndarray, times: np.ndarray, n_bins: int) -> np.ndarray:
    """(n_bins, n) how many rows each resample has in each bin."""
    from scipy import sparse

    if not n_bins:
        return np.zeros((0, times.shape[1]), np.int32)
    return sparse.csr_matrix((np.ones(len(bins), np.int32), (bins, codes)), shape=(n_bins, len(times))) @ times


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; expected a share in (0, 1) such as 0.95")
