"""rsnakit.stepping, chunks and states: compiled steps against the plain loop, and how often torch compiles.

Most tests compile with a backend that runs the graph as it stands: what it would cost is counted, and no compiler is waited
for. What inductor gives is told at the end.
"""

import dataclasses
import functools
import gc
import itertools
import math
import types
from typing import NamedTuple

import numpy as np
import pytest
import torch
from kept import bytes_kept
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from rsnakit import chunks, speed, stepping
from rsnakit.chunks import CompileError
from rsnakit.stepping import Steps, compile_steps


class Graphs(list):
    """A backend that notes each compilation."""

    def __call__(self, graph, inputs):
        self.append(graph)
        return graph.forward

    def boxed(self, graph, inputs):
        return make_boxed_func(self(graph, inputs))


@pytest.fixture
def graphs():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8):  # torch's own; packages that are imported raise it
        yield Graphs()


@pytest.fixture
def passes(graphs):
    """The same of forward and backward passes, which are compiled apart."""
    note = aot_autograd(fw_compiler=graphs.boxed, bw_compiler=graphs.boxed)
    note.graphs = graphs
    return note


def spring(state):
    """Of a mass on a spring: a rotation, so that n steps are one matrix to the n-th power."""
    place, speed = state
    return place + 0.1 * speed, speed - 0.1 * place


MATRIX = np.array([[1, 0.1], [-0.1, 1]])


def start(shape=(3,), dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))


def loop(step, state, total):
    for _ in range(total):
        state = step(state)
    return state


# What it computes


@pytest.mark.parametrize("total", [0, 1, 3, 4, 5, 8, 23])
def test_any_number_of_steps_is_that_power_of_one(graphs, total):
    state = start()
    steps = compile_steps(spring, 4, backend=graphs)
    expected = np.linalg.matrix_power(MATRIX, total) @ np.stack(state)
    np.testing.assert_allclose(np.stack(steps.run(state, total)), expected, rtol=1e-12)
    assert len(graphs) == (2 if total else 0)


def test_a_call_does_n_steps(graphs):
    steps = compile_steps(spring, np.int64(4), backend=graphs)
    expected = np.linalg.matrix_power(MATRIX, 8) @ np.stack(start())
    np.testing.assert_allclose(np.stack(steps(steps(start()))), expected, rtol=1e-12)
    assert steps.n == 4 and steps.report is None and not steps.eager and isinstance(steps, speed.Steps)


class Pair(NamedTuple):
    a: torch.Tensor
    b: dict


@dataclasses.dataclass(frozen=True)
class Body:
    place: torch.Tensor
    rest: Pair
    name: str = "body"
    none: None = None


def move(body: Body) -> Body:
    first, number = body.rest.b["list"]
    after = {"more": (body.rest.b["more"][0] * 1.5,), "list": [first + body.place.sum(), number + 1]}  # another order
    return Body(body.place + body.rest.a, Pair(body.rest.a * 0.5, after))


def test_states_of_any_structure(graphs):
    state = Body(torch.tensor(1.0), Pair(torch.tensor(1.0), {"list": [torch.tensor(0.0), torch.zeros(1, dtype=torch.int64)],
                                                            "more": (torch.tensor(2.0),)}))  # fmt: skip
    steps = compile_steps(move, 2, backend=graphs)
    found = steps.run(state, 5)
    assert type(found) is Body and type(found.rest) is Pair and found.name == "body" and found.none is None
    assert found.place == 1 + 1 + 0.5 + 0.25 + 0.125 + 0.0625 and found.rest.a == 1 / 32
    first, number = found.rest.b["list"]
    assert first == 1 + 2 + 2.5 + 2.75 + 2.875 and number == 5 and number.dtype == torch.int64
    assert found.rest.b["more"][0] == 2 * 1.5**5 and type(found.rest.b["more"]) is tuple
    assert list(found.rest.b) == ["list", "more"] and len(graphs) == 2


class Decay(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(rate))

    def forward(self, x):
        return x * self.rate

    def once(self, x):
        return x * self.rate


@pytest.mark.parametrize(
    "step",
    [Decay(0.5), Decay(0.5).once, functools.partial(torch.mul, torch.tensor(0.5)), lambda x: x / 2],
    ids=["module", "method", "partial", "lambda"],
)
def test_steps_of_any_kind(graphs, step):
    steps = compile_steps(step, 3, backend=graphs)
    with torch.no_grad():
        assert steps.run(torch.ones(2), 10).tolist() == [2.0**-10] * 2 and len(graphs) == 2


