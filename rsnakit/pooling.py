"""From maps to a vector: average, maximum, generalised mean, attention; each in float32, under autocast too."""

import contextlib

import torch
from torch import nn


def make_pool(kind: str, channels: int) -> nn.Module:
    """A module that maps (B, C, h, w) to (B, C): `avg`, `max`, `gem` or `attention`.

    Args:
        channels: C; only attention asks.
    """
    if kind == "attention":
        return AttentionPool(channels)
    return {"avg": AveragePool, "max": MaxPool, "gem": GeM}[kind]()


class AveragePool(nn.Module):
    """The mean of each channel, summed in float32."""

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        """(B, C, h, w) to (B, C)."""
        return maps.mean((2, 3), dtype=torch.float32)


class MaxPool(nn.Module):
    """The largest value of each channel: right where what is looked for is a small spot."""

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        """(B, C, h, w) to (B, C)."""
        return maps.amax((2, 3)).float()


class GeM(nn.Module):
    """Generalised-mean pooling, (mean of x^p)^(1/p) with a learnable p (Radenovic, Tolias & Chum, 2018)."""

    def __init__(self, p: float = 3.0, eps: float = 1e-6) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.tensor(p))
        self.eps = eps

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        """(B, C, h, w) to (B, C), in float32: half precision loses eps, and overflows at the cube of 50."""
        with full_precision(maps):
            # Scaled by the largest value, so that powers stay near 1 whatever the maps' magnitude is.
            maps = maps.float().clamp(min=self.eps)
            scale = maps.detach().amax((2, 3), keepdim=True)
            mean = (maps / scale).pow(self.p).mean((2, 3))
            return mean.pow(1 / self.p) * scale[..., 0, 0]


class AttentionPool(nn.Module):
    """A weighted mean over places, with weights that are the softmax of learned scores (Ilse, Tomczak & Welling, 2018).

    The scores are w · (tanh(V x) * sigmoid(U x)), the paper's gated ones. w begins at 0, so that a new pool is the average.

    Args:
        channels: C of what is pooled.
        hidden: size of V x and U x; there are about 2 * channels * hidden parameters.
    """

    def __init__(self, channels: int, hidden: int = 64) -> None:
        super().__init__()
        self.hidden = nn.Linear(channels, hidden)
        self.gate = nn.Linear(channels, hidden)
        self.score = nn.Linear(hidden, 1, bias=False)  # a softmax takes no notice of a bias
        nn.init.zeros_(self.score.weight)

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        """(B, C, h, w) to (B, C)."""
        places = maps.flatten(2).transpose(1, 2)  # (B, h * w, C)
        return weighted_mean(places, self.weights(places))

    def weights(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """How much each of N vectors counts: (B, N) float32 that sums to 1, for x (B, N, C).

        Args:
            mask: (B, N) bool, False for what does not count; a row without a True gets zeros. None: all count.
        """
        with full_precision(x):
            x = x.to(self.score.weight.dtype)
            scores = self.score(self.hidden(x).tanh() * self.gate(x).sigmoid()).squeeze(2).float()  # (B, N)
            if mask is None:
                return scores.softmax(1)
            # A finite number and no infinity: the softmax of a row without a True stays finite, and so do gradients.
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
            return scores.softmax(1) * mask


def weighted_mean(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """(B, N, C) and weights (B, N) to (B, C) float32."""
    with full_precision(x):
        return torch.einsum("bnc,bn->bc", x.float(), weights.float())


def full_precision(x: torch.Tensor) -> contextlib.AbstractContextManager:
    """A context without autocast on the device of a tensor; the meta device, on which models are run dry, knows none."""
    return contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
