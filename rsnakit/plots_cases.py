"""Figures of single cases: the worst mistakes, and all views of a patient, with what the model saw over them.

Heat maps are drawn in a colour of their own, `HEAT`, as strong as the map says: they show what spoke for cancer. The colours
of cancer and of no cancer are those of frames.
"""

import dataclasses
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from rsnakit import look
from rsnakit.look import LABEL_COLORS, WIDTH
from rsnakit.metrics import BREAST
from rsnakit.store import Store

COLUMNS = 6  # images of a patient side by side
ACROSS = 4  # breasts side by side, in two views each: narrower than that nothing is seen
STRENGTH = 0.5  # of a heat map at its largest value: what lies below is still seen
HALF = 0.5  # of a heat map's largest value
HEAT, HEAT_NAME = "#F0E442", "yellow"  # seen on black and on grey, and unlike any frame
NO_HEAT = "nothing spoke\nfor cancer"  # of a heat map that is zero everywhere
FACTS = {"age": "age", "density": "density", "site_id": "site", "machine_id": "machine"}  # columns of a table, in words


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """An image of a patient as `patient` draws it; whatever is None or NaN is left out.

    Attributes:
        laterality, view: L or R; CC, MLO and so on.
        image_id: of the image.
        cancer: 0 or 1, of the breast.
        score: of the image, or of its breast where a model sees breasts.
        frame: (h, w) float32 in [0, 1], the frame as a viewer shows it, or a smaller copy.
        box: the crop (top, left, bottom, right) in pixels of the source frame, whose (rows, columns) `shape` has.
        image: (H, W) whole numbers in 0..4095, what the model is shown.
        heat: (H, W) float32 in [0, 1], over `image`.
        note: why there is no frame or no image.
    """

    laterality: str
    view: str
    image_id: str
    cancer: float = math.nan
    score: float = math.nan
    frame: np.ndarray | None = None
    box: tuple[int, int, int, int] | None = None
    shape: tuple[int, int] | None = None
    image: np.ndarray | None = None
    heat: np.ndarray | None = None
    note: str = ""


def worst_images(breasts: pd.DataFrame, images: pd.DataFrame, n: int = 4) -> pd.DataFrame:
    """The images that `worst_mistakes` draws, for which heat maps can be made before.

    Args:
        breasts: a row a breast: patient_id, laterality, cancer, score.
        images: of these and perhaps other breasts, those with pixels: patient_id, laterality, view, image_id.
        n: breasts of each kind.

    Returns:
        Rows of `images` with `cancer` and `score` of their breast: of the n breasts with cancer that have the lowest scores,
        then of the n without that have the highest, of each the first image of each of its first two kinds of view.
    """
    shown = images.drop_duplicates([*BREAST, "view"]).groupby(BREAST, sort=False).head(2)
    there = breasts[[*BREAST, "cancer", "score"]].merge(shown[BREAST].drop_duplicates(), on=BREAST)
    missed, called = there[there["cancer"] == 1].nsmallest(n, "score"), there[there["cancer"] == 0].nlargest(n, "score")
    others = [name for name in shown.columns if name not in ("cancer", "score")]
    return pd.concat([missed, called]).merge(shown[others], on=BREAST)


