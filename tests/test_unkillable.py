"""A training that is killed, interrupted, stopped or short of disk, at any moment: the same command goes on and ends the same.

Each training runs in a process of its own, forked from a server that has imported everything once; those that a person would
start by a command or in a notebook run so.
"""

import dataclasses
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from rsnakit import checkpoint, data, engine, models, preprocess, results, runs, stopping, store, tables
from rsnakit.engine import LoopConfig, TrainConfig
from rsnakit.env import RunConfig

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
    for output in (1, 2):
        os.dup2(log.fileno(), output)
    sys.stdout = sys.stderr = log
    multiprocessing.set_start_method("fork", force=True)  # of loader processes, as it is in a command of its own
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
    trainer = os.getpid()

    def call(*arguments, **options):
        nonlocal left
        left -= 1
        if left == 0 and os.getpid() == trainer:  # not in a loader process, each of which counts for itself
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
        return (self.work / "log").read_text() if (self.work / "log").exists() else ""

    def count(self, text: str) -> int:
        """How often it was printed, over all times that the command was given."""
        return self.log().count(text)

    def wait(self, process: multiprocessing.Process, text: str) -> None:
        until = time.monotonic() + 60
        while not self.count(text):
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
    # The dead one's lock; best.safetensors, model.json, oof.csv written aside and moved to their places; history.csv; last.pt
    # to previous.pt: killed before the new one is in its place.
    assert command(dies={"replace": 10}) == -signal.SIGKILL
    assert not (command.fold / "last.pt").exists() and command.done() == (0, STEPS)
    assert runs.unfinished_folds(command.fold.parent) == {0: "epoch 1 of 3"}
    assert command() == 0, command.log()
    assert f"going on after epoch 0 of 3 and {STEPS} of {STEPS} steps" in command.log()
    assert_ends_as(command, unbroken)
    (command.fold / "damaged.pt").touch()
    assert command() == 0 and "finished at epoch 3" in command.log()


