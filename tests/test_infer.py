"""From a run and a competition to a submission that has every row, whatever the images are."""

import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from rsnakit import (
    budget,
    calling,
    data,
    engine,
    ensemble,
    headers,
    infer,
    ledger,
    metrics,
    models,
    preprocess,
    runs,
    scored,
)
from rsnakit.budget import Clock
from rsnakit.dicom import DicomError
from rsnakit.engine import TrainConfig
from rsnakit.ensemble import Pass, levels
from rsnakit.env import RunConfig
from rsnakit.files import Lock, LockedError
from rsnakit.infer import InferConfig, SubmissionError
from rsnakit.models import ModelConfig
from rsnakit.preprocess import PreprocessConfig

MODEL = ModelConfig(backbone="test_resnet", weights="none", pooling="avg")
SMALL = PreprocessConfig(height=64, width=32)
RUN = RunConfig(device="cpu", n_jobs=2)
PRIOR = 0.0625


def make_run(
    work, name="run", folds=2, preprocess_config=SMALL, threshold=0.5, is_demo=True, debug=False, config=MODEL
):
    """A run as training leaves it, with random weights: another model in each fold."""
    folder = work / "runs" / name
    settings = runs.settings_of(preprocess_config, config, TrainConfig(epochs=1), "data", is_demo, debug)
    runs.open_run(work, name, settings)
    for fold in range(folds):
        torch.manual_seed(fold)
        (folder / f"fold{fold}").mkdir(parents=True)
        model = models.build_model(config)
        for name_of, parameter in model.named_parameters():  # new pools of views begin as the mean, and heads near 0
            if not name_of.startswith("backbone."):
                torch.nn.init.normal_(parameter, std=1.0)
        models.save_weights(model, folder / f"fold{fold}" / "best.safetensors")
        described = {"model": dataclasses.asdict(config), "preprocess": dataclasses.asdict(preprocess_config)}
        described |= {"prior": PRIOR, "epoch": 1, "select": "last"}
        (folder / f"fold{fold}" / "model.json").write_text(json.dumps(described))
    if threshold is not None:
        (folder / "summary.json").write_text(json.dumps({"threshold": threshold, "folds": list(range(folds))}))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("work"))


@pytest.fixture(scope="module")
def report(competition, run):
    return infer.predict(competition, run, InferConfig(), RUN)


def test_scores_are_the_mean_over_folds_of_single_images(competition, run, report):
    table = data.load_table(competition, "test")
    assert report["image_id"].tolist() == table["image_id"].tolist()
    assert (report["status"] == "ok").all()
    nets = [
        models.load_weights(models.build_model(MODEL), run / f"fold{fold}" / "best.safetensors").eval()
        for fold in (0, 1)
    ]
    for row in (0, 5, len(table) - 1):
        image = preprocess.load_image(table["path"][row], SMALL).astype(np.float32) / 4095
        with torch.no_grad():
            expected = np.mean([net(torch.from_numpy(image)[None, None])["cancer"].sigmoid().item() for net in nets])
        assert report["score"][row] == pytest.approx(expected, abs=1e-5)


def test_processes_and_batches_change_nothing(competition, run, report):
    again = infer.predict(competition, run, InferConfig(infer_batch_size=3), dataclasses.replace(RUN, n_jobs=1))
    np.testing.assert_allclose(again["score"], report["score"], atol=1e-6)


def hurt(competition, tmp_path) -> Path:
    """A copy of the test set in which images are cut, empty, no DICOM, blank and missing."""
    root = tmp_path / "hurt"
    root.mkdir()
    shutil.copy(competition / "test.csv", root)
    shutil.copytree(competition / "test_images", root / "test_images")
    table = data.load_table(root, "test")
    paths = table["path"].tolist()
    paths[0].write_bytes(paths[0].read_bytes()[:-200])
    paths[1].write_bytes(b"")
    paths[2].write_text("no image at all")
    paths[3].unlink()
    import pydicom

    blank = pydicom.dcmread(paths[5])
    blank.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    blank.PixelData = bytes(blank.Rows * blank.Columns * 2)
    blank["PixelData"].VR = "OW"
    blank.save_as(paths[5])
    return root


def test_images_that_cannot_be_read_get_the_prior_and_a_line(competition, run, report, tmp_path):  # D13, I02
    root = hurt(competition, tmp_path)
    found = infer.predict(root, run, InferConfig(), RUN)
    assert found["status"].tolist()[:6] == ["failed", "failed", "failed", "failed", "ok", "blank"]
    bad = found["status"] != "ok"
    assert (found.loc[bad, "score"] == PRIOR).all()
    for row, cause in {0: "cut short", 1: "empty", 2: "not a DICOM file", 3: "No such file", 5: "blank"}.items():
        assert cause in found["reason"][row] and "\n" not in found["reason"][row]
    np.testing.assert_allclose(found.loc[~bad, "score"], report.loc[~bad, "score"], atol=1e-6)
    submission = infer.write_submission(found, tmp_path / "submission.csv", None)
    infer.check_submission(tmp_path / "submission.csv", root / "test.csv")
    # By hand: the first breast's mean, with the prior for each of its images without pixels.
    first = found[found["prediction_id"] == found["prediction_id"][0]]
    assert submission["cancer"][0] == pytest.approx(first["score"].mean())


def test_many_failed_images_are_said(competition, run, tmp_path, capsys):
    root = tmp_path / "none"
    root.mkdir()
    shutil.copy(competition / "test.csv", root)
    report = infer.predict(root, run, InferConfig(), RUN)
    n, first = len(report), report.iloc[0]
    said = capsys.readouterr().out
    assert f"NOTE: {n} of {n} images failed, {first['image_id']} for this reason: {first['reason']}\n" in said


def test_one_image_alone(competition, run, tmp_path):  # I02
    root = tmp_path / "one"
    root.mkdir()
    table = pd.read_csv(competition / "test.csv").head(1)
    table["age"] = np.nan
    table["machine_id"] = 99999
    table.to_csv(root / "test.csv", index=False)
    (root / "test_images").symlink_to(competition / "test_images")
    report = infer.predict(root, run, InferConfig(), RUN)
    infer.write_submission(report, tmp_path / "s.csv", 0.5)
    assert len(infer.check_submission(tmp_path / "s.csv", root / "test.csv")) == 1


def test_a_submission_has_the_rows_of_test_csv_in_its_order(competition, report, tmp_path):
    infer.write_submission(report, tmp_path / "s.csv", 0.5)
    written = pd.read_csv(tmp_path / "s.csv", dtype={"prediction_id": str})
    test = pd.read_csv(competition / "test.csv", dtype={"prediction_id": str})
    assert written["prediction_id"].tolist() == list(dict.fromkeys(test["prediction_id"]))
    assert list(written.columns) == ["prediction_id", "cancer"]
    by_hand = report.groupby("prediction_id", sort=False)["score"].mean() >= 0.5
    assert written["cancer"].tolist() == by_hand.astype(float).tolist()


