"""rsnakit.nested against scikit-learn, loops written out, and a large sample."""

import json
import math
import warnings

import numpy as np
import pandas as pd
import pytest
from evaluated import drawn_breasts
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score

from rsnakit import calibration, metrics, nested


class TestScoreBreasts:
    def test_against_sklearn(self):
        table = drawn_breasts()
        labels, scores = table["cancer"], table["score"]
        report = json.loads(json.dumps(nested.score_breasts(table, n=200), allow_nan=False))
        counts = [report[name] for name in ("n_breasts", "n_positive", "n_patients", "n_resamples")]
        assert counts == [400, int(labels.sum()), 200, 200]
        assert report["pf1"]["value"] == pytest.approx(2 * (labels * scores).sum() / (labels + scores).sum())
        assert report["auc"]["value"] == pytest.approx(roc_auc_score(labels, scores))
        assert report["average_precision"]["value"] == pytest.approx(average_precision_score(labels, scores))
        threshold = report["naive_threshold"]["value"]
        assert report["naive_f1"]["value"] == pytest.approx(f1_score(labels, scores >= threshold))
        assert report["naive_percentile"] == pytest.approx(100 * (scores < threshold).mean())
        for name in ("pf1", "auc", "average_precision", "naive_f1"):
            assert report[name]["low"] < report[name]["value"] < report[name]["high"]
            assert report[name]["left_out"] == 0
        assert "chosen on the scored data" in report["naive_note"]

    @pytest.mark.parametrize("table", [drawn_breasts(5).iloc[:0], drawn_breasts(5).assign(cancer=0)])
    def test_without_positives(self, table):  # V01, V03
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            report = json.loads(json.dumps(nested.score_breasts(table, n=20), allow_nan=False))
        assert report["pf1"]["value"] == 0.0 and report["naive_f1"]["value"] == 0.0
        for name in ("auc", "average_precision", "naive_threshold"):
            assert report[name] == {"value": None, "low": None, "high": None, "left_out": 20}

    def test_rows_an_image_are_refused(self):
        with pytest.raises(ValueError, match=r"breast 0_L .row 10. is not its breast's only row; call to_breast"):
            nested.score_breasts(pd.concat([drawn_breasts(5)] * 2))


def folded(n_patients=120, n_folds=4, seed=0):
    table = drawn_breasts(n_patients, seed)
    return table.assign(fold=table["patient_id"].astype(int) % n_folds)


def f1_slowly(labels, called):
    both = labels.sum() + called.sum()
    return 2 * (labels * called).sum() / both if both else 0.0


def best_slowly(labels, scores):
    """The highest threshold with the best F1, by trying all."""
    best, threshold = 0.0, math.inf
    for candidate in sorted(set(scores), reverse=True):
        f1 = f1_slowly(labels, scores >= candidate)
        if f1 > best:
            best, threshold = f1, candidate
    return threshold


def nested_slowly(labels, scores, folds):
    called, thresholds = np.zeros(len(labels), dtype=bool), {}
    for fold in np.unique(folds):
        own = folds == fold
        thresholds[fold] = best_slowly(labels[~own], scores[~own])
        called[own] = scores[own] >= thresholds[fold]
    return f1_slowly(labels, called), thresholds, called


