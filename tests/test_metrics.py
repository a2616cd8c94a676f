"""rsnakit.metrics against slow references, scikit-learn and values from the literature."""

import math
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score

from rsnakit import metrics

checked = settings(max_examples=80, deadline=None, database=None, derandomize=True)
# Few distinct scores, so that ties are the rule.
tied_rows = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0])), min_size=1)
rows = st.lists(st.tuples(st.integers(0, 1), st.floats(-0.5, 1.5)), min_size=1, max_size=30)


def slow_pfbeta(labels, scores, beta):
    true_mass = false_mass = positives = 0.0
    for label, score in zip(labels, scores, strict=True):
        score = min(max(score, 0.0), 1.0)
        positives += label
        true_mass += score if label else 0.0
        false_mass += 0.0 if label else score
    if positives == 0 or true_mass == 0:
        return 0.0
    precision, recall = true_mass / (true_mass + false_mass), true_mass / positives
    return (1 + beta**2) * precision * recall / (beta**2 * precision + recall)


def images(**columns):
    """Five images of three breasts of two patients, the breasts interleaved."""
    table = {
        "patient_id": ["7", "12", "7", "12", "7"],
        "laterality": ["R", "L", "L", "L", "R"],
        "image_id": ["1", "2", "3", "4", "5"],
        "score": [0.2, 0.5, 0.3, 0.7, 0.9],
        "cancer": [1, 0, 0, 0, 1],
        "fold": [0, 1, 0, 1, 0],
    }
    return pd.DataFrame(table | columns)


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


class TestPfbeta:
    def test_worked_values(self):  # V01
        labels, scores = [1, 0, 0, 1], [0.9, 0.2, 0.1, 0.4]
        assert metrics.pfbeta(labels, scores) == pytest.approx(2 * 1.3 / (2 + 1.6), abs=1e-12)
        assert metrics.pfbeta(labels, scores) == pytest.approx(0.722222, abs=1e-6)
        assert type(metrics.pfbeta(np.array(labels), np.float32(scores))) is float
        # All ones on the competition's 492 positives in 23,826 breasts.
        assert metrics.pfbeta(np.arange(23826) < 492, np.ones(23826)) == pytest.approx(0.0405, abs=5e-5)

    @pytest.mark.parametrize("labels, scores", [([1, 0], [0, 0]), ([0, 0], [0.5, 1]), ([1, 0], [0, 0.7]), ([], [])])
    def test_nothing_found_is_zero(self, labels, scores):  # V01
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = metrics.pfbeta(labels, scores)
        assert result == 0.0 and type(result) is float

    def test_outside_is_clipped(self):  # V01
        labels = [1, 0, 1, 0]
        inside = metrics.pfbeta(labels, [1, 0, 0.5, 1])
        assert metrics.pfbeta(labels, [1.7, -3, 0.5, 2]) == inside
        assert metrics.pfbeta(labels, [math.inf, -math.inf, 0.5, math.inf]) == inside

    @pytest.mark.parametrize(
        "labels, scores, message",
        [
            ([1, 0], [0.5, math.nan], "1 of 2 scores are NaN.*row 1"),
            ([0, 0], [math.nan, 0.5], "NaN"),  # no positives: the early answer must not hide it
            ([1, 2], [0.5, 0.5], "neither 0 nor 1.*2.0"),
            ([1, math.nan], [0.5, 0.5], "neither 0 nor 1"),
            ([1, 0, 1], [0.5, 0.5], r"\(3,\).*\(2,\)"),
            ([1, 0], [[0.5], [0.5]], r"\(2, 1\)"),
        ],
    )
    def test_refused(self, labels, scores, message):  # V01
        for function in (metrics.pfbeta, metrics.best_threshold, metrics.auc, metrics.average_precision):
            with pytest.raises(ValueError, match=message):
                function(labels, scores)

    @pytest.mark.parametrize("beta", [-1, math.nan, math.inf])
    def test_beta_refused(self, beta):
        with pytest.raises(ValueError, match="beta"):
            metrics.pfbeta([1], [1], beta)

    @checked
    @given(rows, st.sampled_from([0.5, 1.0, 2.0]))
    def test_equals_slow_reference(self, rows, beta):
        labels, scores = zip(*rows, strict=True)
        result = metrics.pfbeta(labels, scores, beta)
        assert result == pytest.approx(slow_pfbeta(labels, scores, beta), abs=1e-9)
        assert 0.0 <= result <= 1.0


