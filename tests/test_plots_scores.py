"""Figures of scores, subgroups, folds and runs: what they show and say is what the data hold."""

import math

import numpy as np
import pandas as pd
import pytest
from figures import (
    drawn,
    make_breasts,
    make_curve,
    make_differences,
    make_folds,
    make_groups,
    make_history,
    make_summary,
    make_table,
    title,
)
from matplotlib.colors import same_color, to_rgb
from sklearn.metrics import auc, average_precision_score, roc_auc_score

from rsnakit import look, plots, results
from rsnakit.metrics import Interval

UNKNOWN = Interval(math.nan, math.nan, math.nan)


def lines_of(ax) -> dict[str, tuple]:
    """Of a forest plot: where the dot and the ends of the bar of each label are, and what is written beside it."""
    ticks = dict(zip(ax.get_yticks(), (label.get_text() for label in ax.get_yticklabels()), strict=True))
    found = {label: [None, None, ""] for label in ticks.values()}
    for line in ax.lines:
        label = ticks.get(line.get_ydata()[0])
        if label is not None and len(line.get_xdata()) == 2:
            found[label][1] = tuple(line.get_xdata())
        elif label is not None:
            found[label][0] = line.get_xdata()[0]
    for text in ax.texts:
        found[ticks[text.xy[1]]][2] = text.get_text()
    return {label: tuple(parts) for label, parts in found.items()}


def test_the_nested_score_comes_first_and_the_naive_one_is_told_apart():
    figure = plots.score_intervals(make_summary(), {"Brier score": Interval(0.04, 0.03, 0.05)})
    (ax,) = figure.axes
    lines = lines_of(ax)
    assert [label.replace("\n", " ") for label in lines] == [
        "pF1 at thresholds from other folds (nested)", "pF1 at its best threshold (naive, flatters)",
        "pF1 of the raw scores", "AUC", "average precision", "Brier score",
    ]  # fmt: skip
    assert lines["AUC"] == (0.8, (pytest.approx(0.7), pytest.approx(0.9)), "0.800 (0.700 to 0.900)")
    assert lines["Brier score"][2] == "0.040 (0.030 to 0.050)"
    nested, naive, *others = [line.get_color() for line in ax.lines if len(line.get_xdata()) == 1]
    assert same_color(nested, "black") and same_color(naive, look.TRAIN) and set(others) == {look.NEUTRAL}
    assert title(figure) == (
        "pF1 at thresholds from other folds (nested): 0.400 (95 %: 0.300 to 0.500); at its best threshold (naive, flatters): "
        "0.420, 0.020 too much. Choosing the epoch on the scored fold added 0.010"
    )


def test_without_a_nested_score_the_naive_one_is_said_to_flatter():
    one_fold = make_summary(nested=None) | {"nested_note": "one fold: there is no other fold"}
    assert title(plots.score_intervals(one_fold)) == (
        "pF1 at its best threshold (naive, flatters): 0.420 (95 %: 0.320 to 0.520). One fold: there is no other fold"
    )
    old = make_summary()
    del old["nested"], old["epoch_choice"]
    assert title(plots.score_intervals(old)).endswith("(95 %: 0.320 to 0.520). It has no nested score")
    lower = make_summary(naive_f1={"value": 0.39, "low": 0.3, "high": 0.5}, epoch_choice=None)
    assert title(plots.score_intervals(lower)).endswith("0.390, 0.010 less")


