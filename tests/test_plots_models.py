"""Figures of models: what they say is what the data hold, of odd shapes and nothing at all too."""

import math

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from rsnakit import plots_models
from rsnakit.metrics import Interval
from rsnakit.necks import SCSE


def title(figure: Figure) -> str:
    figure.canvas.draw()  # no text, size or scale that matplotlib cannot draw
    return " ".join(figure._suptitle.get_text().split())


def picture(height: int = 64, width: int = 32) -> np.ndarray:
    """A bright half disc at the left edge, as a breast lies, on 0."""
    y, x = np.mgrid[:height, :width]
    return (((y - height / 2) / (height / 2.2)) ** 2 + (x / (width / 1.3)) ** 2 < 1).astype(np.float32)


# ---- what a stem costs


def test_the_costs_of_strides_are_told_in_times_of_the_first():
    table = pd.DataFrame({"multiply-adds, G": [0.5, 2.0], "time, ms": [10.0, 80.0]}, index=[4, 2])
    figure = plots_models.stem_costs(table, own=2)
    assert title(figure) == "From stride 4 to 2: 4 times the multiply-adds and 8 times the time"
    assert [bar.get_height() for bar in figure.axes[1].patches] == [10.0, 80.0]
    first, second = (bar.get_facecolor() for bar in figure.axes[0].patches)
    assert first != second  # the model's own is marked


def test_costs_of_one_stride_or_none():
    assert title(plots_models.stem_costs(pd.DataFrame({"time, ms": [3.0]}, index=[2]))) == "Stride 2 alone could be set"
    assert "nothing to compare" in title(plots_models.stem_costs(pd.DataFrame(columns=["time, ms"])))
    assert "1 times" in title(plots_models.stem_costs(pd.DataFrame({"a": [0.0, 0.0], "b": [2.0, 2.0]}, index=[2, 1])))


# ---- what stages see


@pytest.mark.parametrize(("outline", "inside"), [(30.0, 5.0), (5.0, 30.0)])
def test_activations_tell_the_outline_from_the_inside(outline, inside):
    """A map of 2x2 pixels a cell: cells that the outline cuts have one value, those within another, the others 15."""
    image = picture()
    share = torch.nn.functional.avg_pool2d(torch.from_numpy(image)[None, None], 2)[0]
    cells = torch.where(share == 1, inside, torch.where(share == 0, 15.0, outline))
    far = [abs(value - cells.mean()) for value in (outline, inside)]  # each channel counts from its own mean
    text = title(plots_models.activation_maps(image, {"edges": cells, "last": torch.rand(3, 4, 2)}))
    assert text.startswith("A cell stands for 2x2 pixels at first and 16x16 at last; the outline of the breast draws ")
    assert text.split("draws ")[1] == f"{far[0] / far[1]:.1f} times the response of its inside in edges"


@pytest.mark.parametrize(
    "maps", [{"a": torch.zeros(2, 4, 4)}, {"a": torch.full((1, 1, 1), 5.0), "b": torch.rand(1, 64, 32).half()}]
)
def test_activations_of_constant_and_tiny_maps(maps):
    assert "pixels" in title(plots_models.activation_maps(picture(), maps))
    assert "pixels" in title(plots_models.activation_maps(np.zeros((40, 40), np.uint16), maps))


def test_no_maps():
    assert title(plots_models.activation_maps(picture(), {})) == "No maps of stages to show"


@pytest.mark.parametrize(("height", "width", "prefix"), [(16, 8, 0), (16, 8, 1), (14, 14, 5), (7, 3, 2)])
def test_tokens_become_the_map_they_were_cut_from(height, width, prefix):
    maps = torch.rand(2, 24, height, width)
    tokens = torch.cat([torch.zeros(2, prefix, 24), maps.flatten(2).transpose(1, 2)], 1)
    assert torch.equal(plots_models.as_map(tokens, 24, height / width), maps)
    assert torch.equal(plots_models.as_map(maps.permute(0, 2, 3, 1), 24), maps)
    assert plots_models.as_map(maps, 24) is maps


def test_what_is_no_map_is_refused():
    with pytest.raises(ValueError, match=r"\(2, 7\), expected \(N, 5, h, w\)"):
        plots_models.as_map(torch.zeros(2, 7), 5)


# ---- what blocks change


