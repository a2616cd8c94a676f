"""A run's folder whose files are damaged, lost, or of another training: what is passed over, and what is said."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest

from rsnakit import checkpoint, results, runs
from rsnakit.runs import OOF_COLUMNS

SETTINGS = {"train": {"epochs": 2}, "is_demo": True, "debug": False}
ROWS = [("7", "L", "1"), ("7", "L", "2"), ("7", "R", "3"), ("8", "L", "4")]


def make_run(run: Path, folds=(0, 1), epochs: int = 2, kept: int = 1) -> Path:
    """Folds of two patients each, as training leaves them: four images, an epoch's weights kept, and a checkpoint."""
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"settings": SETTINGS}))
    for fold in folds:
        folder = run / f"fold{fold}"
        folder.mkdir()
        rows = pd.DataFrame([(fold * "1" + patient, *rest) for patient, *rest in ROWS], columns=OOF_COLUMNS[:3])
        rows.assign(fold=fold, cancer=[1, 1, 0, 0], score=[0.5, 0.25, 0.125, 0.75]).to_csv(
            folder / "oof.csv", index=False
        )
        described = {"model": {}, "epoch": kept, "oof_rows": 4, "prior": 0.5, "select": "ap"}
        (folder / "model.json").write_text(json.dumps(described))
        (folder / "best.safetensors").touch()
        scores = {"valid_f1": [0.5, 0.4], "valid_ap": [0.5, 0.4]}
        pd.DataFrame({"epoch": [1, 2], **scores})[:epochs].to_csv(folder / "history.csv", index=False)
        checkpoint.save(folder, {"epoch": epochs})
    return run


@pytest.fixture
def run(tmp_path) -> Path:
    return make_run(tmp_path / "runs" / "one")


# Settings


DAMAGED = {
    "": "config.json: cut short or damaged",
    "{": "config.json: cut short or damaged",
    "{}": "config.json: has no settings",
    "[]": "config.json: has no settings",
    '{"settings": null}': "config.json: has no settings",
    '{"settings": {"train": {}}}': "config.json: has no is_demo, debug",
}


@pytest.mark.parametrize("text", DAMAGED)
def test_a_run_with_damaged_settings_stops_no_other(run, tmp_path, text, capsys):
    damaged = make_run(tmp_path / "runs" / "damaged")  # the one last written to
    (damaged / "config.json").write_text(text)
    assert runs.find_run(tmp_path, "", is_demo=True) == run
    said = capsys.readouterr().out
    assert said.startswith("NOTE: run damaged is passed over: ") and DAMAGED[text] in said and said.count("\n") == 1
    with pytest.raises(runs.RunError, match=rf"damaged/{re.escape(DAMAGED[text])}.*name another one with run="):
        runs.find_run(tmp_path, "damaged", is_demo=True)
    with pytest.raises(runs.RunError, match=re.escape(DAMAGED[text])):
        runs.differences_in_kind(damaged, is_demo=True)


def test_where_all_runs_are_damaged_there_is_none(run, tmp_path, capsys):
    (run / "config.json").write_text("{")
    with pytest.raises(runs.RunError, match=r"no run trained on a demo yet\. `papermill 03_train"):
        runs.find_run(tmp_path, "", is_demo=True)
    assert "run one is passed over" in capsys.readouterr().out


def test_settings_that_cannot_be_read(run):
    (run / "config.json").unlink()
    with pytest.raises(runs.RunError, match=r"config\.json: cannot be read: No such file or directory\. Copy the run"):
        runs.read_config(run)


# Runs of mounted bundles


def bundle_with(folder: Path, *names: str, **settings) -> Path:
    """A bundle's folder: finished folds without out-of-fold scores and checkpoint, as it carries them."""
    (folder / "runs").mkdir(parents=True)
    for name in names:
        run = make_run(folder / "runs" / name)
        for fold in (0, 1):
            (run / f"fold{fold}" / "oof.csv").unlink()
            (run / f"fold{fold}" / "last.pt").unlink()
        (run / "config.json").write_text(json.dumps({"settings": {**SETTINGS, **settings}}))
    return folder


def test_the_mounted_run_goes_first(run, tmp_path):  # I02
    """Whatever it was trained on, and though one in the work folder is newer."""
    bundle = bundle_with(tmp_path / "input", "mounted", debug=True)
    make_run(tmp_path / "runs" / "newer")
    found = runs.find_run(tmp_path, "", is_demo=False, bundles=[bundle])
    assert found == bundle / "runs" / "mounted"
    assert runs.unfinished_folds(found) == {} and list(runs.trained_folds(found)) == [0, 1]
    assert "trained on the demo, and this is real data; it was trained on a few patients" in runs.differences_in_kind(
        found, False
    )
    assert runs.find_run(tmp_path, "mounted", is_demo=False, bundles=[bundle]) == found
    assert runs.find_run(tmp_path, "one", is_demo=False, bundles=[bundle]) == run
    make_run(tmp_path / "runs" / "mounted")  # a name is looked for in the work folder first
    assert runs.find_run(tmp_path, "mounted", is_demo=True, bundles=[bundle]) == tmp_path / "runs" / "mounted"


