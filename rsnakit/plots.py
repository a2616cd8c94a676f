"""Every figure of the notebooks: data in, a matplotlib Figure out, with what it shows said in its title.

Figures tolerate what data holds: missing columns and values, a single class, no rows; where there is nothing to draw
they say why. Style and colours are those of `look`.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, NullLocator

from rsnakit import look
from rsnakit.look import CANCER, LABEL_COLORS, NEUTRAL, NO_CANCER, TRAIN, VALIDATION, WIDTH, number, percent
from rsnakit.plots_data import birads_leak, counts, header_overview, positive_rate

__all__ = [
    "CANCER", "LABEL_COLORS", "NO_CANCER", "before_after", "birads_leak", "counts", "differences", "header_overview",
    "montage", "positive_rate", "score_histogram", "training_curves",
]  # fmt: skip

CURVES = {  # limits, then column, colour and line of each curve
    "loss": ((0, None), (("train_loss", TRAIN, "o-"), ("valid_loss", VALIDATION, "o-"))),
    "pF1": ((0, 1), (("train_f1", TRAIN, "o--"), ("train_pf1", TRAIN, "o-"),
                     ("valid_f1", VALIDATION, "o--"), ("valid_pf1", VALIDATION, "o-"))),
    "AUC": ((None, 1), (("train_auc", TRAIN, "o-"), ("valid_auc", VALIDATION, "o-"))),
    "learning rate": ((0, None), (("lr", NEUTRAL, "o-"),)),
}  # fmt: skip
LINES = (("black", "-"), (NEUTRAL, "--"), ("black", ":"), (NEUTRAL, "-."))  # of things without a colour of their own


@look.styled
def montage(
    images: Sequence[np.ndarray],
    titles: Sequence[str],
    colors: Sequence[str | None] | None = None,
    columns: int = 6,
    title: str = "",
) -> Figure:
    """Images side by side, each framed in the colour of its label.

    Args:
        images: (H, W) each: whole numbers in 0..4095 as `preprocess.prepare` gives them, or floats in [0, 1].
        titles: one an image; may have several lines.
        colors: of the frames, one an image (`LABEL_COLORS[label]`), None for no frame.
        columns: images in a row.
        title: of the whole.
    """
    if not len(images):
        return look.nothing(title or "No images to show")
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    aspect = max(image.shape[0] / image.shape[1] for image in images)
    cell = min(WIDTH / columns, 6 / aspect)  # inches: one image alone shall not fill the screen
    lines = max(str(text).count("\n") + 1 for text in titles)
    size = (max(cell * columns, 4), rows * (cell * aspect + 0.18 * lines + 0.15) + 0.5 * bool(title))
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False)
    frames = colors if colors is not None else [None] * len(images)
    for ax, image, text, color in zip(axes.flat, images, titles, frames, strict=False):
        look.show_image(ax, image)
        ax.set_title(text, fontsize=9)
        for spine in ax.spines.values():
            spine.set(visible=color is not None, color=color or "white", linewidth=3)
    for ax in axes.flat[len(images) :]:
        ax.set_axis_off()
    return look.titled(figure, title) if title else figure


@look.styled
def before_after(
    displays: Sequence[np.ndarray],
    boxes: Sequence[tuple[int, int, int, int]],
    prepared: Sequence[np.ndarray],
    titles: Sequence[str],
    shapes: Sequence[tuple[int, int]] | None = None,
) -> Figure:
    """Source frames with their crop boxes, and below each what preprocessing made of it.

    Args:
        displays: (h, w) each, float in [0, 1]: the frames as `dicom.to_display` gives them, or smaller copies of those.
        boxes: (top, left, bottom, right) each, pixels of the source frame (`Prepared.box`).
        prepared: (height, width) each, whole numbers in 0..4095 (`Prepared.image`).
        titles: one a column.
        shapes: (rows, columns) of the source frames (`Prepared.source_shape`); None where `displays` are whole.
    """
    if not len(displays):
        return look.nothing("No images to show")
    cell = min(WIDTH / len(displays), 3.0)
    aspects = [max(image.shape[0] / image.shape[1] for image in images) for images in (displays, prepared)]
    size = (max(len(displays) * cell, 5), cell * min(sum(aspects), 4) + 1.4)
    figure, axes = plt.subplots(2, len(displays), figsize=size, squeeze=False, height_ratios=aspects)
    kept, shapes = [], [display.shape for display in displays] if shapes is None else shapes
    columns = zip(axes.T, displays, boxes, prepared, titles, shapes, strict=True)
    for (above, below), display, (top, left, bottom, right), image, text, (height, width) in columns:
        y, x = display.shape[0] / height, display.shape[1] / width
        look.show_image(above, display)
        corner = (left * x - 0.5, top * y - 0.5)  # pixel 0 reaches from -0.5 to 0.5
        size = ((right - left) * x, (bottom - top) * y)
        above.add_patch(Rectangle(corner, *size, fill=False, edgecolor=look.CROP, linewidth=1.5))
        above.set_title(text, fontsize=9)
        look.show_image(below, image)
        for ax, shape in ((above, (height, width)), (below, image.shape)):
            ax.set_xlabel(f"{shape[0]} x {shape[1]} pixels", fontsize=9)
        kept.append((bottom - top) * (right - left) / (height * width))
    span = list(dict.fromkeys([percent(min(kept)), percent(max(kept))]))
    return look.titled(figure, f"The crop (yellow) keeps {' to '.join(span)} of a frame; below, what it becomes")


@look.styled
def differences(image: np.ndarray, others: Mapping[str, np.ndarray]) -> Figure:
    """An image, where others of it differ from it, and how many pixels do so by how much.

    Args:
        image: (H, W) whole numbers in 0..4095, decoded at full size and kept exactly.
        others: (H, W) each, by what was done to it: a store's format and back, a decoding at reduced size.
    """
    if not others:
        return look.nothing("Nothing to compare the image with")
    errors = {name: other.astype(np.int32) - image for name, other in others.items()}
    most = max(1, max(int(np.abs(error).max()) for error in errors.values()))
    n = 1 + len(errors)
    cell = min(0.85 * WIDTH / (n + 1.5), 5 * image.shape[1] / image.shape[0], 3)  # inches, an image's width
    size = (min(WIDTH, (n + 1.5) * cell / 0.75), cell * image.shape[0] / image.shape[1] + 1.5)
    figure, (first, *maps, last) = plt.subplots(1, n + 1, figsize=size, width_ratios=[1] * n + [1.5])
    look.show_image(first, image)
    first.set_title("the image", fontsize=9)
    levels = np.arange(1, most + 1)
    last.set(yscale="log", ylim=(50 / image.size, 150))
    for ax, (name, error), (color, line) in zip(maps, errors.items(), itertools.cycle(LINES), strict=False):
        shown = ax.imshow(error, cmap="PuOr", vmin=-most, vmax=most, interpolation="nearest")
        ax.set(xticks=[], yticks=[], anchor="N")
        ax.set_title(name, fontsize=9)
        or_more = np.bincount(np.abs(error).ravel(), minlength=most + 1)[::-1].cumsum()[::-1]
        share = 100 * or_more[1:] / image.size
        last.plot(levels, share, "o" + line, drawstyle="steps-mid", color=color, markersize=3, label=name)
    scale = figure.colorbar(shown, ax=maps, location="bottom", shrink=0.8, pad=0.02)
    scale.set_label("difference, of 4,095 levels")
    scale.ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    last.set(xlabel="levels off", title="pixels so far off or farther, %", xlim=(0.5, most + 0.5))
    last.yaxis.set_major_formatter("{x:g}")
    last.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    last.grid(True)
    last.legend(fontsize=9)
    return look.titled(figure, ". ".join(f"{name}: {_difference(error)}" for name, error in errors.items()))


@look.styled
def training_curves(histories: Mapping[int, pd.DataFrame]) -> Figure:
    """Loss, pF1, AUC and learning rate against epoch, a row of panels a fold.

    Args:
        histories: `history.csv` by fold; columns that are missing are left out.
    """
    histories = {fold: history for fold, history in sorted(histories.items()) if len(history)}
    if not histories:
        return look.nothing("No epoch is finished yet")
    n, widths = len(histories), (3, 3, 3, 2)
    figure, axes = plt.subplots(n, 4, figsize=(WIDTH, 0.9 + 2.3 * n), squeeze=False, width_ratios=widths)
    for row, (fold, history) in zip(axes, histories.items(), strict=True):
        for ax, (name, (limits, curves)) in zip(row, CURVES.items(), strict=True):
            for column, color, line in curves:
                if column in history:
                    ax.plot(history["epoch"], history[column].astype(float), line, color=color, markersize=3)
            ax.set(title=f"fold {fold}: {name}", ylim=limits, xlabel="epoch")
            ax.grid(True)
            ax.set_xlim(history["epoch"].min() - 0.5, history["epoch"].max() + 0.5)  # wide enough for one epoch, too
            ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
        row[-1].yaxis.set_major_locator(MaxNLocator(4))
        row[-1].yaxis.set_major_formatter("{x:.1e}")
    lines = {"train": {"color": TRAIN, "marker": "o"}, "validation": {"color": VALIDATION, "marker": "o"},
             "pF1 of raw scores": {"color": "grey"},
             "pF1 at the best threshold (flatters)": {"color": "grey", "linestyle": "--"}}  # fmt: skip
    handles = [Line2D([], [], label=label, markersize=3, **line) for label, line in lines.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return look.titled(figure, _curves_title(histories))


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
        ax.axvline(threshold, color="black", linestyle="--", linewidth=1.2, label=f"threshold {threshold:.3g}")
    ax.set(yscale="log", ylim=(0.7, None), xlabel="score of a breast", ylabel="breasts (log scale)")
    ticks = [step * 10**power for power in range(6) for step in (1, 2, 5)]
    ax.set_yticks([tick for tick in ticks if tick <= ax.get_ylim()[1]])
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.yaxis.set_minor_locator(NullLocator())
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    note = f" ({lost:,} scores are NaN or infinite and left out)" if lost else ""
    return look.titled(figure, _scores_title(breasts, threshold) + note)


# Titles that state the finding


def _curves_title(histories: Mapping[int, pd.DataFrame]) -> str:
    last = pd.DataFrame([history.iloc[-1] for history in histories.values()])
    names = ("valid_auc", "valid_pf1", "valid_f1")
    auc, pf1, f1 = (number(last[name].astype(float).mean() if name in last else math.nan) for name in names)
    folds = f"Fold {next(iter(histories))}" if len(histories) == 1 else f"Mean of {len(histories)} folds"
    epochs = ", ".join(f"{int(epoch)}" for epoch in sorted(last["epoch"].unique()))
    title = f"{folds} after epoch {epochs}: validation AUC {auc}, pF1 {pf1} ({f1} at the best threshold)."
    if "train_resampled" in last and last["train_resampled"].astype(bool).any():
        title += " Training scores are of a resampled epoch, richer in cancers: not to be held against validation."
    return title


def _scores_title(breasts: pd.DataFrame, threshold: float | None) -> str:
    scores = breasts["score"].to_numpy(float)
    cancer = breasts["cancer"].to_numpy() == 1 if "cancer" in breasts else None
    if threshold is None:
        if cancer is None or cancer.all() or not cancer.any():
            return f"{len(scores):,} breasts: half of the scores are below {np.median(scores):.3g}"
        return f"Median score {np.median(scores[cancer]):.3g} with cancer, {np.median(scores[~cancer]):.3g} without"
    called = scores >= threshold
    title = f"{called.sum():,} of {len(scores):,} breasts ({percent(called.mean())}) score {threshold:.3g} or more"
    if cancer is None:
        return title
    return f"{title}: {(called & cancer).sum():,} of the {cancer.sum():,} with cancer"


def _difference(error: np.ndarray) -> str:
    """What a map of errors comes to, in levels of 12 bits."""
    if not error.any():
        return "all pixels as they were"
    kept, largest, mean = percent((error == 0).mean()), np.abs(error).max(), np.abs(error).mean()
    return f"{kept} of pixels as they were, at most {largest} of 4,095 levels off, {mean:.2g} on average"
