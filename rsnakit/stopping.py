"""Being asked to stop: by a signal, by Ctrl-C, by the clock."""

import contextlib
import math
import os
import signal
import sys
import threading
import time
from types import FrameType

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Stop:
    """Whether a loop should save and end: `with Stop(deadline) as stop: ... if stop.asked(): ...`.

    Inside, SIGTERM and Ctrl-C are noted instead of ending the process, so that a step or a file is finished; a second
    Ctrl-C raises KeyboardInterrupt at once. On leaving, the handlers that were there are put back, and a SIGTERM is sent
    again, for them: what was told to end ends, with the exit status that its parent expects. Put it around whatever has to
    be tidied up (a lock), not within.

    One within another has heard what the outer one has heard, and hands on what it hears.

    Signals are noted in a process's main thread only, which alone may set handlers, and only in the process that made the
    object: in a forked child they do what they did before. One that was ignored (`nohup`) stays ignored.

    Args:
        deadline: in seconds of `time.monotonic`.
    """

    def __init__(self, deadline: float = math.inf) -> None:
        self.deadline = deadline
        self._caught: list[int] = []
        self._before: dict[int, object] = {}
        self._outer: Stop | None = None

    def __enter__(self) -> "Stop":
        self._caught, self._before, self._pid, self._leaving = [], {}, os.getpid(), None
        if threading.current_thread() is threading.main_thread():
            for number in NAMES:
                before = signal.getsignal(number)
                if before not in (signal.SIG_IGN, None):  # None: set by other than Python, which could not put it back
                    self._before[number] = before
                    signal.signal(number, self._handle)
        self._outer = next((found for found in map(_stop_of, self._before.values()) if found), None)
        return self

    def __exit__(self, *_: object) -> None:
        if os.getpid() != self._pid:
            return  # a forked child that unwinds
        self._leaving = len(self._caught)  # from here on a signal is noted whatever it is, and sent again below
        # SIGTERM first: once Ctrl-C raises again, nothing of this may be left to do. All of it is done whatever is raised.
        with contextlib.ExitStack() as last_first:
            last_first.callback(self._send_again)
            for number, handler in self._before.items():
                last_first.callback(signal.signal, number, handler)

    def _send_again(self) -> None:
        """An outer Stop hears of all; other handlers of Ctrl-C only where it came while leaving, when nobody could see it."""
        for place, number in enumerate(self._caught):
            before = self._before[number]
            if number == signal.SIGTERM or place >= self._leaving or _stop_of(before):
                if before is signal.SIG_DFL:
                    _flush()  # the process ends on the spot, and what it has just printed would be lost
                signal.raise_signal(number)

    @property
    def reason(self) -> str:
        """`SIGTERM` or `Ctrl-C`, whichever came first, `max_hours` once the deadline has passed, else an empty string."""
        if heard := self._heard():
            return NAMES[heard[0]]
        return "max_hours" if time.monotonic() > self.deadline else ""

    def asked(self) -> bool:
        return bool(self.reason)

    def _heard(self) -> list[int]:
        return [*(self._outer._heard() if self._outer else []), *self._caught]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            self._as_before(number, frame)
        elif number == signal.SIGINT and number in self._heard() and self._leaving is None:
            raise KeyboardInterrupt
        else:
            self._caught.append(number)

    def _as_before(self, number: int, frame: FrameType | None) -> None:
        before = self._before[number]
        if callable(before):
            before(number, frame)
        else:
            signal.signal(number, before)
            signal.raise_signal(number)


def _stop_of(handler: object) -> Stop | None:
    """The one whose handler it is."""
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, Stop) else None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, a broken pipe, or none
            stream.flush()
