"""What a notebook shows of a run that is on disk: all folds there are, by the scores of the weights that were kept."""

import dataclasses
import errno
import json
import os
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from rsnakit import metrics, nested, params, plots, results, runs
from rsnakit.demo import DemoConfig
from rsnakit.engine import LoopConfig
from rsnakit.env import RunConfig
from rsnakit.runs import OOF_COLUMNS

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "03_train.ipynb"


def make_fold(run: Path, fold: int, epochs: int, kept: int, n: int = 30, select: str = "last") -> pd.DataFrame:
    """A fold's folder as training leaves it: two images a breast, epochs in its history, weights of one of them."""
    rng = np.random.default_rng(fold)
    rows = pd.DataFrame({"patient_id": [f"{fold}{i // 2:03}" for i in range(2 * n)], "laterality": "L"})
    rows = rows.assign(image_id=[str(i) for i in range(2 * n)], fold=fold, cancer=(np.arange(2 * n) // 2 % 5 == 0) * 1)
    rows = rows.assign(score=(0.6 * rng.random(2 * n) + 0.3 * rows["cancer"]))[OOF_COLUMNS]
    folder = run / f"fold{fold}"
    folder.mkdir(parents=True)
    rows.to_csv(folder / "oof.csv", index=False)
    scores = {f"{side}_{score}": rng.random(epochs) for side in ("valid", "ema_valid") for score in ("f1", "ap")}
    pd.DataFrame({"epoch": range(1, epochs + 1), **scores}).to_csv(folder / "history.csv", index=False)
    (folder / "best.safetensors").touch()
    described = {"model": {}, "epoch": kept, "oof_rows": len(rows), "prior": 0.2 + 0.1 * fold, "select": select}
    (folder / "model.json").write_text(json.dumps(described))
    return rows


@pytest.fixture
def run(tmp_path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"settings": {"train": {"epochs": 4}}}))
    return tmp_path


def test_nothing_is_trained_yet(run):  # N07
    assert results.histories(run) == {} and results.fold_table(run).empty
    (run / "fold0").mkdir()  # a fold that is being begun
    assert results.histories(run) == {} and results.fold_table(run).empty


def test_a_row_a_fold_unfinished_ones_too(run):
    rows = {2: make_fold(run, 2, epochs=3, kept=3), 0: make_fold(run, 0, epochs=4, kept=2)}
    table = results.fold_table(run)
    assert table.index.tolist() == [0, 2]
    assert table["epoch"].tolist() == [2, 3] and table["state"].tolist() == ["finished", "not finished: epoch 3 of 4"]
    assert table["breasts"].tolist() == [30, 30] and table["positives"].tolist() == [6, 6]
    for fold in rows:
        breasts = rows[fold].groupby("patient_id")[["cancer", "score"]].mean()
        labels, scores = breasts["cancer"], breasts["score"]
        found = table.loc[fold, ["AUC", "AP", "pF1", "pF1 at best cut (flatters)"]].astype(float)
        cuts = [2 * labels[scores >= cut].sum() / (6 + (scores >= cut).sum()) for cut in scores]
        expected = [roc_auc_score(labels, scores), average_precision_score(labels, scores),
                    2 * scores[labels == 1].sum() / (6 + scores.sum()), max(cuts)]  # fmt: skip
        np.testing.assert_allclose(found, expected, atol=0.0005)
    assert {fold: len(history) for fold, history in results.histories(run).items()} == {0: 4, 2: 3}


def test_a_fold_that_was_killed_before_its_history_was_written(run):
    make_fold(run, 0, epochs=1, kept=1)
    (run / "fold0" / "history.csv").unlink()
    assert results.histories(run) == {}
    assert results.fold_table(run).loc[0, "state"] == "not finished: epoch 1 of 4, history.csv is not there"


def test_a_fold_that_was_stopped_within_its_first_epoch(run):
    make_fold(run, 1, epochs=4, kept=4)
    (run / "fold0").mkdir()
    (run / "fold0" / "last.pt").touch()  # a checkpoint, and no weights for inference yet
    table = results.fold_table(run)
    assert table["state"].to_dict() == {0: "not finished: epoch 0 of 4", 1: "finished"}
    assert table.loc[0].drop("state").isna().all() and str(table.loc[1, "epoch"]) == "4"
    assert list(results.histories(run)) == [1]


# The summary


def best_f1(labels: pd.Series, scores: pd.Series) -> tuple[float, float]:
    """The highest threshold with the best F1, and that F1, by trying all."""
    cuts = sorted(set(scores), reverse=True)
    f1 = [2 * labels[scores >= cut].sum() / (labels.sum() + (scores >= cut).sum()) for cut in cuts]
    return cuts[int(np.argmax(f1))], max(f1)


AGGREGATES = {
    "mean": np.mean,
    "max": np.max,
    "noisy_or": lambda scores: 1 - np.prod(1 - scores),
    "top2": np.mean,  # of two images
    "top3": np.mean,
}


