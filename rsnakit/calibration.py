"""Scores made probabilities, by folds that they do not score."""
