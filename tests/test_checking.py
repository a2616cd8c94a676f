"""rsnakit.checking: what a run of the notebook may leave, made by hand, and what is said of it."""

from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest

from rsnakit import checking, hidden
from rsnakit.sandbox import Outcome

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def many(competition, tmp_path_factory):
    return hidden.make(competition, tmp_path_factory.mktemp("hidden") / "many", "many", n=32)


@pytest.fixture
def left(many, tmp_path):
    """A working folder as it should be left, with scores by chance and each breast's mean; the tests spoil it."""
    report = many.images[["prediction_id", "patient_id", "laterality", "image_id", "status"]]
    scores = np.random.default_rng(0).uniform(0.01, 0.2, len(report))
    report = report.assign(score=scores, seconds="0.5", reason=report["status"].where(report["status"] != "ok", ""))
    report.to_csv(tmp_path / "report.csv", index=False)
    submit(tmp_path, report.groupby("prediction_id", sort=False)["score"].mean())
    return tmp_path


def submit(left: Path, predictions: pd.Series) -> None:
    predictions.rename("cancer").rename_axis("prediction_id").reset_index().to_csv(left / "submission.csv", index=False)


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


def test_a_row_without_a_score(many, left):
    change(left, 3, score="")
    (fault,) = checking.check(left, many)[1]
    assert fault.startswith("report.csv has no score for 1 images, ")


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


def test_predictions_follow_from_the_scores_by_each_aggregate_and_threshold(many, left):
    """Aggregates by hand, one line each. All are right, so that none may raise a false alarm."""
    report = pd.read_csv(left / "report.csv", dtype={"prediction_id": str})
    by_breast = report.groupby("prediction_id", sort=False)["score"]
    for scores in (
        by_breast.mean(),
        by_breast.max(),
        by_breast.apply(lambda s: 1 - (1 - s).prod()),
        by_breast.apply(lambda s: s.nlargest(2).mean()),
        by_breast.apply(lambda s: s.nlargest(3).mean()),
    ):
        submit(left, scores)
        assert checking.check(left, many)[1:] == ([], [])
        for threshold in scores.iloc[:5]:  # each is called itself
            submit(left, (scores >= threshold).astype(float))
            assert checking.check(left, many)[1:] == ([], [])
    submit(left, by_breast.mean() ** 2)  # calibrated in a cell of one's own
    assert checking.check(left, many)[1:] == (
        [],
        ["submission.csv is not what the kit makes of report.csv's scores, by any aggregate and threshold"],
    )


def test_predictions_that_contradict_the_scores(many, left):
    report = pd.read_csv(left / "report.csv", dtype={"prediction_id": str})
    mean = report.groupby("prediction_id", sort=False)["score"].mean()
    called = (mean >= mean.median()).astype(float)
    shuffled = mean.sample(frac=1, random_state=0).set_axis(mean.index)
    for spoiled in (1 - mean, 1 - called, shuffled):
        submit(left, spoiled)
        (fault,) = checking.check(left, many)[1]
        assert fault.startswith("submission.csv contradicts report.csv: ")
    # Of the only two that are not equal, one is below the other in all its images.
    lowest, highest = mean.idxmin(), mean.idxmax()
    submit(left, mean.where(~mean.index.isin([lowest]), mean[highest] + 0.1))
    (fault,) = checking.check(left, many)[1]
    assert "1 breasts are predicted above others" in fault and lowest in fault


def test_one_prediction_for_all_is_told(many, left):
    """It scores nothing; with a threshold that is too high it is what the scores lead to all the same."""
    ids = many.images["prediction_id"].drop_duplicates()
    submit(left, pd.Series(0.0, ids))
    assert checking.check(left, many)[1:] == ([], [f"all {len(ids)} breasts have the same prediction, 0"])


def test_what_kaggles_machine_has_not():
    def took(memory: float, disk: float) -> Outcome:
        return Outcome(0, False, 1.0, int(memory * 1e9), int(disk * 1e9), Path("log"))

    assert checking.over_limits(took(28, 19)) == []
    (fault,) = checking.over_limits(took(40, 1))
    assert "40.0 GB of memory, and Kaggle's machine with two T4 has 29" in fault
    (fault,) = checking.over_limits(took(1, 21))
    assert fault == "21.0 GB were in /kaggle/working, which holds 20"


def test_code_that_names_what_only_this_machine_has(tmp_path):
    def checked(*cells: str) -> tuple[list[str], list[str]]:
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        nbformat.write(book, tmp_path / "a.ipynb")
        return checking.check_code(tmp_path / "a.ipynb")

    here = Path(__file__).resolve()
    if here.parts[1] in checking.EVERYWHERE:
        pytest.skip("this repository lies in a folder that every Linux has")
    said = "which is there on this machine and not on Kaggle"
    for cell in (
        f"open({str(here)!r})", f"!cat {here}", f"%cd {here.parent}", f"import sys; sys.path.insert(0, '{here.parent}')",
        f'f"{here.parent}/{{1 + 1}}"', f"data_dir: str = '{here.parents[1]}'  # of a parameter",
    ):  # fmt: skip
        (fault,), notes = checked("1", cell)
        assert fault.startswith(f"code cell 2 names {here.parents[1]}") and fault.endswith(said) and notes == []
    assert checked("open('/nowhere/weights.pt')") == (
        [],
        ["code cell 1 names /nowhere/weights.pt, which is none of Kaggle's folders"],
    )
    (note,) = checked("import os\nos.environ['RSNAKIT_ROOT']")[1]
    assert note.startswith("code cell 1 uses $RSNAKIT_ROOT, which Kaggle does not set")
    plain = (
        "open('/kaggle/working/a'); open('/dev/null'); '/tmp/a'", "1 +", f"# {here}", "print('a / b', '/')",
        "import os; os.environ.get('RSNAKIT_ROOT', '/')", f"f'{{1}}{here}'",
    )  # fmt: skip
    assert checked(*plain) == ([], [])
    assert checking.check_code(REPOSITORY / "notebooks/04_inference.ipynb") == ([], [])


def test_packages_that_kaggle_may_lack(tmp_path):
    """pytest is installed here and not there; timm is where its wheel travels; NumPy and Pillow are in the image."""
    cells = [
        "import os, numpy, PIL.Image\nfrom rsnakit import params",
        "import timm\nfrom pytest import raises",
        "import timm",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbformat.write(book, tmp_path / "a.ipynb")
    said = "which Kaggle's image may lack, and no wheel of it travels"
    assert checking.check_code(tmp_path / "a.ipynb", ["wheels/timm-1.0.31-py3-none-any.whl"]) == (
        [],
        [f"code cell 2 imports pytest, {said}"],
    )
    assert checking.check_code(tmp_path / "a.ipynb", ["rsnakit/data.py"])[1] == [
        f"code cell 2 imports timm, pytest, {said}",
        f"code cell 3 imports timm, {said}",
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
