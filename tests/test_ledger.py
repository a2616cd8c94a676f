"""rsnakit.ledger: what was kept is there after a kill at any byte, and nothing else is taken for it."""

import contextlib
import csv
import errno
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from rsnakit import ledger
from rsnakit.files import LockedError
from rsnakit.ledger import Ledger, Record

KEY = {"weights": {"fold0": "abc"}, "passes": [[0, []], [1, (3,)]]}  # tuples come back as lists
SHAPE = 2, 3  # passes, channels


@pytest.fixture
def paths(tmp_path) -> list[Path]:
    """Files of ten images."""
    (tmp_path / "images").mkdir()
    found = [tmp_path / "images" / f"{i}.dcm" for i in range(10)]
    for i, path in enumerate(found):
        path.write_bytes(b"x" * (i + 1))
    return found


def record(row: int, shape=None, score: float = 0.0, **more) -> Record:
    """Of an image: a score of many digits, or features that tell it from all others."""
    features = None if shape is None else np.random.default_rng(row).normal(size=shape).astype(np.float32)
    values = {"status": "ok", "score": score or (row + 1) / 37, "seconds": 0.25, "asked": 3, "used": 1, "reason": ""}
    return Record(row, **{**values, **more}, features=features)


def opened(folder: Path, paths, shape=None, key=KEY, **more) -> Ledger:
    return Ledger(folder, key, [path.stem for path in paths], paths, shape, **more)


def kept(folder: Path, paths, shape=None, key=KEY, **more) -> dict[int, Record]:
    with opened(folder, paths, shape, key, **more) as found:
        return {each.row: each for each in found.records()}


def same(one: Record, other: Record) -> bool:
    return one[:-1] == other[:-1] and (one.features is None or np.array_equal(one.features, other.features))


@pytest.mark.parametrize("shape", [None, SHAPE])
def test_records_come_back_as_they_were(tmp_path, paths, shape):
    wanted = [record(0, shape), record(7, shape, status="blank", reason='all "zero", 0, nothing', used=0, asked=2**40)]
    wanted.append(record(3, shape, score=1e-300, reason="Brüste"))
    with opened(tmp_path / "scores", paths, shape) as out:
        assert list(out.records()) == []
        out.keep(wanted[:1])
        out.keep(wanted[1:])
        out.keep([])
    found = kept(tmp_path / "scores", paths, shape)
    assert list(found) == [0, 7, 3] and all(same(found[each.row], each) for each in wanted)
    with opened(tmp_path / "scores", paths, shape) as out:
        out.keep([record(5, shape), record(0, shape, score=0.75)])
    found = kept(tmp_path / "scores", paths, shape)
    assert set(found) == {0, 3, 5, 7} and found[0].score == 0.75  # the last one counts
    with open(tmp_path / "scores" / "scores.csv", newline="", encoding="utf-8") as file:  # as anybody reads it
        rows = list(csv.DictReader(file))
    assert [row["image_id"] for row in rows] == ["0", "7", "3", "5", "0"] and rows[1][
        "reason"
    ] == 'all "zero", 0, nothing'
    names = {path.name for path in (tmp_path / "scores").iterdir()}
    assert names == {"key.json", "scores.csv"} | ({"features.bin"} if shape else set())
    if shape:
        assert (tmp_path / "scores" / "features.bin").stat().st_size == 5 * 2 * 3 * 4


def test_images_that_failed_are_tried_again(tmp_path, paths):
    with opened(tmp_path / "scores", paths) as out:
        out.keep([record(0, status="failed", reason="cut short"), record(1)])
    assert list(kept(tmp_path / "scores", paths)) == [1]


def test_without_a_folder_nothing_is_kept(paths):
    with opened(None, paths) as out:
        out.keep([record(0)])
        assert list(out.records()) == []


