"""One function over many files, in processes of this machine or of a Dask cluster.

A process that dies costs one file, and that file is named; so does one that hangs, on this machine.
"""

import functools
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import TimeoutError as NothingDone  # what joblib raises
from typing import Any

import joblib
from joblib.externals.loky import get_reusable_executor

from rsnakit import cluster

CHUNK = 4  # items a process gets at a time
AHEAD = 3  # chunks a process that are handed out before their turn
CLUSTER_AHEAD = 256  # chunks that are handed out at least, so that there is work for processes that join later
STALLED_S = 600  # some item of those under way is done within this time, or all of them hang


class ProcessDied(RuntimeError):
    """A process was killed while it worked on an item, or hung, and again when it had that item alone."""


def over_items(
    function: Callable[[Any], Any],
    items: Iterable[Any],
    n_jobs: int,
    backend: str = "loky",
    address: str = "",
    chunk: int = CHUNK,
) -> Iterator[tuple[Any, Any]]:
    """Yields (item, what `function` made of it), as they are done.

    Where a process is killed (by a decoder's crash, or for want of memory), the items under way are done again, each in a
    process of its own; for one that kills that process too, a `ProcessDied` is yielded in place of its result. The same
    goes for processes that hang, once nothing else is done any more for `STALLED_S`.

    Args:
        function: and its results can be pickled; what it raises ends the iteration. On a cluster it may be called twice
            for an item, even at the same time.
        items: can be pickled.
        n_jobs: processes; 1 does everything in this one, where a crash is nobody's to catch. A cluster uses all its
            workers, whatever this says.
        backend: `loky`, processes of this machine, or `dask`, those of a cluster, to which this package travels by itself.
        address: of the cluster's scheduler, such as tcp://host:8786.
        chunk: items that a process gets at a time; more where one takes no more than a few milliseconds.

    Raises:
        rsnakit.cluster.ClusterError: the cluster cannot be worked with, or has stopped to answer.
    """
    left = dict(enumerate(items))
    if backend == "dask":
        yield from _on_cluster(function, left, address, chunk) if left else ()
    elif n_jobs == 1:
        yield from ((item, function(item)) for item in left.values())
    else:  # with few items, too: the one that crashed last time may be alone
        yield from _on_this_machine(function, left, n_jobs, chunk)


def _on_this_machine(function: Callable, left: dict[int, Any], n_jobs: int, chunk: int) -> Iterator[tuple[Any, Any]]:
    task = functools.partial(_do, function)
    try:
        while left:
            try:
                yield from _run(task, left, chunk, AHEAD * n_jobs, n_jobs=n_jobs)
            except (BrokenProcessPool, NothingDone):
                for number in list(left)[: AHEAD * chunk * n_jobs]:
                    yield left[number], _alone(task, left.pop(number))
    finally:
        _dismiss_processes()


def _on_cluster(function: Callable, left: dict[int, Any], address: str, chunk: int) -> Iterator[tuple[Any, Any]]:
    with cluster.connect(address) as client:
        task, backend = _with_code(function), cluster.backend(client)
        ahead = max(CLUSTER_AHEAD, AHEAD * backend.effective_n_jobs(-1))
        try:
            yield from _run(task, left, chunk, ahead, backend=backend)
            # Left are those whose worker died, again and again, and what it had under way beside them: one after another.
            yield from _run(task, left, 1, 1, backend=backend)
        except ImportError as error:
            raise cluster.ClusterError(
                f"{address}: a worker lacks a package ({error}): run all of them in the same environment as this process"
            ) from error
        except CancelledError as error:
            raise cluster.ClusterError(f"{address}: the connection to the scheduler is lost: {error}") from error
        except NothingDone:
            raise cluster.ClusterError(
                f"{address}: nothing was done for {STALLED_S} s, {cluster.describe_workers(client)}"
            ) from None
    for item in left.values():
        yield item, ProcessDied("the worker that worked on it died, each time that it was tried")


def _run(task: Callable, left: dict[int, Any], size: int, ahead: int, **where: Any) -> Iterator[tuple[Any, Any]]:
    """Does what is left in chunks of `size`, `ahead` of them handed out at a time; what is done is left no more."""
    numbered = list(left.items())
    chunks = (numbered[i : i + size] for i in range(0, len(numbered), size))
    parallel = joblib.Parallel(
        return_as="generator_unordered", batch_size=1, pre_dispatch=ahead, timeout=STALLED_S, **where
    )
    done = parallel(joblib.delayed(task)(chunk) for chunk in chunks)
    try:
        for chunk in done:
            for number, result in chunk:
                yield left.pop(number), result
    finally:  # by name: an iteration that ends early must not leave processes at work behind it
        with warnings.catch_warnings(action="ignore"):  # of joblib, that some work was in vain
            done.close()


def _alone(task: Callable, item: Any) -> Any:
    try:  # with n_jobs=1 it would run here
        return joblib.Parallel(n_jobs=2, timeout=STALLED_S)([joblib.delayed(task)([(0, item)])])[0][0][1]
    except BrokenProcessPool as error:
        return ProcessDied(f"the process that worked on it was killed, twice: {' '.join(str(error).split())[:200]}")
    except NothingDone:
        return ProcessDied(f"the process that worked on it was not done after {STALLED_S} s, twice")


def _do(function: Callable, numbered: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
    import cv2

    cv2.setNumThreads(1)  # the processes are the parallelism
    return [(number, function(item)) for number, item in numbered]


def _with_code(function: Callable) -> Callable:
    """The task of a cluster, which needs this package where it is done and nowhere else.

    It is pickled with its code, since it is no module's: the scheduler, which unpickles tasks too, has not the package.
    """
    import cloudpickle  # comes with Dask

    pickled = cloudpickle.dumps(function)

    def task(numbered: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
        from rsnakit import workers

        return workers._do(pickle.loads(pickled), numbered)

    return task


def _dismiss_processes() -> None:
    """Ends joblib's processes, which would idle for minutes with their memory.

    Their temporary folder and semaphores go with them, which a kernel that is killed later would leave in /dev/shm.
    """
    executor = get_reusable_executor(reuse=True)
    getattr(executor, "terminate", executor.shutdown)()
