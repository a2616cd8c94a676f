"""Statistics of scores against labels: pF1, the best threshold, ranking and calibration.

Labels (N,) are 0 or 1 and scores (N,) are floats, matched by position. A different length, another label or a NaN is a
ValueError everywhere. A statistic is called as `statistic(labels, scores) -> float`. They carry how they follow from sums
over rows (`rows` and `of_sums`), from counts at the scores of positives (`of_points`) or from how often each row counts
(`of_weights`), or which part of `best_of` they are: so `resampling` need not call them on each of its resamples.
"""

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike


def pfbeta(labels: ArrayLike, scores: ArrayLike, beta: float = 1.0) -> Any:
    """Probabilistic F-beta of scores against binary labels.

    Precision and recall are taken over probability mass instead of counts: a positive with score p adds p to the true
    positives and a negative adds p to the false ones (Yacouby & Axman, Eval4NLP 2020). With precision TP / (TP + FP)
    and recall TP / P, F-beta is (1 + beta^2) TP / (beta^2 P + TP + FP), which divides by zero only where TP = 0.

    Args:
        labels: (N,) 0 or 1.
        scores: (N,) probabilities; values outside [0, 1], infinite ones too, are clipped, as the competition does. For
            a torch tensor, on any device, the answer is one too and has a gradient on [0, 1]; clipped scores have none.
        beta: weight of recall against precision, 0 or more.

    Returns:
        A value in [0, 1], a float or a () tensor of float32 or float64; 0.0 where no mass falls on a positive: no rows,
        no positives, or every score 0.

    Raises:
        ValueError: lengths differ, a label is neither 0 nor 1, a score is NaN, or beta is negative or not finite.
    """
    if not (math.isfinite(beta) and beta >= 0):
        raise ValueError(f"beta is {beta}; expected a finite number, 0 or more")
    torch = sys.modules.get("torch")  # nothing is a tensor before it is imported, and importing it takes seconds
    if torch is not None and isinstance(scores, torch.Tensor):
        return _pfbeta_of_tensor(torch, labels, scores, beta)
    return float(fbeta(_mass(*checked(labels, scores)).sum(axis=1), beta))


def best_threshold(labels: ArrayLike, scores: ArrayLike) -> tuple[float, float]:
    """The threshold with the highest F1 where `scores >= threshold` is called positive, and that F1.

    Exact: every distinct score, of any range, is tried, and equal scores fall on the same side. Of equally good
    thresholds the highest is taken; with no positives to find it is (inf, 0.0), which calls nothing positive. The F1 is
    pF1 of the binarised scores; chosen and scored on the same rows it is optimistic.
    """
    threshold, f1 = best_of(operating_points(*checked(labels, scores)))
    return float(threshold), float(f1)


def chosen_threshold(labels: ArrayLike, scores: ArrayLike) -> float:
    """The threshold of `best_threshold`, as a statistic: its interval tells how loosely the rows determine it."""
    return best_threshold(labels, scores)[0]


def best_f1(labels: ArrayLike, scores: ArrayLike) -> float:
    """The F1 of `best_threshold`, as a statistic: chosen and scored on the same rows, so optimistic."""
    return best_threshold(labels, scores)[1]


def percentile_of(scores: ArrayLike, threshold: float) -> float:
    """Percentage (0 to 100) of scores (N,) below the threshold, those called negative; NaN for no scores."""
    scores = _checked_scores(scores)
    if math.isnan(threshold):
        raise ValueError("the threshold is NaN; expected a number")
    return 100.0 * int((scores < threshold).sum()) / len(scores) if len(scores) else math.nan


def threshold_at(scores: ArrayLike, percentile: float) -> float:
    """The threshold that calls the share of scores negative which is nearest to a percentile.

    Carries an operating point over as a rate: `threshold_at(test, percentile_of(oof, threshold))`. Candidates are the
    distinct scores and inf (nothing positive). Equal scores stay together, so the rate is met as nearly as they allow;
    of two equally near thresholds the lower is taken. Undoes `percentile_of` for a threshold that is one of the scores.

    Raises:
        ValueError: no scores, or a percentile outside 0 (all called positive) to 100 (none).
    """
    scores = np.sort(_checked_scores(scores))
    if len(scores) == 0:
        raise ValueError("there are no scores to take a percentile of")
    if not 0 <= percentile <= 100:
        raise ValueError(f"percentile is {percentile}; expected 0 to 100 (97.9 calls 2.1 % positive)")
    distinct, n_below = np.unique(scores, return_index=True)  # of sorted scores: the first index is the count below
    percentiles = 100.0 * np.append(n_below, len(scores)) / len(scores)
    return float(np.append(distinct, math.inf)[np.argmin(np.abs(percentiles - percentile))])


