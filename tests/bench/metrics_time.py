"""Scores of a whole competition: the best threshold, and bootstrapping it over patients, beside scikit-learn and plain loops.

    python tests/bench/metrics_time.py [--out work/bench] [--rounds 3] [--resamples 400]

54,706 drawn scores of 11,913 patients, 1,158 of them positive, as many as the competition's images. All ways answer the
same: one threshold and its F1; and the same 95 % interval of the threshold chosen anew in every resample, since all draw
the same patients. One process on one core, the ways in turn, in seconds of the processor; a ratio is of one round, and its
median, smallest and largest over the rounds are told. Takes about a minute, nearly all of them scikit-learn's.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY))
import turns  # noqa: E402, I001 - before NumPy: it keeps libraries to one thread
import numpy as np  # noqa: E402
import table  # noqa: E402
from sklearn.metrics import precision_recall_curve  # noqa: E402

from rsnakit import metrics  # noqa: E402

N_SCORES, N_PATIENTS, N_POSITIVE = 54_706, 11_913, 1_158
OURS, SKLEARN = "rsnakit", "scikit-learn's precision_recall_curve"
TARGETS = {"best threshold": 2.5, "bootstrap": 100.0}


class Data(NamedTuple):
    labels: np.ndarray  # (N,) bool
    scores: np.ndarray  # (N,)
    patients: np.ndarray  # (N,) numbers from 0


def draw(n_scores: int, n_patients: int, n_positive: int, seed: int = 0) -> Data:
    """Scores that overlap as those of a good model do; every patient has a row at least."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(n_scores) < n_positive
    scores = 1 / (1 + np.exp(-rng.normal(np.where(labels, -1.5, -4.5), 1.5)))
    patients = np.concatenate([np.arange(n_patients), rng.integers(n_patients, size=n_scores - n_patients)])
    return Data(labels, scores, rng.permutation(patients))


# The best threshold


def of_sklearn(labels: np.ndarray, scores: np.ndarray) -> tuple[float, float]:
    precision, recall, thresholds = precision_recall_curve(labels, scores)
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
    best = len(f1) - 1 - np.argmax(f1[::-1])  # of equally good ones the highest
    return float(thresholds[min(best, len(thresholds) - 1)]), float(f1[best])


def of_numpy(labels: np.ndarray, scores: np.ndarray) -> tuple[float, float]:
    order = np.argsort(-scores)
    return _best_of_ranked(np.cumsum(labels[order]), np.arange(1, len(order) + 1), scores[order])


THRESHOLD = {OURS: metrics.best_threshold, SKLEARN: of_sklearn, "NumPy, argsort and cumsum": of_numpy}


# Resampling patients, the threshold chosen anew


def ours(data: Data, n: int) -> tuple[float, float]:
    interval = metrics.bootstrap(*data, metrics.chosen_threshold, n)
    return interval.low, interval.high


def rows_repeated(best: Callable) -> Callable:
    """The plain way: the rows of the patients drawn, put together, and the best threshold of these."""

    def interval(data: Data, n: int) -> tuple[float, float]:
        rows_of = np.split(np.argsort(data.patients, kind="stable"), np.cumsum(np.bincount(data.patients))[:-1])
        rng, values = np.random.default_rng(0), []
        for _ in range(n):
            rows = np.concatenate([rows_of[patient] for patient in rng.integers(len(rows_of), size=len(rows_of))])
            values.append(best(data.labels[rows], data.scores[rows])[0])
        return tuple(np.quantile(values, [0.025, 0.975]))

    return interval


def weights_of_ranked(data: Data, n: int) -> tuple[float, float]:
    """A plain loop by one who knows the trick: rows are sorted once, and a resample is how often each counts."""
    order = np.argsort(-data.scores)
    labels, scores, patients = data.labels[order], data.scores[order], data.patients[order]
    rng, n_patients, values = np.random.default_rng(0), data.patients.max() + 1, []
    for _ in range(n):
        weights = np.bincount(rng.integers(n_patients, size=n_patients), minlength=n_patients)[patients]
        values.append(_best_of_ranked(np.cumsum(weights * labels), np.cumsum(weights), scores)[0])
    return tuple(np.quantile(values, [0.025, 0.975]))


