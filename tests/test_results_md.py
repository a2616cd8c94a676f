"""tests/bench/all.py and RESULTS.md: with benches made up here, and what is committed held together with the README."""

import datetime
import importlib
import math
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
BENCH = REPOSITORY / "tests" / "bench"
sys.path.insert(0, str(BENCH))

import results_md  # noqa: E402
import table  # noqa: E402

command = importlib.import_module("all")

FAKE = f'''"""Measures {{name}}, made up.

More of it.
"""
import argparse, os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {str(BENCH)!r})
import table
table.PACKAGES = ("numpy",)
parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path)
parser.add_argument("--rounds", type=int, default=5)
options = parser.parse_args()
{{body}}
'''
SAVE = """table.save(options.out, "{name}", {{"Times | of all": [{{"way": "a|b", "ms": 12.345}}]}}, results=[
    table.Result("{name} {value}", "theirs", "times as fast", {value}, 1.0, 3.0, target=2.0),
    table.Result("bytes", "theirs", "share of the bytes", 0.25, 0.2, 0.256, target=0.25, at_most=True, note="n"),
    table.Result.missing("on a GPU", "fp32", "times as fast", "there is no GPU", target=1.5),
])
print("rounds", options.rounds)"""


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "benches").mkdir()
    return tmp_path / "benches"


def bench(folder: Path, name: str, value: float = 2.5, before: str = "", body: str | None = None) -> None:
    body = before + SAVE.format(name=name, value=value) if body is None else body
    (folder / f"{name}.py").write_text(FAKE.format(name=name, body=body))


def run(folder: Path, *arguments: str, readme: Path | None = None, limit_s: float = 60.0) -> int:
    results, out = folder.parent / "RESULTS.md", str(folder.parent / "out")
    return command.main([*arguments, "--out", out], folder, results, readme, limit_s)


def test_all_benches_run_and_their_rows_can_be_read_back(folder, capfd):
    bench(folder, "b_time")
    bench(folder, "store_time", 1.996)
    assert run(folder, "--rounds", "3") == 0
    assert capfd.readouterr().out.count("rounds 3") == 2
    text = (folder.parent / "RESULTS.md").read_text()
    sections = results_md.read(folder.parent / "RESULTS.md")
    assert list(sections) == ["store_time", "b_time"]  # known ones first
    rows = results_md.parse(sections["store_time"])
    assert [list(row.values()) for row in rows] == [
        ["store_time 1.996", "theirs", "times as fast", "2.00", "1 to 3", "at least 2", "no", ""],
        ["bytes", "theirs", "share of the bytes", "0.25", "0.20 to 0.26", "at most 0.25", "yes", "n"],
        ["on a GPU", "fp32", "times as fast", "not measured", "", "at least 1.5", "", "there is no GPU"],
    ]
    assert sections["store_time"].startswith("Measures store_time, made up.\n\n")
    assert "**Times | of all**\n\n| way | ms |\n| --- | --: |\n| a/b | 12.3 |\n" in sections["store_time"]
    machine = table.machine()
    expected = f"{datetime.date.today()}, {machine['processor']}, {os.cpu_count()} cores"
    assert results_md.where(sections["b_time"]).removesuffix(results_md.BUSY) == expected
    assert f"Python {machine['Python']}, numpy {machine['numpy']}" in sections["b_time"]
    top = results_md.parse(text)
    assert [row["bench"] for row in top] == ["[store_time](#store_time)"] * 3 + ["[b_time](#b_time)"] * 3
    assert top[2]["median"] == "not measured (there is no GPU)"
    assert "3 of 4 targets reached; 2 of 6 rows not measured." in text
    assert (folder.parent / "out" / "b_time.md").exists() and (folder.parent / "out" / "b_time.json").exists()


def test_one_bench_alone_replaces_its_section_alone(folder):
    path = folder.parent / "RESULTS.md"
    bench(folder, "b_time")
    bench(folder, "store_time")
    run(folder)
    old = path.read_text().replace(str(datetime.date.today()), "2001-02-03")
    path.write_text(old)
    bench(folder, "b_time", 7.125)
    assert run(folder, "b_time") == 0
    before, after = (re.split(r"^## ", text, flags=re.MULTILINE) for text in (old, path.read_text()))
    assert [part.split("\n")[0] for part in after[1:]] == ["Summary", "store_time", "b_time"]
    assert before[2] == after[2] and "2001-02-03" in after[2] and "2001-02-03" not in after[3]
    assert "b_time 7.125" in after[1] and "b_time 7.125" in after[3]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise SystemExit(3)", "exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
        ("time.sleep(60)", "not done after 1 s"),
        ("pass", "it wrote no b_time.json"),
        ('table.save(options.out, "b_time", {})', "it gave no results for RESULTS.md"),
    ],
)
def test_a_bench_that_fails_keeps_its_old_section_and_is_named(folder, capfd, body, reason):
    path = folder.parent / "RESULTS.md"
    results_md.write(path, {"b_time": "as it was\n"})
    bench(folder, "b_time", body=body)
    bench(folder, "c_time")
    assert run(folder, limit_s=1.0 if "sleep" in body else 60.0) == 1
    assert f"FAILED b_time: {reason}" in capfd.readouterr().out
    sections = results_md.read(path)
    assert list(sections) == ["b_time", "c_time"] and sections["b_time"] == "as it was\n"


