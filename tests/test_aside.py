"""rsnakit.aside: a process that is not heard, that Ctrl-C does not reach, and that ends with all it started."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from rsnakit import aside

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes have no groups there")


def begin(pipe, log: str) -> None:
    aside.settle(log)
    os.write(1, b"what it says\n")
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    child = subprocess.Popen(command, start_new_session=True)  # in a group of its own, as a loader's workers
    pipe.send(child.pid)
    time.sleep(60)


def test_it_says_nothing_here_and_ends_with_what_it_started(tmp_path, capfd):
    log = tmp_path / "log"
    log.touch()
    with open(log) as said:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=begin, args=(theirs, str(log)), daemon=True)
        process.start()
        child = psutil.Process(ours.recv())
        os.kill(process.pid, signal.SIGINT)
        assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
        assert said.read() == "what it says\n" and not log.exists() and capfd.readouterr() == ("", "")
        assert process.is_alive()
        aside.end(process)
    assert process.exitcode == -signal.SIGKILL
    child.wait(10)