@pytest.mark.slow
def test_killed_at_twenty_random_moments_it_ends_the_same(command, unbroken):  # C01, C04, C06
    """By the clock, or as a batch is loaded, a file is written or put in its place; with and without loader processes. Runs
    that end in spite of it are begun anew."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw, kills, within = random.Random(seed), 0, 0
    while kills < 20:
        kind = draw.choice(["time", "time", "time", "batch", "batch", "replace", "fsync"])
        dies = {kind: draw.randint(1, 12 if kind == "batch" else 8)} if kind != "time" else None
        begun = command.count("to train on")
        process = command.start(dies=dies, save_every=draw.choice([1, 1, 2]), num_workers=draw.choice([0, 0, 0, 1]))
        if kind == "time":
            while process.is_alive() and command.count("to train on") == begun:  # or finished already
                time.sleep(0.005)
            time.sleep(draw.uniform(0, 1))
            process.kill()
        process.join(60)
        print(kills, dies, process.exitcode, command.done())
        if process.exitcode == 0:
            assert_ends_as(command, unbroken)
            shutil.rmtree(command.work)
        else:
            assert process.exitcode == -signal.SIGKILL, command.log()
            kills, within = kills + 1, within + (command.done()[1] in range(1, STEPS))
    assert within  # some in the middle of an epoch
    assert command() == 0, command.log()
    assert_ends_as(command, unbroken)


# Being asked to stop


@pytest.mark.parametrize(("number", "name", "status"), [(signal.SIGTERM, "SIGTERM", -15), (signal.SIGINT, "Ctrl-C", 0)])
def test_a_signal_saves_and_ends(command, unbroken, number, name, status):
    """As Kaggle, Slurm and docker stop have it: with the line that says how to go on, and after a SIGTERM with its status."""
    process = command.start(save_every=0)
    command.wait(process, "epoch 1/3")
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == status, command.log()
    assert re.search(
        rf"fold 0: stopped by {name}, saved epoch [12] of 3.*; the same command goes on from here", command.log()
    )
    assert not (command.fold / "lock.json").exists()
    unfinished = {str(fold): state for fold, state in runs.unfinished_folds(command.fold.parent).items()}
    assert len(unfinished) == 1 and runs.read_summary(command.fold.parent)["unfinished"] == unfinished
    assert command() == 0, command.log()
    assert_ends_as(command, unbroken)


def test_too_late_within_an_epoch_saves_and_ends(command, unbroken):
    """The next looks at the clock, after a step each, are after the deadline."""
    assert command(looks=1, save_every=0) == 0
    epochs, steps = command.done()
    assert epochs == 0 and 0 < steps < STEPS
    assert (
        f"stopped by max_hours, saved epoch 0 of 3 and {steps} of {STEPS} steps of the next; the same" in command.log()
    )
    assert runs.unfinished_folds(command.fold.parent) == {0: "epoch 0 of 3"}
    assert runs.trained_folds(command.fold.parent) == {}
    assert command(looks=6, save_every=0) == 0  # within the evaluation, or the next epoch
    assert command.done() > (0, steps)
    assert command(save_every=0) == 0
    assert_ends_as(command, unbroken)


# What goes wrong otherwise


def test_a_full_disk_leaves_the_checkpoint_before(command, unbroken):
    assert command(looks=1) == 0
    before = command.done()
    size = (command.fold / "last.pt").stat().st_size
    assert command(limit=size // 2) == 1
    assert "last.pt cannot be written: File too large" in command.log()
    assert "the checkpoint before is whole" in command.log()
    assert command.done() == before
    assert command() == 0, command.log()
    assert_ends_as(command, unbroken)


def test_a_damaged_checkpoint_costs_a_save_not_the_run(command, unbroken):
    assert command(looks=1) == 0
    before = command.done()
    damaged = bytearray((command.fold / "last.pt").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (command.fold / "last.pt").write_bytes(damaged)
    assert command.done() < before
    assert command() == 0 and "last.pt cannot be read" not in command.log()  # the look above moved it away
    assert_ends_as(command, unbroken)


def test_another_data_set_or_run_is_refused_and_nothing_begins_anew(unbroken, competition, store, tmp_path):
    table = tables.load_table(competition, "train")
    copy = tmp_path / "runs" / "mine"
    shutil.copytree(unbroken.fold.parent, copy)
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    with pytest.raises(runs.RunError, match=r"data: '\w+' before, '\w+' now"):
        open_run(tmp_path, store, table.iloc[1:])
    with pytest.raises(runs.RunError, match=r"data: "):
        engine.fit_folds(table.iloc[1:], store, MODEL, TRAIN, RUN, copy)
    # A fold's folder that was put into another run, or under another number.
    other = dataclasses.replace(TRAIN, lr=1e-4)
    elsewhere = open_run(tmp_path, store, table, other, "other")
    shutil.copytree(copy / "fold0", elsewhere / "fold0")
    with pytest.raises(
        runs.RunError, match=r"checkpoint of another run, fold or set of images \(train\.lr: 0\.003, not 0\.0001\)"
    ):
        engine.fit_folds(table, store, MODEL, other, RUN, elsewhere)
    shutil.copytree(copy / "fold0", copy / "fold1")
    with pytest.raises(runs.RunError, match=r"checkpoint of another run, fold or set of images \(fold: 0, not 1"):
        engine.fit_folds(table, store, MODEL, TRAIN, dataclasses.replace(RUN, fold="1"), copy)
    shutil.rmtree(copy / "fold1")
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


def test_a_run_of_an_older_kit_is_refused_by_its_missing_settings(unbroken, competition, store, tmp_path):
    table = tables.load_table(competition, "train")
    copy = tmp_path / "runs" / "mine"
    shutil.copytree(unbroken.fold.parent, copy)
    config = json.loads((copy / "config.json").read_text())
    del config["settings"]["train"]["mixup"], config["settings"]["train"]["ema_decay"]
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        runs.RunError,
        match=r"(?s)by another version of the kit, and with other settings:.*train\.ema_decay: not there before, 0\.9 now",
    ):
        open_run(tmp_path, store, table)


# Two folds at once


def test_two_folds_at_once_are_both_in_the_summary(command):
    processes = [command.start(fold=fold, epochs=1) for fold in ("0", "1")]
    for process in processes:
        process.join(120)
        assert process.exitcode == 0, command.log()
    summary = runs.read_summary(command.fold.parent)
    assert summary["folds"] == [0, 1] and summary["unfinished"] == {}
    assert summary == results.write_summary(command.fold.parent)


def end_slowly(run: Path, staged: Path, reads, goes_on) -> None:
    """Brings fold 0 and writes the summary; while it is scored, the other process ends too."""
    real = results.nested.score_breasts

    def slowly(breasts):
        reads.set()
        goes_on.wait(30)
        return real(breasts)

    results.nested.score_breasts = slowly
    (staged / "fold0").rename(run / "fold0")
    results.write_summary(run)


def end_meanwhile(run: Path, staged: Path, reads, goes_on) -> None:
    reads.wait(30)
    (staged / "fold1").rename(run / "fold1")
    results.write_summary(run)
    goes_on.set()


def test_a_fold_that_ends_while_another_is_scored_is_not_lost(unbroken, tmp_path):
    run, staged = tmp_path / "run", tmp_path / "staged"
    shutil.copytree(unbroken.fold.parent, run)
    for fold in (0, 1):
        shutil.copytree(run / "fold0", staged / f"fold{fold}")
        oof = pd.read_csv(staged / f"fold{fold}" / "oof.csv")
        oof.assign(patient_id=oof["patient_id"] + fold, fold=fold).to_csv(
            staged / f"fold{fold}" / "oof.csv", index=False
        )
    shutil.rmtree(run / "fold0")
    (run / "summary.json").unlink()
    arguments = run, staged, CONTEXT.Event(), CONTEXT.Event()
    processes = [CONTEXT.Process(target=target, args=arguments) for target in (end_slowly, end_meanwhile)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert runs.read_summary(run)["folds"] == [0, 1]


# In a notebook

CELL = """
import sys
from pathlib import Path
sys.path[:0] = [{repository!r}, {tests!r}]
import torch
torch.set_num_threads(1)
import test_unkillable as t
table, images = t.tables.load_table(Path({competition!r}), "train"), t.store.Store({images!r})
folder = t.open_run(Path({work!r}), images, table)
"""
FIT = "print(t.engine.fit_folds(table, images, t.MODEL, t.TRAIN, t.RUN, folder))"


@pytest.fixture
def kernel():
    """A Jupyter kernel, as a notebook has it."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3", env={**os.environ, "OMP_NUM_THREADS": "1"})
    yield manager, client
    client.stop_channels()
    if manager.is_alive():
        manager.shutdown_kernel(now=True)


