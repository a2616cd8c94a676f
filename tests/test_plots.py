"""Figures: what they show is what the data hold, on ordinary and on odd data, and no text runs over another."""

import io
import itertools
import math
import re

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from IPython.core.pylabtools import print_figure
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import same_color, to_rgb
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from scipy.stats import binomtest
from sklearn.metrics import roc_auc_score

from rsnakit import plots
from rsnakit.headers import COLUMNS


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


def make_history(epochs: int = 5, **changes) -> pd.DataFrame:
    epoch = np.arange(1, epochs + 1)
    columns = {"epoch": epoch, "lr": 1e-3 / epoch, "grad_norm": 1.0, "skipped_steps": 0, "seconds": 3.0}
    for side, gain in (("train", 0.06), ("valid", 0.04)):
        columns |= {f"{side}_loss": gain * 10 / epoch, f"{side}_pf1": gain * epoch, f"{side}_f1": 1.5 * gain * epoch}
        columns |= {f"{side}_auc": 0.5 + gain * epoch, f"{side}_ap": gain * epoch}
    return pd.DataFrame(columns | {"train_resampled": False}).assign(**changes)


def make_breasts(n: int = 200, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    cancer = (np.arange(n) % 10 == 0).astype(int)
    return pd.DataFrame({"score": np.clip(rng.beta(1, 6, n) + 0.3 * cancer, 0, 1), "cancer": cancer})


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
    """Pairs of texts of a figure, drawn as it is saved, one of which covers part of the other."""
    renderer = drawn(figure).get_renderer()
    undrawn = set()
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            undrawn |= {tick.label1 for tick in ticks if not (ax.axison and low <= tick.get_loc() <= high)}
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text not in undrawn]
    shown = [(text.get_text(), text.get_window_extent(renderer)) for text in texts if text.get_text().strip()]
    return [
        (a, b)
        for (a, first), (b, second) in itertools.combinations(shown, 2)
        if first.x1 - second.x0 > 1
        and second.x1 - first.x0 > 1
        and first.y1 - second.y0 > 1
        and second.y1 - first.y0 > 1
    ]


