"""From a breast's views to one vector: mean, maximum, or attention that knows which view is which."""

import torch
from torch import nn

from rsnakit.pooling import AttentionPool, weighted_mean
from rsnakit.targets import VIEW_KINDS


class ViewPool(nn.Module):
    """Brings the features of a breast's views together; what is masked changes nothing, NaN even.

    Attention scores each view by its feature with the embedding of its kind added (see `pooling.AttentionPool`), and takes
    the weighted mean of the features themselves: so a breast of one view is that view, and a new pool is the mean.

    Args:
        kind: `mean`, `max` or `attention`.
        channels: C of the features; only attention asks.
    """

    def __init__(self, kind: str, channels: int) -> None:
        super().__init__()
        if kind not in ("mean", "max", "attention"):
            raise ValueError(f"views are pooled by mean, max or attention, got {kind!r}")
        self.kind = kind
        if kind == "attention":
            self.attention = AttentionPool(channels)
            self.embedding = nn.Embedding(len(VIEW_KINDS), channels)
            nn.init.zeros_(self.embedding.weight)  # the kinds begin alike

    def forward(
        self, features: torch.Tensor, mask: torch.Tensor | None = None, view_id: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(B, V, C) to (B, C).

        Args:
            mask: (B, V), False where there is no view; a breast without any gives zeros. None: all views count.
            view_id: (B, V) numbers in `targets.VIEW_KINDS`, read where a view counts; attention alone needs it. Both may
                lie on another device than the features.

        Raises:
            ValueError: attention without view_id, mask or view_id of another shape, or, as far as it can be seen without
                waiting for a GPU, a number that is no kind of view.
        """
        shape = features.shape[:2]
        for name, tensor in (("view_mask", mask), ("view_id", view_id)):
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected (B, V) = {tuple(shape)}")
        if mask is None:
            mask = torch.ones(shape, dtype=torch.bool, device=features.device)
        mask = mask.bool()
        if self.kind == "attention":
            view_id = self._checked(view_id, mask).to(features.device, non_blocking=True)
        mask = mask.to(features.device, non_blocking=True)
        features = features.masked_fill(~mask[..., None], 0)
        if self.kind == "attention":
            return weighted_mean(features, self.attention.weights(features + self.embedding(view_id), mask))
        if self.kind == "mean":
            return features.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        lowest = features.masked_fill(~mask[..., None], -torch.inf).amax(1)
        return lowest.masked_fill(~mask.any(1, keepdim=True), 0)

    @staticmethod
    def _checked(view_id: torch.Tensor | None, mask: torch.Tensor) -> torch.Tensor:
        """The kinds of the views that count, and 0 for the others."""
        kinds = ", ".join(f"{number} {kind}" for number, kind in enumerate(VIEW_KINDS))
        if view_id is None:
            raise ValueError(
                f"views='attention' asks which view is which: give view_id, (B, V) whole numbers ({kinds})"
            )
        view_id = view_id.masked_fill(~mask.to(view_id.device, non_blocking=True), 0).long()
        if (
            view_id.device.type == "cpu"
            and view_id.numel()
            and not 0 <= view_id.min() <= view_id.max() < len(VIEW_KINDS)
        ):
            raise ValueError(f"view_id holds {sorted(set(view_id.flatten().tolist()))}, expected {kinds}")
        return view_id
