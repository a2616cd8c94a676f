"""rsnakit.folds: how patients and machines are dealt out, and what is refused."""

from collections import Counter

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest

from rsnakit.folds import check_folds, count_folds, debug_subset, machine_names, make_folds, with_rates
from rsnakit.tables import TableError


def patients_table(*groups: tuple[int, int, int], images: int = 4) -> pd.DataFrame:
    """(number of patients, cancer, site) groups as a table; half of a patient's images are on each side, cancer on the left."""
    labels = [(cancer, site) for n, cancer, site in groups for _ in range(n)]
    rows = [
        (site, f"{p}", f"{p * 100 + i}", "LR"[i % 2], cancer * (i % 2 == 0))
        for p, (cancer, site) in enumerate(labels, start=1)
        for i in range(images)
    ]
    table = pd.DataFrame(rows, columns=["site_id", "patient_id", "image_id", "laterality", "cancer"])
    return table.assign(breast_id=table["patient_id"] + "_" + table["laterality"])


# --- by patient ---------------------------------------------------------------------------------------------------------


def stratum_counts(table: pd.DataFrame, folds: pd.Series, n_folds: int) -> dict[tuple, list[int]]:
    """Patients of each (cancer, site) in each fold, counted row by row."""
    seen: dict[str, tuple] = {}
    for patient, cancer, site, fold in zip(table["patient_id"], table["cancer"], table["site_id"], folds, strict=True):
        before = seen.get(patient, (0, site, fold))
        assert before[2] == fold, f"patient {patient} in folds {before[2]} and {fold}"
        seen[patient] = (max(before[0], cancer), site, fold)
    counts: dict[tuple, list[int]] = {}
    for cancer, site, fold in seen.values():
        counts.setdefault((cancer, site), [0] * n_folds)[fold] += 1
    return counts


@pytest.mark.parametrize("n_folds", [2, 4, 5])
def test_folds_hold_whole_patients_and_even_strata(n_folds):
    table = patients_table((13, 1, 1), (9, 1, 2), (3, 1, 7), (101, 0, 1), (58, 0, 2), (1, 0, 9))
    counts = stratum_counts(table, make_folds(table, n_folds, seed=3), n_folds)
    for stratum, n in counts.items():
        assert max(n) - min(n) <= 1, (stratum, n)
    for cancer in (0, 1):  # the label over all sites too, and the folds' sizes
        total = np.sum([n for (c, _), n in counts.items() if c == cancer], axis=0)
        assert total.max() - total.min() <= 1
    sizes = np.sum(list(counts.values()), axis=0)
    assert sizes.sum() == 185 and sizes.max() - sizes.min() <= 1


def test_folds_depend_on_patients_and_seed_alone():
    table = patients_table((9, 1, 1), (9, 1, 2), (40, 0, 1), (40, 0, 2))
    folds = make_folds(table, 4, seed=0)
    assert folds.dtype == np.int64 and folds.index.equals(table.index)
    pd.testing.assert_series_equal(folds, make_folds(table, 4, seed=0))
    shuffled = table.sample(frac=1, random_state=1)
    pd.testing.assert_series_equal(make_folds(shuffled, 4, seed=0).sort_index(), folds)
    others = [make_folds(table, 4, seed=s).tolist() for s in range(5)]
    assert len({tuple(o) for o in others}) == 5
    # The seed moves patients, not whole folds' numbers alone: the partitions differ.
    partitions = {frozenset(frozenset(np.flatnonzero(np.array(o) == f).tolist()) for f in range(4)) for o in others}
    assert len(partitions) == 5


def test_a_patient_of_two_sites_is_placed_the_same_whatever_the_order():
    table = patients_table((8, 1, 1), (30, 0, 1), (30, 0, 2))
    table.loc[table["image_id"].str.endswith("0"), "site_id"] = 2  # the first image of each
    folds = make_folds(table, 4, seed=0)
    reverse = table.iloc[::-1]
    pd.testing.assert_series_equal(make_folds(reverse, 4, seed=0).sort_index(), folds)


