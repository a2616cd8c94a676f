"""Every figure on every odd input: one class, one point, no point, values missing, 40 machines. Each says something, in the one
look, and writes nothing over it."""

import io
import math
import re
from collections.abc import Callable
from importlib import import_module
from inspect import signature
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import speed_tables
import torch
from figures import (
    IMAGES,
    TABLE,
    Pictures,
    faults,
    make_breasts,
    make_curve,
    make_differences,
    make_folds,
    make_groups,
    make_headers,
    make_history,
    make_origins,
    make_reliability,
    make_summary,
    make_table,
    make_views,
    scored,
    texts_that_touch,
    title,
)
from IPython.core.pylabtools import print_figure
from matplotlib.colors import same_color
from matplotlib.figure import Figure
from matplotlib.text import Text
from torch import nn

from rsnakit import look, plots, plots_cases, plots_models
from rsnakit.headers import COLUMNS
from rsnakit.metrics import Interval
from rsnakit.nested import NOT_NESTED

MODULES = ("plots", "plots_cases", "plots_data", "plots_groups", "plots_models", "plots_scores", "plots_speed",
           "plots_train", "plots_tricks")  # fmt: skip
ODD = ("one class", "one point", "no point", "missing", "many")
UNKNOWN = Interval(math.nan, math.nan, math.nan)
MANY = make_table(80, machines=40)  # patients, a machine of their own for each two
NESTED = "pF1 at thresholds from other folds (nested)"
MAPS = {f"stage {k}": torch.arange(24.0).reshape(2, 4, 3) % (k + 2) for k in range(5)}
NAMES = [f"blocks.{i}.{j}" for i in range(8) for j in range(5)]


def without_values(frame: pd.DataFrame, *names: str) -> pd.DataFrame:
    return frame.assign(**dict.fromkeys(names, math.nan))


