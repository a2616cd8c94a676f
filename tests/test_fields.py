"""Configs made in Python: their fields follow the rule that parameters follow, and what is wrong is said in the same words."""

import dataclasses

import pytest

from rsnakit.fields import check_all
from rsnakit.params import setting


@dataclasses.dataclass(frozen=True)
class Toy:
    on: bool = setting(False)
    stride: tuple[int, ...] = setting((), low=1, high=64)
    heads: tuple[str, ...] = setting((), choices=("biopsy", "view"))
    rate: float = setting(0.5, low=0.0, high=1.0)
    fold: str = setting("0")
    threshold: float | str = setting("auto", low=0.0, high=1.0, choices=("auto", "none"))

    def __post_init__(self) -> None:
        check_all(self)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("on", "no", False),
        ("on", 1, True),
        ("stride", 2, (2,)),
        ("stride", [4, 1], (4, 1)),
        ("stride", "(4, 1)", (4, 1)),
        ("heads", "view", ("view",)),
        ("rate", 1, 1.0),
        ("rate", "0.25", 0.25),
        ("fold", 3, "3"),
        ("threshold", "0.3", 0.3),
    ],
)
def test_values_get_their_fields_type(name, given, expected):
    found = getattr(Toy(**{name: given}), name)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("on", "maybe", "on: got 'maybe', expected true or false"),
        ("on", 2, "on: got 2, expected true or false"),
        ("stride", (True,), r"stride: got \(True,\), expected a list of any number of: a whole number from 1 to 64"),
        ("stride", 0, "stride: got 0, expected a list"),
        ("heads", ["biopsy", "x"], "heads: got .*, expected a list of any of 'biopsy', 'view'"),
        ("rate", float("nan"), "rate: got nan, expected a finite number from 0.0 to 1.0"),
        ("rate", None, "rate: got None"),
        ("fold", 1.5, "fold: got 1.5, expected text"),
    ],
)
def test_what_is_wrong_is_said(name, given, message):
    with pytest.raises(ValueError, match=message):
        Toy(**{name: given})