def test_ids_come_back_as_they_were_written(competition, run, tmp_path):
    """Leading zeros, and an image_id beyond 2**31 that would be rounded as a float."""
    root = tmp_path / "ids"
    (root / "test_images" / "007").mkdir(parents=True)
    table = pd.read_csv(competition / "test.csv", dtype=str).head(1)
    source = competition / "test_images" / table["patient_id"][0] / f"{table['image_id'][0]}.dcm"
    table["patient_id"], table["image_id"], table["prediction_id"] = "007", "9007199254740993", "007_L"
    table.to_csv(root / "test.csv", index=False)
    shutil.copy(source, root / "test_images" / "007" / "9007199254740993.dcm")
    report = infer.predict(root, run, InferConfig(), RUN)
    assert report["status"].tolist() == ["ok"]
    infer.write_submission(report, tmp_path / "s.csv", None)
    assert (tmp_path / "s.csv").read_text().splitlines()[1].startswith("007_L,")


@pytest.mark.parametrize(
    "aggregate, expected",
    [("mean", [0.5, 0.9]), ("max", [0.8, 0.9]), ("noisy_or", [1 - 0.8 * 0.2 * 0.5, 0.9]), ("top2", [0.65, 0.9]),
     ("top3", [0.5, 0.9])],
)  # fmt: skip
def test_aggregation_and_no_threshold(aggregate, expected, tmp_path):
    report = pd.DataFrame(
        {"prediction_id": ["9_R", "9_R", "9_R", "1_L"], "patient_id": ["9", "9", "9", "1"],
         "laterality": ["R", "R", "R", "L"], "image_id": ["a", "b", "d", "c"], "score": [0.2, 0.8, 0.5, 0.9]}
    )  # fmt: skip
    submission = infer.write_submission(report, tmp_path / "s.csv", None, InferConfig(aggregate=aggregate).aggregate)
    assert submission["prediction_id"].tolist() == ["9_R", "1_L"]
    assert submission["cancer"].tolist() == pytest.approx(expected)


def test_other_aggregates_are_refused():
    with pytest.raises(ValueError, match="got 'median', expected one of 'mean', 'max', 'noisy_or', 'top2', 'top3'"):
        InferConfig(aggregate="median")


def test_thresholds(run, tmp_path):
    with pytest.raises(ValueError, match=r"from 0\.0 to 1\.0 or one of 'auto', 'none', 'percentile'"):
        InferConfig(threshold="best")
    assert calling.choose_threshold(InferConfig(), run)[0] == 0.5
    assert calling.choose_threshold(InferConfig(threshold="none"), run)[0] is None
    assert calling.choose_threshold(InferConfig(threshold=0.31, aggregate="max"), run)[0] == 0.31
    without = make_run(tmp_path, threshold=None)
    with pytest.raises(runs.RunError, match="threshold='auto' is read from it"):
        calling.choose_threshold(InferConfig(), without)


def test_the_threshold_is_that_of_the_aggregate(tmp_path):
    """The maximum of a breast's images is higher than their mean: the mean's threshold would call too many."""
    run = make_run(tmp_path, threshold=0.5)
    with pytest.raises(runs.RunError, match=r"no threshold for aggregate='max'.*Run 03_train again"):
        calling.choose_threshold(InferConfig(aggregate="max"), run)  # a summary of an older kit has the mean's alone
    chosen = {"mean": {"threshold": 0.5, "nested_f1": 0.41}, "max": {"threshold": 0.7, "nested_f1": None}}
    (run / "summary.json").write_text(json.dumps({"threshold": 0.5, "folds": [0, 1], "by_aggregate": chosen}))
    threshold, source = calling.choose_threshold(InferConfig(), run)
    assert threshold == 0.5 and "fold 0, 1" in source and "pF1 to be expected: 0.410" in source
    threshold, source = calling.choose_threshold(InferConfig(aggregate="max"), run)
    assert threshold == 0.7 and "max over images" in source and "expected" not in source


TEST = pd.DataFrame({"prediction_id": ["5_L", "5_L", "5_R", "7_L"]})
GOOD = pd.DataFrame({"prediction_id": ["5_L", "5_R", "7_L"], "cancer": [0.0, 1.0, 0.5]})


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: s.rename(columns={"cancer": "score"}), "columns are"),
        (lambda s: s.assign(extra=1), "columns are"),
        (lambda s: s.iloc[:2], "missing.*7_L"),
        (lambda s: pd.concat([s, s.iloc[:1]]), "twice.*5_L"),
        (lambda s: s.assign(prediction_id=["5_L", "5_R", "8_L"]), "missing.*7_L"),
        (lambda s: pd.concat([s, s.tail(1).assign(prediction_id="8_L")]), "not in test.csv.*8_L"),
        (lambda s: s.iloc[[1, 0, 2]], "row 2 is 5_R, test.csv has 5_L"),
        (lambda s: s.assign(cancer=[0.0, np.nan, 0.5]), "row 3, 5_R: cancer is nan"),
        (lambda s: s.assign(cancer=[0.0, 1.0, 1.5]), "row 4, 7_L: cancer is 1.5"),
        (lambda s: s.assign(cancer=[-0.1, 1.0, 0.5]), "row 2, 5_L"),
        (lambda s: s.assign(cancer=["a", 1.0, 0.5]), "row 2, 5_L: cancer is 'a'"),
    ],
)
@pytest.mark.parametrize("as_file", [False, True])
def test_bad_submissions_are_refused_with_the_reason(change, message, as_file, tmp_path):
    submission = change(GOOD)
    if as_file:
        submission.to_csv(tmp_path / "s.csv", index=False)
        submission, message = tmp_path / "s.csv", message.replace("is nan", "is ''")
    with pytest.raises(SubmissionError, match=message):
        infer.check_submission(submission, TEST)


def test_a_good_submission_is_given_back():
    pd.testing.assert_frame_equal(infer.check_submission(GOOD, TEST), GOOD)


def test_folds_trained_on_other_pixels_are_refused(tmp_path):
    run = make_run(tmp_path)
    path = run / "fold1" / "model.json"
    described = json.loads(path.read_text())
    described["preprocess"]["window"] = "none"
    path.write_text(json.dumps(described))
    with pytest.raises(runs.RunError, match=r"window.*first.*none"):
        infer.load_ensemble(run)


def test_other_settings_of_pixels_are_refused_by_name(run):  # D07
    infer.refuse_other_settings(run, {"height": 64, "epochs": 3, "weights": "hub"})
    with pytest.raises(runs.RunError, match=r"height=128 \(trained with 64\)"):
        infer.refuse_other_settings(run, {"height": 128, "width": 32})


@pytest.mark.parametrize("part", ["preprocess", "model"])
def test_weights_of_another_version_of_the_kit_are_refused_instead_of_guessed_at(tmp_path, part):
    """A setting that a run knows nothing of would get its default, which is not what the run was trained with."""
    folder = make_run(tmp_path)
    path = folder / "fold1" / "model.json"
    described = json.loads(path.read_text())
    name = {"preprocess": "reduce", "model": "pooling"}[part]
    del described[part][name]
    described[part]["older"] = 1
    for fold in (0, 1):
        (folder / f"fold{fold}" / "model.json").write_text(json.dumps(described))
    with pytest.raises(runs.RunError, match=rf"lacks \['{name}'\] and has \['older'\].*train again"):
        infer.load_ensemble(folder)


