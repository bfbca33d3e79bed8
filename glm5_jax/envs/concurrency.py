"""Limits the number of concurrent operations, and runs workers."""

import asyncio
from collections.abc import Awaitable, Callable


class ConcurrencyLimit:
    """Limit of concurrent operations: `async with limit():` waits until fewer than `count` are running.

    Works in every event loop. A semaphore serves one loop only, and each batch of attempts has its own
    loop.
    """

    def __init__(self, count: int):
        self._count = count
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._semaphore = loop, asyncio.Semaphore(self._count)
        return self._semaphore


async def run_workers(work: Callable[[], Awaitable[None]], count: int) -> None:
    """Runs a number of equal workers to their end. Raises the first error of one, after the others are cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(_await(work))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _await(work: Callable[[], Awaitable[None]]) -> None:
    await work()