def test_the_curve_of_thresholds_has_its_band_and_what_was_chosen():
    curve = make_curve(51)  # highest, 0.55, at 0.5
    figure = plots.threshold_curve(curve.sample(frac=1), ([0.4, None, 0.6], Interval(0.52, 0.45, 0.58)), (0.5, 0.55))
    (ax,) = figure.axes
    lines = {line.get_label(): line for line in ax.lines}
    np.testing.assert_allclose(
        lines["pF1 where scores of at least this are called"].get_xydata(), curve[["threshold", "f1"]]
    )
    band = ax.collections[0].get_paths()[0].vertices
    for ends in (curve[["threshold", "low"]], curve[["threshold", "high"]]):
        assert {(round(x, 9), round(y, 9)) for x, y in ends.to_numpy()} <= {(round(x, 9), round(y, 9)) for x, y in band}
    nested, naive = (
        lines[f"at {name}"] for name in ("thresholds from other folds (nested)", "its best threshold (naive, flatters)")
    )
    assert nested.get_xydata().tolist() == [[0.4, 0.52], [0.6, 0.52]] and same_color(nested.get_color(), "black")
    assert naive.get_xydata().tolist() == [[0.5, 0.55]] and same_color(naive.get_color(), look.TRAIN)
    assert [0.5, 0.45] in [line.get_xydata()[0].tolist() for line in ax.lines]  # the interval, at the mean threshold
    # F1 of 0.44 or more, the low end at 0.5: 2.2 t (1 - t) >= 0.44 between 0.2764 and 0.7236, in steps of 0.02
    assert title(figure) == (
        "pF1 at thresholds from other folds (nested): 0.52 (95 %: 0.45 to 0.58). pF1 at its best threshold (naive, flatters), "
        "0.50: 0.55. From 0.28 to 0.72 pF1 stays within the interval of its best"
    )
    alone = plots.threshold_curve(curve.assign(low=math.nan, high=math.nan))
    assert title(alone) == "pF1 is highest, 0.55, at 0.50"


def test_operating_points_lie_where_counting_puts_them():
    breasts = make_breasts(300)
    labels, scores = breasts["cancer"] == 1, breasts["score"]
    points = {"nested": 0.3, "best on these very scores": 0.5, "calls nothing": 2.0, "none": None}
    figure = plots.operating_curves(breasts, points, {"auc": Interval(0.9, 0.8, 0.95)})
    left, right = figure.axes
    for place, (name, cut) in enumerate(list(points.items())[:2]):
        called = scores >= cut
        recall, precision, false = called[labels].mean(), labels[called].mean(), called[~labels].mean()
        marked = [line for line in left.lines if line.get_label().startswith(name)]
        assert [line.get_label() for line in marked] == [f"{name}: {cut:.2f}"]
        np.testing.assert_allclose(marked[0].get_xydata(), [[recall, precision]])
        np.testing.assert_allclose(right.lines[2 + place].get_xydata(), [[false, recall]])
    assert len(right.lines) == 4  # the curve, chance, and two points
    assert auc(*right.lines[0].get_xydata().T) == pytest.approx(roc_auc_score(labels, scores))
    assert right.get_title(loc="left") == "AUC 0.90 (95 %: 0.80 to 0.95); chance: 0.50"
    assert (
        left.get_title(loc="left") == f"average precision {average_precision_score(labels, scores):.2f}; chance: 0.10"
    )
    assert left.lines[1].get_ydata()[0] == pytest.approx(0.1)
    called = scores >= 0.3
    shares = (100 * share.mean() for share in (called[labels], called[~labels], labels[called]))
    recall, false, precision = (f"{share:.1f} %".replace("100.0", "100") for share in shares)
    assert title(figure) == (
        f"At nested 0.30: {recall} of the cancers are called and {false} of the others; {precision} of the called have cancer"
    )
    assert title(plots.operating_curves(breasts)).startswith("AUC 0.9")


def test_calls_that_no_single_threshold_made_are_a_point_too():
    breasts = make_breasts(300)
    called = breasts["score"] >= np.where(np.arange(300) % 2, 0.3, 0.4)
    breasts.loc[7, "score"] = math.nan  # is in no figure
    kept, points = (
        breasts["score"].notna(),
        {"each fold at the others' threshold": called.to_numpy(), "04's threshold": 0.35},
    )
    figure = plots.operating_curves(breasts, points | {"none called": np.zeros(300, bool)})
    texts = [text.get_text() for text in figure.legends[0].texts]
    assert texts == ["each fold at the others' threshold", "04's threshold: 0.35"]
    cancer, called = breasts.loc[kept, "cancer"] == 1, called[kept]
    point = next(line for line in figure.axes[0].lines if line.get_label() == texts[0])
    np.testing.assert_allclose(point.get_xydata(), [[called[cancer].mean(), cancer[called].mean()]])
    point = next(line for line in figure.axes[1].lines if line.get_label() == texts[0])
    np.testing.assert_allclose(point.get_xydata(), [[called[~cancer].mean(), called[cancer].mean()]])
    assert title(figure).startswith("Each fold at the others' threshold: ")
    del points["each fold at the others' threshold"]
    assert title(plots.operating_curves(breasts, points)).startswith("At 04's threshold 0.35: ")


