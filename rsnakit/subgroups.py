"""Scores within sites, machines, views, ages and the like, and within folds: where a model fails, seen beside the noise."""

import math
from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd

from rsnakit import metrics
from rsnakit.metrics import BREAST

AGES = {"<40": 40, "40-49": 50, "50-59": 60, "60-69": 70, "70-79": 80, "80+": math.inf}  # their upper ends
BY = ("site_id", "machine_id", "view", "age", "density", "implant")
FIXED_ORDER = ("site_id", "density", "BIRADS", "implant")  # the others come by size
MISSING = "missing"
COUNTED = ["breasts", "positive", "value", "low", "high", "note"]

Statistic = Callable[[np.ndarray, np.ndarray], float]  # labels (N,) and scores (N,) to a number


def group_table(
    breasts: pd.DataFrame,
    images: pd.DataFrame,
    statistic: Statistic = metrics.auc,
    by: tuple[str, ...] = BY,
    n: int = 1000,
    seed: int = 0,
    minimum: int = 10,
    how: str = "mean",
) -> pd.DataFrame:
    """A statistic with its 95 % interval within each group of breasts, beside how many breasts that is.

    The AUC is the default since, unlike average precision and F1, it does not rise with the share of cancers, which differs
    between groups. A breast is in each group that an image of it is in; for `view` it has the score of the images of that view
    alone. Missing values are a group of their own.

    Args:
        breasts: a row a breast: patient_id, laterality, cancer, score.
        images: a row an image: patient_id, laterality, the columns of `by` (those that it lacks are left out), and for `view`
            image_id and score.
        statistic: of `metrics`, or any callable of labels and scores.
        by: columns to group by; age in bands of ten years.
        n, seed: resamples of patients for the intervals, and seed of the draws.
        minimum: breasts with cancer, and without, that a group needs to be scored.
        how: a breast's images of one view to a score (see `metrics.to_breast`).

    Returns:
        A row a group: column, group (as text), breasts, positive, value, low, high and note, which is empty, or says what there
        are too few of where value, low and high are NaN.
    """
    rows = []
    for name in by:
        if name not in images or (name == "view" and "score" not in images):
            continue
        values, order = categories(images, name)
        for group in order:
            members = images[(values == group).to_numpy()]
            if name == "view":
                scored = metrics.to_breast(members[[*BREAST, "image_id", "score"]], how)
                found = breasts.drop(columns="score").merge(scored[[*BREAST, "score"]], on=BREAST)
            else:
                found = breasts.merge(members[BREAST].drop_duplicates(), on=BREAST)
            if len(found):
                rows.append({"column": name, "group": group, **_scored(found, statistic, n, seed, minimum)})
    return pd.DataFrame(rows, columns=["column", "group", *COUNTED])


def fold_table(
    breasts: pd.DataFrame, statistics: Mapping[str, Statistic], n: int = 1000, seed: int = 0, minimum: int = 1
) -> pd.DataFrame:
    """Statistics with their 95 % intervals within each fold, and over all of them.

    Args:
        breasts: a row a breast: patient_id, cancer, score, fold.
        statistics: by the name that a figure gives them, such as {"AUC": metrics.auc}.
        n, seed, minimum: as in `group_table`.

    Returns:
        A row a statistic and fold, folds in order and last "all" (where there are several): score (the statistic's name), fold
        (as text), breasts, positive, value, low, high, note.
    """
    parts = {str(fold): part for fold, part in breasts.groupby("fold")}
    parts |= {"all": breasts} if len(parts) > 1 else {}
    rows = [
        {"score": name, "fold": fold, **_scored(part, statistic, n, seed, minimum)}
        for name, statistic in statistics.items()
        for fold, part in parts.items()
    ]
    return pd.DataFrame(rows, columns=["score", "fold", *COUNTED])


def categories(table: pd.DataFrame, name: str) -> tuple[pd.Series, list[str]]:
    """A column's values as text, ages in bands, and the order in which to show those there are; "missing" comes last."""
    column = table[name]
    if name == "age":
        ages = pd.to_numeric(column, errors="coerce")
        column = pd.cut(ages, [-math.inf, *AGES.values()], right=False, labels=list(AGES))
    column = column.astype(object)
    text = column.map(lambda value: f"{value:g}" if isinstance(value, float) else str(value))
    text = text.where(column.notna(), MISSING)
    order = list(text.value_counts().index)
    if name in FIXED_ORDER:
        order.sort()
    elif name == "age":
        order.sort(key=[*AGES, MISSING].index)
    return text, sorted(order, key=lambda value: value == MISSING)


def _scored(breasts: pd.DataFrame, statistic: Statistic, n: int, seed: int, minimum: int) -> dict:
    """The columns COUNTED of one group."""
    labels = breasts["cancer"].to_numpy() == 1
    counts = {"breasts": len(breasts), "positive": int(labels.sum())}
    for found, kind in ((labels.sum(), "with cancer"), ((~labels).sum(), "without cancer")):
        if found < minimum:
            return counts | dict.fromkeys(("value", "low", "high"), math.nan) | {"note": f"too few: {found} {kind}"}
    value, low, high = metrics.bootstrap(labels, breasts["score"], breasts["patient_id"], statistic, n=n, seed=seed)
    return counts | {"value": value, "low": low, "high": high, "note": ""}
