"""Figures: what they show is what the data hold."""

import itertools
import math
import re

import numpy as np
import pandas as pd
import pytest
from figures import (
    IMAGES,
    TABLE,
    Pictures,
    bars,
    drawn,
    make_breasts,
    make_headers,
    make_history,
    make_table,
    panel,
    scored,
    title,
)  # fmt: skip
from matplotlib.colors import same_color, to_rgb
from matplotlib.patches import Rectangle
from scipy.stats import binomtest
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score

from rsnakit import plots


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
        "block8: 98.0 % of pixels as they were, at most 3 of 4,095 levels off, 0.04 on average. "
        "reduce=1: 50.0 % of pixels as they were, at most 2 of 4,095 levels off, 1.00 on average. raw16: all pixels as they "
        "were"
    )


def test_training_curves_show_the_history():
    histories = {1: make_history(6), 0: make_history(5, averaged=True)}
    figure = plots.training_curves(histories)
    assert len(figure.axes) == 10
    sides = {0: ["train", "valid", "ema_valid"], 1: ["train", "valid"]}
    for fold, history in histories.items():
        row = figure.axes[5 * fold : 5 * fold + 5]
        assert row[0].get_title(loc="left") == f"fold {fold}: loss"
        names = [ax.get_title(loc="left") for ax in row[1:]]
        assert names == ["pF1", "AUC", "learning rate", "gradient norm"]
        columns = [[f"{side}_{name}" for side in sides[fold] for name in kinds]
                   for kinds in (["loss"], ["f1", "pf1"], ["auc"])] + [["lr"], ["grad_norm"]]  # fmt: skip
        for ax, expected in zip(row, columns, strict=True):
            for line, column in zip(ax.lines, expected, strict=True):
                np.testing.assert_array_equal(line.get_xdata(), history["epoch"])
                np.testing.assert_array_equal(line.get_ydata(), history[column])
                assert line.get_marker() == "o"  # one epoch alone is a point
    pf1 = figure.axes[1]
    assert [line.get_linestyle() for line in pf1.lines] == ["--", "-"] * 3
    colors = [to_rgb(line.get_color()) for line in pf1.lines]
    assert colors[::2] == colors[1::2] and len(set(colors)) == 3
    # (0.5 + 0.04 x 6 + 0.5 + 0.04 x 5) / 2, and so on; averaged in fold 0 alone: 0.5 + 0.05 x 5
    assert title(figure).startswith(
        "Mean of 2 folds after the last epoch (5, 6): validation AUC 0.72, pF1 of the raw scores 0.22 and at its"
    )
    assert "With averaged weights: AUC 0.75, pF1 0.25 and 0.3" in title(figure)
    assert "averaged" not in title(plots.training_curves({1: histories[1]}))


def test_training_curves_speak_of_the_epoch_whose_weights_were_kept():
    histories = {0: make_history(3, valid_auc=[0.5, 0.7, 0.6]), 1: make_history(4, valid_auc=[0.5, 0.6, 0.9, 0.4])}
    figure = plots.training_curves(histories, {0: 2, 1: 3})
    assert title(figure).startswith(
        "Mean of 2 folds with the weights that were kept, of epochs 2, 3: validation AUC 0.80, "
    )
    marked = [[line.get_xdata()[0] for line in ax.lines if line.get_linestyle() == ":"] for ax in figure.axes]
    assert marked == [[2]] * 5 + [[3]] * 5
    same = title(plots.training_curves(histories, {0: 2, 1: 2}))
    assert "that were kept, of epoch 2: validation AUC 0.65" in same
    for unknown in (None, {}, {0: 2}, {0: 2, 1: 9}):  # of a fold whose history was cut, nothing is known
        assert "Mean of 2 folds after the last epoch (3, 4): validation AUC 0.50" in title(
            plots.training_curves(histories, unknown)
        )


def test_training_curves_count_the_steps_that_fp16_left_out():
    histories = {0: make_history(3, skipped_steps=[2, 0, 1]), 1: make_history(2, skipped_steps=[0, 4])}
    assert "In 7 steps fp16 overflowed" in title(plots.training_curves(histories))
    assert "fp16" not in title(plots.training_curves({0: make_history()}))


def test_training_curves_say_where_train_scores_are_of_a_resampled_epoch():
    assert "resampled" not in title(plots.training_curves({0: make_history()}))
    assert "resampled" in title(plots.training_curves({0: make_history(train_resampled=True, train_mixed=False)}))
    mixed = title(plots.training_curves({0: make_history(train_mixed=True)}))
    assert "Training scores are of images mixed with others: not" in mixed
    assert "AUC undefined, pF1 of the raw scores 0.20" in title(
        plots.training_curves({0: make_history(valid_auc=math.nan)})
    )


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
    assert f"half of the scores are below {breasts['score'].median():.2f}" in title(figure)
    medians = breasts.groupby("cancer")["score"].median()
    expected = f"Median score {medians[1]:.2f} with cancer, {medians[0]:.2f} without"
    assert title(plots.score_histogram(breasts)) == expected
    figure = plots.score_histogram(breasts, math.inf)
    assert title(figure).startswith("0 of 100 breasts (0 %)") and not figure.axes[0].lines


