"""What gives the label away, or stands on both sides of a split: looked for before training and evaluation.

A leak is whatever tells of cancer in training and will not be there, or not be the same, in the competition: a column that
test.csv lacks, a patient or an image on both sides, a site whose rate of cancer stands in for a finding.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from rsnakit import metrics
from rsnakit.folds import check_folds
from rsnakit.tables import TableError

# What the competition's test.csv has.
TEST_COLUMNS = (
    "site_id", "patient_id", "image_id", "laterality", "view", "age", "implant", "machine_id", "prediction_id",
)  # fmt: skip
NOT_METADATA = ("cancer", "path", "breast_id", "fold", "score")  # the label, and what the kit adds
SUSPICIOUS = 0.8  # AUC above which a column alone tells too much of cancer
BINS = 20  # that a column with more values is cut into
PARTS = 5  # of the patients, where folds do not serve


def check(
    table: pd.DataFrame,
    folds: pd.Series,
    content: pd.Series,
    test_columns: Sequence[str],
    inputs: Sequence[str] = (),
) -> None:
    """Looks for leaks, says in a few lines what was found, and stops where training or scores would be worth nothing.

    Args:
        table: a row an image, as `load_table` gives it.
        folds: fold numbers on the table's index.
        content: hash of each image's pixels, as `content_of` gives it.
        test_columns: columns of test.csv (see `test_columns`).
        inputs: columns of the table that the model is fed with (see `models.inputs_of`).

    Raises:
        rsnakit.tables.TableError: a patient is in two folds, or one of `inputs` is a column that test.csv lacks.
    """
    check_folds(table, folds)
    n = table["patient_id"].nunique()
    print(
        f"leak checks: {n:,} patients, none on two sides; {_say_duplicates(duplicates(table, content, folds), content)}"
    )
    columns = column_aucs(table, test_columns, folds)
    leaks = columns.index[columns["verdict"] == "leak"]
    if len(leaks):
        print(f"leak checks: test.csv lacks {', '.join(leaks)}: never to be an input")
    aucs = columns.filter(like="auc").max(axis=1)[columns["verdict"] == "suspicious"]
    if len(aucs):
        named = ", ".join(f"{name} ({auc:.2f})" for name, auc in aucs.items())
        sick = table.loc[table["cancer"] == 1, "patient_id"].nunique()
        print(
            f"NOTE: leak checks: AUC above {SUSPICIOUS} by one column alone, pooled or at a site: {named}; look into why. "
            f"{sick:,} patients have cancer: of few, it may be chance"
        )
    fed = sorted(set(inputs) - set(test_columns))
    if fed:
        raise TableError(
            f"{', '.join(fed)}: the model is fed with this, and test.csv lacks it. Scores in training would be worth nothing; "
            "take a model without it."
        )


def column_aucs(table: pd.DataFrame, test_columns: Sequence[str], folds: pd.Series) -> pd.DataFrame:
    """How well each column of the table alone tells images with cancer from those without, ids too.

    An image's score is the rate of cancer that its value has in the other folds; a missing value is a value too, and one that
    the other folds lack has their rate of all (the same is added to each value once, so that rare ones are not overdone).
    Numbers and texts with more than `BINS` values are cut, in their order, into so many of equal size. The AUC is over pairs
    of images of one fold, as rates are not comparable between folds: where these differ in how much cancer they have, the
    others' rate is low just where the own is high. Within a site, rates are of this site.

    Args:
        table: a row an image, with cancer and patient_id; site_id where known.
        test_columns: columns of test.csv.
        folds: fold numbers on the table's index. Where a site has all its cancers in one of them, as with a single fold or with
            machines held out, nothing could be learnt from the others: patients are dealt out to `PARTS` parts instead.

    Returns:
        Indexed by `column`, the highest AUC first: `auc`, `auc site S` for each site where there are several, `in test`, and
        `verdict`: "leak" where test.csv lacks the column, whatever its AUC; "suspicious" where an AUC is above `SUSPICIOUS`;
        else "". AUCs are NaN where no fold has both classes.
    """
    labels, parts = table["cancer"].to_numpy(bool), _parts(table, folds)
    sites = table["site_id"].astype(str).to_numpy() if "site_id" in table else np.full(len(table), "")
    names = sorted(set(sites)) if len(set(sites)) > 1 else []
    rows = {}
    for column in [name for name in table.columns if name not in NOT_METADATA]:
        codes = _codes(table[column])
        row = {"auc": _cross_fitted(codes, labels, parts)}
        for site in names:
            here = sites == site
            row[f"auc site {site}"] = _cross_fitted(codes[here], labels[here], parts[here])
        too_good = any(auc > SUSPICIOUS for auc in row.values())
        there = column in test_columns
        rows[column] = {**row, "in test": there, "verdict": ("suspicious" if too_good else "") if there else "leak"}
    columns = ["auc", *(f"auc site {site}" for site in names), "in test", "verdict"]
    found = pd.DataFrame.from_dict(rows, "index", columns=columns).rename_axis("column")
    return found.sort_values("auc", ascending=False, kind="stable")


def duplicates(table: pd.DataFrame, content: pd.Series, folds: pd.Series) -> pd.DataFrame:
    """Images that another image equals in every pixel, as the store holds them.

    Args:
        table: a row an image.
        content: hash of each image's pixels on the table's index; "" where it is not known.
        folds: fold numbers on the table's index.

    Returns:
        A row such an image, equal ones together: content, patient_id, image_id, laterality, view, cancer and fold, and, of all
        that share the content, `same patient`, `same fold` and `same label`. Of one patient they do no harm; of several in
        different folds an image is trained on and scored; with different labels one of these is wrong.
    """
    names = [name for name in ("patient_id", "image_id", "laterality", "view", "cancer") if name in table]
    found = table[names].assign(fold=folds)
    found.insert(0, "content", content.fillna("").astype(str))
    alike = (found["content"] != "") & found["content"].duplicated(keep=False)
    found = found[alike].sort_values("content", kind="stable")
    for name, column in {"same patient": "patient_id", "same fold": "fold", "same label": "cancer"}.items():
        found[name] = (found.groupby("content")[column].transform("nunique") == 1).astype(bool)
    return found


def within_sites(breasts: pd.DataFrame, n: int = 1000, seed: int = 0) -> pd.DataFrame:
    """Whether a model's AUC is owed to telling sites apart: within each site that is no help.

    Args:
        breasts: a row a breast: patient_id, cancer, score and site_id.
        n, seed: resamples of patients, and seed of the draws.

    Returns:
        A row for `all sites`, each site, and `site alone`, whose score is the rate of cancer at the breast's site (on these
        very breasts): `breasts`, `with cancer`, `AUC` and its 95 % interval, `95 % from` and `to`. A pooled AUC above that of
        every site, by about what the site alone has above 0.5, is a shortcut.

    Raises:
        ValueError: a column is missing.
    """
    missing = [name for name in ("patient_id", "cancer", "score", "site_id") if name not in breasts]
    if missing:
        raise ValueError(f"column {', '.join(missing)} missing; merge it from the table by the breast")
    sites = breasts["site_id"].astype(str)
    parts = {"all sites": breasts, **{f"site {site}": rows for site, rows in breasts.groupby(sites)}}
    parts["site alone"] = breasts.assign(score=breasts.groupby(sites)["cancer"].transform("mean"))
    rows = {}
    for name, part in parts.items():
        columns = part["cancer"], part["score"], part["patient_id"]
        auc, low, high = metrics.bootstrap(*columns, metrics.auc, n=n, seed=seed)
        rows[name] = [len(part), int(part["cancer"].sum()), auc, low, high]
    columns = ["breasts", "with cancer", "AUC", "95 % from", "to"]
    return pd.DataFrame.from_dict(rows, "index", columns=columns)


def test_columns(competition: Path | None) -> tuple[str, ...]:
    """Columns of a competition's test.csv; those that the original has where there is no such file, or it cannot be read."""
    try:
        return tuple(pd.read_csv(Path(competition, "test.csv"), nrows=0, skipinitialspace=True).columns)
    except (OSError, TypeError, ValueError):  # no competition is a TypeError, no header a ValueError
        return TEST_COLUMNS


