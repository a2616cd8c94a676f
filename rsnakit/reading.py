"""Files as prepared images, read by processes of which each has one file at a time: whatever a file does, it does to itself.

torch's loader has one pipe for all its processes, and a process that dies may leave it locked; it hands out whole batches, so
that nobody knows over which file a process died or hangs; and it passes images through /dev/shm, which is 64 MB in many
containers. Here each process has a pipe of its own, and nothing goes through /dev/shm.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import connection
from pathlib import Path

import cv2
import numpy as np

from rsnakit.prepare import status_of
from rsnakit.workers import ProcessDied

HUNG_S = 120  # a file that is not read by then hangs; real ones take a second
IN_HAND = 2  # files that a process has been given: the one it reads, and the next
TICK_S = 5  # how often, at most, it is looked whether one hangs


class Files:
    """Files as prepared images; one that cannot be read is an item too, of zeros, with its reason.

    Args:
        paths: the files.
        read: a file's image, (height, width) uint16; whatever it raises costs that file.
        shape: (height, width).
    """

    def __init__(self, paths: Sequence[Path | str], read: Callable, shape: tuple[int, int]) -> None:
        self.paths, self.read, self.shape = [str(path) for path in paths], read, tuple(shape)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, item: int) -> dict:
        """`image` (height, width) uint16, `status` (`ok`, `blank` or `failed`), `reason` and `seconds` of a file."""
        begun = time.perf_counter()
        try:
            image = self.read(self.paths[item])
            if image.shape != self.shape or image.dtype != np.uint16:
                raise ValueError(f"{self.paths[item]}: {image.shape} {image.dtype}, expected {self.shape} uint16")
        except Exception as error:  # whatever one image does, the others must get their rows
            return self.failed(error, time.perf_counter() - begun)
        return {"image": image, "status": "ok", "reason": "", "seconds": time.perf_counter() - begun}

    def failed(self, error: Exception, seconds: float = 0.0) -> dict:
        """What stands for a file that cannot be read."""
        status, reason = status_of(error)
        return {"image": np.zeros(self.shape, np.uint16), "status": status, "reason": reason, "seconds": seconds}


def over_files(
    files: Files, items: Iterable[int], n_jobs: int, stop: Callable[[], bool] = lambda: False
) -> Iterator[tuple[int, dict | ProcessDied] | None]:
    """Yields (item, what `files` has there), as they are done; a `ProcessDied` for a file over which a process died, or that
    was not read within `HUNG_S`. Such a process is replaced, and what else it had been given is read by others. None comes
    every few seconds while no file is done.

    Nothing is read but while it is asked for the next, and for the `IN_HAND` files of each process; so a consumer that is
    slow finds no more than these waiting for it. Where the system allows fewer processes, it says so and goes on with those.

    Args:
        n_jobs: processes; 0 reads in this one, where a crash is nobody's to catch.
        stop: asked before each file, and every few seconds while none is done; it ends where this says True.
    """
    waiting, readers = deque(items), []
    try:
        while (waiting or any(reader.items for reader in readers)) and not stop():
            n_jobs = _begin(files, readers, min(n_jobs, len(readers) + len(waiting)), n_jobs)
            _hand_out(waiting, readers)
            if not readers:
                item = waiting.popleft()
                yield item, files[item]
            ready = _ready(readers)
            if readers and not ready:
                yield None
            for reader in ready:
                try:
                    found = reader.take()
                except (EOFError, OSError):
                    readers.remove(reader)
                    found = reader.lost(waiting, f"was killed ({reader.end(wait_s=1)})")
                else:
                    _hand_out(waiting, [reader])  # before whoever asked has it: that may take a while
                if found:
                    yield found
            for reader in [reader for reader in readers if reader.hangs()]:
                readers.remove(reader)
                reader.end()
                yield reader.lost(waiting, f"was not done after {HUNG_S:g} s")
    finally:
        for reader in readers:
            reader.end()


def _begin(files: Files, readers: list["_Reader"], useful: int, n_jobs: int) -> int:
    """Starts processes up to the useful number, and says how many may be asked for from here on."""
    try:
        while len(readers) < useful:
            readers.append(_Reader(files))
    except OSError as error:  # no process, no memory, or no pipe to be had
        n_jobs = len(readers)
        print(
            f"NOTE: images are read by {n_jobs or 'this'} process{'es' * (n_jobs > 1)}; no more are to be had ({error})"
        )
    return n_jobs


def _hand_out(waiting: deque[int], readers: list["_Reader"]) -> None:
    """Gives each process something to read before any gets a second file."""
    for number in range(1, IN_HAND + 1):
        for reader in readers:
            if waiting and len(reader.items) < number:
                reader.give(waiting.popleft())


def _ready(readers: list["_Reader"]) -> list["_Reader"]:
    """Those that have something to say; [] where none has for some seconds."""
    if not readers:
        return []
    ready = connection.wait([reader.pipe for reader in readers], min(TICK_S, HUNG_S / 4))
    return [reader for reader in readers if reader.pipe in ready]


class _Reader:
    """A process that reads one file after another, and what it was given to read."""

    def __init__(self, files: Files) -> None:
        # Forked, where that is safe: it takes milliseconds, and the function that reads may be a notebook's.
        context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
        self.shape, self.items, self.since = files.shape, deque(), time.monotonic()
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.pipe, files), daemon=True)
        try:
            self.process.start()
        except OSError:
            self.pipe.close()
            raise
        finally:
            theirs.close()  # so that this end hears when the process is gone

    def give(self, item: int) -> None:
        """A file to read; a process that died meanwhile says so when it is asked for its results."""
        self.since = self.since if self.items else time.monotonic()
        self.items.append(item)
        with contextlib.suppress(OSError):
            self.pipe.send(item)

    def take(self) -> tuple[int, dict]:
        """The file that it has read; EOFError or OSError where it is gone."""
        sample = self.pipe.recv()
        sample["image"] = np.zeros(self.shape, np.uint16)
        if sample["status"] == "ok":
            self.pipe.recv_bytes_into(sample["image"].reshape(-1))
        self.since = time.monotonic()
        return self.items.popleft(), sample

    def hangs(self) -> bool:
        # What waits in the pipe is done: it is this process that did not come for it.
        return bool(self.items) and time.monotonic() - self.since > HUNG_S and not self.pipe.poll()

    def lost(self, waiting: deque[int], why: str) -> tuple[int, ProcessDied] | None:
        """Gives back what it has not begun; the file it was at is blamed. None where it had nothing to do."""
        waiting.extendleft(list(self.items)[:0:-1])
        return (self.items[0], ProcessDied(f"the process that read it {why}")) if self.items else None

    def end(self, wait_s: float = 0.0) -> str:
        """Ends the process, in whatever state it is, and says how it ended; one that is at its end gets `wait_s` for it."""
        self.pipe.close()
        self.process.join(wait_s)
        self.process.kill()
        self.process.join(10)
        code = self.process.exitcode
        with contextlib.suppress(ValueError):  # no signal's number
            return signal.Signals(-(code or 0)).name
        return f"exit code {code}"


def _serve(pipe: connection.Connection, parents: connection.Connection, files: Files) -> None:
    """Reads the files whose numbers come, until the other end is gone."""
    parents.close()  # or this process would never hear that its parent is gone
    cv2.setNumThreads(0)  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C, which reaches every process, is the parent's to answer
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(AttributeError, OSError):  # not on Windows
        os.setpgid(0, 0)  # and what goes to the parent's whole group is for it alone
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        while True:
            sample = files[pipe.recv()]
            image = sample.pop("image")
            pipe.send(sample)
            if sample["status"] == "ok":
                pipe.send_bytes(np.ascontiguousarray(image))


def _end_with(parent: int) -> None:
    """Ends this process once its parent is gone: one that hangs over a file would not hear it from the pipe."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
