"""A run, the package and the inference notebook as what goes to Kaggle: a data set and a notebook with their metadata."""
