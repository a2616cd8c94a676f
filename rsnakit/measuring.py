"""A training at one setting, whose steps are timed and whose memory is told: what the process of `trials` does.

Model, optimiser, scaler and loss are those of `trainer.Trainer`, the steps those of `loop.train_one_epoch`; only the images
are loaded beforehand, so that no loader is waited for.
"""

import dataclasses
import itertools
import math
import re
import statistics
import sys
import time
import warnings
from pathlib import Path

import pandas as pd
import torch

from rsnakit import augment, data, distributed, env
from rsnakit.device import synchronize
from rsnakit.device_memory import Memory
from rsnakit.loop import train_one_epoch
from rsnakit.models import ModelConfig
from rsnakit.recipe import LoopConfig, TrainConfig
from rsnakit.samplers import BalancedSampler
from rsnakit.store import Store
from rsnakit.tally import Tally
from rsnakit.trainer import SAMPLES, Trainer, unit_of

ROUND_S = 0.2  # a round takes so long at least, to be told apart from the clock's and the system's noise
DIFFERENT = 64  # images or breasts that are loaded; larger batches repeat them
ADDED = 2  # batches to a step at most: two show what adding their gradients up costs
WARM = 3  # steps of a compiled model before it is timed: captured graphs are recorded in the second
MANY = 10  # steps after which a model that is compiled anew each time is timed as it is
LR = 1e-3  # of lr is used: hundreds of steps over the same images must not end in a NaN that is not the precision's


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is trained: `images`, the training side's table, those of the `store` (its folder); the configs; the `device`, as
    `env.choose_device` gives it; and the `fold`."""

    images: pd.DataFrame
    store: Path | str
    model: ModelConfig
    train: TrainConfig
    loop: LoopConfig
    device: str
    fold: int = 0


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a training step is tried with: settings of the configs by their names, in place of what a workload has there.
    `precision` is auto, fp32, bf16 or fp16; `batch_size` may be 1, too."""

    precision: str
    channels_last: bool
    compile: str
    grad_checkpointing: bool
    batch_size: int


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a setting gave.

    Attributes:
        images_s: images (breasts, where the model sees these) a second, of each round.
        compile_s: seconds that the first steps took beyond what later ones take, compiling above all; few where torch has
            compiled the same before, and finds it on the disk.
        peak_mb: MB of memory at most during steps, beyond what was taken before the model was made; NaN where it cannot be
            told. On the CPU, where it is what is resident, the batch is part of it, and so is what torch keeps once it has run.
        error: why it could not be done, in a sentence; empty where it could.
    """

    images_s: tuple[float, ...] = ()
    compile_s: float = math.nan
    peak_mb: float = math.nan
    error: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.images_s) if self.images_s else math.nan

    @property
    def low(self) -> float:
        return min(self.images_s, default=math.nan)

    @property
    def high(self) -> float:
        return max(self.images_s, default=math.nan)


class Samples:
    """A workload's first images or breasts, augmented, in the order of its sampler, and batches of any size made of them.

    Raises:
        ValueError: the table has not both kinds, or lacks a column of an auxiliary target, and so on: as training does.
        rsnakit.store.StoreError: an image is not in the store, or there is none.
    """

    def __init__(self, workload: Workload) -> None:
        store, train, unit = Store(workload.store), workload.train, unit_of(workload.model)
        seed, transform = (
            data.sample_seed(train.seed, workload.fold, SAMPLES),
            augment.build(train.augment, *store.shape),
        )
        dataset = data.MammogramDataset(workload.images, store, transform, unit, seed, workload.model.aux, draw=True)
        sampler = BalancedSampler(
            dataset.labels, train.negatives_per_positive, train.batch_size, train.min_positives, train.seed,
            negatives_per_epoch=train.negatives_per_epoch,
        )  # fmt: skip
        self.store = store
        self.samples = [dataset[item] for item in itertools.islice(sampler, DIFFERENT)]
        if not self.samples:
            raise ValueError("there are no images to train on")

    def batch(self, size: int, pinned: bool) -> dict[str, torch.Tensor]:
        """So many of them, again from the first after the last."""
        batch = data.collate(list(itertools.islice(itertools.cycle(self.samples), size)))
        return {name: x.pin_memory() for name, x in batch.items()} if pinned else batch


class Training:
    """A training at one setting, whose steps can be timed; made and warmed up at the shape that is timed.

    Args:
        workload: what is trained.
        samples: of it.
        setting: what it is tried with.

    Attributes:
        measured: what was found so far; the first round is of the last steps of warming up, until `round` was called.

    Raises:
        ValueError: the device, the model or torch cannot do what the setting asks for.
        FloatingPointError: the loss is not finite in this precision.
        RuntimeError: there is no such device, memory ran out, or whatever torch raises.
    """

    def __init__(self, workload: Workload, samples: Samples, setting: Setting) -> None:
        self.device, size = workload.device, setting.batch_size
        if size < 1:
            raise ValueError(f"batch_size is {size}, expected at least 1")
        env.choose_device(self.device)
        self.precision = env.choose_precision(self.device, setting.precision).value
        if setting.compile != "off":
            _prepare_compiler()
        # Before memory is looked at: compiling imports hundreds of MB.
        compiling = env.choose_compile(self.device, setting.compile)
        if compiling.value != setting.compile:
            raise ValueError(compiling.reason)
        self.memory = Memory(self.device, setting.compile)
        self.added = min(distributed.batches_a_step(workload.train.accumulate, 1), ADDED)
        self.trainer = _trainer(workload, samples.store, setting, self.precision, self.added)
        self.batch = samples.batch(size, pinned=self.device.startswith("cuda"))
        self.size, self.updates, self.in_a_row, self.rounds = size, 0, 0, ()
        compile_s = self._warm_up(setting.compile != "off")
        self.measured = Measured((self.warm,), compile_s, self.memory.peak_mb())

    def _warm_up(self, compiled: bool) -> float:
        """Steps until nothing is compiled any more, then a round; gives the seconds that the first took beyond the last."""
        times, graphs = [], -1
        # The optimiser's own memory is there once a step was taken, which fp16's first ones often are not.
        while not self.updates or (compiled and len(times) < MANY and (len(times) < WARM or graphs != _graphs())):
            graphs = _graphs()
            times.append(self._timed(1))
        self.memory.restart()  # what compiling takes is not the steps' own
        step_s = self._timed(1)
        more = math.ceil(ROUND_S / step_s) - 1
        seconds = step_s + (self._timed(more) if more > 0 else 0.0)
        self.steps = max(1, more + 1)
        self.warm = self.steps * self.added * self.size / seconds
        return max(0.0, sum(times) - len(times) * seconds / self.steps)

    def round(self) -> None:
        """Times a round."""
        self.rounds += (self.steps * self.added * self.size / self._timed(self.steps),)
        self.measured = dataclasses.replace(self.measured, images_s=self.rounds)

    def _timed(self, steps: int) -> float:
        """Seconds that optimiser steps take; those that fp16's overflow makes void are steps, too."""
        trainer, tally = self.trainer, Tally(self.in_a_row)
        batches = [self.batch] * (steps * self.added)
        synchronize(self.device)
        begun = time.perf_counter()
        try:
            scored = train_one_epoch(
                trainer.wrapped, batches, trainer.optimizer, trainer.scheduler, trainer.scaler, trainer.loss_of,
                steps=[[self.size] * self.added] * steps, clip_norm=trainer.config.clip_norm, device=self.device,
                precision=self.precision, ema=trainer.ema, mix=trainer.mix, updates=self.updates, tally=tally,
            )  # fmt: skip
        except FloatingPointError as error:
            what = re.split(r" in batch|\. |: ", str(error))[0]
            raise FloatingPointError(f"{what} in {self.precision} on {self.device}") from error
        synchronize(self.device)
        seconds = time.perf_counter() - begun
        if math.isnan(scored.loss):  # a scaler leaves such steps out, and says nothing before it has left out many
            raise FloatingPointError(f"the loss is nan in {self.precision} on {self.device}")
        self.updates, self.in_a_row = self.updates + tally.taken, tally.in_a_row
        return seconds