@pytest.mark.parametrize("ties", [False, True])
def test_precision_and_recall_are_counted(ties):
    breasts = make_breasts(120)
    if ties:
        breasts = breasts.assign(score=breasts["score"].round(1))
    labels, scores = breasts["cancer"].tolist(), breasts["score"].tolist()
    counted = {(0.0, 1.0)}
    for cut in scores:
        called = [label for label, score in zip(labels, scores, strict=True) if score >= cut]
        counted.add((sum(called) / sum(labels), sum(called) / len(called)))
    threshold = sorted(scores)[-9]
    figure = plots.precision_recall(breasts, threshold, {"low": 0.25, "high": 0.75})
    curve, prior, point = figure.axes[0].lines
    assert {tuple(xy) for xy in curve.get_xydata()} == counted  # each way to cut, and no other
    assert curve.get_drawstyle() == "steps-post" and (np.diff(curve.get_xdata()) <= 0).all()
    assert prior.get_ydata()[0] == pytest.approx(0.1)  # 12 of 120
    called = [label for label, score in zip(labels, scores, strict=True) if score >= threshold]
    assert point.get_xydata().tolist() == [[sum(called) / 12, sum(called) / len(called)]]
    expected = average_precision_score(labels, scores)
    assert curve.get_label() == f"average precision {expected:.2f} (95 %: 0.25 to 0.75)"
    f1 = f1_score(labels, [score >= threshold for score in scores])
    assert point.get_label() == f"threshold {threshold:.2f}: pF1 of the calls {f1:.2f}"
    assert f"{sum(called)} of 12 cancers are called" in title(figure)
    assert f"{sum(called)} of the {len(called)} called have one" in title(figure)
    assert title(figure).endswith(f"Average precision {expected:.2f} over 120 breasts, where chance gives 0.10")


def test_precision_and_recall_of_each_fold():
    breasts = scored(TABLE)
    assert set(breasts["fold"]) == {0, 1, 2, 3} and breasts["cancer"].sum() > 5
    breasts.loc[breasts["fold"] == 3, "cancer"] = 0  # no recall to speak of
    *folds, curve, _ = plots.precision_recall(breasts).axes[0].lines
    for fold, line in zip((0, 1, 2), folds, strict=True):
        part = breasts[breasts["fold"] == fold]
        recall, precision = line.get_xydata()[::-1].T
        area = (np.diff(recall) * precision[1:]).sum()  # as it is drawn, in steps
        assert area == pytest.approx(average_precision_score(part["cancer"], part["score"]))
    assert not same_color(folds[0].get_color(), curve.get_color())
    legend = plots.precision_recall(breasts).axes[0].get_legend()
    assert [text.get_text()[:13] for text in legend.get_texts()] == ["each fold alo", "average preci", "chance: the p"]


def test_precision_and_recall_need_both_kinds():
    assert title(plots.precision_recall(scored(TABLE).head(0))) == "No scores to show"
    assert "0 of 120 breasts have cancer" in title(plots.precision_recall(scored(TABLE).assign(cancer=0), 0.5))
    for threshold in (None, math.inf):  # nothing is called: there is no precision to mark
        assert len(plots.precision_recall(make_breasts(), threshold).axes[0].lines) == 2


def test_worst_mistakes_are_the_worst():
    breasts = scored(TABLE).sample(frac=1, random_state=1)
    images = TABLE[TABLE["patient_id"] != "5"][::-1]  # MLO first, and of two of these the later one
    figure = plots.worst_mistakes(breasts, images, Pictures(), 0.6, n=6)
    shown = [ax for ax in figure.axes if ax.images]
    ranked = sorted(breasts[breasts["patient_id"] != "5"].itertuples(), key=lambda breast: breast.score)
    worst = [b for b in ranked if b.cancer][:6] + [b for b in ranked if not b.cancer][::-1][:6]
    texts = [f"{b.patient_id}, {b.laterality} {view}\nscore {b.score:.3g}" for b in worst for view in ("MLO", "CC")]
    assert [ax.get_title(loc="left") for ax in shown] == texts
    for ax, (breast, view) in zip(shown, itertools.product(worst, ("MLO", "CC")), strict=True):
        same = TABLE[(TABLE["patient_id"] == breast.patient_id) & (TABLE["laterality"] == breast.laterality)]
        assert (ax.images[0].get_array() == int(same[same["view"] == view]["image_id"].iloc[-1])).all()
        color = plots.CANCER if breast.cancer else plots.NO_CANCER
        assert ax.spines["left"].get_visible() and same_color(ax.spines["left"].get_edgecolor(), color)
    labels, called = breasts["cancer"] == 1, breasts["score"] >= 0.6
    missed, false = (labels & ~called).sum(), (called & ~labels).sum()
    assert missed > 0 < false and title(figure) == (
        f"At the threshold 0.6, {missed} of {labels.sum()} breasts with cancer are missed and {false} of {(~labels).sum()} "
        "without are called (2 breasts without pixels are not shown)"
    )


def test_worst_mistakes_of_a_real_store(table, store):
    breasts = scored(table)
    figure = plots.worst_mistakes(breasts, table, store, n=1)
    lowest = breasts[breasts["cancer"] == 1].sort_values("score").iloc[0]
    image = table[(table["patient_id"] == lowest["patient_id"]) & (table["laterality"] == lowest["laterality"])].iloc[0]
    np.testing.assert_array_equal(figure.axes[0].images[0].get_array(), store[store.rows_of([image["image_id"]])[0]])
    one_kind = plots.worst_mistakes(breasts[breasts["cancer"] == 0], table, store)
    assert [ax.get_ylabel() for ax in one_kind.axes if ax.get_ylabel()] == ["no cancer, highest scores"]