def test_the_block_that_changes_most_is_named():
    text = title(plots_models.block_changes(pd.Series({"blocks.0": 0.25, "blocks.1": 1.5, "blocks.2": 0.1})))
    assert text == "blocks.1 changes its map most, by 150.0 % of its size, and blocks.2 least, by 10.0 %"
    assert "none can be compared" in title(plots_models.block_changes(pd.Series(dtype=float)))
    assert title(plots_models.block_changes(pd.Series({"a": 0.0}))) == "a changes its map most, by 0 % of its size"


# ---- basic parts


@pytest.mark.parametrize(
    ("part", "pixels", "span"),
    [
        (nn.Conv2d(1, 1, 3, padding=1), 9, 3),
        (nn.Conv2d(1, 1, 3, padding=4, dilation=4), 9, 9),
        (nn.Conv2d(1, 1, 5, stride=2, padding=2), 25, 5),
        (nn.MaxPool2d(2), 4, 2),  # one at a time, all of them over many inputs
        (nn.Upsample(scale_factor=2), 1, 1),
        (nn.Identity(), 1, 1),
    ],
)
def test_the_reach_is_the_kernel_s(part, pixels, span):
    """The receptive field as the formula has it: (kernel - 1) * dilation + 1 along each axis."""
    reached = plots_models.reach(part, 1)
    assert (reached > 0).sum() == pixels and reached.max() == 1
    assert np.ptp(np.argwhere(reached > 0), axis=0).max() + 1 == span


def test_the_reach_leaves_no_gradient_and_draws_no_random_number():
    part = nn.Conv2d(2, 2, 3, padding=1)
    state = torch.get_rng_state()
    with torch.no_grad():
        plots_models.reach(part, 2)
    assert part.weight.grad is None and torch.equal(torch.get_rng_state(), state)


def test_the_gallery_tells_reach_sizes_and_parameters():
    parts = {"wide": nn.Conv2d(1, 1, 7, padding=3), "half": nn.AvgPool2d(2), "twice": nn.Upsample(scale_factor=2)}
    figure = plots_models.parts_gallery(torch.rand(1, 32, 32), parts)
    assert title(figure) == (
        "Wide looks over 7x7 pixels, the others over 1x1 to 2x2; half leaves 1/4 of the cells; twice makes 4 times the cells"
    )
    labels = [ax.get_xlabel() for ax in figure.axes]
    assert {"1x32x32\n50 parameters", "1x16x16\n0 parameters", "1x64x64\n0 parameters"} <= set(labels)
    assert {"49 pixels", "4 pixels", "1 pixel"} <= set(labels)


def test_the_gallery_of_one_part_and_of_none():
    assert (
        title(plots_models.parts_gallery(torch.rand(1, 8, 8), {"itself": nn.Identity()}))
        == "Itself looks over 1x1 pixels"
    )
    assert title(plots_models.parts_gallery(torch.rand(1, 8, 8), {})) == "No parts to show"


# ---- heads


@pytest.mark.parametrize(
    ("difference", "expected"),
    [
        (Interval(0.11, 0.02, 0.2), "'own' scores 0.11 above 'naive', 95 % interval +0.02 to +0.20"),
        (
            Interval(0.05, -0.02, 0.1),
            "'own' scores 0.05 above 'naive', 95 % interval -0.02 to +0.10: that may be noise",
        ),
        (Interval(-0.2, -0.3, -0.1), "'own' scores 0.20 below 'naive', 95 % interval -0.30 to -0.10"),
        (Interval(math.nan, math.nan, math.nan), "cannot be compared: scores need both kinds"),
        (None, "'own' reaches an AUC of 0.81"),
    ],
)
def test_heads_are_compared_as_their_difference_says(difference, expected):
    scores = {"naive": Interval(0.7, 0.6, 0.8), "own": Interval(0.81, 0.7, 0.9)}
    figure = plots_models.head_scores(scores, difference)
    assert title(figure).endswith(expected)
    assert [line.get_xdata()[0] for line in figure.axes[0].lines if line.get_marker() == "o"] == [0.7, 0.81]


def test_heads_without_an_interval_and_no_heads():
    alone = {"naive": Interval(0.3, math.nan, math.nan)}
    assert "AUC of 0.30" in title(plots_models.head_scores(alone))
    assert title(plots_models.head_scores({})) == "No head has been scored"


def test_a_part_that_sees_everything_is_said_to():
    torch.manual_seed(0)
    figure = plots_models.parts_gallery(torch.rand(8, 24, 24), {"scSE": SCSE(8), "3x3": nn.Conv2d(8, 8, 3, padding=1)})
    assert title(figure) == "scSE looks over the whole map, the others over 3x3"
