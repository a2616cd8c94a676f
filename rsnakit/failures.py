"""Errors of memory, said in words that help: what ran out, which parameters to lower, and what of the run is safe."""

import contextlib
import re
import time
import traceback
from collections.abc import Callable, Iterator

import torch

# What the errors say, in lower case, by what ran out; the first that fits counts. Errors of a loader's worker come with the
# worker's own text in theirs.
SHARED = (
    r"killed by signal: bus error|out of shared memory|unable to \w+( \w+){0,6} (shared memory|file </?torch_)"
    r"|no space left on device.*/dev/shm/|/dev/shm/.*no space left on device"
)
FILES = r"too many open files|received 0 items of ancdata"
KILLED = r"killed by signal: killed|dataloader worker \(pid(\(s\))? [\d, ]+\) exited unexpectedly(?! with exit code)"
OTHER_SIGNAL = r"killed by signal: (?!killed|bus error)"  # a crash, or somebody's wish
GPU = r"(cuda|hip|cudnn|mps|cublas).*(out of memory|alloc_failed)"
MEMORY = (
    r"can't allocate memory|cannot allocate memory|not enough memory|unable to allocate|insufficient memory|bad_?alloc"
)

SMALLER = (
    "Lower what a step holds: grad_checkpointing=true, and precision=auto for half precision where the GPU has it, leave the "
    "run what it is, and it goes on. A smaller batch_size with accumulate raised by as much, or a smaller height and width, "
    "makes another run."
)
FEWER = "Give a smaller num_workers, 0 in the end, which needs no processes beside this one; the run then goes on."
ADVICE = {
    "GPU": ("the GPU's memory is used up", f"{SMALLER} See with nvidia-smi whether another program, or a notebook's kernel, "
            "holds some of it."),
    "memory": ("the main memory is used up", f"{FEWER} {SMALLER}"),
    "killed": ("a process that loads data ended without a word, as when the system kills it since the main memory is used up",
               FEWER),
    "shared": ("the shared memory /dev/shm is used up, through which the processes that load data hand over batches; in a "
               "container it is often 64 MB", f"{FEWER} Or begin the container with more: docker run --shm-size=8g."),
    "files": ("too many files are open at once, of which each batch that a process loads takes some",
              f"{FEWER} Or allow more: ulimit -n 65536 before Jupyter is started."),
}  # fmt: skip


DEATH_S = 0.5  # so long after its connection is broken a worker's death is known at the latest


class OutOfMemory(RuntimeError):
    """Memory of some kind is used up; the message says which, what to lower, and what is safe."""


@contextlib.contextmanager
def explained(what_is_safe: str | Callable[[], str]) -> Iterator[None]:
    """A context in which an error of memory becomes an `OutOfMemory`, with the error itself as its cause.

    These are: the GPU's memory or the main memory is used up, a loader's worker was killed for it, or shared memory or open
    files ran out. All other errors, a full disk among them, pass untouched. What the frames held in which it came up is let
    go, so that a cell that is run again finds the memory free.

    Args:
        what_is_safe: what is kept, such as the checkpoint that the run goes on from; it ends the message. Or a function that
            says it, which is called when the error is there.

    Raises:
        OutOfMemory: a RuntimeError.
    """
    try:
        yield
    except OutOfMemory:  # explained within
        raise
    except Exception as error:
        cause = death_of_worker(error) or error
        kind = what_ran_out(cause)
        if kind is None and cause is error:
            raise
        if kind is None:  # a crash in a worker, of which `error` only is what reached us
            raise cause from error
        what, advice = ADVICE[kind]
        traceback.clear_frames(error.__traceback__)
        safe = what_is_safe() if callable(what_is_safe) else what_is_safe
        raise OutOfMemory(f"{what} ({_first_line(cause)}). {advice} Safe is {safe}.") from cause


def what_ran_out(error: BaseException) -> str | None:
    """Which memory an error speaks of: GPU, memory, killed, shared or files; None where it is another error."""
    if isinstance(error, torch.OutOfMemoryError):
        return "GPU"
    text = _text(error)
    if re.search(OTHER_SIGNAL, text):
        return None
    if (
        not isinstance(error, RuntimeError | OSError | MemoryError) and "memory" not in text
    ):  # cv2 has errors of its own
        return None
    patterns = {"shared": SHARED, "files": FILES, "killed": KILLED, "GPU": GPU, "memory": MEMORY}
    found = next((kind for kind, pattern in patterns.items() if re.search(pattern, text)), None)
    return "memory" if found is None and isinstance(error, MemoryError) else found


def death_of_worker(error: Exception) -> RuntimeError | None:
    """How a loader's worker died, which an error says, or of which only the broken connection reached us; None where no worker
    died."""
    if isinstance(error, RuntimeError) and "DataLoader worker" in str(error):
        return error
    try:
        if isinstance(error, ConnectionError | EOFError | FileNotFoundError):
            time.sleep(DEATH_S)  # the loader has a handler of SIGCHLD, which raises it here in a moment
            torch._C._error_if_any_worker_fails()  # what that handler asks, where it came too early to be heard
    except (RuntimeError, AttributeError) as death:
        return death if isinstance(death, RuntimeError) else None
    return None


def _text(error: BaseException | None) -> str:
    """What an error and those that it came from say, in one line of lower case."""
    parts = []
    while error is not None and len(parts) < 5:
        parts.append(str(error))
        error = error.__cause__
    return " ".join(" ".join(parts).lower().split())


def _first_line(error: BaseException) -> str:
    """The line that tells what happened: of a worker's error, which comes with a whole traceback, the last."""
    lines = str(error).strip().splitlines() or [""]
    line = lines[-1] if lines[0].startswith("Caught ") else lines[0]
    return f"{type(error).__name__}: {line.strip()}" if line.strip() else type(error).__name__
