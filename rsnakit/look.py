"""The one look of all figures: style, colours with a fixed meaning, and the parts that `plots` makes figures of.

The colours are from the palette of Okabe & Ito (Color Universal Design, 2008), which people with any colour vision can
tell apart.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath

CANCER, NO_CANCER = "#D55E00", "#0072B2"  # vermillion, blue
LABEL_COLORS = {0: NO_CANCER, 1: CANCER}
SITES = {"1": "#009E73", "2": "#CC79A7"}  # bluish green, reddish purple
TRAIN, VALIDATION = "#E69F00", "#000000"  # orange, black
NEUTRAL, MISSING = "#5A6470", "#BDBDBD"
CROP = "#F0E442"  # yellow: seen on black and on grey
NAMES = {"site_id": "site", "machine_id": "machine", "BIRADS": "BI-RADS"}  # of columns, as figures write them
NESTED, NAIVE = "at thresholds from other folds (nested)", "at its best threshold (naive, flatters)"  # pF1 so called
FUNCTIONS = {"LINEAR": "#56B4E9", "LINEAR_EXACT": "#F0E442", "SIGMOID": "#000000"}

WIDTH = 10.5  # inches: the width of a cell's output in JupyterLab at 100 %
NAME_LENGTH = 20  # characters of a site's, machine's or run's name beside an axis, which keeps its width so
MAX_VALUE = 4095  # of the 12-bit images that preprocessing makes
STYLE = {
    "figure.facecolor": "white",  # also under JupyterLab's dark theme, where black text on nothing can't be read
    "figure.constrained_layout.use": True,
    "figure.dpi": 100,
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#E3E3E3",
    "legend.frameon": False,
    "text.parse_math": False,  # a $ in a name is a $
}

# A score as figures take it: a `metrics.Interval`, the dict of a summary.json, or a number alone.
Score = Iterable[float] | Mapping[str, float | None] | float | None


def styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """A function that draws a figure, in the kit's look whatever style is set; JupyterLab shows what it returns once."""

    @functools.wraps(draw)
    def in_style(*args, **kwargs) -> Figure:
        with plt.style.context(["default", STYLE]):
            figure = draw(*args, **kwargs)
        plt.close(figure)  # an open figure would be shown at the end of the cell, and again as the cell's value
        return figure

    return in_style


def titled(figure: Figure, title: str) -> Figure:
    """The figure with a title over all its panels, on as many lines as its width asks for; it ends without a full stop."""
    font, title = FontProperties(size=12, weight="bold"), title.strip().removesuffix(".")
    figure.suptitle(_wrapped(title, 72 * 0.95 * figure.get_figwidth(), font), x=0.01, ha="left", fontproperties=font)
    return figure


def _wrapped(text: str, width: float, font: FontProperties) -> str:
    """A text on as many lines as it takes for none to be wider, in points; a word that is wider is shortened."""
    lines, measure = [""], TextToPath()
    for word in re.split(r"\s+(?!%)", text.strip()):  # a number stays with its %
        word = short(word, max(8, int(width / font.get_size())))  # no letter is wider than its font's size
        longer = f"{lines[-1]} {word}".strip()
        if measure.get_text_width_height_descent(longer, font, False)[0] > width and lines[-1]:
            lines.append(word)
        else:
            lines[-1] = longer
    return "\n".join(lines)


def short(name: object, most: int = NAME_LENGTH) -> str:
    """A name of so many characters at most: of a longer one the beginning and the end, which tell it from others."""
    name = str(name)
    end = (most - 1) // 2
    return name if len(name) <= most else f"{name[: most - 1 - end].rstrip()}…{name[len(name) - end :].lstrip()}"


def nothing(why: str) -> Figure:
    """A figure with a title alone, which says why there is nothing to draw."""
    figure, ax = plt.subplots(figsize=(WIDTH, 0.7))  # Jupyter doesn't show a figure that has no axes
    ax.set_axis_off()
    return titled(figure, why)


