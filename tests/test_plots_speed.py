"""Figures of speed and memory: titles state what the numbers are, and which way round; marks stand where they belong."""

import math

import figures
import numpy as np
import pandas as pd
import pytest
import speed_tables
from figures import title
from matplotlib.colors import same_color

from rsnakit import look, plots_speed, plots_tricks

ORANGE = "#E69F00"


def said(figure) -> list[str]:
    return [text.get_text() for text in figures.shown_texts(figure)]


def orange_bars(ax) -> list[float]:
    return [bar.get_width() for bar in figures.bars(ax) if same_color(bar.get_facecolor(), ORANGE)]


# ---- settings that were tried


@pytest.mark.parametrize(
    ("chosen", "rates", "expected"),
    [
        (2, (10, 8, 16, math.nan), "bf16, channels last trains 1.6 times as fast as what was asked"),
        (1, (10, 8, 16, math.nan), "fp32, channels last trains 0.8 times as fast as what was asked"),
        (0, (10, 8, 9, math.nan), "fp32 stays: bf16, channels last trains 0.9 times as fast, as the best of the others"),
        (0, (100, 101, 90, 3), "fp32 stays: fp32, channels last trains 1.01 times as fast, which lies within the spread of"),
        (0, (10, 8, 20, math.nan), "fp32 stays: bf16, channels last trains 2 times as fast, as the best of the others"),
        (0, (10, math.nan), "fp32 trains 10 images/s; nothing else could be measured"),
        (1, (math.nan, 12), "fp32, channels last trains 12 images/s; what was asked, fp32, could not be measured"),
        (9, (10, 25), "fp32, channels last trains 2.5 times as fast as what was asked, and nothing is chosen"),
        (9, (math.nan, math.nan), "Precision and memory layout: nothing could be measured"),
    ],
)  # fmt: skip
def test_the_choice_is_told_against_what_was_asked(chosen, rates, expected):
    rows = speed_tables.make_trials(chosen=chosen, rates=[float(rate) for rate in rates])
    assert title(plots_speed.rates(rows)).startswith(expected)


def test_the_chosen_bar_is_marked_and_the_skipped_one_has_its_reason():
    figure = plots_speed.rates(speed_tables.make_trials())
    ax = figure.axes[0]
    assert [bar.get_width() for bar in figures.bars(ax)] == [10, 8, 16] and orange_bars(ax) == [16]
    np.testing.assert_allclose([line.get_xdata() for line in ax.lines], [(9, 10.5), (7.2, 8.4), (14.4, 16.8)])
    assert {"10, as asked", "8, 0.8 times", "16, 1.6 times", "no fp16 on this processor"} <= set(said(figure))


def test_a_loader_loads_and_many_parts_tell_what_changed():
    parts = [
        speed_tables.make_trials(part, chosen)
        for part, chosen in {"precision": 2, "compile": 0, "checkpointing": 0, "loader": 1}.items()
    ]
    text = title(plots_speed.rates(pd.concat(parts, ignore_index=True)))
    first, second = "bf16, channels last trains 1.6", "fp32, channels last loads 0.8"
    assert text == f"{first} times as fast as what was asked; {second} times as fast as what was asked"


def test_a_long_reason_is_on_two_lines_and_ends_in_an_ellipsis():
    rows = speed_tables.make_trials(rates=[math.nan] * 4).assign(skipped=speed_tables.REASON)
    texts = [text for text in said(plots_speed.rates(rows)) if "no units" in text]
    assert len(texts) == 4 and all(text.count("\n") == 1 and text.endswith("…") for text in texts)


# ---- batches, the loader, transforms, all together


