"""rsnakit.packages: what is missing by installed metadata, and what pip is asked for; test_first_cell has the real pip."""

import ast
import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from rsnakit import packages, wheels
from rsnakit.packages import Missing, PackageError

REPOSITORY = Path(__file__).parents[1]
REQUIREMENTS = REPOSITORY / "requirements.txt"


class Machine:
    """Installed distributions, as folders of metadata, and a pip that puts more of them there.

    Attributes:
        index: versions that pip can get, by name.
        commands: what pip was called with, behind `pip install`.
        constraints: lines of the constraints file of the last call.
        harm: distributions that pip installs on the way.
    """

    def __init__(self, folder: Path):
        self.folder, self.index, self.commands, self.constraints, self.harm = folder, {}, [], [], {}

    def put(self, **versions: str) -> None:
        for name, version in versions.items():
            for old in self.folder.glob(f"{name}-*.dist-info"):
                (old / "METADATA").unlink()
                old.rmdir()
            info = self.folder / f"{name}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def pip(self, command, **options) -> SimpleNamespace:
        assert command[:4] == [sys.executable, "-m", "pip", "install"]
        self.commands.append(command[4:])
        if "--constraint" in command:
            self.constraints = Path(command[command.index("--constraint") + 1]).read_text().splitlines()
        wanted = [Requirement(part) for part in command[4:] if ">=" in part or "==" in part]
        for one in wanted:
            if one.name not in self.index:
                return SimpleNamespace(
                    returncode=1, stdout="", stderr=f"ERROR: No matching distribution found for {one}"
                )
        self.put(**{one.name.lower(): self.index[one.name] for one in wanted}, **self.harm)
        return SimpleNamespace(returncode=0, stdout="", stderr="")


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Machine:
    """With nothing on it but what a test puts there."""
    machine = Machine(tmp_path / "site-packages")
    machine.folder.mkdir()
    found = importlib.metadata.distributions
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: found(path=[str(machine.folder)]))
    monkeypatch.setattr(packages.subprocess, "run", machine.pip)
    return machine


def requirements(folder: Path, *lines: str) -> Path:
    (folder / "requirements.txt").write_text("\n".join(lines))
    return folder / "requirements.txt"


# What is missing


def test_missing_and_too_old_are_told_in_order(machine, tmp_path):
    machine.put(torch="2.6.0+cu124", scikit_learn="1.2.1", pillow="11.0", pandas="3.0.0rc1", old="1.9", tqdm="4.66")
    path = requirements(
        tmp_path, "# comment", "", "torch>=2.6  # of the GPU", "captum>=0.9", "scikit-learn>=1.2.2", "Pillow>=10.4",
        "pandas>=2.2", "old>=1.10", "tqdm", "never>=1; python_version < '3'", "soon>=1; python_version >= '3'",
    )  # fmt: skip
    found = packages.missing(path)
    assert found == [
        Missing("captum", "captum>=0.9"),
        Missing("scikit-learn", "scikit-learn>=1.2.2", "1.2.1"),
        Missing("old", "old>=1.10", "1.9"),
        Missing("soon", "soon>=1"),
    ]
    assert [str(one) for one in found[:2]] == [
        "captum>=0.9 (not installed)",
        "scikit-learn>=1.2.2 (1.2.1 is installed)",
    ]


def test_here_nothing_is_missing():
    """These tests run where requirements.txt is installed, as pip itself says."""
    asked = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-deps", "-r", str(REQUIREMENTS)]
    complete = subprocess.run(asked, capture_output=True).returncode == 0
    assert (packages.missing(REQUIREMENTS) == []) == complete


# What pip is asked for


