"""The wheels that Kaggle's image may lack, taken for its Pythons."""

from collections.abc import Sequence
from pathlib import Path


class WheelError(ValueError):
    """Wheels that cannot be had, or are no set that installs; the message says what to do."""


def check(wheels: Sequence[Path]) -> list[Path]:
    return list(wheels)
