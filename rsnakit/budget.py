"""How long inference may take, and a clock that watches it: with which passes over an image the remaining ones still fit.

What is not known beforehand (how fast the disk, the decoder and the models are today) is measured as it goes.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rsnakit.device import Choice
from rsnakit.env import ROOT, Environ, is_rerun, where
from rsnakit.files import process_start

KAGGLE_HOURS = 8.5  # of the 9 that a submission may take: what comes before the first cell counts, too
RESERVE_S = 120.0  # kept for the end: breasts are classified, processes end, files are written
RESERVE_SHARE = 0.1  # of a short time, at most
MARGIN = 0.05  # what the remaining images may take longer than those just measured
ROOM = 0.93  # of the remaining time: passes are taken up again where they would take no more than this
GAIN = 0.02  # a level that saves less than this share of the time saves nothing
WINDOW = 256  # images at most that the measured speed is that of
WARM_UP = 3  # batches a device that are not measured: libraries are loaded, kernels chosen, models compiled
WARM_UP_SHARE = 0.1  # of the whole time, which that does not take: then such are the batches
# What a decision needs: half a window of images; of a slow machine fewer, once this share of the whole time has gone by.
ENOUGH = ((0.02, 3), (0.05, 1))  # shares, and batches
RECENT = 32  # batches, whose longest no other shall outlast at the end
QUEUE = 2  # batches that a device has been given, at most


def hours(max_hours: float, environ: Environ = None, root: Path = ROOT) -> Choice:
    """The hours that inference may take, infinite for no limit, and why.

    Args:
        max_hours: as given; 0 for as many as the place allows: `KAGGLE_HOURS` on Kaggle, without limit elsewhere. While
            Kaggle scores a submission it is never more than that.
    """
    environ = os.environ if environ is None else environ
    rerun = is_rerun(environ)
    if rerun and max_hours > KAGGLE_HOURS:
        return Choice(KAGGLE_HOURS, f"max_hours is {max_hours:g}, and a submission that is scored may take 9 in all")
    if max_hours:
        return Choice(float(max_hours), "max_hours, as given")
    if rerun or where(environ, root).name == "kaggle":
        return Choice(KAGGLE_HOURS, "Kaggle allows 9 for a submission")
    return Choice(math.inf, "no limit: max_hours is 0")


def started() -> float:
    """When this process, a notebook's kernel for one, was started, in seconds of `time.monotonic`.

    Where the system does not say it: when this module was imported.
    """
    try:
        ticks = int(process_start(os.getpid()) or "")
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (AttributeError, OSError, ValueError):  # no /proc (macOS)
        return _IMPORTED
    began = time.monotonic() - age
    return began if age >= 0 and began <= _IMPORTED else _IMPORTED  # a container may have a /proc of its own making


_IMPORTED = time.monotonic()


def deadline(max_hours: float, environ: Environ = None, root: Path = ROOT) -> tuple[float, str]:
    """When inference has to be done, in seconds of `time.monotonic`, and a sentence on it; "" where there is no limit.

    The time counts from this call. Where Kaggle runs the notebook as a whole it counts from the kernel's start; one that is
    open before a person may have been so for days.
    """
    environ = os.environ if environ is None else environ
    limit = hours(max_hours, environ, root)
    if limit.value == math.inf:
        return math.inf, ""
    whole = is_rerun(environ) or environ.get("KAGGLE_KERNEL_RUN_TYPE") == "Batch"
    begun = started() if whole else time.monotonic()
    return begun + limit.value * 3600, f"{in_words(limit.value * 3600)} for inference ({limit.reason})"


class Measured(NamedTuple):
    """One batch: when it was done, its images, passes over each, and the seconds that it took."""

    now: float
    images: int
    passes: int
    model_s: float
    decode_s: float


class Change(NamedTuple):
    """From which image on (counted as they were done) which level was used, and why."""

    done: int
    level: int
    reason: str


class Clock:
    """Says with which passes over an image to go on, so that all images are done in time by as many as possible.

    A level is left for a lower one where the images that remain would not fit by the speed just measured. Then the highest
    one that fits is taken; where none does, the one that does most images; never one that saves nothing, as where decoding
    is the limit. A higher level is taken up again where there is clearly room: an outage that is over need not cost passes
    to the end, and what a level leaves unused is not lost. It has to leave `ROOM`, and more room each time that it was left
    again, so that noise alone does not go to and fro.

    Args:
        until: the deadline, in seconds of `now`.
        levels: of passes, the first has most (see `ensemble.levels`).
        n_images: that are to be done.
        n_processes: that decode.
        n_devices: that run models.
        cores: of the machine.
        model_cores: that a device's models keep busy: 0 of a GPU, the threads of a CPU. What models take there, decoding
            lacks.
        now: the clock.
    """

    def __init__(
        self,
        until: float,
        levels: Sequence[Sequence],
        n_images: int,
        n_processes: int = 1,
        n_devices: int = 1,
        cores: int = 1,
        model_cores: float = 0.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.until, self.levels, self.n_images = until, [tuple(level) for level in levels], n_images
        self._processes, self._devices = max(1, n_processes), max(1, n_devices)
        self._cores, self._model_cores, self._now = max(1, cores), model_cores, now
        self._begun = now()
        self.reserve = min(RESERVE_S, RESERVE_SHARE * max(0.0, until - self._begun))
        self.level, self.done, self.changes = 0, 0, []
        self._warm_up, self._recent, self._each_pass = WARM_UP * self._devices, deque(maxlen=RECENT), 0.0
        self._room, self._raised = ROOM, False
        self._window = min(WINDOW, max(32, n_images // 16))
        self._measured: deque[Measured] = deque()
        self._since = self._begun  # what is measured now began then

    def passes(self) -> tuple:
        """With which to begin a batch now: the level's, or fewer where it would end too late. Any thread may ask."""
        left = self.until - self.reserve - self._now()
        fitting = (level for level in self.levels[self.level :] if self._each_pass * len(level) <= left)
        return next(fitting, self.levels[-1])

    def over(self) -> bool:
        """Whether no more batches should be handed out: of those that wait for a device the last would end too late."""
        waiting = QUEUE * self._each_pass * len(self.levels[-1])
        return self._now() + waiting > self.until - self.reserve

    def told(self, images: int, passes: int, model_s: float, decode_s: float) -> None:
        """Takes note of a batch, and decides on the level.

        Args:
            images: in it.
            passes: that each of them had.
            model_s: seconds that a device worked on it.
            decode_s: sum over its images of the seconds to decode one in its process.
        """
        now = self._now()
        self.done += images
        warm = self._warm_up <= 0 or now - self._begun > WARM_UP_SHARE * (self.until - self._begun)
        self._warm_up -= 1
        self._recent.append(model_s / passes)
        self._each_pass = max(self._recent) if warm else self._recent[-1]  # seconds of a whole batch
        if not warm or passes != len(self.levels[self.level]):  # the latter was begun before the last change
            self._since = now
            return
        self._measured.append(Measured(now, images, passes, model_s, decode_s))
        while self._images() - self._measured[0].images >= self._window:
            self._since = self._measured.popleft().now
        if self.until < math.inf and self._is_enough(now):
            self._decide(now)

    def _images(self) -> int:
        return sum(batch.images for batch in self._measured)

    def _is_enough(self, now: float) -> bool:
        waited, batches = (now - self._since) / (self.until - self._begun), len(self._measured)
        slow = any(waited > share and batches >= fewest for share, fewest in ENOUGH)
        return slow or (batches >= ENOUGH[0][1] and self._images() >= self._window / 2)

    def _decide(self, now: float) -> None:
        left, room = self.n_images - self.done, self.until - self.reserve - now
        if left <= 0:
            return
        each = self._seconds(now)  # an image, by level
        needed = [left * seconds * (1 + MARGIN) for seconds in each]
        if needed[self.level] > room:
            lower = range(self.level, len(self.levels))
            fastest = min(each[level] for level in lower)
            level = next((level for level in lower if needed[level] <= room), None)
            if level is None:
                level = next(level for level in lower if each[level] <= fastest * (1 + GAIN))
            if level > self.level:
                if self._raised:  # too early
                    self._room, self._raised = self._room * ROOM, False
                self._change(level, now, each, room)
        elif left >= self._window:  # with fewer there would be no time to find out that it was too early
            level = next((level for level in range(self.level) if needed[level] <= self._room * room), self.level)
            if level < self.level:
                self._raised = True
                self._change(level, now, each, room)

    def _change(self, level: int, now: float, each: list[float], room: float) -> None:
        have, use, left = len(self.levels[self.level]), len(self.levels[level]), self.n_images - self.done
        reason = (
            f"after {self.done:,} of {self.n_images:,} images: {use} pass{'es' * (use > 1)} over each instead of {have}, "
            f"since the {left:,} that remain would take {in_words(left * each[self.level])}, and there are {in_words(room)}"
        )
        self.changes.append(Change(self.done, level, reason))
        self.level = level
        self._measured.clear()
        self._since = now

    def _seconds(self, now: float) -> list[float]:
        """Seconds that an image takes at each level: as measured at this one, and at others by what would limit there."""
        images = self._images()
        decode = sum(batch.decode_s for batch in self._measured) / images
        model = sum(batch.model_s for batch in self._measured) / sum(
            batch.images * batch.passes for batch in self._measured
        )
        bounds = [self._bound(decode, model * len(level)) for level in self.levels]
        measured = (now - self._since) / images
        # Faster than what limits was only what had been decoded ahead; where decoding and models share cores that is rough.
        if not self._model_cores:
            measured = max(measured, bounds[self.level])
        return [measured * bound / bounds[self.level] if bounds[self.level] else measured for bound in bounds]

    def _bound(self, decode: float, model: float) -> float:
        """Seconds an image, of which one takes so many to decode and in the models."""
        on_cores = (decode + self._model_cores * model) / self._cores if self._model_cores else 0.0
        return max(decode / self._processes, model / self._devices, on_cores)


def in_words(seconds: float) -> str:
    """Hours, or seconds where it is less than one."""
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds:.0f} s"