def test_inference_needs_neither_hub_nor_wheel(tmp_path, competition, monkeypatch):  # M01
    run = make_run(tmp_path, folds=1)
    path = run / "fold0" / "model.json"
    path.write_text(path.read_text().replace('"weights": "none"', '"weights": "hub"'))
    monkeypatch.setattr(models.timm, "create_model", _offline(models.timm.create_model))
    assert len(infer.load_ensemble(run).models) == 1


def _offline(create):
    def create_model(*arguments, pretrained=False, **options):
        assert not pretrained, "the hub was asked"
        return create(*arguments, pretrained=pretrained, **options)

    return create_model


def test_a_model_that_gives_nan_costs_its_images_not_the_submission(tmp_path, competition):
    run = make_run(tmp_path, folds=1)
    model = models.load_weights(models.build_model(MODEL), run / "fold0" / "best.safetensors")
    torch.nn.init.constant_(model.head.bias, float("nan"))
    models.save_weights(model, run / "fold0" / "best.safetensors")
    report = infer.predict(competition, run, InferConfig(), RUN)
    assert (report["status"] == "failed").all() and (report["score"] == PRIOR).all()


def test_debug_looks_at_a_few_breasts_and_keeps_every_row(competition, run, report):
    found = infer.predict(competition, run, InferConfig(), dataclasses.replace(RUN, debug=True))
    assert len(found) == len(report)
    looked_at = found["status"] == "ok"
    assert found.loc[looked_at, "prediction_id"].nunique() == 4
    assert (found.loc[~looked_at, "status"] == "skipped").all()
    np.testing.assert_allclose(found.loc[looked_at, "score"], report.loc[looked_at, "score"], atol=1e-6)


def test_a_fold_that_was_stopped_is_left_out_where_another_is_finished(tmp_path):
    """And the threshold has to be that of the folds that score."""
    stopped = make_run(tmp_path, folds=2)
    pd.DataFrame({"epoch": []}).to_csv(stopped / "fold1" / "history.csv", index=False)
    (stopped / "fold1_old").mkdir()
    shutil.copy(stopped / "fold0" / "model.json", stopped / "fold1_old")
    assert runs.unfinished_folds(stopped) == {1: "epoch 0 of 1"}
    assert list(infer.load_ensemble(stopped).models) == [0]
    with pytest.raises(runs.RunError, match=r"that of folds \[0, 1\], and there are weights of folds \[0\]"):
        calling.choose_threshold(InferConfig(), stopped)
    pd.DataFrame({"epoch": []}).to_csv(stopped / "fold0" / "history.csv", index=False)
    assert list(infer.load_ensemble(stopped).models) == [0, 1]  # none is finished: those there are


def test_a_run_of_another_kind_of_data_is_said(tmp_path):
    assert runs.differences_in_kind(make_run(tmp_path, "a"), is_demo=True) == ""
    assert "trained on the demo, and this is real data" in runs.differences_in_kind(tmp_path / "runs" / "a", False)
    real = make_run(tmp_path, "b", is_demo=False, debug=True)
    assert "few patients" in runs.differences_in_kind(real, False)


@pytest.mark.parametrize("name", ["fold0/model.json", "summary.json", "config.json"])
def test_a_damaged_file_is_named(tmp_path, name):
    run = make_run(tmp_path)
    (run / name).write_text((run / name).read_text()[:20])
    with pytest.raises(ValueError, match=f"{name}: cut short or damaged"):
        infer.load_ensemble(run)
        calling.choose_threshold(InferConfig(), run)


def test_which_run_is_taken(tmp_path):
    with pytest.raises(runs.RunError, match="no run trained on a demo yet"):
        runs.find_run(tmp_path, "", is_demo=True)
    make_run(tmp_path, "old")
    debug = make_run(tmp_path, "debug", debug=True)
    assert runs.find_run(tmp_path, "", is_demo=True) == debug  # the one last written to
    assert runs.find_run(tmp_path, "old", is_demo=False).name == "old"  # asked for by name
    with pytest.raises(runs.RunError, match=r"real competition yet\. Runs of another kind.*debug, old"):
        runs.find_run(tmp_path, "", is_demo=False)
    make_run(tmp_path, "real debug", is_demo=False, debug=True)
    real = make_run(tmp_path, "real", is_demo=False)
    assert runs.find_run(tmp_path, "", is_demo=False) == real
    with pytest.raises(runs.RunError, match="runs there are: debug, old, real, real debug"):
        runs.find_run(tmp_path, "nothing", is_demo=True)
    killed = make_run(tmp_path, "killed", is_demo=False, threshold=None)  # newer, but without a summary
    assert runs.find_run(tmp_path, "", is_demo=False) == real
    assert runs.find_run(tmp_path, "killed", is_demo=False) == killed
    (tmp_path / "runs" / "half" / "fold0").mkdir(parents=True)
    (tmp_path / "runs" / "half" / "config.json").write_text("{}")
    with pytest.raises(runs.RunError, match="no run with a trained fold"):
        runs.find_run(tmp_path, "half", is_demo=True)


# --- models that see breasts


BREASTS = dataclasses.replace(MODEL, views="attention", aux=("biopsy", "density"), grad_checkpointing=True)


@pytest.fixture(scope="module")
def breast_run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("work"), config=BREASTS)


BOTH = Pass(0), Pass(1)


def by_hand(run: Path, table: pd.DataFrame, passes=BOTH) -> float:
    """The score of one breast's images: each fold's model sees them all at once, padded with nothing."""
    images = np.stack([preprocess.load_image(path, SMALL) for path in table["path"]]).astype(np.float32) / 4095
    kinds, scores = torch.tensor([[0 if "CC" in view else 1 for view in table["view"]]]), []
    for fold, flips in passes:
        model = models.load_weights(models.build_model(BREASTS), run / f"fold{fold}" / "best.safetensors").eval()
        shown = torch.flip(torch.from_numpy(images)[None, :, None], [dim + 1 for dim in flips])  # (1, V, 1, H, W)
        with torch.no_grad():
            scores.append(model(shown, view_id=kinds)["cancer"].sigmoid().item())
    return float(np.mean(scores))


def test_a_breast_is_scored_from_all_its_images(competition, breast_run, tmp_path):
    table = data.load_table(competition, "test")
    report = infer.predict(competition, breast_run, InferConfig(infer_batch_size=3), RUN)
    assert list(report.columns) == infer.REPORT_COLUMNS and report["image_id"].tolist() == table["image_id"].tolist()
    assert (report["status"] == "ok").all()
    for breast_id, rows in table.groupby("breast_id"):
        expected = by_hand(breast_run, rows)
        np.testing.assert_allclose(report.loc[rows.index, "score"], expected, atol=1e-5, err_msg=breast_id)
    assert report["score"].nunique() == table["breast_id"].nunique()
    submission = infer.write_submission(report, tmp_path / "s.csv", None)
    infer.check_submission(tmp_path / "s.csv", competition / "test.csv")
    first = report.groupby("prediction_id", sort=False)["score"].first()
    np.testing.assert_allclose(submission["cancer"], first, rtol=1e-12)


