"""A run's models, on all devices at hand, which share the work; what they do with an image stands in `replica`."""

import contextlib
import copy
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rsnakit import env, models, runs
from rsnakit.preprocess import PreprocessConfig
from rsnakit.replica import TTA, Pass, Replica, levels

__all__ = ["TTA", "Ensemble", "Pass", "Scorer", "devices_of", "levels", "load_ensemble"]

AHEAD = 2  # batches for each thread that are under way: the one it is at, and the next


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


def load_ensemble(run: Path, device: str = "cpu") -> Ensemble:
    """Rebuilds the models of all folds that a run has, from its own files alone.

    Raises:
        rsnakit.runs.RunError: no fold is trained, or the folds were trained on differently prepared pixels.
        rsnakit.models.WeightsError: weights that do not fit what `model.json` says.
    """
    folders = runs.trained_folds(run)
    if not folders:
        raise runs.RunError(f"{run}: no fold with best.safetensors and model.json; 03_train makes one")
    built, described = {}, {}
    for fold, folder in folders.items():
        described[fold] = runs.read_model(folder)
        built[fold] = models.load_model(folder).to(device, memory_format=torch.channels_last)
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

    Attributes:
        ensemble: the models on the first device.
        devices: as given.
    """

    def __init__(
        self,
        run: Path,
        devices: Sequence[str],
        precision: str = "fp32",
        compile: str = "off",
        batch_size: int = 8,
    ) -> None:
        self.devices, self.precision = list(devices), precision
        self.ensemble = load_ensemble(run, self.devices[0])
        self._of_device: dict[str, Replica] = {}
        for name in self.devices:
            if name not in self._of_device:
                nets = self.ensemble.models
                if self._of_device:
                    nets = {fold: copy.deepcopy(net).to(name) for fold, net in nets.items()}
                mode = env.choose_compile(name, compile)
                if compile != "off":
                    print(f"compile on {name}: {mode.value}: {mode.reason}")
                by_breast = self.ensemble.by_breast
                self._of_device[name] = Replica(nets, name, precision, mode.value, batch_size, by_breast)

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

        Whatever is raised, here, in a thread or by Ctrl-C, comes through once the threads have ended, which they do after the
        batch that they are at. At most `AHEAD` batches a thread are held.

        Args:
            batches: dicts with `image`, as `batches.in_batches` yields them, which are asked for in this thread.
            passes: asked in a device's thread when it begins a batch, and by several at once.
            take: called in this thread with each batch once, in any order: what was yielded, `score`'s answer, and the seconds
                that the device took.
        """
        crew = _Crew(self._threads(), passes)
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

    def _threads(self) -> list["Replica"]:
        count = env.cores() if self.devices == ["cpu"] else 1
        return [self._of_device[name] for name in self.devices for _ in range(count)]


class _Crew:
    """Threads that score batches, each on its device."""

    def __init__(self, places: Sequence[Replica], passes: Callable[[], Sequence[Pass]]) -> None:
        self.todo, self.done = queue.SimpleQueue(), queue.SimpleQueue()
        self.places, self.passes, self.threads = places, passes, []
        self.under_way, self.stop, self.torch_threads = 0, False, torch.get_num_threads()

    def give(self, batch: dict) -> Iterator[tuple[dict, dict, float]]:
        """Hands out a batch, and yields what is done; it waits while there is no room for another batch."""
        if not self.threads:  # not sooner: the processes that read are forked by now
            self.threads = [threading.Thread(target=self._work, args=(place,), daemon=True) for place in self.places]
            for thread in self.threads:
                thread.start()
        self.todo.put(batch)
        self.under_way += 1
        while self.under_way >= AHEAD * len(self.threads) or not self.done.empty():
            yield self._next()

    def rest(self) -> Iterator[tuple[dict, dict, float]]:
        while self.under_way:
            yield self._next()

    def end(self) -> None:
        self.stop = True
        for _ in self.threads:
            self.todo.put(None)
        for thread in self.threads:
            thread.join()
        torch.set_num_threads(self.torch_threads)

    def _next(self) -> tuple[dict, dict, float]:
        found = self.done.get()
        if isinstance(found, BaseException):
            raise found
        self.under_way -= 1
        return found

    def _work(self, place: Replica) -> None:
        try:
            if place.device.startswith("cpu"):
                torch.set_num_threads(1)
            while (batch := self.todo.get()) is not None and not self.stop:
                passes, begun = tuple(self.passes()), time.perf_counter()
                outputs = place.score(batch["image"], passes)
                self.done.put((batch, outputs, time.perf_counter() - begun))
        except BaseException as error:  # the caller's thread raises it
            self.done.put(error)
