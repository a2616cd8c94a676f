"""rsnakit.batches and rsnakit.reading: every file comes once, and one that kills its process, or hangs it, is named."""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest
import small_shm

from rsnakit import batches, reading
from rsnakit.batches import in_batches
from rsnakit.dicom import DicomError

SHAPE = (2, 3)


def number(path: str) -> np.ndarray:
    """A file's image: its number in every pixel; files that end in 7 can't be read."""
    if path.endswith("7"):
        raise DicomError(path, "cut short")
    return np.full(SHAPE, int(Path(path).name), np.uint16)


def number_or_die(path: str) -> np.ndarray:
    if path.endswith("13"):
        os.kill(os.getpid(), signal.SIGKILL)  # as a decoder's crash does
    return number(path)


def number_or_hang(path: str) -> np.ndarray:
    while path.endswith(("14", "31")):
        time.sleep(1)
    return number(path)


def paths_of(count: int) -> list[Path]:
    return [Path("folder") / str(i) for i in range(count)]


def collect(read, count: int, batch_size: int, n_jobs: int) -> dict[int, tuple]:
    found = {}
    for batch in in_batches(paths_of(count), read, SHAPE, batch_size, n_jobs):
        assert batch["image"].shape == (len(batch["item"]), 1, *SHAPE) and batch["image"].dtype == np.uint16
        assert len(batch["item"]) <= batch_size
        for item, image, status, reason, seconds in zip(
            *(batch[name] for name in ("item", "image", "status", "reason", "seconds")), strict=True
        ):
            assert item not in found and seconds >= 0
            assert image.min() == image.max()
            found[int(item)] = (int(image.max()), status, reason)
    return found


@pytest.mark.parametrize(("count", "batch_size", "n_jobs"), [(23, 4, 0), (23, 4, 2), (5, 8, 2), (1, 4, 3), (0, 4, 2)])
def test_every_file_comes_once(count, batch_size, n_jobs):
    found = collect(number, count, batch_size, n_jobs)
    assert sorted(found) == list(range(count))
    for item, (value, status, reason) in found.items():
        expected = (0, "failed", "cut short") if item % 10 == 7 else (item, "ok", "")
        assert (value, status, reason) == expected


def test_batches_are_the_same_whichever_process_is_faster():
    def slow_at_first(path: str) -> np.ndarray:
        time.sleep(0.3 if path.endswith("/0") else 0)
        return number(path)

    batches = [batch["item"].tolist() for batch in in_batches(paths_of(12), slow_at_first, SHAPE, 4, 2)]
    assert sorted(batches) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert batches[-1] == [0, 1, 2, 3]  # it holds up no other


def test_a_file_that_kills_its_process_costs_itself_alone():  # D17
    found = collect(number_or_die, 60, 4, 2)
    assert sorted(found) == list(range(60))
    assert found[13][1:] == ("failed", "ProcessDied: the process that read it was killed (SIGKILL), twice")
    assert all(found[item] == (item, "ok", "") for item in found if item % 10 != 7 and item != 13)


def test_a_file_that_hangs_costs_itself_alone(monkeypatch):  # D17
    monkeypatch.setattr(reading, "HUNG_S", 0.7)
    found = collect(number_or_hang, 60, 4, 2)
    assert sorted(found) == list(range(60))
    for item in (14, 31):
        assert found[item][1:] == ("failed", "ProcessDied: the process that read it was not done after 0.7 s, twice")
    assert all(found[item] == (item, "ok", "") for item in found if item % 10 != 7 and item not in (14, 31))


