"""Intermediate results of a model: of any of its modules or methods, by name, for the length of a with block."""

import contextlib
import difflib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rsnakit.patching import check_method, inner_module, method_names, original, plain_name, swapped


@contextlib.contextmanager
def capture(
    model: nn.Module, names: str | Sequence[str], detach: bool = True, device: str | torch.device | None = None
) -> Iterator[dict[str, Any]]:
    """A dict that fills with the results of named modules or methods while the model runs in the with block.

        with capture(model, ["layer1", "forward_features"], device="cpu") as seen:
            model(images)
        seen["layer1"]  # (B, C, H, W)

    Results are copies, so that what the model does to them in place later (ReLU after BatchNorm) is not in them. Tensors
    inside tuples, lists and dicts are taken likewise. What is called once gives its result; what is called several times
    in the block, in one pass or in several, gives a list of results in order. `seen.clear()` starts over between passes.
    A forward pass that gradient checkpointing repeats in backward is not counted; keep such a backward inside the block.

    Two things differ in the block. Attention modules of timm that a name lies in compute their attention step by step
    (`fused_attn` off), as the fused kernel never makes the map: `blocks.0.attn.attn_drop` is the map, after the softmax
    and, in training, after dropout. A few models (DaViT, Hiera) have no such module; there `qkv` is what can be had.
    And all that `torch.compile` compiled runs uncompiled, as compiled code passes over hooks. At the end, on exceptions
    too, hooks, methods and settings are as before, and only the dict holds the results.

    Args:
        names: of modules as in `model.named_modules()` ("" is the model), or such a name and a method
            (`blocks.0.attn.forward`, or `forward_features` of the model itself). A module goes first if it is both.
        detach: False keeps the graph: `torch.autograd.grad(loss, seen[name])` works, as the model goes on with what was
            captured (with a further copy of it). Not so for results that are moved to another device.
        device: where results are kept; None: where they are.

    Raises:
        ValueError: there is no such module or method (the nearest are given); or, at the end of a block that raised
            nothing itself, a name that was never called.
    """
    model = inner_module(model)
    modules = _modules(model)
    several = isinstance(names, Iterable) and not isinstance(names, str | nn.Module)
    taps = {tap.name: tap for tap in (_find(model, modules, name) for name in (names if several else [names]))}.values()
    recorder = _Recorder(detach, device)
    try:
        with contextlib.ExitStack() as stack:
            if "torch._dynamo" in sys.modules:  # else nothing can have been compiled
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            for tap in taps:
                stack.enter_context(_unfused(modules, tap))
                stack.enter_context(_tapped(tap, recorder))
            yield recorder.results
        never = [tap for tap in taps if tap.name not in recorder.called]
        if never:
            raise ValueError(_say_never(model, never, everything=len(never) == len(taps)))
    finally:
        recorder.results = None  # a deep copy made in the block keeps the hooks: they take nothing from now on


class _Tap(NamedTuple):
    name: str  # as the user gave it
    module: nn.Module
    method: str | None  # None: the module's call, by a hook