def test_only_what_is_missing_is_installed_and_torch_is_held(machine):
    machine.put(
        torch="2.6.0+cu124", nvidia_cudnn_cu12="9.1", numpy="2.0.2", pandas="2.2.2", ipykernel="6.17", timm="1.0"
    )
    machine.index = {"timm": "1.0.31", "captum": "0.9.0"}
    wanted = [Missing("torch", "torch>=2.7", "2.6.0+cu124"), Missing("timm", "timm>=1.0.15", "1.0")]
    assert packages.install([*wanted, Missing("captum", "captum>=0.9")]) == []
    (command,) = machine.commands
    assert command[-2:] == ["timm>=1.0.15", "captum>=0.9"] and "--upgrade" not in command and "--no-deps" not in command
    held = {"torch==2.6.0+cu124", "nvidia-cudnn-cu12==9.1", "numpy==2.0.2", "ipykernel==6.17"}
    assert set(machine.constraints) == held | {"torchvision<0", "torchaudio<0", "triton<0", "pytorch-triton<0"}
    assert packages.install(wanted[:1]) == [] and len(machine.commands) == 1  # torch alone: pip is not even asked


def test_numpy_that_is_too_old_stays_within_its_major_version(machine):
    machine.put(numpy="1.24.3")
    machine.index = {"numpy": "1.26.4"}
    packages.install([Missing("numpy", "numpy>=1.26.4", "1.24.3")])
    assert "numpy<2" in machine.constraints and "numpy==1.24.3" not in machine.constraints


def test_from_wheels_alone(machine, tmp_path):
    machine.index = {"pydicom": "3.0.2"}
    packages.install([Missing("pydicom", "pydicom>=3.0.1", "2.4.4")], tmp_path / "wheels")
    (command,) = machine.commands
    assert command[-5:] == ["--no-index", "--no-deps", "--find-links", str(tmp_path / "wheels"), "pydicom>=3.0.1"]


def test_those_that_cannot_be_had_are_named_and_the_others_installed(machine):
    machine.put(torch="2.6.0", numpy="2.0.2")
    machine.index = {"timm": "1.0.31"}
    wanted = [Missing(name, f"{name}>=1.0.15") for name in ("captum", "timm", "torchinfo")]
    with pytest.raises(PackageError) as caught:
        packages.install(wanted)
    assert str(caught.value).splitlines() == [
        "not to be had beside torch 2.6.0, numpy 2.0.2:",
        "  captum>=1.0.15 (not installed): No matching distribution found for captum>=1.0.15",
        "  torchinfo>=1.0.15 (not installed): No matching distribution found for torchinfo>=1.0.15",
    ]
    assert packages._versions()["timm"] == "1.0.31"


def test_a_pip_that_changes_torch_all_the_same_is_found_out(machine):
    machine.put(torch="2.6.0+cu124")
    machine.index, machine.harm = {"timm": "1.0.31"}, {"torch": "2.9.0"}
    with pytest.raises(PackageError, match="pip changed torch, which was to stay"):
        packages.install([Missing("timm", "timm>=1.0.15")])


# What a place gets


def with_bundle(folder: Path, *lines: str, wheels: bool = True) -> Path:
    """A repository as a bundle carries it."""
    requirements(folder, *lines)
    (folder / "bundle.json").write_text("{}")
    if wheels:
        (folder / "wheels").mkdir()
    return folder


def test_where_nothing_is_missing_nothing_is_done_or_said(machine, tmp_path, capsys):
    machine.put(torch="2.6.0", timm="1.0.31")
    requirements(tmp_path, "torch>=2.6", "timm>=1.0.15", "jupyterlab>=4.0")
    packages.bring("colab", tmp_path)
    assert machine.commands == [] and capsys.readouterr().out == ""


@pytest.mark.parametrize("place", ["colab", "paperspace", "kaggle"])
def test_what_is_missing_is_said_and_installed(machine, tmp_path, capsys, place):
    machine.put(torch="2.5.1")
    machine.index = {"captum": "0.9.0"}
    requirements(tmp_path, "torch>=2.6", "captum>=0.9", "jupyterlab>=4.0")
    packages.bring(place, tmp_path)
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "NOTE: torch>=2.6 (2.5.1 is installed): older than what the kit is tested with, and left as it is",
        "installing captum>=0.9 (not installed)",
    ]
    assert [command[-1] for command in machine.commands] == ["captum>=0.9"]