def test_records_are_stacked(graphs):
    steps = compile_steps(
        spring, 4, backend=graphs, record=lambda state: {"place": state[0], "energy": sum((x**2).sum() for x in state)}
    )
    state = start()
    (place, _), records = steps.run(state, 10)
    expected = [np.linalg.matrix_power(MATRIX, k) @ np.stack(state) for k in range(1, 11)]
    np.testing.assert_allclose(records["place"], [each[0] for each in expected], rtol=1e-12)
    np.testing.assert_allclose(records["energy"], [(each**2).sum() for each in expected], rtol=1e-12)
    assert records["place"].shape == (10, 3) and torch.equal(records["place"][-1], place)
    assert steps(state)[1]["energy"].shape == (4,) and len(graphs) == 2
    same, nothing = steps.run(state, 0)
    assert same is state and nothing["place"].shape == (0, 3) and nothing["energy"].shape == (0,)


# Gradients


def drift(x, w):
    return torch.sin(x) * w + x


def test_gradients_to_the_state_and_to_what_a_step_closes_over():
    """By finite differences, in float64."""
    torch._dynamo.reset()

    x, w = (each[:2].clone().requires_grad_() for each in start())
    steps = compile_steps(lambda x: drift(x, w), 3, backend="aot_eager")
    assert torch.autograd.gradcheck(lambda x, w: steps.run(x, 7), (x, w))  # which changes w in place


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("first", [False, True], ids=["state plain", "state with gradient"])
def test_gradients_are_those_of_the_plain_loop(passes, checkpoint, first):
    x, w = (each.requires_grad_() for each in start())
    x = x if first else x.detach()
    step = functools.partial(drift, w=w)
    steps = compile_steps(step, 4, backend=passes, checkpoint=checkpoint, record=lambda x: x.mean())
    steps.warm_up(x)
    compiled = len(passes.graphs)
    assert compiled == 4  # forward and backward, of the chunk and of a single step
    inputs = (x, w) if first else (w,)
    found, records = steps.run(x, 23)
    expected = [x]
    for _ in range(23):
        expected.append(step(expected[-1]))
    assert torch.equal(found, expected[-1]) and torch.allclose(records, torch.stack([y.mean() for y in expected[1:]]))
    ours = torch.autograd.grad(found.sum() + records.square().sum(), inputs)
    theirs = torch.autograd.grad(expected[-1].sum() + sum(y.mean() ** 2 for y in expected[1:]), inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    steps.run(steps.run(x, 5)[0], 9)[1].sum().backward()
    assert len(passes.graphs) == compiled and x.is_leaf and w.grad.abs().min() > 0


def test_a_checkpointed_run_keeps_one_state_a_chunk(passes):
    """And the plain one, which is compiled the same way, at least one a step."""
    x, w = (each.requires_grad_() for each in start((1000,)))
    kept = {}
    for checkpoint in (False, True):
        steps = compile_steps(lambda x: drift(x, w), 10, backend=passes, checkpoint=checkpoint)
        steps.warm_up(x)
        kept[checkpoint] = bytes_kept(_Run(steps, 100, w), x)
    assert 10 * 8000 <= kept[True] <= 11 * 8000 and kept[False] >= 100 * 8000


class _Run(nn.Module):
    def __init__(self, steps: Steps, total: int, w: torch.Tensor) -> None:
        super().__init__()
        self.steps, self.total = steps, total
        self.register_buffer("w", w)  # not counted

    def forward(self, x):
        return self.steps.run(x, self.total)


def test_no_graph_where_there_is_nothing_to_train(graphs):
    state = compile_steps(spring, 4, backend=graphs).run(start(), 10)
    assert not any(x.requires_grad for x in state)


def test_random_numbers_of_a_checkpointed_chunk_come_twice_and_are_not_used_up(graphs):
    w = torch.ones(50, requires_grad=True)

    def noisy(x):
        return x * w * (1 + torch.rand(50))

    steps = compile_steps(noisy, 4, backend=graphs, checkpoint=True)
    torch.manual_seed(0)
    found = steps.run(torch.ones(50), 6)  # warm-up in between
    torch.manual_seed(0)
    expected = loop(noisy, torch.ones(50), 6)
    assert torch.allclose(found, expected)
    (ours,), (theirs,) = (torch.autograd.grad(x.sum(), w) for x in (found, expected))
    assert torch.allclose(ours, theirs)


# How often it compiles


def test_nothing_is_compiled_after_the_warm_up(passes):  # T13
    """Whatever the first state is: without gradients, a parameter, transposed, expanded, one tensor twice."""
    w = torch.rand(3, 3, requires_grad=True)

    def step(state):
        a, b = state
        return a + 0.1 * b * w, b - 0.1 * a

    steps = compile_steps(step, 4, backend=passes)
    steps.warm_up((torch.rand(3, 3), torch.rand(3, 3)))
    compiled, one = len(passes.graphs), torch.rand(3, 3)
    assert compiled == 4
    for state in (
        (one, one),
        (one.t(), one),
        (torch.rand(3, 1).expand(3, 3), one),
        (one, torch.rand(6, 6)[::2, ::2]),
        steps.run((one, one), 2),
    ):
        expected = loop(step, state, 11)
        found = steps.run(state, 11)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert all(a.stride() == (3, 1) for a in found)
        found[0].sum().backward()
    assert len(passes.graphs) == compiled
    steps.run((nn.Parameter(torch.rand(3, 3)), nn.Parameter(torch.rand(3, 3))), 11)[0].sum().backward()
    assert len(passes.graphs) == compiled


@pytest.mark.parametrize("first", ["once", "twice"])
def test_one_tensor_twice_in_a_state(graphs, first):  # T13
    one, other = start()
    steps = compile_steps(spring, 4, backend=graphs)
    steps.warm_up((one, other) if first == "once" else (one, one))
    for state in ((one, one), (one, other), (one, one)):
        assert all(torch.equal(a, b) for a, b in zip(steps.run(state, 9), loop(spring, state, 9), strict=True))
    assert len(graphs) == 2


def test_each_mode_is_compiled_once(graphs):  # T13
    steps = compile_steps(lambda x: 0.5 * torch.cos(x), 4, backend=graphs)
    x = torch.rand(3)
    expected = steps.run(x, 9)
    modes = (
        torch.enable_grad,
        torch.no_grad,
        torch.inference_mode,
        functools.partial(torch.autocast, "cpu", torch.bfloat16),
    )
    for number, mode in enumerate((*modes, *modes)):
        with mode():
            made_here = torch.ones(3) * x
            for state in (x, made_here, nn.Parameter(x) if number % 4 in (1, 2) else x):
                assert torch.equal(steps.run(state, 9), expected)
        assert len(graphs) == 2 * min(number + 1, 4)
    with torch.inference_mode():
        state = steps.run(x, 9)
    steps.run(state, 9)  # what was made there, here
    assert len(graphs) == 8


def test_states_that_come_with_and_without_gradients_are_two(passes):
    steps = compile_steps(torch.sin, 4, backend=passes)
    x = torch.rand(3)
    assert not steps.run(x, 9).requires_grad and len(passes.graphs) == 2
    for _ in range(2):
        steps.run(x.clone().requires_grad_(), 9).sum().backward()
        assert len(passes.graphs) == 6
    assert not steps.run(x, 9).requires_grad and len(passes.graphs) == 6


def test_gradients_asked_for_after_the_warm_up_are_given(graphs):
    w = torch.rand(3)
    steps = compile_steps(lambda x: drift(x, w), 2, backend=graphs)
    assert not steps.run(torch.ones(3), 9).requires_grad
    w.requires_grad_()
    (ours,) = torch.autograd.grad(steps.run(torch.ones(3), 9).sum(), w)
    (theirs,) = torch.autograd.grad(loop(lambda x: drift(x, w), torch.ones(3), 9).sum(), w)
    compiled = len(graphs)
    assert torch.equal(ours, theirs)
    steps.run(torch.ones(3), 9)
    assert len(graphs) == compiled


def test_what_a_step_reads_may_be_made_anew_for_each_run(passes):
    """As in training, where backward takes away the graph that leads to it: attributes, and functions with what they hold."""

    class Model:
        def prepare(self, z):
            w = z.exp()
            self.v, self.inner = z.sin(), lambda x: x * w

        def step(self, x):
            return self.inner(x) + self.v

    model, z = Model(), torch.tensor([-0.1, -0.2], requires_grad=True)
    steps = compile_steps(model.step, 3, backend=passes)
    for _ in range(3):
        model.prepare(z)
        (ours,) = torch.autograd.grad(steps.run(torch.ones(2), 7).sum(), z)
        model.prepare(z)
        (theirs,) = torch.autograd.grad(loop(model.step, torch.ones(2), 7).sum(), z)
        torch.testing.assert_close(ours, theirs)
        z = (z - 0.1 * ours).detach().requires_grad_()
    assert len(passes.graphs) == 4


def test_many_steps_of_one_function_share_no_cache(graphs):  # T13
    """torch.compile gives up on the ninth variant of one code."""
    for number in range(1, 11):
        found = compile_steps(lambda x: x + number, 3, backend=graphs).run(torch.zeros(number), 4)  # noqa: B023
        assert found.tolist() == [4.0 * number] * number
    assert len(graphs) == 20


# Errors


@pytest.mark.parametrize(
    ("step", "state", "said"),
    [
        (
            lambda s: {"p": [s["p"][0][:1]]},
            {"p": [torch.ones(2)]},
            r"state\['p'\]\[0\] changes in a step: shape \(2,\) before, shape \(1,\) now; a step has to keep it",
        ),
        (lambda s: s.double(), torch.ones(2), "state changes in a step: torch.float32 before, torch.float64 now"),
        (lambda s: (s, s), torch.ones(2), r"state changes in a step: shape \(2,\), .* a tuple of 2 now"),
        (
            lambda s: Pair(s.a, {}),
            Pair(torch.ones(2), {"x": torch.ones(1)}),
            "state.b changes .* 1 before, a dict of 0 now",
        ),
        (lambda s: [s[0], s[1] + 1], [torch.ones(2), 0], r"state\[1\] .* int 0 before, int 1 now; .* make it a tensor"),
        (lambda s: s.add_(1), torch.ones(2), "state: the step changes it in place"),
        (lambda s: None, torch.ones(2), "state changes in a step: .* NoneType None now"),
    ],
)
@pytest.mark.parametrize("gradients", [False, True])
def test_what_a_step_must_not_change(graphs, step, state, said, gradients):
    if gradients and isinstance(state, torch.Tensor):
        state = state.clone().requires_grad_()
    with pytest.raises(ValueError, match=said):
        compile_steps(step, 3, backend=graphs).run(state, 5)
    assert not graphs


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (np.ones(2), "state is a numpy.ndarray: expected tensors"),
        ((torch.ones(2), {1, 2}), r"state\[1\] is a builtins.set"),
        ((1, None), "a state of kind tuple without any tensor"),
        (torch.eye(2).to_sparse(), "state is a torch.sparse_coo tensor"),
        (nn.Linear(1, 1), "state is a torch.nn.modules.linear.Linear"),
    ],
)
def test_what_is_no_state(graphs, state, said):
    with pytest.raises(TypeError, match=said):
        compile_steps(lambda s: s, 3, backend=graphs).run(state, 5)


