"""The loop, against loops written out here and against closed forms."""

import contextlib
import copy
import io
import math
from unittest import mock

import numpy as np
import pytest
import torch
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import nn
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits, cross_entropy

from rsnakit import distributed, loop, losses, metrics, progress, recipe
from rsnakit.loop import MAX_SKIPS, Stopped, evaluate, train_one_epoch
from rsnakit.tally import Tally

LONG = 20  # steps of the schedule


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


def batches(n=24, size=4, seed=0, mean=0.5):
    """Batches of `size`, or of as many as a list says."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(n, 1, 2, 2, generator=generator)
    labels = (images.mean((1, 2, 3)) > 0.5).float()
    sizes = size if isinstance(size, list) else [min(size, n - i) for i in range(0, n, size)]
    parts = zip((images + mean - 0.5).split(sizes), labels.split(sizes), torch.arange(n).split(sizes), strict=True)
    return [dict(zip(("image", "cancer", "item"), part, strict=True)) for part in parts]


def parts(model, lr=0.5, **scaler):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    scheduler = CosineLRScheduler(optimizer, t_initial=LONG, t_in_epochs=False)
    return optimizer, scheduler, torch.amp.GradScaler("cpu", **{"enabled": False, **scaler})


def rate(taken, lr=0.5):
    """What the schedule of `parts` gives after so many steps."""
    return lr * (1 + math.cos(math.pi * taken / LONG)) / 2


def gradient(weight, images, labels):
    """Of the mean cross-entropy of `Linear`, by hand; and what it scores."""
    x = images.flatten(1)
    p = torch.sigmoid(x @ weight)
    return ((p - labels) @ x) / len(labels), p


def test_an_epoch_equals_a_plain_loop():
    model, loader = Linear(0.1), batches()
    weight, losses_seen, scores = model.weight.detach().clone(), [], []
    found = train_one_epoch(model, loader, *parts(model), cancer_alone)

    for step, batch in enumerate(loader):
        slope, p = gradient(weight, batch["image"], batch["cancer"])
        losses_seen.append(binary_cross_entropy(p, batch["cancer"]))
        scores.append(p)
        weight = weight - rate(step) * slope
    assert torch.allclose(model.weight, weight, atol=1e-6)
    assert found.loss == pytest.approx(float(torch.stack(losses_seen).mean()), abs=1e-6)
    np.testing.assert_allclose(found.scores, torch.cat(scores).numpy(), atol=1e-6)
    assert found.items.tolist() == list(range(24))
    assert model.training


# Accumulation

UNEVEN = [4, 4, 4, 3, 3, 3, 3, 3, 3, 2]


def in_steps(sizes, accumulate):
    return [sizes[i : i + accumulate] for i in range(0, len(sizes), accumulate)]


@pytest.mark.parametrize("sizes", [[3] * 10, UNEVEN], ids=["even", "uneven"])
def test_a_step_of_several_batches_is_one_of_all_their_images(sizes):  # T04
    """Ten batches, four to a step: three steps, the last one of two batches; each is that of one large batch."""
    model, loader = Linear(0.1), batches(sum(sizes), sizes)
    weight, norms = model.weight.detach().clone(), []
    optimizer, scheduler, scaler = parts(model)
    with mock.patch.object(scheduler, "step_update", wraps=scheduler.step_update) as moved:
        found = train_one_epoch(
            model, loader, optimizer, scheduler, scaler, cancer_alone, steps=in_steps(sizes, 4), updates=5
        )

    for step, window in enumerate([loader[:4], loader[4:8], loader[8:]]):
        images, labels = (torch.cat([batch[name] for batch in window]) for name in ("image", "cancer"))
        slope, _ = gradient(weight, images, labels)
        norms.append(float(slope.norm()))
        weight = weight - (0.5 if step == 0 else rate(5 + step)) * slope
    assert torch.allclose(model.weight, weight, atol=1e-6)
    assert [call.args for call in moved.call_args_list] == [(6,), (7,), (8,)]
    assert found.items.tolist() == list(range(sum(sizes)))
    assert found.grad_norm == pytest.approx(np.mean(norms), rel=1e-5)


def test_the_loss_of_an_epoch_is_over_images_whatever_their_batches():
    model, loader = Linear(0.3), batches(32, UNEVEN)
    found = train_one_epoch(model, loader, *parts(model, lr=0.0), cancer_alone, steps=in_steps(UNEVEN, 4))
    _, p = gradient(torch.full((4,), 0.3), *(torch.cat([b[name] for b in loader]) for name in ("image", "cancer")))
    assert found.loss == pytest.approx(
        float(binary_cross_entropy(p, torch.cat([b["cancer"] for b in loader]))), abs=1e-6
    )


def test_gradients_of_two_processors_average_to_those_of_one(monkeypatch):
    """Each processor has every second batch; DistributedDataParallel takes the mean of their gradients."""
    sizes = [4, 3, 3, 2]
    loader = batches(sum(sizes), sizes)

    def step_taken(part):
        model = Linear(0.1)
        train_one_epoch(model, part, *parts(model), cancer_alone, steps=[sizes], clip_norm=0.0)
        return model.weight.detach() - 0.1

    alone = step_taken(loader)
    monkeypatch.setattr(distributed, "world", lambda: 2)
    monkeypatch.setattr(distributed, "gather", lambda value: [value])
    shares = []
    for rank in range(2):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        shares.append(step_taken(loader[rank::2]))
    assert torch.allclose((shares[0] + shares[1]) / 2, alone, atol=1e-7)
    assert not torch.allclose(shares[0], alone, atol=1e-3)


def test_a_step_of_fewer_batches_than_processors_share_loses_none(monkeypatch):
    """A tiny epoch is one step of three batches: the first of two processors has two of them."""
    loader = batches(6, 2)
    monkeypatch.setattr(distributed, "world", lambda: 2)
    monkeypatch.setattr(distributed, "gather", lambda value: [value])
    for rank, expected in enumerate(([0, 1, 4, 5], [2, 3])):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        model = Linear(0.1)
        found = train_one_epoch(model, loader[rank::2], *parts(model), cancer_alone, steps=[[2, 2, 2]])
        assert found.items.tolist() == expected


@pytest.mark.parametrize("given", [0, 3, 4])
def test_a_loader_that_gives_fewer_batches_than_the_steps_need_is_refused(given):
    model = Linear(0.1)
    with pytest.raises(ValueError, match=r"loader has \d batches, and the steps 6"):
        train_one_epoch(model, batches(4 * 6)[:given], *parts(model), cancer_alone, steps=[[4, 4]] * 3)


def test_gradients_are_exchanged_in_the_last_batch_of_a_step_only(monkeypatch):
    inside = []

    @contextlib.contextmanager
    def no_sync(model):
        inside.append(True)
        yield
        inside.append(False)

    held = []
    monkeypatch.setattr(distributed, "no_sync", no_sync)
    model = Linear(0.1)

    def loss_of(outputs, labels):
        held.append(bool(inside and inside[-1]))
        return cancer_alone(outputs, labels)

    train_one_epoch(model, batches(12, 2), *parts(model), loss_of, steps=[[2, 2, 2], [2, 2], [2]])
    assert held == [True, True, False, True, False, False]


# Clipping, scaling and skipped steps


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_clipping_sees_true_gradients(enabled, accumulate):  # T01
    """A true gradient of 0.5 under a limit of 1 moves the weight by 0.5, scaled or not."""
    model = Linear(0.0, pixels=1)
    optimizer, scheduler, scaler = parts(model, lr=1.0, enabled=enabled, init_scale=65536.0)
    batch = {"image": torch.ones(1, 1, 1, 1), "cancer": torch.ones(1), "item": torch.tensor([0])}
    found = train_one_epoch(
        model, [batch] * accumulate, optimizer, scheduler, scaler, cancer_alone, clip_norm=1.0, steps=[[1] * accumulate]
    )
    assert model.weight.item() == pytest.approx(0.5)  # sigmoid(0) - 1 = -0.5
    assert found.grad_norm == pytest.approx(0.5)


def test_gradients_over_the_limit_are_scaled_down_to_it():
    model = Linear(0.0, pixels=1)
    batch = [{"image": torch.full((1, 1, 1, 1), 40.0), "cancer": torch.ones(1), "item": torch.tensor([0])}]
    found = train_one_epoch(model, batch, *parts(model, lr=1.0), cancer_alone, clip_norm=2.0)
    assert found.grad_norm == pytest.approx(20.0)
    assert model.weight.item() == pytest.approx(2.0, rel=1e-4)


def test_without_a_limit_the_gradient_is_taken_whole_and_its_norm_still_told():
    model = Linear(0.0, pixels=1)
    batch = [{"image": torch.full((1, 1, 1, 1), 4000.0), "cancer": torch.ones(1), "item": torch.tensor([0])}]
    found = train_one_epoch(model, batch, *parts(model, lr=1.0), cancer_alone, clip_norm=0.0)
    assert found.grad_norm == pytest.approx(2000.0) and model.weight.item() == pytest.approx(2000.0)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_skipped_step_moves_neither_weights_nor_schedule_nor_average(accumulate, recwarn):  # T02
    """The first three steps overflow in their last batch: the rate is where the good steps bring it, and skips are counted."""
    model, loader = Linear(0.1), batches(20 * accumulate)
    optimizer, scheduler, scaler = parts(model, enabled=True, init_scale=2.0)
    ema = ModelEmaV3(model, decay=0.5)
    calls, averages, bad = [], [], [accumulate * (step + 1) for step in range(3)]

    def loss_of(outputs, labels):
        calls.append(model.weight.detach().clone())
        return cancer_alone(outputs, labels) * (math.inf if len(calls) in bad else 1.0)

    with mock.patch.object(ema, "update", wraps=ema.update) as averaged:
        found = train_one_epoch(
            model, loader, optimizer, scheduler, scaler, loss_of, steps=[[4] * accumulate] * 5, ema=ema, updates=7,
            after_step=lambda: averages.append(ema.module.weight.clone()),
        )  # fmt: skip
    assert found.skipped == 3
    assert all(torch.equal(weight, calls[0]) for weight in calls[: 3 * accumulate + 1])
    assert not torch.equal(model.weight, calls[3 * accumulate])
    assert all(torch.equal(average, calls[0]) for average in averages[:3]) and not torch.equal(averages[3], calls[0])
    assert [call.kwargs["step"] for call in averaged.call_args_list] == [8, 9]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate(9))
    assert scaler.get_scale() == 2.0 / 2**3
    assert math.isfinite(found.loss) and math.isfinite(found.grad_norm)
    assert not [w for w in recwarn if "lr_scheduler.step()" in str(w.message)]


def all_overflow(outputs, labels):
    return outputs["cancer"].sum() * math.inf


def test_many_skipped_steps_in_a_row_stop_the_run_with_advice():
    model = Linear(0.1)
    with pytest.raises(FloatingPointError, match=rf"overflowed in {MAX_SKIPS} steps.*bf16.*lower lr"):
        train_one_epoch(model, batches(4 * MAX_SKIPS), *parts(model, enabled=True), all_overflow)


def test_skipped_steps_in_a_row_are_counted_on_over_epochs():
    model, tally = Linear(0.1), Tally(MAX_SKIPS - 2)
    with pytest.raises(FloatingPointError, match=f"overflowed in {MAX_SKIPS} steps"):
        train_one_epoch(model, batches(8), *parts(model, enabled=True), all_overflow, tally=tally)
    assert (tally.skipped, tally.in_a_row) == (2, MAX_SKIPS)
    fine = Tally(MAX_SKIPS - 1)  # a step that is taken ends the row
    train_one_epoch(model, batches(8), *parts(model, enabled=True), cancer_alone, tally=fine)
    assert (fine.skipped, fine.in_a_row) == (0, 0)


# What is read from the device


class Quiet(progress.Bar):
    """A bar that is never drawn: between two drawings the loop has to read nothing."""

    due = False

    def __init__(self, *_):
        self._painter, self.n, self._values = progress._Nothing(), 0, {}

    def update(self, n=1):
        pass


READINGS = ("item", "cpu", "tolist", "numpy", "__float__", "__bool__", "__int__", "__index__", "__array__")


@pytest.fixture
def readings(monkeypatch):
    """Names of the tensor methods called so far that give a value to Python."""
    monkeypatch.setattr(progress, "bar", Quiet)
    seen = []

    def watched(name, original):
        def method(self, *args, **kwargs):
            seen.append(name)
            return original(self, *args, **kwargs)

        return method

    for name in READINGS:
        monkeypatch.setattr(torch.Tensor, name, watched(name, getattr(torch.Tensor, name)))
    return seen


@pytest.mark.parametrize(("precision", "each"), [("fp32", 0), ("bf16", 0), ("fp16", 1)])
def test_a_step_reads_nothing_from_the_device_but_the_overflow_flag(precision, each, readings):
    """On the CPU every reading is a call that can be counted; test_sync.py asks a GPU itself."""
    model = Wrapped(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    ema, seen = recipe.make_ema(model, recipe.TrainConfig(ema_decay=0.9)), []
    train_one_epoch(
        model, batches(48), *parts(model, enabled=precision == "fp16"), losses.training_loss, steps=[[4, 4]] * 6,
        precision=precision, ema=ema, after_step=lambda: seen.append(list(readings)),
    )  # fmt: skip
    assert seen == [["item"] * each * (step + 1) for step in range(6)]
    assert len(readings) > len(seen[-1])  # at the end all is read, so the watch was on


def test_a_step_runs_where_there_is_nothing_to_read(monkeypatch):
    """On torch's meta device tensors have no values, so whatever asks for one fails, of any method."""
    monkeypatch.setattr(progress, "bar", Quiet)
    monkeypatch.setattr(loop, "autocast", lambda *_: contextlib.nullcontext())
    model = Wrapped(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 1))).to("meta")
    config, taken = recipe.TrainConfig(), []
    optimizer = recipe.make_optimizer(model, config)

    def after_step():
        taken.append(True)
        if len(taken) == 3:
            raise Stopped

    loss_of = recipe.make_loss(config)
    common = optimizer, recipe.make_scheduler(optimizer, config, 6), torch.amp.GradScaler("cpu", enabled=False)
    with pytest.raises(Stopped):
        train_one_epoch(
            model, batches(), *common, loss_of, device="meta", mix=lambda images: 0.3,
            after_step=after_step,
        )  # fmt: skip
    with pytest.raises((NotImplementedError, RuntimeError)):
        train_one_epoch(
            model, batches(), *common, lambda a, b: loss_of(a, b) * float(a["cancer"].detach().sum()), device="meta"
        )


