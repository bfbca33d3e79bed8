"""Softmax attention over all keys on TPU: online softmax forward, and one pass for all three gradients.

Both kernels (`tpu_forward`, `tpu_backward`) go through a list of (query tile, key tile) pairs (`tile_schedule`) on the
grid (batch, head, step). Hidden pairs take no step, and pairs without hidden keys are not masked.

The backward keeps the sums of dq for all rows in VMEM. If there are too many rows for that, they are processed in
chunks, over which XLA sums dk and dv in float32.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels.cost import estimate
from pallas_kernels.flash_mla import cost, tile_schedule, tpu_backward
from pallas_kernels.flash_mla.tile_schedule import Tiling
from pallas_kernels.flash_mla.tpu_forward import LANES, attend
from pallas_kernels.flash_mla.tpu_tiles import FlashPlan, stack_scalars
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
NO_SEGMENT = np.iinfo(np.int32).min  # segment of queries that see nothing


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
    # Pad to full tiles and run the kernel.
    keys, y = tiling.keys * tiling.key, v.shape[-1]
    rows, padded_k = _rows(q, plan), _pad(k, keys, 2)
    padded_v = None if static.shared else _pad(v, keys, 2)
    costs = estimate(cost.forward(**_sizes(static, q, k, v), shared=static.shared))
    out, stats = attend(
        plan,
        schedule,
        first,
        rows,
        padded_k,
        padded_v,
        _hide_padding(segments),
        costs,
        interpret,
    )
    # Undo the tiling.
    real = plan.group * tiling.t
    stats = stats[..., :real]
    lse = stats[:, :, 0].reshape(q.shape[:-1])
    return out[:, :, :real].reshape(*q.shape[:-1], y), lse, jnp.max(stats[:, :, 1])


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
        numbers, chunk_cost = stack_scalars(first, unit), estimate(total_cost, chunks)
        arrays = (q, k, v, dout, stats)
        options = _hide_padding(segments), dtype, chunk_cost, interpret
        return tpu_backward.run_chunk(plan, schedule, numbers, arrays, *options)

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


def max_units(
    plan: FlashPlan, b: int, q: Float[Array, "b m g t x"], v: Float[Array, "b m s y"]
) -> int:
    """Returns how many tiles of rows fit on the chip.

    Their dq must fit VMEM next to the other buffers, and their list scalar memory.
    """
    tiling, item, x = plan.tiling, q.dtype.itemsize, _padded_width(q.shape[-1])
    keys_bytes = tiling.key * (x + _padded_width(v.shape[-1])) * (12 + 6 * item)
    logits_bytes = 24 * tiling.row * tiling.key
    units = (tpu_backward.VMEM_BYTES - keys_bytes - logits_bytes) // (4 * tiling.row * x)
    return max(
        1, min(units, tile_schedule.MAX_TILES, tile_schedule.MAX_ENTRIES // (2 * b * tiling.keys))
    )


def _padded_width(width: int) -> int:
    return -(-width // LANES) * LANES


def _sizes(static, q, k, v):
    """Returns the sizes of q, k and v by their names in cost.py."""
    b, m, g, t, x = q.shape
    sizes = {"b": b, "t": t, "s": k.shape[2], "n": m * g, "m": m, "x": x, "y": v.shape[-1]}
    return sizes | {"start": static.start, "item": q.dtype.itemsize}


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


def _hide_padding(segments: tuple[Array, ...]) -> tuple[Array, ...]:
    """Gives queries of segment 0 a segment that no key has: they see nothing, not even keys of segment 0."""
    if not segments:
        return ()
    rows, keys = segments
    return jnp.where(rows == 0, NO_SEGMENT, rows), keys
