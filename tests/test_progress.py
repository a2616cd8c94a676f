"""Progress bars: drawn rarely, wherever they are shown; handed from one process to another."""

import io
import json
import math
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from rsnakit import progress


class Screen(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: terminal


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def drawn(screen: Screen, description: str) -> list[str]:
    return [part for part in screen.getvalue().split("\r") if part.startswith(description)]


@pytest.mark.parametrize(("terminal", "every"), [(True, 1.0), (False, 30.0)])
@pytest.mark.parametrize("first", ["show", "update"])
def test_a_bar_is_drawn_rarely(first, terminal, every, clock, monkeypatch):  # N06
    """10,000 steps of 10 ms: 100 s, and where a drawing stays for good, as in a log, only every half minute of them."""
    monkeypatch.setattr(sys, "stderr", screen := Screen(terminal))
    read = 0
    with progress.bar(10_000, "train") as bar:
        for step in range(10_000):
            clock[0] += 0.01
            if first == "update":
                bar.update()
            if bar.due:
                read += 1
                bar.show(loss=1 / 3, lr=1e-5, steps=10_000, state="warm", now=str(step // 10))
            if first == "show":
                bar.update()
    lines = drawn(screen, "train")
    assert len(lines) == pytest.approx(1 + 100 / every, abs=2) and read == pytest.approx(len(lines) - 1, abs=1)
    steps = [(int(re.search(r"(\d+)/10000", line)[1]), re.search(r"now=(\d+)", line)) for line in lines]
    assert all(found is None or abs(step - 10 * int(found[1])) < 20 for step, found in steps)  # no old values
    assert "loss=0.333, lr=1e-05, steps=1e+04, state=warm, now=" in lines[-1]
    assert "\n" not in screen.getvalue()  # one line, over and over


def test_a_bar_without_a_total_and_one_that_breaks_off(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Screen(True))
    with progress.bar(None, "search") as bar:
        clock[0] += 2
        bar.update(5)
        clock[0] += 2
        bar.update(5)
        bar.show(loss=math.nan)
        clock[0] += 2
        bar.update(5)
        bar.show(loss=math.nan)
    assert "15batch" in drawn(screen, "search")[-1] and "loss=nan" in drawn(screen, "search")[-1]
    with pytest.raises(KeyError), progress.bar(3, "train"):
        raise KeyError
    with progress.bar(3, "slow") as bar:  # steps that take longer than a bar waits for values
        for step in range(3):
            clock[0] += 10
            bar.update()
            if bar.due:
                bar.show(step=step)
    assert ["1/3" in line for line in drawn(screen, "slow")] == [False, True, False, False]
    assert "step=1" in drawn(screen, "slow")[-1]
    with progress.bar(0, "empty"):
        pass


@pytest.fixture
def ranks(monkeypatch):
    """Makes this process one of those that torchrun started, with or without a notebook behind."""

    def become(rank: int, launcher: str = "1 2") -> None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv(progress.LAUNCHER, launcher)

    return become


def train(clock: list[float], steps: int = 400) -> None:
    for description in ("train", "scores"):
        with progress.bar(steps, description) as bar:
            for step in range(steps):
                clock[0] += 0.01
                if bar.due:
                    bar.show(loss=1 / (1 + step))
                bar.update()
        print(f"done with {description}")


def test_one_process_of_many_has_a_bar(ranks, clock, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", screen := Screen(True))
    ranks(1)
    bar = progress.bar(10, "train")
    assert not bar.due
    train(clock)
    assert (screen.getvalue(), capsys.readouterr().out) == ("", "done with train\ndone with scores\n")
    ranks(0, launcher="")  # torchrun from a terminal
    train(clock)
    assert drawn(screen, "scores") and "{" not in capsys.readouterr().out
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")  # another program's RANK
    assert progress.bar(10, "train")._painter.tqdm.desc == "train"


def test_a_bar_goes_from_process_to_process(ranks, clock, monkeypatch, capsys):
    """What the first process writes is lines; what they make elsewhere is the bar that would be there."""
    monkeypatch.setattr(sys, "stderr", screen := Screen(True))
    ranks(0)
    train(clock)
    lines = capsys.readouterr().out.splitlines()
    states = [json.loads(line.removeprefix(progress.MARK)) for line in lines if line.startswith(progress.MARK)]
    assert screen.getvalue() == "" and 10 <= len(states) <= 14  # 4 s each, and beginning and end
    assert lines[-1] == "done with scores" and sum(state["closed"] for state in states) == 2

    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    follower = progress.Follower()
    for line in [*lines[:-2], "some words without a line's end " + lines[-2], lines[-1]]:
        clock[0] += 1  # as they come
        follower.feed(line)
    follower.close()
    out = capsys.readouterr().out
    assert out.splitlines() == ["done with train", "some words without a line's end ", "done with scores"]
    for description in ("train", "scores"):
        last = drawn(screen, description)[-1]
        assert "400/400" in last and "loss=0.00" in last
    assert len(drawn(screen, "train")) + len(drawn(screen, "scores")) <= len(states) + 6


def test_a_follower_draws_no_faster(clock, monkeypatch):
    """However fast the lines come, as they do to a notebook that was held up."""
    monkeypatch.setattr(sys, "stderr", screen := Screen(True))
    follower = progress.Follower()
    for n in range(1000):
        clock[0] += 0.001
        state = {"total": 1000, "description": "train", "n": n, "values": {}, "closed": False}
        follower.feed(progress.MARK + json.dumps(state))
    follower.feed(progress.MARK + '{"total": 1000, "descr')  # of one that was killed
    follower.close()
    follower.close()
    assert len(drawn(screen, "train")) <= 4


CELL = """
for epoch in range(20):
    for what in "train", "scores":
        with progress.bar(500, f"epoch {epoch}, {what}") as bar:
            for i in range(500):
                if bar.due:
                    bar.show(loss=1 / (1 + i))
                bar.update()
with progress.bar(2, "outer") as outer:
    outer.update()
    with progress.bar(3, "inner"):
        pass
"""


def test_the_bars_of_a_cell_are_one_widget():  # N06
    """Each widget stays in the notebook's file for good: an epoch has two bars, a training many epochs."""
    path = f"import sys; sys.path.insert(0, {str(Path(progress.__file__).parents[1])!r}); from rsnakit import progress"
    cells = [nbformat.v4.new_code_cell(source) for source in (path, CELL, CELL)]
    notebook = nbformat.v4.new_notebook(
        cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "Python"}}
    )
    NotebookClient(notebook, timeout=60).execute()
    for cell in notebook.cells[1:]:
        widgets = [
            output for output in cell.outputs if "application/vnd.jupyter.widget-view+json" in output.get("data", {})
        ]
        assert len(widgets) == len(cell.outputs) == 2  # the cell's, and the one that was inside another
        assert "epoch 0, train" in widgets[0]["data"]["text/plain"]
    state = notebook.metadata["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    shown = [model["state"]["value"] for model in state.values() if model["model_name"] == "HTMLModel"]
    assert any("outer" in text for text in shown) and not any("train" in text for text in shown)
    assert len(json.dumps(notebook)) < 60_000