def test_breasts_in_parts_and_batches_are_the_same(competition, breast_run, monkeypatch):
    whole = infer.predict(competition, breast_run, InferConfig(), RUN)
    monkeypatch.setattr(scored, "BREASTS", 3)
    parts = infer.predict(competition, breast_run, InferConfig(infer_batch_size=1), dataclasses.replace(RUN, n_jobs=1))
    np.testing.assert_allclose(parts["score"], whole["score"], atol=1e-6)


def test_bad_images_of_a_breast_are_left_out(competition, breast_run, tmp_path):  # D13, I02
    """One that cannot be read costs its view; where all of a breast are bad the prior stands."""
    root = hurt(competition, tmp_path)
    table = data.load_table(root, "test")
    report = infer.predict(root, breast_run, InferConfig(), RUN)
    assert report["status"].tolist()[:6] == ["failed", "failed", "failed", "failed", "ok", "blank"]
    ok = report["status"] == "ok"
    seen = set()
    for _, rows in table.groupby("breast_id"):
        good = rows[ok[rows.index]]
        seen.add((len(good) > 0, len(good) == len(rows)))
        expected = by_hand(breast_run, good) if len(good) else PRIOR
        np.testing.assert_allclose(report.loc[rows.index, "score"], expected, atol=1e-5)
    assert seen == {(False, False), (True, False), (True, True)}  # none, some and all of a breast's images


def test_debug_scores_a_few_breasts(competition, breast_run):
    whole = infer.predict(competition, breast_run, InferConfig(), RUN)
    found = infer.predict(competition, breast_run, InferConfig(), dataclasses.replace(RUN, debug=True))
    looked_at = found["status"] == "ok"
    assert found.loc[looked_at, "prediction_id"].nunique() == 4
    np.testing.assert_allclose(found.loc[looked_at, "score"], whole.loc[looked_at, "score"], atol=1e-6)
    assert (found.loc[~looked_at, "score"] == PRIOR).all() and (found.loc[~looked_at, "status"] == "skipped").all()


@pytest.mark.parametrize("where", ["backbone", "head"])
def test_a_breast_model_that_gives_nan_costs_no_row(competition, tmp_path, where):
    run = make_run(tmp_path, folds=1, config=BREASTS)
    model = models.load_weights(models.build_model(BREASTS), run / "fold0" / "best.safetensors")
    inner = where == "backbone"
    for name, parameter in model.named_parameters():
        if name.startswith("backbone.") == inner:
            torch.nn.init.constant_(parameter, float("nan"))
    models.save_weights(model, run / "fold0" / "best.safetensors")
    report = infer.predict(competition, run, InferConfig(), RUN)
    assert (report["status"] == "failed").all() and (report["score"] == PRIOR).all()
    assert (report["reason"] == "the model gave no finite score").all()


def test_inference_gives_the_out_of_fold_scores_of_the_same_images(competition, table, tmp_path):
    """A breast model trained for an epoch, then used through DICOM on the very images that it was scored on."""
    pixels = preprocess.build_store(table, SMALL, tmp_path / "store", n_jobs=1, image_format="raw16")
    train = TrainConfig(n_folds=2, epochs=1, batch_size=4)
    settings = runs.settings_of(SMALL, BREASTS, train, data.fingerprint(table), True, False)
    folder = runs.open_run(tmp_path, "run", settings)
    bad = table.loc[~table["image_id"].isin(data.usable(table, pixels)[0]["image_id"]), "breast_id"].iloc[0]
    fold = data.make_folds(table, 2, 0)[table["breast_id"] == bad].iloc[0]
    engine.fit_folds(table, pixels, BREASTS, train, RunConfig(device="cpu", fold=str(fold), num_workers=0), folder)

    root = tmp_path / "as_test"
    root.mkdir()
    table.drop(columns="path").assign(prediction_id=table["breast_id"]).to_csv(root / "test.csv", index=False)
    (root / "test_images").symlink_to(competition / "train_images")
    report = infer.predict(root, folder, InferConfig(), RUN)
    assert "blank" in set(report.loc[report["prediction_id"] == bad, "status"])
    oof = runs.read_oof(folder)
    found = report.groupby("prediction_id")["score"].first()[oof["patient_id"] + "_" + oof["laterality"]]
    np.testing.assert_allclose(found.to_numpy(), oof["score"], atol=1e-5)
    assert len(oof) > 10 and np.ptp(oof["score"]) > 1e-3  # a hundred times what they may be off


def test_lists_of_a_run_and_tuples_of_a_notebook_are_the_same(tmp_path):
    config = dataclasses.replace(MODEL, aux=("view", "density"), stem_stride=(2,), drop_weights=("head.",))
    run = make_run(tmp_path, config=config)
    given = {"aux": ("view", "density"), "stem_stride": (2,), "views": "none", "grad_checkpointing": True}
    infer.refuse_other_settings(run, {**given, "drop_weights": (), "aux_weight": 0.3})
    with pytest.raises(runs.RunError, match=r"stem_stride=\[1\] \(trained with \[2\]\)"):
        infer.refuse_other_settings(run, {**given, "stem_stride": (1,)})


# --- flips


def test_flips_are_shown_to_all_folds_and_their_probabilities_averaged(competition, run):
    table = data.load_table(competition, "test")
    report = infer.predict(competition, run, InferConfig(tta="all", infer_batch_size=5), RUN)
    nets = [
        models.load_weights(models.build_model(MODEL), run / f"fold{fold}" / "best.safetensors").eval()
        for fold in (0, 1)
    ]
    assert (report["status"] == "ok").all() and (report["reason"] == "").all()
    for row in (0, 6, len(table) - 1):
        image = torch.from_numpy(preprocess.load_image(table["path"][row], SMALL).astype(np.float32) / 4095)[None, None]
        shown = [image, torch.flip(image, [3]), torch.flip(image, [2]), torch.flip(image, [2, 3])]
        with torch.no_grad():
            each = [net(view)["cancer"].sigmoid().item() for net in nets for view in shown]
        assert report["score"][row] == pytest.approx(np.mean(each), abs=1e-5)
        assert np.ptp(each) > 1e-3  # flips do change something


def test_a_breast_is_classified_for_each_fold_and_flip(competition, breast_run):
    table = data.load_table(competition, "test")
    report = infer.predict(competition, breast_run, InferConfig(tta="hflip"), RUN)
    passes = [Pass(fold, flips) for fold in (0, 1) for flips in ((), (3,))]
    for _, rows in table.groupby("breast_id"):
        np.testing.assert_allclose(report.loc[rows.index, "score"], by_hand(breast_run, rows, passes), atol=1e-5)


# --- what a score is of


