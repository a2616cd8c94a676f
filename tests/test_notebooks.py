"""The notebooks, run by papermill as a person runs them: in order, each alone, and with what people get wrong."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pandas as pd
import papermill
import pytest
import yaml
from jupyter_client import AsyncKernelManager
from jupyter_core.utils import run_sync

from rsnakit import demo, infer

REPOSITORY = Path(__file__).parents[1]
NOTEBOOKS = REPOSITORY / "notebooks"
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("[0-9]*.ipynb"))
# A small demo, and pictures small enough for a quick model; enough patients for four folds with a positive each.
SMALL = {"demo_patients": 16, "demo_size": 192, "demo_rate": 0.5, "num_workers": 0, "n_jobs": 2}
QUICK = {"height": 64, "width": 32, "backbone": "test_resnet", "weights": "none", "n_folds": 2, "epochs": 1}


def run(name: str, out: Path, **parameters) -> dict:
    """Runs a notebook by papermill in its own folder and gives back the executed one."""
    papermill.execute_notebook(
        str(NOTEBOOKS / f"{name}.ipynb"), str(out), parameters, cwd=str(NOTEBOOKS), progress_bar=False
    )
    return json.loads(out.read_text(encoding="utf-8"))


# For a kernel that has run another notebook: what that left goes, save for the packages that take seconds to import.
AS_NEW = """
%reset -f
import os, sys
for module in [name for name in sys.modules if name.split(".")[0] == "rsnakit"]:
    del sys.modules[module]
sys.path[:] = [path for path in sys.path if path != {repository!r}]
os.chdir({folder!r})
"""


@pytest.fixture(scope="module")
def kernel():
    """One for the notebooks that soon stop with an error; each would else take five seconds for a kernel of its own."""
    kernel = AsyncKernelManager(kernel_name="python3")
    run_sync(kernel.start_kernel)()
    yield kernel
    run_sync(kernel.shutdown_kernel)(now=True)


def error_of(kernel: AsyncKernelManager, name: str, out: Path, folder: Path = NOTEBOOKS, **parameters) -> str:
    """What papermill says of a notebook that stops, run in a folder."""
    book = nbformat.read(NOTEBOOKS / f"{name}.ipynb", 4)
    book.cells.insert(0, nbformat.v4.new_code_cell(AS_NEW.format(folder=str(folder), repository=str(REPOSITORY))))
    with pytest.raises(papermill.PapermillExecutionError) as error:
        papermill.execute_notebook(book, str(out), parameters, progress_bar=False, km=kernel)
    return str(error.value)


def text_of(book: dict) -> str:
    """What a notebook's cells printed."""
    outputs = [output for cell in book["cells"] for output in cell.get("outputs", [])]
    return "".join("".join(output.get("text", "")) for output in outputs)


def bytes_without_pictures(path: Path) -> int:
    """The size of an executed notebook, less its pictures' bytes."""
    book = json.loads(path.read_text(encoding="utf-8"))
    for cell in book["cells"]:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("image/png", "")
    return len(json.dumps(book))


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("work")


def check_report(html: str) -> None:
    """One file: its pictures are within, nothing is loaded from elsewhere, and the code is left out."""
    pictures = re.findall(r"<img[^>]*src=\"([^\"]*)\"", html)
    assert len(pictures) >= 8 and all(source.startswith("data:image/png;base64,") for source in pictures)
    assert not re.search(r"<(?:script|link|img)[^>]*(?:src|href)=\"(?:https?:)?//", html) and "unpkg.com" not in html
    assert "What the scores are worth" in html and "params.read(" not in html and "papermill's" not in html


