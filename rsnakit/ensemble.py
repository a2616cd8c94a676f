"""A run's models, on all devices at hand, which share the work; what they do with an image stands in `replica`."""

import contextlib
import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from rsnakit import env, models, runs
from rsnakit.crew import Crew, in_line
from rsnakit.preprocess import PreprocessConfig
from rsnakit.replica import TTA, Pass, Replica, levels

__all__ = ["TTA", "Ensemble", "Pass", "Scorer", "devices_of", "levels", "load_ensemble"]


@dataclass(frozen=True)
class Ensemble:
    """The models of a run's folds, and what all of them agree on.

    Attributes:
        models: by fold number, on the device, in evaluation mode.
        preprocess: the settings that shaped the pixels they were trained on.
        prior: share of positive images, or breasts, in their training.
    """

    models: dict[int, torch.nn.Module]
    preprocess: PreprocessConfig
    prior: float

    @property
    def by_breast(self) -> bool:
        """Whether the models score a breast from all its images, and not each image by itself."""
        return next(iter(self.models.values())).config.views != "none"


def load_ensemble(run: Path, device: str = "cpu", keep_going: bool = False) -> Ensemble:
    """Rebuilds the models of all folds that a run has, from its own files alone.

    Args:
        keep_going: folds that cannot be read are left out, and that is said, as long as there is one that can.

    Raises:
        rsnakit.runs.RunError: no fold is trained, or the folds were trained on differently prepared pixels.
        rsnakit.models.WeightsError: weights that do not fit what `model.json` says.
    """
    folders = runs.trained_folds(run)
    if not folders:
        raise runs.RunError(f"{run}: no fold with best.safetensors and model.json; 03_train makes one")
    built, described, errors = {}, {}, []
    for fold, folder in folders.items():
        try:
            net, described[fold] = models.load_model(folder), runs.read_model(folder)
        except Exception as error:
            if not keep_going:
                raise
            errors.append(error)
            print(f"NOTE: fold {fold} cannot be read, and is left out ({in_line(error)})")
        else:
            built[fold] = net.to(device, memory_format=torch.channels_last)
    if not built:
        raise errors[0]
    first, *others = described.values()
    for other in others:
        differences = runs.compare(first["preprocess"], other["preprocess"])
        if differences:
            raise runs.RunError(f"{run}: folds were trained on differently prepared images: {differences}")
    return Ensemble(
        models=built,
        preprocess=runs.rebuild(PreprocessConfig, first["preprocess"], run),
        prior=float(np.mean([model["prior"] for model in described.values()])),
    )


def devices_of(wanted: str = "auto") -> list[str]:
    """The devices that share the work: with "auto" and "cuda" all GPUs that work; else the one that was asked for.

    Raises:
        ValueError, RuntimeError: as `env.choose_device`, which see.
    """
    chosen = env.choose_device(wanted).value
    if chosen != "cuda":
        return [chosen]
    found = []
    for index in range(torch.cuda.device_count()):
        with contextlib.suppress(RuntimeError):  # one among several may be too old, or broken
            found.append(env.choose_device(f"cuda:{index}").value)
    return found or [chosen]


class Scorer:
    """The models of a run, on one device or several.

    Args:
        run: a run's folder.
        devices: as `devices_of` gives them; the same one twice is two threads with the same weights.
        precision: fp32, bf16 or fp16, as `env.choose_precision` gives it.
        compile: off, default or max-autotune. Where it would not work, or fails, the models run uncompiled, and that is said.
        batch_size: images that a model sees at a time at most.
        keep_going: whatever can be done without is, and that is said: a fold that cannot be read, a device that models cannot
            be brought to. Where no device is left, at first or later, the CPU goes on.

    Attributes:
        devices: as given, without those that models could not be brought to.
        precision: as given; of a CPU that stands in for all devices, fp32.
        n_threads: in which models run: one a device, and one a core where the CPU is the only one.
        on_cpu: the models on the CPU, whatever becomes of devices.
    """

    def __init__(
        self,
        run: Path,
        devices: Sequence[str],
        precision: str = "fp32",
        compile: str = "off",
        batch_size: int = 8,
        keep_going: bool = False,
    ) -> None:
        self.precision, self.batch_size, self.keep_going = precision, batch_size, keep_going
        self.on_cpu = load_ensemble(run, "cpu", keep_going)
        self._of_device: dict[str, Replica] = {}
        for name in dict.fromkeys(devices):
            try:
                self._of_device[name] = self._replica(name, precision, compile)
            except Exception as error:
                if not keep_going or name == "cpu":
                    raise
                print(f"NOTE: the models cannot be brought to {name}, which is done without ({in_line(error)})")
        self.devices = [name for name in devices if name in self._of_device]
        if not self.devices:
            self.devices, self.precision = ["cpu"], "fp32"
            self._of_device["cpu"] = self._replica("cpu", "fp32", "off")
        count = env.cores() if self.devices == ["cpu"] else 1
        self._places = [self._of_device[name] for name in self.devices for _ in range(count)]
        self.n_threads = len(self._places)

    def _replica(self, name: str, precision: str, compile: str) -> Replica:
        nets, mode = self.on_cpu.models, env.choose_compile(name, compile)
        if name != "cpu":
            nets = {fold: copy.deepcopy(net).to(name) for fold, net in nets.items()}
        if compile != "off":
            print(f"compile on {name}: {mode.value}: {mode.reason}")
        return Replica(nets, name, precision, mode.value, self.batch_size, self.on_cpu.by_breast)

    @property
    def ensemble(self) -> Ensemble:
        """The models on the first device that has not failed; where all have, on the CPU."""
        return replace(self.on_cpu, models=self._places[0].models) if self._places else self.on_cpu

    def score(self, images: np.ndarray, passes: Sequence[Pass], device: str | None = None) -> dict[Pass, np.ndarray]:
        """What the models on one of `devices`, the first if not given, make of images: see `Replica.score`."""
        return self._of_device[device or self.devices[0]].score(images, passes)

    def run(
        self,
        batches: Iterable[dict],
        passes: Callable[[], Sequence[Pass]],
        take: Callable[[dict, dict[Pass, np.ndarray], float], None],
    ) -> None:
        """Scores batches, with a thread for each device; a CPU alone has one for each core, as two that share no images need
        not wait for one another in each layer.

        A device that fails is done without, and an image that models fail over has NaN (see `crew`). Whatever else is raised,
        here, in a thread or by Ctrl-C, comes through once the threads have ended, which they do after the batch that they are
        at; so does the error of the last device, and one that no image is spared. At most `crew.AHEAD` batches a thread are
        held.

        Args:
            batches: dicts with `image`, as `batches.in_batches` yields them, which are asked for in this thread.
            passes: asked in a device's thread when it begins a batch, and by several at once.
            take: called in this thread with each batch once, in any order: what was yielded, where images failed with `errors`
                by their places in it; `score`'s answer; and the seconds that the device took.
        """
        crew = Crew(self._places, passes, self._spare, self.keep_going)
        try:
            for batch in batches:
                for done in crew.give(batch):
                    take(*done)
            for done in crew.rest():
                take(*done)
        finally:
            crew.end()
            if hasattr(batches, "close"):
                batches.close()

    def _spare(self) -> list[Replica]:
        """What goes on where no device is left: all cores, where they have not been at it."""
        if not self.keep_going or "cpu" in self.devices:
            return []
        print("NOTE: no device is left, and the CPU goes on")
        return [self._replica("cpu", "fp32", "off")] * env.cores()