def auc(labels: ArrayLike, scores: ArrayLike) -> float:
    """Area under the ROC curve, as scikit-learn's `roc_auc_score`; NaN, without a warning, where a class is missing."""
    return float(_auc(operating_points(*checked(labels, scores))))


def average_precision(labels: ArrayLike, scores: ArrayLike) -> float:
    """Mean precision over steps in recall, as scikit-learn's `average_precision_score`, without interpolation.

    NaN, without a warning, where a class is missing.
    """
    return float(_average_precision(operating_points(*checked(labels, scores))))


def brier(labels: ArrayLike, scores: ArrayLike) -> float:
    """Mean squared difference of scores, clipped to [0, 1], and labels (G. W. Brier, Monthly Weather Review 78, 1950).

    As scikit-learn's `brier_score_loss`; NaN for no rows.
    """
    return float(_mean(_squares(*checked(labels, scores)).sum(axis=1)))


def calibration_error(labels: ArrayLike, scores: ArrayLike, n_bins: int = 15) -> float:
    """Expected calibration error: |observed rate - mean score| of bins, weighted by the rows in them.

    The 15 bins are Guo et al.'s (ICML 2017), but of equally many rows: of their equally wide ones the lowest would hold
    nearly all rows where few are positive, and equally full ones are less biased (Roelofs et al., AISTATS 2022). A row's
    bin follows from how many scores are lower, so that equal scores stay together. By chance alone a perfect model shows
    some error, and a resample more than its sample: for comparing models on the same rows.

    Args:
        labels, scores: (N,); scores outside [0, 1] are clipped.
        n_bins: number of bins, at least 1.

    Returns:
        A value in [0, 1]; NaN for no rows.
    """
    labels, scores = checked(labels, scores)
    if n_bins < 1:
        raise ValueError(f"n_bins is {n_bins}; expected at least 1")
    if not len(scores):
        return math.nan
    return _calibration_error(labels, scores, n_bins)(np.ones(len(scores), np.int64))


class Points(NamedTuple):
    """What is called at the distinct scores of positives as thresholds, of the rows (K,) or of n resamples of them (K, n).

    No other threshold is ever best: between two of these scores a lower one only calls more negatives.
    """

    thresholds: np.ndarray  # (K,), falling
    true_positives: np.ndarray
    called: np.ndarray  # rows with a score at the threshold or above
    tied: np.ndarray  # rows with that very score
    positives: np.ndarray  # () or (n,)
    negatives: np.ndarray  # () or (n,)

    @property
    def spared(self) -> np.ndarray:
        """Negatives that are not called."""
        return self.negatives - (self.called - self.true_positives)


def operating_points(labels: np.ndarray, scores: np.ndarray) -> Points:
    """The points of labels (N,) bool and scores (N,) float64, as `checked` gives them; one sort of all scores."""
    ranked, found = np.sort(scores), np.sort(scores[labels])
    thresholds = np.unique(found)[::-1]
    true_positives = len(found) - np.searchsorted(found, thresholds)
    called = len(ranked) - np.searchsorted(ranked, thresholds)
    above = len(ranked) - np.searchsorted(ranked, thresholds, side="right")
    return Points(
        thresholds, true_positives, called, called - above, np.array(len(found)), np.array(len(ranked) - len(found))
    )