def test_of_several_mounted_runs_one_has_to_be_named(tmp_path):
    a, b = bundle_with(tmp_path / "a", "first", "second"), bundle_with(tmp_path / "b", "second")
    with pytest.raises(runs.RunError) as caught:
        runs.find_run(tmp_path, "", is_demo=True, bundles=[a, b])
    assert str(caught.value).splitlines() == [
        "3 runs are mounted: name one with run=, or detach the other data sets:",
        *(f"  {run}" for run in (a / "runs/first", a / "runs/second", b / "runs/second")),
    ]
    assert runs.find_run(tmp_path, "first", is_demo=True, bundles=[a, b]) == a / "runs" / "first"
    with pytest.raises(runs.RunError, match=r"run second is mounted 2 times: detach all but one(.|\n)*b/runs/second"):
        runs.find_run(tmp_path, "second", is_demo=True, bundles=[a, b])
    with pytest.raises(runs.RunError, match=r"third or .*/a/runs/third or .*runs there are: first, second, second"):
        runs.find_run(tmp_path, "third", is_demo=True, bundles=[a, b])


def test_a_bundle_whose_folders_were_lost_is_said(run, tmp_path, capsys):  # K06
    """An upload that flattened the folds leaves no run; one in the work folder is taken, where there is one."""
    bundle = bundle_with(tmp_path / "input", "mounted")
    for fold in (0, 1):
        for path in (bundle / "runs" / "mounted" / f"fold{fold}").iterdir():
            path.rename(bundle / path.name)
    assert runs.find_run(tmp_path, "", is_demo=True, bundles=[bundle]) == run
    assert f"NOTE: {bundle}: no run with a trained fold is in its runs/" in capsys.readouterr().out
    with pytest.raises(runs.RunError, match="no run trained on a demo yet"):
        runs.find_run(tmp_path / "empty", "", is_demo=True, bundles=[bundle])


def test_a_mounted_run_with_damaged_settings_is_refused(run, tmp_path):
    bundle = bundle_with(tmp_path / "input", "mounted")
    (bundle / "runs" / "mounted" / "config.json").write_text("{")
    with pytest.raises(runs.RunError, match=r"mounted/config\.json: cut short or damaged"):
        runs.find_run(tmp_path, "", is_demo=True, bundles=[bundle])


# Which folds are finished


def test_a_finished_fold_whose_history_is_lost_stays_finished(run):
    """Its weights are of the first of two epochs, and the checkpoint knows of both."""
    before = results.summarize(run)
    (run / "fold1" / "history.csv").unlink()
    assert runs.unfinished_folds(run) == {} and list(runs.trained_folds(run)) == [0, 1]
    after = results.summarize(run)
    assert after["folds"] == [0, 1] and after["scores"] == before["scores"] and after["nested"] == before["nested"]


def test_without_history_and_checkpoint_model_json_tells(tmp_path):
    last = make_run(tmp_path / "last", kept=2)
    for fold in (0, 1):
        (last / f"fold{fold}" / "history.csv").unlink()
        (last / f"fold{fold}" / "last.pt").unlink()
    assert runs.unfinished_folds(last) == {}  # of the last epoch
    best = make_run(tmp_path / "best", kept=1)
    (best / "fold1" / "history.csv").unlink()
    (best / "fold1" / "last.pt").write_bytes(b"damaged")
    assert runs.unfinished_folds(best) == {1: "epoch 1 of 2, history.csv is not there"}
    assert runs.unfinished_folds(make_run(tmp_path / "stopped", epochs=1)) == {0: "epoch 1 of 2", 1: "epoch 1 of 2"}


@pytest.mark.parametrize("checkpointed", [True, False])  # folders that were copied for inference have none
@pytest.mark.parametrize(
    ("gone", "state"),
    [
        (("best.safetensors",), "best.safetensors is not there"),
        (("model.json",), "model.json is not there"),
        (("model.json", "best.safetensors", "history.csv"), "model.json and best.safetensors are not there"),
        (("model.json", "best.safetensors", "oof.csv"), "model.json and best.safetensors are not there"),
        (("best.safetensors", "history.csv", "oof.csv"), "best.safetensors is not there"),
    ],
)
def test_what_a_fold_has_lost_is_named(run, gone, state, checkpointed):
    for name in gone:
        (run / "fold1" / name).unlink()
    if not checkpointed:
        (run / "fold1" / "last.pt").unlink()
    assert runs.unfinished_folds(run) == {1: state} and list(runs.trained_folds(run)) == [0]
    assert results.fold_table(run)["state"].tolist() == ["finished", f"not finished: {state}"]
    assert results.summarize(run)["unfinished"] == {"1": state}


