"""A run's models on the devices at hand: all folds and all flips of a batch of images in one pass over its pixels."""

import contextlib
import copy
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from rsnakit import env, failures, models, runs
from rsnakit.loop import autocast
from rsnakit.preprocess import PreprocessConfig
from rsnakit.store_formats import MAX_VALUE

# Ways to show a model an image, by the dimensions of (B, 1, H, W) that are flipped; the first is the image as it is.
TTA = {
    "none": ((),),
    "hflip": ((), (3,)),
    "vflip": ((), (2,)),
    "diagonal": ((), (2, 3)),
    "all": ((), (3,), (2,), (2, 3)),
}
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


class Pass(NamedTuple):
    """One model on one way of showing it the image: `flips` are the dimensions of (B, 1, H, W) that are flipped."""

    fold: int
    flips: tuple[int, ...] = ()


def levels(folds: Sequence[int], tta: str) -> list[tuple[Pass, ...]]:
    """What to do with an image, from all there is to the least, each a tuple of passes.

    First comes everything; then, without flips, all folds; then one fold less each time, from the end; at last the first fold
    alone. Within a level the images as they are come first.

    Args:
        folds: fold numbers, the one to be kept longest first.
        tta: a name in `TTA`.
    """
    everything = tuple(Pass(fold, flips) for flips in TTA[tta] for fold in folds)
    plain = [tuple(Pass(fold) for fold in folds[:count]) for count in range(len(folds), 0, -1)]
    return ([everything] if len(TTA[tta]) > 1 else []) + plain


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
        self._of_device: dict[str, _OnDevice] = {}
        for name in self.devices:
            if name not in self._of_device:
                nets = self.ensemble.models
                if self._of_device:
                    nets = {fold: copy.deepcopy(net).to(name) for fold, net in nets.items()}
                mode = env.choose_compile(name, compile)
                if compile != "off":
                    print(f"compile on {name}: {mode.value}: {mode.reason}")
                by_breast = self.ensemble.by_breast
                self._of_device[name] = _OnDevice(nets, name, precision, mode.value, batch_size, by_breast)

    def score(self, images: np.ndarray, passes: Sequence[Pass], device: str | None = None) -> dict[Pass, np.ndarray]:
        """What the models make of images; each image goes to the device once, and each flip is made once.

        An output that is not finite in half precision is taken from float32, for that image and that pass alone. Where the
        device's memory does not suffice, the images are shown in halves, from then on.

        Args:
            images: (B, 1, H, W) uint16 of 12 bits.
            passes: what to do with each image.
            device: one of `devices`; the first if not given.

        Returns:
            By pass, in their order, the cancer logits (B,), or features (B, C) of models that see breasts; float32.

        Raises:
            torch.OutOfMemoryError: the device has not even room for one image.
        """
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
            passes: asked in a device's thread when it begins a batch.
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

    def _threads(self) -> list["_OnDevice"]:
        count = env.cores() if self.devices == ["cpu"] else 1
        return [self._of_device[name] for name in self.devices for _ in range(count)]


