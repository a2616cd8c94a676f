"""rsnakit.bundle and parcel: what goes to Kaggle is whole, works there, and holds nothing that it must not."""

import dataclasses
import json
import multiprocessing
import os
import re
import shutil
import signal
from pathlib import Path

import nbformat
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_run import TINY, write_run
from test_wheels import wheel

from rsnakit import bundle, calling, env, files, infer, parcel, results, runs
from rsnakit.bundle import BundleError
from rsnakit.infer import InferConfig
from rsnakit.recipe import TrainConfig
from rsnakit.slugs import SlugError
from rsnakit.wheels import WheelError

HOME = "/home/jane.doe"
MARK = "patient-of-ours-"  # what no file of a bundle may hold
FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def run(table, store, tmp_path_factory) -> Path:
    """A run of two folds as training leaves it, with all that lies beside what inference needs; do not write to it."""
    folder = tmp_path_factory.mktemp("work") / "runs" / "first-run"
    images = table.assign(patient_id=MARK + table["patient_id"])
    images["breast_id"] = MARK + images["breast_id"]
    patients = images["patient_id"].unique()
    write_run(folder, images, store, {patient: number % 2 for number, patient in enumerate(patients)})
    model = dataclasses.replace(TINY, weights=f"{HOME}/weights/start.safetensors")
    train = TrainConfig(n_folds=2, epochs=1)
    (folder / "config.json").unlink()
    settings = runs.settings_of(store.manifest["preprocess"], model, train, "0123456789abcdef", False, False)
    runs.open_run(folder.parents[1], folder.name, settings)
    for fold in (0, 1):
        path = folder / f"fold{fold}" / "model.json"
        described = json.loads(path.read_text())
        described["model"]["weights"] = (
            "C:\\Users\\jane\\start.safetensors" if fold else f"{HOME}/weights/start.safetensors"
        )
        path.write_text(json.dumps(described | {"note": f"patients {MARK}1, {MARK}2"}))
        (path.parent / "last.pt").write_bytes(b"a checkpoint")
        (path.parent / "events.out.tfevents.1.host").write_bytes(b"curves")
        pd.DataFrame({"epoch": [1], "lr": [1e-3], "who": [f"{MARK}1"]}).to_csv(path.parent / "history.csv", index=False)
    results.write_summary(folder)
    (folder / "notes.txt").write_text(f"{MARK}1 looks odd")
    return folder


@pytest.fixture(scope="module")
def made(run, tmp_path_factory) -> bundle.Bundle:
    """Its bundle; do not write to it."""
    wheels = tmp_path_factory.mktemp("wheels")
    wheel(wheels, "codec", "2.0", "cp311-abi3-manylinux_2_28_x86_64", ("numpy",))
    return bundle.make(run, "jane", tmp_path_factory.mktemp("bundles") / "dist", wheels_folder=wheels)


@pytest.fixture
def own(run, tmp_path) -> Path:
    """A copy of the run, to be written to."""
    return Path(shutil.copytree(run, tmp_path / "work" / "runs" / run.name))


@pytest.fixture
def repository(tmp_path) -> Path:
    """What of the repository a bundle is made of, to be written to."""
    folder = tmp_path / "repository"
    (folder / "notebooks").mkdir(parents=True)
    shutil.copy(env.REPOSITORY / "requirements.txt", folder)
    shutil.copy(env.REPOSITORY / "notebooks" / bundle.NOTEBOOK, folder / "notebooks")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_bundle_is_the_whole_set_and_nothing_else(made):
    modules = {f"rsnakit/{path.name}" for path in (env.REPOSITORY / "rsnakit").glob("*.py")}
    fold = ("best.safetensors", "history.csv", "model.json")
    expected = {"bundle.json", "dataset-metadata.json", "requirements.txt", *modules}
    expected |= {f"runs/first-run/{name}" for name in ("config.json", "summary.json")}
    expected |= {f"runs/first-run/fold{number}/{name}" for number in (0, 1) for name in fold}
    expected |= {"wheels/codec-2.0-cp311-abi3-manylinux_2_28_x86_64.whl"}
    assert contents(made.dataset).keys() == expected
    assert contents(made.kernel).keys() == {"04_inference.ipynb", "kernel-metadata.json"}
    assert set(made.folder.iterdir()) == {made.dataset, made.kernel}
    assert list(made.folder.parent.iterdir()) == [made.folder]  # nothing is left beside it
    assert not [path for path in made.folder.rglob("*") if path.is_symlink()]


