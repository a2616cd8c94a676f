"""rsnakit.calibration against maximum likelihood by SciPy, pooled adjacent violators written out, and scikit-learn's bins."""

import math
import warnings

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import minimize
from scipy.special import expit, logit
from scipy.stats import binomtest
from sklearn.calibration import calibration_curve

from rsnakit import calibration
from rsnakit.breasts import BREAST


def drawn(n=600, seed=0, rate=0.1):
    """Labels and scores that are too high: the logit of the true probability, times 0.7, plus 2."""
    rng = np.random.default_rng(seed)
    truth = expit(rng.normal(logit(rate) - 0.5, 1.5, n))
    return (rng.random(n) < truth).astype(int), expit(0.7 * logit(truth) + 2), truth


def breasts_of(labels, scores, folds):
    return pd.DataFrame(
        {"patient_id": (np.arange(len(labels)) // 2).astype(str), "laterality": np.tile(["L", "R"], len(labels) // 2),
         "fold": folds, "cancer": labels, "score": scores}
    )  # fmt: skip


def platt_slowly(labels, scores):
    """Platt's a and b, from the likelihood of his targets."""
    labels, x = np.asarray(labels), logit(scores)
    n_positive, n_negative = labels.sum(), (1 - labels).sum()
    target = np.where(labels == 1, (n_positive + 1) / (n_positive + 2), 1 / (n_negative + 2))

    def loss(parameters):
        z = parameters[0] * x + parameters[1]
        return (np.logaddexp(0, z) - target * z).sum()

    return minimize(loss, [1.0, 0.0], method="BFGS", options={"gtol": 1e-7}).x


def isotonic_slowly(labels, scores):
    """Pooled adjacent violators: blocks of rising score are joined until their shares of positives rise."""
    blocks = [[labels[scores == score].mean(), int((scores == score).sum())] for score in np.unique(scores)]
    sizes = [1] * len(blocks)
    at = 0
    while at < len(blocks) - 1:
        (low, n_low), (high, n_high) = blocks[at], blocks[at + 1]
        if low <= high:
            at += 1
            continue
        blocks[at : at + 2] = [[(low * n_low + high * n_high) / (n_low + n_high), n_low + n_high]]
        sizes[at : at + 2] = [sizes[at] + sizes[at + 1]]
        at = max(at - 1, 0)
    return np.repeat([share for share, _ in blocks], sizes)


class TestPlatt:
    @pytest.mark.parametrize("seed", range(3))
    def test_equals_maximum_likelihood(self, seed):
        labels, scores, _ = drawn(seed=seed)
        a, b = platt_slowly(labels, scores)
        new = np.linspace(0.01, 0.99, 50)
        np.testing.assert_allclose(calibration.platt(labels, scores)(new), expit(a * logit(new) + b), atol=1e-5)

    def test_undoes_what_was_done_to_the_scores(self):
        labels, scores, truth = drawn(n=50_000)
        error = calibration.platt(labels, scores)(scores) - truth
        assert abs(error).mean() < 0.01 < 0.2 < abs(scores - truth).mean()

    def test_of_classes_that_are_apart(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = calibration.platt([0, 0, 0, 1, 1], [0.1, 0.2, 0.3, 0.7, 0.8])([0.1, 0.3, 0.7, 1.0])
        assert (np.diff(found) > 0).all() and found[0] > 0.1 and found[3] < 1
        # Their mean is that of Platt's targets, 1 / (3 + 2) and (2 + 1) / (2 + 2): the intercept is not held back.
        fitted = calibration.platt([0, 0, 0, 1, 1], [0.1, 0.2, 0.3, 0.7, 0.8])([0.1, 0.2, 0.3, 0.7, 0.8])
        assert fitted.sum() == pytest.approx(3 / 5 + 2 * 3 / 4, abs=1e-5)

    def test_of_one_class_and_sure_scores(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = calibration.platt([0, 0, 0], [0.0, 0.5, 1.0])([0.0, 0.5, 1.0])
        assert found == pytest.approx(1 / 5, abs=0.002)  # 1 / (N + 2), whatever the score


class TestIsotonic:
    def test_equals_pooled_adjacent_violators(self):
        labels, scores, _ = drawn(n=200)
        scores = np.round(scores, 2)  # ties
        found = calibration.isotonic(labels, scores)(np.unique(scores))
        np.testing.assert_allclose(found, isotonic_slowly(labels, scores), atol=1e-12)

    def test_beyond_what_it_was_fitted_on(self):
        found = calibration.isotonic([0, 1, 0, 1], [0.2, 0.3, 0.4, 0.5])
        assert found([0.0, 0.2, 0.35, 0.9]).tolist() == [0.0, 0.0, 0.5, 1.0]
        assert calibration.isotonic([0, 0], [0.1, 0.2])([0.5]).tolist() == [0.0]


class TestCrossFitted:
    @pytest.mark.parametrize("how", calibration.WAYS)
    def test_a_fold_is_calibrated_by_the_others(self, how):
        labels, scores, _ = drawn(n=300)
        table = breasts_of(labels, scores, np.arange(300) // 2 % 3)
        found = calibration.cross_fitted(table, how)
        for fold in range(3):
            own = (table["fold"] == fold).to_numpy()
            fitted = calibration.WAYS[how](labels[~own], scores[~own])
            np.testing.assert_allclose(found[own], fitted(scores[own]), atol=1e-12)
        # A fold's own labels change nothing of its scores.
        own = (table["fold"] == 0).to_numpy()
        turned = table.assign(cancer=np.where(own, 1 - labels, labels))
        np.testing.assert_array_equal(calibration.cross_fitted(turned, how)[own], found[own])

    def test_one_fold_is_dealt_into_parts_of_patients(self):
        labels, scores, _ = drawn(n=240)
        table = breasts_of(labels, scores, 0)
        found = calibration.cross_fitted(table, "platt", seed=3)
        order = np.random.default_rng(0).permutation(len(table))
        np.testing.assert_allclose(
            calibration.cross_fitted(table.iloc[order], "platt", seed=3), found[order], atol=1e-6
        )
        assert not np.allclose(calibration.cross_fitted(table, "platt", seed=4), found, atol=1e-6)
        # Both breasts of a patient are of one part: exchanging their labels changes neither of their scores.
        of_patient = table.groupby("patient_id")["cancer"].sum()
        own = (table["patient_id"] == of_patient.index[of_patient == 1][0]).to_numpy()
        turned = table.assign(cancer=np.where(own, 1 - labels, labels))
        again = calibration.cross_fitted(turned, "platt", seed=3)
        np.testing.assert_allclose(again[own], found[own], atol=1e-9)
        assert not np.allclose(again, found, atol=1e-9)

    def test_few_positives_are_spread_over_the_parts(self):
        labels = np.zeros(60, dtype=int)
        labels[[0, 10, 20, 30, 40]] = 1  # one in each part
        parts = calibration._parts(breasts_of(labels, labels / 2, 0), seed=0)
        assert sorted(parts[labels == 1]) == [0, 1, 2, 3, 4]
        assert np.bincount(parts).tolist() == [12] * 5

    def test_better_probabilities_on_new_patients(self):
        labels, scores, truth = drawn(n=4000)
        table = breasts_of(labels, scores, np.arange(4000) // 2 % 4)
        for how in calibration.WAYS:
            found = calibration.cross_fitted(table, how)
            assert np.mean((found - truth) ** 2) < 0.1 * np.mean((scores - truth) ** 2)

    def test_refused(self):
        table = breasts_of([0, 1, 0, 1], [0.1, 0.2, 0.3, 0.4], 0)
        with pytest.raises(ValueError, match=r"beta.*platt, isotonic"):
            calibration.cross_fitted(table, "beta")
        with pytest.raises(ValueError, match="all breasts are of one patient"):
            calibration.cross_fitted(table[:2], "platt")
        with pytest.raises(ValueError, match="'fold'"):
            calibration.cross_fitted(table.drop(columns="fold"), "platt")
        with pytest.raises(ValueError, match=r"breast 0_L .row 4. is not its breast's only row"):
            calibration.cross_fitted(pd.concat([table, table]), "platt")
        for fit in calibration.WAYS.values():
            with pytest.raises(ValueError, match="no scores"):
                fit([], [])
            with pytest.raises(ValueError, match="NaN"):
                fit([1, 0], [0.5, math.nan])

    @pytest.mark.parametrize("how", calibration.WAYS)
    def test_no_rows(self, how):
        table = breasts_of([0, 1], [0.1, 0.2], 0)[:0]
        assert calibration.cross_fitted(table, how).shape == (0,)
        assert set(BREAST) <= set(table)


class TestReliability:
    def test_equals_the_bins_of_sklearn(self):
        labels, scores, _ = drawn(n=1000)
        found = calibration.reliability(labels, scores, 8)
        observed, predicted = calibration_curve(labels, scores, n_bins=8, strategy="quantile")
        np.testing.assert_allclose(found["observed"], observed, atol=1e-12)
        np.testing.assert_allclose(found["predicted"], predicted, atol=1e-12)
        assert found["n"].tolist() == [125] * 8
        for row in found.itertuples():
            interval = binomtest(round(row.observed * row.n), row.n).proportion_ci(method="wilson")
            assert (row.low, row.high) == pytest.approx((interval.low, interval.high), abs=1e-9)

    def test_equal_scores_stay_together(self):
        found = calibration.reliability([1, 0, 1, 0, 1], [0.5, 0.5, 0.5, 0.5, 2.0], 4)
        assert found["n"].tolist() == [4, 1] and found["predicted"].tolist() == [0.5, 1.0]
        assert found["observed"].tolist() == [0.5, 1.0]
        assert len(calibration.reliability([1, 0, 1], [0.5, 0.5, 0.5])) == 1

    def test_odd_input(self):
        assert list(calibration.reliability([], [])) == ["n", "predicted", "observed", "low", "high"]
        assert calibration.reliability([1], [0.3]).to_dict("list")["observed"] == [1.0]
        with pytest.raises(ValueError, match="n_bins is 0"):
            calibration.reliability([1], [0.3], 0)