TABLE = make_table()
IMAGES = [np.full((40, 20), value, np.uint16) for value in (0, 2048, 4095)]
FIGURES = {  # what every figure must stand: nothing to show, one row, one class, values missing, many categories
    "counts": lambda: plots.counts(TABLE),
    "counts of one image": lambda: plots.counts(TABLE.head(1)),
    "counts of 40 machines": lambda: plots.counts(make_table(80, machines=40)),
    "counts of no rows": lambda: plots.counts(TABLE.head(0)),
    "counts without columns": lambda: plots.counts(TABLE[["patient_id", "image_id"]]),
    "counts of missing values": lambda: plots.counts(TABLE.assign(age=math.nan, machine_id=None, view=None)),
    "rate": lambda: plots.positive_rate(TABLE),
    "rate of one image": lambda: plots.positive_rate(TABLE.head(1)),
    "rate of 40 machines": lambda: plots.positive_rate(make_table(80, machines=40)),
    "rate without cancer": lambda: plots.positive_rate(TABLE.assign(cancer=0)),
    "rate of cancer only": lambda: plots.positive_rate(TABLE.assign(cancer=1)),
    "rate of no rows": lambda: plots.positive_rate(TABLE.head(0)),
    "rate of a test set": lambda: plots.positive_rate(TABLE.drop(columns="cancer")),
    "rate without columns": lambda: plots.positive_rate(TABLE[["patient_id", "laterality", "cancer"]]),
    "headers": lambda: plots.header_overview(make_headers()),
    "headers, none": lambda: plots.header_overview(make_headers().head(0)),
    "headers, one": lambda: plots.header_overview(make_headers().head(1)),
    "headers, all unreadable": lambda: plots.header_overview(make_headers().assign(error="cut short")),
    "headers without windows": lambda: plots.header_overview(make_headers().assign(window_center=math.nan)),
    "headers without anything": lambda: plots.header_overview(pd.DataFrame(index=range(3), columns=list(COLUMNS))),
    "montage": lambda: plots.montage(IMAGES, ["a\nb"] * 3, [plots.CANCER, None, plots.NO_CANCER], columns=2),
    "montage of one": lambda: plots.montage(IMAGES[:1], ["a"], title="One image"),
    "montage of none": lambda: plots.montage([], []),
    "BI-RADS": lambda: plots.birads_leak(TABLE),
    "BI-RADS, one image": lambda: plots.birads_leak(TABLE.head(1)),
    "BI-RADS, none known": lambda: plots.birads_leak(TABLE.assign(BIRADS=math.nan)),
    "BI-RADS, no column": lambda: plots.birads_leak(TABLE.drop(columns="BIRADS")),
    "BI-RADS, no site": lambda: plots.birads_leak(TABLE.drop(columns="site_id")),
    "BI-RADS, no rows": lambda: plots.birads_leak(TABLE.head(0)),
    "before and after": lambda: plots.before_after(
        [IMAGES[0] / 4095] * 6, [(0, 0, 9, 9)] * 6, IMAGES * 2, ["a\nb"] * 6
    ),
    "before and after, one": lambda: plots.before_after([IMAGES[0] / 4095], [(0, 0, 40, 20)], IMAGES[:1], ["a"]),
    "before and after, none": lambda: plots.before_after([], [], [], []),
    "differences": lambda: plots.differences(
        IMAGES[1], {"block8": IMAGES[1] + 3, "reduce=1": IMAGES[2], "raw16": IMAGES[1]}
    ),
    "differences, none": lambda: plots.differences(IMAGES[1], {"raw16": IMAGES[1]}),
    "differences, one level": lambda: plots.differences(IMAGES[1].T, {"block8": IMAGES[1].T - 1}),
    "differences from nothing": lambda: plots.differences(IMAGES[1], {}),
    "curves": lambda: plots.training_curves({k: make_history(12, train_resampled=True) for k in range(4)}),
    "curves of one epoch": lambda: plots.training_curves({2: make_history(1)}),
    "curves of none": lambda: plots.training_curves({0: make_history(0)}),
    "curves of one class": lambda: plots.training_curves({0: make_history(3, valid_auc=math.nan, valid_ap=None)}),
    "curves of some columns": lambda: plots.training_curves({0: make_history(3)[["epoch", "train_loss"]]}),
    "scores": lambda: plots.score_histogram(make_breasts(), 0.31),
    "scores, one": lambda: plots.score_histogram(make_breasts(1)),
    "scores, none": lambda: plots.score_histogram(make_breasts().head(0), 0.5),
    "scores, all 0": lambda: plots.score_histogram(make_breasts().assign(score=0.0), math.inf),
    "scores of a test set": lambda: plots.score_histogram(make_breasts()[["score"]], 0.31),
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_says_something_and_writes_nothing_over_it(name):
    before = plt.get_fignums()
    with plt.style.context("dark_background"):  # what a user may have set
        colors = matplotlib.rcParams["text.color"], matplotlib.rcParams["figure.facecolor"]
        figure = FIGURES[name]()
        assert (matplotlib.rcParams["text.color"], matplotlib.rcParams["figure.facecolor"]) == colors
    assert plt.get_fignums() == before  # an open figure would be shown twice
    assert texts_that_touch(figure) == []
    assert same_color(figure.get_facecolor(), "white")
    if not name.startswith("montage"):
        assert len(title(figure)) > 15 and "nan" not in title(figure)
        assert same_color(figure._suptitle.get_color(), "black")
        assert figure._suptitle.get_window_extent().x1 < 1.03 * figure.bbox.x1


def test_jupyter_shows_figures_opaque_and_those_without_data_too():
    for figure in (plots.counts(TABLE.head(0)), plots.score_histogram(make_breasts())):
        pixels = plt.imread(io.BytesIO(print_figure(figure)))  # what a notebook's cell does with its value
        assert (pixels[..., 3:] == 1).all() and pixels[..., :3].min() < 0.1 and (pixels[0, 0, :3] == 1).all()


def test_the_check_of_texts_finds_a_touch():
    figure, ax = plt.subplots(figsize=(1, 1))
    ax.set_xticks([0, 1, 2], ["machine 1", "machine 2", "machine 3"])
    plt.close(figure)
    assert ("machine 1", "machine 2") in texts_that_touch(figure)


def test_counts():
    table = make_table(80, machines=40)
    figure = plots.counts(table)
    for name, column in {"site": "site_id", "machine": "machine_id", "view": "view", "density": "density"}.items():
        expected = table[column].value_counts(dropna=False)
        assert sorted(bar.get_height() for bar in bars(panel(figure, name))) == sorted(expected), name
    ages = panel(figure, "age")
    labels = [label.get_text() for label in ages.get_xticklabels()]
    assert labels == ["<40", "40-49", "50-59", "60-69", "70-79", "80+", "missing"]
    in_table = [(table["age"] == age).sum() for age in (35, 44, 58, 62, 75, 83)] + [table["age"].isna().sum()]
    assert [bar.get_height() for bar in bars(ages)] == in_table
    assert to_rgb(bars(ages)[-1].get_facecolor()) == to_rgb("#BDBDBD") != to_rgb(bars(ages)[0].get_facecolor())
    assert len(panel(figure, "machine").get_xticklabels()) == 40
    assert title(figure).startswith(f"{len(table):,} images of 80 patients; missing: density in ")
    assert f"density in {100 * table['density'].isna().mean():.1f} %" in title(figure)


def test_positive_rate_is_of_breasts_and_has_wilson_intervals():
    figure = plots.positive_rate(TABLE)
    breasts = TABLE.drop_duplicates(["patient_id", "laterality"])
    n, k = len(breasts), int(breasts["cancer"].sum())
    assert n == 120 and title(figure).startswith(
        f"{100 * k / n:.1f} % of breasts have cancer ({k} of 120). Site 1 has "
    )
    sites = breasts.groupby("site_id")["cancer"].agg(["sum", "size"])
    assert "their intervals overlap" in title(figure)
    ax = figure.axes[0]
    labels = dict(zip((tick.get_text() for tick in ax.get_yticklabels()), ax.get_yticks(), strict=True))
    for site, (positive, size) in sites.iterrows():
        y = labels[f"{site} (60)"]
        span, dot = [line for line in ax.lines if line.get_ydata()[0] == y]
        interval = binomtest(int(positive), int(size)).proportion_ci(method="wilson")
        np.testing.assert_allclose(span.get_xdata(), [100 * interval.low, 100 * interval.high])
        np.testing.assert_allclose(dot.get_xdata(), 100 * positive / size)
    every_breast_once = [tick.get_text() for tick in figure.axes[1].get_yticklabels()][1:3]
    assert every_breast_once == ["MLO (120)", "CC (120)"]  # though some have MLO twice
    assert ax.lines[0].get_xdata()[0] == 100 * k / n


def test_positive_rate_sites_apart_and_a_small_group_beyond_the_axis():
    table = make_table(400, machines=7)
    cancer = (table["site_id"] == 1) & (table["patient_id"].astype(int) % 6 == 0)
    table = table.assign(cancer=cancer.astype(int))
    table.loc[table["cancer"].idxmax(), "view"] = "LM"
    figure = plots.positive_rate(table)
    assert "Site 1 has 33.5 %, site 2 0 %: their intervals do not overlap" in title(figure)  # 67 of 200 patients
    limit = figure.axes[1].get_xlim()[1]
    beyond = [line for line in figure.axes[1].lines if line.get_marker() == ">"]
    assert limit < 70 and len(beyond) == 1 and beyond[0].get_xdata() == [limit]


def test_header_overview():
    headers = make_headers(30)
    headers.loc[[0, 1], "error"] = "cut short"
    figure = plots.header_overview(headers)
    good = headers.iloc[2:]
    sizes = panel(figure, "3 image sizes").collections[0]
    assert sorted(map(tuple, sizes.get_offsets())) == [(2000, 3000), (2500, 4000), (2500, 5000)]
    areas = dict(zip(map(tuple, sizes.get_offsets()), sizes.get_sizes(), strict=True))
    assert areas[2500, 5000] > areas[2000, 3000]  # 10 and 9 images
    points = {marks.get_label(): marks.get_offsets() for marks in panel(figure, "first windows").collections}
    assert {label: points[label][0].tolist() for label in points} == {
        "SIGMOID: 9 images": [2000, 4000], "no function: 9 images": [1500, 900],
    }  # fmt: skip
    for name in ("transfer_syntax", "photometric"):
        ax = panel(figure, name.replace("_", " "))
        assert sorted(bar.get_width() for bar in bars(ax)) == sorted(good[name].value_counts())
    assert "2 encodings, 3.6 % MONOCHROME1 and 35.7 % without a window among 28 headers" in title(figure)
    assert "2 more cannot be read" in title(figure)


def test_montage_shades_and_frames():
    images = [np.full((8, 4), 2048, np.uint16), np.full((8, 4), 0.5, np.float32), np.full((8, 4), 4095, np.uint16)]
    figure = plots.montage(images, ["a", "b", "c"], [plots.CANCER, plots.NO_CANCER, None], columns=2)
    shown = [ax for ax in figure.axes if ax.images]
    shades = [ax.images[0].norm(ax.images[0].get_array()).mean() for ax in shown]
    np.testing.assert_allclose(shades, [0.5, 0.5, 1.0], atol=1e-3)
    assert [ax.get_title(loc="left") for ax in shown] == ["a", "b", "c"] and len(figure.axes) == 4
    assert [ax.spines["left"].get_visible() for ax in shown] == [True, True, False]
    assert same_color(shown[0].spines["top"].get_edgecolor(), plots.CANCER)
    assert same_color(shown[1].spines["top"].get_edgecolor(), plots.NO_CANCER)


def test_birads_leak_of_the_original():
    """Counts of the original train.csv; an image AUC of 0.79 is what public analyses of it report."""
    cells = {(1, 0.0): (8249, 664), (1, 1.0): (15772, 0), (1, 2.0): (2265, 0), (2, math.nan): (28420, 494)}
    rows = [
        pd.DataFrame({"site_id": site, "BIRADS": birads, "cancer": [1] * sick + [0] * (n - sick)})
        for (site, birads), (n, sick) in cells.items()
    ]
    table = pd.concat(rows, ignore_index=True)
    figure = plots.birads_leak(table)
    assert "an AUC of 0.79 on images" in title(figure) and "never an input" in title(figure)
    first, second = figure.axes
    np.testing.assert_allclose([bar.get_height() for bar in bars(first)], [100 * 664 / 8249, 0, 0, 0])
    np.testing.assert_allclose([bar.get_height() for bar in bars(second)], [0, 0, 0, 100 * 494 / 28420])
    site = table[table["site_id"] == 1]
    auc = roc_auc_score(site["cancer"], site["BIRADS"].map({0.0: 1, 1.0: 0, 2.0: 0}))
    assert first.get_title(loc="left") == f"site 1: AUC {auc:.2f}"
    assert second.get_title(loc="left") == "site 2: AUC 0.50"


def test_birads_without_a_leak_or_a_class():
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"BIRADS": rng.integers(0, 3, 4000).astype(float), "cancer": rng.integers(0, 2, 4000)})
    assert "never an input" not in title(plots.birads_leak(table))
    assert "One class only" in title(plots.birads_leak(table.assign(cancer=0)))


