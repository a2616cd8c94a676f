"""Which way an image takes through a model, found out by dry runs: where it enters, and how its maps lie."""

import contextlib
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from rsnakit import stems
from rsnakit.hooks import InputPad, hook_of


def taken_too(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Inputs 2 and 4 times as large as x, as far as the model takes them; none for a model of one size."""
    found = []
    for times in (2, 4):  # what strides and windows divide stays so
        with contextlib.suppress(Exception):
            larger = x.new_empty((*x.shape[:2], *(times * length for length in x.shape[2:])))
            stems.trial(model, larger)
            found.append(larger)
    return found


def maps_into(model: nn.Module, name: str, inputs: Sequence[torch.Tensor]) -> tuple[bool, tuple[int, int]]:
    """Whether what goes into a module is (N, H, W, C), and its (H, W) for the first of several inputs of growing size.

    Found out by growing the image, as one shape does not tell.
    """
    found = [stems.shapes_into(model, [name], x).get(name) for x in inputs[:2]]
    shape = found[0]
    if shape is None:
        raise ValueError(f"insert_pool: {name!r} is not called when the model runs, or not with a tensor")
    if len(shape) != 4:
        raise ValueError(
            f"insert_pool: {name!r} gets {'tokens' if len(shape) == 3 else 'a tensor'} of shape {shape}, which have no height "
            "and width to pool over; take a module that gets maps"
        )
    if len(found) == 2:
        axes = tuple(axis for axis in range(4) if shape[axis] != found[1][axis])
    else:  # one size alone: of a square image height and width are alike
        axes = next((pair for pair in ((2, 3), (1, 2)) if shape[pair[0]] == shape[pair[1]]), ())
        axes = () if shape[1] == shape[2] == shape[3] else axes
    if axes not in ((2, 3), (1, 2)):
        raise ValueError(f"insert_pool: which axes of {name!r}'s input {shape} are height and width cannot be told")
    return axes == (1, 2), (shape[axes[0]], shape[axes[1]])


def entered_by(model: nn.Module, x: torch.Tensor, first: Sequence[str]) -> list[nn.Module]:
    """The outermost modules inside of a model that are given its very input, through which it must reach its `first` ones."""
    found: list[str] = []
    inputs: list[torch.Tensor] = []
    beside: list[str] = []

    def check(name: str) -> Callable:
        return lambda _, arguments: beside.append(name) if stems.of_image(arguments) else None

    def note(name: str) -> Callable:  # by name, as it may be a copy that is run
        def hook(_: nn.Module, arguments: tuple) -> tuple | None:
            if not arguments or not inputs or arguments[0] is not inputs[-1]:
                return None
            found.append(name)
            # What is inside is given another, without a gradient.
            return (arguments[0].detach(), *arguments[1:])

        return hook

    with contextlib.ExitStack() as stack:
        stack.callback(model.register_forward_pre_hook(stems.mark_image).remove)
        stack.callback(model.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0])).remove)
        for name, module in model.named_modules():
            if name:
                stack.callback(module.register_forward_pre_hook(note(name), prepend=True).remove)
            if name in first:
                stack.callback(module.register_forward_pre_hook(check(name)).remove)
        stems.trial(model, x)
    if beside or not found:
        raise ValueError(
            f"pad_input: {type(model).__name__} does not give its input as it is to {', '.join(beside) or 'any module'} (it is "
            "scaled, cut or resized first); pad the images yourself, or pad the part of the model that gets them"
        )
    return [model.get_submodule(name) for name in dict.fromkeys(found)]


def intermediate_shapes(model: nn.Module, x: torch.Tensor) -> list[tuple[int, ...]] | None:
    """Shapes of what a model's `forward_intermediates` gives; None where it does not run."""
    if hasattr(model, "forward_intermediates"):
        with contextlib.suppress(Exception):
            levels = stems.trial(model, x, method="forward_intermediates", real=False, intermediates_only=True)
            return [tuple(level.shape) for level in levels]
    return None


def shapes_when_padded(
    model: nn.Module, entered: Sequence[nn.Module], inputs: Sequence[torch.Tensor], pad: Sequence[int]
) -> tuple[torch.Tensor, list[tuple[int, ...]]] | None:
    """The first input that `forward_intermediates` takes when padded outside of the model, and the shapes it then gives."""
    left, right, top, bottom = pad
    if not any(hook_of(module, InputPad) for module in entered):
        for x in inputs:
            shapes = intermediate_shapes(model, F.pad(x, (left, right, top, bottom)))
            if shapes:
                return x, shapes
    return None
