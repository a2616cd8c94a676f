from __future__ import annotations

import ast
import dataclasses
import importlib
import io
import json
import math
import shlex
import subprocess
import sys
import tokenize
import typing
from dataclasses import dataclass
from pathlib import Path

import nbformat
import papermill
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from papermill.cli import _resolve_type as papermill_type  # what `-p NAME VALUE` makes of its text
from papermill.cli import papermill as papermill_command
from papermill.translators import PythonTranslator

from rsnakit import params
from rsnakit.params import ParameterError, from_mapping, read, setting

REPOSITORY = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


@dataclass(frozen=True)
class Toy:
    n: int = setting(4, low=1, high=64)
    lr: float = setting(1e-3, low=0.0)
    debug: bool = False
    folds: tuple[int, ...] = setting((0,), low=0)
    fold: str = "0"
    threshold: float | str = setting("auto", low=0.0, high=1.0, choices=("auto", "none"))
    size: tuple[int, int] = (512, 256)
    clip: float | None = None


@dataclass(frozen=True)
class Net:
    batch_size: int = setting(8, low=1)
    pooling: str = setting("avg", choices=("avg", "gem"))
    run: str = ""


@dataclass(frozen=True)
class Other:
    height: int = setting(1024, low=32)
    mode: str = "a"


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setattr(params, "_known_configs", lambda: (Toy, Net, Other))


# ---- values


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("debug", "false", False),
        ("debug", "False", False),
        ("debug", "true", True),
        ("debug", "no", False),
        ("debug", 0, False),
        ("debug", 1, True),
        ("lr", "1e-3", 0.001),
        ("lr", 1, 1.0),
        ("lr", "0", 0.0),
        ("n", "4", 4),
        ("n", 4.0, 4),
        ("n", "4.0", 4),
        ("n", 64, 64),
        ("folds", "[0,1]", (0, 1)),
        ("folds", "(0, 1)", (0, 1)),
        ("folds", "0,1", (0, 1)),
        ("folds", "(1,)", (1,)),
        ("folds", "[]", ()),
        ("folds", [0, 1.0], (0, 1)),
        ("folds", ["0", "1"], (0, 1)),
        ("folds", 2, (2,)),
        ("fold", 0, "0"),
        ("fold", "all", "all"),
        ("threshold", "auto", "auto"),
        ("threshold", "0.31", 0.31),
        ("threshold", 0.31, 0.31),
        ("threshold", 1, 1.0),
        ("size", "[64, 32]", (64, 32)),
        ("clip", None, None),
        ("clip", "None", None),
        ("clip", "1e1", 10.0),
    ],
)
def test_accepted(name, value, expected):  # N01
    got = getattr(from_mapping({name: value}, Toy), name)
    assert got == expected and type(got) is type(expected)
    if isinstance(got, tuple):
        assert [type(part) for part in got] == [type(part) for part in expected]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("debug", "maybe", "true or false"),
        ("debug", 2, "true or false"),
        ("debug", 1.0, "true or false"),
        ("debug", "", "true or false"),
        ("lr", "small", "a finite number of at least 0.0"),
        ("lr", -1, "at least 0.0"),
        ("lr", math.nan, "finite"),
        ("lr", "inf", "finite"),
        ("lr", True, "finite"),
        ("lr", None, "finite"),
        ("lr", [1.0], "finite"),
        ("n", 2.5, "a whole number from 1 to 64"),
        ("n", "2.5", "a whole number"),
        ("n", True, "a whole number"),
        ("n", "True", "a whole number"),
        ("n", 0, "from 1 to 64"),
        ("n", 65, "from 1 to 64"),
        ("n", math.inf, "a whole number"),
        ("folds", "[0,1.5]", "a list of any number of: a whole number"),
        ("folds", "[[0],[1]]", "a list"),
        ("folds", "[0,-1]", "at least 0"),
        ("folds", [True], "a list"),
        ("fold", 1e5, "text; as text: papermill -r NAME VALUE"),
        ("fold", True, "text"),
        ("fold", None, "text"),
        ("threshold", "best", "a finite number from 0.0 to 1.0 or one of 'auto', 'none'"),
        ("threshold", 1.5, "from 0.0 to 1.0"),
        ("threshold", "nan", "finite"),
        ("threshold", True, "finite"),
        ("size", [1, 2, 3], "a list of 2 of: a whole number"),
        ("size", 512, "a list of 2"),
        ("clip", "off", "a finite number or None"),
    ],
)
def test_refused(name, value, message):
    with pytest.raises(ParameterError) as caught:
        from_mapping({name: value}, Toy)
    assert str(caught.value).startswith("1 parameter is wrong:\n  " + name)
    assert repr(value) in str(caught.value) and message in str(caught.value)


