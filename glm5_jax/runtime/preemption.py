"""Handles SIGTERM and Ctrl-C at once, even while the process compiles.

Python runs a signal's handler only after the main thread returns from C code, and a compiler can keep it there for half
a minute. But the signal's number is written to a pipe immediately (`signal.set_wakeup_fd`), and a thread reads that pipe.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import ClassVar

from glm5_jax.runtime.placement import EXIT_RESTART

SIGNALS = signal.SIGINT, signal.SIGTERM


@contextlib.contextmanager
def signal_handlers(handler: Callable, pipe: int = -1) -> Iterator[None]:
    """Installs a handler for both signals while entered. Call it in the main thread.

    pipe: descriptor that the signal numbers are written to; -1: none.
    """
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    other = signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(other, warn_on_full_buffer=False)
        for number, old in before.items():
            signal.signal(number, old)


class PreemptionGuard:
    """Is true after SIGTERM or Ctrl-C, so that training can save and end; a context manager.

    A second signal has its usual effect, as if there were no `PreemptionGuard`. Outside the main thread the guard
    stays false.

    Attributes:
      unsaved: whether there is something to save.
    """

    _program: ClassVar["PreemptionGuard | None"] = None

    def __init__(self, ends: bool = False, unsaved: bool = False):
        """ends: the guard is that of the whole program. The first signal then ends the process with code EXIT_RESTART if
        nothing is unsaved, and the second one always does, with code 128 + its number. Guards that are entered inside
        return this one.
        """
        self.unsaved = unsaved
        self._is_program, self._is_set = ends, False
        self._exit_stack = contextlib.ExitStack()

    def __bool__(self) -> bool:
        return self._is_set

    def __enter__(self) -> "PreemptionGuard":
        if PreemptionGuard._program is not None:
            return PreemptionGuard._program
        if threading.current_thread() is not threading.main_thread():
            return self
        reader, writer = os.pipe()
        os.set_blocking(writer, False)  # because a signal's handler must not wait
        thread = threading.Thread(target=self._listen, args=(reader,), daemon=True, name="signals")
        thread.start()
        self._exit_stack.callback(thread.join)
        self._exit_stack.callback(os.close, writer)
        self._exit_stack.enter_context(signal_handlers(self._handle, writer))
        if self._is_program:
            PreemptionGuard._program = self
        return self

    def __exit__(self, kind, error, trace) -> None:
        if PreemptionGuard._program is self:
            PreemptionGuard._program = None
        self._exit_stack.close()

    def _handle(self, number, frame) -> None:
        self._is_set = True
        if not self._is_program:
            self._exit_stack.close()

    def _listen(self, reader: int) -> None:
        is_stopping = False
        with open(reader, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                if number[0] not in SIGNALS:
                    continue  # a signal of another handler of the process
                if is_stopping and self._is_program:
                    _end("stopped at once", 128 + number[0])
                if is_stopping:
                    continue
                if self._is_program and not self.unsaved:
                    _end("stopped, with nothing to save", EXIT_RESTART)
                is_stopping = self._is_set = True
                _say(
                    "stopping once this step is made and saved; the same signal again stops at once"
                )


def _end(text: str, code: int) -> None:
    # A progress bar may have hidden the cursor.
    _say(text + ("\x1b[?25h" if os.isatty(2) else ""))
    os._exit(code)


def _say(text: str) -> None:
    # The main thread may be in the middle of a print, and wait there.
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())
