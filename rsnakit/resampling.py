"""Intervals: patients drawn again, and Wilson's."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from rsnakit.scoring import checked


@dataclass(frozen=True)
class Interval:
    """A statistic with its interval; unpacks as `value, low, high`."""

    value: float
    low: float
    high: float
    left_out: int = 0  # resamples in which the statistic was not finite

    def __iter__(self):
        return iter((self.value, self.low, self.high))


def bootstrap(
    labels: ArrayLike,
    scores: ArrayLike,
    groups: ArrayLike,
    statistic: Callable[[np.ndarray, np.ndarray], float],
    n: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """Percentile interval of a statistic when whole groups (patients) are drawn again, with replacement.

    A patient's two breasts are no independent cases, so they are drawn together. The interval lies between the
    (1 - level) / 2 and (1 + level) / 2 quantiles of the resampled values (Efron & Tibshirani, An Introduction to the
    Bootstrap, 1993, chapter 13). It knows the noise of these patients, not that of training again, and is somewhat
    narrow with few positives. The same seed draws the same patients for every statistic, whatever the order of rows.

    Args:
        labels, scores: (N,).
        groups: (N,) the patient of each row.
        statistic: maps labels and scores to a float; must not depend on the order of rows.
        n, seed: number of resamples, and seed of the draws.
        level: coverage aimed at, in (0, 1).

    Returns:
        The statistic on all rows and its interval. Resamples in which it is NaN or infinite (AUC with no positive
        drawn) are left out and counted in `left_out`; low and high are NaN where none remains.

    Raises:
        ValueError: also where a group is missing, n < 1, or level is outside (0, 1).
    """
    labels, scores = checked(labels, scores)
    _check_level(level)
    if n < 1:
        raise ValueError(f"n is {n}; expected at least 1 resample")
    groups = pd.Series(groups)
    if len(groups) != len(labels) or groups.isna().any():
        raise ValueError(
            f"{len(groups)} groups ({groups.isna().sum()} missing) for {len(labels)} rows; expected one for every row"
        )
    codes, names = pd.factorize(groups, sort=True)
    order = np.argsort(-scores, kind="stable")  # resamples of ranked rows come out ranked: statistics sort them fast
    labels, scores, codes = labels[order].astype(np.int64), scores[order], codes[order]
    values = np.full(n, math.nan)
    rng = np.random.default_rng(seed)
    for i in range(n if len(names) else 0):
        times_drawn = np.bincount(rng.integers(len(names), size=len(names)), minlength=len(names))
        rows = np.repeat(np.arange(len(codes)), times_drawn[codes])
        values[i] = statistic(labels[rows], scores[rows])
    kept = values[np.isfinite(values)]
    low, high = np.quantile(kept, [(1 - level) / 2, (1 + level) / 2]) if len(kept) else (math.nan, math.nan)
    return Interval(float(statistic(labels, scores)), float(low), float(high), n - len(kept))


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


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; expected a share in (0, 1) such as 0.95")
