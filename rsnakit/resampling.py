"""Intervals: patients drawn again, and Wilson's."""
