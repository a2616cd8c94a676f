"""What is written at the end: the submission before all else, whatever the disk and figures do. (See test_infer, too.)"""

import pandas as pd
import pytest

from rsnakit import infer, submission

REPORT = pd.DataFrame(
    {"prediction_id": ["9_R", "1_L"], "patient_id": ["9", "1"], "laterality": ["R", "L"], "image_id": ["a", "b"],
     "score": [0.2, 0.9]}
)  # fmt: skip


@pytest.mark.parametrize("rerun", [False, True])
def test_a_disk_that_has_no_room_for_the_report_has_the_submission(tmp_path, monkeypatch, capsys, rerun):
    to_csv, breasts = pd.DataFrame.to_csv, submission.to_breasts(REPORT)

    def nearly_full(frame, path, **options) -> None:
        if "image_id" in frame:
            raise OSError(28, "No space left on device")
        to_csv(frame, path, **options)

    monkeypatch.setattr(pd.DataFrame, "to_csv", nearly_full)
    if rerun:
        monkeypatch.setenv("KAGGLE_IS_COMPETITION_RERUN", "1")
        assert infer.write_files(REPORT, breasts, tmp_path / "out", 0.5)["cancer"].tolist() == [0.0, 1.0]
        assert "NOTE: " in (said := capsys.readouterr().out) and "report.csv cannot be written: No space" in said
    else:
        with pytest.raises(OSError, match="No space"):
            infer.write_files(REPORT, breasts, tmp_path / "out", 0.5)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["submission.csv"]
    assert (tmp_path / "out" / "submission.csv").read_text() == "prediction_id,cancer\n9_R,0.0\n1_L,1.0\n"


def test_both_files_are_written(tmp_path):
    written = infer.write_files(REPORT, submission.to_breasts(REPORT), tmp_path, None)
    assert written["cancer"].tolist() == [0.2, 0.9]
    assert (tmp_path / "report.csv").read_text() == REPORT.to_csv(index=False)
    infer.check_submission(tmp_path / "submission.csv", REPORT)


def test_what_only_shows_something_ends_no_submission_that_is_scored(monkeypatch, capfd):
    assert infer.shown(divmod, 7, 2) == (3, 1) and infer.shown(sorted, [1, 2], reverse=True) == [2, 1]
    with pytest.raises(ZeroDivisionError):
        infer.shown(divmod, 1, 0)
    monkeypatch.setenv("KAGGLE_IS_COMPETITION_RERUN", "1")
    assert infer.shown(divmod, 7, 2) == (3, 1)
    assert infer.shown(divmod, 1, 0) is None
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_ids_that_read_as_nothing_are_ids(tmp_path):
    (tmp_path / "test.csv").write_text("prediction_id,age\nNA,60\nNA,60\nnull,\n")
    (tmp_path / "s.csv").write_text("prediction_id,cancer\nNA,0.5\nnull,1\n")
    assert infer.check_submission(tmp_path / "s.csv", tmp_path / "test.csv")["cancer"].tolist() == [0.5, 1.0]