def test_the_metadata_are_as_kaggles_client_reads_them(made):  # K05
    about = json.loads((made.dataset / "dataset-metadata.json").read_text())
    assert about == {"title": "rsnakit first-run", "id": "jane/rsnakit-first-run", "licenses": [{"name": "other"}]}
    assert json.loads((made.kernel / "kernel-metadata.json").read_text()) == {
        "id": "jane/rsnakit-first-run-inference", "title": "rsnakit first-run inference", "code_file": "04_inference.ipynb",
        "language": "python", "kernel_type": "notebook", "is_private": True, "enable_gpu": True, "enable_internet": False,
        "machine_shape": "NvidiaTeslaT4", "dataset_sources": ["jane/rsnakit-first-run"],
        "competition_sources": ["rsna-breast-cancer-detection"], "kernel_sources": [], "model_sources": [],
    }  # fmt: skip


def test_no_patient_and_no_path_of_this_machine_travels(made, run):
    for name, data in (contents(made.dataset) | contents(made.kernel)).items():
        for text in (MARK, "jane.doe", "Users", "/tmp/", str(run), str(Path.home()) + "/"):
            assert text.encode() not in data, f"{name} holds {text}"
    for name in ("config.json", "fold0/model.json", "fold1/model.json"):
        settings = json.loads((made.dataset / "runs" / "first-run" / name).read_text())
        assert (settings.get("settings") or settings)["model"]["weights"] == "start.safetensors"


def test_the_run_works_as_it_did(made, run, store, tmp_path):
    bundled = runs.find_run(tmp_path, "", False, bundles=[made.dataset])
    assert bundled == made.dataset / "runs" / "first-run"
    assert runs.compare(runs.read_config(bundled)["model"], runs.read_config(run)["model"]).keys() == {"weights"}
    assert runs.compare(runs.read_config(bundled)["train"], runs.read_config(run)["train"]) == {}
    assert runs.read_summary(bundled) == runs.read_summary(run)
    assert runs.unfinished_folds(bundled) == {} and list(runs.trained_folds(bundled)) == [0, 1]
    infer.refuse_other_settings(bundled, {"weights": "none", "height": store.manifest["preprocess"]["height"]})
    with pytest.raises(runs.RunError, match="height"):
        infer.refuse_other_settings(bundled, {"height": 999})
    before, after = infer.load_ensemble(run), infer.load_ensemble(bundled)
    assert (after.preprocess, after.prior) == (before.preprocess, before.prior)
    x = torch.rand(2, 1, 64, 32)
    for fold in (0, 1):
        torch.testing.assert_close(after.models[fold](x)["cancer"], before.models[fold](x)["cancer"], rtol=0, atol=0)
    breasts = pd.DataFrame({"score": [0.1, 0.9]})
    for kind in ("auto", "percentile", 0.3):
        chosen = [calling.choose_threshold(InferConfig(threshold=kind), folder, breasts) for folder in (run, bundled)]
        assert chosen[0] == chosen[1]


def test_weights_keep_their_precision(made, run):
    for fold in (0, 1):
        before = load_file(run / f"fold{fold}" / "best.safetensors")
        after = load_file(made.dataset / "runs" / "first-run" / f"fold{fold}" / "best.safetensors")
        assert after.keys() == before.keys()
        assert all(
            after[name].dtype == before[name].dtype and torch.equal(after[name], before[name]) for name in before
        )


def test_two_bundles_of_one_run_are_the_same_bytes(made, own, tmp_path, monkeypatch):
    for path in own.rglob("*"):
        os.utime(path, (1e9, 1e9))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOSTNAME", "another")
    again = bundle.make(own, "jane", Path("dist"), wheels_folder=made.dataset / "wheels")
    assert contents(again.folder) == contents(made.folder)
    given = {"threshold": "percentile"}
    texts = {parcel.notebook_text(env.REPOSITORY / "notebooks" / bundle.NOTEBOOK, given) for _ in range(2)}
    assert len(texts) == 1  # papermill draws the id of its cell


