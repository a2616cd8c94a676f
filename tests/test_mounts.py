"""rsnakit.mounts: folders of Kaggle, Colab and Paperspace, laid out in a folder that stands for the machine's root."""

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rsnakit import mounts

SLUG = "rsna-breast-cancer-detection"


def test_the_two_layouts(tmp_path):
    """As Kaggle mounts them, in words of its own."""
    assert [
        mounts.competition_folder(tmp_path, layout).relative_to(tmp_path).as_posix() for layout in mounts.LAYOUTS
    ] == [
        f"kaggle/input/{SLUG}",
        f"kaggle/input/competitions/{SLUG}",
    ]
    folders = [mounts.data_set_folder(tmp_path, layout, "me", "rsnakit-run") for layout in mounts.LAYOUTS]
    assert [folder.relative_to(tmp_path).as_posix() for folder in folders] == [
        "kaggle/input/rsnakit-run",
        "kaggle/input/datasets/me/rsnakit-run",
    ]


def test_bundles_are_found_in_either_layout_and_a_folder_deeper(tmp_path):
    inputs = tmp_path / "kaggle/input"
    assert mounts.bundles(tmp_path) == []
    expected = ("b", "c/dataset", "datasets/me/a", "datasets/me/d/dataset")
    for name in expected:
        (inputs / name).mkdir(parents=True)
        (inputs / name / "bundle.json").touch()
    for name in (f"{SLUG}/train_images/1", "datasets/me/e/f/g", "datasets/me/h"):  # none, or nobody's place for one
        (inputs / name).mkdir(parents=True)
    for name in (f"{SLUG}/train_images/1", "datasets/me/e/f/g"):
        (inputs / name / "bundle.json").touch()
    assert mounts.bundles(tmp_path) == [inputs / name for name in expected]


# ---- where work is kept


@pytest.fixture(autouse=True)
def no_work_folder(monkeypatch):
    monkeypatch.setenv("RSNAKIT_WORK", "before")  # so that what a test sets is undone
    monkeypatch.delenv("RSNAKIT_WORK")


@pytest.mark.parametrize("place", ["kaggle", "local"])
def test_work_that_is_kept_anyway(tmp_path, place):  # K08
    said = mounts.keep_work(place, tmp_path)
    assert said.startswith("work/ is kept: ") and "RSNAKIT_WORK" not in os.environ
    assert ("/kaggle/working" in said and "20 GB" in said) == (place == "kaggle")


def test_paperspace_keeps_it_in_storage(tmp_path):
    with pytest.raises(OSError, match=rf"there is no folder {tmp_path}/storage .*set keep_work to False"):
        mounts.keep_work("paperspace", tmp_path)
    (tmp_path / "storage").mkdir()
    assert mounts.keep_work("paperspace", tmp_path) == f"work/ is kept in {tmp_path}/storage/rsnakit"
    assert os.environ["RSNAKIT_WORK"] == f"{tmp_path}/storage/rsnakit"
    for named, expected in (("storage/mine", "storage/mine"), ("elsewhere", "storage/rsnakit")):
        os.environ["RSNAKIT_WORK"] = f"{tmp_path}/{named}"
        mounts.keep_work("paperspace", tmp_path)
        assert os.environ["RSNAKIT_WORK"] == f"{tmp_path}/{expected}"


@pytest.fixture
def drive(monkeypatch, tmp_path) -> list[str]:
    """Stands in for google.colab.drive: what was mounted is listed, and its folder made."""
    mounted: list[str] = []

    def mount(folder: str) -> None:
        (Path(folder) / "MyDrive").mkdir(parents=True)
        mounted.append(folder)

    module = ModuleType("google.colab.drive")
    module.mount = mount
    colab = ModuleType("google.colab")
    colab.drive = module
    monkeypatch.setitem(sys.modules, "google.colab", colab)
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path) in mounted)
    return mounted


def test_colab_mounts_the_drive_once(tmp_path, drive):
    for _ in range(2):
        assert mounts.keep_work("colab", tmp_path) == f"work/ is kept in {tmp_path}/content/drive/MyDrive/rsnakit"
    assert drive == [f"{tmp_path}/content/drive"]
    assert os.environ["RSNAKIT_WORK"] == f"{tmp_path}/content/drive/MyDrive/rsnakit"


def test_a_drive_that_cannot_be_mounted(tmp_path, drive, monkeypatch):
    monkeypatch.setattr(sys.modules["google.colab"].drive, "mount", lambda folder: None)  # no consent
    with pytest.raises(OSError, match=rf"there is no folder {tmp_path}/content/drive/MyDrive"):
        mounts.keep_work("colab", tmp_path)
    monkeypatch.setitem(sys.modules, "google.colab", None)  # as where it is not installed
    with pytest.raises(OSError, match=r"no Drive is mounted at .*google\.colab, which mounts it, is not installed"):
        mounts.keep_work("colab", tmp_path)
    assert "RSNAKIT_WORK" not in os.environ
