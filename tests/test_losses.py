"""Losses against their formulas, computed in float64 here."""

import math

import numpy as np
import pytest
import torch

from rsnakit.losses import cancer_loss

LOGITS = [-30.0, -3.5, -0.2, 0.0, 0.7, 2.0, 25.0]
LABELS = [0, 1, 0, 1, 1, 0, 1]


def by_hand(logits, labels, target=1.0, weight=1.0) -> float:
    """Binary cross-entropy, -t log s(z) - (1 - t) log(1 - s(z)), in the form that does not overflow."""
    total = 0.0
    for z, y in zip(logits, labels, strict=True):
        t = target * y
        total += (weight if y else 1.0) * (max(z, 0) - z * t + math.log1p(math.exp(-abs(z))))
    return total / len(logits)


@pytest.mark.parametrize("target", [1.0, 0.9, 0.5])
@pytest.mark.parametrize("weight", [1.0, 7.0, 0.0])
def test_the_loss_is_its_formula(target, weight):
    loss = cancer_loss(torch.tensor(LOGITS), torch.tensor(LABELS), target, weight)
    assert loss.shape == () and loss.dtype == torch.float32
    assert float(loss) == pytest.approx(by_hand(LOGITS, LABELS, target, weight), rel=1e-6)


def test_known_values():
    zero = torch.zeros(1)
    assert float(cancer_loss(zero, torch.ones(1))) == pytest.approx(math.log(2), rel=1e-6)
    # one positive at logit log 9, probability 0.9: -0.9 log 0.9 - 0.1 log 0.1, the least that target 0.9 allows
    nine = torch.tensor([math.log(9)], requires_grad=True)
    loss = cancer_loss(nine, torch.ones(1), positive_target=0.9)
    assert loss.item() == pytest.approx(-0.9 * math.log(0.9) - 0.1 * math.log(0.1), rel=1e-6)
    loss.backward()
    assert abs(float(nine.grad)) < 1e-6


def test_a_weighted_positive_counts_as_so_many_negatives():
    logits = torch.zeros(2, requires_grad=True)
    cancer_loss(logits, torch.tensor([1, 0]), positive_weight=3.0).backward()
    assert logits.grad.tolist() == pytest.approx([3 * -0.5 / 2, 0.5 / 2])  # weight * (s(z) - y) / B


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("labels", [torch.int64, torch.float32, torch.bool])
def test_other_types_are_taken_in_float32(dtype, labels):
    logits = torch.tensor(LOGITS, dtype=dtype)
    loss = cancer_loss(logits, torch.tensor(LABELS).to(labels))
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(by_hand(logits.double().tolist(), LABELS), rel=1e-6)


def test_large_logits_neither_overflow_nor_lose_their_gradient():
    logits = torch.tensor([-300.0, 300.0], dtype=torch.float16, requires_grad=True)
    loss = cancer_loss(logits, torch.tensor([1, 0]))
    loss.backward()
    assert loss.item() == pytest.approx(300.0)
    assert logits.grad.tolist() == [-0.5, 0.5]


def test_under_autocast_it_works_in_float32():
    # T06
    head = torch.nn.Linear(4, 1)
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32))
    labels = torch.arange(8) % 2
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(x).squeeze(1)
        inside = cancer_loss(logits, labels, 0.9, 2.0)
    assert logits.dtype == torch.bfloat16 and inside.dtype == torch.float32
    assert inside.item() == pytest.approx(by_hand(logits.double().tolist(), labels.tolist(), 0.9, 2.0), rel=1e-6)
    inside.backward()
    assert torch.isfinite(head.weight.grad).all() and head.weight.grad.abs().sum() > 0


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match="size"):
        cancer_loss(torch.zeros(4, 1), torch.zeros(4))