@pytest.mark.parametrize("name", ["torch", "torchvision"])
def test_without_torch_it_says_how_to_get_it_and_installs_nothing(machine, tmp_path, name):
    machine.put(**{"torchvision" if name == "torch" else "torch": "2.6.0"})
    requirements(tmp_path, "torch>=2.6", "torchvision>=0.21", "timm>=1.0.15")
    with pytest.raises(PackageError, match=rf"{name} is not installed.*pip install torch torchvision"):
        packages.bring("paperspace", tmp_path)
    assert machine.commands == []


def test_a_bundle_on_kaggle_gets_what_scoring_needs_from_its_wheels(machine, tmp_path, capsys):  # D16
    machine.put(torch="2.6.0", pydicom="2.4.4")
    machine.index = {"imagecodecs": "2026.1.14", "pydicom": "3.0.2"}
    lines = (
        "torch>=2.6",
        "pydicom>=3.0.1",
        "imagecodecs>=2024.12.30",
        "captum>=0.9",
        "kaggle>=1.7.4.2",
        "jupyterlab>=4",
    )
    packages.bring("kaggle", with_bundle(tmp_path, *lines))
    (command,) = machine.commands
    assert command[-3:] == [str(tmp_path / "wheels"), "pydicom>=3.0.1", "imagecodecs>=2024.12.30"]
    assert "--no-index" in command and "--no-deps" in command
    said = "not installed, as scoring needs none of it: captum>=0.9 (not installed), kaggle>=1.7.4.2 (not installed)\n"
    assert said in capsys.readouterr().out


def test_a_bundle_brings_versions_that_are_later_than_those_there(machine, tmp_path):
    """The run was trained with that timm, and may need it; a later one than the bundle's stays."""
    machine.put(torch="2.6.0", timm="1.0.27", pydicom="3.1.0")
    machine.index = {"timm": "1.0.31", "pydicom": "3.0.2"}
    repository = with_bundle(tmp_path, "timm>=1.0.15", "pydicom>=3.0.1")
    for name in ("timm-1.0.31-py3-none-any.whl", "pydicom-3.0.2-py3-none-any.whl"):
        (repository / "wheels" / name).touch()
    packages.bring("kaggle", repository)
    (command,) = machine.commands
    assert command[-2:] == [str(repository / "wheels"), "timm>=1.0.31"]
    packages.bring("kaggle", repository)
    assert machine.commands == [command]


@pytest.mark.parametrize("wheels", [True, False])
def test_a_bundle_without_the_wheel_says_which_command_makes_it(machine, tmp_path, wheels):  # D16
    machine.put(torch="2.6.0")
    with pytest.raises(PackageError) as caught:
        packages.bring("kaggle", with_bundle(tmp_path, "imagecodecs>=2024.12.30", wheels=wheels))
    assert "  imagecodecs>=2024.12.30 (not installed): No matching" in str(caught.value)
    assert "`python -m rsnakit.kaggle bundle RUN --owner NAME`" in str(caught.value)
    assert ("--no-index" in machine.commands[0]) == wheels


def test_a_repository_on_kaggle_scores_without_the_rest(machine, tmp_path, capsys):
    """Without internet: captum is not to be had, and scoring does not need it; elsewhere it is an error."""
    machine.put(torch="2.6.0")
    requirements(tmp_path, "captum>=0.9")
    packages.bring("kaggle", tmp_path)
    assert (
        "NOTE: scoring needs none of these, other notebooks do: not to be had beside torch" in capsys.readouterr().out
    )
    with pytest.raises(PackageError, match=r"captum>=0\.9 \(not installed\): No matching(.|\n)*Turn the internet on"):
        packages.bring("colab", tmp_path)


def test_what_was_imported_before_it_was_upgraded_wants_a_restart(machine, tmp_path, monkeypatch, capsys):
    def prepare():
        machine.put(pillow="9.0", timm="0.9")
        machine.index = {"Pillow": "11.0", "timm": "1.0.31"}

    requirements(tmp_path, "Pillow>=10.4", "timm>=1.0.15")
    modules = {"PIL": ["Pillow"], "timm": ["timm"]}
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: modules)
    monkeypatch.setitem(sys.modules, "PIL", sys)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    prepare()
    with pytest.raises(PackageError, match=r"^PIL: imported before it was upgraded; restart the session"):
        packages.bring("colab", tmp_path)
    packages.bring("colab", tmp_path)  # restarted
    prepare()
    packages.bring("kaggle", tmp_path)
    assert "NOTE: PIL: imported before it was upgraded" in capsys.readouterr().out


