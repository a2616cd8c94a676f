"""rsnakit.sandbox: no network, inputs that stay as they are, nothing of this repository, and an end to all that was begun."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from test_wheels import wheel

from rsnakit import sandbox
from rsnakit.sandbox import Isolation, SandboxError

REPOSITORY = Path(__file__).parents[1]
WEAK = Isolation("blocked", "chmod")
NAMESPACE = pytest.mark.skipif(sandbox.strongest().network != "namespace", reason="this machine allows no namespaces")
MOUNTS = pytest.mark.skipif(sandbox.strongest().inputs != "mount", reason="this machine allows no mounts")


def python(code: str, folder: Path, **arguments) -> sandbox.Outcome:
    """Code run by this interpreter in the sandbox, in an empty folder."""
    working = folder / "working"
    working.mkdir(exist_ok=True)
    return sandbox.run([sys.executable, "-c", code], working, folder / "log", **arguments)


# What a connection comes to: "open", or the error's number and what it says.
CONNECT = """
import socket, time
begun = time.monotonic()
try:
    with socket.socket() as s:
        s.settimeout(30)
        s.connect({address!r})
    print("open")
except OSError as error:
    print(error.errno, error)
"""


@NAMESPACE
def test_a_namespace_reaches_no_server_of_this_machine(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        assert python(CONNECT.format(address=address), tmp_path, isolation=WEAK).tail() == "open"
        assert "Connection refused" in python(CONNECT.format(address=address), tmp_path).tail()
    assert "Network is unreachable" in python(CONNECT.format(address=("192.0.2.1", 80)), tmp_path).tail()


@NAMESPACE
def test_who_is_not_allowed_namespaces_gets_them_as_a_user(tmp_path):
    """Root without the right to administer stands for one who is not root; setpriv is of util-linux."""
    code = f"""
import sys
from pathlib import Path
from rsnakit import sandbox
print(sandbox.strongest())
folder, log = Path({str(tmp_path)!r}), Path({str(tmp_path / "log")!r})
print(sandbox.run([sys.executable, "-c", "open('test.csv', 'w')"], folder, log, [folder]).tail(1))
"""
    drop = ["setpriv", "--bounding-set=-sys_admin"] if os.geteuid() == 0 else []
    try:
        done = subprocess.run([*drop, sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no setpriv here")
    if "namespace" not in done.stdout:
        pytest.skip(f"no namespaces for users here: {done.stdout}{done.stderr}")
    assert "Read-only file system" in done.stdout


@pytest.mark.parametrize("isolation", [None, WEAK], ids=["strongest", "weak"])
def test_the_loopback_and_sockets_of_the_machine_are_open(tmp_path, isolation):
    code = """
import socket, os
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(("localhost", server.getsockname()[1])):
    a, b = socket.socketpair()
    a.send(b"both"); print(b.recv(9).decode())
"""
    assert python(code, tmp_path, isolation=isolation).tail() == "both"


def test_blocked_sockets_refuse_at_once_and_send_nothing(tmp_path):
    """An address for documentation (RFC 5737), to which packets would go unanswered until the time-out."""
    said = python(CONNECT.format(address=("192.0.2.1", 80)), tmp_path, isolation=WEAK).tail()
    assert "the sandbox refuses 192.0.2.1" in said
    code = """
import socket, urllib.request
for attempt in (
    lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 9)),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendmsg([b"x"], [], 0, ("192.0.2.1", 9)),
    lambda: socket.create_connection(("192.0.2.1", 80), timeout=30),
    lambda: socket.getaddrinfo("example.org", 80),
    lambda: socket.gethostbyname("example.org"),
    lambda: urllib.request.build_opener(urllib.request.ProxyHandler({})).open("http://192.0.2.1/", timeout=30),
):
    try:
        print("open", attempt())
    except OSError as error:
        print("refused" if "the sandbox refuses" in str(error) else error)
"""
    assert python(code, tmp_path, isolation=WEAK).tail().split() == ["refused"] * 6


WRITE = """
import os, sys
for attempt in (lambda: open("{0}/old", "a"), lambda: open("{0}/new", "w"), lambda: os.remove("{0}/old")):
    try:
        attempt()
        print("written")
    except OSError as error:
        print(error.strerror)
