"""Swapping a method of one object at run time, and putting the old one back.

A replaced method lives in the object's own `__dict__`, with a record of what it took the place of beside it. So the class
and its other objects stay as they are, a state_dict knows nothing of it, and `copy.deepcopy` and pickle take it along:
the copy calls itself. What looks elsewhere passes it by: a shallow `copy.copy` shares the method with the first object, as
it shares its weights, and `torch.fx` traces the outermost module by its class's forward (of inner ones, the replaced).
"""

import contextlib
import difflib
import functools
import gc
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

_RECORD = "_replaced_methods"  # in the object's __dict__: {name: [_Level, ...]}, the latest last
_running = threading.local()  # .levels: ((object, name, level), ...) of the replaced methods that are being called


def replace_method(obj: Any, name: str, func: Callable) -> Any:
    """Makes `obj.name(...)` call `func(obj, ...)`; others of its class stay as they are.

    Inside func, `original(obj, name)` is the method that was there before. Replacing again puts a further one on top.
    Of a module compiled by `torch.compile` the inner one is patched. A patch after compiling is in force at the next
    call, which compiles anew, and a warning says so. To be pickled, func has to be a module's function, no lambda.

    Args:
        obj: any object with a `__dict__`, a module or a plain one.
        name: of a method, such as `forward`.
        func: takes the object first, then what the method takes.

    Returns:
        obj, changed in place.

    Raises:
        AttributeError: obj has no such method, or the name is a submodule, a tensor, a property, a static or class
            method, or one that Python looks up on the class (`__call__`); class, name and nearest names are given.
        TypeError: obj cannot hold a method of its own (a class, `__slots__`, TorchScript), or func cannot be called.
    """
    target = inner_module(obj)
    _check(target, name, func)
    tell_if_compiled(target, name, "replaced")
    put(target, name, func)
    return obj


def original(obj: Any, name: str) -> Callable:
    """The method that a replaced one took the place of, bound to the object.

    Called inside a func of `replace_method` it is the one below that func; outside, the one below the latest. Where
    nothing was replaced, it is the method itself. In a deep copy, give the copy (the func's first argument is it).

    Raises:
        AttributeError: the object has no such method.
    """
    target = inner_module(obj)
    levels = _levels(target, name)
    if not levels:
        check_method(target, name)
        return getattr(target, name)
    level = len(levels)
    for holder, of, at in reversed(getattr(_running, "levels", ())):
        if holder is target and of == name:
            level = min(at, level)
            break
    if level > 1:  # it says where it is, so that an `original` in it goes one down and not to itself
        return functools.partial(_call, levels[level - 2].func, target, name, level - 1)
    before = levels[0].before
    return functools.partial(getattr(type(target), name), target) if before is None else before


def restore(obj: Any, name: str) -> Any:
    """Undoes the last `replace_method` of a name; returns the object.

    Raises:
        ValueError: the method was never replaced, or was set by other means since.
    """
    target = inner_module(obj)
    take(target, name)
    tell_if_compiled(target, name, "restored")
    return obj


def replacements(obj: Any, name: str) -> list[Callable]:
    """The funcs that stand in a method's place, the latest last; empty where it was not replaced."""
    return [level.func for level in _levels(inner_module(obj), name)]


@contextlib.contextmanager
def patched(obj: Any, name: str, func: Callable) -> Iterator[Any]:
    """`replace_method` for the length of a with block, which gives the object.

    At its end, on exceptions too, the method is as before the block, even if it was replaced again within.

    Raises:
        What `replace_method` and `restore` raise.
    """
    target = inner_module(obj)
    _check(target, name, func)
    tell_if_compiled(target, name, "replaced")
    try:
        with swapped(target, name, func):
            yield obj
    finally:
        tell_if_compiled(target, name, "restored")


@contextlib.contextmanager
def swapped(target: Any, name: str, func: Callable) -> Iterator[None]:
    """`patched` without its checks and warnings."""
    before = len(_levels(target, name))
    put(target, name, func)
    try:
        yield
    finally:
        while len(_levels(target, name)) > before:
            take(target, name)


def check_method(target: Any, name: str) -> None:
    """Raises AttributeError, with the reason and the nearest names, where an object has no method that can be replaced."""
    reason = _why_not(target, name)
    if reason is not None:
        near = ", ".join(difflib.get_close_matches(name, method_names(target), 4, cutoff=0.5))
        raise AttributeError(f"{type(target).__name__} {reason}{near and f'; near it: {near}'}")


def inner_module(obj: Any) -> Any:
    """The module that torch.compile wrapped, whose methods are what compiled code calls; anything else as it is."""
    while _is_wrapper(obj):
        obj = obj._orig_mod
    return obj


