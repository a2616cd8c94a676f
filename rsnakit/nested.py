"""Thresholds from folds that they do not score, and what choosing on the scored data adds."""
