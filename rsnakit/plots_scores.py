"""Figures of a run's scores: their intervals, thresholds, operating points, calibration.

Black is what holds for new patients; orange is what was chosen on the very data that it is scored on, and flatters.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.metrics import roc_curve

from rsnakit import look, metrics
from rsnakit.look import NAIVE, NESTED, NEUTRAL, TRAIN, VALIDATION, WIDTH, Line, Score, number, percent
from rsnakit.plots_train import draw_precision_recall

__all__ = ["calibration_curves", "operating_curves", "score_intervals", "threshold_curve"]

POINTS = ((VALIDATION, "o"), (TRAIN, "s"), ("#56B4E9", "D"), ("#009E73", "^"), ("#CC79A7", "v"))  # colour and marker
SIZE, RING = 9, 5  # of a point in points, and by how much larger one is that another lies on
NEAR = 0.04  # of an axis from 0 to 1: points that are nearer than that lie on one another
SCORES = {  # of a summary, as figures write them
    "pf1": "pF1 of the raw scores", "auc": "AUC", "average_precision": "average precision",
}  # fmt: skip


@look.styled
def score_intervals(summary: Mapping, others: Mapping[str, Score] | None = None) -> Figure:
    """The scores of a run with their 95 % intervals: nested F1 first, then the naive one, then those without a threshold.

    Args:
        summary: as `results.write_summary` gives it; `nested` is None or missing for a run with one fold.
        others: further scores, between 0 and 1, by what the figure calls them.
    """
    found = dict(summary.get("scores") or {})
    nested = summary.get("nested") or {}
    lines = [(f"pF1 {NESTED}", nested.get("f1"), VALIDATION), (f"pF1 {NAIVE}", found.get("naive_f1"), TRAIN)]
    lines += [(text, found.get(name), NEUTRAL) for name, text in SCORES.items()]
    lines += [(text, score, NEUTRAL) for text, score in (others or {}).items()]
    lines = [Line(textwrap.fill(text, 46), *look.interval_of(score), color) for text, score, color in lines]
    lines = [line for line in lines if not math.isnan(line.value)]
    if not lines:
        return look.nothing("No scores yet: they need breasts with cancer and breasts without")
    figure, ax = plt.subplots(figsize=(WIDTH, 1.1 + 0.42 * len(lines)))
    look.forest(ax, {"": lines}, (0, 1), "{:.3f}")
    ax.set_xlabel("score of breasts, out of fold, with its 95 % interval over patients")
    return look.titled(figure, _summary_title(summary, lines[0]))


@look.styled
def threshold_curve(
    curve: pd.DataFrame,
    nested: tuple[float | Sequence[float], Score] | None = None,
    naive: tuple[float, Score] | None = None,
) -> Figure:
    """pF1 of calls at each threshold with its bootstrap band, and the points that were chosen.

    Args:
        curve: threshold, f1, low, high, as `metrics.f1_curve` gives it.
        nested: thresholds of the folds, each chosen on the other folds, and the F1 of the calls they make.
        naive: the threshold chosen on the very scores that the curve is of, and its F1.
    """
    curve = curve[np.isfinite(curve["threshold"]) & curve["f1"].notna()].sort_values("threshold")
    if curve.empty or not curve["f1"].any():
        return look.nothing("No threshold has a pF1: it needs breasts with cancer, and a score that calls one of them")
    figure, ax = plt.subplots(figsize=(WIDTH, 3.8))
    ax.fill_between(curve["threshold"], curve["low"], curve["high"], color="#DDDDDD", linewidth=0, label="95 % band")
    line = "o-" if len(curve) == 1 else "-"
    ax.plot(curve["threshold"], curve["f1"], line, color=NEUTRAL, label="pF1 where scores of at least this are called")
    if naive is not None:
        _draw_choice(ax, *naive, TRAIN, marker="s", linewidth=6, markersize=10, label=NAIVE)
    if nested is not None:
        _draw_choice(ax, *nested, VALIDATION, marker="o", linewidth=1.5, markersize=6, label=NESTED)
    first, last = curve["threshold"].iloc[[0, -1]]
    margin = 0.02 * (last - first) or 0.05
    ax.set(xlabel="threshold: score of a breast at or above which it is called", xlim=(first - margin, last + margin))
    ax.set(ylabel="pF1 of the calls", ylim=(0, min(1.03, 1.08 * max(curve["high"].max(), curve["f1"].max()))))
    ax.grid(True)
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return look.titled(figure, _threshold_title(curve, nested, naive))


@look.styled
def operating_curves(
    breasts: pd.DataFrame,
    points: Mapping[str, float | Sequence[bool]] | None = None,
    scores: Mapping[str, Score] | None = None,
) -> Figure:
    """Precision against recall and ROC side by side, with the operating points of thresholds and of calls.

    Args:
        breasts: a row a breast, with score and cancer.
        points: by what the figure calls them, at most five, the most important first: a threshold, or (N,) bool which of the
            breasts are called, where several thresholds did that. One that calls nothing is left out.
        scores: `auc` and `average_precision` with their intervals, as a summary's scores have them.
    """
    finite = np.isfinite(breasts["score"].to_numpy(float))
    labels, values = breasts["cancer"].to_numpy()[finite] == 1, breasts["score"].to_numpy(float)[finite]
    if labels.all() or not labels.any():  # no rows: both
        why = f"{labels.sum():,} of {len(labels):,} breasts have cancer, and both kinds are needed"
        return look.nothing(f"No curves: {why}")
    calls = {}  # by name: what is called, and the threshold as text, if there is one
    for name, point in (points or {}).items():
        known = point is not None and len(calls) < len(POINTS)
        called = known and (np.asarray(point, bool)[finite] if np.ndim(point) else values >= point)
        if np.any(called):
            calls[name] = called, "" if np.ndim(point) else look.cut(point)
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 4.4 + 0.25 * -(-len(calls) // 2)))
    found = {"average_precision": metrics.average_precision(labels, values), "auc": metrics.auc(labels, values)}
    texts = {name: look.with_interval((scores or {}).get(name) or score) for name, score in found.items()}
    draw_precision_recall(left, labels, values, color=VALIDATION)
    left.axhline(labels.mean(), color=NEUTRAL, linestyle=":")
    left.set(title=f"average precision {texts['average_precision']}; chance: {look.cut(labels.mean())}")
    left.set(xlabel="recall: share of the cancers that are called", ylabel="precision: share with cancer")
    rates = roc_curve(labels, values, drop_intermediate=True)
    right.plot(rates[0], rates[1], color=VALIDATION)
    right.plot([0, 1], [0, 1], color=NEUTRAL, linestyle=":")
    right.set(
        title=f"AUC {texts['auc']}; chance: 0.50",
        xlabel="1 - specificity: share of those without cancer that are called",
    )
    right.set(ylabel="sensitivity: share of cancers called")
    named = {": ".join(filter(None, [name, cut])): called for name, (called, cut) in calls.items()}
    _draw_points(left, {text: (called[labels].mean(), labels[called].mean()) for text, called in named.items()})
    _draw_points(right, {text: (called[~labels].mean(), called[labels].mean()) for text, called in named.items()})
    for ax in (left, right):
        ax.set(xlim=(-0.04, 1.04), ylim=(-0.04, 1.05))
        ax.grid(True)
    if calls:
        where = "called where the score is at least (dotted: chance)"
        legend = figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, title=where)
        for handle in legend.legend_handles:
            handle.set_markersize(SIZE)
    return look.titled(figure, _operating_title(labels, calls, texts))


@look.styled
def calibration_curves(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """The share of cancers among breasts of about the same score against that score, a panel a way to calibrate.

    Args:
        tables: by what was done to the scores, those as they came first: n, predicted, observed, low and high of each bin, as
            `calibration.reliability` gives them.
    """
    tables = {name: table[table["n"] > 0].dropna(subset=["predicted"]) for name, table in tables.items()}
    tables = {name: table for name, table in tables.items() if len(table)}
    if not tables:
        return look.nothing("No scores to hold against the share of cancers")
    columns = min(len(tables), 3)
    rows = -(-len(tables) // columns)
    size = (max(3.5 * columns, 5.5), 0.9 + 3.5 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, sharex=True, sharey=True)
    top = max(table[["predicted", "observed", "high"]].max(axis=None) for table in tables.values())
    for ax, (name, table) in zip(axes.flat, tables.items(), strict=False):
        ax.plot([0, 100], [0, 100], color=NEUTRAL, linestyle=":")
        predicted, observed = 100 * table["predicted"], 100 * table["observed"]
        errors = [(observed - 100 * table["low"]).clip(lower=0), (100 * table["high"] - observed).clip(lower=0)]
        ax.errorbar(predicted, observed, errors, fmt="o-", color=VALIDATION, markersize=5, linewidth=1)
        ax.set_title(f"{name}: off by {_off(table):.1f} points")
        ax.set(xlim=(-2 * top, 104 * top), ylim=(-2 * top, 104 * top))
        ax.tick_params(labelbottom=True)
        ax.grid(True)
    for ax in axes.flat[len(tables) :]:
        ax.set_axis_off()
    figure.supxlabel("mean score of a bin's breasts, %", fontsize=10)
    figure.supylabel("breasts with cancer, %, with 95 % interval", fontsize=10)
    return look.titled(figure, _calibration_title(tables))


def _draw_points(ax: Axes, spots: Mapping[str, tuple[float, float]]) -> None:
    """Points by what the legend calls them, the most important first; where some meet, each is a ring round the one before."""
    drawn = []
    for (text, spot), (color, marker) in zip(spots.items(), POINTS, strict=False):
        under = sum(math.dist(spot, other) < NEAR for other in drawn)
        style = {"color": color, "marker": marker, "markersize": SIZE + RING * under, "markeredgecolor": "white"}
        ax.plot(*spot, linestyle="", label=text, zorder=10 - len(drawn), clip_on=False, **style)
        drawn.append(spot)


def _draw_choice(
    ax: Axes, thresholds: float | Sequence[float], score: Score, color: str, linewidth: float, **points
) -> None:
    """A chosen threshold as a point with its interval; several as points on a line."""
    thresholds = np.sort(np.atleast_1d(np.asarray(thresholds, float)))
    thresholds = thresholds[np.isfinite(thresholds)]
    value, low, high = look.interval_of(score)
    if len(thresholds) and not math.isnan(value):
        ax.plot([thresholds.mean()] * 2, [low, high], color=color, linewidth=linewidth, solid_capstyle="butt")
        ax.plot(thresholds, [value] * len(thresholds), "-", color=color, **points)


def _off(table: pd.DataFrame) -> float:
    """How far scores are from the share of cancers, in points of a hundred, on average over a reliability table's breasts."""
    return 100 * float(np.average((table["predicted"] - table["observed"]).abs(), weights=table["n"]))