def test_values_are_read_where_the_bar_is_drawn(monkeypatch):
    """A bar that is always due shows what the epoch had so far: loss, norm, rate, and scores once there are both kinds."""
    shown = []

    class Eager(Quiet):
        due = True

        def show(self, **values):
            shown.append(values)

    monkeypatch.setattr(progress, "bar", Eager)
    model, loader = Linear(0.1), batches()
    found = train_one_epoch(model, loader, *parts(model), cancer_alone)
    assert len(shown) == 6
    assert [values["lr"] for values in shown] == pytest.approx([rate(step + 1) for step in range(6)])
    assert shown[-1]["loss"] == pytest.approx(found.loss)
    labels = np.concatenate([batch["cancer"].numpy() for batch in loader])
    assert shown[-1]["pF1"] == pytest.approx(metrics.pfbeta(labels, found.scores))
    assert shown[-1]["AUC"] == pytest.approx(metrics.auc(labels, found.scores))


# The average of the weights


def test_the_average_follows_batch_statistics_and_survives_a_save():  # T11
    """On data with mean 5: an average whose statistics stayed at 0 would score like noise."""
    torch.manual_seed(0)
    model = Wrapped(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    loader, config = batches(200, mean=5.0), recipe.TrainConfig(ema_decay=0.9)
    ema, means = recipe.make_ema(model, config), []
    train_one_epoch(
        model, loader, *parts(model), cancer_alone, ema=ema,
        after_step=lambda: means.append(model.inner[1].running_mean.clone()),
    )  # fmt: skip

    # timm's warm-up: after t steps the share of the old is 1 - t^(-2/3), up to the decay, and none at the first.
    expected = means[0]
    for step, mean in enumerate(means[1:], start=2):
        kept = min(0.9, 1 - step ** (-2 / 3))
        expected = kept * expected + (1 - kept) * mean
    norm = ema.module.inner[1]
    assert torch.allclose(norm.running_mean, expected, atol=1e-4)
    assert float(norm.running_mean.min()) > 4
    assert int(norm.num_batches_tracked) == int(model.inner[1].num_batches_tracked) == 50
    assert norm.num_batches_tracked.dtype == torch.int64

    raw, averaged = (evaluate(each, loader, cancer_alone) for each in (model, ema.module))
    labels = np.concatenate([batch["cancer"].numpy() for batch in loader])
    assert metrics.auc(labels, averaged.scores) > 0.9 and averaged.loss == pytest.approx(raw.loss, abs=0.2)
    assert not np.array_equal(raw.scores, averaged.scores)

    other = recipe.make_ema(Wrapped(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 1))), config)
    other.module.load_state_dict(through_a_file(ema.module.state_dict()))
    np.testing.assert_array_equal(evaluate(other.module, loader, cancer_alone).scores, averaged.scores)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