def checked(labels: ArrayLike, scores: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Labels as (N,) bool and scores as (N,) float64; a ValueError says which of them is not as it should be."""
    labels, scores = np.asarray(labels, dtype=float), _checked_scores(scores)
    if labels.shape != scores.shape:
        raise ValueError(f"labels have shape {labels.shape}, scores {scores.shape}; expected the same (N,)")
    wrong = (labels != 0) & (labels != 1)
    if wrong.any():
        raise ValueError(f"{int(wrong.sum())} labels are neither 0 nor 1, the first is {labels[np.argmax(wrong)]}")
    return labels == 1, scores


def _checked_scores(scores: ArrayLike) -> np.ndarray:
    scores = np.asarray(scores, dtype=float)
    if scores.ndim != 1:
        raise ValueError(f"scores have shape {scores.shape}; expected (N,)")
    missing = np.isnan(scores)
    if missing.any():
        raise ValueError(f"{int(missing.sum())} of {len(scores)} scores are NaN, the first at row {np.argmax(missing)}")
    return scores


def _pfbeta_of_tensor(torch: Any, labels: Any, scores: Any, beta: float) -> Any:
    known = labels.detach().to("cpu", torch.float64) if isinstance(labels, torch.Tensor) else labels
    known, _ = checked(known, scores.detach().to("cpu", torch.float64))
    positive = torch.as_tensor(known, device=scores.device)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))  # sums in half precision overflow
    # clamp alone leaves the gradient at 0 and at 1 to the release of torch: a score there can still move.
    mass = torch.where((scores >= 0) & (scores <= 1), scores, scores.detach().clamp(0, 1))
    whole = beta**2 * positive.sum() + mass.sum()
    return (1 + beta**2) * (mass * positive).sum() / torch.where(whole > 0, whole, 1)  # 0 / 1 where there is nothing


# What follows takes sums and points of the rows, or of resamples along a last axis.


def _mass(labels: np.ndarray, scores: np.ndarray) -> np.ndarray:
    mass = np.clip(scores, 0.0, 1.0)
    return np.stack([mass * labels, mass * ~labels, labels])


def fbeta(sums: np.ndarray, beta: float = 1.0) -> np.ndarray:
    """F-beta of sums of true mass, false mass and positives."""
    true_mass, false_mass, positives = sums[:3]
    whole = beta**2 * positives + (true_mass + false_mass)
    return (1 + beta**2) * true_mass / np.where(true_mass > 0, whole, 1)


def _squares(labels: np.ndarray, scores: np.ndarray) -> np.ndarray:
    return np.stack([(np.clip(scores, 0.0, 1.0) - labels) ** 2, np.ones(len(labels))])


def _mean(sums: np.ndarray) -> np.ndarray:
    return ratio(sums[0], sums[1])


def best_of(points: Points) -> tuple[np.ndarray, np.ndarray]:
    """The highest of the best thresholds, inf where there is no positive, and its F1."""
    if not len(points.thresholds):
        nothing = np.zeros(np.shape(points.positives))
        return nothing + math.inf, nothing
    halves = points.true_positives / (np.maximum(points.positives, 1) + points.called)  # F1 = 2 TP / (P + called)
    best = np.argmax(halves, axis=0)
    f1 = 2 * np.take_along_axis(halves, np.expand_dims(best, 0), axis=0)[0]
    return np.where(points.positives > 0, points.thresholds[best], math.inf), f1


def _auc(points: Points) -> np.ndarray:
    """Of every positive the negatives below it, and half of those that tie with it; in halves, whole numbers all."""
    found = np.diff(points.true_positives, axis=0, prepend=0)
    above_twice = 2 * points.called - points.tied - 2 * points.true_positives + found
    halves = (found * (2.0 * points.negatives - above_twice)).sum(axis=0)
    return ratio(halves, 2.0 * points.positives * points.negatives)


def _average_precision(points: Points) -> np.ndarray:
    found = np.diff(points.true_positives, axis=0, prepend=0)
    precision = points.true_positives / np.maximum(points.called, 1)
    return of_both(points, ratio((found * precision).sum(axis=0), points.positives))


def _calibration_error(labels: np.ndarray, scores: np.ndarray, n_bins: int = 15) -> Callable[[np.ndarray], float]:
    """A function of how often each row counts, (N,) whole numbers; the rows are sorted once for all its calls."""
    order = np.argsort(scores, kind="stable")
    ranked = scores[order]
    first = np.flatnonzero(np.append(True, ranked[1:] != ranked[:-1]))  # of the rows of each distinct score
    gaps = labels[order] - np.clip(ranked, 0.0, 1.0)

    def of_weights(weights: np.ndarray) -> float:
        weights = weights[order].astype(np.int64)
        n = np.add.reduceat(weights, first)
        bins = (np.cumsum(n) - n) * n_bins // n.sum()
        return float(np.abs(np.bincount(bins, weights=np.add.reduceat(weights * gaps, first))).sum() / n.sum())

    return of_weights


def ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """NaN, without a warning, where the whole is 0."""
    out = np.full(np.broadcast_shapes(np.shape(part), np.shape(whole)), math.nan)
    return np.divide(part, whole, out=out, where=np.asarray(whole) > 0)


def of_both(points: Points, value: np.ndarray) -> np.ndarray:
    """NaN where a class is missing."""
    return np.where((points.positives > 0) & (points.negatives > 0), value, math.nan)


pfbeta.rows, pfbeta.of_sums = _mass, fbeta
calibration_error.of_weights = _calibration_error
brier.rows, brier.of_sums = _squares, _mean
auc.of_points, average_precision.of_points = _auc, _average_precision
chosen_threshold.of_best, best_f1.of_best = 0, 1  # which of the two that `best_of` gives
