"""Several processes: what they tell one another, what they train, how they are started, and how they end.

Each start of torch takes seconds, so one start checks many things. This file is also what the processes run.
"""

import contextlib
import copy
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from rsnakit import distributed, launching, progress, stopping
from rsnakit.distributed import batches_a_step, processes
from rsnakit.files import process_start

TESTS = Path(__file__).parent


class Small(nn.Module):
    """A model with a dict of logits, a mask beside its images, and a parameter that no pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)
        self.cancer, self.density = nn.Linear(4, 1), nn.Linear(4, 3)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor, view_mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        self.mask = view_mask
        features = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return {"cancer": self.cancer(features)[:, 0], "density": self.density(features)}


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.softplus(model(x, view_mask=torch.ones(len(x), dtype=torch.bool))["cancer"]).mean()


# --- in the processes


def check_all(folder: Path) -> dict:
    """What the functions do in one of two processes, as plain values."""
    rank = distributed.rank()
    found = {"world": distributed.world(), "rank": rank, "is_main": distributed.is_main()}
    values = distributed.gather({"scores": np.full(3 + rank, rank / 2), "name": "ab"[rank]})
    found["gathered"] = [(value["scores"].tolist(), value["name"]) for value in values]
    found["any"] = [distributed.any_rank(flag) for flag in (False, rank == 0, rank == 1, True)]

    norm = nn.BatchNorm1d(2)
    norm.running_mean += 1 + rank
    norm.num_batches_tracked += 7 + rank
    distributed.broadcast_buffers(norm)
    distributed.broadcast_buffers(nn.Linear(1, 1))  # one that has none
    found["buffers"] = norm.running_mean.tolist(), int(norm.num_batches_tracked)

    torch.manual_seed(rank)
    model = Small()
    model.seen += rank
    wrapped = distributed.wrap(model, False, "cpu")
    found["begun"] = float(model.conv.weight.detach().double().sum()), model.seen.tolist()
    alone = copy.deepcopy(model)
    batches = torch.randn(4, 3, 1, 8, 8, generator=torch.Generator().manual_seed(5))  # of a step, on both together
    with distributed.no_sync(wrapped):
        (loss_of(wrapped, batches[rank]) / 2).backward()
    found["kept_to_itself"] = float(model.conv.weight.grad.abs().sum())
    (loss_of(wrapped, batches[2 + rank]) / 2).backward()
    found["mask_kept"] = model.mask.tolist()
    sum(loss_of(alone, batch) / 4 for batch in batches).backward()
    pairs = {name: (p.grad, dict(alone.named_parameters())[name].grad) for name, p in model.named_parameters()}
    found["no_gradient"] = [name for name, (a, b) in pairs.items() if a is None and b is None]
    found["apart"] = {
        name: float((a - b).abs().max()) for name, (a, b) in pairs.items() if b is not None and a is not None
    }
    found["largest"] = max(float(b.abs().max()) for _, b in pairs.values() if b is not None)
    model(batches[0])  # a pass of evaluation on one process alone waits for no other
    for _ in range(2):  # a second step, and one more
        wrapped.zero_grad(set_to_none=True)
        loss_of(wrapped, batches[rank]).backward()
    every = distributed.wrap(nn.Linear(2, 1), False, "cpu")  # torch would warn that it uses all of its parameters
    every(torch.ones(1, 2)).sum().backward()
    with contextlib.suppress(ValueError):
        distributed.wrap(Small(), True, "cpu")
        found["sync_batchnorm"] = True
    return found


def saves_when_asked(folder: Path) -> None:
    with stopping.Stop() as stop:
        (folder / f"looping{distributed.rank()}").write_text(f"{os.getppid()} of torchrun")
        for _ in range(600):
            if distributed.any_rank(stop.asked()):
                time.sleep(0.5)
                (folder / f"saved{distributed.rank()}").write_text(stop.reason)
                distributed.gather(None)
                return
            time.sleep(0.05)


def scribble(folder: Path, name: str) -> None:
    """Writes without an end, as a process that outlives its parent would."""
    with open(folder / f"scribbled_{name}", "a") as f:
        for _ in range(3000):
            f.write(f"{os.getpid()}\n")
            f.flush()
            time.sleep(0.02)


def main(folder: Path) -> None:
    distributed.end_with_parent()
    device = distributed.join("cpu" if torch.cuda.is_available() else "auto")
    rank = distributed.rank()
    if folder.name == "checked":
        print(f"says {rank} on {device}, {os.environ['OMP_NUM_THREADS']} threads")
        print(f"warns {rank}", file=sys.stderr)
        with progress.bar(3, "train") as bar:
            bar.show(loss=0.123456)
            bar.update(3)
        (folder / f"found{rank}.json").write_text(json.dumps(check_all(folder)))
        distributed.gather(None)
        if rank == 1:
            raise LookupError("told by the second")
        distributed.gather("which never comes")
    if folder.name == "killed":
        distributed.gather(None)
        if rank == 1:
            (folder / "dies").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        distributed.gather("which never comes")
    if folder.name in ("stopped", "ended", "shot"):
        saves_when_asked(folder)
    if folder.name == "orphaned":
        multiprocessing.get_context("fork").Process(
            target=scribble, args=(folder, f"worker{rank}"), daemon=True
        ).start()
        scribble(folder, f"rank{rank}")
    distributed.leave()


# --- in the test's process


def launched(folder: Path) -> None:
    """In a fork of this process: launches, and writes what came of it."""
    os.setsid()  # as a notebook's kernel, whose whole group gets what a person sends it
    os.environ["PYTHONPATH"] = str(TESTS)
    os.environ.pop("OMP_NUM_THREADS", None)
    with open(folder / "shown.txt", "w", buffering=1) as shown:
        sys.stdout = sys.stderr = shown
        try:
            outcome = {"returned": distributed.launch(folder, 2, module="test_distributed")}
        except BaseException as error:
            outcome = {"raised": type(error).__name__, "message": str(error)}
    (folder / "outcome.json").write_text(json.dumps(outcome))
    os._exit(0)


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """Launches of two processes each, all at once, by what happens to them: the process that launches, and its folder."""
    root = tmp_path_factory.mktemp("launches")
    begun = {}
    for name in ("checked", "killed", "stopped", "ended", "shot", "orphaned"):
        (root / name).mkdir()
        process = multiprocessing.get_context("fork").Process(target=launched, args=(root / name,))
        process.start()
        begun[name] = process, root / name
    yield begun
    for process, _ in begun.values():
        process.kill()


def outcome(launches: dict, name: str) -> dict:
    process, folder = launches[name]
    process.join(120)
    assert not process.is_alive(), (folder / "shown.txt").read_text()
    return json.loads((folder / "outcome.json").read_text()) | {"shown": (folder / "shown.txt").read_text()}


def wait_for(what, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_killed_launcher_takes_all_with_it(launches):
    """kill -9 of a notebook: torchrun, its processes and their workers end, and write no more."""
    process, folder = launches["orphaned"]
    wait_for(lambda: len([path for path in folder.glob("scribbled_*") if path.stat().st_size]) == 4)
    pids = {int(path.read_text().split()[0]) for path in folder.glob("scribbled_*")}
    assert len(pids) == 4 and all(process_start(pid) for pid in pids)
    os.killpg(process.pid, signal.SIGKILL)
    begun = time.monotonic()
    wait_for(lambda: not any(process_start(pid) for pid in pids), 5)
    print(f"gone after {time.monotonic() - begun:.1f} s")
    sizes = [path.stat().st_size for path in sorted(folder.glob("scribbled_*"))]
    time.sleep(0.2)
    assert [path.stat().st_size for path in sorted(folder.glob("scribbled_*"))] == sizes


def test_ctrl_c_lets_the_processes_save(launches):
    process, folder = launches["stopped"]
    wait_for(lambda: len(list(folder.glob("looping*"))) == 2)
    os.killpg(process.pid, signal.SIGINT)
    ended = outcome(launches, "stopped")
    assert ended.get("returned") == "Ctrl-C", ended
    assert {path.read_text() for path in folder.glob("saved*")} == {"SIGTERM"}
    assert len(list(folder.glob("saved*"))) == 2
    assert ended["shown"] == "Ctrl-C: 2 processes finish their step and save\n"  # and no lines of torchrun's


def signal_torchrun(folder: Path, number: int) -> None:
    wait_for(lambda: sum(path.stat().st_size > 0 for path in folder.glob("looping*")) == 2)
    os.kill(int((folder / "looping0").read_text().split()[0]), number)


def test_a_torchrun_told_to_end_lets_the_processes_save(launches):
    folder = launches["ended"][1]
    signal_torchrun(folder, signal.SIGTERM)
    ended = outcome(launches, "ended")
    assert ended["message"] == (
        "torchrun was ended by SIGTERM. It had its processes save first, and the same command goes on from there."
    )
    assert [path.read_text() for path in folder.glob("saved*")] == ["SIGTERM"] * 2
    assert ended["raised"] == "RuntimeError" and ended["shown"] == ""


def test_a_killed_torchrun_is_said(launches):
    folder = launches["shot"][1]
    signal_torchrun(folder, signal.SIGKILL)
    ended = outcome(launches, "shot")
    assert ended["message"] == (
        "torchrun was killed by SIGKILL: as a rule the system does so when memory runs out\n"
        "The same command goes on from the last checkpoint."
    )
    assert ended["raised"] == "RuntimeError" and not list(folder.glob("saved*"))


def test_a_killed_process_ends_the_others_and_is_named(launches):
    ended = outcome(launches, "killed")
    assert ended["raised"] == "RuntimeError"
    assert re.match(r"process 1 \(pid \d+\) was killed by SIGKILL.*memory", ended["message"]), ended
    assert "Traceback" not in ended["message"] + ended["shown"]  # of the other, which lost its peer
    died, ended_at = ((launches["killed"][1] / name).stat().st_mtime for name in ("dies", "outcome.json"))
    assert ended_at - died < 50


def test_the_first_failure_is_the_error(launches):
    ended = outcome(launches, "checked")
    assert ended["raised"] == "RuntimeError"
    lines = ended["message"].splitlines()
    assert lines[0] == "process 1 failed" and lines[1].startswith("Traceback")
    assert lines[-1] == "LookupError: told by the second" and "test_distributed.py" in ended["message"]
    assert "elastic" not in ended["message"]  # of torchrun's table


def test_what_the_first_process_says_is_shown(launches):
    import joblib

    shown = outcome(launches, "checked")["shown"]
    assert f"says 0 on cpu, {max(1, joblib.cpu_count() // 2)} threads\n" in shown and "warns 0\n" in shown
    assert "says 1" not in shown and "warns 1" not in shown
    assert "train:   0%|" in shown and "{" not in shown  # the bar, and not the lines that it came in
    assert "Warning" not in shown


@pytest.fixture(scope="module")
def found(launches) -> list[dict]:
    """What the processes of one launch found, by rank."""
    outcome(launches, "checked")
    return [json.loads((launches["checked"][1] / f"found{rank}.json").read_text()) for rank in (0, 1)]


def test_processes_know_one_another(found):
    assert [(f["world"], f["rank"], f["is_main"]) for f in found] == [(2, 0, True), (2, 1, False)]
    for f in found:
        assert f["gathered"] == [[[0.0] * 3, "a"], [[0.5] * 4, "b"]]
        assert f["any"] == [False, True, True, True]
        assert f["buffers"] == [[1.0, 1.0], 7]


def test_processes_begin_with_the_same_weights(found):
    torch.manual_seed(0)
    for f in found:
        assert f["begun"] == [pytest.approx(found[0]["begun"][0]), [0.0, 0.0]]
    assert found[0]["begun"][0] == pytest.approx(float(Small().conv.weight.detach().double().sum()))


def test_gradients_are_those_of_one_process(found):
    """Of four batches, two on each; the first without a word to the other."""
    assert found[0]["kept_to_itself"] != pytest.approx(found[1]["kept_to_itself"])
    for f in found:
        assert f["no_gradient"] == ["unused", "density.weight", "density.bias"]
        assert len(f["apart"]) == 6 and f["largest"] > 1e-2
        assert max(f["apart"].values()) < 1e-6 * max(1, f["largest"])
        assert f["mask_kept"] == [True] * 3
        assert "sync_batchnorm" not in f  # refused on a CPU


# --- without processes


def test_alone_everything_is_what_it_is():
    assert (distributed.world(), distributed.rank(), distributed.is_main()) == (1, 0, True)
    value = {"a": np.arange(3)}
    assert distributed.gather(value)[0] is value and distributed.gather([1, 2]) == [[1, 2]]
    assert distributed.any_rank(True) is True and distributed.any_rank(False) is False
    model = Small()
    distributed.broadcast_buffers(model)
    assert distributed.wrap(model, True, "cpu") is model  # with one process there is nothing to share
    with distributed.no_sync(model):
        pass
    assert distributed.join("cuda:1") == "cuda:1"  # not started by torchrun
    distributed.end_with_parent()
    distributed.leave()


def test_sync_batchnorm_keeps_names_weights_and_activations():
    """timm's BatchNorms hold an activation, which torch's own conversion loses."""
    import timm

    model = timm.create_model("test_efficientnet", num_classes=2).eval()
    before, parameters = {name: tensor.clone() for name, tensor in model.state_dict().items()}, list(model.parameters())
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = model(x)
    converted = distributed._with_sync_batchnorm(model)
    assert not any(type(module) is nn.BatchNorm2d for module in converted.modules())
    assert sum(isinstance(module, nn.SyncBatchNorm) for module in converted.modules()) > 3
    assert converted.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in converted.state_dict().items())
    assert all(a is b for a, b in zip(converted.parameters(), parameters, strict=True))
    with torch.no_grad():
        torch.testing.assert_close(converted(x), expected)
    hooked = nn.Sequential(nn.BatchNorm2d(3))
    hooked[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="sync_batchnorm: 0 has a hook"):
        distributed._with_sync_batchnorm(hooked)


@pytest.mark.parametrize(
    ("wanted", "device", "gpus", "expected"),
    [
        (0, "cpu", 0, 1), (3, "cpu", 0, 3), (0, "cuda", 2, 2), (1, "cuda", 2, 1), (2, "cuda", 2, 2),
        (0, "cuda:1", 2, 1), (1, "cuda:1", 2, 1), (0, "mps", 0, 1),
    ],
)  # fmt: skip
def test_as_many_processes_as_there_are_gpus(wanted, device, gpus, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert processes(wanted, device) == expected


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="n_procs: got 3, but there are 2 GPUs"):
        processes(3, "cuda")
    with pytest.raises(ValueError, match="n_procs: got 2, but cuda:1 is one device"):
        processes(2, "cuda:1")
    with pytest.raises(ValueError, match="n_procs: got -1"):
        processes(-1, "cpu")


def test_batches_are_shared_evenly():
    assert [batches_a_step(a, n) for a, n in ((0, 1), (0, 4), (1, 1), (8, 4), (2, 2), (3, 1))] == [1, 4, 1, 8, 2, 3]
    with pytest.raises(ValueError, match=r"accumulate: 3 .* by 2 processes; take 2 or 4"):
        batches_a_step(3, 2)
    with pytest.raises(ValueError, match=r"accumulate: 1 .* by 2 processes; take 2,"):
        batches_a_step(1, 2)


def test_the_line_for_several_machines(monkeypatch):
    import shlex

    from torch.distributed.run import get_args_parser

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(launching.joblib, "cpu_count", lambda: 14)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    plan = Path("/data/my runs/x/launch-0.json")
    words = shlex.split(distributed.command(plan))
    assert words[0].startswith("PYTHONPATH=") and (Path(words[0].partition("=")[2]) / "rsnakit").is_dir()
    assert words[1:4] == ["OMP_NUM_THREADS=3", "TORCH_CPP_LOG_LEVEL=ERROR", "torchrun"]
    arguments = get_args_parser().parse_args(words[4:])  # torchrun takes it
    assert arguments.nproc_per_node == "4"
    assert (arguments.module, arguments.training_script) == (True, "rsnakit.engine")
    assert arguments.training_script_args == [str(plan)]
    assert (arguments.nnodes, arguments.rdzv_backend, arguments.rdzv_endpoint) == ("2", "c10d", "HOST:29500")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert " OMP_NUM_THREADS=2 " in distributed.command(plan)


LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:30132."
FAILED = """E1201 launcher: failed (exitcode: {1}) local_rank: 1 (pid: 26027) of binary: python
============================================================
Failures:
[1]:
  time      : 2026-12-01_00:59:55
  rank      : 0 (local_rank: 0)
  exitcode  : {0} (pid: 26026)
  error_file: <N/A>
  traceback : Traceback (most recent call last):
