"""Tables that figures are drawn from in tests, and what is asked of every figure."""

import itertools
import math
import re

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import Collection
from matplotlib.colors import to_hex, to_rgb, to_rgba
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Text

from rsnakit import look, subgroups
from rsnakit.headers import COLUMNS
from rsnakit.plots_cases import View


def make_table(n_patients: int = 60, machines: int = 6, seed: int = 0) -> pd.DataFrame:
    """A row an image: two breasts a patient, CC and MLO, some MLO twice; site 2 without density and BI-RADS."""
    rng = np.random.default_rng(seed)
    rows = []
    for patient in range(n_patients):
        site, sick = 1 + patient % 2, rng.random() < 0.3
        age = rng.choice([35.0, 44.0, 58.0, 62.0, 75.0, 83.0, math.nan])
        density = rng.choice(list("ABCD")) if site == 1 else None
        for laterality in "LR":
            cancer = int(sick and laterality == "L")
            birads = (0.0 if cancer else rng.choice([0.0, 1.0, 2.0])) if site == 1 else math.nan
            views = ["CC", "MLO", "MLO"] if rng.random() < 0.3 else ["CC", "MLO"]
            rows += [
                {"site_id": site, "patient_id": str(patient), "laterality": laterality, "view": view, "age": age,
                 "cancer": cancer, "BIRADS": birads, "implant": int(patient % 9 == 0), "density": density,
                 "machine_id": 40 + patient % machines}
                for view in views
            ]  # fmt: skip
    table = pd.DataFrame(rows)
    return table.assign(image_id=[str(i) for i in range(len(table))])


