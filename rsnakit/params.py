"""Notebook parameters: flat names in, typed and checked configs out; a name that nothing knows is refused.

A notebook has one cell tagged `parameters`, a line `name: type = value  # unit, range, why` a setting, and reads it in
the next one: `model, train = params.read(ModelConfig, TrainConfig)`. papermill puts its own cell between the two, in
which `-p folds '[0,1]' -p debug false` are still strings; the field of the config says what they are meant to be.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib
import shlex
import sys
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from rsnakit.fields import bounds, check, convert, expected

# Every config of the kit, as module:class. Imported only when a name has to be looked up that a notebook doesn't use.
CONFIGS = (
    "env:RunConfig",
    "demo:DemoConfig",
    "preprocess:PreprocessConfig",
    "preprocess:BuildConfig",
    "models:ModelConfig",
    "recipe:FoldConfig",
    "recipe:TrainConfig",
    "recipe:LoopConfig",
    "infer:InferConfig",
    "evaluation:EvaluateConfig",
    "tuning:SpeedConfig",
)

INJECTED_FIRST_LINE = "# Parameters"  # how papermill opens the cell it injects
PAPERMILL_OWN = ("PAPERMILL_INPUT_PATH", "PAPERMILL_OUTPUT_PATH")  # injected by its option --inject-paths

_unused: dict[str, Any] = {}


class ParameterError(ValueError):
    """Some parameters are wrong; the message has a line for each of them."""


def setting(default: Any, *, low: float | None = None, high: float | None = None, choices: tuple | None = None) -> Any:
    """A field of a config with what it may be.

    Args:
        default: the value where a notebook or YAML gives none; also the one that the parameters cell shows.
        low, high: bounds of a number, or of each number of a tuple; both are allowed values.
        choices: the values allowed. Where all of them are strings, numbers are left to `low` and `high`, so that
            `float | str` can be "auto", "none" or a number.
    """
    return dataclasses.field(default=default, metadata={"low": low, "high": high, "choices": choices})


def start(keep_work: bool = False) -> None:
    """The first cell of a notebook: prints where this runs, on what device and in what precision, and why.

    On Kaggle, Colab and Paperspace it installs before that what is missing there (see `packages.bring`).

    Args:
        keep_work: keep what the notebooks write where it outlives the machine: on Google Drive in Colab, in /storage on
            Paperspace. On Kaggle and on a machine of one's own it is kept anyway.

    Raises:
        PackageError: something that is needed cannot be installed, or the session has to be restarted.
        OSError: work cannot be kept.
        RuntimeError: this Python is too old, or Kaggle gave a GPU that its torch cannot compute on.
    """
    if sys.version_info < (3, 11):  # noqa: UP036  as in old images
        found = sys.version.split()[0]
        raise RuntimeError(f"this is Python {found}, and the kit needs 3.11 or later: choose a newer image or kernel")
    from rsnakit import device, env, mounts, packages

    place = env.where().name
    if place != "local":
        packages.bring(place, env.REPOSITORY)
    if keep_work:
        print(mounts.keep_work(place, env.ROOT))
    print(env.describe())
    if place == "kaggle":
        device.check_gpu(env.ROOT)


def read(*config_classes: type, namespace: Mapping[str, Any] | None = None) -> Any:
    """Build configs from the variables of the notebook, in the cell after its parameters cell.

    Under papermill every name of the injected cell has to be known: one of another notebook's config is accepted,
    checked, printed as not used here and kept for `unused`, so that one YAML serves the whole way. Other variables of
    the notebook are no parameters, and cells may be run again in any order.

    Args:
        config_classes: dataclasses whose fields are bool, int, float, str, tuples of these, or unions of them.
        namespace: variables by name; the caller's globals, where the cells of a notebook live, if not given.

    Returns:
        A config where one class is given, else a tuple of configs in the order of the classes.

    Raises:
        ParameterError: a value has the wrong type or is out of range, a name is unknown, or the parameters cell didn't
            run before the injected one. All problems are in the one message.
    """
    global _unused
    if namespace is None:
        namespace = sys._getframe(1).f_globals
    fields = {name for cls in config_classes for name in _settings(cls)}
    injected, problems = _injected(namespace, fields)
    values = {name: value for name, value in injected.items() if name not in fields}
    for name in sorted(fields):
        if name in namespace:
            values[name] = _unwrap(namespace[name], name)
        else:
            problems.append(f"{name}: has no value; run the parameters cell, which sets it, before this one")
    configs, unused, more = _build(values, config_classes)
    _raise(problems + more)
    _unused = unused
    if unused:
        print("not used by this notebook:", ", ".join(f"{name}={value!r}" for name, value in unused.items()))
    return configs[0] if len(configs) == 1 else tuple(configs)


def from_mapping(values: Mapping[str, Any], *config_classes: type) -> Any:
    """Build configs from a flat mapping of names to values, as a YAML of `params/` holds them.

    Names that are left out keep their defaults; names of the kit's other configs are checked and dropped. Returns and
    raises as `read` does.
    """
    configs, _, problems = _build(values, config_classes)
    _raise(problems)
    return configs[0] if len(configs) == 1 else tuple(configs)


def unused() -> dict[str, Any]:
    """Values that the last `read` accepted for configs which its notebook doesn't use, by name."""
    return dict(_unused)


def show(*configs: Any) -> None:
    """Print a line a config with the settings that differ from their defaults."""
    for config in configs:
        pairs = [f"{name}={value!r}" for name, value in _changed(config).items()]
        print(f"{type(config).__name__}: {', '.join(pairs) or 'all defaults'}")