Root Cause (first observed failure):
[0]:
  time      : 2026-12-01_00:59:55
  rank      : 1 (local_rank: 1)
  exitcode  : {1} (pid: 26027)  (SIGNAL)
============================================================"""
SENT = "W1201 00:59:55.743 Sending process 26026 closing signal SIGTERM\n"


@pytest.mark.parametrize(
    ("said", "told", "stopped", "expected"),
    [
        (SENT + FAILED.format(1, 3), {0: LOST}, False, "process 1 ended with status 3\nlast words"),
        (SENT + FAILED.format(-15, -15), {}, False, "process 1 (pid 26027) was killed by SIGTERM\nlast words"),
        # One that torchrun killed after 30 s is not what failed.
        (SENT + FAILED.format(-9, 1), {1: "ValueError: no"}, False, "process 1 failed\nValueError: no"),
        (FAILED.format(1, 1), {0: LOST, 1: "ValueError: no"}, False, "process 1 failed\nValueError: no"),
        (FAILED.format(1, 1), {1: "ValueError: b", 0: "ValueError: a"}, False, "process 1 failed\nValueError: b"),
        (SENT + FAILED.format(-15, 1), {1: LOST}, False, f"process 1 failed\n{LOST}"),
        (FAILED.format(-15, -15), {}, True, ""),
        (FAILED.format(1, -15), {0: LOST}, True, ""),
        (FAILED.format(1, -15), {0: "OSError: disk full"}, True, "process 0 failed\nOSError: disk full"),
        (FAILED.format(-15, -9), {}, True, "process 1 (pid 26027) was killed by SIGKILL: as a rule"),
        ("ValueError: no rendezvous", {}, False, "torchrun failed\nValueError: no rendezvous"),
    ],
)
def test_the_process_that_failed_is_found(said, told, stopped, expected, tmp_path):
    """Whatever the others then fail of, and however torchrun ends them."""
    for number in (0, 1):
        (tmp_path / f"run/attempt_0/{number}").mkdir(parents=True)
        (tmp_path / f"run/attempt_0/{number}/stderr.log").write_text("last words\n" if number else "")
    for age, (number, text) in enumerate(told.items()):
        path = tmp_path / f"run/attempt_0/{number}/error.json"
        path.write_text(json.dumps({"message": {"message": "", "extraInfo": {"py_callstack": text}}}))
        os.utime(path, (100 + age, 100 + age))
    found = launching._failure(said.splitlines(), tmp_path, stopped, torchrun=1)
    assert found.startswith(expected) and bool(found) == bool(expected)


ENDED = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 26 got signal: 15\n"


@pytest.mark.parametrize(
    ("said", "told", "stopped", "status", "expected"),
    [
        (SENT + ENDED, "", False, 1, "torchrun was ended by SIGTERM. "),
        (SENT + ENDED, LOST, False, 1, "torchrun was ended by SIGTERM. "),
        (SENT + ENDED, "OSError: disk full", False, 1, "process 1 failed\nOSError: disk full"),
        (SENT + ENDED, "", True, 1, ""),  # by `launch`, before its processes had begun
        ("", "", True, -15, ""),
        ("", "", False, -15, "torchrun was killed by SIGTERM\n"),
        ("", LOST, True, -9, "torchrun was killed by SIGKILL: "),
        ("", "MemoryError", False, -9, "process 1 failed\nMemoryError"),
    ],
)
def test_a_torchrun_that_was_ended_is_told_from_one_that_failed(said, told, stopped, status, expected, tmp_path):
    if told:
        (tmp_path / "1").mkdir()
        error = {"message": {"message": "", "extraInfo": {"py_callstack": told}}}
        (tmp_path / "1/error.json").write_text(json.dumps(error))
    found = launching._failure(said.splitlines(), tmp_path, stopped, status)
    assert found.startswith(expected) and bool(found) == bool(expected)


# --- training in earnest


@pytest.fixture(scope="module")
def trained(competition, store, table):
    """A way to train a small model without BatchNorm and dropout in a work folder; gives the run's folder."""
    from rsnakit import data, engine, models, preprocess, runs
    from rsnakit.env import RunConfig

    model = models.ModelConfig(backbone="test_convnext", weights="none", pooling="avg", dropout=0.0)

    def train(work: Path, n_procs: int, epochs: int, max_hours: float = 0, workers: int = 0) -> Path:
        config = engine.TrainConfig(
            n_folds=2, epochs=epochs, batch_size=4, accumulate=2, lr=3e-3, negatives_per_positive=2.0, ema_decay=0.9
        )
        pixels = preprocess.PreprocessConfig(**store.manifest["preprocess"])
        settings = runs.settings_of(pixels, model, config, data.fingerprint(table), is_demo=True, debug=False)
        folder = runs.open_run(work, "one", settings)
        run = RunConfig(device="cpu", fold="0", num_workers=workers, max_hours=max_hours)
        loop = engine.LoopConfig(n_procs=n_procs, save_every=1)
        engine.fit_folds(table, store, model, config, run, folder, loop, competition)
        return folder

    return train


