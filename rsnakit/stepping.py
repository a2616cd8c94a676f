"""A loop of many equal steps, compiled a few steps at a time.

Compiled whole, a loop of a thousand steps takes far too long to compile; compiled a step at a time, it still pays for a call
a step. So n steps are unrolled into one chunk, and a plain loop drives the chunks.
"""

import math
import operator
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import torch

from rsnakit import chunks, failures
from rsnakit.chunks import CompileError, Program
from rsnakit.states import Form

CHUNKS = (1, 2, 5, 10, 25, 50, 100)
COLUMNS = ["n", "compile_s", "ms_step", "run_s", "total_s", "pays_after", "chosen", "left_out", "cached"]
ROUNDS = 5  # in which all chunk sizes take turns at being timed
LEAST_S = 0.03  # of a timing
PLAIN = 10  # steps of the plain loop that are timed at once


def compile_steps(
    step: Callable[[Any], Any],
    n: int | str,
    *,
    record: Callable[[Any], Any] | None = None,
    checkpoint: bool = False,
    state: Any = None,
    total: int | None = None,
    calls: int = 1,
    budget_s: float = 60.0,
    chunks: Sequence[int] = CHUNKS,
    backend: str | Callable = "inductor",
) -> "Steps":
    """Compiles a function that maps a state to the next, n steps of it in one chunk.

    A state is a tensor, or tuples, namedtuples, lists, dicts and dataclasses of tensors, nested as you like. Numbers, strings
    and None in it are part of its structure: a counter has to be a tensor. Structure, shapes, types and devices stay from
    step to step. A step gives new tensors and leaves those it was given alone; it should change nothing else either, as it
    is called more often than there are steps: at a warm-up, and with `checkpoint`.

    Args:
        step: a function, method or module; what it closes over (a velocity model, say) gets gradients too. Tensors that are
            made anew for each run, as in training, are attributes of the object whose method the step is.
        n: steps a chunk, or "auto": sizes are tried on `state` in the mode at hand (with gradients, where there are any:
            forward and backward), and the one is kept with the least time for compiling and for all calls together.
        record: a function of a state; what it gives after each step (a tensor, or several as in a state) is kept.
        checkpoint: with gradients each chunk keeps its input alone, and is computed again in backward.
        state, total, calls: for "auto": a state as it will be, steps a call of `run`, and how many calls are expected.
        budget_s: for "auto": seconds for compiling. A size that would take longer, at as long a step as the size before it,
            is left out; one that is being compiled is not stopped.
        chunks: for "auto": the sizes to try.
        backend: of `torch.compile`.

    Returns:
        The steps; nothing is compiled yet, but for "auto".

    Raises:
        TypeError, ValueError: step can't be called, n, total or a size is no count, or "auto" lacks state or total; a state
            holds something else, or a step changes what has to stay (`state.p[0]: shape ...`).
        CompileError: n="auto", and a step can't be compiled as one graph. What this machine can't compile, or for which its
            memory does not do, is left out.
    """
    for name, function in (("step", step), ("record", record)):
        if not callable(function) and not (name == "record" and function is None):
            raise TypeError(f"{name} is a {type(function).__name__}: expected a function of a state")
    if n != "auto":
        return Steps(step, _count(n, "n"), record, checkpoint, backend)
    if state is None or total is None:
        raise ValueError('n="auto" measures: give it a state, and total, the steps of a call of run')
    if not budget_s >= 0:
        raise ValueError(f"budget_s is {budget_s}: expected seconds, 0 or more")
    sizes = sorted({_count(size, "a size to try") for size in chunks})
    steps = Steps(step, 1, record, checkpoint, backend)
    steps._choose(state, _count(total, "total"), _count(calls, "calls"), budget_s, sizes)
    return steps


