"""A session of the gateway that has begun and not ended, with the requests that are being answered in it."""

import asyncio
import functools
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from glm5_jax.rl.rollouts.sessions import Plan, Session
from glm5_jax.runtime.http_server import ApiError

_T = TypeVar("_T")


class OpenSession:
    """A session that is open, and what is asked of it."""

    def __init__(self, session: Session):
        self.session, self.ended = session, False
        self.cached = self.read = 0  # tokens of prompts
        self.asked: list[Plan] = []  # that are being answered
        self.changing = asyncio.Lock()  # of the session, which a plan reads in another thread
        self._calls: set[asyncio.Task] = set()  # of engines

    async def plan(self, messages: Sequence[Mapping], tools, thinking: bool) -> Plan:
        """Returns what to read for a request, which is in `asked` from then on. Raises SessionError.

        Long messages take long to encode: not while other sessions wait.
        """
        async with self.changing:
            make = functools.partial(
                self.session.plan,
                messages,
                tools,
                enable_thinking=thinking,
                asked=tuple(self.asked),
            )
            plan = await asyncio.get_running_loop().run_in_executor(None, make)
            self.asked.append(plan)
        return plan

    def end(self) -> None:
        """No engine goes on with what nobody will read."""
        self.ended = True
        for call in self._calls:
            call.cancel()

    async def until_ended(self, name: str, call: Coroutine[Any, Any, _T]) -> _T:
        """Returns what a call of an engine gives. Raises ApiError if the session ends before."""
        task = asyncio.create_task(call)
        self._calls.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            self.check(name)
            raise
        finally:
            self._calls.discard(task)

    def check(self, name: str) -> None:
        """ApiError if it was ended while it was asked."""
        if self.ended:
            raise ApiError(f"the session {name!r} was ended meanwhile", 404)
