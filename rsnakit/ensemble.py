"""A run's models on the devices at hand: all folds and all flips of a batch of images in one pass over its pixels."""
