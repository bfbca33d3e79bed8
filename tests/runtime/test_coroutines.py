"""Tests run_sync with and without a running event loop."""

import asyncio

import pytest

from glm5_jax.runtime.coroutines import run_sync


async def return_later(value):
    await asyncio.sleep(0)
    if value is None:
        raise ValueError("no value")
    return value


async def call_from_coroutine(value):
    return run_sync(return_later(value))


def test_runs_coroutine_with_and_without_running_loop():
    assert run_sync(return_later(3)) == asyncio.run(call_from_coroutine(3)) == 3
    with pytest.raises(ValueError, match="no value"):
        run_sync(return_later(None))
    with pytest.raises(ValueError, match="no value"):
        asyncio.run(call_from_coroutine(None))
