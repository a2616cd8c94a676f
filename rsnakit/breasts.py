"""From images to breasts, and from several tables of the same breasts to one.

Models score images, and the competition scores breasts: `to_breast` goes from the ones to the others, and `combine` brings
what several folds or runs say of the same breasts together.
"""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

BREAST = ["patient_id", "laterality"]
HOWS = ("mean", "max", "noisy_or", "top2", "top3")  # of a breast's images
COMBINATIONS = ("mean", "logits", "ranks")  # of several tables
CONSTANT = ("cancer", "fold", "prediction_id")  # columns with one value a breast


def to_breast(frame: pd.DataFrame, how: str = "mean") -> pd.DataFrame:
    """A table with a row an image to one with a row a breast, in first-seen order.

    Args:
        frame: columns patient_id, laterality, score; image_id, cancer, fold and prediction_id where known.
        how: "mean" or "max" of a breast's scores; "top2", "top3": mean of the two or three highest, of all where there
            are fewer; "noisy_or": 1 - product of (1 - score), the probability that at least one image shows a cancer if
            each were a witness of its own (Pearl, Probabilistic Reasoning in Intelligent Systems, 1988, section 4.3). A
            breast's images are no such witnesses, so that noisy-or grows with their number.

    Returns:
        patient_id, laterality, score and, where given, cancer, fold and prediction_id, in the order they came, then
        n_images; other columns are dropped. A table that has a row a breast keeps its values, n_images among them.

    Raises:
        ValueError: a needed column or an id is missing, a score is NaN or infinite, or for noisy_or outside [0, 1], an
            image stands there twice, or cancer, fold or prediction_id differ within a breast.
    """
    if how not in HOWS:
        raise ValueError(f"how is {how!r}; expected one of {', '.join(HOWS)}")
    check_columns(frame, [*BREAST, "score"])
    if frame[BREAST].isna().any(axis=None):
        raise ValueError(f"{int(frame[BREAST].isna().any(axis=1).sum())} rows have no patient_id or no laterality")
    scores = frame["score"].to_numpy(dtype=float, na_value=math.nan)
    _check_scores(frame, scores, np.isfinite(scores), "a finite number")
    if how == "noisy_or":
        _check_scores(frame, scores, (scores >= 0) & (scores <= 1), "a probability in [0, 1] for noisy_or")
    if "image_id" in frame:
        twice = (frame.duplicated([*BREAST, "image_id"]) & frame["image_id"].notna()).to_numpy()
        if twice.any():
            raise ValueError(f"{name_of(frame, int(np.argmax(twice)))} is there twice; expected a row an image")

    breast = frame.groupby(BREAST, sort=False, observed=True).ngroup().to_numpy()  # (N,) numbers in first-seen order
    constant = [name for name in CONSTANT if name in frame]
    for name in constant:
        differs = frame[name].groupby(breast).nunique(dropna=False).to_numpy() > 1
        if differs.any():
            rows = breast == np.argmax(differs)
            found = ", ".join(map(str, frame.loc[rows, name].unique()))
            breast_name = name_of(frame.drop(columns="image_id", errors="ignore"), int(np.argmax(rows)))
            raise ValueError(f"{name} of {breast_name} is {found}; expected one value a breast")

    breasts = frame.loc[~frame.duplicated(BREAST).to_numpy()].reset_index(drop=True)
    if not ("n_images" in frame and len(breasts) == len(frame)):
        breasts["n_images"] = np.bincount(breast, minlength=len(breasts)).astype(np.int64)
    breasts["score"] = _aggregate(scores, breast, how)
    kept = [name for name in breasts.columns if name in (*BREAST, "score", *constant)]
    return breasts[[*kept, "n_images"]]


def combine(frames: Sequence[pd.DataFrame], how: str = "mean") -> pd.DataFrame:
    """What several folds or runs say of the same breasts, brought to one score a breast.

    Args:
        frames: tables with a row a breast (see `to_breast`), of the same breasts in any order.
        how: "mean" of the scores; "logits": mean of log(p / (1 - p)), brought back to a probability, where a score of
            exactly 0 or 1 counts as float32's next number inside, so that it outweighs others without silencing them;
            "ranks": mean of each table's average ranks over N, in (0, 1], which compares tables of different scales
            but knows no probabilities.

    Returns:
        The breasts in the first table's order with its columns. `fold` and `n_images` are left out where the tables do not
        agree on them: runs may have other folds.

    Raises:
        ValueError: no table, a breast that has several rows or is not in all tables, a label or prediction_id that differs,
            a score that is missing or, for logits, outside [0, 1].
    """
    if how not in COMBINATIONS:
        raise ValueError(f"how is {how!r}; expected one of {', '.join(COMBINATIONS)}")
    if not frames:
        raise ValueError("there are no tables to combine")
    first = frames[0]
    for frame in frames:
        check_columns(frame, [*BREAST, "score"])
        check_breasts(frame)
    keys = pd.MultiIndex.from_frame(first[BREAST])
    ordered = [first, *(_in_order(frame, keys, number) for number, frame in enumerate(frames[1:], start=2))]
    kept = []
    for name in first.columns:
        same = all(name in frame and _equal(frame[name], first[name]).all() for frame in ordered)
        if name in ("cancer", "prediction_id"):
            _check_same(ordered, keys, name)
        if same or name in ("score", "cancer", "prediction_id"):
            kept.append(name)
    scores = np.stack([frame["score"].to_numpy(dtype=float, na_value=math.nan) for frame in ordered])  # (tables, N)
    for frame, found in zip(ordered, scores, strict=True):
        _check_scores(frame, found, np.isfinite(found), "a finite number")
        if how == "logits":
            _check_scores(frame, found, (found >= 0) & (found <= 1), "a probability in [0, 1] for logits")
    return first[kept].reset_index(drop=True).assign(score=_combined(scores, how))