@pytest.fixture(scope="module")
def together(trained, tmp_path_factory) -> Path:
    """Three epochs in two processes, without a break."""
    return trained(tmp_path_factory.mktemp("together"), 2, 3)


def history_of(folder: Path):
    import pandas as pd

    return pd.read_csv(folder / "fold0" / "history.csv").drop(columns="seconds")


def scores_of(folder: Path):
    from rsnakit import runs

    return runs.read_oof(folder).set_index("image_id")["score"]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    from rsnakit import models

    return models.read_weights(folder / "fold0" / "best.safetensors")


def assert_same(a: Path, b: Path) -> None:
    """Bit for bit."""
    import pandas as pd

    pd.testing.assert_frame_equal(history_of(a), history_of(b), check_exact=True)
    pd.testing.assert_series_equal(scores_of(a), scores_of(b), check_exact=True)
    assert weights_of(a).keys() == weights_of(b).keys()
    assert all(torch.equal(tensor, weights_of(b)[name]) for name, tensor in weights_of(a).items())


@pytest.mark.slow
def test_two_processes_train_as_one_does(trained, together, table, tmp_path):
    """With the same batches and steps: one after another on one processor, or side by side. Also where one goes on with what
    the other began, after an epoch and within one."""
    import pandas as pd

    from rsnakit import data

    alone = trained(tmp_path / "alone", 1, 3)
    columns = ["train_loss", "valid_loss", "ema_valid_loss"]
    assert len(history_of(alone)) == 3 and history_of(alone)["train_loss"].nunique() == 3
    pd.testing.assert_frame_equal(history_of(alone)[columns], history_of(together)[columns], rtol=0, atol=1e-4)
    for folder in (alone, together):
        scores = scores_of(folder)
        held_out = table.loc[data.make_folds(table, 2, 0) == 0, "image_id"]
        assert scores.index.is_unique and set(scores.index) == set(held_out) and scores.notna().all()
    pd.testing.assert_series_equal(scores_of(alone), scores_of(together), rtol=0, atol=1e-4)

    changing = trained(tmp_path / "changing", 1, 3, max_hours=1e-9)  # one step
    assert not (changing / "fold0" / "history.csv").exists() and (changing / "fold0" / "last.pt").exists()
    trained(tmp_path / "changing", 2, 3, max_hours=2e-4)  # a few
    trained(tmp_path / "changing", 1, 3)
    pd.testing.assert_frame_equal(history_of(alone)[columns], history_of(changing)[columns], rtol=0, atol=1e-4)
    pd.testing.assert_series_equal(scores_of(alone), scores_of(changing), rtol=0, atol=1e-4)