def show_image(ax: Axes, image: np.ndarray) -> None:
    """An image in grey, (H, W) whole numbers in 0..4095 or floats in [0, 1].

    Large ones are thinned out for speed; the axes stay in pixels of the original, of which the first is at 0, 0.
    """
    height, width = image.shape
    top = MAX_VALUE if image.dtype.kind in "iu" else 1.0
    step = max(1, max(image.shape) // 1000)
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    ax.imshow(image[::step, ::step], cmap="gray", vmin=0, vmax=top, extent=extent, interpolation="antialiased")
    bare(ax)


def bare(ax: Axes) -> None:
    """Axes that hold a picture: no ticks and no frame, at the top of their place."""
    ax.set(xticks=[], yticks=[], anchor="N")
    ax.spines[:].set_visible(False)


def label_bars(ax: Axes, labels: list[str], inches: float) -> None:
    """Labels below upright bars at 0, 1, ..., long ones shortened; turned if they would meet on an axis so wide, in inches."""
    labels, room = [short(label, 12) for label in labels], 0.92 * inches / max(len(labels), 1)
    lengths = [0.086 * len(label) for label in labels]  # inches, at 10 points
    neighbours = [(left + right) / 2 for left, right in itertools.pairwise(lengths)]
    crowded = max(neighbours, default=0.0) > room
    ax.set_xticks(range(len(labels)), labels, rotation=90 if crowded else 0, fontsize=min(10.0, 65 * room))


class Line(NamedTuple):
    """Of a forest plot: a value with its interval, or a note in place of both."""

    label: str
    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    color: str = NEUTRAL
    note: str = ""


def forest(ax: Axes, sections: Mapping[str, Iterable[Line]], limits: tuple[float, float], written: str = "") -> float:
    """A line a group below the heading of its section, if that isn't empty: a dot and its interval as a bar.

    Values beyond the limits are triangles at the edge.

    Args:
        sections: lines by heading.
        limits: of the axis; NaN takes no part in them.
        written: how a value is written beside its line, such as "{:.2f}"; empty: not at all.

    Returns:
        How many lines high the whole is.
    """
    ticks, labels, bold, y = [], [], [], 0.0
    for heading, lines in sections.items():
        if heading:
            ticks.append(y), labels.append(heading), bold.append(True)
            y += 1
        for line in lines:
            ticks.append(y), labels.append(line.label), bold.append(False)
            _draw_line(ax, y, line, limits, written)
            y += 1
        y += 0.5
    ax.set_yticks(ticks, labels)
    for label, heavy in zip(ax.get_yticklabels(), bold, strict=True):
        label.set_fontweight("bold" if heavy else "normal")
    ax.tick_params(axis="y", length=0)
    ax.set(xlim=limits, ylim=(y - 0.5, -0.8))
    ax.grid(True, axis="x")
    return y - 0.5


def _draw_line(ax: Axes, y: float, line: Line, limits: tuple[float, float], written: str) -> None:
    (least, most), text = limits, line.note
    if not math.isnan(line.value):
        ax.plot([line.low, line.high], [y, y], color=line.color, linewidth=2, solid_capstyle="butt")
        marker = "<" if line.value < least else ">" if line.value > most else "o"
        ax.plot(min(max(line.value, least), most), y, marker, color=line.color, clip_on=False)
        ends = "" if math.isnan(line.low) else f" ({written} to {written})".format(line.low, line.high)
        text = written.format(line.value) + ends + f"  {line.note}" * bool(line.note) if written else line.note
    if text:
        ax.annotate(text, (1, y), (6, 0), ("axes fraction", "data"), "offset points", va="center", fontsize=9)


def color_of(value: str, colors: dict[str, str] | None = None) -> str:
    """The colour of a category: grey where it is "missing", its own where it has one in `colors`."""
    return MISSING if value == "missing" else (colors or {}).get(value, NEUTRAL)


def percent(share: float) -> str:
    """A share as text, to a tenth of a percent; all and none are whole numbers."""
    if 0 < share < 0.0005:
        return "under 0.1 %"
    return f"{100 * share:.0f} %" if share in (0, 1) else f"{100 * share:.1f} %"


def number(value: float, decimals: int = 2) -> str:
    """A score as text."""
    return "undefined" if math.isnan(value) else f"{value:.{decimals}f}"


def cut(value: float) -> str:
    """A threshold, or a rate that scores start from, as text: to two decimals as scores are, and finer where that would say
    little, next to 0, or make it 1."""
    if 0 < abs(value) < 0.1:
        return f"{value:.2g}"
    return f"{value:.4g}" if 0.995 <= value < 1 else f"{value:.2f}"


def interval_of(score: Score) -> tuple[float, float, float]:
    """Value, low and high of a score; NaN for what it lacks."""
    if isinstance(score, Mapping):
        score = [score.get(name) for name in ("value", "low", "high")]
    elif not isinstance(score, Iterable):
        score = [score, None, None]
    return tuple(math.nan if end is None else float(end) for end in score)


def counted(n: int, thing: str) -> str:
    """A number of things as text: 1 image, 1,200 images."""
    return f"{n:,} {thing}{'s' * (n != 1)}"


def times(ratio: float) -> str:
    """A ratio as text: 0.87, 1.35, 5.4, 120."""
    if not math.isfinite(ratio):
        return "unknown"
    if ratio < 0.1:
        return f"{ratio:.2g}"
    text = f"{ratio:.{2 if ratio < 1.995 else 1 if ratio < 20 else 0}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def plain(value: float) -> str:
    """A number as text, with three digits or all before the point."""
    if not math.isfinite(value):
        return "unknown"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def capital(text: str) -> str:
    """A text as a sentence begins."""
    return text[:1].upper() + text[1:]


def with_interval(score: Score, decimals: int = 2) -> str:
    """A score and its interval as text."""
    value, low, high = interval_of(score)
    ends = "" if math.isnan(low) else f" (95 %: {low:.{decimals}f} to {high:.{decimals}f})"
    return number(value, decimals) + ends