@pytest.mark.parametrize("shape", [None, SHAPE])
def test_a_writer_that_ends_at_any_byte_costs_the_record_it_was_at(tmp_path, paths, shape, monkeypatch):  # C01
    """Cut by hand at every length: the records whose lines end before it are there, and what is added after is whole."""
    monkeypatch.setattr(ledger, "ROOM", (0, 0))
    folder = tmp_path / "scores"
    with opened(folder, paths, shape) as out:
        for row in range(3):
            out.keep([record(row, shape)])
    names = ["scores.csv", "features.bin"] if shape else ["scores.csv"]
    for name in names:
        whole = {other: (folder / other).read_bytes() for other in names}
        for length in range(len(whole[name]) + 1):
            for other, content in whole.items():
                (folder / other).write_bytes(content)
            os.truncate(folder / name, length)
            ends = whole[name][:length].count(b"\n") - 1 if name == "scores.csv" else length // (4 * 6)
            with opened(folder, paths, shape) as out:
                assert sorted(each.row for each in out.records()) == list(range(max(0, ends)))
                out.keep([record(9, shape)])
            found = kept(folder, paths, shape)
            assert sorted(found) == [*range(max(0, ends)), 9] and same(found[9], record(9, shape))
        for other, content in whole.items():
            (folder / other).write_bytes(content)


def test_damage_costs_the_records_it_is_in(tmp_path, paths):
    folder, rng = tmp_path / "scores", random.Random(0)
    with opened(folder, paths, SHAPE) as out:
        out.keep([record(row, SHAPE) for row in range(10)])
    whole = {name: (folder / name).read_bytes() for name in ("scores.csv", "features.bin")}
    header = whole["scores.csv"].index(b"\n") + 1
    for number in range(60):
        name = ("scores.csv", "features.bin")[number % 2]
        place = rng.randrange(header if name == "scores.csv" else 0, len(whole[name]))
        damaged = bytearray(whole[name])
        damaged[place] ^= 1 << rng.randrange(8)
        (folder / name).write_bytes(damaged)
        found = kept(folder, paths, SHAPE)
        assert 8 <= len(found) <= 9  # a line's end that is lost costs the next line, too
        assert all(same(each, record(each.row, SHAPE)) for each in found.values())
        for other, content in whole.items():
            (folder / other).write_bytes(content)


def write_on(folder: Path, paths: list[Path], said) -> None:
    """What a process does that is killed at it: four records at a time, and says of each time how many there are now."""
    with opened(folder, paths, SHAPE) as out:
        first = sum(1 for _ in out.records())
        said.send(first)
        for row in range(first, len(paths), 4):
            out.keep([record(i, SHAPE) for i in range(row, min(row + 4, len(paths)))])
            said.send(min(row + 4, len(paths)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_kill_at_random_moments_of_many_saves(tmp_path, paths):  # C01, K08
    """What `keep` has come back from is there, and all of it as it was; the next writer goes on from it."""
    many, rng, last = paths * 200, random.Random(1), 0
    context = multiprocessing.get_context("fork")
    for _ in range(8):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=write_on, args=(tmp_path / "scores", many, sender))
        process.start()
        sender.close()
        assert receiver.recv() >= last  # what the one before had said is there
        time.sleep(rng.uniform(0, 0.05))
        process.kill()
        process.join()
        with contextlib.suppress(EOFError):
            while True:
                last = receiver.recv()
    rows = kept(tmp_path / "scores", many, SHAPE)
    assert list(rows) == list(range(len(rows))) and len(rows) >= last > 100
    assert all(same(rows[row], record(row, SHAPE)) for row in rows)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"weights": {"fold0": "abd"}}, "weights.fold0 differ"),
        ({"weights": {"fold0": "abc", "fold1": "e"}}, "weights.fold1 differ"),
        ({"passes": [[0, []]]}, "passes differ"),
    ],
)
def test_scores_that_something_else_decided_are_begun_anew_in_a_line(tmp_path, paths, capsys, change, named):
    folder = tmp_path / "scores"
    with opened(folder, paths, SHAPE) as out:
        out.keep([record(0, SHAPE)])
    assert capsys.readouterr().out == ""
    with opened(folder, paths, SHAPE, {**KEY, **change}) as out:
        assert list(out.records()) == []
        out.keep([record(1, SHAPE)])
    (said,) = capsys.readouterr().out.splitlines()
    assert "begun anew" in said and named in said and str(folder) in said
    assert list(kept(folder, paths, SHAPE, {**KEY, **change})) == [1]
    assert (folder / "features.bin").stat().st_size == 24