def flags(*configs: Any, without: Iterable[str] = ()) -> str:
    """The settings that differ from their defaults as papermill's `-p name value`, quoted for a shell; but for those `without`,
    such as a YAML brings, which `-p` would overrule."""
    pairs = {name: value for config in configs for name, value in _changed(config).items() if name not in without}
    return " ".join(f"-p {name} {shlex.quote(str(value))}" for name, value in pairs.items())


def _changed(config: Any) -> dict[str, Any]:
    pairs = [(field, getattr(config, field.name)) for field in dataclasses.fields(config)]
    return {field.name: value for field, value in pairs if value != field.default}


def _build(values: Mapping[str, Any], config_classes: Iterable[type]) -> tuple[list, dict[str, Any], list[str]]:
    """Configs, values of other configs, and problems; a config with a problem is missing from the first."""
    configs, problems = [], []
    given: set[str] = set()
    for cls in config_classes:
        settings = _settings(cls)
        given |= settings.keys()
        typed, wrong = _typed(values, settings)
        problems += wrong
        if not wrong:
            try:
                configs.append(cls(**typed))
            except ValueError as error:  # what a config checks by itself, across its fields
                problems.append(str(error))
    foreign = {name: value for name, value in values.items() if name not in given and name not in PAPERMILL_OWN}
    others: dict[str, Any] = {}
    for cls in _known_configs() if foreign else ():
        others.update(_settings(cls))
    kept, wrong = _typed(foreign, others)
    unknown = [_unknown(name, given, others) for name in foreign if name not in others]
    return configs, kept, list(dict.fromkeys(problems + wrong + unknown))


def _typed(values: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    typed, problems = {}, []
    for name, (hint, field) in settings.items():
        if name not in values:
            continue
        value = values[name]
        if value is False and "off" in (field.metadata.get("choices") or ()):
            value = "off"  # as YAML reads a bare off
        try:
            typed[name] = convert(value, hint)
            check(typed[name], **bounds(field))
        except ValueError:
            problems.append(f"{name}: got {value!r} ({type(value).__name__}), expected {expected(hint, field)}")
    return typed, problems


def _known_configs() -> tuple[type, ...]:
    """The classes named in CONFIGS."""
    pairs = [entry.split(":") for entry in CONFIGS]
    return tuple(getattr(importlib.import_module(f"rsnakit.{module}"), name) for module, name in pairs)


def _settings(cls: type) -> dict[str, tuple[Any, dataclasses.Field]]:
    """Type and field of each setting of a config, by name."""
    hints = typing.get_type_hints(cls)
    return {field.name: (hints[field.name], field) for field in dataclasses.fields(cls) if field.init}


def _unknown(name: str, given: Iterable[str], others: Iterable[str]) -> str:
    lower = {other.lower(): other for other in (*others, *given)}
    near = difflib.get_close_matches(name.lower(), lower, n=1)
    hint = f"did you mean {lower[near[0]]}?" if near else f"this notebook has {', '.join(sorted(given))}"
    return f"{name}: unknown parameter; {hint}"


def _raise(problems: list[str]) -> None:
    if problems:
        count = "1 parameter is" if len(problems) == 1 else f"{len(problems)} parameters are"
        raise ParameterError("\n  ".join([f"{count} wrong:", *problems]))


# ---- what papermill injected


def _injected(namespace: Mapping[str, Any], fields: set[str]) -> tuple[dict[str, Any], list[str]]:
    """Names and values of the injected cell that is in force, and problems with the order in which cells ran.

    Where the parameters cell ran again after the injected one, by hand, the injected one is no longer in force. Where
    it ran only after it, the injected values are lost: papermill injects at the very top where no cell is tagged.
    """
    history = namespace.get("In")
    cells = [cell for cell in history if isinstance(cell, str)] if isinstance(history, list | tuple) else []
    own = [i for i, cell in enumerate(cells) if _is_parameters_cell(cell, fields)]
    opened = [i for i, cell in enumerate(cells) if cell.strip().split("\n", 1)[0].strip() == INJECTED_FIRST_LINE]
    last = max(set(opened) - set(own), default=None)
    if last is None:
        return {}, []
    ran_before, ran_after = any(i < last for i in own), any(i > last for i in own)
    if ran_before and ran_after:
        return {}, []
    values = _assigned(cells[last], namespace)
    if not ran_after:
        return values, []
    now = {name: _unwrap(namespace[name], name) for name in sorted(fields & values.keys()) if name in namespace}
    return values, [
        f"{name}: {values[name]!r} was injected, but the parameters cell ran after that and set {value!r}; "
        "tag the parameters cell `parameters`, or run the injected cell again"
        for name, value in now.items()
        if value != values[name]
    ]


def _is_parameters_cell(cell: str, fields: set[str]) -> bool:
    """Whether a cell annotates most of the settings, as no other cell does."""
    annotated = {ast.unparse(node.target) for node in _statements(cell) if isinstance(node, ast.AnnAssign)}
    return 2 * len(annotated & fields) > len(fields)


def _assigned(cell: str, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Values that a cell assigns, by name: as written there, for a later cell may use the name for something else."""
    values = {}
    for node in _statements(cell):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):  # papermill writes no other kind
            name = node.targets[0].id
            try:
                values[name] = ast.literal_eval(node.value)
            except ValueError:  # float('nan')
                values[name] = namespace.get(name)
    return values


def _statements(cell: str) -> list[ast.stmt]:
    try:
        return ast.parse(cell).body
    except SyntaxError:  # the history keeps the cells that didn't run, too
        return []


def _unwrap(value: Any, name: str) -> Any:
    """The setting itself where `..., run = params.read(...)` put a config under the name of one of its settings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return getattr(value, name, value)
    return value
