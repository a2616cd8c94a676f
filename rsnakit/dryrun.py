"""A forward pass that computes nothing: shapes alone, in milliseconds, on torch's meta device.

The model is called with stand-ins for its weights and buffers, so that it keeps no trace: no statistics move, no random
number is drawn, no memory is taken, and its device does not matter.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def run(
    model: nn.Module,
    *inputs: torch.Tensor,
    method: str = "forward",
    grad: bool = False,
    weights: dict[str, torch.Tensor] | None = None,
    **options: Any,
) -> Any:
    """What a model gives for inputs, as tensors on the meta device: shapes and types without values.

    Args:
        inputs: on any device; of a tensor only shape and type are used. `torch.empty(1, 3, 224, 224, device="meta")` is enough.
        method: of the model, to be called in place of `forward`.
        grad: whether the result can be differentiated, as counting what is kept for backward needs.
        weights: as `stand_ins` gives them, to ask for their gradients; by default new ones.
        options: further arguments of the method.

    Raises:
        Whatever the model raises for inputs of such shapes; a few models compute with values and cannot be run so.
    """
    if weights is None:
        weights = stand_ins(model, grad)
    caller = model
    if method != "forward":
        caller, weights = _Method(model, method), {f"model.{name}": tensor for name, tensor in weights.items()}
    arguments = tuple(_on_meta(x) for x in inputs)
    options = {name: _on_meta(value) for name, value in options.items()}
    try:
        with torch.set_grad_enabled(grad):
            return torch.func.functional_call(caller, weights, arguments, options, tie_weights=False)
    finally:
        for module in model.modules():  # LeViT and its like keep a table a device
            getattr(module, "attention_bias_cache", {}).pop("meta", None)


def stand_ins(model: nn.Module, grad: bool = False) -> dict[str, torch.Tensor]:
    """Meta tensors in the place of a model's weights and buffers, by name; tied ones are one.

    A module that stands in several places counts once: functional_call would else leave its stand-ins in it.
    """
    found: dict[str, torch.Tensor] = {}
    made: dict[int, torch.Tensor] = {}
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            if id(tensor) not in made:
                made[id(tensor)] = torch.empty_like(tensor, device="meta").requires_grad_(grad and tensor.requires_grad)
            found[f"{path}.{name}" if path else name] = made[id(tensor)]
    return found


def shapes(
    model: nn.Module, names: list[str], *inputs: torch.Tensor
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes of the first tensor that goes into, and comes out of, each named module when the model runs on the inputs.

    A module that the pass does not reach is missing; one that is called several times counts with its first call.
    """
    found: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def note(name: str) -> Callable:
        def hook(_: nn.Module, arguments: tuple, output: Any) -> None:
            into, out = first_tensor(arguments), first_tensor(output)
            if into is not None and out is not None:
                found.setdefault(name, (tuple(into.shape), tuple(out.shape)))

        return hook

    handles = [model.get_submodule(name).register_forward_hook(note(name)) for name in names]
    try:
        run(model, *inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def first_tensor(value: Any) -> torch.Tensor | None:
    """The first tensor in a value that may be one, or a list, tuple or dict of them."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, dict):
        value = value.values()
    if isinstance(value, list | tuple) or type(value).__name__ == "dict_values":
        return next((tensor for tensor in map(first_tensor, value) if tensor is not None), None)
    return None


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


class _Method(nn.Module):
    """A method of a model as a module, which is what `functional_call` takes."""

    def __init__(self, model: nn.Module, method: str) -> None:
        super().__init__()
        self.model, self.method = model, method

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return getattr(self.model, self.method)(*arguments, **options)