@pytest.mark.parametrize("apart", [0.0, 0.03])
def test_operating_points_that_meet_are_all_seen(apart):
    cancer = np.arange(100) >= 50
    breasts = pd.DataFrame({"cancer": cancer.astype(int), "score": np.linspace(0, 1, 100)})  # perfect
    cuts = 0.5 + apart * np.arange(5)
    figure = plots.operating_curves(breasts, {f"way {i}": cut for i, cut in enumerate(cuts)})
    pixels = np.asarray(drawn(figure).buffer_rgba())[..., :3] / 255
    left, right = figure.axes
    for ax in (left, right):
        box = ax.get_tightbbox()
        own = pixels[len(pixels) - int(box.y1) : len(pixels) - int(box.y0), int(box.x0) : int(box.x1)]
        for color in ("#E69F00", "#56B4E9", "#009E73", "#CC79A7"):
            assert (np.abs(own - to_rgb(color)).max(-1) < 0.02).sum() > 25, color
    sizes = [line.get_markersize() for line in left.lines if line.get_label().startswith("way")]
    assert sizes == ([9, 14, 19, 24, 29] if not apart else sizes) and sizes[0] == 9
    assert {handle.get_markersize() for handle in figure.legends[0].legend_handles} == {9}
    alone = plots.operating_curves(breasts, {"low": 0.1, "middle": 0.5, "high": 0.9}).axes[1].lines
    assert [line.get_markersize() for line in alone[2:]] == [9, 9, 9]


def test_calibration_shows_bins_and_says_how_far_scores_are_off():
    columns = ["n", "predicted", "observed", "low", "high"]
    raw = pd.DataFrame(
        [(90, 0.1, 0.02, 0.01, 0.05), (10, 0.6, 0.5, 0.3, 0.7), (0, 0.9, math.nan, 0.0, 1.0)], columns=columns
    )
    platt = raw.assign(predicted=[0.03, 0.4, 0.9])
    figure = plots.calibration_curves({"raw scores": raw, "Platt": platt})
    first, second = figure.axes
    points = first.lines[1].get_xydata()
    np.testing.assert_allclose(points, [[10, 2], [60, 50]])
    bars = first.collections[0].get_segments()
    np.testing.assert_allclose(bars, [[[10, 1], [10, 5]], [[60, 30], [60, 70]]])
    # raw: (90 x 0.08 + 10 x 0.1) / 100; Platt: (90 x 0.01 + 10 x 0.1) / 100; promised (9 + 6) / 100, found (1.8 + 5) / 100
    assert first.get_title(loc="left") == "raw scores: off by 8.2 points"
    assert second.get_title(loc="left") == "Platt: off by 1.9 points"
    assert title(figure) == (
        "Raw scores: scores say that 15.0 % of breasts have cancer, in truth 6.8 %; Platt brings the mean distance from 8.2 to "
        "1.9 points"
    )
    worse = plots.calibration_curves({"Platt": platt, "raw scores": raw})
    assert title(worse).endswith("no calibration brings the scores nearer")


def test_the_forest_has_a_line_a_group_and_names_those_apart():
    table = make_groups(make_table())
    figure = plots.forest(table, Interval(0.6, 0.5, 0.7), "AUC")
    lines = {label: line for ax in figure.axes for label, line in lines_of(ax).items()}
    assert {"site", "machine", "view", "age", "density", "implant"} <= set(lines)
    for row in table.itertuples():
        label = f"{row.group} ({row.breasts:,}, {row.positive:,})"
        if row.note:
            assert lines[label] == (None, None, row.note) and math.isnan(row.value)
        else:
            assert lines[label] == (
                row.value,
                (row.low, row.high),
                f"{row.value:.2f} ({row.low:.2f} to {row.high:.2f})",
            )
    scored = table[table["note"] == ""]
    apart = scored[(scored["low"] > 0.6) | (scored["high"] < 0.6)]
    first = apart.iloc[0]
    assert len(apart) > 3 and len(scored) < len(table)
    names = {"site_id": "site", "machine_id": "machine"}
    assert title(figure).startswith(
        f"AUC of all, 0.60, is outside the interval of {names.get(first['column'], first['column'])} {first['group']} ("
    )
    assert f" and {len(apart) - 3} more: {len(apart)} of {len(scored)} groups, where chance alone" in title(figure)
    assert title(figure).endswith(f"too small to score: {len(table) - len(scored)} of {len(table)} groups")
    one_site = next(ax for ax in figure.axes if "site" in [label.get_text() for label in ax.get_yticklabels()])
    assert any(same_color(line.get_color(), look.SITES["1"]) for line in one_site.lines)


