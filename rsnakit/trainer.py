"""Everything of a fold's training that changes as it goes on: built from settings, saved to a checkpoint, gone on from one."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable

import pandas as pd
import torch
from timm.utils import random_seed
from torch import nn
from torch.utils.data import DataLoader

from rsnakit import anatomy, augment, checkpoint, data, distributed, dryrun, env, models, recipe
from rsnakit.loop import evaluate, train_one_epoch
from rsnakit.losses import training_loss
from rsnakit.mixing import Mix
from rsnakit.samplers import BalancedSampler, StepBatches
from rsnakit.store import Store
from rsnakit.tally import Scored, Tally

INITIAL, SAMPLES, DROPOUT = 0, 1, 2  # what a seed is for, so that no two things draw the same numbers


class Trainer:
    """A fold's model and all that trains it.

    Args:
        images: the training side's, with pixels.
        store: that holds them.
        device, precision: as `env` chose them.
        num_workers: loader processes; -1: chosen by the device.
        marks: what checkpoints say of the run they are of, as plain values.
        state: of a checkpoint to go on from, or None.

    Attributes:
        model: plain, on the device; `ema`: its average over steps, or None.
        epoch: finished ones; `updates`: optimiser steps taken in them; `tally`: what the epoch at hand had so far.
        history: a row for each finished epoch; `best`: the score of the weights that are kept.

    Raises:
        ValueError: the model cannot take images of the store's size, or a setting does not go with another.
    """

    def __init__(
        self, images: pd.DataFrame, store: Store, model_config: models.ModelConfig, config: recipe.TrainConfig,
        loop: recipe.LoopConfig, device: str, precision: str, num_workers: int, fold: int, marks: dict, state: dict | None,
    ) -> None:  # fmt: skip
        self.config, self.loop, self.device, self.precision, self.fold = config, loop, device, precision, fold
        self.store, self.num_workers, self.marks = store, num_workers, marks
        self.unit = unit_of(model_config)
        check_settings(model_config, config)
        torch.manual_seed(data.sample_seed(config.seed, fold, INITIAL))
        self.model = self._build(model_config, begun=state is not None)
        self.ema = recipe.make_ema(self.model, config)
        self.loss_of = recipe.make_loss(config)
        self.mix = Mix(config.mixup, config.cutmix) if config.mixup or config.cutmix else None

        dataset = self.dataset(images, augment.build(config.augment, *store.shape), model_config.aux, draw=True)
        accumulate = distributed.batches_a_step(config.accumulate, distributed.world())
        self.sampler = BalancedSampler(
            dataset.labels, config.negatives_per_positive, config.batch_size, config.min_positives, config.seed,
            accumulate, config.negatives_per_epoch,
        )  # fmt: skip
        self.batches = StepBatches(self.sampler, distributed.rank(), distributed.world())
        self.train_loader = self._loader(dataset, self.batches)

        # With a gradient scaler a fused step would be left out on the device, where the loop cannot see it.
        self.optimizer = recipe.make_optimizer(
            self.model, config, fused=device.startswith("cuda") and precision != "fp16"
        )
        self.scheduler = recipe.make_scheduler(self.optimizer, config, config.epochs * len(self.sampler.steps))
        self.scaler = torch.amp.GradScaler(torch.device(device).type, enabled=precision == "fp16")
        self.epoch, self.updates, self.history, self.best, self.seconds = 0, 0, [], -math.inf, 0.0
        self.tally, self._random = Tally(), None
        if state:
            self._load_state(state)
        self._compile()
        self.wrapped = distributed.wrap(self.model, config.sync_batchnorm, device)

    def _build(self, model_config: models.ModelConfig, begun: bool) -> models.CancerNet:
        """The model on the device. One that goes on has its own weights, and must not need the hub or file that it began
        from."""
        plain = dataclasses.replace(model_config, weights="none", drop_weights=())
        model = models.build_model(plain if begun else model_config)
        model.config = model_config  # so that model.json says what training began from, after a break too
        check_size(model, self.store.shape)
        if not self.config.aux_weight:
            model.aux_heads.requires_grad_(False)  # no loss reaches them, and processors would wait for their gradients
        layout = torch.channels_last if self.loop.channels_last else torch.contiguous_format
        return model.to(self.device, memory_format=layout)

    def _compile(self) -> None:
        """Compiles model and average in place, so that no wrapper's prefix gets into a checkpoint."""
        choice = env.choose_compile(self.device, self.loop.compile)
        if self.loop.compile != "off" and distributed.is_main():
            print(f"compile {choice.value}: {choice.reason}")
        mode = choice.value
        if mode == "max-autotune" and self.sampler.accumulate > distributed.world():
            mode += "-no-cudagraphs"  # what a GPU has recorded replays into the same gradients, which could not add up
        if mode != "off":
            for model in (self.model, self.ema and self.ema.module):
                if model is not None:
                    model.compile(mode=mode)

    def dataset(self, images: pd.DataFrame, transform=None, aux=(), draw: bool = False) -> data.MammogramDataset:
        """A table's images, or the breasts they show, as the model takes them."""
        seed = data.sample_seed(self.config.seed, self.fold, SAMPLES)
        return data.MammogramDataset(images, self.store, transform, self.unit, seed, aux, draw)

    def valid_loader(self, images: pd.DataFrame) -> DataLoader:
        """A table's images or breasts in their order; on several processors every so-manieth batch is this one's."""
        dataset = self.dataset(images)
        # Without gradients there is room for more; but a breast may come with eight images.
        size = self.config.batch_size * (2 if self.unit == "image" else 1)
        batches = [list(range(i, min(i + size, len(dataset)))) for i in range(0, len(dataset), size)]
        return self._loader(dataset, batches[distributed.rank() :: distributed.world()])

    def _loader(self, dataset: data.MammogramDataset, batches) -> DataLoader:
        return make_loader(dataset, batches, loader_workers(self.num_workers, self.device), self.device)

    @property
    def done(self) -> int:
        """Optimiser steps of the epoch at hand that are over."""
        return self.tally.taken + self.tally.skipped

    def train(self, title: str, after_step: Callable[[], None]) -> Scored:
        """The epoch at hand, from the step it is at to its end."""
        self.sampler.set_epoch(self.epoch)
        self.batches.start = self.done
        if self._random is None:
            # Dropout and mixup draw from here; seeded by the epoch and the processor.
            number = DROPOUT + self.epoch + 2**20 * distributed.rank()
            random_seed(data.sample_seed(self.config.seed, self.fold, number))
        else:
            checkpoint.set_rng_state(self._random, self.device)
            self._random = None
        return train_one_epoch(
            self.wrapped, self.train_loader, self.optimizer, self.scheduler, self.scaler, self.loss_of,
            steps=self.sampler.steps[self.done :], clip_norm=self.config.clip_norm, device=self.device,
            precision=self.precision, ema=self.ema, mix=self.mix, updates=self.updates, tally=self.tally,
            after_step=after_step, description=title,
        )  # fmt: skip

    def evaluate(self, model: nn.Module, loader: DataLoader, title: str, after_batch=None) -> Scored:
        """A model's scores; its loss is of cancer alone, as it is: what the curves show shall not depend on how training is
        bent."""
        distributed.broadcast_buffers(model)  # batch statistics are each processor's own; those that are kept score
        return evaluate(model, loader, training_loss, self.device, self.precision, title, after_batch)

    def end_epoch(self) -> None:
        """Counts the epoch as finished."""
        self.epoch, self.updates = self.epoch + 1, self.updates + self.tally.taken
        self.tally, self.seconds = Tally(self.tally.in_a_row), 0.0

    def state(self) -> dict:
        """All of it as plain values and tensors; every processor has to call this, and rank 0's is the one to save."""
        self.tally.read(self.scaler.is_enabled())
        own = {"random": checkpoint.rng_state(self.device), "tally": self.tally.state()}
        return {
            "model": self.model.state_dict(),
            "ema": self.ema.module.state_dict() if self.ema else None,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "updates": self.updates,  # with the steps of the epoch at hand all that the schedule needs to be known
            "epoch": self.epoch, "history": self.history, "best": self.best, "seconds": self.seconds,
            "fold": self.fold, **self.marks,
            "processors": distributed.gather(own),
        }  # fmt: skip

    def _load_state(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        if self.ema:
            self.ema.module.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        if state["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        for name in ("epoch", "updates", "history", "best", "seconds"):
            setattr(self, name, state[name])
        parts = state["processors"]
        own = parts[distributed.rank()] if len(parts) == distributed.world() else None
        if own:
            self.tally.load_state(own["tally"])
            self._random = own["random"] if self.done else None
        else:  # another number of processors goes on with the same images, and other dropout
            self.tally.load_state(*(part["tally"] for part in parts))
            if not distributed.is_main():
                self.tally.forget()  # the first one has what all had
        self.scheduler.step_update(self.updates + self.tally.taken)  # with more epochs than before it is another rate


def loader_workers(wanted: int, device: str, world: int | None = None) -> int:
    """How many processes load images for each that trains: as many as are `wanted`, or where that is negative what the device
    and the number of processes that train (`world`; None: as it is) make of it."""
    if wanted >= 0:
        return wanted
    # On the CPU the model takes the cores that workers would need.
    return 0 if device == "cpu" else min(8, env.cores() // (world or distributed.world()))


def make_loader(
    dataset: data.MammogramDataset, batches: Iterable[list], workers: int, device: str, timeout_s: float = 0
) -> DataLoader:
    """A loader of batches, given as lists of the dataset's items, for a model on a device.

    Args:
        timeout_s: seconds after which a batch that does not come is an error; 0: never.
    """
    return DataLoader(
        dataset, batch_sampler=batches, num_workers=workers, pin_memory=device.startswith("cuda"),
        collate_fn=data.collate, worker_init_fn=data.worker_init, persistent_workers=workers > 0, timeout=timeout_s,
        generator=torch.Generator(),  # its own: what it draws for workers must not shift what dropout draws
    )  # fmt: skip


def unit_of(model_config: models.ModelConfig) -> str:
    """What a model sees at a time, and has a row of scores for: `image` or `breast`."""
    return "image" if model_config.views == "none" else "breast"


def check_settings(model_config: models.ModelConfig, config: recipe.TrainConfig) -> None:
    """Refuses (ValueError) settings of model and training that do not go together."""
    if unit_of(model_config) == "breast" and (config.mixup or config.cutmix):
        raise ValueError("mixup and cutmix mix images, and with views a breast has several: set both to 0")


def check_size(model: nn.Module, shape: tuple[int, int]) -> None:
    """Refuses (ValueError) a model that cannot take images of (height, width) pixels, before any image is loaded.

    Args:
        model: as `models.build_model` gives it, on the CPU.
    """
    with contextlib.suppress(Exception):  # a few models cannot be run without computing, and are tried in earnest
        dryrun.run(model, torch.empty(2, 1, *shape, device="meta"), method="features")
        return
    training = model.training
    try:
        with torch.no_grad():
            model.eval().features(torch.zeros(1, 1, *shape))
    except Exception as error:  # timm's models have no kind of error of their own
        refusal = anatomy.refusal(model, (1, 1, *shape), error)
        raise ValueError(f"{refusal} Give it another height and width, or take another backbone.") from error
    finally:
        model.train(training)
