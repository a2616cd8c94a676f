"""Figures of a training: its curves, and what its out-of-fold scores say of breasts."""

import math
from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator
from sklearn.metrics import precision_recall_curve

from rsnakit import look, metrics
from rsnakit.look import CANCER, NAIVE, NEUTRAL, NO_CANCER, TRAIN, VALIDATION, WIDTH, number, percent

AVERAGED = "#56B4E9"  # sky blue: validation of the weights' average
CURVES = {  # limits, then column, colour and line of each curve
    "loss": ((0, None), (("train_loss", TRAIN, "o-"), ("valid_loss", VALIDATION, "o-"), ("ema_valid_loss", AVERAGED, "o-"))),
    "pF1": ((0, 1.03), (("train_f1", TRAIN, "o--"), ("train_pf1", TRAIN, "o-"),
                     ("valid_f1", VALIDATION, "o--"), ("valid_pf1", VALIDATION, "o-"),
                     ("ema_valid_f1", AVERAGED, "o--"), ("ema_valid_pf1", AVERAGED, "o-"))),
    "AUC": ((None, 1.01), (("train_auc", TRAIN, "o-"), ("valid_auc", VALIDATION, "o-"), ("ema_valid_auc", AVERAGED, "o-"))),
    "learning rate": ((0, None), (("lr", NEUTRAL, "o-"),)),
    "gradient norm": ((0, None), (("grad_norm", NEUTRAL, "o-"),)),
}  # fmt: skip