def plain_name(name: str) -> str:
    """A module's name without what torch.compile puts into it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def method_names(obj: Any) -> list[str]:
    """Names of the methods of an object that can be replaced, those of its own class first."""
    names = dict.fromkeys(name for kind in type(obj).__mro__ for name in vars(kind))
    names.update(dict.fromkeys(getattr(obj, "__dict__", ())))
    return [name for name in names if _why_not(obj, name) is None]


class _Level(NamedTuple):
    func: Callable
    installed: Callable  # what stands in the object's __dict__
    before: Callable | None  # what stood there before; None: nothing, the class's method was in force


def put(target: Any, name: str, func: Callable) -> None:
    """`replace_method` without its checks and warning."""
    own = vars(target)
    levels = own.setdefault(_RECORD, {}).setdefault(name, [])
    # A partial and no types.MethodType: pickle stores that as getattr(obj, func.__name__), which fails, or, where func is
    # called like the method, quietly gives the class's.
    if levels:
        installed = functools.partial(_call, func, target, name, len(levels) + 1)
    else:
        installed = functools.partial(func, target)
    levels.append(_Level(func, installed, own.get(name)))
    own[name] = installed


def take(target: Any, name: str) -> None:
    """`restore` without its warning."""
    own = vars(target)
    levels = _levels(target, name)
    if not levels:
        replaced = ", ".join(own.get(_RECORD, ())) or "none"
        raise ValueError(
            f"{type(target).__name__}.{name} was not replaced, so there is nothing to restore; replaced: {replaced}"
        )
    if own.get(name) is not levels[-1].installed:
        raise ValueError(
            f"{type(target).__name__}.{name} was set by other means after replace_method (a wrapper, an assignment); "
            "undo that first, then restore"
        )
    last = levels.pop()
    if last.before is None:
        del own[name]
    else:
        own[name] = last.before
    if not levels:
        del own[_RECORD][name]
        if not own[_RECORD]:
            del own[_RECORD]


def _call(func: Callable, obj: Any, name: str, level: int, /, *args: Any, **options: Any) -> Any:
    """Calls a replaced method, and notes for `original` which of several it is."""
    outer = getattr(_running, "levels", ())
    _running.levels = (*outer, (obj, name, level))
    try:
        return func(obj, *args, **options)
    finally:
        _running.levels = outer


def _levels(target: Any, name: str) -> list[_Level]:
    return getattr(target, "__dict__", {}).get(_RECORD, {}).get(name, [])


def _is_wrapper(obj: Any) -> bool:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # not loaded: nothing was compiled
    return dynamo is not None and isinstance(obj, dynamo.OptimizedModule)


def _check(target: Any, name: str, func: Callable) -> None:
    kind = type(target).__name__
    if isinstance(target, type):
        raise TypeError(f"{target.__name__} is a class; give an object of it, whose method alone is then replaced")
    if isinstance(target, torch.jit.ScriptModule):
        raise TypeError(
            f"{kind} is compiled by TorchScript, which calls its own code; patch before scripting or tracing"
        )
    if not hasattr(target, "__dict__"):
        raise TypeError(
            f"{kind} objects have no __dict__ (built in, or __slots__), so none can have a method of its own"
        )
    if not callable(func):
        raise TypeError(f"{kind}.{name}: expected a function of (self, ...), got {func!r}")
    check_method(target, name)


def _why_not(target: Any, name: str) -> str | None:
    """Why a name is no method that can be replaced; None where it is one."""
    if name.startswith("__") and name.endswith("__"):
        advice = "; replace forward" if name == "__call__" and isinstance(target, nn.Module) else ""
        return f"cannot have a {name} of its own: Python looks such names up on the class{advice}"
    found = inspect.getattr_static(type(target), name, None)
    if hasattr(type(found), "__set__") or isinstance(found, functools.cached_property):
        return f"has {name}, but as a property, not a method"
    own = getattr(target, "__dict__", {})
    if name in own:
        method = callable(own[name]) and not isinstance(own[name], type)
        return None if method else f"has {name}, but as a value, not a method"
    if isinstance(target, nn.Module):
        if name in target._modules:
            return f"has {name}, but as a module, not a method: replace_method(model.{name}, 'forward', func) is meant"
        if name in target._parameters or name in target._buffers:
            return f"has {name}, but as a tensor, not a method"
    if isinstance(found, staticmethod | classmethod):
        return f"has {name}, but as a static or class method, which is not called with the object"
    if callable(found) and hasattr(type(found), "__get__"):
        return None
    if found is not None:
        return f"has {name}, but as a value of the class, not a method"
    for inner in ("module", "model"):  # of DistributedDataParallel, ModelEmaV3 and their like
        if callable(getattr(getattr(target, inner, None), name, None)):
            return f"has no method {name}, but its .{inner} has: replace it there"
    return f"has no method {name}"


def tell_if_compiled(target: Any, name: str, done: str) -> None:
    """Warns where a module is, or is in, one that was compiled. It looks through all objects alive: once for many changes."""
    holder = compiled_holder(target)
    if holder is not None:
        warnings.warn(
            f"{type(target).__name__}.{name} was {done} after torch.compile of {type(holder).__name__}. It is in force, and "
            "the next call compiles anew. To compile once, change the model first and compile it then.",
            stacklevel=3,
        )


def compiled_holder(module: Any) -> nn.Module | None:
    """A live module compiled by torch.compile or its `.compile()` that is this one or holds it; functions are not found."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    if frames is None or not frames.FRAME_COUNTER or not isinstance(module, nn.Module):
        return None  # no code was compiled since the start or a reset, which spares the walk over all objects
    for other in gc.get_objects():
        if issubclass(type(other), nn.Module) and (_is_wrapper(other) or other._compiled_call_impl is not None):
            held = inner_module(other)
            if any(part is module for part in held.modules()):
                return held
    return None
