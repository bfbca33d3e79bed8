"""How far a run is: a progress bar on a terminal, plain lines everywhere else."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

LINE_INTERVAL_S = 15.0  # between two plain lines of progress
WAIT_INTERVAL_S = 60.0  # between two plain lines about something that does not say how far it is


class ProgressBar:
    """Counts steps up to `total`, starting at `done`; use as a context manager.

    It shows on standard error, so that what is printed can be piped; stream: where both go instead.
    """

    def __init__(self, total: int, done: int = 0, unit: str = "step", stream=None):
        self._console = Console(file=stream or sys.stderr, highlight=False)
        self._out = Console(file=stream or sys.stdout, highlight=False)
        self._total, self._done, self._unit = total, done, unit
        self._first = None  # (step, its time): what comes before it is compilation
        self._printed = float("-inf")
        self._bar = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn(unit),
                MofNCompleteColumn(),
                BarColumn(bar_width=28),
                TextColumn("{task.fields[text]}"),
                TextColumn("eta"),
                TimeRemainingColumn(compact=True),
                console=self._console,
                refresh_per_second=4,
                redirect_stdout=self._out.is_terminal,
            )
            self._task = self._bar.add_task(unit, total=total, completed=done, text="compiling ...")

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, done: int, text: str) -> None:
        """`done` steps are complete; text is what to say about the last of them."""
        self._done = done
        if self._bar:
            self._bar.update(self._task, completed=done, text=text)
            return
        now = time.monotonic()
        if done == self._total or now - self._printed > LINE_INTERVAL_S:
            self._printed = now
            step, began = self._first or (done, now)
            eta = (now - began) / max(1, done - step) * (self._total - done)
            note = f"  eta {_clock(eta)}" if done > step else ""
            line = f"{self._unit} {done}/{self._total}  {text}{note}"
            self._console.print(Text(line), soft_wrap=True)
        self._first = self._first or (done, now)

    def print(self, text: str) -> None:
        """A line of output without any markup, above the bar if that is on the same terminal."""
        above = self._bar and self._out.is_terminal
        (self._console if above else self._out).print(Text(text), soft_wrap=True)


@contextlib.contextmanager
def waiting(text: str, stream=None) -> Iterator[None]:
    """Says on standard error (stream: there) how long it takes, while within it is what cannot say how far it is.

    What is over within a minute goes without a plain line.
    """
    console = Console(file=stream or sys.stderr, highlight=False)
    if console.is_terminal:
        columns = SpinnerColumn(), TextColumn("{task.description}", markup=False)
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
            bar.add_task(text, total=None)
            yield
        return
    ended, began = threading.Event(), time.monotonic()

    def tell():
        while not ended.wait(WAIT_INTERVAL_S):
            line = f"{text}  {_clock(time.monotonic() - began)}"
            console.print(Text(line), soft_wrap=True)

    thread = threading.Thread(target=tell, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
