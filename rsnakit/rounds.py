"""The epochs of a fold's training, one after another, and all that is written within and after each."""

import time
from pathlib import Path

import pandas as pd
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from rsnakit import checkpoint, data, distributed, history, models
from rsnakit.files import replacing
from rsnakit.loop import Stopped, learning_rate
from rsnakit.stopping import Stop
from rsnakit.trainer import Trainer


class Rounds:
    """What `engine.fit` calls `run_epoch` of until the last epoch is over.

    Args:
        train, valid: the fold's two sides.
        folder: of the fold.
        writer: of TensorBoard's events; None where another process writes.
        stop: asked after each step and batch.
    """

    def __init__(
        self,
        trainer: Trainer,
        train: data.Side,
        valid: data.Side,
        folder: Path,
        writer: SummaryWriter | None,
        stop: Stop,
    ) -> None:
        self.trainer, self.train, self.valid = trainer, train, valid
        self.folder, self.writer, self.stop = folder, writer, stop
        self.prior = float(pd.concat([train.items["cancer"], train.bad["cancer"]]).mean())
        self.valid_loader = trainer.valid_loader(valid.images)

    def run_epoch(self) -> None:
        """One epoch, from where it is to its end."""
        trainer, begun = self.trainer, time.monotonic()
        self.begun = begun - trainer.seconds
        title = f"fold {trainer.fold}, epoch {trainer.epoch + 1} of {trainer.config.epochs}"
        trained = trainer.train(title, self.after_step)
        lr = learning_rate(trainer.optimizer)
        scored = {"valid": trainer.evaluate(trainer.model, self.valid_loader, f"{title}, scores", self.after_batch)}
        if trainer.ema:
            scored["ema_valid"] = trainer.evaluate(
                trainer.ema.module, self.valid_loader, f"{title}, scores of the average", self.after_batch
            )
        seconds = time.monotonic() - self.begun
        trainer.end_epoch()
        oof = {
            side: history.oof_rows(
                self.valid.items, self.valid.bad, found.items, found.scores, trainer.fold, self.prior
            )
            for side, found in scored.items()
        }
        row = history.row(trainer.epoch, lr, trained, self.train.items, scored, oof) | {
            "train_resampled": trainer.sampler.balanced,  # then its scores are of another share of positives
            "train_mixed": trainer.mix is not None,  # and then of other images
            "seconds": round(seconds, 2),
        }
        trainer.history.append(row)
        self.after_epoch(row, oof)

    def after_step(self) -> None:
        """After each optimiser step: a checkpoint where it is time for one, and the end where it was asked for."""
        trainer, every = self.trainer, self.trainer.loop.save_every
        stopped = distributed.any_rank(self.stop.asked())
        if stopped or (every and trainer.done % every == 0):
            self.save()
        if stopped:
            raise Stopped(self.stop.reason or "another process")

    def after_batch(self) -> None:
        """After each batch of an evaluation. Several processors have different numbers of them, and end only after it."""
        if distributed.world() == 1 and self.stop.asked():
            self.save()
            raise Stopped(self.stop.reason)

    def after_epoch(self, row: dict, oof: dict[str, pd.DataFrame]) -> None:
        """Writes what the epoch leaves, the checkpoint last: killed before that, the epoch's end comes again."""
        trainer, config = self.trainer, self.trainer.config
        side = "ema_valid" if trainer.ema and config.ema_keep else "valid"
        score = {"last": trainer.epoch, "pf1": row[f"{side}_f1"], "ap": row[f"{side}_ap"]}[config.select]
        better = score > trainer.best
        trainer.best = max(score, trainer.best)
        if distributed.is_main():
            print(history.line(row, config.epochs))
            if better:
                self._keep(trainer.ema.module if side == "ema_valid" else trainer.model, oof[side])
            with replacing(self.folder / "history.csv") as temporary:
                pd.DataFrame(trainer.history).to_csv(temporary, index=False)
            history.log(self.writer, row)
        self.save()

    def save(self) -> None:
        """Writes the checkpoint; every processor has to call this."""
        self.trainer.seconds = time.monotonic() - self.begun if self.trainer.done else 0.0
        state = self.trainer.state()
        if distributed.is_main():
            checkpoint.save(self.folder, state, self.trainer.loop.keep_last)
        distributed.gather(None)  # torchrun ends all once one has ended, and this one may be told to next

    def _keep(self, model: nn.Module, oof: pd.DataFrame) -> None:
        """Writes a model's weights with their out-of-fold scores and all that inference needs to use them: aside first, so that
        a full disk cannot leave weights of one epoch and scores of another."""
        aside = self.folder / ".kept"
        models.save_model(
            model, aside, preprocess=self.trainer.store.manifest["preprocess"], prior=self.prior,
            epoch=self.trainer.epoch, select=self.trainer.config.select, oof_rows=len(oof),
        )  # fmt: skip
        with replacing(aside / "oof.csv") as temporary:
            oof.to_csv(temporary, index=False)
        for name in ("best.safetensors", "model.json", "oof.csv"):
            (aside / name).replace(self.folder / name)
        aside.rmdir()