def test_too_few_positives_are_refused_with_a_table():
    # V03
    table = patients_table((4, 1, 1), (36, 0, 1))
    with pytest.raises(TableError) as caught:
        make_folds(table, 5, seed=0)
    message = str(caught.value)
    assert "positive breasts" in message and "fewer folds than 5" in message and "4 have cancer" in message
    rows = [line.split() for line in message.splitlines() if line[:1].isdigit()]
    # by hand: 40 patients in 5 folds are 8 each, with 16 breasts and 32 images; 4 folds have the one positive breast
    assert [int(r[0]) for r in rows] == [0, 1, 2, 3, 4]
    assert all([int(v) for v in r[1:3]] == [8, 16] and int(r[4]) == 32 for r in rows)
    assert sorted(int(r[3]) for r in rows) == [0, 1, 1, 1, 1]


@pytest.mark.parametrize("positive", [0, 1, 4])
def test_five_patients_in_five_folds_are_refused(positive):
    # V03
    with pytest.raises(TableError, match="fewer folds"):
        make_folds(patients_table((positive, 1, 1), (5 - positive, 0, 1)), 5, seed=0)


def test_a_fold_without_negatives_is_refused():
    table = patients_table((5, 1, 1), images=1)  # one image each, with cancer
    with pytest.raises(TableError, match="without negatives"):
        make_folds(table, 5, seed=0)


@pytest.mark.parametrize(("patients", "n_folds"), [(3, 4), (10, 1), (10, 0)])
def test_impossible_numbers_of_folds_are_refused(patients, n_folds):
    with pytest.raises(TableError, match=f"{n_folds} folds of {patients} patients"):
        make_folds(patients_table((2, 1, 1), (patients - 2, 0, 1)), n_folds, seed=0)


def test_as_many_positive_patients_as_folds_are_enough():
    table = patients_table((5, 1, 1), (35, 0, 1))
    counts = count_folds(table, make_folds(table, 5, seed=0))
    assert counts["positive breasts"].tolist() == [1] * 5


def test_count_folds_by_hand():
    rows = [  # patient, breast, cancer, fold
        ("1", "1_L", 1, 0), ("1", "1_L", 1, 0), ("1", "1_R", 0, 0), ("2", "2_L", 0, 1), ("3", "3_L", 1, 1), ("3", "3_R", 1, 1)
    ]  # fmt: skip
    table = pd.DataFrame(rows, columns=["patient_id", "breast_id", "cancer", "fold"])
    counts = count_folds(table.drop(columns="fold"), table["fold"])
    assert counts.loc[0].to_dict() == {"patients": 1, "breasts": 2, "positive breasts": 1, "images": 3}
    assert counts.loc[1].to_dict() == {"patients": 2, "breasts": 3, "positive breasts": 2, "images": 3}


def test_rates_of_folds_are_wilsons():
    table = machines_table(("49", 8, 20), ("48", 3, 30))
    shown = with_rates(count_folds(table, make_folds(table, 2, 0, "machine")))
    assert shown["positive breasts"].tolist() == [8, 3] and shown["breasts"].tolist() == [56, 66]
    assert shown["with cancer, %"].tolist() == [14.3, 4.5]
    for fold, (k, n) in enumerate([(8, 56), (3, 66)]):
        interval = binomtest(k, n).proportion_ci(method="wilson")
        assert shown.loc[fold, ["95 % from", "to"]].tolist() == pytest.approx(
            [100 * end for end in interval], abs=0.051
        )


def test_a_patient_in_two_folds_stops():
    # V04
    table = patients_table((4, 1, 1), (8, 0, 1))
    folds = make_folds(table, 2, seed=0)
    check_folds(table, folds)
    leak = folds.copy()
    leak.iloc[4] = 1 - leak.iloc[4]
    with pytest.raises(TableError, match=r"patient 2 is in folds \[0, 1\], and 1 patients"):
        check_folds(table, leak)


