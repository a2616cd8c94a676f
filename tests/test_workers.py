"""rsnakit.workers: every item gets its answer, and the one that kills its process is named (D17)."""

import os
import signal
import time

import joblib
import pytest

from rsnakit import workers
from rsnakit.workers import ProcessDied, over_items

JOBLIB = tuple(map(int, joblib.__version__.split(".")[:2]))


def square(item: int) -> tuple[int, int]:
    return item**2, os.getpid()


def square_or_die(item: int) -> int:
    if item in (3, 21):
        os.kill(os.getpid(), signal.SIGKILL)
    return item**2


def square_or_hang(item: int) -> int:
    while item == 14:
        time.sleep(1)
    return item**2


def square_or_raise(item: int) -> int:
    if item == 5:
        raise ZeroDivisionError(f"item {item}")
    return item**2


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_every_item_gets_its_result(n_jobs):
    items = list(range(100, 143))
    done = list(over_items(square, items, n_jobs))
    assert sorted(item for item, _ in done) == items
    assert all(result[0] == item**2 for item, result in done)
    elsewhere = {process for _, (_, process) in done} - {os.getpid()}
    assert bool(elsewhere) == (n_jobs > 1)
    assert list(over_items(square, [], n_jobs)) == []


def test_item_that_kills_its_process_is_named_and_the_others_are_done():  # D17
    done = dict(over_items(square_or_die, range(40), 2))
    died = {item for item, result in done.items() if isinstance(result, ProcessDied)}
    assert died == {3, 21}
    assert "killed" in str(done[3])
    assert {item: done[item] for item in set(range(40)) - died} == {item: item**2 for item in set(range(40)) - died}


@pytest.mark.skipif(JOBLIB < (1, 5), reason="joblib sets no time limit where results come in any order")
def test_item_over_which_a_process_hangs_is_named_and_the_others_are_done(monkeypatch):
    begun = time.monotonic()
    list(over_items(square, range(8), 2))
    stalled = max(1.0, 3 * (time.monotonic() - begun))  # what it takes to start processes is no hanging
    monkeypatch.setattr(workers, "STALLED_S", stalled)
    done = dict(over_items(square_or_hang, range(40), 2))
    assert isinstance(done[14], ProcessDied) and f"not done after {stalled} s" in str(done.pop(14))
    assert done == {item: item**2 for item in range(40) if item != 14}


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_what_the_function_raises_comes_through(n_jobs):
    with pytest.raises(ZeroDivisionError, match="item 5"):
        list(over_items(square_or_raise, range(40), n_jobs))


@pytest.mark.filterwarnings("error:.*tasks.*")
def test_iteration_that_ends_early_leaves_nothing_at_work():
    results = over_items(square, range(4000), 2)
    next(results)
    results.close()
    assert dict(over_items(square_or_raise, range(10, 30), 2)) == {item: item**2 for item in range(10, 30)}
    assert workers.CHUNK * workers.AHEAD < 4000


@pytest.mark.parametrize("interrupted", [False, True])
def test_processes_are_gone_afterwards(interrupted):
    results = over_items(square, range(40), 2)
    processes = {next(results)[1][1]}
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            results.throw(KeyboardInterrupt())
    processes |= {process for _, (_, process) in results}
    assert os.getpid() not in processes
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