def test_a_key_that_cannot_be_read_fits_nothing(tmp_path, paths, capsys):
    with opened(tmp_path / "scores", paths) as out:
        out.keep([record(0)])
    for text in ('{"key": {"wei', "[]", "{}", None):
        path = tmp_path / "scores" / "key.json"
        path.unlink() if text is None else path.write_text(text)
        assert kept(tmp_path / "scores", paths) == {}
        assert "cannot be read what decided them" in capsys.readouterr().out


def test_what_is_only_noted_is_said_and_gone_on_with(tmp_path, paths, capsys):
    with opened(tmp_path / "scores", paths, noted={"precision": "fp16"}) as out:
        out.keep([record(0)])
    assert list(kept(tmp_path / "scores", paths, noted={"precision": "fp32"})) == [0]
    assert "(precision: 'fp16', now 'fp32')" in capsys.readouterr().out
    assert list(kept(tmp_path / "scores", paths, noted={"precision": "fp32"})) == [0]
    assert capsys.readouterr().out == ""


def test_an_image_whose_file_was_changed_is_scored_again(tmp_path, paths):
    os.utime(paths[2], (1, 1))
    with opened(tmp_path / "scores", paths) as out:
        out.keep([record(row) for row in range(5)])
    paths[0].write_bytes(b"other")
    os.utime(paths[1], (5, 5))
    paths[3].unlink()
    assert sorted(kept(tmp_path / "scores", paths)) == [2, 4]
    with opened(tmp_path / "scores", paths) as out:
        out.keep([record(0, score=0.5)])
    assert kept(tmp_path / "scores", paths)[0].score == 0.5


def test_another_file_of_the_same_size_and_time_is_scored_again(tmp_path, paths):
    """As where images were decoded anew, and their times kept. They differ at the beginning or in the middle."""
    stamp = (1_600_000_000_000_000_000,) * 2
    for row, path in enumerate(paths):
        path.write_bytes(bytes([row]) * 40_000)
        os.utime(path, ns=stamp)
    with opened(tmp_path / "scores", paths) as out:
        out.keep([record(row) for row in range(len(paths))])
    first, second = (path.read_bytes() for path in paths[:2])
    paths[0].write_bytes(second), paths[1].write_bytes(first)  # changed for one another
    paths[2].write_bytes(bytes([2]) * 20_000 + b"?" + bytes([2]) * 19_999)
    paths[3].write_bytes(b"?" + bytes([3]) * 39_999)
    paths[4].unlink()
    os.mkfifo(paths[4])  # which nobody writes to
    for path in paths:
        os.utime(path, ns=stamp)
    assert list(kept(tmp_path / "scores", paths)) == [5, 6, 7, 8, 9]


def test_a_table_in_which_the_row_is_another_image_has_nothing(tmp_path, paths):
    """Not by its key, but by the line itself."""
    with opened(tmp_path / "scores", paths) as out:
        out.keep([record(0)])
    with Ledger(tmp_path / "scores", KEY, ["other"] * 10, paths) as out:
        assert list(out.records()) == []


def test_two_writers_of_a_folder_are_refused(tmp_path, paths):
    with (
        opened(tmp_path / "scores", paths) as first,
        pytest.raises(LockedError, match="inference: process"),
        opened(tmp_path / "scores", paths),
    ):
        pass
    first.keep([record(0)])  # it is closed, and does nothing
    assert kept(tmp_path / "scores", paths) == {}


