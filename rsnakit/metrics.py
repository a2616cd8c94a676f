"""pF1, the competition's metric, and what a score needs beside it: breasts, thresholds, AUC and intervals.

Scores are judged per breast: bring a table with a row an image through `to_breast` first. Labels (N,) are 0 or 1 and
scores (N,) are floats, matched by position. A different length, another label or a NaN is a ValueError everywhere.
The statistics are those of `scoring`, the intervals those of `resampling`.
"""

from rsnakit.breasts import BREAST, HOWS, combine, to_breast
from rsnakit.resampling import Interval, bootstrap, wilson
from rsnakit.scoring import auc, average_precision, best_threshold, checked, percentile_of, pfbeta, threshold_at

__all__ = [
    "BREAST", "HOWS", "Interval", "auc", "average_precision", "best_threshold", "bootstrap", "checked", "combine",
    "percentile_of", "pfbeta", "threshold_at", "to_breast", "wilson",
]  # fmt: skip
