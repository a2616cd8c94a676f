"""pF1, the competition's metric, and what a score needs beside it: breasts, thresholds, AUC and intervals.

Scores are judged per breast: bring a table with a row an image through `to_breast` first. Labels (N,) are 0 or 1 and
scores (N,) are floats, matched by position. A different length, another label or a NaN is a ValueError everywhere.
The statistics are those of `scoring` and, at an operating point, of `operating`; the intervals are those of `resampling`.
"""

from rsnakit.breasts import BREAST, HOWS, combine, to_breast
from rsnakit.operating import (
    F1At,
    RecallRateAt,
    SensitivityAt,
    SensitivityOf,
    SpecificityAt,
    SpecificityOf,
    curve_thresholds,
    f1_curve,
    threshold_of_sensitivity,
    threshold_of_specificity,
)
from rsnakit.resampling import Difference, Draws, Interval, bootstrap, bootstrap_values, compare, counts, draw, wilson
from rsnakit.scoring import (
    auc,
    average_precision,
    best_f1,
    best_threshold,
    brier,
    calibration_error,
    checked,
    chosen_threshold,
    percentile_of,
    pfbeta,
    threshold_at,
)

__all__ = [
    "BREAST", "HOWS", "Difference", "Draws", "F1At", "Interval", "RecallRateAt", "SensitivityAt", "SensitivityOf",
    "SpecificityAt", "SpecificityOf", "auc", "average_precision", "best_f1", "best_threshold", "bootstrap",
    "bootstrap_values", "brier", "calibration_error", "checked", "chosen_threshold", "combine", "compare", "counts",
    "curve_thresholds", "draw", "f1_curve", "percentile_of", "pfbeta", "threshold_at", "threshold_of_sensitivity",
    "threshold_of_specificity", "to_breast", "wilson",
]  # fmt: skip
