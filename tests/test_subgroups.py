"""Scores within groups of breasts, and within folds."""

import math

import numpy as np
import pandas as pd
import pytest
from figures import make_table
from sklearn.metrics import average_precision_score, roc_auc_score

from rsnakit import metrics, subgroups
from rsnakit.metrics import BREAST

N = 40  # resamples: intervals are those of `metrics.bootstrap`, which has tests of its own


def scored_images(seed: int = 0, **columns) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Breasts and images of `make_table`, an image's score being of its own, and higher with cancer."""
    images = make_table(300)
    rng = np.random.default_rng(seed)
    images = images.assign(score=rng.beta(1 + images["cancer"], 3), **columns)
    return metrics.to_breast(images), images


def by_hand(breasts: pd.DataFrame, members: pd.DataFrame) -> pd.DataFrame:
    """The breasts that an image of `members` is of."""
    keys = set(zip(members["patient_id"], members["laterality"], strict=True))
    return breasts[[key in keys for key in zip(breasts["patient_id"], breasts["laterality"], strict=True)]]


def test_each_group_has_the_score_of_its_breasts():
    breasts, images = scored_images()
    table = subgroups.group_table(breasts, images, by=("site_id", "machine_id", "density", "implant"), n=N, minimum=2)
    assert list(table.columns) == ["column", "group", "breasts", "positive", "value", "low", "high", "note"]
    assert table["column"].value_counts().to_dict() == {"machine_id": 6, "density": 5, "site_id": 2, "implant": 2}
    for row in table.itertuples():
        values = images[row.column]
        members = images[values.isna() if row.group == "missing" else values.astype(str) == row.group]
        found = by_hand(breasts, members)
        assert (row.breasts, row.positive) == (len(found), found["cancer"].sum())
        assert row.value == pytest.approx(roc_auc_score(found["cancer"], found["score"])) and row.note == ""
        expected = metrics.bootstrap(found["cancer"], found["score"], found["patient_id"], metrics.auc, n=N)
        assert (row.low, row.high) == (expected.low, expected.high) and row.low < row.value < row.high
    assert table[table["column"] == "density"]["group"].iloc[-1] == "missing"


def test_a_view_is_scored_by_its_own_images():
    breasts, images = scored_images()
    table = subgroups.group_table(breasts, images, metrics.average_precision, by=("view",), n=N, how="max").set_index(
        "group"
    )
    for view in ("CC", "MLO"):  # MLO is there twice in some breasts
        scores = images[images["view"] == view].groupby(BREAST)[["cancer", "score"]].max()
        expected = average_precision_score(scores["cancer"], scores["score"])
        assert table.loc[view, "value"] == pytest.approx(expected) and table.loc[view, "breasts"] == len(scores)
    assert table.loc["CC", "value"] != table.loc["MLO", "value"]


def test_ages_are_in_bands_of_ten_years_and_missing_ones_a_group():
    breasts, images = scored_images()
    table = subgroups.group_table(breasts, images, by=("age",), n=N, minimum=1)
    bands = {
        "<40": (0, 40),
        "40-49": (40, 50),
        "50-59": (50, 60),
        "60-69": (60, 70),
        "70-79": (70, 80),
        "80+": (80, 200),
    }
    assert list(table["group"]) == [*bands, "missing"]
    for row in table.itertuples():
        low, high = bands.get(row.group, (math.nan, math.nan))
        members = images[images["age"].isna() if row.group == "missing" else images["age"].between(low, high, "left")]
        assert row.breasts == len(by_hand(breasts, members))


def test_groups_that_are_too_small_say_so():
    breasts, images = scored_images()
    sick = images["cancer"] == 1
    groups = np.where(sick, "sick", "well")
    groups[np.flatnonzero(sick)[:4]] = "well"  # 2 breasts or fewer
    table = subgroups.group_table(breasts, images.assign(implant=groups), by=("implant",), n=N).set_index("group")
    few = len(images[sick & (groups == "well")].drop_duplicates(BREAST))
    assert (
        table.loc["sick", "note"] == "too few: 0 without cancer"
        and table.loc["well", "note"] == f"too few: {few} with cancer"
    )
    assert table[["value", "low", "high"]].isna().all(axis=None)
    enough = subgroups.group_table(breasts, images.assign(implant=groups), by=("implant",), n=N, minimum=few)
    assert enough.set_index("group").loc["well", "note"] == ""


def test_what_is_not_there_is_left_out():
    breasts, images = scored_images()
    lacking = images.drop(columns=["density", "score"])
    table = subgroups.group_table(breasts, lacking, by=("density", "view", "implant"), n=N)
    assert set(table["column"]) == {"implant"}
    assert subgroups.group_table(breasts.head(0), images, n=N).empty
    some = breasts[breasts["patient_id"].astype(int) < 20]
    table = subgroups.group_table(some, images, by=("site_id",), n=N, minimum=1)
    assert table["breasts"].tolist() == [20, 20]  # two breasts of each of ten patients


def test_a_statistic_without_labels_and_patients_of_two_machines():
    breasts, images = scored_images()
    first = images["patient_id"] == "0"
    images.loc[first & (images["view"] == "CC"), "machine_id"] = 99
    table = subgroups.group_table(
        breasts, images, lambda labels, scores: float((scores >= 0.5).mean()), ("machine_id",), N, minimum=0
    )
    row = table.set_index("group").loc["99"]
    assert row["breasts"] == 2 and row["value"] == (breasts[breasts["patient_id"] == "0"]["score"] >= 0.5).mean()
    own = table[table["group"] != "99"]["breasts"].sum()
    assert own == len(breasts)  # the patient's breasts are of both machines


def test_folds_beside_all_of_them():
    breasts, _ = scored_images()
    breasts["fold"] = breasts["patient_id"].astype(int) % 3
    table = subgroups.fold_table(breasts, {"AUC": metrics.auc, "AP": metrics.average_precision}, n=N)
    assert table[["score", "fold"]].values.tolist() == [[s, f] for s in ("AUC", "AP") for f in ("0", "1", "2", "all")]
    score = {"AUC": roc_auc_score, "AP": average_precision_score}
    for row in table.itertuples():
        part = breasts if row.fold == "all" else breasts[breasts["fold"] == int(row.fold)]
        assert row.value == pytest.approx(score[row.score](part["cancer"], part["score"]))
        assert (row.breasts, row.positive) == (len(part), part["cancer"].sum()) and row.low < row.value < row.high


def test_one_fold_and_a_fold_of_one_class():
    breasts, _ = scored_images()
    alone = subgroups.fold_table(breasts.assign(fold=2), {"AUC": metrics.auc}, n=N)
    assert alone["fold"].tolist() == ["2"]
    split = subgroups.fold_table(breasts.assign(fold=breasts["cancer"]), {"AUC": metrics.auc}, n=N).set_index("fold")
    assert split["note"].to_dict() == {"0": "too few: 0 with cancer", "1": "too few: 0 without cancer", "all": ""}
    assert math.isnan(split.loc["0", "value"])