# Stopped, and gone on


class Training:
    """What an epoch needs, made the same each time: batch statistics, dropout, an optimiser with a memory, an average."""

    def __init__(self, scaled):
        torch.manual_seed(3)
        net = nn.Sequential(
            nn.Flatten(), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 1)
        )
        config = recipe.TrainConfig(ema_decay=0.9, lr=0.05)
        self.model, self.tally, self.calls = Wrapped(net), Tally(), 0
        self.optimizer = recipe.make_optimizer(self.model, config)
        self.scheduler = recipe.make_scheduler(self.optimizer, config, 30)
        self.scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=4.0, growth_interval=3)
        self.ema = recipe.make_ema(self.model, config)

    @property
    def done(self):
        return self.tally.taken + self.tally.skipped

    def state(self):
        self.tally.read(self.scaler.is_enabled())
        objects = {"model": self.model, "ema": self.ema.module, "optimizer": self.optimizer, "scaler": self.scaler}
        states = {name: each.state_dict() for name, each in objects.items()}
        return through_a_file({**states, "tally": self.tally.state(), "random": torch.get_rng_state()})

    def load(self, state):
        self.model.load_state_dict(state["model"])
        self.ema.module.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        self.tally.load_state(state["tally"])
        self.scheduler.step_update(7 + self.tally.taken)
        torch.set_rng_state(state["random"])

    def run(self, after_step=None):
        steps = in_steps(UNEVEN * 2, 2)
        loader = batches(64, UNEVEN * 2)[2 * self.done :]

        def loss_of(outputs, labels):
            # Two batches overflow where there is a scaler: one before the break and one after it.
            overflows = self.scaler.is_enabled() and float(labels["cancer"].sum()) in bad
            return cancer_alone(outputs, labels) * (math.inf if overflows else 1.0)

        every = [float(batch["cancer"].sum()) for batch in batches(64, UNEVEN * 2)]
        bad = {max(every)}
        return train_one_epoch(
            self.model, loader, self.optimizer, self.scheduler, self.scaler, loss_of, steps=steps[self.done :],
            ema=self.ema, updates=7, tally=self.tally, after_step=after_step,
        )  # fmt: skip


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("stop", [1, 4, 10])
def test_an_epoch_that_was_stopped_goes_on_bit_for_bit(stop, scaled):
    whole = Training(scaled)
    torch.manual_seed(11)
    expected = whole.run()
    assert bool(expected.skipped) == scaled and expected.skipped < 10

    broken, saved = Training(scaled), []
    torch.manual_seed(11)

    def after_step():
        if broken.done == stop:
            saved.append(broken.state())
            raise Stopped

    with pytest.raises(Stopped):
        broken.run(after_step)
    on = Training(scaled)
    torch.manual_seed(99)
    on.load(saved[0])
    found = on.run()
    np.testing.assert_array_equal(found.items, expected.items)
    np.testing.assert_array_equal(found.scores, expected.scores)
    assert (found.loss, found.grad_norm, found.skipped) == (expected.loss, expected.grad_norm, expected.skipped)
    for name in ("model", "ema"):
        ours, theirs = on.state()[name], whole.state()[name]
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs), name
    assert on.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]


