"""Breasts that are called positive: by which threshold, and what is said where far more or fewer are called than before."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from test_runs import make_run

from rsnakit import calling, infer, metrics, results, runs
from rsnakit.infer import InferConfig


def scored(scores) -> pd.DataFrame:
    """A report of two images a breast, one 0.1 above and one 0.1 below the breast's score."""
    frame = pd.DataFrame({"patient_id": [str(i) for i in range(len(scores))], "laterality": "L", "score": scores})
    frame = frame.assign(prediction_id=frame["patient_id"] + "_L")
    parts = [
        frame.assign(image_id=frame["patient_id"] + side, score=frame["score"] + by)
        for side, by in (("a", 0.1), ("b", -0.1))
    ]
    return pd.concat(parts).sort_values("image_id", kind="stable").reset_index(drop=True)


def breasts_of(n: int, called: int, threshold: float = 0.5) -> pd.DataFrame:
    """A breast each, so many of them at the threshold and the others below it."""
    scores = np.where(np.arange(n) < called, threshold, threshold - 0.1)
    return pd.DataFrame({"patient_id": [str(i) for i in range(n)], "laterality": "L", "score": scores})


def with_summary(folder: Path, percentile: float | None, threshold: float = 0.5) -> Path:
    run = make_run(folder)
    chosen = {"threshold": threshold, "percentile": percentile, "nested_f1": None}
    (run / "summary.json").write_text(json.dumps({"folds": [0, 1], "by_aggregate": {"mean": chosen, "max": chosen}}))
    return run


@pytest.mark.parametrize("views", ["none", "attention"])
@pytest.mark.parametrize("how", metrics.HOWS)
def test_a_breast_that_was_scored_as_such_keeps_its_score_in_every_way(tmp_path, how, views):
    """Through noisy_or again, two images of 0.47 would make 0.72 of it."""
    run, scores = make_run(tmp_path / "run"), [0.47, 0.1 + 0.2, 1 / 3]
    for fold in (0, 1):
        path = run / f"fold{fold}" / "model.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "model": {"views": views}}))
    report = scored(scores)
    if views != "none":
        report = report.assign(score=np.repeat(scores, 2))
    found = calling.to_breasts(report, run, how)
    pairs = report["score"].to_numpy().reshape(3, 2)
    by_hand = {"mean": pairs.mean(1), "max": pairs.max(1), "noisy_or": 1 - (1 - pairs).prod(1)}
    expected = scores if views != "none" else by_hand.get(how, pairs.mean(1))
    assert found["score"].tolist() == (scores if views != "none" else pytest.approx(expected))
    submission = infer.write_submission(found, tmp_path / "s.csv", None)
    assert submission["cancer"].tolist() == found["score"].tolist()
    called = infer.write_submission(found, tmp_path / "s.csv", found["score"].max())["cancer"]
    assert called.tolist() == (found["score"] == found["score"].max()).astype(float).tolist()


def test_what_the_report_says_of_its_scores_goes_before_what_the_run_is(tmp_path):
    """A report of an older version of the kit does not say it."""
    run = make_run(tmp_path / "run")  # whose model.json says nothing of views: it scores images
    report = scored([0.25, 0.25]).assign(score=0.25)
    assert calling.to_breasts(report, run, "noisy_or")["score"].tolist() == pytest.approx([1 - 0.75**2] * 2)
    assert calling.to_breasts(report.assign(score_of="breast"), run, "noisy_or")["score"].tolist() == [0.25] * 2


PERCENTILE = InferConfig(threshold="percentile")


def test_the_share_that_was_called_out_of_fold_is_called(tmp_path):
    """Here the scores lie lower, as those of a mean over folds may: the best threshold of before calls none of them."""
    run = make_run(tmp_path / "run")
    results.write_summary(
        run
    )  # breasts of 0.375 (cancer), 0.125 and 0.75 in either fold: 0.375 is best, and calls two thirds
    breasts = breasts_of(30, 0).assign(score=np.random.default_rng(0).permutation(np.arange(1, 31)) / 100)
    assert calling.choose_threshold(InferConfig(), run, breasts)[0] == 0.375
    threshold, source = calling.choose_threshold(PERCENTILE, run, breasts)
    assert threshold == 0.11 and (breasts["score"] >= threshold).sum() == 20
    assert source.startswith(
        "threshold 0.1100, which calls nearest to the 66.7 % called on the out-of-fold scores of fold 0, 1"
    )
    assert calling.called_note(PERCENTILE, run, threshold, breasts) == ""
    assert calling.called_note(InferConfig(), run, 0.375, breasts).startswith(
        "NOTE: 66.7% of the out-of-fold breasts were called, and 0.0% of 30 are here: "
    )


def test_the_percentile_is_that_of_the_aggregate(tmp_path):
    run, breasts = make_run(tmp_path / "run"), breasts_of(30, 0).assign(score=np.arange(1, 31) / 100)
    results.write_summary(run)  # the maximum of 0.5 and 0.25 is 0.5, which stays below 0.75: two thirds again
    summary = json.loads((run / "summary.json").read_text())
    summary["by_aggregate"]["max"]["percentile"] = 90.0
    (run / "summary.json").write_text(json.dumps(summary))
    for how, n in (("max", 3), ("mean", 20)):
        threshold, source = calling.choose_threshold(InferConfig("percentile", how), run, breasts)
        assert (breasts["score"] >= threshold).sum() == n and f"each breast's {how} over images" in source


