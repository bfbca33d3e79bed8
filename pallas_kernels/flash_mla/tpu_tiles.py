"""Tiles of a call of attention over all keys on a TPU, and the parts that both kernels share.

A grid step takes one entry of a list of (query tile, key tile) pairs (`tile_schedule`), which scalar memory holds.
The index maps of all blocks read their tiles from the entry, so a tile that stays the same is not copied again.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int, Int32

from pallas_kernels.flash_mla.tile_schedule import TileSchedule, Tiling
from pallas_kernels.mask import HIDDEN


class FlashPlan(NamedTuple):
    """Static part of a call.

    Attributes:
      group: heads that share a tile of rows.
      parts: groups of the heads of a key.
      segments: whether queries and keys have segments.
      precision: precision of the products.
    """

    tiling: Tiling
    group: int
    parts: int
    scale: float
    segments: bool
    precision: lax.Precision


def dot(plan: FlashPlan, a: Array, b: Array, axes: tuple[int, int]) -> Array:
    """Returns the float32 product that contracts axes[0] of a with axes[1] of b."""
    dims = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=plan.precision, preferred_element_type=jnp.float32)


def last_seen_key(plan: FlashPlan, tile, start, shape: tuple[int, int]) -> Int32[Array, "..."]:
    """Returns the last visible key of each row of a tile, as a row or a column."""
    row = lax.broadcasted_iota(jnp.int32, shape, int(shape[0] == 1))
    row = row + tile * plan.tiling.row
    if plan.group > 1:
        row = lax.rem(row, plan.tiling.t)
    return jnp.minimum(start + row, plan.tiling.s - 1)


def key_index(plan: FlashPlan, tile, shape: tuple[int, int]) -> Int32[Array, "..."]:
    """Returns the key indices of a tile, as a row or a column."""
    key = lax.broadcasted_iota(jnp.int32, shape, int(shape[0] == 1))
    return key + tile * plan.tiling.key


def mask_hidden(
    logits: Float[Array, "..."], is_visible: Bool[Array, "..."], q_segments, k_segments
) -> Float[Array, "..."]:
    """Returns logits with HIDDEN where a key is not visible or in another segment; refs of segments, or None."""
    if q_segments is not None:
        is_visible = is_visible & (q_segments[0] == k_segments[0])
    return jnp.where(is_visible, logits, HIDDEN)


def schedule_entry(schedule: TileSchedule, entries, b, step) -> Int32[Array, ""]:
    """Returns an entry of batch row b in a flat list."""
    lists, steps = schedule.entries.shape
    return entries[b * steps + step] if lists > 1 else entries[step]


def flat_list(entries: Int[Array, "lists steps"] | np.ndarray) -> Int32[Array, " n"]:
    """Returns the entries as one dimension: scalars of more would be padded to 8 x 128 each."""
    return jnp.asarray(entries, jnp.int32).reshape(-1)


def stack_scalars(*numbers: int | Int[Array, ""]) -> Int32[Array, " n"]:
    """Returns numbers as one array for scalar memory."""
    return jnp.stack([jnp.asarray(x, jnp.int32) for x in numbers])


def compiler_params(vmem_bytes: int) -> pltpu.CompilerParams:
    """Returns the parameters of a kernel over (batch, head, step), whose steps run in order."""
    semantics = ("parallel", "parallel", "arbitrary")
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=vmem_bytes)