def test_room_is_kept_while_it_writes_and_the_size_is_what_is_said(tmp_path, paths):
    folder = tmp_path / "scores"
    with opened(folder, paths, SHAPE) as out:
        assert (folder / "room").stat().st_size >= 1_000_000
        out.keep([record(row, SHAPE, status="blank", reason="why " * 100) for row in range(10)])
        taken = {path.name: path.stat().st_size for path in folder.iterdir()}
        assert sum(taken.values()) - taken["lock.json"] <= out.size
        assert taken["scores.csv"] <= 11 * ledger.LINE_BYTES
    assert not (folder / "room").exists()


def full_after(n_bytes: int):
    """`_write` on a disk that has so much room left, for a part of what is written, too."""
    left = n_bytes

    def write(file, data: bytes) -> None:
        nonlocal left
        file.write(data[:left])
        left -= len(data)
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return write


@pytest.mark.parametrize("room", [0, 30, 100, 200, 400])
def test_a_full_disk_is_said_once_and_inference_goes_on(tmp_path, paths, capsys, monkeypatch, room):  # C01, K08
    folder = tmp_path / "scores"
    with opened(folder, paths, SHAPE) as out:
        monkeypatch.setattr(ledger, "_write", full_after(room))
        for row in range(5):
            out.keep([record(row, SHAPE)])
        assert not (folder / "room").exists()  # submission.csv is to be written yet
        monkeypatch.undo()
    (said,) = capsys.readouterr().out.splitlines()
    assert "No space left on device" in said and "goes on without" in said
    found = kept(folder, paths, SHAPE)
    assert list(found) == list(range(len(found))) and len(found) < 5
    assert all(same(found[row], record(row, SHAPE)) for row in found)


def test_on_a_disk_that_is_full_from_the_start_what_there_is_is_read(tmp_path, paths, capsys, monkeypatch):
    folder = tmp_path / "scores"
    with opened(folder, paths, SHAPE) as out:
        out.keep([record(0, SHAPE)])

    def full(self):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Ledger, "_take_room", full)
    with opened(folder, paths, SHAPE) as out:
        assert [each.row for each in out.records()] == [0]
        out.keep([record(1, SHAPE)])
    assert capsys.readouterr().out.count("No space left") == 1


def test_a_disk_of_3_mb_takes_the_submission_all_the_same(tmp_path, paths, capsys):  # C01, K08
    """400 kB an image fill it; the room that was kept takes what comes at the end."""
    (tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(tmp_path / "disk")]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no disk of its own can be mounted here")
    try:
        with opened(tmp_path / "disk" / "scores", paths, (100, 1000)) as out:
            for row in range(10):
                out.keep([record(row, (100, 1000))])
        (tmp_path / "disk" / "submission.csv").write_text("5_L,0.5\n" * 20_000)
        assert capsys.readouterr().out.count("No space left on device") == 1
        found = kept(tmp_path / "disk" / "scores", paths, (100, 1000))
        assert 2 <= len(found) <= 5 and all(same(found[row], record(row, (100, 1000))) for row in found)
    finally:
        subprocess.run(["umount", str(tmp_path / "disk")], check=True)


def test_a_limit_on_files_stops_nothing(tmp_path, paths, capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path / "scores", paths, (100, 1000)) as out:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
        try:
            for row in range(5):
                out.keep([record(row, (100, 1000))])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert capsys.readouterr().out.count("File too large") == 1
    assert list(kept(tmp_path / "scores", paths, (100, 1000))) == [0, 1]


def test_a_folder_that_cannot_be_made_stops_nothing(tmp_path, paths, capsys):
    (tmp_path / "file").touch()
    with opened(tmp_path / "file" / "scores", paths) as out:
        out.keep([record(0)])
        assert list(out.records()) == []
    assert capsys.readouterr().out.count("scores cannot be kept there (Not a directory)") == 1