FIGURES: dict[str, dict[str, Callable[[], Figure]]] = {  # by the function, then by what it is drawn from
    "counts": {
        "ordinary": lambda: plots.counts(TABLE),
        "one point": lambda: plots.counts(TABLE.head(1)),
        "no point": lambda: plots.counts(TABLE.head(0)),
        "missing": lambda: plots.counts(TABLE.assign(age=math.nan, machine_id=None, view=None)),
        "many": lambda: plots.counts(MANY),
        "no columns": lambda: plots.counts(TABLE[["patient_id", "image_id"]]),
    },
    "positive_rate": {
        "ordinary": lambda: plots.positive_rate(TABLE),
        "one class": lambda: plots.positive_rate(TABLE.assign(cancer=0)),
        "cancer alone": lambda: plots.positive_rate(TABLE.assign(cancer=1)),
        "one point": lambda: plots.positive_rate(TABLE.head(1)),
        "no point": lambda: plots.positive_rate(TABLE.head(0)),
        "missing": lambda: plots.positive_rate(without_values(TABLE, "age", "machine_id", "view", "density", "site_id")),
        "many": lambda: plots.positive_rate(MANY),
        "a test set": lambda: plots.positive_rate(TABLE.drop(columns="cancer")),
        "no columns": lambda: plots.positive_rate(TABLE[["patient_id", "laterality", "cancer"]]),
    },
    "header_overview": {
        "ordinary": lambda: plots.header_overview(make_headers()),
        "one point": lambda: plots.header_overview(make_headers().head(1)),
        "no point": lambda: plots.header_overview(make_headers().head(0)),
        "missing": lambda: plots.header_overview(pd.DataFrame(index=range(3), columns=list(COLUMNS))),
        "many": lambda: plots.header_overview(
            make_headers().assign(rows=3000.0 + np.arange(30) ** 2, voi_function=[f"OWN_{i % 9}" for i in range(30)],
                                  window_center=1000.0 + np.arange(30), window_width=500.0)
        ),
        "all unreadable": lambda: plots.header_overview(make_headers().assign(error="cut short")),
        "no windows": lambda: plots.header_overview(make_headers().assign(window_center=math.nan)),
    },
    "machine_differences": {
        "ordinary": lambda: plots.machine_differences(make_origins()),
        "one point": lambda: plots.machine_differences(make_origins().head(1)),
        "no point": lambda: plots.machine_differences(make_origins().head(0)),
        "missing": lambda: plots.machine_differences(
            without_values(make_origins(), "brightness", "rows", "window_center", "machine_id", "site_id")
        ),
        "many": lambda: plots.machine_differences(make_origins(80, 40)),
    },
    "birads_leak": {
        "ordinary": lambda: plots.birads_leak(TABLE),
        "one class": lambda: plots.birads_leak(TABLE.assign(cancer=1)),
        "one point": lambda: plots.birads_leak(TABLE.head(1)),
        "no point": lambda: plots.birads_leak(TABLE.head(0)),
        "missing": lambda: plots.birads_leak(without_values(TABLE, "BIRADS", "site_id")),
        "no column": lambda: plots.birads_leak(TABLE.drop(columns="BIRADS")),
        "no site": lambda: plots.birads_leak(TABLE.drop(columns="site_id")),
    },
    "montage": {
        "ordinary": lambda: plots.montage(IMAGES, ["a\nb"] * 3, [plots.CANCER, None, plots.NO_CANCER], columns=2),
        "one point": lambda: plots.montage(IMAGES[:1], ["a"], title="One image"),
        "no point": lambda: plots.montage([], []),
        "many": lambda: plots.montage(IMAGES * 6, [f"machine {i}\n0" for i in range(18)], columns=8),
    },
    "before_after": {
        "ordinary": lambda: plots.before_after([IMAGES[0] / 4095] * 6, [(0, 0, 9, 9)] * 6, IMAGES * 2, ["a\nb"] * 6),
        "one point": lambda: plots.before_after([IMAGES[0] / 4095], [(0, 0, 40, 20)], IMAGES[:1], ["a"]),
        "no point": lambda: plots.before_after([], [], [], []),
    },
    "differences": {
        "ordinary": lambda: plots.differences(
            IMAGES[1], {"block8": IMAGES[1] + 3, "reduce=1": IMAGES[2], "raw16": IMAGES[1]}
        ),
        "one point": lambda: plots.differences(IMAGES[1].T, {"block8": IMAGES[1].T - 1}),
        "no point": lambda: plots.differences(IMAGES[1], {}),
        "none": lambda: plots.differences(IMAGES[1], {"raw16": IMAGES[1]}),
    },
    "training_curves": {
        "ordinary": lambda: plots.training_curves({k: make_history(12, train_resampled=True) for k in range(2)}),
        "kept": lambda: plots.training_curves({0: make_history(12, True), 1: make_history(9)}, {0: 7, 1: 9}),
        "one class": lambda: plots.training_curves({0: make_history(3, valid_auc=math.nan, valid_ap=None)}),
        "one point": lambda: plots.training_curves({2: make_history(1)}),
        "no point": lambda: plots.training_curves({0: make_history(0)}),
        "missing": lambda: plots.training_curves({0: make_history(3)[["epoch", "train_loss"]]}),
        "many": lambda: plots.training_curves(
            {k: make_history(120, k > 0, train_resampled=True, skipped_steps=2) for k in range(2)}
        ),
    },
    "precision_recall": {
        "ordinary": lambda: plots.precision_recall(make_breasts(), 0.31, {"low": 0.2, "high": 0.7}),
        "one class": lambda: plots.precision_recall(make_breasts().assign(cancer=1), 0.5),
        "one class a fold": lambda: plots.precision_recall(scored(TABLE).assign(fold=lambda b: b["cancer"])),
        "one point": lambda: plots.precision_recall(make_breasts(1), math.inf),
        "no point": lambda: plots.precision_recall(scored(TABLE).head(0), 0.5),
        "missing": lambda: plots.precision_recall(make_breasts().assign(score=[math.nan, -3.0, 9.0, 9.0] * 50)),
        "many": lambda: plots.precision_recall(scored(MANY).assign(fold=range(160)), 0.5),
        "all 0": lambda: plots.precision_recall(make_breasts().assign(score=0.0), 0.0, {"low": None, "high": None}),
    },
    "score_histogram": {
        "ordinary": lambda: plots.score_histogram(make_breasts(), 0.31),
        "one class": lambda: plots.score_histogram(make_breasts().assign(cancer=0), 0.31),
        "one point": lambda: plots.score_histogram(make_breasts(1)),
        "no point": lambda: plots.score_histogram(make_breasts().head(0), 0.5),
        "missing": lambda: plots.score_histogram(make_breasts().assign(score=[math.nan, 0.2, math.inf, 0.4] * 50)),
        "all 0": lambda: plots.score_histogram(make_breasts().assign(score=0.0), math.inf),
        "a test set": lambda: plots.score_histogram(make_breasts()[["score"]], 0.31),
    },
    "score_intervals": {
        "ordinary": lambda: plots.score_intervals(make_summary(), {"sensitivity at 90 % specificity": Interval(0.4, 0.3, 0.5)}),
        "one class": lambda: plots.score_intervals(make_summary(nested=None, auc=None, average_precision=None)),
        "one fold": lambda: plots.score_intervals(make_summary(nested=None) | {"nested_note": NOT_NESTED, "folds": [0]}),
        "one point": lambda: plots.score_intervals({"scores": {"auc": 0.5}}),
        "no point": lambda: plots.score_intervals({}),
        "missing": lambda: plots.score_intervals(make_summary(epoch_choice=None, pf1=None), {"Brier": UNKNOWN, "other": None}),
        "many": lambda: plots.score_intervals(make_summary(), {f"recall rate of machine {i}": i / 40 for i in range(20)}),
    },
    "threshold_curve": {
        "ordinary": lambda: plots.threshold_curve(make_curve(), ([0.2, 0.3, 0.25], Interval(0.5, 0.4, 0.6)), (0.3, 0.55)),
        "one class": lambda: plots.threshold_curve(make_curve().assign(f1=0.0, low=0.0, high=0.0), None, (math.inf, 0.0)),
        "one point": lambda: plots.threshold_curve(make_curve().head(1)),
        "no point": lambda: plots.threshold_curve(make_curve().head(0), None, (0.3, 0.5)),
        "missing": lambda: plots.threshold_curve(without_values(make_curve(), "low", "high"), ([math.inf, 0.3], UNKNOWN)),
        "many": lambda: plots.threshold_curve(make_curve(), (np.linspace(0.1, 0.9, 40), 0.4), (0.3, Interval(0.5, 0.4, 0.6))),
    },
    "operating_curves": {
        "ordinary": lambda: plots.operating_curves(make_breasts(), {"nested": 0.3, "best": 0.4}, make_summary()["scores"]),
        "one class": lambda: plots.operating_curves(make_breasts().assign(cancer=1), {"nested": 0.3}),
        "one point": lambda: plots.operating_curves(make_breasts(1), {"nested": 0.3}),
        "no point": lambda: plots.operating_curves(make_breasts().head(0)),
        "missing": lambda: plots.operating_curves(
            make_breasts().assign(score=[math.nan, -3.0, 0.5, 0.9] * 50), {"nested": None, "best": math.inf},
            {"auc": {"value": 0.5, "low": None, "high": None}},
        ),
        "many": lambda: plots.operating_curves(make_breasts(), {f"{i} % of the other breasts": i / 50 for i in range(40)}),
    },
    "calibration_curves": {
        "ordinary": lambda: plots.calibration_curves(dict.fromkeys(("raw scores", "Platt", "isotonic"), make_reliability())),
        "one class": lambda: plots.calibration_curves({"raw scores": make_reliability().assign(observed=0.0, low=0.0)}),
        "one point": lambda: plots.calibration_curves({"raw scores": make_reliability(1)}),
        "no point": lambda: plots.calibration_curves({"raw scores": make_reliability(0)}),
        "missing": lambda: plots.calibration_curves(
            {"raw scores": make_reliability(), "Platt": without_values(make_reliability(), "predicted", "observed")}
        ),
        "many": lambda: plots.calibration_curves({f"way {i}": make_reliability(40) for i in range(5)}),
    },
    "forest": {
        "ordinary": lambda: plots.forest(make_groups(TABLE), Interval(0.8, 0.7, 0.9)),
        "one class": lambda: plots.forest(make_groups(TABLE.assign(cancer=0)), UNKNOWN, "average precision"),
        "one point": lambda: plots.forest(make_groups(TABLE).head(1), 0.8),
        "no point": lambda: plots.forest(make_groups(TABLE).head(0), None),
        "missing": lambda: plots.forest(
            make_groups(without_values(TABLE, "age", "machine_id", "view", "density", "site_id")), 0.2
        ),
        "many": lambda: plots.forest(make_groups(MANY), 0.8),
    },
    "fold_scores": {
        "ordinary": lambda: plots.fold_scores(make_folds(4, "AUC", "average precision", "pF1 of the raw scores")),
        "one class": lambda: plots.fold_scores(make_folds(4, "AUC").assign(value=math.nan, low=math.nan, high=math.nan,
                                                                           note="too few: 0 with cancer")),
        "one point": lambda: plots.fold_scores(make_folds(1, "AUC")),
        "no point": lambda: plots.fold_scores(make_folds(4, "AUC").head(0)),
        "missing": lambda: plots.fold_scores(without_values(make_folds(4, "AUC", "average precision"), "low", "high")),
        "many": lambda: plots.fold_scores(make_folds(8, *(f"sensitivity at {90 + i} % specificity" for i in range(4)))),
    },
    "comparison": {
        "ordinary": lambda: plots.comparison(make_differences(2, NESTED, "AUC"), "small_768"),
        "one class": lambda: plots.comparison(
            without_values(make_differences(1, "AUC"), "low", "high", "difference", "probability")
        ),
        "one point": lambda: plots.comparison(make_differences(1, "AUC").assign(difference=0.0, low=0.0, high=0.0)),
        "no point": lambda: plots.comparison(make_differences(1, "AUC").head(0)),
        "missing": lambda: plots.comparison(without_values(make_differences(1, "AUC", "F1"), "low", "high")),
        "many": lambda: plots.comparison(make_differences(4, NESTED, "AUC", "average precision", "pF1")),
    },
    "worst_mistakes": {
        "ordinary": lambda: plots.worst_mistakes(scored(TABLE), TABLE, Pictures(), 0.5),
        "one class": lambda: plots.worst_mistakes(scored(TABLE.assign(cancer=0)), TABLE.assign(cancer=0), Pictures(), 0.5),
        "one point": lambda: plots.worst_mistakes(scored(TABLE).head(1), TABLE, Pictures(), math.inf),
        "no point": lambda: plots.worst_mistakes(scored(TABLE).head(0), TABLE, Pictures(), 0.5),
        "missing": lambda: plots.worst_mistakes(
            scored(TABLE), without_values(TABLE, "age", "machine_id", "density", "site_id"), Pictures()
        ),
        "many": lambda: plots.worst_mistakes(scored(MANY), MANY, Pictures(), 0.5, 6),
        "long ids": lambda: plots.worst_mistakes(
            scored(TABLE).replace({"patient_id": {"1": "65534"}}), TABLE.replace({"patient_id": {"1": "65534"}}), Pictures()
        ),
        "no pixels": lambda: plots.worst_mistakes(scored(TABLE), TABLE.head(0), Pictures()),
        "heat maps": lambda: plots.worst_mistakes(
            scored(TABLE), TABLE, Pictures(), 0.5, 2, {str(i): np.eye(64, 32, dtype=np.float32) for i in range(99)}
        ),
    },
    "patient": {
        "ordinary": lambda: plots_cases.patient(make_views(4), "Patient 7: one breast has cancer"),
        "one class": lambda: plots_cases.patient(make_views(2, cancer=0), "Patient 7: no breast has cancer"),
        "one point": lambda: plots_cases.patient(make_views(1), "Patient 7: one image"),
        "no point": lambda: plots_cases.patient([], "Patient 7"),
        "missing": lambda: plots_cases.patient(
            make_views(4, cancer=math.nan, score=math.nan, image=None, heat=None, frame=None, note="the file is cut short"),
            "Patient 7: nothing is known", window="none",
        ),
        "many": lambda: plots_cases.patient(make_views(14), "Patient 7: 14 images"),
    },
    "stem_costs": {
        "ordinary": lambda: plots_models.stem_costs(
            pd.DataFrame({"multiply-adds, G": [0.5, 2.0], "time, ms": [10.0, 80.0]}, index=[4, 2]), own=2
        ),
        "one point": lambda: plots_models.stem_costs(pd.DataFrame({"time, ms": [3.0]}, index=[2])),
        "no point": lambda: plots_models.stem_costs(pd.DataFrame(columns=["time, ms"])),
        "missing": lambda: plots_models.stem_costs(pd.DataFrame({"time, ms": [10.0, math.nan]}, index=[4, 2])),
    },
    "activation_maps": {
        "ordinary": lambda: plots_models.activation_maps(IMAGES[1], MAPS),
        "one point": lambda: plots_models.activation_maps(IMAGES[1], {"a": torch.full((1, 1, 1), 5.0)}),
        "no point": lambda: plots_models.activation_maps(IMAGES[1], {}),
    },
    "block_changes": {
        "ordinary": lambda: plots_models.block_changes(pd.Series({"blocks.0": 0.25, "blocks.1": 1.5, "blocks.2": 0.1})),
        "one point": lambda: plots_models.block_changes(pd.Series({"blocks.0": 0.0})),
        "no point": lambda: plots_models.block_changes(pd.Series(dtype=float)),
        "missing": lambda: plots_models.block_changes(pd.Series({"blocks.0": 0.25, "blocks.1": math.nan})),
        "many": lambda: plots_models.block_changes(pd.Series(np.linspace(0.1, 2, 40), NAMES)),
    },
    "parts_gallery": {
        "ordinary": lambda: plots_models.parts_gallery(
            torch.rand(1, 32, 32), {"wide": nn.Conv2d(1, 1, 7, padding=3), "half": nn.AvgPool2d(2)}
        ),
        "one point": lambda: plots_models.parts_gallery(torch.rand(1, 1, 1), {"itself": nn.Identity()}),
        "no point": lambda: plots_models.parts_gallery(torch.rand(1, 8, 8), {}),
    },
    "head_scores": {
        "ordinary": lambda: plots_models.head_scores(
            {"naive": Interval(0.7, 0.6, 0.8), "own": Interval(0.81, 0.7, 0.9)}, Interval(0.11, 0.02, 0.2)
        ),
        "one class": lambda: plots_models.head_scores({"naive": UNKNOWN, "own": UNKNOWN}, UNKNOWN),
        "one point": lambda: plots_models.head_scores({"naive": Interval(0.3, math.nan, math.nan)}),
        "no point": lambda: plots_models.head_scores({}),
    },
    **speed_tables.FIGURES,
}  # fmt: skip
# What a figure has no place for: it is not drawn from labels, or not from what can be missing or many.
HAS_NO = {
    "labels": ("counts", "header_overview", "machine_differences", "montage", "before_after", "differences", "stem_costs",
               "activation_maps", "block_changes", "parts_gallery", *speed_tables.FIGURES),
    "gaps": ("montage", "before_after", "differences", "activation_maps", "parts_gallery", "head_scores"),
    "many": ("birads_leak", "before_after", "differences", "score_histogram", "stem_costs", "activation_maps",
             "parts_gallery", "head_scores", "tuned", "format_costs"),
}  # fmt: skip


