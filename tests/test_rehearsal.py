"""rsnakit.rehearsal: a sound bundle passes in both layouts, and each kind of broken one is caught before Kaggle sees it."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from test_infer import make_run

from rsnakit import bundle, checking, mounts, rehearsal, sandbox
from rsnakit.bundle import BundleError
from rsnakit.files import write_json
from rsnakit.rehearsal import Rehearsal
from rsnakit.sandbox import Isolation, SandboxError

WEAK = Isolation("blocked", "chmod")
NOT_REHEARSED = "this bundle, as it is, was not rehearsed: python -m rsnakit.kaggle rehearse"


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """A bundle of a small run, as `bundle` makes it; do not write to it."""
    folder = tmp_path_factory.mktemp("bundle")
    bundle.make(make_run(folder / "work"), "someone", folder / "dist")
    return folder / "dist"


def broken(dist: Path, out: Path, *cells: str, changes=lambda data_set: None) -> Path:
    """The bundle with other files, which its list then names, and where cells are given with a notebook of these."""
    shutil.copytree(dist, out)
    changes(out / "dataset")
    described = json.loads((out / "dataset/bundle.json").read_text())
    there = {path: out / "dataset" / path for path in described["files"] if (out / "dataset" / path).exists()}
    described["files"] = {
        path: {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        for path, file in there.items()
    }
    (out / "dataset/bundle.json").write_text(json.dumps(described))
    if cells:
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        nbformat.write(book, out / "kernel/04_inference.ipynb")
    return out


def rehearse(dist: Path, competition: Path, **arguments) -> Rehearsal:
    arguments = {"stages": [("flat", "one")], "say": lambda _: None, **arguments}
    return rehearsal.rehearse(dist, competition, **arguments)


@pytest.mark.slow
def test_a_sound_bundle_in_both_layouts_on_all_sets(dist, competition, tmp_path):  # I02, K06, M01
    before = {path: path.stat().st_mtime_ns for path in competition.rglob("*")}
    said = []
    keep = tmp_path / "kept"
    found = rehearse(dist, competition, keep=keep, images=40, stages=rehearsal.STAGES, say=said.append)
    assert not any(stage.faults for stage in found.stages), found.sentences()
    # On a machine that is busy with other things the hours may not hold; how fast it is is not asked here.
    assert found.ok == (found.projection.hours <= 9)
    assert "no network" in said[0] and ("can go to Kaggle" in found.sentences()[-1]) == found.ok
    assert "that it keeps to 9 hours is not proven" in found.sentences()[-1] or not found.ok
    # The bundle's own notes are said again, and publishing knows of this rehearsal once it was kept beside the bundle.
    made = bundle.read(dist)
    assert made.notes and set(made.notes) <= set(found.sentences())
    assert checking.verdict_note(made) == NOT_REHEARSED
    shutil.copytree(dist, tmp_path / "again/dist")
    shutil.copytree(tmp_path / "kept", tmp_path / "again/rehearsal")
    again = bundle.read(tmp_path / "again/dist")
    assert bool(checking.verdict_note(again)) != found.ok
    notebook = again.kernel / bundle.NOTEBOOK
    notebook.write_bytes(notebook.read_bytes() + b"\n")
    assert checking.verdict_note(again) == NOT_REHEARSED
    names = ["1_flat_visible", "2_nested_visible", "3_flat_one", "4_nested_many"]
    assert found.table().index.tolist() == names
    assert found.projection.hours > 0 and found.projection.image_s > 0 and 0 <= found.projection.models_share <= 1
    for name, images in zip(names, (len(pd.read_csv(competition / "test.csv")),) * 2 + (1, 40), strict=True):
        report = pd.read_csv(keep / name / "report.csv", dtype={"image_id": str})
        assert len(report) == images and (keep / f"{name}.ipynb").exists()
        scores = pd.read_csv(keep / name / "submission.csv")["cancer"]
        assert scores.between(0, 1).all() and len(scores) == report["prediction_id"].nunique()
    # Of `many`, by hand: four files that cannot be read, one that is blank, and thirty-five images that have a score.
    assert report["status"].value_counts().to_dict() == {"ok": 35, "failed": 4, "blank": 1}
    assert {path: path.stat().st_mtime_ns for path in competition.rglob("*")} == before
    assert all(300e6 < stage.outcome.peak_memory < 6e9 for stage in found.stages)


WRITES_SAMPLE = """
import os, shutil
from pathlib import Path
root = Path(os.environ["RSNAKIT_ROOT"])
competition = next(p.parent for p in sorted((root / "kaggle/input").rglob("test.csv")))
"""


@pytest.mark.slow
@pytest.mark.parametrize("isolation", [None, WEAK], ids=["strongest", "weak"])
def test_a_notebook_that_asks_the_network_is_caught(dist, competition, tmp_path, isolation):  # M01
    cell = "import urllib.request\nurllib.request.urlopen('http://192.0.2.1/weights', timeout=60)"
    seen = f"import os; print(os.path.exists({str(Path(__file__))!r}))"
    said: list[str] = []
    found = rehearse(broken(dist, tmp_path / "dist", seen, cell), competition, isolation=isolation, say=said.append)
    (fault,) = found.stages[0].faults
    assert fault.startswith("code cell 2 stopped with URLError") and not found.ok
    assert "unreachable" in fault or "no network here" in fault
    # The repository is not there, where it can be hidden; and in any case it is told that the code names it.
    is_hidden = (isolation or sandbox.strongest()).inputs == "mount"
    cells = nbformat.read(found.stages[0].notebook, 4).cells  # papermill puts one that says what failed first
    (output,) = next(cell for cell in cells if cell.source == seen).outputs
    assert output.text.strip() == str(not is_hidden)
    assert any(line.startswith("hidden from the notebook: ") for line in said) == is_hidden
    assert f"code cell 1 names {__file__}, which is there on this machine and not on Kaggle" in found.faults
    assert found.stages[0].notebook == tmp_path / "rehearsal/1_flat_one.ipynb" and found.stages[0].notebook.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("import os; os.kill(os.getpid(), 9)", "DeadKernelError"),
        (WRITES_SAMPLE + "(competition / 'test.csv').write_text('')", "code cell 1 stopped with OSError: .*Read-only"),
        (WRITES_SAMPLE + "os.mkdir('work'); shutil.copy(competition / 'sample_submission.csv', 'work/submission.csv')",
         "submission.csv is not in /kaggle/working, but work/submission.csv is"),
        (f"open({str(Path(__file__).parents[1] / 'README.md')!r})", "code cell 1 stopped with FileNotFoundError: .*README"),
        ("import time; time.sleep(600)", "it was stopped after 3 s"),
    ],
    ids=["dies", "writes to inputs", "submission elsewhere", "reads the repository", "time-out"],
)  # fmt: skip
def test_notebooks_that_go_wrong(dist, competition, tmp_path, cell, said):
    timeout_s = 3 if "sleep" in cell else 300
    out = broken(dist, tmp_path / "dist", cell)

    def meanwhile(line: str) -> None:
        """Another rehearsal is begun, and one bundles anew."""
        if "it was stopped after" in line:
            with pytest.raises(SandboxError, match="the rehearsal: process"):
                rehearse(out, competition)
            write_json(out / "kernel/04_inference.ipynb", {"cells": []})

    found = rehearse(out, competition, timeout_s=timeout_s, say=meanwhile)
    assert not found.ok and ("sleep" in cell) == any("made anew, or changed" in fault for fault in found.faults)
    assert re.search(said, found.stages[0].faults[0]), found.sentences()


@pytest.mark.slow
def test_a_file_of_the_package_that_is_missing_is_caught(dist, competition, tmp_path):
    out = broken(dist, tmp_path / "dist", changes=lambda data_set: (data_set / "rsnakit/tables.py").unlink())
    (fault,) = rehearse(out, competition).stages[0].faults
    assert "ModuleNotFoundError: No module named 'rsnakit.tables'" in fault or "cannot import name 'tables'" in fault


@pytest.mark.slow
def test_weights_that_are_cut_are_caught(dist, competition, tmp_path):  # C01
    def cut(data_set: Path) -> None:
        (path,) = data_set.glob("runs/*/fold0/best.safetensors")
        path.write_bytes(path.read_bytes()[:-100])

    out, stages = broken(dist, tmp_path / "dist", changes=cut), [("flat", "visible")]  # a rerun makes do without
    (fault,) = rehearse(out, competition, stages=stages).stages[0].faults
    assert "best.safetensors" in fault
    assert checking.verdict_note(bundle.read(tmp_path / "dist")).startswith("its rehearsal found faults")


@pytest.mark.slow
def test_a_bundle_that_is_not_as_bundled_is_refused(dist, competition, tmp_path):
    shutil.copytree(dist, tmp_path / "dist")
    path = next((tmp_path / "dist/dataset/runs").rglob("fold0/best.safetensors"))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BundleError, match=r"best\.safetensors"):
        rehearse(tmp_path / "dist", competition)
    path.unlink()
    with pytest.raises(BundleError, match="missing"):
        rehearse(tmp_path / "dist", competition)
    with pytest.raises(BundleError, match="no bundle here"):
        rehearse(tmp_path / "nothing", competition)


def test_settings_out_of_range_are_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match="gpu_speedup is 0"):
        rehearse(tmp_path, tmp_path, gpu_speedup=0)
    with pytest.raises(ValueError, match="images is 3: a set made to hurt has 32 or more"):
        rehearse(tmp_path, tmp_path, images=3)


def test_what_a_killed_rehearsal_left_is_removed_by_the_next(tmp_path):
    left, other = tmp_path / f"{rehearsal.PREFIX}left", tmp_path / "other"
    for folder in (left, other):
        (folder / "kaggle").mkdir(parents=True)
        (tmp_path / "root.txt").write_text(str(folder))
        with rehearsal._root(tmp_path) as root:
            assert root.is_dir() and (tmp_path / "root.txt").read_text() == str(root)
        assert not root.exists() and not (tmp_path / "root.txt").exists()
    assert not left.exists() and other.exists()


@pytest.mark.slow
def test_the_layouts_are_those_of_kaggle(dist, competition, tmp_path):
    """Where each file comes, by the two layouts as the facts say them; the data set's metadata are not uploaded."""
    made = bundle.read(dist)
    for layout, of_competition, of_data_set in (
        ("flat", mounts.SLUG, made.slug),
        ("nested", f"competitions/{mounts.SLUG}", f"datasets/someone/{made.slug}"),
    ):
        root = tmp_path / layout
        rehearsal._lay_out(made, root, layout, competition, "one", 1, 0, link=True)
        there = root / "kaggle/input"
        assert (there / of_competition / "test.csv").exists() and list(root.glob("kaggle/working/*")) == []
        found = {str(p.relative_to(there / of_data_set)) for p in (there / of_data_set).rglob("*") if p.is_file()}
        assert found == {*made.files, "bundle.json"}
        assert "rsnakit/__init__.py" in found and "dataset-metadata.json" not in found
