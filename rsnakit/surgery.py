"""Look into a timm model and change how its weights are used; weights and the names of a state_dict stay as they were.

Every change is tried on a dry run. Where the model no longer runs, it is put back as it was, and a ValueError says why.
A change is made before `torch.compile`: compiled code may ignore hooks that come later.
"""

import contextlib
import difflib
from collections.abc import Iterator, Sequence

import torch
from timm.layers import PatchEmbed
from torch import nn

from rsnakit import stems
from rsnakit.anatomy import summarize
from rsnakit.flow import entered_by, intermediate_shapes, maps_into, shapes_when_padded, taken_too
from rsnakit.hooks import InputPad, Pool, PoolBefore, hook_of, remove_hook
from rsnakit.patching import original, patched, replace_method, restore
from rsnakit.pyramid import measure, reductions, write_reductions
from rsnakit.taps import capture

__all__ = [
    "capture", "insert_pool", "original", "pad_input", "patched", "reductions", "replace_method", "restore", "set_stem",
    "summarize",
]  # fmt: skip

HOOKS = "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs"
MODES = {"zero": "constant", "constant": "constant", "reflect": "reflect"}


def set_stem(
    model: nn.Module,
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] | None = None,
    input_size: Sequence[int] | None = None,
) -> nn.Module:
    """Changes stride and padding of the convolutions that see the image, in place, and keeps their weights.

    Called again it starts from the padding that the model came with, or that was last given, so nothing adds up.
    timm's convolutions that pad themselves as TensorFlow does give the input over the stride, rounded up, at any stride;
    with a padding given they do without (`Conv2dSame` becomes an `nn.Conv2d`, the same object with the same weights).
    `model.feature_info` tells the true reductions afterwards.

    Args:
        stride: one number, or (vertical, horizontal); None: as it is.
        padding: the same, in pixels on either side. None: the convolution's own where maps are then exactly the input over
            the stride; else the least that makes them so, even wherever that can be. In a stem of branches with kernels
            of different size it is the largest kernel's, and the smaller ones get what keeps their maps aligned.
        input_size: (H, W) or (C, H, W) of an image to try; by default the one in the model's `pretrained_cfg`.

    Raises:
        ValueError: nothing to change, the model takes images of one size, sees them through no convolution, is compiled, or
            does not run with such a stem.
    """
    if stride is None and padding is None:
        raise ValueError("set_stem: neither a stride nor a padding is given; give one, such as stride=(4, 1)")
    wanted = None if stride is None else _pair(stride, "stride", 1)
    given = None if padding is None else _pair(padding, "padding", 0)
    _refuse_compiled(model, "set_stem")
    refuse_fixed(model)
    x, names = stems.look(model, input_size)
    if not names:
        raise ValueError(
            f"set_stem: no convolution of {type(model).__name__} sees the image; a linear layer may cut it into patches: "
            "take another backbone, such as a convnext or an efficientnet"
        )
    convolutions = [model.get_submodule(name) for name in names]
    strides = [wanted or convolution.stride for convolution in convolutions]
    paddings = _paddings(convolutions, strides, given)
    with _all_or_nothing(model, f"set_stem(stride={stride}, padding={padding})", [x]):
        for name, convolution, steps, pads in zip(names, convolutions, strides, paddings, strict=True):
            stems.set_convolution(convolution, steps, pads)
            if given is not None:
                convolution.own_padding = pads
            parent = model.get_submodule(name.rpartition(".")[0])
            if isinstance(parent, PatchEmbed):
                parent.patch_size = steps  # it counts its patches by that
            _keep_when_fused(model, name)
    return model