def test_choices():
    assert from_mapping({"pooling": "gem"}, Net).pooling == "gem"
    with pytest.raises(ParameterError, match=r"'max' .*expected one of 'avg', 'gem'$"):
        from_mapping({"pooling": "max"}, Net)

    @dataclass
    class Factor:
        factor: int = setting(1, choices=(1, 2, 4))

    assert from_mapping({"factor": "4"}, Factor).factor == 4
    with pytest.raises(ParameterError, match=r"expected one of 1, 2, 4$"):
        from_mapping({"factor": 3}, Factor)


def test_a_bare_off_of_yaml_is_the_choice():
    """YAML 1.1 reads it as false."""
    from rsnakit.recipe import LoopConfig

    assert params.from_mapping(yaml.safe_load("compile: off"), LoopConfig).compile == "off"
    with pytest.raises(params.ParameterError, match=r"compile: got True \(bool\), expected one of 'off'"):
        params.from_mapping(yaml.safe_load("compile: on"), LoopConfig)


def test_all_problems_at_once():
    with pytest.raises(ParameterError) as caught:
        from_mapping({"n": 2.5, "lr": "x", "pooling": "max", "batchsize": 4, "height": 1}, Toy, Net)
    lines = str(caught.value).splitlines()
    assert lines[0] == "5 parameters are wrong:"
    assert sorted(line.split(":")[0].strip() for line in lines[1:]) == ["batchsize", "height", "lr", "n", "pooling"]


def test_a_config_checks_itself():
    @dataclass
    class Pair:
        low: int = 0
        high: int = 1

        def __post_init__(self):
            if self.low > self.high:
                raise ValueError("low: above high")

    with pytest.raises(ParameterError, match="low: above high"):
        from_mapping({"low": 2}, Pair)


def test_a_field_of_an_unknown_type_is_a_mistake_of_the_config():
    @dataclass
    class Wrong:
        table: dict = None

    with pytest.raises(TypeError, match="dict"):
        from_mapping({"table": {}}, Wrong)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 64),
    lr=st.floats(0, 1e6),
    debug=st.booleans(),
    folds=st.lists(st.integers(0, 9), max_size=4),
    threshold=st.floats(0, 1) | st.sampled_from(["auto", "none"]),
)
def test_through_papermill_every_value_comes_back(n, lr, debug, folds, threshold):  # N01
    """As text (-r), as -p guesses it, and as a YAML's own types; all through the cell papermill writes."""
    values = {"n": n, "lr": lr, "debug": debug, "folds": folds, "threshold": threshold}
    texts = {name: str(value) for name, value in values.items()}
    texts["debug"] = texts["debug"].lower()
    for given_values in (values, texts, {name: papermill_type(text) for name, text in texts.items()}):
        namespace = {}
        exec(PythonTranslator.codify(given_values), namespace)
        config = from_mapping({name: namespace[name] for name in values}, Toy)
        assert config == Toy(n=n, lr=lr, debug=debug, folds=tuple(folds), threshold=threshold)


# ---- names


def test_unknown_names():  # N02
    with pytest.raises(ParameterError, match=r"batchsize: unknown parameter; did you mean batch_size\?"):
        from_mapping({"batchsize": 4}, Net)
    with pytest.raises(ParameterError, match=r"LR: unknown parameter; did you mean lr\?"):
        from_mapping({"LR": 4}, Toy)
    with pytest.raises(ParameterError, match=r"hieght: unknown parameter; did you mean height\?"):
        from_mapping({"hieght": 64}, Net)  # of another notebook
    with pytest.raises(ParameterError, match=r"xyzzy: unknown parameter; this notebook has batch_size, pooling, run$"):
        from_mapping({"xyzzy": 4}, Net)


