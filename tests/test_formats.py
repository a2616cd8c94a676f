"""rsnakit.formats: errors against closed forms, bytes on disk, what is refused. How fast anything is, is not asserted."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rsnakit import formats


def waves(shots: int = 2, samples: int = 256, receivers: int = 64) -> np.ndarray:
    """Arrivals of 15 Hz that fall off by e every 40 ms: six decades from the first to the last."""
    time, place = 1e-3 * np.arange(samples)[:, None], np.arange(receivers)
    wave = np.sin(2 * np.pi * (15 * time - 0.02 * place)) * np.exp(-time / 0.04 - place / 500)
    return (np.arange(1, shots + 1)[:, None, None] * wave).astype(np.float32)


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


# ---- how near what comes back is


def test_float32_comes_back_as_it_was(tmp_path):
    x = np.random.default_rng(0).normal(size=(3, 50, 7)).astype(np.float32)
    back = formats.round_trip(x, "float32", tmp_path)
    assert back.dtype == np.float32
    np.testing.assert_array_equal(back, x)


def test_float16_is_within_half_of_its_last_digit(tmp_path):
    x = np.random.default_rng(0).uniform(1, 60000, 5000).astype(np.float32)
    back = formats.round_trip(x, "float16", tmp_path)
    relative = np.abs(back / x - 1)
    assert 2**-12 < relative.max() <= 2**-11 * (1 + 1e-6)  # 10 digits after the leading one, to the nearest
    np.testing.assert_array_equal(back, x.astype(np.float16).astype(np.float32))


def test_int8_has_one_scale_from_the_largest_value(tmp_path):
    x = np.array([-254, -100, -3.1, -0.9, 0, 0.9, 3, 101, 127], np.float32)  # 254 / 127: steps of 2
    np.testing.assert_allclose(
        formats.round_trip(x, "int8, one scale", tmp_path), [-254, -100, -4, 0, 0, 0, 4, 100, 128], rtol=1e-6
    )


@settings(deadline=None, max_examples=60)
@given(x=hnp.arrays(np.float32, st.integers(1, 200), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_errors_of_any_array_are_within_half_a_step(x, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "any"
    top = float(np.abs(x).max())
    int8 = np.abs(formats.round_trip(x, "int8, one scale", folder).astype(float) - x).max()
    assert int8 <= top / 127 / 2 * (1 + 1e-5) + 1e-44
    back = formats.round_trip(x, "8+1 bits", folder).astype(float)
    for first in range(0, len(x), 64):
        block = x[first : first + 64].astype(float)
        bound = (block.max() - block.min()) / 255 / 2 + 2**-22 * np.abs(block).max()  # and what float32 rounds
        assert np.abs(back[first : first + 64] - block).max() <= bound * (1 + 1e-5) + 1e-44


def test_late_arrivals_are_lost_by_one_scale_and_kept_by_blocks(tmp_path):
    x = waves()
    late = np.s_[:, 240:]  # e^-6 = 0.0025 of the first: below half of int8's step of 1 / 127
    assert 0 < np.abs(x[late]).max() < np.abs(x).max() / 127 / 2
    int8 = formats.round_trip(x, "int8, one scale", tmp_path)
    assert not int8[late].any()
    blocks = formats.round_trip(x, "8+1 bits", tmp_path)
    assert rms(blocks[late] - x[late]) < 0.01 * rms(x[late])


# ---- the table


def test_the_table_tells_errors_bytes_and_times(tmp_path):
    x = waves()
    table = formats.compare(x, tmp_path / "new", rounds=3)
    assert list(table.index) == ["float32", "float16", "8+1 bits", "int8, one scale"]
    n = x.size
    assert table["bytes"].tolist() == [4 * n, 2 * n, n + 8 * (n // 64), n + 4]
    assert table["bits"].tolist() == pytest.approx([32, 16, 9, 8], abs=0.01)
    for name, row in table.iterrows():
        back = formats.round_trip(x, name, tmp_path / "again").astype(np.float64)
        assert row["largest_error"] == np.abs(back - x).max()
        assert row["error"] == pytest.approx(rms(back - x) / rms(x))
    assert table.loc["float32", ["largest_error", "error"]].tolist() == [0, 0]
    assert table["error"].is_monotonic_increasing  # of these waves
    assert (
        (table["low"] > 0).all()
        and (table["low"] <= table["load_ms"]).all()
        and (table["load_ms"] <= table["high"]).all()
    )
    assert table.loc["float32", ["times", "times_low", "times_high"]].tolist() == [1, 1, 1]
    assert sum(path.stat().st_size for path in (tmp_path / "new").iterdir()) == table["bytes"].sum()


def test_formats_take_turns_and_ratios_are_of_one_round(tmp_path, monkeypatch):
    """The clock is made: the machine is ten times slower in the second round, and no ratio is the worse for it."""
    seconds = {"float32": 1.0, "float16": 2.0, "8+1 bits": 4.0, "int8, one scale": 0.5}
    loaded, now = [], [0.0]

    def writers(block):
        def writer(name):
            def write(values, path):
                def load():
                    loaded.append(name)
                    now[0] += seconds[name] * (10 if 8 < len(loaded) <= 12 else 1)
                    return values

                path.write_bytes(b"")
                return [path], load

            return write

        return {name: writer(name) for name in seconds}

    monkeypatch.setattr(formats, "_writers", writers)
    monkeypatch.setattr(formats.time, "perf_counter", lambda: now[0])
    table = formats.compare(np.ones(4, np.float32), tmp_path, rounds=3)
    assert table["times"].tolist() == [1, 0.5, 0.25, 2]
    assert table["times_low"].tolist() == table["times_high"].tolist() == [1, 0.5, 0.25, 2]
    assert table.loc["8+1 bits", ["load_ms", "low", "high"]].tolist() == [4000, 4000, 40000]
    rounds = [loaded[4 * i : 4 * i + 4] for i in range(4)]
    assert all(sorted(each) == sorted(seconds) for each in rounds)
    assert len({each[0] for each in rounds[1:]}) == 3  # another goes first each time


def test_what_float16_overflows_is_told(tmp_path):
    table = formats.compare(np.array([1.0, 1e6, -2e5]), tmp_path, rounds=1)
    assert table.loc["float16", ["largest_error", "error"]].tolist() == [math.inf, math.inf]
    assert np.isfinite(table.drop(index="float16")[["largest_error", "error"]]).all(axis=None)


@pytest.mark.parametrize("value", [0.0, 3.0, -1e-3, 1e-44, 3e38])
@pytest.mark.parametrize("shape", [(), (1,), (5, 13, 3)])
def test_constant_and_tiny_arrays(value, shape, tmp_path):
    x = np.full(shape, value, np.float32)
    table = formats.compare(x, tmp_path, rounds=1)
    for name in ("float32", "8+1 bits"):
        assert table.loc[name, "largest_error"] == 0
    assert table.loc["int8, one scale", "largest_error"] <= abs(value) / 127 / 2 + 1e-44
    assert formats.round_trip(x, "8+1 bits", tmp_path).shape == shape


def test_int8_of_values_that_are_127_times_too_small_for_a_scale(tmp_path):
    x = np.array([1, -7, 3], np.float32) * np.finfo(np.float32).smallest_subnormal
    assert np.ptp(x) > 0 and np.float32(np.abs(x).max() / 127) == 0
    np.testing.assert_array_equal(formats.round_trip(x, "int8, one scale", tmp_path), x)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ">f4"])
def test_other_floats_and_strides_are_taken(dtype, tmp_path):
    x = waves().astype(dtype)[:, ::3, ::-1]
    back = formats.round_trip(x, "float32", tmp_path)
    np.testing.assert_array_equal(back, x.astype(np.float32))
    assert formats.compare(x, tmp_path, rounds=1).loc["8+1 bits", "error"] < 0.02


def test_the_speed_of_reading_below_which_a_format_pays():
    table = pd.DataFrame(
        {"bytes": [4e6, 2e6, 1e6], "load_ms": [1.0, 5.0, 0.5]}, ["float32", "8+1 bits", "int8, one scale"]
    )
    assert formats.pays_below(table) == pytest.approx(500e6)  # 2 MB less to read for 4 ms more to compute
    assert formats.pays_below(table, "int8, one scale") == math.inf
    table.loc["8+1 bits", "bytes"] = 5e6  # as of a few values, whose block is written whole
    assert formats.pays_below(table) == 0


# ---- what is refused


@pytest.mark.parametrize(
    ("x", "error", "named"),
    [
        (np.array([0, 1, np.nan]), ValueError, "a NaN at flat position 2, expected finite"),
        (np.array([[0, -np.inf], [1, 1]], np.float16), ValueError, "an infinity at flat position 1"),
        (np.array([0, 1e300]), ValueError, r"1e\+300, beyond the range of float32, at flat position 1"),
        (np.zeros((3, 0), np.float32), ValueError, r"empty array of shape \(3, 0\)"),
        (np.arange(4), TypeError, "takes floats, not int64"),
        (np.array([True]), TypeError, "takes floats, not bool"),
        (np.array([1j]), TypeError, "takes floats, not complex128"),
    ],
)
def test_what_is_no_array_of_finite_floats_is_refused(x, error, named, tmp_path):  # A06
    with pytest.raises(error, match=named):
        formats.compare(x, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_no_rounds_and_no_blocks_are_refused(tmp_path):
    with pytest.raises(ValueError, match="0 rounds"):
        formats.compare(np.ones(3), tmp_path, rounds=0)
    with pytest.raises(ValueError, match="no blocks of 0"):
        formats.compare(np.ones(3), tmp_path, block=0)


def test_the_input_is_left_alone(tmp_path):
    x = waves()
    copy = x.copy()
    x.flags.writeable = False
    formats.compare(x, tmp_path, rounds=1)
    np.testing.assert_array_equal(x, copy)
