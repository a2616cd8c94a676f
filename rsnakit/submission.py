"""From a report of images to a submission, and what the competition would say of it."""

import contextlib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rsnakit import env, metrics
from rsnakit.files import replacing

COLUMNS = ["prediction_id", "cancer"]
SCORE_OF = ("image", "breast")  # what the score of a report's row may be of


class SubmissionError(ValueError):
    """A submission that the competition would refuse or score wrongly; the message says what is wrong in which row."""


def to_breasts(report: pd.DataFrame, how: str = "mean") -> pd.DataFrame:
    """A report's images to breasts (see `metrics.to_breast`).

    A score that is that of the whole breast already (`score_of` says `breast`) stays what it is in every way: put through
    noisy_or again it would grow with each image.

    Args:
        report: as `infer.predict` gives it, or breasts, which stay as they are. Without `score_of` scores are those of images.
        how: one of `metrics.HOWS`.

    Raises:
        ValueError: as `metrics.to_breast`; or `score_of` is not the same in all rows, or a breast has several scores.
    """
    of = report["score_of"].unique().tolist() if "score_of" in report else []
    if len(of) > 1 or not set(of) <= set(SCORE_OF):
        raise ValueError(f"score_of is {', '.join(map(repr, of))}; expected one of {', '.join(SCORE_OF)} in all rows")
    if of != ["breast"]:
        return metrics.to_breast(report, how)
    breasts = metrics.to_breast(report, "max")
    several = report.groupby(metrics.BREAST, sort=False)["score"].nunique() > 1
    if several.any():
        name = "_".join(map(str, several.idxmax()))
        raise ValueError(f"breast {name} has several scores, and score_of says that each is the whole breast's")
    return breasts


def write_submission(
    report: pd.DataFrame, path: Path | str, threshold: float | None, aggregate: str = "mean"
) -> pd.DataFrame:
    """Brings a report's images to breasts, cuts at the threshold and writes the submission, whole or not at all.

    Args:
        report: as `infer.predict` gives it, or breasts of it, as `to_breasts` gives them.
        threshold: scores at or above it become 1, others 0; None leaves them.
        aggregate: one of `metrics.HOWS`, over a breast's images (see `to_breasts`).

    Returns:
        What was written: prediction_id, cancer, a row a breast in first-seen order.
    """
    breasts = to_breasts(report, aggregate)
    cancer = breasts["score"].clip(0, 1)
    if threshold is not None:
        cancer = (breasts["score"] >= threshold).astype(float)
    submission = pd.DataFrame({"prediction_id": breasts["prediction_id"], "cancer": cancer})
    with replacing(path) as temporary:
        submission.to_csv(temporary, index=False)
    return submission


def write_files(
    report: pd.DataFrame, breasts: pd.DataFrame, folder: Path | str, threshold: float | None
) -> pd.DataFrame:
    """Writes `submission.csv` and then `report.csv`, each whole or not at all.

    In this order, as the report is ten times as long: where the disk is nearly full it must not take the submission's place.
    While Kaggle scores a submission a report that cannot be written is said, and no more.

    Args:
        report: as `infer.predict` gives it.
        breasts: of it, as `to_breasts` gives them.
        folder: made where there is none.
        threshold: as in `write_submission`.

    Returns:
        The submission, as `write_submission`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    submission = write_submission(breasts, folder / "submission.csv", threshold)
    try:
        with replacing(folder / "report.csv") as temporary:
            report.to_csv(temporary, index=False)
    except OSError as error:
        if not env.is_rerun():
            raise
        print(f"NOTE: {error}")
    return submission


def shown(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What a function gives that only shows something, such as a figure or a note.

    While Kaggle scores a submission its error is printed, and None given: a notebook that ends with an error is not scored,
    whatever it has written.
    """
    try:
        return function(*arguments, **options)
    except Exception:
        if not env.is_rerun():
            raise
        with contextlib.suppress(OSError):  # of a full disk, too
            traceback.print_exc()
        return None


def check_submission(submission: Path | str | pd.DataFrame, test: Path | str | pd.DataFrame) -> pd.DataFrame:
    """Checks a submission against test.csv as the competition would.

    Args:
        submission: its file, or a frame of it.
        test: test.csv, or a frame with its prediction_id.

    Returns:
        The submission.

    Raises:
        SubmissionError: other columns; a prediction_id missing, twice, unknown or out of order; a value that is missing,
            no number, or outside [0, 1].
    """
    ids = {"prediction_id": str}
    if not isinstance(submission, pd.DataFrame):
        submission = pd.read_csv(submission, dtype=ids, keep_default_na=False)
    if not isinstance(test, pd.DataFrame):
        test = pd.read_csv(test, dtype=ids, usecols=["prediction_id"], keep_default_na=False)
    if list(submission.columns) != COLUMNS:
        raise SubmissionError(f"columns are {list(submission.columns)}, expected {COLUMNS}")
    expected = test["prediction_id"].astype(str).drop_duplicates().tolist()
    found = submission["prediction_id"].astype(str).tolist()
    for what, names in (
        ("twice", submission["prediction_id"][submission["prediction_id"].duplicated()].tolist()),
        ("missing", sorted(set(expected) - set(found))),
        ("not in test.csv", sorted(set(found) - set(expected))),
    ):
        if names:
            raise SubmissionError(f"{len(names)} prediction_ids are {what}, {names[:3]} among them")
    if found != expected:
        row = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
        raise SubmissionError(f"row {row + 2} is {found[row]}, test.csv has {expected[row]} there: keep its order")
    values = pd.to_numeric(submission["cancer"], errors="coerce")
    wrong = ~values.between(0, 1)
    if wrong.any():
        row = int(np.argmax(wrong))
        value = submission["cancer"].iloc[row]
        shown = repr(value) if isinstance(value, str) else str(value)
        raise SubmissionError(f"row {row + 2}, {found[row]}: cancer is {shown}, expected 0 to 1")
    return submission.assign(cancer=values.to_numpy(dtype=float))
