"""The levels of a timm model's pyramid: by how much each is smaller than the image, as measured."""

import contextlib
import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from timm.models import FeatureInfo
from torch import nn

from rsnakit import dryrun, stems
from rsnakit.hooks import InputPad, hook_of
from rsnakit.patching import inner_module


def reductions(model: nn.Module, input_size: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """By how much each level of the pyramid is smaller than the input, (vertical, horizontal), as measured in dry runs.

    Measured is how much the maps grow with the image, so that padding does not blur it: 72 rows from 1000 with 156 padded
    are a reduction of 16. A model that takes one size is measured by what it makes of that.

    Raises:
        ValueError: the model has no `feature_info`, or a level is no map with a height and a width.
    """
    model = inner_module(model)
    x, _ = stems.look(model, input_size)
    measured = _measure(model, x)
    if not measured:
        raise ValueError(
            f"{type(model).__name__} has no feature_info, which names the levels of a timm model's pyramid"
        )
    owner, levels = next(iter(measured.items()))
    indices = owner.feature_info.out_indices if isinstance(owner.feature_info, FeatureInfo) else range(len(levels))
    for index in indices:
        if levels[index] is None:
            where = owner.feature_info[index].get("module")
            raise ValueError(f"level {index} of {type(model).__name__} ({where}) is no map with a height and a width")
    return [levels[index] for index in indices]


def measure(model: nn.Module, inputs: Sequence[torch.Tensor]) -> dict[nn.Module, list[tuple[int, int] | None]]:
    """What `_measure` finds with the first of the inputs that the model takes."""
    first_error = None
    for x in inputs:
        try:
            return _measure(model, x)
        except Exception as error:  # whatever a model may raise
            first_error = first_error or error
    raise first_error


def _measure(model: nn.Module, x: torch.Tensor) -> dict[nn.Module, list[tuple[int, int] | None]]:
    """Reductions of every level of each part of the model that has a `feature_info`, the model itself first."""
    height, width = x.shape[-2:]
    small = _map_shapes(model, x)
    # Larger by much, and by what strides, windows and the size itself divide: nothing is computed, so size is no matter.
    # Where the model has to be run really, it is small. Height and width differ lest their axes be taken for others.
    large, more = {}, (0, 0)
    for least in (1024, 64):
        more = math.lcm(height, least), 2 * math.lcm(width, least)
        with contextlib.suppress(Exception):  # a model of one size
            large = _map_shapes(model, x.new_empty((*x.shape[:2], height + more[0], width + more[1])))
            break
    pads = [hook.pad for module in model.modules() if (hook := hook_of(module, InputPad))][:1] or [(0, 0, 0, 0)]
    padded = height + pads[0][2] + pads[0][3], width + pads[0][0] + pads[0][1]
    found: dict[nn.Module, list[tuple[int, int] | None]] = {}
    for (owner, index), shape in small.items():
        other = large.get((owner, index))
        found.setdefault(owner, [None] * len(list(owner.feature_info)))
        if len(shape) != 4:
            continue
        if other is not None:
            grown = [(b - a) for a, b in zip(shape, other, strict=True) if a != b]
            if len(grown) == 2:
                found[owner][index] = tuple(round(much / by) for much, by in zip(more, grown, strict=True))
        else:
            channels = owner.feature_info[index]["num_chs"]
            axes = (1, 2) if shape[3] == channels and shape[1] != channels else (2, 3)
            found[owner][index] = tuple(round(n / shape[axis]) for n, axis in zip(padded, axes, strict=True))
    return found


def _map_shapes(model: nn.Module, x: torch.Tensor) -> dict[tuple[nn.Module, int], tuple[int, ...]]:
    """Shapes of the levels of each part that has a `feature_info`, by part and number of the level."""
    shapes: dict[tuple[nn.Module, int], tuple[int, ...]] = {}

    def note(owner: nn.Module, indices: Sequence[int]) -> Any:
        def hook(_: nn.Module, __: tuple, output: Any) -> None:
            maps = [output] if len(indices) == 1 and not isinstance(output, list | dict) else output
            for index, value in zip(indices, maps.values() if isinstance(maps, dict) else maps, strict=False):
                tensor = dryrun.first_tensor(value)
                if tensor is not None:
                    shapes[owner, index] = tuple(tensor.shape)

        return hook

    owners = [module for module in model.modules() if isinstance(_info(module), list | tuple | FeatureInfo)]
    with contextlib.ExitStack() as stack:
        for owner in owners:
            names = {stems.flat(name): module for name, module in owner.named_modules()}
            for index, level in enumerate(_info(owner)):
                module = names.get(stems.flat(level.get("module") or ""))
                shapes[owner, index] = ()
                if module is not None and module is not owner:
                    stack.callback(module.register_forward_hook(note(owner, [index])).remove)
            if isinstance(_info(owner), FeatureInfo):
                stack.callback(owner.register_forward_hook(note(owner, _info(owner).out_indices)).remove)
        stems.trial(model, x)
    info = _info(model)
    if isinstance(info, list | tuple) and any(len(shapes[model, index]) != 4 for index in range(len(info))):
        # Tokens, or levels that are no module's output: timm makes maps of them.
        with contextlib.suppress(Exception):
            maps = stems.trial(model, x, method="forward_intermediates", real=False, intermediates_only=True)
            if len(maps) == len(info):
                shapes |= {(model, index): tuple(level.shape) for index, level in enumerate(maps)}
    return shapes


def _info(module: nn.Module) -> Any:
    return vars(module).get("feature_info")


def write_reductions(measured: dict[nn.Module, list[tuple[int, int] | None]]) -> None:
    """Puts measured reductions into `feature_info`, into copies, as other models may share the old ones."""
    for owner, levels in measured.items():
        info = [dict(level) for level in owner.feature_info]
        for level, reduction in zip(info, levels, strict=True):
            if reduction is not None:
                level["reduction"] = reduction[0] if reduction[0] == reduction[1] else reduction
        if isinstance(owner.feature_info, FeatureInfo):
            owner.feature_info = copy.copy(owner.feature_info)
            owner.feature_info.info = info
        else:
            owner.feature_info = type(owner.feature_info)(info)