def test_folds_on_other_rows_stop():
    table = patients_table((4, 1, 1), (8, 0, 1))
    folds = make_folds(table, 2, seed=0)
    for wrong in (
        folds.iloc[:-1],
        folds.reset_index(drop=True).iloc[::-1],
        folds.astype(float).where(folds.index != 3),
    ):
        with pytest.raises(TableError, match="not on the same rows"):
            check_folds(table, wrong)


# --- by machine ---------------------------------------------------------------------------------------------------------


def machines_table(*machines: tuple[object, int, int]) -> pd.DataFrame:
    """(machine_id, patients with cancer, patients without) as a table with four images a patient, cancer on the left."""
    table = patients_table(*[group for _, sick, well in machines for group in ((sick, 1, 1), (well, 0, 1))])
    patients = [name for name, sick, well in machines for _ in range(sick + well)]
    return table.assign(machine_id=np.repeat(np.array(patients, dtype=object), 4))


# Patients with cancer and without, near the competition's shares of its ten machines.
TEN = (("49", 21, 500), ("48", 13, 290), ("29", 9, 240), ("21", 6, 220), ("93", 3, 40), ("216", 3, 70), ("210", 2, 60),
       ("170", 1, 30), ("190", 0, 20), ("197", 0, 1))  # fmt: skip


@pytest.mark.parametrize("n_folds", [2, 4, 5, 8])
def test_machines_are_held_out_whole(n_folds):
    # V03, V04
    table = machines_table(*TEN)
    folds = make_folds(table, n_folds, seed=0, split="machine")
    check_folds(table, folds)
    assert folds.dtype == np.int64 and folds.index.equals(table.index)
    assert (folds.groupby(table["machine_id"]).nunique() == 1).all()
    counts = count_folds(table, folds)
    assert len(counts) == n_folds and counts["machines"].sum() == 10
    assert (counts["positive breasts"] > 0).all() and (counts["positive breasts"] < counts["breasts"]).all()


def test_machines_are_shared_out_by_positives_and_then_by_size():
    table = machines_table(*TEN)
    folds = make_folds(table, 4, seed=0, split="machine")
    members = table.groupby(folds)["machine_id"].unique().map(set).tolist()
    # By hand, (with cancer, all): 49 (21, 521), 48 (13, 303), 29 (9, 249) and 21 (6, 226) open the folds. 216 (3, 73) joins 21
    # (9, 299); 93 (3, 43) joins 29, as many with cancer and fewer in all; 210 (2, 62) joins 21 (11, 361), and so does 170.
    # Of those without cancer 190 joins the fewest patients, 29's 292, and 197 then 48's 303.
    assert members == [{"49"}, {"48", "197"}, {"29", "93", "190"}, {"21", "216", "210", "170"}]


def test_of_equal_machines_the_seed_decides_and_of_others_it_does_not():
    equal = machines_table(*((name, 2, 10) for name in "abcdef"))
    partitions = set()
    for seed in range(6):
        folds = make_folds(equal, 3, seed, "machine")
        assert count_folds(equal, folds)["positive breasts"].tolist() == [4, 4, 4]
        partitions.add(frozenset(frozenset(rows["machine_id"]) for _, rows in equal.groupby(folds)))
    assert len(partitions) > 1
    pd.testing.assert_series_equal(*(make_folds(machines_table(*TEN), 4, seed, "machine") for seed in (0, 1)))


def test_the_order_of_rows_does_not_matter_to_machines():
    table = machines_table(*((name, 2, 10) for name in "abcdef"))
    folds = make_folds(table, 3, 0, "machine")
    pd.testing.assert_series_equal(
        make_folds(table.sample(frac=1, random_state=1), 3, 0, "machine").sort_index(), folds
    )


