"""SIGTERM and Ctrl-C, answered at once whatever the process computes.

Python runs the handler of a signal once the main thread is back from what it called, and a compiler keeps it for half a
minute. The number of the signal is written to a pipe all the same (`signal.set_wakeup_fd`), which a thread reads.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import ClassVar, Self

from glm5_jax.core.placement import AGAIN

SIGNALS = signal.SIGINT, signal.SIGTERM


@contextlib.contextmanager
def answered_by(handler: Callable, pipe: int = -1) -> Iterator[None]:
    """Within it both signals have this handler, and their numbers go to that pipe (-1: to none). For the main thread."""
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    other = signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(other, warn_on_full_buffer=False)
        for number, old in before.items():
            signal.signal(number, old)


class StopSignal:
    """True once SIGTERM or Ctrl-C has come: what trains then saves, and ends. A second one is answered as if there were no
    `StopSignal`. In other threads than the main one it stays false.

    Attributes:
      unsaved: whether there is something to save.
    """

    _program: ClassVar["StopSignal | None"] = None

    def __init__(self, ends: bool = False, unsaved: bool = False):
        """ends: the process is a program that is its own: the first signal ends it with code AGAIN while nothing is
        unsaved, and the second in any case, with 128 and its number. Those that are entered meanwhile are this one."""
        self.unsaved = unsaved
        self._ends, self._came = ends, False
        self._entered = contextlib.ExitStack()

    def __bool__(self) -> bool:
        return self._came

    def __enter__(self) -> Self:
        if StopSignal._program is not None:
            return StopSignal._program
        if threading.current_thread() is not threading.main_thread():
            return self
        reader, writer = os.pipe()
        os.set_blocking(writer, False)  # as a signal's handler must not wait
        thread = threading.Thread(target=self._listen, args=(reader,), daemon=True, name="signals")
        thread.start()
        self._entered.callback(thread.join)
        self._entered.callback(os.close, writer)
        self._entered.enter_context(answered_by(self._come, writer))
        if self._ends:
            StopSignal._program = self
        return self

    def __exit__(self, kind, error, trace) -> None:
        if StopSignal._program is self:
            StopSignal._program = None
        self._entered.close()

    def _come(self, number, frame) -> None:
        self._came = True
        if not self._ends:
            self._entered.close()

    def _listen(self, reader: int) -> None:
        heard = False
        with open(reader, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                if number[0] not in SIGNALS:
                    continue  # of another handler of the process
                if heard and self._ends:
                    _end("stopped at once", 128 + number[0])
                if heard:
                    continue
                if self._ends and not self.unsaved:
                    _end("stopped, with nothing to save", AGAIN)
                heard = self._came = True
                _say(
                    "stopping once this step is made and saved; the same signal again stops at once"
                )


def _end(words: str, code: int) -> None:
    # A progress bar may have hidden the cursor.
    _say(words + ("\x1b[?25h" if os.isatty(2) else ""))
    os._exit(code)


def _say(words: str) -> None:
    # The main thread may be in the middle of a print, and wait there.
    with contextlib.suppress(OSError):
        os.write(2, f"\n{words}\n".encode())
