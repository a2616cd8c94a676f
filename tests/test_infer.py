"""From a run and a competition to a submission that has every row, whatever the images are."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from rsnakit import calling, data, engine, infer, models, preprocess, runs, scored
from rsnakit.engine import TrainConfig
from rsnakit.env import RunConfig
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


def by_hand(run: Path, table: pd.DataFrame, folds=(0, 1)) -> float:
    """The score of one breast's images: each fold's model sees them all at once, padded with nothing."""
    images = np.stack([preprocess.load_image(path, SMALL) for path in table["path"]]).astype(np.float32) / 4095
    kinds = torch.tensor([[0 if "CC" in view else 1 for view in table["view"]]])
    scores = []
    for fold in folds:
        model = models.load_weights(models.build_model(BREASTS), run / f"fold{fold}" / "best.safetensors").eval()
        with torch.no_grad():
            logit = model(torch.from_numpy(images)[None, :, None], view_id=kinds)["cancer"]
        scores.append(logit.sigmoid().item())
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
