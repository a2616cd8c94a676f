"""rsnakit.breasts against loops written out, SciPy and values by hand."""

import math
import warnings

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit, logit
from scipy.stats import rankdata

from rsnakit import breasts, metrics

checked = settings(max_examples=15, deadline=None, database=None, derandomize=True)
some_images = st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0])), min_size=1)


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


class TestToBreast:
    def test_by_hand(self):
        expected = pd.DataFrame(
            {
                "patient_id": ["7", "12", "7"],
                "laterality": ["R", "L", "L"],
                "score": [0.55, 0.6, 0.3],
                "cancer": [1, 0, 0],
                "fold": [0, 1, 0],
                "n_images": [2, 2, 1],
            }
        )
        table = images(view=["CC", "CC", "CC", "MLO", "MLO"])
        table.index = [4, 4, 0, 9, 2]  # concatenated tables repeat their index
        pd.testing.assert_frame_equal(breasts.to_breast(table), expected)
        by_hand = {
            "max": [0.9, 0.7, 0.3],
            "top2": [0.55, 0.6, 0.3],  # fewer than two: what there is
            "noisy_or": [1 - 0.8 * 0.1, 1 - 0.5 * 0.3, 0.3],
        }
        for how, scores in by_hand.items():
            pd.testing.assert_frame_equal(breasts.to_breast(table, how), expected.assign(score=scores))

    @pytest.mark.parametrize("how", ["mean", "max"])
    def test_equals_groupby(self, how):
        rng = np.random.default_rng(0)
        ids, sides = rng.integers(0, 40, 200).astype(str), rng.choice(["L", "R"], 200)
        table = pd.DataFrame({"patient_id": ids, "laterality": sides, "score": rng.random(200)})
        result = breasts.to_breast(table, how).set_index(["patient_id", "laterality"]).sort_index()
        grouped = table.groupby(["patient_id", "laterality"])["score"]
        np.testing.assert_allclose(result["score"], grouped.agg(how), rtol=1e-12)
        np.testing.assert_array_equal(result["n_images"], grouped.size())

    def test_categories_without_rows_make_no_breasts(self):
        table = images(laterality=pd.Categorical(["R", "L", "L", "L", "R"], categories=["L", "R", "?"]))
        result = breasts.to_breast(table)
        assert result["laterality"].tolist() == ["R", "L", "L"] and result["score"].tolist() == [0.55, 0.6, 0.3]

    def test_breasts_stay_as_they_are(self):
        once = breasts.to_breast(images())
        pd.testing.assert_frame_equal(breasts.to_breast(once), once)

    def test_frame_is_not_changed(self):
        table = images()
        breasts.to_breast(table)
        pd.testing.assert_frame_equal(table, images())

    def test_prediction_id_is_kept(self):
        table = images(prediction_id=["a", "b", "c", "b", "a"]).drop(columns=["cancer", "fold", "image_id"])
        assert breasts.to_breast(table)["prediction_id"].tolist() == ["a", "b", "c"]

    def test_empty(self):
        for table in (images().iloc[:0], pd.DataFrame(columns=images().columns)):
            result = breasts.to_breast(table)
            assert len(result) == 0 and result["score"].dtype == float
            assert {"patient_id", "laterality", "cancer", "fold", "n_images"} <= set(result)

    @pytest.mark.parametrize(
        "columns, message",
        [
            ({"score": [0.2, 0.5, 0.3, math.nan, 0.9]}, "image 4 of breast 12_L is nan"),
            ({"score": [0.2, 0.5, 0.3, math.inf, 0.9]}, "image 4 of breast 12_L is inf"),
            ({"cancer": [1, 0, 0, 0, 0]}, "cancer of breast 7_R.* is 1, 0"),
            ({"cancer": [1, 0, 0, math.nan, 1]}, "cancer of breast 12_L"),
            ({"fold": [0, 1, 0, 2, 0]}, "fold of breast 12_L.* is 1, 2"),  # V04: a breast in two folds
            ({"prediction_id": ["a", "b", "c", "d", "a"]}, "prediction_id of breast 12_L.* is b, d"),
            ({"image_id": ["1", "2", "3", "2", "5"]}, "image 2 of breast 12_L is there twice"),  # V04
            ({"patient_id": ["7", None, "7", "12", "7"]}, "1 rows have no patient_id"),
        ],
    )
    def test_refused(self, columns, message):
        with pytest.raises(ValueError, match=message):
            breasts.to_breast(images(**columns))

    def test_arguments_refused(self):
        with pytest.raises(ValueError, match="median"):
            breasts.to_breast(images(), how="median")
        with pytest.raises(ValueError, match=r"\['laterality'\] are missing"):
            breasts.to_breast(images().drop(columns="laterality"))


