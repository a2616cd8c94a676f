"""What is put into a model without a trace in its state_dict: pads and pools.

They are plain objects registered as forward pre-hooks, so that a model is copied and pickled with them; a closure could not be.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rsnakit import dryrun


class Pad:
    """A forward pre-hook that pads a module's first argument; it can be copied and pickled with its module.

    Attributes:
        pad: left, right, top, bottom, in pixels; negative ones cut off.
        mode: as in `torch.nn.functional.pad`.
    """

    def __init__(self, pad: Sequence[int], mode: str = "constant") -> None:
        self.pad, self.mode = tuple(pad), mode

    def __call__(self, module: nn.Module, arguments: tuple) -> tuple:
        x, *others = arguments
        return (F.pad(x, self.pad, mode=self.mode), *others)


class StemPad(Pad):
    """The part of a first convolution's padding that the convolution cannot do itself, as it pads evenly."""


class InputPad(Pad):
    """A forward pre-hook that pads the image."""

    def __call__(self, module: nn.Module, arguments: tuple) -> tuple:
        if self.mode == "reflect":
            height, width = arguments[0].shape[-2:]
            left, right, top, bottom = self.pad
            if max(top, bottom) >= height or max(left, right) >= width:
                raise ValueError(
                    f"an image of {height} rows and {width} columns cannot be reflected by {top} at the top, {bottom} at the "
                    f"bottom, {left} at the left and {right} at the right: at most by one pixel less than it has; "
                    "pad less, take larger images, or mode='zero'"
                )
        return super().__call__(module, arguments)


class Pool(nn.Module):
    """An average pool of maps (N, C, H, W), or (N, H, W, C) if `channels_last`."""

    def __init__(self, kernel: tuple[int, int], channels_last: bool) -> None:
        super().__init__()
        self.kernel, self.channels_last = kernel, channels_last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.channels_last:
            return F.avg_pool2d(x.permute(0, 3, 1, 2), self.kernel).permute(0, 2, 3, 1)
        return F.avg_pool2d(x, self.kernel)

    def extra_repr(self) -> str:
        return f"kernel={self.kernel}, channels_last={self.channels_last}"


class PoolBefore:
    """A forward pre-hook that pools the first tensor among a module's arguments."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def __call__(self, module: nn.Module, arguments: tuple, options: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        first = dryrun.first_tensor((arguments, options))
        arguments = tuple(self.pool(x) if x is first else x for x in arguments)
        return arguments, {key: self.pool(x) if x is first else x for key, x in options.items()}


def hook_of(module: nn.Module, kind: type) -> Any:
    """A module's forward pre-hook of a kind; None where it has none."""
    return next((hook for hook in module._forward_pre_hooks.values() if isinstance(hook, kind)), None)


def remove_hook(module: nn.Module, kind: type) -> None:
    """Takes forward pre-hooks of a kind off a module."""
    for key in [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, kind)]:
        del module._forward_pre_hooks[key]