def test_what_is_read_is_what_was_made(made):
    assert bundle.read(made.folder) == made
    assert (made.run, made.owner, made.slug) == ("first-run", "jane", "rsnakit-first-run")
    listed = sum(
        len(data) for name, data in contents(made.dataset).items() if not name.endswith(("bundle.json", "data.json"))
    )
    assert made.size == listed
    table = made.table()
    assert table["files"].sum() == len(made.files) and table["MB"].sum() == pytest.approx(made.size / 1e6, abs=0.02)
    assert table.loc["rsnakit/*.py", "files"] == len(list((env.REPOSITORY / "rsnakit").glob("*.py")))


def turn(path: Path) -> None:
    """Changes a file, and not its size."""
    path.write_bytes(path.read_bytes()[::-1])


def change(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def without(path: Path, name: str) -> None:
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != name}))


@pytest.mark.parametrize(
    ("hurt", "said"),
    [
        (lambda to: (to / "dataset/runs/first-run/fold1/best.safetensors").unlink(), "1 missing: runs/first-run/fold1/best."),
        (lambda to: (to / "dataset/rsnakit/extra.py").write_text("x"), "not of this bundle: rsnakit/extra.py"),
        (lambda to: turn(to / "dataset/requirements.txt"), "not as bundled: requirements.txt"),
        (lambda to: (to / "dataset/link").symlink_to(to), "link: is a link"),
        (lambda to: (to / "dataset/bundle.json").write_text("{"), "bundle.json: cut short or damaged"),
        (lambda to: (to / "dataset/bundle.json").write_text("[]"), "not those that were bundled"),
        (lambda to: (to / "kernel/04_inference.ipynb").unlink(), "04_inference.ipynb: is not there. Bundle again"),
        (lambda to: (to / "kernel/04_inference.ipynb").write_text("[1, 2]"), "not those that were bundled"),
        (lambda to: (to / "kernel/04_inference.ipynb").write_text('{"cells": [{"source": 7}]}'), "is no notebook"),
        (lambda to: change(to / "dataset/dataset-metadata.json", id="john/rsnakit-first-run"), "john/rsnakit-first-run"),
        (lambda to: change(to / "dataset/dataset-metadata.json", title="Another title"), "makes the id jane/another-title"),
        (lambda to: change(to / "kernel/kernel-metadata.json", id="jane/other"), "makes the id jane/rsnakit-first-run-inf"),
        (lambda to: change(to / "kernel/kernel-metadata.json", id="INSERT_USER/first-run-inference"), "kaggle.com/NAME"),
        (lambda to: change(to / "kernel/kernel-metadata.json", dataset_sources=[]), "the metadata name the data sets"),
        (lambda to: change(to / "kernel/kernel-metadata.json", enable_gpu=False), "enable_gpu is False, and was bundled"),
        (lambda to: change(to / "kernel/kernel-metadata.json", enable_internet=True), "enable_internet is True"),
        (lambda to: change(to / "kernel/kernel-metadata.json", is_private=False), "is_private is False"),
        (lambda to: change(to / "kernel/kernel-metadata.json", machine_shape="NvidiaTeslaP100"), "machine_shape is 'Nvid"),
        (lambda to: change(to / "kernel/kernel-metadata.json", competition_sources=[]), "competition_sources is []"),
        (lambda to: change(to / "kernel/kernel-metadata.json", code_file="../../x.ipynb"), "code_file is '../../x.ipynb'"),
        (lambda to: (to / "kernel/kernel-metadata.json").write_text("{}"), "not those that were bundled"),
        (lambda to: without(to / "kernel/kernel-metadata.json", "code_file"), "code_file is None"),
        (lambda to: shutil.rmtree(to), "no bundle here; `python -m rsnakit.kaggle bundle"),
    ],
)  # fmt: skip
def test_what_was_changed_since_is_found(made, tmp_path, hurt, said):  # K01, K02
    folder = Path(shutil.copytree(made.folder, tmp_path / "dist"))
    assert bundle.read(folder).files == made.files
    hurt(folder)
    with pytest.raises((BundleError, SlugError), match=re.escape(said)):
        bundle.read(folder)


def test_a_new_bundle_is_never_mixed_with_the_old_one(own, tmp_path):
    dist = tmp_path / "dist"
    first = bundle.make(own, "jane", dist)
    assert "no wheels" in " ".join(first.notes)
    (dist / "dataset" / "stray.txt").write_text("from somewhere")
    shutil.rmtree(own / "fold1")
    results.write_summary(own)
    second = bundle.make(own, "jane", dist, "RSNA: Train (v2)!")
    assert bundle.read(dist) == second and (second.slug, second.kernel_slug) == (
        "rsna-train-v2",
        "rsna-train-v2-inference",
    )
    assert not [path for path in dist.rglob("*") if path.name in ("fold1", "stray.txt")]


