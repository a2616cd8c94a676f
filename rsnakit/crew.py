"""Threads that score batches, each on its device: what one device or one image does costs no more than that device or image."""

import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from rsnakit.replica import Pass, Replica

AHEAD = 2  # batches for each thread that are under way: the one it is at, and the next
FIRST = 3  # batches of which not one image can be scored, after which an error is one of the code, not of images
SAID = 5  # batches with such images that are spoken of


class Lost(NamedTuple):
    """A device that works no more, the batch that it was at, and what it said."""

    place: Replica
    batch: dict
    error: Exception


class Crew:
    """Threads that score batches, each on its device.

    Where a batch raises, its device is tried with a black image. If that raises, too, the device is done without, and others
    get the batch; where none is left the spare ones begin. If it does not, the images are shown one by one, and those that
    raise again have NaN.

    Args:
        places: models on devices, a thread each; those that are lost are taken off this list.
        passes: asked in a thread when it begins a batch.
        spare: gives what goes on where no place is left; none: then the last device's error is raised.
        keep_going: errors of single images are never raised. Else they are where no image at all could be scored, of the
            first `FIRST` batches or of all.
    """

    def __init__(
        self,
        places: list[Replica],
        passes: Callable[[], Sequence[Pass]],
        spare: Callable[[], Sequence[Replica]] = tuple,
        keep_going: bool = False,
    ) -> None:
        self.todo, self.done = queue.SimpleQueue(), queue.SimpleQueue()
        self.places, self.passes, self.spare, self.keep_going = places, passes, spare, keep_going
        self.threads, self.working, self.under_way, self.stop = [], 0, 0, False
        self.scored, self.failed, self.error = 0, 0, None  # images that were, batches of which none was, and why
        self.torch_threads, self.said, self.shown = torch.get_num_threads(), 0, False

    def give(self, batch: dict) -> Iterator[tuple[dict, dict, float]]:
        """Hands out a batch, and yields what is done; it waits while there is no room for another batch."""
        if not self.threads:  # not sooner: the processes that read are forked by now
            self._begin(list(self.places))
            if not self.working:
                self._begin_spare(RuntimeError("no device is left that works"))
        self.todo.put(batch)
        self.under_way += 1
        while self.under_way >= AHEAD * self.working or not self.done.empty():
            yield from self._next()

    def rest(self) -> Iterator[tuple[dict, dict, float]]:
        while self.under_way:
            yield from self._next()
        if self.failed and not self.scored and not self.keep_going:
            raise self.error

    def end(self) -> None:
        self.stop = True
        for _ in self.threads:
            self.todo.put(None)
        for thread in self.threads:
            thread.join()
        torch.set_num_threads(self.torch_threads)

    def _begin(self, places: Sequence[Replica]) -> None:
        """Starts a thread for each place, or for as many as the system allows."""
        for place in places:
            thread = threading.Thread(target=self._work, args=(place,), daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if not self.working:
                    raise
                print(f"NOTE: models run in {self.working} of {len(places)} threads; no more are to be had ({error})")
                break
            self.threads.append(thread)
            self.working += 1

    def _next(self) -> Iterator[tuple[dict, dict, float]]:
        """Waits for a thread, and yields the batch that it has done, if it has."""
        found = self.done.get()
        if isinstance(found, BaseException):
            raise found
        if isinstance(found, Lost):
            self._do_without(found)
            return
        batch, errors = found[0], found[0].get("errors", {})
        self.under_way -= 1
        right = sum(status == "ok" for i, status in enumerate(_statuses(batch)) if i not in errors)
        self.scored, self.failed = self.scored + right, self.failed + (bool(errors) and not right)
        if self.failed >= FIRST and not self.scored and not self.keep_going:
            raise self.error
        if errors and self.said < SAID:
            self.said += 1
            print(f"NOTE: {len(errors)} of {len(batch['image'])} images of a batch: {next(iter(errors.values()))}")
            self._show(self.error)
        yield found

    def _do_without(self, lost: Lost) -> None:
        self.working -= 1
        if lost.place in self.places:
            self.places.remove(lost.place)
        if not self.working:
            self._begin_spare(lost.error)
        print(f"NOTE: {lost.place.device} fails, and is done without ({in_line(lost.error)})")
        self._show(lost.error)
        self.todo.put(lost.batch)

    def _begin_spare(self, error: Exception) -> None:
        """Lets the spare places begin, once; where there are none the error is raised."""
        spare, self.spare = self.spare(), tuple
        self._begin(spare)
        if not self.working:
            raise error

    def _work(self, place: Replica) -> None:
        try:
            if place.device.startswith("cpu"):
                torch.set_num_threads(1)
            while (batch := self.todo.get()) is not None and not self.stop:
                passes, begun = tuple(self.passes()), time.perf_counter()
                found = self._scored(place, batch, passes)
                if isinstance(found, Lost):
                    self.done.put(found)
                    return
                self.done.put((*found, time.perf_counter() - begun))
        except BaseException as error:  # the caller's thread raises it
            self.done.put(error)

    def _scored(self, place: Replica, batch: dict, passes: tuple[Pass, ...]) -> tuple[dict, dict] | Lost:
        """A batch, with `errors` where it has some, and its outputs."""
        images = batch["image"]
        outputs, error = _try(place, images, passes)
        if error is None:
            return batch, outputs
        black, lost = _try(place, np.zeros_like(images[:1]), passes)
        parts, errors = [], {}
        for i in range(len(images) if lost is None else 0):
            part, error = _try(place, images[i : i + 1], passes)
            if error is not None:
                errors[i] = f"the model failed: {in_line(error)}"
                part = {each: np.full_like(output, np.nan) for each, output in black.items()}
                black, lost = _try(place, np.zeros_like(images[:1]), passes)
                if lost is not None:
                    break
                self.error = error
            parts.append(part)
        if lost is not None:
            return Lost(place, batch, error or lost)
        whole = {each: np.concatenate([part[each] for part in parts]) for each in passes}
        if not errors:
            return batch, whole
        return {**batch, "errors": errors}, whole

    def _show(self, error: Exception) -> None:
        """The first error with all there is to it: what comes of it is told in a line."""
        if not self.shown:
            traceback.print_exception(error)
        self.shown = True


def in_line(error: BaseException) -> str:
    """An error as a line of no great length."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _try(place: Replica, images: np.ndarray, passes: Sequence[Pass]) -> tuple[dict | None, Exception | None]:
    """Outputs, or the error there was; it holds nothing of what filled a device's memory."""
    try:
        return place.score(images, passes), None
    except Exception as error:
        place.pinned = False  # locked memory is all devices' together, and the error of another may come up in it
        traceback.clear_frames(error.__traceback__)
        return None, error


def _statuses(batch: dict) -> Sequence[str]:
    return batch.get("status", ["ok"] * len(batch["image"]))
