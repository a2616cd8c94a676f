"""Out-of-fold scores as a fold keeps them, `oof.csv`: read, and checked before anything is made of them."""

from pathlib import Path

import numpy as np
import pandas as pd

from rsnakit.breasts import BREAST

OOF_COLUMNS = ["patient_id", "laterality", "image_id", "fold", "cancer", "score"]


def read(path: Path, fold: int, n_rows: int | None = None) -> pd.DataFrame:
    """A fold's out-of-fold scores, a row an image, or a row a breast with an empty `image_id`.

    Args:
        path: of `oof.csv`.
        fold: the fold whose patients were held out.
        n_rows: how many rows were written; None where that is not known.

    Raises:
        ValueError: the file is not there, no csv, or not whole; or a value is not as training writes it. Rows are counted
            as lines of the file, the header being line 1.
    """
    try:
        found = pd.read_csv(path, dtype={"patient_id": str, "image_id": str}).fillna({"image_id": ""})
    except FileNotFoundError:
        raise ValueError("not there") from None
    except (OSError, ValueError) as error:  # pandas' own kinds of it: nothing in the file, lines of several lengths
        raise ValueError(f"cannot be read as csv ({str(error).strip()})") from error
    if list(found.columns) != OOF_COLUMNS:
        raise ValueError(f"columns are {list(found.columns)}, expected {OOF_COLUMNS}")
    if n_rows is not None and len(found) != n_rows:
        raise ValueError(f"{len(found)} rows, {n_rows} were written")
    _check_values(found, fold)
    return found


def _check_values(rows: pd.DataFrame, fold: int) -> None:
    def refuse(wrong: pd.Series, name: str, expected: str) -> None:
        if wrong.any():
            row = int(np.argmax(wrong))
            found = rows[name].iloc[row]
            raise ValueError(f"row {row + 2}: the {name} of {_name(rows, row)} is {found}, expected {expected}")

    for name in BREAST:
        refuse(rows[name].isna(), name, "one in every row")
    score = pd.to_numeric(rows["score"], errors="coerce")
    refuse(~score.between(0, 1), "score", "a probability in [0, 1]")
    refuse(~pd.to_numeric(rows["cancer"], errors="coerce").isin([0, 1]), "cancer", "0 or 1")
    refuse(pd.to_numeric(rows["fold"], errors="coerce") != fold, "fold", f"{fold}, that of its folder")
    keys = BREAST if (rows["image_id"] == "").all() else [*BREAST, "image_id"]
    twice = rows.duplicated(keys)
    if twice.any():
        row = int(np.argmax(twice))
        raise ValueError(f"row {row + 2}: {_name(rows, row)} is there a second time")
    labels = rows.groupby(BREAST)["cancer"].transform("nunique")
    refuse(labels > 1, "cancer", "the same in all rows of a breast")


def _name(rows: pd.DataFrame, row: int) -> str:
    record = rows.iloc[row]
    breast = f"breast {record['patient_id']}_{record['laterality']}"
    return f"image {record['image_id']} of {breast}" if record["image_id"] else breast
