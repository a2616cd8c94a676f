"""Splits of a table into folds: by patient, or by machine."""