def test_a_breasts_score_is_counted_once_by_whoever_writes_the_submission(competition, breast_run, run, tmp_path):
    """noisy_or over the images of a breast would make more of its one score with each of them."""
    for folder, of in ((breast_run, "breast"), (run, "image")):
        report = infer.predict(competition, folder, InferConfig(), RUN)
        assert (report["score_of"] == of).all()
        report.to_csv(tmp_path / "report.csv", index=False)
        back = pd.read_csv(tmp_path / "report.csv", dtype={"patient_id": str, "image_id": str, "prediction_id": str})
        for how in metrics.HOWS:
            breasts = calling.to_breasts(report, folder, how)
            by_hand = [infer.write_submission(each, tmp_path / "s.csv", None, how) for each in (report, back)]
            assert by_hand[0]["cancer"].tolist() == by_hand[1]["cancer"].tolist() == breasts["score"].tolist()
            if of == "breast":
                assert (
                    breasts["score"].tolist() == report.groupby("prediction_id", sort=False)["score"].first().tolist()
                )


def test_scores_of_two_kinds_or_of_a_breast_twice_are_refused(tmp_path):
    report = pd.DataFrame({"prediction_id": "5_L", "patient_id": "5", "laterality": "L", "image_id": ["a", "b"]})
    report = report.assign(score=[0.25, 0.5], score_of="breast")
    with pytest.raises(ValueError, match="breast 5_L has several scores"):
        infer.write_submission(report, tmp_path / "s.csv", None)
    with pytest.raises(ValueError, match="score_of is 'image', 'breast'; expected one of image, breast in all rows"):
        infer.write_submission(report.assign(score_of=["image", "breast"]), tmp_path / "s.csv", None)


# --- going on after a kill


@pytest.fixture
def reads(tmp_path, monkeypatch):
    """Names of the files that were read since it was last asked, in whatever process."""
    log, read = tmp_path / "reads", infer.load_image

    def load_image(path, config):
        with open(log, "a") as file:
            file.write(f"{Path(path).stem}\n")
        return read(path, config)

    def since() -> list[str]:
        names = log.read_text().split() if log.exists() else []
        log.unlink(missing_ok=True)
        return names

    monkeypatch.setattr(infer, "load_image", load_image)
    return since


@pytest.mark.parametrize("kind", ["images", "breasts"])
def test_what_was_scored_is_not_read_again(competition, run, breast_run, tmp_path, reads, capsys, monkeypatch, kind):
    """Stopped by an error after some batches, then again; the report is that of an unbroken run."""
    folder, config = run if kind == "images" else breast_run, InferConfig(tta="hflip", infer_batch_size=3)
    whole = infer.predict(competition, folder, config, RUN)
    assert sorted(reads()) == sorted(whole["image_id"])
    told, count = Clock.told, itertools.count(1)

    def fail(self, *arguments) -> None:
        told(self, *arguments)
        if next(count) == 3:
            raise ZeroDivisionError

    monkeypatch.setattr(Clock, "told", fail)
    with pytest.raises(ZeroDivisionError):
        infer.predict(competition, folder, config, RUN, tmp_path / "scores")
    reads()
    monkeypatch.setattr(Clock, "told", told)
    capsys.readouterr()
    report = infer.predict(competition, folder, config, RUN, tmp_path / "scores")
    assert len(reads()) == len(whole) - 6  # two batches had been kept
    assert f"6 of {len(whole)} images were scored before, {len(whole) - 6} are left" in capsys.readouterr().out
    pd.testing.assert_frame_equal(report.drop(columns="seconds"), whole.drop(columns="seconds"), rtol=1e-6)
    again = infer.predict(competition, folder, config, RUN, tmp_path / "scores")
    assert reads() == []
    pd.testing.assert_frame_equal(again.drop(columns="seconds"), report.drop(columns="seconds"), check_exact=True)


def test_files_that_failed_or_were_changed_are_read_again(competition, run, tmp_path, reads):
    root = hurt(competition, tmp_path)
    first = infer.predict(root, run, InferConfig(), RUN, tmp_path / "scores")
    reads()
    table = data.load_table(root, "test")
    shutil.copy(competition / "test_images" / table["patient_id"][0] / table["path"][0].name, table["path"][0])
    shutil.copy(table["path"][6], table["path"][7])
    second = infer.predict(root, run, InferConfig(), RUN, tmp_path / "scores")
    assert sorted(reads()) == sorted(table["image_id"][[0, 1, 2, 3, 7]])  # the blank one is as it was
    assert second["status"].tolist()[:6] == ["ok", "failed", "failed", "failed", "ok", "blank"]
    assert second["reason"][5] == first["reason"][5] != ""
    assert second["score"][7] == pytest.approx(second["score"][6])


def test_other_weights_flips_or_code_begin_anew_and_delete_nothing(competition, tmp_path, reads, capsys, monkeypatch):
    run, scores = make_run(tmp_path), tmp_path / "scores"
    infer.predict(competition, run, InferConfig(), RUN, scores)
    n = len(reads())
    infer.predict(competition, run, InferConfig(infer_batch_size=2, aggregate="max"), RUN, scores)
    assert reads() == [] and "beside them" not in capsys.readouterr().out
    infer.predict(competition, run, InferConfig(tta="vflip"), RUN, scores)
    assert len(reads()) == n and "beside them are those of other weights, flips" in capsys.readouterr().out
    infer.predict(competition, run, InferConfig(), dataclasses.replace(RUN, precision="bf16"), scores)
    assert len(reads()) == n  # who asks for a precision wants to see what it does
    infer.predict(competition, run, InferConfig(), RUN, scores)
    assert reads() == []
    weights = make_run(tmp_path / "other") / "fold1" / "best.safetensors"
    model = models.load_weights(models.build_model(MODEL), weights)
    torch.nn.init.constant_(model.head.bias, 0.5)
    models.save_weights(model, run / "fold1" / "best.safetensors")
    infer.predict(competition, run, InferConfig(tta="vflip"), RUN, scores)
    assert len(reads()) == n
    other = tmp_path / "code" / "rsnakit"
    shutil.copytree(Path(infer.rsnakit.__file__).parent, other)
    monkeypatch.setattr(infer.rsnakit, "__file__", str(other / "__init__.py"))
    infer.predict(competition, run, InferConfig(tta="vflip"), RUN, scores)
    assert reads() == []  # the same code, elsewhere
    (other / "crop.py").write_text((other / "crop.py").read_text() + "MARGIN = 7\n")
    infer.predict(competition, run, InferConfig(tta="vflip"), RUN, scores)
    assert len(reads()) == n and len(list(scores.iterdir())) == 5


def test_scores_that_another_process_writes_are_refused(competition, run, tmp_path):
    infer.predict(competition, run, InferConfig(), RUN, tmp_path / "scores")
    (folder,) = (tmp_path / "scores").iterdir()
    with Lock(folder, "inference"), pytest.raises(LockedError, match="inference: process"):
        infer.predict(competition, run, InferConfig(), RUN, tmp_path / "scores")


def test_a_full_disk_costs_no_score(competition, run, report, tmp_path, monkeypatch, capsys):  # C01, K08
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ledger, "_write", full)
    found = infer.predict(competition, run, InferConfig(infer_batch_size=2), RUN, tmp_path / "scores")
    np.testing.assert_allclose(found["score"], report["score"], atol=1e-6)
    assert capsys.readouterr().out.count("No space left on device") == 1


