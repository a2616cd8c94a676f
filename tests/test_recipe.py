"""What a training is built from: optimiser, schedule and average, against timm itself and closed forms."""

import copy
import io
import math

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from torch import nn

from rsnakit import models
from rsnakit.losses import training_loss
from rsnakit.models import ModelConfig
from rsnakit.recipe import LoopConfig, TrainConfig, make_ema, make_loss, make_optimizer, make_scheduler

FAMILIES = {
    "test_resnet": "conv1", "test_convnext": "stem", "test_efficientnet": "conv_stem", "test_vit": "patch_embed",
    "poolformerv2_s12": "stem",  # of those to which timm gives no layers: they are counted by twelve parameters
}  # fmt: skip


def network(backbone="test_resnet", **settings):
    return models.build_model(ModelConfig(backbone=backbone, weights="none", **settings))


def of_group(model, optimizer, value) -> dict[str, float]:
    """A value of the group that each of the model's parameters is in, by name."""
    values = {id(p): value(group) for group in optimizer.param_groups for p in group["params"]}
    assert len(values) == sum(len(group["params"]) for group in optimizer.param_groups)  # none is in two groups
    return {name: values[id(p)] for name, p in model.named_parameters() if id(p) in values}


def rates(model, optimizer):
    return of_group(model, optimizer, lambda group: group["lr"])


# ---- the optimiser


@pytest.mark.parametrize(("backbone", "stem"), FAMILIES.items())
def test_layer_decay_is_timms_and_heads_learn_at_the_full_rate(backbone, stem):
    """As timm's own model of that name has it with its own classifier."""
    config = TrainConfig(lr=0.1, layer_decay=0.8)
    ours = network(backbone, pooling="attention", aux=("biopsy",))
    optimizer = make_optimizer(ours, config)
    make_scheduler(optimizer, TrainConfig(lr=0.1, layer_decay=0.8, warmup=0.0), 10)
    found = rates(ours, optimizer)
    theirs = timm.create_model(backbone, in_chans=1, num_classes=1)
    theirs_optimizer = create_optimizer_v2(theirs, opt="adamw", lr=0.1, weight_decay=0.02, layer_decay=0.8)
    scales = of_group(theirs, theirs_optimizer, lambda group: group["lr_scale"])
    assert set(found) == {name for name, _ in ours.named_parameters()}
    inside = {name.removeprefix("backbone."): rate for name, rate in found.items() if name.startswith("backbone.")}
    assert inside == pytest.approx({name: 0.1 * scales[name] for name in inside})
    assert {rate for name, rate in found.items() if not name.startswith("backbone.")} == {0.1}
    least = min(found.values())
    assert least < 0.1 and least in {rate for name, rate in inside.items() if name.startswith(stem)}
    assert rates(ours, make_optimizer(ours, TrainConfig(lr=0.1))) == dict.fromkeys(found, 0.1)  # off


@pytest.mark.parametrize("layer_decay", [1.0, 0.8])
@pytest.mark.parametrize("backbone", ["test_resnet", "test_convnext", "test_vit"])
def test_norms_biases_and_positions_are_not_decayed(backbone, layer_decay):
    model = network(backbone)
    optimizer = make_optimizer(model, TrainConfig(weight_decay=0.3, layer_decay=layer_decay))
    decays = of_group(model, optimizer, lambda group: group["weight_decay"])
    kept = {f"backbone.{name}" for name in getattr(model.backbone, "no_weight_decay", set)()}
    if backbone == "test_vit":
        assert "backbone.pos_embed" in kept
    for name, parameter in model.named_parameters():
        assert decays[name] == (0.0 if parameter.ndim <= 1 or name in kept else 0.3), name


def test_frozen_weights_are_left_out():
    model = network(aux=("biopsy",))
    model.aux_heads.requires_grad_(False)
    found = rates(model, make_optimizer(model, TrainConfig(layer_decay=0.9)))
    assert (
        set(found)
        == {name for name, p in model.named_parameters() if p.requires_grad}
        < set(dict(model.named_parameters()))
    )


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw", "lamb", "lion", "nadamw", "adafactor"])
def test_two_steps_are_those_of_timms_optimiser(name, fused):
    """Fused only where torch has it; elsewhere the same optimiser without."""
    torch.manual_seed(0)
    # Before a batch norm a bias has no gradient but rounding's, which Adam would blow up to whole steps.
    ours = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 1))
    theirs = copy.deepcopy(ours)
    config = TrainConfig(optimizer=name, lr=0.05, weight_decay=0.1)
    pairs = [(ours, make_optimizer(ours, config, fused)),
             (theirs, create_optimizer_v2(theirs, opt=name, lr=0.05, weight_decay=0.1))]  # fmt: skip
    x = torch.rand(4, 1, 4, 4)
    for model, optimizer in pairs:
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert bool(pairs[0][1].defaults.get("fused")) is (fused and name in ("sgd", "momentum", "adam", "adamw"))