def insert_pool(
    model: nn.Module,
    name: str,
    kernel: int | Sequence[int],
    replace: bool = False,
    input_size: Sequence[int] | None = None,
) -> nn.Module:
    """Puts an average pool before a named module, or in its place, in place; the rest of the model is as it was.

    The pool acts on height and width, wherever these are in the maps (N, C, H, W) or (N, H, W, C), on the first tensor that
    goes into the module. Rows and columns that fill no window are dropped. `model.feature_info` tells the true reductions
    afterwards.

    Args:
        name: as in `model.named_modules()`; in features_only models it may begin with `stages_0.` for `stages.0.`.
        kernel: one number, or (vertical, horizontal), which is its stride too.
        replace: the pool takes the module's place; an Identity's it takes always.
        input_size: as in `set_stem`.

    Raises:
        ValueError: no such module (the nearest are named), it has weights that would be lost, has a pool already, is not
            reached, gets tokens or vectors instead of maps, or maps smaller than the kernel, or the model does not run with
            the pool, as where it stands in a residual branch; images 2 and 4 times as large are tried too, if it takes them.
    """
    kernels = _pair(kernel, "kernel", 1)
    _refuse_compiled(model, "insert_pool")
    module = _find(model, name)
    if isinstance(module, Pool) or hook_of(module, PoolBefore):
        raise ValueError(f"insert_pool: {name!r} has a pool already; give one kernel that does both, to a fresh model")
    in_place = replace or isinstance(module, nn.Identity)
    if in_place and (list(module.parameters()) or list(module.buffers())):
        raise ValueError(
            f"insert_pool: {name!r} is a {type(module).__name__} with weights, which would be lost; leave replace=False"
        )
    x, _ = stems.look(model, input_size)
    tries = [x, *taken_too(model, x)]
    channels_last, (height, width) = maps_into(model, name, tries)
    if kernels[0] > height or kernels[1] > width:
        raise ValueError(
            f"insert_pool: a pool of {kernels} is larger than the maps before {name!r}, which have {height} rows and {width} "
            f"columns for an image of {tuple(x.shape[2:])}; take a smaller kernel, or give the input_size of your images"
        )
    pool = Pool(kernels, channels_last)
    with _all_or_nothing(model, f"insert_pool({name!r}, {kernel})", [x]):
        if in_place:
            pool.training = module.training
            for hooks in HOOKS:
                setattr(pool, hooks, getattr(module, hooks))
            model.set_submodule(name, pool)
        else:
            module.register_forward_pre_hook(PoolBefore(pool), with_kwargs=True)
        for y in tries:  # of maps pooled to one row a sum with others fits by chance: larger ones show it
            try:
                stems.trial(model, y)
            except Exception as error:  # whatever a model may raise
                raise ValueError(
                    f"the model takes an image of {tuple(y.shape[2:])}, but not with the pool. Probably the pool stands inside "
                    "a residual branch (or one of several branches), whose sum with the map beside it no longer fits: put it "
                    "before a whole block or stage. Or what follows is made for maps of one size (windows, position biases). "
                    f"{type(error).__name__}: {error}"
                ) from error
    return model


def pad_input(
    model: nn.Module, pad: Sequence[int], mode: str = "zero", input_size: Sequence[int] | None = None
) -> nn.Module:
    """Pads what the model is given, in place, before its first module; however it is entered.

    The model's own first modules pad, so that `model(x)`, `forward_features` and `forward_intermediates` do. Called again it
    sets another pad; four zeros take it away. A model that normalises what it is given (this kit's) calls its backbone
    afterwards: in the backbone a zero means the mean of the weights' training images.

    Args:
        pad: pixels (left, right, top, bottom), as `torch.nn.functional.pad` takes them.
        mode: `zero` or `reflect`.
        input_size: as in `set_stem`, before padding.

    Raises:
        ValueError: a pad or mode that is none, no module is given the input itself, or the model does not run so. A model
            with reflected edges raises it for an image that is not larger than its pads.
    """
    pads = tuple(pad) if isinstance(pad, Sequence) else ()
    if len(pads) != 4 or not all(isinstance(n, int) and n >= 0 for n in pads):
        raise ValueError(f"pad_input: pad is {pad!r}; expected four pixel numbers from 0, (left, right, top, bottom)")
    if mode not in MODES:
        raise ValueError(f"pad_input: mode is {mode!r}; expected 'zero' or 'reflect'")
    _refuse_compiled(model, "pad_input")
    x, first = stems.look(model, input_size)
    entered = entered_by(model, x, first)
    left, right, top, bottom = pads
    height, width = x.shape[2:]
    sizes = [(height, width)]
    if input_size is None:  # a model of one size now takes less, and edges to be reflected may need more
        sizes += [(height - top - bottom, width - left - right), (4 * height, 4 * width)]
        sizes = [(h, w) for h, w in sizes if h > max(top, bottom) and w > max(left, right)] or sizes[:1]
    tries = [x.new_empty((*x.shape[:2], *size)) for size in sizes]
    expected = shapes_when_padded(model, entered, tries, pads)
    with _all_or_nothing(model, f"pad_input({pads}, {mode!r})", tries):
        for module in entered:
            remove_hook(module, InputPad)
            if any(pads):
                module.register_forward_pre_hook(InputPad(pads, MODES[mode]), prepend=True)  # before a stem's own pad
        if expected and intermediate_shapes(model, expected[0]) != expected[1]:
            raise ValueError("forward_intermediates takes the size of its maps from the image as it was before padding")
    return model


