"""Gradient checkpointing around the blocks of a model: memory for time."""

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from rsnakit import patching

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
# Compiled by torch 2.6, a checkpointed BatchNorm moves its statistics twice a step; by 2.14 once.
COMPILED_MOVES_ONCE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)
WRAPPED = ("module", "_orig_mod", "backbone")  # where DistributedDataParallel, torch.compile and CancerNet have theirs


def checkpoint_blocks(model: nn.Module, enable: bool = True) -> nn.Module:
    """Has the blocks of a model forget their intermediate results, and compute them again in backward; in place.

    In training a block then keeps its inputs alone for backward (Chen, Xu, Zhang & Guestrin, 2016). Loss, gradients,
    random numbers and the running statistics of norms are those of the plain model: what a module has in its buffers
    moves in the first pass and stands still in the second. A block in evaluation mode, or without gradients, runs as ever.

    Left as they are: the last stage (where it holds no more than a third of the blocks) or else the last block. A stage
    after a halving of the map keeps a fraction and takes as long; and what backward needs first is not worth forgetting.
    timm's own checkpointing is switched off, as with both a block would be computed three times.

    Args:
        model: any module; where it has a `backbone`, as CancerNet, that alone is searched for blocks (`find_blocks`).
        enable: False gives the blocks their own forward back. Doing either twice is doing it once.

    Returns:
        The model; unchanged, with a warning, where it has no block. Hooks on modules inside a block fire in both passes.

    Under `torch.compile` of the whole model the blocks are part of the compiled graph and what is computed again is the
    compiler's to choose; before torch 2.14 blocks with buffers run beside the graph. The backend "eager", which is for
    debugging, cannot take back BatchNorms that are checkpointed: use "aot_eager".

    Raises:
        ValueError: to be disabled, but a block's forward was replaced again since.
    """
    changed = [module for module in model.modules() if any(_ours(module))]
    if not enable:
        for block in changed:
            if not _ours(block)[-1]:
                raise ValueError(
                    f"{type(block).__name__}.forward was replaced again after checkpoint_blocks; restore that first"
                )
        if changed:
            patching.tell_if_compiled(patching.inner_module(model), "forward", "restored")
        for block in changed:
            patching.take(block, "forward")
        return model
    if changed:
        return model
    blocks = _worth_it(find_blocks(model))
    if not blocks:
        warnings.warn(f"{type(model).__name__}: no blocks found to checkpoint; it trains as it is", stacklevel=2)
    for module in model.modules():
        if getattr(module, "grad_checkpointing", False) is True:
            module.grad_checkpointing = False
    if blocks:
        patching.tell_if_compiled(patching.inner_module(model), "forward", "replaced")
    for block in blocks.values():
        long = (
            _is_chain(block) and len(_runs(block)) > 1 and not _ours(block)
        )  # the last: not replaced by others before
        patching.put(block, "forward", _forward_in_runs if long else _forward_twice)
    return model


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks that a model is built of, none inside another, by name and in the model's order.

    A block is a module with at least two layers (convolutions and linear layers, a depthwise one not counted, or norms)
    that stands in a Sequential, ModuleList or ModuleDict and has no such module inside: `layer1.0` of a ResNet,
    `stages.0.blocks.0` of a ConvNeXt, `blocks.0` of a ViT. To them come the parts of two or more layers before the last
    of them (a deep stem, say), and a Sequential of plain layers. A model without any is taken by its children, such as
    `Mixed_5b` of Inception v3. Names and classes don't matter, so that it works for any timm model.
    """
    root, prefix = model, ""
    while name := next((n for n in WRAPPED if isinstance(getattr(root, n, None), nn.Module)), None):
        root, prefix = getattr(root, name), f"{prefix}{name}."
    total = _layers(root)
    found: list[tuple[str, nn.Module, bool]] = []  # name, module, whether it is one of several in a row
    seen: set[nn.Module] = set()

    def walk(name: str, module: nn.Module, in_row: bool) -> None:
        if module in seen:  # the same module stands in several places
            return
        seen.add(module)
        first = len(found)
        if module is root or _is_row(module) or _has_row(module) or 4 * _layers(module) > total:
            for child_name, child in module.named_children():
                walk(f"{name}.{child_name}" if name else child_name, child, _is_row(module))
        inside = sum(_layers(block) for _, block, _ in found[first:])
        whole = module is not root and (_is_chain(module) or not isinstance(module, CONTAINERS))
        if whole and _layers(module) > max(1, 2 * inside):
            found[first:] = [(name, module, in_row or (_is_chain(module) and len(_runs(module)) > 1))]

    walk("", root, False)
    last = max((i for i, (_, _, in_row) in enumerate(found) if in_row), default=len(found) - 1)
    return {prefix + name: module for name, module, _ in found[: last + 1]}


def _layers(module: nn.Module) -> int:
    """Dense layers in a module, or norms where these are more."""
    dense = norms = 0
    for part in module.modules():
        weight = getattr(part, "weight", None)
        if isinstance(weight, torch.Tensor):
            depthwise = weight.ndim == 4 and weight.shape[1] == 1
            dense += weight.ndim > 1 and not depthwise
            norms += weight.ndim == 1
    return max(dense, norms)


def _is_row(module: nn.Module) -> bool:
    """Whether a module stands for its children: a container, or one whose children are numbered blocks of one class."""
    if isinstance(module, CONTAINERS):
        return True
    children = list(module.children())
    alike = len({type(child) for child in children}) == 1 and all(
        name[-1].isdigit() for name, _ in module.named_children()
    )
    return alike and all(_layers(child) > 1 for child in children)


def _has_row(module: nn.Module) -> bool:
    """Whether a module holds, or is, a row with a block in it."""
    rows = (part for part in module.modules() if _is_row(part))
    return any(not _is_row(child) and _layers(child) > 1 for row in rows for child in row.children())


def _is_chain(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _runs(chain: nn.Sequential) -> list[list[nn.Module]]:
    """A chain's layers, cut before the first layer with weights after each pooling."""
    runs: list[list[nn.Module]] = [[]]
    pooled = False
    for layer in chain:
        if pooled and _layers(layer):
            runs.append([])
            pooled = False
        pooled = pooled or isinstance(layer, POOLS)
        runs[-1].append(layer)
    return runs


