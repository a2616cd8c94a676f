"""Every trick of speed and memory in one place: compiled step loops, checkpointing, settings chosen by measurement."""

from rsnakit.checkpointing import checkpoint_blocks, find_blocks
from rsnakit.stepping import Steps, compile_steps
from rsnakit.tuning import SpeedConfig, Tuner, tune

__all__ = ["SpeedConfig", "Steps", "Tuner", "checkpoint_blocks", "compile_steps", "find_blocks", "tune"]
