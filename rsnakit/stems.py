"""Where a model meets the image: the first convolutions of any timm model, and how each of them strides and pads."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from timm.layers import Conv2dSame
from torch import nn
from torch.utils import _pytree as pytree

from rsnakit import dryrun
from rsnakit.hooks import InputPad, StemPad, hook_of, remove_hook
from rsnakit.patching import inner_module

Pads = tuple[tuple[int, int], tuple[int, int]]  # (above, below), (left, right)


def first_convolutions(model: nn.Module, input_size: Sequence[int] | None = None) -> dict[str, nn.Conv2d]:
    """The convolutions that see the image itself, by name in the model, in the order in which they are called.

    A dry run tells: a convolution belongs to them when the image reaches it through no other weight. So every branch is found
    (timm's `pretrained_cfg["first_conv"]` may leave out some), in plain models, in features_only ones, whose modules have
    other names, and in a model that holds a timm model. Where the model cannot be run, those that `first_conv` names are
    returned.

    Args:
        input_size: (H, W) or (C, H, W) of an image that the model takes; by default the one in its `pretrained_cfg`.

    Returns:
        Empty where no 2-D convolution sees the image: naflexvit and gemma4_vit cut patches and use a linear layer.
    """
    model = inner_module(model)
    try:
        _, names = look(model, input_size)
    except ValueError:
        names = _named_by_timm(model)
    return {name: model.get_submodule(name) for name in names}


def look(model: nn.Module, input_size: Sequence[int] | None = None) -> tuple[torch.Tensor, list[str]]:
    """An input that the model takes, (1, C, H, W) on the meta device, and the names of the convolutions that see it.

    Raises:
        ValueError: the model runs with no such input.
    """
    seen: list[str] = []

    def note(name: str) -> Callable:  # by name, as it may be a copy that is run
        def hook(module: nn.Module, arguments: tuple, options: dict[str, Any]) -> None:
            if isinstance(module, nn.Conv2d) and name not in seen and of_image((arguments, options)):
                seen.append(name)

        return hook

    def end(_: nn.Module, __: tuple, output: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output)

    first_error = None
    with contextlib.ExitStack() as stack:
        # What is the image still, scaled or rearranged, has a graph that leads to it; behind a weight nothing has one.
        stack.callback(model.register_forward_pre_hook(mark_image).remove)
        for name, module in model.named_modules():
            if isinstance(module, nn.Conv2d) or any(_mixes(weight) for weight in module.parameters(recurse=False)):
                stack.callback(module.register_forward_pre_hook(note(name), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(end).remove)
        for real in (False, True):
            for shape in _shapes(model, input_size):
                seen.clear()
                try:
                    x = torch.empty(shape, dtype=_dtype(model), device="meta")
                    trial(model, x, real=real)
                    return x, seen
                except Exception as error:  # whatever a model may raise
                    first_error = first_error or error
    raise ValueError(
        f"{_kind(model)} cannot be run on an image of (1, C, H, W) = {next(_shapes(model, input_size))}: {first_error}; "
        "give the input_size (C, H, W) of an image that it takes"
    ) from first_error


class _Image(torch.autograd.Function):
    """What it gives is its input; in the graph of what is made of that it stands for the image."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


def mark_image(_: nn.Module, arguments: tuple) -> tuple:
    """A forward pre-hook of a whole model, by which `of_image` knows the image, and all that is made of it, in a dry run."""
    torch.set_grad_enabled(True)  # which the dry run switches back
    return (_Image.apply(torch.zeros_like(arguments[0], requires_grad=True)), *arguments[1:])


def of_image(value: Any) -> bool:
    """Whether the first tensor in a value is made of the marked image; that it has a gradient may be a weight's doing."""
    tensor = dryrun.first_tensor(value)
    nodes = [None if tensor is None else tensor.grad_fn]
    known = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node.name() == f"{_Image.__name__}Backward":
            return True
        if node is not None and node not in known:
            known.add(node)
            nodes.extend(following for following, _ in node.next_functions)
    return False


def shapes_into(model: nn.Module, names: Sequence[str], x: torch.Tensor) -> dict[str, tuple[int, ...]]:
    """Shapes of the first tensor that goes into each named module, at its first call; without those that are not called."""
    found: dict[str, tuple[int, ...]] = {}

    def note(name: str) -> Callable:
        def hook(_: nn.Module, arguments: tuple, options: dict[str, Any]) -> None:
            tensor = dryrun.first_tensor((arguments, options))
            if tensor is not None:
                found.setdefault(name, tuple(tensor.shape))

        return hook

    with contextlib.ExitStack() as stack:
        for name in names:
            module = model.get_submodule(name)
            stack.callback(module.register_forward_pre_hook(note(name), with_kwargs=True).remove)
        trial(model, x)
    return found


def trial(model: nn.Module, x: torch.Tensor, method: str = "forward", real: bool = True, **options: Any) -> Any:
    """What a model in evaluation mode gives for an input of x's shape; it keeps no trace. Values mean nothing.

    Runs dry; where a model cannot, really, on a copy (`real`, and only if the input is small).

    Raises:
        Whatever the model raises in the dry run if the other fails too.
    """
    with torch.inference_mode(False), evaluating(model):
        try:
            return dryrun.run(model, x, method=method, **options)
        except Exception:
            if not real or x.numel() > 2**21 or any(weight.is_meta for weight in model.parameters()):
                raise
            weight = next(model.parameters(), x)
            with torch.random.fork_rng(devices=[]), torch.no_grad(), contextlib.suppress(Exception):
                twin = copy.deepcopy(model).requires_grad_(False)  # lest a graph of it all be kept
                return getattr(twin, method if method != "forward" else "__call__")(
                    torch.zeros(x.shape, dtype=x.dtype, device=weight.device), **options
                )
            raise


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for the length of a with block; each module's own flag comes back."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def extent(convolution: nn.Conv2d) -> tuple[int, int]:
    """Rows and columns that a convolution's kernel spans, dilation counted."""
    pairs = zip(convolution.kernel_size, convolution.dilation, strict=True)
    rows, columns = ((size - 1) * dilation + 1 for size, dilation in pairs)
    return rows, columns


def pads_itself(convolution: nn.Conv2d) -> bool:
    """Whether it is one of timm's convolutions that pad as TensorFlow does, by the size of each input."""
    return isinstance(convolution, Conv2dSame) or getattr(convolution, "same_pad", False)


def padding_of(convolution: nn.Conv2d) -> Pads:
    """The padding that a convolution applies, its hook's included."""
    hook = hook_of(convolution, StemPad)
    if hook is not None:
        left, right, top, bottom = hook.pad
        return (top, bottom), (left, right)
    if convolution.padding == "valid":
        return (0, 0), (0, 0)
    if convolution.padding == "same":  # of torch: for stride 1 alone
        rows, columns = ((n - 1) // 2 for n in extent(convolution)), (n // 2 for n in extent(convolution))
        (top, left), (bottom, right) = rows, columns
        return (top, bottom), (left, right)
    vertical, horizontal = convolution.padding
    return (vertical, vertical), (horizontal, horizontal)


def own_padding(convolution: nn.Conv2d) -> Pads:
    """The padding that it was made with, or that was given for it, whatever fitted a stride since."""
    return getattr(convolution, "own_padding", None) or padding_of(convolution)


def fitting_padding(convolution: nn.Conv2d, stride: tuple[int, int]) -> Pads:
    """The padding with which the map is the input over the stride, for every input that the stride divides.

    Along each axis the convolution's own is kept where it does so. Else as little as possible is padded, evenly wherever
    that can be: only an even kernel at stride 1 needs a pixel more on one side, which is the bottom or the right.
    """
    found = []
    for (before, after), size, step in zip(own_padding(convolution), extent(convolution), stride, strict=True):
        least, most = max(size - step, 0), size - 1  # (n + total - size) // step + 1 = n / step, for such totals
        if not least <= before + after <= most:
            total = least + least % 2 if least + least % 2 <= most else least
            before, after = total // 2, total - total // 2
        found.append((before, after))
    return tuple(found)


def set_convolution(convolution: nn.Conv2d, stride: tuple[int, int], padding: Pads | None) -> None:
    """Gives a convolution a stride and a padding, and nothing else: no weight is touched or copied.

    Args:
        padding: None for one that pads itself, and goes on to do so.
    """
    convolution.stride = stride
    if padding is None:
        return
    if isinstance(convolution, Conv2dSame):
        convolution.__class__ = nn.Conv2d  # the same object, so weights, names and optimizers know nothing of it
    elif pads_itself(convolution):
        convolution.same_pad = False  # weights go on to be standardised
    if not hasattr(convolution, "own_padding"):
        convolution.own_padding = padding_of(convolution)
    remove_hook(convolution, StemPad)
    (top, bottom), (left, right) = padding
    mode = "constant" if convolution.padding_mode == "zeros" else convolution.padding_mode
    even = top == bottom >= 0 and left == right >= 0
    convolution.padding = (top, left) if even else (0, 0)
    convolution._reversed_padding_repeated_twice = [n for n in reversed(convolution.padding) for _ in range(2)]
    if not even:
        convolution.register_forward_pre_hook(StemPad((left, right, top, bottom), mode))


def flat(name: str) -> str:
    """A module's name as features_only models may have it: `stages.0` is `stages_0` there."""
    return name.replace(".", "_")


def _shapes(model: nn.Module, input_size: Sequence[int] | None) -> Iterator[tuple[int, int, int, int]]:
    """Shapes of inputs that the model may take, the likeliest first."""
    configs = (getattr(module, "pretrained_cfg", None) for module in model.modules())
    known = tuple(next((config for config in configs if config), {}).get("input_size") or (3, 224, 224))
    size = tuple(input_size or known)
    if len(size) not in (2, 3) or not all(isinstance(n, int) and n > 0 for n in size):
        raise ValueError(f"input_size {input_size!r}: expected (H, W) or (C, H, W) in pixels, such as (1, 512, 256)")
    if input_size and len(size) == 3:
        channels = [size[0]]
    else:
        first = next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), known[0])
        # A stem may begin with a space-to-depth step of 4 or 2 pixels.
        channels = [getattr(model, "in_chans", first), first, first // 16, first // 4, known[0]]
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    pads = [hook.pad for hook in hooks if isinstance(hook, InputPad)][:1]
    height, width = size[-2:]
    sizes = [(height, width)]
    if input_size is None and pads:  # a model of fixed size now takes less, and a reflected edge needs more
        left, right, top, bottom = pads[0]
        sizes.append((height - top - bottom, width - left - right))
        sizes.append((4 * height, 4 * width))
    for height, width in sizes:
        for count in dict.fromkeys(channels):
            if min(count, height, width) > 0:
                yield 1, count, height, width


def _named_by_timm(model: nn.Module) -> list[str]:
    """Names of the convolutions that `pretrained_cfg["first_conv"]` means, as the model has them."""
    found = []
    configs = (getattr(module, "pretrained_cfg", None) for module in model.modules())
    wanted = next((config for config in configs if config), {}).get("first_conv") or ()
    for want in (wanted,) if isinstance(wanted, str) else wanted:
        ends = [name for name, _ in model.named_modules() if f"_{flat(name)}".endswith(f"_{flat(want)}")]
        name = min(ends, key=len, default=None)
        if name is not None and isinstance(model.get_submodule(name), nn.Conv2d):
            found.append(name)
    return found


def _dtype(model: nn.Module) -> torch.dtype:
    return next((weight.dtype for weight in model.parameters() if weight.is_floating_point()), torch.float32)


def _kind(model: nn.Module) -> str:
    return type(model).__name__


def _mixes(weight: torch.Tensor) -> bool:
    """Whether a weight does more than to scale or shift channels."""
    return sum(length > 1 for length in weight.shape) > 1