def _worth_it(blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The blocks without those of the last stage, or without the last."""
    stages = [name.rpartition(".")[0] for name in blocks]
    in_last = sum(1 for _ in itertools.takewhile(lambda stage: stage == stages[-1], reversed(stages)))
    left = in_last if 3 * in_last <= len(blocks) else len(blocks) // 3 and 1
    return dict(itertools.islice(blocks.items(), len(blocks) - left))


def _ours(module: nn.Module) -> list[bool]:
    """Of each function that took the place of a module's forward, the latest last, whether it came from here."""
    return [func in (_forward_twice, _forward_in_runs) for func in patching.replacements(module, "forward")]


def _forward_twice(block: nn.Module, *args: Any, **options: Any) -> Any:
    """A block's forward, of which only the inputs are kept."""
    forward = patching.original(block, "forward")
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **options)
    return _run_twice(forward, [block], args, options)


def _forward_in_runs(chain: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """The forward of a Sequential of plain layers, of whose runs all but the last keep their input only."""
    if not (chain.training and torch.is_grad_enabled()):
        return patching.original(chain, "forward")(x)
    *runs, last = _runs(chain)
    for run in runs:
        x = _run_twice(functools.partial(_through, run), run, (x,), {})
    return _through(last, x)


def _through(layers: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def _run_twice(forward: Callable, modules: list[nn.Module], args: tuple, options: dict[str, Any]) -> Any:
    """Calls a forward that runs through the modules, and has autograd keep its arguments in place of all else."""
    parts = [part for module in modules for part in module.modules()]
    if torch.compiler.is_compiling() and (COMPILED_MOVES_ONCE or not any(part._buffers for part in parts)):
        return checkpoint(forward, *args, use_reentrant=False, **options)
    return _run_twice_uncompiled(forward, parts, args, options)


@torch._disable_dynamo  # breaks the graph; torch.compiler.disable does so too, but takes seconds to import
def _run_twice_uncompiled(forward: Callable, parts: list[nn.Module], args: tuple, options: dict[str, Any]) -> Any:
    modes = [part.training for part in parts]
    # Flat, so that what is given in a list is kept as it is now: DenseNet goes on to append to the list.
    leaves, spec = pytree.tree_flatten((args, options))

    def run(*leaves: Any) -> Any:
        args, options = pytree.tree_unflatten(leaves, spec)
        return forward(*args, **options)

    return checkpoint(
        run, *leaves, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), _SecondPass(parts, modes))
    )


class _SecondPass(contextlib.AbstractContextManager):
    """Modules in the modes of the first pass, with copies for buffers, so that what moves there is thrown away.

    Entered once for each backward through the graph.
    """

    def __init__(self, parts: list[nn.Module], modes: list[bool]) -> None:
        self.parts, self.modes = parts, modes

    def __enter__(self) -> None:
        copies = [
            {name: buffer if buffer is None else buffer.clone() for name, buffer in part._buffers.items()}
            if mode
            else {}
            for part, mode in zip(self.parts, self.modes, strict=True)
        ]
        self.before = [(part.training, dict(part._buffers)) for part in self.parts]
        for part, mode, buffers in zip(self.parts, self.modes, copies, strict=True):
            part.training = mode
            part._buffers.update(buffers)

    def __exit__(self, *_: object) -> None:
        for part, (mode, buffers) in zip(self.parts, self.before, strict=True):
            part.training = mode
            part._buffers.update(buffers)