@pytest.mark.slow
def test_one_after_another_with_one_yaml_for_all(work, tmp_path):
    """01 to 05 with the same parameters, those of the other notebooks among them; then 04's submission is right."""
    common = {**SMALL, **QUICK, "work_dir": str(work)}
    for name in NAMES[:5]:
        out = tmp_path / f"{name}.ipynb"
        book = run(name, out, **common)
        assert bytes_without_pictures(out) < 1_000_000
        assert "SYNTHETIC DATA" in text_of(book)
    assert "not used by this notebook" in text_of(book)
    (folder,) = (work / "runs").iterdir()
    (competition,) = (work / "demo").iterdir()
    out = work / "submissions" / folder.name
    submission = infer.check_submission(out / "submission.csv", competition / "test.csv")
    assert set(submission["cancer"]) <= {0.0, 1.0}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["folds"] == [0] and summary["nested"] is None

    # The same command again trains nothing anew, and another fold joins the first.
    assert "finished at epoch 1" in text_of(run("03_train", tmp_path / "again.ipynb", **common))
    run("03_train", tmp_path / "all.ipynb", **common, fold="all")
    assert json.loads((folder / "summary.json").read_text())["folds"] == [0, 1]
    # With two folds there is a nested score, and a report that needs no network.
    run("03_train", tmp_path / "other.ipynb", **{**common, "lr": 1e-4}, fold="all")
    (other,) = {path.name for path in (work / "runs").iterdir()} - {folder.name}
    book = run(
        "05_evaluate", tmp_path / "report.ipynb", **{**common, "run": folder.name}, compare=[other], resamples=100
    )
    assert f"run {folder.name}, folds [0, 1]" in text_of(book)
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary["nested"]["thresholds"]) == {"0", "1"}
    assert summary["nested"]["f1"]["low"] <= summary["nested"]["f1"]["value"] <= summary["nested"]["f1"]["high"]
    command = re.search(r"jupyter nbconvert .*", text_of(book))[0]
    assert command in (REPOSITORY / "README.md").read_text(encoding="utf-8")
    command = command.replace("out.ipynb", str(tmp_path / "report.ipynb"))
    subprocess.run(command, shell=True, cwd=NOTEBOOKS, check=True)
    check_report((tmp_path / "report.html").read_text(encoding="utf-8"))
    # A look at a few breasts never stands in the place of the real submission.
    before = (out / "submission.csv").read_bytes()
    debug = {**common, "run": folder.name, "debug": True, "data_dir": str(competition)}
    run("04_inference", tmp_path / "debug.ipynb", **debug)
    assert (out / "submission.csv").read_bytes() == before
    # The settings that shape pixels travel with the weights: others are refused by name.
    with pytest.raises(papermill.PapermillExecutionError, match=r"height=128 \(trained with 64\)"):
        run("04_inference", tmp_path / "other.ipynb", **{**common, "height": 128})


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[:6])
def test_each_alone_and_in_debug(name, tmp_path):
    """On a fresh machine, with nothing made before."""
    book = run(name, tmp_path / f"{name}.ipynb", debug=True, demo_size=256, work_dir=str(tmp_path / "work"))
    assert all(cell.get("execution_count") for cell in book["cells"] if cell["cell_type"] == "code")
    assert bytes_without_pictures(tmp_path / f"{name}.ipynb") < 1_000_000


@pytest.mark.slow
def test_what_07_finds_is_what_03_takes(tmp_path):
    """On a fresh machine; every trick is measured, and the YAML goes to the training through papermill's -f."""
    common = {**SMALL, **QUICK, "debug": True, "work_dir": str(tmp_path / "work")}
    book = run("07_speed", tmp_path / "speed.ipynb", **common)
    assert all(cell.get("execution_count") for cell in book["cells"] if cell["cell_type"] == "code")
    assert bytes_without_pictures(tmp_path / "speed.ipynb") < 1_000_000
    drawn = [output for cell in book["cells"] for output in cell.get("outputs", []) if "image/png" in str(output)]
    assert len(drawn) == 11  # a figure a trick
    tuned = tmp_path / "work" / "tuned.yaml"
    found = yaml.safe_load(tuned.read_text(encoding="utf-8"))
    assert found.keys() >= {"precision", "channels_last", "compile", "grad_checkpointing", "num_workers"}
    printed = text_of(run("03_train", tmp_path / "train.ipynb", **{**common, **found}))
    (folder,) = (tmp_path / "work" / "runs").iterdir()
    assert json.loads((folder / "summary.json").read_text())["folds"] == [0] and "-p run" in printed


def test_the_example_of_07_is_the_one_that_is_checked_by_physics():
    """test_waves.py checks waves.py, and the notebook has the same lines."""
    title = "# The acoustic wave equation in two dimensions"
    cells = ["".join(cell["source"]) for cell in nbformat.read(NOTEBOOKS / "07_speed.ipynb", 4).cells]
    first = next(number for number, cell in enumerate(cells) if cell.startswith(title))
    checked = (REPOSITORY / "tests" / "waves.py").read_text(encoding="utf-8").partition(title)[2]
    assert re.split(r"\n+", title + checked.rstrip()) == re.split(r"\n+", cells[first] + "\n" + cells[first + 2])


@pytest.mark.slow
def test_a_model_that_cannot_be_tamed_says_why(tmp_path):
    """A ViT's stem is refused in a sentence, and the rest of the notebook goes on, at the size that the model takes."""
    common = {**SMALL, "debug": True, "work_dir": str(tmp_path / "work")}
    book = run("06_models", tmp_path / "out.ipynb", backbone="vit_tiny_patch16_224", weights="none", **common)
    printed = text_of(book)
    assert "vit_tiny_patch16_224 takes images of 224x224 pixels alone" in printed
    assert "not to be had: " in printed and "position" in printed


@pytest.mark.slow
def test_the_main_job():
    """The README's first command; where it has run already, this only looks at what it left."""
    out = REPOSITORY / "out.ipynb"
    command = [sys.executable, "-m", "papermill", "notebooks/03_train.ipynb", str(out), "-p", "fold", "0"]
    subprocess.run(
        [*command, "--no-progress-bar"], cwd=REPOSITORY, check=True, env={**os.environ, "OMP_NUM_THREADS": ""}
    )
    assert bytes_without_pictures(out) < 1_000_000
    printed = text_of(json.loads(out.read_text(encoding="utf-8")))
    folder = REPOSITORY / "work" / "runs" / re.search(r"-p run (\S+)", printed)[1]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["folds"][0] == 0
    if summary["folds"] == [0]:
        assert 0.80 <= summary["scores"]["auc"]["value"] <= 0.99


