"""rsnakit.checkpoint: what is left to go on from after a kill, on a full disk, of a damaged file."""

import multiprocessing
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from rsnakit import checkpoint

FORK = multiprocessing.get_context("fork")


def state(epoch: int, size: int = 3) -> dict:
    return {"epoch": epoch, "model": torch.full((size,), float(epoch))}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def epochs(folder: Path) -> list[int]:
    """Of the checkpoints there are, newest first."""
    return [torch.load(path, weights_only=True)["epoch"] for path in checkpoint.list_all(folder)]


def in_a_child(work, *arguments) -> object:
    """What `work` returns, or the exception that it raises, in a process of its own; None where it was killed."""

    def run(connection) -> None:
        try:
            connection.send(work(*arguments))
        except Exception as error:
            connection.send(error)

    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=run, args=(theirs,))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        return None
    finally:
        process.join()


# Keeping


@pytest.mark.parametrize("keep_last", [1, 2, 4])
def test_the_newest_are_kept(tmp_path, keep_last):
    for epoch in range(1, 7):
        checkpoint.save(tmp_path, state(epoch), keep_last)
        assert epochs(tmp_path) == list(range(epoch, max(0, epoch - keep_last), -1))
        assert checkpoint.load(tmp_path)["epoch"] == epoch
    assert names(tmp_path) == sorted(["last.pt", "previous.pt", "previous2.pt", "previous3.pt"][:keep_last])


def test_fewer_to_keep_clears_the_rest_and_more_is_filled_up(tmp_path):
    for epoch in range(1, 6):
        checkpoint.save(tmp_path, state(epoch), keep_last=4)
    (tmp_path / "previous_run.pt").write_bytes(b"a person's own")
    checkpoint.save(tmp_path, state(6), keep_last=2)
    assert epochs(tmp_path) == [6, 5]
    checkpoint.save(tmp_path, state(7), keep_last=3)
    assert epochs(tmp_path) == [7, 6, 5]
    checkpoint.save(tmp_path, state(8), keep_last=1)
    assert names(tmp_path) == ["last.pt", "previous_run.pt"]


def test_what_was_saved_is_what_loads(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    saved = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "best": -float("inf"), "name": "a", "none": None,
        "history": [{"epoch": 1, "loss": 0.1 + 0.2, "flag": True}], "rng": checkpoint.rng_state("cpu"),
        "half": torch.ones(2, dtype=torch.bfloat16),
    }  # fmt: skip
    checkpoint.save(tmp_path, saved)
    loaded = checkpoint.load(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded["model"][name], tensor)
    step = loaded["optimizer"]["state"][0]
    assert all(torch.equal(value, optimizer.state_dict()["state"][0][name]) for name, value in step.items())
    assert all(loaded[name] == saved[name] for name in ("best", "name", "none", "history"))
    assert loaded["half"].dtype == torch.bfloat16
    assert checkpoint.load(tmp_path / "elsewhere") is None


# Kills


def saves_until_killed(folder: Path, first: int, keep_last: int, call: int) -> None:
    """Saves on and on; is killed before the file system is told of the `call`-th change."""
    left = [call]
    (folder / "saved").write_text(str(first - 1))

    def counted(change):
        def change_or_die(*arguments, **options):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return change(*arguments, **options)

        return change_or_die

    for name in ("replace", "unlink", "fsync"):
        setattr(os, name, counted(getattr(os, name)))
    for epoch in range(first, first + 10):
        checkpoint.save(folder, state(epoch), keep_last)
        (folder / "saved").write_text(str(epoch))


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_killed_between_any_two_steps_of_a_save_one_is_there_that_is_whole(tmp_path, keep_last):  # C01
    gap = False
    for call in range(1, 9):
        folder = tmp_path / str(call)
        folder.mkdir()
        for epoch in range(1, keep_last + 1):
            checkpoint.save(folder, state(epoch), keep_last)
        first = keep_last + 1
        for _ in range(1 + (call % 2)):  # gone on with, and killed again at the same place
            assert in_a_child(saves_until_killed, folder, first, keep_last, call) is None
            saved = int((folder / "saved").read_text())
            gap |= not (folder / "last.pt").exists()
            loaded = checkpoint.load(folder)
            assert loaded["epoch"] in (saved, saved + 1), names(folder)
            first = loaded["epoch"] + 1
        checkpoint.save(folder, state(first), keep_last)
        assert epochs(folder)[:2] == [first, first - 1][:keep_last]
        assert len(epochs(folder)) <= keep_last and not list(folder.glob(".*"))  # nothing half-written stays
    assert gap == (keep_last > 1)  # the moment without a newest was among those tried


def saves_on_and_on(folder: Path, epoch: int) -> None:
    while True:
        checkpoint.save(folder, state(epoch, size=200_000))
        (folder / "saved").write_text(str(epoch))
        epoch += 1


