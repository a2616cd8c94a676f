"""What a choice adds to a score: thresholds from folds that they do not score, and epochs chosen on the scored fold.

A threshold chosen on the very breasts that it then scores flatters, the more the fewer positives there are. Taken from the
other folds instead, its F1 is what new patients are to be expected to give.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd

from rsnakit import metrics
from rsnakit.breasts import BREAST, check_breasts, check_columns, folds_of
from rsnakit.resampling import N_NUMBERS, Draws, Interval, counts

NAIVE = "the threshold was chosen on the scored data, so that this pF1 flatters: expect less on new patients"
NOT_NESTED = "with one fold there is no other fold to take a threshold from, so that this pF1 flatters"
SELECTED = {"pf1": "f1", "ap": "ap"}  # the score in a history by which `select` keeps an epoch's weights


@dataclass(frozen=True)
class Nested:
    """F1 at thresholds that come from other folds, beside the naive one.

    Attributes:
        f1: over all folds' calls, each fold called at the best threshold of all other folds.
        naive_f1: F1 at the threshold that is best on all folds together, which it scores as well.
        optimism: naive minus nested.
        thresholds: by fold; inf, which calls nothing, where the other folds have no positive.
        called: (N,) bool, the rows called positive, in their order.
    """

    f1: Interval
    naive_f1: Interval
    optimism: float
    thresholds: dict[int, float]
    called: np.ndarray

    def plain(self) -> dict:
        """f1, naive_f1, optimism and thresholds, as `summary.json` has them."""
        return {
            "f1": _plain_interval(self.f1),
            "naive_f1": _plain_interval(self.naive_f1),
            "optimism": self.optimism,
            "thresholds": {str(fold): _plain(threshold) for fold, threshold in self.thresholds.items()},
        }


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
        "naive_threshold": metrics.chosen_threshold,
        "naive_f1": metrics.F1At(threshold),
    }
    report = {
        "n_breasts": len(frame),
        "n_positive": int(labels.sum()),
        "n_patients": int(frame["patient_id"].nunique()),
        "n_resamples": int(n),
    }
    for name, statistic in statistics.items():
        report[name] = _plain_interval(metrics.bootstrap(labels, scores, frame["patient_id"], statistic, n, seed))
    return report | {"naive_percentile": _plain(metrics.percentile_of(scores, threshold)), "naive_note": NAIVE}


def nested_threshold(breasts: pd.DataFrame, n: int = 1000, seed: int = 0) -> Nested | None:
    """F1 where each fold is called at a threshold that was chosen on the other folds only.

    It is the F1 that is to be expected of a threshold that is chosen as the kit chooses it, on about as many breasts as the
    other folds have, and used on new patients: cross-validation with the choice inside it (Varma & Simon, BMC
    Bioinformatics 7:91, 2006). In simulations of 150 to 1,000 patients it is on average within 0.007 of what new patients
    give, and the naive F1 0.03 to 0.07 above it; their 95 % intervals cover it in 97 to 98 % and 87 to 92 % of trials.

    Args:
        breasts: a row a breast (see `to_breast`): patient_id, laterality, fold, cancer, score.
        n, seed: resamples of patients, and seed of the draws (see `bootstrap`). In each resample every fold's threshold is
            chosen anew on the other folds' resampled patients. The naive F1's interval keeps its threshold, as choosing
            again would flatter each resample anew.

    Returns:
        None where there are fewer than two folds.

    Raises:
        ValueError: a column or a fold is missing, or a breast has several rows.
    """
    labels, scores, folds = _folded(breasts)
    if len(np.unique(folds)) < 2:
        return None
    thresholds, called = _nested_calls(labels, scores, folds)
    value = metrics.pfbeta(labels, called)
    draws = metrics.draw(breasts["patient_id"], n, seed)
    low, high = np.quantile(_resampled_f1(labels, scores, folds, draws), [0.025, 0.975])
    naive = metrics.F1At(metrics.best_threshold(labels, scores)[0])
    naive_f1 = metrics.bootstrap(labels, scores, breasts["patient_id"], naive, n, seed)
    interval = Interval(value, float(low), float(high))
    return Nested(interval, naive_f1, naive_f1.value - value, thresholds, called)


def epoch_choice(histories: Mapping[int, pd.DataFrame], select: str, side: str = "valid") -> dict | None:
    """What choosing the epoch on the scored fold added to its scores.

    Each fold's scores at the epoch that it chose for itself, minus those at the epoch that it would have been given without
    a look at it: the one at which the mean over the other folds is best. With one fold that is the last epoch.

    Args:
        histories: `history.csv` by fold, with columns epoch, valid_f1 (F1 at the best threshold) and valid_ap.
        select: by which score the epoch was chosen, `pf1` (F1 at the best threshold) or `ap`; `last`: it was not.
        side: "valid", or "ema_valid" where the averaged weights are kept.

    Returns:
        None where no epoch was chosen, or there is none. Else `f1` and `average_precision`: what the choice added, the mean
        over folds; `epochs` (chosen) and `other_epochs` (compared with), by fold; `note`, in words.

    Raises:
        ValueError: another `select`, or a history that lacks a column.
    """
    if select not in ("last", *SELECTED):
        raise ValueError(f"select is {select!r}; expected last, {', '.join(SELECTED)}")
    histories = {fold: history.set_index("epoch") for fold, history in histories.items() if len(history)}
    if select == "last" or not histories:
        return None
    columns = {"f1": f"{side}_f1", "average_precision": f"{side}_ap"}
    for history in histories.values():
        check_columns(history, list(columns.values()))
    # (epochs, folds), epochs that all folds have; a score that is not known is never the best.
    curves = pd.concat({fold: history[f"{side}_{SELECTED[select]}"] for fold, history in histories.items()}, axis=1)
    curves = curves.sort_index()
    common = curves.loc[curves.index.isin(set.intersection(*(set(history.index) for history in histories.values())))]
    chosen, others = {}, {}
    for fold, history in histories.items():
        chosen[fold] = _best_epoch(curves.loc[history.index, fold])
        alone = len(histories) == 1
        others[fold] = int(history.index[-1]) if alone else _best_epoch(common.drop(columns=fold).mean(axis=1))
    added = {}
    for name, column in columns.items():
        by_fold = [
            history.loc[chosen[fold], column] - history.loc[others[fold], column] for fold, history in histories.items()
        ]
        added[name] = _plain(float(np.mean(by_fold)))
    against = "the last epoch" if len(histories) == 1 else "the epoch that the other folds choose"
    return {
        "select": select,
        **added,
        "epochs": {str(fold): epoch for fold, epoch in chosen.items()},
        "other_epochs": {str(fold): epoch for fold, epoch in others.items()},
        "note": f"the epoch was chosen by {select} on the fold that it scores; compared with {against}",
    }


def pf1_table(
    breasts: pd.DataFrame, calibrated: Mapping[str, np.ndarray], n: int = 1000, seed: int = 0
) -> pd.DataFrame:
    """pF1 of the scores as they are, calibrated, and cut at thresholds from other folds, side by side.

    Args:
        breasts: a row a breast (see `to_breast`): patient_id, laterality, fold, cancer, score.
        calibrated: by name, (N,) probabilities in the order of the rows, as `calibration.cross_fitted` gives them.
        n, seed: as in `nested_threshold`. Calibrations are kept as they are in all resamples, nested thresholds are not.

    Returns:
        A row each, indexed by `scores`: value, low, high (95 %). With one fold the cut ones are at the naive threshold, and
        their row says that it flatters.
    """
    labels, scores, _ = _folded(breasts)
    rows = {
        name: metrics.bootstrap(labels, found, breasts["patient_id"], metrics.pfbeta, n, seed)
        for name, found in {"raw": scores, **calibrated}.items()
    }
    nested = nested_threshold(breasts, n, seed)
    if nested:
        rows["cut at other folds' thresholds"] = nested.f1
    else:
        naive = metrics.F1At(metrics.best_threshold(labels, scores)[0])
        rows["cut at the naive threshold (flatters)"] = metrics.bootstrap(
            labels, scores, breasts["patient_id"], naive, n, seed
        )
    table = pd.DataFrame.from_dict(
        {name: list(interval) for name, interval in rows.items()},
        "index",
        columns=["value", "low", "high"],
        dtype=float,
    )
    return table.rename_axis("scores")


def _nested_calls(labels: np.ndarray, scores: np.ndarray, folds: np.ndarray) -> tuple[dict[int, float], np.ndarray]:
    """Each fold's threshold, from the others, and all rows that are so called positive, (N,) bool."""
    thresholds, called = {}, np.zeros(len(labels), dtype=bool)
    for fold in np.unique(folds):
        own = folds == fold
        threshold, _ = metrics.best_threshold(labels[~own], scores[~own])
        thresholds[int(fold)], called[own] = threshold, scores[own] >= threshold
    return thresholds, called