def test_a_package_without_its_requirements(machine, tmp_path, capsys):
    packages.bring("kaggle", tmp_path)
    assert f"NOTE: there is no {tmp_path / 'requirements.txt'}" in capsys.readouterr().out


# What scoring needs


def imported(tree: ast.AST) -> set[str]:
    """Modules that are imported when a cell or a module runs, those of `from rsnakit import ...` among them."""
    names, todo = set(), [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        if not isinstance(node, ast.FunctionDef | ast.Lambda | ast.If):
            todo += ast.iter_child_nodes(node)
    return names


def loaded_by(notebook: Path) -> set[str]:
    """Top modules that a notebook's imports load, through the kit's modules, on whose own imports nothing is known."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    todo = {
        name for cell in cells if cell["cell_type"] == "code" for name in imported(ast.parse("".join(cell["source"])))
    }
    seen = set()
    while todo:
        name = todo.pop()
        seen.add(name)
        path = REPOSITORY / (name.replace(".", "/") + ".py")
        if name.startswith("rsnakit.") and path.exists():
            todo |= imported(ast.parse(path.read_text(encoding="utf-8"))) - seen
    return {name.split(".")[0] for name in seen}


def test_scoring_is_told_all_that_04_imports():
    of = importlib.metadata.packages_distributions()
    known = {packages._normal(Requirement(line.split("#")[0]).name) for line in lines_of(REQUIREMENTS)}
    needed = {
        packages._normal(name)
        for module in loaded_by(REPOSITORY / "notebooks/04_inference.ipynb")
        for name in of.get(module, ())
    }
    assert {"timm", "pandas", "pydicom"} <= needed
    assert needed & known <= {*packages.SCORING, *packages.NEVER}
    assert {*packages.SCORING} <= known


def lines_of(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.split("#")[0].strip()]


def test_the_wheels_of_a_bundle_are_for_scoring_and_recent_enough():  # D16
    pinned = {packages._normal(one.name): one for one in map(Requirement, wheels.NEEDED)}
    assert {*pinned} <= {*packages.SCORING} and "imagecodecs" in pinned
    for line in lines_of(REQUIREMENTS):
        asked = Requirement(line.split("#")[0])
        if (one := pinned.get(packages._normal(asked.name))) is not None:
            (version,) = [Version(part.version) for part in one.specifier if part.operator == "=="]
            assert version in asked.specifier


# Other Pythons


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_the_package_is_read_by_other_pythons(version, tmp_path):
    """All of it is compiled, without a warning; what needs no other package but pip's own runs."""
    python = other_python(version)
    code = f"""
import sys, warnings
from pathlib import Path
warnings.simplefilter("error")
for path in Path({str(REPOSITORY / "rsnakit")!r}).glob("*.py"):
    compile(path.read_text(encoding="utf-8"), str(path), "exec")
warnings.simplefilter("default")
sys.path.insert(0, {str(REPOSITORY)!r})
from rsnakit import mounts, packages
(Path("kaggle/input/a/dataset")).mkdir(parents=True)
Path("kaggle/input/a/dataset/bundle.json").touch()
print(mounts.bundles(Path("."))[0].as_posix(), *(one.name for one in packages.missing(Path({str(REQUIREMENTS)!r}))))
"""
    done = subprocess.run([python, "-I", "-B", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    bundle, *names = done.stdout.split()
    assert bundle == "kaggle/input/a/dataset" and set(names) <= {
        packages._normal(Requirement(line.split("#")[0]).name) for line in lines_of(REQUIREMENTS)
    }


def other_python(version: str) -> str:
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python"))
    for python in filter(None, (*map(str, installed), shutil.which(f"python{version}"))):
        if subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0:
            return python
    pytest.skip(f"no Python {version} with pip on this machine")