def test_registry_is_resolved_by_name(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(params, "CONFIGS", ("env:RunConfig",))
    from rsnakit.env import RunConfig

    assert params._known_configs() == (RunConfig,)
    assert from_mapping({"max_hours": 6, "n": 3}, Toy).n == 3
    with pytest.raises(ParameterError, match="did you mean max_hours"):
        from_mapping({"max_hour": 6}, Toy)


def test_show(capsys):
    params.show(Toy(lr=0.5, folds=(0, 1)), Net())
    assert capsys.readouterr().out == "Toy: lr=0.5, folds=(0, 1)\nNet: all defaults\n"


def test_flags_bring_the_same_settings_back_through_a_shell():
    from rsnakit.env import RunConfig

    settings_given = Toy(lr=0.5, folds=(0, 1)), RunConfig(data_dir="a folder/it's", n_jobs=3)
    words = shlex.split(params.flags(*settings_given))
    assert words[::3] == ["-p"] * (len(words) // 3)
    assert params.from_mapping(dict(zip(words[1::3], words[2::3], strict=True)), Toy, RunConfig) == settings_given
    assert params.flags(RunConfig()) == ""
    assert params.flags(*settings_given, without=("lr", "data_dir")) == "-p folds '(0, 1)' -p n_jobs 3"


# ---- reading from a notebook's variables: cells in the order they ran


PARAMETERS = "batch_size: int = 8  # images\npooling: str = 'avg'  # avg, gem\nrun: str = ''  # name of the run"
READ = "net = params.read(Net)"


def run_cells(*cells):
    """Run cells as IPython does: one namespace, sources in `In`, the running cell among them."""
    namespace = {"params": params, "Net": Net, "Toy": Toy, "In": [""]}
    for cell in cells:
        namespace["In"].append(cell)
        exec(cell, namespace)
    return namespace


def injected(**values):
    return PythonTranslator.codify(values)


def test_read_without_papermill():
    assert run_cells(PARAMETERS, READ)["net"] == Net()
    namespace = {"batch_size": "16", "pooling": "gem", "run": "a"}
    assert read(Net, namespace=namespace) == Net(16, "gem", "a")
    toy = {field.name: field.default for field in dataclasses.fields(Toy)}
    assert read(Net, Toy, namespace={**namespace, **toy}) == (Net(16, "gem", "a"), Toy())


def test_read_before_the_parameters_cell():
    with pytest.raises(ParameterError, match="batch_size: has no value; run the parameters cell"):
        run_cells(READ)


def test_injected_values_win_and_unused_ones_are_kept(capsys):
    cells = (PARAMETERS, injected(batch_size=4, height="512", mode="b"), "height = 7  # this notebook's own", READ)
    assert run_cells(*cells)["net"] == Net(batch_size=4)
    assert params.unused() == {"height": 512, "mode": "b"}
    assert capsys.readouterr().out == "not used by this notebook: height=512, mode='b'\n"
    run_cells(PARAMETERS, READ)
    assert params.unused() == {}
    assert capsys.readouterr().out == ""


def test_injected_names_are_checked():  # N02
    with pytest.raises(ParameterError, match="did you mean batch_size"):
        run_cells(PARAMETERS, injected(batchsize=4), READ)
    with pytest.raises(ParameterError, match="height: got 1"):
        run_cells(PARAMETERS, injected(height=1), READ)
    with pytest.raises(ParameterError, match="height: got nan"):
        run_cells(PARAMETERS, injected(height=math.nan), READ)
    paths = {"PAPERMILL_INPUT_PATH": "a.ipynb", "PAPERMILL_OUTPUT_PATH": "b.ipynb"}  # papermill --inject-paths
    assert run_cells(PARAMETERS, injected(**paths), READ)["net"] == Net()


@pytest.mark.parametrize(
    ("cells", "batch_size"),
    [
        ((PARAMETERS, READ, "mine: int = 3\nbatchsize = 5", READ), 8),  # own variables are no parameters
        ((PARAMETERS, READ, PARAMETERS.replace("8", "2"), READ, READ), 2),
        ((PARAMETERS, injected(batch_size=4), READ, PARAMETERS.replace("8", "2"), READ), 2),
        ((PARAMETERS, injected(batch_size=4), READ, READ, PARAMETERS, injected(batch_size=3), READ), 3),
        # a wrong injected cell, put right by hand in one way or another
        ((PARAMETERS, injected(batchsize=4), injected(batch_size=4), READ), 4),
        ((PARAMETERS, injected(batchsize=4), PARAMETERS.replace("8", "4"), READ), 4),
        ((PARAMETERS, "# Parameters of the figure\nrows = 3", READ), 8),
        ((PARAMETERS, "run = params.read(Net)", "run = params.read(Net)", "net = run"), 8),
        ((PARAMETERS, "net, run = params.read(Net), 'other'", READ), 8),
    ],
)
def test_cells_run_by_hand_in_any_order(cells, batch_size):
    assert run_cells(*cells)["net"].batch_size == batch_size


def test_injected_above_the_parameters_cell():  # N03: no tag, so papermill injects at the top
    heading = "# Parameters\n" + PARAMETERS
    for own in (PARAMETERS, heading):
        with pytest.raises(ParameterError, match=r"batch_size: 4 was injected, but .* set 8; tag the parameters cell"):
            run_cells(injected(batch_size=4), own, READ)
        assert run_cells(injected(batch_size=8), own, READ)["net"] == Net()  # nothing lost
        assert run_cells(own, injected(batch_size=4), READ)["net"] == Net(batch_size=4)


# ---- real papermill


def make_notebook(path: Path, parameters: str, cells: list[str], tag: str = "parameters") -> Path:
    new = nbformat.v4.new_code_cell
    first = f"import sys\nsys.path[:0] = [{str(REPOSITORY)!r}, {str(path.parent)!r}]"
    notebook = nbformat.v4.new_notebook(cells=[new(first), new(parameters), *map(new, cells)])
    notebook.cells[1].metadata["tags"] = [tag]
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)
    return path


TOY_MODULE = """
from dataclasses import dataclass
from rsnakit.params import setting

@dataclass(frozen=True)
class Train:
    folds: tuple[int, ...] = setting((0,), low=0)
    debug: bool = True
    lr: float = setting(0.5, low=0.0)
    n: int = setting(1, low=1)
    wd: float = setting(0.5, low=0.0)
    batch_size: int = setting(8, low=1)
    fold: str = "0"

@dataclass(frozen=True)
class Pixels:
    height: int = setting(1024, low=32)
"""
TOY_PARAMETERS = """# what is trained
folds: tuple = (0,)  # numbers from 0
debug: bool = True  # a few patients
lr: float = 0.5  # learning rate, from 0

n: int = 1  # from 1
wd: float = 0.5  # weight decay, from 0
batch_size: int = 8  # images, from 1
fold: str = "0"  # a number, or "all"
"""
TOY_CELLS = [
    "import dataclasses, json, toy\nfrom rsnakit import params\nparams._known_configs = lambda: (toy.Train, toy.Pixels)",
    "train = params.read(toy.Train)",
    "print(json.dumps([dataclasses.asdict(train), params.unused()]))",
]


@pytest.fixture(scope="module")
def papermill_runs(tmp_path_factory):
    """Exit status, messages and output notebook of runs of papermill's command.

    One is a process of its own; the others, at the same time, are spared the seconds that it takes to start.
    """
    folder = tmp_path_factory.mktemp("papermill")
    (folder / "toy.py").write_text(TOY_MODULE)
    (folder / "place.yaml").write_text("batch_size: 16\nheight: 512\n")
    tagged = make_notebook(folder / "tagged.ipynb", TOY_PARAMETERS, TOY_CELLS)
    bare = make_notebook(folder / "bare.ipynb", TOY_PARAMETERS, TOY_CELLS, tag="other")
    values = [("-p", "folds", "[0,1]"), ("-p", "debug", "false"), ("-p", "lr", "1e-3"), ("-p", "fold", "3")]
    values += [("-r", "n", "2"), ("-y", "wd: 1e-3"), ("-f", "place.yaml")]
    commands = {
        "values": [tagged, *(part for option in values for part in option)],
        "typing error": [tagged, "-p", "batchsize", "4"],
        "lost tag": [bare, "-p", "batch_size", "4"],
    }
    # the kernel is found beside the interpreter, with no environment activated
    environ = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(folder / "ipython")}
    outs = {name: folder / f"{name}.ipynb" for name in commands}
    commands = {
        name: [str(book), str(outs[name]), "--no-progress-bar", *rest] for name, (book, *rest) in commands.items()
    }
    done = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, value in environ.items():
            patch.setenv(name, value)
        process = subprocess.Popen(
            [sys.executable, "-m", "papermill", *commands.pop("typing error")],
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        for name, command in commands.items():
            result = CliRunner().invoke(papermill_command, command)
            done[name] = result.exit_code, f"{result.output}\n{result.exception}", outs[name]
        log, _ = process.communicate(timeout=120)
        done["typing error"] = process.returncode, log, outs["typing error"]
    return done


def stdout_of(path: Path) -> str:
    outputs = [output for cell in nbformat.read(path, 4).cells for output in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def test_papermill_values(papermill_runs):  # N01
    status, log, out = papermill_runs["values"]
    assert status == 0, log
    listed, printed = stdout_of(out).splitlines()
    assert listed == "not used by this notebook: height=512"
    train, unused = json.loads(printed)
    expected = {"folds": [0, 1], "debug": False, "lr": 0.001, "n": 2, "wd": 0.001, "batch_size": 16, "fold": "3"}
    assert train == expected
    assert unused == {"height": 512}


def test_papermill_typing_error(papermill_runs):  # N02
    status, log, _ = papermill_runs["typing error"]
    assert status != 0
    assert "batchsize: unknown parameter; did you mean batch_size?" in log


def test_papermill_lost_tag(papermill_runs):  # N03
    status, log, _ = papermill_runs["lost tag"]
    assert status != 0
    assert "batch_size: 4 was injected, but the parameters cell ran after that and set 8" in log


# ---- every notebook's parameters cell


def notebook_type(hint) -> str:
    """How a parameters cell writes the type of a field, so that `papermill --help-notebook` can list it: papermill's
    pattern reads names and brackets, so `tuple[int, ...]` is written tuple, `float | str` str, `float | None` float."""
    if typing.get_origin(hint) is tuple:
        return "tuple"
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    if not members:
        return hint.__name__
    return "str" if str in members else notebook_type(members[0])


def settings_read(cells: list[ast.Module], configs: dict[str, type]) -> tuple[list[type], list[ast.stmt]]:
    """Configs that a notebook gives to `params.read`, and the statements that do."""
    classes, statements = [], []
    for statement in (statement for cell in cells for statement in cell.body):
        for call in ast.walk(statement):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "params.read":
                statements.append(statement)
                classes += [configs[ast.unparse(arg).split(".")[-1]] for arg in call.args]
    return classes, statements


def assigned_names(cell: ast.Module, skip: list[ast.stmt]) -> set[str]:
    """Names that a cell gives the notebook, from loops too, but not those inside its functions."""
    names, todo = set(), [statement for statement in cell.body if statement not in skip]
    scopes = (ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        if not isinstance(node, scopes):
            todo += ast.iter_child_nodes(node)
    return names


def problems_of(path: Path, configs: dict[str, type]) -> list[str]:
    """What is wrong with a notebook's parameters cell; configs by class name."""
    notebook = nbformat.read(path, 4)
    tagged = [i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) != 1 or tagged[0] > 5 or notebook.cells[tagged[0]].cell_type != "code":
        return [f"expected one code cell tagged parameters among the first 6, found {tagged}"]
    source = notebook.cells[tagged[0]].source
    code = {i: cell.source for i, cell in enumerate(notebook.cells) if cell.cell_type == "code" and i != tagged[0]}
    parsed = {
        i: ast.parse("\n".join("pass" if line.startswith(("%", "!")) else line for line in text.splitlines()))
        for i, text in code.items()
    }
    classes, reads = settings_read(list(parsed.values()), configs)
    if not classes:
        return ["no cell calls params.read"]
    problems = []
    expected = {}
    for cls in classes:
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            item = (notebook_type(hints[field.name]), field.default)
            if expected.setdefault(field.name, item) != item:
                problems.append(f"{field.name}: two configs disagree about its type or default")

    found = {}
    comments = {
        token.start[0]: token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    for node in ast.parse(source).body:
        if not isinstance(node, ast.AnnAssign) or node.value is None or node.lineno != node.end_lineno:
            problems.append(f"line {node.lineno}: expected `name: type = value  # why` on one line")
            continue
        name = ast.unparse(node.target)
        if name in found:
            problems.append(f"{name}: set twice")
        found[name] = (ast.unparse(node.annotation), ast.literal_eval(node.value))
        if len(comments.get(node.lineno, "").lstrip("# ")) < 3:
            problems.append(f"{name}: no comment says its unit, range or why")
    for name in sorted(expected.keys() | found.keys()):
        if repr(found.get(name)) != repr(expected.get(name)):  # repr: 1, 1.0 and True are equal
            problems.append(f"{name}: the cell has {found.get(name)}, the configs {expected.get(name)}")

    listed = papermill.inspect_notebook(str(path))
    for name in found:
        if name not in listed or listed[name]["inferred_type_name"] != found[name][0] or not listed[name]["help"]:
            problems.append(f"{name}: papermill cannot list it (an = in its comment, a type with | or ...?)")
    for i, cell in parsed.items():
        for name in sorted(assigned_names(cell, reads) & expected.keys()):
            problems.append(f"cell {i} assigns to {name}, a parameter: running params.read again would take that")
    return problems


@pytest.mark.parametrize("path", NOTEBOOKS or [None], ids=lambda path: path.stem if path else "none")
def test_parameters_cell(path):  # N03
    if path is None:
        pytest.skip("there are no notebooks yet")
    text = path.read_text(encoding="utf-8")
    names = [entry.split(":") for entry in params.CONFIGS]
    configs = {
        name: getattr(importlib.import_module(f"rsnakit.{module}"), name) for module, name in names if name in text
    }
    assert problems_of(path, configs) == []


GOOD = """# the network
batch_size: int = 8  # images, 1 to 64
pooling: str = "avg"  # avg or gem

# the rest
run: str = ""  # name of the run; "" makes one
"""


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("", ""), None),
        (("= 8", "= 9"), "batch_size: the cell has"),
        (("= 8", "= 8.0"), "batch_size: the cell has"),
        (("int = 8", "float = 8"), "batch_size: the cell has"),
        (("batch_size", "batchsize"), "batchsize: the cell has"),
        (("  # avg or gem", ""), "pooling: no comment"),
        (("avg or gem", "avg = mean"), "pooling: papermill cannot list it"),
        (('run: str = ""', 'run = ""'), "line 6: expected"),
        (("# the rest", "extra: int = 1  # not of these configs"), "extra: the cell has"),
        (("pooling: str", "pooling: str | None"), "pooling: papermill cannot list it"),
    ],
)
def test_the_check_of_notebooks_finds_faults(tmp_path, change, complaint):
    cells = ["%matplotlib inline\nrun = params.read(Net)\nname = run.run", "print([run for run in 'ab'])"]
    path = make_notebook(tmp_path / "a.ipynb", GOOD.replace(*change) if complaint else GOOD, cells)
    problems = problems_of(path, {"Net": Net})
    if complaint is None:
        assert problems == []
    else:
        assert any(problem.startswith(complaint) for problem in problems), problems


def test_the_check_of_notebooks_finds_other_faults(tmp_path):
    path, configs = tmp_path / "a.ipynb", {"Net": Net}
    make_notebook(path, GOOD, ["net = params.read(Net)", "for batch_size in (1, 2):\n    pass"])
    assert [problem[:28] for problem in problems_of(path, configs)] == ["cell 3 assigns to batch_size"]
    make_notebook(path, GOOD, ["net = params.read(Net)"], tag="other")
    assert problems_of(path, configs)[0].startswith("expected one code cell tagged parameters")
    make_notebook(path, GOOD, ["net = Net()"])
    assert problems_of(path, configs) == ["no cell calls params.read"]


def test_types_in_a_parameters_cell(tmp_path):
    source = "\n".join(f"{name}: {kind} = {value!r}  # why" for name, kind, value in (
        ("n", "int", 4), ("lr", "float", 1e-3), ("debug", "bool", False), ("folds", "tuple", (0,)), ("fold", "str", "0"),
        ("threshold", "str", "auto"), ("size", "tuple", (512, 256)), ("clip", "float", None),
    ))  # fmt: skip
    path = make_notebook(tmp_path / "a.ipynb", source, ["toy = params.read(Toy)"])
    assert problems_of(path, {"Toy": Toy}) == []
