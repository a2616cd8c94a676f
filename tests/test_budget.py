"""rsnakit.budget: the hours of a place, and a clock that is watched while it watches, in simulated time."""

import heapq
import math
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from rsnakit import budget
from rsnakit.budget import Clock

HOUR = 3600.0
LEVELS = [tuple(range(n)) for n in (16, 4, 3, 2, 1)]  # four folds, each flipped in four ways


# Hours


def test_hours_of_a_place(tmp_path):
    local, kaggle = {}, {"KAGGLE_KERNEL_RUN_TYPE": "Batch"}
    rerun = {**kaggle, "KAGGLE_IS_COMPETITION_RERUN": "1"}
    assert budget.hours(0, local, tmp_path).value == math.inf
    assert budget.hours(3, local, tmp_path).value == 3
    assert budget.hours(0, kaggle, tmp_path).value == 8.5
    assert budget.hours(11, kaggle, tmp_path).value == 11  # a session of one's own, that is no submission
    assert budget.hours(2, rerun, tmp_path).value == 2
    assert budget.hours(0, rerun, tmp_path).value == 8.5
    chosen = budget.hours(11, rerun, tmp_path)
    assert chosen.value == 8.5 and "max_hours is 11" in chosen.reason


def test_the_start_is_that_of_the_process():
    code = (
        "import time, sys; begun = time.monotonic(); time.sleep(0.5)\n"
        "from rsnakit import budget; print(budget.started() - begun)"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    said = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    # Ticks are hundredths; the interpreter came up in between, and nobody waited for the import.
    assert -5 < float(said.stdout) < 0.05


def test_without_proc_the_start_is_the_import(monkeypatch):
    monkeypatch.setattr(budget, "process_start", lambda pid: "unknown")
    assert budget.started() == budget._IMPORTED
    monkeypatch.setattr(
        budget, "process_start", lambda pid: str(10**12)
    )  # a /proc that says the process is yet to begin
    assert budget.started() == budget._IMPORTED


def test_the_deadline_counts_from_the_kernels_start_where_it_runs_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(budget, "started", lambda: time.monotonic() - HOUR)
    until, said = budget.deadline(0, {"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, tmp_path)
    assert until - time.monotonic() == pytest.approx(7.5 * HOUR, abs=5) and said.startswith(
        "8.5 h for inference (Kaggle"
    )
    for environ, max_hours in (
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, 0),
        ({}, 8.5),
    ):  # open since yesterday, perhaps
        until, _ = budget.deadline(max_hours, environ, tmp_path)
        assert until - time.monotonic() == pytest.approx(8.5 * HOUR, abs=5)
    assert budget.deadline(0, {}, tmp_path) == (math.inf, "")


# The clock


def always(value: float):
    return lambda image: value


@dataclass
class Machine:
    """A machine, in simulated time: processes decode ahead into a bounded queue, devices take batches from it.

    Attributes:
        decode, model: seconds of a process for an image, and of a device for a pass over it.
        late: further seconds of a device for its n-th batch.
        noise: of an image's seconds, as the deviation of their logarithm; their mean stays.
    """

    decode: object = always(2.0)
    model: object = always(0.05)
    processes: int = 4
    devices: int = 1
    late: dict = field(default_factory=dict)
    noise: float = 0.0
    ahead: int = 8  # batches

    def run(self, n_images: int, until: float, batch_size: int = 8):
        """What became of it: the clock, the second it ended, passes of all images, images that were never begun."""
        rng, now = random.Random(0), [0.0]
        clock = Clock(until, LEVELS, n_images, self.processes, self.devices, now=lambda: now[0])
        processes, devices, under_way = [0.0] * self.processes, [0.0] * self.devices, []
        begun, done_by, passes, left = [], [0] * self.devices, 0, 0

        def vary() -> float:
            return rng.lognormvariate(-(self.noise**2) / 2, self.noise)

        def hear(second: float) -> None:
            while under_way and under_way[0][0] <= second:
                now[0], *told = heapq.heappop(under_way)
                clock.told(*told)

        for number, first in enumerate(range(0, n_images, batch_size)):
            images = range(first, min(n_images, first + batch_size))
            room = begun[number - self.ahead] if number >= self.ahead else 0.0  # since then the queue has some
            decode_s = sum(self.decode(image) * vary() for image in images)
            decoded = max(heapq.heappop(processes), room) + decode_s
            heapq.heappush(processes, decoded)
            device = int(np.argmin(devices))
            second = max(decoded, devices[device])
            hear(second)
            now[0] = max(now[0], second)
            if clock.over():
                left = n_images - first
                break
            n_passes = len(clock.passes())
            model_s = sum(self.model(image) * n_passes * vary() for image in images)
            model_s += self.late.get(done_by[device], 0.0)
            begun.append(second)
            done_by[device] += 1
            passes += n_passes * len(images)
            devices[device] = second + model_s
            heapq.heappush(under_way, (second + model_s, len(images), n_passes, model_s, decode_s))
        hear(math.inf)
        return clock, now[0], passes, left

    def best(self, n_images: int, until: float) -> float:
        """Passes of all images that who knows every image's seconds beforehand could have, less the reserve.

        Each image takes what decoding or one pass takes; passes that fit beside decoding cost nothing, and what time is left
        goes to the cheapest of the others.
        """
        left, passes, dear = until - min(120.0, until / 10), 0.0, []
        for image in range(n_images):
            decode, model = self.decode(image) / self.processes, self.model(image) / self.devices
            left -= max(decode, model)
            free = min(16.0, max(1.0, decode / model))
            passes += free
            dear.append((model, 16.0 - free))
        assert left >= 0, "not even one pass fits"
        for seconds, more in sorted(dear):
            share = min(more, left / seconds)
            passes, left = passes + share, left - share * seconds
        return passes


N = 8_000
BUDGET = 8.5 * HOUR / 4  # as 32,000 images in 8.5 h
CHANGING = {
    "a slow machine": Machine(model=always(0.1)),
    "a slow machine, noise": Machine(model=always(0.1), noise=0.6),
    "a very slow machine": Machine(model=always(0.4), noise=0.3),
    "two slow GPUs": Machine(model=always(0.15), devices=2, noise=0.3),
    "becomes slow half way": Machine(model=lambda image: 0.04 if image < N / 2 else 0.12, noise=0.3),
    "becomes ten times slower": Machine(model=lambda image: 0.03 if image < N / 2 else 0.3, noise=0.3),
    "becomes twenty times slower, late": Machine(model=lambda image: 0.04 if image < 0.8 * N else 0.8, noise=0.3),
    "becomes fast half way": Machine(model=lambda image: 0.12 if image < N / 2 else 0.04, noise=0.3),
}


@pytest.mark.parametrize("name", CHANGING)
def test_all_images_are_done_in_time_by_about_as_many_passes_as_fit(name):
    """At least 0.7 of the passes of who knew all seconds beforehand; 0.8 where speed does not rise unforeseen."""
    machine = CHANGING[name]
    clock, ended, passes, left = machine.run(N, BUDGET)
    assert left == 0 and clock.done == N
    assert ended < BUDGET - clock.reserve
    assert clock.changes and clock.changes[0].level > 0
    assert passes >= (0.7 if "fast" in name else 0.8) * machine.best(N, BUDGET)
    assert len(clock.changes) < 10  # it does not go to and fro


STEADY = {
    "there is time": Machine(noise=0.3),
    "it takes long to begin": Machine(late={0: 600.0, 1: 60.0, 2: 20.0}),  # libraries, compilation, graphs
    "decoding is the limit": Machine(decode=always(3.6), model=always(0.03), noise=0.3),
    "decoding is the limit, and does not fit": Machine(decode=always(5.0), model=always(0.03), noise=0.3),
}


@pytest.mark.parametrize("name", STEADY)
def test_nothing_is_dropped_where_it_need_not_be_or_would_gain_nothing(name):
    clock, ended, passes, left = STEADY[name].run(N, BUDGET)
    assert clock.changes == [] and clock.level == 0
    assert (left > 0) == ("does not fit" in name)
    assert (
        passes == 16 * (N - left) if not left else passes > 15.9 * (N - left)
    )  # the last batch before the end has fewer
    assert ended < BUDGET


def test_an_outage_costs_passes_only_while_it_lasts():
    clock, ended, passes, left = Machine(late={500: 300.0}).run(N, BUDGET)
    assert left == 0 and ended < BUDGET
    assert [change.level for change in clock.changes][-1:] in ([], [0])
    assert passes >= 0.95 * 16 * N


def test_where_one_pass_does_not_fit_it_ends_in_time_with_what_it_has():
    machine = Machine(model=always(4.0), noise=0.3)
    clock, ended, _, left = machine.run(N, BUDGET)
    assert clock.level == len(LEVELS) - 1
    assert ended < BUDGET - clock.reserve and left > 0
    assert (
        N - left > 0.75 * BUDGET / 4.0
    )  # so many are all that anybody could do; each of the first batches takes 500 s


@pytest.mark.parametrize("batch_size", [1, 8, 64])
def test_a_short_time_for_few_images(batch_size):
    """As a rehearsal has it; batches may be a large part of it."""
    _, ended, *_ = Machine(decode=always(1.0), model=always(0.1), noise=0.3).run(400, 300.0, batch_size)
    assert ended < 300.0
    _, ended, *_ = Machine(decode=always(1.0), model=always(0.9), noise=0.3).run(64, 200.0, batch_size)
    assert ended < 200.0 or batch_size == 64  # one batch of 64 takes 920 s, and nobody knew


def test_a_change_says_after_how_many_images_and_why():
    clock, *_ = CHANGING["a very slow machine"].run(N, BUDGET)
    first = clock.changes[0]
    assert first.reason.startswith(
        f"after {first.done:,} of 8,000 images: 2 passes over each instead of 16, since the "
    )
    assert first.reason.endswith("and there are 2.0 h")


def test_decoding_on_the_cores_that_the_models_use_gains_by_fewer_passes():
    """A CPU alone: what is not spent on passes is there to decode with, even where the models wait for images."""
    now = [0.0]
    clock = Clock(1000.0, LEVELS, 1000, n_processes=2, cores=2, model_cores=1.0, now=lambda: now[0])
    while clock.done < 1000 and not clock.over():
        n = len(clock.passes())
        decode_s, model_s = 8 * 1.0, 8 * 0.1 * n  # core seconds of 8 images: (1.0 + 0.1 n) / 2 s an image on two cores
        now[0] += (decode_s + model_s) / 2
        clock.told(8, n, model_s, decode_s)
    assert clock.done == 1000 and now[0] < 1000  # by 16 passes each it would take 1,300 s, by 4 700 s
    assert clock.changes[0].level == 1


def test_without_a_deadline_nothing_is_dropped():
    clock, _, passes, left = Machine(model=always(10.0)).run(500, math.inf)
    assert left == 0 and passes == 16 * 500 and not clock.over()


def test_a_deadline_that_has_passed_begins_nothing():
    assert Clock(-1.0, LEVELS, 10, now=lambda: 0.0).over()


def test_batches_begun_before_a_change_are_not_taken_for_its_speed():
    now = [0.0]
    clock = Clock(1000.0, LEVELS, 4000, now=lambda: now[0])
    while not clock.changes:
        now[0] += 8 * 1.6
        clock.told(8, 16, 8 * 1.6, 0.0)
    before = clock.level
    now[0] += 12.8
    clock.told(8, 16, 12.8, 0.0)
    assert clock.level == before and len(clock.changes) == 1
