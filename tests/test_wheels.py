"""rsnakit.wheels: the wheels that travel are a set that installs on Kaggle, and are those that inference lacks there."""

import ast
import importlib.metadata
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rsnakit import wheels
from rsnakit.wheels import WheelError

REPOSITORY = Path(__file__).parents[1]
FUNCTIONS = (ast.FunctionDef, ast.ClassDef)
ABI3 = "cp311-abi3-manylinux_2_27_x86_64.manylinux_2_28_x86_64"


def imports_of(source: str) -> set[str]:
    """The modules that a text imports at its top, by their first name; those of the kit with `rsnakit.` before it."""
    found = set()
    at_once = [
        node
        for node in ast.parse(source).body
        if not isinstance(node, FUNCTIONS) and "TYPE_CHECKING" not in ast.unparse(node)
    ]
    for node in ast.walk(ast.Module(at_once, [])):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "rsnakit":
            found |= {f"rsnakit.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = node.module.split(".")
            found.add(".".join(parts[:2]) if parts[0] == "rsnakit" else parts[0])
    return found


def imported_by_inference() -> set[str]:
    """The distributions that the modules behind 04_inference import, the whole way down the kit."""
    notebook = json.loads((REPOSITORY / "notebooks" / "04_inference.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    to_do, seen = imports_of("\n".join(cells)), set()
    while to_do:
        seen |= to_do
        modules = [REPOSITORY / "rsnakit" / f"{name[8:]}.py" for name in to_do if name.startswith("rsnakit.")]
        to_do = {name for path in modules for name in imports_of(path.read_text(encoding="utf-8"))} - seen
    tops = {name for name in seen if not name.startswith("rsnakit")} - set(sys.stdlib_module_names)
    of = importlib.metadata.packages_distributions()
    return {of[top][0].lower().replace("_", "-") for top in tops}


def wheel(
    folder: Path, name: str, version: str = "1.0", tag: str = "py3-none-any", requires: tuple[str, ...] = ()
) -> Path:
    """A wheel of one empty module, by the rules of the format."""
    folder.mkdir(parents=True, exist_ok=True)
    path, info = folder / f"{name}-{version}-{tag}.whl", f"{name}-{version}.dist-info"
    head = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", f"__version__ = {version!r}\n")
        archive.writestr(f"{info}/METADATA", head + "".join(f"Requires-Dist: {one}\n" for one in requires))
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels that is all that pip finds, by its own settings in variables; no network is asked."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


def test_what_inference_imports_is_taken_or_in_the_image():
    imported = imported_by_inference()
    taken = {Requirement(text).name for text in wheels.NEEDED}
    assert imported - taken - wheels.IMAGE.keys() == set()
    assert taken - imported == set(), "taken, and nothing of inference imports it"
    assert {"torch", "imagecodecs", "matplotlib"} <= imported  # through several modules each


def test_versions_are_exact_and_within_the_requirements():
    lines = [line.split("#")[0].strip() for line in (REPOSITORY / "requirements.txt").read_text().splitlines()]
    asked = {Requirement(line).name.lower(): Requirement(line) for line in lines if line}
    for text in wheels.NEEDED:
        exact = Requirement(text)
        (specifier,) = exact.specifier
        assert specifier.operator == "==" and asked[exact.name].specifier.contains(specifier.version), text


@pytest.mark.parametrize(
    ("tag", "fits"),
    [
        ("py3-none-any", ["3.12", "3.13"]),
        ("py2.py3-none-any", ["3.12", "3.13"]),
        (ABI3, ["3.12", "3.13"]),
        ("cp312-cp312-manylinux_2_28_x86_64", ["3.12"]),
        ("cp313-cp313-manylinux_2_17_x86_64.manylinux2014_x86_64", ["3.13"]),
        ("cp312-abi3-manylinux2014_x86_64", ["3.12", "3.13"]),
        ("cp313-abi3-manylinux_2_5_x86_64.manylinux1_x86_64", ["3.13"]),
        ("cp313-cp313t-manylinux_2_28_x86_64", []),
        ("cp312-cp312-manylinux_2_34_x86_64", []),
        ("cp312-cp312-manylinux_2_28_aarch64", []),
        ("cp312-cp312-musllinux_1_2_x86_64", []),
        ("cp312-cp312-win_amd64", []),
        ("cp312-cp312-macosx_11_0_arm64", []),
        ("cp311-cp311-manylinux_2_28_x86_64", []),
    ],
)
def test_which_wheels_fit_kaggles_pythons(tmp_path, tag, fits):
    path = wheel(tmp_path, "codec", tag=tag)
    for python in wheels.PYTHONS:
        if python in fits:
            assert wheels.check([path], pythons=[python]) == [path]
        else:
            with pytest.raises(WheelError, match=f"of codec there is no wheel for Python {python}"):
                wheels.check([path], pythons=[python])


def test_a_wheel_for_each_python_is_a_set_and_one_of_two_is_none(tmp_path):
    both = [wheel(tmp_path, "codec", tag=f"cp{n}-cp{n}-manylinux_2_28_x86_64") for n in (312, 313)]
    assert wheels.check(reversed(both)) == both
    with pytest.raises(WheelError, match=r"codec there is no wheel for Python 3\.13"):
        wheels.check(both[:1])
    with pytest.raises(WheelError, match=r"two wheels of one distribution for Python 3\.12"):
        wheels.check([*both, wheel(tmp_path, "codec", "1.1")])


@pytest.mark.parametrize(
    ("requires", "said"),
    [
        ((), None),
        (("numpy",), None),
        (("numpy>=1.24", "torch>=2.1", "PyYAML"), None),
        (("other>=1.0",), None),
        (("eval-type-backport; python_version < '3.10'",), None),
        (("pywin32; sys_platform == 'win32'",), None),
        (("sphinx; extra == 'docs'",), None),
        (("numpy>=2.1",), "asks for numpy>=2.1 on Python 3.12, and version 1.26.4 is there"),
        (("other>=2.0",), "asks for other>=2.0 on Python 3.12, and version 1.0 is there"),
        (("stringzilla",), "neither among the wheels nor in Kaggle's image"),
        (("backport; python_version >= '3.13'",), "on Python 3.13"),
    ],
)
def test_what_wheels_require_is_among_them_or_in_the_image(tmp_path, requires, said):
    paths = [wheel(tmp_path, "codec", requires=requires), wheel(tmp_path, "other")]
    if said is None:
        assert wheels.check(paths) == paths
    else:
        with pytest.raises(WheelError, match=said):
            wheels.check(paths)


@pytest.mark.parametrize("name", ["torch", "torchvision", "numpy", "nvidia_cublas_cu12", "triton"])
def test_what_fits_the_gpu_is_never_among_them(tmp_path, name):
    with pytest.raises(WheelError, match=f"{name.replace('_', '-')}: is never installed"):
        wheels.check([wheel(tmp_path, name, "9.9")])


def test_a_damaged_wheel_is_named(tmp_path):
    path = wheel(tmp_path, "codec")
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", whole.replace(b"__version__", b"__verZion__")):
        path.write_bytes(damaged)
        with pytest.raises(WheelError, match=r"codec-1\.0-py3-none-any\.whl: cannot be read as a wheel"):
            wheels.check([path])
    path.write_bytes(whole)
    wheels.check([path])
    with pytest.raises(WheelError, match="no name of a wheel"):
        wheels.check([path.rename(tmp_path / "codec.whl")])


def test_pip_takes_them_once_for_each_python_and_they_are_kept(tmp_path, index, monkeypatch):
    for number in (312, 313):
        wheel(index, "codec", "2.0", f"cp{number}-cp{number}-manylinux_2_28_x86_64")
        wheel(index, "codec", "2.0", f"cp{number}-cp{number}-manylinux_2_34_x86_64")
    wheel(index, "pure", "1.5", "py3-none-any", ("numpy", "torch"))
    wheel(index, "pure", "1.6")
    folder, asked = tmp_path / "kept" / "wheels", ("codec==2.0", "pure<1.6")
    taken = wheels.take(folder, asked)
    expected = [f"codec-2.0-cp{n}-cp{n}-manylinux_2_28_x86_64.whl" for n in (312, 313)]
    assert [path.name for path in taken] == [*expected, "pure-1.5-py3-none-any.whl"]
    before = {path: path.read_bytes() for path in taken}
    assert set(folder.parent.rglob("*")) == {folder, *taken}  # nothing is left beside them

    with monkeypatch.context() as offline:
        offline.setattr(subprocess, "run", None)  # neither pip nor anything else is asked again
        assert {path: path.read_bytes() for path in wheels.take(folder, asked)} == before
    assert [path.name for path in wheels.take(folder, ["pure==1.6"], ["3.12"])] == ["pure-1.6-py3-none-any.whl"]
    (folder / "pure-1.6-py3-none-any.whl").write_bytes(b"cut short")
    wheels.check(wheels.take(folder, ["pure==1.6"], ["3.12"]))


def test_what_pip_cannot_take_is_said_plainly(tmp_path, index, monkeypatch):
    wheel(index, "codec", tag="cp312-cp312-manylinux_2_28_x86_64")
    folder = tmp_path / "wheels"
    with pytest.raises(
        WheelError, match=r"for Python 3\.13: .*that satisfies the requirement codec==1.0.*copied from"
    ) as error:
        wheels.take(folder, ["codec==1.0"], ["3.13"])
    assert "\n" not in str(error.value) and not folder.exists()
    wheel(index, "needy", requires=("stringzilla",))
    with pytest.raises(WheelError, match="asks for stringzilla"):
        wheels.take(folder, ["needy"], ["3.12"])
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # where nobody answers
    folder.mkdir()
    (folder / "absent-1.0-py3-none-any.whl").write_bytes(b"cut short")
    with pytest.raises(WheelError, match=r"could not connect to its index.*--no-wheels.*absent-1\.0-py3-none"):
        wheels.take(folder, ["absent==1.0"], ["3.12"])


def test_an_error_of_pips_own_is_said_by_its_last_line(tmp_path, monkeypatch):
    """As pip prints it where the disk is full."""
    said = (
        "ERROR: Exception:\nTraceback (most recent call last):\n  File x\nOSError: [Errno 28] No space left on device\n"
    )
    failed = subprocess.CompletedProcess([], 2, "", said)
    monkeypatch.setattr(wheels.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(WheelError, match="No space left on device"):
        wheels.take(tmp_path / "wheels", ["absent==1.0"], ["3.12"])


@pytest.mark.slow
def test_the_real_ones_are_a_set_and_install_without_a_network(tmp_path, monkeypatch):
    """From the package index that pip is set to: taken, and installed for each Python as a notebook on Kaggle does it."""
    taken = wheels.take(tmp_path / "wheels")
    assert sum(path.stat().st_size for path in taken) < 40e6
    assert wheels.check(taken, wheels.NEEDED) == taken
    exact = {Requirement(text).name: next(iter(Requirement(text).specifier)).version for text in wheels.NEEDED}
    for python in wheels.PYTHONS:
        target = tmp_path / python
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--find-links"]
        command += [str(tmp_path / "wheels"), "--target", str(target), "--only-binary=:all:", "--implementation", "cp"]
        command += ["--python-version", python, *(f"--platform={platform}" for platform in wheels.PLATFORMS), *exact]
        subprocess.run(command, check=True)
        there = dict(path.name.removesuffix(".dist-info").split("-") for path in target.glob("*.dist-info"))
        assert there == exact
        assert not list(target.glob("torch")) + list(target.glob("numpy*"))
    # The compiled one is for all Pythons from 3.11 on, and so for this one too.
    code = "import imagecodecs, numpy; x = numpy.arange(48, dtype='u2').reshape(6, 8); "
    code += (
        "print((imagecodecs.jpeg2k_decode(imagecodecs.jpeg2k_encode(x, level=0)) == x).all(), imagecodecs.__version__)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "3.12"))
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["True", exact["imagecodecs"]]


@pytest.mark.parametrize(
    "trained, taken",
    [
        ("1.0.30", "1.0.31"),
        ("1.0.31", "1.0.31"),
        ("1.1.2", "1.1.2"),
        ("1.1.0.dev0", "1.0.31"),
        ("not installed", "1.0.31"),
    ],
)
def test_a_later_release_that_a_run_was_trained_with_is_taken(trained, taken):
    assert wheels.at_least(trained, "timm==1.0.31") == f"timm=={taken}"
