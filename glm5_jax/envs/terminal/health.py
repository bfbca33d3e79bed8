"""Waits until the environment of a task is ready, by the task's health check."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from glm5_jax.envs.sandbox import Sandbox
from glm5_jax.envs.terminal.image import ImageError
from glm5_jax.envs.terminal.task import HealthCheck


async def wait_until_healthy(
    box: Sandbox,
    check: HealthCheck,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Runs the check until it succeeds. Raises ImageError if it fails as often as its retries allow."""
    start_end, failures = clock() + check.start_period_s, 0
    while True:
        command = ["/bin/sh", "-c", check.command]
        done = await box.exec(command, user="root", timeout_s=check.timeout_s)
        if done.code == 0 and not done.timed_out:
            return
        is_starting = clock() < start_end
        failures += not is_starting
        if failures >= check.retries:
            output = (done.stdout + done.stderr).decode(errors="replace").strip()
            raise ImageError(
                f"environment.healthcheck {check.command!r} failed {failures} times in a row, with exit code "
                f"{done.code}: {output[-300:]}"
            )
        await sleep(check.start_interval_s if is_starting else check.interval_s)
