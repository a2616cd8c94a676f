"""What a notebook shows of a run that is on disk: all folds there are, by the scores of the weights that were kept."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from rsnakit import metrics, params, plots, results, runs
from rsnakit.demo import DemoConfig
from rsnakit.engine import LoopConfig
from rsnakit.env import RunConfig
from rsnakit.runs import OOF_COLUMNS

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "03_train.ipynb"


def make_fold(run: Path, fold: int, epochs: int, kept: int, n: int = 30) -> pd.DataFrame:
    """A fold's folder as training leaves it: two images a breast, epochs in its history, weights of one of them."""
    rng = np.random.default_rng(fold)
    rows = pd.DataFrame({"patient_id": [f"{i // 2:03}" for i in range(2 * n)], "laterality": "L"})
    rows = rows.assign(image_id=[str(i) for i in range(2 * n)], fold=fold, cancer=(np.arange(2 * n) // 2 % 5 == 0) * 1)
    rows = rows.assign(score=(0.6 * rng.random(2 * n) + 0.3 * rows["cancer"]))[OOF_COLUMNS]
    folder = run / f"fold{fold}"
    folder.mkdir(parents=True)
    rows.to_csv(folder / "oof.csv", index=False)
    pd.DataFrame({"epoch": range(1, epochs + 1), "valid_loss": 0.5}).to_csv(folder / "history.csv", index=False)
    (folder / "best.safetensors").touch()
    (folder / "model.json").write_text(json.dumps({"model": {}, "epoch": kept, "oof_rows": len(rows)}))
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
    assert results.fold_table(run).loc[0, "state"] == "not finished: epoch 1 of 4"


def test_a_fold_that_was_stopped_within_its_first_epoch(run):
    make_fold(run, 1, epochs=4, kept=4)
    (run / "fold0").mkdir()
    (run / "fold0" / "last.pt").touch()  # a checkpoint, and no weights for inference yet
    table = results.fold_table(run)
    assert table["state"].to_dict() == {0: "not finished: epoch 0 of 4", 1: "finished"}
    assert table.loc[0].drop("state").isna().all() and str(table.loc[1, "epoch"]) == "4"
    assert list(results.histories(run)) == [1]


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
    assert shown[4].empty and shown[5].empty
    assert "no epoch is finished yet" in capsys.readouterr().out