def test_before_after_draws_the_box_where_it_is():
    display = np.zeros((2600, 1300), np.float32)  # larger than what is drawn of it
    display[300:2000, 100:900] = 1.0
    figure = plots.before_after([display], [(300, 100, 2000, 900)], [IMAGES[1]], ["machine 49"])
    above, below = figure.axes
    box = next(patch for patch in above.patches if isinstance(patch, Rectangle))
    assert (box.get_x(), box.get_y(), box.get_width(), box.get_height()) == (99.5, 299.5, 800, 1700)
    assert above.get_xlim() == (-0.5, 1299.5) and above.get_ylim() == (2599.5, -0.5)
    assert f"keeps {100 * 1700 * 800 / display.size:.1f} % of a frame" in title(figure)
    assert below.images[0].norm(2048) == pytest.approx(0.5, abs=1e-3)
    # as drawn: inside the box the image is white, and left of it black
    pixels = np.asarray(drawn(figure).buffer_rgba())[..., :3].mean(axis=2)
    for (x, y), shade in {(500, 1000): 255, (890, 1990): 255, (50, 1000): 0, (950, 1000): 0, (500, 2050): 0}.items():
        column, row = above.transData.transform((x, y)).round().astype(int)
        assert abs(pixels[len(pixels) - row, column] - shade) < 10, (x, y)


