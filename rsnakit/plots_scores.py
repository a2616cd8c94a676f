"""Figures of an evaluation: thresholds, operating points, calibration, subgroups, folds and runs."""