def test_a_forest_of_groups_none_of_which_is_apart():
    table = make_groups(make_table()).assign(low=0.1, high=0.95)
    assert title(plots.forest(table, 0.6)).startswith(
        "No group's AUC is apart from that of all, 0.60, by more than its interval"
    )


def test_folds_stand_beside_all_of_them():
    table = make_folds(3, "AUC", "average precision")  # 0.70, 0.72, 0.74 and 0.76 over all, each 0.6 to 0.9
    figure = plots.fold_scores(table)
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["AUC", "average precision"]
    lines = lines_of(figure.axes[0])
    assert lines["fold 1 (5,956, 123 with cancer)"] == (0.72, (0.6, 0.9), "0.72 (0.60 to 0.90)")
    assert list(lines)[-1] == "all folds (5,956, 123 with cancer)"
    colors = [line.get_color() for line in figure.axes[0].lines if len(line.get_xdata()) == 1]
    assert [same_color(color, "black") for color in colors] == [False, False, False, True]
    assert title(figure) == (
        "AUC of 3 folds runs from 0.70 to 0.74; that over all, 0.76, is within the interval of each: noise alone could do that"
    )
    table.loc[1, "high"] = 0.75
    assert title(plots.fold_scores(table)).endswith("that over all, 0.76, is outside the interval of fold 1")


def test_runs_are_compared_as_their_differences_say():
    table = make_differences(2, "pF1 at thresholds from other folds (nested)", "AUC")
    figure = plots.comparison(table, "small")
    (ax,) = figure.axes
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == ["small less first_place_0", *table["score"][:2], "small less first_place_1", *table["score"][2:]]
    assert {text.get_text() for text in ax.texts} == {
        "+0.020 (-0.010 to +0.050)  better in 91.0 %", "+0.010 (-0.020 to +0.050)  better in 91.0 %",
    }  # fmt: skip
    assert sum(list(line.get_xdata()) == [0, 0] for line in ax.lines) == 1  # neither is better there
    assert title(figure) == (
        "small scores 0.020 above first_place_0 in pF1 at thresholds from other folds (nested), "
        "95 %: -0.010 to +0.050, and is better in 91.0 % of "
        "resamples: that may be noise"
    )
    worse = table.assign(difference=-0.03, low=-0.05, high=-0.01, probability=0.004)
    assert title(plots.comparison(worse, "small")).endswith(
        "0.030 below first_place_0 in pF1 at thresholds from other folds (nested), "
        "95 %: -0.050 to -0.010, and is better in 0.4 % of resamples"
    )


def test_figures_and_tables_call_a_score_by_one_name():
    summary = make_summary(
        nested={**make_summary()["nested"], "naive_f1": vars(Interval(0.42, 0.3, 0.5)), "optimism": 0.02}
    )
    table = results.summary_table(summary | {"folds": [0, 1], "epoch_choice": None})
    labels = {text.get_text().replace("\n", " ") for text in plots.score_intervals(summary).axes[0].get_yticklabels()}
    assert labels == {name for name in table.index if "higher" not in name}
    (curve,) = plots.threshold_curve(make_curve(), ([0.2, 0.3], 0.5), (0.3, 0.55)).axes
    training = plots.training_curves({0: make_history()}).legends[0]
    texts = [f"pF1 {text.get_text()}" for text in curve.get_legend().get_texts()] + [
        text.get_text() for text in training.texts
    ]
    assert labels - {"AUC", "average precision"} <= set(texts)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.335, "0.34"), (0.5, "0.50"), (0.0312, "0.031"), (0.0, "0.00"), (1.0, "1.00"), (0.9982, "0.9982"), (math.inf, "inf"),
     (-3.0, "-3.00")],
)  # fmt: skip
def test_thresholds_are_written_with_as_many_decimals_as_scores(value, text):
    assert look.cut(value) == text


def test_shares_of_a_title_have_as_many_digits():
    assert [look.percent(share) for share in (0.6, 0.471, 0, 1, 0.0001)] == [
        "60.0 %",
        "47.1 %",
        "0 %",
        "100 %",
        "under 0.1 %",
    ]
