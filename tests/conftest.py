"""What several test files share: a small synthetic competition and its store, made once a session."""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded: the machines have few cores, and are shared

from pathlib import Path

import pytest

from rsnakit import demo, env, preprocess, tables
from rsnakit.preprocess import PreprocessConfig

SMALL = PreprocessConfig(height=64, width=32)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many processes share the tests of whole folders: one a core, up to four, since each grows to 3 GB.

    Files that are named run in this process, where nothing has to be started and imported first; so does everything under
    `-s`, since what other processes print is not shown.
    """
    folders = all(Path(argument).is_dir() for argument in config.args)
    processes = min(env.cores(), 4) if folders and config.option.capture != "no" else 0
    return processes if processes > 1 else 0


@pytest.fixture(scope="session")
def competition(tmp_path_factory) -> Path:
    """A synthetic competition of 16 training and 4 test patients; do not write to it."""
    root = tmp_path_factory.mktemp("competition") / "demo"
    return demo.make_competition(root, n_patients=16, size=192, positive_rate=0.5, n_test=4, n_jobs=1)


@pytest.fixture(scope="session")
def store(competition, tmp_path_factory):
    """The store of its training images at 64x32; do not write to it."""
    table = tables.load_table(competition, "train")
    return preprocess.build_store(table, SMALL, tmp_path_factory.mktemp("store"), n_jobs=1)


@pytest.fixture(scope="session")
def table(competition):
    return tables.load_table(competition, "train")


@pytest.fixture(scope="module", autouse=True)
def compiled_code_is_forgotten():
    """Once something was compiled, each swapped method is looked for among all objects alive: in one file is enough."""
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()
