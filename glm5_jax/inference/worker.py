"""An engine in a thread of its own, for callers in any other."""

import collections
import concurrent.futures
import logging
import threading
from collections.abc import Callable

from glm5_jax.inference.engine import Engine
from glm5_jax.inference.runner import WeightsLost

_PAUSED_SECONDS = 0.05
_log = logging.getLogger(__name__)


class WorkerStopped(Exception):
    """The engine takes no more: it was stopped, or has failed, which `Worker.failure` says."""


class Worker:
    """Steps an engine as long as there is work, and calls what others ask for between two steps.

    Attributes:
      engine: its counts may be read from any thread; all else goes through `call`.
      failure: the error that ended it, or None.
      on_failure: called in the engine's thread once `failure` is set; None: nothing is called.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], None] | None = None
        self._calls: collections.deque = collections.deque()
        self._awake = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def stop(self) -> None:
        """Ends after the step it is in; what has not ended is left as it is."""
        with self._awake:
            self._stopped = True
            self._awake.notify()
        self._thread.join()

    def call(self, function: Callable[[Engine], object]) -> concurrent.futures.Future:
        """function(engine) in the engine's thread; what it returns or raises. WorkerStopped if that has ended."""
        future = concurrent.futures.Future()
        with self._awake:
            if self._stopped or self.failure:
                raise WorkerStopped("the engine has ended") from self.failure
            self._calls.append((function, future))
            self._awake.notify()
        return future

    def _run(self) -> None:
        try:
            self._step_until_stopped()
        except Exception as error:
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

    def _step_until_stopped(self) -> None:
        busy = False
        while True:
            with self._awake:
                while not (busy or self._calls or self._stopped):
                    self._awake.wait()
                if self.engine.paused and not self._calls:
                    # What is cancelled or late ends even so.
                    self._awake.wait(_PAUSED_SECONDS)
                if self._stopped:
                    return
                count = len(self._calls)
            # One by one: if one of them ends the engine, the others are still there to be answered.
            for _ in range(count):
                _answer(*self._calls.popleft(), self.engine)
            busy = self.engine.step()


def _answer(function, future: concurrent.futures.Future, engine: Engine) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(engine))
    except Exception as error:
        future.set_exception(error)
        if isinstance(error, WeightsLost):
            raise