class TestNestedThreshold:
    @pytest.mark.parametrize("seed", range(3))
    def test_equals_a_loop_over_folds(self, seed):
        table = folded(seed=seed).iloc[np.random.default_rng(seed).permutation(240)]
        labels, scores, folds = (table[name].to_numpy() for name in ("cancer", "score", "fold"))
        found = nested.nested_threshold(table, n=50)
        value, thresholds, called = nested_slowly(labels, scores, folds)
        assert found.f1.value == pytest.approx(value) and value == pytest.approx(f1_score(labels, called))
        assert found.thresholds == thresholds
        np.testing.assert_array_equal(found.called, called)
        naive = f1_score(labels, scores >= best_slowly(labels, scores))
        assert found.naive_f1.value == pytest.approx(naive)
        assert found.optimism == pytest.approx(naive - value)

    def test_a_folds_own_labels_do_not_choose_its_threshold(self):
        table = folded()
        own = table["fold"] == 2
        turned = table.assign(cancer=table["cancer"].where(~own, 1 - table["cancer"]))
        before, after = nested.nested_threshold(table, n=10), nested.nested_threshold(turned, n=10)
        assert before.thresholds[2] == after.thresholds[2]
        assert before.thresholds != after.thresholds

    def test_the_interval_chooses_anew_in_each_resample(self):
        table = folded(40, n_folds=3)  # few positives, and scores with two decimals: ties, and resamples without some
        labels, scores, folds = (table[name].to_numpy() for name in ("cancer", "score", "fold"))
        draws = metrics.draw(table["patient_id"], 60, 5)
        values = []
        for times in draws.times.T:
            rows = np.repeat(np.arange(len(table)), times[draws.codes])
            values.append(nested_slowly(labels[rows], scores[rows], folds[rows])[0])
        found = nested.nested_threshold(table, n=60, seed=5).f1
        assert (found.low, found.high) == pytest.approx(tuple(np.quantile(values, [0.025, 0.975])), abs=1e-12)
        fixed = metrics.bootstrap(labels, scores, table["patient_id"], metrics.F1At(best_slowly(labels, scores)), 60, 5)
        assert nested.nested_threshold(table, n=60, seed=5).naive_f1 == fixed

    def test_resamples_in_parts_are_the_same(self, monkeypatch):
        table = folded(40)
        whole = nested.nested_threshold(table, n=50)
        monkeypatch.setattr(nested, "N_NUMBERS", 300)
        assert nested.nested_threshold(table, n=50).f1 == whole.f1

    def test_the_order_of_rows_does_not_matter(self):
        table = folded()
        found = nested.nested_threshold(table.iloc[::-1], n=50)
        expected = nested.nested_threshold(table, n=50)
        assert found.plain() == expected.plain()
        np.testing.assert_array_equal(found.called[::-1], expected.called)

    def test_one_fold_has_none(self):  # and no rows have none
        assert nested.nested_threshold(folded().assign(fold=3)) is None
        assert nested.nested_threshold(folded().iloc[:0]) is None

    def test_other_folds_without_positives_call_nothing(self):
        table = folded(20, n_folds=2)
        found = nested.nested_threshold(table.assign(cancer=(table["fold"] == 1).astype(int)), n=20)
        assert found.thresholds[1] == math.inf and not found.called[table["fold"] == 1].any()
        assert (found.f1.value, found.f1.low, found.f1.high) == (0.0, 0.0, 0.0)  # fold 0 is all called, and wrongly
        written = json.loads(json.dumps(found.plain(), allow_nan=False))
        assert written["thresholds"]["1"] is None and written["optimism"] == found.naive_f1.value
        none = nested.nested_threshold(table.assign(cancer=0), n=20)
        assert none.f1.value == none.naive_f1.value == 0.0

    def test_refused(self):
        with pytest.raises(ValueError, match="'fold'"):
            nested.nested_threshold(drawn_breasts(5))
        with pytest.raises(ValueError, match=r"10 of .* rows have no whole number as fold"):
            nested.nested_threshold(drawn_breasts(5).assign(fold=None))
        with pytest.raises(ValueError, match=r"breast 0_L .row 10. is not its breast's only row"):
            nested.nested_threshold(pd.concat([folded(5)] * 2))


def draw_patients(rng, n):
    """Labels (2 n,) of two breasts of n patients, 10 % positive, and scores whose errors are alike within a patient."""
    labels = rng.random((n, 2)) < 0.1
    scores = 1.5 * labels + np.sqrt(0.4) * rng.normal(size=(n, 1)) + np.sqrt(0.6) * rng.normal(size=(n, 2))
    return labels.ravel(), scores.ravel()


