"""Models on one device: what they make of images, all folds and all flips in one pass over the pixels."""

import contextlib
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from rsnakit import failures
from rsnakit.loop import autocast
from rsnakit.store_formats import MAX_VALUE

# Ways to show a model an image, by the dimensions of (B, 1, H, W) that are flipped; the first is the image as it is.
TTA = {
    "none": ((),),
    "hflip": ((), (3,)),
    "vflip": ((), (2,)),
    "diagonal": ((), (2, 3)),
    "all": ((), (3,), (2,), (2, 3)),
}
# What cuDNN says where it has no room for what it needs besides.
NO_ROOM = (
    r"unable to find an engine to execute this|[Uu]nable to find a valid cuDNN algorithm|CUDNN_STATUS_INTERNAL_ERROR"
)
# Compilation's modes that are taken for others: captured graphs belong to the thread that captured them.
MODES = {"max-autotune": "max-autotune-no-cudagraphs"}


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


class Replica:
    """A run's models on one device; several threads may use it.

    Args:
        nets: models by fold, on the device, in evaluation mode.
        precision: fp32, bf16 or fp16.
        mode: off, or a mode of `torch.compile`. Where compiling fails the models run uncompiled, and that is said.
        limit: images that are shown at a time at most; compiled code is for just as many.
        by_breast: whether features are asked for, and not logits.

    Attributes:
        pinned: whether images come to the device by way of locked memory.
    """

    def __init__(
        self, nets: Mapping[int, torch.nn.Module], device: str, precision: str, mode: str, limit: int, by_breast: bool
    ) -> None:
        self.device, self.precision, self.limit, self.compiled = device, precision, limit, mode != "off"
        self.models, self.pinned = dict(nets), device.startswith("cuda")
        self.plain = {fold: _function_of(net, by_breast) for fold, net in nets.items()}
        # On the device: CUDA multiplies by the reciprocal of a number that is not, which may be off by a bit.
        self.scale = torch.tensor(float(MAX_VALUE), device=device)
        self.lock = threading.Lock()
        self.begun: set[int] = set()  # folds whose compiled function has been called
        self.nets = self.plain
        if self.compiled:
            mode = MODES.get(mode, mode)
            self.nets = {fold: torch.compile(each, mode=mode, dynamic=False) for fold, each in self.plain.items()}

    def score(self, images: np.ndarray, passes: Sequence[Pass]) -> dict[Pass, np.ndarray]:
        """What the models make of images; each image goes to the device once, and each flip is made once.

        An output that is not finite in half precision is taken from float32, for that image and that pass alone. Where the
        device's memory does not suffice, the images are shown in halves, from then on.

        Args:
            images: (B, 1, H, W) uint16 of 12 bits.
            passes: what to do with each image.

        Returns:
            By pass, in their order, the cancer logits (B,), or features (B, C); float32.

        Raises:
            torch.OutOfMemoryError: the device has not even room for one image.
        """
        current = torch.cuda.device(self.device) if self.device.startswith("cuda") else contextlib.nullcontext()
        with torch.inference_mode(), current:
            pixels = self._to_device(images)
            found = self._in_parts(pixels, passes, self.precision)
            for each in passes if self.precision != "fp32" else ():
                odd = np.flatnonzero(~np.isfinite(found[each]).reshape(len(images), -1).all(1))
                if len(odd):
                    rows = pixels[torch.from_numpy(odd).to(self.device)]
                    found[each][odd] = self._in_parts(rows, [each], "fp32")[each]
        return found

    def _to_device(self, images: np.ndarray) -> torch.Tensor:
        """(B, 1, H, W) float32 in [0, 1]."""
        whole = torch.from_numpy(images.view(np.int16))  # of 12 bits; not all devices know uint16
        if self.pinned:
            whole = whole.pin_memory()
        return whole.to(self.device, non_blocking=True).float() / self.scale

    def _in_parts(self, pixels: torch.Tensor, passes: Sequence[Pass], precision: str) -> dict[Pass, np.ndarray]:
        """Outputs of so many images at a time as the device has had room for so far."""
        parts, first = [], 0
        while first < len(pixels):
            part = pixels[first : first + self.limit]
            outputs = self._tried(part, passes, precision)
            if outputs is None:  # tried again out here: the handler's error holds what filled the memory
                self._halve(len(part))
                continue
            parts.append(outputs)
            first += len(part)
        return {each: np.concatenate([part[each] for part in parts]) for each in passes}

    def _tried(self, pixels: torch.Tensor, passes: Sequence[Pass], precision: str) -> dict[Pass, np.ndarray] | None:
        try:
            return self._outputs(pixels, passes, precision)
        except Exception as error:
            if not _lacks_room(error) or len(pixels) == 1:
                raise
            return None

    def _halve(self, count: int) -> None:
        with self.lock:
            if self.limit >= count:  # another thread has not done it meanwhile
                self.limit = count // 2
                print(
                    f"NOTE: {self.device} has no room for {count} images at a time, and gets {self.limit} from here on"
                )
        if self.device.startswith("cuda"):
            with contextlib.suppress(RuntimeError):  # of another device, which has failed
                torch.cuda.empty_cache()

    def _outputs(self, pixels: torch.Tensor, passes: Sequence[Pass], precision: str) -> dict[Pass, np.ndarray]:
        """Outputs of images (B, 1, H, W) by pass, all of them taken off the device at once."""
        count, compiled = len(pixels), self.compiled and precision == self.precision
        if compiled and count < self.limit:  # compiled code is for one shape
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
        if not (compiled and self.compiled):
            return self.plain[fold](shown)
        try:
            # Compiled in the first call, by one thread while others wait.
            with contextlib.nullcontext() if fold in self.begun else self.lock:
                output = self.nets[fold](shown)
            self.begun.add(fold)
            return output
        except Exception as error:
            if failures.what_ran_out(error) == "GPU":
                raise
            cause = (str(error).strip() or type(error).__name__).splitlines()[0]
            with self.lock:
                if self.compiled:
                    print(f"NOTE: {self.device}: compiling failed, and the models run uncompiled ({cause})")
                self.compiled = False
        return self.plain[fold](shown)


def _lacks_room(error: Exception) -> bool:
    """Whether fewer images at a time may help."""
    return failures.what_ran_out(error) in ("GPU", "memory") or bool(re.search(NO_ROOM, str(error)))


def _function_of(net: torch.nn.Module, by_breast: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """What is asked of a model: features where it sees breasts, else cancer logits."""
    return net.features if by_breast else lambda images: net(images)["cancer"]
