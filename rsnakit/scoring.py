"""Statistics of scores against labels: pF1, thresholds, AUC and average precision.

Labels (N,) are 0 or 1 and scores (N,) are floats, matched by position. A different length, another label or a NaN is a
ValueError everywhere.
"""

import math

import numpy as np
from numpy.typing import ArrayLike


def pfbeta(labels: ArrayLike, scores: ArrayLike, beta: float = 1.0) -> float:
    """Probabilistic F-beta of scores against binary labels.

    Precision and recall are taken over probability mass instead of counts: a positive with score p adds p to the true
    positives and a negative adds p to the false ones (Yacouby & Axman, Eval4NLP 2020). With precision TP / (TP + FP)
    and recall TP / P, F-beta is (1 + beta^2) TP / (beta^2 P + TP + FP), which divides by zero only where TP = 0.

    Args:
        labels: (N,) 0 or 1.
        scores: (N,) probabilities; values outside [0, 1], infinite ones too, are clipped, as the competition does.
        beta: weight of recall against precision, 0 or more.

    Returns:
        A value in [0, 1]; 0.0 where no mass falls on a positive: no rows, no positives, or every score 0.

    Raises:
        ValueError: lengths differ, a label is neither 0 nor 1, a score is NaN, or beta is negative or not finite.
    """
    labels, scores = checked(labels, scores)
    if not (math.isfinite(beta) and beta >= 0):
        raise ValueError(f"beta is {beta}; expected a finite number, 0 or more")
    mass = np.clip(scores, 0.0, 1.0)
    true_mass, false_mass = float(mass[labels].sum()), float(mass[~labels].sum())
    if true_mass == 0.0:
        return 0.0
    return (1 + beta**2) * true_mass / (beta**2 * int(labels.sum()) + (true_mass + false_mass))


def best_threshold(labels: ArrayLike, scores: ArrayLike) -> tuple[float, float]:
    """The threshold with the highest F1 where `scores >= threshold` is called positive, and that F1.

    Exact: every distinct score, of any range, is tried, and equal scores fall on the same side. Of equally good
    thresholds the highest is taken; with no positives to find it is (inf, 0.0), which calls nothing positive. The F1 is
    pF1 of the binarised scores; chosen and scored on the same rows it is optimistic.
    """
    labels, scores = checked(labels, scores)
    if not labels.any():
        return math.inf, 0.0
    thresholds, true_positives, called = _operating_points(labels, scores)
    f1 = 2 * true_positives / (labels.sum() + called)
    best = int(np.argmax(f1))
    return float(thresholds[best]), float(f1[best])


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
    """Area under the ROC curve, as scikit-learn's `roc_auc_score`; NaN, without a warning, where a class is missing.

    Written out here because the bootstrap calls it thousands of times.
    """
    labels, scores = checked(labels, scores)
    n_positive = int(labels.sum())
    n_negative = len(labels) - n_positive
    if not n_positive or not n_negative:
        return math.nan
    _, true_positives, called = _operating_points(labels, scores)
    false_positives = called - true_positives
    # Trapezoids, in whole numbers until the last division.
    heights = true_positives + np.append(0, true_positives[:-1])
    return float((np.diff(false_positives, prepend=0) * heights).sum() / (2 * n_positive * n_negative))


def average_precision(labels: ArrayLike, scores: ArrayLike) -> float:
    """Mean precision over steps in recall, as scikit-learn's `average_precision_score`, without interpolation.

    NaN, without a warning, where a class is missing.
    """
    labels, scores = checked(labels, scores)
    if labels.all() or not labels.any():  # no rows: both
        return math.nan
    _, true_positives, called = _operating_points(labels, scores)
    return float((np.diff(true_positives, prepend=0) * true_positives / called).sum() / labels.sum())


def _operating_points(labels: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct scores, falling, and at each as threshold the true positives and all called positive; N > 0."""
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    last = np.append(np.flatnonzero(ranked[1:] != ranked[:-1]), len(ranked) - 1)  # the last row of each tie
    return ranked[last], np.cumsum(labels[order])[last], last + 1


def checked(labels: ArrayLike, scores: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Labels as (N,) bool and scores as (N,) float64."""
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
