"""That a training step does not wait for the GPU: CUDA itself tells of every operation that does. Needs one.

What these tests watch are the steps of `train_one_epoch` from the first batch on, after a warm-up of an epoch; the end of the
epoch, where scores are read, is not among them. test_loop.py has what can be told without a GPU.
"""

import warnings

import pytest
import torch
from torch import nn

from rsnakit import losses, progress, recipe
from rsnakit.loop import train_one_epoch
from rsnakit.mixing import Mix
from rsnakit.models import ModelConfig, build_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing to wait for")

STEPS, ACCUMULATE, BATCH = 4, 2, 4
MESSAGE = "called a synchronizing CUDA operation"


class Quiet(progress.Bar):
    """A bar that is never drawn: the loop may read where one is."""

    due = False

    def __init__(self, *_):
        pass

    def __exit__(self, *_):
        pass

    def update(self, n=1):
        pass


class Watched:
    """A loader that turns CUDA's watch on as the first batch is asked for; `after_step` turns it off after the last step."""

    def __init__(self, batches, mode):
        self.batches, self.mode, self.left = batches, mode, STEPS

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(self.mode)
        yield from self.batches

    def after_step(self):
        self.left -= 1
        if not self.left:
            torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def watch_ends(monkeypatch):
    monkeypatch.setattr(progress, "bar", Quiet)
    yield
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")


def batches(views=0, aux=()):
    """Batches in pinned memory, as the loader gives them where there is a GPU."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(STEPS * ACCUMULATE):
        shape = (BATCH, views, 1, 64, 32) if views else (BATCH, 1, 64, 32)
        batch = {
            "image": torch.rand(shape, generator=generator),
            "cancer": torch.arange(BATCH) % 2.0,
            "item": torch.arange(BATCH) + number * BATCH,
        }
        if views:
            mask = torch.rand(BATCH, views, generator=generator) > 0.4
            mask[:, 0] = True
            batch |= {"view_mask": mask, "view_id": torch.arange(views).expand(BATCH, views) % 2}
        batch |= {name: torch.tensor([0.0, 1.0, float("nan"), 1.0]) for name in aux}
        made.append({name: value.contiguous().pin_memory() for name, value in batch.items()})
    return made


def train(mode, precision, *, views="none", aux=(), mix=None, loss="bce", fused=True):
    """An epoch to warm up, then one under watch; gives the warnings of its steps."""
    torch.manual_seed(0)
    model = build_model(ModelConfig(backbone="resnet18", weights="none", views=views, aux=aux))
    model = model.to("cuda", memory_format=torch.channels_last)
    config = recipe.TrainConfig(ema_decay=0.99, loss=loss, layer_decay=0.9)
    optimizer = recipe.make_optimizer(model, config, fused=fused and precision != "fp16")
    scheduler, ema = recipe.make_scheduler(optimizer, config, 2 * STEPS), recipe.make_ema(model, config)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16", init_scale=64.0)  # small: no step overflows
    loss_of, data = recipe.make_loss(config), batches(0 if views == "none" else 3, aux)

    def epoch(loader, updates, after_step=None):
        return train_one_epoch(
            model, loader, optimizer, scheduler, scaler, loss_of, steps=[[BATCH] * ACCUMULATE] * STEPS, clip_norm=1.0,
            device="cuda", precision=precision, ema=ema, mix=mix, updates=updates, after_step=after_step,
        )  # fmt: skip

    epoch(data, 0)
    watched = Watched(data, mode)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            found = epoch(watched, STEPS, watched.after_step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert watched.left == 0 and found.skipped == 0
    assert found.items.tolist() == list(range(STEPS * ACCUMULATE * BATCH))
    return [str(warning.message) for warning in seen if MESSAGE in str(warning.message)]


def needs(precision):
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU has no bf16 units")


CASES = {
    "images": {},
    "optimiser as a loop over weights": {"fused": False},
    "breasts, mean": {"views": "mean"},
    "breasts, attention": {"views": "attention"},
    "auxiliary heads": {"aux": ("biopsy", "birads")},
    "breasts and auxiliary heads": {"views": "attention", "aux": ("biopsy", "birads")},
    "mixup": {"mix": Mix(0.5, 0.0)},
    "cutmix": {"mix": Mix(0.0, 1.0)},
    **{loss: {"loss": loss} for loss in losses.NAMES if loss != "bce"},
}


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_step_waits(precision, case):
    """Under "error" the first operation that waits would raise."""
    needs(precision)
    assert train("error", precision, **CASES[case]) == []


@pytest.mark.parametrize("case", list(CASES))
def test_with_fp16_a_step_waits_once_for_the_overflow_flag(case):
    assert len(train("warn", "fp16", **CASES[case])) == STEPS


@pytest.mark.parametrize(
    "reading",
    [lambda loss: loss.item(), lambda loss: loss.cpu(), lambda loss: float(loss), lambda loss: bool(loss > 0)],
)
def test_the_watch_sees_what_waits(reading):
    """A loss that is read in every batch is told of; so what the tests above do not see is not there."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64 * 32, 1)).to("cuda")

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return {"cancer": self.inner(x).squeeze(1)}

    def loss_of(outputs, labels):
        loss = losses.training_loss(outputs, labels)
        reading(loss.detach())
        return loss

    config = recipe.TrainConfig()
    optimizer = recipe.make_optimizer(model, config)
    scheduler = recipe.make_scheduler(optimizer, config, STEPS)

    def epoch(watched):
        train_one_epoch(
            Wrapped(), watched, optimizer, scheduler, torch.amp.GradScaler("cuda", enabled=False), loss_of,
            steps=[[BATCH] * ACCUMULATE] * STEPS, device="cuda", after_step=watched.after_step,
        )  # fmt: skip

    with pytest.raises(RuntimeError, match=MESSAGE):
        epoch(Watched(batches(), "error"))
    torch.cuda.set_sync_debug_mode("default")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        epoch(Watched(batches(), "warn"))
    assert sum(MESSAGE in str(warning.message) for warning in seen) == STEPS * ACCUMULATE
