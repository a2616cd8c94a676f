"""Chunks of steps: compiled, run, timed, and their errors explained."""

import contextlib
import itertools
import re
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node
from torch.utils.checkpoint import checkpoint as checkpointed

from rsnakit import states
from rsnakit.device import synchronize
from rsnakit.states import Form

COMPILER_ERRORS = {
    "TorchDynamoException",
    "FailOnRecompileLimitHit",
    "InductorError",
}  # by name: importing them takes seconds
_number = itertools.count()


class CompileError(RuntimeError):
    """Steps that cannot be compiled; the message says where and why. `by_step`: the step is the cause, not the machine."""

    by_step = False


class Program(NamedTuple):
    """What runs in one mode: of the state's tensors, as a chunk takes them, which require gradients, and their strides.

    Attributes:
        records: what is recorded in a step, with a new first dimension of length 1.
        single, chunk: compiled, of one step and of many.
    """

    grads: tuple[bool, ...]
    strides: list[tuple[int, ...]]
    records: list[torch.Tensor]
    single: Callable | None = None
    chunk: Callable | None = None


def unrolled(step: Callable, record: Callable | None, form: Form, record_form: Form | None, size: int) -> Callable:
    """A function of a state's tensors that gives those `size` steps later, and after them the records, stacked."""
    plan, record_plan = form.plan, record_form and record_form.plan

    def chunk(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        state = states.build(plan, iter(leaves))
        records = []
        for _ in range(size):
            state = step(state)
            if record is not None:
                records.append(states.pick(record_plan, record(state)))
        return *states.pick(plan, state), *(torch.stack(each) for each in zip(*records, strict=True))

    return chunk


def compiled(chunk: Callable, backend: str | Callable) -> Callable:
    """The chunk by torch.compile, which does its work at the first call.

    torch.compile keeps what it compiled with a function's code, a few variants and no more, and all chunks have one code:
    so each gets a copy of its own.
    """
    chunk.__code__ = chunk.__code__.replace(co_name=f"chunk_{next(_number)}")
    return torch.compile(chunk, fullgraph=True, dynamic=False, backend=backend)


def start_compiler(device: torch.device, backend: str | Callable) -> float:
    """Seconds until the compiler is ready, which the first compilation of a process takes: a line is compiled.

    Raises:
        CompileError: there is none that works.
    """
    begun = time.perf_counter()
    x = torch.ones(8, device=device, requires_grad=torch.is_grad_enabled())
    (found,), _ = advance(compiled(lambda x: (x * 2 + 1,), backend), [x], None, checkpoint=False)
    if found.requires_grad:
        torch.autograd.grad(found.sum(), x)
    return time.perf_counter() - begun


def advance(
    chunk: Callable, leaves: list[torch.Tensor], program: Program | None, checkpoint: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A state's tensors and the records after a chunk; program is None where it is not compiled.

    Raises:
        CompileError: it is compiled now, and that fails.
    """
    if program is not None:
        leaves = settle(leaves, program)
    with explained():
        if checkpoint and torch.is_grad_enabled():
            found = checkpointed(chunk, *leaves, use_reentrant=False)
        else:
            found = chunk(*leaves)
    return list(found[: len(leaves)]), list(found[len(leaves) :])


def seconds(
    chunk: Callable, leaves: list[torch.Tensor], program: Program, checkpoint: bool, times: int = 1, in_a_row: int = 1,
    eager: bool = False,
) -> float:  # fmt: skip
    """That a chunk takes, backward included where there are gradients; the mean of several, from the same state each.

    From the same, since a step may count, and look up in a table as long as the loop.

    Args:
        program: what a state is like, for plain steps as well: these, too, begin with gradients where others do.
        in_a_row: chunks that are timed at once. A GPU is waited for after the last, as in a run: after each, small ones would
            be timed by how long it takes to start them.
        eager: the chunk is of plain steps.

    Raises:
        CompileError: it is compiled now, and that fails.
    """
    taken, begin = 0.0, settle([leaf.detach() for leaf in leaves], program)
    for _ in range(times):
        found, recorded = begin, []
        mark = torch.zeros((), requires_grad=True).view(()).grad_fn if torch.is_grad_enabled() else None
        begun = now(leaves)
        for _ in range(in_a_row):
            found, records = advance(chunk, found, None if eager else program, checkpoint)
            recorded += records
        taken += now(leaves) - begun
        if mark is not None:
            results = [x for x in (*found, *recorded) if x.grad_fn is not None and _younger(x.grad_fn, mark)]
            edges, ones = _edges(results, mark), [torch.ones_like(x) for x in results]
            begun = now(leaves)
            if results:
                with explained():  # backward is compiled when it is asked for
                    torch.autograd.grad(results, edges, ones, allow_unused=True)
            taken += now(leaves) - begun
    return max(taken / (times * in_a_row), 1e-9)


def random_numbers_kept(leaves: list[torch.Tensor]) -> contextlib.AbstractContextManager:
    """Random numbers go on afterwards as if nothing had been drawn: on the CPU, and on the GPUs of these tensors."""
    return torch.random.fork_rng({leaf.device for leaf in leaves if leaf.device.type == "cuda"})


def mode(leaves: list[torch.Tensor]) -> tuple:
    """What torch.compile compiles anew for, tensors apart."""
    kinds = sorted({leaf.device.type for leaf in leaves})
    autocast = [(kind, torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)) for kind in kinds]
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast, torch.get_default_dtype(),
        torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


def settle(leaves: list[torch.Tensor], program: Program) -> list[torch.Tensor]:
    """Tensors as the chunk was compiled for: all that may differ in a first state, or from one chunk to the next."""
    inference, settled, seen = torch.is_inference_mode_enabled(), [], set()
    for leaf, needed, strides in zip(leaves, program.grads, program.strides, strict=True):
        if leaf.is_inference() != inference:
            leaf = leaf.clone()
        if leaf.is_conj() or leaf.is_neg():
            leaf = leaf.resolve_conj().resolve_neg()
        if leaf.stride() != strides:
            leaf = torch.empty_strided(leaf.shape, strides, dtype=leaf.dtype, device=leaf.device).copy_(leaf)
        if leaf.requires_grad and not needed:
            leaf = leaf.detach()
        elif needed and not leaf.requires_grad:
            leaf = leaf.detach().requires_grad_()
        elif id(leaf) in seen or type(leaf) is not torch.Tensor:
            leaf = leaf.view_as(leaf)
        seen.add(id(leaf))
        settled.append(leaf)
    return settled


def _edges(results: list[torch.Tensor], mark: Node) -> list[GradientEdge]:
    """Where the graph of the results, as far as it is younger than the mark, comes from: to go back so far and no further."""
    edges, nodes = set(), [x.grad_fn for x in results]
    seen = set(nodes)
    for node in nodes:
        for before, number in node.next_functions:
            if before is not None and (not before.next_functions or not _younger(before, mark)):
                edges.add((before, number))
            elif before is not None and before not in seen:
                seen.add(before)
                nodes.append(before)
    return [GradientEdge(*edge) for edge in edges]


def _younger(node: Node, mark: Node) -> bool:
    return node._sequence_nr() >= mark._sequence_nr()


def now(leaves: list[torch.Tensor]) -> float:
    """The clock, once the devices have done what they were given."""
    for device in {leaf.device for leaf in leaves}:
        synchronize(device)
    return time.perf_counter()


def hits() -> int:
    """How often something compiled was found on the disk."""
    counters = torch._dynamo.utils.counters
    return counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """A context in which a compiler's error becomes a CompileError; others pass."""
    try:
        yield
    except Exception as error:
        found = explain(error)
        if found is None:
            raise
        raise found from error


def explain(error: Exception) -> CompileError | None:
    """A compiler's error in a sentence: where in the step, and what to do; None if it is no compiler's."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if not names & COMPILER_ERRORS:
        return None
    text = str(error)
    frames = re.findall(r'File "(.+)", line (\d+), in .+\n +(.+)', text.partition("from user code:")[2])
    where = f"{frames[-1][0]}, line {frames[-1][1]} ({frames[-1][2].strip()})" if frames else "the step"
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    reason = " ".join(lines[: 2 if lines[0].endswith("raised:") else 1])
    if "PendingUnbackedSymbol" in text:
        found = CompileError(
            f"{where}: the value of a tensor would be read in Python, as w[i] does where i has no dimension; "
            "give i the shape (1,), or use torch.index_select"
        )
    elif "FailOnRecompileLimitHit" in names:
        found = CompileError(
            f"{where}: compiled too often, since something that a step reads besides its state changes from run to run "
            "(a number, say, or the shape of a tensor): make it a tensor of one shape, or a part of the state"
        )
    elif "Unsupported" in names or "UserError" in names:
        found = CompileError(
            f"{where}: a step can't be compiled as one graph: {reason}. Prints, .item(), branches on a tensor's value and "
            "calls into other libraries have to stay outside of a step"
        )
    else:
        return CompileError(f"torch.compile failed on {where}: {type(error).__name__}: {reason[:300]}")
    found.by_step = True
    return found
