"""rsnakit.outlook: the hours that a rehearsal projects, and what is a fault of the whole."""

from pathlib import Path

import pytest

from rsnakit import env, outlook
from rsnakit.outlook import Rehearsal, Stage
from rsnakit.sandbox import Outcome


def stage(
    kind: str, images: int, seconds: float, decode_s: float = 0.0, cells_s: tuple = (0.0,), faults: tuple = ()
) -> Stage:
    outcome = Outcome(0, False, seconds, 3_000_000_000, 5_000_000, Path("log"))
    return Stage(f"1_flat_{kind}", "flat", kind, images, images, outcome, faults, (), decode_s, cells_s, Path("book"))


def test_the_hours_that_the_hidden_test_set_would_take():
    """By hand: 20 s of start-up; 199 images in 199 s, of which two cores spent 100 s on decoding 200 images."""
    one, many = stage("one", 1, 20.0), stage("many", 200, 219.0, decode_s=100.0)
    found = outlook.project(one, many, cores=2)
    assert (found.startup_s, found.image_s) == (20.0, 1.0)
    assert found.models_share == pytest.approx(0.75)  # 100 s / 200 images / 2 cores are a quarter of a second
    assert found.hours == pytest.approx((20 + 32_000 * 1.0 * 2 / 4) / 3600)
    faster = outlook.project(one, many, cores=2, gpu_speedup=3.0)
    assert faster.hours == pytest.approx((20 + 32_000 * (0.25 + 0.75 / 3) * 2 / 4) / 3600)
    # The machine was busy while the notebook on one image was started: then the cell that grew has the time.
    slow = stage("one", 1, 220.0, cells_s=(210.0, 2.0, 1.0))
    found = outlook.project(slow, stage("many", 200, 219.0, cells_s=(9.0, 201.0, 1.5)), cores=4)
    assert found.image_s == pytest.approx(1.0) and found.models_share == 1.0


def test_a_fault_anywhere_spoils_the_whole():
    assert Rehearsal((stage("one", 1, 20.0),), None, (), ()).ok
    for found in (
        Rehearsal((stage("visible", 4, 20.0), stage("one", 1, 20.0, faults=("a row is missing",))), None, (), ()),
        Rehearsal((stage("one", 1, 20.0),), None, ("32,000 images would take 12.0 h",), ()),
    ):
        assert not found.ok
        lines = found.sentences()
        assert lines[0].startswith("FAULT") and lines[-1] == "1 fault: do not submit this bundle"
    table = found.table()
    assert table.index.tolist() == ["1_flat_one"]
    assert table.iloc[0][["images", "seconds", "peak memory, GB", "peak disk, MB"]].tolist() == [1, 20.0, 3.0, 5.0]


def test_nine_hours_that_would_not_hold_are_a_fault():
    """2.5 s an image on as many cores as Kaggle has are 22 h; the same with a GPU that is ten times as fast are 2.2."""
    done = [stage("one", 1, 20.0), stage("many", 200, 20.0 + 2.5 * 199 * 4 / env.cores())]
    found = outlook.conclude(done, [], 12.0, 1.0)
    assert not found.ok and "32,000 images would take 22.2 h, more than 9" in found.faults[0]
    found = outlook.conclude(done, [], 12.0, 10.0)
    assert found.ok and found.projection.hours == pytest.approx(2.23, abs=0.01) and len(found.notes) == 1
    assert "hours on Kaggle: 2.2 = 20 s of start-up + 32,000 images x" in found.notes[0]
    assert "megapixels" in outlook.conclude(done, [], 0.5, 10.0).notes[1]