def fork_train(trained, work: Path) -> multiprocessing.Process:
    """Training in two processes, each with a loader's worker, launched by a fork of this process."""

    def run() -> None:
        with open(work / "shown.txt", "a", buffering=1) as shown:
            sys.stdout = sys.stderr = shown
            try:
                trained(work, 2, 3, workers=1)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}")
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def ranks_of(work: Path) -> dict[int, str]:
    """The processes that train in a work folder, their loaders' workers among them: rank by process number."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().decode().split("\0")
            if str(work / "runs") in " ".join(words) and "torch.distributed.run" not in words:
                environment = dict(w.split("=", 1) for w in (path / "environ").read_text().split("\0") if "=" in w)
                found[int(path.name)] = environment["RANK"]
    return found


@pytest.mark.slow
def test_stopped_and_killed_the_same_command_ends_the_same(trained, together, tmp_path):
    """Ctrl-C, kill -9 of the notebook, kill -9 of one process of the two; bit for bit what two did without a break."""
    last = tmp_path / "runs" / "one" / "fold0" / "last.pt"

    def begin() -> multiprocessing.Process:
        saved = last.stat().st_mtime_ns if last.exists() else 0
        process = fork_train(trained, tmp_path)
        wait_for(lambda: last.exists() and last.stat().st_mtime_ns > saved, 90)
        assert process.is_alive(), (tmp_path / "shown.txt").read_text()
        return process

    process = begin()
    os.kill(process.pid, signal.SIGINT)
    process.join(30)
    assert not process.is_alive() and not ranks_of(tmp_path)
    shown = (tmp_path / "shown.txt").read_text()
    assert "stopped by SIGTERM, saved" in shown and "Error" not in shown
    assert not (last.parent / "lock.json").exists()

    process = begin()
    # Each with its loader's worker, and from the first epoch's end on with one of the validation loader too, which stays.
    found = Counter(ranks_of(tmp_path).values())
    assert found.keys() == {"0", "1"} and set(found.values()) <= {2, 3}
    process.kill()
    wait_for(lambda: not ranks_of(tmp_path), 5)
    written = {path: path.stat().st_mtime_ns for path in last.parent.iterdir()}
    time.sleep(0.5)
    assert {path: path.stat().st_mtime_ns for path in last.parent.iterdir()} == written

    process = begin()
    os.kill(next(pid for pid, rank in sorted(ranks_of(tmp_path).items()) if rank == "1"), signal.SIGKILL)
    process.join(30)
    assert not process.is_alive()
    wait_for(lambda: not ranks_of(tmp_path), 10)  # a loader's worker of the one that was killed looks every 5 s
    assert "RuntimeError: process 1 (pid" in (tmp_path / "shown.txt").read_text()

    assert_same(trained(tmp_path, 2, 3), together)


@pytest.mark.slow
def test_two_machines_train_as_two_processes_do(trained, together, tmp_path, capsys, monkeypatch):
    """Two agents of torchrun, as on two machines that share a disk, with the line that the kit prints."""
    folder = trained(tmp_path, -1, 3)
    line = re.search(r"PYTHONPATH=.*", capsys.readouterr().out)[0]
    assert not (folder / "fold0").exists()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = line.replace("HOST:29500", f"127.0.0.1:{port}")
    assert "--nproc-per-node 1 " in line or torch.cuda.is_available()
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    agents = [
        subprocess.Popen(line, shell=True, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    said = [agent.communicate(timeout=120)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert sum("epoch 3/3" in text for text in said) == 1  # the first process says it
    assert_same(folder, together)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
