"""A coroutine's result, whether or not an event loop runs around the caller."""

import asyncio

import pytest

from glm5_jax.runtime.coroutines import run_sync


async def later(value):
    await asyncio.sleep(0)
    if value is None:
        raise ValueError("no value")
    return value


async def within(value):
    return run_sync(later(value))


def test_a_result_with_and_without_a_running_loop():
    assert run_sync(later(3)) == asyncio.run(within(3)) == 3
    with pytest.raises(ValueError, match="no value"):
        run_sync(later(None))
    with pytest.raises(ValueError, match="no value"):
        asyncio.run(within(None))
