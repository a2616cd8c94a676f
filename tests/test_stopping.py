"""rsnakit.stopping: signals and the clock are noted, and everything is put back."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rsnakit import stopping
from rsnakit.stopping import Stop

INT, TERM = signal.SIGINT, signal.SIGTERM


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0)  # Python looks for signals between two of its instructions


@pytest.fixture(autouse=True)
def handlers_are_put_back():
    before = [signal.getsignal(number) for number in (INT, TERM)]
    yield
    after = [signal.getsignal(number) for number in (INT, TERM)]
    for number, handler in zip((INT, TERM), before, strict=True):
        signal.signal(number, handler)
    assert after == before


BEGIN = "import os, signal, sys, time\nfrom rsnakit.stopping import Stop\n"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
ENVIRONMENT["PYTHONPATH"] = str(Path(__file__).parents[1])


def run(code: str) -> subprocess.CompletedProcess:
    """A Python process of its own."""
    return subprocess.run(
        [sys.executable, "-c", BEGIN + code], capture_output=True, text=True, env=ENVIRONMENT, timeout=30
    )


def test_nothing_asked():
    with Stop() as stop:
        assert stop.reason == "" and not stop.asked()
    assert stop.reason == ""


def test_ctrl_c_is_noted_and_a_second_one_raises():
    with pytest.raises(KeyboardInterrupt), Stop() as stop:
        send(INT)
        assert stop.asked() and stop.reason == "Ctrl-C"
        send(INT)
        pytest.fail("the second one was noted too")
    assert stop.reason == "Ctrl-C"


def test_ctrl_c_is_over_when_it_was_noted():
    with Stop() as stop:
        send(INT)
    assert stop.reason == "Ctrl-C"
    with stop:  # the same again: a new question
        assert stop.reason == ""
    with pytest.raises(KeyboardInterrupt):
        send(INT)


def test_sigterm_is_noted_and_sent_again_to_the_handler_before():
    heard = []
    signal_before = signal.signal(TERM, lambda number, frame: heard.append(number))
    try:
        with Stop() as stop:
            send(TERM)
            assert stop.reason == "SIGTERM" and heard == []
            send(INT)
            assert stop.reason == "SIGTERM"  # the first
        assert heard == [TERM]
        with pytest.raises(ZeroDivisionError), Stop():
            send(TERM)
            raise ZeroDivisionError
        assert heard == [TERM, TERM]
    finally:
        signal.signal(TERM, signal_before)


def test_sigterm_ends_the_process_once_it_is_ready():
    """With the exit status that its parent expects, and nothing of what it printed lost."""
    done = run("with Stop() as stop:\n os.kill(os.getpid(), 15)\n print(stop.reason)\nprint('not reached')")
    assert (done.returncode, done.stdout, done.stderr) == (-TERM, "SIGTERM\n", "")
    done = run("sys.stdout.close()\nwith Stop():\n os.kill(os.getpid(), 15)")
    assert done.returncode == -TERM


def test_the_clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    with Stop(math.inf) as never, Stop(deadline=105.0) as stop:
        assert not stop.asked()
        now[0] = 105.1
        assert stop.reason == "max_hours" and stop.asked() and not never.asked()
        send(INT)
        assert stop.reason == "Ctrl-C"


def test_nested_both_hear():
    with Stop() as outer:
        with Stop() as inner:
            send(INT)
            assert inner.reason == "Ctrl-C" and outer.reason == ""
        assert outer.reason == "Ctrl-C"
        with Stop() as inner:  # one that comes before the inner one is there is not lost on it
            assert inner.reason == "Ctrl-C"
            with pytest.raises(KeyboardInterrupt):
                send(INT)  # the second
        assert outer.reason == "Ctrl-C"
    heard = []
    signal_before = signal.signal(TERM, lambda number, frame: heard.append(number))
    try:
        with Stop() as outer:
            with Stop() as inner:
                send(TERM)
            assert outer.reason == inner.reason == "SIGTERM" and heard == []
        assert heard == [TERM]
    finally:
        signal.signal(TERM, signal_before)


def test_another_thread_has_the_clock_only():
    found = []

    def work() -> None:
        before = [signal.getsignal(number) for number in (INT, TERM)]
        with Stop(deadline=0.0) as stop:
            found.append([signal.getsignal(number) for number in (INT, TERM)] == before)
            found.append(stop.reason)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [True, "max_hours"]


@pytest.mark.parametrize("number", [INT, TERM])
def test_what_is_ignored_stays_ignored(number):
    """As under nohup, or a shell's job in the background."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with Stop() as stop:
            send(number)
            assert not stop.asked()
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_handler_that_python_did_not_set_is_left_alone(monkeypatch):
    set_to = []
    monkeypatch.setattr(stopping.signal, "getsignal", lambda number: None)
    monkeypatch.setattr(stopping.signal, "signal", lambda *arguments: set_to.append(arguments))
    with Stop():
        pass
    assert set_to == []


