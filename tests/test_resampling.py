"""rsnakit.resampling: draws, intervals, paired differences, against a plain loop, closed forms and the literature."""

import math
import warnings
from statistics import NormalDist

import numpy as np
import pytest
from evaluated import drawn_breasts
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from sklearn.metrics import average_precision_score, f1_score, precision_recall_curve, roc_auc_score

from rsnakit import metrics, resampling

STATISTICS = [
    metrics.pfbeta, metrics.brier, metrics.calibration_error, metrics.auc, metrics.average_precision, metrics.best_f1,
    metrics.chosen_threshold, metrics.F1At(0.5), metrics.SensitivityOf(0.5), metrics.SpecificityOf(0.5),
    metrics.RecallRateAt(0.5), metrics.SensitivityAt(0.8), metrics.SpecificityAt(0.8),
]  # fmt: skip


def in_each_resample(labels, scores, draws, statistic):
    """A plain loop: every row as often as its group is drawn."""
    values = []
    for times in draws.times.T:
        rows = [row for row, group in enumerate(draws.codes) for _ in range(times[group])]
        values.append(statistic(np.array(labels)[rows], np.array(scores)[rows]))
    return np.array(values, dtype=float)


class TestDraw:
    def test_all_groups_are_drawn_alike(self):
        draws = metrics.draw(["c", "a", "b", "a"], n=6000)
        assert draws.codes.tolist() == [2, 0, 1, 0] and draws.times.shape == (3, 6000)
        assert (draws.times.sum(axis=0) == 3).all()
        # Three draws with replacement of three: all three possible shares, and the variance n p (1 - p).
        assert draws.times.mean(axis=1) == pytest.approx([1, 1, 1], abs=0.05)
        assert draws.times.var(axis=1) == pytest.approx([2 / 3] * 3, abs=0.05)
        assert np.corrcoef(draws.times)[0, 1] == pytest.approx(-0.5, abs=0.05)

    def test_strata_keep_their_sizes(self):
        groups, labels = np.repeat(np.arange(50), 2), np.zeros(100, int)
        labels[[3, 10, 11, 90]] = 1  # patients 1, 5 and 45
        draws = metrics.draw(groups, 200, strata=labels)
        positive = np.unique(draws.codes[labels == 1])
        assert len(positive) == 3 and sorted(set(draws.codes)) == list(range(50))
        assert (draws.times[positive].sum(axis=0) == 3).all() and (draws.times.sum(axis=0) == 50).all()
        assert draws.times[positive].var(axis=1) == pytest.approx([2 / 3] * 3, abs=0.2)
        one_row_each = draws.codes[::2]
        assert sorted(one_row_each) == list(range(50)) and (draws.codes[1::2] == one_row_each).all()

    @pytest.mark.parametrize("labels", [[0, 0, 0], [1, 1, 1]])
    def test_one_stratum_is_no_stratum(self, labels):
        plain, stratified = metrics.draw(list("abc"), 20), metrics.draw(list("abc"), 20, strata=labels)
        assert (plain.times == stratified.times).all() and (plain.codes == stratified.codes).all()

    @pytest.mark.parametrize("stratified", [False, True])
    def test_same_patients_whatever_the_row_order(self, stratified):
        groups, labels = np.array(list("dbacabd")), np.array([0, 0, 1, 0, 0, 1, 0])
        order = np.array([4, 6, 0, 2, 5, 3, 1])
        first = metrics.draw(groups, 100, strata=labels if stratified else None)
        again = metrics.draw(groups[order], 100, strata=labels[order] if stratified else None)
        assert (first.times == again.times).all() and (first.codes[order] == again.codes).all()

    def test_more_than_one_block(self):
        draws = metrics.draw(range(4), n=2 * resampling.BLOCK + 3)
        assert (draws.times.sum(axis=0) == 4).all()
        assert (metrics.draw(range(4), n=5).times == draws.times[:, :5]).all()

    def test_no_rows(self):
        draws = metrics.draw([], 10)
        assert draws.times.shape == (0, 10) and draws.codes.shape == (0,)