def simulated(n_trials, n):
    """Trials of 400 patients in 5 folds: nested and naive F1 of each, `(value, low, high)`, and what the same thresholds
    give on a large sample of new patients, each on an equal share of them."""
    rng = np.random.default_rng(0)
    labels, scores = draw_patients(rng, 500_000)
    positive, negative = np.sort(scores[labels]), np.sort(scores[~labels])

    def on_new_patients(thresholds):
        hits, alarms = (len(of) - np.searchsorted(of, thresholds).mean() for of in (positive, negative))
        return 2 * hits / (len(positive) + hits + alarms)

    patients = np.arange(800) // 2
    table = pd.DataFrame({"patient_id": patients, "laterality": np.tile(["L", "R"], 400), "fold": patients % 5})
    rows = []
    for trial in range(n_trials):
        labels, scores = draw_patients(rng, 400)
        found = nested.nested_threshold(table.assign(cancer=labels.astype(int), score=scores), n, seed=trial)
        naive = metrics.best_threshold(labels, scores)[0]
        truths = on_new_patients(list(found.thresholds.values())), on_new_patients([naive])
        rows.append([*found.f1, truths[0], *found.naive_f1, truths[1]])
    return np.reshape(rows, (n_trials, 2, 4)).transpose(1, 2, 0)


def test_nested_is_unbiased_and_naive_is_not():
    (value, _, _, truth), (naive_value, _, _, naive_truth) = simulated(300, n=1)
    noise = (value - truth).std() / np.sqrt(300)
    assert abs((value - truth).mean()) < 3 * noise < 0.01
    assert (naive_value - naive_truth).mean() > 8 * noise  # 0.03


@pytest.mark.slow
def test_nested_intervals_cover_what_new_patients_give():
    (_, low, high, truth), (_, naive_low, naive_high, naive_truth) = simulated(300, n=300)
    assert 0.92 <= ((low <= truth) & (truth <= high)).mean() <= 0.98
    assert ((naive_low <= naive_truth) & (naive_truth <= naive_high)).mean() < 0.92


def history(f1, ap, side="valid"):
    return pd.DataFrame({"epoch": range(1, len(f1) + 1), f"{side}_f1": f1, f"{side}_ap": ap})


