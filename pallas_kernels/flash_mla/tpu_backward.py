"""Kernel of `tpu.backward`: all three gradients in one pass over the pairs of tiles.

Grid: (batch, head of the keys, step). A step takes one entry of the schedule: a unit, which is a tile of up to 512 rows
of one of the heads that share the keys, and a tile of up to 1024 keys. The keys' tiles go from the last to the first,
and all steps of a tile of keys are neighbours. Logits and probabilities are computed once, not once for dq and once
for dk and dv.

Blocks, at heads of x = y = 256 bfloat16 columns, double-buffered by the pipeline: queries [512 x] and dout [512 y]
(256 KiB each), keys [1024 x] and values [1024 y] (512 KiB each), statistics float32[2 512], dq [512 x], dk [1024 x],
dv [1024 y].

Scratch VMEM: sums float32[units x 512] of dq, transposed, for all units of the chunk (512 KiB per unit, up to
`tpu.max_units`), sums of dk [1024 x] and dv [1024 y] (1 MiB each) for one tile of keys, and its keys transposed
(512 KiB). Scalar memory holds the schedule, and the unit that was closed last at each step.

Phases of a program:

1. First unit of the tile of keys: reset dk and dv, transpose the keys. First tile of keys of the unit: reset its dq.
2. Logits [keys rows] in base 2, masked if the entry is MASKED; probabilities; add to dv, dk and dq.
3. Last tile of keys of the unit: write dq. Last unit of the tile of keys: write dk and dv.

dq is written back when a later unit is closed: its block index is the unit that was closed last. Padding: rows after
the last have an infinite log-sum-exp, hence probabilities of 0; keys after the last are masked.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

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
)
from pallas_kernels.numerics import LOG2E

VMEM_BYTES = 62 * 2**20  # of the 64 MiB of v5p and tpu7x


def run_chunk(
    plan: FlashPlan,
    schedule: TileSchedule,
    scalars: Int32[Array, " 2"],
    arrays: tuple[Array, ...],
    segments: tuple[Array, ...],
    dtype: DTypeLike,
    chunk_cost: pl.CostEstimate,
    interpret: object,
) -> tuple[Float[Array, "b m rows x"], Float[Array, "b m keys x"], Float[Array, "b m keys y"]]:
    """Returns (dq, dk, dv) of one chunk of rows, following a schedule of its units; dk and dv have `dtype`.

    scalars: key index of query 0, and number of the first unit. arrays: q [b m rows x], k [b m keys x], v [b m keys
    y], dout [b m rows y] and statistics float32[b m 2 rows]: log-sum-exp in base 2, and the sum of out * dout.
    segments: int32[b rows of a head] and int32[b keys], or ().
    """
    q, k, v, _, _ = arrays
    tiling, (b, heads, rows, x), y = plan.tiling, q.shape, v.shape[-1]
    entry_at = functools.partial(schedule_entry, schedule)

    # Block indices of a step, read from the schedule.
    def unit(b, step, entries):
        return tile_schedule.inner_tile(entry_at(entries, b, step))

    def key_tile(b, step, entries):
        return tiling.keys - 1 - tile_schedule.outer_tile(entry_at(entries, b, step))

    def of_unit(b, h, step, entries, *_):
        return b, h, unit(b, step, entries), 0

    def of_stats(b, h, step, entries, *_):
        return b, h, 0, unit(b, step, entries)

    def of_keys(b, h, step, entries, *_):
        return b, h, key_tile(b, step, entries), 0

    def of_closed(b, h, step, entries, closed, _):
        return b, h, entry_at(closed, b, step), 0

    def of_row_segments(b, h, step, entries, closed, scalars):
        return b, 0, lax.rem(scalars[1] + unit(b, step, entries), tiling.rows)

    # Blocks of the operands.
    in_specs = [
        pl.BlockSpec((1, 1, tiling.row, x), of_unit),
        pl.BlockSpec((1, 1, tiling.key, x), of_keys),
        pl.BlockSpec((1, 1, tiling.key, y), of_keys),
        pl.BlockSpec((1, 1, tiling.row, y), of_unit),
        pl.BlockSpec((1, 1, 2, tiling.row), of_stats),
    ]
    if segments:
        arrays = (*arrays, segments[0][:, None], segments[1][:, :, None])
        in_specs += [
            pl.BlockSpec((1, 1, tiling.row), of_row_segments),
            pl.BlockSpec(
                (1, tiling.key, 1), lambda b, h, *entry_at: (b, key_tile(b, *entry_at[:2]), 0)
            ),
        ]
    # Call the kernel.
    sums = [(rows // tiling.row, x, tiling.row), (tiling.key, x), (tiling.key, y)]
    return pl.pallas_call(
        functools.partial(_backward_kernel, plan=plan, entry_at=entry_at),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(b, heads, schedule.count),
            in_specs=in_specs,
            out_specs=[
                pl.BlockSpec((1, 1, tiling.row, x), of_closed),
                pl.BlockSpec((1, 1, tiling.key, x), of_keys),
                pl.BlockSpec((1, 1, tiling.key, y), of_keys),
            ],
            scratch_shapes=[
                *(pltpu.VMEM(shape, jnp.float32) for shape in sums),
                pltpu.VMEM((x, tiling.key), k.dtype),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(k.shape, dtype),
            jax.ShapeDtypeStruct(v.shape, dtype),
        ],
        compiler_params=compiler_params(VMEM_BYTES),
        cost_estimate=chunk_cost,
        interpret=interpret,
        name="flash_mla_backward",
    )(
        flat_list(schedule.entries),
        flat_list(tile_schedule.latest_closed(schedule)),
        scalars,
        *arrays,
    )


def _backward_kernel(entries, closed, scalars, q, k, v, dout, stats, *rest, plan, entry_at):
    q_segments, k_segments = rest[:2] if plan.segments else (None, None)
    dq, dk, dv, total_dq, total_dk, total_dv, transposed_keys = rest[-7:]
    entry = entry_at(entries, pl.program_id(0), pl.program_id(2))
    unit = tile_schedule.inner_tile(entry)

    # First unit of this key tile: reset dk and dv, and transpose the keys.
    @pl.when(tile_schedule.has_flag(entry, tile_schedule.FIRST))
    def _():
        total_dk[...] = jnp.zeros_like(total_dk)
        total_dv[...] = jnp.zeros_like(total_dv)
        transposed_keys[...] = k[0, 0].T

    # First key tile of this unit: reset dq.
    @pl.when(tile_schedule.has_flag(entry, tile_schedule.OPENS))
    def _():
        total_dq[unit] = jnp.zeros(total_dq.shape[1:], jnp.float32)

    def add(masked: bool):
        # Keys first: only the keys are transposed, once for all their rows, and dq when it is written.
        logits = dot(plan, k[0, 0], q[0, 0], (1, 1)) * (plan.scale * LOG2E)
        if masked:
            tile = lax.rem(scalars[1] + unit, plan.tiling.rows)
            query = last_seen_key(plan, tile, scalars[0], (1, plan.tiling.row))
            tile = plan.tiling.keys - 1 - tile_schedule.outer_tile(entry)
            key = key_index(plan, tile, (plan.tiling.key, 1))
            logits = mask_hidden(logits, key <= query, q_segments, k_segments)
        p = jnp.exp2(logits - stats[0, 0, :1])
        total_dv[...] += dot(plan, p.astype(v.dtype), dout[0, 0], (1, 0))
        dp = dot(plan, v[0, 0], dout[0, 0], (1, 1))
        ds = (p * (dp - stats[0, 0, 1:])).astype(q.dtype)
        total_dk[...] += dot(plan, ds, q[0, 0], (1, 0))
        total_dq[unit] += dot(plan, transposed_keys[...], ds, (1, 0))

    pl.when(tile_schedule.has_flag(entry, tile_schedule.MASKED))(lambda: add(True))
    pl.when(tile_schedule.has_flag(entry, tile_schedule.UNMASKED))(lambda: add(False))

    # Last key tile of this unit: write dq.
    @pl.when(tile_schedule.has_flag(entry, tile_schedule.CLOSES))
    def _():
        dq[0, 0] = (total_dq[unit].T * plan.scale).astype(dq.dtype)

    # Last unit of this key tile: write dk and dv.
    @pl.when(tile_schedule.has_flag(entry, tile_schedule.LAST))
    def _():
        dk[0, 0] = (total_dk[...] * plan.scale).astype(dk.dtype)
        dv[0, 0] = total_dv[...].astype(dv.dtype)
