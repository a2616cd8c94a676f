"""A run set beside others."""

import numpy as np
import pandas as pd
import pytest
from evaluated import breasts_of, make_run
from sklearn.metrics import average_precision_score, roc_auc_score

from rsnakit import comparing, runs
from rsnakit.breasts import BREAST


def test_how_runs_were_held_out_stands_beside_them(tmp_path, table, capsys):
    same = {"n_folds": 2, "seed": 0, "epochs": 1, "select": "last"}
    one = make_run(tmp_path / "runs" / "one", table, train={**same, "split": "patient"}, model={"backbone": "a"})
    other = make_run(tmp_path / "runs" / "other", table, train={**same, "split": "machine"}, model={"backbone": "b"})
    found = comparing.settings_table({"one": one, "other": other})
    assert "not held out alike (split)" in capsys.readouterr().out
    assert found["split"].to_dict() == {"one": "patient", "other": "machine"}
    assert found["folds scored"].tolist() == ["2 of 2", "2 of 2"] and found["backbone"].tolist() == ["a", "b"]
    comparing.settings_table({"one": one})
    assert not capsys.readouterr().out


def test_other_runs_are_looked_for_by_name(tmp_path, table, capsys):
    one, other = (make_run(tmp_path / "runs" / name, table) for name in ("one", "other"))
    assert comparing.find_others(tmp_path, ("other", "one", "other"), one) == {"other": other}
    assert "compare: one is the run itself" in capsys.readouterr().out
    with pytest.raises(runs.RunError, match=r"none: no run with a trained fold here; runs there are: one, other"):
        comparing.find_others(tmp_path, ("none",), one)


def test_runs_are_cut_to_the_breasts_that_all_have(capsys):
    one, other = breasts_of(0), breasts_of(1).iloc[10:].sample(frac=1, random_state=0)
    same = comparing.on_the_same({"one": one, "other": other})
    assert "one has 60 breasts; compared on the 50 that all have" in capsys.readouterr().out
    pd.testing.assert_frame_equal(same["one"][BREAST], same["other"][BREAST])
    pd.testing.assert_frame_equal(same["one"], one.iloc[10:].reset_index(drop=True))
    with pytest.raises(runs.RunError, match="0 breasts are scored by all of them"):
        comparing.on_the_same({"one": one, "none": one.assign(patient_id=one["patient_id"] + "x")})


def test_a_run_against_itself_and_against_a_worse_one():
    one = breasts_of(0)
    worse = one.assign(score=one["score"] - 0.3 * one["cancer"])
    found = comparing.differences({"one": one, "same": one, "worse": worse}, n=200).set_index(["other", "score"])
    assert (found.loc["same"][["difference", "low", "high"]] == 0).all(axis=None)
    assert (found.loc["same"]["probability"] == 0.5).all()
    labels = one["cancer"]
    expected = {
        "AUC": roc_auc_score(labels, one["score"]) - roc_auc_score(labels, worse["score"]),
        "average precision": average_precision_score(labels, one["score"])
        - average_precision_score(labels, worse["score"]),
    }
    for score, difference in expected.items():
        row = found.loc[("worse", score)]
        assert row["difference"] == pytest.approx(difference) and row["low"] <= difference <= row["high"]
        assert row["probability"] > 0.9
    assert found.index.get_level_values("score")[0] == "pF1 at thresholds from other folds (nested)"
    one_fold = {name: frame.assign(fold=0) for name, frame in (("one", one), ("worse", worse))}
    assert "pF1 at thresholds from other folds (nested)" not in set(comparing.differences(one_fold, n=100)["score"])
    assert comparing.differences({"one": one}).empty


def test_blends_are_scored_beside_what_they_are_of():
    one, other = breasts_of(0), breasts_of(1)
    found = comparing.blends({"one": one, "other": other}, n=100)
    assert found.index.tolist() == ["one", "other", "all, mean", "all, logits", "all, ranks"]
    ranks = (one["score"].rank() + other["score"].rank()) / 2
    expected = [roc_auc_score(one["cancer"], s) for s in (one["score"], other["score"], one["score"] + other["score"])]
    np.testing.assert_allclose(found["AUC"].iloc[:3], expected, atol=0.0005)
    assert found.loc["all, ranks", "AUC"] == pytest.approx(roc_auc_score(one["cancer"], ranks), abs=0.0005)
    assert comparing.blends({"one": one}, n=100).index.tolist() == ["one"]