def make_headers(n: int = 30) -> pd.DataFrame:
    rows = {
        "image_id": [str(i) for i in range(n)], "transfer_syntax": ["JPEG2000Lossless", "JPEGLosslessSV1"] * (n // 2),
        "photometric": ["MONOCHROME1"] * (n // 10) + ["MONOCHROME2"] * (n - n // 10),
        "rows": [3000, 4000, 5000] * (n // 3), "columns": [2000, 2500, 2500] * (n // 3),
        "window_center": [2000.0, 1500.0, math.nan] * (n // 3), "window_width": [4000.0, 900.0, math.nan] * (n // 3),
        "voi_function": ["SIGMOID", None, None] * (n // 3),
    }  # fmt: skip
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(COLUMNS)


def make_origins(n_patients: int = 60, machines: int = 6) -> pd.DataFrame:
    """As `origins.measure` gives it of `make_table`."""
    table, rng = make_table(n_patients, machines), np.random.default_rng(1)
    values = {"rows": 3000 + 10 * table["machine_id"], "columns": 2500, "window_center": 2000.0, "window_width": 900.0}
    return table[["site_id", "machine_id"]].assign(**values, brightness=rng.uniform(0.2, 0.6, len(table)))


def make_history(epochs: int = 5, averaged: bool = False, **changes) -> pd.DataFrame:
    epoch = np.arange(1, epochs + 1)
    columns = {"epoch": epoch, "lr": 1e-3 / epoch, "grad_norm": 1.0, "skipped_steps": 0, "seconds": 3.0}
    for side, gain in (("train", 0.06), ("valid", 0.04), *[("ema_valid", 0.05)] * averaged):
        columns |= {f"{side}_loss": gain * 10 / epoch, f"{side}_pf1": gain * epoch, f"{side}_f1": 1.5 * gain * epoch}
        columns |= {f"{side}_auc": 0.5 + gain * epoch, f"{side}_ap": gain * epoch}
    return pd.DataFrame(columns | {"train_resampled": False}).assign(**changes)


def make_breasts(n: int = 200, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    cancer = (np.arange(n) % 10 == 0).astype(int)
    return pd.DataFrame({"score": np.clip(rng.beta(1, 6, n) + 0.3 * cancer, 0, 1), "cancer": cancer})


TABLE = make_table()


def make_summary(nested: dict | None = {}, epoch_choice: dict | None = {}, **scores) -> dict:  # noqa: B006
    """As `results.write_summary` gives it, of four folds."""
    named = {"pf1": 0.2, "auc": 0.8, "average_precision": 0.35, "naive_f1": 0.42}
    found = {name: {"value": value, "low": value - 0.1, "high": value + 0.1} for name, value in named.items()}
    f1 = {"f1": {"value": 0.4, "low": 0.3, "high": 0.5}, "thresholds": {"0": 0.3, "1": 0.2}}
    return {
        "scores": found | scores,
        "nested": f1 if nested == {} else nested,
        "epoch_choice": {"f1": 0.01} if epoch_choice == {} else epoch_choice,
    }


def make_curve(n: int = 50) -> pd.DataFrame:
    thresholds = np.linspace(0.0, 1.0, n)
    f1 = 2.2 * thresholds * (1 - thresholds)
    return pd.DataFrame({"threshold": thresholds, "f1": f1, "low": 0.8 * f1, "high": 1.2 * f1})


def make_reliability(n: int = 10) -> pd.DataFrame:
    predicted = np.linspace(0.0, 0.3, n) ** 2
    columns = {
        "n": 100,
        "predicted": predicted,
        "observed": 0.7 * predicted,
        "low": 0.5 * predicted,
        "high": predicted + 0.01,
    }
    return pd.DataFrame(columns)


def make_groups(table: pd.DataFrame) -> pd.DataFrame:
    """What `subgroups.group_table` gives of a table with a row an image, without a bootstrap."""
    rows = []
    for name in subgroups.BY:
        values, order = subgroups.categories(table, name)
        for place, group in enumerate(order):
            sick = int(table.loc[(values == group).to_numpy(), "cancer"].sum())
            value = 0.5 + 0.4 * place / len(order) if sick > 3 else math.nan
            note = "" if sick > 3 else f"too few: {sick} with cancer"
            rows.append((name, group, int((values == group).sum()), sick, value, value - 0.1, value + 0.07, note))
    return pd.DataFrame(rows, columns=["column", "group", *subgroups.COUNTED])


def make_folds(n: int, *scores: str) -> pd.DataFrame:
    folds = [*map(str, range(n)), "all"] if n > 1 else ["0"]
    rows = [(name, fold, 5956, 123, 0.7 + 0.02 * i, 0.6, 0.9, "") for name in scores for i, fold in enumerate(folds)]
    return pd.DataFrame(rows, columns=["score", "fold", *subgroups.COUNTED])


def make_differences(n: int, *scores: str) -> pd.DataFrame:
    rows = [
        (f"first_place_{i}", name, 0.02 - 0.01 * i, -0.01 - 0.01 * i, 0.05, 0.91) for i in range(n) for name in scores
    ]
    return pd.DataFrame(rows, columns=["other", "score", "difference", "low", "high", "probability"])


def make_views(n: int, **changes) -> list[View]:
    """Views of a patient, L and R in turn, CC and MLO."""
    image = np.full((64, 32), 900, np.uint16)
    whole = {"cancer": 1, "score": 0.3, "frame": np.full((40, 30), 0.5, np.float32), "box": (100, 0, 300, 200),
             "shape": (400, 300), "image": image, "heat": image / np.float32(900)} | changes  # fmt: skip
    return [View("LR"[i % 2], ("CC", "MLO")[i // 2 % 2], str(1_000_000_000 + i), **whole) for i in range(n)]


class Pictures:
    """A store of images of one grey each, 0, 1, 2 and so on, by image_id."""

    shape = (64, 32)

    def rows_of(self, image_ids) -> np.ndarray:
        return np.array([int(image_id) for image_id in image_ids], np.int64)

    def __getitem__(self, row: int) -> np.ndarray:
        return np.full(self.shape, row, np.uint16)


def scored(table: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """A row a breast of `make_table`, with a score and a fold."""
    breasts = table.drop_duplicates(["patient_id", "laterality"])[["patient_id", "laterality", "cancer"]]
    noise = np.random.default_rng(seed).random(len(breasts))
    return breasts.assign(score=0.7 * noise + 0.3 * breasts["cancer"], fold=breasts["patient_id"].astype(int) % 4)


IMAGES = [np.full((40, 20), value, np.uint16) for value in (0, 2048, 4095)]


def title(figure) -> str:
    return " ".join(figure._suptitle.get_text().split())


def bars(ax) -> list[Rectangle]:
    return [patch for container in ax.containers if hasattr(container, "patches") for patch in container.patches]


def panel(figure, start: str):
    return next(ax for ax in figure.axes if ax.get_title(loc="left").startswith(start))


def drawn(figure) -> FigureCanvasAgg:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return canvas


def texts_that_touch(figure) -> list[tuple[str, str]]:
    """Pairs of texts of a figure, drawn as it is saved, one of which covers part of the other or reads on from it."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()  # places everything, and takes half the time of a picture
    shown = [
        (text.get_text(), text.get_window_extent(renderer), text.get_rotation() == 0) for text in shown_texts(figure)
    ]
    found = []
    for (a, first, level), (b, second, _) in itertools.combinations(shown, 2):
        across = min(first.x1, second.x1) - max(first.x0, second.x0)  # pixels; below 0: so far apart
        down = min(first.y1, second.y1) - max(first.y0, second.y0)
        on_one_line = level and down > 0.6 * min(first.height, second.height)
        if (across > 1 and down > 1) or (across > -2 and on_one_line):
            found.append((a, b))
    return found


# ---- what is asked of every figure

OKABE_ITO = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")  # beside black and greys
VARIABLES = {  # names of columns and of a summary's parts, for which figures have words
    "site_id", "machine_id", "patient_id", "image_id", "naive_f1", "nested_f1", "nested_note", "epoch_choice",
    "average_precision", "pf1", "valid_auc", "valid_pf1", "valid_f1", "ema_valid_auc", "train_loss", "valid_loss",
    "transfer_syntax", "voi_function", "window_center",
}  # fmt: skip
COLOR_MAPS = ("gray", "inferno", "PuOr")  # told apart by their lightness, or as orange and purple are


def faults(figure) -> list[str]:
    """What of the one look a figure breaks, drawn as it is saved; nothing for a good one."""
    touching = texts_that_touch(figure)  # draws it
    found = [f"{a!r} lies over {b!r}" for a, b in touching]
    found += [f"{text!r} is cut off" for text in texts_cut_off(figure)]
    words = {word for text in shown_texts(figure) for word in re.findall(r"[a-z0-9_]+", text.get_text())}
    found += [f"{name} is a variable's name" for name in sorted(words & VARIABLES)]
    if figure.get_figwidth() > look.WIDTH + 0.01:
        found.append(f"{figure.get_figwidth():.1f} inches wide: a notebook would draw it smaller, texts with it")
    for text in shown_texts(figure):
        if text.get_fontsize() < 7:
            found.append(f"{text.get_text()!r} has {text.get_fontsize():.1f} points")
        if contrast(text.get_color()) < 4.5:  # WCAG 2.1, success criterion 1.4.3
            found.append(f"{text.get_text()!r} is too pale to read on white")
    palette = {to_rgb(color) for color in OKABE_ITO}
    odd = [color for color in colors_of(figure) if color not in palette and np.ptp(color) > 0.1]  # others are greys
    found += [f"a colour that is not of the palette: {to_hex(color)}" for color in sorted(odd)]
    maps = {image.get_cmap().name for image in figure.findobj(AxesImage) if np.ndim(image.get_array()) == 2}
    found += [f"the colour map {name}" for name in sorted(maps - set(COLOR_MAPS))]
    return list(dict.fromkeys(found))


def shown_texts(figure) -> list[Text]:
    """Texts that are drawn, those of ticks beyond their axis left out."""
    undrawn = set()
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            undrawn |= {tick.label1 for tick in ticks if not (ax.axison and low <= tick.get_loc() <= high)}
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    return [text for text in texts if text not in undrawn]


def texts_cut_off(figure) -> list[str]:
    renderer, box = figure.canvas.get_renderer(), figure.bbox
    spans = {text: text.get_window_extent(renderer) for text in shown_texts(figure)}
    return [
        text.get_text()
        for text, span in spans.items()
        if span.x0 < box.x0 - 1 or span.y0 < box.y0 - 1 or span.x1 > box.x1 + 1 or span.y1 > box.y1 + 1
    ]


def contrast(color) -> float:
    """Of a colour on white, 1 to 21, as WCAG 2.1 defines it."""
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return 1.05 / (float(linear @ (0.2126, 0.7152, 0.0722)) + 0.05)


def colors_of(figure) -> set[tuple]:
    """Colours of lines, bars, frames and points; of images and what a colour map paints not."""
    found = []
    for line in figure.findobj(Line2D):
        found += [line.get_color()] * (line.get_linestyle() != "None")
        found += [line.get_markerfacecolor()] * (line.get_marker() in line.filled_markers)
        found += [line.get_markeredgecolor()] * (line.get_marker() not in ("None", "", None))
    for patch in figure.findobj(Patch):
        found += [patch.get_facecolor()] * patch.get_fill() + [patch.get_edgecolor()] * (patch.get_linewidth() > 0)
    for points in figure.findobj(Collection):
        if points.get_array() is None:
            found += [*points.get_facecolor(), *points.get_edgecolor()]
    return {to_rgb(color) for color in found if not (isinstance(color, str) and color == "none") and to_rgba(color)[3]}
