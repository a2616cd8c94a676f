"""Losses against their formulas, computed in float64 here."""

import math

import numpy as np
import pytest
import torch

from rsnakit.losses import NAMES, auxiliary_loss, cancer_loss, focal_loss, pf1_loss, training_loss

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
    how = {"positive_target": 0.9, "positive_weight": 2.0}
    loss = training_loss(outputs, targets, **how, aux_weight=0.25)
    assert float(loss) == pytest.approx(cancer + 0.25 * extra, rel=1e-6)
    assert float(training_loss(outputs, targets, **how, aux_weight=0.0)) == pytest.approx(cancer, rel=1e-6)
    assert float(training_loss(outputs, {"cancer": targets["cancer"]}, **how)) == pytest.approx(cancer, rel=1e-6)
    alone = {"cancer": outputs["cancer"]}
    assert float(training_loss(alone, targets, **how, aux_weight=0.25)) == pytest.approx(cancer)
    for name in NAMES:  # the same share of the others, whatever the cancer loss is
        with_others = training_loss(outputs, targets, loss=name, **how, aux_weight=0.25)
        assert float(with_others - training_loss(alone, targets, loss=name, **how)) == pytest.approx(0.25 * extra)


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


# --- focal loss


def focal_by_hand(logits, labels, target=1.0, weight=1.0, gamma=2.0) -> float:
    """In float64: -t (1 - p)^gamma log p - (1 - t) p^gamma log(1 - p), with 1 - p as s(-z)."""
    total = 0.0
    for z, y in zip(logits, labels, strict=True):
        t, p, q = target * y, 1 / (1 + math.exp(-z)), 1 / (1 + math.exp(z))
        total += (weight if y else 1.0) * -(t * q**gamma * math.log(p) + (1 - t) * p**gamma * math.log(q))
    return total / len(logits)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize(("target", "weight"), [(1.0, 1.0), (0.9, 1.0), (0.9, 7.0), (1.0, 0.0)])
def test_focal_is_its_formula(gamma, target, weight):
    loss = focal_loss(torch.tensor(LOGITS), torch.tensor(LABELS), target, weight, gamma)
    assert loss.shape == () and loss.dtype == torch.float32
    assert float(loss) == pytest.approx(focal_by_hand(LOGITS, LABELS, target, weight, gamma), rel=1e-5)


@pytest.mark.parametrize("gamma", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("alpha", [-1, 0.25, 0.5])
def test_focal_and_its_gradient_are_those_of_torchvision(gamma, alpha):
    """Of hard labels; alpha there is the share of positives' weight, -1 none."""
    from torchvision.ops import sigmoid_focal_loss

    logits, labels = torch.tensor(LOGITS[1:-1]), torch.tensor(LABELS[1:-1]).float()
    weight, factor = (1.0, 1.0) if alpha < 0 else (alpha / (1 - alpha), 1 - alpha)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = factor * focal_loss(ours, labels, positive_weight=weight, gamma=gamma)
    expected = sigmoid_focal_loss(theirs, labels, alpha=alpha, gamma=gamma, reduction="mean")
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)


def test_focal_with_gamma_0_is_cross_entropy():
    logits, labels = torch.tensor(LOGITS), torch.tensor(LABELS)
    torch.testing.assert_close(focal_loss(logits, labels, 0.9, 3.0, 0.0), cancer_loss(logits, labels, 0.9, 3.0))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0, 10.0])
