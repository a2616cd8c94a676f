"""Tables of a competition: read and checked. Their folds are in folds.py."""

import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

LABELS = ("cancer", "biopsy", "invasive", "BIRADS", "density", "difficult_negative_case")  # in train.csv alone
REQUIRED = {
    "train": ("site_id", "patient_id", "image_id", "laterality", "view", "cancer"),
    "test": ("patient_id", "image_id", "laterality", "view", "prediction_id"),
}
DECIDING = (
    "patient_id",
    "breast_id",
    "image_id",
    "site_id",
    "machine_id",
    "view",
    *LABELS,
)  # what a training depends on
IDS = ("patient_id", "image_id")


class TableError(ValueError):
    """A table of a competition that is not as it should be; the message names file, row and value."""


def load_table(root: Path | str, split: str) -> pd.DataFrame:
    """Reads `train.csv` or `test.csv` of a competition and checks it.

    Ids are strings and stay as they are written. Rows that repeat another one wholly are dropped with a warning. Row numbers
    in messages are those of the file's lines, the header being line 1.

    Args:
        root: the competition's folder.
        split: `train` or `test`.

    Returns:
        The table in the file's order with a fresh index, `cancer` as int64, and two columns more: `path`, the image's DICOM
        file (whether it is there is not asked), and `breast_id`, patient and laterality.

    Raises:
        FileNotFoundError: no such csv.
        TableError: not a csv, a column missing, no rows, an empty or repeated id, `7` beside `007` or `7.0`, an id that
            would leave the folder, a laterality or label out of range, a label or prediction_id that differs within a breast.
    """
    path = Path(root) / f"{split}.csv"
    if not path.exists():
        raise FileNotFoundError(f"{path}: not found; a competition's folder holds train.csv, test.csv and *_images/")
    try:
        # index_col=False: a comma too many at the end of each line would else make the first column the index.
        strings = {name: str for name in (*IDS, "prediction_id")}
        table = pd.read_csv(path, dtype=strings, index_col=False, skipinitialspace=True)
    except ValueError as error:  # pandas' own kinds of it: nothing in the file, lines of several lengths, not text
        raise TableError(f"{path}: cannot be read as csv: {error}") from error
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
    table = table.assign(
        path=_paths(table, Path(root) / f"{split}_images"),
        breast_id=table["patient_id"] + "_" + table["laterality"],
    )
    if split == "train":
        table["cancer"] = pd.to_numeric(table["cancer"]).astype(np.int64)
        _check_one_value(table, path, "breast_id", "cancer")
    else:
        _check_one_value(table, path, "breast_id", "prediction_id")
        _check_one_value(table, path, "prediction_id", "breast_id")
    return table.reset_index(drop=True)


def _paths(table: pd.DataFrame, folder: Path) -> list[Path]:
    """The images' DICOM files. Ids that went through floats, such as 1519946254.0, lead to the files of the whole numbers."""
    patients, images = table["patient_id"], table["image_id"]
    if not (folder / patients.iloc[0]).exists():
        patients = _whole_numbers(patients)
    if not (folder / patients.iloc[0] / f"{images.iloc[0]}.dcm").exists():
        images = _whole_numbers(images)
    return [folder / patient / f"{image}.dcm" for patient, image in zip(patients, images, strict=True)]


def _whole_numbers(ids: pd.Series) -> pd.Series:
    """Ids without a fraction of zeros, where all have one; else as they are."""
    return ids.str.replace(r"\.0+$", "", regex=True) if ids.str.fullmatch(r"\d+\.0+").all() else ids


