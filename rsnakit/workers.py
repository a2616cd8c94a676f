"""One function over many files, in processes: a process that dies costs one file, and that file is named."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import cv2
import joblib
from joblib.externals.loky import get_reusable_executor

CHUNK = 4  # items a process gets at a time
AHEAD = 3  # chunks a process that are handed out before their turn


class ProcessDied(RuntimeError):
    """A process was killed while it worked on an item, and again when it had that item alone."""


def over_items(function: Callable[[Any], Any], items: Iterable[Any], n_jobs: int) -> Iterator[tuple[Any, Any]]:
    """Yields (item, what `function` made of it), as they are done.

    Where a process is killed (by a decoder's crash, or for want of memory), the items under way are done again, each in a
    process of its own; for one that kills that process too, a `ProcessDied` is yielded in place of its result.

    Args:
        function: and its results can be pickled; what it raises ends the iteration.
        items: can be pickled.
        n_jobs: processes; 1 does everything in this one, where a crash is nobody's to catch.
    """
    left = dict(enumerate(items))
    if n_jobs == 1 or len(left) < 2 * CHUNK:  # starting processes takes longer than a few images
        yield from ((item, function(item)) for item in left.values())
        return
    try:
        while left:
            try:
                # Closed by name: an iteration that ends early must not leave processes at work behind it.
                with contextlib.closing(_in_processes(function, left, n_jobs)) as results:
                    for number, result in results:
                        yield left.pop(number), result
            except BrokenProcessPool:
                for number in list(left)[: AHEAD * CHUNK * n_jobs]:
                    yield left[number], _alone(function, left.pop(number))
    finally:
        _dismiss_processes()


def _in_processes(function: Callable, items: dict[int, Any], n_jobs: int) -> Iterator[tuple[int, Any]]:
    numbered = list(items.items())
    chunks = (numbered[i : i + CHUNK] for i in range(0, len(numbered), CHUNK))
    parallel = joblib.Parallel(
        n_jobs=n_jobs, return_as="generator_unordered", pre_dispatch=f"{AHEAD}*n_jobs", batch_size=1
    )
    with contextlib.closing(parallel(joblib.delayed(_do)(function, chunk) for chunk in chunks)) as results:
        for result in results:
            yield from result


def _alone(function: Callable, item: Any) -> Any:
    try:  # with n_jobs=1 it would run here
        return joblib.Parallel(n_jobs=2)([joblib.delayed(_do)(function, [(0, item)])])[0][0][1]
    except BrokenProcessPool as error:
        return ProcessDied(f"the process that worked on it was killed, twice: {' '.join(str(error).split())[:200]}")


def _do(function: Callable, numbered: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
    cv2.setNumThreads(1)  # the processes are the parallelism
    return [(number, function(item)) for number, item in numbered]


def _dismiss_processes() -> None:
    """Ends joblib's processes, which would idle for minutes with their memory.

    Their temporary folder and semaphores go with them, which a kernel that is killed later would leave in /dev/shm.
    """
    executor = get_reusable_executor(reuse=True)
    getattr(executor, "terminate", executor.shutdown)()
