"""Losses against their formulas, computed in float64 here."""

import math

import numpy as np
import pytest
import torch

from rsnakit.losses import auxiliary_loss, cancer_loss, training_loss

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


# --- auxiliary heads: labels that may be missing


NAN = float("nan")


def test_one_logit_is_binary_cross_entropy_over_the_known():
    logits, labels = torch.tensor(LOGITS), torch.tensor([0, NAN, 1, NAN, 1, 0, NAN])
    known = [0, 2, 4, 5]
    loss = auxiliary_loss(logits, labels)
    assert loss.shape == () and loss.dtype == torch.float32
    expected = by_hand([LOGITS[i] for i in known], [labels[i].item() for i in known])
    assert float(loss) == pytest.approx(expected, rel=1e-6)


def test_several_logits_are_cross_entropy_over_the_known():
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [5.0, -5.0, 0.5]])
    # by hand: log(e^1 + e^2 + e^3) - 3, and log(e^5 + e^-5 + e^0.5) - (-5); the second row has no label
    first = math.log(math.exp(1) + math.exp(2) + math.exp(3)) - 3
    third = math.log(math.exp(5) + math.exp(-5) + math.exp(0.5)) + 5
    loss = auxiliary_loss(logits, torch.tensor([2, NAN, 1]))
    assert loss.dtype == torch.float32 and float(loss) == pytest.approx((first + third) / 2, rel=1e-6)
    assert float(auxiliary_loss(torch.zeros(5, 4), torch.tensor([0, 1, 2, 3, NAN]))) == pytest.approx(math.log(4))


@pytest.mark.parametrize("shape", [(4,), (4, 3)])
@pytest.mark.parametrize("odd", [0.5, NAN, math.inf, -math.inf])
def test_rows_without_a_label_have_no_gradient(shape, odd):
    """Whatever the logit there is: a weight of 0 times a NaN would be NaN."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shape, generator=generator)
    logits[1], logits[3] = odd, odd
    logits.requires_grad_()
    loss = auxiliary_loss(logits, torch.tensor([1, NAN, 0, NAN]))
    loss.backward()
    assert torch.isfinite(loss)
    assert (logits.grad[[1, 3]] == 0).all() and (logits.grad[[0, 2]] != 0).all()
    if shape == (4,):  # (s(z) - y) over the two that are known
        expected = (torch.sigmoid(logits.detach()) - torch.tensor([1.0, 0, 0, 0]))[[0, 2]] / 2
        assert torch.allclose(logits.grad[[0, 2]], expected)


@pytest.mark.parametrize("shape", [(3,), (3, 4)])
def test_a_batch_without_labels_adds_exactly_nothing(shape):
    logits = torch.randn(shape, requires_grad=True)
    loss = auxiliary_loss(logits, torch.full((3,), NAN))
    loss.backward()
    assert loss.item() == 0.0 and (logits.grad == 0).all()


def test_training_is_cancer_and_a_share_of_the_mean_of_the_others():
    outputs = {
        "cancer": torch.tensor([0.3, -2.0]),
        "biopsy": torch.tensor([1.0, 4.0]),
        "density": torch.zeros(2, 4),
        "birads": torch.randn(2, 3),
    }
    targets = {
        "cancer": torch.tensor([1.0, 0.0]),
        "biopsy": torch.tensor([1.0, NAN]),
        "density": torch.tensor([2.0, 3.0]),
        "birads": torch.tensor([NAN, NAN]),
    }
    cancer = by_hand([0.3, -2.0], [1, 0], 0.9, 2.0)
    extra = (math.log1p(math.exp(-1)) + math.log(4) + 0) / 3  # -log s(1); a quarter each; none known
    loss = training_loss(outputs, targets, 0.9, 2.0, 0.25)
    assert float(loss) == pytest.approx(cancer + 0.25 * extra, rel=1e-6)
    assert float(training_loss(outputs, targets, 0.9, 2.0, 0.0)) == pytest.approx(cancer, rel=1e-6)
    assert float(training_loss(outputs, {"cancer": targets["cancer"]}, 0.9, 2.0)) == pytest.approx(cancer, rel=1e-6)
    assert float(training_loss({"cancer": outputs["cancer"]}, targets, 0.9, 2.0, 0.25)) == pytest.approx(cancer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_auxiliary_losses_work_in_float32_under_autocast(dtype):  # T06
    """Logits of half precision, as a head under autocast gives them; 300 overflows an exponential in any half type."""
    logits = torch.tensor([300.0, -300.0, 1.0], dtype=dtype, requires_grad=True)
    several = torch.tensor([[300.0, 0.0], [0.0, 300.0]], dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        first = auxiliary_loss(logits, torch.tensor([0.0, 1.0, NAN]))
        second = auxiliary_loss(several, torch.tensor([1.0, 1.0]))
    assert first.dtype == second.dtype == torch.float32
    assert first.item() == pytest.approx(300.0) and second.item() == pytest.approx(150.0)
    (first + second).backward()
    assert logits.grad.tolist() == [0.5, -0.5, 0.0] and several.grad.tolist() == [[0.5, -0.5], [0.0, 0.0]]


def test_a_logit_that_is_not_finite_is_not_hidden():
    """Where its label is known: the loop stops at such a loss, or skips the step."""
    assert auxiliary_loss(torch.tensor([NAN, 1.0]), torch.tensor([1.0, 1.0])).isnan()
    assert auxiliary_loss(torch.tensor([[NAN, 1.0], [0.0, 0.0]]), torch.tensor([1.0, 1.0])).isnan()