def test_an_unknown_optimiser_is_refused_before_anything_is_loaded():
    with pytest.raises(ValueError, match=r"optimizer: timm has no 'adamww'; near it: .*adamw"):
        TrainConfig(optimizer="adamww")


def test_an_optimiser_that_cannot_be_used_is_refused_in_a_sentence(monkeypatch):
    with pytest.raises(ValueError, match="optimizer: adahessian wants second derivatives"):
        TrainConfig(optimizer="adahessian")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("bnbadam8bit", "fusedlamb"):  # of packages that are not asked for, and for GPUs alone
        with pytest.raises(ValueError, match=f"optimizer: {name} cannot be made here"):
            make_optimizer(network(), TrainConfig(optimizer=name), fused=True)


# ---- the schedule


def closed_form(step, steps, warmup, lr, share):
    """A line from lr / (warmup + 1) to lr over the warm-up's steps, then half a cosine down to share * lr."""
    if step < warmup:
        first = lr / (warmup + 1)
        return first + step * (lr - first) / warmup
    done = min(1.0, (step - warmup) / (steps - warmup))
    return lr * (share + (1 - share) * (1 + math.cos(math.pi * done)) / 2)


@pytest.mark.parametrize(
    ("steps", "share", "warmup"), [(20, 0.1, 2), (20, 0.0, 0), (30, 0.5, 15), (7, 0.9, 6), (1, 0.9, 0)]
)
@pytest.mark.parametrize("end", [0.01, 0.0, 1.0])
def test_the_schedule_is_a_line_and_a_cosine(steps, share, warmup, end):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.4)
    scheduler = make_scheduler(optimizer, TrainConfig(lr=0.4, warmup=share, lr_end=end), steps)
    found = [optimizer.param_groups[0]["lr"]]
    for step in range(1, steps + 1):
        scheduler.step_update(step)
        found.append(optimizer.param_groups[0]["lr"])
    assert found == pytest.approx([closed_form(step, steps, warmup, 0.4, end) for step in range(steps + 1)])
    assert found[0] > 0 and max(found) == pytest.approx(0.4)
    assert found[-1] == pytest.approx(0.4 * end)  # what would be the next step's, after the last
    scheduler.step_update(steps + 5)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.4 * end)


def test_every_group_keeps_its_share_of_the_rate_all_the_way():
    model = network("test_convnext")
    config = TrainConfig(lr=0.2, layer_decay=0.7, warmup=0.25, lr_end=0.05)
    optimizer = make_optimizer(model, config)
    scheduler = make_scheduler(optimizer, config, 20)
    scales = [group["lr_scale"] for group in optimizer.param_groups]
    assert max(scales) == 1.0 and min(scales) == pytest.approx(0.7 ** (len(set(scales)) - 1))
    for step in (0, 3, 5, 12, 20):
        if step:
            scheduler.step_update(step)
        rate = closed_form(step, 20, 5, 0.2, 0.05)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([rate * scale for scale in scales])


def test_a_training_that_goes_on_with_more_epochs_follows_the_longer_schedule():  # C03, T04
    """The state of the optimiser that it takes over has rates of the shorter one, which are gone at the first look."""
    config = TrainConfig(lr=0.3, layer_decay=0.9)
    model = network()
    first = make_optimizer(model, config)
    make_scheduler(first, config, 10).step_update(8)
    saved = io.BytesIO()
    torch.save(first.state_dict(), saved)
    saved.seek(0)
    second = make_optimizer(network(), config)
    scheduler = make_scheduler(second, config, 40)
    second.load_state_dict(torch.load(saved, weights_only=True))
    scheduler.step_update(8)
    assert max(group["lr"] for group in second.param_groups) == pytest.approx(closed_form(8, 40, 4, 0.3, 0.01))
    straight = make_optimizer(network(), config)
    make_scheduler(straight, config, 40).step_update(8)
    assert [group["lr"] for group in second.param_groups] == [group["lr"] for group in straight.param_groups]