"""


@MOUNTS
def test_inputs_are_mounted_read_only(tmp_path):
    inputs = tmp_path / "input"
    inputs.mkdir()
    (inputs / "old").write_text("as it was")
    outcome = python(WRITE.format(inputs), tmp_path, read_only=[inputs])
    assert outcome.tail().splitlines() == ["Read-only file system"] * 3
    # Here, outside, the folder is still to be written to, and what was in it is as it was.
    assert (inputs / "old").read_text() == "as it was" and os.listdir(inputs) == ["old"]
    (inputs / "new").touch()


@MOUNTS
def test_what_is_hidden_is_empty_and_stays_as_it_was(tmp_path):
    """Folders in one another, what is kept in them, and the working folder, which is one of those."""
    private = tmp_path / "private"
    for name in ("repository/.git", "data", "kept/deep"):
        (private / name).mkdir(parents=True)
        (private / name / "old").write_text("as it was")
    (private / "kept/module.py").touch()
    code = f"""
import os
from pathlib import Path
private = Path({str(private)!r})
print(sorted(str(p.relative_to(private)) for p in private.rglob("*")))
for attempt in (lambda: (private / "new").touch(), lambda: (private / "repository").mkdir()):
    try:
        attempt()
        print("written")
    except OSError as error:
        print(error.strerror)
(private / "kept/deep/new").touch()
"""
    working = private / "kept/deep"
    outcome = sandbox.run(
        [sys.executable, "-c", code],
        working,
        tmp_path / "log",
        hide=[private / "data", private, private / "repository", Path("/")],
        keep=[private / "kept/module.py", private / "gone"],
    )
    assert outcome.tail().splitlines() == [
        "['kept', 'kept/deep', 'kept/deep/old', 'kept/module.py']",
        *["Read-only file system"] * 2,
    ]
    assert (private / "repository/.git/old").read_text() == "as it was" and (working / "new").exists()


@MOUNTS
def test_a_python_within_what_is_hidden_goes_on(tmp_path):
    """A virtual environment in the folder that is hidden, and one that is that folder, as `python -m venv .` makes it."""
    for place, hidden in ((tmp_path / "a/.venv", tmp_path / "a"), (tmp_path / "b", tmp_path / "b")):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
        (hidden / "secret").touch()
        code = f"""
import sys
from pathlib import Path
sys.path[:0] = {[str(REPOSITORY), *filter(os.path.isdir, sys.path)]!r}
from rsnakit import sandbox
hidden, working = Path({str(hidden)!r}), Path({str(tmp_path)!r}) / "working"
working.mkdir(exist_ok=True)
inside = "import os, sys; print(sys.prefix, sorted(os.listdir({str(hidden)!r})))"
print(sandbox.run([sys.executable, "-c", inside], working, working / "log", hide=[hidden]).tail())
print(sandbox.python_in([hidden]))
"""
        done = subprocess.run([place / "bin/python", "-c", code], capture_output=True, text=True)
        assert done.stdout.startswith(f"{place} "), done.stderr
        listed = done.stdout.splitlines()[0]
        assert "secret" not in listed and ("'.venv'" in listed or "'pyvenv.cfg'" in listed)


def test_inputs_lose_their_permissions_where_nothing_can_be_mounted(tmp_path):
    inputs = tmp_path / "input"
    (inputs / "folder").mkdir(parents=True)
    (inputs / "old").write_text("as it was")
    outcome = python("print('done')", tmp_path, read_only=[inputs], isolation=WEAK)
    assert outcome.tail() == "done"
    for path in (inputs, inputs / "folder", inputs / "old"):
        assert path.stat().st_mode & 0o222 == 0
    assert ("does not stop root" in str(WEAK)) == (os.geteuid() == 0)
    if os.geteuid():
        outcome = python(WRITE.format(inputs), tmp_path, read_only=[inputs], isolation=WEAK)
        assert outcome.tail().splitlines() == ["Permission denied"] * 3


def test_what_this_process_has_stays_outside(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("KAGGLE_KEY", "secret")
    monkeypatch.setenv("RSNA_DATA", "/data")
    code = """
import os, json
print(json.dumps([dict(os.environ), os.getcwd(), os.listdir(os.path.expanduser("~")), os.listdir()]), flush=True)
import rsnakit
"""
    outcome = python(code, tmp_path, environ={"KAGGLE_KERNEL_RUN_TYPE": "Batch"})
    lines = outcome.log.read_text().splitlines()
    environ, folder, home, listed = json.loads(lines[0])
    assert "No module named 'rsnakit'" in lines[-1] and outcome.status == 1
    assert environ["KAGGLE_KERNEL_RUN_TYPE"] == "Batch" and "PATH" in environ
    assert not {"KAGGLE_KEY", "RSNA_DATA"} & environ.keys() and "secret" not in str(environ)
    assert str(REPOSITORY) not in environ["PYTHONPATH"]
    assert folder == str(tmp_path / "working") and home == listed == []
    assert not Path(environ["HOME"]).exists()  # gone with the run


def test_what_pip_installs_inside_is_found_there_and_gone_afterwards(tmp_path):
    """As the notebook's first cell does with a bundle's wheels; this Python keeps what it has."""
    path = wheel(tmp_path, "newfangled")
    code = f"""
