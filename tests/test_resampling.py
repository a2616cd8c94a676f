"""rsnakit.resampling: draws, intervals, paired differences, against a plain loop, closed forms and the literature."""

import math
import warnings

import numpy as np
import pandas as pd
import pytest

from rsnakit import metrics


def drawn_breasts(n_patients=200, seed=0):
    rng = np.random.default_rng(seed)
    cancer = (rng.random(2 * n_patients) < 0.1).astype(int)
    return pd.DataFrame(
        {
            "patient_id": np.repeat(np.arange(n_patients), 2).astype(str),
            "laterality": np.tile(["L", "R"], n_patients),
            "cancer": cancer,
            "score": np.round(np.clip(rng.normal(0.3 + 0.3 * cancer, 0.2), 0, 1), 2),
        }
    )


class TestBootstrap:
    def test_width_is_that_of_patients(self):
        # Both breasts of a patient score the same: the mean's error is that of 300 patients, not of 600 breasts.
        patient_scores = np.random.default_rng(1).normal(size=300)
        scores, groups = np.repeat(patient_scores, 2), np.repeat(np.arange(300), 2)
        interval = metrics.bootstrap(np.zeros(600), scores, groups, lambda labels, scores: scores.mean(), n=4000)
        half = 1.96 * patient_scores.std() / math.sqrt(300)
        assert interval.value == pytest.approx(patient_scores.mean())
        assert interval.high - interval.value == pytest.approx(half, rel=0.08)
        assert interval.value - interval.low == pytest.approx(half, rel=0.08)

    def test_coverage(self):
        rng, covered = np.random.default_rng(2), 0
        for seed in range(150):
            scores = np.repeat(rng.normal(size=40), 2)
            _, low, high = metrics.bootstrap(
                np.zeros(80), scores, np.repeat(np.arange(40), 2), lambda labels, scores: scores.mean(), 150, seed, 0.8
            )
            covered += low <= 0 <= high
        # 80 % aimed at, with a binomial deviation of 3.3 %; drawing breasts instead of patients would cover 64 %.
        assert 0.7 < covered / 150 < 0.9

    def test_statistic_keeps_labels_with_their_scores(self):
        labels = np.array([0, 1, 0, 1, 1, 0])
        interval = metrics.bootstrap(labels, labels * 0.5, list("abcdef"), lambda y, s: float((y * 0.5 == s).all()), 50)
        assert tuple(interval) == (1.0, 1.0, 1.0)

    def test_same_seed_same_interval_whatever_the_row_order(self):
        table = drawn_breasts()
        shuffled = table.sample(frac=1, random_state=3)
        first, again = (
            metrics.bootstrap(t["cancer"], t["score"], t["patient_id"], metrics.auc, 100, 5) for t in (table, shuffled)
        )
        assert tuple(first) == pytest.approx(tuple(again), abs=1e-12)
        other = metrics.bootstrap(table["cancer"], table["score"], table["patient_id"], metrics.auc, 100, 6)
        assert other.low != first.low

    def test_undefined_resamples_are_counted(self):  # V03
        # One positive in three patients: it is missing from (2/3)^3 of the resamples.
        interval = metrics.bootstrap([1, 0, 0], [0.9, 0.1, 0.2], ["a", "b", "c"], metrics.average_precision, n=3000)
        expected = 3000 * ((2 / 3) ** 3 + (1 / 3) ** 3)  # ... and only it is drawn in (1/3)^3
        assert interval.left_out == pytest.approx(expected, rel=0.1)
        assert tuple(interval) == (1.0, 1.0, 1.0)
        value, low, high = metrics.bootstrap([0, 0], [0.5, 0.5], ["a", "b"], metrics.auc, n=10)
        assert math.isnan(value) and math.isnan(low) and math.isnan(high)
        nothing = metrics.bootstrap([], [], [], metrics.pfbeta, n=10)
        assert (nothing.value, nothing.left_out) == (0.0, 10) and math.isnan(nothing.low)

    def test_refused(self):
        for groups in (["a"], ["a", None]):
            with pytest.raises(ValueError, match="groups"):
                metrics.bootstrap([1, 0], [1, 0], groups, metrics.auc)
        with pytest.raises(ValueError, match="n is 0"):
            metrics.bootstrap([1, 0], [1, 0], ["a", "b"], metrics.auc, n=0)
        with pytest.raises(ValueError, match="level is 95"):
            metrics.bootstrap([1, 0], [1, 0], ["a", "b"], metrics.auc, level=95)


class TestWilson:
    def test_published_values(self):
        # Newcombe, Statistics in Medicine 17, 1998, 857-872, table I (method 3), and the closed form z^2 / (n + z^2).
        low, high = metrics.wilson([81, 15, 0, 1], [263, 148, 20, 29])
        assert low == pytest.approx([0.2553, 0.0624, 0.0, 0.0061], abs=5e-5)
        assert high == pytest.approx([0.3662, 0.1605, 0.1611, 0.1718], abs=5e-5)
        assert metrics.wilson(0, 10) == pytest.approx((0, 1.959964**2 / (10 + 1.959964**2)), abs=1e-7)
        assert metrics.wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=5e-5)

    def test_bounds_solve_the_score_equation(self):
        k, n, z = np.arange(1, 50), 50, 1.6448536269514722  # 90 %
        for bound in metrics.wilson(k, n, level=0.9):
            assert np.abs(k / n - bound) == pytest.approx(z * np.sqrt(bound * (1 - bound) / n), abs=1e-12)

    def test_ends(self):
        n = np.arange(200)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert (metrics.wilson(0, n)[0] == 0.0).all() and (metrics.wilson(n, n)[1] == 1.0).all()
            assert metrics.wilson(0, 0) == (0.0, 1.0)

    @pytest.mark.parametrize("k, n", [(3, 2), (-1, 2), (math.nan, 2), (1, math.inf)])
    def test_refused(self, k, n):
        with pytest.raises(ValueError, match="0 <= k <= n"):
            metrics.wilson(k, n)