def test_a_field_that_is_not_given_when_it_is_made():
    @dataclasses.dataclass
    class Odd:
        x: torch.Tensor
        y: torch.Tensor = dataclasses.field(init=False)

        def __post_init__(self):
            self.y = self.x

    with pytest.raises(TypeError, match=r"state.y: Odd does not take it when it is made \(init=False\)"):
        compile_steps(lambda s: s, 3)(Odd(torch.ones(1)))


def test_a_class_that_changes_what_it_is_given():
    @dataclasses.dataclass
    class Shifted:
        x: torch.Tensor

        def __post_init__(self):
            self.x = self.x + 1

    with pytest.raises(TypeError, match=r"state\.x: its class changes it when it is made"):
        compile_steps(lambda s: s, 2).run(Shifted(torch.zeros(2)), 4)


@pytest.mark.parametrize(
    ("record", "said"), [(lambda s: float(s.mean()), "record is no"), (lambda s: (s, 1), r"record\[1\] is no")]
)
def test_records_without_tensors(graphs, record, said):
    with pytest.raises(TypeError, match=f"{said} tensor: of each step tensors alone are kept"):
        compile_steps(torch.cos, 2, record=record, backend=graphs).run(torch.zeros(2), 4)


def test_a_table_that_is_too_short_for_the_steps_that_are_tried(graphs):
    table = torch.arange(5.0)
    with pytest.raises((IndexError, RuntimeError)) as caught:
        compile_steps(lambda s: (s[0] + table[s[1]], s[1] + 1), 8, backend=graphs).run(
            (torch.zeros(1), torch.zeros(1, dtype=torch.long)), 5
        )
    assert "8 steps were tried from the state given" in " ".join(caught.value.__notes__)


