"""Trials of settings: what steps take, the largest batch, and a process that may die."""

import dataclasses
import itertools
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from rsnakit import data, measuring, models
from rsnakit import trials as trials_module
from rsnakit.models import ModelConfig
from rsnakit.recipe import LoopConfig, TrainConfig
from rsnakit.trials import Batches, Measured, Setting, Trials, Workload, _Found

REPOSITORY = Path(__file__).parents[1]
MODEL = ModelConfig(backbone="test_resnet", weights="none", pooling="avg")
TRAIN = TrainConfig(n_folds=2, epochs=1, batch_size=8, negatives_per_positive=2.0)
PLAIN = Setting("fp32", True, "off", False, 8)
linux = pytest.mark.skipif(sys.platform != "linux", reason="memory of a process is limited on Linux")


@dataclasses.dataclass(frozen=True)
class Trap(Setting):
    """A setting that does something to the process in which it is tried."""

    what: str = ""

    def __getattribute__(self, name: str):
        if name == "channels_last" and multiprocessing.parent_process() is not None:
            what = object.__getattribute__(self, "what")
            if what == "hangs":
                time.sleep(600)
            os.kill(os.getpid(), {"is killed": signal.SIGKILL, "crashes": signal.SIGSEGV}[what])
        return object.__getattribute__(self, name)


def trap(what: str, **changes) -> Trap:
    return Trap(**{**vars(PLAIN), **changes}, what=what)


def changed(setting: Setting = PLAIN, **changes) -> Setting:
    return dataclasses.replace(setting, **changes)


@pytest.fixture(scope="module")
def workload(table, store) -> Workload:
    return Workload(data.usable(table, store)[0], store.path, MODEL, TRAIN, LoopConfig(), "cpu")


@pytest.fixture(scope="module")
def trials(workload):
    with Trials(workload) as trials:
        yield trials


@pytest.fixture
def clock(monkeypatch):
    """A clock that only training moves: the seconds of each step, the last one for all that follow."""
    now, steps, sizes = [0.0], [0.5, 0.125], []

    def perf_counter() -> float:
        return now[0]

    real = measuring.train_one_epoch

    def train(model, batches, *arguments, **options):
        for sizes_of_step in options["steps"]:
            sizes.append(sizes_of_step)
            now[0] += steps.pop(0) if len(steps) > 1 else steps[0]
        return real(model, batches, *arguments, **options)

    monkeypatch.setattr(measuring.time, "perf_counter", perf_counter)
    monkeypatch.setattr(measuring, "train_one_epoch", train)
    return sizes


def test_rates_are_images_over_seconds(workload, clock):
    """A first step of 0.5 s and others of 0.125 s: two to a round of 0.2 s."""
    training = measuring.Training(workload, measuring.Samples(workload), changed(batch_size=6))
    for _ in range(3):
        training.round()
    assert training.measured.images_s == pytest.approx([48.0] * 3)
    assert training.measured.compile_s == pytest.approx(0.375)
    assert clock == [[6]] * (1 + 2 + 3 * 2)


def test_batches_of_a_step_are_added_up(workload, clock):
    more = dataclasses.replace(workload, train=dataclasses.replace(TRAIN, accumulate=12))
    training = measuring.Training(more, measuring.Samples(more), changed(batch_size=6))
    training.round()
    assert clock[0] == [6, 6] and training.measured.images_s == pytest.approx([96.0])
    assert training.trainer.sampler.accumulate == 2  # how a model is compiled depends on whether gradients add up


def test_batches_repeat_the_images(workload):
    samples = measuring.Samples(dataclasses.replace(workload, images=workload.images.iloc[:24]))
    count = len(samples.samples)
    batch = samples.batch(count + 5, pinned=False)
    assert torch.equal(batch["image"][count:], batch["image"][:5]) and batch["image"].shape == (count + 5, 1, 64, 32)
    assert 0 < batch["cancer"].mean() < 1


def test_a_loss_that_is_nan_is_an_error(workload):
    samples = measuring.Samples(workload)
    samples.samples[0]["image"].fill_(math.nan)
    for precision in ("fp32", "bf16"):
        with pytest.raises(FloatingPointError, match=f"the loss is nan in {precision} on cpu"):
            measuring.Training(workload, samples, changed(precision=precision))


