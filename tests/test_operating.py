"""rsnakit.operating against scikit-learn, brute force over all thresholds and a plain loop over resamples."""

import math
import warnings

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score, recall_score

from rsnakit import metrics

checked = settings(max_examples=80, deadline=None, database=None, derandomize=True)
SCORES = [-math.inf, 0.0, 0.1, 0.25, 0.5, 0.9, 1.0, math.inf]
tied_rows = st.lists(st.tuples(st.integers(0, 1), st.sampled_from(SCORES)), min_size=1)
shares = st.sampled_from([0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 1.0])


def of(rows):
    return map(np.array, zip(*rows, strict=True))


def drawn(n_patients=60, seed=0):
    """Labels, scores with ties, and patients of two breasts each."""
    rng = np.random.default_rng(seed)
    labels = (rng.random(2 * n_patients) < 0.2).astype(int)
    scores = np.round(np.clip(rng.normal(0.3 + 0.3 * labels, 0.2), 0, 1), 2)
    return labels, scores, np.repeat(np.arange(n_patients), 2)


class TestAtThreshold:
    @settings(checked, max_examples=30)
    @given(tied_rows, st.sampled_from([*SCORES, 0.3]))
    def test_equals_sklearn(self, rows, threshold):
        labels, scores = of(rows)
        called = scores >= threshold
        assert metrics.F1At(threshold)(labels, scores) == pytest.approx(f1_score(labels, called, zero_division=0))
        assert metrics.RecallRateAt(threshold)(labels, scores) == called.mean()
        for kind, statistic in ((1, metrics.SensitivityOf(threshold)), (0, metrics.SpecificityOf(threshold))):
            expected = recall_score(labels, called, pos_label=kind) if kind in labels else math.nan
            assert statistic(labels, scores) == pytest.approx(expected, nan_ok=True)

    def test_no_rows(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert metrics.F1At(0.5)([], []) == 0.0
            for statistic in (metrics.SensitivityOf, metrics.SpecificityOf, metrics.RecallRateAt):
                assert math.isnan(statistic(0.5)([], []))

    def test_refused(self):
        for statistic in (metrics.F1At, metrics.SensitivityOf, metrics.SpecificityOf, metrics.RecallRateAt):
            with pytest.raises(ValueError, match="threshold is NaN"):
                statistic(math.nan)
            with pytest.raises(ValueError, match="neither 0 nor 1"):
                statistic(0.5)([2], [0.5])


class TestAtShare:
    @checked
    @given(tied_rows, shares)
    def test_equals_brute_force(self, rows, share):
        labels, scores = of(rows)
        thresholds = np.unique([*scores, math.inf])
        if not 0 < labels.sum() < len(labels):
            assert math.isnan(metrics.SensitivityAt(share)(labels, scores))
            assert math.isnan(metrics.SpecificityAt(share)(labels, scores))
            return
        sensitivity = np.array([(scores[labels == 1] >= t).mean() for t in thresholds])
        specificity = np.array([(scores[labels == 0] < t).mean() for t in thresholds])
        best = sensitivity[specificity >= share].max(initial=0)
        assert metrics.SensitivityAt(share)(labels, scores) == pytest.approx(best)
        best = specificity[sensitivity >= share].max(initial=0)
        assert metrics.SpecificityAt(share)(labels, scores) == pytest.approx(best)
        assert metrics.threshold_of_sensitivity(labels, scores, share) == thresholds[sensitivity >= share].max()
        expected = thresholds[specificity >= share].min(initial=math.inf)
        assert metrics.threshold_of_specificity(labels, scores, share) == expected

    def test_shares_are_compared_as_shares(self):
        """1 - 0.9 is less than 0.1 in floats, and one of ten negatives may be called all the same."""
        labels = np.repeat([0, 1], 10)
        scores = np.array([*range(9), 9.2, *range(8), 9.1, 9.3])  # one negative above one positive, and below another
        assert metrics.SensitivityAt(0.9)(labels, scores) == 0.2
        assert metrics.SensitivityAt(0.91)(labels, scores) == 0.1

    def test_class_missing(self):
        assert math.isnan(metrics.threshold_of_sensitivity([0, 0], [0.1, 0.2], 0.9))
        assert math.isnan(metrics.threshold_of_specificity([1, 1], [0.1, 0.2], 0.9))
        assert metrics.threshold_of_sensitivity([1, 1], [0.1, 0.2], 0.5) == 0.2
        assert metrics.threshold_of_specificity([0, 0], [0.1, 0.2], 0.5) == 0.2
        assert metrics.threshold_of_specificity([0, 0], [0.1, 0.2], 0.9) == math.inf

    @pytest.mark.parametrize("share", [0, -0.1, 90, math.nan])
    def test_refused(self, share):
        for make in (
            metrics.SensitivityAt,
            metrics.SpecificityAt,
            lambda share: metrics.threshold_of_sensitivity([1, 0], [1, 0], share),
            lambda share: metrics.threshold_of_specificity([1, 0], [1, 0], share),
        ):
            with pytest.raises(ValueError, match="expected a share above 0"):
                make(share)


class TestCurve:
    def test_equals_a_plain_loop(self):
        labels, scores, groups = drawn()
        thresholds = [0.5, 0.1, 0.5, -1, 2]
        curve = metrics.f1_curve(labels, scores, groups, thresholds, n=20, seed=3, level=0.8)
        assert curve.columns.tolist() == ["threshold", "f1", "low", "high"]
        assert curve["threshold"].tolist() == [-1, 0.1, 0.5, 2]
        draws = metrics.draw(groups, 20, 3)
        for row in curve.itertuples():
            called = scores >= row.threshold
            assert row.f1 == pytest.approx(f1_score(labels, called, zero_division=0))
            values = [
                f1_score(np.repeat(labels, times[groups]), np.repeat(called, times[groups]), zero_division=0)
                for times in draws.times.T
            ]
            assert (row.low, row.high) == pytest.approx(tuple(np.quantile(values, [0.1, 0.9])))

    def test_at_one_threshold_it_is_the_interval_there(self):
        labels, scores, groups = drawn()
        row = metrics.f1_curve(labels, scores, groups, [0.4], n=200, seed=1).iloc[0]
        assert tuple(row[["f1", "low", "high"]]) == pytest.approx(
            tuple(metrics.bootstrap(labels, scores, groups, metrics.F1At(0.4), n=200, seed=1))
        )

    @pytest.mark.parametrize(
        "make",
        [lambda scores: scores, lambda scores: np.repeat(scores, 40) + np.arange(4800) / 1e6],
        ids=["few", "many"],
    )
    def test_thresholds_of_its_own(self, make):
        labels, scores, groups = drawn()
        scores = make(scores)
        labels, groups = (np.repeat(each, len(scores) // len(each)) for each in (labels, groups))
        curve = metrics.f1_curve(labels, scores, groups, n=5)
        assert len(curve) <= 203 and set(curve["threshold"]) <= set(scores)
        assert {scores.min(), scores.max(), metrics.chosen_threshold(labels, scores)} <= set(curve["threshold"])
        assert curve["f1"].max() == pytest.approx(metrics.best_f1(labels, scores))

    @pytest.mark.parametrize(
        "labels, scores", [([], []), ([0, 0, 0], [0.1, 0.2, 0.2]), ([1], [0.5]), ([0, 1], [-math.inf, math.inf])]
    )
    def test_odd_input(self, labels, scores):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            curve = metrics.f1_curve(labels, scores, range(len(labels)), n=20)
        assert curve.dtypes.eq(float).all() and np.isfinite(curve["threshold"]).all()
        if not any(labels):
            assert curve["f1"].eq(0).all()
        nothing = metrics.f1_curve([], [], [], [0.5], n=20)
        pd.testing.assert_frame_equal(
            nothing, pd.DataFrame({"threshold": [0.5], "f1": 0.0, "low": math.nan, "high": math.nan})
        )

    def test_refused(self):
        with pytest.raises(ValueError, match="a threshold is NaN"):
            metrics.f1_curve([1, 0], [1, 0], ["a", "b"], [math.nan])
        with pytest.raises(ValueError, match="level is 95"):
            metrics.f1_curve([1, 0], [1, 0], ["a", "b"], [0.5], level=95)
