"""rsnakit.nested against scikit-learn, loops written out, and a large sample."""

import json
import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score

from rsnakit import nested


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