def with_png(table: pd.DataFrame, folder: Path | str) -> pd.DataFrame:
    """A table whose `path` leads to PNG files, in place of the DICOM files that `load_table` names.

    They are looked for as `{patient_id}/{image_id}.png` and `{patient_id}_{image_id}.png`, in `folder` and in its
    `train_images` or `test_images`. Folders are listed: asking for each file by its name takes minutes on a network disk.

    Args:
        table: as `load_table` gives it, or some of its rows.
        folder: of the PNG files; may be the competition's.

    Returns:
        The table with other paths. An image that isn't there keeps its row, with the path that it was expected at, where
        it fails by name when it is read; a warning counts these.

    Raises:
        TableError: no such folder, none of the images is in it, or a file's name fits two images.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise TableError(f"{folder}: no such folder; png_dir names the one that holds the PNG files")
    ids = list(zip(table["patient_id"], table["image_id"], strict=True))
    splits = sorted({Path(path).parents[1].name for path in table["path"]})
    found: dict[tuple[str, str], Path] = {}
    for root in (folder, *(folder / split for split in splits)):
        if root.is_dir() and len(found) < len(ids):
            found = max(found, _png_files(ids, root), key=len)
    missing = [pair for pair in ids if pair not in found]
    if missing and not found:
        (patient, image), inside = ids[0], sorted(os.listdir(folder))
        raise TableError(
            f"{folder}: none of {len(ids):,} images is there. Expected are {patient}/{image}.png or {patient}_{image}.png "
            f"and so on, in it or in its {' or '.join(splits)}; png_dir names another folder. "
            f"Found {len(inside):,} other names: {', '.join(inside[:3])}"
        )
    if len(set(found.values())) < len(found):
        paths = pd.Series(found)
        raise TableError(
            f"{paths[paths.duplicated()].iloc[0]}: its name fits two images; use a folder for each patient"
        )
    if missing:
        (_, image), path = next(iter(found.items()))
        root, mark = (path.parents[1], "/") if path.stem == image else (path.parent, "_")
        expected = {(patient, image): root / f"{patient}{mark}{image}.png" for patient, image in missing}
        message = "%s: %d of %d images are not there, such as %s; they will count as failed"
        logging.getLogger(__name__).warning(
            message, root, len(missing), len(ids), expected[missing[0]].relative_to(root)
        )
        found |= expected
    return table.assign(path=[found[pair] for pair in ids])


def _png_files(ids: list[tuple[str, str]], root: Path) -> dict[tuple[str, str], Path]:
    """The files of those images, (patient_id, image_id), that are in a folder."""
    flat, in_folders, patients = dict(_list_png(root)), {}, {patient for patient, _ in ids}
    with os.scandir(root) as entries:
        for entry in entries:
            if entry.name in patients and entry.is_dir():
                in_folders |= {(entry.name, stem): path for stem, path in _list_png(entry.path)}
    either = {pair: in_folders.get(pair) or flat.get("_".join(pair)) for pair in ids}
    return {pair: Path(path) for pair, path in either.items() if path}


def _list_png(folder: Path | str) -> Iterator[tuple[str, str]]:
    """Name without its ending, and path, of each PNG file in a folder."""
    for name in os.listdir(folder):
        stem, ending = os.path.splitext(name)
        if ending.lower() == ".png":
            yield stem, os.path.join(folder, name)


def _check_ids(table: pd.DataFrame, path: Path) -> None:
    for name in IDS:
        for row, value in zip(table.index, table[name], strict=True):
            if not isinstance(value, str) or not value.strip():
                raise TableError(f"{path}: row {row + 2}: {name} is empty")
            if value in (".", "..") or "/" in value or "\\" in value or "\0" in value:
                raise TableError(f"{path}: row {row + 2}: {name} {value!r} would lead out of the image folder")
        _check_spellings(pd.Series(table[name].unique(), dtype=object), name, path)
    images = table["image_id"]
    if images.duplicated().any():
        twice = table[images == images[images.duplicated()].iloc[0]]
        differing = [column for column in table.columns if twice[column].nunique(dropna=False) > 1]
        raise TableError(
            f"{path}: image_id {twice['image_id'].iloc[0]} stands in rows {_lines(twice)}, which differ in "
            f"{', '.join(differing)}; an image has one row"
        )


def _check_spellings(ids: pd.Series, name: str, path: Path) -> None:
    """Refuses one number in several spellings, and numbers of which some were written as floats and some not."""
    parts = ids.str.extract(r"^\s*0*(?P<number>\d+)(?P<fraction>\.0*)?\s*$")  # ids that are no numbers: NaN
    number, is_float = parts["number"], parts["fraction"].notna()
    same = number.notna() & number.duplicated(keep=False)
    if same.any():
        shown = ids[number == number[same].iloc[0]].tolist()
        raise TableError(
            f"{path}: {name} has the same number in several spellings, {shown}; write ids alike, or images and labels "
            "will be mixed up"
        )
    if is_float.any() and (number.notna() & ~is_float).any():
        raise TableError(
            f"{path}: {name} is written as a float in some rows ({ids[is_float].iloc[0]!r}) and as an integer in others "
            f"({ids[number.notna() & ~is_float].iloc[0]!r}); write ids as the image folders are named"
        )


def _check_values(table: pd.DataFrame, path: Path, split: str) -> None:
    def refuse(bad: pd.Series, name: str, expected: str) -> None:
        if bad.any():
            row = int(bad.idxmax())
            value = table.loc[row, name]
            shown = repr(value) if isinstance(value, str) else str(value)  # not np.int64(2)
            raise TableError(f"{path}: row {row + 2}: {name} is {shown}, expected {expected}")

    refuse(~table["laterality"].isin(["L", "R"]), "laterality", "L or R")
    if split == "train":
        refuse(~pd.to_numeric(table["cancer"], errors="coerce").isin([0, 1]), "cancer", "0 or 1")
    else:
        refuse(table["prediction_id"].isna(), "prediction_id", "an id")


def _check_one_value(table: pd.DataFrame, path: Path, key: str, column: str) -> None:
    """Refuses rows that share a key, such as the breast, and differ in a column."""
    values = table.groupby(key, sort=False)[column].nunique()
    if (values > 1).any():
        rows = table[table[key] == values.index[values > 1][0]]
        raise TableError(
            f"{path}: {key} {rows[key].iloc[0]} has more than one {column}: {rows[column].unique().tolist()} in rows "
            f"{_lines(rows)}; it must be the same in all of them"
        )


def _lines(rows: pd.DataFrame) -> list[int]:
    return [int(i) + 2 for i in rows.index[:8]]


def fingerprint(table: pd.DataFrame) -> str:
    """A hash of all in a training table that training depends on, whatever the order of its rows: images, breasts and labels,
    what folds are made by, and what is learnt beside cancer. Tells data sets apart."""
    columns = [name for name in DECIDING if name in table]
    rows = sorted(",".join(map(str, row)) for row in zip(*(table[name].tolist() for name in columns), strict=True))
    return hashlib.sha256("\n".join([",".join(columns), *rows]).encode()).hexdigest()[:16]