def test_every_figure_function_is_drawn_on_every_odd_input():
    modules = [import_module(f"rsnakit.{name}") for name in MODULES]
    assert {path.stem for path in Path(plots.__file__).parent.glob("plots*.py")} == set(MODULES)
    functions = {
        name
        for module in modules
        for name, function in vars(module).items()
        if callable(function) and function.__module__ == module.__name__ and not name.startswith("_")
        and not isinstance(function, type) and signature(function).return_annotation is Figure
    }  # fmt: skip
    assert functions == set(FIGURES)
    spared = zip(("labels", "gaps", "many"), ("one class", "missing", "many"), strict=True)
    expected = {(name, kind) for name in FIGURES for kind in ODD}
    expected -= {(name, kind) for what, kind in spared for name in HAS_NO[what]}
    assert expected <= {(name, kind) for name, kinds in FIGURES.items() for kind in kinds}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in FIGURES.items() for kind in kinds])
def test_every_figure_says_something_in_the_one_look_and_writes_nothing_over_it(name, kind):
    before = plt.get_fignums()
    with plt.style.context("dark_background"):  # what a user may have set
        colors = matplotlib.rcParams["text.color"], matplotlib.rcParams["figure.facecolor"]
        figure = FIGURES[name][kind]()
        assert (matplotlib.rcParams["text.color"], matplotlib.rcParams["figure.facecolor"]) == colors
    assert plt.get_fignums() == before  # an open figure would be shown twice
    assert faults(figure) == []
    assert same_color(figure.get_facecolor(), "white") and figure.get_facecolor()[3] == 1  # in dark mode, too
    if name != "montage":
        assert len(title(figure)) > 15 and "nan" not in title(figure)
        assert same_color(figure._suptitle.get_color(), "black")


