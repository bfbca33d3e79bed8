"""Splits queries into blocks, and cuts the keys at each block's end where it is known when tracing."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Int32

EXTENTS = 16  # distinct key lengths: wasted keys stay below 1/32, compile time stays flat


class QueryRun(NamedTuple):
    """`count` consecutive blocks of `size` queries, beginning at query `first`; they see the keys below `keys`."""

    first: int
    count: int
    size: int
    keys: int


def query_runs(t: int, s: int, start: int | Array | None, block: int) -> list[QueryRun]:
    """Returns runs that cover t queries over s keys; start is the key index of query 0.

    If start is an int, the keys of a run end at its last query. Otherwise every run sees all s keys.
    """
    block = min(block, t)
    start_is_known = isinstance(start, int)
    run_length = block * -(-t // (block * EXTENTS)) if start_is_known else block * -(-t // block)
    runs = []
    for first in range(0, t, run_length):
        end = min(first + run_length, t)
        keys = min(start + end, s) if start_is_known else s
        num_full_blocks = (end - first) // block
        if num_full_blocks:
            runs.append(QueryRun(first=first, count=num_full_blocks, size=block, keys=keys))
        if (end - first) % block:
            runs.append(
                QueryRun(
                    first=first + num_full_blocks * block,
                    count=1,
                    size=(end - first) % block,
                    keys=keys,
                )
            )
    return runs


def offsets(
    run: QueryRun, like: Array, segments: Int[Array, "b t"] | None = None
) -> tuple[Int32[Array, " count"], Int[Array, "b t"] | None]:
    """Returns (index of each block's first query [count], segments of the queries), made to depend on `like`.

    In a loop over layers jax computes once what depends on no layer, and keeps it for the backward pass.
    Without this dependency it would keep the masks of all blocks, one number per query and key.
    """
    firsts = run.first + run.size * jnp.arange(run.count, dtype=jnp.int32)
    element = lax.slice(like, (0,) * like.ndim, (1,) * like.ndim)
    return lax.optimization_barrier((firsts, segments, element))[:2]


def split(x: Array | None, run: QueryRun, axis: int) -> Array | None:
    """Returns the run's part of x as [count, ..., size, ...], blocks leading; None for None."""
    if x is None:
        return None
    part = lax.slice_in_dim(x, run.first, run.first + run.count * run.size, axis=axis)
    shape = (*x.shape[:axis], run.count, run.size, *x.shape[axis + 1 :])
    return _moveaxis(part.reshape(shape), axis, 0)


def join(blocks: Array, axis: int) -> Array:
    """Joins blocks [count, ..., size, ...] into [..., count * size, ...] with the queries at axis."""
    moved = _moveaxis(blocks, 0, axis)
    shape = moved.shape
    return moved.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def _moveaxis(x, source, destination):
    order = [i for i in range(x.ndim) if i != source]
    order.insert(destination, source)
    return lax.transpose(x, order) if order != list(range(x.ndim)) else x
