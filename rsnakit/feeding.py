"""How fast stored images reach the model, by store format, augmentation and number of loader processes."""
