"""The notebooks' first cell: where it finds the package, how it brings it, what it says where there is none to be had.

The fast tests run it as a script, with a package of two lines that says which folder it was taken from. The slow ones run it
with the kit itself in fresh environments, each of which is made to look like one of the places.
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("[0-9]*.ipynb"))
WAYS = "fill in repository, upload rsnakit.zip, or add its data (Kaggle)"


def first_cell(notebook: Path) -> str:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return "".join(next(cell["source"] for cell in cells if cell["cell_type"] == "code"))


CELL = first_cell(NOTEBOOKS[0])


def test_it_is_the_same_in_all_notebooks_and_begins_with_its_form():
    for notebook in NOTEBOOKS:
        assert first_cell(notebook) == CELL, notebook.name
    assert CELL.splitlines()[:2] == [
        'repository = ""  # @param {type:"string"}',
        'keep_work = False  # @param {type:"boolean"}',
    ]


STUB = "from pathlib import Path\ndef start(keep_work): print('from', Path(__file__).parents[1], keep_work)\n"


def package(folder: Path) -> Path:
    """A folder with a package that says where it is."""
    (folder / "rsnakit").mkdir(parents=True)
    (folder / "rsnakit" / "__init__.py").touch()
    (folder / "rsnakit" / "params.py").write_text(STUB)
    return folder


def run(folder: Path, root: Path, cell: str = CELL, **environ: str) -> subprocess.CompletedProcess:
    """The cell, run by this Python in a folder; nothing of this repository is on the path."""
    folder.mkdir(parents=True, exist_ok=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RSNAKIT", "PYTHON", "GIT"))}
    return subprocess.run(
        [sys.executable, "-I", "-c", cell], cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL,
        env={**clean, "RSNAKIT_ROOT": str(root), **environ},
    )  # fmt: skip


def found(done: subprocess.CompletedProcess) -> str:
    """Where the package was taken from, and keep_work."""
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1].removeprefix("from ")


# Where it is


MOUNTS = (
    "kaggle/input/bundle",
    "kaggle/input/bundle/dataset",
    "kaggle/input/datasets/me/bundle",
    "kaggle/input/datasets/me/bundle/dataset",
)


@pytest.mark.parametrize("mount", MOUNTS)
def test_a_data_set_on_kaggle(tmp_path, mount):
    package(tmp_path / mount)
    images = tmp_path / "kaggle/input/rsna-breast-cancer-detection/train_images/1/rsnakit"
    images.mkdir(parents=True)  # as deep as nobody looks
    (images / "params.py").touch()
    assert found(run(tmp_path / "kaggle/working", tmp_path)) == f"{tmp_path / mount} False"


def test_the_nearest_folder_above_goes_first(tmp_path):
    for folder in (tmp_path, tmp_path / "repository", tmp_path / "kaggle/input/bundle"):
        package(folder)
    here = tmp_path / "repository" / "notebooks"
    assert found(run(here, tmp_path)) == f"{tmp_path / 'repository'} False"
    assert found(run(tmp_path / "elsewhere", tmp_path)) == f"{tmp_path} False"
    (tmp_path / "[a] b" / "rsnakit").mkdir(parents=True)  # a folder of that name without the package in it
    assert found(run(package(tmp_path / "[a] b" / "c*"), tmp_path)) == f"{tmp_path / '[a] b' / 'c*'} False"


def test_a_rehearsal_finds_nothing_above_its_root(tmp_path):
    package(tmp_path)
    root = tmp_path / "work" / "rehearsal"
    done = run(root / "kaggle/working", root)
    assert done.returncode and WAYS in done.stderr
    mounted = package(root / "kaggle/input/bundle")
    (tmp_path / "link").symlink_to(root)
    for named in (root, tmp_path / "link"):
        assert found(run(root / "kaggle/working", named)) == f"{mounted} False"
    shutil.rmtree(mounted)
    assert WAYS in run(root / "kaggle/working", tmp_path / "link").stderr
    assert found(run(package(tmp_path / "mine"), root)) == f"{tmp_path / 'mine'} False"  # not within that root


# How it is brought


@pytest.fixture
def clone(tmp_path) -> Path:
    """A repository as a person has it at an address, with the package and a notebook beside it."""
    folder = package(tmp_path / "far away" / "rsnakit")
    (folder / "notebooks").mkdir()
    (folder / "notebooks" / "03_train.ipynb").write_text("{}")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], cwd=folder, check=True)
    return folder


@pytest.mark.parametrize("how", ["form", "variable"])
def test_from_the_address_of_a_repository_once(clone, tmp_path, how):
    here, address = tmp_path / "content", clone.as_uri()
    cell = CELL.replace('repository = ""', f'repository = "{address}"') if how == "form" else CELL
    given = {} if how == "form" else {"RSNAKIT_REPO": address}
    expected = f"{here / 'rsnakit-code'} False"
    assert found(run(here, tmp_path, cell, **given)) == expected
    assert (here / "rsnakit-code/notebooks/03_train.ipynb").exists()
    assert [path.name for path in here.iterdir()] == ["rsnakit-code"]
    shutil.rmtree(clone)  # so that it could not be brought once more
    done = run(here, tmp_path, cell, **given)
    assert found(done) == expected
    assert done.stdout.splitlines()[0] == f"rsnakit from {here / 'rsnakit-code'} (delete it to have it brought anew)"
    assert found(run(here / "deeper", tmp_path)) == expected


def test_the_form_goes_before_the_variable(clone, tmp_path):
    cell = CELL.replace('repository = ""', f'repository = "{clone.as_uri()}"')
    assert "rsnakit-code" in found(run(tmp_path / "content", tmp_path, cell, RSNAKIT_REPO="file:///nowhere"))


@pytest.mark.parametrize(
    ("place", "top"), [("beside", "rsnakit-main"), ("above", ""), ("mounted", "rsnakit-main"), ("variable", "")]
)
def test_from_an_uploaded_zip(tmp_path, place, top):
    here = tmp_path / "content" / "notebooks"
    folder = {
        "beside": here,
        "above": here.parent,
        "mounted": tmp_path / "kaggle/input/code",
        "variable": tmp_path / "a b",
    }
    package(tmp_path / "packed" / top)
    archive = shutil.make_archive(str(folder[place] / "rsnakit-main"), "zip", tmp_path / "packed")
    shutil.rmtree(tmp_path / "packed")
    given = {"RSNAKIT_REPO": archive} if place == "variable" else {}
    assert found(run(here, tmp_path, **given)) == f"{here / 'rsnakit-code'} False"
    Path(archive).unlink()
    assert found(run(here, tmp_path)) == f"{here / 'rsnakit-code'} False"


# What it says where there is none to be had, and what it leaves


def test_no_package_and_no_address(tmp_path):
    done = run(tmp_path / "content", tmp_path)
    assert done.returncode and f"no rsnakit in reach: {WAYS}" in done.stderr
    assert not list((tmp_path / "content").iterdir())


@pytest.mark.parametrize("name", ["nothing there", "nothing.zip", "other.zip", "broken.zip", "other"])
def test_a_wrong_address_leaves_nothing(clone, tmp_path, name):
    address = tmp_path / name
    if name == "broken.zip":
        address.write_bytes(b"PK\x03\x04 cut short")
    if name == "other.zip":
        (tmp_path / "packed" / "rsnakit").mkdir(parents=True)
        (tmp_path / "packed" / "rsnakit" / "other.py").touch()
        shutil.make_archive(str(address.with_suffix("")), "zip", tmp_path / "packed")
    if name == "other":
        shutil.copytree(clone, address)
        git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run([*git, "mv", "rsnakit", "another"], cwd=address, check=True)
        subprocess.run([*git, "commit", "-qm", "second"], cwd=address, check=True)
    done = run(tmp_path / "content", tmp_path, RSNAKIT_REPO=str(address))
    assert done.returncode and done.stderr.strip().splitlines()[-1].endswith(f"no rsnakit in {address}: {WAYS}")
    assert not list((tmp_path / "content").iterdir())
    assert "rsnakit-code" in found(
        run(tmp_path / "content", tmp_path, RSNAKIT_REPO=clone.as_uri())
    )  # the right one, then


def test_a_clone_that_breaks_off_leaves_nothing(tmp_path):
    """By a git that writes the package and is cut off then."""
    (tmp_path / "bin").mkdir()
    package(tmp_path / "half")
    git = tmp_path / "bin" / "git"
    git.write_text(f'#!/bin/sh\nfor target; do :; done\ncp -r {tmp_path}/half "$target"\nkill -9 $$\n')
    git.chmod(0o755)
    done = run(tmp_path / "content", tmp_path, RSNAKIT_REPO="x", PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert done.returncode and not list((tmp_path / "content").iterdir())


def test_keep_work_is_handed_on(tmp_path):
    cell = CELL.replace("keep_work = False", "keep_work = True")
    assert found(run(package(tmp_path / "here"), tmp_path, cell)) == f"{tmp_path / 'here'} True"


# The places, each in an environment that lacks a package


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """An environment as a place has it: all that this one has, torch above all, without torchinfo.

    The packages are links to this environment's, so that it takes no gigabytes; pip is its own.
    """
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    (folder / "links").mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("torchinfo", "pip", "__pycache__")) and entry.suffix != ".pth":
            (folder / "links" / entry.name).symlink_to(entry)
    site = next((folder / "venv").glob("lib/python*/site-packages"))
    (site / "links.pth").write_text(str(folder / "links"))
    return folder / "venv"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """torchinfo's, put together from what is installed here."""
    one = importlib.metadata.distribution("torchinfo")
    path = tmp_path_factory.mktemp("wheels") / f"torchinfo-{one.version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in one.files:
            if file.suffix != ".pyc" and ".." not in file.parts:
                archive.write(file.locate(), str(file))
    return path


