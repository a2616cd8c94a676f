"""A real stretch of training, in a process of its own, that is run a round at a time: so that two can take turns.

Loader, model, optimiser and schedule are those of `trainer.Trainer`; only checkpoints and scoring are left out.
"""

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any

import torch

from rsnakit import aside, device_memory
from rsnakit.deciding import USED_UP, beats
from rsnakit.device import synchronize
from rsnakit.feeding import AHEAD, NO_TIME, why
from rsnakit.measuring import Measured, Workload
from rsnakit.store import Store
from rsnakit.trainer import Trainer

WARM = 3  # optimiser steps before any is timed
END_S = 10  # a process that was told to end has ended by then
ROUNDS = 5
LEAST_S = 1.0  # of a round; with less time left than that nothing is begun
MOST_S = 5.0  # of a round


class StretchError(RuntimeError):
    """The training could not go on; the message says why, in a sentence."""


class Stretch:
    """A training under way that waits between rounds, as a context manager: `with Stretch(...) as s: s.begin(60); s.round(2)`.

    Nothing is written to a run's folder or to the store.

    Args:
        workload: what is trained, with the settings to try in its configs.
        precision: fp32, bf16 or fp16.
        num_workers: loader processes; -1: chosen by the device.

    Attributes:
        peak_mb: MB that its steps took at most (see `device_memory.Memory`); NaN where it cannot be told.
    """

    def __init__(self, workload: Workload, precision: str, num_workers: int) -> None:
        self.job, self.peak_mb = (workload, precision, num_workers, torch.get_num_threads()), float("nan")
        self.pipe, self.process, self.waits = None, None, False

    def __enter__(self) -> "Stretch":
        context = multiprocessing.get_context("spawn")  # a forked one could not use CUDA
        self.pipe, theirs = context.Pipe()
        # Not a daemon, which may have no processes: it has those of the loader.
        self.process = context.Process(target=_serve, args=(theirs,), daemon=False, name="rsnakit-stretch")
        try:
            self.process.start()
        finally:
            theirs.close()  # so that this end hears when the process is gone
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends it in whatever state it is, and its loader's workers with it."""
        if self.process is None or self.process.pid is None:
            return
        self.pipe.close()
        self.process.join(END_S if self.waits else 0)  # it ends by itself where it waits for the next round
        if self.process.is_alive():
            aside.end(self.process)
        self.process = None

    def begin(self, limit_s: float) -> float:
        """Builds the training and takes the first steps; gives the seconds that this took.

        Raises:
            StretchError: it failed, or was not done in time.
        """
        begun = time.monotonic()
        self._ask(self.job, limit_s)
        return time.monotonic() - begun

    def round(self, seconds: float, limit_s: float = 600) -> float:
        """Images (or breasts) a second over a round of at least so many seconds, in whole optimiser steps.

        Raises:
            StretchError: it failed, or was not done in time.
        """
        images, taken, self.peak_mb = self._ask(seconds, limit_s)
        return images / taken

    def _ask(self, request: Any, limit_s: float) -> Any:
        self.waits = False
        with contextlib.suppress(OSError):  # it is gone, which `wait` sees
            self.pipe.send(request)
        ready = connection.wait([self.pipe, self.process.sentinel], max(0.0, limit_s))
        if not ready:
            raise StretchError(f"it was not done after {limit_s:.0f} s, and was ended")
        try:
            failed, answer = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(END_S)
            raise StretchError(aside.how_it_ended(self.process.exitcode or 0)) from None
        self.waits = True
        if failed:
            raise StretchError(answer)
        return answer


def best_of(
    jobs: Sequence[tuple[Workload, str, int]], left: Callable[[], float], stretch: Callable[..., Stretch] = Stretch
) -> tuple[list[Measured], int | None]:
    """Trainings against each other: each takes turns with the best one before it, and has to beat that.

    Where two have no room beside each other they are measured one after the other.

    Args:
        jobs: arguments of `Stretch`; the first is the one that stays if no other is faster.
        left: gives the seconds that are left for all of it.

    Returns:
        Of each what its last rounds gave, or why there are none; and the number of the best one, None where none was measured.
    """
    found, best, champion = [Measured(error=NO_TIME) for _ in jobs], None, None
    with contextlib.ExitStack() as running:  # all of them end with it, whatever is raised
        for place, job in enumerate(jobs):
            if left() < LEAST_S:
                break
            end = time.monotonic() + left() / (len(jobs) - place)
            challenger, error = _begun(running, stretch, job, left())
            if champion is not None and USED_UP in error:  # alone it may have
                if not found[best].images_s:
                    (found[best],) = _rounds([champion], (end - time.monotonic()) / 2)
                champion.close()
                champion = None
                challenger, error = _begun(running, stretch, job, left())
            if error:
                found[place] = Measured(error=error)
            elif best is None and place < len(jobs) - 1:  # it waits for the next one, to take turns with
                best, champion = place, challenger
            else:
                runners = [champion, challenger] if champion is not None else [challenger]
                *others, found[place] = _rounds(runners, end - time.monotonic())
                if others:
                    found[best] = others[0]
                if best is None or beats(found[place].images_s, found[best].images_s, in_turn=bool(others)):
                    best, champion, challenger = place, challenger, champion
                if challenger is not None:
                    challenger.close()
        if champion is not None and found[best].error == NO_TIME:  # it had nobody to take turns with
            (found[best],) = _rounds([champion], left())
    return found, best if best is not None and found[best].images_s else None