class _Recorder:
    """Takes results under their names into a dict, and gives what the model is to go on with."""

    def __init__(self, detach: bool, device: str | torch.device | None) -> None:
        self.detach, self.device = detach, device
        self.results: dict[str, Any] | None = {}
        self.called: dict[str, int] = {}

    def take(self, name: str, result: Any) -> Any:
        in_backward = torch._C._current_graph_task_id() != -1  # so checkpointing runs a forward pass again
        if self.results is None or in_backward:
            return result
        leaves, structure = pytree.tree_flatten(result)
        kept = [self._keep(leaf) for leaf in leaves]
        self._store(name, pytree.tree_unflatten(kept, structure))
        passed = [self._pass_on(*pair) for pair in zip(leaves, kept, strict=True)]
        if all(after is before for before, after in zip(leaves, passed, strict=True)):
            return result
        return pytree.tree_unflatten(passed, structure)

    def _keep(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return (value.detach() if self.detach else value).to(self.device or value.device, copy=True)

    def _pass_on(self, value: Any, kept: Any) -> Any:
        """With a graph the model goes on from what was kept, so that gradients reach it; by a copy, as it may change it."""
        if isinstance(value, torch.Tensor) and kept.requires_grad and kept.device == value.device:
            return kept.clone()
        return value

    def _store(self, name: str, value: Any) -> None:
        if name not in self.results:  # the first, or the first since the user emptied the dict
            self.results[name] = value
            self.called[name] = 1
            return
        if self.called[name] == 1:
            self.results[name] = [self.results[name]]
        self.results[name].append(value)
        self.called[name] += 1


@contextlib.contextmanager
def _tapped(tap: _Tap, recorder: _Recorder) -> Iterator[None]:
    if tap.method is None:

        def hook(module: nn.Module, _: tuple, result: Any) -> Any:
            return recorder.take(tap.name, result) if module is tap.module else result  # not of a deep copy

        handle = tap.module.register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()
        return

    def method(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        result = original(self, tap.method)(*arguments, **options)
        return recorder.take(tap.name, result) if self is tap.module else result

    with swapped(tap.module, tap.method, method):
        yield


@contextlib.contextmanager
def _unfused(modules: dict[str, nn.Module], tap: _Tap) -> Iterator[None]:
    """Fused attention off in all modules that a name lies in."""
    parts = plain_name(tap.name).split(".")
    around = [modules[name] for name in (".".join(parts[:end]) for end in range(len(parts))) if name in modules]
    fused = [module for module in around if getattr(module, "fused_attn", False) is True]
    for module in fused:
        module.fused_attn = False
    try:
        yield
    finally:
        for module in fused:
            module.fused_attn = True


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """All modules by plain name, those that stand under two names too."""
    return {plain_name(name): inner_module(module) for name, module in model.named_modules(remove_duplicate=False)}


def _find(model: nn.Module, modules: dict[str, nn.Module], name: str) -> _Tap:
    if not isinstance(name, str):
        raise ValueError(
            "names are text, as model.named_modules() has them, such as 'layer1' or ['layer1', 'forward_features']; got "
            f"{type(name).__name__}"
        )
    plain = plain_name(name)
    if plain in modules:
        return _Tap(name, modules[plain], None)
    head, _, method = plain.rpartition(".")
    reason = f"{type(model).__name__} has no module or method {name!r}"
    if head in modules:
        try:
            check_method(modules[head], method)
            return _Tap(name, modules[head], method)
        except AttributeError as error:
            reason += f" ({error})" if hasattr(modules[head], method) else ""
    raise ValueError(f"{reason}; near it: {', '.join(_near(modules, plain))}")


def _near(modules: dict[str, nn.Module], name: str) -> list[str]:
    head = name.rpartition(".")[0]
    known = [known for known in modules if known]
    if head in modules:  # the place is right, so its other modules and methods are the likeliest
        own = [f"{head}.{child}" if head else child for child, _ in modules[head].named_children()]
        own += [f"{head}.{method}" if head else method for method in method_names(modules[head])]
        known = own + known
    # timm's features_only models have stages_0 for stages.0
    same = [other for other in known if other.replace("_", ".") == name.replace("_", ".")]
    close = difflib.get_close_matches(name, known, 4, cutoff=0.6)
    return list(dict.fromkeys([*same, *close])) or [child for child in known if "." not in child][:8]


def _say_never(model: nn.Module, taps: list[_Tap], everything: bool) -> str:
    lines = [f"never called in the block: {', '.join(repr(tap.name) for tap in taps)}."]
    if everything:
        lines.append(f"Did the {type(model).__name__} run in it?")
    for tap in taps:
        if tap.method is None and type(tap.module).forward is nn.Module.forward:  # ModuleList and its like
            lines.append(f"{tap.name} only holds modules and is not called itself: name one of them.")
        elif tap.method is None:
            lines.append(
                f"{tap.name} ({type(tap.module).__name__}) may be reached by its forward or another method, "
                f"or only by its weights: try {tap.name}.forward."
            )
    return " ".join(lines)
