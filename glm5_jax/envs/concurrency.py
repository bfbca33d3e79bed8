"""Limits the number of concurrent operations."""

import asyncio


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
