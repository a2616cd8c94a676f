"""Training: `fit` takes a fold from its images to weights and scores, and can be killed and called again.

The epoch itself, in mixed precision, is in `loop`.
"""

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pandas as pd
from torch.utils.tensorboard import SummaryWriter

from rsnakit import checkpoint, data, distributed, env, failures, leaks, models, preprocess, results, resuming, runs
from rsnakit.files import Lock, read_json, write_json
from rsnakit.loop import Stopped, evaluate, train_one_epoch
from rsnakit.recipe import LoopConfig, TrainConfig
from rsnakit.rounds import Rounds
from rsnakit.stopping import Stop
from rsnakit.store import Store
from rsnakit.trainer import Trainer, check_size, unit_of

__all__ = [
    "LoopConfig", "TrainConfig", "check_size", "ensure_demo_run", "evaluate", "fit", "fit_folds", "main", "train_one_epoch",
    "unit_of",
]  # fmt: skip

PLAIN = LoopConfig()


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
    folder, loop = runs.open_run(work, "", settings), LoopConfig(n_procs=1)
    fit_folds(table, store, model_config, config, run, folder, loop, competition)


def fit_folds(
    table: pd.DataFrame,
    store: Store,
    model_config: models.ModelConfig,
    config: TrainConfig,
    run: env.RunConfig,
    out: Path,
    loop: LoopConfig = PLAIN,
    competition: Path | None = None,
) -> dict:
    """Trains the folds that `run.fold` names, one after another, and brings `summary.json` up to date after each.

    Before that it looks for leaks (see `leaks.check`). Where several processes are to train, it starts them by torchrun and
    shows their progress; in each of them it is called again.

    Args:
        table: as `data.load_table` gives it, all folds.
        store: that holds the images of the table.
        out: the run's folder, as `runs.open_run` gives it.
        loop: processes, checkpoints and the like, which decide no result.
        competition: the folder of the table, from which several processes read it again, and whose test.csv says what a model
            may be fed with.

    Returns:
        The summary over all folds there are (see `results.write_summary`), one that was stopped among them; empty where no
        epoch was finished yet.

    Raises:
        rsnakit.data.TableError: the folds are not sound, `run.fold` is none of them, or the model would be fed with a leak.
        rsnakit.runs.RunError: the settings are not those that the run was opened with.
        ValueError: settings that do not go together.
        RuntimeError: one of several processes failed; the message has its error.
    """
    fingerprint = data.fingerprint(table)
    runs.check_settings(
        out, preprocess=store.manifest["preprocess"], model=model_config, train=config, data=fingerprint
    )
    folds = data.make_folds(table, config.n_folds, config.seed, config.split)
    wanted = range(config.n_folds) if run.fold == "all" else [int(run.fold)]
    if wanted[-1] >= config.n_folds:
        raise data.TableError(
            f"fold {run.fold}: with n_folds={config.n_folds} there are folds 0 to {config.n_folds - 1}"
        )
    if distributed.world() == 1:  # once, in the process that starts the others
        content, test_columns = leaks.content_of(table, store), leaks.test_columns(competition)
        leaks.check(table, folds, content, test_columns, models.inputs_of(model_config))
        n_procs = (
            loop.n_procs
            if loop.n_procs < 0
            else distributed.processes(loop.n_procs, env.choose_device(run.device).value)
        )
        if n_procs != 1:
            plan = _plan(out, store, model_config, config, run, loop, competition, n_procs)
            if n_procs < 0:
                print(f"ready for several machines; on each: {distributed.command(plan)}")
            else:
                distributed.launch(plan, n_procs)
            return runs.read_summary(out) or {}
    deadline, summary = time.monotonic() + run.max_hours * 3600 if run.max_hours else math.inf, {}
    with Stop() as stop:  # around the one in `fit`: a signal ends the process only once locks are given back
        for fold in wanted:
            finished = fit(fold, table, folds, store, model_config, config, run, out, deadline, loop)
            if distributed.is_main() and runs.trained_folds(out):
                summary = results.write_summary(out)
            if not finished or stop.asked():
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
    loop: LoopConfig = PLAIN,
) -> bool:
    """Trains one fold, or goes on with it where `last.pt` is; a finished one is left as it is.

    After each epoch it writes the weights that are kept (`best.safetensors`, `model.json`), their out-of-fold scores
    (`oof.csv`), `history.csv`, TensorBoard's events, and last of all `last.pt`; within an epoch `last.pt` every
    `loop.save_every` steps. A run that was killed goes on from the newest of these, with the same order, augmentation and
    dropout, and ends with the same weights. Asked to stop, by SIGTERM, Ctrl-C or the clock, it saves where it is.

    Args:
        folds: fold numbers on the table's index.
        deadline: in seconds of `time.monotonic`; the step during which it passes is the last one.

    Returns:
        Whether the fold is finished.

    Raises:
        rsnakit.data.TableError: a patient is in two folds, or a side has no positive image or no negative one.
        rsnakit.files.LockedError: another process trains this fold.
        rsnakit.runs.RunError: the checkpoint is of another run or fold, or a finished fold lacks a file.
        ValueError: the model cannot take images of the store's size, or an auxiliary target has no column.
        RuntimeError: no checkpoint can be read, the disk is full, or memory does not do; what is safe is said.
    """
    data.check_folds(table, folds)
    # The same data in another order is the same run.
    table = table.sort_values(["patient_id", "image_id"], kind="stable")
    folds = folds.loc[table.index]
    folder, unit = out / f"fold{fold}", unit_of(model_config)
    train = data.side(table[folds != fold], store, unit, f"training side of fold {fold}")
    valid = data.side(table[folds == fold], store, unit, f"fold {fold}")
    device = env.choose_device(run.device)
    precision = env.choose_precision(device.value, run.precision)
    settings = runs.read_config(out)
    with Lock(folder, f"fold {fold} of run {out.name}") if distributed.is_main() else contextlib.nullcontext():
        state = checkpoint.load(folder)
        seen = resuming.seen(store, train, valid)
        resuming.check(state, folder, fold, settings, seen)
        if state and state["epoch"] >= config.epochs:
            print(
                f"fold {fold}: finished at epoch {state['epoch']}. To begin anew, delete {folder} or give another run or seed"
            )
            return True
        with failures.explained(partial(_safe, folder / "last.pt")):
            trainer = Trainer(
                train.images, store, model_config, config, loop, device.value, precision.value, run.num_workers, fold,
                {"settings": settings, "seen": seen}, state,
            )  # fmt: skip
            del state  # a second copy of everything
            _say_begun(trainer, train, valid, unit, device, precision)
            # purge_step hides what a killed run wrote of the epoch that is now begun again.
            writer = SummaryWriter(str(folder), purge_step=trainer.epoch + 1) if distributed.is_main() else None
            with Stop(deadline) as stop, writer or contextlib.nullcontext():
                rounds = Rounds(trainer, train, valid, folder, writer, stop)
                try:
                    while trainer.epoch < config.epochs:
                        rounds.run_epoch()
                except Stopped as stopped:
                    print(
                        f"fold {fold}: stopped by {stopped}, saved {_where(trainer)}; the same command goes on from here"
                    )
                    return False
    return True