def test_a_patient_of_two_machines_goes_whole_with_the_one_that_made_more():
    # V04
    table = machines_table(("1", 4, 10), ("2", 4, 10))
    images = table.index[:4]  # of the first patient, of machine 1

    def goes_with(rows: pd.DataFrame) -> str:
        folds = make_folds(rows, 2, 0, "machine")
        check_folds(rows, folds)
        others = rows.drop(index=images)
        (machine,) = set(others.loc[folds[others.index] == folds[images[0]], "machine_id"])
        return machine

    for machines, expected in (("2111", "1"), ("2221", "2"), ("2211", "1"), ("1122", "1")):
        table.loc[images, "machine_id"] = list(machines)
        assert goes_with(table) == goes_with(table.iloc[::-1]) == expected, machines


def test_images_without_a_machine_are_held_out_together():
    table = machines_table((49.0, 3, 9), (48.0, 2, 9), (np.nan, 2, 9))
    folds = make_folds(table, 3, 0, "machine")
    assert folds[table["machine_id"].isna()].nunique() == 1 and folds.nunique() == 3
    whole = table.assign(machine_id=table["machine_id"].fillna(-1).astype(int)).replace({"machine_id": {-1: pd.NA}})
    pd.testing.assert_series_equal(make_folds(whole, 3, 0, "machine"), folds)  # 49 and 49.0 are one
    assert Counter(machine_names(table)) == {"49": 48, "48": 44, "missing": 44}


def test_machines_that_cannot_be_scored_apart_are_refused_with_a_table():
    # V03
    table = machines_table(("49", 6, 10), ("48", 2, 10), ("29", 0, 10), ("21", 0, 4))
    with pytest.raises(TableError) as caught:
        make_folds(table, 3, 0, "machine")
    message = str(caught.value)
    assert "Of 4 machines 2 have patients with cancer; take fewer folds than 3, or split='patient'" in message
    rows = [line.split() for line in message.splitlines() if line[:1].isdigit()]
    assert [row[3] for row in rows] == ["6", "2", "0"]  # positive breasts
    with pytest.raises(TableError, match=r"3 folds of 2 machines.*take fewer folds than 3"):
        make_folds(machines_table(("49", 2, 5), ("48", 2, 5)), 3, 0, "machine")
    with pytest.raises(TableError, match=r"2 folds of 1 machines.*take split='patient'\.$"):
        make_folds(machines_table(("49", 2, 5)), 2, 0, "machine")


def test_a_table_without_machines_and_a_split_that_there_is_not():
    table = patients_table((4, 1, 1), (8, 0, 1))
    with pytest.raises(TableError, match="needs a column machine_id; found site_id, patient_id"):
        make_folds(table, 2, 0, "machine")
    with pytest.raises(ValueError, match="split 'site': expected one of patient, machine"):
        make_folds(table, 2, 0, "site")


# --- a few patients -----------------------------------------------------------------------------------------------------


def test_debug_subset_takes_whole_patients_with_positives_among_them():
    table = patients_table((20, 1, 1), (80, 0, 2))
    small = debug_subset(table, n_patients=12, n_positive=5, seed=0)
    cancer = small.groupby("patient_id")["cancer"].max()
    assert len(cancer) == 12 and cancer.sum() == 5 and len(small) == 12 * 4
    assert small.index.equals(pd.RangeIndex(48)) and small["image_id"].astype(int).is_monotonic_increasing
    pd.testing.assert_frame_equal(small, debug_subset(table, n_patients=12, n_positive=5, seed=0))
    assert set(debug_subset(table, 12, 5, seed=1)["patient_id"]) != set(small["patient_id"])


@pytest.mark.parametrize(("positive", "negative", "expected"), [(2, 30, (2, 22)), (30, 3, (8, 3)), (3, 0, (3, 0))])
def test_debug_subset_of_few_patients(positive, negative, expected):
    small = debug_subset(patients_table((positive, 1, 1), (negative, 0, 1)))
    cancer = small.groupby("patient_id")["cancer"].max()
    assert (cancer.sum(), (cancer == 0).sum()) == expected


def test_debug_subset_is_never_larger_than_asked():
    small = debug_subset(patients_table((9, 1, 1), (30, 0, 1)), n_patients=4, n_positive=6)
    assert small["patient_id"].nunique() == 4
