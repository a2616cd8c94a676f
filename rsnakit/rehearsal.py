"""The bundle run here as Kaggle would run it: both layouts, offline, on test sets that it has never seen."""