def test_before_after_of_a_small_copy_of_a_frame():
    display = np.zeros(
        (325, 260), np.float32
    )  # of a frame of 2600 x 1300 pixels: 1/8 of its rows and 1/5 of its columns
    figure = plots.before_after([display], [(400, 100, 2000, 900)], [IMAGES[1]], ["machine 49"], [(2600, 1300)])
    above, below = figure.axes
    box = next(patch for patch in above.patches if isinstance(patch, Rectangle))
    assert (box.get_x(), box.get_y(), box.get_width(), box.get_height()) == (19.5, 49.5, 160, 200)
    assert above.get_xlabel() == "2600 x 1300 pixels" and below.get_xlabel() == "40 x 20 pixels"
    assert f"keeps {100 * 1600 * 800 / (2600 * 1300):.1f} % of a frame" in title(figure)


def test_differences_counts_every_pixel():
    image = np.full((10, 20), 1000, np.uint16)
    block8, reduced = image.copy(), image.copy()
    block8[0, :4] = (999, 1001, 1003, 1003)  # 4 of 200 pixels
    reduced[:5] -= 2  # half of them
    figure = plots.differences(image, {"block8": block8, "reduce=1": reduced, "raw16": image})
    _, first, second, third, last, _ = figure.axes
    np.testing.assert_array_equal(first.images[0].get_array(), block8.astype(int) - image)
    np.testing.assert_array_equal(second.images[0].get_array()[[0, 9], 0], [-2, 0])
    limits = {ax.images[0].get_clim() for ax in (first, second, third)}
    assert limits == {(-3, 3)}  # one scale, or a small difference would look like a large one
    lines = {line.get_label(): line.get_xydata().tolist() for line in last.lines}
    assert lines == {
        "block8": [[1, 2], [2, 1], [3, 1]], "reduce=1": [[1, 50], [2, 50], [3, 0]], "raw16": [[1, 0], [2, 0], [3, 0]],
    }  # fmt: skip
    # (1 + 1 + 3 + 3) / 200, 100 * 2 / 200
    assert title(figure) == (
        "block8: 98 % of pixels as they were, at most 3 of 4,095 levels off, 0.04 on average. "
        "reduce=1: 50 % of pixels as they were, at most 2 of 4,095 levels off, 1 on average. raw16: all pixels as they were"
    )