def _trainer(workload: Workload, store: Store, setting: Setting, precision: str, added: int) -> Trainer:
    """Training at a setting, with so many batches to a step, on which it depends how a model is compiled."""
    size = max(2, setting.batch_size)
    train = dataclasses.replace(
        workload.train, batch_size=size, min_positives=min(workload.train.min_positives, size - 1),
        lr=workload.train.lr * LR, accumulate=added,
    )  # fmt: skip
    model = dataclasses.replace(workload.model, grad_checkpointing=setting.grad_checkpointing)
    loop = dataclasses.replace(workload.loop, channels_last=setting.channels_last, compile=setting.compile)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*no blocks found to checkpoint")  # it would be timed as it is
        try:
            return Trainer(
                workload.images, store, model, train, loop, workload.device, precision, 0, workload.fold, {}, None
            )
        except UserWarning as warning:
            raise ValueError(str(warning)) from warning


def _prepare_compiler() -> None:
    """Has settings that are alive at once not count as one that comes with many shapes: each is compiled for its own, as a
    training that has but one is."""
    import torch._dynamo

    config = torch._dynamo.config
    config.automatic_dynamic_shapes = False
    config.recompile_limit = max(64, config.recompile_limit)


def _graphs() -> int:
    """Graphs that were compiled so far in this process."""
    if "torch._dynamo" not in sys.modules:
        return 0
    return sys.modules["torch._dynamo"].utils.counters["stats"]["unique_graphs"]
