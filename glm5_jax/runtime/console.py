"""Shows the progress of a run: as a bar on a terminal, as plain lines elsewhere."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO, Self

from rich.console import Console
from rich.markup import escape
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

from glm5_jax.runtime.terminal import make_printable

LINE_INTERVAL_S = 15.0  # between two plain lines of progress
WAIT_INTERVAL_S = 60.0  # between two plain lines of a spinner


class ProgressBar:
    """Counts steps up to `total`, starting at `done`; use as a context manager.

    The bar is drawn on standard error, so that printed lines can be piped. stream: target of both instead.
    """

    def __init__(
        self, total: int, done: int = 0, unit: str = "step", stream: IO[str] | None = None
    ):
        self._console = _make_console(stream or sys.stderr)
        self._out = _make_console(stream or sys.stdout)
        self._total, self._done, self._unit = total, done, unit
        self._first = None  # (step, its time); the time before it is compilation
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
        """Sets the number of complete steps. text: note about the last of them."""
        self._done = done
        if self._bar:
            self._bar.update(self._task, completed=done, text=escape(make_printable(text)))
            return
        now = time.monotonic()
        if done == self._total or now - self._printed > LINE_INTERVAL_S:
            self._printed = now
            step, began = self._first or (done, now)
            eta = (now - began) / max(1, done - step) * (self._total - done)
            note = f"  eta {_format_time(eta)}" if done > step else ""
            line = f"{self._unit} {done}/{self._total}  {make_printable(text)}{note}"
            self._console.print(Text(line), soft_wrap=True)
        self._first = self._first or (done, now)

    def print(self, text: str) -> None:
        """Prints a line without markup, above the bar if that is on the same terminal."""
        above = self._bar and self._out.is_terminal
        (self._console if above else self._out).print(Text(make_printable(text)), soft_wrap=True)


@contextlib.contextmanager
def spinner(text: str, stream: IO[str] | None = None) -> Iterator[None]:
    """Shows the elapsed time while entered, for work of unknown length; on standard error unless a stream is passed.

    Without a terminal it prints a line per `WAIT_INTERVAL_S`, hence none for work of less than a minute.
    """
    console, text = _make_console(stream or sys.stderr), make_printable(text)
    if console.is_terminal:
        columns = SpinnerColumn(), TextColumn("{task.description}", markup=False)
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
            bar.add_task(text, total=None)
            yield
        return
    ended, began = threading.Event(), time.monotonic()

    def print_elapsed():
        while not ended.wait(WAIT_INTERVAL_S):
            line = f"{text}  {_format_time(time.monotonic() - began)}"
            console.print(Text(line), soft_wrap=True)

    thread = threading.Thread(target=print_elapsed, name="spinner", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _make_console(stream: IO[str]) -> Console:
    console = Console(file=stream, highlight=False)
    if not console.is_jupyter:
        return console
    # In Jupyter a console would ignore its file and make an HTML output of every line. Streams there claim to be a
    # terminal, but notebooks store the codes that redraw a bar.
    return Console(file=stream, highlight=False, force_jupyter=False, force_terminal=False)


def _format_time(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