def test_another_state_than_the_first(graphs):
    steps = compile_steps(spring, 3, backend=graphs)
    steps(start())
    with pytest.raises(
        ValueError,
        match=r"state\[0\] is not as in the first state: shape \(3,\) before, shape \(4,\) now; make other Steps",
    ):
        steps(start((4,)))  # fmt: skip
    with pytest.raises(ValueError, match=r"state\[0\] .* torch.float64 before, torch.float32 now"):
        steps(start(dtype=torch.float32))
    with pytest.raises(ValueError, match="state is not as in the first state: a tuple of 2 before, a list of 2 now"):
        steps(list(start()))


@pytest.mark.parametrize(
    ("n", "options", "error", "said"),
    [
        (0, {}, ValueError, "n is 0: expected at least 1"),
        (2.5, {}, TypeError, "n is 2.5: expected a whole number"),
        (True, {}, TypeError, "n is True: expected a whole number"),
        ("best", {}, TypeError, "n is 'best'"),
        ("auto", {"state": torch.ones(1)}, ValueError, "auto.* measures: give it a state, and total"),
        ("auto", {"total": 1}, ValueError, "auto.* measures"),
        ("auto", {"state": torch.ones(1), "total": 0}, ValueError, "total is 0"),
        ("auto", {"state": torch.ones(1), "total": 1, "calls": 0}, ValueError, "calls is 0"),
        ("auto", {"state": torch.ones(1), "total": 1, "chunks": (0, 1)}, ValueError, "a size to try is 0"),
        ("auto", {"state": torch.ones(1), "total": 1, "budget_s": -1}, ValueError, "budget_s is -1"),
        (1, {"record": 7}, TypeError, "record is a int"),
    ],
)
def test_arguments_that_make_no_sense(n, options, error, said):
    with pytest.raises(error, match=said):
        compile_steps(lambda x: x, n, **options)


