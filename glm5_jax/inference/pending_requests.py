"""Shares the requests of one body between the engine's thread and the handler of the server."""

import asyncio
import functools
import time
from collections.abc import AsyncIterator

from glm5_jax.inference.engine import Engine
from glm5_jax.inference.metrics import EngineMetrics
from glm5_jax.inference.protocol import ParsedRequest
from glm5_jax.inference.request import Handle


class PendingRequests:
    """Requests of one body, shared by the engine's thread, which writes, and the handler, which waits."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, parsed: ParsedRequest, metrics: EngineMetrics
    ):
        self.handles: list[Handle] = []
        self._loop, self._parsed, self._metrics = loop, parsed, metrics
        self._updated, self._event = set(), asyncio.Event()
        self._is_abandoned, self._began = False, time.monotonic()

    def submit(self, engine: Engine) -> None:
        """Submits all requests, in the engine's thread. Cancels them at once if the handler has left.

        They count from the creation of this object: another server may have prefilled their prompts meanwhile.
        """
        for index, request in enumerate(self._parsed.requests):
            handle = engine.submit(request, functools.partial(self._listen, index), self._began)
            self.handles.append(handle)
            if self._is_abandoned:
                handle.cancel()

    def leave(self) -> None:
        """Cancels all requests that have not ended, because the handler is done."""
        self._is_abandoned = True
        for handle in list(self.handles):
            handle.cancel()

    async def updates(self) -> AsyncIterator[set[int]]:
        """Yields the indices of requests with new output, each with its end once, until all have ended."""
        done: set[int] = set()
        while len(done) < len(self.handles):
            # An end may be visible before its notification arrives.
            ended = {i for i, handle in enumerate(self.handles) if handle.finish_reason is not None}
            updated, self._updated = (self._updated | ended) - done, set()
            if updated:
                yield updated
                done |= ended
            else:
                await self._event.wait()
            self._event.clear()

    def _listen(self, index: int, handle: Handle) -> None:
        """Notifies the handler, from the engine's thread."""
        if handle.finish_reason is not None:
            self._metrics.observe(handle)
        if not self._is_abandoned:
            try:
                self._loop.call_soon_threadsafe(self._notify, index)
            except RuntimeError:  # the loop has ended before the engine
                handle.cancel()

    def _notify(self, index: int) -> None:
        self._updated.add(index)
        self._event.set()
