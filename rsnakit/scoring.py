"""Statistics of scores against labels: pF1, thresholds, AUC, calibration."""
