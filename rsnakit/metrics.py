"""pF1, the competition's metric, and what a score needs beside it: breasts, thresholds, AUC and intervals.

Scores are judged per breast: bring a table with a row an image through `to_breast` first. Labels (N,) are 0 or 1 and
scores (N,) are floats, matched by position. A different length, another label or a NaN is a ValueError everywhere.
The statistics are those of `scoring`, the intervals those of `resampling`.
"""

import math
from dataclasses import asdict

import numpy as np
import pandas as pd

from rsnakit.resampling import Interval, bootstrap, wilson
from rsnakit.scoring import auc, average_precision, best_threshold, checked, percentile_of, pfbeta, threshold_at

__all__ = [
    "BREAST", "NAIVE", "Interval", "auc", "average_precision", "best_threshold", "bootstrap", "checked", "percentile_of",
    "pfbeta", "score_breasts", "threshold_at", "to_breast", "wilson",
]  # fmt: skip

BREAST = ["patient_id", "laterality"]
NAIVE = "threshold chosen on the scored data: naive_f1 is optimistic, expect less on new patients"


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
    labels, scores = checked(frame["cancer"], frame["score"])
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


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has neither NaN nor inf


def _check_columns(frame: pd.DataFrame, needed: list[str]) -> None:
    missing = [name for name in needed if name not in frame]
    if missing:
        raise ValueError(f"columns {missing} are missing; the table has {list(frame.columns)}")


def _name(frame: pd.DataFrame, row: int) -> str:
    record = frame.iloc[row]
    breast = f"breast {record['patient_id']}_{record['laterality']}"
    return f"image {record['image_id']} of {breast}" if "image_id" in frame else f"{breast} (row {row})"