def test_training_curves_show_the_history():
    histories = {1: make_history(6), 0: make_history(4)}
    figure = plots.training_curves(histories)
    assert len(figure.axes) == 8
    for fold, history in histories.items():
        for name, columns in {"loss": ["train_loss", "valid_loss"], "AUC": ["train_auc", "valid_auc"],
                              "pF1": ["train_f1", "train_pf1", "valid_f1", "valid_pf1"],
                              "learning rate": ["lr"]}.items():  # fmt: skip
            ax = panel(figure, f"fold {fold}: {name}")
            for line, column in zip(ax.lines, columns, strict=True):
                np.testing.assert_array_equal(line.get_xdata(), history["epoch"])
                np.testing.assert_array_equal(line.get_ydata(), history[column])
                assert line.get_marker() == "o"  # one epoch alone is a point
    pf1 = panel(figure, "fold 0: pF1")
    assert [line.get_linestyle() for line in pf1.lines] == ["--", "-", "--", "-"]
    assert same_color(pf1.lines[0].get_color(), pf1.lines[1].get_color())
    assert not same_color(pf1.lines[1].get_color(), pf1.lines[2].get_color())
    # (0.5 + 0.04 x 6 + 0.5 + 0.04 x 4) / 2, and so on
    assert title(figure).startswith("Mean of 2 folds after epoch 4, 6: validation AUC 0.70, pF1 0.20 (0.30 at")


def test_training_curves_say_where_train_scores_are_of_a_resampled_epoch():
    assert "resampled" not in title(plots.training_curves({0: make_history()}))
    assert "resampled" in title(plots.training_curves({0: make_history(train_resampled=True)}))
    assert "AUC undefined, pF1 0.20" in title(plots.training_curves({0: make_history(valid_auc=math.nan)}))


@pytest.mark.parametrize("scale", [1.0, 0.02, 30.0])
def test_score_histogram_counts_every_breast_once(scale):
    breasts = make_breasts(300).assign(score=lambda frame: scale * frame["score"])
    breasts.loc[[3, 4], "score"] = [math.nan, math.inf]
    figure = plots.score_histogram(breasts, 0.31 * scale)
    (ax,) = figure.axes
    by_color = {}
    for bar in bars(ax):
        by_color[bar.get_facecolor()[:3]] = by_color.get(bar.get_facecolor()[:3], 0) + bar.get_height()
    assert by_color == {to_rgb(plots.CANCER): 30, to_rgb(plots.NO_CANCER): 268}
    assert sum(bar.get_height() > 0 for bar in bars(ax)) > 20  # spread out, not in one bin
    kept = breasts[np.isfinite(breasts["score"])]
    called = kept["score"] >= 0.31 * scale
    numbers = [int(text.replace(",", "")) for text in re.findall(r"\b\d[\d,]*(?= of| with)", title(figure))]
    assert numbers == [called.sum(), kept.loc[called, "cancer"].sum(), 30]
    assert "2 scores are NaN or infinite" in title(figure)
    assert [line.get_xdata()[0] for line in ax.lines] == [0.31 * scale]


def test_score_histogram_without_labels_or_threshold():
    breasts = make_breasts(100)
    figure = plots.score_histogram(breasts[["score"]])
    assert sum(bar.get_height() for bar in bars(figure.axes[0])) == 100
    assert f"half of the scores are below {breasts['score'].median():.3g}" in title(figure)
    medians = breasts.groupby("cancer")["score"].median()
    expected = f"Median score {medians[1]:.3g} with cancer, {medians[0]:.3g} without"
    assert title(plots.score_histogram(breasts)) == expected
    figure = plots.score_histogram(breasts, math.inf)
    assert title(figure).startswith("0 of 100 breasts (0 %)") and not figure.axes[0].lines
