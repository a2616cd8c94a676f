"""Columns of train.csv as targets, in every way that a csv may spell them."""

import io

import numpy as np
import pandas as pd
import pytest

from rsnakit.targets import AUXILIARY, VIEW_KINDS, target_values, view_ids

NAN = np.nan


@pytest.mark.parametrize(
    "name, values, expected",
    [
        ("biopsy", [0, 1, 1], [0, 1, 1]),
        ("invasive", [0.0, 1.0, NAN], [0, 1, NAN]),
        ("birads", [2.0, NAN, 0.0, 1.0], [2, NAN, 0, 1]),
        ("birads", ["2", "1.0", "", "unknown"], [2, 1, NAN, NAN]),
        ("birads", [3.0, 6.0, -1.0, 0.5], [NAN] * 4),
        ("density", ["A", "D", NAN, "B", "C"], [0, 3, NAN, 1, 2]),
        ("density", ["a", " B", "E", None], [0, 1, NAN, NAN]),
        ("difficult", [True, False, True], [1, 0, 1]),
        ("difficult", ["True", "False", NAN, "true"], [1, 0, NAN, 1]),
        ("difficult", [1, 0, 1], [1, 0, 1]),
        ("difficult", [1.0, NAN, 0.0], [1, NAN, 0]),
        ("difficult", [True, NAN, "False", 0], [1, NAN, 0, 0]),
        ("view", ["CC", "MLO", "AT", "ML", NAN, "LMO"], [0, 1, NAN, NAN, NAN, NAN]),
    ],
)
def test_class_numbers(name, values, expected):
    table = pd.DataFrame({AUXILIARY[name].column: values}, index=range(10, 10 + len(values)))
    found = target_values(table, name)
    assert found.dtype == np.float32 and found.shape == (len(values),)
    np.testing.assert_array_equal(found, np.array(expected, np.float32))


@pytest.mark.parametrize("kind", ["boolean", "category", "string"])
def test_other_kinds_of_columns(kind):
    table = pd.DataFrame({"difficult_negative_case": pd.Series([True, False, pd.NA]).astype(kind)})
    np.testing.assert_array_equal(target_values(table, "difficult"), [1, 0, NAN])


def test_as_a_csv_gives_them():
    text = "BIRADS,density,difficult_negative_case,biopsy\n0.0,A,False,1\n,,True,0\n2.0,C,,0\n"
    table = pd.read_csv(io.StringIO(text))
    found = {name: target_values(table, name).tolist() for name in ("birads", "density", "difficult", "biopsy")}
    expected = {"birads": [0, NAN, 2], "density": [0, NAN, 2], "difficult": [0, 1, NAN], "biopsy": [1, 0, 0]}
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)
    empty = table.iloc[:0]
    assert target_values(empty, "density").shape == (0,)
    assert np.isnan(target_values(table.assign(density=NAN), "density")).all()


def test_the_synthetic_competition_has_them_all(table):
    for name in AUXILIARY:
        values = target_values(table, name)
        column = table[AUXILIARY[name].column]
        for number, value in enumerate(AUXILIARY[name].classes):
            assert (values == number).sum() == (column == value).sum()


def test_a_table_without_the_column_fails_where_it_is_asked_for():
    with pytest.raises(ValueError, match=r"'birads'.*no column BIRADS; only train\.csv"):
        target_values(pd.DataFrame({"view": ["CC"]}), "birads")
    with pytest.raises(ValueError, match=r"'age': expected one of biopsy, invasive, birads"):
        target_values(pd.DataFrame({"age": [50]}), "age")


def test_heads_have_a_logit_for_yes_or_no_and_else_one_a_class():
    logits = {name: target.logits for name, target in AUXILIARY.items()}
    assert logits == {"biopsy": 1, "invasive": 1, "birads": 3, "density": 4, "difficult": 1, "view": 1}


def test_views_are_of_two_kinds():
    views = pd.Series(["CC", "MLO", "XCCL", "FBCC", "AT", "LM", "ML", "LMO", "cc", NAN, None, ""])
    found = view_ids(views)
    assert found.dtype == np.int64
    assert found.tolist() == [0, 1, 0, 0, 1, 1, 1, 1, 0, 1, 1, 1]
    assert len(VIEW_KINDS) == 2 and VIEW_KINDS[0] == "CC"
    assert view_ids(views.iloc[:0]).shape == (0,)
