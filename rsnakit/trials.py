"""Trials of one setting on this machine: time and memory of a training step, what ran out, in a process that may die.

What one setting does (a crash in a compiler, memory that runs out, a step that never ends) costs that setting alone: the next
is tried in a new process. What is tried there stands in `measuring`.
"""

import contextlib
import dataclasses
import gc
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any, NamedTuple

import cv2
import torch

from rsnakit import aside, device_memory, env, measuring
from rsnakit.measuring import Measured, Setting, Workload

__all__ = ["Batches", "Measured", "Setting", "Trials", "Workload"]

START_S = 180  # a process has imported torch and read its images by then
SOFT = 0.9  # of a limit: no round begins after that
SAID = 200  # characters of the last line that a process said
BAR = "batch/s"  # in a line that is a progress bar's


@dataclasses.dataclass
class Batches:
    """What `Trials.largest_batch` found.

    Attributes:
        largest: the largest batch that fits; 0 where not even one image does, or nothing was found out.
        tried: for each batch size, in the order of trying, `batch`, `fits`, `images_s`, `peak_mb` and `why` it does not fit.
        ended: what set the end: `memory`, `most`, `time`, or `error`: one that a smaller batch would not help, which is the
            `why` of the last.
    """

    largest: int = 0
    tried: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    ended: str = "time"