def content_of(table: pd.DataFrame, store: object | None) -> pd.Series:
    """The hash of each image's pixels, on the table's index; "" where the store does not have it, or there is none.

    Args:
        table: a row an image.
        store: a `Store`, or None.
    """
    known = {} if store is None else dict(zip(store.index["image_id"], store.index["content"], strict=True))
    return pd.Series([known.get(image_id, "") for image_id in table["image_id"]], index=table.index, name="content")


def _say_duplicates(found: pd.DataFrame, content: pd.Series) -> str:
    """What `duplicates` found, as the end of a line, with notes on lines of their own."""
    unknown = int((content.fillna("") == "").sum())
    some = f" (of {unknown:,} of {len(content):,} images the pixels are not known)" if unknown else ""
    if unknown == len(content):
        return "equal images not looked for, as no store knows their pixels"
    if found.empty:
        return f"no two images are equal{some}"
    lines = [f"{len(found):,} images equal another one in every pixel{some}"]
    apart = found[~found["same patient"] & ~found["same fold"]]
    if len(apart):
        lines.append(_note(apart, "equal images of different patients in different folds, trained on and scored"))
    wrong = found[~found["same label"]]
    if len(wrong):
        lines.append(_note(wrong, "equal images with different labels, of which one is wrong"))
    return "\n".join(lines)


