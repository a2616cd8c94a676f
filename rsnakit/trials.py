"""Trials of one setting on this machine: time and memory of a training step, what ran out, in a process that may die."""