def test_steps_that_cannot_be_called_and_totals_that_cannot_be_run():
    with pytest.raises(TypeError, match="step is a Tensor"):
        compile_steps(torch.ones(2), 3)
    with pytest.raises(ValueError, match="total is -1: expected at least 0"):
        compile_steps(lambda x: x, 3).run(torch.ones(2), -1)


TABLE = torch.arange(9.0)


def prints(state):
    print("now")
    return state


def branches(state):
    if state[0].sum() > 0:
        return state
    return (-state[0], state[1])


def looks_up(state):
    return state[0] * TABLE[state[1]], state[1] + 1


@pytest.mark.parametrize("n", [3, "auto"])
@pytest.mark.parametrize(
    ("step", "said"),
    [
        (prints, r'test_stepping.py, line \d+ \(print\("now"\)\): a step can\'t be compiled as one graph'),
        (branches, r"test_stepping.py, line \d+ \(if state\[0\].sum\(\) > 0:\): a step can't be compiled as one graph"),
    ],
)
def test_a_break_of_the_graph_is_told_where(graphs, step, said, n):
    with pytest.raises(CompileError, match=said):
        compile_steps(step, n, backend=graphs, state=start(), total=9).run(start(), 9)


def test_an_index_without_dimensions(graphs):
    """It depends on torch's version and on what was compiled before whether torch takes that; our example does without."""
    state = (torch.ones(2), torch.tensor(0))
    try:
        found = compile_steps(looks_up, 3, backend=graphs)(state)
    except CompileError as error:
        assert "give i the shape (1,), or use torch.index_select" in str(error)
    else:
        assert found[0].tolist() == [0.0, 0.0]
    shaped = (torch.ones(2), torch.tensor([1]))
    assert compile_steps(looks_up, 3, backend=graphs)(shaped)[0].tolist() == [6.0, 6.0]


def test_a_step_that_changes_from_run_to_run(graphs):  # T13
    number = [0]
    steps = compile_steps(lambda x: x + number[0], 2, backend=graphs)
    with pytest.raises(CompileError, match="compiled too often, since something that a step reads besides its state"):
        for number[0] in range(20):
            steps.run(torch.zeros(1), 4)


def test_errors_of_the_step_itself_are_its_own(graphs):
    with pytest.raises(RuntimeError, match="must match the size") as caught:
        compile_steps(lambda x: x + torch.ones(3), 3, backend=graphs)(torch.ones(2))
    assert not isinstance(caught.value, CompileError)


def test_a_backend_that_fails_is_an_error_or_left_out():
    def broken(graph, inputs):
        raise OSError("no compiler here")

    torch._dynamo.reset()
    with pytest.raises(CompileError, match=r"torch.compile failed on the step.* no compiler here"):
        compile_steps(spring, 3, backend=broken)(start())
    steps = compile_steps(spring, "auto", state=start(), total=100, backend=broken, chunks=(1, 5))
    assert steps.eager and steps.report["chosen"].tolist() == [True, False, False]
    assert steps.report["left_out"].str.contains("no compiler here").tolist() == [False, True, True]
    expected = np.linalg.matrix_power(MATRIX, 100) @ np.stack(start())
    np.testing.assert_allclose(np.stack(steps.run(start(), 100)), expected, rtol=1e-12)