def check_columns(frame: pd.DataFrame, needed: Sequence[str]) -> None:
    """Stops (ValueError) where a table lacks columns."""
    missing = [name for name in needed if name not in frame]
    if missing:
        raise ValueError(f"columns {missing} are missing; the table has {list(frame.columns)}")


def check_breasts(frame: pd.DataFrame) -> None:
    """Stops (ValueError) where a breast has several rows."""
    repeated = frame.duplicated(BREAST).to_numpy()
    if repeated.any():
        raise ValueError(
            f"{name_of(frame, int(np.argmax(repeated)))} is not its breast's only row; call to_breast first"
        )


def folds_of(frame: pd.DataFrame) -> np.ndarray:
    """The column `fold` of a table as whole numbers, (N,) int.

    Raises:
        ValueError: there is no such column, or a value is missing, text that is no number, or between two numbers.
    """
    check_columns(frame, ["fold"])
    folds = pd.to_numeric(frame["fold"], errors="coerce").to_numpy(dtype=float, na_value=math.nan)
    whole = np.isfinite(folds) & (folds == np.floor(folds))
    if not whole.all():
        row = int(np.argmin(whole))
        raise ValueError(
            f"{int((~whole).sum())} of {len(frame)} rows have no whole number as fold: that of {name_of(frame, row)} is "
            f"{frame['fold'].iloc[row]!r}; expected 0, 1, 2 and so on"
        )
    return folds.astype(int)


def name_of(frame: pd.DataFrame, row: int) -> str:
    """How a message calls a row, counted from 0: `image 4 of breast 12_L`, or `breast 12_L (row 3)` without images."""
    record = frame.iloc[row]
    breast = f"breast {record['patient_id']}_{record['laterality']}"
    return f"image {record['image_id']} of {breast}" if "image_id" in frame else f"{breast} (row {row})"


def _aggregate(scores: np.ndarray, breast: np.ndarray, how: str) -> np.ndarray:
    """Scores (N,) of images to one for each of the breasts that `breast` (N,) numbers."""
    images = pd.Series(scores, dtype=float)
    if how in ("mean", "max"):
        return images.groupby(breast).agg(how).to_numpy()
    if how == "noisy_or":
        with np.errstate(divide="ignore"):  # of a sure image: -inf, and the breast is sure
            none_shows = pd.Series(np.log1p(-scores), dtype=float).groupby(breast).sum().to_numpy()
        single = images.groupby(breast).size().to_numpy() == 1  # exactly as it is: logs and back would round it
        return np.where(single, images.groupby(breast).max().to_numpy(), -np.expm1(none_shows))
    falling = np.lexsort((-scores, breast))
    highest = falling[images.groupby(breast[falling]).cumcount().to_numpy() < int(how.removeprefix("top"))]
    return images.iloc[highest].groupby(breast[highest]).mean().to_numpy()


def _combined(scores: np.ndarray, how: str) -> np.ndarray:
    """Scores (tables, N) to (N,)."""
    if how == "mean":
        return scores.mean(0)
    if how == "ranks":
        ranks = sum(pd.Series(found).rank().to_numpy() for found in scores)  # exact, so that ties stay ties
        return ranks / max(1, scores.size)
    lowest, highest = np.nextafter(np.float32([0, 1]), np.float32(0.5)).astype(float)
    inside = scores.clip(lowest, highest)
    return 1 / (1 + np.exp(-(np.log(inside) - np.log1p(-inside)).mean(0)))


def _in_order(frame: pd.DataFrame, keys: pd.MultiIndex, number: int) -> pd.DataFrame:
    """A table's rows in the order of the first table's breasts; `number`: of the table, counted from 1."""
    found = pd.MultiIndex.from_frame(frame[BREAST])
    for missing, where in ((keys[~keys.isin(found)], f"table {number}"), (found[~found.isin(keys)], "table 1")):
        if len(missing):
            named = ", ".join(f"{patient}_{side}" for patient, side in missing[:3])
            raise ValueError(
                f"{len(missing)} breasts are not in {where}, {named} among them; expected the same breasts"
            )
    return frame.iloc[found.get_indexer(keys)].reset_index(drop=True)


def _check_same(frames: Sequence[pd.DataFrame], keys: pd.MultiIndex, name: str) -> None:
    """Stops where tables in the same order that have a column do not agree on it."""
    first = frames[0][name]
    for number, frame in enumerate(frames[1:], start=2):
        if name in frame and not (same := _equal(frame[name], first)).all():
            row = int(np.argmin(same))
            raise ValueError(
                f"{name} of breast {'_'.join(map(str, keys[row]))} is {first.iloc[row]} in table 1 and "
                f"{frame[name].iloc[row]} in table {number}; expected one value a breast"
            )


def _equal(one: pd.Series, other: pd.Series) -> np.ndarray:
    """Where two columns in the same order agree, (N,) bool; two missing values do."""
    one, other = one.reset_index(drop=True), other.reset_index(drop=True)
    return ((one == other) | (one.isna() & other.isna())).to_numpy(dtype=bool)


def _check_scores(frame: pd.DataFrame, scores: np.ndarray, right: np.ndarray, expected: str) -> None:
    if not right.all():
        row = int(np.argmin(right))
        raise ValueError(f"the score of {name_of(frame, row)} is {scores[row]}; expected {expected}")