def test_killed_at_random_moments_of_saves(tmp_path):  # C01
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw, epoch = random.Random(seed), 1
    for _ in range(25):
        process = FORK.Process(target=saves_on_and_on, args=(tmp_path, epoch))
        process.start()
        while not (tmp_path / "saved").exists() or (tmp_path / "saved").read_text() in ("", str(epoch - 1)):
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.02))
        process.kill()
        process.join()
        loaded = checkpoint.load(tmp_path)
        assert loaded["epoch"] >= int((tmp_path / "saved").read_text() or 0)
        assert torch.equal(loaded["model"], state(loaded["epoch"], size=200_000)["model"])
        epoch = loaded["epoch"] + 1
        (tmp_path / "saved").write_text(str(epoch - 1))
    checkpoint.save(tmp_path, state(epoch))
    assert names(tmp_path) == ["last.pt", "previous.pt", "saved"] and epochs(tmp_path) == [epoch, epoch - 1]


# A full disk


def saved_on_a_full_disk(folder: Path, limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    checkpoint.save(folder, state(2, size=1_000_000))


@pytest.mark.parametrize("limit", [0, 500, 1_000_000, 4_000_500])
def test_a_disk_that_takes_no_more_is_said_and_the_checkpoint_before_stays(tmp_path, limit):
    """The limit on a file's size stands for it: the first bytes, the header, the tensor or the last bytes do not fit."""
    checkpoint.save(tmp_path, state(1))
    before = (tmp_path / "last.pt").read_bytes()
    error = in_a_child(saved_on_a_full_disk, tmp_path, limit)
    assert type(error) is OSError
    assert re.search(
        r"last\.pt cannot be written: File too large\. It takes 4\.0 MB .* [\d,.]+ MB are free\. Nothing half-written stays; "
        r"the checkpoint before is whole\. Make room, .*keep_last",
        str(error),
    )
    assert names(tmp_path) == ["last.pt"] and (tmp_path / "last.pt").read_bytes() == before
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    assert "there was none before" in str(in_a_child(saved_on_a_full_disk, tmp_path, limit))
    assert names(tmp_path) == []


@pytest.fixture
def tiny_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"no mount here: {error}")
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(tiny_disk):  # C01
    checkpoint.save(tiny_disk, state(1, size=60_000))
    checkpoint.save(tiny_disk, state(2, size=60_000))
    with pytest.raises(
        OSError, match=r"No space left on device\. It takes 0\.8 MB .* 0\.\d MB are free.*before is whole"
    ):
        checkpoint.save(tiny_disk, state(3, size=200_000))
    assert names(tiny_disk) == ["last.pt", "previous.pt"] and epochs(tiny_disk) == [2, 1]
    checkpoint.save(tiny_disk, state(3, size=60_000))
    assert epochs(tiny_disk) == [3, 2]


def test_a_folder_that_cannot_be_written_to_is_said(tmp_path, monkeypatch):
    def refuses(*_):
        raise PermissionError(13, "no")

    monkeypatch.setattr(os, "replace", refuses)
    with pytest.raises(PermissionError, match=r"last\.pt cannot be written: Permission denied"):
        checkpoint.save(tmp_path, state(1))
    assert names(tmp_path) == []


def test_an_error_that_is_not_the_disks_stays_what_it_is(tmp_path, monkeypatch):
    def breaks(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "save", breaks)
    with pytest.raises(RuntimeError, match=r"^CUDA error"):
        checkpoint.save(tmp_path, state(1))
    assert names(tmp_path) == []


# Damage


def test_a_cut_checkpoint_falls_back_to_the_one_before(tmp_path, caplog):  # C01
    checkpoint.save(tmp_path, state(1))
    checkpoint.save(tmp_path, state(2))
    assert checkpoint.load(tmp_path)["epoch"] == 2
    whole = (tmp_path / "last.pt").read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        (tmp_path / "last.pt").write_bytes(whole[:size])
        assert checkpoint.load(tmp_path)["epoch"] == 1
    assert "last.pt cannot be read" in caplog.text
    (tmp_path / "last.pt").write_bytes(whole[:10])
    (tmp_path / "previous.pt").write_bytes(b"")
    for _ in range(2):  # also when the command is given again
        with pytest.raises(checkpoint.CheckpointError, match=r"none of last\.pt, previous\.pt can be read\. Delete"):
            checkpoint.load(tmp_path)


