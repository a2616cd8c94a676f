"""Statistics at an operating point: at a threshold, at a specificity or a sensitivity; and F1 along the threshold.

One is made with its parameter and then called as any other: `SensitivityAt(0.9)(labels, scores)`.
"""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from rsnakit.resampling import counts, draw_for, group_sums, limits
from rsnakit.scoring import Points, best_threshold, checked, fbeta, of_both, operating_points, ratio


@dataclass(frozen=True)
class _AtThreshold:
    """A statistic of which rows are called: those with `scores >= threshold`."""

    threshold: float

    def __post_init__(self) -> None:
        if math.isnan(self.threshold):
            raise ValueError("the threshold is NaN; expected a number")

    def __call__(self, labels: ArrayLike, scores: ArrayLike) -> float:
        return float(self.of_sums(self.rows(*checked(labels, scores)).sum(axis=1)))

    def rows(self, labels: np.ndarray, scores: np.ndarray) -> np.ndarray:
        called = scores >= self.threshold
        return np.stack([called & labels, called & ~labels, labels, ~labels])


class F1At(_AtThreshold):
    """F1 at a given threshold, which is pF1 of the scores binarised there; 0.0 where no positive is called."""

    def of_sums(self, sums: np.ndarray) -> np.ndarray:
        return fbeta(sums)


class SensitivityOf(_AtThreshold):
    """Share of the positives that is called at a threshold; NaN without positives."""

    def of_sums(self, sums: np.ndarray) -> np.ndarray:
        return ratio(sums[0], sums[2])


class SpecificityOf(_AtThreshold):
    """Share of the negatives that is not called at a threshold; NaN without negatives."""

    def of_sums(self, sums: np.ndarray) -> np.ndarray:
        return ratio(sums[3] - sums[1], sums[3])


class RecallRateAt(_AtThreshold):
    """Share of all rows that is called at a threshold, as screening counts whom it recalls; NaN for no rows."""

    def of_sums(self, sums: np.ndarray) -> np.ndarray:
        return ratio(sums[0] + sums[1], sums[2] + sums[3])


@dataclass(frozen=True)
class SensitivityAt:
    """The highest sensitivity that a threshold reaches with at least this specificity; NaN where a class is missing."""

    specificity: float = 0.9

    def __post_init__(self) -> None:
        _check_share("specificity", self.specificity)

    def __call__(self, labels: ArrayLike, scores: ArrayLike) -> float:
        return float(self.of_points(operating_points(*checked(labels, scores))))

    def of_points(self, points: Points) -> np.ndarray:
        allowed = ratio(points.spared, points.negatives) >= self.specificity
        found = np.max(points.true_positives, axis=0, where=allowed, initial=0)
        return of_both(points, ratio(found, points.positives))


@dataclass(frozen=True)
class SpecificityAt:
    """The highest specificity that a threshold reaches with at least this sensitivity; NaN where a class is missing."""

    sensitivity: float = 0.9

    def __post_init__(self) -> None:
        _check_share("sensitivity", self.sensitivity)

    def __call__(self, labels: ArrayLike, scores: ArrayLike) -> float:
        return float(self.of_points(operating_points(*checked(labels, scores))))

    def of_points(self, points: Points) -> np.ndarray:
        reached = ratio(points.true_positives, points.positives) >= self.sensitivity
        spared = np.max(points.spared, axis=0, where=reached, initial=0)
        return of_both(points, ratio(spared, points.negatives))


def threshold_of_sensitivity(labels: ArrayLike, scores: ArrayLike, sensitivity: float) -> float:
    """The highest threshold with at least that sensitivity, a positive's score; NaN without positives."""
    _check_share("sensitivity", sensitivity)
    points = operating_points(*checked(labels, scores))
    reached = ratio(points.true_positives, points.positives) >= sensitivity
    return float(points.thresholds[np.argmax(reached)]) if reached.any() else math.nan


def threshold_of_specificity(labels: ArrayLike, scores: ArrayLike, specificity: float) -> float:
    """The lowest score that is a threshold with at least that specificity, inf if none is; NaN without negatives."""
    _check_share("specificity", specificity)
    labels, scores = checked(labels, scores)
    if labels.all():
        return math.nan
    candidates = np.append(np.unique(scores), math.inf)
    spared = np.searchsorted(np.sort(scores[~labels]), candidates) / int((~labels).sum())
    return float(candidates[spared >= specificity].min(initial=math.inf))


def f1_curve(
    labels: ArrayLike,
    scores: ArrayLike,
    groups: ArrayLike,
    thresholds: ArrayLike | None = None,
    n: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> pd.DataFrame:
    """F1 of `scores >= threshold`, which is pF1 of the binarised scores, along the threshold, with its bootstrap band.

    The band is pointwise: it covers as `bootstrap` does at each threshold by itself, not all along the curve at once.

    Args:
        thresholds: (K,) in any order; None for about 200 of the scores (see `curve_thresholds`).
        labels, scores, groups, n, seed, level: as of `bootstrap`.

    Returns:
        threshold, f1, low and high, a row a threshold in rising order, equal ones once; no band where there are no rows.
    """
    labels, scores = checked(labels, scores)
    thresholds = (
        curve_thresholds(labels, scores) if thresholds is None else np.unique(np.asarray(thresholds, dtype=float))
    )
    if np.isnan(thresholds).any():
        raise ValueError("a threshold is NaN; expected numbers")
    draws = draw_for(labels, groups, n, seed, level)
    once = np.ones((len(draws.times), 1), np.int32)  # every group once: the rows as they are
    curves = []
    for times in (once, draws.times):
        true_positives, called = counts(labels, scores, draws.codes, times, thresholds[::-1])
        positives = group_sums(labels[None], draws.codes, times)
        curves.append((2 * true_positives / np.maximum(called + positives, 1))[::-1])
    bands = np.array([limits(values if len(labels) else [], level) for values in curves[1]]).reshape(-1, 2)
    return pd.DataFrame({"threshold": thresholds, "f1": curves[0][:, 0], "low": bands[:, 0], "high": bands[:, 1]})


def curve_thresholds(labels: ArrayLike, scores: ArrayLike, n: int = 200) -> np.ndarray:
    """Some of the distinct scores, about n, rising: half of them evenly spaced, half with equally many positives between.

    The lowest, the highest and the best threshold are among them, and infinite scores are not.
    """
    labels, scores = checked(labels, scores)
    finite = np.isfinite(scores)
    distinct, found = np.unique(scores[finite]), np.unique(scores[finite & labels])
    if not len(distinct):
        return distinct
    even = np.linspace(distinct[0], distinct[-1], n // 2)
    at = np.minimum(np.searchsorted(distinct, even), len(distinct) - 1)
    ranks = np.linspace(0, len(found) - 1, min(len(found), n // 2)).astype(int)
    best, _ = best_threshold(labels, scores)
    return np.unique(np.concatenate([distinct[at], found[ranks], [best] if math.isfinite(best) else []]))


def _check_share(name: str, share: float) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"{name} is {share}; expected a share above 0 and up to 1, such as 0.9")