CHILD = """
with Stop() as stop:
    child = os.fork()
    if child == 0:
        try:
            print("ready", flush=True)
            while not stop.asked():
                time.sleep(0.01)
            print("noted by the child", flush=True)
            os._exit(0)
        except KeyboardInterrupt:
            os._exit(7)
    time.sleep(0.3)
    os.kill(child, signal.{name})
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), repr(stop.reason))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize(("name", "status"), [("SIGTERM", -TERM), ("SIGINT", 7)])
def test_a_forked_child_does_what_it_did_before(name, status):
    done = run(CHILD.format(name=name))
    assert done.stdout == f"ready\n{status} ''\n", done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_that_unwinds_sends_nothing():
    done = run("""
with Stop() as stop:
    os.kill(os.getpid(), 15)
    child = os.fork()
    if child == 0:
        sys.exit(5)  # through the block's end
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status))
""")
    assert (done.returncode, done.stdout) == (-TERM, "5\n")


@pytest.mark.parametrize("number", [INT, TERM])
@pytest.mark.parametrize("moment", [0, 1])
def test_a_signal_while_leaving_is_not_lost(monkeypatch, number, moment):
    """It comes before the first or the second handler is put back; the one before hears of it, and both are put back."""
    heard, real = [], signal.signal
    before = {n: real(n, lambda n, frame: heard.append(n)) for n in (INT, TERM)}
    own = {n: signal.getsignal(n) for n in (INT, TERM)}
    moments = iter(range(2))

    def interrupted(n, handler):
        if next(moments) == moment:
            send(number)
        return real(n, handler)

    try:
        with Stop():
            monkeypatch.setattr(stopping.signal, "signal", interrupted)
        assert heard == [number]
        assert {n: signal.getsignal(n) for n in own} == own
    finally:
        for n, handler in before.items():
            real(n, handler)


def test_a_second_ctrl_c_while_leaving_raises_when_all_is_put_back(monkeypatch):
    real, own = signal.signal, signal.getsignal(TERM)

    def interrupted(number, handler):
        send(INT)
        return real(number, handler)

    with pytest.raises(KeyboardInterrupt), Stop():
        send(INT)
        monkeypatch.setattr(stopping.signal, "signal", interrupted)
    monkeypatch.setattr(stopping.signal, "signal", real)
    assert signal.getsignal(INT) is signal.default_int_handler and signal.getsignal(TERM) is own


def test_signals_from_outside_in_the_middle_of_work():
    """A process that saves and ends when it is told to, told a hundred times at once."""
    code = """
with Stop() as stop:
    print("ready", flush=True)
    while not stop.asked():
        sum(range(1000))
    time.sleep(0.3)
    print("saved", stop.reason)
"""
    command = [sys.executable, "-c", BEGIN + code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert process.stdout.readline() == "ready\n"
    for _ in range(100):
        process.send_signal(TERM)
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (-TERM, "saved SIGTERM\n")
