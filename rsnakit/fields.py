"""What a field of a config may hold: values turned into its type, checked against its bounds, and said in words."""

from __future__ import annotations

import dataclasses
import math
import numbers
import types
import typing
from typing import Any


def convert(value: Any, hint: Any) -> Any:
    """The value as the type says; ValueError where that would change what it means."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        # text last: it would take what the others can read
        for member in sorted(typing.get_args(hint), key=lambda member: member is str):
            try:
                return convert(value, member)
            except ValueError:
                continue
        raise ValueError
    if typing.get_origin(hint) is tuple:
        return _to_tuple(value, typing.get_args(hint))
    if hint not in _CONVERTERS:
        raise TypeError(f"a config has a field of type {hint}; expected bool, int, float, str, tuple[...] or a union")
    return _CONVERTERS[hint](value.strip() if isinstance(value, str) else value)


def _to_bool(value: Any) -> bool:
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    word = str(value).lower()
    if not isinstance(value, bool | int | str) or word not in words:
        raise ValueError
    return words[word]


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real | str):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _to_int(value: Any) -> int:
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    try:
        return int(value if isinstance(value, str) else "")
    except ValueError:
        number = _to_float(value)  # 4.0, '4.0', '1e3'
        if not number.is_integer():
            raise
        return int(number)


def _to_str(value: Any) -> str:
    # `papermill -p fold 0` makes an int of it. A float is refused: the text 1e5 would come back as 100000.0.
    if isinstance(value, bool) or not isinstance(value, str | numbers.Integral):
        raise ValueError
    return str(value)


def _to_none(value: Any) -> None:
    if value is not None and value not in ("None", "none", "null"):
        raise ValueError


def _to_tuple(value: Any, members: tuple) -> tuple:
    if isinstance(value, str):
        inside = value.strip()
        if inside[:1] + inside[-1:] in ("[]", "()"):
            inside = inside[1:-1]
        parts = [part.strip().strip("'\"") for part in inside.split(",")]
        value = parts if parts[-1] else parts[:-1]  # (1,) and the empty list
    elif not isinstance(value, list | tuple):
        value = (value,)  # `-p folds 0`
    if members[-1] is Ellipsis:
        members = (members[0],) * len(value)
    if len(members) != len(value):
        raise ValueError
    return tuple(convert(part, member) for part, member in zip(value, members, strict=True))


_CONVERTERS = {bool: _to_bool, int: _to_int, float: _to_float, str: _to_str, type(None): _to_none}


def bounds(field: dataclasses.Field) -> dict[str, Any]:
    return {name: field.metadata.get(name) for name in ("low", "high", "choices")}


def check(value: Any, low: float | None, high: float | None, choices: tuple | None) -> None:
    for part in value if isinstance(value, tuple) else (value,):
        number = isinstance(part, int | float) and not isinstance(part, bool)
        if number and ((low is not None and part < low) or (high is not None and part > high)):
            raise ValueError
        free = choices is None or part is None or (number and _is_text(choices))
        if not free and part not in choices:
            raise ValueError


def check_all(config: Any) -> None:
    """Gives each field of a frozen config its type, by the rule that parameters follow (2 becomes (2,) in a tuple, 'no' False
    in a bool), and refuses (ValueError) one whose value is of another kind or out of its bounds."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        try:
            object.__setattr__(config, field.name, convert(value, hint))
            check(getattr(config, field.name), **bounds(field))
        except ValueError:
            raise ValueError(f"{field.name}: got {value!r}, expected {expected(hint, field)}") from None


def expected(hint: Any, field: dataclasses.Field) -> str:
    low, high, choices = bounds(field).values()
    if typing.get_origin(hint) is tuple and choices and _is_text(choices):
        return f"a list of any of {', '.join(map(repr, choices))}"
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    words = [_words(member) for member in members if not (choices and (member is str or not _is_text(choices)))]
    if words and low is not None and high is not None:
        words[-1] += f" from {low} to {high}"
    elif words and (low is not None or high is not None):
        words[-1] += f" of at least {low}" if high is None else f" of at most {high}"
    if choices:
        words.append(f"one of {', '.join(map(repr, choices))}")
    by_hand = "; as text: papermill -r NAME VALUE, or in quotes" if hint is str and not choices else ""
    return " or ".join(words) + by_hand


def _is_text(choices: tuple) -> bool:
    return all(isinstance(choice, str) for choice in choices)


def _words(hint: Any) -> str:
    if typing.get_origin(hint) is tuple:
        args = typing.get_args(hint)
        length = "any number" if args[-1] is Ellipsis else str(len(args))
        return f"a list of {length} of: {_words(args[0])}"
    names = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text", type(None): "None"}
    return names[hint]
