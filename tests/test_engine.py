"""Training a fold: what it writes, how it goes on, what it refuses."""

import dataclasses
import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from rsnakit import data, engine, metrics, models, results, runs, trainer
from rsnakit.engine import LoopConfig, TrainConfig
from rsnakit.env import RunConfig
from rsnakit.files import Lock, LockedError
from rsnakit.models import ModelConfig
from rsnakit.preprocess import PreprocessConfig
from rsnakit.samplers import BalancedSampler
from rsnakit.stopping import Stop

MODEL = ModelConfig(backbone="test_resnet", weights="none", pooling="avg", dropout=0.3)
TRAIN = TrainConfig(n_folds=2, epochs=3, batch_size=8, lr=3e-3, negatives_per_positive=2.0)
RUN = RunConfig(device="cpu", fold="0", num_workers=0)


def begin(tmp_path, store, table, train=TRAIN, name="", model=MODEL) -> Path:
    pixels = PreprocessConfig(**store.manifest["preprocess"])
    settings = runs.settings_of(pixels, model, train, data.fingerprint(table), is_demo=True, debug=False)
    return runs.open_run(tmp_path, name, settings)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return models.read_weights(folder / "fold0" / "best.safetensors")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, store, table) -> Path:
    """A run of one fold, three epochs, trained without a break."""
    folder = begin(tmp_path_factory.mktemp("work"), store, table)
    engine.fit_folds(table, store, MODEL, TRAIN, RUN, folder)
    return folder


def test_what_a_fold_leaves(finished, store, table):
    fold = finished / "fold0"
    names = {"best.safetensors", "model.json", "oof.csv", "history.csv", "last.pt"}
    assert names <= {path.name for path in fold.iterdir()}
    assert any(path.name.startswith("events.") for path in fold.iterdir())
    assert not (fold / "lock.json").exists()
    described = json.loads((fold / "model.json").read_text())
    assert described["preprocess"] == store.manifest["preprocess"]
    assert runs.rebuild(ModelConfig, described["model"], fold) == MODEL
    history = pd.read_csv(fold / "history.csv")
    assert history["epoch"].tolist() == [1, 2, 3]
    assert history["train_resampled"].all()


