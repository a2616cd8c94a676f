"""A progress bar that a loop feeds, wherever it runs: a notebook, a terminal, a log file, a process that torchrun started.

A bar is drawn at most once a second, so that a long training does not fill a notebook or a log (`Bar.due` tells a loop
when a value is worth reading from the device). In a notebook all bars of a cell, one after another, are one widget.
"""

import contextlib
import json
import os
import sys
import time
from typing import Any

from tqdm.auto import tqdm

DRAW_S = 1.0  # between two drawings that a person watches
LOG_S = 30.0  # and between two that stay, as lines of a log
PATIENCE_S = 5.0
LAUNCHER = "RSNAKIT_LAUNCHER"  # set in processes that `distributed.launch` started: who did
MARK = "@rsnakit-bar "  # begins a line of such a process that is a bar's state, as JSON


class Bar:
    """A bar over a loop, as a context manager: `with bar(len(loader), "train") as progress: ... progress.update()`."""

    def __init__(self, total: int | None, description: str) -> None:
        self.total, self.description = total, description
        self.n = 0
        self._values: dict[str, str] = {}
        self._painter = _painter(total, description)
        self._draw_at = self._read_at = time.monotonic() + self._painter.every

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        self._painter.close(self.n, self._values)

    @property
    def due(self) -> bool:
        """Whether it is time for `show`: what it shows has to be read from the device only then."""
        return time.monotonic() >= self._read_at

    def show(self, **values: float | str) -> None:
        """Sets the values that stand beside the bar, numbers with three digits."""
        self._values = {
            name: value if isinstance(value, str) else f"{float(value):.3g}" for name, value in values.items()
        }
        now = time.monotonic()
        self._read_at = now + self._painter.every
        if now >= self._draw_at:
            self._draw(now)

    def update(self, n: int = 1) -> None:
        """Moves the bar on by n."""
        self.n += n
        now = time.monotonic()
        # A bar with values waits a while for the next ones, and is drawn with them.
        if now >= self._draw_at + (PATIENCE_S if self._values else 0.0):
            self._draw(now)

    def _draw(self, now: float) -> None:
        self._painter.draw(self.n, self._values)
        self._draw_at = now + self._painter.every


def bar(total: int | None, description: str) -> Bar:
    """A bar over `total` steps; None where their number is not known.

    In a process that torchrun started, the first one has a bar and the others show nothing; under `distributed.launch` it
    writes what the launching notebook draws (`Follower`).
    """
    return Bar(total, description)


class Follower:
    """Draws here the bars of another process, from the lines that it writes."""

    def __init__(self) -> None:
        self._bar: Bar | None = None

    def feed(self, line: str) -> None:
        """Takes a line: a bar's state moves the bar, what else it holds is printed."""
        text, mark, state = line.partition(MARK)
        if text or not mark:
            tqdm.write(text)
        if mark:
            with contextlib.suppress(ValueError):  # its writer was killed within the line
                self._move(json.loads(state))

    def _move(self, state: dict[str, Any]) -> None:
        of = state["total"], state["description"]
        if self._bar and ((self._bar.total, self._bar.description) != of or self._bar.n > state["n"]):
            self.close()
        if not self._bar:
            self._bar = Bar(*of)
        self._bar.update(state["n"] - self._bar.n)
        if state["values"]:
            self._bar.show(**state["values"])
        if state["closed"]:
            self.close()

    def close(self) -> None:
        """Ends the bar there is, if there is one."""
        if self._bar:
            self._bar.__exit__()
            self._bar = None


def _painter(total: int | None, description: str) -> Any:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if os.environ.get("RANK", "0") != "0":
            return _Nothing()
        if os.environ.get(LAUNCHER):
            return _Lines(total, description)
    return _Tqdm(total, description)


class _Nothing:
    """A bar that is not seen."""

    every = float("inf")

    def draw(self, n: int, values: dict[str, str]) -> None:
        pass

    def close(self, n: int, values: dict[str, str]) -> None:
        pass


class _Lines:
    """A bar as lines that a `Follower` in another process reads."""

    every = DRAW_S

    def __init__(self, total: int | None, description: str) -> None:
        self.of = {"total": total, "description": description}
        self.draw(0, {})

    def draw(self, n: int, values: dict[str, str], closed: bool = False) -> None:
        # In one piece: torchrun's processes write unbuffered, and share what they write to.
        sys.stdout.write(f"{MARK}{json.dumps({**self.of, 'n': n, 'values': values, 'closed': closed})}\n")
        sys.stdout.flush()

    def close(self, n: int, values: dict[str, str]) -> None:
        self.draw(n, values, closed=True)


class _Tqdm:
    """A bar of tqdm's; in a notebook a widget, which the bars of a cell hand on."""

    def __init__(self, total: int | None, description: str) -> None:
        cell = _cell()
        self.every = DRAW_S if cell is not None or sys.stderr.isatty() else LOG_S
        self.kept = bool(cell is not None and total and not _widget.get("taken"))
        if self.kept and _widget.get("cell") == cell:
            self.tqdm = _widget["tqdm"]
            self.tqdm.reset(total)
            self.tqdm.set_description(description)
            self.tqdm.set_postfix_str("", refresh=False)  # the last bar's values are not this one's
        else:  # not drawn of its own accord: `Bar` knows when
            self.tqdm = tqdm(total=total, desc=description, unit="batch", leave=self.kept, mininterval=0, miniters=1)
        if self.kept:
            _widget.update(cell=cell, tqdm=self.tqdm, taken=True)

    def draw(self, n: int, values: dict[str, str]) -> None:
        self.tqdm.set_postfix(values, refresh=False)
        self.tqdm.update(n - self.tqdm.n)

    def close(self, n: int, values: dict[str, str]) -> None:
        if not self.kept:
            self.tqdm.close()
            return
        self.draw(n, values)
        _widget["taken"] = False


_widget: dict[str, Any] = {}  # of the notebook: `tqdm`, the `cell` that shows it, and whether a bar has `taken` it


def _cell() -> int | None:
    """The number of the notebook's cell that runs; None where there are no widgets."""
    if not any(parent.__name__ == "tqdm_notebook" for parent in tqdm.__mro__):
        return None
    return sys.modules["IPython"].get_ipython().execution_count