def made_wheel(folder: Path, name: str, version: str, *needs: str) -> Path:
    """A wheel of nothing, which needs others."""
    info, path = f"{name}-{version}.dist-info", folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        lines = (
            "Metadata-Version: 2.1",
            f"Name: {name}",
            f"Version: {version}",
            *(f"Requires-Dist: {n}" for n in needs),
        )
        archive.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def index_of(folder: Path, *wheels: Path) -> str:
    """The address of a package index with some wheels, as pip reads it, on this disk."""
    for path in wheels:
        page = folder / "simple" / path.name.split("-")[0].replace("_", "-") / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(f'<a href="{path.as_uri()}">{path.name}</a>')
    return (folder / "simple").as_uri()


def copy_of_the_kit(folder: Path) -> Path:
    shutil.copytree(REPOSITORY / "rsnakit", folder / "rsnakit", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "requirements.txt", folder)
    return folder


def run_in(venv: Path, folder: Path, code: str, **environ: str) -> subprocess.CompletedProcess:
    """Code run by an environment's Python in a folder, with no settings of pip but those given."""
    foreign = ("RSNAKIT", "PYTHON", "GIT", "PIP", "KAGGLE", "COLAB", "PAPERSPACE")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return subprocess.run(
        [str(venv / "bin" / "python"), "-c", code], cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL,
        env={**clean, "PIP_CONFIG_FILE": os.devnull, "CUDA_VISIBLE_DEVICES": "", **environ},
    )  # fmt: skip


