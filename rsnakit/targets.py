"""What a model may be asked for beside cancer, and what kinds of view there are: names, columns and classes.

Auxiliary targets are columns that train.csv alone has: they teach, and are never an input. A label that is missing is NaN,
which the loss masks.
"""

import dataclasses

import numpy as np
import pandas as pd


@dataclasses.dataclass(frozen=True)
class Target:
    """A column of train.csv as a target: its values in the order of their class numbers; two values are one logit."""

    column: str
    classes: tuple

    @property
    def logits(self) -> int:
        """How many logits the head has: 1 for a yes or no, else one a class."""
        return 1 if len(self.classes) == 2 else len(self.classes)


AUXILIARY = {
    "biopsy": Target("biopsy", (0, 1)),
    "invasive": Target("invasive", (0, 1)),
    "birads": Target("BIRADS", (0, 1, 2)),
    "density": Target("density", ("A", "B", "C", "D")),
    "difficult": Target("difficult_negative_case", (False, True)),
    "view": Target("view", ("CC", "MLO")),
}
VIEW_KINDS = ("CC", "MLO")  # what a model tells apart; views from the side and askew all count as the second


def target_values(table: pd.DataFrame, name: str) -> np.ndarray:
    """Class numbers of an auxiliary target, (N,) float32 in the table's order; NaN where it is missing or none of the classes.

    Raises:
        ValueError: no such target, or the table lacks its column.
    """
    if name not in AUXILIARY:
        raise ValueError(f"auxiliary target {name!r}: expected one of {', '.join(AUXILIARY)}")
    target = AUXILIARY[name]
    if target.column not in table:
        raise ValueError(
            f"auxiliary target {name!r}: the table has no column {target.column}; only train.csv has the labels that "
            "auxiliary heads learn from. Leave it out of aux."
        )
    classes = {_plain(value): float(number) for number, value in enumerate(target.classes)}
    column = table[target.column].astype(object)
    numbers = {value: classes.get(_plain(value), np.nan) for value in column.dropna().unique()}
    return column.map(numbers).to_numpy(np.float32)


def view_ids(views: pd.Series) -> np.ndarray:
    """The kind of each view, (N,) int64: 0 for those from above (CC, XCCL and the like), 1 for all others.

    Missing ones and the rarely seen kinds (AT, LM, ML ...) count with MLO: a number of their own would have learned next to
    nothing when a test set brings them.
    """
    from_above = views.astype(str).str.upper().str.contains("CC", regex=False)
    return np.where(from_above, 0, 1).astype(np.int64)


def _plain(value: object) -> float | str:
    """One spelling for what a csv may hold of a value: True, 1, 1.0, '1' and 'True' are the number 1."""
    text = str(value).strip().lower()
    try:
        return float({"true": "1", "false": "0"}.get(text, text))
    except ValueError:
        return text