def slowly(scores, how):
    """What `to_breast` makes of one breast's scores, written out."""
    scores = sorted(scores, reverse=True)
    if how == "noisy_or":
        return 1 - math.prod(1 - score for score in scores)
    kept = {"mean": len(scores), "max": 1, "top2": 2, "top3": 3}[how]
    return sum(scores[:kept]) / len(scores[:kept])


class TestHows:
    @pytest.mark.parametrize("how", breasts.HOWS)
    @checked
    @given(some_images)
    def test_equals_a_loop(self, how, rows):
        ids, scores = zip(*rows, strict=True)
        table = pd.DataFrame({"patient_id": np.array(ids).astype(str), "laterality": "L", "score": scores})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = breasts.to_breast(table, how)
        for _, found in result.iterrows():
            of_breast = [score for number, score in rows if str(number) == found["patient_id"]]
            assert found["score"] == pytest.approx(slowly(of_breast, how), abs=1e-12)
            assert found["n_images"] == len(of_breast)
            assert len(of_breast) > 1 or found["score"] == of_breast[0]

    @pytest.mark.parametrize("how", breasts.HOWS)
    def test_a_single_image_and_a_breast_keep_their_score(self, how):
        scores = np.random.default_rng(0).random(50)
        table = pd.DataFrame({"patient_id": np.arange(50), "laterality": "L", "score": scores})
        once = breasts.to_breast(table, how)
        assert once["score"].tolist() == scores.tolist()
        pd.testing.assert_frame_equal(
            breasts.to_breast(breasts.to_breast(images(), how), how), breasts.to_breast(images(), how)
        )

    def test_noisy_or_of_scores_too_small_for_one_minus_them(self):
        table = images(score=[1e-18, 0.5, 1.0, 0.7, 3e-18])
        assert breasts.to_breast(table, "noisy_or")["score"].tolist() == pytest.approx([4e-18, 0.85, 1.0], rel=1e-12)

    def test_noisy_or_is_of_probabilities(self):
        with pytest.raises(ValueError, match=r"image 4 of breast 12_L is 1.5; expected a probability in \[0, 1\]"):
            breasts.to_breast(images(score=[0.2, 0.5, 0.3, 1.5, 0.9]), "noisy_or")
        assert breasts.to_breast(images(score=[0.2, 0.5, 0.3, 1.5, 0.9]), "top3")["score"].tolist()[1] == 1.0

    @pytest.mark.parametrize("how", breasts.HOWS)
    def test_empty(self, how):
        assert len(breasts.to_breast(images().iloc[:0], how)) == 0


def three_breasts(scores, **columns):
    table = {"patient_id": ["7", "7", "12"], "laterality": ["L", "R", "L"], "cancer": [0, 1, 0], "fold": [0, 0, 1]}
    return pd.DataFrame(table | {"score": scores, "n_images": [2, 2, 1]} | columns)


