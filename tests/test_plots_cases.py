"""Figures of single cases: heat maps where they belong, and what is known of an image below it."""

import math

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from figures import OKABE_ITO, TABLE, Pictures, faults, make_views, scored, title
from matplotlib.colors import to_rgb

from rsnakit import look, plots, plots_cases


def test_the_images_of_the_worst_mistakes_are_those_that_are_drawn():
    breasts = scored(TABLE).sample(frac=1, random_state=2)
    shown = plots.worst_images(breasts, TABLE, n=3)
    figure = plots.worst_mistakes(breasts, TABLE, Pictures(), n=3)
    drawn = [int(ax.images[0].get_array()[0, 0]) for ax in figure.axes if ax.images]
    assert shown["image_id"].astype(int).tolist() == drawn
    missed = breasts[breasts["cancer"] == 1].nsmallest(3, "score")
    called = breasts[breasts["cancer"] == 0].nlargest(3, "score")
    ids = pd.concat([missed, called])[["patient_id", "laterality", "score", "cancer"]]
    found = shown.drop_duplicates(["patient_id", "laterality"])[list(ids.columns)]
    pd.testing.assert_frame_equal(found.reset_index(drop=True), ids.reset_index(drop=True), check_dtype=False)
    assert {"age", "machine_id", "density", "site_id"} <= set(shown.columns)


def test_heat_lies_over_the_images_that_have_one():
    breasts, heat = scored(TABLE), np.zeros((64, 32), np.float32)
    heat[10:20, 4:8] = 1
    shown = plots.worst_images(breasts, TABLE)
    with_heat = shown["image_id"].iloc[[0, 5]].tolist()
    figure = plots.worst_mistakes(breasts, TABLE, Pictures(), heatmaps=dict.fromkeys(with_heat, heat))
    axes = [ax for ax in figure.axes if ax.images]
    assert [number for number, ax in enumerate(axes) if len(ax.images) > 1] == [0, 5]
    colors = axes[5].images[1].get_array()
    assert axes[5].images[1].get_extent() == axes[5].images[0].get_extent() == [-0.5, 31.5, 63.5, -0.5]
    np.testing.assert_allclose(colors[..., 3], 0.5 * heat)
    np.testing.assert_allclose(colors[12, 5, :3], to_rgb(look.CROP), atol=1e-6)
    (line,) = axes[5].collections  # round what is above a half: half a pixel outside of the block
    (path,) = line.get_paths()
    assert path.get_extents().bounds == pytest.approx((3.5, 9.5, 4, 10))
    assert title(figure).endswith(". Yellow: what spoke for cancer")
    assert "Yellow" not in title(plots.worst_mistakes(breasts, TABLE, Pictures()))


def test_heat_has_a_colour_that_no_frame_has():
    assert plots_cases.HEAT not in plots.LABEL_COLORS.values() and plots_cases.HEAT in OKABE_ITO


@pytest.mark.parametrize("empty", [1, 4])
def test_images_in_which_nothing_spoke_for_cancer_are_said_and_counted(empty):
    breasts, nothing = scored(TABLE), np.zeros((64, 32), np.float32)
    shown = plots.worst_images(breasts, TABLE)["image_id"].tolist()
    maps = dict(zip(shown, [*[nothing] * empty, *[np.eye(64, 32, dtype=np.float32)] * (4 - empty)], strict=False))
    figure = plots.worst_mistakes(breasts, TABLE, Pictures(), heatmaps=maps)
    below = [ax.get_xlabel() for ax in figure.axes if ax.images]
    assert ["nothing spoke\nfor cancer" in text for text in below] == [True] * empty + [False] * (len(below) - empty)
    said = {1: "yellow: what spoke for cancer; nothing in 1 of 4 images",
            4: "no heat: nothing spoke for cancer in any of 4 images"}[empty]  # fmt: skip
    assert title(figure).endswith(". " + look.capital(said)) and faults(figure) == []

    views = [*make_views(empty, heat=nothing), *make_views(4 - empty)]
    figure = plots_cases.patient(views, "Patient 7")
    labels = [ax.get_xlabel() for ax in figure.axes]
    assert labels == [*[""] * 4, *["nothing spoke\nfor cancer"] * empty, *[""] * (4 - empty)]
    assert figure.axes[4].get_ylabel() == "what the model is shown\n" + said.replace("; ", "\n")
    assert faults(figure) == []


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_heat_that_is_the_same_everywhere_has_no_line(value, recwarn):
    figure, ax = plt.subplots()
    plots_cases.show_heat(ax, np.full((8, 4), value, np.float32))
    plots_cases.show_heat(ax, None)
    assert len(ax.images) == 1 and not ax.collections and not list(recwarn)
    plt.close(figure)


def test_what_is_known_of_an_image():
    row = {"age": 57.0, "density": "B", "site_id": 1, "machine_id": 49, "implant": 0}
    assert plots_cases.facts(row) == "age 57, density B, site 1, machine 49"
    assert (
        plots_cases.facts({"age": math.nan, "density": None, "site_id": 2, "machine_id": np.int64(7)})
        == "site 2, machine 7"
    )
    assert plots_cases.facts({"density": "", "age": 63.5}) == "age 63.5" and plots_cases.facts({}) == ""
    figure = plots.worst_mistakes(scored(TABLE), TABLE, Pictures(), n=2)
    shown = plots.worst_images(scored(TABLE), TABLE, n=2).to_dict("records")
    below = [ax.get_xlabel() for ax in figure.axes if ax.images]
    assert below == [plots_cases.facts(row).replace(", site", "\nsite") for row in shown]  # site 2 has no density
    assert len({text.count(",") for text in below}) > 1


def test_a_view_without_its_parts_says_why():
    views = [
        *make_views(1, image=None, heat=None, note="blank: nothing is seen"),
        *make_views(1, frame=None, note="gone"),
    ]
    figure = plots_cases.patient(views, "Patient 7")
    above, below = figure.axes[:2], figure.axes[2:]
    assert [" ".join(text.get_text().split()) for ax in figure.axes for text in ax.texts] == [
        "gone",
        "blank: nothing is seen",
    ]
    assert [len(ax.images) for ax in (*above, *below)] == [1, 0, 0, 2]
    assert len(above[0].patches) == 1 and not above[1].patches


def test_many_mistakes_are_drawn_in_several_rows_a_kind():
    figure = plots.worst_mistakes(scored(TABLE), TABLE, Pictures(), n=5)
    drawn = [ax for ax in figure.axes if ax.images]
    assert len(drawn) == 20 and figure.get_figwidth() <= plots.WIDTH
    tops = [[round(ax.get_position().y1, 2) for ax in drawn[first : first + 10]] for first in (0, 10)]
    assert [[kind.count(top) for top in sorted(set(kind), reverse=True)] for kind in tops] == [[8, 2], [8, 2]]
    assert min(tops[0]) > max(tops[1])  # cancers above the others
    assert sum(bool(ax.get_ylabel()) for ax in drawn) == 2
