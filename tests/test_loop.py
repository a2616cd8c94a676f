"""The loop, against loops written out here and against closed forms."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from rsnakit.loop import evaluate, train_one_epoch


class Linear(nn.Module):
    """The least model: a logit that is a weighted sum of the pixels."""

    def __init__(self, weight=0.0, pixels=4):
        super().__init__()
        self.weight = nn.Parameter(torch.full((pixels,), float(weight)))

    def forward(self, x):
        return {"cancer": (x.flatten(1) * self.weight).sum(1)}


class Wrapped(nn.Module):
    """Any network with one output as the kit's models are called."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return {"cancer": self.inner(x).squeeze(1)}


def cancer_alone(outputs, labels):
    return binary_cross_entropy_with_logits(outputs["cancer"], labels["cancer"])


def batches(n=24, size=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(n, 1, 2, 2, generator=generator)
    labels = (images.mean((1, 2, 3)) > 0.5).float()
    return [
        {"image": images[i : i + size], "cancer": labels[i : i + size], "item": torch.arange(i, min(n, i + size))}
        for i in range(0, n, size)
    ]


def parts(model, lr=0.5, **scaler):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    return optimizer, scheduler, torch.amp.GradScaler("cpu", **{"enabled": False, **scaler})


def test_an_epoch_equals_a_plain_loop():
    model, loader = Linear(0.1), batches()
    reference = copy.deepcopy(model)
    optimizer, scheduler, scaler = parts(model)
    found = train_one_epoch(model, loader, optimizer, scheduler, scaler, cancer_alone)

    weight, losses, scores = reference.weight.detach().clone(), [], []
    for step, batch in enumerate(loader):
        x, y = batch["image"].flatten(1), batch["cancer"]
        p = torch.sigmoid(x @ weight)
        losses.append(-(y * p.log() + (1 - y) * (1 - p).log()).mean())
        scores.append(p)
        weight = weight - 0.5 / (step + 1) * ((p - y) @ x) / len(y)  # gradient of the cross-entropy, by hand
    assert torch.allclose(model.weight, weight, atol=1e-6)
    assert found.loss == pytest.approx(float(torch.stack(losses).mean()), abs=1e-6)
    np.testing.assert_allclose(found.scores, torch.cat(scores).numpy(), atol=1e-6)
    assert found.items.tolist() == list(range(24))


@pytest.mark.parametrize("enabled", [False, True])
def test_clipping_sees_true_gradients(enabled):  # T01
    """A true gradient of 0.5 under a limit of 1 moves the weight by 0.5, scaled or not."""
    model = Linear(0.0, pixels=1)
    optimizer, scheduler, scaler = parts(model, lr=1.0, enabled=enabled, init_scale=65536.0)
    batch = [{"image": torch.ones(1, 1, 1, 1), "cancer": torch.ones(1), "item": torch.tensor([0])}]
    found = train_one_epoch(model, batch, optimizer, scheduler, scaler, cancer_alone, clip_norm=1.0)
    assert model.weight.item() == pytest.approx(0.5)  # sigmoid(0) - 1 = -0.5
    assert found.grad_norm == pytest.approx(0.5)


def test_gradients_over_the_limit_are_scaled_down_to_it():
    model = Linear(0.0, pixels=1)
    optimizer, scheduler, scaler = parts(model, lr=1.0)
    batch = [{"image": torch.full((1, 1, 1, 1), 40.0), "cancer": torch.ones(1), "item": torch.tensor([0])}]
    found = train_one_epoch(model, batch, optimizer, scheduler, scaler, cancer_alone, clip_norm=2.0)
    assert found.grad_norm == pytest.approx(20.0)
    assert model.weight.item() == pytest.approx(2.0, rel=1e-4)


def test_a_skipped_step_moves_neither_weights_nor_schedule(recwarn):  # T02
    """Three steps overflow: the learning rate is where two good steps bring it, and the skips are counted."""
    model, loader = Linear(0.1), batches(20)
    optimizer, scheduler, scaler = parts(model, enabled=True, init_scale=2.0)
    calls = []

    def loss_of(outputs, labels):
        calls.append(model.weight.detach().clone())
        loss = cancer_alone(outputs, labels)
        return loss * (math.inf if len(calls) <= 3 else 1.0)

    found = train_one_epoch(model, loader, optimizer, scheduler, scaler, loss_of)
    assert found.skipped == 3
    assert all(torch.equal(weight, calls[0]) for weight in calls[:4])
    assert not torch.equal(model.weight, calls[3])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 / 3)
    assert math.isfinite(found.loss)
    assert not [w for w in recwarn if "lr_scheduler.step()" in str(w.message)]


def test_an_epoch_in_which_every_step_overflows_stops_the_run():
    model = Linear(0.1)
    with pytest.raises(FloatingPointError, match="overflowed in all 6 steps"):
        train_one_epoch(model, batches(), *parts(model, enabled=True), lambda a, b: a["cancer"].sum() * math.inf)