def test_a_damaged_history_is_named(run):
    (run / "fold1" / "history.csv").write_text("")
    with pytest.raises(runs.RunError, match=r"fold1/history\.csv: cannot be read as csv .*\. Delete it"):
        runs.trained_folds(run)
    (run / "fold1" / "history.csv").unlink()
    assert list(runs.trained_folds(run)) == [0, 1]


# Out-of-fold scores


def damage(run: Path, change) -> None:
    path = run / "fold1" / "oof.csv"
    change(pd.read_csv(path, dtype={"patient_id": str})).to_csv(path, index=False)


def with_value(name: str, value: object):
    return lambda rows: rows.astype({name: object}).assign(**{name: [*rows[name][:2], value, *rows[name][3:]]})


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (with_value("score", None), "row 4: the score of image 3 of breast 17_R is nan, expected a probability"),
        (with_value("score", "inf"), "row 4: the score of image 3 of breast 17_R is inf, expected a probability"),
        (with_value("score", 1.5), "row 4: the score of image 3 of breast 17_R is 1.5, expected a probability in [0, 1]"),
        (with_value("score", -0.1), "row 4: the score of image 3 of breast 17_R is -0.1, expected a probability"),
        (with_value("score", "x"), "row 4: the score of image 3 of breast 17_R is x, expected a probability"),
        (with_value("cancer", 2), "row 4: the cancer of image 3 of breast 17_R is 2, expected 0 or 1"),
        (with_value("fold", 0), "row 4: the fold of image 3 of breast 17_R is 0, expected 1, that of its folder"),
        (with_value("fold", "a"), "row 4: the fold of image 3 of breast 17_R is a, expected 1, that of its folder"),
        (with_value("laterality", None), "row 4: the laterality of image 3 of breast 17_nan is nan"),
        (lambda rows: rows.iloc[[0, 1, 2, 0]], "row 5: image 1 of breast 17_L is there a second time"),
        (lambda rows: rows.assign(image_id=""), "row 3: breast 17_L is there a second time"),
        (lambda rows: rows.assign(cancer=[1, 0, 0, 0]), "row 2: the cancer of image 1 of breast 17_L is 1, expected the same"),
        (lambda rows: rows.iloc[:3], "3 rows, 4 were written"),
        (lambda rows: rows.drop(columns="fold"), "columns are ['patient_id', 'laterality', 'image_id', 'cancer', 'score']"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_oof_csv_is_named_with_file_and_row(run, change, found):
    damage(run, change)
    advice = f". Delete {run / 'fold1'} and train this fold again."
    for read in (runs.read_oof, results.write_summary, results.fold_table):
        with pytest.raises(runs.RunError) as caught:
            read(run)
        assert str(caught.value).startswith(f"{run / 'fold1' / 'oof.csv'}: {found}")
        assert str(caught.value).endswith(advice)


@pytest.mark.parametrize(
    ("text", "found"), [(None, "not there"), ("", "cannot be read as csv"), ("a\nb,c\nd,e,f", "cannot be")]
)
def test_an_oof_csv_that_cannot_be_read(run, text, found):
    path = run / "fold1" / "oof.csv"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(runs.RunError, match=rf"fold1/oof\.csv: {found}.*Delete .*fold1 and train this fold again"):
        runs.read_oof(run)


def test_rows_of_breasts_and_probabilities_at_the_ends_are_right(run):
    for fold in (0, 1):
        path = run / f"fold{fold}" / "oof.csv"
        rows = pd.read_csv(path, dtype={"patient_id": str}).iloc[[0, 2, 3]]
        rows.assign(image_id="", score=[1.0, 0.0, 0.5]).to_csv(path, index=False)
        described = json.loads((run / f"fold{fold}" / "model.json").read_text())
        (run / f"fold{fold}" / "model.json").write_text(json.dumps({**described, "oof_rows": 3}))
    assert runs.read_oof(run)["score"].tolist() == [1.0, 0.0, 0.5] * 2


def test_folds_of_several_trainings_are_not_put_together(run):
    damage(run, lambda rows: rows.assign(patient_id=["7", "7", "7", "18"]))  # which fold 0 held out too
    with pytest.raises(
        runs.RunError, match=r"one: 1 patients are in .* folds, 7 in those of folds 0, 1: .*train them again"
    ):
        runs.read_oof(run)