# What pays


class Clock:
    """Seconds as the test says: a compilation of n steps takes `compile_s(n)`, a chunk of them `chunk_s(n)`."""

    def __init__(self, monkeypatch, compile_s, chunk_s):
        self.now, real, seconds = 0.0, Steps._compile, chunks.seconds

        def timed(chunk, leaves, program, checkpoint, *_, eager=False):
            seconds(chunk, leaves, program, checkpoint, eager=eager)
            return chunk_s(getattr(chunk, "size", 0))

        def compiled(steps, size, leaves, program):
            chunk = real(steps, size, leaves, program)
            chunk.size = size
            self.now += compile_s(size)
            return chunk

        monkeypatch.setattr(chunks, "seconds", timed)
        monkeypatch.setattr(Steps, "_compile", compiled)
        monkeypatch.setattr(stepping.time, "perf_counter", lambda: self.now)


def tried(graphs, monkeypatch, total, calls, budget_s=60.0, sizes=(1, 2, 5, 10), compile_s=lambda n: 2.0 * n):
    """A plain step takes 10 ms (they are timed ten at once), a chunk 1 ms a step and 2 ms a call."""
    with monkeypatch.context() as patch:
        Clock(patch, compile_s, lambda n: 0.002 + 0.001 * n if n else 0.1)
        return compile_steps(
            spring, "auto", state=start(), total=total, calls=calls, budget_s=budget_s, chunks=sizes, backend=graphs
        )


def test_the_report_adds_up(graphs, monkeypatch):
    report = tried(graphs, monkeypatch, 105, 10).report
    assert list(report) == stepping.COLUMNS and report["n"].tolist() == [0, 1, 2, 5, 10]
    assert report["compile_s"].tolist() == [0, 2, 6, 12, 22]  # a single step's is part of each
    chunk_ms = (105 * 3, 52 * 4 + 3, 21 * 7, 10 * 12 + 5 * 3)  # and does what remains
    assert report["run_s"].tolist() == pytest.approx([1.05, *(ms / 1000 for ms in chunk_ms)])
    assert report["ms_step"].tolist() == pytest.approx([10, *(ms / 105 for ms in chunk_ms)])
    totals = [10.5, *(c + ms / 100 for c, ms in zip((2, 6, 12, 22), chunk_ms, strict=True))]
    assert report["total_s"].tolist() == pytest.approx(totals)
    gains = [1.05 - ms / 1000 for ms in chunk_ms]
    pays = [math.ceil(c / gain) for c, gain in zip((2, 6, 12, 22), gains, strict=True)]
    assert report["pays_after"].tolist() == [0, *pays] == [0, 3, 8, 14, 25]
    assert report["chosen"].tolist() == [False, True, False, False, False] and (report["left_out"] == "").all()


@pytest.mark.parametrize(("calls", "chosen"), [(1, 0), (10, 1), (200, 5), (10_000, 10)])
def test_the_number_of_calls_decides(graphs, monkeypatch, calls, chosen):
    steps = tried(graphs, monkeypatch, 100, calls)
    report = steps.report.set_index("n")
    assert report.index[report["chosen"]].tolist() == [chosen] and report["total_s"].idxmin() == chosen
    assert steps.eager == (chosen == 0) and steps.n == max(chosen, 1)
    compiled = len(graphs)
    expected = np.linalg.matrix_power(MATRIX, 103) @ np.stack(start())
    np.testing.assert_allclose(np.stack(steps.run(start(), 103)), expected, rtol=1e-12)
    assert len(graphs) == compiled  # what was tried is used
    np.testing.assert_allclose(np.stack(steps(start())), np.linalg.matrix_power(MATRIX, steps.n) @ np.stack(start()))


def test_a_size_that_would_not_fit_the_budget_is_left_out(graphs, monkeypatch):
    report = tried(graphs, monkeypatch, 100, 10_000, budget_s=30.0, sizes=(1, 2, 5, 10, 200)).report.set_index("n")
    # 2 + 4 + 10 s are spent before 10 steps, which would take twice as long as 5.
    assert report["left_out"][10] == "compiling would take about 20 s; of 30 s 16 are spent"
    assert report["left_out"][200] == "longer than the 100 steps of a call"
    assert report.loc[[10, 200], ["compile_s", "ms_step", "run_s", "total_s", "pays_after"]].isna().all(axis=None)
    assert report["chosen"][5] and len(graphs) == 3
    torch._dynamo.reset()
    graphs.clear()
    steps = tried(graphs, monkeypatch, 100, 10_000, budget_s=0)
    assert steps.eager and not graphs and (steps.report["left_out"][1:] != "").all()