def _resampled_f1(labels: np.ndarray, scores: np.ndarray, folds: np.ndarray, draws: Draws) -> np.ndarray:
    """Nested F1 in each resample of patients, (n,)."""
    # F1 only falls where a threshold takes in negatives alone: the best one is a positive's score.
    candidates = np.unique(scores[labels])[::-1]  # (K,) falling
    if not len(candidates):
        return np.zeros(draws.times.shape[1])
    own = [folds == fold for fold in np.unique(folds)]
    step = max(1, N_NUMBERS // (len(own) * len(candidates)))
    parts = [draws.times[:, first : first + step] for first in range(0, draws.times.shape[1], step)]
    f1 = []
    for times in parts:
        counted = [counts(labels[rows], scores[rows], draws.codes[rows], times, candidates) for rows in own]
        f1.append(_other_folds_f1(*(np.stack(part) for part in zip(*counted, strict=True))))
    return np.concatenate(f1)


def _other_folds_f1(true_positives: np.ndarray, called: np.ndarray) -> np.ndarray:
    """(n,) F1 over all folds, each called at the threshold that is best on the others, from counts (folds, K, n) at falling
    thresholds, the last of which calls all positives."""
    others_true, others_called = true_positives.sum(0) - true_positives, called.sum(0) - called
    f1 = 2 * others_true / np.maximum(others_true[:, -1:] + others_called, 1)
    best = f1.argmax(1)[:, None]  # (folds, 1, n), the highest of equally good ones
    found = np.take_along_axis(f1, best, 1) > 0  # else the other folds have no positive: inf, which calls nothing
    hits = np.where(found, np.take_along_axis(true_positives, best, 1), 0).sum((0, 1))
    calls = np.where(found, np.take_along_axis(called, best, 1), 0).sum((0, 1))
    return 2 * hits / np.maximum(true_positives[:, -1].sum(0) + calls, 1)


def _best_epoch(curve: pd.Series) -> int:
    """The first epoch with the highest score, as training keeps it; the last one where no score is known."""
    return int(curve.index[-1] if curve.isna().all() else curve.idxmax())


def _folded(breasts: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels (N,) bool, scores (N,) and folds (N,) of a table with a row a breast."""
    labels, scores = _labelled(breasts)
    return labels, scores, folds_of(breasts)


def _labelled(frame: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Labels (N,) bool and scores (N,) of a table with a row a breast."""
    check_columns(frame, [*BREAST, "cancer", "score"])
    check_breasts(frame)
    return metrics.checked(frame["cancer"], frame["score"])


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has neither NaN nor inf


def _plain_interval(interval: Interval) -> dict[str, float | None]:
    return {name: _plain(value) for name, value in asdict(interval).items()}