LONG = {
    "1": "St. $Mary's$ General Hospital of the County at Long_Name, East",
    "2": "2",
    "40": "Hologic $3D$ " + 40 * "x",
    "41": "y" * 60,
}
ODD_NAMES = TABLE.assign(
    site_id=TABLE["site_id"].astype(str).replace(LONG), machine_id=TABLE["machine_id"].astype(str).replace(LONG)
)
RUN = "a_run_of_a_very_long_name_with_$money$_and_its_settings_0123456789abcdef"
LONG_NAMED = {
    "counts": lambda: plots.counts(ODD_NAMES),
    "positive_rate": lambda: plots.positive_rate(ODD_NAMES),
    "machine_differences": lambda: plots.machine_differences(make_origins().assign(
        **ODD_NAMES[["site_id", "machine_id"]])),
    "birads_leak": lambda: plots.birads_leak(ODD_NAMES),
    "header_overview": lambda: plots.header_overview(make_headers().assign(transfer_syntax=LONG["1"], voi_function=LONG["40"])),
    "forest": lambda: plots.forest(make_groups(ODD_NAMES), 0.55),
    "comparison": lambda: plots.comparison(
        pd.concat(make_differences(1, NESTED, "AUC").assign(other=other) for other in (RUN, RUN + "$")), RUN
    ),
    "worst_mistakes": lambda: plots.worst_mistakes(scored(ODD_NAMES), ODD_NAMES, Pictures(), 0.5),
    "montage": lambda: plots.montage(IMAGES * 2, [f"{LONG['1']}\n{LONG['41']}"] * 6, title=LONG["1"]),
    "before_after": lambda: plots.before_after([IMAGES[0] / 4095] * 6, [(0, 0, 9, 9)] * 6, IMAGES * 2, [LONG["41"]] * 6),
    "no images": lambda: plots.montage([], [], title="x" * 300 + " is the name of a site, and $y$ of another"),
}  # fmt: skip


