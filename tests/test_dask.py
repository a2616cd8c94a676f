"""A store built on a Dask cluster: a scheduler and two workers, started outside the repository, get the same bytes."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import joblib
import nbformat
import numpy as np
import pandas as pd
import papermill
import pytest
from dicom_files import j2k, write
from phantoms import CONFIG, deadly, write_many
from pydicom import uid

import rsnakit
from rsnakit import cluster, preprocess, store, workers
from rsnakit.cluster import ClusterError
from rsnakit.jobs import JobError
from rsnakit.preprocess import BuildConfig, build_store
from rsnakit.workers import over_items

distributed = pytest.importorskip("distributed")
JOBLIB = tuple(map(int, joblib.__version__.split(".")[:2]))


@contextlib.contextmanager
def started(command: list[str], folder: Path):
    """A process of Dask's, in a folder that has no way to this package; it and what it starts are ended afterwards."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # A task is given up when one worker has died over it; Dask's own choice is four.
    environ |= {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0", "OMP_NUM_THREADS": "1"}
    with open(folder / f"{command[0]}.log", "w") as log:
        command = [sys.executable, "-m", f"distributed.cli.{command[0]}", *command[1:]]
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=log, stderr=log, start_new_session=True)
        try:
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> str:
    """Of a scheduler with two worker processes, of one thread each."""
    folder = tmp_path_factory.mktemp("cluster")
    scheduler = ["dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--dashboard-address", "127.0.0.1:0"]
    about = folder / "scheduler.json"
    with started([*scheduler, "--scheduler-file", about.name], folder):
        deadline = time.monotonic() + 60
        while not about.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        found = json.loads(about.read_text())["address"]
        options = ["--nworkers", "2", "--nthreads", "1", "--no-dashboard", "--memory-limit", "0"]
        with started(["dask_worker", found, *options, "--local-directory", str(folder)], folder):
            with distributed.Client(found, set_as_default=False) as client:
                client.wait_for_workers(2, timeout=60)
                specs = client.run(eval, "__import__('importlib.util').util.find_spec('rsnakit')").values()
                assert set(specs) == {None}  # they have not the package by themselves
            yield found


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> pd.DataFrame:
    """40 files, one of them cut short and one blank; do not write to them."""
    table = write_many(tmp_path_factory.mktemp("files") / "a", 40, j2k(12), uid.JPEG2000Lossless)
    cut = Path(table["path"][9])
    cut.write_bytes(cut.read_bytes()[:2000])
    write(table["path"][30], np.zeros((200, 160), np.uint16))
    return table


@pytest.fixture(scope="module")
def finished(table, tmp_path_factory) -> Path:
    """Their store, made by one process; do not write to it."""
    folder = tmp_path_factory.mktemp("stores") / "finished"
    build_store(table, CONFIG, folder, n_jobs=1)
    return folder


def build_on(address: str, table: pd.DataFrame, folder: Path) -> store.Store:
    return build_store(table, CONFIG, folder, n_jobs=1, build=BuildConfig(backend="dask", address=address))


def index_without_times(folder: Path) -> pd.DataFrame:
    return store.read_index(folder).drop(columns="seconds")


def test_cluster_changes_no_byte(address, table, finished, tmp_path):
    build_on(address, table.head(11), tmp_path / "store")
    images = build_on(address, table, tmp_path / "store")  # goes on with it
    assert images.index["status"].value_counts().to_dict() == {"ok": 38, "failed": 1, "blank": 1}
    assert (tmp_path / "store" / "images.bin").read_bytes() == (finished / "images.bin").read_bytes()
    pd.testing.assert_frame_equal(index_without_times(tmp_path / "store"), index_without_times(finished))
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["images.bin", "index.csv", "manifest.json"]


def test_a_notebook_finds_the_cluster(address, tmp_path):
    """Its kernel has built-in functions of its own, which can't be pickled."""
    code = f"import sys\nsys.path.insert(0, {str(Path(rsnakit.__file__).parents[1])!r})\n"
    code += "from rsnakit.workers import over_items\n"
    code += f"print(sorted(over_items(abs, range(-3, 0), 1, 'dask', {address!r})))"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbformat.write(notebook, tmp_path / "a.ipynb")
    out = papermill.execute_notebook(
        tmp_path / "a.ipynb", tmp_path / "out.ipynb", kernel_name="python3", progress_bar=False
    )
    assert out.cells[0].outputs[-1].text == "[(-3, 3), (-2, 2), (-1, 1)]\n"