# What a later cell would find, behind the first cell, run twice.
LATER = """
print("SECOND")
params.start(keep_work)
import importlib.metadata, json, torch, torchinfo
from rsnakit import env
versions = {}
for one in importlib.metadata.distributions():
    versions.setdefault(one.metadata["Name"].lower(), one.version)  # the first is the one that is imported
print(json.dumps({"versions": versions, "package": params.__file__, "torchinfo": torchinfo.__file__, "where": env.where().name,
                  "torch": torch.__version__, "work": os.environ.get("RSNAKIT_WORK", "")}))
"""
PLACES = {
    "kaggle flat": ({"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, "kaggle/working"),
    "kaggle nested": ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "COLAB_RELEASE_TAG": "r"}, "kaggle/working"),
    "colab": ({"COLAB_RELEASE_TAG": "release-colab"}, "content"),
    "paperspace": ({"PAPERSPACE_NOTEBOOK_REPO_ID": "r1"}, "notebooks"),
}


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_each_place_gets_what_it_lacks_and_keeps_its_torch(bare, wheel, tmp_path, place):  # D16
    venv = tmp_path / "venv"
    shutil.copytree(bare, venv, symlinks=True)
    marks, folder = PLACES[place]
    here = tmp_path / "root" / folder
    here.mkdir(parents=True)
    given = {**marks, "RSNAKIT_ROOT": str(tmp_path / "root"), "PIP_INDEX_URL": index_of(tmp_path, wheel)}
    home, work, cell = here / "rsnakit-code", "", CELL.replace("keep_work = False", "keep_work = True")
    if place.startswith("kaggle"):
        inside = "kaggle/input/run-a" if place == "kaggle flat" else "kaggle/input/datasets/me/run-a"
        home = copy_of_the_kit(tmp_path / "root" / inside)
        (home / "bundle.json").write_text("{}")
        (home / "wheels").mkdir()
        shutil.copy(wheel, home / "wheels")
        given["PIP_INDEX_URL"] = "http://127.0.0.1:9"  # no internet
    elif place == "colab":
        kit = copy_of_the_kit(tmp_path / "rsnakit")
        git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
        for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
            subprocess.run([*git, *command], cwd=kit, check=True)
        given["RSNAKIT_REPO"] = kit.as_uri()
        colab = next(venv.glob("lib/python*/site-packages")) / "google" / "colab"
        colab.mkdir(parents=True)
        (colab / "drive.py").write_text(
            "import os\ndef mount(folder): os.makedirs(f'{folder}/MyDrive', exist_ok=True)\n"
        )
        work = str(tmp_path / "root/content/drive/MyDrive/rsnakit")
    else:
        copy_of_the_kit(tmp_path / "packed" / "rsnakit-main")
        shutil.make_archive(str(here / "rsnakit-main"), "zip", tmp_path / "packed")
        (tmp_path / "root" / "storage").mkdir()
        work = str(tmp_path / "root/storage/rsnakit")

    done = run_in(venv, here, cell + LATER, **given)
    assert done.returncode == 0, done.stderr
    first, _, second = done.stdout.partition("SECOND\n")
    assert first.count("installing torchinfo>=") == 1 and "(not installed)" in first and "installing" not in second
    found = json.loads(second.splitlines()[-1])
    assert found["where"] == place.split()[0] and found["work"] == work
    assert Path(found["package"]).parents[1] == home and Path(found["torchinfo"]).is_relative_to(venv)
    before = {}
    for one in importlib.metadata.distributions():  # setuptools, once imported, puts others of its own behind
        before.setdefault(one.metadata["Name"].lower(), one.version)
    different = {name for name, version in found["versions"].items() if before.get(name, version) != version}
    assert different <= {"pip", "setuptools"} and found["torch"] == torch_version()
    assert not list(next(venv.glob("lib/python*/site-packages")).glob("torch-*"))


