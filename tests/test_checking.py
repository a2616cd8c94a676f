"""rsnakit.checking: what a run of the notebook may leave, made by hand, and what is said of it."""

from pathlib import Path

import nbformat
import pandas as pd
import pytest

from rsnakit import checking, hidden
from rsnakit.sandbox import Outcome


@pytest.fixture(scope="module")
def many(competition, tmp_path_factory):
    return hidden.make(competition, tmp_path_factory.mktemp("hidden") / "many", "many", n=32)


@pytest.fixture
def left(many, tmp_path):
    """A working folder as it should be left; the tests spoil it."""
    sample = pd.read_csv(many.folder / "sample_submission.csv", dtype=str)
    sample.to_csv(tmp_path / "submission.csv", index=False)
    report = many.images[["prediction_id", "patient_id", "laterality", "image_id", "status"]]
    report = report.assign(score="0.02", seconds="0.5", reason=report["status"].where(report["status"] != "ok", ""))
    report.to_csv(tmp_path / "report.csv", index=False)
    return tmp_path


def change(left: Path, row: int, **values) -> None:
    report = pd.read_csv(left / "report.csv", dtype=str, keep_default_na=False)
    report.loc[row, list(values)] = list(values.values())
    report.to_csv(left / "report.csv", index=False)


def place(many, hurt: str) -> int:
    return many.images["hurt"].tolist().index(hurt)


def test_as_it_should_be(many, left):
    report, faults, notes = checking.check(left, many)
    assert (faults, notes) == ([], [])
    assert report["seconds"].sum() == pytest.approx(16)


def test_rows_that_are_missing_or_wrong(many, left):  # I02
    lines = (left / "submission.csv").read_text().splitlines()
    (left / "submission.csv").write_text("\n".join(lines[:-1]) + "\n")
    (fault,) = checking.check(left, many)[1]
    assert fault.startswith("submission.csv: 1 prediction_ids are missing") and lines[-1].split(",")[0] in fault
    (left / "submission.csv").write_bytes(b"")
    assert checking.check(left, many)[1][0].startswith("submission.csv: ")
    (left / "work").mkdir()
    (left / "submission.csv").rename(left / "work/submission.csv")
    (fault,) = checking.check(left, many)[1]
    assert fault == "submission.csv is not in /kaggle/working, but work/submission.csv is"


def test_each_hurt_image_has_its_status(many, left):  # I02
    cut, garbage, zero, huge = (place(many, name) for name in ("cut", "garbage", "all_zero", "huge"))
    change(left, cut, status="ok", reason="")
    change(left, zero, status="failed", reason="the model gave no finite score")
    change(left, huge, status="failed", reason="too large")
    ids = many.images["image_id"]
    faults = checking.check(left, many)[1]
    assert len(faults) == 3 and not any(ids[garbage] in fault for fault in faults)
    for row, said in (
        (cut, "the cut image {} is 'ok', expected 'failed'"),
        (zero, "the all-zero image {} is 'failed', expected 'blank'; the model gave no finite score"),
        (huge, "the huge image {} is 'failed', expected 'ok'; too large"),
    ):
        assert any(fault.startswith(said.format(ids[row])) for fault in faults)


def test_sound_images_have_to_be_scored(many, left):
    row = place(many, "")
    change(left, row, status="skipped", reason="no time was left")
    (fault,) = checking.check(left, many)[1]
    assert "1 of 26 sound images were not scored" in fault and "is 'skipped': no time was left" in fault
    assert str(many.images["source"][row]) in fault
    # Called blank, though it is not: no word of that is believed.
    change(left, row, status="blank", reason="blank image")
    assert "1 of 26 sound images" in checking.check(left, many)[1][0]


def test_an_image_that_is_blank_in_the_competition_is_no_fault(many, left):
    row, zero = place(many, ""), place(many, "all_zero")
    change(left, row, status="blank", reason="blank image")
    folder = many.folder / "test_images"
    images = many.images.copy()
    images.loc[row, "source"] = folder / images["patient_id"][zero] / f"{images['image_id'][zero]}.dcm"
    _, faults, notes = checking.check(left, hidden.HiddenSet(many.folder, many.kind, images))
    assert faults == [] and notes[0].startswith("1 images are blank in the competition itself")


def test_images_without_a_row_and_a_report_that_is_none(many, left):
    report = (left / "report.csv").read_text().splitlines()
    (left / "report.csv").write_text("\n".join(report[:-2]) + "\n")
    (fault,) = checking.check(left, many)[1]
    assert "no row for 2 images" in fault and many.images["image_id"].iloc[-1] in fault
    (left / "report.csv").write_text("nothing\n1\n")
    assert "report.csv cannot be used" in checking.check(left, many)[1][0]
    (left / "report.csv").unlink()
    assert checking.check(left, many)[1] == ["report.csv is not in /kaggle/working"]


def test_what_is_worth_knowing(many, left):
    """Passes that were dropped for want of time, and what is left beside the two files."""
    rows = [row for row, hurt in enumerate(many.images["hurt"]) if not hurt][:5]
    for row in rows:
        change(left, row, reason="fold 0 alone, for want of time")
    (left / "work").mkdir()
    for name, size in (("a", 1), ("b", 2_000_000), ("c", 2), ("d", 3)):
        (left / "work" / name).write_bytes(bytes(size))
    _, faults, notes = checking.check(left, many)
    assert faults == []
    assert notes == [
        "4 more files in /kaggle/working, 2.0 MB: work/b, work/d, work/c and others",
        "5 images: fold 0 alone, for want of time",
    ]


def test_inputs_that_were_written(many):
    before = checking.listed(many.folder)
    assert len(before) == 34 and checking.changes(before, checking.listed(many.folder)) == []
    path = many.folder / "train.csv"
    path.write_bytes(path.read_bytes() + b"\n")
    (many.folder / "more").touch()
    (fault,) = checking.changes(before, checking.listed(many.folder))
    assert fault == "2 files of the inputs were written, more, train.csv"


def test_which_cell_failed(tmp_path):
    book = nbformat.v4.new_notebook()
    error = nbformat.v4.new_output(
        "error", ename="OSError", evalue="\x1b[31mno room\x1b[0m\n" + "\n".join("abcdefgh"), traceback=[]
    )
    cells = [
        nbformat.v4.new_code_cell("1"),
        nbformat.v4.new_markdown_cell("x"),
        nbformat.v4.new_code_cell("2", outputs=[error]),
    ]
    cells[0].metadata["papermill"] = {"duration": 1.5}
    book.cells = cells
    nbformat.write(book, tmp_path / "a.ipynb")
    (tmp_path / "log").write_text("one\ntwo\nDeadKernelError: Kernel died\n")
    outcome = Outcome(1, False, 1.0, 0, 0, tmp_path / "log")
    assert (
        checking.what_failed(tmp_path / "a.ipynb", outcome)
        == "code cell 2 stopped with OSError: no room | c | d | e | f | g | h"
    )
    assert checking.seconds_of_cells(tmp_path / "a.ipynb") == (1.5, 0.0)
    said = checking.what_failed(tmp_path / "none.ipynb", outcome)
    assert said == "ended with status 1: one | two | DeadKernelError: Kernel died"