# Titles that state the finding


def _summary_title(summary: Mapping, first: Line) -> str:
    nested, naive = summary.get("nested") or {}, (summary.get("scores") or {}).get("naive_f1")
    value, flattering = look.interval_of(nested.get("f1"))[0], look.interval_of(naive)[0]
    if math.isnan(value):
        title = f"{first.label.replace(chr(10), ' ')}: {look.with_interval(first[1:4], 3)}"
        return title + ("" if nested else f". {look.capital(summary.get('nested_note') or 'it has no nested score')}")
    title = f"pF1 {NESTED}: {look.with_interval(nested['f1'], 3)}"
    if not math.isnan(flattering):
        title += f"; {NAIVE}: {number(flattering, 3)}, {abs(flattering - value):.3f} "
        title += "too much" if flattering >= value else "less"
    chosen = (summary.get("epoch_choice") or {}).get("f1")
    if chosen is not None and math.isfinite(chosen):
        title += f". Choosing the epoch on the scored fold added {chosen:.3f}"
    return title


def _threshold_title(curve: pd.DataFrame, nested: tuple | None, naive: tuple | None) -> str:
    best = curve.loc[curve["f1"].idxmax()]
    near = curve.loc[curve["f1"] >= best["low"], "threshold"] if not math.isnan(best["low"]) else ()
    score, flattering = (look.interval_of(point[1])[0] if point is not None else math.nan for point in (nested, naive))
    title = ""
    if not math.isnan(score):
        title = f"pF1 {NESTED}: {look.with_interval(nested[1])}. "
    if not math.isnan(flattering):
        title += f"pF1 {NAIVE}, {look.cut(naive[0])}: {number(flattering)}. "
    if not title:
        title = f"pF1 is highest, {number(best['f1'])}, at {look.cut(best['threshold'])}. "
    if len(near) > 1:
        title += f"From {look.cut(near.min())} to {look.cut(near.max())} pF1 stays within the interval of its best"
    return title.strip().removesuffix(".")