def test_file_that_kills_its_worker_is_named_and_the_rest_is_done(address, table, finished, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(preprocess, "prepare_into_store", deadly("022"))
        images = build_on(address, table, tmp_path / "store")
    expected = index_without_times(finished)
    died = images.index.iloc[22]
    assert died["status"] == "failed" and "the worker that worked on it died" in died["reason"]
    pd.testing.assert_frame_equal(index_without_times(tmp_path / "store").drop(22), expected.drop(22))
    build_on(address, table, tmp_path / "store")  # it is tried again
    assert (tmp_path / "store" / "images.bin").read_bytes() == (finished / "images.bin").read_bytes()


def test_changed_package_takes_the_place_of_the_older_one(address, tmp_path, monkeypatch):
    def marks(item):
        from rsnakit import fields

        return getattr(fields, "MARK", "as it was"), os.getpid()

    def said() -> set:
        return {mark for _, (mark, _) in over_items(marks, range(12), 1, "dask", address)}

    assert said() == {"as it was"}
    with monkeypatch.context() as patch:
        shutil.copytree(Path(rsnakit.__file__).parent, tmp_path / "rsnakit")
        with open(tmp_path / "rsnakit" / "fields.py", "a") as f:
            f.write('\nMARK = "changed"\n')
        patch.setattr(rsnakit, "__file__", str(tmp_path / "rsnakit" / "__init__.py"))
        assert said() == {"changed"}
    assert said() == {"as it was"}


def test_what_the_function_raises_comes_through_and_ends_the_work(address):
    def raises(item):
        raise ZeroDivisionError(f"item {item}")

    with pytest.raises(ZeroDivisionError, match="item"):
        list(over_items(raises, range(40), 1, "dask", address))
    assert list(over_items(len, ["ab", "c"], 1, "dask", address)) in ([("ab", 2), ("c", 1)], [("c", 1), ("ab", 2)])
    assert list(over_items(len, [], 1, "dask", "tcp://nowhere:1")) == []


# A cluster that cannot be worked with


def test_workers_that_do_not_share_the_folder_stop_the_build(address, table, tmp_path, monkeypatch):
    monkeypatch.setattr(preprocess, "read_lock", lambda out: "a lock that they do not see")
    with pytest.raises(JobError, match="a cluster needs a folder that all its workers share"):
        build_on(address, table, tmp_path / "store")
    assert store.read_index(tmp_path / "store").empty and not (tmp_path / "store" / "lock.json").exists()


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs a path that is another one in each process")
def test_workers_that_do_not_see_the_images_stop_the_build(address, table, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(table["path"][0]).parent)
    here = table.assign(path="/proc/self/cwd/" + table["image_id"] + ".dcm")
    with pytest.raises(JobError, match=r"cwd/0\d\d\.dcm: is here, and a worker of the cluster does not find it"):
        build_on(address, here, tmp_path / "store")


@pytest.mark.skipif(JOBLIB < (1, 5), reason="joblib sets no time limit where results come in any order")
def test_workers_that_hang_stop_the_work(address, monkeypatch):
    monkeypatch.setattr(workers, "STALLED_S", 1)
    with pytest.raises(ClusterError, match="nothing was done for 1 s, its 2 workers hang or are busy"):
        list(over_items(time.sleep, [3, 3], 1, "dask", address))


def test_scheduler_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(cluster, "ANSWER_S", 1)
    for nowhere in ("tcp://127.0.0.1:1", "host8786", "ftp://127.0.0.1:8786"):
        with pytest.raises(ClusterError, match=f"{nowhere}: no Dask scheduler answers there within 1 s"):
            list(over_items(len, ["ab"], 1, "dask", nowhere))


def test_scheduler_without_workers(monkeypatch):
    monkeypatch.setattr(cluster, "WORKERS_S", 1)
    with (
        distributed.LocalCluster(n_workers=0, processes=False, dashboard_address=None) as lonely,
        pytest.raises(ClusterError, match="the scheduler had no workers within 1 s"),
    ):
        list(over_items(len, ["ab"], 1, "dask", lonely.scheduler_address))


@pytest.mark.parametrize(
    ("others", "complaint"),
    [
        ({"two": {"numpy": "1.0"}}, r"two has numpy 1\.0 \(here 2\.0\)\."),
        ({"one": {"Pillow": None, "joblib": None}}, r"one lacks Pillow, joblib\."),
        ({"one": {"Python": "3.9"}}, r"one has Python 3\.9 \(here 3\.11\)\."),
        (
            {"scheduler": {"joblib": None}, "two": {"imagecodecs": "1"}},
            r"scheduler lacks joblib; two has imagecodecs 1 ",
        ),
    ],
    ids=str,
)
def test_cluster_of_other_packages_is_refused_by_name(others, complaint):
    here = {
        "Python": "3.11",
        "numpy": "2.0",
        "pydicom": "3.0.1",
        "imagecodecs": "2025",
        "Pillow": "11",
        "joblib": "1.5",
    }
    here |= {"pandas": "2.2", "tqdm": "4", "opencv-python": None, "opencv-python-headless": "4.11"}

    def check(**others: dict) -> None:
        there = {name: here | others.get(name, {}) for name in ("scheduler", "one", "two")}
        cluster._check_packages(dict(here), there, "tcp://here:1")

    check()
    check(one={"opencv-python": "4.11", "opencv-python-headless": None})
    check(two={"pandas": "0.1"}, scheduler={"numpy": None})  # decide no pixel
    with pytest.raises(ClusterError, match=f"tcp://here:1: .*{complaint}.*run scheduler, workers and this in the same"):
        check(**others)


def test_distributed_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ClusterError, match="pip install distributed"):
        list(over_items(len, ["ab"], 1, "dask", "tcp://127.0.0.1:8786"))
