"""A training that is killed, interrupted, stopped or short of disk, at any moment: the same command goes on and ends the same.

Each training runs in a process of its own, forked from a server that has imported everything once; those that a person would
start by a command or in a notebook run so.
"""

import dataclasses
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from rsnakit import checkpoint, data, engine, models, preprocess, runs, stopping, store, tables
from rsnakit.engine import LoopConfig, TrainConfig
from rsnakit.env import RunConfig

if not hasattr(data, "worker_init"):
    data.worker_init = data.one_thread
TESTS = Path(__file__).parent
# Whatever draws or remembers: two batches to a step, dropout, mixup, an average, augmentation, three steps an epoch.
MODEL = models.ModelConfig(backbone="test_resnet", weights="none", pooling="avg", dropout=0.3)
TRAIN = TrainConfig(
    n_folds=2, epochs=3, batch_size=8, accumulate=2, lr=3e-3, negatives_per_positive=2.0, ema_decay=0.9, mixup=0.4,
    augment="light",
)  # fmt: skip
RUN = RunConfig(device="cpu", fold="0", num_workers=0)
STEPS = 3  # of an epoch, as these settings and the demo give them
CONTEXT = multiprocessing.get_context("forkserver")


def train(
    competition: Path, images: Path, work: Path, dies: dict | None = None, save_every: int = 1, **settings
) -> None:
    """The command: trains, or goes on. What it prints is added to `work/log`.

    Args:
        dies: what the process kills itself at, and the how-manieth: `batch` (as one is loaded), `replace` (as a file takes its
            place), `fsync` (a file being written, not yet in its place).
        settings: of RunConfig, and `epochs`, `limit` (bytes of a file), `looks` (at the clock, until it is too late).
    """
    work.mkdir(exist_ok=True)
    log = open(work / "log", "a", buffering=1)  # noqa: SIM115
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    torch.set_num_threads(1)
    for what, left in (dies or {}).items():
        place, name = {"batch": (data, "collate"), "replace": (os, "replace"), "fsync": (os, "fsync")}[what]
        setattr(place, name, _dying(getattr(place, name), left))
    if limit := settings.pop("limit", 0):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if looks := settings.pop("looks", 0):
        clock = iter([0.0] * looks)
        stopping.time = SimpleNamespace(monotonic=lambda: next(clock, float("inf")))
        settings["max_hours"] = 1.0
    config = dataclasses.replace(TRAIN, epochs=settings.pop("epochs", TRAIN.epochs))
    table, images = tables.load_table(competition, "train"), store.Store(images)
    folder = open_run(work, images, table, config)
    engine.fit_folds(
        table, images, MODEL, config, dataclasses.replace(RUN, **settings), folder, LoopConfig(save_every=save_every)
    )


def open_run(
    work: Path, images: store.Store, table: pd.DataFrame, config: TrainConfig = TRAIN, name: str = "mine"
) -> Path:
    pixels = preprocess.PreprocessConfig(**images.manifest["preprocess"])
    settings = runs.settings_of(pixels, MODEL, config, data.fingerprint(table), is_demo=True, debug=False)
    return runs.open_run(work, name, settings)


def _dying(function, left: int):
    def call(*arguments, **options):
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    return call


class Command:
    """The command as it can be given again and again; each time it runs in another process."""

    def __init__(self, competition: Path, images: store.Store, work: Path) -> None:
        self.places = competition, images.path, work
        self.work, self.fold = work, work / "runs" / "mine" / "fold0"

    def start(self, **options) -> multiprocessing.Process:
        before = {name: os.environ.get(name) for name in ("PYTHONPATH",)}
        os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS)])  # of the server, on its first start
        try:
            process = CONTEXT.Process(target=train, args=self.places, kwargs=options)
            process.start()
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
        return process

    def __call__(self, **options) -> int:
        """Runs it to its end and gives its exit status."""
        process = self.start(**options)
        process.join(120)
        assert process.exitcode is not None, self.log()
        return process.exitcode

    def log(self) -> str:
        return (self.work / "log").read_text()

    def wait(self, process: multiprocessing.Process, text: str, times: int = 1) -> None:
        """Until it has printed a text so many times."""
        until = time.monotonic() + 60
        while not (self.work / "log").exists() or self.log().count(text) < times:
            assert process.is_alive() and time.monotonic() < until, self.log()
            time.sleep(0.005)

    def state(self) -> dict:
        """Of the newest checkpoint."""
        return checkpoint.load(self.fold)

    def done(self) -> tuple[int, int]:
        """Epochs, and steps of the next, that a newest checkpoint has; -1 steps without one."""
        state = self.state()
        return (state["epoch"], state["processors"][0]["tally"]["taken"]) if state else (0, -1)


