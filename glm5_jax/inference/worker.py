"""Runs an engine in its own thread, for callers in other threads."""

import collections
import concurrent.futures
import logging
import threading
from collections.abc import Callable

from glm5_jax.inference.engine import Engine
from glm5_jax.inference.engine_weights import WeightsLost
from glm5_jax.runtime.console import ProgressBar

_PAUSED_POLL_S = 0.05
_log = logging.getLogger(__name__)


class WorkerStopped(Exception):
    """Raised if the engine was stopped or has failed; `Worker.failure` is the error."""


class Worker:
    """Thread that steps an engine while there is work, and runs calls of other threads between two steps.

    Attributes:
      engine: the engine. Any thread may read its stats; all other access goes through `call`.
      failure: error that ended the thread, or None.
      on_failure: called in the engine's thread after `failure` is set; None: nothing is called.
      compiling: number of compiled programs and of all programs while the engine compiles them; None: it does not.
    """

    def __init__(self, engine: Engine, warm: bool = False):
        """warm: whether the engine compiles all programs before it serves calls."""
        self.engine = engine
        self.compiling: tuple[int, int] | None = (0, 0) if warm else None
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], object] | None = None
        self._calls: collections.deque[
            tuple[Callable[[Engine], object], concurrent.futures.Future]
        ] = collections.deque()
        self._awake = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stops the thread after the current step. Unfinished requests stay unfinished."""
        with self._awake:
            self._stopped = True
            self._awake.notify()
        self._thread.join()

    def call(self, function: Callable[[Engine], object]) -> concurrent.futures.Future:
        """Runs function(engine) in the engine's thread. Raises WorkerStopped if the thread has ended."""
        future = concurrent.futures.Future()
        with self._awake:
            if self._stopped or self.failure:
                raise WorkerStopped("the engine has ended") from self.failure
            self._calls.append((function, future))
            self._awake.notify()
        return future

    def _run(self) -> None:
        try:
            self._compile()
            self._step_until_stopped()
        except BaseException as error:  # a panic of native code is no Exception
            self.failure = error
            _log.exception("the engine has failed")
            self.engine.fail()
        finally:
            with self._awake:
                self._stopped = True
            for _, future in self._calls:
                if future.set_running_or_notify_cancel():
                    future.set_exception(WorkerStopped("the engine has ended"))
            if self.failure is not None and self.on_failure is not None:
                self.on_failure()

    def _compile(self) -> None:
        """Compiles the engine's programs, unless it is warm or stopped."""
        if self.compiling is None:
            return
        steps = self.engine.compile_programs()
        _, total = next(steps)
        with ProgressBar(total, unit="program") as bar:
            for done, total in steps:
                self.compiling = (done, total)
                bar.update(done, "compiled")
                if self._stopped:
                    break
        self.compiling = None

    def _step_until_stopped(self) -> None:
        busy = False
        while True:
            with self._awake:
                while not (busy or self._calls or self._stopped):
                    self._awake.wait()
                if self.engine.paused and not self._calls:
                    # Steps even so, because requests may be cancelled or time out.
                    self._awake.wait(_PAUSED_POLL_S)
                if self._stopped:
                    return
                count = len(self._calls)
            # One at a time: if a call ends the engine, the remaining ones still get an error.
            for _ in range(count):
                _run_call(*self._calls.popleft(), self.engine)
            busy = self.engine.step()


def _run_call(function, future: concurrent.futures.Future, engine: Engine) -> None:
    """Runs a call and sets its future. Raises WeightsLost, after which the engine cannot run."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(engine))
    except Exception as error:
        future.set_exception(error)
        if isinstance(error, WeightsLost):
            raise
    except BaseException as error:  # a panic of native code
        future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
