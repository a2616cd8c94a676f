"""What a training is made of: its settings, and timm's optimiser, schedule and average of weights built from them."""

import dataclasses
import difflib
from functools import partial

import torch
from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import nn

from rsnakit import augment, losses
from rsnakit.fields import check_all
from rsnakit.folds import SPLITS
from rsnakit.params import setting


@dataclasses.dataclass(frozen=True)
class FoldConfig:
    """How a table is split into folds."""

    n_folds: int = setting(4, low=2, high=50)
    seed: int = setting(0, low=0, high=2**31 - 1)  # of folds, order, augmentation and the new layers' weights
    split: str = setting("patient", choices=SPLITS)  # what is dealt out to folds, whole: patients, or their machines

    def __post_init__(self) -> None:
        check_all(self)


@dataclasses.dataclass(frozen=True)
class TrainConfig(FoldConfig):
    """How a fold is trained; every setting here decides the result."""

    epochs: int = setting(6, low=1, high=10_000)
    batch_size: int = setting(16, low=2, high=4096)  # on one processor: images; breasts where the model sees these
    # Batches to an optimiser step, on all processors together; 0: one on each.
    accumulate: int = setting(0, low=0, high=4096)
    lr: float = setting(1e-3, low=0.0, high=10.0)  # peak learning rate, after warm-up
    lr_end: float = setting(0.01, low=0.0, high=1.0)  # share of lr that the cosine ends at
    warmup: float = setting(0.1, low=0.0, high=0.9)  # share of all steps over which lr rises
    layer_decay: float = setting(1.0, low=0.01, high=1.0)  # on lr, from a block of the backbone to the one before it
    optimizer: str = setting("adamw")  # any name of timm's create_optimizer_v2
    weight_decay: float = setting(0.02, low=0.0, high=10.0)
    clip_norm: float = setting(10.0, low=0.0)  # gradients are scaled down to this norm; 0: never
    ema_decay: float = setting(0.0, low=0.0, high=0.999999)  # of the weights' average over steps; 0: none
    ema_keep: bool = setting(True)  # the averaged weights are kept for inference, else the raw ones
    negatives_per_positive: float = setting(3.0, low=0.0)  # positives are repeated up to this; 0: as they are
    min_positives: int = setting(1, low=0)  # in every batch, where positives are repeated
    negatives_per_epoch: int = setting(0, low=0)  # 0: each once; the next epoch goes on where one stopped
    positive_target: float = setting(0.9, low=0.5, high=1.0)  # what the loss asks of a positive
    positive_weight: float = setting(1.0, low=0.0)  # negatives that a positive counts for in the loss
    loss: str = setting("bce", choices=losses.NAMES)
    focal_gamma: float = setting(2.0, low=0.0, high=10.0)  # how fast the focal loss forgets what is right already
    aux_weight: float = setting(0.1, low=0.0, high=100.0)  # of the auxiliary heads' mean loss, beside the cancer loss
    augment: str = setting("light", choices=augment.NAMES)
    mixup: float = setting(0.0, low=0.0, high=10.0)  # alpha of the share that two images are mixed in; 0: off
    cutmix: float = setting(0.0, low=0.0, high=10.0)  # the same, of a rectangle put in; 0: off
    sync_batchnorm: bool = setting(False)  # batch statistics over all processors; GPUs only
    # Weights that are kept: those of the last epoch, or of the best by a score of the very fold, which flatters it.
    select: str = setting("last", choices=("last", "pf1", "ap"))

    def __post_init__(self) -> None:
        check_all(self)
        if self.optimizer not in list_optimizers():
            near = ", ".join(difflib.get_close_matches(self.optimizer, list_optimizers(), 4, cutoff=0.3))
            raise ValueError(f"optimizer: timm has no {self.optimizer!r}; near it: {near}")
        if get_optimizer_info(self.optimizer).second_order:
            raise ValueError(f"optimizer: {self.optimizer} wants second derivatives, which this loop does not compute")
        if self.negatives_per_epoch and not self.negatives_per_positive:
            raise ValueError(
                "negatives_per_epoch: with negatives_per_positive=0 an epoch is every row once; give it a ratio too"
            )


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """How a fold is trained where that decides no result: all of it may change when a run goes on."""

    # Processes that train; 0: as many as there are GPUs; -1: none, the command for torchrun is printed.
    n_procs: int = setting(0, low=-1, high=1024)
    save_every: int = setting(0, low=0)  # optimiser steps between checkpoints within an epoch; 0: after epochs only
    keep_last: int = setting(2, low=1, high=100)  # checkpoints kept, each with the model, its average and the optimiser
    compile: str = setting("off", choices=("off", "default", "max-autotune"))
    channels_last: bool = setting(True)  # twice as fast on a CPU, and on tensor cores

    def __post_init__(self) -> None:
        check_all(self)


def make_optimizer(model: nn.Module, config: TrainConfig, fused: bool = False) -> torch.optim.Optimizer:
    """timm's optimiser of that name: no weight decay on norms and biases, and lr falling towards the stem by `layer_decay`.

    Args:
        fused: one kernel for all weights, where torch has one for this optimiser. Not with a gradient scaler: a fused
            step is left out on the device, and whoever counts steps would not know.

    Raises:
        ValueError: it needs a package or a GPU that is not there.
    """
    options = {"opt": config.optimizer, "lr": config.lr, "weight_decay": config.weight_decay}
    if config.layer_decay < 1:
        options["layer_decay"] = config.layer_decay
    for more in ({"fused": True}, {}) if fused else ({},):  # timm's own optimisers have no fused step
        try:
            return create_optimizer_v2(model, **options, **more)
        except (AssertionError, ImportError, RuntimeError, TypeError, ValueError) as error:
            problem = error
    raise ValueError(f"optimizer: {config.optimizer} cannot be made here ({problem}); take another") from problem


def make_scheduler(optimizer: torch.optim.Optimizer, config: TrainConfig, steps: int) -> CosineLRScheduler:
    """timm's cosine over all optimiser steps of a training, after a linear rise; moved by `step_update(steps taken)`.

    The first step is taken with lr / (warm-up steps + 1): a rate of 0 would waste it.

    Args:
        steps: of the whole training. With more epochs than before, the same number of steps taken is another rate.
    """
    warmup = min(round(steps * config.warmup), steps - 1)
    return CosineLRScheduler(
        optimizer, t_initial=max(1, steps - warmup), lr_min=config.lr * config.lr_end, warmup_t=warmup,
        warmup_lr_init=config.lr / (warmup + 1), warmup_prefix=True, t_in_epochs=False,
        cycle_decay=0.5,  # there is one cycle, so that it does nothing; with 1 timm warns of a cosine of one step
    )  # fmt: skip


def make_ema(model: nn.Module, config: TrainConfig) -> ModelEmaV3 | None:
    """timm's average of weights and buffers, counters copied; None where `ema_decay` is 0. It begins as an average over
    few steps, so that short trainings are not held back by the weights they began with."""
    return ModelEmaV3(model, decay=config.ema_decay, use_warmup=True) if config.ema_decay else None


def make_loss(config: TrainConfig) -> losses.Loss:
    """The loss that training minimises, of logits and labels by name."""
    return partial(
        losses.training_loss, loss=config.loss, positive_target=config.positive_target,
        positive_weight=config.positive_weight, focal_gamma=config.focal_gamma, aux_weight=config.aux_weight,
    )  # fmt: skip
