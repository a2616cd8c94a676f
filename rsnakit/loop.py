"""The loop itself: an epoch of training and a pass of evaluation, in mixed precision.

In the order that matters: forward under autocast, the loss in float32, scaled before backward (fp16 only), gradients of
all batches of a step added up, unscaled before they are clipped, schedule and average moved only when the optimiser moved.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import nn

from rsnakit import distributed, mixing, progress
from rsnakit.losses import Loss
from rsnakit.tally import Scored, Tally

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NEEDED = {"image", "cancer", "item"}
VIEWS = ("view_mask", "view_id")  # in batches of breasts alone
MAX_SKIPS = 30  # steps in a row: by then the scale has fallen from 65,536 to 2 ** -14, and it is not the scale
Tensors = Mapping[str, torch.Tensor]


class Stopped(Exception):
    """Training was asked to end, and its state is saved."""


def train_one_epoch(
    model: nn.Module,
    loader: Iterable[dict[str, torch.Tensor]],
    optimizer: torch.optim.Optimizer,
    scheduler: Scheduler,
    scaler: torch.amp.GradScaler,
    loss_of: Loss,
    *,
    steps: Sequence[Sequence[int]] | None = None,
    clip_norm: float = 10.0,
    device: str = "cpu",
    precision: str = "fp32",
    ema: ModelEmaV3 | None = None,
    mix: mixing.Mix | None = None,
    updates: int = 0,
    tally: Tally | None = None,
    after_step: Callable[[], None] | None = None,
    description: str = "train",
) -> Scored:
    """Trains a model for one pass over a loader.

    Args:
        model: on the device; maps images (B, 1, H, W) to a dict with `cancer` logits (B,) and those of auxiliary heads; or
            breasts (B, V, 1, H, W), with `view_mask` and `view_id` (B, V) by name.
        loader: batches with `image`, `cancer` (B,), `item` (B,), a label (B,) for each auxiliary head under its name, and of
            breasts `view_mask` and `view_id`, as `data.collate` makes them.
        scheduler: one of timm's, told the number of steps taken after each.
        scaler: enabled where precision is fp16, and only there.
        loss_of: of the model's logits and the batch's labels, both by name, such as `losses.training_loss`.
        steps: for each optimiser step the sizes of its batches over all processors, as `BalancedSampler.steps` has them; this
            processor's loader gives its share of them. None: every batch is a step. A step's gradient is that of the mean
            over all its images, however many it has.
        clip_norm: gradients are scaled down to this norm; 0: never.
        device, precision: as `env.choose_device` and `env.choose_precision` give them.
        ema: moved after each step that was taken.
        mix: mixes images before they are seen, and the loss with them.
        updates: steps taken before this epoch.
        tally: with what an epoch that goes on had so far.
        after_step: called after each step; may raise `Stopped`.

    Returns:
        Scores are those that the weights gave as they changed, on augmented images in the loader's order.

    Raises:
        FloatingPointError: the loss is NaN or infinite where no scaler is there to skip the step, or a scaler skipped
            `MAX_SKIPS` steps in a row.
        ValueError: the loader gave nothing, or other batches than `steps` says.
    """
    model.train()
    tally = Tally() if tally is None else tally
    place, context = torch.device(device), autocast(device, precision)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with progress.bar(_length(loader), description) as bar, _watched(optimizer, scaler) as step:
        for batches, count, items in optimizer_steps(loader, steps):
            optimizer.zero_grad(set_to_none=True)
            for number, batch in enumerate(batches, start=1):
                # Gradients add up in place; processors exchange them once a step, in the backward pass of its last batch.
                with contextlib.nullcontext() if number == count else distributed.no_sync(model):
                    outputs, loss = _loss(model, batch, loss_of, place, context, mix)
                    # Batches of a step may differ in size, and processors' gradients are averaged: both are made up for.
                    share = batch["item"].shape[0] * distributed.world() / items
                    scaler.scale(loss if share == 1 else loss * share).backward()
                # Kept on the device; reading it now would make the loop wait for every step.
                tally.add(loss, outputs["cancer"], batch)
                bar.update()

            scaler.unscale_(optimizer)  # before clipping: a norm of scaled gradients would mean nothing
            norm = nn.utils.clip_grad_norm_(parameters, clip_norm or math.inf)
            taken = step()  # by the scaler: with fp16 not where gradients overflowed
            scaler.update()
            tally.add_step(norm, taken)
            if taken:
                scheduler.step_update(updates + tally.taken)
                if ema is not None:
                    ema.update(model, step=updates + tally.taken)
            elif tally.in_a_row >= MAX_SKIPS:
                raise FloatingPointError(
                    f"fp16 overflowed in {tally.in_a_row} steps in a row: take precision fp32 or bf16, or lower lr"
                )
            if bar.due:
                tally.read(scaler.is_enabled())
                bar.show(**tally.live(), lr=learning_rate(optimizer))
            if after_step is not None:
                after_step()
    scored = tally.scored(scaler.is_enabled())
    if not len(scored.items):
        raise ValueError("nothing to train on: the loader gave no batch")
    return scored


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: Iterable[dict[str, torch.Tensor]],
    loss_of: Loss,
    device: str = "cpu",
    precision: str = "fp32",
    description: str = "evaluate",
    after_batch: Callable[[], None] | None = None,
) -> Scored:
    """Scores every image or breast of a loader once; the arguments are those of `train_one_epoch`, which see.

    Args:
        loader: on several processors, this one's share.

    Returns:
        Of all processors; on several of them sorted by item.

    Raises:
        FloatingPointError: the loss is NaN or infinite.
    """
    model.eval()
    tally, place, context = Tally(), torch.device(device), autocast(device, precision)
    with progress.bar(_length(loader), description) as bar:
        for batch in map(_checked, loader):
            outputs, loss = _loss(model, batch, loss_of, place, context)
            tally.add(loss, outputs["cancer"], batch)
            bar.update()
            if after_batch is not None:
                after_batch()
    scored = tally.scored()
    if distributed.world() == 1:
        return scored
    order = scored.items.argsort(kind="stable")
    return Scored(scored.items[order], scored.scores[order], scored.loss)


def autocast(device: str | torch.device, precision: str) -> contextlib.AbstractContextManager:
    """The context in which forward runs in `fp32`, `bf16` or `fp16`."""
    # Without gradients nothing is cached: torch up to 2.10 at least would hand weights that were cast so to a training step
    # in the same outer context, which then has no gradients.
    cached = torch.is_grad_enabled()
    return torch.autocast(torch.device(device).type, DTYPES[precision], precision != "fp32", cache_enabled=cached)


def optimizer_steps(loader: Iterable, steps: Sequence[Sequence[int]] | None) -> Iterator[tuple[Iterator, int, int]]:
    """A loader's batches in optimiser steps: for each its batches on this processor, how many these are, and how many images
    or breasts it has over all processors."""
    rank, world = distributed.rank(), distributed.world()
    if steps is None:
        for batch in map(_checked, loader):
            yield iter([batch]), 1, batch["item"].shape[0] * world
        return
    own = [sizes[rank::world] for sizes in steps]
    length = _length(loader)
    if length is not None and length != sum(map(len, own)):
        raise ValueError(
            f"the loader has {length} batches, and the steps {sum(map(len, own))}: they do not belong together"
        )
    batches = map(_checked, loader)
    for sizes, mine in zip(steps, own, strict=True):
        yield _next(batches, mine), len(mine), sum(sizes)


def _next(batches: Iterator, sizes: Sequence[int]) -> Iterator:
    """The batches of a step, of these sizes."""
    for size in sizes:
        batch = next(batches, None)
        found = 0 if batch is None else batch["item"].shape[0]
        if found != size:
            raise ValueError(
                f"the loader gave a batch of {found}, and the step has one of {size}: they do not belong together"
            )
        yield batch


def _checked(batch: Tensors) -> Tensors:
    """The batch, if it is one."""
    if isinstance(batch, Mapping) and batch.keys() >= NEEDED:
        return batch
    names = ", ".join(batch) if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
    raise ValueError(
        f"a batch is a dict of tensors with {', '.join(sorted(NEEDED))}, as data.collate makes it, not {names}"
    )


def _loss(
    model: nn.Module,
    batch: Tensors,
    loss_of: Loss,
    device: torch.device,
    context: contextlib.AbstractContextManager,
    mix: mixing.Mix | None = None,
) -> tuple[Tensors, torch.Tensor]:
    """The model's logits for a batch, under autocast (`context`), and their loss in float32."""
    images = batch["image"].to(device, non_blocking=True)
    lam = 1.0
    if mix is not None:
        images = images.clone() if images is batch["image"] else images  # it mixes in place, and the batch is not ours
        lam = mix(images)
    # These stay where the loader put them: the model picks the views that are there, and on a device that would make it wait.
    views = {name: batch[name] for name in VIEWS if name in batch}
    with context:
        outputs = model(images, **views)
    if not isinstance(outputs, Mapping) or "cancer" not in outputs:
        raise ValueError(f"a model gives a dict of logits, cancer (B,) among them, not a {type(outputs).__name__}")
    labels = {name: batch[name].to(device, non_blocking=True) for name in outputs if name in batch}
    loss = loss_of(outputs, labels)
    if lam < 1:
        loss = lam * loss + (1 - lam) * loss_of(outputs, mixing.partners(labels))
    return outputs, loss


@contextlib.contextmanager
def _watched(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> Iterator[Callable[[], bool]]:
    """The scaler's step as a function that says whether the optimiser took it: the scaler reads its overflow flag from the
    device and keeps it to itself, and asking it for the scale would be a second reading."""
    if not scaler.is_enabled():
        yield lambda: (scaler.step(optimizer), True)[1]
        return
    taken = []
    hook = optimizer.register_step_post_hook(lambda *_: taken.append(True))

    def step() -> bool:
        taken.clear()
        scaler.step(optimizer)
        return bool(taken)

    try:
        yield step
    finally:
        hook.remove()


def learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """The learning rate; with layer decay the head's, which is the highest."""
    return max(group["lr"] for group in optimizer.param_groups)


def _length(loader: Iterable) -> int | None:
    return len(loader) if hasattr(loader, "__len__") else None