class TestValues:
    @settings(max_examples=25, deadline=None, database=None, derandomize=True)
    @given(
        st.lists(
            st.tuples(
                st.integers(0, 1), st.sampled_from([-math.inf, 0.0, 0.1, 0.5, 0.7, 1.0, math.inf]), st.integers(0, 5)
            ),
            min_size=1,
            max_size=20,
        ),
        st.booleans(),
    )
    def test_all_at_once_equal_one_by_one(self, rows, stratified):
        labels, scores, groups = zip(*rows, strict=True)
        draws = metrics.draw(groups, 8, strata=labels if stratified else None)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for statistic in STATISTICS:
                found = metrics.bootstrap_values(labels, scores, draws, statistic)
                expected = in_each_resample(labels, scores, draws, statistic)
                np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12, err_msg=str(statistic))

    def test_equal_sklearn(self):
        table = drawn_breasts(60)
        labels, scores = table["cancer"].to_numpy(), table["score"].to_numpy()
        draws = metrics.draw(table["patient_id"], 12, seed=1)

        def f1(labels, scores):
            return f1_score(labels, scores >= 0.5)

        def best_f1(labels, scores):
            precision, recall, _ = precision_recall_curve(labels, scores)
            return np.max(2 * precision * recall / np.maximum(precision + recall, 1e-9))

        for statistic, expected in (
            (metrics.auc, roc_auc_score),
            (metrics.average_precision, average_precision_score),
            (metrics.F1At(0.5), f1),
            (metrics.best_f1, best_f1),
        ):
            found = metrics.bootstrap_values(labels, scores, draws, statistic)
            assert found == pytest.approx(in_each_resample(labels, scores, draws, expected), abs=1e-12)
            other = metrics.bootstrap_values(labels, scores, draws, lambda y, s, of=expected: of(y, s))
            assert other == pytest.approx(found, abs=1e-12)

    def test_parts_change_nothing(self, monkeypatch):
        table = drawn_breasts(30)
        args = table["cancer"], table["score"], metrics.draw(table["patient_id"], 50)
        whole = [metrics.bootstrap_values(*args, statistic) for statistic in STATISTICS]
        monkeypatch.setattr(resampling, "N_NUMBERS", 30 * 7)
        for statistic, expected in zip(STATISTICS, whole, strict=True):
            np.testing.assert_array_equal(metrics.bootstrap_values(*args, statistic), expected)

    def test_best_thresholds_far_below_that_of_the_sample(self):
        """Three positives on top make the sample's threshold; in one resample of twenty none of them is drawn."""
        labels = np.array([1] * 3 + ([0] * 20 + [1]) * 3)
        scores, groups = np.linspace(1, 0, len(labels)), np.arange(len(labels))
        draws = metrics.draw(groups, 200)
        found = metrics.bootstrap_values(labels, scores, draws, metrics.chosen_threshold)
        assert metrics.chosen_threshold(labels, scores) == scores[2]
        assert (found >= scores[2]).mean() > 0.85 and (np.isfinite(found) & (found < scores[40])).any()
        for statistic in (metrics.chosen_threshold, metrics.best_f1):
            expected = in_each_resample(labels, scores, draws, statistic)
            assert (metrics.bootstrap_values(labels, scores, draws, statistic) == expected).all()

    def test_counts_of_a_part_of_the_rows(self):
        table = drawn_breasts(30)
        labels, scores = metrics.checked(table["cancer"], table["score"])
        draws = metrics.draw(table["patient_id"], 20)
        part, thresholds = np.arange(60) % 3 == 0, np.array([0.8, 0.5, 0.2, -1.0])
        true_positives, called = metrics.counts(labels[part], scores[part], draws.codes[part], draws.times, thresholds)
        weights = draws.times[draws.codes]
        for k, threshold in enumerate(thresholds):
            above = part & (scores >= threshold)
            assert (called[k] == weights[above].sum(axis=0)).all()
            assert (true_positives[k] == weights[above & labels].sum(axis=0)).all()


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

    def test_stratified_resamples_lack_no_class(self):
        # The case below: the one positive is in every resample, and one of the two negatives is drawn in each place.
        labels, scores = [1, 0, 0], [0.15, 0.1, 0.2]
        plain, stratified = (
            metrics.bootstrap(labels, scores, list("abc"), metrics.auc, n=400, stratified=each)
            for each in (False, True)
        )
        assert plain.left_out > 100 and stratified.left_out == 0
        assert tuple(stratified) == (0.5, 0.0, 1.0)
        # With it the number of positives is known: the width is that of the scores alone, sqrt(p (1 - p) / P).
        rng = np.random.default_rng(0)
        labels, scores = np.arange(2000) < 200, rng.random(2000)
        interval = metrics.bootstrap(labels, scores, range(2000), metrics.SensitivityOf(0.5), n=2000, stratified=True)
        assert interval.high - interval.low == pytest.approx(2 * 1.96 * math.sqrt(0.25 / 200), rel=0.1)

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
            with pytest.raises(ValueError, match="groups"):
                metrics.compare([1, 0], [1, 0], [0, 1], groups, metrics.auc)
        with pytest.raises(ValueError, match="n is 0"):
            metrics.bootstrap([1, 0], [1, 0], ["a", "b"], metrics.auc, n=0)
        with pytest.raises(ValueError, match="level is 95"):
            metrics.bootstrap([1, 0], [1, 0], ["a", "b"], metrics.auc, level=95)


