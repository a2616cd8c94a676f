"""pF1, the competition's metric, and what a score needs beside it: breasts, thresholds, AUC and intervals.

Scores are judged per breast: bring a table with a row an image through `to_breast` first. Labels (N,) are 0 or 1 and
scores (N,) are floats, matched by position. A different length, another label or a NaN is a ValueError everywhere.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import NormalDist

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

BREAST = ["patient_id", "laterality"]
NAIVE = "threshold chosen on the scored data: naive_f1 is optimistic, expect less on new patients"


@dataclass(frozen=True)
class Interval:
    """A statistic with its interval; unpacks as `value, low, high`."""

    value: float
    low: float
    high: float
    left_out: int = 0  # resamples in which the statistic was not finite

    def __iter__(self):
        return iter((self.value, self.low, self.high))


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
    labels, scores = _checked(labels, scores)
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
    labels, scores = _checked(labels, scores)
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
    labels, scores = _checked(labels, scores)
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
    labels, scores = _checked(labels, scores)
    if labels.all() or not labels.any():  # no rows: both
        return math.nan
    _, true_positives, called = _operating_points(labels, scores)
    return float((np.diff(true_positives, prepend=0) * true_positives / called).sum() / labels.sum())


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
    labels, scores = _checked(labels, scores)
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


def to_breast(frame: pd.DataFrame, how: str = "mean") -> pd.DataFrame:
    """A table with a row an image to one with a row a breast, in first-seen order.

    Args:
        frame: columns patient_id, laterality, score; image_id, cancer, fold and prediction_id where known.
        how: "mean" or "max" of a breast's scores.

    Returns:
        patient_id, laterality, score and, where given, cancer, fold and prediction_id, in the order they came, then
        n_images; other columns are dropped. A table that has a row a breast keeps its values, n_images among them.

    Raises:
        ValueError: a needed column or an id is missing, a score is NaN or infinite, an image stands there twice, or
            cancer, fold or prediction_id differ within a breast.
    """
    if how not in ("mean", "max"):
        raise ValueError(f"how is {how!r}; expected 'mean' or 'max'")
    _check_columns(frame, [*BREAST, "score"])
    if frame[BREAST].isna().any(axis=None):
        raise ValueError(f"{int(frame[BREAST].isna().any(axis=1).sum())} rows have no patient_id or no laterality")
    scores = frame["score"].to_numpy(dtype=float, na_value=math.nan)
    if not np.isfinite(scores).all():
        row = int(np.flatnonzero(~np.isfinite(scores))[0])
        raise ValueError(f"the score of {_name(frame, row)} is {scores[row]}; expected a finite number")
    if "image_id" in frame:
        twice = (frame.duplicated([*BREAST, "image_id"]) & frame["image_id"].notna()).to_numpy()
        if twice.any():
            raise ValueError(f"{_name(frame, int(np.argmax(twice)))} is there twice; expected a row an image")

    breast = frame.groupby(BREAST, sort=False, observed=True).ngroup().to_numpy()  # (N,) numbers in first-seen order
    constant = [name for name in ("cancer", "fold", "prediction_id") if name in frame]
    for name in constant:
        differs = frame[name].groupby(breast).nunique(dropna=False).to_numpy() > 1
        if differs.any():
            rows = breast == np.argmax(differs)
            found = ", ".join(map(str, frame.loc[rows, name].unique()))
            breast_name = _name(frame.drop(columns="image_id", errors="ignore"), int(np.argmax(rows)))
            raise ValueError(f"{name} of {breast_name} is {found}; expected one value a breast")

    breasts = frame.loc[~frame.duplicated(BREAST).to_numpy()].reset_index(drop=True)
    if not ("n_images" in frame and len(breasts) == len(frame)):
        breasts["n_images"] = np.bincount(breast, minlength=len(breasts)).astype(np.int64)
    breasts["score"] = pd.Series(scores, dtype=float).groupby(breast).agg(how).to_numpy()
    kept = [name for name in breasts.columns if name in (*BREAST, "score", *constant)]
    return breasts[[*kept, "n_images"]]


def score_breasts(frame: pd.DataFrame, n: int = 1000, seed: int = 0) -> dict:
    """What a report shows of scores per breast, ready for JSON: plain numbers, None where one is undefined.

    The naive threshold is the best on these very rows. Its interval chooses again in every resample; that of naive_f1
    keeps the threshold, as choosing again would flatter each resample anew.

    Args:
        frame: a row a breast (see `to_breast`) with patient_id, laterality, cancer and score.
        n, seed: resamples of patients for the 95 % intervals, and seed of the draws (see `bootstrap`).

    Returns:
        n_breasts, n_positive, n_patients, n_resamples; pf1 (of the scores as they are), auc, average_precision,
        naive_threshold and naive_f1, each a dict of value, low, high, left_out; naive_percentile, where the threshold
        lies among the scores; naive_note, what naive means.

    Raises:
        ValueError: also where a column is missing or a breast has several rows.
    """
    _check_columns(frame, [*BREAST, "cancer", "score"])
    repeated = frame.duplicated(BREAST).to_numpy()
    if repeated.any():
        raise ValueError(f"{_name(frame, int(np.argmax(repeated)))} is not its breast's only row; call to_breast first")
    labels, scores = _checked(frame["cancer"], frame["score"])
    threshold, _ = best_threshold(labels, scores)
    statistics = {
        "pf1": pfbeta,
        "auc": auc,
        "average_precision": average_precision,
        "naive_threshold": lambda labels, scores: best_threshold(labels, scores)[0],
        "naive_f1": lambda labels, scores: pfbeta(labels, scores >= threshold),
    }
    report = {
        "n_breasts": len(frame),
        "n_positive": int(labels.sum()),
        "n_patients": int(frame["patient_id"].nunique()),
        "n_resamples": int(n),
    }
    for name, statistic in statistics.items():
        interval = bootstrap(labels, scores, frame["patient_id"], statistic, n, seed)
        report[name] = {key: _plain(value) for key, value in asdict(interval).items()}
    return report | {"naive_percentile": _plain(percentile_of(scores, threshold)), "naive_note": NAIVE}


def _operating_points(labels: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct scores, falling, and at each as threshold the true positives and all called positive; N > 0."""
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    last = np.append(np.flatnonzero(ranked[1:] != ranked[:-1]), len(ranked) - 1)  # the last row of each tie
    return ranked[last], np.cumsum(labels[order])[last], last + 1


def _checked(labels: ArrayLike, scores: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
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


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has neither NaN nor inf


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; expected a share in (0, 1) such as 0.95")


def _check_columns(frame: pd.DataFrame, needed: list[str]) -> None:
    missing = [name for name in needed if name not in frame]
    if missing:
        raise ValueError(f"columns {missing} are missing; the table has {list(frame.columns)}")


def _name(frame: pd.DataFrame, row: int) -> str:
    record = frame.iloc[row]
    breast = f"breast {record['patient_id']}_{record['laterality']}"
    return f"image {record['image_id']} of {breast}" if "image_id" in frame else f"{breast} (row {row})"