def test_an_exception_leaves_the_optimiser_as_it_was():
    """No hook stays behind: an epoch after a stopped one counts its steps once."""
    model = Linear(0.1)
    made = parts(model)

    def stop():
        raise Stopped

    with pytest.raises(Stopped):
        train_one_epoch(model, batches(), *made, cancer_alone, after_step=stop)
    assert not made[0]._optimizer_step_post_hooks


# Losses that are not finite


def test_nan_stops_the_run_with_the_batch_and_advice():
    model, loader = Linear(0.1), batches()
    loader[2]["image"][0] = math.nan
    with pytest.raises(FloatingPointError, match=r"loss is nan in batch 3 of this epoch.*Lower lr"):
        train_one_epoch(model, loader, *parts(model), cancer_alone)


def test_nan_stops_the_run_before_it_is_saved():
    """Whoever saves reads the tally first, as it is a part of what is saved."""
    model, loader, tally, saved = Linear(0.1), batches(32), Tally(), []
    loader[5]["image"][0] = math.nan

    def save():
        tally.read()
        saved.append(model.weight.detach().clone())

    with pytest.raises(FloatingPointError, match="loss is nan in batch 6 of this epoch"):
        train_one_epoch(model, loader, *parts(model), cancer_alone, steps=[[4, 4]] * 4, tally=tally, after_step=save)
    assert len(saved) == 2 and all(weight.isfinite().all() for weight in saved)


