"""tests/bench/gpu_time.py where there is no GPU: what it reckons from trials, and the same on a CPU at tiny sizes."""

import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent / "bench"
sys.path.insert(0, str(BENCH))

import gpu_time  # noqa: E402

from rsnakit.trials import Batches, Measured, Setting, Trials  # noqa: E402

TINY = gpu_time.Plan(
    device="cpu", rounds=2, backbone="resnet18", size=(64, 32), batch=4, most=6, grids=((20, 0, 1),), steps=20, images=8,
    detector=(512, 416), limit_s=60.0,
)  # fmt: skip


class Told:
    """In place of `Trials`: what settings give is written here."""

    def __init__(self, change=None) -> None:
        self.change = change or {}

    def in_turn(self, settings, rounds, limit_s):
        return [self.change.get(setting, self.measured(setting)) for setting in settings]

    def measured(self, setting: Setting) -> Measured:
        rate = {"fp32": 10.0, "bf16": 20.0, "fp16": 30.0}[setting.precision]
        rate *= (0.5 if not setting.channels_last else 1) * (1.5 if setting.compile != "off" else 1)
        rate *= 0.8 if setting.grad_checkpointing else 1
        memory = 100.0 if setting.grad_checkpointing else 400.0
        return Measured((rate, 2 * rate), 12.0 if setting.compile != "off" else 0.1, memory)

    def largest_batch(self, setting, most, limit_s):
        return Batches({"fp32": 8, "bf16": 14, "fp16": 16}[setting.precision], [], "memory")


def setting(**changed) -> Setting:
    return dataclasses.replace(Setting("bf16", True, "off", False, TINY.batch), **changed)


def bench(tmp_path, change=None, failing=("loops", "inference")) -> gpu_time.Bench:
    found = gpu_time.Bench(TINY, Told(change), tmp_path)
    for name in failing:
        setattr(found, name, lambda: 1 / 0)
    return found


def test_rows_are_ratios_of_rounds_and_what_fails_costs_its_own(tmp_path):
    made = bench(tmp_path)
    results = made.results()
    names = [row.what.split(", ")[-1] if "largest" not in row.what else "largest " + row.what[-4:] for row in results]
    assert names[:7] == ["bf16", "fp16", "largest bf16", "largest fp16", "channels last", "torch.compile", names[6]]
    assert [row.median for row in results[:8]] == pytest.approx([2, 3, 1.75, 2, 2, 1.5, 1.25, 0.25])
    assert results[2].note == "14 images, and 8; set by memory" and results[5].note == "45 images/s, compiled in 12 s"
    assert results[7].note == "400 MB, and 100"
    assert all(math.isnan(row.median) and row.note.startswith("ZeroDivisionError") for row in results[8:])
    assert [row[:3] for row in results] == [tuple(row) for rows in gpu_time.rows_of(TINY).values() for row in rows]
    assert [(row["precision"], row["compile"]) for row in made.tried[:3]] == [
        ("fp32", "off"), ("bf16", "off"), ("fp16", "off"),
    ]  # fmt: skip


def test_a_setting_that_the_device_cannot_do_says_why(tmp_path):
    refused = {setting(precision="fp16"): Measured(error="a T4 has no such units")}
    bf16, fp16 = bench(tmp_path, refused).results()[:2]
    assert bf16.median == 2.0 and math.isnan(fp16.median) and fp16.note == "a T4 has no such units"
    refused = {setting(): Measured(error="no")}
    results = {row.what.split(", ")[-1]: row for row in bench(tmp_path, refused).results()}
    assert results["torch.compile"].note == results["channels last"].note == "no"
    untold = {setting(): Measured((10.0, 10.0), 0.1, math.nan)}
    time, memory = bench(tmp_path, untold).results()[6:8]
    assert time.median > 0 and memory.note == "the memory cannot be told here"


def test_a_round_that_only_one_had_time_for_is_left_out():
    assert gpu_time.even((1.0, 2.0, 3.0), (4.0, 5.0)) == ((1.0, 2.0), (4.0, 5.0))


def test_no_batch_at_all_is_a_row_with_the_reason(tmp_path):
    made = bench(tmp_path)
    tried = [{"batch": 4, "why": "precision fp16 was asked for"}]
    made.trials.largest_batch = lambda setting, *_, **__: Batches(0 if setting.precision == "fp16" else 8, tried)
    assert made.batches() == [((1.0, 1.0, 1.0), "8 images, and 8; set by time"), "precision fp16 was asked for"]


@pytest.mark.skipif(not gpu_time.why_not("cuda"), reason="there is a GPU")
def test_without_a_gpu_every_row_says_why(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_time.py", "--out", str(tmp_path)])
    gpu_time.main()
    rows = json.loads((tmp_path / "gpu_time.json").read_text())["results"]
    assert len(rows) == sum(map(len, gpu_time.rows_of(gpu_time.Plan()).values())) == 11
    assert all(math.isnan(row["median"]) and row["note"].endswith("sees no CUDA GPU") for row in rows)
    assert "nothing is measured: torch" in capsys.readouterr().err


@pytest.mark.slow
def test_the_same_on_a_cpu_at_tiny_sizes(tmp_path, monkeypatch):
    """All but compiling the model, which takes a CPU a minute."""
    with Trials(gpu_time.make_workload(TINY, tmp_path)) as trials:
        made = gpu_time.Bench(TINY, trials, tmp_path)
        monkeypatch.setattr(made, "compiling", lambda: ["left out"])
        results = made.results()
    missing = [row.note for row in results if math.isnan(row.median)]
    assert missing[:2] == [missing[0]] * 2 and missing[0].startswith("precision fp16 was asked for")
    assert missing[2:] == ["left out"]
    assert all(0 < row.low <= row.median <= row.high for row in results if row.note not in missing)
    assert results[2].note == "6 images, and 6; set by most"
    assert [row["error"] for row in made.tried if row["precision"] == "fp32"] == [""]