def tensorboard_points(fold: Path, name: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    points = EventAccumulator(str(fold)).Reload().Scalars(name)
    assert len({point.step for point in points}) == len(points)  # no step twice
    return {point.step: point.value for point in points}


def test_tensorboard_shows_the_history(finished):
    history = pd.read_csv(finished / "fold0" / "history.csv").set_index("epoch")
    for column, name in (("valid_auc", "valid/auc"), ("train_loss", "train/loss"), ("lr", "lr")):
        assert tensorboard_points(finished / "fold0", name) == pytest.approx(history[column].to_dict(), rel=1e-6)


def test_out_of_fold_scores_are_those_of_the_kept_weights(finished, store, table):
    oof = pd.read_csv(finished / "fold0" / "oof.csv", dtype={"patient_id": str, "image_id": str})
    folds = data.make_folds(table, TRAIN.n_folds, TRAIN.seed)
    assert set(oof["image_id"]) == set(table.loc[folds == 0, "image_id"])
    assert list(oof.columns) == ["patient_id", "laterality", "image_id", "fold", "cancer", "score"]

    model = models.load_weights(models.build_model(MODEL), finished / "fold0" / "best.safetensors").eval()
    rows = oof[oof["image_id"].isin(store.index.loc[store.index["status"] == "ok", "image_id"])]
    images = np.stack([store[row] for row in store.rows_of(rows["image_id"])]).astype(np.float32) / 4095
    with torch.no_grad():
        scores = model(torch.from_numpy(images)[:, None])["cancer"].sigmoid().numpy()
    np.testing.assert_allclose(rows["score"], scores, atol=1e-5)


def test_an_image_without_pixels_gets_the_prior_and_is_not_trained_on(finished, store, table):
    blank = store.index.loc[store.index["status"] != "ok", "image_id"].tolist()
    assert blank, "the demo has an all-zero image"
    folds = data.make_folds(table, TRAIN.n_folds, TRAIN.seed)
    # Folds are named so that the blank image is in the fold that is scored.
    fold = int(folds[table["image_id"] == blank[0]].iloc[0])
    usable, without = data.usable(table[folds == fold], store)
    assert blank[0] in without["image_id"].tolist() and blank[0] not in usable["image_id"].tolist()
    from rsnakit.history import oof_rows

    rows = oof_rows(usable, without, np.arange(len(usable)), np.full(len(usable), 0.5), fold, prior=0.125)
    assert rows.loc[rows["image_id"] == blank[0], "score"].tolist() == [0.125]
    assert len(rows) == (folds == fold).sum()


def test_history_scores_are_per_breast(finished):
    oof = pd.read_csv(finished / "fold0" / "oof.csv", dtype={"patient_id": str})
    last = pd.read_csv(finished / "fold0" / "history.csv").iloc[-1]
    breasts = oof.groupby(["patient_id", "laterality"]).agg(cancer=("cancer", "first"), score=("score", "mean"))
    from sklearn.metrics import average_precision_score, roc_auc_score

    assert last["valid_auc"] == pytest.approx(roc_auc_score(breasts["cancer"], breasts["score"]))
    assert last["valid_ap"] == pytest.approx(average_precision_score(breasts["cancer"], breasts["score"]))
    positive = breasts["cancer"] == 1
    closed_form = 2 * breasts.loc[positive, "score"].sum() / (positive.sum() + breasts["score"].sum())
    assert last["valid_pf1"] == pytest.approx(closed_form)


def test_summary_has_the_threshold_of_the_out_of_fold_scores(finished):
    summary = json.loads((finished / "summary.json").read_text())
    breasts = metrics.to_breast(runs.read_oof(finished))
    from sklearn.metrics import f1_score

    best = max(f1_score(breasts["cancer"], breasts["score"] >= t) for t in breasts["score"])
    assert f1_score(breasts["cancer"], breasts["score"] >= summary["threshold"]) == pytest.approx(best)
    assert summary["folds"] == [0] and summary["unfinished"] == {}
    table = results.summary_table(summary)
    assert (table["95 % from"] <= table["value"]).all() and (table["value"] <= table["to"]).all()


def test_a_finished_fold_is_left_as_it_is(finished, store, table, capsys):
    before = {path: path.stat().st_mtime_ns for path in (finished / "fold0").iterdir()}
    engine.fit_folds(table, store, MODEL, TRAIN, RUN, finished)
    assert {path: path.stat().st_mtime_ns for path in (finished / "fold0").iterdir()} == before
    assert "finished at epoch 3. To begin anew" in capsys.readouterr().out


def stopped_after(monkeypatch, steps: int) -> None:
    """Makes the clock run out after so many looks at it: one an optimiser step or batch of evaluation."""
    looks = iter(range(1_000_000))
    monkeypatch.setattr(Stop, "reason", property(lambda _: "max_hours" if next(looks) >= steps else ""))


def same_history(a: Path, b: Path) -> None:
    frames = [pd.read_csv(run / "fold0" / "history.csv").drop(columns="seconds") for run in (a, b)]
    pd.testing.assert_frame_equal(*frames, check_exact=True)


@pytest.mark.parametrize("steps", [2, 7, 8])  # in the first epoch's training, in its evaluation, in the second epoch
def test_a_run_stopped_by_the_clock_goes_on_to_the_same_weights(
    finished, store, table, tmp_path, capsys, steps
):  # C03, C04
    folder = begin(tmp_path, store, table)
    with pytest.MonkeyPatch.context() as patch:
        stopped_after(patch, steps)
        summary = engine.fit_folds(table, store, MODEL, TRAIN, RUN, folder)
    done = steps // 8  # an epoch is five steps and three batches to score
    assert f"stopped by max_hours, saved epoch {done} of 3 and" in capsys.readouterr().out
    assert summary.get("unfinished", {}) == ({"0": "epoch 1 of 3"} if done else {})
    engine.fit_folds(table, store, MODEL, TRAIN, RUN, folder)
    assert "going on after epoch" in capsys.readouterr().out
    for name, tensor in weights(finished).items():
        assert torch.equal(tensor, weights(folder)[name]), name
    assert (folder / "fold0" / "oof.csv").read_bytes() == (finished / "fold0" / "oof.csv").read_bytes()
    same_history(finished, folder)


def test_loader_processes_change_nothing(finished, store, table, tmp_path):  # A01, C04
    folder = begin(tmp_path, store, table)
    engine.fit_folds(table, store, MODEL, TRAIN, dataclasses.replace(RUN, num_workers=2), folder)
    for name, tensor in weights(finished).items():
        assert torch.equal(tensor, weights(folder)[name]), name


def test_more_epochs_go_on_along_the_new_schedule(finished, store, table, tmp_path):
    folder = begin(tmp_path, store, table, name="mine")
    engine.fit_folds(table, store, MODEL, TRAIN, RUN, folder)
    longer = dataclasses.replace(TRAIN, epochs=5)
    assert begin(tmp_path, store, table, longer, "mine") == folder
    engine.fit_folds(table, store, MODEL, longer, RUN, folder)
    history = pd.read_csv(folder / "fold0" / "history.csv")
    assert history["epoch"].tolist() == [1, 2, 3, 4, 5]
    # lr logged after an epoch is that of the step to come: of the schedule over five epochs from the third on
    steps = 5 * _steps_an_epoch(store, table)
    warmup = round(steps * TRAIN.warmup)
    along = (4 * steps // 5 - warmup) / (steps - warmup)
    low = TRAIN.lr * TRAIN.lr_end
    assert history["lr"].iloc[3] == pytest.approx(low + (TRAIN.lr - low) * (1 + math.cos(math.pi * along)) / 2)
    with pytest.raises(runs.RunError, match=r"train\.epochs: 5 before, 2 now"):
        begin(tmp_path, store, table, dataclasses.replace(TRAIN, epochs=2), "mine")


def _steps_an_epoch(store, table) -> int:
    folds = data.make_folds(table, TRAIN.n_folds, TRAIN.seed)
    usable, _ = data.usable(table[folds != 0], store)
    return len(BalancedSampler(usable["cancer"], TRAIN.negatives_per_positive, TRAIN.batch_size).steps)


def test_going_on_needs_no_weights_to_begin_from_and_says_which_they_were(finished, store, table, tmp_path):
    start = shutil.copy(finished / "fold0" / "best.safetensors", tmp_path / "start.safetensors")
    model, config = dataclasses.replace(MODEL, weights=str(start)), dataclasses.replace(TRAIN, epochs=1)
    folder = begin(tmp_path, store, table, config, "mine", model)
    engine.fit_folds(table, store, model, config, RUN, folder)
    os.remove(start)
    longer = dataclasses.replace(config, epochs=2)
    begin(tmp_path, store, table, longer, "mine", model)
    engine.fit_folds(table, store, model, longer, RUN, folder)
    described = runs.read_model(folder / "fold0")
    assert described["epoch"] == 2 and described["model"]["weights"] == str(start)


def test_the_best_epoch_is_kept_where_asked_for(store, table, tmp_path):
    config = dataclasses.replace(TRAIN, select="ap", lr=3e-2)  # so high that the scores jump about
    folder = begin(tmp_path, store, table, config)
    engine.fit_folds(table, store, MODEL, config, RUN, folder)
    history = pd.read_csv(folder / "fold0" / "history.csv")
    kept = json.loads((folder / "fold0" / "model.json").read_text())["epoch"]
    assert kept == history.loc[history["valid_ap"].idxmax(), "epoch"]


def test_a_changed_setting_starts_another_run_and_a_named_run_refuses_it(finished, store, table, tmp_path):
    other = dataclasses.replace(TRAIN, lr=1e-4)
    assert begin(finished.parents[1], store, table, other).name != finished.name
    begin(tmp_path, store, table, name="mine")
    with pytest.raises(runs.RunError, match=r"train\.lr: 0\.003 before, 0\.0001 now"):
        begin(tmp_path, store, table, other, "mine")
    with pytest.raises(runs.RunError, match=r"data: "):
        begin(tmp_path, store, table.iloc[1:], name="mine")


def test_settings_changed_under_an_open_run_are_refused(finished, store, table):
    other = dataclasses.replace(TRAIN, lr=0.5)
    with pytest.raises(
        runs.RunError, match=r"(?s)train\.lr: 0\.003 before, 0\.5 now.*Run the cell with open_run again"
    ):
        engine.fit_folds(table, store, MODEL, other, RUN, finished)
    with pytest.raises(runs.RunError, match=r"model\.dropout"):
        engine.fit_folds(table, store, dataclasses.replace(MODEL, dropout=0.1), TRAIN, RUN, finished)


def test_a_finished_fold_that_lost_a_file_is_said(finished, store, table, tmp_path):
    folder = tmp_path / "runs" / "copy"
    shutil.copytree(finished, folder)
    whole = (folder / "fold0" / "oof.csv").read_text()
    (folder / "fold0" / "oof.csv").write_text(whole[: len(whole) // 2])
    with pytest.raises(runs.RunError, match=r"oof\.csv: \d+ rows, \d+ were written\. Delete .*fold0"):
        engine.fit_folds(table, store, MODEL, TRAIN, RUN, folder)
    (folder / "fold0" / "best.safetensors").unlink()
    with pytest.raises(runs.RunError, match=r"fold0: at epoch 3, but without best\.safetensors\. Delete it"):
        engine.fit_folds(table, store, MODEL, TRAIN, RUN, folder)


def test_names_that_timm_does_not_have_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match="optimizer: timm has no 'adamww'; near it: adamw"):
        TrainConfig(optimizer="adamww")
    with pytest.raises(ValueError, match=r"no model 'resnet1'; near it: .*resnet18"):
        ModelConfig(backbone="resnet1")


def test_all_folds_one_after_another(store, table, tmp_path):
    config = dataclasses.replace(TRAIN, epochs=1)
    folder = begin(tmp_path, store, table, config)
    summary = engine.fit_folds(table, store, MODEL, config, dataclasses.replace(RUN, fold="all"), folder)
    assert summary["folds"] == [0, 1]
    oof = runs.read_oof(folder)
    assert sorted(oof["image_id"]) == sorted(table["image_id"])


def test_a_fold_that_is_not_there(finished, store, table):
    with pytest.raises(data.TableError, match="fold 2: with n_folds=2 there are folds 0 to 1"):
        engine.fit_folds(table, store, MODEL, TRAIN, dataclasses.replace(RUN, fold="2"), finished)


def test_a_patient_on_both_sides_stops_training(finished, store, table):  # V04
    folds = data.make_folds(table, TRAIN.n_folds, TRAIN.seed)
    folds.iloc[0] = 1 - folds.iloc[0]
    with pytest.raises(data.TableError, match=f"patient {table['patient_id'].iloc[0]} is in folds"):
        engine.fit(0, table, folds, store, MODEL, TRAIN, RUN, finished)


def test_a_second_writer_of_a_fold_is_refused(finished, store, table):
    folds = data.make_folds(table, TRAIN.n_folds, TRAIN.seed)
    with Lock(finished / "fold0", "test"), pytest.raises(LockedError, match="fold 0 of run"):
        engine.fit(0, table, folds, store, MODEL, TRAIN, RUN, finished)


def test_the_checkpoint_holds_plain_values_only(finished):
    state = torch.load(finished / "fold0" / "last.pt", weights_only=True)
    assert state["epoch"] == 3 and len(state["history"]) == 3


def test_a_checkpoint_of_another_run_or_fold_is_refused(finished, store, table, tmp_path):
    """Copied into the folder of another one, it would silently be gone on with."""
    other = dataclasses.replace(TRAIN, lr=1e-3)
    folder = begin(tmp_path, store, table, other)
    (folder / "fold0").mkdir()
    shutil.copy(finished / "fold0" / "last.pt", folder / "fold0")
    with pytest.raises(runs.RunError, match=r"another run, fold or set of images \(train\.lr: 0\.003, not 0\.001\)"):
        engine.fit_folds(table, store, MODEL, other, RUN, folder)
    folder = begin(tmp_path, store, table, TRAIN)
    shutil.copytree(finished / "fold0", folder / "fold1")
    with pytest.raises(runs.RunError, match=r"fold: 0, not 1"):
        engine.fit_folds(table, store, MODEL, TRAIN, dataclasses.replace(RUN, fold="1"), folder)


def changed(table: pd.DataFrame, what: str) -> pd.DataFrame:
    if what == "sites":  # folds are made by them
        return table.assign(site_id=3 - table["site_id"])
    if what == "labels":  # of what is learnt beside cancer
        return table.assign(BIRADS=1.0)
    return table.assign(view=table["view"].where(table["view"] != "MLO", "ML"))


@pytest.mark.parametrize("what", ["sites", "labels", "views"])
def test_another_table_of_the_same_images_is_refused(finished, store, table, what):
    """Folds, heads and pairs of views are made of more than images and cancer."""
    with pytest.raises(runs.RunError, match=r"data: "):
        engine.fit_folds(changed(table, what), store, MODEL, TRAIN, RUN, finished)


def test_the_order_of_the_table_changes_nothing(finished, store, table, tmp_path):
    folder = begin(tmp_path, store, table)
    with pytest.MonkeyPatch.context() as patch:
        stopped_after(patch, 3)
        engine.fit_folds(table, store, MODEL, TRAIN, RUN, folder)
    engine.fit_folds(table.sample(frac=1, random_state=1), store, MODEL, TRAIN, RUN, folder)
    same_history(finished, folder)


def test_other_images_with_pixels_or_another_format_are_refused(finished, store, table, tmp_path):
    """A store that lost or won images is another set of images: numbers in the checkpoint would mean others."""
    from rsnakit import preprocess

    pixels = PreprocessConfig(**store.manifest["preprocess"])
    png = preprocess.build_store(table, pixels, tmp_path / "png", n_jobs=1, image_format="png8")
    with pytest.raises(runs.RunError, match=r"store_format: 'block8', not 'png8'"):
        engine.fit_folds(table, png, MODEL, TRAIN, RUN, finished)
    real = data.usable

    def fewer(table, store):
        good, bad = real(table, store)
        return good.iloc[:-1], pd.concat([bad, good.iloc[-1:]])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "usable", fewer)
        with pytest.raises(runs.RunError, match=r"set of images \(images to score.*number to train on: 35, not 34"):
            engine.fit_folds(table, store, MODEL, TRAIN, RUN, finished)


def test_checkpoints_that_are_gone_are_said_and_nothing_is_trained_over_the_weights(finished, store, table, tmp_path):
    folder = tmp_path / "runs" / "copy"
    shutil.copytree(finished, folder)
    for path in (folder / "fold0").glob("*.pt"):
        path.unlink()
    before = (folder / "fold0" / "best.safetensors").read_bytes()
    with pytest.raises(runs.RunError, match=r"weights of a training, but no last\.pt"):
        engine.fit_folds(table, store, MODEL, TRAIN, RUN, folder)
    assert (folder / "fold0" / "best.safetensors").read_bytes() == before


def test_weights_that_are_gone_are_said_before_more_epochs_are_trained(finished, store, table, tmp_path):
    folder = tmp_path / "runs" / "copy"
    shutil.copytree(finished, folder)
    (folder / "fold0" / "best.safetensors").unlink()
    longer = dataclasses.replace(TRAIN, epochs=4)
    assert begin(tmp_path, store, table, longer, "copy") == folder
    with pytest.raises(runs.RunError, match=r"at epoch 3, but without best\.safetensors"):
        engine.fit_folds(table, store, MODEL, longer, RUN, folder)


@pytest.mark.parametrize("state", [torch.zeros(3), {"settings": {}}, {"epoch": 3}], ids=["tensor", "settings", "old"])
def test_a_checkpoint_of_something_else_is_said(store, table, tmp_path, state):
    folder = begin(tmp_path, store, table)
    (folder / "fold0").mkdir()
    torch.save(state, folder / "fold0" / "last.pt")
    with pytest.raises(
        runs.RunError, match=r"not written by this version of the kit\. Delete it to go on from one before"
    ):
        engine.fit_folds(table, store, MODEL, TRAIN, RUN, folder)


def test_weights_scores_and_what_describes_them_change_together(store, table, tmp_path, monkeypatch):
    """A disk that is full in the middle of it leaves those of the epoch before, all three."""
    folder = begin(tmp_path, store, table)
    with pytest.MonkeyPatch.context() as patch:
        stopped_after(patch, 8)
        engine.fit_folds(table, store, MODEL, TRAIN, RUN, folder)
    names = ("best.safetensors", "model.json", "oof.csv")
    before = {name: (folder / "fold0" / name).read_bytes() for name in names}
    real = pd.DataFrame.to_csv

    def full(self, path, *arguments, **options):
        if "oof.csv" in str(path):
            raise OSError(28, "No space left on device")
        return real(self, path, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pd.DataFrame, "to_csv", full)
        with pytest.raises(OSError, match=r"oof\.csv cannot be written: No space left"):
            engine.fit_folds(table, store, MODEL, TRAIN, RUN, folder)
    assert {name: (folder / "fold0" / name).read_bytes() for name in names} == before
    engine.fit_folds(table, store, MODEL, TRAIN, RUN, folder)
    assert runs.read_model(folder / "fold0")["epoch"] == 3


def test_how_a_fold_is_trained_may_change_when_it_goes_on(finished, store, table, tmp_path):
    """Checkpoints, layout and loader processes decide no result; accumulating does, and is a part of the run."""
    folder = begin(tmp_path, store, table)
    with pytest.MonkeyPatch.context() as patch:
        stopped_after(patch, 4)
        engine.fit_folds(table, store, MODEL, TRAIN, RUN, folder, LoopConfig(save_every=3))
    engine.fit_folds(table, store, MODEL, TRAIN, RUN, folder, LoopConfig(save_every=2, keep_last=1))
    same_history(finished, folder)
    assert [path.name for path in (folder / "fold0").glob("*.pt")] == ["last.pt"]
    with pytest.raises(runs.RunError, match=r"train\.accumulate"):
        engine.fit_folds(table, store, MODEL, dataclasses.replace(TRAIN, accumulate=2), RUN, folder)


def test_accumulated_batches_train_as_one_large_batch(store, table, tmp_path):  # T04
    """Without BatchNorm and dropout batches of 18 and 17 images make the step that one of 35 makes."""
    model = dataclasses.replace(MODEL, backbone="test_convnext", dropout=0.0)
    plain = dataclasses.replace(TRAIN, negatives_per_positive=0.0)
    found = {}
    for size, accumulate in ((35, 1), (18, 2)):
        config = dataclasses.replace(plain, batch_size=size, accumulate=accumulate)
        folder = begin(tmp_path, store, table, config, model=model)
        engine.fit_folds(table, store, model, config, RUN, folder)
        found[accumulate] = pd.read_csv(folder / "fold0" / "history.csv")
    columns = ["lr", "train_loss", "valid_loss", "grad_norm", "valid_auc"]
    pd.testing.assert_frame_equal(found[1][columns], found[2][columns], rtol=1e-4)


def test_the_average_is_scored_beside_the_raw_weights_and_kept_where_asked_for(store, table, tmp_path):  # T11
    kept = {}
    for keep in (True, False):
        config = dataclasses.replace(TRAIN, epochs=2, ema_decay=0.5, ema_keep=keep, lr=3e-2)
        folder = begin(tmp_path, store, table, config)
        engine.fit_folds(table, store, MODEL, config, RUN, folder)
        kept[keep] = weights(folder)
        last = pd.read_csv(folder / "fold0" / "history.csv").iloc[-1]
        auc = json.loads((folder / "summary.json").read_text())["scores"]["auc"]["value"]
        assert auc == pytest.approx(last["ema_valid_auc" if keep else "valid_auc"])
        assert last["ema_valid_loss"] != last["valid_loss"]
        state = torch.load(folder / "fold0" / "last.pt", weights_only=True)
        assert all(
            torch.equal(tensor, state["ema" if keep else "model"][name]) for name, tensor in weights(folder).items()
        )
        means = [name for name in state["model"] if name.endswith("running_mean")]
        assert means and all(not torch.equal(state["model"][name], state["ema"][name]) for name in means)
        counters = [name for name in state["model"] if name.endswith("num_batches_tracked")]
        assert all(torch.equal(state["model"][name], state["ema"][name]) for name in counters)
    assert any(not torch.equal(kept[True][name], kept[False][name]) for name in kept[True])


def test_an_epoch_may_be_longer_or_shorter_than_the_data(store, table, tmp_path):
    folds = data.make_folds(table, TRAIN.n_folds, TRAIN.seed)
    usable, _ = data.usable(table[folds != 0], store)
    negatives = int((usable["cancer"] == 0).sum())
    for wanted in (negatives // 3, 2 * negatives + 1):
        config = dataclasses.replace(TRAIN, epochs=1, negatives_per_epoch=wanted)
        folder = begin(tmp_path, store, table, config)
        engine.fit_folds(table, store, MODEL, config, RUN, folder)
        items = torch.load(folder / "fold0" / "last.pt", weights_only=True)
        steps = math.ceil((wanted + round(wanted / 2)) / TRAIN.batch_size)
        assert items["updates"] == steps


def test_a_loss_that_is_not_finite_stops_and_leaves_the_checkpoint_before(
    finished, store, table, tmp_path, monkeypatch
):
    folder = begin(tmp_path, store, table)
    with pytest.MonkeyPatch.context() as patch:
        stopped_after(patch, 3)
        engine.fit_folds(table, store, MODEL, TRAIN, RUN, folder)
    before = (folder / "fold0" / "last.pt").read_bytes()
    real = trainer.train_one_epoch

    def poisoned(model, *arguments, **options):
        torch.nn.init.constant_(model.head.weight, math.nan)
        return real(model, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_one_epoch", poisoned)
        with pytest.raises(FloatingPointError, match=r"the loss is nan in batch 5 of this epoch.*Lower lr"):
            engine.fit_folds(table, store, MODEL, TRAIN, RUN, folder, LoopConfig(save_every=1))
    assert (folder / "fold0" / "last.pt").read_bytes() == before
    engine.fit_folds(table, store, MODEL, TRAIN, RUN, folder)
    same_history(finished, folder)


def test_mixing_breasts_is_refused(store, table, tmp_path):
    model, config = dataclasses.replace(MODEL, views="mean"), dataclasses.replace(TRAIN, mixup=0.4)
    folder = begin(tmp_path, store, table, config, model=model)
    with pytest.raises(ValueError, match="with views a breast has several: set both to 0"):
        engine.fit_folds(table, store, model, config, RUN, folder)


def test_several_processes_need_to_know_the_table_and_the_step(store, table, competition, tmp_path):
    folder = begin(tmp_path, store, table)
    with pytest.raises(ValueError, match="n_procs=2: several processes read the table again"):
        engine.fit_folds(table, store, MODEL, TRAIN, RUN, folder, LoopConfig(n_procs=2))
    with pytest.raises(ValueError, match="accumulate=0 with n_procs=2"):
        engine.fit_folds(table, store, MODEL, TRAIN, RUN, folder, LoopConfig(n_procs=2), competition)


def test_two_folds_started_at_once_have_a_plan_each(store, table, competition, tmp_path, monkeypatch):
    """The processes read it seconds later, when the other fold's has been written."""
    config = dataclasses.replace(TRAIN, accumulate=2)
    folder, plans = begin(tmp_path, store, table, config), []
    monkeypatch.setattr(engine.distributed, "launch", lambda plan, n_procs: plans.append((plan, n_procs)))
    for fold in ("0", "1"):
        run = dataclasses.replace(RUN, fold=fold)
        engine.fit_folds(table, store, MODEL, config, run, folder, LoopConfig(n_procs=2), competition)
    assert [json.loads(plan.read_text())["run"]["fold"] for plan, n_procs in plans if n_procs == 2] == ["0", "1"]


def test_for_several_machines_the_command_is_printed(store, table, competition, tmp_path, capsys):
    config = dataclasses.replace(TRAIN, accumulate=4)
    folder = begin(tmp_path, store, table, config)
    assert engine.fit_folds(table, store, MODEL, config, RUN, folder, LoopConfig(n_procs=-1), competition) == {}
    printed = capsys.readouterr().out
    assert "torchrun" in printed and "--nnodes" in printed and str(folder) in printed
    plan = json.loads((folder / "launch-0.json").read_text())
    assert plan["train"]["accumulate"] == 4 and plan["store"] == str(store.path)


# --- breasts, auxiliary heads, and models that do not fit


BREASTS = dataclasses.replace(MODEL, views="attention", aux=("biopsy", "density", "birads"))
TWO = dataclasses.replace(TRAIN, epochs=2, batch_size=4)


@pytest.fixture(scope="module")
def breast_run(tmp_path_factory, store, table) -> Path:
    """A run of a model that sees breasts, on the fold in which an image has no pixels."""
    folder = begin(tmp_path_factory.mktemp("work"), store, table, TWO, model=BREASTS)
    engine.fit_folds(table, store, BREASTS, TWO, dataclasses.replace(RUN, fold=fold_of_blank(store, table)), folder)
    return folder


def fold_of_blank(store, table) -> str:
    blank = store.index.loc[store.index["status"] != "ok", "image_id"].iloc[0]
    folds = data.make_folds(table, TWO.n_folds, TWO.seed)
    return str(folds[table["image_id"] == blank].iloc[0])


def test_a_breast_model_leaves_a_row_a_breast(breast_run, store, table):
    """Scored from all its images that have pixels, however many; by the weights kept."""
    fold = fold_of_blank(store, table)
    there = table[data.make_folds(table, TWO.n_folds, TWO.seed) == int(fold)]
    oof = runs.read_oof(breast_run)
    assert (oof["image_id"] == "").all()
    ids = (oof["patient_id"] + "_" + oof["laterality"]).tolist()
    assert sorted(ids) == sorted(there["breast_id"].unique())
    assert len(metrics.to_breast(oof)) == len(oof)
    assert json.loads((breast_run / "summary.json").read_text())["scores"]["n_breasts"] == len(oof)
    raw = pd.read_csv(breast_run / f"fold{fold}" / "oof.csv", dtype=str)
    assert list(raw.columns) == runs.OOF_COLUMNS and raw["image_id"].isna().all()

    good, bad = data.usable(there, store)
    assert len(bad) and good.groupby("breast_id").size().nunique() > 1  # breasts of several sizes, one with a bad image
    model = models.build_model(BREASTS)
    models.load_weights(model, breast_run / f"fold{fold}" / "best.safetensors").eval()
    for (_, row), breast_id in zip(oof.iterrows(), ids, strict=True):
        own = good[good["breast_id"] == breast_id]
        views = np.stack([store[i] for i in store.rows_of(own["image_id"])]).astype(np.float32) / 4095
        kinds = torch.tensor([[0 if "CC" in view else 1 for view in own["view"]]])
        with torch.no_grad():
            logit = model(torch.from_numpy(views)[None, :, None], view_id=kinds)["cancer"]
        assert row["score"] == pytest.approx(logit.sigmoid().item(), abs=1e-5)
        assert row["cancer"] == own["cancer"].iloc[0]
    # Batches count breasts: every negative once, and as many positives as the ratio asks for.
    history = pd.read_csv(breast_run / f"fold{fold}" / "history.csv")
    assert np.isfinite(history[["train_loss", "valid_loss", "train_auc", "valid_auc", "grad_norm"]]).all(axis=None)


def test_training_sees_pairs_and_scoring_all_images(store, table, tmp_path, monkeypatch):
    """Batches count breasts; the two views of a pair are of two kinds."""
    seen = {}

    def watched(name, run):
        def run_and_note(model, loader, *arguments, **options):
            seen[name] = list(loader)
            return run(model, loader, *arguments, **options)

        return run_and_note

    for name in ("train_one_epoch", "evaluate"):
        monkeypatch.setattr(trainer, name, watched(name, getattr(trainer, name)))
    config = dataclasses.replace(TWO, epochs=1)
    folder = begin(tmp_path, store, table, config, model=BREASTS)
    engine.fit_folds(table, store, BREASTS, config, RUN, folder)
    labels = ("biopsy", "density", "birads")
    for batch in seen["train_one_epoch"]:
        assert batch["image"].shape[:2] == (len(batch["item"]), 2) and len(batch["item"]) <= 4
        assert batch["view_id"][batch["view_mask"].all(1)].tolist() == [[0, 1]] * int(batch["view_mask"].all(1).sum())
        assert batch["cancer"].sum() >= 1 and all(batch[name].shape == batch["cancer"].shape for name in labels)
    assert max(batch["image"].shape[1] for batch in seen["evaluate"]) > 2
    assert [n for batch in seen["evaluate"] for n in batch["item"].tolist()] == list(range(len(runs.read_oof(folder))))


def test_a_breast_run_goes_on_to_the_same_weights(breast_run, store, table, tmp_path):  # A01, C04
    """Stopped within an epoch, gone on with loader processes."""
    fold = fold_of_blank(store, table)
    folder = begin(tmp_path, store, table, TWO, model=BREASTS)
    folds = data.make_folds(table, TWO.n_folds, TWO.seed)
    with pytest.MonkeyPatch.context() as patch:
        stopped_after(patch, 3)
        assert engine.fit(int(fold), table, folds, store, BREASTS, TWO, RUN, folder) is False
    assert engine.fit(int(fold), table, folds, store, BREASTS, TWO, dataclasses.replace(RUN, num_workers=1), folder)
    a, b = (models.read_weights(run / f"fold{fold}" / "best.safetensors") for run in (breast_run, folder))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_breast_without_any_pixels_gets_the_prior(store, table):
    """One of its images is enough to be scored; without any it is left out of training, and keeps its row."""
    blank = store.index.loc[store.index["status"] != "ok", "image_id"].iloc[0]
    breast_id = table.loc[table["image_id"] == blank, "breast_id"].iloc[0]
    whole = data.side(table, store, "breast", "all")
    assert breast_id in whole.items["breast_id"].tolist() and whole.bad.empty
    rest = table[(table["breast_id"] != breast_id) | (table["image_id"] == blank)]
    side = data.side(rest, store, "breast", "all")
    assert side.bad["breast_id"].tolist() == [breast_id]
    assert len(side.items) == rest["breast_id"].nunique() - 1
    from rsnakit.history import oof_rows

    rows = oof_rows(side.items, side.bad, np.arange(len(side.items)), np.full(len(side.items), 0.5), 3, prior=0.125)
    assert rows["score"].tolist() == [0.5] * len(side.items) + [0.125]
    assert (rows["image_id"] == "").all() and (rows["fold"] == 3).all()
    with pytest.raises(data.TableError, match="fold 1: 0 of 1 breasts with pixels are positive"):
        data.side(rest[rest["cancer"] == 0].iloc[:1], store, "breast", "fold 1")


def test_heads_learn_what_the_loss_asks(store, table, tmp_path):
    """With a weight of 0 they stay as they were made; with one they do not."""
    after = {}
    for weight in (0.0, 1.0):
        config = dataclasses.replace(TRAIN, epochs=1, aux_weight=weight)
        model = dataclasses.replace(MODEL, aux=("density", "view"))
        folder = begin(tmp_path, store, table, config, model=model)
        engine.fit_folds(table, store, model, config, RUN, folder)
        after[weight] = weights(folder)
    differing = {name for name in after[0.0] if not torch.equal(after[0.0][name], after[1.0][name])}
    assert any("density" in name for name in differing) and any("backbone" in name for name in differing)
    begun = len(list((tmp_path / "runs").iterdir()))
    assert begun == 2  # the weight is a part of the run's name


def test_an_auxiliary_label_without_a_column_stops_before_training(store, table, tmp_path):
    model = dataclasses.replace(MODEL, aux=("density",))
    bare = table.drop(columns="density")
    folder = begin(tmp_path, store, bare, model=model)
    with pytest.raises(ValueError, match="'density': the table has no column density"):
        engine.fit_folds(bare, store, model, TRAIN, RUN, folder)
    assert not list(folder.glob("fold0/*.pt"))


def test_gradient_checkpointing_is_no_part_of_a_run(store, table, tmp_path):
    """Out of memory, a person turns it on and goes on with the same run."""
    config = dataclasses.replace(TRAIN, epochs=1)
    on = dataclasses.replace(MODEL, grad_checkpointing=True)
    folder = begin(tmp_path, store, table, config)
    engine.fit_folds(table, store, MODEL, config, RUN, folder)
    assert begin(tmp_path, store, table, config, model=on) == folder
    assert "grad_checkpointing" not in runs.read_config(folder)["model"]
    longer = dataclasses.replace(config, epochs=2)
    folder = begin(tmp_path, store, table, config, "mine")
    engine.fit_folds(table, store, MODEL, config, RUN, folder)
    assert begin(tmp_path, store, table, longer, "mine", on) == folder
    engine.fit_folds(table, store, on, longer, RUN, folder)
    assert runs.read_model(folder / "fold0")["model"]["grad_checkpointing"] is True
    assert runs.read_model(folder / "fold0")["epoch"] == 2


def test_a_model_that_cannot_take_the_size_is_refused_before_an_image_is_read(store, table, tmp_path, monkeypatch):
    # M05: not in the first batch
    monkeypatch.setattr(data.MammogramDataset, "__getitem__", None)
    model = dataclasses.replace(MODEL, backbone="vit_tiny_patch16_224")
    folder = begin(tmp_path, store, table, model=model)
    with pytest.raises(
        ValueError, match=r"vit_tiny_patch16_224.* fails on .*64, 32.*made for .*224, 224.*another height and width"
    ):
        engine.fit_folds(table, store, model, TRAIN, RUN, folder)


class Picky(torch.nn.Module):
    """A model that looks at values, which a dry run has none of; and takes images of one height."""

    def __init__(self):
        super().__init__()
        self.backbone, self.config, self.batches = torch.nn.BatchNorm2d(1), MODEL, []
        self.backbone.pretrained_cfg = {}

    def features(self, x):
        assert x.shape[2] == 64, "expected height 64"
        self.batches.append(float(x.sum()))
        return self.backbone(x).mean((2, 3))


def test_a_model_that_cannot_be_run_dry_is_tried_in_earnest():
    model = Picky()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine.check_size(model, (64, 32))
    assert model.batches == [0.0] and model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(
        ValueError, match=r"(?s)fails on .*32, 64.*AssertionError: expected height 64.*another height and width"
    ):
        engine.check_size(model, (32, 64))