def test_gradients_that_are_not_finite_under_a_finite_loss_stop_the_run():
    model = Linear(0.1)

    def loss_of(outputs, labels):
        return cancer_alone(outputs, labels) + (outputs["cancer"] - outputs["cancer"].detach()).sqrt().mean()

    with pytest.raises(FloatingPointError, match=r"gradients' norm is (inf|nan)"):
        train_one_epoch(model, batches(4), *parts(model), loss_of)


def test_a_loader_that_gives_nothing_is_refused():
    model = Linear(0.1)
    with pytest.raises(ValueError, match="nothing to train on"):
        train_one_epoch(model, [], *parts(model), cancer_alone)


# Mixing and precision


def test_mixed_images_are_learnt_by_both_labels_in_their_shares():
    """lam of the loss by a batch's labels, 1 - lam of that by the reversed ones; with an odd image that keeps its own."""
    model, loader, lam = Linear(0.1), batches(21, 7), 0.3
    for batch in loader:
        batch["cancer"] = torch.tensor([1.0, 1, 0, 1, 0, 0, 1])
    weight, expected = model.weight.detach().clone(), []

    def mix(images):
        images[: len(images) // 2] *= 0.5
        return lam

    given = copy.deepcopy(loader)
    found = train_one_epoch(model, given, *parts(model), cancer_alone, mix=mix)
    assert all(torch.equal(a["image"], b["image"]) for a, b in zip(given, loader, strict=True))  # for the next epoch
    for step, batch in enumerate(loader):
        images, labels = batch["image"].clone(), batch["cancer"]
        images[:3] *= 0.5
        others = torch.cat([labels[:6].flip(0), labels[6:]])
        assert not torch.equal(labels, others)
        slope, p = gradient(weight, images, lam * labels + (1 - lam) * others)  # the loss is linear in the label
        expected.append(lam * binary_cross_entropy(p, labels) + (1 - lam) * binary_cross_entropy(p, others))
        weight = weight - rate(step) * slope
    assert torch.allclose(model.weight, weight, atol=1e-6)
    assert found.loss == pytest.approx(float(torch.stack(expected).mean()), abs=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_forward_is_in_the_precision_asked_for_and_the_loss_in_float32(precision):
    model, seen = Wrapped(nn.Sequential(nn.Flatten(), nn.Linear(4, 1))), []

    def loss_of(outputs, labels):
        loss = losses.training_loss(outputs, labels)
        seen.append((outputs["cancer"].dtype, loss.dtype, torch.is_autocast_enabled("cpu")))
        return loss

    before, loader = copy.deepcopy(model), batches(8)
    scaler = {"enabled": precision == "fp16", "init_scale": 1024.0}
    found = train_one_epoch(model, loader, *parts(model, lr=0.1, **scaler), loss_of, precision=precision)
    assert seen == [(loop.DTYPES[precision], torch.float32, False)] * 2
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    train_one_epoch(before, loader, *parts(before, lr=0.1), losses.training_loss)
    assert torch.allclose(model.inner[1].weight, before.inner[1].weight, atol=5e-3)
    assert found.scores.dtype == np.float32


# Evaluation


def test_evaluation_scores_every_item_once_and_learns_nothing():
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    wrapped, loader, seen = Wrapped(model), batches(10), []
    before = copy.deepcopy(wrapped.state_dict())
    found = evaluate(wrapped, loader, cancer_alone, after_batch=lambda: seen.append(True))
    again = evaluate(wrapped, loader, cancer_alone)
    assert found.items.tolist() == list(range(10)) and len(seen) == 3
    np.testing.assert_array_equal(found.scores, again.scores)
    assert all(torch.equal(value, before[name]) for name, value in wrapped.state_dict().items())
    assert all(parameter.grad is None for parameter in wrapped.parameters())
    # The loss is over images, not over batches: the last one is shorter.
    labels = torch.cat([batch["cancer"] for batch in loader])
    reference = binary_cross_entropy(torch.from_numpy(found.scores).double(), labels.double())
    assert found.loss == pytest.approx(float(reference), abs=1e-5)


def test_training_after_evaluation_under_autocast_has_gradients():  # T07
    """The model and its average are evaluated within autocast, then trained in it."""
    wrapped, loader, cached = Wrapped(nn.Sequential(nn.Flatten(), nn.Linear(4, 1))), batches(8), []
    wrapped.inner.register_forward_hook(lambda *_: cached.append(torch.is_autocast_cache_enabled()))
    ema = ModelEmaV3(wrapped)
    with torch.autocast("cpu", torch.bfloat16):
        for model in (wrapped, ema.module):
            evaluate(model, loader, losses.training_loss, precision="bf16")
        assert cached == [False] * 4  # torch 2.14 would forgive it, older ones hand the cast weights on
        train_one_epoch(wrapped, loader, *parts(wrapped), losses.training_loss, precision="bf16", ema=ema)
    assert all(parameter.grad is not None for parameter in wrapped.parameters())
    assert all(parameter.grad.abs().sum() > 0 for parameter in wrapped.parameters())


# Breasts and auxiliary heads


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
    for step, batch in enumerate(loader, start=1):
        outputs = reference(batch["image"], batch["view_mask"], batch["view_id"])
        optimizer.zero_grad()
        loss_of(outputs, {name: batch[name] for name in ("cancer", "birads")}).backward()
        optimizer.step()
        scheduler.step_update(step)
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
    with pytest.raises(FloatingPointError, match="loss is nan in batch 1"):
        train_one_epoch(model, loader, *parts(model), lambda a, b: losses.training_loss(a, b, aux_weight=0.1))


def test_batches_and_models_of_another_kind_are_named():
    model, plain = Linear(0.1), batches()
    for loader, said in (
        ([{"image": plain[0]["image"], "cancer": plain[0]["cancer"]}], "image, cancer$"),
        ([(plain[0]["image"], plain[0]["cancer"])], "a tuple$"),
    ):
        with pytest.raises(ValueError, match=rf"a batch is a dict of tensors with cancer, image, item, .*not .*{said}"):
            train_one_epoch(model, loader, *parts(model), cancer_alone)
        with pytest.raises(ValueError, match="a batch is a dict"):
            evaluate(model, loader, cancer_alone)
    bare = nn.Sequential(nn.Flatten(), nn.Linear(4, 1))
    with pytest.raises(ValueError, match=r"a model gives a dict of logits, .*not a Tensor"):
        train_one_epoch(bare, plain, *parts(bare), cancer_alone)


def test_steps_of_another_loader_are_refused():
    """More batches than the steps have would be left out in silence; other sizes would make other gradients."""
    model, loader = Linear(0.1), batches(24, 4)
    with pytest.raises(ValueError, match="loader has 6 batches, and the steps 2"):
        train_one_epoch(model, loader, *parts(model), cancer_alone, steps=[[4], [4]])
    with pytest.raises(ValueError, match="gave a batch of 4, and the step has one of 400"):
        train_one_epoch(model, loader, *parts(model), cancer_alone, steps=[[400, 1]] * 3)
    with pytest.raises(ValueError, match="gave a batch of 0, and the step has one of 4"):
        train_one_epoch(model, iter(loader[:2]), *parts(model), cancer_alone, steps=[[4]] * 3)
