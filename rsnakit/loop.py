"""The loop itself: an epoch of training and a pass of evaluation, in mixed precision.

In the order that matters: forward under autocast, the loss in float32, scaled before backward (fp16 only), gradients
unscaled before they are clipped, the schedule moved only when the optimiser moved.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
READ_EVERY_S = 1.0  # the loss is read from the device so often, since every reading makes the device wait
VIEWS = ("view_mask", "view_id")  # in batches of breasts alone
Tensors = Mapping[str, torch.Tensor]
Loss = Callable[[Tensors, Tensors], torch.Tensor]  # logits and labels by name (see `losses`) to the batch's mean, ()


def autocast(device: str, precision: str) -> contextlib.AbstractContextManager:
    """The context in which forward runs in `fp32`, `bf16` or `fp16`."""
    # Without gradients nothing is cached: torch up to 2.10 at least would hand weights that were cast so to a training step
    # in the same outer context, which then has no gradients.
    cached = torch.is_grad_enabled()
    return torch.autocast(torch.device(device).type, DTYPES[precision], precision != "fp32", cache_enabled=cached)


@dataclasses.dataclass(frozen=True)
class Scored:
    """What a pass over images or breasts gave: `items` (N,) their numbers, `scores` (N,) in [0, 1], `loss`, and for training
    `grad_norm`, the mean norm before clipping, and `skipped`, steps that fp16 overflow made void."""

    items: np.ndarray
    scores: np.ndarray
    loss: float
    grad_norm: float = math.nan
    skipped: int = 0


def train_one_epoch(
    model: nn.Module,
    loader: Iterable[dict[str, torch.Tensor]],
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    scaler: torch.amp.GradScaler,
    loss_of: Loss,
    clip_norm: float = 10.0,
    device: str = "cpu",
    precision: str = "fp32",
    description: str = "train",
) -> Scored:
    """Trains a model for one pass over a loader.

    Args:
        model: on the device; maps images (B, 1, H, W) to a dict with `cancer` logits (B,) and those of auxiliary heads; or
            breasts (B, V, 1, H, W), with `view_mask` and `view_id` (B, V) by name.
        loader: batches with `image`, `cancer` (B,), `item` (B,), a label (B,) for each auxiliary head under its name, and of
            breasts `view_mask` and `view_id`, as `data.collate` makes them.
        scheduler: stepped once for each step that the optimiser took.
        scaler: enabled where precision is fp16, and only there.
        loss_of: of the model's logits and the batch's labels, both by name, such as `losses.training_loss`.
        clip_norm: gradients are scaled down to this norm; 0: never.
        device, precision: as `env.choose_device` and `env.choose_precision` give them.

    Returns:
        Scores are those that the weights gave as they changed, on augmented images in the loader's order.

    Raises:
        FloatingPointError: the loss is NaN or infinite where no scaler is there to skip the step.
    """
    model.train()
    losses, logits_seen, items = [], [], []
    norm_sum, taken, skipped = 0.0, 0, 0
    last_read = 0.0
    with _bar(loader, description) as progress:
        for batch in loader:
            outputs, labels = _forward(model, batch, device, precision)
            loss = loss_of(outputs, labels)

            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)  # before clipping: a norm of scaled gradients would mean nothing
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm or math.inf)
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.is_enabled() and scaler.get_scale() < scale:  # gradients overflowed: the step was not taken
                skipped += 1
            else:
                scheduler.step()
                norm_sum, taken = norm_sum + norm.detach(), taken + 1

            # Kept on the device; reading them each step would make it wait for every one.
            losses.append(loss.detach())
            logits_seen.append(outputs["cancer"].detach())
            items.append(batch["item"])
            if time.monotonic() - last_read > READ_EVERY_S:
                last_read = time.monotonic()
                shown = {
                    "loss": f"{_mean_loss(losses, scaler.is_enabled()):.4f}",
                    "lr": f"{optimizer.param_groups[0]['lr']:.1e}",
                }
                progress.set_postfix(shown, refresh=False)
            progress.update()
    if not losses:
        raise ValueError("nothing to train on: the loader gave no batch")
    if not taken:
        raise FloatingPointError(f"fp16 overflowed in all {skipped} steps of the epoch: take precision fp32 or bf16")
    scores = torch.cat(logits_seen).float().sigmoid().cpu().numpy()
    return Scored(
        torch.cat(items).numpy(),
        scores,
        _mean_loss(losses, scaler.is_enabled()),
        float(norm_sum) / max(1, taken),
        skipped,
    )


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: Iterable[dict[str, torch.Tensor]],
    loss_of: Loss,
    device: str = "cpu",
    precision: str = "fp32",
    description: str = "evaluate",
) -> Scored:
    """Scores every image or breast of a loader once; the arguments are those of `train_one_epoch`."""
    model.eval()
    losses, logits_seen, items = [], [], []
    with _bar(loader, description) as progress:
        for batch in loader:
            outputs, labels = _forward(model, batch, device, precision)
            losses.append(loss_of(outputs, labels) * len(batch["item"]))
            logits_seen.append(outputs["cancer"].float())
            items.append(batch["item"])
            progress.update()
    logits = torch.cat(logits_seen)
    loss = float(torch.stack(losses).sum()) / len(logits)
    return Scored(torch.cat(items).numpy(), logits.sigmoid().cpu().numpy(), loss)


def _forward(model: nn.Module, batch: Tensors, device: str, precision: str) -> tuple[Tensors, Tensors]:
    """The model's logits for a batch, and the labels that the batch has for them, on the device."""
    images = batch["image"].to(device, non_blocking=True)
    # These stay where the loader put them: the model picks the views that are there, and on a device that would make it wait.
    views = {name: batch[name] for name in VIEWS if name in batch}
    with autocast(device, precision):
        outputs = model(images, **views)
    return outputs, {name: batch[name].to(device, non_blocking=True) for name in outputs if name in batch}


def _bar(loader: Iterable, description: str) -> tqdm:
    """A progress bar beside the loop, not around the loader: tqdm begins an iteration of its own, and a loader draws from
    torch's generator each time it begins one."""
    total = len(loader) if hasattr(loader, "__len__") else None
    return tqdm(total=total, desc=description, unit="batch", leave=False, mininterval=1)


def _mean_loss(losses: list[torch.Tensor], skips: bool) -> float:
    """Mean over the steps so far; those whose loss is not finite are left out where a scaler `skips` such steps."""
    values = torch.stack(losses)
    finite = torch.isfinite(values)
    if not skips and not finite.all():
        raise FloatingPointError(
            f"the loss is {float(values[~finite][0])} at step {int((~finite).nonzero()[0])} of this epoch. Lower lr, lengthen "
            "warmup, or take precision fp32; the checkpoint of the epoch before is sound."
        )
    return float(values[finite].mean())