def main(arguments: Sequence[str] | None = None) -> None:
    """What torchrun runs in each process: the training that a plan in a run's folder, `launch-<fold>.json`, describes."""
    (path,) = map(Path, sys.argv[1:] if arguments is None else arguments)
    distributed.end_with_parent()
    plan = read_json(path)
    run, model_config, config, loop = (
        runs.rebuild(kind, plan[name], path)
        for name, kind in (("run", env.RunConfig), ("model", models.ModelConfig), ("train", TrainConfig), ("loop", LoopConfig))
    )  # fmt: skip
    run = dataclasses.replace(run, device=distributed.join(run.device))
    loop = dataclasses.replace(loop, n_procs=1)  # this is one of them
    quiet = contextlib.nullcontext() if distributed.is_main() else contextlib.redirect_stdout(None)
    with quiet:
        table = data.load_table(Path(plan["competition"]), "train")
        if run.debug:
            table = data.debug_subset(table)
        fit_folds(table, Store(plan["store"]), model_config, config, run, path.parent, loop)
    distributed.leave()


def _plan(out: Path, store: Store, model_config, config, run, loop, competition: Path | None, n_procs: int) -> Path:
    """Writes what each of several processes is to train, and gives the file: one for each fold, since two may be trained at
    once."""
    if competition is None:
        raise ValueError(
            f"n_procs={n_procs}: several processes read the table again; give fit_folds its competition folder"
        )
    if not config.accumulate:
        raise ValueError(
            f"accumulate=0 with n_procs={n_procs}: how many batches make a step has to be known before the run is named; "
            "03_train asks distributed.batches_a_step"
        )
    distributed.batches_a_step(config.accumulate, max(1, n_procs))
    parts = {"run": run, "model": model_config, "train": config, "loop": loop}
    places = {"competition": str(Path(competition).resolve()), "store": str(Path(store.path).resolve())}
    path = out.resolve() / f"launch-{run.fold}.json"
    write_json(path, {**{name: vars(part) for name, part in parts.items()}, **places})
    return path


def _safe(checkpoint: Path) -> str:
    if checkpoint.exists():
        return f"{checkpoint}, from which the same command goes on"
    return "nothing yet: there was no checkpoint before that"


def _say_begun(trainer: Trainer, train: data.Side, valid: data.Side, unit: str, device, precision) -> None:
    config, world = trainer.config, distributed.world()
    if trainer.epoch or trainer.done:
        print(f"fold {trainer.fold}: going on after {_where(trainer)}")
    print(
        f"fold {trainer.fold}: {len(train.items)} {unit}s to train on ({int(train.items['cancer'].sum())} positive), "
        f"{len(valid.items)} to score; {len(train.bad)} and {len(valid.bad)} without pixels; "
        f"{device.value}, {precision.value}"
    )
    bent = ["resampled"] * trainer.sampler.balanced + ["mixed"] * (trainer.mix is not None)
    if bent:
        print(
            f"fold {trainer.fold}: training scores are of {' and '.join(bent)} {unit}s, and not to be held against the others"
        )
    accumulate = distributed.batches_a_step(config.accumulate, world)
    if accumulate > 1:
        print(
            f"a step is {accumulate} batches of up to {config.batch_size} {unit}s, on {world} "
            f"{'processor' if world == 1 else 'processors'}; an epoch is {len(trainer.sampler.steps)} of them"
        )


def _where(trainer: Trainer) -> str:
    """How far training came: after so many epochs, and steps of the next."""
    steps = f" and {trainer.done} of {len(trainer.sampler.steps)} steps of the next" if trainer.done else ""
    return f"epoch {trainer.epoch} of {trainer.config.epochs}{steps}"


if __name__ == "__main__":
    main()
