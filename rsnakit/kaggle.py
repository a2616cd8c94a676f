"""The way to Kaggle: `python -m rsnakit.kaggle bundle|rehearse|publish`."""
