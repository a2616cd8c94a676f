"""rsnakit.scoring against slow references and scikit-learn."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, brier_score_loss, f1_score, roc_auc_score

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
        for function in (
            metrics.pfbeta, metrics.best_threshold, metrics.best_f1, metrics.chosen_threshold, metrics.auc,
            metrics.average_precision, metrics.brier, metrics.calibration_error,
        ):  # fmt: skip
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

    @checked
    @given(st.lists(st.tuples(st.integers(0, 1), st.floats(0, 1)), min_size=1, max_size=30))
    def test_equals_the_closed_form(self, rows):
        labels, scores = map(np.array, zip(*rows, strict=True))
        expected = 2 * scores[labels == 1].sum() / (labels.sum() + scores.sum()) if scores[labels == 1].any() else 0.0
        assert metrics.pfbeta(labels, scores) == pytest.approx(expected, abs=1e-9)

    @settings(checked, max_examples=40)
    @given(st.lists(st.tuples(st.integers(0, 1), st.floats(-2, 2)), min_size=1, max_size=30))
    def test_binarised_scores_have_f1(self, rows):
        labels, scores = map(np.array, zip(*rows, strict=True))
        called = scores >= 0.5
        assert metrics.pfbeta(labels, called) == pytest.approx(f1_score(labels, called, zero_division=0), abs=1e-12)


class TestPfbetaOfTensors:
    @checked
    @given(rows, st.sampled_from([0.5, 1.0, 2.0]))
    def test_equals_that_of_arrays(self, rows, beta):
        labels, scores = map(list, zip(*rows, strict=True))
        tensor = torch.tensor(scores, dtype=torch.float64)
        result = metrics.pfbeta(torch.tensor(labels), tensor, beta)
        assert result.shape == () and result.dtype == torch.float64
        assert result.item() == pytest.approx(slow_pfbeta(labels, scores, beta), abs=1e-9)
        assert torch.equal(metrics.pfbeta(np.array(labels), tensor, beta), result)

    def test_gradient_is_the_derivative_inside_and_none_outside(self):
        """Of 2A / D with A = sum(p y) and D = sum(y) + sum(p): 2 (y D - A) / D^2; nothing where a score is clipped."""
        labels, scores = np.array([1, 0, 0, 1, 1, 0]), np.array([0.9, 0.2, 0.1, 0.4, 1.5, -0.5])
        tensor = torch.tensor(scores, requires_grad=True)
        metrics.pfbeta(torch.tensor(labels), tensor).backward()
        p = scores.clip(0, 1)
        a, d = (p * labels).sum(), labels.sum() + p.sum()
        expected = np.where((scores >= 0) & (scores <= 1), 2 * (labels * d - a) / d**2, 0)
        assert tensor.grad.numpy() == pytest.approx(expected, abs=1e-12)
        inside = torch.tensor(scores[:4], requires_grad=True)
        assert torch.autograd.gradcheck(lambda x: metrics.pfbeta(labels[:4], x, 2.0), inside)

    @pytest.mark.parametrize("labels, scores", [([1, 0], [0, 0]), ([0, 0], [0.5, 1]), ([0, 0], [0, 0]), ([], [])])
    def test_nothing_found_is_zero_with_a_finite_gradient(self, labels, scores):  # V01
        tensor = torch.tensor(scores, dtype=torch.float32, requires_grad=True)
        result = metrics.pfbeta(torch.tensor(labels), tensor)
        result.backward()
        assert result.item() == 0.0 and torch.isfinite(tensor.grad).all()
        # With P positives, none of any mass, pF1 begins with a slope of 2 / P.
        assert tensor.grad.tolist() == ([2.0, 0.0] if labels == [1, 0] else [0.0] * len(labels))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_is_summed_in_single(self, dtype):
        labels, scores = torch.arange(70_000) < 35_000, torch.ones(70_000, dtype=dtype)  # float16 ends at 65,504
        result = metrics.pfbeta(labels, scores)
        assert result.dtype == torch.float32 and result.item() == pytest.approx(70_000 / 105_000)
        assert metrics.pfbeta(labels, labels).item() == 1.0  # bools are scores too

    @pytest.mark.parametrize(
        "labels, scores, message",
        [
            ([1, 0], [0.5, math.nan], "1 of 2 scores are NaN.*row 1"),
            ([1, 2], [0.5, 0.5], "neither 0 nor 1"),
            ([1], [0.5, 1], "shape"),
        ],
    )
    def test_refused(self, labels, scores, message):  # V01
        with pytest.raises(ValueError, match=message):
            metrics.pfbeta(torch.tensor(labels), torch.tensor(scores, requires_grad=True))


class TestBestThreshold:
    @settings(checked, max_examples=40)
    @given(tied_rows)
    def test_equals_brute_force(self, rows):  # V01, ties
        labels, scores = map(np.array, zip(*rows, strict=True))
        threshold, score = metrics.best_threshold(labels, scores)
        candidates = np.unique(scores)
        f1 = np.array([f1_score(labels, scores >= t, zero_division=0) for t in candidates])
        assert score == pytest.approx(f1.max(), abs=1e-12)
        assert score == pytest.approx(metrics.pfbeta(labels, scores >= threshold), abs=1e-12)
        assert (metrics.chosen_threshold(labels, scores), metrics.best_f1(labels, scores)) == (threshold, score)
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


class TestCalibration:
    @checked
    @given(st.lists(st.tuples(st.integers(0, 1), st.floats(0, 1)), min_size=1, max_size=30))
    def test_brier_equals_sklearn(self, rows):
        labels, scores = zip(*rows, strict=True)
        assert metrics.brier(labels, scores) == pytest.approx(brier_score_loss(labels, scores, pos_label=1), abs=1e-12)

    def test_scores_outside_are_clipped(self):
        labels, scores = [1, 0, 1, 0], [math.inf, -0.5, 0.5, 2.0]
        assert metrics.brier(labels, scores) == pytest.approx((0 + 0 + 0.25 + 1) / 4)
        assert metrics.calibration_error(labels, scores, 4) == pytest.approx((0 + 0.5 + 1 + 0) / 4)

    @checked
    @given(tied_rows, st.integers(1, 20))
    def test_error_equals_slow_reference(self, rows, n_bins):
        labels, scores = zip(*rows, strict=True)
        bins = {}
        for label, score in rows:
            lower = sum(other < score for other in scores)
            bins.setdefault(lower * n_bins // len(rows), []).append((label, score))
        error = 0.0
        for found in bins.values():
            observed, predicted = (sum(row[part] for row in found) / len(found) for part in (0, 1))
            error += len(found) / len(rows) * abs(observed - predicted)
        assert metrics.calibration_error(labels, scores, n_bins) == pytest.approx(error, abs=1e-12)
        order = np.random.default_rng(0).permutation(len(rows))
        again = metrics.calibration_error(np.array(labels)[order], np.array(scores)[order], n_bins)
        assert again == pytest.approx(error, abs=1e-12)

    def test_error_of_known_distributions(self):
        rng = np.random.default_rng(0)
        truth = rng.beta(1, 20, 200_000)  # rare, as cancer is
        labels = rng.random(len(truth)) < truth
        # By chance a bin of m rows is off by sqrt(2 / pi * rate (1 - rate) / m) on average.
        by_chance = math.sqrt(2 / math.pi * truth.mean() * (1 - truth.mean()) / (len(truth) / 15))
        assert metrics.calibration_error(labels, truth) < 1.5 * by_chance
        # A score twice too high is off by the mean of the truth; one number for all by nothing: it says the rate.
        assert metrics.calibration_error(labels, 2 * truth) == pytest.approx(labels.mean(), abs=2 * by_chance)
        assert metrics.calibration_error(labels, np.full(len(truth), labels.mean())) == pytest.approx(0, abs=1e-12)

    def test_no_rows(self):
        assert math.isnan(metrics.brier([], [])) and math.isnan(metrics.calibration_error([], []))
        with pytest.raises(ValueError, match="n_bins is 0"):
            metrics.calibration_error([1], [1], 0)
