"""Open session of the gateway, with the requests that engines are answering for it."""

import asyncio
import functools
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from glm5_jax.rl.rollouts.sessions import Session, SessionStart, TurnPlan
from glm5_jax.runtime.http_server import ApiError

_T = TypeVar("_T")


class OpenSession:
    """Session that has not ended, and its running requests.

    Attributes:
      session: turns of the session.
      start: seed and distribution of its samples.
      is_ended: whether the session was ended while requests were running.
      cached_tokens, prompt_tokens: prompt tokens so far that engines read from a cache, and all prompt tokens.
      pending_plans: plans of the requests that are running.
      lock: held while the session changes, or while a plan reads it in another thread.
    """

    def __init__(self, session: Session, start: SessionStart):
        self.session, self.start, self.is_ended = session, start, False
        self.cached_tokens = self.prompt_tokens = 0
        self.pending_plans: list[TurnPlan] = []
        self.lock = asyncio.Lock()
        self._calls: set[asyncio.Task] = set()  # running requests to engines

    async def plan(
        self, messages: Sequence[Mapping], tools: Sequence[Mapping] | None, thinking: bool
    ) -> TurnPlan:
        """Returns the prompt of a request, and adds it to `pending_plans`. Raises SessionError.

        It runs in another thread, because encoding long messages takes long and other sessions must not wait.
        """
        async with self.lock:
            make_plan = functools.partial(
                self.session.plan,
                messages,
                tools,
                enable_thinking=thinking,
                pending=tuple(self.pending_plans),
            )
            plan = await asyncio.get_running_loop().run_in_executor(None, make_plan)
            self.pending_plans.append(plan)
        return plan

    def end(self) -> None:
        """Ends the session, and cancels its requests to engines."""
        self.is_ended = True
        for call in self._calls:
            call.cancel()

    async def call_engine(self, name: str, call: Coroutine[Any, Any, _T]) -> _T:
        """Returns the result of a request to an engine. Raises ApiError if the session ends before."""
        task = asyncio.create_task(call)
        self._calls.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            self.check_open(name)
            raise
        finally:
            self._calls.discard(task)

    def check_open(self, name: str) -> None:
        """Raises ApiError if the session was ended while a request was running. name: id of the session."""
        if self.is_ended:
            raise ApiError(f"the session {name!r} was ended meanwhile", 404)