class Reparameterize:
    """What fuses the branches of a block, in place of the block's own method, which would take the stride it was made with."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block

    def __call__(self) -> None:
        branches = [m for m in self.block.modules() if isinstance(m, nn.Conv2d) and hasattr(m, "own_padding")]
        widest = max(branches, key=stems.extent)
        stride, padding, own = widest.stride, stems.padding_of(widest), widest.own_padding
        del self.block.reparameterize  # which uncovers the block's own
        self.block.reparameterize()
        stems.set_convolution(self.block.reparam_conv, stride, padding)
        self.block.reparam_conv.own_padding = own


@contextlib.contextmanager
def _all_or_nothing(model: nn.Module, what: str, inputs: Sequence[torch.Tensor]) -> Iterator[None]:
    """Tries the model after a change, and writes down its true reductions; puts all back if it takes none of the inputs."""
    modules = list(model.modules())
    before = [(module, module.__class__, dict(vars(module))) for module in modules]
    contents = [[(held, dict(held)) for held in vars(module).values() if isinstance(held, dict)] for module in modules]
    try:
        yield
        write_reductions(measure(model, inputs))
    except BaseException as error:
        for (module, kind, attributes), dictionaries in zip(before, contents, strict=True):
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)
            for held, content in dictionaries:  # the very dictionaries, to which handles of hooks point
                held.clear()
                held.update(content)
        if isinstance(error, Exception):
            raise ValueError(f"{what}: {error}; the model is as it was") from error
        raise


def _paddings(
    convolutions: Sequence[nn.Conv2d], strides: Sequence[tuple[int, int]], given: tuple[int, int] | None
) -> list[stems.Pads | None]:
    """Padding of each first convolution: the one given, or what fits its stride; None where it goes on to pad itself."""
    if given is None:
        if all(map(stems.pads_itself, convolutions)):
            return [None] * len(convolutions)
        fitting = [stems.fitting_padding(*pair) for pair in zip(convolutions, strides, strict=True)]
        if fitting == [stems.own_padding(convolution) for convolution in convolutions]:
            return fitting
        extents = [stems.extent(convolution) for convolution in convolutions]
        vertical, horizontal = (
            max(zip(extents, fitting, strict=True), key=lambda p: p[0][axis])[1][axis] for axis in (0, 1)
        )
        widest = vertical, horizontal
    else:
        widest = tuple((n, n) for n in given)
    found = []
    for convolution in convolutions:  # kernels' centres lie on one another, so branches of any sizes can be added up
        pads = []
        for axis, (before, after) in enumerate(widest):
            less = max(stems.extent(other)[axis] for other in convolutions) - stems.extent(convolution)[axis]
            pads.append((before - less // 2, after - (less - less // 2)))
        found.append(tuple(pads))
    return found


def _keep_when_fused(model: nn.Module, name: str) -> None:
    """Makes blocks around a convolution fuse to what they are now (timm's fastvit would take its first stride)."""
    parts = name.split(".")
    for end in range(len(parts)):
        block = model.get_submodule(".".join(parts[:end]))
        if hasattr(block, "reparameterize") and getattr(block, "reparam_conv", block) is None:
            block.reparameterize = Reparameterize(block)


def refuse_fixed(model: nn.Module) -> None:
    """Raises ValueError for a model whose stem cannot be changed as its position embedding is made for one size of maps."""
    for module in model.modules():
        config = getattr(module, "pretrained_cfg", None) or {}
        fixed = getattr(module, "_traits", {}).get("fixed_input_size", config.get("fixed_input_size", False))
        # Made so that timm resamples the position embedding, or windows, to whatever comes.
        free = any(
            getattr(part, "dynamic_img_size", False) or getattr(part, "strict_img_size", True) is False
            for part in module.modules()
        )
        if fixed and not free:
            raise ValueError(
                f"set_stem: {config.get('architecture') or type(module).__name__} takes images of one size alone, "
                f"{tuple(config.get('input_size', ()))[1:]}; its position embedding or windows are made for the maps of this "
                "stem. Where timm offers it make the model with dynamic_img_size=True (ViT, DeiT, EVA) or "
                "strict_img_size=False (Swin), or take a backbone without fixed_input_size, such as a convnext"
            )


def _refuse_compiled(model: nn.Module, what: str) -> None:
    for module in model.modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise ValueError(
                f"{what}: the model is compiled already, and compiled code may ignore the change; "
                "change the model as it was before (model._orig_mod), and compile it then"
            )


def _find(model: nn.Module, name: str) -> nn.Module:
    names = [known for known, _ in model.named_modules() if known]
    if name in names:
        return model.get_submodule(name)
    same = [known for known in names if stems.flat(known) == stems.flat(name)]
    near = ", ".join(same or difflib.get_close_matches(name, names, 4, cutoff=0.3)) or ", ".join(names[:4])
    raise ValueError(f"insert_pool: {type(model).__name__} has no module {name!r} inside of it; near it: {near}")


def _pair(value: int | Sequence[int], what: str, low: int) -> tuple[int, int]:
    pair = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value, value)
    pair = pair * 2 if len(pair) == 1 else pair
    if len(pair) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n >= low for n in pair):
        raise ValueError(f"{what} is {value!r}; expected a whole number from {low}, or two: (vertical, horizontal)")
    return pair
