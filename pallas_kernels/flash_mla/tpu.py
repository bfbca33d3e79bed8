"""Softmax attention over all keys on TPU: online softmax forward, and one pass for all three gradients.

Grid: (batch, head, step). Both kernels go through a list of (query tile, key tile) pairs (`tile_schedule`).
Hidden pairs take no step, and pairs without hidden keys are not masked. The rows of a tile are queries of one
head, or of several heads that share their keys.

The backward goes through the keys' tiles from the last to the first. VMEM holds the sums of dk and dv for one
tile of keys, and that of dq for all rows. Logits and probabilities are therefore computed once, not once for dq
and once for dk and dv. If there are too many rows for that, they are processed in chunks.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels.cost import estimate
from pallas_kernels.flash_mla import cost, tile_schedule
from pallas_kernels.flash_mla.tile_schedule import Tiling
from pallas_kernels.mask import HIDDEN
from pallas_kernels.numerics import LOG2E


class Tiles(NamedTuple):
    """Maximum rows of queries and of keys per step."""

    row: int
    key: int


# Not measured, because no device was available. For heads of 256 columns a step reads 1 MiB and has at least
# 1,000 FLOP per byte, enough for every chip. Its logits, probabilities and copies take 12 to 24 bytes each.
FORWARD = Tiles(1024, 1024)
BACKWARD = Tiles(512, 1024)
ALIGN = 128  # tile sizes are multiples of it if there is more than one tile
FORWARD_VMEM = 32 * 2**20  # the kernel needs less than 24 MiB, and XLA can use the rest
BACKWARD_VMEM = 62 * 2**20  # of the 64 MiB of v5p and tpu7x

LANES = 128  # a column of numbers is stored with this width
NO_SEGMENT = np.iinfo(np.int32).min  # segment of queries that see nothing


class FlashPlan(NamedTuple):
    """Static part of a call.

    Attributes:
      group: heads that share a tile of rows.
      parts: groups of the heads of a key.
    """

    tiling: Tiling
    group: int
    parts: int
    scale: float
    segments: bool
    precision: lax.Precision


def unsupported_reason(
    q: Float[Array, "b m g t x"],
    k: Float[Array, "b m s x"],
    v: Float[Array, "b m s y"],
    topk: Int32[Array, "b t k"] | None,
    window: int | None = None,
) -> str | None:
    """Returns the reason why the arguments are not supported, or None."""
    if window is not None:
        return "it has no sliding window"
    if topk is not None:
        return "it has no membership masks (topk)"
    if not (q.dtype == k.dtype == v.dtype and q.dtype in (jnp.bfloat16, jnp.float32)):
        return f"all must be bfloat16 or all float32, not {q.dtype}, {k.dtype}, {v.dtype}"
    tiling, _ = _tile(q, k, FORWARD)
    entries = q.shape[0] * tiling.rows * tiling.keys
    if (
        entries > tile_schedule.MAX_ENTRIES
        or max(tiling.rows, tiling.keys) > tile_schedule.MAX_TILES
    ):
        return f"{q.shape[0]} x {q.shape[3]} queries over {k.shape[2]} keys have too many tiles"
    return None


def forward(
    static,
    q: Float[Array, "b m g t x"],
    k: Float[Array, "b m s x"],
    v: Float[Array, "b m s y"],
    start: int | Int[Array, ""],
    q_segments: Int[Array, "b t"] | None,
    k_segments: Int[Array, "b s"] | None,
    topk: Int32[Array, "b t k"] | None,
    *,
    interpret: object = False,
) -> tuple[Float[Array, "b m g t y"], Float[Array, "b m g t"], Float[Array, ""]]:
    """Returns (out, lse, largest logit); lse has the accumulation dtype."""
    del topk
    first = start if static.start is None else static.start
    # Tile the problem and list the pairs of tiles.
    plan = _plan(static, q, k, q_segments, FORWARD)
    tiling, segments = plan.tiling, _segments(plan, q_segments, k_segments)
    schedule = tile_schedule.by_rows(tiling, first, segments)
    entry_at = functools.partial(_entry, schedule)
    b, heads, x, y = q.shape[0], q.shape[1] * plan.parts, q.shape[-1], v.shape[-1]
    rows, keys = tiling.rows * tiling.row, tiling.keys * tiling.key

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
    arrays = [_rows(q, plan), _pad(k, keys, 2)]
    in_specs = [
        pl.BlockSpec((1, 1, tiling.row, x), of_rows),
        pl.BlockSpec((1, 1, tiling.key, x), of_keys),
    ]
    if not static.shared:
        arrays += [_pad(v, keys, 2)]
        in_specs += [pl.BlockSpec((1, 1, tiling.key, y), of_keys)]
    if segments:
        arrays += [_hide_padding(segments[0])[:, :, None], segments[1][:, None]]
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
    out, stats = pl.pallas_call(
        functools.partial(_forward_kernel, plan=plan, entry_at=entry_at, shared=static.shared),
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
        compiler_params=_compiler_params(FORWARD_VMEM),
        cost_estimate=estimate(cost.forward(**_sizes(static, q, k, v), shared=static.shared)),
        interpret=interpret,
        name="flash_mla_forward",
    )(_flat(schedule.entries), _stack_scalars(first), *arrays)
    # Undo the tiling.
    real = plan.group * tiling.t
    stats = stats[..., :real]
    lse = stats[:, :, 0].reshape(q.shape[:-1])
    return out[:, :, :real].reshape(*q.shape[:-1], y), lse, jnp.max(stats[:, :, 1])


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
        logits = _dot(plan, q[0, 0], k[0, 0], (1, 1)) * (plan.scale * LOG2E)
        if masked:
            query = _last_seen(
                plan, tile_schedule.outer_tile(entry), start[0], (plan.tiling.row, 1)
            )
            key = _index(plan, tile_schedule.inner_tile(entry), (1, plan.tiling.key))
            logits = _mask(logits, key <= query, q_segments, k_segments)
        old_top = top[...]
        new_top = jnp.maximum(old_top, jnp.max(logits, axis=1, keepdims=True))
        p = jnp.exp2(logits - _across(new_top, logits.shape[1]))
        decay = jnp.exp2(old_top - new_top)
        top[...] = new_top
        total[...] = decay * total[...] + jnp.sum(p, axis=1, keepdims=True)
        new_values = _dot(plan, p.astype(v.dtype), v[0, 0], (1, 0))
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


def backward(
    static, saved: tuple, dout: Float[Array, "b m g t y"], *, interpret: object = False
) -> tuple[Float[Array, "b m g t x"], Float[Array, "b m s x"], Float[Array, "b m s y"]]:
    """Returns (dq, dk, dv) for the inputs of `forward`, its out and lse, and the gradient of out."""
    q, k, v, start, q_segments, k_segments, _, out, lse = saved
    first = start if static.start is None else static.start
    # Tile the problem.
    plan = _plan(static, q, k, q_segments, BACKWARD)
    tiling, (b, heads), keys = plan.tiling, q.shape[:2], plan.tiling.keys * plan.tiling.key
    segments = _segments(plan, q_segments, k_segments)
    total_cost = cost.backward(**_sizes(static, q, k, v))
    k, v = _pad(k, keys, 2), _pad(v, keys, 2)

    # Split the rows into chunks that fit VMEM, and compute the statistics of the rows.
    units = plan.parts * tiling.rows  # tiles of rows per tile of keys
    chunks = -(-units // max_units(plan, b, q, v))
    size = -(-units // chunks)
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    q_rows, douts = (_units(plan, size * chunks, x, 0) for x in (q, dout))
    lse, delta = (_units(plan, size * chunks, *x) for x in ((lse * LOG2E, jnp.inf), (delta, 0)))
    stats = jnp.stack([lse, delta], axis=2)

    def run_chunk(unit, q, dout, stats, dtype):
        """Returns (dq, dk, dv) of `size` units from number `unit` on; dk and dv in dtype."""
        schedule = tile_schedule.by_keys(tiling, first, segments, unit + np.arange(size), units)
        numbers, chunk_cost = _stack_scalars(first, unit), estimate(total_cost, chunks)
        arrays = (q, k, v, dout, stats)
        return _run_chunk(plan, schedule, numbers, arrays, segments, dtype, chunk_cost, interpret)

    # Run the chunks, and sum dk and dv over them.
    if chunks == 1:
        dq, dk, dv = run_chunk(0, q_rows, douts, stats, k.dtype)
    else:

        def add(carry, args):
            # The barriers keep XLA from fusing the loop's slices with the kernel, which would lose its VMEM limit.
            unit, q, dout, stats = lax.optimization_barrier(args)
            results = run_chunk(unit, q, dout, stats, jnp.float32)
            dq, *key_grads = lax.optimization_barrier(results)
            return [a + b for a, b in zip(carry, key_grads, strict=True)], dq

        def split_chunks(x, axis):
            x = x.reshape(*x.shape[:axis], chunks, -1, *x.shape[axis + 1 :])
            return jnp.moveaxis(x, axis, 0)

        numbers = size * jnp.arange(chunks, dtype=jnp.int32)
        zeros = [jnp.zeros(x.shape, jnp.float32) for x in (k, v)]
        args = (numbers, split_chunks(q_rows, 2), split_chunks(douts, 2), split_chunks(stats, 3))
        (dk, dv), dq = lax.scan(add, zeros, args)
        dq = jnp.moveaxis(dq, 0, 2)
    # Undo the tiling.
    dq = dq.reshape(b, heads, -1, q.shape[-1])[:, :, : units * tiling.row]
    dq = dq.reshape(b, heads * plan.parts, -1, q.shape[-1])[:, :, : plan.group * tiling.t]
    dk, dv = (g[:, :, : tiling.s].astype(k.dtype) for g in (dk, dv))
    return dq.reshape(q.shape), dk, dv


def _run_chunk(plan, schedule, scalars, arrays, segments, dtype, chunk_cost, interpret):
    """Returns (dq, dk, dv) of the rows [b m . .] of one chunk, following a schedule of its units.

    arrays: q, k, v, dout, stats. scalars: start, and the number of the first unit. chunk_cost: cost estimate.
    """
    q, k, v, _, _ = arrays
    tiling, (b, heads, rows, x), y = plan.tiling, q.shape, v.shape[-1]
    entry_at = functools.partial(_entry, schedule)

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
        arrays = (*arrays, _hide_padding(segments[0])[:, None], segments[1][:, :, None])
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
        compiler_params=_compiler_params(BACKWARD_VMEM),
        cost_estimate=chunk_cost,
        interpret=interpret,
        name="flash_mla_backward",
    )(_flat(schedule.entries), _flat(tile_schedule.latest_closed(schedule)), scalars, *arrays)


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
        logits = _dot(plan, k[0, 0], q[0, 0], (1, 1)) * (plan.scale * LOG2E)
        if masked:
            tile = lax.rem(scalars[1] + unit, plan.tiling.rows)
            query = _last_seen(plan, tile, scalars[0], (1, plan.tiling.row))
            tile = plan.tiling.keys - 1 - tile_schedule.outer_tile(entry)
            key = _index(plan, tile, (plan.tiling.key, 1))
            logits = _mask(logits, key <= query, q_segments, k_segments)
        p = jnp.exp2(logits - stats[0, 0, :1])
        total_dv[...] += _dot(plan, p.astype(v.dtype), dout[0, 0], (1, 0))
        dp = _dot(plan, v[0, 0], dout[0, 0], (1, 1))
        ds = (p * (dp - stats[0, 0, 1:])).astype(q.dtype)
        total_dk[...] += _dot(plan, ds, q[0, 0], (1, 0))
        total_dq[unit] += _dot(plan, transposed_keys[...], ds, (1, 0))

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


def _dot(plan: FlashPlan, a, b, axes):
    """Returns the float32 product that contracts axes[0] of a with axes[1] of b."""
    dims = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=plan.precision, preferred_element_type=jnp.float32)


def _sizes(static, q, k, v):
    """Returns the sizes of q, k and v by their names in cost.py."""
    b, m, g, t, x = q.shape
    sizes = {"b": b, "t": t, "s": k.shape[2], "n": m * g, "m": m, "x": x, "y": v.shape[-1]}
    return sizes | {"start": static.start, "item": q.dtype.itemsize}


def _last_seen(plan: FlashPlan, tile, start, shape):
    """Returns the last visible key of each row of a tile, as a row or a column."""
    row = lax.broadcasted_iota(jnp.int32, shape, int(shape[0] == 1))
    row = row + tile * plan.tiling.row
    if plan.group > 1:
        row = lax.rem(row, plan.tiling.t)
    return jnp.minimum(start + row, plan.tiling.s - 1)


def _index(plan: FlashPlan, tile, shape):
    """Returns the key indices of a tile, as a row or a column."""
    key = lax.broadcasted_iota(jnp.int32, shape, int(shape[0] == 1))
    return key + tile * plan.tiling.key


def _mask(logits, is_visible, q_segments, k_segments):
    if q_segments is not None:
        is_visible = is_visible & (q_segments[0] == k_segments[0])
    return jnp.where(is_visible, logits, HIDDEN)


def _across(column, width: int):
    """Returns a column, stored LANES wide, with the given width."""
    if width <= LANES:
        return column[:, :width]
    return jnp.tile(column, (1, -(-width // LANES)))[:, :width]


def _entry(schedule, entries, b, step):
    """Returns an entry of batch row b in a flat list."""
    lists, steps = schedule.entries.shape
    return entries[b * steps + step] if lists > 1 else entries[step]


def _flat(entries):
    # Scalars of more than one dimension would be padded to 8 x 128 each.
    return jnp.asarray(entries, jnp.int32).reshape(-1)


def _stack_scalars(*numbers):
    return jnp.stack([jnp.asarray(x, jnp.int32) for x in numbers])


def _compiler_params(vmem: int):
    semantics = ("parallel", "parallel", "arbitrary")
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=vmem)


def max_units(
    plan: FlashPlan, b: int, q: Float[Array, "b m g t x"], v: Float[Array, "b m s y"]
) -> int:
    """Returns how many tiles of rows fit on the chip.

    Their dq must fit VMEM next to the other buffers, and their list scalar memory.
    """
    tiling, item, x = plan.tiling, q.dtype.itemsize, _padded_width(q.shape[-1])
    keys_bytes = tiling.key * (x + _padded_width(v.shape[-1])) * (12 + 6 * item)
    logits_bytes = 24 * tiling.row * tiling.key
    units = (BACKWARD_VMEM - keys_bytes - logits_bytes) // (4 * tiling.row * x)
    return max(
        1, min(units, tile_schedule.MAX_TILES, tile_schedule.MAX_ENTRIES // (2 * b * tiling.keys))
    )


def _padded_width(width: int) -> int:
    return -(-width // LANES) * LANES


def _tile(q, k, tiles: Tiles) -> tuple[Tiling, int]:
    """Returns the tiling of q and k, and the number of heads whose rows share a tile."""
    (g, t), s = q.shape[2:4], k.shape[2]
    group = max(n for n in range(1, g + 1) if g % n == 0 and (n == 1 or n * t <= tiles.row))
    row, rows = _even_tiles(group * t, tiles.row, ALIGN // 8)
    key, keys = _even_tiles(s, tiles.key, ALIGN)
    return Tiling(t=t, s=s, row=row, key=key, rows=rows, keys=keys), group


def _even_tiles(count: int, largest: int, align: int) -> tuple[int, int]:
    """Returns (size, number) of tiles that hold `count` with little padding; a single tile needs less alignment."""
    number = -(-count // largest)
    align = align if number == 1 else ALIGN
    return -(-count // (number * align)) * align, number


def _plan(static, q, k, q_segments, tiles) -> FlashPlan:
    tiling, group = _tile(q, k, tiles)
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else lax.Precision.DEFAULT
    parts = q.shape[2] // group
    return FlashPlan(
        tiling=tiling,
        group=group,
        parts=parts,
        scale=static.scale,
        segments=q_segments is not None,
        precision=precision,
    )


def _pad(x, size: int, axis: int, fill=0):
    if x.shape[axis] == size:
        return x
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, pad, constant_values=fill)


def _rows(x, plan: FlashPlan, fill=0):
    """Reshapes [b m g t ...] to [b, m * parts, all rows, ...]."""
    b, m, _, t = x.shape[:4]
    x = x.reshape(b, m * plan.parts, plan.group * t, *x.shape[4:])
    return _pad(x, plan.tiling.rows * plan.tiling.row, 2, fill)


def _units(plan: FlashPlan, units: int, x, fill):
    """Reshapes [b m g t ...] to [b, m, rows of `units` units, ...], with a key's heads in sequence."""
    b, m = x.shape[:2]
    x = _rows(x, plan, fill)
    x = x.reshape(b, m, plan.parts * x.shape[2], *x.shape[3:])
    return _pad(x, units * plan.tiling.row, 2, fill)


def _segments(plan: FlashPlan, q_segments, k_segments):
    """Returns the segments of all rows and all keys, 0 in padding; () without segments."""
    if not plan.segments:
        return ()
    tiling = plan.tiling
    q_segments = _pad(jnp.tile(q_segments, (1, plan.group)), tiling.rows * tiling.row, 1)
    return q_segments, _pad(k_segments, tiling.keys * tiling.key, 1)


def _hide_padding(segments):
    """Gives queries of segment 0 a segment that no key has: they see nothing, not even keys of segment 0."""
    return jnp.where(segments == 0, NO_SEGMENT, segments)
