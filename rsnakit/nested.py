"""Thresholds from folds that they do not score, and what choosing on the scored data adds."""

import math
from dataclasses import asdict

import numpy as np
import pandas as pd

from rsnakit import metrics
from rsnakit.breasts import BREAST, check_breasts, check_columns

NAIVE = "threshold chosen on the scored data: naive_f1 is optimistic, expect less on new patients"


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
    labels, scores = _labelled(frame)
    threshold, _ = metrics.best_threshold(labels, scores)
    statistics = {
        "pf1": metrics.pfbeta,
        "auc": metrics.auc,
        "average_precision": metrics.average_precision,
        "naive_threshold": lambda labels, scores: metrics.best_threshold(labels, scores)[0],
        "naive_f1": lambda labels, scores: metrics.pfbeta(labels, scores >= threshold),
    }
    report = {
        "n_breasts": len(frame),
        "n_positive": int(labels.sum()),
        "n_patients": int(frame["patient_id"].nunique()),
        "n_resamples": int(n),
    }
    for name, statistic in statistics.items():
        interval = metrics.bootstrap(labels, scores, frame["patient_id"], statistic, n, seed)
        report[name] = {key: _plain(value) for key, value in asdict(interval).items()}
    return report | {"naive_percentile": _plain(metrics.percentile_of(scores, threshold)), "naive_note": NAIVE}


def _labelled(frame: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Labels (N,) bool and scores (N,) of a table with a row a breast."""
    check_columns(frame, [*BREAST, "cancer", "score"])
    check_breasts(frame)
    return metrics.checked(frame["cancer"], frame["score"])


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has neither NaN nor inf