def answer(client, request: str) -> tuple[str, str]:
    """The status of a cell that was run, and what it printed."""
    printed = []
    while True:
        message = client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") != request:
            continue
        printed.append(message["content"].get("text", ""))
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            return client.get_shell_msg(timeout=60)["content"]["status"], "".join(printed)


@pytest.mark.slow
def test_a_notebook_that_is_interrupted_and_then_killed(kernel, command, unbroken):
    """Ctrl-C (the stop button) saves and leaves the kernel alive; the same cell goes on; kill -9 leaves a lock, which the next
    one takes over."""
    manager, client = kernel
    names = ("competition", "images", "work", "repository", "tests")
    places = {name: str(path) for name, path in zip(names, (*command.places, TESTS.parent, TESTS), strict=True)}
    assert answer(client, client.execute(CELL.format(**places)))[0] == "ok"
    cell = client.execute(FIT)
    seen = command.fold / "last.pt"
    for stop in (manager.interrupt_kernel, lambda: os.kill(manager.provisioner.pid, signal.SIGKILL)):
        before = seen.stat().st_mtime_ns if seen.exists() else 0
        until = time.monotonic() + 60
        while not seen.exists() or seen.stat().st_mtime_ns == before:
            assert time.monotonic() < until
            time.sleep(0.005)
        stop()
        if stop == manager.interrupt_kernel:
            status, printed = answer(client, cell)
            assert status == "ok" and "fold 0: stopped by Ctrl-C, saved epoch " in printed, printed
            assert not (command.fold / "lock.json").exists()
            assert (
                answer(client, client.execute("import signal; print(signal.getsignal(2))"))[1].find("default_int") > 0
            )
            cell = client.execute(FIT)
    assert command.done() < (3, 0) and (command.fold / "lock.json").exists()
    assert command() == 0, command.log()
    assert_ends_as(command, unbroken)