def torch_version() -> str:
    import torch

    return torch.__version__


@pytest.mark.slow
def test_torch_stays_as_it_is_whatever_needs_it(tmp_path):
    """By the real pip, with torch as some images have it: not all that it says it needs is installed.

    What asks for another torch is refused by name, without touching it; what does with this one is installed with its needs.
    """
    venv, kit = tmp_path / "venv", tmp_path / "kit"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    copy_of_the_kit(kit)
    here = (
        made_wheel(tmp_path, "torch", "2.6.0", "nvidia-x==1.0"),
        made_wheel(tmp_path, "numpy", "2.0.2"),
    )
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--no-index", "--no-deps", "-q"]
    subprocess.run([*pip, *map(str, here)], check=True)
    wheels = [
        made_wheel(tmp_path, "newfangled", "1.0", "torch>=99"),
        made_wheel(tmp_path, "newarrays", "1.0", "numpy>=99"),
        made_wheel(tmp_path, "helper", "1.0", "torch>=2", "small>=1", "nothere>=1; extra == 'all'"),
        *(made_wheel(tmp_path, name, "1.0") for name in ("small", "nvidia_x")),
        *(made_wheel(tmp_path, name, "99.0") for name in ("torch", "numpy")),
    ]
    (kit / "requirements.txt").write_text("torch>=2.6\nnewfangled>=1.0\nhelper>=1.0\nnewarrays>=1.0\n")
    code = "from pathlib import Path\nfrom rsnakit import packages\npackages.bring('colab', Path())"
    done = run_in(venv, kit, code, PIP_INDEX_URL=index_of(tmp_path, *wheels))
    said = done.stderr.strip().splitlines()
    assert done.returncode and said[-4].endswith("not to be had beside torch 2.6.0, numpy 2.0.2:")
    assert said[-3].startswith("  newfangled>=1.0 (not installed): ") and "torch" in said[-3]
    cause = "newarrays 1.0 depends on numpy>=99, but what stays is numpy==2.0.2"
    assert said[-2] == f"  newarrays>=1.0 (not installed): {cause}" and "internet" in said[-1]
    there = {path.name for path in next(venv.glob("lib/python*/site-packages")).glob("*.dist-info")}
    installed = {"torch-2.6.0", "numpy-2.0.2", "helper-1.0", "small-1.0"}
    assert {
        name.removesuffix(".dist-info") for name in there if not name.startswith(("pip", "setuptools"))
    } == installed


@pytest.mark.parametrize("version", ["3.9", "3.10"])
def test_an_old_python_is_told_so(tmp_path, version):
    found = sorted(map(str, Path.home().glob(f".pyenv/versions/{version}*/bin/python"))) or [
        shutil.which(f"python{version}")
    ]
    if found[0] is None:
        pytest.skip(f"no Python {version} on this machine")
    copy_of_the_kit(tmp_path)
    done = subprocess.run([found[0], "-I", "-B", "-c", CELL], cwd=tmp_path, capture_output=True, text=True)
    said = done.stderr.splitlines()[-1]
    assert done.returncode and said.startswith(f"RuntimeError: this is Python {version}.") and "3.11 or later" in said
