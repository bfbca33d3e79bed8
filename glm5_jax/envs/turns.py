"""How many may be at something at once."""

import asyncio


class Turns:
    """`async with turns():` waits until fewer than `count` are within, in whichever event loop runs: a semaphore serves
    one loop alone, and each batch of attempts has its own."""

    def __init__(self, count: int):
        self._count = count
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._places = loop, asyncio.Semaphore(self._count)
        return self._places