class _OnDevice:
    """The models on one device."""

    def __init__(
        self,
        nets: Mapping[int, torch.nn.Module],
        device: str,
        precision: str,
        mode: str,
        batch_size: int,
        by_breast: bool,
    ) -> None:
        self.device, self.precision, self.limit, self.compiled = device, precision, batch_size, mode != "off"
        self.plain = {fold: _function_of(net, by_breast) for fold, net in nets.items()}
        self.nets = self.plain
        self.lock = threading.Lock()  # the compiler does not work for two threads at once
        # On a device: CUDA multiplies by the reciprocal of a number that is not, which is off by a bit.
        self.scale = torch.tensor(float(MAX_VALUE), device=device)
        if self.compiled:
            self.nets = {
                fold: torch.compile(function, mode=mode, dynamic=False) for fold, function in self.plain.items()
            }

    @torch.inference_mode()
    def score(self, images: np.ndarray, passes: Sequence[Pass]) -> dict[Pass, np.ndarray]:
        pixels = self._to_device(images)
        found = self._in_parts(pixels, passes, self.precision)
        if self.precision != "fp32":
            for each in passes:
                odd = np.flatnonzero(~np.isfinite(found[each]).reshape(len(images), -1).all(1))
                if len(odd):
                    rows = pixels[torch.from_numpy(odd).to(self.device)]
                    found[each][odd] = self._in_parts(rows, [each], "fp32")[each]
        return found

    def _to_device(self, images: np.ndarray) -> torch.Tensor:
        """(B, 1, H, W) float32 in [0, 1]."""
        whole = torch.from_numpy(images.view(np.int16))  # 12 bits; uint16 is not known to all devices
        if self.device.startswith("cuda"):
            whole = whole.pin_memory().to(self.device, non_blocking=True)
        return whole.to(self.device).float() / self.scale

    def _in_parts(self, pixels: torch.Tensor, passes: Sequence[Pass], precision: str) -> dict[Pass, np.ndarray]:
        """Outputs of so many images at a time as the device has had room for so far."""
        parts, first = [], 0
        while first < len(pixels):
            count = self.limit
            part = self._tried(pixels[first : first + count], passes, precision)
            if part is None:  # tried again outside of the handler, whose error holds what filled the memory
                self._halve(min(count, len(pixels) - first))
                continue
            parts.append(part)
            first += count
        return {each: np.concatenate([part[each] for part in parts]) for each in passes}

    def _tried(self, pixels: torch.Tensor, passes: Sequence[Pass], precision: str) -> dict[Pass, np.ndarray] | None:
        try:
            return self._outputs(pixels, passes, precision)
        except Exception as error:
            if failures.what_ran_out(error) != "GPU" or len(pixels) == 1:
                raise
            return None

    def _halve(self, count: int) -> None:
        with self.lock:
            if self.limit >= count:
                self.limit = count // 2
                print(
                    f"NOTE: {self.device} has no room for {count} images at a time; from here on it gets {self.limit}"
                )
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def _outputs(self, pixels: torch.Tensor, passes: Sequence[Pass], precision: str) -> dict[Pass, np.ndarray]:
        """Outputs of images (B, 1, H, W) by pass, all of them moved off the device at once."""
        count, compiled = len(pixels), self.compiled and precision == self.precision
        if compiled and count < self.limit:  # with another shape it would be compiled anew
            pixels = torch.cat([pixels, pixels[-1:].expand(self.limit - count, -1, -1, -1)])
        found = {}
        with autocast(self.device, precision):
            for flips in dict.fromkeys(each.flips for each in passes):
                shown = pixels.flip(flips) if flips else pixels
                for each in passes:
                    if each.flips == flips:
                        found[each] = self._forward(each.fold, shown, compiled)[:count].float()
        whole = torch.stack([found[each] for each in passes]).cpu().numpy()
        return dict(zip(passes, whole, strict=True))

    def _forward(self, fold: int, shown: torch.Tensor, compiled: bool) -> torch.Tensor:
        if not compiled:
            return self.plain[fold](shown)
        try:
            with self.lock:
                return self.nets[fold](shown).clone()  # a captured graph writes the next result into the same place
        except Exception as error:
            if failures.what_ran_out(error) == "GPU":
                raise
            cause = (str(error).strip() or type(error).__name__).splitlines()[0]
            print(f"NOTE: {self.device}: compiling failed, and the models run uncompiled ({cause})")
            self.compiled = False
        return self.plain[fold](shown)


def _function_of(net: torch.nn.Module, by_breast: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """What is asked of a model: features where it sees breasts, else cancer logits."""
    return net.features if by_breast else lambda images: net(images)["cancer"]


class _Crew:
    """Threads that score batches, each on its device."""

    def __init__(self, places: Sequence[_OnDevice], passes: Callable[[], Sequence[Pass]]) -> None:
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

    def _work(self, place: _OnDevice) -> None:
        try:
            if place.device == "cpu":
                torch.set_num_threads(1)
            while (batch := self.todo.get()) is not None and not self.stop:
                passes, begun = tuple(self.passes()), time.perf_counter()
                outputs = place.score(batch["image"], passes)
                self.done.put((batch, outputs, time.perf_counter() - begun))
        except BaseException as error:  # the caller's thread raises it
            self.done.put(error)