def test_what_is_no_bundle_is_not_replaced(run, tmp_path):
    (tmp_path / "thesis.txt").write_text("five years")
    with pytest.raises(BundleError, match="is no bundle, and would be replaced"):
        bundle.make(run, "jane", tmp_path)
    assert contents(tmp_path) == {"thesis.txt": b"five years"}


def made_and_killed(run: Path, dist: Path, at: str) -> None:
    """In a process of its own: bundles, and dies by SIGKILL at one of the moments that `os.replace` makes."""
    replace = os.replace
    seen = []

    def deadly(source, target):
        source, target = Path(source), Path(target)
        moment = {"old": "aside", dist.name: "in"}.get(target.name, "")
        seen.append(moment)
        if at == "while writing" and len(seen) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)
        if at == f"after {moment}":
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = deadly
    bundle.make(run, "jane", dist, "A newer one")


@pytest.mark.parametrize("at", ["while writing", "after aside", "after in"])
def test_a_kill_leaves_the_old_one_or_the_new_one(made, run, tmp_path, at):  # C01
    dist = Path(shutil.copytree(made.folder, tmp_path / "dist"))
    process = FORK.Process(target=made_and_killed, args=(run, dist, at))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    found = bundle.read(dist)
    assert found.slug == ("a-newer-one" if at == "after in" else made.slug)
    assert bundle.make(run, "jane", dist, "The next one").slug == bundle.read(dist).slug == "the-next-one"
    assert list(tmp_path.iterdir()) == [dist]  # what the killed one left is cleared


def test_a_second_one_at_the_same_time_is_refused(made, run, tmp_path):
    dist = Path(shutil.copytree(made.folder, tmp_path / "dist"))
    with files.Lock(tmp_path / ".dist", "the bundle"), pytest.raises(BundleError, match="the bundle: process"):
        bundle.make(run, "jane", dist)
    assert bundle.read(dist).files == made.files


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def not_finite(path: Path) -> None:
    tensors = load_file(path)
    tensors["head.bias"][0] = torch.nan
    save_file(tensors, path)


def of_another_shape(path: Path) -> None:
    tensors = load_file(path)
    save_file(tensors | {"head.bias": torch.zeros(3)}, path)


@pytest.mark.parametrize("hurt", [cut_short, not_finite, of_another_shape])
def test_damaged_weights_are_refused_by_name(own, tmp_path, hurt):
    path = own / "fold1" / "best.safetensors"
    hurt(path)
    with pytest.raises(BundleError, match=re.escape(str(path))):
        bundle.make(own, "jane", tmp_path / "dist")
    assert not (tmp_path / "dist").exists()


def test_unfinished_folds_are_left_out_and_it_says_so(own, tmp_path):
    (own / "fold1" / "history.csv").unlink()
    change(own / "fold1" / "model.json", epoch=0)
    results.write_summary(own)
    found = bundle.make(own, "jane", tmp_path / "dist")
    assert list(runs.begun_folds(found.dataset / "runs" / own.name)) == [0]
    assert "fold 1 is not finished, epoch 0 of 1" in found.notes[0] and found.notes[0].endswith("left out")


def test_a_run_of_the_demo_says_so(own, tmp_path):
    settings = json.loads((own / "config.json").read_text())["settings"] | {"is_demo": True, "debug": True}
    change(own / "config.json", settings=settings)
    found = bundle.make(own, "jane", tmp_path / "dist")
    assert "trained on the demo" in found.notes[0] and "a few patients" in found.notes[1]
    assert bundle.read(found.folder).notes == found.notes