class Trials:
    """Trials of settings on a device, as a context manager: `with Trials(workload) as trials: trials.step(setting)`.

    The process in which steps run is started when it is first needed, which takes seconds, and again when it died, hung or
    was stopped at its limit; it ends with the context, and with this process, however that ends. A script needs the usual
    `if __name__ == "__main__":`, a notebook nothing.

    Nothing is written to a run's folder or to the store.

    Args:
        workload: what is trained.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._worker: _Worker | None = None
        self._refusal = ""  # why the workload cannot be trained at all

    def __enter__(self) -> "Trials":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process, whatever it is at; the next trial starts another."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def step(self, setting: Setting, rounds: int = 5, limit_s: float = 120) -> Measured:
        """Times the training step at one setting.

        Args:
            rounds: each takes a fifth of a second, or a step where that is longer.
            limit_s: seconds after which no more rounds are begun, and the process is ended soon after; its start is not
                counted.

        Returns:
            With an `error` where it could not be done.
        """
        return self.in_turn([setting], rounds, limit_s)[0]

    def in_turn(self, settings: Sequence[Setting], rounds: int = 5, limit_s: float = 120) -> list[Measured]:
        """Times the training step at several settings, which take turns: what else the machine does meets all of them.

        All models are alive at once. A setting that memory runs out for is tried again alone. One that is not ready after
        half of the time that is left, while others wait, is given up.

        Args:
            rounds: as in `step`; so many for each.
            limit_s: for all of them together. Where it does not suffice there are fewer rounds, the first ones of which each
                setting has had by itself.

        Returns:
            For each setting, with an `error` where it could not be done.
        """
        found, end = self._tried(settings, rounds, time.monotonic() + limit_s)
        for place, each in enumerate(found):
            if each.no_room and len(settings) > 1:
                (found[place],), end = self._tried([settings[place]], rounds, end)
        return [each.measured for each in found]

    def largest_batch(
        self, setting: Setting, most: int = 4096, memory_gb: float | None = None, limit_s: float = 120
    ) -> Batches:
        """The largest batch that a step can be taken with: doubled from the asked size, then bisected.

        Each size is tried by steps at that very shape, of a model of its own; where the setting compiles, each is compiled.

        Args:
            setting: `batch_size` is tried first.
            most: larger ones are not tried.
            memory_gb: GB (10 ** 9 bytes) that may be used beyond what is taken before the model is made; None: what the device
                has left, of a CPU's memory less a reserve.
            limit_s: for all sizes together.

        Raises:
            ValueError: `most` or `memory_gb` is not positive, or this device's memory cannot be limited.
        """
        if most < 1 or not (memory_gb is None or memory_gb > 0):
            raise ValueError(f"most={most} and memory_gb={memory_gb}: expected positive numbers")
        kind = device_memory.device_type(self.workload.device)
        if memory_gb is not None and not (kind == "cuda" or (kind == "cpu" and sys.platform == "linux")):
            raise ValueError(f"memory_gb={memory_gb}: the memory of {kind} cannot be limited on {sys.platform}")
        batches, end, lacking = Batches(), time.monotonic() + limit_s, None
        size = min(max(1, setting.batch_size), most)
        while True:
            one = dataclasses.replace(setting, batch_size=size)
            # A library that gets no memory on a CPU may crash.
            (found,), end = self._tried([one], 0, end, memory_gb, crash_is_room=kind == "cpu")
            if found.no_time:
                return batches
            measured = found.measured
            batches.tried.append({
                "batch": size, "fits": not measured.error, "images_s": measured.median, "peak_mb": measured.peak_mb,
                "why": measured.error,
            })  # fmt: skip
            if measured.error and not found.no_room:
                batches.ended = "error"
                return batches
            if measured.error:
                lacking = size
            else:
                batches.largest = size
            if batches.largest == most or (lacking is not None and lacking - batches.largest == 1):
                batches.ended = "most" if batches.largest == most else "memory"
                return batches
            size = min(2 * size, most) if lacking is None else (batches.largest + lacking) // 2

    def _tried(
        self, settings: Sequence[Setting], rounds: int, end: float, memory_gb: float | None = None, crash_is_room=False
    ) -> tuple[list["_Found"], float]:
        """What settings gave, in as many processes as it takes; and the end, later by the time that these took to start."""
        found: dict[int, _Found] = {}
        todo = list(range(len(settings)))
        while todo:
            begun = time.monotonic()
            try:
                worker = self._ready_worker()
            except _Died as died:
                return [_Found(Measured(error=str(died)))] * len(settings), end
            end += time.monotonic() - begun
            answer = _Answer(todo, crash_is_room)
            try:
                answer.take(worker, [settings[place] for place in todo], rounds, memory_gb, end)
            except _Died as died:
                if not died.replaced:
                    self.close()
                answer.blame(died)
            except BaseException:  # Ctrl-C
                self.close()
                raise
            found |= answer.found
            failed = [place for place in todo if place in found and found[place].measured.error]
            if answer.whole or not failed or time.monotonic() > end:
                break
            todo = [place for place in todo if place not in failed]  # begun again: their process is gone
        late = _Found(Measured(error="no time was left for it"), no_time=True)
        return [found.get(place, late) for place in range(len(settings))], end

    def _ready_worker(self) -> "_Worker":
        if self._worker is not None and not self._worker.process.is_alive():
            self.close()
        if self._refusal:
            raise _Died(self._refusal)
        if self._worker is None:
            # What this process has let go of but keeps for itself, as torch does with a GPU's memory, is wanted over there.
            device_memory.give_back(self.workload.device)
            self._worker = _Worker()
            try:
                self._refusal = self._worker.begin(self.workload)
            except BaseException:
                self.close()
                raise
            if self._refusal:
                self.close()
                raise _Died(self._refusal)
        return self._worker


class _Found(NamedTuple):
    """What a setting gave, and whether memory or time was too little for it."""

    measured: Measured
    no_room: bool = False
    no_time: bool = False


class _Died(Exception):
    """The process is gone, or as good as gone: how, the number of the signal that ended it, whether it was not done in time,
    and whether another stands ready already."""

    def __init__(self, how: str, number: int = 0, late: bool = False, replaced: bool = False) -> None:
        super().__init__(how)
        self.number, self.late, self.replaced = number, late, replaced


class _Answer:
    """What a process says of settings, the numbers of which are `places`, until it is done or gone."""

    def __init__(self, places: list[int], crash_is_room: bool) -> None:
        self.places, self.crash_is_room = places, crash_is_room
        self.found: dict[int, _Found] = {}
        self.at, self.whole = None, False

    def take(
        self, worker: "_Worker", settings: Sequence[Setting], rounds: int, memory_gb: float | None, end: float
    ) -> None:
        worker.send((settings, rounds, memory_gb, SOFT * (end - time.monotonic())))
        until = end
        while True:
            name, number, value = worker.take(until)
            place = self.places[number] if number is not None else None
            if name == "at":
                self.at, now = place, time.monotonic()
                others_wait = value and number < len(settings) - 1
                until = now + (end - now) / 2 if others_wait else end
            elif name == "measured":
                self.found[place] = _Found(value)
            elif name == "failed":
                self.found[place] = _Found(Measured(error=value[0]), no_room=value[1])
            elif name == "gone":
                raise worker.how_it_ended(value, replaced=True)
            else:
                self.whole = True
                return

    def blame(self, died: _Died) -> None:
        """Notes the end of the process with the setting that it was at."""
        for place in self.places if self.at is None else [self.at]:
            known = self.found.get(place)
            if known and (known.measured.error or died.late):  # it had failed before, or has been timed once
                continue
            killed = died.number == aside.KILL
            no_room = killed or (self.crash_is_room and died.number != 0)
            self.found[place] = _Found(Measured(error=str(died)), no_room, died.late)


class _Worker:
    """The process, and this end of what is between it and this one."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # a forked one could not use CUDA
        self.pipe, theirs = context.Pipe()
        number, self.log = tempfile.mkstemp(prefix="rsnakit-", suffix=".log")
        self.said = open(number, encoding="utf-8", errors="replace")  # noqa: SIM115 - until `end`
        arguments = theirs, self.log, torch.get_num_threads()
        self.process = context.Process(target=_serve, args=arguments, daemon=True, name="rsnakit-trials")
        try:
            self.process.start()
        finally:
            theirs.close()  # so that this end hears when the process is gone

    def begin(self, workload: Workload) -> str:
        """Has it get ready; why it cannot be for this workload, or nothing."""
        self.send(workload)
        name, _, value = self.take(time.monotonic() + START_S)
        return value if name == "refused" else ""

    def send(self, request: Any) -> None:
        try:
            self.pipe.send(request)
        except OSError:
            raise self._gone() from None

    def take(self, until: float) -> tuple[str, int | None, Any]:
        begun = time.monotonic()
        ready = connection.wait([self.pipe, self.process.sentinel], max(0.0, until - begun))
        if not ready:
            raise _Died(f"it was not done after {max(0.0, until - begun):.0f} s, and was ended", late=True)
        try:
            if self.pipe.poll():
                return self.pipe.recv()
        except (EOFError, OSError):
            pass
        raise self._gone()

    def _gone(self) -> _Died:
        self.process.join(5)
        return self.how_it_ended(self.process.exitcode or 0)

    def how_it_ended(self, code: int, replaced: bool = False) -> _Died:
        """In a sentence, with the last that it said.

        Args:
            code: its exit code, as `subprocess` has it.
        """
        self.said.seek(0)
        said = [line for line in self.said.read().splitlines() if line.strip()]
        last = said[-1].strip()[:SAID] if said and BAR not in said[-1] else ""
        return _Died(aside.how_it_ended(code, last), max(0, -code), replaced=replaced)

    def end(self) -> None:
        """Ends it in whatever state it is, and what it started with it."""
        self.pipe.close()
        aside.end(self.process)
        self.said.close()
        with contextlib.suppress(OSError):  # it has done so itself
            os.unlink(self.log)


