"""What settings train fastest here, by trying them: precision, layout, compiling, checkpointing, batch, loader."""

from dataclasses import dataclass

from rsnakit.fields import check_all
from rsnakit.params import setting


@dataclass(frozen=True)
class SpeedConfig:
    """How long settings are tried for."""

    tune_minutes: float = setting(3.0, low=0.1, high=600.0)  # of trying settings, all parts together
    tune_batch: bool = setting(False)  # the fastest batch size is taken too; it decides the result, and lr goes with it

    def __post_init__(self) -> None:
        check_all(self)


class Tuner:
    """A stub."""


def tune():
    raise NotImplementedError
