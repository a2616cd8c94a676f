"""From a backbone to the maps that are pooled: its last ones as they are, or a small feature pyramid."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from rsnakit import dryrun

LEVELS = 3  # of the pyramid: the last three stages


class FPN(nn.Module):
    """A feature pyramid network (Lin et al., 2017): coarse maps brought into finer ones.

    Each map goes through a 1x1 convolution, takes up the coarser result, enlarged to its own size by nearest neighbours,
    and is smoothed by a 3x3 convolution. The enlarging goes by the finer map's true size, so that odd sizes and maps all
    of one size (of a ViT) are right as well.

    Args:
        in_channels: of the maps, finest first.
        channels: of all results.
        scse: whether each result goes through `SCSE`.
    """

    def __init__(self, in_channels: Sequence[int], channels: int, scse: bool = False) -> None:
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(count, channels, 1) for count in in_channels)
        self.smooth = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in in_channels)
        for convolution in (*self.lateral, *self.smooth):
            nn.init.kaiming_uniform_(convolution.weight, a=1)  # keeps the variance; no activation follows
            nn.init.zeros_(convolution.bias)
        self.attention = nn.ModuleList(SCSE(channels) for _ in in_channels) if scse else None

    def forward(self, maps: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Maps (B, C_i, h_i, w_i), finest first, to maps (B, channels, h_i, w_i)."""
        merged = [lateral(x) for lateral, x in zip(self.lateral, maps, strict=True)]
        for i in range(len(merged) - 2, -1, -1):
            merged[i] = merged[i] + F.interpolate(merged[i + 1], size=merged[i].shape[2:], mode="nearest")
        merged = [smooth(x) for smooth, x in zip(self.smooth, merged, strict=True)]
        if self.attention is not None:
            merged = [attention(x) for attention, x in zip(self.attention, merged, strict=True)]
        return merged


class SCSE(nn.Module):
    """Concurrent spatial and channel squeeze and excitation (Roy, Navab & Wachinger, 2018).

    The map times a weight for each channel, from the channels' means, plus the map times a weight for each place, from the
    channels there.
    """

    def __init__(self, channels: int, reduction: int = 2) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, max(1, channels // reduction), 1)
        self.excite = nn.Conv2d(max(1, channels // reduction), channels, 1)
        self.place = nn.Conv2d(channels, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, C, h, w) to (B, C, h, w)."""
        channel = self.excite(self.squeeze(x.mean((2, 3), keepdim=True)).relu()).sigmoid()  # (B, C, 1, 1)
        return x * channel + x * self.place(x).sigmoid()


class Pyramid:
    """Takes the maps of a timm backbone's last three stages, and knows their channels.

    The maps are timm's `forward_intermediates`, normed where the model norms what it gives (ViTs). What the backbone does
    behind its last stage (a last convolution or norm before the classifier) has no part in them: such weights stay in the
    model under their names, but are frozen, so that an optimiser or several GPUs do not wait for gradients that never come.

    Attributes:
        channels: of the maps, finest first.
        unused: names of the backbone's parameters that were frozen.

    Args:
        backbone: as timm gives it, before any surgery.

    Raises:
        ValueError: timm cannot take maps from this model.
    """

    def __init__(self, backbone: nn.Module) -> None:
        kind = type(backbone).__name__
        if not hasattr(backbone, "forward_intermediates"):
            raise ValueError(f"neck: this version of timm cannot take the maps of {kind}'s stages; use neck='none'")
        config = backbone.pretrained_cfg
        x = torch.empty(2, 1, *(config.get("input_size") or (1, 224, 224))[1:], device="meta")
        first = None
        for norm in (True, False):  # a few refuse to norm
            self.options = {"indices": LEVELS, "norm": norm, "output_fmt": "NCHW", "intermediates_only": True}
            try:
                maps = dryrun.run(backbone, x, method="forward_intermediates", **self.options)
                break
            except Exception as error:  # whatever a model may raise
                first = first or error
        else:
            raise ValueError(
                f"neck: the maps of {kind}'s stages cannot be taken ({type(first).__name__}: {first}); use neck='none'"
            ) from first
        self.channels = [x.shape[1] for x in maps]
        self.unused = _without_gradient(backbone, x, self.options)
        for name in self.unused:
            backbone.get_parameter(name).requires_grad_(False)

    def __call__(self, backbone: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        """Maps (B, C_i, h_i, w_i), finest first, of images as the backbone takes them."""
        return backbone.forward_intermediates(x, **self.options)


def feature_channels(backbone: nn.Module) -> int:
    """Channels of what a timm backbone without classifier and pooling gives."""
    return getattr(backbone, "head_hidden_size", None) or backbone.num_features


def as_maps(features: torch.Tensor, backbone: nn.Module) -> torch.Tensor:
    """A backbone's last features as (B, C, h, w): some timm models give (B, h, w, C), some (B, tokens, C).

    Raises:
        ValueError: the features have another shape.
    """
    channels, kind = feature_channels(backbone), type(backbone).__name__
    if not isinstance(features, torch.Tensor):
        raise ValueError(f"{kind} gives a {type(features).__name__} of features, expected maps; neck='fpn' may take it")
    if features.ndim == 3 and features.shape[2] == channels:
        return features[:, getattr(backbone, "num_prefix_tokens", 0) :].transpose(1, 2).unsqueeze(3)
    if features.ndim == 4 and features.shape[1] == channels:
        return features
    if features.ndim == 4 and features.shape[3] == channels:
        return features.permute(0, 3, 1, 2)
    raise ValueError(f"{kind} gives features {tuple(features.shape)}, expected {channels} channels")


def _without_gradient(backbone: nn.Module, x: torch.Tensor, options: dict) -> list[str]:
    """Names of the parameters that the maps do not depend on, as a dry run with gradients tells."""
    parameters = [name for name, _ in backbone.named_parameters()]
    stand_ins = dryrun.stand_ins(backbone)
    weights = [stand_ins[name].requires_grad_() for name in parameters]
    maps = dryrun.run(backbone, x, method="forward_intermediates", grad=True, weights=stand_ins, **options)
    gradients = torch.autograd.grad(sum(x.sum() for x in maps), weights, allow_unused=True)
    return [name for name, gradient in zip(parameters, gradients, strict=True) if gradient is None]