def test_parameters_are_papermills_own_cell(own, tmp_path, repository):
    path = repository / "notebooks" / bundle.NOTEBOOK
    notebook = nbformat.read(path, 4)
    for cell in notebook.cells:
        cell.metadata["papermill"] = {"status": "completed", "start_time": "2026-01-01"}
        if cell.cell_type == "code":
            cell.outputs = [nbformat.v4.new_output("stream", text=f"{MARK}1")]
            cell.execution_count = 7
    notebook.metadata["papermill"] = {"input_path": f"{HOME}/04_inference.ipynb"}
    nbformat.write(notebook, path)
    given = {"threshold": "percentile", "infer_batch_size": "4", "debug": "false", "n_folds": 4, "run": own.name}
    found = bundle.make(own, "jane", tmp_path / "dist", parameters=given, repository=repository)
    text = (found.kernel / bundle.NOTEBOOK).read_text()
    assert not any(word in text for word in (MARK, HOME, "completed"))
    result = nbformat.reads(text, 4)
    nbformat.validate(result)
    code = [cell for cell in result.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    (number,) = [i for i, cell in enumerate(code) if cell.metadata.get("tags") == ["injected-parameters"]]
    assert code[number - 1].metadata.tags == ["parameters"]
    values: dict = {}
    exec(code[number].source, values)
    values.pop("__builtins__")
    # Typed as the notebook's settings are; the one of another notebook is as it was given.
    assert values == {"threshold": "percentile", "infer_batch_size": 4, "debug": False, "n_folds": 4, "run": own.name}
    assert code[number].source.splitlines()[0] == "# Parameters"  # by which params.read knows it
    assert len({cell.id for cell in result.cells}) == len(result.cells)
    sources = [cell.source for cell in result.cells if "injected-parameters" not in cell.metadata.get("tags", [])]
    assert sources == [cell.source for cell in notebook.cells]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"treshold": 0.3}, "did you mean threshold"),
        ({"threshold": 1.5}, "threshold: got 1.5"),
        ({"height": 1024}, "height=1024 (trained with 64)"),
        ({"data_dir": f"{HOME}/rsna"}, "data_dir: '/home/jane.doe/rsna' is a folder of this machine"),
        ({"work_dir": "~/work"}, "work_dir: '~/work' is a folder of this machine"),
        ({"data_dir": "demo"}, "data_dir: 'demo' is a folder of this machine, and on Kaggle it is in /kaggle/input/"),
        ({"data_dir": "/kaggle/input/../working/x"}, "data_dir: '/kaggle/input/../working/x'"),
        ({"work_dir": "/kaggle/input/x"}, "on Kaggle it is in /kaggle/working/"),
        ({"device": "cpu"}, "device: 'cpu' makes no use of Kaggle's two GPUs"),
        ({"device": "cuda:5"}, "device: 'cuda:5'"),
        ({"debug": "true"}, "write no submission.csv"),
        ({"run": "second-run"}, "first-run is the one that travels"),
    ],
)
def test_parameters_that_would_stop_the_notebook_are_refused(run, tmp_path, given, said):
    with pytest.raises(BundleError, match=re.escape(said)):
        bundle.make(run, "jane", tmp_path / "dist", parameters=given)
    assert list(tmp_path.iterdir()) == []


def test_a_threshold_that_the_run_does_not_have_is_refused(own, tmp_path):
    (own / "summary.json").unlink()
    with pytest.raises(BundleError, match=r"no summary\.json.*run 03_train, or give a number, such as threshold=0"):
        bundle.make(own, "jane", tmp_path / "dist")
    assert not (tmp_path / "dist").exists()
    bundle.make(own, "jane", tmp_path / "dist", parameters={"threshold": 0.3, "work_dir": "/kaggle/working/mine"})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"username":"jane","key":"0123456789abcdef0123456789abcdef"}', "a key of Kaggle"),
        ("KAGGLE_KEY=0123456789abcdef0123456789abcdef", "a key of Kaggle"),
        ("KGAT_0123456789abcdef0123", "a key of Kaggle"),
        ("token ghp_" + "a1" * 18, "a token of GitHub"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----", "a private key"),
        ("--extra-index-url https://jane:correct-horse-battery@host", "the value of $MY_INDEX_PASSWORD"),
        (f"-r {Path.home()}/more.txt", "this machine's home folder"),
    ],
)
def test_secrets_are_found_and_not_repeated(tmp_path, monkeypatch, line, said):
    monkeypatch.setenv("MY_INDEX_PASSWORD", "correct-horse-battery")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "some.txt").write_text("key: value, token, ghp, KAGGLE_KEY is read from the environment\n")
    parcel.refuse_secrets(tmp_path)
    (tmp_path / "sub" / "some.txt").write_text(f"one\n{line}\n")
    with pytest.raises(BundleError, match=re.escape(f"sub/some.txt: holds {said}")) as error:
        parcel.refuse_secrets(tmp_path)
    assert line not in str(error.value) and "correct-horse" not in str(error.value)