class TestCompare:
    def test_paired_on_the_same_draws(self):
        table = drawn_breasts()
        labels, scores, groups = table["cancer"], table["score"], table["patient_id"]
        others = scores + np.random.default_rng(1).normal(0, 0.1, len(scores))
        found = metrics.compare(labels, scores, others, groups, metrics.auc, n=50, seed=4)
        assert found.value == pytest.approx(roc_auc_score(labels, scores) - roc_auc_score(labels, others))
        draws = metrics.draw(groups, 50, 4)
        ours, theirs = (in_each_resample(labels, each, draws, roc_auc_score) for each in (scores, others))
        assert tuple(found)[1:] == pytest.approx(tuple(np.quantile(ours - theirs, [0.025, 0.975])))
        assert found.probability == pytest.approx((ours > theirs).mean() + (ours == theirs).mean() / 2)
        # Pairs tell more than two intervals by themselves: the runs' errors are mostly the same patients'.
        alone = metrics.bootstrap(labels, scores, groups, metrics.auc, n=50, seed=4)
        assert found.high - found.low < 0.7 * (alone.high - alone.low)

    def test_sides_change_sign(self):
        table = drawn_breasts(50)
        scores, others = table["score"], table["score"].round(1)
        args = table["patient_id"], metrics.average_precision, 200
        forth = metrics.compare(table["cancer"], scores, others, *args)
        back = metrics.compare(table["cancer"], others, scores, *args)
        assert tuple(back) == pytest.approx((-forth.value, -forth.high, -forth.low))
        assert back.probability == pytest.approx(1 - forth.probability)

    def test_equal_and_better(self):
        labels, groups = np.arange(40) % 4 == 0, range(40)
        same = metrics.compare(labels, labels, labels, groups, metrics.auc, n=100)
        assert tuple(same) == (0, 0, 0) and same.probability == 0.5 and same.left_out == 0
        better = metrics.compare(labels, labels, ~labels, groups, lambda y, s: metrics.auc(y, s), n=100)
        assert tuple(better) == (1, 1, 1) and better.probability == 1.0

    def test_undefined_resamples_are_left_out(self):  # V03
        found = metrics.compare([1, 0, 0], [0.9, 0.1, 0.2], [0.1, 0.2, 0.3], list("abc"), metrics.auc, n=1000)
        assert tuple(found) == (1, 1, 1) and found.left_out == pytest.approx(1000 / 3, rel=0.15)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # inf - inf of thresholds, too
            nothing = metrics.compare([0, 0], [0.1, 0.2], [0.2, 0.1], list("ab"), metrics.auc, n=10)
            metrics.compare([1, 0], [0.1, 0.2], [0.2, 0.1], list("ab"), metrics.chosen_threshold, n=10)
        assert math.isnan(nothing.value) and math.isnan(nothing.probability) and nothing.left_out == 10

    def test_refused(self):
        with pytest.raises(ValueError, match=r"\(2,\), scores \(1,\)"):
            metrics.compare([1, 0], [1, 0], [1], list("ab"), metrics.auc)
        with pytest.raises(ValueError, match="level is 0"):
            metrics.compare([1, 0], [1, 0], [1, 0], list("ab"), metrics.auc, level=0)


RATE, CUT, SHIFT, OTHER_SHIFT = 0.15, 1.0, 1.2, 0.8  # of positives; threshold; mean of positives for two runs
N_TRIALS, N_PATIENTS = 300, 300


@pytest.fixture(scope="module")
def coverage():
    """Share of trials whose 95 % interval covers the truth of the distribution that the trials are drawn from.

    Binormal scores, N(0, 1) of negatives and N(shift, 1) of positives, of patients whose two breasts share a part.
    """
    normal = NormalDist()
    true, false = RATE * normal.cdf(SHIFT - CUT), (1 - RATE) * normal.cdf(-CUT)
    grid = np.linspace(-6, 8, 20_001)
    found, raised = RATE * stats.norm.sf(grid - SHIFT), (1 - RATE) * stats.norm.sf(grid)
    truths = {
        metrics.auc: normal.cdf(SHIFT / math.sqrt(2)),
        metrics.average_precision: integrate.trapezoid(stats.norm.pdf(grid - SHIFT) * found / (found + raised), grid),
        metrics.F1At(CUT): 2 * true / (RATE + true + false),
        "difference": normal.cdf(SHIFT / math.sqrt(2)) - normal.cdf(OTHER_SHIFT / math.sqrt(2)),
    }
    covered = dict.fromkeys(truths, 0)
    groups = np.repeat(np.arange(N_PATIENTS), 2)
    for trial in range(N_TRIALS):
        rng = np.random.default_rng(trial)
        labels = rng.random(2 * N_PATIENTS) < RATE
        shared = 0.6 * np.repeat(rng.normal(size=N_PATIENTS), 2)
        scores, others = (
            shift * labels + shared + 0.8 * rng.normal(size=len(labels)) for shift in (SHIFT, OTHER_SHIFT)
        )
        for statistic, truth in truths.items():
            if statistic == "difference":
                found = metrics.compare(labels, scores, others, groups, metrics.auc, 200, trial)
            else:
                found = metrics.bootstrap(labels, scores, groups, statistic, 200, trial)
            covered[statistic] += found.low <= truth <= found.high
    return {str(getattr(each, "__name__", each)): count / N_TRIALS for each, count in covered.items()}


@pytest.mark.parametrize("name", ["auc", "average_precision", f"F1At(threshold={CUT})", "difference"])
def test_intervals_cover_the_truth(coverage, name):
    assert 0.92 <= coverage[name] <= 0.98


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