class Steps:
    """Many steps from a state (see `compile_steps`): a call does n of them, `run` any number.

    The first state in a mode (with gradients, under no_grad, in inference_mode, under autocast) compiles a chunk of n steps
    and one of a single step for what remains; after that nothing is compiled, however many steps are asked for. Every Steps
    has a cache of its own in torch.compile. With the backend "inductor" on a CPU results are those of the plain loop to the
    bit where a step adds and multiplies; sums, exp and their like, and gradients, may differ in the last digits (in float32
    by 1e-4 of the values after 23 steps). Random numbers that a step draws are others, and compiled chunks have no second
    derivatives.

    Attributes:
        n: steps a chunk, and a call.
        eager: whether nothing is compiled, since "auto" found that it does not pay; n is 1 then.
        report: a row for each size tried by "auto", and one with n = 0 for the plain loop: `compile_s` (a chunk's and the
            single step's, and the compiler's start), `ms_step`, `run_s` (a call of run), `total_s` (compile_s and all calls),
            `pays_after` (calls; inf where never), `chosen`, `left_out` (why it was not tried), `cached` (something compiled
            came from the disk, where torch keeps it from earlier runs: a first run takes longer). Else None.
    """

    def __init__(
        self, step: Callable, n: int, record: Callable | None, checkpoint: bool, backend: str | Callable
    ) -> None:
        self.n, self.eager, self.report = n, False, None
        self._step, self._record, self._checkpoint, self._backend = step, record, checkpoint, backend
        self._form: Form | None = None  # of the first state
        self._record_form: Form | None = None
        self._settled: dict[tuple, Program] = {}  # by mode and by which tensors come with gradients
        self._programs: dict[tuple, Program] = {}  # by mode and by which tensors have gradients after some steps

    def __call__(self, state: Any) -> Any:
        """The state n steps later; with `record`, that and the n records (see `run`)."""
        return self.run(state, self.n)

    def run(self, state: Any, total: int) -> Any:
        """The state `total` steps later.

        Returns:
            With `record`, the state and the records, stacked along a new first dimension of length total.

        Raises:
            TypeError, ValueError: the state is not like the first one, a step changes what has to stay, total is negative.
            CompileError: as `warm_up`.
        """
        left = _count(total, "total", least=0)
        leaves = self._leaves(state)
        if not left and self._record is None:
            return state
        program = self._program(leaves)
        size = self._size_eager(left) if self.eager else self.n
        records = []
        while left:
            if not self.eager and _more_gradients(leaves, program):  # of what the step closes over, since the warm-up
                program = self._program(leaves)
            taken = min(size, left) if self.eager else size if left >= size else 1
            one = self._unrolled(taken) if self.eager else program.chunk if taken == size else program.single
            leaves, recorded = self._advance(one, leaves, program)
            records.append(recorded)
            left -= taken
        state = self._form.build(leaves) if total else state
        if self._record is None:
            return state
        if total:
            return state, self._record_form.build([torch.cat(each) for each in zip(*records, strict=True)])
        return state, self._record_form.build([each[:0] for each in program.records])

    def warm_up(self, state: Any) -> float:
        """Compiles for states like this one in the mode at hand, backward included; gives the seconds it took.

        For it n steps are done from this state and their results thrown away, so a table that they look up must go so far.

        Raises:
            TypeError, ValueError: as `run`.
            CompileError: a step can't be compiled as one graph (it prints, reads a tensor's value, ...), or not here.
        """
        begun = time.perf_counter()
        self._program(self._leaves(state))
        return time.perf_counter() - begun

    # What is compiled

    def _leaves(self, state: Any) -> list[torch.Tensor]:
        if self._form is None:
            form = Form(state, "state")
            if not form.names:
                raise TypeError(f"a state of kind {type(state).__name__} without any tensor")
            self._form = form
        return self._form.leaves(state, "is not as in the first state", "make other Steps for it")

    def _program(self, leaves: list[torch.Tensor]) -> Program:
        """What is compiled for the mode at hand and for such tensors."""
        mode = chunks.mode(leaves)
        key = (*mode, *(leaf.requires_grad for leaf in leaves))
        if key not in self._settled:
            with chunks.random_numbers_kept(leaves):
                looked = self._look(leaves)
                same = (*mode, *looked.grads)
                if same not in self._programs:
                    if not self.eager:
                        single = self._compile(1, leaves, looked)
                        chunk = single if self.n == 1 else self._compile(self.n, leaves, looked)
                        looked = looked._replace(single=single, chunk=chunk)
                    self._programs[same] = looked
            self._settled[key] = self._programs[same]
        return self._settled[key]

    def _look(self, leaves: list[torch.Tensor]) -> Program:
        """Does a few plain steps, to see what stays, and which tensors require gradients sooner or later."""
        gradients = torch.is_grad_enabled()
        grads = [gradients and leaf.requires_grad for leaf in leaves]
        with torch.inference_mode(False), torch.set_grad_enabled(gradients):
            while True:
                given = [x.detach().clone().requires_grad_(a) for x, a in zip(leaves, grads, strict=True)]
                given = [x.clone() for x in given]  # of a leaf with gradients torch itself refuses that it is changed
                versions = [leaf._version for leaf in given]
                state = self._step(self._form.build(given))
                for name, leaf, version in zip(self._form.names, given, versions, strict=True):
                    if leaf._version != version:
                        raise ValueError(f"{name}: the step changes it in place; have it give a new tensor instead")
                after = self._form.leaves(state, "changes in a step", "a step has to keep it")
                records = []
                if self._record is not None:
                    record = self._record(state)
                    self._record_form = self._record_form or _form_of_record(record)
                    records = [x.detach()[None] for x in self._record_form.leaves(record, "is another", "keep it")]
                before, grads = grads, [a or x.requires_grad for x, a in zip(after, grads, strict=True)]
                if grads == before:
                    return Program(tuple(grads), [torch.empty_like(x).stride() for x in after], records)

    def _compile(self, size: int, leaves: list[torch.Tensor], program: Program) -> Callable:
        """A chunk, compiled and run once, with its backward pass."""
        chunk = chunks.compiled(self._unrolled(size), self._backend)
        try:
            chunks.seconds(chunk, leaves, program, self._checkpoint)
        except (IndexError, RuntimeError) as error:
            if "out of bounds" in str(error):
                error.add_note(
                    f"{size} steps were tried from the state given: a table that a step looks up must go so far"
                )
            raise
        return chunk

    def _unrolled(self, size: int) -> Callable:
        return chunks.unrolled(self._step, self._record, self._form, self._record_form, size)

    def _advance(self, chunk: Callable, leaves: list[torch.Tensor], program: Program) -> tuple[list, list]:
        return chunks.advance(chunk, leaves, None if self.eager else program, self._checkpoint)

    def _size_eager(self, total: int) -> int:
        """Steps of the plain loop that are one checkpoint's: so few tensors are kept if there are as many checkpoints."""
        return max(1, math.isqrt(total) if self._checkpoint else total)

    # What pays

    def _choose(self, state: Any, total: int, calls: int, budget_s: float, sizes: list[int]) -> None:
        """Tries sizes on a state, keeps the best and writes the report."""
        leaves = self._leaves(state)
        with chunks.random_numbers_kept(leaves):
            program = self._look(leaves)
            plain = min(total, self._size_eager(total), PLAIN)
            ways, trials = self._try(leaves, program, total, budget_s, sizes)
            chunk_s = self._in_turn({0: self._unrolled(plain)} | ways, leaves, program, plain, budget_s)
        run_s = {n: total // n * chunk_s[n] + total % n * chunk_s[1] for n in ways} | {0: total / plain * chunk_s[0]}
        self.report = _report(trials, run_s, total, calls, sizes)
        chosen = int(self.report["n"][self.report["chosen"]].iloc[0])
        self.n, self.eager = max(chosen, 1), chosen == 0
        if chosen:
            program = program._replace(single=ways[1], chunk=ways[chosen])
        self._programs[(*chunks.mode(leaves), *program.grads)] = program

    def _try(
        self, leaves: list[torch.Tensor], program: Program, total: int, budget_s: float, sizes: list[int]
    ) -> tuple[dict[int, Callable], dict[int, dict[str, Any]]]:
        """What could be compiled, by size; and of each size `compile_s` and `cached`, or why it was `left_out`.

        Of size 0 `compile_s` is the compiler's start, which the first compilation would have to take upon itself.
        """
        ways: dict[int, Callable] = {}
        trials: dict[int, dict[str, Any]] = {}
        spent = expected = 0.0
        failed = None
        if budget_s and self._backend == "inductor":
            try:
                spent = chunks.start_compiler(leaves[0].device, self._backend)
            except CompileError as error:
                failed = str(error)
        trials[0] = {"compile_s": spent}
        for size in sorted({1, *sizes}):  # a single step is for what remains
            if ways:
                expected = trials[max(ways)]["compile_s"] * size / max(ways)
            if size > total:
                trials[size] = {"left_out": f"longer than the {total} steps of a call"}
            elif failed:
                trials[size] = {"left_out": failed}
            elif spent + expected >= budget_s:
                why = f"compiling would take about {expected:.0f} s; of {budget_s:g} s {spent:.0f} are spent"
                trials[size] = {"left_out": why}
            else:
                hits, begun = chunks.hits(), time.perf_counter()
                try:
                    ways[size] = self._compile(size, leaves, program)
                    trials[size] = {"compile_s": time.perf_counter() - begun, "cached": chunks.hits() > hits}
                except Exception as error:
                    if (failed := _why_not(error, size)) is None:
                        raise
                    trials[size] = {"left_out": failed}
                spent += time.perf_counter() - begun
        return ways, trials

    def _in_turn(
        self, ways: dict[int, Callable], leaves: list[torch.Tensor], program: Program, plain: int, limit_s: float
    ) -> dict[int, float]:
        """Median seconds of each way's chunk, of way 0 `plain` steps; in rounds of all, since a machine's speed drifts."""
        in_a_row = {n: max(1, plain // n) if n else 1 for n in ways}

        def seconds(n: int, times: int) -> float:
            return chunks.seconds(ways[n], leaves, program, self._checkpoint, times, in_a_row[n], eager=n == 0)

        times = {n: math.ceil(LEAST_S / (in_a_row[n] * seconds(n, 1))) for n in ways}
        found: dict[int, list[float]] = {n: [] for n in ways}
        begun = time.perf_counter()
        for _ in range(ROUNDS):
            for n in ways:
                found[n].append(seconds(n, times[n]))
            if time.perf_counter() - begun > limit_s / 2:  # of steps that take seconds one round will do
                break
        return {n: statistics.median(each) for n, each in found.items()}


def _report(trials: dict[int, dict], run_s: dict[int, float], total: int, calls: int, sizes: list[int]) -> pd.DataFrame:
    """See Steps."""
    rows = []
    for n in (0, *sizes):
        trial = trials.get(n, {})
        row = {"n": n, "chosen": False, "left_out": trial.get("left_out", ""), "cached": False}
        if n in run_s:
            parts = [trials[size] for size in {0, 1, n}] if n else []
            compile_s = float(sum(part["compile_s"] for part in parts))
            row["cached"] = any(part.get("cached", False) for part in parts)
            gain = run_s[0] - run_s[n]
            row |= {"compile_s": compile_s, "ms_step": 1000 * run_s[n] / total, "run_s": run_s[n]}
            row["total_s"] = compile_s + calls * run_s[n]
            row["pays_after"] = (math.ceil(compile_s / gain) if gain > 0 else math.inf) if n else 0
        rows.append(row)
    report = pd.DataFrame(rows)[COLUMNS]
    report.loc[report["total_s"].idxmin(), "chosen"] = True
    return report


def _why_not(error: Exception, size: int) -> str | None:
    """Why a size is left out for an error; None where it is the step's own."""
    if isinstance(error, CompileError):
        return None if error.by_step else str(error)
    kind = failures.what_ran_out(error)
    return f"a chunk of {size} steps: {failures.ADVICE[kind][0]}" if kind in ("GPU", "memory") else None


def _more_gradients(leaves: list[torch.Tensor], program: Program) -> bool:
    return any(leaf.requires_grad and not needed for leaf, needed in zip(leaves, program.grads, strict=True))


def _form_of_record(record: Any) -> Form:
    form = Form(record, "record")
    if form.constants or not form.names:
        wrong = next(iter(form.constants), "record")
        raise TypeError(
            f"{wrong} is no tensor: of each step tensors alone are kept, so give it as one (no float, no .item())"
        )
    return form


def _count(value: Any, name: str, least: int = 1) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name} is {value}: expected a whole number")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}: expected a whole number") from None
    if number < least:
        raise ValueError(f"{name} is {number}: expected at least {least}")
    return number