BOOTSTRAP = {
    OURS: ours,
    SKLEARN: rows_repeated(of_sklearn),
    "NumPy, a loop over rows put together": rows_repeated(of_numpy),
    "NumPy, a loop over weights of ranked rows": weights_of_ranked,
}


def _best_of_ranked(true_positives: np.ndarray, called: np.ndarray, scores: np.ndarray) -> tuple[float, float]:
    last = np.flatnonzero(np.append(scores[1:] != scores[:-1], True))
    f1 = 2 * true_positives[last] / np.maximum(called[last] + true_positives[-1], 1)
    best = np.argmax(f1)
    return float(scores[last[best]]), float(f1[best])


def measure(ways: dict[str, Callable], args: tuple, rounds: int) -> tuple[list[dict], dict[str, list[float]]]:
    """A row for each way, and its seconds of the processor in each round: the median of up to nine calls, if they are short.

    Raises:
        RuntimeError: a way answers otherwise than the first.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    calls, expected = dict.fromkeys(ways, 1), None
    for number in range(rounds + 1):  # the first is for warming up
        for name, way in ways.items():
            took = []
            for _ in range(calls[name]):
                begun = time.process_time()
                found = way(*args)
                took.append(time.process_time() - begun)
            if number:
                seconds[name].append(statistics.median(took))
            else:
                calls[name] = min(9, 1 + int(1 / max(took[0], 1e-3)))
            expected = expected or found
            if not np.allclose(found, expected, rtol=1e-9, atol=0):
                raise RuntimeError(f"{name} finds {found}, {next(iter(ways))} {expected}")
    rows = []
    for name, each in seconds.items():
        ratio = turns.ratio(each, seconds[next(iter(ways))])
        ms = 1000 * statistics.median(each)
        rows.append({"way": name, "ms": ms, "times ours": ratio.median, "from": ratio.low, "to": ratio.high})
    return rows, seconds


def verdict(rows: list[dict], target: float) -> str:
    found = next(row["times ours"] for row in rows if row["way"] == SKLEARN)
    return f"target {target:g} times faster than scikit-learn: {'yes' if found >= target else 'no'}, {found:.3g}"


def results_of(what: str, rows: list[dict], target: float) -> list[table.Result]:
    """A row for each of the others; the target is against scikit-learn."""
    note = f"ours {rows[0]['ms']:.3g} ms of a core"
    return [
        table.Result(
            what, row["way"], "times as fast", row["times ours"], row["from"], row["to"],
            target if row["way"] == SKLEARN else None, note=note,
        )
        for row in rows[1:]
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=table.OUT)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--resamples", type=int, default=400)
    options = parser.parse_args()
    turns.use_one_core()
    data = draw(N_SCORES, N_PATIENTS, N_POSITIVE)
    best, best_seconds = measure(THRESHOLD, data[:2], 3 * options.rounds)
    again, again_seconds = measure(BOOTSTRAP, (data, options.resamples), options.rounds)
    sections = {
        f"The best threshold of {N_SCORES} scores ({verdict(best, TARGETS['best threshold'])})": best,
        f"{options.resamples} resamples of {N_PATIENTS} patients, the threshold chosen anew "
        f"({verdict(again, TARGETS['bootstrap'])})": again,
    }
    results = [
        *results_of(f"the best threshold of {N_SCORES} scores", best, TARGETS["best threshold"]),
        *results_of(f"its {options.resamples} resamples over {N_PATIENTS} patients", again, TARGETS["bootstrap"]),
    ]
    details = {"best threshold": best_seconds, "bootstrap": again_seconds}
    table.save(options.out, "metrics_time", sections, details, results)


if __name__ == "__main__":
    main()
