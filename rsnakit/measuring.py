"""A training at one setting, whose steps are timed and whose memory is told: what the process of `trials` does.

Model, optimiser, scaler and loss are those of `trainer.Trainer`, the steps those of `loop.train_one_epoch`; only the images
are loaded beforehand, so that no loader is waited for.
"""

import contextlib
import dataclasses
import gc
import itertools
import math
import re
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import psutil  # of ipykernel's
import torch

from rsnakit import augment, data, distributed, env, failures
from rsnakit.crew import in_line
from rsnakit.loop import train_one_epoch
from rsnakit.models import ModelConfig
from rsnakit.recipe import LoopConfig, TrainConfig
from rsnakit.replica import NO_ROOM
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
# Of the memory that is available to a CPU so much is left alone: a share, and bytes at least.
LEFT_ALONE, LEFT_BYTES = 0.1, 256 * 2**20
# What oneDNN says where it got no memory; torch's own words for it are known to `failures`.
NO_ROOM_ON_CPU = r"could not (create|execute|initialize) a (primitive|memory)|could not create a memory object"
MB = 1e6


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


class Memory:
    """The most memory that is taken on a device beyond what was when this was made.

    Args:
        compile: mode in which the model is compiled.
    """

    def __init__(self, device: str, compile: str = "off") -> None:
        self.device = device
        # Captured graphs keep their memory to themselves, and it is not counted while they run.
        self.hidden = compile == "max-autotune" and device_type(device) == "cuda"
        if device == "cpu":
            give_back()
            self.before = _status("VmRSS") - _status("RssFile")
        elif device.startswith("cuda"):
            self.before = torch.cuda.memory_allocated(device)
        self.restart()

    def restart(self) -> None:
        """The most is counted from here on."""
        self.known = device_type(self.device) in ("cpu", "cuda")
        if self.device == "cpu":
            try:
                Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
            except OSError:
                self.known = False
        elif self.known:
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_mb(self) -> float:
        """MB; NaN where it cannot be told."""
        if not self.known or self.hidden:
            return math.nan
        if self.device == "cpu":  # without pages of files, which are the libraries' code and come as they are run
            peak = _status("VmHWM") - _status("RssFile")
        else:
            peak = torch.cuda.max_memory_allocated(self.device)
        return max(0.0, peak - self.before) / MB


@contextlib.contextmanager
def limited(device: str, memory_gb: float | None) -> Iterator[None]:
    """A context in which a device's memory runs out after so many GB (10 ** 9 bytes) more.

    On the CPU it always runs out before the machine's does, so that an error is raised and nothing is killed.

    Args:
        memory_gb: None: what there is.

    Raises:
        ValueError: this system or device cannot be limited, and a limit was asked for.
    """
    kind = device_type(device)
    if kind == "cuda" and memory_gb is not None:
        index = torch.device(device).index
        index = torch.cuda.current_device() if index is None else index  # torch takes no "cuda" without a number here
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(index).total_memory
        share = (torch.cuda.memory_reserved(index) + memory_gb * 1e9) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), index)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, index)
    elif kind == "cpu" and not math.isnan(taken := _status("VmData")):
        import resource

        there = available()
        room = min(there - max(LEFT_ALONE * there, LEFT_BYTES), math.inf if memory_gb is None else memory_gb * 1e9)
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limits = [int(taken + max(0, room)), *(each for each in (soft, hard) if each != resource.RLIM_INFINITY)]
        resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    elif kind != "cuda" and memory_gb is not None:
        raise ValueError(f"memory_gb={memory_gb}: the memory of {device} cannot be limited on {sys.platform}")
    else:
        yield


def available(root: Path = Path("/")) -> float:
    """Bytes of main memory that can be had: the machine's, or what a container's control group has left (interface 2 or 1)."""
    there = psutil.virtual_memory().available
    group = root / "sys/fs/cgroup"
    for most, taken, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):  # no such interface, or "max"
            limit, used = (int((group / name).read_text()) for name in (most, taken))
            text = (group / taken).with_name("memory.stat").read_text()
            reusable = re.search(rf"^{cached} (\d+)", text, re.MULTILINE)  # of files, given back when asked for
            there = min(there, limit - used + int(reusable[1] if reusable else 0))
    return max(0, there)


def recover(error: BaseException, device: str) -> None:
    """Lets go of what the frames held in which an error came up, and gives the device's memory back.

    Raises:
        RuntimeError: the device has failed for good, as after an access to memory that is not there.
    """
    seen = set()
    while error is not None and error not in seen:
        seen.add(error)
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    give_back(device)


def give_back(device: str = "cpu") -> None:
    """Frees memory that nothing uses any more, so that neither the next setting nor its measurement has to do with it."""
    gc.collect()
    if device.startswith("cuda"):
        if torch.cuda.is_initialized():  # else there is nothing, and asking would take some
            synchronize(device)
            torch.cuda.empty_cache()
    elif device == "cpu" and sys.platform == "linux":
        import ctypes

        with contextlib.suppress(AttributeError, OSError):  # a C library other than GNU's
            ctypes.CDLL(None).malloc_trim(0)


def synchronize(device: str) -> None:
    """Waits until a device has done what it was told to."""
    if device_type(device) == "cuda":
        torch.cuda.synchronize(device)
    elif device_type(device) == "mps":
        torch.mps.synchronize()


def device_type(device: str) -> str:
    return device.partition(":")[0]


def lacks_room(error: BaseException) -> bool:
    """Whether an error says that memory ran out, so that a smaller batch may do."""
    return failures.what_ran_out(error) in ("GPU", "memory") or bool(
        re.search(f"{NO_ROOM}|{NO_ROOM_ON_CPU}", str(error))
    )


def in_words(error: BaseException) -> str:
    """An error in a sentence."""
    kind = failures.what_ran_out(error)
    if kind is None and lacks_room(error):
        kind = "GPU" if re.search(NO_ROOM, str(error)) else "memory"
    if kind is not None:
        return f"{failures.ADVICE[kind][0]} ({in_line(error)})"
    return " ".join(str(error).split()) if isinstance(error, ValueError | FloatingPointError) else in_line(error)


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


def _status(name: str) -> float:
    """Bytes of a line of /proc/self/status; NaN where there is none."""
    with contextlib.suppress(OSError):
        found = re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        if found:
            return int(found[1]) * 1024
    return math.nan