@pytest.mark.parametrize("name", LONG_NAMED)
def test_long_names_are_shortened_and_a_dollar_is_a_dollar(name, recwarn):
    figure = LONG_NAMED[name]()
    assert faults(figure) == []
    assert [str(warning.message) for warning in recwarn] == []
    texts = figure.findobj(Text)
    assert not any(text.get_parse_math() for text in texts if "$" in text.get_text())
    assert any("…" in text.get_text() for text in texts)
    for ax in figure.axes:
        if ax.axison and name != "before_after":
            width, height = ax.get_window_extent().size / figure.dpi  # inches
            assert width > 1 and height > 0.5, ax.get_title(loc="left")


def test_short_names_keep_their_ends():
    assert look.short("x" * 20) == "x" * 20 and look.short(49) == "49"
    assert look.short("abcdefghijklmnopqrstuvwxyz") == "abcdefghij…rstuvwxyz"
    assert look.short("St. Mary's General Hospital", 12) == "St. Ma…pital"
    assert look.short("ab     cdefgh", 8) == "ab…fgh"


def test_runs_whose_short_names_are_one_are_all_there():
    table = pd.concat(make_differences(1, "AUC").assign(other=f"a_run_of_{i}_a_very_long_name") for i in range(3))
    assert len(plots.comparison(table).axes[0].texts) == 3


