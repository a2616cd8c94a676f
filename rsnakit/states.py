"""The state of a loop: tensors in tuples, namedtuples, lists, dicts and dataclasses, taken apart and put together."""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

CONSTANTS = (type(None), str, bool, int, float, complex, torch.dtype, torch.device)


class Node(NamedTuple):
    """A place in a state. Of a container: its keys and what stands there; of a constant: its value, as the only key."""

    kind: type
    keys: tuple = ()
    inside: tuple["Node", ...] = ()


class Form:
    """The structure of a state, without its tensors.

    Attributes:
        plan: how it is built.
        names: of its tensors, such as `state.p[0]`, in the plan's order.
        constants: names of what is no tensor: numbers, strings and the like.
    """

    def __init__(self, value: Any, name: str) -> None:
        """Reads a state; name is what it is called in messages.

        Raises:
            TypeError: it holds what is neither a tensor nor a number or string, or what cannot be put together again.
        """
        self.name = name
        self.names: list[str] = []
        self.constants: list[str] = []
        self._found: dict[str, tuple[str, ...]] = {}  # by name, what stands there
        self.plan = self._read(value, name)
        tensors = pick(self.plan, value)
        again = pick(self.plan, self.build(tensors))
        changed = [each for each, a, b in zip(self.names, tensors, again, strict=True) if a is not b]
        if changed:
            raise TypeError(
                f"{changed[0]}: its class changes it when it is made (__init__ or __post_init__), at each chunk"
            )

    def _read(self, value: Any, name: str) -> Node:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            if value.layout != torch.strided:
                raise TypeError(f"{name} is a {value.layout} tensor: only dense ones are supported")
            self._found[name] = (f"shape {tuple(value.shape)}", str(value.dtype), f"on {value.device}")
            self.names.append(name)
            return Node(torch.Tensor)
        if isinstance(value, CONSTANTS):
            self._found[name] = (f"{kind.__name__} {value!r}",)
            self.constants.append(name)
            return Node(type(None), (value,))
        if _by_attribute(kind):
            fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
            wrong = [field.name for field in fields if not field.init]
            if wrong:
                raise TypeError(f"{name}.{wrong[0]}: {kind.__name__} does not take it when it is made (init=False)")
            keys = tuple(field.name for field in fields) or kind._fields
            parts = [(f"{name}.{key}", getattr(value, key)) for key in keys]
        elif kind in (tuple, list, dict):
            keys = tuple(value) if kind is dict else tuple(range(len(value)))
            parts = [(f"{name}[{key!r}]", value[key]) for key in keys]
        else:
            raise TypeError(
                f"{name} is a {kind.__module__}.{kind.__qualname__}: expected tensors, in tuples, namedtuples, lists, dicts "
                "or dataclasses"
            )
        self._found[name] = (f"a {kind.__name__} of {len(keys)}",)
        return Node(kind, keys, tuple(self._read(part, key) for key, part in parts))

    def leaves(self, value: Any, what: str, remedy: str) -> list[torch.Tensor]:
        """The tensors of another state, in the plan's order.

        Args:
            what, remedy: for the message: `state.p[0] WHAT: shape (2,) before, shape (3,) now; REMEDY`.

        Raises:
            ValueError: its structure, a shape, type, device or number is another.
            TypeError: as for a Form.
        """
        other = Form(value, self.name)._found
        for name in dict.fromkeys((*self._found, *other)):
            before, after = self._found.get(name, ("nothing",)), other.get(name, ("nothing",))
            if before != after:
                differ = [(a, b) for a, b in itertools.zip_longest(before, after, fillvalue="") if a != b]
                before, after = (", ".join(filter(None, each)) for each in zip(*differ, strict=True))
                if re.match("(bool|int|float|complex) ", before):
                    remedy = "a number is part of the structure: make it a tensor"
                raise ValueError(f"{name} {what}: {before} before, {after} now; {remedy}")
        return pick(self.plan, value)

    def build(self, leaves: Sequence[torch.Tensor]) -> Any:
        """A state of these tensors."""
        return build(self.plan, iter(leaves))


# These two are compiled with the steps.


def build(node: Node, leaves: Iterator[torch.Tensor]) -> Any:
    kind, keys, inside = node
    if kind is torch.Tensor:
        return next(leaves)
    if kind is type(None):
        return keys[0]
    parts = [build(each, leaves) for each in inside]
    if kind is list:
        return parts
    if kind is tuple:
        return tuple(parts)
    named = dict(zip(keys, parts, strict=True))
    return named if kind is dict else kind(**named)


def pick(node: Node, value: Any) -> list[torch.Tensor]:
    """The tensors of a state, in the plan's order."""
    kind, keys, inside = node
    if kind is torch.Tensor:
        return [value]
    found = []
    for key, each in zip(keys, inside, strict=False):  # nothing inside a constant
        found += pick(each, getattr(value, key) if _by_attribute(kind) else value[key])
    return found


def _by_attribute(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))