@pytest.fixture(scope="module", autouse=True)
def server():
    CONTEXT.set_forkserver_preload(["test_unkillable"])


@pytest.fixture
def command(competition, store, tmp_path) -> Command:
    return Command(competition, store, tmp_path)


@pytest.fixture(scope="module")
def unbroken(competition, store, tmp_path_factory) -> Command:
    """The same command, never killed."""
    command = Command(competition, store, tmp_path_factory.mktemp("unbroken"))
    assert command(save_every=0) == 0, command.log()
    return command


def same(a: object, b: object, where: str = "state") -> None:
    """Stops at the first thing in which two states differ; seconds may."""
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for name in a.keys() - {"seconds"}:
            same(a[name], b[name], f"{where}[{name!r}]")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for place, (left, right) in enumerate(zip(a, b, strict=True)):
            same(left, right, f"{where}[{place}]")
    else:
        assert a == b or (a != a and b != b), f"{where}: {a} and {b}"


def assert_ends_as(command: Command, unbroken: Command) -> None:
    """Bit for bit: weights, out-of-fold scores, history, what training would go on from; and no curve has a step twice."""
    for name in ("oof.csv", "best.safetensors", "model.json"):
        assert (command.fold / name).read_bytes() == (unbroken.fold / name).read_bytes(), name
    histories = [pd.read_csv(each.fold / "history.csv").drop(columns="seconds") for each in (command, unbroken)]
    pd.testing.assert_frame_equal(*histories, check_exact=True)
    same(command.state(), unbroken.state())
    assert not list(command.fold.glob(".*")) and not (command.fold / "lock.json").exists()
    left_out = {"epoch", "train_resampled", "train_mixed"}
    assert curves(command.fold).keys() == curves(unbroken.fold).keys()
    assert len(curves(command.fold)) == len(set(pd.read_csv(command.fold / "history.csv")) - left_out)


def curves(fold: Path) -> dict[str, list[int]]:
    """Steps of each of TensorBoard's curves, as it shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(fold)).Reload()
    steps = {name: [point.step for point in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert all(each == list(range(1, len(each) + 1)) for each in steps.values()), steps
    return steps


# Kills


def test_killed_at_three_moments_it_ends_the_same(command, unbroken):  # C01, C06
    """In the middle of a step's batches, in the evaluation after the epoch, and between the two renames of a save."""
    batches = TRAIN.accumulate * STEPS
    assert command(dies={"batch": TRAIN.accumulate + 2}) == -signal.SIGKILL, command.log()
    assert command.done() == (0, 1)
    assert command(dies={"batch": batches - TRAIN.accumulate + 2}) == -signal.SIGKILL
    assert command.done() == (0, STEPS)
    # The dead one's lock, oof.csv, best.safetensors, model.json, history.csv, last.pt to previous.pt: killed before the new one
    # is in its place.
    assert command(dies={"replace": 7}) == -signal.SIGKILL
    assert not (command.fold / "last.pt").exists() and command.done() == (0, STEPS)
    assert runs.unfinished_folds(command.fold.parent) == {0: "epoch 1 of 3"}
    assert command() == 0, command.log()
    assert f"going on after epoch 0 of 3 and {STEPS} of {STEPS} steps" in command.log()
    assert_ends_as(command, unbroken)
    (command.fold / "damaged.pt").touch()
    assert command() == 0 and "finished at epoch 3" in command.log()


@pytest.mark.slow
def test_killed_at_twenty_random_moments_it_ends_the_same(command, unbroken):  # C01, C04, C06
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw, moments, finished = random.Random(seed), [], False
    for life in range(1, 21):
        kind = draw.choice(["time", "time", "time", "replace", "fsync"])
        workers, every = draw.choice([0, 0, 0, 1]), draw.choice([1, 1, 2])
        dies = {kind: draw.randint(1, 6)} if kind != "time" else None
        process = command.start(dies=dies, save_every=every, num_workers=workers)
        if kind == "time":
            command.wait(process, "to train on", sum(moment[0] != "early" for moment in moments) + 1)
            time.sleep(draw.uniform(0, 0.4))
            process.kill()
        process.join(60)
        moments.append((kind, process.exitcode, *command.done(), "last.pt" in os.listdir(command.fold)))
        print(life, dies, *moments[-1])
        finished = finished or process.exitcode == 0
    assert command() == 0, command.log()
    assert_ends_as(command, unbroken)