def test_a_loss_that_is_nan_is_an_error_with_a_scaler(workload, monkeypatch):
    """A scaler leaves the step out, and would go on for a while without a word."""
    monkeypatch.setattr(measuring.env, "choose_precision", lambda device, wanted: measuring.env.Choice(wanted, ""))
    samples = measuring.Samples(workload)
    samples.samples[0]["image"].fill_(math.nan)
    with pytest.raises(FloatingPointError, match="the loss is nan in fp16 on cpu"):
        measuring.Training(workload, samples, changed(precision="fp16"))


def test_steps_that_overflow_are_not_all_there_is(workload, clock, monkeypatch):
    """A scaler halves its scale after each step that it leaves out; without any that was taken the optimiser has no memory yet,
    and a batch may seem to fit. Steps take 0.5 s, more than a round needs."""
    real, made = measuring._trainer, []

    def trainer(*arguments):
        made.append(real(*arguments))
        made[0].scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=1000)
        return made[0]

    monkeypatch.setattr(measuring.env, "choose_precision", lambda device, wanted: measuring.env.Choice(wanted, ""))
    monkeypatch.setattr(measuring, "_trainer", trainer)
    training = measuring.Training(workload, measuring.Samples(workload), changed(precision="fp16", compile="off"))
    skipped = len(clock) - training.updates
    assert skipped > 2 and training.updates >= 1 and made[0].optimizer.state


def test_weights_stay_where_they_are(workload):
    """So many steps over a few images must not end in a loss that is no more finite, however high lr is."""
    wild = dataclasses.replace(workload, train=dataclasses.replace(TRAIN, lr=10.0, optimizer="sgd", clip_norm=0.0))
    training = measuring.Training(wild, measuring.Samples(wild), PLAIN)
    training.round()
    assert training.updates > training.steps and np.isfinite(training.measured.median)


def test_settings_in_turn(trials, workload):
    """One process for all of them: those that cannot be done say why, and the others go on."""
    before = [(path, path.stat().st_mtime_ns) for path in sorted(Path(workload.store).rglob("*"))]
    found = trials.in_turn(
        [
            PLAIN, changed(precision="bf16", channels_last=False), changed(precision="fp16"), changed(precision="fp8"),
            changed(compile="fast"), changed(batch_size=0), changed(grad_checkpointing=True, batch_size=16),
        ],
        rounds=2,
    )  # fmt: skip
    for each in (found[0], found[1], found[6]):
        assert not each.error and len(each.images_s) == 2 and each.low > 0
        assert each.low <= each.median <= each.high
        assert sys.platform != "linux" or each.peak_mb > 0
    for each, why in zip(
        found[2:6],
        ("a CPU is slow in fp16", "expected auto, fp32, bf16", "expected off, default", "at least 1"),
        strict=True,
    ):
        assert why in each.error and not each.images_s and math.isnan(each.median)
    assert before == [(path, path.stat().st_mtime_ns) for path in sorted(Path(workload.store).rglob("*"))]


@linux
def test_a_process_that_dies_costs_one_setting(trials):
    found = trials.in_turn([trap("is killed"), PLAIN, trap("crashes")], rounds=1)
    assert "was killed, as the system does when the main memory is used up" in found[0].error and not found[0].images_s
    assert "crashed with SIGSEGV" in found[2].error
    assert not found[1].error and len(found[1].images_s) == 1


@linux
@pytest.mark.slow
def test_memory_that_a_step_takes_grows_with_the_batch(trials, workload):
    """By as much as backward needs of an image, and what is computed on the way."""
    small, large = trials.in_turn([changed(batch_size=64), changed(batch_size=512)], rounds=1)
    per_image = (large.peak_mb - small.peak_mb) * 1e6 / (512 - 64)
    assert 1 <= per_image / saved_bytes() <= 2


def saved_bytes() -> float:
    """Bytes that autograd keeps of an image, weights left out."""
    model, kept = models.build_model(MODEL).train(), {}
    images = torch.rand(4, 1, 64, 32).to(memory_format=torch.channels_last)
    own = {parameter.data_ptr() for parameter in model.parameters()}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        outputs = model(images)["cancer"]
    assert outputs.requires_grad
    return sum(kept.values()) / 4