def test_the_largest_batch_that_fits_is_told_and_those_that_do_not_are_crosses():
    figure = plots_speed.batch_rates(speed_tables.make_batches())
    expected = "Batches up to 32 fit (40: out of memory); the largest trains 6 times as many images/s as a batch of 1"
    assert title(figure) == expected
    for ax in figure.axes:
        crosses = [list(line.get_xdata()) for line in ax.lines if line.get_marker() == "X"]
        assert crosses == [[40, 48, 64]]
        assert [list(line.get_xdata()) for line in ax.lines if line.get_color() == ORANGE] == [[8]]
    all_fit = title(plots_speed.batch_rates(speed_tables.make_batches(3, ())))
    assert all_fit.startswith("Batches up to 4 fit, and no larger one was tried")
    none = title(plots_speed.batch_rates(speed_tables.make_batches(0, (1, 2))))
    assert none == "Not even a batch of 1 could be trained, out of memory"


def test_what_stopped_the_batches_is_the_next_larger_one():
    table = speed_tables.make_batches(4, (16,))
    table.loc[1, ["images_s", "skipped"]] = [math.nan, "it took too long"]
    assert title(plots_speed.batch_rates(table)).startswith("Batches up to 8 fit (16: out of memory)")


def test_precisions_have_a_line_each_and_the_chosen_one_comes_first():
    fp32 = speed_tables.make_batches(3, (8, 6)).assign(chosen=False)
    bf16 = speed_tables.make_batches(4, (16,)).assign(
        skipped=lambda t: t["skipped"].replace("out of memory", "not tried")
    )
    table = pd.concat(
        [fp32.assign(name="fp32, " + fp32["name"]), bf16.assign(name="bf16, " + bf16["name"])], ignore_index=True
    )
    figure = plots_speed.batch_rates(table, "breasts")
    first = "bf16: batches up to 8 fit (16: not tried); the largest trains 4 times as many breasts/s as a batch of 1"
    assert title(figure) == f"{first}; fp32: batches up to 4 fit (6: out of memory)"
    lines = {
        line.get_label(): list(line.get_xdata())
        for line in figure.axes[0].lines
        if line.get_label() in ("fp32", "bf16")
    }
    assert lines == {"bf16": [1, 2, 4, 8], "fp32": [1, 2, 4]}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (300.0, "The model is the limit with block8 and 2 workers, which load 4 times the images/s that it takes"),
        (1200.0, "The model is the limit with block8 and 2 workers, which load 1 times the images/s that it takes"),
        (1500.0, "The loader is the limit: at its best, block8 with 2 workers, it loads 0.8 times the images/s that the model"),
        (math.nan, "block8 with 2 workers loads fastest, 1,200 images/s; what the model takes is not known"),
        (0.0, "block8 with 2 workers loads fastest, 1,200 images/s; what the model takes is not known"),
    ],
)  # fmt: skip
def test_who_limits_is_told(model, expected):
    figure = plots_speed.loader_limits(speed_tables.make_loading(), model)
    assert title(figure).startswith(expected)
    lines = [line.get_ydata()[0] for line in figure.axes[0].lines if line.get_linestyle() == "--"]
    assert lines == ([model] if model > 0 else [])


def test_formats_and_workers_that_were_skipped_are_told_by_their_reason():
    table = speed_tables.make_loading(["block8", "png8"], [0, 1])
    table.loc[[1, 3], ["images_s", "skipped"]] = [math.nan, "no room on the disk"]
    label = plots_speed.loader_limits(table, 10.0).axes[0].get_xlabel()
    assert label.endswith("\nblock8 1 worker, png8 1 worker: no room on the disk")


def test_the_dearest_transform_is_named_with_its_share():
    table = pd.DataFrame({"ms": [0.5, 1.5], "share": [0.25, 0.75]}, index=["HorizontalFlip", "Affine"])
    figure = plots_speed.transform_costs(table)
    assert title(figure) == "Affine takes 75.0 % of the 2 ms that augmentation takes an image, HorizontalFlip 25.0 %"
    assert orange_bars(figure.axes[0]) == [1.5]
    assert "1.5 ms, 75.0 %" in said(figure)