def test_compiling_that_never_pays(graphs, monkeypatch):
    with monkeypatch.context() as patch:
        Clock(patch, lambda n: 1.0, lambda n: float(n or 1))
        steps = compile_steps(spring, "auto", state=start(), total=10, calls=10**6, chunks=(1, 2), backend=graphs)
    assert steps.eager and steps.report["pays_after"].tolist() == [0, math.inf, math.inf]


def test_single_steps_are_compiled_for_what_remains_where_they_are_not_to_be_tried(graphs, monkeypatch):
    steps = tried(graphs, monkeypatch, 12, 10_000, sizes=(5,))
    assert steps.report["n"].tolist() == [0, 5] and steps.report["compile_s"].tolist() == [0, 12]
    assert steps.n == 5 and len(graphs) == 2


def test_trials_leave_gradients_and_random_numbers_alone(passes):
    """The step's weights come from a graph that is walked back later, once."""
    z = torch.ones(3, requires_grad=True)
    w = z.exp()
    torch.manual_seed(0)
    steps = compile_steps(
        lambda x: x * w / 3 * (0.5 + torch.rand(3)), "auto", state=torch.ones(3), total=8, calls=5, chunks=(1, 4),
        checkpoint=True, backend=passes, budget_s=100,
    )  # fmt: skip
    assert z.grad is None and torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(0))
    assert len(passes.graphs) == 4
    steps.run(torch.ones(3), 8).sum().backward()
    assert z.grad.abs().min() > 0 and len(passes.graphs) == 4
    assert (steps.report["ms_step"] > 0).all() and steps.report["chosen"].sum() == 1


def test_all_ways_are_timed_alike(graphs, monkeypatch):
    """With gradients, also where the state alone has some, and as many steps at once: a GPU is waited for after the last."""
    notes, advance, now, in_turn = [], chunks.advance, chunks.now, Steps._in_turn

    def noted(chunk, leaves, program, checkpoint):
        notes.append(("plain loop" if program is None else "compiled", leaves[0].requires_grad))
        return advance(chunk, leaves, program, checkpoint)

    monkeypatch.setattr(chunks, "advance", noted)
    monkeypatch.setattr(chunks, "now", lambda leaves: notes.append("wait") or now(leaves))
    monkeypatch.setattr(Steps, "_in_turn", lambda *args: notes.clear() or in_turn(*args))
    state = torch.ones(3, requires_grad=True)
    compile_steps(torch.sin, "auto", state=state, total=50, chunks=(1, 5, 25), budget_s=100, backend=graphs)
    assert set(notes) == {"wait", ("plain loop", True), ("compiled", True)}
    in_a_row = [len(list(run)) for kind, run in itertools.groupby(notes, lambda note: note == "wait") if not kind]
    # Ten steps at once by the plain loop, in chunks of one, of five, or once a chunk of 25; a wait before and after each.
    assert set(in_a_row) == {1, 10, 2} and in_a_row[:4] == [1, 10, 2, 1]


def test_the_device_of_the_state_is_waited_for(monkeypatch):
    """And not the current one, as torch has it where it isn't told."""
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    devices = [torch.device(name) for name in ("cuda:1", "cpu", "cuda:1", "meta")]
    chunks.now([types.SimpleNamespace(device=device) for device in devices])
    assert waited == [torch.device("cuda:1")]


def test_trials_walk_back_no_further_than_the_steps(passes):
    """What is recorded may stand outside of the step, and a tensor may pass through it as it is."""
    z = torch.ones(3, requires_grad=True)
    w, x = z.exp(), torch.ones(3, requires_grad=True)
    options = {"total": 8, "chunks": (1, 4), "backend": passes, "budget_s": 100}
    compile_steps(lambda x: x * w, "auto", state=torch.ones(3), record=lambda x: w, **options)
    compile_steps(lambda x: x * 2, "auto", state=torch.ones(3), record=lambda x: x + w.square(), **options)
    compile_steps(lambda s: (s[0], s[1] + 1), "auto", state=(x, torch.zeros(1)), **options)
    assert torch.autograd.grad(w.square().sum(), z)[0].tolist() == pytest.approx(
        [2 * math.e**2] * 3
    )  # its graph is whole


