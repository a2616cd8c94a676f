"""Losses on logits, always in float32: half precision rounds the small probabilities that this task is about to zero."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F


def training_loss(
    outputs: Mapping[str, torch.Tensor],
    targets: Mapping[str, torch.Tensor],
    positive_target: float = 1.0,
    positive_weight: float = 1.0,
    aux_weight: float = 0.0,
) -> torch.Tensor:
    """What training minimises: the cancer loss, and a share of the mean over the auxiliary heads' losses.

    Args:
        outputs: logits by name, as a model gives them: `cancer` (B,), and auxiliary heads (B,) or (B, K).
        targets: (B,) each, by the same names; auxiliary ones are class numbers, NaN where missing.
        positive_target, positive_weight: of `cancer_loss`.
        aux_weight: of the auxiliary mean; 0 leaves it out, and then its targets need not be there.

    Returns:
        () float32.
    """
    loss = cancer_loss(outputs["cancer"], targets["cancer"], positive_target, positive_weight)
    names = [name for name in outputs if name != "cancer"]
    if not names or not aux_weight:
        return loss
    return loss + aux_weight * torch.stack([auxiliary_loss(outputs[name], targets[name]) for name in names]).mean()


def cancer_loss(
    logits: torch.Tensor, labels: torch.Tensor, positive_target: float = 1.0, positive_weight: float = 1.0
) -> torch.Tensor:
    """Binary cross-entropy of the cancer logit, mean over the batch.

    Args:
        logits: (B,) of any float type; no sigmoid before.
        labels: (B,) 0 or 1.
        positive_target: what a positive is asked to reach; 0.9 keeps a model from being sure (the 1st place's choice).
        positive_weight: how many negatives a positive counts for.

    Returns:
        () float32.
    """
    labels = labels.float()
    weight = torch.where(labels > 0.5, positive_weight, 1.0)
    return F.binary_cross_entropy_with_logits(logits.float(), labels * positive_target, weight=weight)


def auxiliary_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of an auxiliary head, mean over those of the batch whose label is known.

    Args:
        logits: (B,), one a yes or no, or (B, K), one a class; of any float type.
        labels: (B,) class numbers; NaN where unknown.

    Returns:
        () float32; 0 where no label is known. A row without a label has a gradient of exactly 0.
    """
    # No row is picked by a mask: that would make the device wait for the number of rows.
    known = ~labels.isnan()
    labels = torch.where(known, labels, 0.0)
    if logits.ndim == 1:
        losses = F.binary_cross_entropy_with_logits(
            torch.where(known, logits.float(), 0.0), labels.float(), reduction="none"
        )
    else:
        losses = F.cross_entropy(torch.where(known[:, None], logits.float(), 0.0), labels.long(), reduction="none")
    return torch.where(known, losses, 0.0).sum() / known.sum().clamp(min=1)