@pytest.mark.parametrize(
    ("images_s", "peak_mb", "expected"),
    [
        (21.0, 240.0, "train 2.1 times as fast as what was asked, in 0.6 times the memory"),
        (8.0, 800.0, "train 0.8 times as fast as what was asked, in 2 times the memory"),
        (10.0, 400.0, "train as fast as what was asked, in the same memory"),
        (30.0, math.nan, "train 3 times as fast as what was asked"),
    ],
)
def test_what_all_settings_give_together(images_s, peak_mb, expected):
    asked = {"name": "as asked", "images_s": 10.0, "low": 9.0, "high": 11.0, "peak_mb": 400.0, "chosen": False}
    after = {"name": "tuned", "images_s": images_s, "low": 7.0, "high": 31.0, "peak_mb": peak_mb, "chosen": True}
    figure = plots_speed.tuned(pd.DataFrame([asked, after, {**after, "images_s": 1.0, "chosen": False}]))
    assert title(figure) == f"All settings together {expected}"
    assert orange_bars(figure.axes[0]) == [images_s]
    assert "not known" in title(plots_speed.tuned(pd.DataFrame([asked, {**after, "images_s": math.nan}])))


def test_what_was_asked_may_stay():
    asked = {"name": "as asked", "images_s": 10.0, "peak_mb": 400.0, "chosen": True}
    assert "stays, 10 images/s: nothing else promised" in title(plots_speed.tuned(pd.DataFrame([asked])))
    other = {"name": "as chosen", "images_s": 9.0, "peak_mb": 200.0, "chosen": False}
    figure = plots_speed.tuned(pd.DataFrame([asked, other]), "breasts")
    assert "stays, 10 breasts/s: nothing else that was tried trains faster" in title(figure)
    assert orange_bars(figure.axes[0]) == [10.0]


# ---- single tricks


def test_chunks_are_told_by_their_gain_and_when_they_pay():
    reports = {"70x70": speed_tables.make_report(), "310x310": speed_tables.make_report(1)}
    figure = plots_tricks.chunk_gain(reports)
    # Eager takes 2 s a call. 25 steps: 15.5 s to compile, 2 - 2 / 5.4 s saved a call; one step: 3.5 s and 1 s.
    first = f"70x70: chunks of 25 compiled steps are 5.4 times as fast as eager and pay after {math.ceil(15.5 / (2 - 2 / 5.4))}"
    second = "310x310: chunks of one compiled step are 2 times as fast as eager and pay after 4"
    assert title(figure) == f"{first} calls; {second} calls"
    marked = [[tuple(line.get_xydata()[0]) for line in ax.lines if line.get_color() == ORANGE] for ax in figure.axes]
    assert marked == [[pytest.approx((15.5, 5.4))], [pytest.approx((3.5, 2.0))]]
    assert "beyond the budget of 60 s" in figure.axes[0].get_xlabel().replace("\n", " ")


def test_compiling_pays_in_the_grey_alone():
    """A point on its border takes as long as eager over all calls: compile_s + calls * run_s = calls * eager's."""
    (ax,) = plots_tricks.chunk_gain({"x": speed_tables.make_report(calls=10)}).axes
    (grey,) = ax.collections
    (path,) = grey.get_paths()
    for compile_s, pays in ((14.0, True), (17.0, False)):  # run_s is 2 / 5.4: 10 calls gain 16.3 s
        assert path.contains_point((compile_s, 5.4)) == pays
    assert "pays within 10 calls" in ax.get_xlabel()


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (speed_tables.make_report(0), "x: eager steps stay, no chunk pays in the calls there are"),
        (
            speed_tables.make_report(1, gains=(1.0, 0.8)),
            "x: chunks of one compiled step are 0.8 times as fast as eager",
        ),
        (speed_tables.make_report(7), "x: no chunk is chosen"),
    ],
)
def test_chunks_that_do_not_pay(report, expected):
    figure = plots_tricks.chunk_gain({"x": report})
    assert title(figure) == expected
    if len(report) == 3:
        assert "1 step: 0.8 times, never pays" in said(figure)


