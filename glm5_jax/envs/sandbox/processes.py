"""Waits for processes, and for operations that must not be cancelled halfway."""

import asyncio
import logging
import select
import signal
from collections.abc import Awaitable

log = logging.getLogger(__name__)


async def shield_until_done(operation: Awaitable) -> None:
    """Waits for an operation even if the caller is cancelled, and raises the cancellation afterwards."""
    task = asyncio.ensure_future(operation)
    cancelled = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:  # raised or logged below
            break
    if cancelled is None:
        task.result()
    elif not task.cancelled() and task.exception() is not None:
        log.error("while a sandbox was cancelled: %s", task.exception())
    if cancelled is not None:
        raise cancelled


def has_ended(pidfd: int) -> bool:
    """Returns whether the process has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


async def wait_for_end(pidfd: int, timeout_s: float) -> bool:
    """Waits for the end of a process; returns whether it ended within the time limit."""
    clock = asyncio.get_running_loop().time
    last = clock() + timeout_s
    while not (ended := has_ended(pidfd)) and clock() < last:
        await asyncio.sleep(0.005)
    return ended


def kill(pidfd: int) -> None:
    """Kills the process if it has not ended."""
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        pass