def _note(found: pd.DataFrame, what: str) -> str:
    first = found[found["content"] == found["content"].iloc[0]]
    named = " and ".join(f"{row.image_id} of patient {row.patient_id}" for row in first.head(3).itertuples())
    return f"NOTE: leak checks: {len(found):,} {what}, such as {named}"


def _parts(table: pd.DataFrame, folds: pd.Series) -> np.ndarray:
    """Fold of each row as 0, 1, ..., if each site with cancer has it in several; else patients dealt out by label and site."""
    site = table["site_id"].astype(str) if "site_id" in table else pd.Series("", index=table.index)
    sick = table["cancer"] == 1
    if (folds[sick].groupby(site[sick]).nunique() > 1).all():
        return pd.factorize(folds)[0]
    rows = pd.DataFrame({"patient_id": table["patient_id"], "cancer": table["cancer"], "site": site})
    patients = rows.groupby("patient_id", sort=True).agg(cancer=("cancer", "max"), site=("site", "min"))
    patients = patients.sort_values(["cancer", "site"], kind="stable")
    return table["patient_id"].map(pd.Series(np.arange(len(patients)) % PARTS, index=patients.index)).to_numpy()


def _codes(column: pd.Series) -> np.ndarray:
    """Category of each value, (N,) int64: itself, or the bin it is in where there are many; 0 where it is missing."""
    codes, values = pd.factorize(column)  # -1 where missing
    if len(values) > BINS:
        numbers = pd.to_numeric(pd.Series(values), errors="coerce")
        order = np.argsort(numbers if numbers.notna().all() else np.asarray(values, dtype=str), kind="stable")
        sizes = np.bincount(codes[codes >= 0], minlength=len(values))[order]
        bins = np.empty(len(values), np.int64)
        bins[order] = (np.cumsum(sizes) - sizes / 2) / sizes.sum() * BINS  # where the middle of a value's rows lies
        codes = np.where(codes < 0, -1, bins[codes])
    return codes + 1


def _cross_fitted(codes: np.ndarray, labels: np.ndarray, folds: np.ndarray) -> float:
    """AUC over the pairs within each fold, of the rates that the other folds have by category."""
    shape = (int(folds.max(initial=0)) + 1, int(codes.max(initial=0)) + 1)
    cells = folds * shape[1] + codes
    n, positive = (np.bincount(cells, weights, shape[0] * shape[1]).reshape(shape) for weights in (None, labels))
    n, positive = n.sum(0) - n, positive.sum(0) - positive  # of the other folds
    overall = positive.sum(1, keepdims=True) / np.maximum(n.sum(1, keepdims=True), 1)
    scores = ((positive + overall) / (n + 1))[folds, codes]
    total = pairs = 0.0
    for fold in np.unique(folds):
        here = folds == fold
        weight = float(labels[here].sum()) * float((~labels[here]).sum())
        if weight:
            total += weight * metrics.auc(labels[here], scores[here])
            pairs += weight
    return total / pairs if pairs else np.nan
