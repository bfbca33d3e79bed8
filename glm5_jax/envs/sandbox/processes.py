"""Waiting for processes and for work that must not be cancelled halfway."""

import asyncio
import logging
import select
import signal
from collections.abc import Awaitable

log = logging.getLogger(__name__)


async def to_the_end(work: Awaitable) -> None:
    """Waits for the work even if this is cancelled meanwhile, and passes that on afterwards."""
    task = asyncio.ensure_future(work)
    cancelled = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:  # told below
            break
    if cancelled is None:
        task.result()
    elif not task.cancelled() and task.exception() is not None:
        log.error("while a sandbox was cancelled: %s", task.exception())
    if cancelled is not None:
        raise cancelled


def has_ended(pidfd: int) -> bool:
    """Whether the process has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


async def end_of(pidfd: int, seconds: float) -> bool:
    """Whether the process ends within so many seconds."""
    clock = asyncio.get_running_loop().time
    last = clock() + seconds
    while not (ended := has_ended(pidfd)) and clock() < last:
        await asyncio.sleep(0.005)
    return ended


def kill(pidfd: int) -> None:
    """Kills the process, if it has not ended."""
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        pass
