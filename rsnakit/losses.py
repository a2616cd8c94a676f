"""Losses on logits, always in float32: half precision rounds the small probabilities that this task is about to zero."""

import torch
import torch.nn.functional as F


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