def test_an_interrupted_run_keeps_what_was_done_and_leaves_no_process(folder):
    path, started = folder.parent / "RESULTS.md", folder.parent / "started"
    bench(folder, "a_time")
    child = f"""
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
Path({str(started)!r}).write_text(f"{{os.getpid()}} {{child.pid}}")
time.sleep(60)
"""
    bench(folder, "b_time", body=child)
    code = f"""
import importlib, runpy, sys
sys.path.insert(0, {str(BENCH)!r})
from pathlib import Path
command = importlib.import_module("all")
command.signal.signal(command.signal.SIGTERM, command.signal.default_int_handler)
command.main(["--out", {str(folder.parent / "out")!r}], Path({str(folder)!r}), Path({str(path)!r}), None)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not started.exists() or not started.read_text():
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait(20) != 0
    assert list(results_md.read(path)) == ["a_time"]
    for pid in map(int, started.read_text().split()):
        while alive(pid):
            assert time.monotonic() < until
            time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text().rpartition(") ")[2].startswith("Z"))


def test_benches_are_listed_and_a_wrong_name_is_refused(folder, capsys):
    bench(folder, "b_time")
    assert run(folder, "--list") == 0
    assert capsys.readouterr().out == "b_time: Measures b_time, made up. [not measured]\n"
    with pytest.raises(SystemExit) as error:
        run(folder, "c_time")
    assert error.value.code == 2 and "no bench c_time: there are b_time" in capsys.readouterr().err


@pytest.mark.parametrize(("load", "warned"), [(0.3, False), (9.0 * 64, True), (None, False)])
def test_the_load_is_told_and_warned_of(folder, capsys, monkeypatch, load, warned):
    monkeypatch.setattr(command, "load_now", lambda: load)
    bench(folder, "b_time")
    run(folder)
    told = "unknown" if load is None else f"{load:.2f}"
    out, text = capsys.readouterr().out, (folder.parent / "RESULTS.md").read_text()
    assert f"load at the start {told}" in out and ("WARNING: other work runs" in out) == warned
    assert f"Load at the start {told};" in text
    assert ("Other work ran on the machine during b_time: these are rough." in text) == warned


def test_figures_of_the_readme_are_rows_of_the_results(folder, monkeypatch):
    readme = folder.parent / "README.md"
    readme.write_text(f"Before\n\n{results_md.FIRST}\nold\n{results_md.LAST}\n\nAfter\n")
    shown = (
        results_md.Figure("Fast", (("b_time", "b_time 2.5", "theirs"), ("b_time", "bytes", "theirs"))),
        results_md.Figure("On a GPU", (("b_time", "on a GPU", "fp32"),)),
        results_md.Figure("Another", (("c_time", "x", "y"),)),
    )
    monkeypatch.setattr(command, "FIGURES", shown)
    monkeypatch.setattr(command, "load_now", lambda: 0.0)
    bench(folder, "b_time")
    run(folder, readme=readme)
    text = readme.read_text()
    assert text.startswith(f"Before\n\n{results_md.FIRST}\n") and text.endswith(f"\n{results_md.LAST}\n\nAfter\n")
    assert [list(row.values()) for row in results_md.parse(text)] == [
        ["**Fast**", "b_time 2.5", "theirs", "2.50 times as fast (1 to 3)"],
        ["", "bytes", "theirs", "0.25 share of the bytes (0.20 to 0.26)"],
        ["**On a GPU**", "on a GPU", "fp32", "not measured"],
        ["**Another**", "x", "y", "not measured"],
    ]
    assert f"Measured on: {datetime.date.today()}, {table.machine()['processor']}, {os.cpu_count()} cores.\n" in text


def test_a_readme_without_a_place_for_figures_is_told_before_anything_runs(folder):
    bench(folder, "b_time")
    (folder.parent / "README.md").write_text("no marks")
    with pytest.raises(ValueError, match="no place for its figures"):
        run(folder, readme=folder.parent / "README.md")
    assert not (folder.parent / "RESULTS.md").exists() and (folder.parent / "README.md").read_text() == "no marks"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0123, "0.01"), (1.996, "2.00"), (9.994, "9.99"), (14.26, "14.3"), (123.4, "123"), (3.0, "3")],
)
def test_ratios_keep_two_digits_behind_the_point_or_three_in_all_or_are_whole(value, shown):
    assert results_md.number(value) == shown


def test_ratios_over_rounds_are_those_of_each_round():
    assert table.over_rounds([2.0, 30.0, 4.0], [1.0, 10.0, 1.0]) == (3.0, 2.0, 4.0)
    assert math.isnan(table.Result.missing("a", "b", "c", "why").median)


# What is committed


def test_the_readme_shows_what_the_results_say():
    sections = results_md.read(command.RESULTS)
    text = command.README.read_text(encoding="utf-8")
    assert text == results_md.replace_figures(text, results_md.figures(command.FIGURES, sections))
    assert len(command.FIGURES) == 5
    for bench, what, against in (row for figure in command.FIGURES for row in figure.rows):
        found = [(row["what"], row["against"]) for row in results_md.parse(sections.get(bench, ""))]
        assert bench in command.find(BENCH) and ((what, against) in found or not found), (bench, what, against)


def test_the_summary_is_that_of_the_sections():
    sections = results_md.read(command.RESULTS)
    text = command.RESULTS.read_text(encoding="utf-8")
    assert f"\n## Summary\n\n{results_md.summary(sections)}\n## " in text
    assert set(sections) <= set(command.find(BENCH))


def test_the_results_name_no_machine_and_no_folder():
    text = command.RESULTS.read_text(encoding="utf-8")
    assert socket.gethostname() not in text and str(REPOSITORY) not in text
    assert not re.findall(r"(?<![\w.])/(?:home|root|tmp|work|usr|mnt|kaggle)\b\S*", text)
