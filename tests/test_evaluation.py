"""What 05_evaluate reads of a run, and what its scores mean."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from evaluated import breasts_of, make_run
from sklearn.metrics import brier_score_loss, confusion_matrix, roc_curve

from rsnakit import data, evaluation, runs
from rsnakit.breasts import BREAST
from rsnakit.env import RunConfig
from rsnakit.nested import nested_threshold
from rsnakit.preprocess import PreprocessConfig
from rsnakit.tables import TableError


@pytest.fixture
def run(tmp_path, table) -> Path:
    return make_run(tmp_path / "runs" / "one", table)


def test_scores_come_with_all_that_the_table_says(run, table, competition):
    pd.testing.assert_frame_equal(evaluation.table_of(run, competition), table)
    images, breasts = evaluation.read_scores(run, table, "max")
    found, oof = images.set_index("image_id"), runs.read_oof(run).set_index("image_id")
    assert len(found) == len(oof) == len(table)
    pd.testing.assert_frame_equal(found.loc[oof.index, ["fold", "cancer", "score"]], oof[["fold", "cancer", "score"]])
    pd.testing.assert_series_equal(found["machine_id"], table.set_index("image_id")["machine_id"])
    highest = oof.groupby(BREAST)["score"].max()
    pd.testing.assert_series_equal(breasts.set_index(BREAST)["score"], highest, check_like=True)


@pytest.mark.parametrize("how", ["mean", "noisy_or"])
def test_a_model_that_scores_breasts_has_one_score_a_breast(tmp_path, table, how):
    run = make_run(tmp_path / "breasts", table, by_breast=True)
    images, breasts = evaluation.read_scores(run, table, how)
    assert images["image_id"].tolist() == table["image_id"].tolist() and "score" not in images
    pd.testing.assert_series_equal(
        breasts.set_index(BREAST)["score"], runs.read_oof(run).set_index(BREAST)["score"], check_like=True
    )


def test_a_run_of_other_data_is_refused(tmp_path, table, competition):  # V04
    for name, values in {"cancer": 1 - table["cancer"], "density": "", "machine_id": 7}.items():
        made = make_run(tmp_path / name, table.assign(**{name: values}))
        with pytest.raises(runs.RunError, match=rf"{name}: trained on other .*: .*\b{name}\b.*03_train trains one"):
            evaluation.table_of(made, competition)


def test_a_run_with_debug_is_of_a_few_patients(tmp_path, table, competition):
    few = data.debug_subset(table)
    run = make_run(tmp_path / "few", few, debug=True)
    pd.testing.assert_frame_equal(evaluation.table_of(run, competition), few)


def test_rows_that_are_not_in_the_table_or_have_another_label(run, table):
    with pytest.raises(
        runs.RunError, match=rf"of {len(table)} rows of oof\.csv 3 are not in the table, and 0 have another"
    ):
        evaluation.read_scores(run, table.iloc[3:])
    breast = table["breast_id"] == table["breast_id"].iloc[0]
    with pytest.raises(runs.RunError, match=rf"0 are not in the table, and {breast.sum()} have another label"):
        evaluation.read_scores(run, table.assign(cancer=table["cancer"].where(~breast, 1 - table["cancer"])))


def test_no_fold_is_trained(tmp_path, table):
    (tmp_path / "config.json").write_text(json.dumps({"settings": {"train": {"epochs": 1}}}))
    with pytest.raises(runs.RunError, match="no fold with out-of-fold scores yet; 03_train makes them"):
        evaluation.read_scores(tmp_path, table)


def test_without_a_store_there_are_scores_and_no_pictures(tmp_path, table, competition, capsys):
    run = make_run(tmp_path / "one", table, is_demo=False, preprocess=asdict(PreprocessConfig(height=64, width=32)))
    assert evaluation.open_store(run, tmp_path, competition, table, RunConfig()) is None
    assert "no pictures" in (said := capsys.readouterr().out) and "02_preprocess.ipynb" in said
    assert evaluation.with_pixels(table, None).empty


def test_operating_points_are_where_they_say():
    frame = breasts_of(3, n=400)
    labels, scores, found = frame["cancer"].to_numpy(), frame["score"].to_numpy(), nested_threshold(frame, n=10)
    points = evaluation.operating_points(frame, 0.45, found)
    assert (
        list(points)[:2] == ["each fold at the others' threshold", "04's threshold"]
        and points["04's threshold"] == 0.45
    )
    np.testing.assert_array_equal(points["each fold at the others' threshold"], found.called)
    false, true, cuts = roc_curve(labels, scores, drop_intermediate=False)
    assert points["90 % sensitivity"] == cuts[true >= 0.9].max()
    assert points["90 % specificity"] == cuts[false <= 0.1].min()
    assert next(iter(evaluation.operating_points(frame, 0.45, None))) == "04's threshold"


def test_quantities_are_those_of_sklearn():
    frame = breasts_of(4, n=400)
    labels, scores, found = frame["cancer"].to_numpy(), frame["score"].to_numpy(), nested_threshold(frame, n=10)
    expected = []
    for called in (found.called, scores >= 0.5):
        (tn, fp), (fn, tp) = confusion_matrix(labels, called)
        expected += [tp / (tp + fn), tn / (tn + fp), (tp + fp) / len(labels)]
    false, true, _ = roc_curve(labels, scores, drop_intermediate=False)
    expected += [true[false <= 0.1].max(), 1 - false[true >= 0.9].min(), brier_score_loss(labels, scores)]
    table = evaluation.quantities(frame, 0.5, found, n=200)
    np.testing.assert_allclose(table["value"].iloc[:9], expected, atol=0.0005)
    inside = table.iloc[:9]
    assert (inside["95 % from"] <= inside["value"]).all() and (inside["value"] <= inside["to"]).all()
    alone = evaluation.quantities(frame, 0.5, None, n=200)
    pd.testing.assert_frame_equal(alone, table.iloc[3:])


def test_a_leak_among_the_inputs_stops_an_evaluation(run, table, competition, store, monkeypatch):
    monkeypatch.setattr(runs, "rebuild", lambda *_: None)
    monkeypatch.setattr(evaluation.models, "inputs_of", lambda _: ("BIRADS",))
    with pytest.raises(TableError, match="BIRADS"):
        evaluation.check(run, evaluation.read_scores(run, table).images, store, competition)


def test_the_config_refuses_what_it_cannot_do():
    assert evaluation.EvaluateConfig(compare=("a", "b"), aggregate="noisy_or").aggregate == "noisy_or"
    for wrong in ({"aggregate": "median"}, {"resamples": 5}, {"mistakes": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            evaluation.EvaluateConfig(**wrong)


def test_a_patient_is_looked_for_before_the_work(table):
    evaluation.check_patient("", table)
    evaluation.check_patient(table["patient_id"].iloc[0], table)
    with pytest.raises(ValueError, match=r"patient: no 'nobody' among 16 scored ones; near it: "):
        evaluation.check_patient("nobody", table)
