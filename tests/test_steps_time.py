"""tests/bench/steps_time.py on tiny loops, compiled by a backend that changes nothing."""

import json
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "bench"))

import steps_time
import table

SMALL = steps_time.Case(16, 0, 1, 4.5, 1)
COMPILING = {"backend": "aot_eager"}


def test_a_row_compares_like_with_like():
    row, report = steps_time.measure(SMALL, 1, 3, 12, 60, chunks=(1, 4), **COMPILING)
    assert row["grid"] == "16x16, batch 1" and row["differs by"] == 0 and row["n"] in (0, 1, 4)
    assert row["from"] <= row["times as fast"] <= row["to"]
    assert row["times as fast"] == pytest.approx(row["plain, ms a step"] / row["compiled, ms a step"], rel=0.5)
    assert row["tried"] == "1, 4" and [each["n"] for each in report] == [0, 1, 4]


def test_gradients_cost_what_is_said():
    rows, seconds = steps_time.train(SMALL, 1, 2, 100, **COMPILING)
    plain, compiled, checkpointed = rows
    assert [row["way"] for row in rows] == list(steps_time.WAYS) and plain["of plain"] == plain["times plain"] == 1
    assert 0 < checkpointed["MB kept"] < 0.3 * compiled["MB kept"]
    assert checkpointed["MB kept"] >= 10 * 2 * 16 * 16 * 4 / 1e6  # two fields a chunk
    assert checkpointed["MB a chunk"] == pytest.approx(compiled["MB kept"] / 10)
    assert max(row["gradient differs by"] for row in rows) < 1e-4
    assert plain["compile s"] == 0 < compiled["compile s"] == checkpointed["compile s"]  # of the same chunks
    assert all(len(each) == 2 for each in seconds.values())
    assert compiled["times plain"] == pytest.approx(
        sum(a / b for a, b in zip(seconds["compiled"], seconds["plain loop"], strict=True)) / 2
    )


def test_gradients_that_differ_are_told():
    assert steps_time.relative(torch.tensor([1.0, 4.5]), torch.tensor([1.0, 4.0])) == 0.125


def test_each_way_comes_first_as_often_as_the_others():
    calls = []
    seconds = steps_time.in_turn({name: lambda name=name: calls.append(name) for name in "ab"}, 4)
    assert calls == list("abbaabba") and [len(each) for each in seconds.values()] == [4, 4]


def test_seconds_of_compiling_are_counted_once():
    """A start of 2 s, and 1, 3 and 5 s: each row has the start and the single step's in it."""
    report = pd.DataFrame(
        {"n": [0, 1, 2, 5, 10], "compile_s": [0, 3, 6, 8, float("nan")], "left_out": ["", "", "", "", "too long"]}
    )
    assert steps_time.sum_compiled(report) == 2 + 1 + 3 + 5


def test_results_are_rows_of_the_tables(monkeypatch, tmp_path, capsys):
    row = {
        "grid": "70x70, batch 1", "threads": 1, "times as fast": 5.0, "from": 4.8, "to": 5.2, "n": 25, "tried": "1, 25",
        "compile s": 30.0, "pays after calls": 700.0, "differs by": 0.0,
    }  # fmt: skip
    trained = [
        {"grid": "70x70, batch 1", "threads": 2, "way": way, "of plain": 0.1, "MB kept": 4.0, "MB a chunk": 0.2,
         "times plain": 0.5, "from": 0.4, "to": 0.6, "compile s": 9.0, "gradient differs by": 2e-6}
        for way in steps_time.WAYS
    ]  # fmt: skip
    first, second, memory, time = steps_time.results_of([row, row | {"threads": 2, "n": 0}], trained, 1000)
    assert (first.median, first.low, first.high, first.target, first.ratio) == (5.0, 4.8, 5.2, 4.5, "times as fast")
    assert first.what == "waves on 70x70, batch 1, 1000 steps, compile_steps n=auto, 1 thread"
    assert first.note.startswith("n = 25 of those tried (1, 25), compiled in 30 s; pays after 700 calls")
    assert second.note.startswith("the plain loop stays (tried: 1, 25)")
    assert second.target is None and "2 threads" in second.what
    assert memory.median == 0.1 and memory.what.endswith("2 threads: memory") and time.median == 0.5
    monkeypatch.setattr(steps_time, "measure", lambda *_: (row, [{"n": 25}]))
    monkeypatch.setattr(steps_time, "train", lambda *_: (trained, {}))
    monkeypatch.setattr(
        sys, "argv", ["steps_time", "--out", str(tmp_path), "--warm", "--threads", "1", "--cases", "small"]
    )
    steps_time.main()
    data = json.loads((tmp_path / "steps_time.json").read_text())
    assert [each["median"] for each in data["results"]] == [5.0, 0.1, 0.5] and "| 25 |" in capsys.readouterr().out
    assert table.Result(**data["results"][0]) == first