@pytest.mark.parametrize("asked, most", list(itertools.product((1, 3, 16, 100), (1, 20, 64))))
def test_bisection_finds_the_largest(workload, monkeypatch, asked, most):
    """Against trying all of them, for every capacity there may be."""
    for capacity in (0, 1, 2, 3, 15, 16, 17, 19, 20, 21, 63, 64, 1000):
        sizes = []

        def tried(settings, rounds, end, memory_gb, crash_is_room, capacity=capacity, sizes=sizes):
            (size,) = (setting.batch_size for setting in settings)
            sizes.append(size)
            fits = size <= capacity
            return [_Found(Measured((1.0,)) if fits else Measured(error="memory"), no_room=not fits)], end

        trials = Trials(workload)
        monkeypatch.setattr(trials, "_tried", tried)
        found = trials.largest_batch(changed(batch_size=asked), most)
        assert found.largest == max((size for size in range(1, most + 1) if size <= capacity), default=0)
        assert found.ended == ("most" if capacity >= most else "memory")
        assert len(set(sizes)) == len(sizes) <= 14 and max(sizes) <= most
        assert [row["batch"] for row in found.tried] == sizes


def test_what_ends_the_search_for_a_batch(workload, monkeypatch):
    """An error that has nothing to do with the size, and the limit."""
    answers = [_Found(Measured((5.0,))), _Found(Measured(error="ValueError: no"))]
    for last, ended, rows in ((answers[1], "error", 2), (_Found(Measured(error="late"), no_time=True), "time", 1)):
        trials, left = Trials(workload), [answers[0], last]
        monkeypatch.setattr(trials, "_tried", lambda *_, left=left, **__: ([left.pop(0)], 0.0))
        found = trials.largest_batch(PLAIN)
        assert (found.largest, found.ended, len(found.tried)) == (8, ended, rows)
    assert found == Batches(8, [{"batch": 8, "fits": True, "images_s": 5.0, "peak_mb": pytest.approx(math.nan, nan_ok=True),
                                 "why": ""}], "time")  # fmt: skip
    with pytest.raises(ValueError, match="positive"):
        trials.largest_batch(PLAIN, memory_gb=0)


class Deaf(list):
    """A pipe that keeps what is sent."""

    def send(self, message: tuple) -> None:
        self.append(message)


def test_memory_that_ran_out_is_given_back(workload, monkeypatch):
    """On a GPU all goes on in the same process: what filled it must be gone, and the next setting is tried."""
    held = []

    class Training:
        def __init__(self, workload, samples, setting) -> None:
            self.measured, activations = Measured((1.0,)), torch.zeros(8)
            held.append(weakref.ref(activations))
            self.model, self.itself = activations, self  # models have such circles, and go when Python looks for them
            if setting.batch_size == 16:
                try:
                    raise RuntimeError("CUDA error: out of memory")
                except RuntimeError as error:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB") from error

        def round(self) -> None:
            assert held[0]() is not None and held[1]() is None

    monkeypatch.setattr(measuring, "Training", Training)
    pipe = Deaf()
    trials_module._answer(pipe, workload, None, 1, [PLAIN, changed(batch_size=16), PLAIN], 1, None, 60)
    (failed,) = (message for message in pipe if message[0] == "failed")
    assert failed[1] == 1 and "the GPU's memory is used up" in failed[2][0] and failed[2][1]
    assert [message[1] for message in pipe if message[0] == "measured"] == [0, 2, 0, 2] and pipe[-1][0] == "end"
    assert all(each() is None for each in held)


def test_memory_that_this_process_keeps_is_given_back_before_trials_begin(workload, monkeypatch):
    """A notebook's kernel that has computed on the GPU holds of it what torch keeps for the next time."""
    done = []

    class Worker:
        process = SimpleNamespace(is_alive=lambda: True)

        def __init__(self) -> None:
            done.append("begun")

        def begin(self, workload) -> str:
            return ""

    monkeypatch.setattr(trials_module, "_Worker", Worker)
    for name in ("is_initialized", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: done.append(name) or True)
    Trials(dataclasses.replace(workload, device="cuda"))._ready_worker()
    assert done == ["is_initialized", "synchronize", "empty_cache", "begun"]


