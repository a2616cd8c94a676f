"""Tables of a competition: read and checked, split into folds by patient."""

import hashlib
import logging
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.model_selection import StratifiedKFold

LABELS = ("cancer", "biopsy", "invasive", "BIRADS", "density", "difficult_negative_case")  # in train.csv alone
REQUIRED = {
    "train": ("site_id", "patient_id", "image_id", "laterality", "view", "cancer"),
    "test": ("patient_id", "image_id", "laterality", "view", "prediction_id"),
}
IDS = ("patient_id", "image_id")


class TableError(ValueError):
    """A table of a competition that is not as it should be; the message names file, row and value."""


def load_table(root: Path | str, split: str) -> pd.DataFrame:
    """Reads `train.csv` or `test.csv` of a competition and checks it.

    Ids are strings and stay as they are written. Rows that repeat another one wholly are dropped with a warning.

    Args:
        root: the competition's folder.
        split: `train` or `test`.

    Returns:
        The table in the file's order with a fresh index, and two columns more: `path`, the image's DICOM file (whether it
        is there is not asked), and `breast_id`, patient and laterality.

    Raises:
        FileNotFoundError: no such csv.
        TableError: a column missing, an empty or repeated id, `7` beside `007`, an id that would leave the folder, a
            laterality or label out of range, a label or prediction_id that differs within a breast.
    """
    path = Path(root) / f"{split}.csv"
    if not path.exists():
        raise FileNotFoundError(f"{path}: not found; a competition's folder holds train.csv, test.csv and *_images/")
    table = pd.read_csv(path, dtype={name: str for name in (*IDS, "prediction_id")}, skipinitialspace=True)
    missing = [name for name in REQUIRED[split] if name not in table.columns]
    if missing:
        raise TableError(f"{path}: column {', '.join(missing)} missing; found {', '.join(map(str, table.columns))}")
    if table.empty:
        raise TableError(f"{path}: no rows")
    repeated = table.duplicated()
    if repeated.any():
        logging.getLogger(__name__).warning("%s: %d rows repeat another one and are left out", path, repeated.sum())
        table = table[~repeated]
    _check_ids(table, path)
    _check_values(table, path, split)
    table = table.reset_index(drop=True)
    folder = Path(root) / f"{split}_images"
    table["path"] = [folder / p / f"{i}.dcm" for p, i in zip(table["patient_id"], table["image_id"], strict=True)]
    table["breast_id"] = table["patient_id"] + "_" + table["laterality"]
    same = "cancer" if split == "train" else "prediction_id"
    differing = table.groupby("breast_id", sort=False)[same].nunique()
    if (differing > 1).any():
        breast = differing.index[differing > 1][0]
        values = table.loc[table["breast_id"] == breast, same].unique().tolist()
        raise TableError(
            f"{path}: breast {breast} has more than one {same}: {values}; it must be the same in all its rows"
        )
    if split == "test":
        _check_one_breast_an_id(table, path)
    return table


def _check_ids(table: pd.DataFrame, path: Path) -> None:
    for name in IDS:
        for row, value in zip(table.index, table[name], strict=True):
            if not isinstance(value, str) or not value.strip():
                raise TableError(f"{path}: row {row + 2}: {name} is empty")
            if value in (".", "..") or "/" in value or "\\" in value or "\0" in value:
                raise TableError(f"{path}: row {row + 2}: {name} {value!r} would lead out of the image folder")
        spellings = pd.Series(table[name].unique())
        same = spellings.str.strip().str.lstrip("0").str.removesuffix(".0").duplicated(keep=False)
        if same.any():
            raise TableError(
                f"{path}: {name} has the same number in several spellings: {spellings[same].head(4).tolist()}; "
                "write ids alike, or images and labels will be mixed up"
            )
    images = table["image_id"]
    if images.duplicated().any():
        twice = images[images.duplicated(keep=False)]
        rows = [int(i) + 2 for i in twice.index[twice == twice.iloc[0]]]
        raise TableError(f"{path}: image_id {twice.iloc[0]} stands in rows {rows} with different contents")


def _check_values(table: pd.DataFrame, path: Path, split: str) -> None:
    def refuse(bad: pd.Series, name: str, expected: str) -> None:
        if bad.any():
            row = int(bad.idxmax())
            raise TableError(f"{path}: row {row + 2}: {name} is {table.loc[row, name]!r}, expected {expected}")

    refuse(~table["laterality"].isin(["L", "R"]), "laterality", "L or R")
    if split == "train":
        refuse(~table["cancer"].isin([0, 1]), "cancer", "0 or 1")
    else:
        refuse(table["prediction_id"].isna(), "prediction_id", "an id")