DYING = """
import os, signal, sys
from pathlib import Path
from rsnakit import infer, ledger
from rsnakit.env import RunConfig
from rsnakit.infer import InferConfig
competition, run, folder, left = *map(Path, sys.argv[1:4]), int(sys.argv[4])
write = ledger._write
def dying(file, data):
    global left
    write(file, data[:left])
    left -= len(data)
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
ledger._write = dying
read = infer.load_image
def load_image(path, config):
    with open(folder.parent / "reads", "a") as file:
        file.write(f"{Path(path).stem}\\n")
    return read(path, config)
infer.load_image = load_image
infer.predict(competition, run, InferConfig(infer_batch_size=2), RunConfig(device="cpu", n_jobs=2), folder)
"""


@pytest.mark.slow
def test_killed_at_any_byte_of_what_it_keeps(competition, breast_run, tmp_path, reads):  # C01, K08
    """Each time it dies so many bytes further on, within a record or a line; no image that was kept is read twice."""
    whole = infer.predict(competition, breast_run, InferConfig(infer_batch_size=2), RUN)
    reads()
    (tmp_path / "killed").mkdir()
    scores, read = tmp_path / "killed" / "scores", tmp_path / "killed" / "reads"
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    before = set()
    for left in (1_000, 4_321, 5_102):
        command = [sys.executable, "-c", DYING, str(competition), str(breast_run), str(scores), str(left)]
        died = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
        assert died.returncode == -signal.SIGKILL, died.stderr
        assert before.isdisjoint(read.read_text().split())
        read.unlink()
        (kept,) = scores.glob("*/scores.csv")
        lines = kept.read_text().split("\n")[1:-1]  # the last one is torn, or empty
        before = {line.split(",")[1] for line in lines}
    assert 2 <= len(before) < len(whole)
    report = infer.predict(competition, breast_run, InferConfig(infer_batch_size=2), RUN, scores)
    assert sorted(reads()) == sorted(set(whole["image_id"]) - before)
    pd.testing.assert_frame_equal(report.drop(columns="seconds"), whole.drop(columns="seconds"), rtol=1e-6)


# --- the clock, and being stopped


class Slow(Clock):
    """A clock of a machine on which every pass over an image takes a second of simulated time, on one device."""

    def __init__(self, until, *arguments, **more):
        self.second = 0.0
        super().__init__(until, *arguments, n_processes=1, now=lambda: self.second)

    def told(self, images, passes, model_s, decode_s):
        self.second += images * passes
        super().told(images, passes, images * passes, 0.0)


def slow(monkeypatch, seconds: float) -> list[Slow]:
    """Lets `predict` have so many simulated seconds, on one thread, batch by batch. Gives the clocks that it makes."""
    made = []

    def clock(until, steps, n_images, *_):
        made.append(Slow(seconds, steps, n_images))
        return made[-1]

    monkeypatch.setattr(infer, "_clock", clock)
    monkeypatch.setattr(infer.env, "cores", lambda: 1)
    monkeypatch.setattr(budget, "deadline", lambda max_hours: (time.monotonic() + seconds, "0.1 h for inference"))
    return made