class TestEpochChoice:
    FOLDS: dict = {  # noqa: RUF012
        0: history([0.2, 0.5, 0.4], [0.1, 0.3, 0.35]),
        1: history([0.3, 0.3, 0.6], [0.2, 0.2, 0.25]),
        2: history([0.6, 0.1, 0.2], [0.5, 0.4, 0.1]),
    }

    def test_by_hand(self):
        # Means of the others: without fold 0 .45 .2 .4, without 1 .4 .3 .3, without 2 .25 .4 .5: epochs 1, 1, 3.
        found = nested.epoch_choice(self.FOLDS, "pf1")
        assert found["epochs"] == {"0": 2, "1": 3, "2": 1}
        assert found["other_epochs"] == {"0": 1, "1": 1, "2": 3}
        assert found["f1"] == pytest.approx((0.3 + 0.3 + 0.4) / 3)
        assert found["average_precision"] == pytest.approx((0.2 + 0.05 + 0.4) / 3)
        assert "the other folds choose" in found["note"] and found["select"] == "pf1"
        by_ap = nested.epoch_choice(self.FOLDS, "ap")  # without fold 0 .35 .3 .175, 1 .3 .35 .225, 2 .15 .25 .3
        assert (by_ap["epochs"], by_ap["other_epochs"]) == ({"0": 3, "1": 3, "2": 1}, {"0": 1, "1": 2, "2": 3})
        assert by_ap["average_precision"] == pytest.approx((0.25 + 0.05 + 0.4) / 3)
        json.dumps(by_ap, allow_nan=False)

    def test_one_fold_is_held_against_its_last_epoch(self):
        found = nested.epoch_choice({4: self.FOLDS[0]}, "pf1")
        assert (found["epochs"], found["other_epochs"]) == ({"4": 2}, {"4": 3})
        assert found["f1"] == pytest.approx(0.1) and found["average_precision"] == pytest.approx(-0.05)
        assert "the last epoch" in found["note"]

    def test_nothing_was_chosen(self):
        assert nested.epoch_choice(self.FOLDS, "last") is None
        assert nested.epoch_choice({}, "pf1") is None
        assert nested.epoch_choice({0: self.FOLDS[0][:0]}, "pf1") is None

    def test_the_averaged_weights(self):
        folds = {
            fold: table.rename(columns=lambda name: name.replace("valid", "ema_valid"))
            for fold, table in self.FOLDS.items()
        }
        assert nested.epoch_choice(folds, "pf1", "ema_valid") == nested.epoch_choice(self.FOLDS, "pf1")
        with pytest.raises(ValueError, match="'valid_f1', 'valid_ap'"):
            nested.epoch_choice(folds, "pf1")
        with pytest.raises(ValueError, match="select is 'loss'; expected last, pf1, ap"):
            nested.epoch_choice(self.FOLDS, "loss")

    def test_unknown_scores_and_folds_of_other_lengths(self):
        longer = history([0.5, 0.1, 0.1, 0.9], [math.nan, 0.2, 0.1, 0.9])
        found = nested.epoch_choice({0: self.FOLDS[0], 1: longer}, "ap")
        # Fold 1 chose epoch 4, which fold 0 does not have; of the three that both have fold 1's best is the second.
        assert (found["epochs"], found["other_epochs"]) == ({"0": 3, "1": 4}, {"0": 2, "1": 3})
        assert found["average_precision"] == pytest.approx((0.05 + 0.8) / 2)
        never = history([0.0, 0.0], [math.nan, math.nan])
        assert nested.epoch_choice({0: never}, "ap")["average_precision"] is None

    def test_a_choice_among_noise_adds_what_the_maximum_does(self):
        """Epochs that are equally good: the best of 8 draws of a normal is 1.4236 deviations up (Teichroew, 1956), and an
        epoch that other folds choose is none."""
        rng = np.random.default_rng(0)
        added = [
            nested.epoch_choice({fold: history(rng.normal(size=8), np.zeros(8)) for fold in range(3)}, "pf1")["f1"]
            for _ in range(100)
        ]
        assert np.mean(added) == pytest.approx(1.4236, abs=3 * np.std(added) / np.sqrt(100))
        assert np.std(added) / np.sqrt(100) < 0.1


class TestPf1Table:
    def test_side_by_side(self):
        table = folded()
        calibrated = {how: calibration.cross_fitted(table, how) for how in calibration.WAYS}
        found = nested.pf1_table(table, calibrated, n=50)
        assert found.index.tolist() == ["raw", "platt", "isotonic", "cut at other folds' thresholds"]
        for name, scores in {"raw": table["score"], **calibrated}.items():
            expected = metrics.bootstrap(table["cancer"], scores, table["patient_id"], metrics.pfbeta, 50)
            assert found.loc[name].tolist() == pytest.approx(list(expected))
        assert found.iloc[-1].tolist() == pytest.approx(list(nested.nested_threshold(table, n=50).f1))
        # Closed form, 2 pTP / (P + sum p).
        raw = 2 * (table["score"] * table["cancer"]).sum() / (table["cancer"].sum() + table["score"].sum())
        assert found.loc["raw", "value"] == pytest.approx(raw)

    def test_one_fold_says_that_it_flatters(self):
        table = folded().assign(fold=0)
        found = nested.pf1_table(table, {}, n=20)
        assert found.index.tolist() == ["raw", "cut at the naive threshold (flatters)"]
        best = best_slowly(table["cancer"], table["score"])
        assert found["value"].iloc[1] == pytest.approx(f1_score(table["cancer"], table["score"] >= best))