def test_a_damaged_one_never_takes_the_place_of_the_last_that_is_whole(tmp_path):
    """The next save moves `last.pt` to `previous.pt`: killed right then, the good one would be gone."""
    checkpoint.save(tmp_path, state(1))
    checkpoint.save(tmp_path, state(2))
    (tmp_path / "last.pt").write_bytes(b"damaged")
    assert checkpoint.load(tmp_path)["epoch"] == 1
    for call in (1, 2, 3, 4):
        copy = tmp_path / str(call)
        copy.mkdir()
        for path in tmp_path.glob("*.pt"):
            shutil.copy(path, copy)
        assert in_a_child(saves_until_killed, copy, 2, 2, call) is None
        assert checkpoint.load(copy)["epoch"] >= 1
    checkpoint.save(tmp_path, state(2))
    assert [path.name for path in tmp_path.glob("*.pt")] == ["last.pt", "previous.pt"] or epochs(tmp_path) == [2, 1]
    assert not (tmp_path / "damaged.pt").exists()


def test_a_flipped_bit_is_found(tmp_path):
    """By the checksums; torch itself loads it without a word."""
    checkpoint.save(tmp_path, {"epoch": 1, "model": torch.arange(4000.0)})
    checkpoint.save(tmp_path, {"epoch": 2, "model": torch.arange(4000.0)})
    whole = (tmp_path / "last.pt").read_bytes()
    draw, unnoticed = random.Random(0), 0
    for _ in range(150):
        flipped = bytearray(whole)
        flipped[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        (tmp_path / "last.pt").write_bytes(flipped)
        loaded = checkpoint.load(tmp_path)
        assert torch.equal(loaded["model"], torch.arange(4000.0))
        unnoticed += loaded["epoch"] == 2  # in the padding or a date
    assert unnoticed < 15


class Evil:
    def __reduce__(self):
        return os.mkdir, ("/tmp/this-must-not-be-run",)


@pytest.mark.parametrize(
    "value", [np.float64(1.5), Path("a"), Evil(), np.arange(3)], ids=lambda value: type(value).__name__
)
def test_values_that_are_not_plain_are_refused_before_they_are_needed(tmp_path, value):
    checkpoint.save(tmp_path, state(1))
    with pytest.raises(TypeError, match=r"plain Python values only; in this one are .*(numpy|pathlib|posix)"):
        checkpoint.save(tmp_path, {**state(2), "history": [{"score": value}]})
    assert names(tmp_path) == ["last.pt"] and checkpoint.load(tmp_path)["epoch"] == 1


def test_a_file_with_other_values_is_no_damaged_one(tmp_path, caplog):
    checkpoint.save(tmp_path, state(1))
    checkpoint.save(tmp_path, state(2))
    torch.save({**state(3), "config": Path("a")}, tmp_path / "last.pt")
    with pytest.raises(checkpoint.CheckpointError, match=r"last\.pt: is whole, but holds pathlib.*run code.*delete"):
        checkpoint.load(tmp_path)
    (tmp_path / "last.pt").write_bytes(pickle.dumps(state(3)))  # no checkpoint of torch at all
    assert checkpoint.load(tmp_path)["epoch"] == 1
    assert "last.pt cannot be read" in caplog.text


def test_a_checkpoint_that_may_not_be_read_is_no_damaged_one(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, state(1))

    def refuses(*_):
        raise PermissionError(13, "no")

    monkeypatch.setattr(checkpoint.zipfile, "ZipFile", refuses)
    with pytest.raises(PermissionError):
        checkpoint.load(tmp_path)


# Random numbers


def draws() -> list:
    return [torch.rand(3).tolist(), torch.randn(1).item(), np.random.rand(2).tolist(), np.random.randn(), random.random(),
            random.gauss(0, 1)]  # fmt: skip


def test_random_numbers_go_on_where_they_stood(tmp_path):  # C04
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    draws()  # an odd number of normal ones: half a pair is kept back for the next draw
    checkpoint.save(tmp_path, {"rng": checkpoint.rng_state("cpu")})
    expected = [draws(), draws()]
    assert expected[0] != expected[1]
    torch.manual_seed(9)
    np.random.seed(9)
    random.seed(9)
    checkpoint.set_rng_state(checkpoint.load(tmp_path)["rng"], "cpu")
    assert [draws(), draws()] == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_random_numbers_of_a_gpu_go_on_where_they_stood(tmp_path):
    torch.cuda.manual_seed(1)
    checkpoint.save(tmp_path, {"rng": checkpoint.rng_state("cuda:0")})
    expected = torch.rand(3, device="cuda:0")
    checkpoint.set_rng_state(checkpoint.load(tmp_path)["rng"], "cuda:0")
    assert torch.equal(torch.rand(3, device="cuda:0"), expected)


def test_a_state_from_the_cpu_leaves_another_device_alone():
    state = checkpoint.rng_state("cpu")
    checkpoint.set_rng_state(state, "cuda:0")  # nothing of it is touched: there may be none
    assert set(state) == {"torch", "numpy", "random"}