def test_nan_stops_the_run_with_the_step_and_advice():
    model, loader = Linear(0.1), batches()
    loader[2]["image"][0] = math.nan
    with pytest.raises(FloatingPointError, match=r"nan at step 2.*Lower lr"):
        train_one_epoch(model, loader, *parts(model), cancer_alone)


def test_evaluation_scores_every_item_once_and_learns_nothing():
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    wrapped, loader = Wrapped(model), batches(10)
    before = copy.deepcopy(wrapped.state_dict())
    found = evaluate(wrapped, loader, cancer_alone)
    again = evaluate(wrapped, loader, cancer_alone)
    assert found.items.tolist() == list(range(10))
    np.testing.assert_array_equal(found.scores, again.scores)
    assert all(torch.equal(value, before[name]) for name, value in wrapped.state_dict().items())
    assert all(parameter.grad is None for parameter in wrapped.parameters())
    # The loss is over images, not over batches: the last one is shorter.
    labels = torch.cat([batch["cancer"] for batch in loader])
    scores = torch.from_numpy(found.scores).double()
    reference = torch.nn.functional.binary_cross_entropy(scores, labels.double())
    assert found.loss == pytest.approx(float(reference), abs=1e-5)


def test_training_after_evaluation_under_autocast_has_gradients():  # T07
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 1))
    wrapped, loader = Wrapped(model), batches(8)

    def loss(outputs, labels):
        return binary_cross_entropy_with_logits(outputs["cancer"].float(), labels["cancer"])

    with torch.autocast("cpu", torch.bfloat16):
        evaluate(wrapped, loader, loss, precision="bf16")
        train_one_epoch(wrapped, loader, *parts(wrapped), loss, precision="bf16")
    assert all(parameter.grad is not None for parameter in wrapped.parameters())


class Views(nn.Module):
    """A logit that is a weighted sum of the pixels of the views that count, and an auxiliary one of three classes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.1))
        self.kinds = nn.Parameter(torch.zeros(2))
        self.classes = nn.Parameter(torch.full((4, 3), 0.2))

    def forward(self, x, view_mask, view_id):
        pixels = x.flatten(2) * view_mask[..., None]  # (B, V, 4)
        logits = (pixels * self.weight).sum((1, 2)) + (self.kinds[view_id] * view_mask).sum(1)
        return {"cancer": logits, "birads": pixels.sum(1) @ self.classes}


def breasts(n=8, size=4):
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(n, 3, generator=generator) > 0.4
    whole = {
        "image": torch.rand(n, 3, 1, 2, 2, generator=generator),
        "view_mask": mask | ~mask.any(1, keepdim=True),
        "view_id": torch.randint(0, 2, (n, 3), generator=generator),
        "cancer": torch.arange(n) % 2.0,
        "birads": torch.tensor([0, 1, 2, math.nan] * (n // 4)),
        "item": torch.arange(n),
    }
    return [{name: value[i : i + size] for name, value in whole.items()} for i in range(0, n, size)]


def test_breasts_and_auxiliary_labels_reach_model_and_loss():
    """An epoch of one step each equals the gradient written out; what is evaluated is the cancer logit."""
    model, loader = Views(), breasts()
    reference = copy.deepcopy(model)

    def loss_of(outputs, labels):
        assert set(outputs) == {"cancer", "birads"} and set(labels) == {"cancer", "birads"}
        known = ~labels["birads"].isnan()
        extra = cross_entropy(outputs["birads"][known], labels["birads"][known].long())
        return cancer_alone(outputs, labels) + 0.5 * extra

    found = train_one_epoch(model, loader, *parts(model), loss_of)
    optimizer, scheduler, _ = parts(reference)
    for batch in loader:
        outputs = reference(batch["image"], batch["view_mask"], batch["view_id"])
        optimizer.zero_grad()
        loss_of(outputs, {name: batch[name] for name in ("cancer", "birads")}).backward()
        optimizer.step()
        scheduler.step()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter, dict(reference.named_parameters())[name]), name
        assert not torch.equal(parameter, dict(Views().named_parameters())[name]), name
    assert found.items.tolist() == list(range(8)) and found.scores.shape == (8,)

    scored = evaluate(model, [{k: v for k, v in batch.items() if k != "birads"} for batch in loader], cancer_alone)
    logits = torch.cat([model(b["image"], b["view_mask"], b["view_id"])["cancer"] for b in loader])
    np.testing.assert_allclose(scored.scores, logits.detach().sigmoid().numpy(), atol=1e-6)


def test_an_auxiliary_logit_that_is_not_finite_stops_the_run():
    model, loader = Views(), breasts()
    nn.init.constant_(model.classes, math.inf)
    from rsnakit.losses import training_loss

    with pytest.raises(FloatingPointError, match="nan at step 0"):
        train_one_epoch(model, loader, *parts(model), lambda a, b: training_loss(a, b, aux_weight=0.1))
