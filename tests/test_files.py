"""rsnakit.files: what is left of a file and of a lock when a writer is killed."""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rsnakit import files
from rsnakit.files import Lock, LockedError, replacing, write_atomic, write_json


def start(code: str, *arguments: object) -> subprocess.Popen:
    """A Python process that has run `code` up to its print('ready') and goes on from there."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, env=environ)
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Files


def test_content_is_replaced_whole(tmp_path):
    path = tmp_path / "a.txt"
    write_atomic(path, "Brüste\r\n")
    assert path.read_bytes() == b"Br\xc3\xbcste\r\n"
    write_atomic(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    write_json(path, {"b": [1, 2.5, None]})
    assert json.loads(path.read_text()) == {"b": [1, 2.5, None]}
    assert names(tmp_path) == ["a.txt"]


def test_old_content_stays_where_writing_fails(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(path) as temporary:
        temporary.write_text("half of the n")
        raise ZeroDivisionError
    with pytest.raises(ValueError):
        write_json(path, {"score": float("nan")})
    with pytest.raises(FileNotFoundError), replacing(path):
        pass  # nothing was written
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_a_disk_that_takes_no_more_is_said_with_the_files_name(tmp_path):  # C01
    path = tmp_path / "history.csv"
    path.write_text("old")
    code = """
import resource, sys
from rsnakit.files import replacing, write_atomic
print("ready", flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
for write in (lambda: write_atomic(sys.argv[1], "x" * 2000), lambda: write_atomic(sys.argv[1] + "/a", "x")):
    try:
        write()
    except OSError as error:
        print(type(error).__name__, error, flush=True)
"""
    process = start(code, path)
    said = process.stdout.read().splitlines()
    process.communicate()
    assert re.fullmatch(
        r"OSError \[Errno 27\] .*history\.csv cannot be written: File too large\. [\d,.]+ MB are free; .*as it was\.",
        said[0],
    )
    assert said[1].startswith("NotADirectoryError [Errno 20]")  # others stay what they are
    assert path.read_text() == "old" and names(tmp_path) == ["history.csv"]


WRITER = """
import sys
from rsnakit.files import replacing
with replacing(sys.argv[1]) as temporary:
    with open(temporary, "w") as f:
        f.write("half of")
        f.flush()
        print("ready", flush=True)
        sys.stdin.read()
"""


def test_killed_writer_leaves_the_old_file_and_the_next_one_clears_up(tmp_path):  # C01
    path = tmp_path / "last[1].pt"  # brackets mean something to glob
    path.write_text("old")
    kill(start(WRITER, path))
    assert path.read_text() == "old"
    assert len(names(tmp_path)) == 2
    write_atomic(path, "new")
    assert path.read_text() == "new"
    assert names(tmp_path) == ["last[1].pt"]


def test_a_living_writer_keeps_its_temporary_file(tmp_path):
    path = tmp_path / "a.txt"
    writer = start(WRITER, path)
    elsewhere = tmp_path / ".a.txt.another-host.7.tmp"
    for other in (elsewhere, tmp_path / ".a.txt.bak.txt", tmp_path / ".b.txt.another-host.7.tmp"):
        other.write_text("")
    write_atomic(path, "mine")
    assert elsewhere.exists()  # written to a moment ago
    os.utime(elsewhere, (0, 0))
    write_atomic(path, "mine")
    assert not elsewhere.exists()
    writer.communicate()  # its input ends, and it finishes
    assert path.read_text() == "half of"
    assert names(tmp_path) == [".a.txt.bak.txt", ".b.txt.another-host.7.tmp", "a.txt"]


def test_kill_at_random_moments_never_leaves_half_a_file(tmp_path):  # C01
    code = """
import sys
from rsnakit.files import write_atomic
print("ready", flush=True)
for i in range(10**9):
    write_atomic(sys.argv[1], str(i % 10) * 200_000)
"""
    path = tmp_path / "a.txt"
    for wait in (0.005, 0.011, 0.023, 0.05):
        path.unlink(missing_ok=True)
        process = start(code, path)
        while not path.exists():
            time.sleep(0.001)
        time.sleep(wait)
        kill(process)
        text = path.read_text()
        assert len(text) == 200_000 and len(set(text)) == 1
    write_atomic(path, "")
    assert names(tmp_path) == ["a.txt"]


# Locks

HOLDER = """
import sys
from rsnakit.files import Lock
with Lock(sys.argv[1], "fold 0"):
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_second_process_is_refused_until_the_first_is_done(tmp_path):
    holder = start(HOLDER, tmp_path / "fold0")
    with pytest.raises(LockedError) as refused, Lock(tmp_path / "fold0", "fold 0 of run x"):
        pass
    message = str(refused.value)
    for part in (
        "fold 0 of run x",
        f"process {holder.pid} on {socket.gethostname()} ",
        str(tmp_path / "fold0"),
        "Wait",
    ):
        assert part in message
    holder.communicate()
    with Lock(tmp_path / "fold0", "fold 0 of run x"):
        pass
    assert names(tmp_path / "fold0") == []


def test_killed_holder_is_taken_over_from_at_once(tmp_path):  # C01
    holder = start(HOLDER, tmp_path)
    holder.send_signal(signal.SIGKILL)
    time.sleep(0.1)  # not waited for: it may be a zombie, which has a number and writes nothing
    with Lock(tmp_path, "x"):
        assert json.loads((tmp_path / "lock.json").read_text())["pid"] == os.getpid()
        assert names(tmp_path) == ["lock.json"]
    holder.wait()


def test_lock_is_held_once_a_process_and_released_by_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), Lock(tmp_path, "x"):
        with pytest.raises(LockedError), Lock(tmp_path, "x"):
            pass
        assert names(tmp_path) == ["lock.json"]  # the refused one released nothing
        raise ZeroDivisionError
    assert names(tmp_path) == []