def test_a_secret_stops_the_bundle(run, tmp_path, repository):
    with open(repository / "requirements.txt", "a") as f:
        f.write("KGAT_0123456789abcdef0123\n")
    with pytest.raises(BundleError, match=r"dataset/requirements\.txt: holds a key of Kaggle"):
        bundle.make(run, "jane", tmp_path / "dist", repository=repository)
    assert not (tmp_path / "dist").exists() and not (tmp_path / ".dist").exists()


def test_a_path_among_the_settings_is_refused(own, tmp_path):
    for path in ("~/x", "D:\\x", "\\\\server\\x", "file:///x"):
        assert parcel.ABSOLUTE.match(path)
    for text in ("first", "blocks.1:4x1:replace", "epoch 1 of 3", "", "work/x"):
        assert not parcel.ABSOLUTE.match(text)
    config = json.loads((own / "config.json").read_text())
    config["settings"]["train"]["augment"] = f"{HOME}/x"
    (own / "config.json").write_text(json.dumps(config))
    with pytest.raises(BundleError, match=r"config\.json: augment is .* a path of this machine"):
        bundle.make(own, "jane", tmp_path / "dist")


def test_runs_that_cannot_be_used_are_refused(tmp_path, own):
    with pytest.raises(BundleError, match=r"config\.json: cannot be read"):
        bundle.make(tmp_path / "nothing", "jane", tmp_path / "dist")
    with pytest.raises(BundleError, match="rename the folder"):
        bundle.make(own.rename(own.with_name("läuft: 1")), "jane", tmp_path / "dist")


@pytest.mark.parametrize("owner", ["INSERT_USER", "", "jane@home.org"])
def test_an_owner_that_is_none_is_refused(run, tmp_path, owner):  # K02
    with pytest.raises(SlugError, match="owner is"):
        bundle.make(run, owner, tmp_path / "dist")


def test_titles_of_long_names_are_shortened_and_keep_their_end():  # K01
    from slugify import slugify

    for length in (1, 20, 41, 42, 43, 44, 60, 200):
        name = "demo-" + "x" * length + "-1a2b3c4d"
        title = bundle._shortened(f"rsnakit {name}", 50)
        assert len(title) <= 50 and slugify(title).startswith("rsnakit-demo-x") and slugify(title).endswith("-1a2b3c4d")


def test_wheels_that_do_not_install_are_refused(run, tmp_path):
    wheel(tmp_path / "wheels", "numpy", "2.4")
    with pytest.raises(WheelError, match="numpy: is never installed"):
        bundle.make(run, "jane", tmp_path / "dist", wheels_folder=tmp_path / "wheels")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BundleError, match="no wheels in it"):
        bundle.make(run, "jane", tmp_path / "dist", wheels_folder=tmp_path / "empty")


def test_files_that_kaggle_would_not_take_or_keep_apart_are_refused():  # K06
    def of(*paths: str, size: int = 1) -> dict:
        return {path: {"bytes": size} for path in paths}

    parcel.check_limits(
        of("bundle.json", "runs/r/fold0/best.safetensors", "runs/r/fold1/best.safetensors", "wheels/a.whl")
    )
    with pytest.raises(BundleError, match=r"300\.0 GB.*up to 200 GB"):
        parcel.check_limits(of("a", size=300 * 10**9))
    with pytest.raises(BundleError, match="51 files and folders at the top"):
        parcel.check_limits(of(*(f"{number}.txt" for number in range(51))))
    for twins in (("runs/r/Fold0/a", "runs/r/fold0/a"), ("runs/a", "runs.zip")):
        with pytest.raises(BundleError, match="two files would have this name"):
            parcel.check_limits(of(*twins))


def test_a_full_disk_is_said_before_anything_is_written(run, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(BundleError, match="the bundle needs 0"):
        bundle.make(run, "jane", tmp_path / "dist")
    assert list(tmp_path.iterdir()) == []


def test_the_wheels_of_a_run_have_its_timm(run, tmp_path):
    copied = tmp_path / "runs" / "later"
    shutil.copytree(run, copied)
    found = json.loads((copied / "config.json").read_text())
    found["versions"]["timm"] = "1.99.1"
    (copied / "config.json").write_text(json.dumps(found))
    assert "timm==1.99.1" in bundle.requirements(copied)
    assert len(bundle.requirements(copied)) == len(bundle.requirements(run))
