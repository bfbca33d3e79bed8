"""Kernel of `tpu.forward`: online softmax over the tiles of keys that a tile of rows sees.

Grid: (batch, head, step). A step takes one entry of the schedule: a tile of up to 1024 rows and one of up to 1024 keys
that it may see; hidden pairs have no step. The rows of a tile are queries of one head, or all queries of several heads
that share their keys. All steps of a tile of rows are neighbours.

Blocks, at heads of x = y = 256 bfloat16 columns, double-buffered by the pipeline: queries [1024 x] (512 KiB), keys
[1024 x] and values [1024 y] (512 KiB each; one array for latents), out [1024 y] (512 KiB), statistics float32[2 1024].

Scratch VMEM: sums of the values float32[1024 y] (1 MiB), running maximum and sum float32[1024 128] (512 KiB each, one
number per row in all lanes). The logits of a step take 4 MiB more. Scalar memory holds the schedule.

Phases of a program:

1. First key tile of the rows: reset the running maximum and sums.
2. Logits in base 2; mask them if the entry is MASKED; add to the online softmax.
3. Last key tile of the rows: normalise, write out and statistics.

Padding: rows and keys are padded with zeros to full tiles. A key after the last is masked, because no row sees beyond
key s - 1; rows after the last are cut off. A row without visible keys gives 0 and an infinite log-sum-exp.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.flash_mla import tile_schedule
from pallas_kernels.flash_mla.tile_schedule import TileSchedule
from pallas_kernels.flash_mla.tpu_tiles import (
    FlashPlan,
    compiler_params,
    dot,
    flat_list,
    key_index,
    last_seen_key,
    mask_hidden,
    schedule_entry,
    stack_scalars,
)
from pallas_kernels.mask import HIDDEN
from pallas_kernels.numerics import LOG2E

VMEM_BYTES = 32 * 2**20  # the kernel needs less than 24 MiB, and XLA can use the rest
LANES = 128  # a column of numbers is stored with this width


def attend(
    plan: FlashPlan,
    schedule: TileSchedule,
    first: int | Int[Array, ""],
    q: Float[Array, "b h rows x"],
    k: Float[Array, "b m keys x"],
    v: Float[Array, "b m keys y"] | None,
    segments: tuple[Array, ...],
    cost_estimate: pl.CostEstimate,
    interpret: object,
) -> tuple[Float[Array, "b h rows y"], Float[Array, "b h 2 rows"]]:
    """Returns (out, statistics) of rows and keys in full tiles; statistics: log-sum-exp and largest logit, float32.

    first: key index of query 0. v: None if the values are the keys. segments: int32[b rows] and int32[b keys], or
    (); a row that sees nothing has a segment that no key has.
    """
    entry_at = functools.partial(schedule_entry, schedule)
    (b, heads, rows, x), tiling = q.shape, plan.tiling
    y = (k if v is None else v).shape[-1]

    # Block indices of a step, read from the schedule.
    def row_tile(b, step, entries):
        return tile_schedule.outer_tile(entry_at(entries, b, step))

    def key_tile(b, step, entries):
        return tile_schedule.inner_tile(entry_at(entries, b, step))

    def of_rows(b, h, step, entries, _):
        return b, h, row_tile(b, step, entries), 0

    def of_stats(b, h, step, entries, _):
        return b, h, 0, row_tile(b, step, entries)

    def of_keys(b, h, step, entries, _):
        return b, lax.div(h, plan.parts), key_tile(b, step, entries), 0

    # Operands and their blocks.
    arrays = [q, k]
    in_specs = [
        pl.BlockSpec((1, 1, tiling.row, x), of_rows),
        pl.BlockSpec((1, 1, tiling.key, x), of_keys),
    ]
    if v is not None:
        arrays += [v]
        in_specs += [pl.BlockSpec((1, 1, tiling.key, y), of_keys)]
    if segments:
        arrays += [segments[0][:, :, None], segments[1][:, None]]
        in_specs += [
            pl.BlockSpec(
                (1, tiling.row, 1), lambda b, h, *entry_at: (b, row_tile(b, *entry_at[:2]), 0)
            ),
            pl.BlockSpec(
                (1, 1, tiling.key), lambda b, h, *entry_at: (b, 0, key_tile(b, *entry_at[:2]))
            ),
        ]
    # Call the kernel.
    column = pltpu.VMEM((tiling.row, LANES), jnp.float32)
    return pl.pallas_call(
        functools.partial(_forward_kernel, plan=plan, entry_at=entry_at, shared=v is None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(b, heads, schedule.count),
            in_specs=in_specs,
            out_specs=[
                pl.BlockSpec((1, 1, tiling.row, y), of_rows),
                pl.BlockSpec((1, 1, 2, tiling.row), of_stats),
            ],
            scratch_shapes=[pltpu.VMEM((tiling.row, y), jnp.float32), column, column],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((b, heads, rows, y), q.dtype),
            jax.ShapeDtypeStruct((b, heads, 2, rows), jnp.float32),
        ],
        compiler_params=compiler_params(VMEM_BYTES),
        cost_estimate=cost_estimate,
        interpret=interpret,
        name="flash_mla_forward",
    )(flat_list(schedule.entries), stack_scalars(first), *arrays)


def _forward_kernel(entries, start, q, k, *rest, plan, entry_at, shared):
    v, *rest = (k, *rest) if shared else rest
    q_segments, k_segments = rest[:2] if plan.segments else (None, None)
    out, stats, total_out, top, total = rest[-5:]
    entry = entry_at(entries, pl.program_id(0), pl.program_id(2))

    # First key tile of the rows: reset the sums.
    @pl.when(tile_schedule.has_flag(entry, tile_schedule.FIRST))
    def _():
        total_out[...] = jnp.zeros_like(total_out)
        top[...] = jnp.full_like(top, HIDDEN)
        total[...] = jnp.zeros_like(total)

    # Online softmax over one key tile.
    def add(masked: bool):
        logits = dot(plan, q[0, 0], k[0, 0], (1, 1)) * (plan.scale * LOG2E)
        if masked:
            query = last_seen_key(
                plan, tile_schedule.outer_tile(entry), start[0], (plan.tiling.row, 1)
            )
            key = key_index(plan, tile_schedule.inner_tile(entry), (1, plan.tiling.key))
            logits = mask_hidden(logits, key <= query, q_segments, k_segments)
        old_top = top[...]
        new_top = jnp.maximum(old_top, jnp.max(logits, axis=1, keepdims=True))
        p = jnp.exp2(logits - _across(new_top, logits.shape[1]))
        decay = jnp.exp2(old_top - new_top)
        top[...] = new_top
        total[...] = decay * total[...] + jnp.sum(p, axis=1, keepdims=True)
        new_values = dot(plan, p.astype(v.dtype), v[0, 0], (1, 0))
        total_out[...] = total_out[...] * _across(decay, new_values.shape[1]) + new_values

    pl.when(tile_schedule.has_flag(entry, tile_schedule.MASKED))(lambda: add(True))
    pl.when(tile_schedule.has_flag(entry, tile_schedule.UNMASKED))(lambda: add(False))

    # Last key tile of the rows: normalise and write.
    @pl.when(tile_schedule.has_flag(entry, tile_schedule.LAST))
    def _():
        has_keys = top[...] > HIDDEN / 2
        normaliser = jnp.where(has_keys, 1 / total[...], 0)
        out[0, 0] = (total_out[...] * _across(normaliser, out.shape[-1])).astype(out.dtype)
        largest = jnp.where(has_keys, top[...] * (1 / LOG2E), HIDDEN)
        lse = jnp.where(has_keys, largest + jnp.log(total[...]), jnp.inf)
        stats[0, 0, :1] = lse.T[:1]
        stats[0, 0, 1:] = largest.T[:1]


def _across(column, width: int):
    """Returns a column, stored LANES wide, with the given width."""
    if width <= LANES:
        return column[:, :width]
    return jnp.tile(column, (1, -(-width // LANES)))[:, :width]