def test_a_summary_has_a_threshold_for_each_way_to_breasts(run):
    images = pd.concat([make_fold(run, fold, epochs=4, kept=4) for fold in (0, 1, 3)])
    summary = results.write_summary(run)
    assert json.loads((run / "summary.json").read_text()) == summary
    assert summary["folds"] == [0, 1, 3] and summary["prior"] == pytest.approx(0.2 + 0.1 * 4 / 3)
    assert set(summary["by_aggregate"]) == set(AGGREGATES) == set(metrics.HOWS)
    for how, aggregate in AGGREGATES.items():
        breasts = images.groupby("patient_id").agg({"score": aggregate, "cancer": "first", "fold": "first"})
        labels, scores, chosen = breasts["cancer"], breasts["score"], summary["by_aggregate"][how]
        threshold, naive = best_f1(labels, scores)
        assert chosen["threshold"] == pytest.approx(threshold) and chosen["naive_f1"] == pytest.approx(naive)
        assert chosen["percentile"] == pytest.approx(100 * (scores < threshold - 1e-9).mean())
        called = pd.Series(False, index=breasts.index)
        for fold, own in breasts.groupby("fold"):
            others = breasts[breasts["fold"] != fold]
            cut, _ = best_f1(others["cancer"], others["score"])
            called[own.index] = own["score"] >= cut - 1e-9
        assert chosen["nested_f1"] == pytest.approx(2 * labels[called].sum() / (labels.sum() + called.sum()))
        assert chosen["nested_low"] < chosen["nested_f1"] < chosen["nested_high"]
    assert summary["by_aggregate"]["max"]["threshold"] > summary["by_aggregate"]["mean"]["threshold"]
    mean = summary["by_aggregate"]["mean"]
    assert (summary["threshold"], summary["percentile"]) == (mean["threshold"], mean["percentile"])
    assert summary["nested"]["f1"]["value"] == mean["nested_f1"] and summary["nested_note"] == ""
    assert summary["nested"]["naive_f1"] == summary["scores"]["naive_f1"]
    assert summary["nested"]["optimism"] == pytest.approx(mean["naive_f1"] - mean["nested_f1"])
    assert set(summary["nested"]["thresholds"]) == {"0", "1", "3"}
    assert summary["epoch_choice"] is None


def test_the_nested_score_is_shown_first(run):
    for fold in (0, 1):
        make_fold(run, fold, epochs=4, kept=4)
    summary = results.write_summary(run)
    table = results.summary_table(summary)
    nested_score = summary["nested"]
    assert table.index.tolist() == [
        "pF1 at thresholds from other folds (nested)",
        "pF1 at its best threshold (naive, flatters)",
        "by which the naive one is higher",
        "AUC",
        "average precision",
        "pF1 of the raw scores",
    ]
    assert table.iloc[0].tolist() == pytest.approx([nested_score["f1"][k] for k in ("value", "low", "high")], abs=6e-4)
    assert table.iloc[1, 0] - table.iloc[0, 0] == pytest.approx(table.iloc[2, 0], abs=0.0015)
    table = results.aggregate_table(summary)
    assert table.index.tolist() == list(metrics.HOWS) and not table.isna().any(axis=None)
    assert table.loc["max", "threshold"] == pytest.approx(summary["by_aggregate"]["max"]["threshold"], abs=6e-4)


@pytest.mark.parametrize("averaged", [False, True])
def test_what_choosing_the_epoch_added(run, averaged):
    train = {"epochs": 4, "ema_decay": 0.99, "ema_keep": True} if averaged else {"epochs": 4}
    (run / "config.json").write_text(json.dumps({"settings": {"train": train}}))
    for fold in (0, 1, 2):
        make_fold(run, fold, epochs=4, kept=2, select="ap")
    make_fold(run, 3, epochs=2, kept=1, select="ap")  # not finished: counts nowhere
    summary = results.write_summary(run)
    assert summary["folds"] == [0, 1, 2]
    histories = {fold: results.histories(run)[fold] for fold in (0, 1, 2)}
    expected = nested.epoch_choice(histories, "ap", "ema_valid" if averaged else "valid")
    assert summary["epoch_choice"] == expected
    row = results.summary_table(summary).loc["added by choosing the epoch by ap on the scored fold"]
    assert row["value"] == pytest.approx(expected["f1"], abs=6e-4) and row.isna().tolist() == [False, True, True]


def test_one_fold_has_no_nested_score_and_says_so(run):
    make_fold(run, 2, epochs=4, kept=3, select="pf1")
    summary = results.write_summary(run)
    assert summary["nested"] is None and "no other fold" in summary["nested_note"]
    assert summary["by_aggregate"]["max"]["nested_f1"] is None
    assert "the last epoch" in summary["epoch_choice"]["note"]
    table = results.summary_table(summary)
    assert table.index[0] == "pF1 at its best threshold (naive, flatters; one fold: no nested score)"
    assert table.iloc[0, 0] == pytest.approx(summary["scores"]["naive_f1"]["value"], abs=6e-4)
    assert "choosing the epoch by pf1" in table.index[1]
    assert results.aggregate_table(summary).columns.tolist() == ["threshold", "pF1 at this threshold (naive, flatters)"]