class TestCombine:
    def test_by_hand(self):
        one, other = three_breasts([0.1, 0.6, 0.3]), three_breasts([0.3, 0.8, 0.2])
        expected = {
            "mean": [0.2, 0.7, 0.25],
            "logits": expit((logit([0.1, 0.6, 0.3]) + logit([0.3, 0.8, 0.2])) / 2),
            "ranks": [(1 / 3 + 2 / 3) / 2, 1.0, (2 / 3 + 1 / 3) / 2],
        }
        for how, scores in expected.items():
            found = breasts.combine([one, other.iloc[[2, 0, 1]]], how)  # rows in another order
            pd.testing.assert_frame_equal(found, three_breasts(scores))
            assert found["score"].to_numpy() == pytest.approx(scores, abs=1e-12)

    @pytest.mark.parametrize("how", breasts.COMBINATIONS)
    def test_one_table_keeps_its_order_of_scores(self, how):
        table = three_breasts([0.1, 0.6, 0.3])
        found = breasts.combine([table], how)
        assert found["score"].tolist() == pytest.approx(
            [1 / 3, 1, 2 / 3] if how == "ranks" else table["score"].tolist()
        )

    def test_ranks_of_ties_are_those_of_scipy(self):
        rng = np.random.default_rng(0)
        scores = rng.integers(0, 5, (3, 40)) / 4
        tables = [pd.DataFrame({"patient_id": np.arange(40), "laterality": "L", "score": scores[i]}) for i in range(3)]
        expected = np.mean([rankdata(row) / 40 for row in scores], axis=0)
        np.testing.assert_allclose(breasts.combine(tables, "ranks")["score"], expected, atol=1e-12)

    def test_equal_sums_of_ranks_tie_exactly(self):
        orders = [[1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1], [2, 2, 2, 2, 2, 2, 2]]
        tables = [pd.DataFrame({"patient_id": np.arange(7), "laterality": "L", "score": order}) for order in orders]
        assert breasts.combine(tables, "ranks")["score"].tolist() == [12 / 21] * 7

    def test_logits_of_scores_that_are_sure(self):
        tables = [three_breasts([0.0, 1.0, 0.0]), three_breasts([0.5, 0.5, 0.0]), three_breasts([0.5, 0.5, 0.0])]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = breasts.combine(tables, "logits")["score"]
        assert 0 < found[2] < 1e-30 and np.isfinite(found).all()  # all are sure
        # The nearest float32 inside: 2**-149, and 1 - 2**-24, whose logit is 24 ln 2 but for 6e-8.
        assert found[0] == pytest.approx(expit(-149 * math.log(2) / 3), rel=1e-6)
        assert found[1] == pytest.approx(expit(24 * math.log(2) / 3), abs=1e-6)

    def test_folds_of_runs_may_differ(self):
        one, other = three_breasts([0.1, 0.6, 0.3]), three_breasts([0.1, 0.6, 0.3], fold=[1, 1, 0], n_images=[2, 2, 2])
        assert list(breasts.combine([one, other])) == ["patient_id", "laterality", "cancer", "score"]
        unlabelled = other.drop(columns="cancer")
        assert breasts.combine([one, unlabelled])["cancer"].tolist() == [0, 1, 0]
        assert metrics.combine is breasts.combine

    @pytest.mark.parametrize(
        "other, message",
        [
            (three_breasts([0, 0, 0]).iloc[:2], "1 breasts are not in table 2, 12_L among them"),
            (three_breasts([0, 0, 0], laterality=["L", "R", "R"]), "1 breasts are not in table 2, 12_L among them"),
            (three_breasts([0, 0, 0], patient_id=[7, 7, 12]), "3 breasts are not in table 2"),  # numbers are no strings
            (three_breasts([0, 0, 0], cancer=[0, 1, 1]), "cancer of breast 12_L is 0 in table 1 and 1 in table 2"),
            (
                three_breasts([0, 0, 0], cancer=[0, math.nan, 0]),
                "cancer of breast 7_R is 1 in table 1 and nan in table 2",
            ),
            (three_breasts([0, 0, 0], laterality=["L", "L", "L"]), "breast 7_L .row 1. is not its breast's only row"),
            (three_breasts([0, math.nan, 0]), "breast 7_R .row 1. is nan; expected a finite number"),
            (three_breasts([0, 1.5, 0]), "breast 7_R .row 1. is 1.5; expected a probability"),
            (three_breasts([0, 0, 0]).drop(columns="score"), "'score'"),
        ],
    )
    def test_refused(self, other, message):
        with pytest.raises(ValueError, match=message):
            breasts.combine([three_breasts([0.1, 0.6, 0.3]), other], "logits")

    def test_arguments_refused(self):
        with pytest.raises(ValueError, match="median"):
            breasts.combine([three_breasts([0, 0, 0])], "median")
        with pytest.raises(ValueError, match="no tables"):
            breasts.combine([])
        longer = pd.concat([three_breasts([0, 0, 0]), three_breasts([0, 0, 0], patient_id=["1", "1", "2"])])
        with pytest.raises(ValueError, match="3 breasts are not in table 1, 1_L, 1_R, 2_L among them"):
            breasts.combine([three_breasts([0, 0, 0]), longer])


class TestFoldsOf:
    @pytest.mark.parametrize("values", [[0, 1, 0, 1, 0], [0.0, 1.0, 0.0, 1.0, 0.0], ["0", "1", "0", "1", "0"]])
    def test_whole_numbers_however_they_are_kept(self, values):
        assert breasts.folds_of(images(fold=values)).tolist() == [0, 1, 0, 1, 0]

    @pytest.mark.parametrize(
        ("values", "found"),
        [
            ([0, 1, "a", 1, 0], "'a'"),
            ([0.0, 1.0, 0.7, 1.0, 0.0], "0.7"),  # cut to 0 it would be scored with fold 0
            ([0.0, 1.0, math.nan, 1.0, 0.0], "nan"),
            ([0.0, 1.0, math.inf, 1.0, 0.0], "inf"),
            (pd.array([0, 1, None, 1, 0], dtype="Int64"), "<NA>"),
        ],
    )
    def test_what_is_no_fold_is_named(self, values, found):
        with pytest.raises(
            ValueError, match=rf"1 of 5 rows .* that of image 3 of breast 7_L is .*{found}.*; expected 0, 1"
        ):
            breasts.folds_of(images(fold=values))

    def test_no_such_column(self):
        with pytest.raises(ValueError, match=r"columns \['fold'\] are missing"):
            breasts.folds_of(images().drop(columns="fold"))
