"""Training: `fit` takes a fold from its images to weights and scores, and can be killed and called again.

The epoch itself, in mixed precision, is in `loop`.
"""

import contextlib
import dataclasses
import difflib
import math
import time
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from timm.optim import create_optimizer_v2, list_optimizers
from torch import nn
from torch.utils.data import DataLoader, Sampler
from torch.utils.tensorboard import SummaryWriter

from rsnakit import anatomy, augment, checkpoint, data, dryrun, env, history, models, preprocess, runs
from rsnakit.fields import check_all
from rsnakit.files import Lock, replacing
from rsnakit.loop import evaluate, train_one_epoch
from rsnakit.losses import training_loss
from rsnakit.params import setting
from rsnakit.samplers import BalancedSampler
from rsnakit.store import Store

__all__ = ["TrainConfig", "check_size", "evaluate", "fit", "fit_folds", "train_one_epoch", "unit_of"]


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How a fold is trained; every setting here decides the result."""

    n_folds: int = setting(4, low=2, high=50)  # patients are split into so many
    seed: int = setting(0, low=0, high=2**31 - 1)  # of folds, order, augmentation and the new layers' weights
    epochs: int = setting(6, low=1, high=10_000)
    batch_size: int = setting(16, low=2, high=4096)  # images; breasts where the model sees these
    lr: float = setting(1e-3, low=0.0, high=10.0)  # peak learning rate, after warm-up
    warmup: float = setting(0.1, low=0.0, high=0.9)  # share of all steps over which lr rises
    optimizer: str = setting("adamw")  # any name of timm's create_optimizer_v2
    weight_decay: float = setting(0.02, low=0.0, high=10.0)
    clip_norm: float = setting(10.0, low=0.0)  # gradients are scaled down to this norm; 0: never
    negatives_per_positive: float = setting(3.0, low=0.0)  # positives are repeated up to this; 0: as they are
    min_positives: int = setting(1, low=0)  # in every batch, where positives are repeated
    positive_target: float = setting(0.9, low=0.5, high=1.0)  # what the loss asks of a positive
    positive_weight: float = setting(1.0, low=0.0)  # negatives that a positive counts for in the loss
    aux_weight: float = setting(0.1, low=0.0, high=100.0)  # of the auxiliary heads' mean loss, beside the cancer loss
    augment: str = setting("light", choices=augment.NAMES)
    # Weights that are kept: those of the last epoch, or of the best by a score of the very fold, which flatters it.
    select: str = setting("last", choices=("last", "pf1", "ap"))

    def __post_init__(self) -> None:
        check_all(self)
        if self.optimizer not in list_optimizers():
            near = ", ".join(difflib.get_close_matches(self.optimizer, list_optimizers(), 4, cutoff=0.3))
            raise ValueError(f"optimizer: timm has no {self.optimizer!r}; near it: {near}")


def ensure_demo_run(work: Path, competition: Path, run: env.RunConfig) -> None:
    """Trains a small run on the demo where none is there yet, so that inference has something to show; says so.

    Args:
        work: the work folder.
        competition: the demo's folder.
        run: device, precision and processes.
    """
    with contextlib.suppress(runs.RunError):
        runs.find_run(work, "", is_demo=True)
        return
    print("no run on the demo yet: a small one is trained first. 03_train trains the real one.")
    table = data.debug_subset(data.load_table(competition, "train"))
    preprocess_config, model_config, config = preprocess.PreprocessConfig(), models.ModelConfig(), TrainConfig(epochs=2)
    path = preprocess.store_path(work, competition, preprocess_config, run)
    store = preprocess.build_store(table, preprocess_config, path, run.n_jobs, run.store_format)
    settings = runs.settings_of(preprocess_config, model_config, config, data.fingerprint(table), True, True)
    fit_folds(table, store, model_config, config, run, runs.open_run(work, "", settings))


def fit_folds(
    table: pd.DataFrame,
    store: Store,
    model_config: models.ModelConfig,
    config: TrainConfig,
    run: env.RunConfig,
    out: Path,
) -> dict:
    """Trains the folds that `run.fold` names, one after another, and brings `summary.json` up to date after each.

    Args:
        table: as `data.load_table` gives it, all folds.
        store: that holds the images of the table.
        out: the run's folder, as `runs.open_run` gives it.

    Returns:
        The summary over all folds there are (see `runs.write_summary`), one whose time was over among them; empty where
        the time was over before the first epoch.

    Raises:
        rsnakit.data.TableError: the folds are not sound, or `run.fold` is none of them.
        rsnakit.runs.RunError: the settings are not those that the run was opened with.
    """
    runs.check_settings(
        out, preprocess=store.manifest["preprocess"], model=model_config, train=config, data=data.fingerprint(table)
    )
    folds = data.make_folds(table, config.n_folds, config.seed)
    wanted = range(config.n_folds) if run.fold == "all" else [int(run.fold)]
    if wanted[-1] >= config.n_folds:
        raise data.TableError(
            f"fold {run.fold}: with n_folds={config.n_folds} there are folds 0 to {config.n_folds - 1}"
        )
    deadline = time.monotonic() + run.max_hours * 3600 if run.max_hours else math.inf
    for fold in wanted:
        finished = fit(fold, table, folds, store, model_config, config, run, out, deadline)
        summary = runs.write_summary(out) if runs.trained_folds(out) else {}
        if not finished:
            print(f"max_hours={run.max_hours:g} is used up; the same command goes on from here")
            break
    return summary


def fit(
    fold: int,
    table: pd.DataFrame,
    folds: pd.Series,
    store: Store,
    model_config: models.ModelConfig,
    config: TrainConfig,
    run: env.RunConfig,
    out: Path,
    deadline: float = math.inf,
) -> bool:
    """Trains one fold, or goes on with it where `last.pt` is; a finished one is left as it is.

    After each epoch it writes the weights that are kept (`best.safetensors`, `model.json`), their out-of-fold scores
    (`oof.csv`), `history.csv`, TensorBoard's events, and last of all `last.pt`. A run that was killed begins the epoch
    again that it was in, with the same order and augmentation, and ends with the same weights.

    Args:
        folds: fold numbers on the table's index.
        deadline: in seconds of `time.monotonic`; no epoch is begun that would probably end after it.

    Returns:
        Whether the fold is finished.

    Raises:
        rsnakit.data.TableError: a patient is in two folds, or a side has no positive image or no negative one.
        rsnakit.files.LockedError: another process trains this fold.
        ValueError: the model cannot take images of the store's size, or an auxiliary target has no column.
    """
    data.check_folds(table, folds)
    folder = out / f"fold{fold}"
    unit = unit_of(model_config)
    train = data.side(table[folds != fold], store, unit, f"training side of fold {fold}")
    valid = data.side(table[folds == fold], store, unit, f"fold {fold}")
    device = env.choose_device(run.device)
    precision = env.choose_precision(device.value, run.precision)
    with Lock(folder, f"fold {fold} of run {out.name}"):
        state = checkpoint.load(folder)
        if state and state["epoch"] >= config.epochs:
            missing = [name for name in ("best.safetensors", "model.json", "oof.csv") if not (folder / name).exists()]
            if missing:
                raise runs.RunError(
                    f"{folder}: finished, but without {', '.join(missing)}. Delete it to train it anew."
                )
            print(
                f"fold {fold}: finished at epoch {state['epoch']}. To begin anew, delete {folder} or give another run or seed"
            )
            return True
        trainer = _Trainer(train.images, store, model_config, config, run, device.value, precision.value, fold, state)
        if state:
            print(f"fold {fold}: going on after epoch {trainer.epoch} of {config.epochs}")
        print(
            f"fold {fold}: {len(train.items)} {unit}s to train on ({int(train.items['cancer'].sum())} positive), "
            f"{len(valid.items)} to score; {len(train.bad)} and {len(valid.bad)} without pixels; "
            f"{device.value}, {precision.value}"
        )
        prior = float(pd.concat([train.items["cancer"], train.bad["cancer"]]).mean())
        # Without gradients there is room for more; but a breast may come with eight images.
        batch_size = config.batch_size * (2 if unit == "image" else 1)
        valid_loader = trainer.loader(trainer.dataset(valid.images), batch_size)
        longest = 0.0
        # purge_step hides what a killed run wrote of the epoch that is now begun again.
        with SummaryWriter(str(folder), purge_step=trainer.epoch + 1) as writer:
            while trainer.epoch < config.epochs:
                if time.monotonic() + longest > deadline:
                    return False
                begun = time.monotonic()
                _run_epoch(trainer, train, valid, valid_loader, prior, folder, writer)
                longest = max(longest, time.monotonic() - begun)
    return True


def unit_of(model_config: models.ModelConfig) -> str:
    """What a model sees at a time, and has a row of scores for: `image` or `breast`."""
    return "image" if model_config.views == "none" else "breast"


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


class _Trainer:
    """Everything of a fold's training that changes as it goes on, with its state in and out."""

    def __init__(self, images, store, model_config, config, run, device, precision, fold, state) -> None:
        torch.manual_seed(data.sample_seed(config.seed, fold, 0))
        self.config, self.device, self.precision, self.fold = config, device, precision, fold
        self.store, self.num_workers = store, run.num_workers
        self.model_config = model_config
        # A run that goes on has its own weights, and must not need the hub or file that it began from.
        model = models.build_model(
            dataclasses.replace(model_config, weights="none", drop_weights=()) if state else model_config
        )
        model.config = model_config  # so that model.json says what training began from, after a break too
        check_size(model, store.shape)
        self.model = model.to(
            device, memory_format=torch.channels_last
        )  # twice as fast here on a CPU, and on tensor cores
        dataset = self.dataset(images, augment.build(config.augment, *store.shape), model_config.aux, draw=True)
        self.sampler = BalancedSampler(
            dataset.labels, config.negatives_per_positive, config.batch_size, config.min_positives, config.seed
        )
        self.train_loader = self.loader(dataset, config.batch_size, self.sampler)
        self.optimizer = create_optimizer_v2(
            self.model, opt=config.optimizer, lr=config.lr, weight_decay=config.weight_decay
        )
        steps = max(1, config.epochs * len(self.train_loader))
        self.factor = partial(warmup_cosine, steps=steps, warmup=round(steps * config.warmup))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.factor)
        self.scaler = torch.amp.GradScaler(torch.device(device).type, enabled=precision == "fp16")
        self.epoch, self.history, self.best = 0, [], -math.inf
        if state:
            self.load_state(state)

    def dataset(self, images: pd.DataFrame, transform=None, aux=(), draw: bool = False) -> data.MammogramDataset:
        """A table's images, or the breasts they show, as the model takes them."""
        seed = data.sample_seed(self.config.seed, self.fold, 1)
        return data.MammogramDataset(images, self.store, transform, unit_of(self.model_config), seed, aux, draw)

    def loader(self, dataset: data.MammogramDataset, batch_size: int, sampler: Sampler | None = None) -> DataLoader:
        """Batches of a data set: in its order, or in a sampler's."""
        workers = self.num_workers
        if workers < 0:  # on the CPU the model takes the cores that workers would need
            workers = 0 if self.device == "cpu" else min(8, env.cores())
        count = len(sampler) if sampler is not None else len(dataset)
        return DataLoader(
            dataset, batch_size, sampler=sampler, num_workers=workers, pin_memory=self.device.startswith("cuda"),
            drop_last=sampler is not None and count > 1 and count % batch_size == 1,  # one image has no batch statistics
            collate_fn=data.collate, worker_init_fn=data.one_thread, persistent_workers=workers > 0,
            generator=torch.Generator(),  # its own: what it draws for workers must not shift what dropout draws
        )  # fmt: skip

    def state(self) -> dict:
        parts = ("model", "optimizer", "scheduler", "scaler")
        return {
            **{name: getattr(self, name).state_dict() for name in parts},
            "epoch": self.epoch, "history": self.history, "best": self.best,
        }  # fmt: skip

    def load_state(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        for group, base in zip(self.optimizer.param_groups, self.scheduler.base_lrs, strict=True):
            group["lr"] = base * self.factor(self.scheduler.last_epoch)  # with more epochs than before it is another
        if state["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        self.epoch, self.history, self.best = state["epoch"], state["history"], state["best"]


def warmup_cosine(step: int, steps: int, warmup: int, floor: float = 0.01) -> float:
    """A factor on the learning rate: rises over the first `warmup` of the steps, then falls to `floor` along a cosine."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2


def _run_epoch(
    trainer: _Trainer, train: data.Side, valid: data.Side, valid_loader, prior: float, folder, writer
) -> None:
    """One epoch with everything that is written after it."""
    config, begun = trainer.config, time.monotonic()
    trainer.sampler.set_epoch(trainer.epoch)
    # Dropout draws from here; seeded by the epoch, it is the same after a resume.
    torch.manual_seed(data.sample_seed(config.seed, trainer.fold, 2 + trainer.epoch))
    title = f"fold {trainer.fold}, epoch {trainer.epoch + 1} of {config.epochs}"
    trained = train_one_epoch(
        trainer.model, trainer.train_loader, trainer.optimizer, trainer.scheduler, trainer.scaler,
        partial(
            training_loss, positive_target=config.positive_target, positive_weight=config.positive_weight,
            aux_weight=config.aux_weight,
        ),
        config.clip_norm, trainer.device, trainer.precision, title,
    )  # fmt: skip
    # Of cancer alone, as it is: what the curves show shall not depend on how training is bent.
    scored = evaluate(trainer.model, valid_loader, training_loss, trainer.device, trainer.precision, f"{title}, scores")
    trainer.epoch += 1
    oof = history.oof_rows(valid.items, valid.bad, scored.items, scored.scores, trainer.fold, prior)
    row = {
        "epoch": trainer.epoch,
        "lr": trainer.optimizer.param_groups[0]["lr"],
        "train_loss": trained.loss,
        **history.side_scores("train", history.train_rows(train.items, trained.items, trained.scores)),
        "train_resampled": trainer.sampler.balanced,  # then its scores are of another share of positives
        "valid_loss": scored.loss,
        **history.side_scores("valid", oof),
        "grad_norm": trained.grad_norm,
        "skipped_steps": trained.skipped,
        "seconds": round(time.monotonic() - begun, 2),
    }
    trainer.history.append(row)
    print(history.line(row, config.epochs))
    score = {"last": trainer.epoch, "pf1": row["valid_f1"], "ap": row["valid_ap"]}[config.select]
    if score > trainer.best:
        trainer.best = score
        _keep(trainer, oof, prior, folder)
    with replacing(folder / "history.csv") as temporary:
        pd.DataFrame(trainer.history).to_csv(temporary, index=False)
    history.log(writer, row)
    checkpoint.save(folder, trainer.state())


def _keep(trainer: _Trainer, oof: pd.DataFrame, prior: float, folder: Path) -> None:
    """Writes the weights of now with their scores and all that inference needs to use them."""
    with replacing(folder / "oof.csv") as temporary:
        oof.to_csv(temporary, index=False)
    models.save_model(
        trainer.model, folder, preprocess=trainer.store.manifest["preprocess"], prior=prior, epoch=trainer.epoch,
        select=trainer.config.select, oof_rows=len(oof),
    )  # fmt: skip