@linux
@pytest.mark.slow
def test_the_largest_batch_in_a_memory(trials):
    """Twice, with more memory the second time: the images that this is more are as many as it has room for."""
    import resource

    before = [resource.getrlimit(kind) for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]
    found = [trials.largest_batch(changed(batch_size=72), memory_gb=memory) for memory in (0.1, 0.2)]
    for each in found:
        assert each.ended == "memory"
        fits = {row["batch"]: row["fits"] for row in each.tried}
        assert fits[each.largest] and not fits[each.largest + 1]
        assert all("memory is used up" in row["why"] for row in each.tried if not row["fits"])
        assert all(row["images_s"] > 0 for row in each.tried if row["fits"])
    per_image = 0.1e9 / (found[1].largest - found[0].largest)
    assert 1 <= per_image / saved_bytes() <= 2
    assert before == [resource.getrlimit(kind) for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]


@linux
@pytest.mark.slow
def test_a_process_that_hangs_is_ended_at_its_limit(workload):
    with Trials(workload) as trials:
        assert not trials.step(PLAIN, rounds=1).error
        hung = trials._worker.process
        found = trials.in_turn([trap("hangs"), PLAIN], rounds=1, limit_s=8)
        assert "was not done after 4 s" in found[0].error
        assert not found[1].error
        assert not hung.is_alive()
        process = psutil.Process(trials._worker.process.pid)
    assert not process.is_running()


@pytest.mark.slow
def test_what_cannot_be_trained_at_all(workload):
    """Few positives, breasts, auxiliary heads, no such store."""
    healthy = dataclasses.replace(workload, images=workload.images[workload.images["cancer"] == 0])
    with Trials(healthy) as trials:
        assert "0 positives" in trials.step(PLAIN).error
        assert trials.largest_batch(PLAIN).ended == "error"
    model = dataclasses.replace(MODEL, views="attention", aux=("density",))
    with Trials(dataclasses.replace(workload, model=model)) as trials:
        found = trials.in_turn([PLAIN, changed(batch_size=40)], rounds=1)
        assert all(not each.error and each.median > 0 for each in found)


SCRIPT = """
import pickle, sys
from rsnakit.trials import Trials
with open(sys.argv[1], "rb") as file:
    workload, setting = pickle.load(file)
with Trials(workload) as trials:
    trials.in_turn([setting], rounds=0)
    print(trials._worker.process.pid, flush=True)
    trials.in_turn([setting], rounds=10**9, limit_s=10**6)
"""


@linux
@pytest.mark.slow
def test_trials_that_were_never_closed_leave_nothing(workload, tmp_path):
    """As a notebook that fails before its end leaves them."""
    import pickle

    (tmp_path / "workload").write_bytes(pickle.dumps((workload, PLAIN)))
    script = SCRIPT.replace("with Trials(workload) as trials:", "trials = Trials(workload)\nif True:").splitlines()[:-2]
    script = "\n".join([*script, "    print(trials._worker.process.pid, flush=True)", "1 / 0"])
    told = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "workload"], cwd=REPOSITORY, capture_output=True, text=True, timeout=120,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert "ZeroDivisionError" in told.stderr and not psutil.pid_exists(int(told.stdout))
    assert not list(tmp_path.glob("rsnakit-*"))


@linux
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_parent(workload, tmp_path, number):
    """Told to stop, or killed; begun as a notebook's kernel begins, with no file for __main__."""
    import pickle

    (tmp_path / "workload").write_bytes(pickle.dumps((workload, PLAIN)))
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, tmp_path / "workload"], cwd=REPOSITORY, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as parent:  # fmt: skip
        try:
            child = psutil.Process(int(parent.stdout.readline()))
            end = time.monotonic() + 30
            while not child.children() and time.monotonic() < end:
                time.sleep(0.1)
            family = [child, *child.children()]
            assert len(family) == 2
            parent.send_signal(number)
            parent.wait(30)
            _, alive = psutil.wait_procs(family, timeout=20)
            assert not alive and not list(tmp_path.glob("rsnakit-*"))
        finally:
            parent.kill()