@pytest.fixture(scope="module")
def many(competition, tmp_path_factory) -> Path:
    """A test set of 120 images in breasts of three: the same few files under other names."""
    root = tmp_path_factory.mktemp("many")
    table, rows = pd.read_csv(competition / "test.csv", dtype=str), []
    for number in range(120):
        row, patient = table.iloc[number % len(table)], str(100 + number // 6)
        side = "LR"[number // 3 % 2]
        folder = root / "test_images" / patient
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.dcm").symlink_to(
            competition / "test_images" / row["patient_id"] / f"{row['image_id']}.dcm"
        )
        ids = {"patient_id": patient, "image_id": str(number), "laterality": side, "prediction_id": f"{patient}_{side}"}
        rows.append({**row, **ids})
    pd.DataFrame(rows).to_csv(root / "test.csv", index=False)
    return root


@pytest.mark.parametrize("kind", ["images", "breasts"])
def test_passes_are_dropped_where_they_would_not_fit_and_the_report_says_so(
    many, run, breast_run, tmp_path, monkeypatch, capsys, kind
):
    """Two folds on two flips are four seconds an image; 340 are left of the time, a little less than three each."""
    folder, config = run if kind == "images" else breast_run, InferConfig(tta="hflip", infer_batch_size=4)
    table, records = data.load_table(many, "test"), {}
    put = scored.Scored.put
    monkeypatch.setattr(
        scored.Scored, "put", lambda self, record: (records.update({record.row: record}), put(self, record))
    )
    clocks = slow(monkeypatch, 380.0)
    report = infer.predict(many, folder, config, RUN, tmp_path / "scores")
    assert clocks[0].second < 380 and (report["status"] == "ok").all()
    assert "NOTE: after " in (said := capsys.readouterr().out) and " passes over each instead of 4, since the" in said
    passes, masks = levels([0, 1], "hflip")[0], [records[row].used for row in range(len(table))]
    assert {4, 2} <= {mask.bit_count() for mask in masks}
    for key, rows in table.groupby("breast_id" if kind == "breasts" else "image_id"):
        mask = np.bitwise_and.reduce([masks[row] for row in rows.index])
        used = [each for number, each in enumerate(passes) if mask >> number & 1]
        what = "its breast was scored" if kind == "breasts" else "scored"
        expected = "" if len(used) == 4 else f"{what} by {len(used)} of 4 passes, for want of time"
        assert (report.loc[rows.index, "reason"] == expected).all(), key
        if kind == "breasts" and (key.startswith("100") or len({masks[row] for row in rows.index}) > 1):
            np.testing.assert_allclose(report.loc[rows.index, "score"], by_hand(breast_run, rows, used), atol=1e-5)
    poor = sum(mask.bit_count() < 4 for mask in masks)
    clocks = slow(monkeypatch, 25.0)  # too little for one batch; what there is stays as it is
    again = infer.predict(many, folder, config, RUN, tmp_path / "scores")
    assert f"120 images were scored before, 0 are left; {poor} that were by fewer passes are scored again" in (
        capsys.readouterr().out
    )
    assert all((again["reason"] == "") | (again["reason"] >= report["reason"]))  # "by 3 of 4" comes after "by 2 of 4"
    clocks = slow(monkeypatch, 3000.0)
    again = infer.predict(many, folder, config, RUN, tmp_path / "scores")
    assert clocks[1].done <= poor and (again["reason"] == "").all()
    whole = infer.predict(many, folder, config, RUN)
    pd.testing.assert_frame_equal(again.drop(columns="seconds"), whole.drop(columns="seconds"), rtol=1e-5)
    infer.write_submission(report, tmp_path / "s.csv", None)
    infer.check_submission(tmp_path / "s.csv", many / "test.csv")


@pytest.mark.parametrize("kind", ["images", "breasts"])
def test_images_that_are_not_reached_get_the_prior_in_time(many, run, breast_run, tmp_path, monkeypatch, capsys, kind):
    folder = run if kind == "images" else breast_run
    clocks = slow(monkeypatch, 80.0)
    report = infer.predict(many, folder, InferConfig(infer_batch_size=4), RUN)
    skipped = report["status"] == "skipped"
    assert clocks[0].second <= 80 and 40 <= skipped.sum() < 110 and (report["status"][~skipped] == "ok").all()
    assert (report.loc[skipped, "reason"] == "no time was left of 0.1 h for inference").all()
    assert f"NOTE: {skipped.sum()} of 120 images were not scored: no time was left" in capsys.readouterr().out
    reached = report["prediction_id"].isin(report.loc[~skipped, "prediction_id"])
    prior = skipped if kind == "images" else ~reached
    assert (report.loc[prior, "score"] == PRIOR).all() and (report.loc[~prior, "score"] != PRIOR).all()
    infer.write_submission(report, tmp_path / "s.csv", None)
    infer.check_submission(tmp_path / "s.csv", many / "test.csv")


def test_with_no_time_at_all_there_is_a_valid_submission(competition, run, tmp_path, reads):
    report = infer.predict(competition, run, InferConfig(), dataclasses.replace(RUN, max_hours=1e-9))
    assert reads() == [] and (report["score"] == PRIOR).all() and (report["status"] == "skipped").all()
    infer.write_submission(report, tmp_path / "s.csv", None)
    infer.check_submission(tmp_path / "s.csv", competition / "test.csv")


def sends(monkeypatch, number: int, after: int = 2) -> None:
    """Lets this process get a signal once so many batches are done."""
    told, count = Clock.told, itertools.count(1)

    def told_and_sent(self, *arguments) -> None:
        told(self, *arguments)
        if next(count) == after:
            os.kill(os.getpid(), number)
            time.sleep(0)

    monkeypatch.setattr(Clock, "told", told_and_sent)


def test_ctrl_c_ends_it_and_what_is_there_is_kept(competition, run, tmp_path, monkeypatch, reads, capsys):
    """No report: the cells that follow would make a submission of priors."""
    sends(monkeypatch, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        infer.predict(competition, run, InferConfig(infer_batch_size=2), RUN, tmp_path / "scores")
    assert "were not scored: stopped by Ctrl-C; the others are kept" in capsys.readouterr().out
    monkeypatch.undo()
    (folder,) = (tmp_path / "scores").iterdir()
    lines = (folder / "scores.csv").read_text().count("\n") - 1
    assert 4 <= lines < 16 and sorted(path.name for path in folder.iterdir()) == ["key.json", "scores.csv"]


def test_sigterm_is_sent_again_once_all_is_kept(competition, run, tmp_path, monkeypatch):
    heard = []
    before = signal.signal(
        signal.SIGTERM, lambda number, _: heard.append(any((tmp_path / "scores").glob("*/lock.json")))
    )
    try:
        sends(monkeypatch, signal.SIGTERM)
        report = infer.predict(competition, run, InferConfig(infer_batch_size=2), RUN, tmp_path / "scores")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [False]  # once, and the folder was given back by then
    stopped = report["status"] == "skipped"
    assert 0 < stopped.sum() < len(report) and (report.loc[stopped, "reason"] == "stopped by SIGTERM").all()


# --- while Kaggle scores a submission


def test_debug_is_refused_while_kaggle_scores(competition, run, monkeypatch):
    monkeypatch.setenv("KAGGLE_IS_COMPETITION_RERUN", "1")
    with pytest.raises(ValueError, match=r"debug=True .* would be worthless: set debug to False"):
        infer.predict(competition, run, InferConfig(), dataclasses.replace(RUN, debug=True))


@pytest.mark.parametrize("kind", ["images", "breasts"])
def test_an_error_of_the_models_ends_no_submission_that_is_scored(
    competition, run, breast_run, tmp_path, monkeypatch, capfd, kind
):
    folder, told, count = run if kind == "images" else breast_run, Clock.told, itertools.count(1)

    def fail(self, *arguments) -> None:
        told(self, *arguments)
        if next(count) >= 3:
            raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(Clock, "told", fail)
    with pytest.raises(RuntimeError, match="illegal memory"):  # anywhere else it has to be seen
        infer.predict(competition, folder, InferConfig(infer_batch_size=2), RUN)
    count = itertools.count(1)
    monkeypatch.setenv("KAGGLE_IS_COMPETITION_RERUN", "1")
    report = infer.predict(competition, folder, InferConfig(infer_batch_size=2), RUN)
    assert (report["status"] == "ok").sum() == 4
    lost = report.loc[report["status"] == "skipped"]
    assert lost["reason"].unique() == [
        "inference ended with an error: RuntimeError: CUDA error: an illegal memory access"
    ]
    captured = capfd.readouterr()
    assert "Traceback" in captured.err and "NOTE: " in captured.out
    infer.write_submission(report, tmp_path / "s.csv", None)
    infer.check_submission(tmp_path / "s.csv", competition / "test.csv")


@pytest.mark.parametrize("kind", ["images", "breasts"])
def test_an_error_that_is_over_costs_what_was_at_hand(competition, run, breast_run, tmp_path, monkeypatch, kind):
    """Of whatever it is of: here, of taking note of a batch."""
    folder, told, count = run if kind == "images" else breast_run, Clock.told, itertools.count(1)
    whole = infer.predict(competition, folder, InferConfig(infer_batch_size=2), RUN)

    def fail(self, *arguments) -> None:
        if next(count) in (2, 5):
            raise MemoryError
        told(self, *arguments)

    monkeypatch.setattr(Clock, "told", fail)
    monkeypatch.setenv("KAGGLE_IS_COMPETITION_RERUN", "1")
    report = infer.predict(competition, folder, InferConfig(infer_batch_size=2), RUN, tmp_path / "scores")
    pd.testing.assert_frame_equal(report.drop(columns="seconds"), whole.drop(columns="seconds"), rtol=1e-5)


@pytest.fixture
def poison(competition, monkeypatch):
    """Two images over which models fail; also a function that lets one of two threads fail always."""
    table, score, bad = data.load_table(competition, "test"), ensemble.Replica.score, []
    images = [preprocess.load_image(table["path"][row], SMALL) for row in (1, 6)]

    def fail(self, images_, passes):
        if one_thread[0] and (not bad or threading.get_ident() in bad):
            bad.append(threading.get_ident())
            raise RuntimeError("CUDA error: unspecified launch failure")
        if any((image == each).all() for image in images_[:, 0] for each in images):
            raise ValueError("poison")
        return score(self, images_, passes)

    one_thread = [False]
    monkeypatch.setattr(ensemble.Replica, "score", fail)
    return table, lambda: one_thread.__setitem__(0, True)


@pytest.mark.parametrize("rerun", [False, True])
@pytest.mark.parametrize("kind", ["images", "breasts"])
def test_what_models_fail_over_costs_itself(competition, run, breast_run, tmp_path, monkeypatch, poison, kind, rerun):
    """On two devices, of which one fails from its first batch on; the images are tried again by the next call."""
    folder = run if kind == "images" else breast_run
    table, fail_in_one_thread = poison
    fail_in_one_thread()
    monkeypatch.setattr(infer, "devices_of", lambda wanted: ["cpu", "cpu"])
    if rerun:
        monkeypatch.setenv("KAGGLE_IS_COMPETITION_RERUN", "1")
    report = infer.predict(competition, folder, InferConfig(infer_batch_size=4), RUN, tmp_path / "scores")
    bad = report["status"] != "ok"
    assert bad.to_numpy().nonzero()[0].tolist() == [1, 6]
    assert (report.loc[bad, "status"] == "failed").all()
    assert (report.loc[bad, "reason"] == "the model failed: ValueError: poison").all()
    if kind == "breasts":
        for _, rows in table.groupby("breast_id"):
            expected = by_hand(breast_run, rows[~bad[rows.index]])
            np.testing.assert_allclose(report.loc[rows.index, "score"], expected, atol=1e-5)
    monkeypatch.undo()
    again = infer.predict(competition, folder, InferConfig(infer_batch_size=4), RUN, tmp_path / "scores")
    whole = infer.predict(competition, folder, InferConfig(infer_batch_size=4), RUN)
    pd.testing.assert_frame_equal(again.drop(columns="seconds"), whole.drop(columns="seconds"), rtol=1e-5)


def test_an_error_of_the_code_is_no_failed_image(competition, run, monkeypatch):
    """Models that fail over all there is: a report of failed rows would look like a bad test set."""
    score = ensemble.Replica.score

    def fail(self, images, passes):
        return score(self, images, passes) if not images.any() else len(None)

    monkeypatch.setattr(ensemble.Replica, "score", fail)
    with pytest.raises(TypeError, match="NoneType"):
        infer.predict(competition, run, InferConfig(infer_batch_size=2), RUN)
    monkeypatch.setenv("KAGGLE_IS_COMPETITION_RERUN", "1")
    report = infer.predict(competition, run, InferConfig(infer_batch_size=2), RUN)
    assert (report["status"] == "failed").all() and (report["score"] == PRIOR).all()


def test_breasts_that_cannot_be_classified_have_the_prior(competition, breast_run, monkeypatch, capfd):
    """One breast by one of the folds, and another by both."""
    table, features_of = data.load_table(competition, "test"), {}
    one, both = (table[table["breast_id"] == name] for name in table["breast_id"].unique()[[0, 2]])
    whole = infer.predict(competition, breast_run, InferConfig(), RUN)
    put, classify = scored.Scored.put, models.CancerNet.classify

    def put_and_note(self, record):
        features_of[record.row] = torch.from_numpy(record.features)  # (folds, C)
        put(self, record)

    def fail(self, features, *views):
        bad = features_of[one.index[0]][:1], features_of[both.index[0]]
        if any(torch.equal(breast, each) for breast in features[:, 0] for each in torch.cat(bad)):
            raise RuntimeError("classify broke")
        return classify(self, features, *views)

    monkeypatch.setattr(scored.Scored, "put", put_and_note)
    monkeypatch.setattr(models.CancerNet, "classify", fail)
    with pytest.raises(RuntimeError, match="classify broke"):
        infer.predict(competition, breast_run, InferConfig(), RUN)
    monkeypatch.setenv("KAGGLE_IS_COMPETITION_RERUN", "1")
    report = infer.predict(competition, breast_run, InferConfig(), RUN)
    captured = capfd.readouterr()
    assert "classify broke" in captured.err and "NOTE: breasts are classified again, on the CPU" in captured.out
    assert (report.loc[both.index, "score"] == PRIOR).all() and (report.loc[both.index, "status"] == "failed").all()
    assert report.loc[both.index, "reason"].str.startswith("the model failed over its breast").all()
    np.testing.assert_allclose(report.loc[one.index, "score"], by_hand(breast_run, one, [Pass(1)]), atol=1e-5)
    others = report.index.difference([*one.index, *both.index])
    np.testing.assert_allclose(report.loc[others, "score"], whole.loc[others, "score"], atol=1e-5)


@pytest.mark.parametrize("kind", ["images", "breasts"])
def test_what_cannot_be_had_is_left_out_where_kaggle_scores(competition, tmp_path, monkeypatch, capsys, kind):
    """A fold whose weights are cut short, and a GPU that has no room for the models."""
    run = make_run(tmp_path, folds=3, config=MODEL if kind == "images" else BREASTS)
    whole = infer.predict(
        competition, make_run(tmp_path / "two", config=MODEL if kind == "images" else BREASTS), InferConfig(), RUN
    )
    os.truncate(run / "fold2" / "best.safetensors", 1000)
    to = torch.nn.Module.to

    def no_room(net, device="cpu", **options):
        if device == "cuda:0":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return to(net, device, **options)

    monkeypatch.setattr(torch.nn.Module, "to", no_room)
    monkeypatch.setattr(infer, "devices_of", lambda wanted: ["cuda:0"])
    monkeypatch.setattr(infer.env, "choose_precision", lambda device, wanted: infer.env.Choice("fp16", ""))
    with pytest.raises(models.WeightsError, match="fold2"):
        infer.predict(competition, run, InferConfig(), RUN)
    monkeypatch.setenv("KAGGLE_IS_COMPETITION_RERUN", "1")
    report = infer.predict(competition, run, InferConfig(), RUN, tmp_path / "scores")
    said = capsys.readouterr().out
    assert "NOTE: fold 2 cannot be read" in said and "NOTE: the models cannot be brought to cuda:0" in said
    pd.testing.assert_frame_equal(report.drop(columns="seconds"), whole.drop(columns="seconds"), rtol=1e-5)
    calling.check_threshold(InferConfig(), run)  # that of all the folds that were bundled


def test_one_fold_that_gives_nan_leaves_the_score_to_the_others(tmp_path, competition, run, report):
    bad = make_run(tmp_path, folds=2)
    model = models.load_weights(models.build_model(MODEL), bad / "fold1" / "best.safetensors")
    torch.nn.init.constant_(model.head.bias, float("nan"))
    models.save_weights(model, bad / "fold1" / "best.safetensors")
    found = infer.predict(competition, bad, InferConfig(), RUN)
    assert (found["status"] == "ok").all()
    assert (found["reason"] == "scored by 1 of 2 passes, the others gave nothing finite").all()
    alone = infer.predict(competition, make_run(tmp_path / "one", folds=1), InferConfig(), RUN)
    np.testing.assert_allclose(found["score"], alone["score"], atol=1e-6)


def test_a_missing_decoder_stops_the_work_before_it_begins(competition, run, monkeypatch):  # D16
    """But not while Kaggle scores a submission, where the other images are worth having."""
    reason = "no decoder for JPEG 2000 is installed: pip install imagecodecs"
    monkeypatch.setattr(headers.dicom, "missing_decoder", lambda uid: reason if uid.endswith(".4.90") else None)
    reads = []
    monkeypatch.setattr(infer, "in_batches", lambda paths, *_: reads.extend(paths) or iter(()))
    with pytest.raises(DicomError, match=r"decoders are missing.*\n.* images: no decoder .*pip install imagecodecs"):
        infer.predict(competition, run, InferConfig(), RUN)
    assert not reads
    monkeypatch.setenv("KAGGLE_IS_COMPETITION_RERUN", "1")
    infer.predict(competition, run, InferConfig(), RUN)
    assert len(reads) == len(data.load_table(competition, "test"))