def test_sizes_for_which_memory_does_not_do_are_left_out(graphs):
    def small(graph, inputs):
        if len(graphs(graph, inputs).__self__.graph.nodes) <= 40:  # four to a step, and three more
            return graph.forward

        def full(*_):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        return full

    steps = compile_steps(
        spring, "auto", state=start(), total=100, chunks=(1, 5, 10, 25), calls=10**9, backend=small, budget_s=100
    )
    report = steps.report.set_index("n")
    assert (
        not report["left_out"][[0, 1, 5]].any()
        and report["left_out"][[10, 25]].tolist() == ["a chunk of 10 steps: the GPU's memory is used up"] * 2
    )
    with pytest.raises(torch.OutOfMemoryError):
        compile_steps(spring, 10, backend=small)(start())


def test_a_backward_pass_that_cannot_be_compiled_is_an_error_or_left_out(passes):
    def broken(graph, inputs):
        raise torch._dynamo.exc.BackendCompilerFailed(broken, OSError("no compiler here"), None)

    backend = aot_autograd(fw_compiler=passes.graphs.boxed, bw_compiler=broken)
    x, said = torch.ones(3, requires_grad=True), "torch.compile failed on the step.* no compiler here"
    with pytest.raises(CompileError, match=said):
        compile_steps(torch.sin, 3, backend=backend).warm_up(x)
    steps = compile_steps(torch.sin, "auto", state=x, total=9, backend=backend, chunks=(1, 3))
    assert steps.eager and steps.report["left_out"][1:].str.contains(said).all()


def test_a_size_is_cached_where_the_single_step_was():
    """Its seconds are part of the size's."""
    trials = {
        0: {"compile_s": 1.0}, 1: {"compile_s": 0.1, "cached": True}, 5: {"compile_s": 3.0, "cached": False},
    }  # fmt: skip
    report = stepping._report(trials, {0: 9.0, 1: 2.0, 5: 1.0}, 100, 1, [1, 5])
    assert report["cached"].tolist() == [False, True, True] and report["compile_s"].tolist() == [0, 1.1, 4.1]


def test_the_plain_loop_is_checkpointed_too():
    x, w = (each.requires_grad_() for each in start((1000,)))
    steps = compile_steps(lambda x: drift(x, w), "auto", state=x, total=100, checkpoint=True, budget_s=0)
    assert steps.eager
    kept = bytes_kept(_Run(steps, 100, w), x)
    assert 10 * 8000 <= kept <= 12 * 8000
    (ours,) = torch.autograd.grad(steps.run(x, 103).sum(), w)
    (theirs,) = torch.autograd.grad(loop(lambda x: drift(x, w), x, 103).sum(), w)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_steps_that_are_gone_leave_nothing(graphs):
    state = start((1000,))
    compile_steps(spring, 3, backend=graphs).run(state, 7)
    graphs.clear()
    torch._dynamo.reset()
    gc.collect()
    kept = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.shape == (1000,)]
    assert len(kept) == 2


# In earnest


@pytest.mark.slow
def test_by_inductor_results_and_gradients_are_those_of_the_plain_loop():
    """To the bit where a step adds and multiplies; a sum and functions of libraries may end in another digit."""
    torch._dynamo.reset()
    w = torch.rand(64, 64, requires_grad=True)

    def adds(state):
        a, b = state
        return a + 0.1 * b * w, b - 0.1 * a

    def mixes(state):
        a, b = state
        return torch.tanh(a) + b.mean() * w, torch.exp(-b) * a.softmax(1)

    for step, same in ((adds, True), (mixes, False)):
        state = tuple(x.float() for x in start((64, 64)))
        steps = compile_steps(step, 5, checkpoint=True, record=lambda state: state[0].sum())
        steps.warm_up(state)
        compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        found, records = steps.run(state, 23)
        expected = loop(step, state, 23)
        (ours,), (theirs,) = (torch.autograd.grad(x[0].square().sum() + x[1].sum(), w) for x in (found, expected))
        if same:
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        for a, b in zip((*found, ours), (*expected, theirs), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))
        torch.testing.assert_close(records[-1], expected[0].sum(), rtol=1e-4, atol=1e-3)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled


@pytest.mark.slow
def test_what_comes_from_the_disk_is_told(tmp_path, monkeypatch):
    """Compile times are short then, and a first run's are not."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    reports = []
    for _ in range(2):
        torch._dynamo.reset()
        reports.append(compile_steps(spring, "auto", state=start((50, 50)), total=20, chunks=(1, 3), calls=3).report)
    cold, warm = (report.set_index("n")["cached"] for report in reports)
    assert not cold.any() and warm[[1, 3]].all() and not warm[0]