@look.styled
def worst_mistakes(
    breasts: pd.DataFrame,
    images: pd.DataFrame,
    store: Store,
    threshold: float | None = None,
    n: int = 4,
    heatmaps: Mapping[str, np.ndarray] | None = None,
) -> Figure:
    """The breasts with cancer that have the lowest scores, and those without that have the highest, each in two views.

    Args:
        breasts: a row a breast: patient_id, laterality, cancer, score.
        images: of these and perhaps other breasts, those with pixels: patient_id, laterality, view, image_id, and what is
            known of age, site, machine and density (`FACTS`), which stands below each. A breast without any is not shown.
        store: that holds these images.
        threshold: scores at or above it are called positive; None or inf: none was chosen.
        n: breasts of each kind.
        heatmaps: (H, W) in [0, 1] each, by image_id: drawn over the images that have one (`heatmaps.OutOfFold`).
    """
    shown = worst_images(breasts, images, n)
    if not len(shown):
        return look.nothing("No scores of breasts with images to show")
    heatmaps = heatmaps or {}
    counts = shown.drop_duplicates(BREAST)["cancer"].value_counts(sort=False)
    columns = 2 * min(int(counts.max()), ACROSS)
    rows = {label: -(-2 * count // columns) for label, count in counts.items()}  # of images, each kind
    cell = min(0.93 * WIDTH / columns, 2.0)  # inches
    texts = {row["image_id"]: _below(row, heatmaps.get(row["image_id"]), cell) for row in shown.to_dict("records")}
    below = 0.13 * max(text.count("\n") + 1 for text in texts.values())
    height = sum(rows.values()) * (cell * store.shape[0] / store.shape[1] + 0.45 + below) + 0.8
    size = (max(columns * cell / 0.93, 7), height)
    figure, axes = plt.subplots(sum(rows.values()), columns, figsize=size, squeeze=False)
    for ax in axes.flat:
        ax.set_axis_off()
    for first, (label, of_kind) in zip((0, rows.get(1, 0)), shown.groupby("cancer", sort=False), strict=False):
        places = axes[first : first + rows[label]].ravel()
        for number, (_, views) in enumerate(of_kind.groupby(BREAST, sort=False)):
            records = zip(store.rows_of(views["image_id"]), views.to_dict("records"), strict=True)
            for ax, (row, view) in zip(places[2 * number :], records, strict=False):
                text = f"{view['patient_id']}, {view['laterality']} {view['view']}\nscore {view['score']:.3g}"
                ax.set_axis_on()
                framed(ax, store[int(row)], text, LABEL_COLORS[label])
                show_heat(ax, heatmaps.get(view["image_id"]))
                ax.set_xlabel(texts[view["image_id"]], fontsize=8, loc="left")
        places[0].set_ylabel("cancer, lowest scores" if label else "no cancer, highest scores")
    there = breasts.merge(images[BREAST].drop_duplicates(), on=BREAST)
    lost = len(breasts) - len(there)
    note = f" ({lost:,} breasts without pixels are not shown)" if lost else ""
    seen = _say_heat([heatmaps.get(image_id) for image_id in texts])
    return look.titled(
        figure, ". ".join(filter(None, [_mistakes_title(breasts, threshold) + note, look.capital(seen)]))
    )


@look.styled
def patient(views: Sequence[View], title: str, window: str = "first") -> Figure:
    """All views of a patient: frames with their crop boxes, and below what the model is shown, with heat maps.

    Args:
        views: in the order in which they are drawn.
        title: of the whole.
        window: that the frames are shown with, `first` or `none`.
    """
    if not views:
        return look.nothing(f"{title}: no images" if title else "No images to show")
    aspects = [  # of the frames, and of what is made of them
        max([image.shape[0] / image.shape[1] for image in images if image is not None], default=0.3)
        for images in ([view.frame for view in views], [view.image for view in views])
    ]
    columns = min(len(views), COLUMNS)
    bands = -(-len(views) // columns)
    cell = min(0.96 * WIDTH / columns, 3.0 / aspects[0], 3.6 / aspects[1])  # inches
    size = (max(columns * cell / 0.96, 9), bands * (cell * sum(aspects) + 0.5) + 0.6)
    figure, axes = plt.subplots(2 * bands, columns, figsize=size, squeeze=False, height_ratios=aspects * bands)
    for ax in axes.flat:
        ax.set_axis_off()
    for number, view in enumerate(views):
        band, column = divmod(number, columns)
        _draw_view(*axes[2 * band : 2 * band + 2, column], view, cell)
    seen = _say_heat([view.heat for view in views if view.image is not None])
    if views[0].frame is not None:
        axes[0][0].set_ylabel(f"frame, window {window}")
    if views[0].image is not None:
        axes[1][0].set_ylabel("\n".join(filter(None, ["what the model is shown", seen.replace("; ", "\n")])))
    return look.titled(figure, title)


def _draw_view(above: Axes, below: Axes, view: View, inches: float) -> None:
    """The frame of a view with its crop box, and below it what was made of it with the heat map."""
    color = LABEL_COLORS.get(view.cancer)
    score = "no score" if math.isnan(view.score) else f"score {view.score:.3g}"
    for ax, image, text in ((above, view.frame, f"{view.laterality} {view.view}\n{score}"), (below, view.image, "")):
        if image is not None:
            ax.set_axis_on()
            framed(ax, image, "", color)
        ax.set_title(text, fontsize=9)
    if view.frame is not None and view.box is not None:
        draw_box(above, view.box, view.frame.shape, view.shape or view.frame.shape)
    if view.image is not None:
        show_heat(below, view.heat)
        if is_empty(view.heat):
            below.set_xlabel(NO_HEAT, fontsize=8, loc="left")
    if view.note:
        ax = below if view.image is None else above
        ax.text(0.5, 0.5, _wrapped(view.note, inches), ha="center", va="center", fontsize=8, transform=ax.transAxes)


def facts(row: Mapping, names: Iterable[str] = FACTS) -> str:
    """What a table's row says of `FACTS`, such as `age 57, density B, site 1, machine 49`; missing ones are left out."""
    known = {name: row.get(name) for name in names}
    known = {name: value for name, value in known.items() if pd.notna(value) and value != ""}
    return ", ".join(f"{FACTS[name]} {_plain(value)}" for name, value in known.items())


def framed(ax: Axes, image: np.ndarray, text: str, color: str | None) -> None:
    """An image in grey with a text above it, framed in a colour; None: no frame."""
    look.show_image(ax, image)
    ax.set_title(text, fontsize=9)
    for spine in ax.spines.values():
        spine.set(visible=color is not None, color=color or "white", linewidth=3)


def draw_box(ax: Axes, box: tuple[int, int, int, int], drawn: tuple[int, int], shape: tuple[int, int]) -> None:
    """A crop box over a frame.

    Args:
        box: (top, left, bottom, right), pixels of the source frame.
        drawn: (rows, columns) of the copy that the axes show.
        shape: (rows, columns) of the source frame.
    """
    top, left, bottom, right = box
    y, x = drawn[0] / shape[0], drawn[1] / shape[1]
    corner = (left * x - 0.5, top * y - 0.5)  # pixel 0 reaches from -0.5 to 0.5
    size = ((right - left) * x, (bottom - top) * y)
    ax.add_patch(Rectangle(corner, *size, fill=False, edgecolor=look.CROP, linewidth=1.5))


def show_heat(ax: Axes, heat: np.ndarray | None) -> None:
    """A heat map, (H, W) in [0, 1], over an image of that size, and a line round what is above a half; None: nothing."""
    if heat is None:
        return
    height, width = heat.shape
    step = max(1, max(heat.shape) // 1000)  # as look.show_image thins out
    heat = heat[::step, ::step]
    colors = np.empty((*heat.shape, 4), np.float32)
    colors[..., :3], colors[..., 3] = to_rgb(HEAT), STRENGTH * heat
    ax.imshow(colors, extent=(-0.5, width - 0.5, height - 0.5, -0.5), interpolation="nearest")
    if heat.min() < HALF < heat.max():
        ax.contour(np.arange(0, width, step), np.arange(0, height, step), heat, [HALF], colors=HEAT, linewidths=1)
    ax.set(xticks=[], yticks=[], anchor="N")


def is_empty(heat: np.ndarray | None) -> bool:
    """Whether there is a heat map, and nothing in it."""
    return heat is not None and not (heat > 0).any()


def _say_heat(heats: Sequence[np.ndarray | None]) -> str:
    """What the heat maps of a figure's images come to, of which nothing is said where there are none."""
    known = [heat for heat in heats if heat is not None]
    empty = sum(map(is_empty, known))
    if not known:
        return ""
    if empty == len(known):
        return f"no heat: nothing spoke for cancer in any of {look.counted(empty, 'image')}"
    return f"{HEAT_NAME}: what spoke for cancer" + (f"; nothing in {empty:,} of {len(known):,} images" if empty else "")


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _below(row: Mapping, heat: np.ndarray | None, inches: float) -> str:
    """What stands below an image of such a width: facts of the woman and of the machine, and an empty heat map."""
    whose, where = facts(row, ("age", "density")), facts(row, ("site_id", "machine_id"))
    most = int(12 * inches)  # letters at 8 points, of names all of which may be wide
    if len(where) > 1.5 * most:
        where = "\n".join(look.short(facts(row, [name]), most) for name in ("site_id", "machine_id"))
    return "\n".join(filter(None, [whose, where.strip(), NO_HEAT if is_empty(heat) else ""]))


def _wrapped(text: str, inches: float) -> str:
    return textwrap.fill(text, max(10, int(inches * 14)))


# Titles that state the finding


def _mistakes_title(breasts: pd.DataFrame, threshold: float | None) -> str:
    if threshold is None or not math.isfinite(threshold):
        return "Cancers with the lowest scores, and breasts without cancer with the highest"
    cancer, called = breasts["cancer"] == 1, breasts["score"] >= threshold
    missed, false = int((cancer & ~called).sum()), int((called & ~cancer).sum())
    return (
        f"At the threshold {threshold:.3g}, {missed:,} of {cancer.sum():,} breasts with cancer are missed and {false:,} of "
        f"{(~cancer).sum():,} without are called"
    )
