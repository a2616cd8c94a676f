"""Functions timed in turn, each in a process of its own, on one core.

In turn, because a machine's speed drifts by more than what is to be told apart; processes of their own, because what one
imports changes the others: rsnakit adds a decoder to pydicom's, and the ones that are compared with must not have it.
"""

import logging
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import table

# Read when NumPy, OpenCV, torch and ITK are loaded, so it stands before any of them, and processes inherit it.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "ITK_GLOBAL_DEFAULT_NUMBER_OF_THREADS"):
    os.environ[_name] = "1"


class Call(NamedTuple):
    """One call: seconds on the clock and of the processor, what it returned if that was asked for, or why it failed."""

    seconds: float
    cpu_seconds: float
    result: Any = None
    error: str = ""


class Ratio(NamedTuple):
    """How many times as long a function takes as another: the median over the rounds, the smallest and the largest."""

    median: float
    low: float
    high: float


class Turn:
    """A function in a process of its own, on one core: `opener(*args)` makes it there."""

    def __init__(self, opener: Callable[..., Callable], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, opener, args), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, *args: Any, keep: bool = False, limit_s: float = 300) -> Call:
        """Calls the function; `keep` brings back what it returns. A process that dies or hangs is an error too."""
        try:
            self._pipe.send((args, keep))
            if self._pipe.poll(limit_s):
                return self._pipe.recv()
            self._process.kill()
            return Call(limit_s, limit_s, error=f"not done after {limit_s:.0f} s")
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join(5)
            return Call(0, 0, error=f"the process died (exit code {self._process.exitcode})")

    def close(self) -> None:
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()


def in_turn(turns: dict[str, Turn], args: tuple, rounds: int) -> tuple[dict[str, Call], dict[str, list[Call]]]:
    """Calls each function once for warming up, then those that did not fail `rounds` times, one after the other.

    Returns:
        The first call of each, with what it returned or why it failed, and the timed calls of each.
    """
    first = {name: turn.call(*args, keep=True) for name, turn in turns.items()}
    timed: dict[str, list[Call]] = {name: [] for name, call in first.items() if not call.error}
    for _ in range(rounds):
        for name, calls in timed.items():
            calls.append(turns[name].call(*args))
    return first, timed


def ratio(theirs: list[float], ours: list[float]) -> Ratio:
    """theirs / ours, round by round."""
    return Ratio(*table.over_rounds(theirs, ours))


def use_one_core() -> None:
    """Keeps this process on one core, whatever number of threads a library starts; where the system has such a thing."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def _serve(pipe, opener: Callable[..., Callable], opener_args: tuple) -> None:
    use_one_core()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    import cv2

    cv2.setNumThreads(1)
    function, missing = None, ""
    try:
        function = opener(*opener_args)
    except Exception as error:  # most likely a package that is not installed
        missing = f"{type(error).__name__}: {error}"
    while True:
        try:
            args, keep = pipe.recv()
        except EOFError:
            return
        pipe.send(Call(0, 0, error=missing) if missing else _timed(function, args, keep))


def _timed(function: Callable, args: tuple, keep: bool) -> Call:
    begun, cpu_begun = time.perf_counter(), time.process_time()
    try:
        result = function(*args)
    except Exception as error:
        return Call(0, 0, error=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return Call(time.perf_counter() - begun, time.process_time() - cpu_begun, result if keep else None)