def test_titles_end_without_a_full_stop():
    one_site = plots.positive_rate(TABLE.assign(site_id=1))
    assert re.search(r"\(\d+ of 120\)$", title(one_site))
    assert not title(plots.training_curves({0: make_history(3, skipped_steps=1)})).endswith(".")


def test_jupyter_shows_figures_opaque_and_those_without_data_too():
    for figure in (plots.counts(TABLE.head(0)), plots.score_histogram(make_breasts())):
        pixels = plt.imread(io.BytesIO(print_figure(figure)))  # what a notebook's cell does with its value
        assert (pixels[..., 3:] == 1).all() and pixels[..., :3].min() < 0.1 and (pixels[0, 0, :3] == 1).all()


def test_the_check_finds_what_it_looks_for():
    figure, ax = plt.subplots(figsize=(1, 1))
    ax.set_xticks([0, 1, 2], ["machine 1", "machine 2", "machine 3"])
    ax.text(0, 0, "pale", color="#CCCCCC")
    ax.text(0, 1, "small", fontsize=5)
    ax.text(1, 1, "naive_f1: 0.5")
    ax.plot([0, 2], color="lime")
    ax.imshow([[0, 1]], cmap="jet")
    ax.set_xlim(0, 2)
    plt.close(figure)
    assert ("machine 1", "machine 2") in texts_that_touch(figure)
    found = faults(figure)
    for text in (
        "'pale' is too pale",
        "'small' has 5.0 points",
        "naive_f1 is a variable's name",
        "'machine 3' is cut off",
        "palette: #00ff00",
        "map jet",
    ):
        assert any(text in fault for fault in found), text
    wide = plt.figure(figsize=(12, 1))
    plt.close(wide)
    assert faults(wide) == ["12.0 inches wide: a notebook would draw it smaller, texts with it"]
