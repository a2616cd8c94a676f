"""Losses on logits, always in float32: half precision rounds the small probabilities that this task is about to zero.

No loss waits for a device: nothing is read from it, and no row is picked by a mask.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

NAMES = ("bce", "focal", "pf1")
Tensors = Mapping[str, torch.Tensor]
Loss = Callable[[Tensors, Tensors], torch.Tensor]  # logits and labels by name to the batch's mean, ()


def training_loss(
    outputs: Tensors,
    targets: Tensors,
    *,
    loss: str = "bce",
    positive_target: float = 1.0,
    positive_weight: float = 1.0,
    focal_gamma: float = 2.0,
    aux_weight: float = 0.0,
) -> torch.Tensor:
    """What training minimises: the cancer loss, and a share of the mean over the auxiliary heads' losses.

    Args:
        outputs: logits by name, as a model gives them: `cancer` (B,), and auxiliary heads (B,) or (B, K).
        targets: (B,) each, by the same names; auxiliary ones are class numbers, NaN where missing.
        loss: of the cancer logit: `bce` is `cancer_loss`, `focal` is `focal_loss`, `pf1` is `pf1_loss`.
        positive_target, positive_weight, focal_gamma: of these; pf1 has no use for the first.
        aux_weight: of the auxiliary mean; 0 leaves it out, and then its targets need not be there.

    Returns:
        () float32.

    Raises:
        ValueError: no such loss, or logits and labels of `cancer` differ in shape.
    """
    logits, labels = outputs["cancer"], targets["cancer"]
    if loss == "bce":
        total = cancer_loss(logits, labels, positive_target, positive_weight)
    elif loss == "focal":
        total = focal_loss(logits, labels, positive_target, positive_weight, focal_gamma)
    elif loss == "pf1":
        total = pf1_loss(logits, labels, positive_weight)
    else:
        raise ValueError(f"loss {loss!r}: expected one of {', '.join(NAMES)}")
    names = [name for name in outputs if name != "cancer"]
    if not names or not aux_weight:
        return total
    return total + aux_weight * torch.stack([auxiliary_loss(outputs[name], targets[name]) for name in names]).mean()


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
    logits, labels, weight = _prepared(logits, labels, positive_weight)
    return F.binary_cross_entropy_with_logits(logits, labels * positive_target, weight=weight)


def focal_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    positive_target: float = 1.0,
    positive_weight: float = 1.0,
    gamma: float = 2.0,
) -> torch.Tensor:
    """Cross-entropy in which what is right already counts little, (1 - p)^gamma log p, mean over the batch (Lin et al., 2017).

    A soft target t is what the loss would be on average if the label were 1 with probability t: t times the loss of a
    positive and 1 - t times that of a negative. So it goes with mixing as cross-entropy does; but its least lies nearer to
    one half than t, with gamma 2 at 0.69 for t = 0.9.

    Args:
        logits, labels, positive_target, positive_weight: as of `cancer_loss`.
        gamma: 0 is cross-entropy.

    Returns:
        () float32; finite, as its gradient, for logits of any size.
    """
    logits, labels, weight = _prepared(logits, labels, positive_weight)
    targets = labels * positive_target
    # softplus(-z) is -log p and softplus(z) is -log(1 - p); powers are taken of them, since 1 - p itself would round to 0.
    right, wrong = F.softplus(-logits), F.softplus(logits)
    as_positive, as_negative = right * torch.exp(-gamma * wrong), wrong * torch.exp(-gamma * right)
    return (weight * (targets * as_positive + (1 - targets) * as_negative)).mean()


def pf1_loss(logits: torch.Tensor, labels: torch.Tensor, positive_weight: float = 1.0) -> torch.Tensor:
    """1 - pF1 of the batch, the competition's metric on probabilities as they are: 1 - 2 sum(p y) / (sum y + sum p).

    It is of the batch as a whole and not a mean over it: each batch wants positives, some negatives, and size. A batch
    without positives, or without any probability on one, has pF1 0, so a loss of 1; without positives no gradient, too.
    There is no soft target: pF1 grows with a positive's score up to 1.

    Args:
        logits, labels: as of `cancer_loss`.
        positive_weight: how many negatives a positive counts for, in each of the sums.

    Returns:
        () float32 in [0, 1].
    """
    logits, labels, weight = _prepared(logits, labels, positive_weight)
    p = torch.sigmoid(logits)
    mass = (weight * (labels + p)).sum()
    # Where there is a positive its weight is in the mass; where there is none the numerator is 0, whatever it is divided by.
    return 1 - 2 * (weight * labels * p).sum() / mass.clamp(min=torch.finfo(torch.float32).tiny)


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


def _prepared(
    logits: torch.Tensor, labels: torch.Tensor, positive_weight: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits and labels in float32 and each row's weight, all (B,). Shapes that would broadcast are refused (ValueError)."""
    if logits.shape != labels.shape:
        raise ValueError(
            f"logits of size {tuple(logits.shape)} and labels of size {tuple(labels.shape)}: expected the same"
        )
    labels = labels.float()
    return logits.float(), labels, torch.where(labels > 0.5, positive_weight, 1.0)