def _check_one_breast_an_id(table: pd.DataFrame, path: Path) -> None:
    breasts = table.groupby("prediction_id", sort=False)["breast_id"].nunique()
    if (breasts > 1).any():
        raise TableError(f"{path}: prediction_id {breasts.index[breasts > 1][0]} stands for more than one breast")


def fingerprint(table: pd.DataFrame) -> str:
    """A hash of which images with which labels a training table holds, whatever their order: tells data sets apart."""
    rows = sorted(
        f"{i},{b},{c}" for i, b, c in zip(table["image_id"], table["breast_id"], table["cancer"], strict=True)
    )
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]


def make_folds(table: pd.DataFrame, n_folds: int, seed: int) -> pd.Series:
    """A fold number for each row: whole patients, stratified by label and site.

    The patients are what is dealt out, each with its label (any cancer) and its site, so that the strata come out even;
    splitting rows with groups as a side condition can leave folds without positives.

    Args:
        table: as `load_table` gives it, with `cancer` and `site_id`.
        n_folds: 2 or more.
        seed: another one deals other folds.

    Returns:
        (N,) int64 Series on the table's index, values 0 to n_folds - 1.

    Raises:
        TableError: there are fewer patients than folds, or a fold has no positive; the message has a table of the folds.
    """
    patients = table.groupby("patient_id", sort=True).agg(cancer=("cancer", "max"), site=("site_id", "first"))
    if n_folds < 2 or len(patients) < n_folds:
        raise TableError(
            f"{n_folds} folds of {len(patients)} patients: at least 2 folds and a patient in each are needed"
        )
    strata = patients["cancer"].astype(str) + "/" + patients["site"].astype(str)
    sizes = strata.map(strata.value_counts())
    strata = strata.where(
        sizes >= n_folds, patients["cancer"].astype(str)
    )  # a site too small to be dealt out by itself
    if (patients["cancer"] == 1).sum() >= n_folds:
        splitter = StratifiedKFold(n_folds, shuffle=True, random_state=seed)
        for fold, (_, chosen) in enumerate(splitter.split(patients, strata)):
            patients.loc[patients.index[chosen], "fold"] = fold
    else:  # too few positives for all folds: dealt one by one, so that the table below is true
        order = patients.sample(frac=1, random_state=seed).sort_values("cancer", kind="stable", ascending=False).index
        patients.loc[order, "fold"] = np.arange(len(order)) % n_folds
    folds = table["patient_id"].map(patients["fold"]).astype(np.int64).rename("fold")
    counts = count_folds(table, folds)
    if (counts["positive breasts"] == 0).any():
        raise TableError(
            f"a fold without positives cannot be scored:\n{counts.to_string()}\n"
            f"Take fewer folds than {n_folds}: there are {int(patients['cancer'].sum())} patients with cancer."
        )
    return folds


def count_folds(table: pd.DataFrame, folds: pd.Series) -> pd.DataFrame:
    """Patients, breasts, positive breasts and images of each fold: the table to look at before training."""
    breasts = (
        table.assign(fold=folds)
        .groupby("breast_id")
        .agg(
            fold=("fold", "first"),
            patient_id=("patient_id", "first"),
            cancer=("cancer", "first"),
            images=("cancer", "size"),
        )
    )
    counts = breasts.groupby("fold").agg(
        patients=("patient_id", "nunique"),
        breasts=("cancer", "size"),
        positive=("cancer", "sum"),
        images=("images", "sum"),
    )
    return counts.rename(columns={"positive": "positive breasts"})


def check_folds(table: pd.DataFrame, folds: pd.Series) -> None:
    """Stops (TableError) where a patient stands in two folds: its images would be trained on and scored."""
    n = folds.groupby(table["patient_id"]).nunique()
    if (n > 1).any():
        patient = n.index[n > 1][0]
        where = sorted(folds[table["patient_id"] == patient].unique().tolist())
        raise TableError(
            f"patient {patient} is in folds {where}, and {(n > 1).sum()} patients in all are in more than one"
        )


def debug_subset(table: pd.DataFrame, n_patients: int = 24, n_positive: int = 8, seed: int = 0) -> pd.DataFrame:
    """A few patients of a training table, with positives among them, for a first try."""
    cancer = table.groupby("patient_id")["cancer"].max()
    rng = np.random.default_rng(seed)
    positive, negative = (np.sort(cancer.index[cancer == c].to_numpy(dtype=object)) for c in (1, 0))
    chosen = [
        *rng.permutation(positive)[:n_positive],
        *rng.permutation(negative)[: n_patients - min(n_positive, len(positive))],
    ]
    return table[table["patient_id"].isin(chosen)].reset_index(drop=True)