def test_tricks_are_told_by_memory_and_time():
    figure = plots_tricks.time_memory(speed_tables.make_tricks())
    assert (
        title(figure)
        == "checkpointed loop takes 0.1 times the memory and 1.5 times the time; bf16 autocast 0.55 and 0.7"
    )
    points = {tuple(line.get_xydata()[0]) for line in figure.axes[0].lines if line.get_marker() == "o"}
    assert points == {(1.3, 0.13), (1.5, 0.1), (0.7, 0.55)}
    assert "bf16 autocast: time 0.7, memory 0.55" in said(figure)
    with_plain = pd.concat([pd.DataFrame({"time": 1.0, "memory": 1.0}, ["plain"]), speed_tables.make_tricks().iloc[:1]])
    assert title(plots_tricks.time_memory(with_plain)).startswith(
        "checkpointing, convnext_tiny takes 0.13 times the memory"
    )
    slower = with_plain.assign(memory=[1.0, 2.0])
    assert title(plots_tricks.time_memory(slower)).startswith("checkpointing, convnext_tiny takes 2 times the memory")


def test_names_of_points_stand_in_the_order_of_their_heights():
    table = pd.DataFrame({"time": 1.2, "memory": [0.50, 0.52, 0.51]}, index=["low", "high", "middle"])
    figure = plots_tricks.time_memory(table)
    assert figures.faults(figure) == []
    height = {text.get_text().split(":")[0]: text.get_position()[1] for text in figure.axes[0].texts}
    assert height["high"] > height["middle"] > height["low"]


@pytest.mark.parametrize(("late", "word"), [(3, "3 ms after"), (-4, "4 ms before"), (0, "0 ms after")])
def test_the_arrival_is_held_against_its_prediction(late, word):
    record, arrival = speed_tables.make_record(late=late)
    assert title(plots_tricks.shot_record(record, 0.001, 10.0, arrival)) == (
        f"The wave is strongest {word} the time predicted at 30 receivers"
    )
    later = title(plots_tricks.shot_record(record, 0.001, 10.0, arrival + np.linspace(0, 0.01, 30)))
    assert later.endswith(f"{late - 10:+d} to {late:+d} ms over 30 receivers")


def test_the_record_s_axes_are_metres_and_seconds():
    record, arrival = speed_tables.make_record()
    figure = plots_tricks.shot_record(record, 0.001, 10.0, arrival)
    (picture,) = figure.axes[0].images
    assert picture.get_extent() == pytest.approx((-5, 295, 0.1995, -0.0005))
    (line,) = figure.axes[0].lines
    np.testing.assert_allclose(line.get_xydata(), np.stack([10.0 * np.arange(30), arrival], 1))
    without = title(plots_tricks.shot_record(record, 0.001, 10.0))
    assert without == "The wave is strongest at 0.023 s where it comes first and at 0.118 s where it comes last"


def test_formats_are_told_against_float32():
    figure = plots_tricks.format_costs(speed_tables.make_formats())
    expected = "8+1 bits takes 28.1 % of the bytes of float32, is off by 0.3 % and loads 0.4 times as fast"
    assert title(figure) == f"{expected}; int8, one scale is off by 4 %"
    assert {"32, 4 MB", "9, 1.12 MB", "exact", "0.02 %", "4 %", "2.5 ms"} <= set(said(figure))
    assert [orange_bars(ax) for ax in figure.axes] == [[9.0], [0.003], [2.5]]


def test_a_format_that_overflows_says_so():
    table = speed_tables.make_formats().assign(error=[0.0, math.inf, 1e-3, math.inf])
    figure = plots_tricks.format_costs(table)
    assert title(figure).endswith("int8, one scale overflows") and said(figure).count("overflows") == 2


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(1.0, "1"), (1.604, "1.6"), (1.35, "1.35"), (1.999, "2"), (5.43, "5.4"), (20.0, "20"), (0.126, "0.13"), (0.02, "0.02"),
     (100.0, "100"), (math.inf, "unknown")],
)  # fmt: skip
def test_ratios_as_text(ratio, text):
    assert look.times(ratio) == text
