"""Openers for `turns.Turn`, in a module of their own: each process of a turn imports it anew, and must not import torch."""

import os
from collections.abc import Callable

import numpy as np


def zeros(value: int) -> Callable[[tuple[int, ...]], np.ndarray]:
    """Gives arrays of a size that hold one value."""
    return lambda size: np.full(size, value)


def broken() -> Callable:
    """As where a package is not installed."""
    raise ModuleNotFoundError("No module named 'nobody_has_this'")


def dying() -> Callable:
    """Ends its process when it is called."""
    return lambda: os._exit(7)