# ---- the average


def with_buffers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 1))


def test_the_average_follows_weights_and_buffers_and_copies_counters():  # T11
    """After step n it moves by 1 - d of the way, d being the decay or, where that is less, 1 - n^(-2/3)."""
    model, decay = with_buffers(), 0.9
    ema = make_ema(model, TrainConfig(ema_decay=decay))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    expected = {name: value.clone().double() for name, value in model.state_dict().items()}
    for step in range(1, 51):
        model(torch.randn(8, 1, 4, 4) + 5).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update(model, step=step)
        d = min(decay, 1 - step ** (-2 / 3))
        for name, value in model.state_dict().items():
            expected[name] = (
                d * expected[name] + (1 - d) * value.double() if value.is_floating_point() else value.clone()
            )
    averaged = ema.module.state_dict()
    for name, value in averaged.items():
        torch.testing.assert_close(value.double(), expected[name].double(), rtol=1e-4, atol=1e-5)
    assert averaged["1.num_batches_tracked"].item() == 50 and averaged["1.num_batches_tracked"].dtype == torch.int64
    # Near the model's own, of images with a mean of 5; those it began with, 0 and 1, are gone.
    torch.testing.assert_close(averaged["1.running_mean"], model[1].running_mean, rtol=0.1, atol=0.1)
    assert not torch.equal(averaged["1.running_mean"], model[1].running_mean)
    assert averaged["1.running_mean"].abs().max() > 0.5


def test_the_average_of_a_single_step_is_the_weights_then():
    model = with_buffers()
    ema = make_ema(model, TrainConfig(ema_decay=0.9998))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    ema.update(model, step=1)
    for a, b in zip(ema.module.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_average_is_a_model_of_its_own_that_scores():
    """Of one that was tamed, and whose blocks are checkpointed; it does not train, and moving it leaves the model alone."""
    model = network("test_efficientnet", grad_checkpointing=True, stem_stride=(1,), pools=("blocks.1:2",)).train()
    ema = make_ema(model, TrainConfig(ema_decay=0.5))
    x = torch.rand(2, 1, 64, 32)
    torch.testing.assert_close(ema.module(x)["cancer"], model.eval()(x)["cancer"])
    assert not ema.module.training
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for value in ema.module.parameters():
            value.zero_()
    assert (ema.module(x)["cancer"] == 0).all()  # of its own weights
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_no_average_by_default_and_none_of_a_decay_of_1():
    assert make_ema(with_buffers(), TrainConfig()) is None
    with pytest.raises(ValueError, match="ema_decay"):
        TrainConfig(ema_decay=1.0)


# ---- the loss, and what does not go together


def test_the_loss_is_the_one_that_the_settings_name():
    outputs = {"cancer": torch.tensor([0.3, -2.0, 1.0]), "biopsy": torch.tensor([1.0, 4.0, 0.0])}
    targets = {"cancer": torch.tensor([1.0, 0.0, 0.0]), "biopsy": torch.tensor([1.0, 0.0, 1.0])}
    for name in ("bce", "focal", "pf1"):
        config = TrainConfig(loss=name, positive_target=0.8, positive_weight=3.0, focal_gamma=1.5, aux_weight=0.3)
        expected = training_loss(
            outputs, targets, loss=name, positive_target=0.8, positive_weight=3.0, focal_gamma=1.5, aux_weight=0.3
        )
        assert torch.equal(make_loss(config)(outputs, targets), expected)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"loss": "dice"}, "loss"), ({"layer_decay": 0.0}, "layer_decay"), ({"accumulate": -1}, "accumulate"),
        ({"mixup": -0.1}, "mixup"), ({"lr_end": 1.5}, "lr_end"), ({"augment": "third_place"}, "augment"),
        ({"negatives_per_epoch": 10, "negatives_per_positive": 0}, "negatives_per_epoch"),
    ],
)  # fmt: skip
def test_settings_out_of_range(settings, part):
    with pytest.raises(ValueError, match=part):
        TrainConfig(**settings)


@pytest.mark.parametrize("settings", [{"compile": "on"}, {"n_procs": -2}, {"keep_last": 0}, {"save_every": -1}])
def test_settings_of_the_loop_out_of_range(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        LoopConfig(**settings)