def _serve(pipe: connection.Connection, log: str, threads: int) -> None:
    """What the process does: gets ready for a workload, then answers requests until the other end is gone."""
    aside.settle(log)
    torch.set_num_threads(1)  # a pool of threads would not outlive the fork
    cv2.setNumThreads(0)
    with contextlib.suppress(EOFError, OSError):
        workload = pipe.recv()
        try:
            samples = measuring.Samples(workload)
        except Exception as error:  # whatever a table or a store does
            pipe.send(("refused", None, device_memory.in_words(error)))
            return
        gc.collect()
        gc.freeze()  # what is imported by now need not be looked through again and again, nor copied into each child for it
        pipe.send(("ready", None, None))
        while True:
            request = pipe.recv()
            if workload.device != "cpu" or sys.platform != "linux":
                _answer(pipe, workload, samples, threads, *request)
            elif number := _in_a_child(_answer, pipe, workload, samples, threads, *request):
                pipe.send(("gone", None, number))


def _in_a_child(function: Callable, *arguments: Any) -> int:
    """Calls a function in a forked process, and gives its exit code; minus the signal's number where one ended it.

    On a CPU so much stays behind when memory ran out (oneDNN makes no more code in that thread, freed memory is still counted)
    that a new process is the only way to begin at the beginning; and this is one that takes milliseconds. It is safe since
    this process has but one thread at work and has used no pool of them.
    """
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 1
    try:
        function(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(status)


def _answer(
    pipe: connection.Connection, workload: Workload, samples: measuring.Samples, threads: int,
    settings: Sequence[Setting], rounds: int, memory_gb: float | None, limit_s: float,
) -> None:  # fmt: skip
    """Says at which setting it is, and of each what it gave, again after each round, or why it failed."""
    end, device = time.monotonic() + limit_s, workload.device
    torch.set_num_threads(threads)
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)  # or locked memory would be another GPU's, and take some of it
    for mode in {setting.compile for setting in settings} & {"default", "max-autotune"}:
        env.choose_compile(
            device, mode
        )  # what it imports is no setting's; what it says is asked for again by the setting
    alive: dict[int, measuring.Training] = {}
    with device_memory.limited(device, memory_gb):
        for turn in range(rounds + 1):
            for place, setting in enumerate(settings):
                if turn and (place not in alive or time.monotonic() > end):
                    continue
                pipe.send(("at", place, turn == 0))
                try:
                    if turn:
                        alive[place].round()
                    else:
                        alive[place] = measuring.Training(workload, samples, setting)
                    pipe.send(("measured", place, alive[place].measured))
                except Exception as error:  # whatever torch, a compiler or a driver raises
                    alive.pop(place, None)
                    pipe.send(("failed", place, (device_memory.in_words(error), device_memory.lacks_room(error))))
                    device_memory.recover(error, device)
        alive.clear()
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # what was compiled for one setting must not decide how the next is
        device_memory.give_back(device)
    pipe.send(("end", None, None))