def _operating_title(labels: np.ndarray, calls: Mapping[str, tuple[np.ndarray, str]], texts: Mapping) -> str:
    if not calls:
        precision = f"average precision {texts['average_precision']} where chance gives {look.cut(labels.mean())}"
        return f"AUC {texts['auc']}, {precision}"
    name, (called, cut) = next(iter(calls.items()))
    hits = (called & labels).sum()
    return (
        f"{f'At {name} {cut}' if cut else look.capital(name)}: {percent(hits / labels.sum())} of the cancers are called and "
        f"{percent(called[~labels].mean())} of the others; {percent(hits / called.sum())} of the called have cancer"
    )


def _calibration_title(tables: Mapping[str, pd.DataFrame]) -> str:
    (name, before), *others = tables.items()
    promised, found = (np.average(before[column], weights=before["n"]) for column in ("predicted", "observed"))
    title = (
        f"{look.capital(name)}: scores say that {percent(promised)} of breasts have cancer, in truth {percent(found)}"
    )
    if not others:
        return title
    best = min((name for name, _ in others), key=lambda name: _off(tables[name]))
    if _off(tables[best]) >= _off(before):
        return f"{title}; no calibration brings the scores nearer"
    return f"{title}; {best} brings the mean distance from {_off(before):.1f} to {_off(tables[best]):.1f} points"