@pytest.mark.parametrize("slow", [("5",), ("0", "5", "9")])
def test_a_slow_file_holds_up_its_batch_for_seconds(monkeypatch, tmp_path, slow):
    """Whether others are still read, or none; it comes by itself, and so does what its process was to read next."""
    monkeypatch.setattr(batches, "LATE_S", 0.3)
    monkeypatch.setattr(reading, "TICK_S", 0.1)

    def read(path: str) -> np.ndarray:
        until = time.monotonic() + 20
        while Path(path).name in slow and not (tmp_path / "go on").exists() and time.monotonic() < until:
            time.sleep(0.05)
        return number(path)

    found, before = [], None
    for batch in in_batches(paths_of(12), read, SHAPE, 4, len(slow) + 1):
        found.append(batch["item"].tolist())
        items = [item for each in found for item in each]
        if before is None and len(items) >= 12 - reading.IN_HAND * len(slow):
            before = set(items)
            (tmp_path / "go on").touch()
    assert sorted(items) == list(range(12)) and before.isdisjoint(map(int, slow))
    assert all(len({item // 4 for item in each}) == 1 for each in found)


def test_a_slow_consumer_gets_whole_batches(monkeypatch):
    """It is not the files that are late."""
    monkeypatch.setattr(batches, "LATE_S", 0.3)
    found = []
    for batch in in_batches(paths_of(24), number, SHAPE, 3, 3):
        found.append(batch["item"].tolist())
        time.sleep(0.4)
    assert sorted(found) == [list(range(first, first + 3)) for first in range(0, 24, 3)]


def test_what_waits_for_a_consumer_that_is_away_does_not_hang():
    reader = reading._Reader(reading.Files(paths_of(2), number_or_hang, SHAPE))
    try:
        reader.give(1)
        assert reader.pipe.poll(60)  # done
        reader.since -= 2 * reading.HUNG_S
        assert not reader.hangs()
        assert reader.take()[0] == 1 and not reader.hangs()
        reader.since -= 2 * reading.HUNG_S  # idle
        assert not reader.hangs()
    finally:
        reader.end()


def test_where_all_files_hang_it_ends_when_told_to(monkeypatch):
    monkeypatch.setattr(reading, "TICK_S", 0.1)
    asked = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) > 5

    def hang(path: str) -> np.ndarray:
        time.sleep(1000)

    assert list(in_batches(paths_of(1000), hang, SHAPE, 4, 2, stop)) == []
    assert len(asked) == 6 and not active_children()


@pytest.mark.parametrize("n_jobs", [0, 2])
def test_nothing_is_read_far_ahead_of_a_slow_consumer(tmp_path, n_jobs):
    """So that memory stays flat over a competition, whatever is slower."""

    def counted(path: str) -> np.ndarray:
        with open(tmp_path / "read", "ab", buffering=0) as file:
            file.write(b"x")
        return number(path)

    batch_size, ahead, given = 4, [], 0
    for batch in in_batches(paths_of(400), counted, SHAPE, batch_size, n_jobs):
        time.sleep(0.002 if given % 80 else 0.2)
        given += len(batch["item"])
        ahead.append((tmp_path / "read").stat().st_size - given)
    assert given == 400
    # What processes hold, and what has come of the batches that these files belong to.
    assert min(ahead) >= 0 and max(ahead) <= n_jobs * reading.IN_HAND * batch_size


def test_memory_stays_flat(tmp_path):
    """64 MB a batch, 1 GB in all: of a few batches at a time."""
    script = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import numpy as np
from rsnakit.batches import in_batches
read = lambda path: np.full((2048, 2048), 7, np.uint16)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
for number, batch in enumerate(in_batches(["x"] * 120, read, (2048, 2048), 8, 2)):
    before = peak() if number == 4 else None or before if number > 4 else 0
print(number + 1, peak() - before)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    batches, growth = map(int, result.stdout.split())
    assert batches == 15 and growth < 150


@pytest.mark.parametrize("way", ["broken off", "raised"])
def test_processes_are_gone_afterwards(way):
    batches = in_batches(paths_of(400), number, SHAPE, 4, 2)
    next(batches)
    assert len(active_children()) == 2
    if way == "raised":
        with pytest.raises(KeyboardInterrupt):
            batches.throw(KeyboardInterrupt())
    else:
        batches.close()
    assert not active_children()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("state", ["idle", "hangs"])
def test_processes_end_with_a_parent_that_is_killed(state):
    script = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import numpy as np
from multiprocessing import active_children
from rsnakit.batches import in_batches
def read(path):
    if path == "hangs":
        time.sleep(1000)
    return np.zeros((9, 9), np.uint16)
batches = in_batches(["x"] * 4 + [{state!r}] * 8, read, (9, 9), 4, 3)
next(batches)
time.sleep(0.3)
print(*(child.pid for child in active_children()), flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        children = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(children) == 3
    until = time.monotonic() + 10
    while any(alive(pid) for pid in children) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in children)


def alive(pid: int) -> bool:
    try:
        return "Z" not in re.search(r"\) (\w)", Path(f"/proc/{pid}/stat").read_text())[1]
    except OSError:
        return False


def test_signals_to_the_whole_group_reach_no_process_that_reads():
    """Ctrl-C in a terminal, or a SIGTERM that torchrun hands on: the parent answers, and may want a few batches more."""
    batches = in_batches(paths_of(400), number, SHAPE, 4, 2)
    given = 0
    for batch in batches:
        given += len(batch["item"])
        if 1 in batch["item"]:  # the second process has begun, too
            break
    children = active_children()
    for child in children:
        assert os.getpgid(child.pid) != os.getpgid(0)
        os.kill(child.pid, signal.SIGINT)
    for batch in itertools.islice(batches, 20):
        given += len(batch["item"])
    assert set(active_children()) == set(children)
    assert given + sum(len(batch["item"]) for batch in batches) == 400


@pytest.mark.parametrize(("allowed", "said"), [(1, "read by 1 process;"), (0, "read by this process;")])
def test_fewer_processes_where_no_more_are_to_be_had(monkeypatch, capsys, allowed, said):
    begun, start = [], reading._Reader.__init__

    def refuse(self, files) -> None:
        if len(begun) >= allowed:
            raise OSError(11, "Resource temporarily unavailable")
        begun.append(self)
        start(self, files)

    monkeypatch.setattr(reading._Reader, "__init__", refuse)
    found = collect(number, 23, 4, 3)
    assert sorted(found) == list(range(23)) and found[22] == (22, "ok", "")
    assert capsys.readouterr().out.count(said) == 1


def test_no_shared_memory_is_needed():  # A03
    """A /dev/shm of 64 kB, where the system lets us have one of our own, and images of 4 MB."""
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import numpy as np
from rsnakit.batches import in_batches
read = lambda path: np.full((2048, 1024), int(path), np.uint16)
paths = [str(i) for i in range(24)]
print(sum(int(batch["image"][:, 0, -1, -1].sum()) for batch in in_batches(paths, read, (2048, 1024), 8, 4)))
"""
    command = small_shm.command_in("64k", sys.executable, "-c", script)
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == str(sum(range(24))), result.stderr


def test_an_image_of_another_shape_or_type_is_a_failure_of_its_own():
    def odd(path: str) -> np.ndarray:
        return {"1": np.zeros((3, 2), np.uint16), "2": np.zeros(SHAPE, np.float32)}.get(Path(path).name, number("5"))

    found = collect(odd, 4, 4, 2)
    assert [found[item][1] for item in range(4)] == ["ok", "failed", "failed", "ok"]
    assert "(3, 2) uint16, expected (2, 3) uint16" in found[1][2] and "float32" in found[2][2]
