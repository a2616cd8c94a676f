"""tests/bench/formats_time.py: its waveforms are waves, its rows and results say what was found."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "bench"))

import formats_time

from rsnakit import formats


@pytest.fixture(scope="module")
def record() -> np.ndarray:
    return formats_time.waveforms(steps=300, pad=20, shots=2)


def test_waveforms_reach_the_receivers_when_they_should(record):
    """Over 1,500 m/s the wave of the first shot, at the first receiver, takes 10 m / 1,500 m/s a receiver."""
    assert record.shape == (2, 300, 70) and record.dtype == np.float32 and np.isfinite(record).all()
    peaks = np.abs(record[0]).argmax(axis=0)
    near, far = peaks[8], peaks[24]  # 160 m apart: 107 ms
    assert far - near == pytest.approx(160 / 1500 * 1000, abs=4)


def test_rows_tell_what_was_found_and_late_arrivals_need_blocks(record, tmp_path):
    rows = formats_time.measure(record, 2, 2, tmp_path)
    by_name = {row["format"]: row for row in rows}
    assert list(by_name) == list(formats.FORMATS)
    n = 2 * record.size
    assert [row["MB"] for row in rows] == pytest.approx([4e-6 * n, 2e-6 * n, 1.125e-6 * n, 1e-6 * n], rel=1e-2)
    assert by_name["float32"]["error, % (rms)"] == by_name["float32"]["of late arrivals, %"] == 0
    assert by_name["8+1 bits"]["of late arrivals, %"] < 0.2 * by_name["int8, one scale"]["of late arrivals, %"]
    # Of late arrivals alone, with what came back of the whole.
    x = record * np.random.default_rng(0).uniform(0.5, 2.0, 2).astype(np.float32)[:, None, None, None]
    late = formats_time.late_errors(x.reshape(-1, *record.shape[1:]), tmp_path)
    assert {name: 100 * value for name, value in late.items()} == pytest.approx(
        {row["format"]: row["of late arrivals, %"] for row in rows}
    )


def test_results_are_ratios_the_right_way_round(record, tmp_path):
    rows = formats_time.measure(record, 1, 2, tmp_path)
    results = formats_time.results_of(rows)
    by_name = {row["format"]: row for row in rows}
    assert [result.what.split(" as ")[-1] for result in results[:3]] == ["8+1 bits", "float16", "int8 with one scale"]
    for result, name in zip(results, ("8+1 bits", "float16", "int8, one scale"), strict=False):
        assert result.against == "float32" and result.ratio == "times as fast" and result.target is None
        assert result.median == by_name[name]["times as fast as float32"]
        assert 0 < result.low <= result.median <= result.high < math.inf
    last = results[-1]
    assert last.median == by_name["8+1 bits"]["of late arrivals, %"] / by_name["int8, one scale"]["of late arrivals, %"]
    assert "rms, over the second half" in last.note