def test_a_percentile_needs_breasts_and_a_summary_that_has_it(tmp_path):
    run = make_run(tmp_path / "run")
    with pytest.raises(runs.RunError, match=r"no summary\.json, and threshold='percentile' is read from it"):
        calling.choose_threshold(PERCENTILE, run, breasts_of(4, 2))
    (run / "summary.json").write_text(json.dumps({"folds": [0, 1], "threshold": 0.5}))
    with pytest.raises(runs.RunError, match=r"no percentile for aggregate='mean'; an older version"):
        calling.choose_threshold(PERCENTILE, run, breasts_of(4, 2))
    with pytest.raises(ValueError, match="give breasts"):
        calling.choose_threshold(PERCENTILE, with_summary(tmp_path / "other", 90.0))


@pytest.mark.parametrize(
    "summary",
    [
        None,  # a run whose summary was not copied
        {"folds": [0], "threshold": 0.5, "percentile": 98.0},  # of other folds than there are
        {"threshold": 0.5, "percentile": 98.0},
        {"folds": [0, 1]},
        {"folds": [0, 1], "threshold": None, "percentile": None},
        {"folds": [0, 1], "by_aggregate": {"max": {"threshold": 0.5, "percentile": 98.0}}},
    ],
)
@pytest.mark.parametrize("threshold", ["auto", "percentile"])
def test_what_a_summary_cannot_give_is_known_before_anything_is_scored(tmp_path, threshold, summary):
    """With the words that it would have afterwards."""
    run, config = make_run(tmp_path / "run"), InferConfig(threshold)
    (run / "summary.json").unlink(missing_ok=True)
    if summary is not None:
        (run / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(runs.RunError) as before:
        calling.check_threshold(config, run)
    with pytest.raises(runs.RunError) as after:
        calling.choose_threshold(config, run, breasts_of(4, 2))
    assert str(before.value) == str(after.value)
    for other in (InferConfig("none"), InferConfig(0.5)):  # which ask the summary for nothing
        calling.check_threshold(other, run)


@pytest.mark.parametrize("threshold", ["auto", "percentile"])
def test_what_a_summary_can_give_is_no_fault(tmp_path, threshold):
    calling.check_threshold(InferConfig(threshold, "max"), with_summary(tmp_path / "run", 90.0))


@pytest.mark.parametrize(
    ("percentile", "n", "called", "far"),
    [
        # Wilson's 95 % intervals, z = 1.96: of 0 in 24 it ends at z^2 / (24 + z^2) = 0.138, of all 24 it begins at 0.862.
        (74.0, 24, 0, True),
        (94.0, 24, 0, False),  # 6 % may be none of 24
        (54.0, 24, 24, True),
        (10.0, 24, 24, False),  # 90 % may be all of 24
        (97.9, 2, 0, False),  # Kaggle's public test.csv has two breasts
        (97.9, 2, 2, True),  # two of two begin at 2 / (2 + z^2) = 0.342
        (98.0, 20_000, 600, False),  # 2 % and 3 %: beyond chance, but odds of 1.5
        (98.0, 20_000, 1_000, True),  # 2 % and 5 %: odds of 2.6
        (90.0, 20_000, 1_000, True),  # 10 % and 5 %: odds of 2.1
        (90.0, 20_000, 1_200, False),  # 10 % and 6 %: odds of 1.7
        (0.0, 24, 24, False),
        (100.0, 24, 0, False),
    ],
)
def test_far_more_or_fewer_than_out_of_fold_are_said(tmp_path, percentile, n, called, far):
    run, breasts = with_summary(tmp_path / "run", percentile), breasts_of(n, called)
    said = calling.called_note(InferConfig(), run, 0.5, breasts)
    assert bool(said) == far
    if far:
        share, here = f"{1 - percentile / 100:.1%}", f"{called / n:.1%}"
        assert f"NOTE: {share} of the out-of-fold breasts were called, and {here} of {n:,} are here" in said
        assert "-p threshold percentile" in said


def test_a_given_threshold_is_held_against_the_same_one_out_of_fold(tmp_path):
    """One third of the out-of-fold breasts is at 0.6 or above it, and none of these."""
    run, breasts = make_run(tmp_path / "run"), breasts_of(24, 0)
    assert "NOTE: 33.3% of the out-of-fold" in calling.called_note(InferConfig(0.6), run, 0.6, breasts)
    assert calling.called_note(InferConfig(0.8), run, 0.8, breasts) == ""  # none then either
    (run / "fold0" / "oof.csv").unlink()  # a run that was copied without its scores
    assert calling.called_note(InferConfig(0.6), run, 0.6, breasts) == ""


def test_where_nothing_is_known_nothing_is_said(tmp_path):
    run = with_summary(tmp_path / "run", None)
    assert calling.called_note(InferConfig(), run, 0.5, breasts_of(24, 24)) == ""
    assert calling.called_note(InferConfig("none"), run, None, breasts_of(24, 24)) == ""
    assert calling.called_note(InferConfig(), run, 0.5, breasts_of(0, 0)) == ""


def test_equal_scores_are_called_together(tmp_path):
    run, breasts = with_summary(tmp_path / "run", 70.0), breasts_of(30, 30)
    threshold, _ = calling.choose_threshold(PERCENTILE, run, breasts)
    assert threshold == np.inf  # none is nearer to 30 % than all
    assert "many breasts share a score" in calling.called_note(PERCENTILE, run, threshold, breasts)
