"""What the settings of a model ask of stem, pools and padding, done to a backbone; and what of it can be seen on a model."""

import re
from collections.abc import Sequence

from torch import nn

from rsnakit import hooks, stems, surgery
from rsnakit.patching import plain_name


def parse_pool(text: str) -> tuple[str, tuple[int, int], bool]:
    """An entry of `ModelConfig.pools` as the arguments of `surgery.insert_pool`: module, kernel (vertical, horizontal),
    replace.

    Raises:
        ValueError: it is not written as `name:4x1` or `name:2`, with `:replace` or without.
    """
    found = re.fullmatch(r"([^:\s]+):([1-9]\d*)(?:x([1-9]\d*))?(:replace)?", text)
    if not found:
        raise ValueError(
            f"pools: got {text!r}, expected a module's name and a kernel, such as stages.0:2 or stages.0:4x1 (vertical x "
            "horizontal), and :replace behind it to have the pool in the module's place"
        )
    name, vertical, horizontal, replace = found.groups()
    return name, (int(vertical), int(horizontal or vertical)), bool(replace)


def tame(
    backbone: nn.Module,
    stem_stride: Sequence[int] = (),
    stem_padding: Sequence[int] = (),
    pools: Sequence[str] = (),
    input_pad: Sequence[int] = (),
    input_pad_mode: str = "zero",
) -> None:
    """The surgery that the settings ask for, in place; weights and their names stay.

    Raises:
        ValueError: it is not to be had of this backbone.
    """
    if stem_stride or stem_padding:
        sizes = [size[0] if len(size) == 1 else size or None for size in (stem_stride, stem_padding)]
        surgery.set_stem(backbone, stride=sizes[0], padding=sizes[1])
    for pool in pools:
        name, kernel, replace = parse_pool(pool)
        surgery.insert_pool(backbone, name, kernel, replace)
    if any(input_pad):
        surgery.pad_input(backbone, input_pad, input_pad_mode)


def traces(model: nn.Module) -> list[tuple]:
    """What surgery can change of a model and its state_dict does not show: strides, paddings, and the kit's pads and pools."""
    found = []
    for name, module in model.named_modules():
        name = plain_name(name)
        if isinstance(module, nn.Conv2d):
            found.append((name, module.stride, None if stems.pads_itself(module) else stems.padding_of(module)))
        elif isinstance(module, hooks.Pool):
            found.append((name, module.kernel))
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, hooks.InputPad):
                found.append((name, hook.pad, hook.mode))
            elif isinstance(hook, hooks.PoolBefore):
                found.append((name, "before", hook.pool.kernel))
    return found