def test_summaries_of_an_older_kit_are_read(run):
    for fold in (0, 1):
        make_fold(run, fold, epochs=4, kept=4)
    summary = results.write_summary(run)
    older = {k: v for k, v in summary.items() if k not in ("nested", "nested_note", "epoch_choice", "by_aggregate")}
    table = results.summary_table(older)
    assert "an older summary: no nested score" in table.index[0] and len(table) == 4
    for nothing in (older, {}, None):
        assert results.aggregate_table(nothing).empty


def test_breasts_that_were_scored_as_such_are_the_same_in_every_way(run):
    rows = make_fold(run, 0, epochs=4, kept=4).drop_duplicates("patient_id").assign(image_id="")
    rows.to_csv(run / "fold0" / "oof.csv", index=False)
    described = json.loads((run / "fold0" / "model.json").read_text()) | {"oof_rows": len(rows)}
    (run / "fold0" / "model.json").write_text(json.dumps(described))
    first, *others = results.write_summary(run)["by_aggregate"].values()
    assert others == [first] * 4


def test_the_cells_after_training_where_nothing_is_trained_yet(run, capsys):  # N07
    """The time was over before the first epoch, or the training runs elsewhere: they say so, and none fails."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    after = code[next(i for i, text in enumerate(code) if text.startswith("engine.fit_folds(")) + 1 :]
    assert len(after) == 6
    usable = pd.DataFrame({"patient_id": ["7"], "laterality": "L", "view": "CC", "image_id": "1"})
    names = {"folder": run, "usable": usable, "images": None, "run_config": RunConfig(), "dataclasses": dataclasses}
    names |= {"loop_config": LoopConfig(), "demo_config": DemoConfig()}
    names |= {"metrics": metrics, "params": params, "plots": plots, "results": results, "runs": runs}
    shown = []
    for text in after:
        *_, last = text.splitlines()
        exec(text, names)
        shown.append(eval(last, names))
    titles = [" ".join(figure._suptitle.get_text().split()) for figure in shown[:4]]
    nothing = "No scores to show"
    assert titles == ["No epoch is finished yet", nothing, nothing, "No scores of breasts with images to show"]
    assert shown[4].empty and shown[5].data.empty
    assert "no epoch is finished yet" in capsys.readouterr().out


def test_a_summary_of_another_way_from_images_to_breasts(run):
    """The file keeps the mean's, by which inference cuts unless it is asked for another way."""
    rows = pd.concat([make_fold(run, fold, epochs=4, kept=4) for fold in (0, 1)])
    (run / "config.json").write_text(json.dumps({"settings": {"train": {"epochs": 4, "n_folds": 2}}}))
    for fold in (0, 1):
        path = run / f"fold{fold}" / "model.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "select": "last", "prior": 0.2}))
    highest = rows.groupby(["fold", "patient_id"])[["cancer", "score"]].max()
    written, found = results.write_summary(run), results.summarize(run, "max")
    assert json.loads((run / "summary.json").read_text())["aggregate"] == written["aggregate"] == "mean"
    assert found["scores"]["auc"]["value"] == pytest.approx(roc_auc_score(highest["cancer"], highest["score"]))
    assert found["by_aggregate"] == written["by_aggregate"]
    assert found["threshold"] == found["by_aggregate"]["max"]["threshold"] != written["threshold"]
    assert found["nested"]["f1"]["value"] == found["by_aggregate"]["max"]["nested_f1"]


@pytest.mark.parametrize(("number", "before"), [(errno.EROFS, None), (errno.EACCES, "{}"), (errno.EPERM, None)])
def test_a_run_that_cannot_be_written_to_is_scored_all_the_same(run, monkeypatch, capsys, number, before):
    """Training has to leave a summary, and fails without; who only looks at the run is told that it stays as it is."""
    for fold in (0, 1):
        make_fold(run, fold, epochs=4, kept=4)
    expected = results.update_summary(run)
    assert json.loads((run / "summary.json").read_text()) == expected and capsys.readouterr().out == ""
    (run / "summary.json").unlink() if before is None else (run / "summary.json").write_text(before)
    there = sorted(run.iterdir())

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("rsnakit.files.os.replace", refuse)
    with pytest.raises(OSError, match=re.escape(os.strerror(number))):
        results.write_summary(run)
    assert results.update_summary(run) == expected
    said = capsys.readouterr().out
    assert (
        said == f"NOTE: {run / 'summary.json'} stays as it is, since it cannot be written to: {os.strerror(number)}\n"
    )
    assert sorted(run.iterdir()) == there and (before is None or (run / "summary.json").read_text() == before)


def test_a_full_disk_is_no_run_to_be_looked_at_only(run, monkeypatch):
    make_fold(run, 0, epochs=4, kept=4)

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rsnakit.files.os.replace", refuse)
    with pytest.raises(OSError, match="MB are free"):
        results.update_summary(run)