def _begun(
    running: contextlib.ExitStack, stretch: Callable[..., Stretch], job: tuple, limit_s: float
) -> tuple[Stretch | None, str]:
    """A training that has begun, or why it has not."""
    runner = running.enter_context(stretch(*job))
    try:
        runner.begin(limit_s)
    except StretchError as error:
        runner.close()
        return None, str(error)
    return runner, ""


def _rounds(runners: Sequence[Stretch], seconds: float) -> list[Measured]:
    """Rounds of trainings in turn, as many as there is time for; a training that fails in them has failed."""
    end, rates = time.monotonic() + seconds, [[] for _ in runners]
    length = min(MOST_S, max(LEAST_S, seconds / (ROUNDS * len(runners))))
    errors = [""] * len(runners)
    for turn in range(ROUNDS):
        if turn and time.monotonic() + length * len(runners) > end + length / 2:
            break
        order = range(len(runners))
        for place in order if turn % 2 == 0 else reversed(order):
            if not errors[place]:
                try:
                    rates[place].append(runners[place].round(length, max(60.0, 2 * seconds)))
                except StretchError as error:
                    errors[place] = str(error)
    return [
        Measured((), error=error) if error else Measured(tuple(rate), peak_mb=runner.peak_mb)
        for runner, rate, error in zip(runners, rates, errors, strict=True)
    ]


class _Pace:
    """What is done after each optimiser step: rounds are timed, and the next one is waited for.

    Args:
        drained: steps at the beginning of a round that are not timed, in which what the loader's workers loaded while they
            waited is used up.
    """

    def __init__(
        self, pipe: connection.Connection, trainer: Trainer, memory: device_memory.Memory, drained: int
    ) -> None:
        self.pipe, self.trainer, self.memory, self.drained = pipe, trainer, memory, drained
        self.left, self.seconds = WARM, 0.0  # untimed steps, then a round; the first has no length
        self.begun, self.images = None, 0

    def __call__(self) -> None:
        if self.begun is not None:
            self.images += sum(self.trainer.sampler.steps[self.trainer.done - 1])
        elif self.left > 0:
            self.left -= 1
        if self.begun is None and not self.left:
            self._start()
        if self.begun is not None and time.perf_counter() - self.begun >= self.seconds:
            synchronize(self.trainer.device)
            self.pipe.send((False, (self.images, time.perf_counter() - self.begun, self.memory.peak_mb())))
            self.seconds = self.pipe.recv()
            self.begun, self.left = None, self.drained
            if not self.left:
                self._start()

    def _start(self) -> None:
        synchronize(self.trainer.device)
        self.begun, self.images = time.perf_counter(), 0


def _serve(pipe: connection.Connection) -> None:
    """What the process does: trains, until the other end is gone."""
    aside.settle()
    with contextlib.suppress(EOFError, OSError):
        job = pipe.recv()
        try:
            _train(pipe, *job)
        except (EOFError, BrokenPipeError):
            return
        except Exception as error:  # whatever torch, a compiler, a driver or a loader raises
            pipe.send((True, why(error)))


def _train(pipe: connection.Connection, workload: Workload, precision: str, num_workers: int, threads: int) -> None:
    torch.set_num_threads(threads)
    memory = device_memory.Memory(workload.device, workload.loop.compile)
    trainer = Trainer(
        workload.images, Store(workload.store), workload.model, workload.train, workload.loop, workload.device, precision,
        num_workers, workload.fold, {}, None,
    )  # fmt: skip
    workers, batches = trainer.train_loader.num_workers, max(1, len(trainer.sampler.steps[0]))
    pace = _Pace(pipe, trainer, memory, -(-AHEAD * workers // batches))
    while True:
        trainer.train("", pace)
        trainer.end_epoch()
        # Beyond its schedule it would go on with a rate of nothing.
        if trainer.epoch >= workload.train.epochs:
            trainer.epoch, trainer.updates = 0, 0
