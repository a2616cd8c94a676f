"""Every figure of the notebooks: data in, a matplotlib Figure out, with what it shows said in its title.

Figures tolerate what data holds: missing columns and values, a single class, no rows; where there is nothing to draw
they say why. Style and colours are those of `look`.
"""

import itertools
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from rsnakit import look
from rsnakit.look import CANCER, LABEL_COLORS, NEUTRAL, NO_CANCER, WIDTH, percent
from rsnakit.plots_cases import draw_box, framed, worst_images, worst_mistakes
from rsnakit.plots_data import birads_leak, counts, header_overview, machine_differences, positive_rate
from rsnakit.plots_groups import comparison, fold_scores, forest
from rsnakit.plots_scores import calibration_curves, operating_curves, score_intervals, threshold_curve
from rsnakit.plots_train import precision_recall, score_histogram, training_curves

__all__ = [
    "CANCER", "LABEL_COLORS", "NO_CANCER", "before_after", "birads_leak", "calibration_curves", "comparison", "counts",
    "differences", "fold_scores", "forest", "header_overview", "machine_differences", "montage", "operating_curves",
    "positive_rate", "precision_recall", "score_histogram", "score_intervals", "threshold_curve", "training_curves",
    "worst_images", "worst_mistakes",
]  # fmt: skip

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
        framed(ax, image, _shortened(text, size[0] / columns), color)
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
        look.show_image(above, display)
        draw_box(above, (top, left, bottom, right), display.shape, (height, width))
        above.set_title(_shortened(text, size[0] / len(displays)), fontsize=9)
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
        look.bare(ax)
        ax.set_title(name, fontsize=9)
        or_more = np.bincount(np.abs(error).ravel(), minlength=most + 1)[::-1].cumsum()[::-1]
        share = 100 * or_more[1:] / image.size
        last.plot(levels, share, "o" + line, drawstyle="steps-mid", color=color, markersize=3, label=name)
    scale = figure.colorbar(shown, ax=maps, location="bottom", shrink=0.8, pad=0.02)
    scale.set_label("difference, of 4,095 levels")
    scale.ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    last.set(xlabel="levels off", title="pixels so far off or farther, %", xlim=(0.5, most + 0.5))
    last.yaxis.set_major_formatter("{x:g}")
    last.yaxis.set_minor_formatter(NullFormatter())  # its own would write mathematics
    last.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    last.grid(True)
    last.legend(fontsize=9)
    return look.titled(figure, ". ".join(f"{name}: {_difference(error)}" for name, error in errors.items()))


def _shortened(text: object, inches: float) -> str:
    """A text of which no line is wider than an image of such a width, at 9 points."""
    return "\n".join(look.short(line, max(8, int(10 * inches))) for line in str(text).split("\n"))


# Titles that state the finding


def _difference(error: np.ndarray) -> str:
    """What a map of errors comes to, in levels of 12 bits."""
    if not error.any():
        return "all pixels as they were"
    kept, largest, mean = percent((error == 0).mean()), np.abs(error).max(), np.abs(error).mean()
    return f"{kept} of pixels as they were, at most {largest} of 4,095 levels off, {mean:.2f} on average"
