"""Blocks of queries and copies of single rows from HBM, shared by the TPU kernels of both directions.

A row's copy costs the scalar instructions that start it. A tile's copies are therefore unrolled, into a buffer at a
known address whose last tile has just been loaded: the compiler starts them during that tile's products. Tiles come
in pairs, one per buffer, and are always copied fully. After a block's last pair comes the first pair of the next
block, so only a core's first block waits for its rows.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.mask import HIDDEN

COMPILER_PARAMS = pltpu.CompilerParams(
    dimension_semantics=("parallel", "arbitrary"),
    vmem_limit_bytes=48 << 20,
    disable_bounds_checks=True,  # the union only holds rows of the array
)


class BlockSizes(NamedTuple):
    """Sizes of a block.

    Attributes:
      queries: neighbours that share a gather.
      rows: rows of their union per tile, a multiple of 8.
    """

    queries: int
    rows: int


class BlockPlan(NamedTuple):
    """Blocks of a call with b sequences of t queries of n heads.

    Attributes:
      queries: queries of a block.
      tile: rows of a tile.
      groups: blocks of a sequence.
      parts: runs of neighbouring blocks, one per core.
    """

    b: int
    t: int
    n: int
    queries: int
    tile: int
    groups: int
    parts: int

    @property
    def blocks(self) -> int:
        """Blocks of all sequences."""
        return self.b * self.groups

    @property
    def m(self) -> int:
        """Queries times heads of a block."""
        return self.queries * self.n

    @property
    def grid(self) -> tuple[int, int]:
        """Grid of both kernels: (core, block of the core)."""
        return self.parts, self.blocks // self.parts

    def spec(self, *shape: int, space=pltpu.VMEM) -> pl.BlockSpec:
        """Returns one block's part of an array [blocks ...]; each core has its blocks in order."""
        per_core = self.blocks // self.parts
        return pl.BlockSpec(
            (None, *shape), lambda part, i, _: (part * per_core + i, 0, 0), memory_space=space
        )

    def stack_heads(self, x: Array) -> Array:
        """Returns [b t n ...] as [blocks m ...], with zeros for the queries beyond t."""
        rest = x.shape[3:]
        pad = [(0, 0), (0, self.groups * self.queries - self.t)] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, pad).reshape(self.blocks, self.m, *rest)

    def unstack_heads(self, x: Array) -> Array:
        """Returns [blocks m ...] as [b t n ...], without the queries beyond t."""
        return x.reshape(self.b, -1, self.n, *x.shape[2:])[:, : self.t]

    def copies_per_iteration(self, interpret: object) -> int:
        """Returns the copies started per loop iteration: a full tile.

        It is 1 in an interpreter, which gains nothing from unrolling.
        """
        return 1 if interpret else self.tile


def append_next_block(
    lists: Int32[Array, "b g c"], next_first: Int32[Array, "b g d"]
) -> Int32[Array, "blocks 1 c+d"]:
    """Returns each block's list followed by the beginning of the next block's list.

    The result has one list per block, b * g of them.
    """
    lists, next_first = (x.reshape(-1, 1, x.shape[-1]) for x in (lists, next_first))
    return jnp.concatenate([lists, jnp.roll(next_first, -1, axis=0)], axis=-1)


def num_rows(counts) -> Int32[Array, ""]:
    """Returns the number of used entries of this block's union."""
    return counts[pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)]


def num_pairs(counts, tile: int) -> Int32[Array, ""]:
    """Returns the number of pairs of tiles of this block, at least one."""
    return jnp.maximum(1, lax.div(num_rows(counts) + 2 * tile - 1, 2 * tile))


def fetch_first_pair(copies: Callable, tile: int, unroll: int) -> None:
    """Fetches the first pair of tiles of a core's first block; those of other blocks are already in flight."""

    @pl.when(pl.program_id(1) == 0)
    def _():
        for slot in range(2):
            start_copies(tile, unroll, copies(0, slot))


def drain_copies(buffers, arrived) -> None:
    """Waits for all copies after a core's last block."""

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        for slot in range(2):
            wait_for_copies(buffers[slot], arrived.at[slot])


def copy_row(row, buffer, i, semaphore, to_hbm: bool = False):
    """Returns the copy of one row in HBM to row i of a buffer, or back."""
    buffer_row = buffer.at[pl.ds(i, 1)]
    return pltpu.make_async_copy(*((buffer_row, row) if to_hbm else (row, buffer_row)), semaphore)


def start_copies(count: int, unroll: int, *copies: Callable) -> None:
    """Starts copy(i) for i below count, `unroll` per loop iteration; without a loop if unroll is count."""

    def start_one(i, _):
        for copy in copies:
            copy(i).start()

    if unroll == count:
        for i in range(count):
            start_one(i, None)
    else:
        lax.fori_loop(0, count, start_one, None, unroll=unroll)


def wait_for_copies(buffer, semaphore) -> None:
    """Waits for as many bytes as the buffer has: for all row copies into it, or out of it."""
    pltpu.make_async_copy(buffer, buffer, semaphore).wait()


def member_tile(members, j, tile: int) -> Int32[Array, "1 tile"]:
    """Returns int32[1 tile]: the membership bits of tile j of a block's union."""
    return members[:, pl.ds(pl.multiple_of(j * tile, tile), tile)]


def dot(
    a: Float[Array, "..."], b: Float[Array, "..."], left: int, right: int
) -> Float[Array, "..."]:
    """Multiplies a and b along these dimensions in float32."""
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((left,), (right,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)


def masked_logits(
    q: Float[Array, "m x"],
    keys: Float[Array, "r x"],
    members: Int32[Array, "1 r"],
    heads: int,
    scale: float,
) -> Float[Array, "m r"]:
    """Returns float32[m r]: HIDDEN where members int32[1 r] lacks the bit of the query."""
    bias = [
        jnp.broadcast_to(jnp.where(members & (1 << a) != 0, 0.0, HIDDEN), (heads, keys.shape[0]))
        for a in range(q.shape[0] // heads)
    ]
    return scale * dot(q, keys, 1, 1) + jnp.concatenate(bias, axis=0)