class TestBestThreshold:
    @checked
    @given(tied_rows)
    def test_equals_brute_force(self, rows):  # V01, ties
        labels, scores = map(np.array, zip(*rows, strict=True))
        threshold, score = metrics.best_threshold(labels, scores)
        candidates = np.unique(scores)
        f1 = np.array([f1_score(labels, scores >= t, zero_division=0) for t in candidates])
        assert score == pytest.approx(f1.max(), abs=1e-12)
        assert score == pytest.approx(metrics.pfbeta(labels, scores >= threshold), abs=1e-12)
        if labels.any():
            assert threshold == candidates[f1 >= f1.max() - 1e-12].max()
        else:
            assert (threshold, score) == (math.inf, 0.0)

    def test_no_rows(self):
        assert metrics.best_threshold([], []) == (math.inf, 0.0)

    def test_float32_scores_still_reach_their_threshold(self):
        scores = np.float32([0.1, 0.3, 0.7])
        threshold, score = metrics.best_threshold([0, 1, 1], scores)
        assert (scores >= threshold).tolist() == [False, True, True] and score == 1.0


class TestPercentile:
    def test_known_rate(self):
        scores = np.arange(1000) / 1000
        assert metrics.percentile_of(scores, 0.979) == pytest.approx(97.9)
        assert (scores * 3 >= metrics.threshold_at(scores * 3, 97.9)).sum() == 21

    @checked
    @given(st.lists(st.integers(0, 9), min_size=1))
    def test_round_trip(self, scores):
        for threshold in [*scores, math.inf]:
            assert metrics.threshold_at(scores, metrics.percentile_of(scores, threshold)) == threshold

    def test_nearest_rate_at_ties(self):
        scores = [0.0] * 99 + [0.8]  # the plain 97.9th percentile is 0, which would call everything positive
        assert metrics.threshold_at(scores, 97.9) == 0.8
        assert metrics.threshold_at([0.5] * 4, 40) == 0.5
        assert metrics.threshold_at([0.5] * 4, 97.9) == math.inf

    def test_refused(self):
        assert math.isnan(metrics.percentile_of([], 0.5))
        with pytest.raises(ValueError, match="no scores"):
            metrics.threshold_at([], 50)
        with pytest.raises(ValueError, match="0 to 100"):
            metrics.threshold_at([0.5], 101)
        with pytest.raises(ValueError, match="threshold is NaN"):
            metrics.percentile_of([0.5], math.nan)


class TestRanking:
    @checked
    @given(tied_rows)
    def test_equals_sklearn(self, rows):
        labels, scores = zip(*rows, strict=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            area, precision = metrics.auc(labels, scores), metrics.average_precision(labels, scores)
        if len(set(labels)) == 2:
            assert area == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
            assert precision == pytest.approx(average_precision_score(labels, scores), abs=1e-12)
        else:  # V03: a fold without positives gives no number instead of a wrong one
            assert math.isnan(area) and math.isnan(precision)

    def test_no_rows(self):
        assert math.isnan(metrics.auc([], [])) and math.isnan(metrics.average_precision([], []))


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


def test_import_is_light():
    heavy = "{'torch', 'sklearn', 'scipy', 'matplotlib', 'pydicom'}"
    code = f"import sys, rsnakit.metrics; print(sorted({heavy} & set(sys.modules)))"
    root = Path(__file__).parents[1]
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert result.stdout.strip() == "[]"