def test_number_given_to_another_process_is_no_holder(tmp_path):
    holder = start(HOLDER, tmp_path / "other")
    text = json.loads((tmp_path / "other" / "lock.json").read_text())
    (tmp_path / "lock.json").write_text(json.dumps({**text, "started": "1"}))  # lives, but began at another time
    with Lock(tmp_path, "x"):
        pass
    holder.communicate()


@pytest.mark.parametrize("host", ["another-host", f"{socket.gethostname()} pid:[1]"], ids=["host", "container"])
def test_lock_of_another_machine_lives_by_its_heartbeat(tmp_path, host):
    path = tmp_path / "lock.json"
    path.write_text(json.dumps({"host": host, "pid": 1, "started": "0"}))
    with pytest.raises(LockedError, match=host.split()[0]), Lock(tmp_path, "x"):
        pass
    old = time.time() - files.STALE_S - 5
    os.utime(path, (old, old))
    with Lock(tmp_path, "x"):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "content", ["", '{"host": "a', "[]", "3", "null", "{}", '{"host": 1, "pid": 1, "started": "1"}', "\xff"]
)
def test_lock_that_was_never_filled_is_waited_for_and_taken_over(tmp_path, content):
    path = tmp_path / "lock.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(LockedError, match="unknown machine"), Lock(tmp_path, "x"):
        pass
    os.utime(path, (0, 0))
    with Lock(tmp_path, "x"):
        pass


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_folder_that_cannot_be_written_to_is_said(tmp_path, monkeypatch, number):
    """As a read-only disk answers; root, as whom tests may run, is refused by no folder's mode."""

    def refuse(path, *arguments, **settings):
        raise OSError(number, os.strerror(number), str(path))

    for name, where in (("open", files), ("mkdir", Path)):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, refuse, raising=False)
            with pytest.raises(OSError) as refused, Lock(tmp_path / "fold0", "fold 0 of run x"):
                pass
        assert refused.value.errno == number and type(refused.value) is type(OSError(number, ""))
        assert re.fullmatch(
            rf"fold 0 of run x: {tmp_path}/fold0 cannot be written to: {os.strerror(number)}\. Give another folder, .*",
            refused.value.strerror,
        )
    with pytest.raises(NotADirectoryError, match=r"a/b"):  # others stay what they are
        (tmp_path / "a").touch()
        Lock(tmp_path / "a" / "b", "x").__enter__()


def test_heartbeat_touches_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "HEARTBEAT_S", 0.02)
    with Lock(tmp_path, "x"):
        os.utime(tmp_path / "lock.json", (0, 0))
        time.sleep(0.3)
        assert time.time() - (tmp_path / "lock.json").stat().st_mtime < 5


def test_lock_lost_to_another_is_left_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "HEARTBEAT_S", 0.02)
    path = tmp_path / "lock.json"
    with Lock(tmp_path, "x"):  # slept so long that another machine took over
        path.write_text(json.dumps({"host": "another-host", "pid": 1, "started": "0"}))
        os.utime(path, (0, 0))
        time.sleep(0.2)
        assert path.stat().st_mtime == 0
    assert json.loads(path.read_text())["host"] == "another-host"


def test_of_many_that_take_over_at_once_one_gets_it(tmp_path):
    code = """
import sys
from rsnakit.files import Lock, LockedError
print("ready", flush=True)
sys.stdin.read(1)
try:
    with Lock(sys.argv[1], "x"):
        print("held", flush=True)
        sys.stdin.read()
except LockedError:
    print("refused", flush=True)
"""
    for _ in range(5):
        (tmp_path / "lock.json").write_text(json.dumps({"host": "another-host", "pid": 1, "started": "0"}))
        os.utime(tmp_path / "lock.json", (0, 0))
        processes = [start(code, tmp_path) for _ in range(4)]
        for process in processes:
            process.stdin.write("g")
            process.stdin.flush()
        said = sorted(process.stdout.readline() for process in processes)
        for process in processes:
            process.communicate()
        assert said == ["held\n"] + ["refused\n"] * 3
        assert names(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_forked_child_does_not_release_its_parents_lock(tmp_path):
    code = """
import os, sys
from rsnakit.files import Lock
with Lock(sys.argv[1], "x"):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        print("ready", os.path.exists(sys.argv[1] + "/lock.json"))
"""
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=30)
    assert said.stdout == "ready True\n"
    assert names(tmp_path) == []
