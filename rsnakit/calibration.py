"""Scores made probabilities, by folds that they do not score.

A model that sees its positives several times over, and aims at 0.9 for them, gives scores that rank well and are no
probabilities. pF1 of the raw scores suffers from it, and so does whoever reads a score as a risk.
"""

from collections.abc import Callable

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from rsnakit.breasts import BREAST, check_breasts, check_columns, folds_of
from rsnakit.resampling import wilson
from rsnakit.scoring import checked

PARTS = 5  # of the patients, where there is one fold only
Calibrator = Callable[[ArrayLike], np.ndarray]  # scores (N,) to probabilities (N,)


def platt(labels: ArrayLike, scores: ArrayLike) -> Calibrator:
    """Platt's scaling: the probability is sigmoid(a logit(score) + b).

    Fitted by maximum likelihood to labels that are a little less than sure, (P + 1) / (P + 2) of P positives and
    1 / (N + 2) of N negatives, so that it stays finite where the classes are apart (Platt, Probabilistic outputs for
    support vector machines, 1999). Scores of exactly 0 or 1 count as float32's next number inside.

    Args:
        labels: (N,) 0 or 1.
        scores: (N,) probabilities; values outside [0, 1] are clipped.

    Returns:
        A function of scores (M,) that gives probabilities (M,). It keeps their order where a is above 0, which it is
        unless the scores rank worse than chance.

    Raises:
        ValueError: no rows, and as in `scoring`: lengths differ, a label is neither 0 nor 1, a score is NaN.
    """
    labels, scores = _rows(labels, scores)
    n_positive = int(labels.sum())
    sure = np.where(labels, (n_positive + 1) / (n_positive + 2), 1 / (len(labels) - n_positive + 2))
    model = LogisticRegression(C=np.inf, tol=1e-8, max_iter=1000)
    # A label of 0.98 is 0.98 of a positive and 0.02 of a negative.
    model.fit(np.tile(_logits(scores), (2, 1)), np.repeat([1, 0], len(labels)), np.concatenate([sure, 1 - sure]))
    return lambda scores: model.predict_proba(_logits(scores))[:, 1] if len(scores) else np.zeros(0)


def isotonic(labels: ArrayLike, scores: ArrayLike) -> Calibrator:
    """Isotonic regression: the rising step function that is nearest to the labels in squares.

    Makes no assumption but the order (Zadrozny & Elkan, KDD 2002), and wants more positives than Platt's scaling: with few
    its steps are wide, and breasts on a step tie.

    Args, Returns, Raises: as `platt`; scores beyond those it was fitted on get the nearest one's probability.
    """
    labels, scores = _rows(labels, scores)
    model = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip").fit(scores, labels)
    return lambda scores: model.predict(np.asarray(scores, dtype=float)) if len(scores) else np.zeros(0)


WAYS = {"platt": platt, "isotonic": isotonic}


def cross_fitted(breasts: pd.DataFrame, how: str, seed: int = 0) -> np.ndarray:
    """Calibrated scores, each by a calibration that was fitted on other folds only.

    Args:
        breasts: a row a breast (see `breasts.to_breast`): patient_id, laterality, fold, cancer, score.
        how: "platt" or "isotonic".
        seed: of the parts. Where all breasts are of one fold, its patients are dealt into 5 parts, those with a cancer
            and those without by themselves, the same parts whatever the order of rows.

    Returns:
        (N,) probabilities in the order of the rows. Between folds their order may differ from that of the scores.

    Raises:
        ValueError: another method, a column is missing, a breast has several rows, or all are of one patient.
    """
    if how not in WAYS:
        raise ValueError(f"how is {how!r}; expected one of {', '.join(WAYS)}")
    check_columns(breasts, [*BREAST, "fold", "cancer", "score"])
    check_breasts(breasts)
    labels, scores = checked(breasts["cancer"], breasts["score"])
    parts = folds_of(breasts)
    if len(breasts) and len(np.unique(parts)) < 2:
        parts = _parts(breasts, seed)
        if len(np.unique(parts)) < 2:
            raise ValueError("all breasts are of one patient; expected others to fit a calibration on")
    found = np.zeros(len(breasts))
    for part in np.unique(parts):
        held_out = parts == part
        found[held_out] = WAYS[how](labels[~held_out], scores[~held_out])(scores[held_out])
    return found


def reliability(labels: ArrayLike, scores: ArrayLike, n_bins: int = 10) -> pd.DataFrame:
    """What share of breasts has a cancer, beside the share that their scores say.

    The bins hold equally many breasts, equal scores together: with bins of equal width nearly all breasts would fall into
    the first where 2 % are positive. So there may be fewer than asked for.

    Args:
        labels, scores: (N,); scores outside [0, 1] are clipped.
        n_bins: most bins.

    Returns:
        A row a bin, by rising score: n, predicted (mean score), observed (share of positives), low and high (its 95 %
        interval by Wilson, which takes breasts as independent, though two are of one patient).

    Raises:
        ValueError: n_bins < 1, and as in `scoring`.
    """
    if n_bins < 1:
        raise ValueError(f"n_bins is {n_bins}; expected at least 1")
    labels, scores = checked(labels, scores)
    rows = pd.DataFrame({"label": labels, "score": scores.clip(0, 1)}).sort_values("score", kind="stable")
    # Each distinct score goes whole to the bin that the middle of its rows lies in.
    middle = (rows["score"].rank() - 0.5) / max(1, len(rows))
    bins = rows.groupby(np.minimum((middle * n_bins).astype(int), n_bins - 1).to_numpy())
    found = bins.agg(n=("label", "size"), predicted=("score", "mean"), observed=("label", "mean")).reset_index(
        drop=True
    )
    low, high = wilson(bins["label"].sum().to_numpy(), found["n"].to_numpy())
    return found.astype({"observed": float}).assign(low=low, high=high)


def _rows(labels: ArrayLike, scores: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    labels, scores = checked(labels, scores)
    if not len(labels):
        raise ValueError("there are no scores to fit a calibration on")
    return labels, scores


def _logits(scores: ArrayLike) -> np.ndarray:
    """Logits (N, 1) of scores (N,), finite."""
    lowest, highest = np.nextafter(np.float32([0, 1]), np.float32(0.5)).astype(float)
    inside = np.clip(np.asarray(scores, dtype=float), lowest, highest)
    return (np.log(inside) - np.log1p(-inside))[:, None]


def _parts(breasts: pd.DataFrame, seed: int) -> np.ndarray:
    """Numbers of parts (N,): patients with a cancer are dealt first, the others go on where these ended."""
    patients = breasts.groupby("patient_id", sort=True)["cancer"].max()
    shuffled = patients.iloc[np.random.default_rng(seed).permutation(len(patients))]
    dealt = shuffled.sort_values(ascending=False, kind="stable")
    return breasts["patient_id"].map(pd.Series(np.arange(len(dealt)) % PARTS, index=dealt.index)).to_numpy()