def test_a_run_from_the_repository_and_a_wrong_parameter(kernel, tmp_path):  # N02; test_params.py has the command line
    """From the repository's folder; a mistyped name fails at once with the nearest one."""
    said = error_of(kernel, "03_train", tmp_path / "out.ipynb", REPOSITORY, batchsize=4, lr="fast")
    assert "batchsize: unknown parameter; did you mean batch_size?" in said
    assert "lr: got 'fast'" in said


def test_no_data_at_a_named_folder(kernel, tmp_path):
    (tmp_path / "empty").mkdir()
    here = {"data_dir": str(tmp_path / "empty"), "work_dir": str(tmp_path / "work")}
    assert "holds neither train" in error_of(kernel, "02_preprocess", tmp_path / "out.ipynb", **here)


@pytest.fixture(scope="module")
def real_layout(tmp_path_factory) -> Path:
    """A folder that is named, so that it counts as a real competition."""
    root = tmp_path_factory.mktemp("real") / "competition"
    return demo.make_competition(root, n_patients=16, size=192, positive_rate=0.5, n_test=4, n_jobs=1)


TAMED = {
    "views": {"views": "attention", "aux": "[biopsy, density]", "batch_size": 8, "grad_checkpointing": "true"},
    "stem": {
        "backbone": "test_efficientnet", "stem_stride": 1, "pools": "blocks.1:2", "neck": "fpn_scse", "neck_channels": 16,
        "input_pad": "[2, 2, 0, 0]", "input_pad_mode": "reflect", "pooling": "attention", "aux": "view",
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("how", TAMED)
def test_a_tamed_model_from_parameters_alone(how, tmp_path):
    """03 trains it and 04 rebuilds it; the parameters are written as `papermill -p` gives them."""
    common = {**SMALL, **QUICK, **TAMED[how], "work_dir": str(tmp_path / "work")}
    printed = text_of(run("03_train", tmp_path / "out.ipynb", **common))
    assert ("breasts to train on" in printed) == (how == "views")
    run("04_inference", tmp_path / "out.ipynb", **common)
    (competition,), (out,) = (tmp_path / "work/demo").iterdir(), (tmp_path / "work/submissions").iterdir()
    infer.check_submission(out / "submission.csv", competition / "test.csv")
    report = pd.read_csv(out / "report.csv", dtype={"prediction_id": str})
    assert (report["status"] == "ok").all() and report["score"].between(0, 1).all()
    assert (report.groupby("prediction_id")["score"].nunique() == 1).all() == (how == "views")
    if how == "views":  # another way of pooling is another model, and is refused by name; checkpointing is not
        with pytest.raises(papermill.PapermillExecutionError, match=r"views='max' \(trained with 'attention'\)"):
            run("04_inference", tmp_path / "other.ipynb", **{**common, "views": "max", "grad_checkpointing": False})


@pytest.mark.slow
def test_a_real_competition_says_which_command_makes_the_store(real_layout, tmp_path):
    here = {"data_dir": str(real_layout), "work_dir": str(tmp_path / "work")}
    with pytest.raises(
        papermill.PapermillExecutionError,
        match=r"papermill 02_preprocess\.ipynb out\.ipynb -p data_dir .* -p height 64",
    ):
        run("03_train", tmp_path / "out.ipynb", **here, **QUICK)
    with pytest.raises(papermill.PapermillExecutionError, match="no run trained on a real competition yet"):
        run("04_inference", tmp_path / "out.ipynb", **here)
    run("02_preprocess", tmp_path / "out.ipynb", **here, height=64, width=32)
    printed = text_of(run("03_train", tmp_path / "out.ipynb", **here, **QUICK))
    assert "SYNTHETIC" not in printed and "64x32 pixels are the demo's size" in printed


def test_a_column_missing_from_the_csv(kernel, real_layout, tmp_path):
    text = (real_layout / "train.csv").read_text().replace("laterality", "side")
    root = tmp_path / "broken"
    root.mkdir()
    (root / "train.csv").write_text(text)
    here = {"data_dir": str(root), "work_dir": str(tmp_path / "work")}
    assert "train.csv: column laterality missing" in error_of(kernel, "02_preprocess", tmp_path / "out.ipynb", **here)


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_are_committed_without_outputs(name):
    book = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
    assert book["metadata"]["kernelspec"]["name"] == "python3"
    for cell, before in zip(book["cells"][1:], book["cells"], strict=False):
        if cell["cell_type"] == "code":
            assert before["cell_type"] == "markdown"  # a sentence before each
            assert "parameters" in cell["metadata"].get("tags", []) or len(cell["source"]) <= 25