@look.styled
def training_curves(histories: Mapping[int, pd.DataFrame], kept: Mapping[int, int] | None = None) -> Figure:
    """Loss, pF1, AUC, learning rate and gradient norm before clipping against epoch, a row of panels a fold.

    Args:
        histories: `history.csv` by fold; columns that are missing are left out.
        kept: by fold, the epoch whose weights were kept, where that is known (`runs.read_model`): it is marked by a dotted
            line, and the title is on its scores. Without it, or where any fold's is not known, the title is on the last epoch.
    """
    histories = {fold: history for fold, history in sorted(histories.items()) if len(history)}
    if not histories:
        return look.nothing("No epoch is finished yet")
    n, widths = len(histories), (3, 3, 3, 2.2, 2.2)
    figure, axes = plt.subplots(n, len(CURVES), figsize=(WIDTH, 0.9 + 2.3 * n), squeeze=False, width_ratios=widths)
    for row, (fold, history) in zip(axes, histories.items(), strict=True):
        for ax, (name, (limits, curves)) in zip(row, CURVES.items(), strict=True):
            for column, color, line in curves:
                if column in history:
                    ax.plot(history["epoch"], history[column].astype(float), line, color=color, markersize=3)
            if (kept or {}).get(fold) in set(history["epoch"]):
                ax.axvline(kept[fold], color=NEUTRAL, linestyle=":", linewidth=1, zorder=1)
            ax.set(title=f"fold {fold}: {name}" if ax is row[0] else name, ylim=limits, xlabel="epoch")
            ax.grid(True)
            ax.set_xlim(history["epoch"].min() - 0.5, history["epoch"].max() + 0.5)  # wide enough for one epoch, too
            ax.xaxis.set_major_locator(MaxNLocator(5 if ax in row[:3] else 4, integer=True, min_n_ticks=1))
        row[3].yaxis.set_major_locator(MaxNLocator(4))
        row[3].yaxis.set_major_formatter("{x:.1e}")
    lines = {"train": {"color": TRAIN, "marker": "o"}, "validation": {"color": VALIDATION, "marker": "o"},
             "validation, averaged weights": {"color": AVERAGED, "marker": "o"},
             "pF1 of the raw scores": {"color": "grey"},
             f"pF1 {NAIVE}": {"color": "grey", "linestyle": "--"}}  # fmt: skip
    if not any("ema_valid_loss" in history for history in histories.values()):
        del lines["validation, averaged weights"]
    if kept:
        lines["epoch whose weights were kept"] = {"color": NEUTRAL, "linestyle": ":", "linewidth": 1}
    handles = [Line2D([], [], label=label, markersize=3, **line) for label, line in lines.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return look.titled(figure, _curves_title(histories, kept or {}))


@look.styled
def precision_recall(
    breasts: pd.DataFrame, threshold: float | None = None, interval: Mapping[str, float] | None = None
) -> Figure:
    """Precision against recall of breasts' scores, with the point of a threshold and what chance would give.

    Args:
        breasts: a row a breast, with score and cancer; where a column `fold` has several, each has a thin line too.
        threshold: scores at or above it are called positive; None or inf marks no point.
        interval: of the average precision: `low` and `high` at 95 %, as a summary's scores have them.
    """
    breasts = breasts[np.isfinite(breasts["score"].astype(float))]
    labels, scores = breasts["cancer"].to_numpy() == 1, breasts["score"].to_numpy(float)
    if breasts.empty:
        return look.nothing("No scores to show")
    if labels.all() or not labels.any():
        return look.nothing(
            f"No precision and recall: {labels.sum():,} of {len(breasts):,} breasts have cancer, and both kinds are needed"
        )
    figure, ax = plt.subplots(figsize=(WIDTH, 3.8))
    folds = breasts.groupby("fold")["cancer"].max() if "fold" in breasts else ()
    if len(folds) > 1:
        for fold in folds.index[folds == 1]:
            part = (breasts["fold"] == fold).to_numpy()
            draw_precision_recall(ax, labels[part], scores[part], color="#BDBDBD", linewidth=1, label="each fold alone")
    found = metrics.average_precision(labels, scores)
    ends = [(interval or {}).get(end) for end in ("low", "high")]
    between = "" if None in ends else f" (95 %: {ends[0]:.2f} to {ends[1]:.2f})"
    draw_precision_recall(ax, labels, scores, color=VALIDATION, label=f"average precision {found:.2f}{between}")
    ax.axhline(labels.mean(), color=NEUTRAL, linestyle=":", label=f"chance: the prior, {percent(labels.mean())}")
    title = f"Average precision {found:.2f} over {len(labels):,} breasts, where chance gives {look.cut(labels.mean())}"
    if threshold is not None and (called := scores >= threshold).any():
        hits = (called & labels).sum()
        recall, precision = hits / labels.sum(), hits / called.sum()
        f1 = metrics.pfbeta(labels, called)
        ax.plot(
            recall,
            precision,
            "o",
            color=VALIDATION,
            markersize=9,
            label=f"threshold {look.cut(threshold)}: pF1 of the calls {f1:.2f}",
        )
        title = (
            f"At a score of {look.cut(threshold)} or more, {hits:,} of {labels.sum():,} cancers are called "
            f"({percent(recall)}), and {hits:,} of the {called.sum():,} called have one ({percent(precision)}). {title}"
        )
    ax.set(xlabel="recall: share of the cancers that are called", xlim=(0, 1.02))
    ax.set(ylabel="precision: share with cancer", ylim=(0, 1.03))
    ax.grid(True)
    handles = {text: handle for handle, text in zip(*ax.get_legend_handles_labels(), strict=True)}  # the folds once
    ax.legend(handles.values(), handles, loc="upper left", bbox_to_anchor=(1, 1))
    return look.titled(figure, title)


@look.styled
def score_histogram(breasts: pd.DataFrame, threshold: float | None = None) -> Figure:
    """How the scores of breasts are spread, by label where there is one, and what lies at or above a threshold.

    Args:
        breasts: a row a breast, with score, and cancer where known.
        threshold: scores at or above it are called positive; None draws no line.
    """
    finite = np.isfinite(breasts["score"].astype(float))
    breasts, lost = breasts[finite], int((~finite).sum())
    if breasts.empty:
        return look.nothing(f"No scores to show{f': {lost} are NaN or infinite' if lost else ''}")
    scores = breasts["score"].to_numpy(float)
    groups = {f"{len(scores):,} breasts": (scores, NEUTRAL)}
    if "cancer" in breasts:
        cancer = breasts["cancer"].to_numpy() == 1
        groups = {f"no cancer: {(~cancer).sum():,} breasts": (scores[~cancer], NO_CANCER),
                  f"cancer: {cancer.sum():,} breasts": (scores[cancer], CANCER)}  # fmt: skip
    drawn = threshold is not None and math.isfinite(threshold)
    figure, ax = plt.subplots(figsize=(WIDTH, 3.6))
    ends = [0.0, *scores, threshold] if drawn else [0.0, *scores]
    top = max(ends)  # the scores of a short training are small, and all would stand in one bin
    edges = np.linspace(min(ends), 1.0 if 0.5 < top < 1 or top == min(ends) else top, 41)
    values, colors = zip(*groups.values(), strict=True)
    ax.hist(values, edges, color=colors, label=list(groups))
    if drawn:
        ax.axvline(threshold, color="black", linestyle="--", linewidth=1.2, label=f"threshold {look.cut(threshold)}")
    ax.set(yscale="log", ylim=(0.7, None), xlabel="score of a breast", ylabel="breasts (log scale)")
    ticks = [step * 10**power for power in range(6) for step in (1, 2, 5)]
    ax.set_yticks([tick for tick in ticks if tick <= ax.get_ylim()[1]])
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.yaxis.set_minor_locator(NullLocator())
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    note = f" ({lost:,} scores are NaN or infinite and left out)" if lost else ""
    return look.titled(figure, _scores_title(breasts, threshold) + note)


def draw_precision_recall(ax: Axes, labels: np.ndarray, scores: np.ndarray, **line) -> None:
    """The curve of labels (N,) and scores (N,) of both classes, as the steps that it is."""
    precision, recall, _ = precision_recall_curve(labels, scores)
    ax.plot(recall, precision, drawstyle="steps-post", **line)  # recall falls: each point holds up to the next


# Titles that state the finding


def _curves_title(histories: Mapping[int, pd.DataFrame], kept: Mapping[int, int]) -> str:
    found = {fold: history[history["epoch"] == kept.get(fold)] for fold, history in histories.items()}
    known = all(map(len, found.values()))
    rows = pd.DataFrame([history.iloc[-1] for history in (found if known else histories).values()])
    names = ("valid_auc", "valid_pf1", "valid_f1")
    auc, pf1, f1 = (number(rows[name].astype(float).mean() if name in rows else math.nan) for name in names)
    folds = f"Fold {next(iter(histories))}" if len(histories) == 1 else f"Mean of {len(histories)} folds"
    epochs = sorted({int(epoch) for epoch in rows["epoch"]})
    when = ", ".join(map(str, epochs))
    if known:
        when = f"with the weights that were kept, of epoch{'s' * (len(epochs) > 1)} {when}"
    else:
        when = f"after the last epoch ({when})"
    title = f"{folds} {when}: validation AUC {auc}, pF1 of the raw scores {pf1} and {NAIVE} {f1}."
    if "ema_valid_auc" in rows:
        auc, pf1, f1 = (number(rows[f"ema_{name}"].astype(float).mean()) for name in names)
        title += f" With averaged weights: AUC {auc}, pF1 {pf1} and {f1}."
    skipped = sum(int(history["skipped_steps"].sum()) for history in histories.values() if "skipped_steps" in history)
    if skipped:
        title += f" In {skipped:,} steps fp16 overflowed, and they were left out."
    reasons = {"train_resampled": "a resampled epoch, richer in cancers", "train_mixed": "images mixed with others"}
    apart = [why for name, why in reasons.items() if name in rows and rows[name].astype(bool).any()]
    if apart:
        title += f" Training scores are of {' and of '.join(apart)}: not to be held against validation."
    return title


def _scores_title(breasts: pd.DataFrame, threshold: float | None) -> str:
    scores = breasts["score"].to_numpy(float)
    cancer = breasts["cancer"].to_numpy() == 1 if "cancer" in breasts else None
    if threshold is None:
        if cancer is None or cancer.all() or not cancer.any():
            return f"{look.counted(len(scores), 'breast')}: half of the scores are below {look.cut(np.median(scores))}"
        sides = [look.cut(np.median(scores[side])) for side in (cancer, ~cancer)]
        return f"Median score {sides[0]} with cancer, {sides[1]} without"
    called = scores >= threshold
    title = f"{called.sum():,} of {len(scores):,} breasts ({percent(called.mean())}) "
    title += (
        f"score {look.cut(threshold)} or more" if math.isfinite(threshold) else "are called, as no threshold was found"
    )
    if cancer is None:
        return title
    return f"{title}: {(called & cancer).sum():,} of the {cancer.sum():,} with cancer"
