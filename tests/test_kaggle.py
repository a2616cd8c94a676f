"""The command line of the way to Kaggle: what it makes, and what it ends with."""

import json
import shutil
from pathlib import Path

import pytest
from test_infer import make_run

from rsnakit import bundle, kaggle, rehearsal


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    work = tmp_path_factory.mktemp("kaggle") / "work"
    make_run(work, "first", folds=1)
    return work


def test_a_run_is_bundled_and_what_would_be_published_is_shown(work, capsys):
    place = ["--work-dir", str(work)]
    status = kaggle.main(
        ["bundle", "first", "--owner", "jane", "--no-wheels", "-p", "threshold=0.25", "-p", "tta=hflip", *place]
    )
    printed = capsys.readouterr().out
    assert status == 0 and "runs/first/fold0/best.safetensors" in printed and "MB" in printed
    assert f"next: python -m rsnakit.kaggle rehearse --work-dir {work}" in printed
    made = bundle.read(work / "dist")
    book = json.loads((made.kernel / "04_inference.ipynb").read_text(encoding="utf-8"))
    injected = next(
        "".join(c["source"]) for c in book["cells"] if "injected-parameters" in c["metadata"].get("tags", [])
    )
    values: dict = {}
    exec(injected, values)
    assert values["threshold"] == 0.25 and values["tta"] == "hflip"

    assert kaggle.main(["publish", "--dry-run", *place]) == 0
    printed = capsys.readouterr().out
    assert f"kaggle datasets create -p {made.dataset} -r zip" in printed and f"kernels push -p {made.kernel}" in printed


def test_a_run_is_named_or_its_folder_given(work, tmp_path):
    assert kaggle.find("first", work) == work / "runs" / "first"
    copied = shutil.copytree(work / "runs" / "first", tmp_path / "brought")
    assert kaggle.find(str(copied), work) == copied


@pytest.mark.parametrize(
    "words, said",
    [
        (["bundle", "second", "--owner", "jane"], "runs there are: first"),
        (["bundle", "first", "--owner", "INSERT_USER"], "INSERT_USER"),  # K02
        (["bundle", "first", "--owner", "jane", "--title", "abc"], "abc"),  # K01
        (["bundle", "first", "--owner", "jane", "-p", "treshold=0.3"], "did you mean threshold"),
        (["bundle", "first", "--owner", "jane", "-p", "threshold=2"], "threshold: got 2"),
    ],
)
def test_what_cannot_be_bundled_is_said_in_a_sentence(work, words, said, capsys):
    before = {path: path.stat().st_mtime_ns for path in (work / "dist").rglob("*")}
    assert kaggle.main([*words, "--no-wheels", "--work-dir", str(work)]) == 1
    assert said in capsys.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in (work / "dist").rglob("*")}


def test_without_a_bundle_there_is_nothing_to_rehearse_or_publish(tmp_path, capsys):
    for command in ("rehearse", "publish"):
        assert kaggle.main([command, "--work-dir", str(tmp_path)]) == 1
        assert "rsnakit.kaggle bundle RUN --owner NAME" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):  # whose it is has to be said
        kaggle.main(["bundle", "first"])


@pytest.mark.parametrize("text", ["threshold=[", "threshold", "thresh old=1"])
def test_what_is_no_parameter_is_said_as_misuse(text, capsys):
    with pytest.raises(SystemExit, match="2"):
        kaggle.main(["bundle", "first", "--owner", "jane", "-p", text])
    assert repr(text) in capsys.readouterr().err


@pytest.mark.parametrize("faults", [(), ("row 3 is missing",)])
def test_a_rehearsal_that_finds_a_fault_ends_with_an_error(work, faults, monkeypatch, capsys):
    found = rehearsal.Rehearsal(stages=(), projection=None, faults=faults, notes=())
    monkeypatch.setattr(rehearsal, "rehearse", lambda *_, **__: found)
    assert kaggle.main(["rehearse", "--work-dir", str(work)]) == len(faults)
    printed = capsys.readouterr().out
    assert ("FAULT: row 3 is missing" in printed) == bool(faults) and ("rsnakit.kaggle publish" in printed) != bool(
        faults
    )