import importlib, subprocess, sys
subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", {str(path)!r}], check=True)
importlib.invalidate_caches()
import newfangled
print("imported from", newfangled.__file__)
"""
    assert python(code, tmp_path).tail(1).startswith("imported from /")
    assert importlib.util.find_spec("newfangled") is None


def test_a_package_that_is_installed_is_refused(tmp_path):
    sandbox.refuse_package("rsnakit", tmp_path)
    with pytest.raises(
        SandboxError, match=r"pydicom can be imported where nothing but the bundle should have it: .*pydicom"
    ):
        sandbox.refuse_package("pydicom", tmp_path)


# Starts a process in a session of its own, which a signal to the group does not reach, and tells its number.
LEAVES_ONE = """
import subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(other.pid, flush=True)
time.sleep({seconds})
"""


@pytest.mark.parametrize("isolation", [None, WEAK], ids=["strongest", "weak"])
def test_importing_from_the_inputs_writes_nothing_there(tmp_path, isolation):
    (tmp_path / "input").mkdir()
    (tmp_path / "input/module.py").write_text("value = 7")
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'input')!r}); import module; print(module.value)"
    assert python(code, tmp_path, read_only=[tmp_path / "input"], isolation=isolation).tail() == "7"
    assert os.listdir(tmp_path / "input") == ["module.py"]


@pytest.mark.parametrize("isolation", [None, WEAK], ids=["strongest", "weak"])
def test_time_out_ends_all_that_was_begun(tmp_path, isolation):
    outcome = python(LEAVES_ONE.format(seconds=600), tmp_path, isolation=isolation, timeout_s=1)
    assert outcome.timed_out and outcome.status == -signal.SIGKILL and outcome.seconds >= 1
    assert not psutil.pid_exists(int(outcome.tail()))


def test_what_a_command_leaves_behind_is_ended(tmp_path):
    outcome = python(LEAVES_ONE.format(seconds=0), tmp_path)
    assert (outcome.status, outcome.timed_out) == (0, False)
    assert not psutil.pid_exists(int(outcome.tail()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_it_ends_with_who_began_it(tmp_path, number):
    """Ctrl-C at the rehearsal, and one that is killed and can clean up nothing."""
    code = f"""
import sys
from pathlib import Path
from rsnakit import sandbox
folder = Path({str(tmp_path)!r})
sandbox.run([sys.executable, "-c", {LEAVES_ONE.format(seconds=600)!r}], folder, folder / "log")
"""
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    outer = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, env=environ, stderr=subprocess.DEVNULL)
    log, deadline = tmp_path / "log", time.monotonic() + 60
    while not (log.exists() and log.read_text().strip()) and time.monotonic() < deadline:
        time.sleep(0.05)
    pid = int(log.read_text())
    assert psutil.pid_exists(pid)
    outer.send_signal(number)
    outer.wait(60)
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)
    while list(tmp_path.glob("rsnakit-*")) and time.monotonic() < deadline:  # its own folders
        time.sleep(0.05)
    assert not list(tmp_path.glob("rsnakit-*"))


def test_memory_and_disk_are_measured_over_all_processes(tmp_path):
    """200 MB in a child of the command's, and 30 MB that are on the disk for a while."""
    code = """
import os, subprocess, sys, time
open("large", "wb").write(bytes(30_000_000))
subprocess.run([sys.executable, "-c", "import time; held = b'1' * 200_000_000; time.sleep(1.5)"])
os.remove("large")
open("small", "wb").write(bytes(1000))
"""
    outcome = python(code, tmp_path)
    assert outcome.status == 0
    assert 200e6 < outcome.peak_memory < 260e6
    assert outcome.peak_disk == 30_000_000


def test_a_status_is_told(tmp_path):
    assert python("raise SystemExit(125)", tmp_path).status == 125
    assert python("import os; os.kill(os.getpid(), 9)", tmp_path).status == -signal.SIGKILL


def test_a_place_that_cannot_be_made_is_an_error(tmp_path):
    with pytest.raises(SandboxError, match=r"could not be made.*nothing_of_this_name"):
        sandbox.run(["nothing_of_this_name"], tmp_path, tmp_path / "log")
    if sandbox.strongest().inputs == "mount":
        with pytest.raises(SandboxError, match=r"could not be made.*No such file"):
            python("", tmp_path, read_only=[tmp_path / "nowhere"])