@pytest.mark.parametrize("size", [17.0, 100.0, 300.0, 60_000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_focal_of_large_logits(gamma, size, dtype):
    """Where 1 - p rounds to 0 in float32, as of 17 on: a wrong one costs its logit, a right one next to nothing."""
    logits = torch.tensor([size, -size, size, -size], dtype=dtype, requires_grad=True)
    right = torch.tensor([1.0, 0.0, 1.0, 0.0])
    assert 0 <= focal_loss(logits, right, gamma=gamma).item() <= 1e-6
    loss = focal_loss(logits, 1 - right, gamma=gamma)
    loss.backward()
    assert loss.item() == pytest.approx(size, rel=1e-3)
    assert logits.grad.tolist() == pytest.approx([0.25, -0.25, 0.25, -0.25], rel=1e-3)
    (grad,) = torch.autograd.grad(focal_loss(logits, right, 0.9, gamma=gamma), logits)
    assert torch.isfinite(grad).all()


def test_focal_of_a_soft_target_is_the_mean_over_labels_drawn_so():
    positive = [float(focal_loss(torch.tensor([z]), torch.ones(1))) for z in LOGITS]
    negative = [float(focal_loss(torch.tensor([z]), torch.zeros(1))) for z in LOGITS]
    soft = [float(focal_loss(torch.tensor([z]), torch.ones(1), positive_target=0.9)) for z in LOGITS]
    assert soft == pytest.approx([0.9 * p + 0.1 * n for p, n in zip(positive, negative, strict=True)], rel=1e-6)
    grid = np.linspace(0.01, 0.99, 981)
    logits = torch.from_numpy(np.log(grid / (1 - grid))).float()
    values = [float(focal_loss(z[None], torch.ones(1), positive_target=0.9)) for z in logits]
    assert grid[int(np.argmin(values))] == pytest.approx(0.694, abs=0.002)  # as its docstring says


# --- pF1


def pf1_by_hand(logits, labels, weight=1.0) -> float:
    p, y = 1 / (1 + np.exp(-np.array(logits))), np.array(labels)
    w = np.where(y == 1, weight, 1.0)
    return 1 - 2 * (w * p * y).sum() / ((w * y).sum() + (w * p).sum())


@pytest.mark.parametrize("weight", [1.0, 7.0])
def test_pf1_is_its_formula_and_the_metric(weight):
    from rsnakit.metrics import pfbeta

    loss = pf1_loss(torch.tensor(LOGITS), torch.tensor(LABELS), weight)
    assert loss.shape == () and loss.dtype == torch.float32
    assert float(loss) == pytest.approx(pf1_by_hand(LOGITS, LABELS, weight), rel=1e-5)
    if weight == 1:
        scores = 1 / (1 + np.exp(-np.array(LOGITS)))
        assert 1 - float(loss) == pytest.approx(pfbeta(LABELS, scores), rel=1e-5)


def test_pf1_of_the_worked_value():  # V01
    p = torch.tensor([0.9, 0.2, 0.1, 0.4])
    assert 1 - float(pf1_loss(p.logit(), torch.tensor([1, 0, 0, 1]))) == pytest.approx(0.722222, abs=1e-6)


def test_the_gradient_of_pf1_is_its_derivative():
    """d(1 - 2A/D)/dp = -2 (y D - A) / D^2 with A = sum(p y), D = sum y + sum p; and dp/dz = p (1 - p)."""
    logits = torch.tensor(LOGITS[1:-1], requires_grad=True)
    labels = np.array(LABELS[1:-1])
    pf1_loss(logits, torch.tensor(labels)).backward()
    p = 1 / (1 + np.exp(-np.array(LOGITS[1:-1])))
    a, d = (p * labels).sum(), labels.sum() + p.sum()
    assert logits.grad.tolist() == pytest.approx(-2 * (labels * d - a) / d**2 * p * (1 - p), rel=1e-5)
    assert (
        np.sign(logits.grad.numpy()) == np.where(labels == 1, -1, 1)
    ).all()  # up with positives, down with negatives


@pytest.mark.parametrize("logits", [[0.0, 2.0, -3.0], [-300.0, -300.0, -300.0], [300.0, 300.0, 300.0]])
@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_pf1_of_a_batch_without_positives_is_1_and_teaches_nothing(logits, weight):
    logits = torch.tensor(logits, requires_grad=True)
    loss = pf1_loss(logits, torch.zeros(3), weight)
    loss.backward()
    assert loss.item() == 1.0 and (logits.grad == 0).all()


def test_pf1_of_a_batch_without_mass_is_1():
    """No score on a positive, nor elsewhere: the worst there is; and no NaN. A hopeless one of -15 still has a gradient."""
    assert pf1_loss(torch.full((4,), -300.0), torch.tensor([1, 0, 0, 1])).item() == 1.0
    logits = torch.tensor([-15.0, -15.0], requires_grad=True)
    pf1_loss(logits, torch.tensor([1, 0])).backward()
    assert logits.grad[0] < 0 and torch.isfinite(logits.grad).all()
    logits = torch.zeros(2, requires_grad=True)
    loss = pf1_loss(logits, torch.ones(2), 0.0)  # positives that count for nothing
    loss.backward()
    assert loss.item() == 1.0 and (logits.grad == 0).all()


# --- all of them


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_each_loss_works_in_float32_on_logits_of_any_type(name, dtype):  # T06
    """Under autocast too, and with the auxiliary ones; the gradient comes back in the type of the logits."""
    logits = torch.tensor([300.0, -300.0, 0.25, -1.5], dtype=dtype, requires_grad=True)
    labels = torch.tensor([0, 1, 1, 0])
    with torch.autocast("cpu", torch.bfloat16):
        loss = training_loss(
            {"cancer": logits}, {"cancer": labels}, loss=name, positive_target=0.9, positive_weight=2.0
        )
    assert loss.dtype == torch.float32
    by_name = {"bce": by_hand, "focal": focal_by_hand, "pf1": lambda z, y, target, weight: pf1_by_hand(z, y, weight)}
    assert loss.item() == pytest.approx(by_name[name](logits.tolist(), labels.tolist(), 0.9, 2.0), rel=1e-5)
    loss.backward()
    assert logits.grad.dtype == dtype and torch.isfinite(logits.grad).all() and logits.grad.abs().sum() > 0


@pytest.mark.parametrize("name", NAMES)
def test_no_loss_waits_for_the_device(name):
    """Tensors of the meta device have no values: whatever read one, or asked how many rows a mask has, would fail."""

    def empty(*shape):
        return torch.empty(shape, device="meta", requires_grad=True)

    outputs = {"cancer": empty(6), "biopsy": empty(6), "density": empty(6, 4)}
    targets = {label: torch.empty(6, device="meta") for label in outputs}
    with pytest.raises(RuntimeError):
        float(targets["cancer"].sum())  # so it is
    loss = training_loss(outputs, targets, loss=name, positive_target=0.9, positive_weight=2.0, aux_weight=0.1)
    loss.backward()
    assert loss.is_meta and outputs["density"].grad.shape == (6, 4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device to wait for")
@pytest.mark.parametrize("name", NAMES)
def test_no_loss_waits_for_a_gpu(name):
    outputs = {"cancer": torch.randn(6, device="cuda", requires_grad=True), "density": torch.randn(6, 4, device="cuda")}
    targets = {"cancer": (torch.arange(6) % 2).cuda(), "density": torch.tensor([0, NAN, 1, 2, 3, NAN]).cuda()}
    torch.cuda.set_sync_debug_mode("error")
    try:
        training_loss(outputs, targets, loss=name, aux_weight=0.1).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", NAMES)
def test_each_loss_refuses_shapes_that_would_broadcast(name):
    with pytest.raises(ValueError, match="size"):
        training_loss({"cancer": torch.zeros(4, 1)}, {"cancer": torch.zeros(4)}, loss=name)


@pytest.mark.parametrize("name", NAMES)
def test_each_loss_shows_a_logit_that_is_not_finite(name):
    """The loop stops at such a loss, or skips the step."""
    logits = torch.tensor([NAN, 1.0])
    assert training_loss({"cancer": logits}, {"cancer": torch.tensor([1.0, 0.0])}, loss=name).isnan()


def test_each_loss_gets_its_settings():
    z, y = torch.tensor(LOGITS), torch.tensor(LABELS)
    how = {"positive_target": 0.8, "positive_weight": 3.0, "focal_gamma": 1.5}
    found = {name: float(training_loss({"cancer": z}, {"cancer": y}, loss=name, **how)) for name in NAMES}
    expected = {
        "bce": by_hand(LOGITS, LABELS, 0.8, 3.0),
        "focal": focal_by_hand(LOGITS, LABELS, 0.8, 3.0, 1.5),
        "pf1": pf1_by_hand(LOGITS, LABELS, 3.0),
    }
    assert found == pytest.approx(expected, rel=1e-5)


def test_an_unknown_loss_is_refused():
    with pytest.raises(ValueError, match="loss 'dice': expected one of bce, focal, pf1"):
        training_loss({"cancer": torch.zeros(2)}, {"cancer": torch.zeros(2)}, loss="dice")


@pytest.mark.parametrize("name", NAMES)
def test_each_loss_can_be_learned_from(name):
    """Two heaps of points, one in eight positive, come apart."""
    generator = torch.Generator().manual_seed(0)
    labels = (torch.arange(64) % 8 == 0).float()
    x = torch.randn(64, 2, generator=generator) + 3 * labels[:, None]
    model = torch.nn.Linear(2, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(150):
        optimizer.zero_grad()
        loss = training_loss({"cancer": model(x).squeeze(1)}, {"cancer": labels}, loss=name)
        loss.backward()
        optimizer.step()
    right = ((model(x).squeeze(1) > 0) == (labels > 0.5)).float().mean()
    assert right >= 0.95
