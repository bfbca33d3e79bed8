"""Softmax attention over all keys on TPU: online softmax forward, and one pass for all three gradients.

Both kernels go through a list of meetings of a tile of queries with a tile of keys (`visits`), so that no
step is spent where causality or the documents hide everything, and nothing is masked where they hide
nothing. The rows of a tile are queries of one head, or those of several heads that share their keys.

The backward goes through the keys' tiles from the last to the first. The sums of dk and dv stay on chip
for one tile of keys, that of dq for all rows: logits and probabilities are computed once, not once for dq
and once for dk and dv. Rows that are too many for that go in chunks.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cost import estimate
from pallas_kernels.flash_mla import cost, visits
from pallas_kernels.flash_mla.visits import Tiling
from pallas_kernels.mask import HIDDEN
from pallas_kernels.numerics import LOG2E


class Tiles(NamedTuple):
    """Rows of queries and of keys of a step, at most."""

    row: int
    key: int


# Not measured: no device was at hand. Of 256-wide heads a step reads 1 MiB for 1,000 FLOP a byte and more,
# which keeps every chip's multipliers busy; its logits, probabilities and copies take 12 to 24 bytes each.
FORWARD = Tiles(1024, 1024)
BACKWARD = Tiles(512, 1024)
ALIGN = 128  # tiles are multiples of it, where there is more than one
FORWARD_VMEM = 32 * 2**20  # it needs less than 24 MiB, and XLA can use what is left
BACKWARD_VMEM = 62 * 2**20  # of the 64 MiB of v5p and tpu7x

LANES = 128  # a column of numbers is stored as wide as this
NO_SEGMENT = np.iinfo(np.int32).min  # of queries that see nothing


class Plan(NamedTuple):
    """The static part of a call. group: heads that share a tile of rows; parts: groups of a key's heads."""

    tiling: Tiling
    group: int
    parts: int
    scale: float
    segments: bool
    precision: lax.Precision


def refuse(q, k, v, topk, window=None) -> str | None:
    """Why these arguments cannot run here, or None."""
    if window is not None:
        return "it has no sliding window"
    if topk is not None:
        return "it has no membership masks (topk)"
    if not (q.dtype == k.dtype == v.dtype and q.dtype in (jnp.bfloat16, jnp.float32)):
        return f"it takes bfloat16 or float32, one for all, not {q.dtype}, {k.dtype}, {v.dtype}"
    tiling, _ = _tile(q, k, FORWARD)
    entries = q.shape[0] * tiling.rows * tiling.keys
    if entries > visits.ENTRIES or max(tiling.rows, tiling.keys) > visits.MOST:
        return f"{q.shape[0]} x {q.shape[3]} queries over {k.shape[2]} keys have too many tiles"
    return None


def forward(static, q, k, v, start, q_segments, k_segments, topk, *, interpret=False):
    """(out [b m g t y], lse wide[b m g t], largest logit) of q [b m g t x] over k [b m s x], v [b m s y]."""
    del topk
    first = start if static.start is None else static.start
    plan = _plan(static, q, k, q_segments, FORWARD)
    tiling, segments = plan.tiling, _segments(plan, q_segments, k_segments)
    listed = visits.by_rows(tiling, first, segments)
    at = functools.partial(_entry, listed)
    b, heads, x, y = q.shape[0], q.shape[1] * plan.parts, q.shape[-1], v.shape[-1]
    rows, keys = tiling.rows * tiling.row, tiling.keys * tiling.key

    def row_tile(b, step, entries):
        return visits.outer_of(at(entries, b, step))

    def key_tile(b, step, entries):
        return visits.inner_of(at(entries, b, step))

    def of_rows(b, h, step, entries, _):
        return b, h, row_tile(b, step, entries), 0

    def of_stats(b, h, step, entries, _):
        return b, h, 0, row_tile(b, step, entries)

    def of_keys(b, h, step, entries, _):
        return b, lax.div(h, plan.parts), key_tile(b, step, entries), 0

    arrays = [_rows(q, plan), _pad(k, keys, 2)]
    in_specs = [
        pl.BlockSpec((1, 1, tiling.row, x), of_rows),
        pl.BlockSpec((1, 1, tiling.key, x), of_keys),
    ]
    if not static.shared:
        arrays += [_pad(v, keys, 2)]
        in_specs += [pl.BlockSpec((1, 1, tiling.key, y), of_keys)]
    if segments:
        arrays += [_own(segments[0])[:, :, None], segments[1][:, None]]
        in_specs += [
            pl.BlockSpec((1, tiling.row, 1), lambda b, h, *at: (b, row_tile(b, *at[:2]), 0)),
            pl.BlockSpec((1, 1, tiling.key), lambda b, h, *at: (b, 0, key_tile(b, *at[:2]))),
        ]
    column = pltpu.VMEM((tiling.row, LANES), jnp.float32)
    out, stats = pl.pallas_call(
        functools.partial(_forward_kernel, plan=plan, at=at, shared=static.shared),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(b, heads, listed.count),
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
    )(_flat(listed.entries), _numbers(first), *arrays)
    real = plan.group * tiling.t
    stats = stats[..., :real]
    lse = stats[:, :, 0].reshape(q.shape[:-1])
    return out[:, :, :real].reshape(*q.shape[:-1], y), lse, jnp.max(stats[:, :, 1])


def _forward_kernel(entries, start, q, k, *rest, plan, at, shared):
    v, *rest = (k, *rest) if shared else rest
    q_segments, k_segments = rest[:2] if plan.segments else (None, None)
    out, stats, total_out, top, total = rest[-5:]
    entry = at(entries, pl.program_id(0), pl.program_id(2))

    @pl.when(visits.has(entry, visits.FIRST))
    def _():
        total_out[...] = jnp.zeros_like(total_out)
        top[...] = jnp.full_like(top, HIDDEN)
        total[...] = jnp.zeros_like(total)

    def add(masked: bool):
        logits = _dot(plan, q[0, 0], k[0, 0], (1, 1)) * (plan.scale * LOG2E)
        if masked:
            query = _last_seen(plan, visits.outer_of(entry), start[0], (plan.tiling.row, 1))
            key = _index(plan, visits.inner_of(entry), (1, plan.tiling.key))
            logits = _mask(logits, key <= query, q_segments, k_segments)
        before = top[...]
        now = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
        p = jnp.exp2(logits - _across(now, logits.shape[1]))
        kept = jnp.exp2(before - now)
        top[...] = now
        total[...] = kept * total[...] + jnp.sum(p, axis=1, keepdims=True)
        new = _dot(plan, p.astype(v.dtype), v[0, 0], (1, 0))
        total_out[...] = total_out[...] * _across(kept, new.shape[1]) + new

    pl.when(visits.has(entry, visits.MASKED))(lambda: add(True))
    pl.when(visits.has(entry, visits.WHOLE))(lambda: add(False))

    @pl.when(visits.has(entry, visits.LAST))
    def _():
        seen = top[...] > HIDDEN / 2
        share = jnp.where(seen, 1 / total[...], 0)
        out[0, 0] = (total_out[...] * _across(share, out.shape[-1])).astype(out.dtype)
        largest = jnp.where(seen, top[...] * (1 / LOG2E), HIDDEN)
        lse = jnp.where(seen, largest + jnp.log(total[...]), jnp.inf)
        stats[0, 0, :1] = lse.T[:1]
        stats[0, 0, 1:] = largest.T[:1]


def backward(static, saved, dout, *, interpret=False):
    """(dq, dk, dv) for what `forward` took, out and lse that it gave, and the gradient of out."""
    q, k, v, start, q_segments, k_segments, _, out, lse = saved
    first = start if static.start is None else static.start
    plan = _plan(static, q, k, q_segments, BACKWARD)
    tiling, (b, heads), keys = plan.tiling, q.shape[:2], plan.tiling.keys * plan.tiling.key
    segments = _segments(plan, q_segments, k_segments)
    whole = cost.backward(**_sizes(static, q, k, v))
    k, v = _pad(k, keys, 2), _pad(v, keys, 2)

    units = plan.parts * tiling.rows  # tiles of rows that a tile of keys may meet
    chunks = -(-units // max_units(plan, b, q, v))
    size = -(-units // chunks)
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    q_rows, douts = (_units(plan, size * chunks, x, 0) for x in (q, dout))
    lse, delta = (_units(plan, size * chunks, *x) for x in ((lse * LOG2E, jnp.inf), (delta, 0)))
    stats = jnp.stack([lse, delta], axis=2)

    def run(unit, q, dout, stats, dtype):
        """(dq, dk, dv) of `size` units from number `unit` on; dk and dv in dtype."""
        listed = visits.by_keys(tiling, first, segments, unit + np.arange(size), units)
        numbers, share = _numbers(first, unit), estimate(whole, chunks)
        arrays = (q, k, v, dout, stats)
        return _run(plan, listed, numbers, arrays, segments, dtype, share, interpret)

    if chunks == 1:
        dq, dk, dv = run(0, q_rows, douts, stats, k.dtype)
    else:

        def add(carry, args):
            # XLA would fuse the loop's slices with the kernel, and then forget how much VMEM that asks for.
            made = run(*lax.optimization_barrier(args), jnp.float32)
            dq, *more = lax.optimization_barrier(made)
            return [a + b for a, b in zip(carry, more, strict=True)], dq

        def cut(x, axis):
            x = x.reshape(*x.shape[:axis], chunks, -1, *x.shape[axis + 1 :])
            return jnp.moveaxis(x, axis, 0)

        numbers = size * jnp.arange(chunks, dtype=jnp.int32)
        zeros = [jnp.zeros(x.shape, jnp.float32) for x in (k, v)]
        args = (numbers, cut(q_rows, 2), cut(douts, 2), cut(stats, 3))
        (dk, dv), dq = lax.scan(add, zeros, args)
        dq = jnp.moveaxis(dq, 0, 2)
    dq = dq.reshape(b, heads, -1, q.shape[-1])[:, :, : units * tiling.row]
    dq = dq.reshape(b, heads * plan.parts, -1, q.shape[-1])[:, :, : plan.group * tiling.t]
    dk, dv = (g[:, :, : tiling.s].astype(k.dtype) for g in (dk, dv))
    return dq.reshape(q.shape), dk, dv


def _run(plan, listed, numbers, arrays, segments, dtype, share, interpret):
    """(dq, dk, dv) of the rows [b m . .] of arrays (q, k, v, dout, stats), a list of whose units is given;
    numbers: start, and the number of the first unit; share: of the cost."""
    q, k, v, _, _ = arrays
    tiling, (b, heads, rows, x), y = plan.tiling, q.shape, v.shape[-1]
    at = functools.partial(_entry, listed)

    def unit(b, step, entries):
        return visits.inner_of(at(entries, b, step))

    def key_tile(b, step, entries):
        return tiling.keys - 1 - visits.outer_of(at(entries, b, step))

    def of_unit(b, h, step, entries, *_):
        return b, h, unit(b, step, entries), 0

    def of_stats(b, h, step, entries, *_):
        return b, h, 0, unit(b, step, entries)

    def of_keys(b, h, step, entries, *_):
        return b, h, key_tile(b, step, entries), 0

    def of_closed(b, h, step, entries, closed, _):
        return b, h, at(closed, b, step), 0

    def of_row_segments(b, h, step, entries, closed, numbers):
        return b, 0, lax.rem(numbers[1] + unit(b, step, entries), tiling.rows)

    in_specs = [
        pl.BlockSpec((1, 1, tiling.row, x), of_unit),
        pl.BlockSpec((1, 1, tiling.key, x), of_keys),
        pl.BlockSpec((1, 1, tiling.key, y), of_keys),
        pl.BlockSpec((1, 1, tiling.row, y), of_unit),
        pl.BlockSpec((1, 1, 2, tiling.row), of_stats),
    ]
    if segments:
        arrays = (*arrays, _own(segments[0])[:, None], segments[1][:, :, None])
        in_specs += [
            pl.BlockSpec((1, 1, tiling.row), of_row_segments),
            pl.BlockSpec((1, tiling.key, 1), lambda b, h, *at: (b, key_tile(b, *at[:2]), 0)),
        ]
    sums = [(rows // tiling.row, x, tiling.row), (tiling.key, x), (tiling.key, y)]
    return pl.pallas_call(
        functools.partial(_backward_kernel, plan=plan, at=at),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(b, heads, listed.count),
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
        cost_estimate=share,
        interpret=interpret,
        name="flash_mla_backward",
    )(_flat(listed.entries), _flat(visits.latest_closed(listed)), numbers, *arrays)


def _backward_kernel(entries, closed, numbers, q, k, v, dout, stats, *rest, plan, at):
    q_segments, k_segments = rest[:2] if plan.segments else (None, None)
    dq, dk, dv, total_dq, total_dk, total_dv, turned = rest[-7:]
    entry = at(entries, pl.program_id(0), pl.program_id(2))
    unit = visits.inner_of(entry)

    @pl.when(visits.has(entry, visits.FIRST))
    def _():
        total_dk[...] = jnp.zeros_like(total_dk)
        total_dv[...] = jnp.zeros_like(total_dv)
        turned[...] = k[0, 0].T

    @pl.when(visits.has(entry, visits.OPENS))
    def _():
        total_dq[unit] = jnp.zeros(total_dq.shape[1:], jnp.float32)

    def add(masked: bool):
        # Keys first: only the keys are turned, once for all rows that they meet, and dq on its way out.
        logits = _dot(plan, k[0, 0], q[0, 0], (1, 1)) * (plan.scale * LOG2E)
        if masked:
            tile = lax.rem(numbers[1] + unit, plan.tiling.rows)
            query = _last_seen(plan, tile, numbers[0], (1, plan.tiling.row))
            tile = plan.tiling.keys - 1 - visits.outer_of(entry)
            key = _index(plan, tile, (plan.tiling.key, 1))
            logits = _mask(logits, key <= query, q_segments, k_segments)
        p = jnp.exp2(logits - stats[0, 0, :1])
        total_dv[...] += _dot(plan, p.astype(v.dtype), dout[0, 0], (1, 0))
        dp = _dot(plan, v[0, 0], dout[0, 0], (1, 1))
        ds = (p * (dp - stats[0, 0, 1:])).astype(q.dtype)
        total_dk[...] += _dot(plan, ds, q[0, 0], (1, 0))
        total_dq[unit] += _dot(plan, turned[...], ds, (1, 0))

    pl.when(visits.has(entry, visits.MASKED))(lambda: add(True))
    pl.when(visits.has(entry, visits.WHOLE))(lambda: add(False))

    @pl.when(visits.has(entry, visits.CLOSES))
    def _():
        dq[0, 0] = (total_dq[unit].T * plan.scale).astype(dq.dtype)

    @pl.when(visits.has(entry, visits.LAST))
    def _():
        dk[0, 0] = (total_dk[...] * plan.scale).astype(dk.dtype)
        dv[0, 0] = total_dv[...].astype(dv.dtype)


def _dot(plan: Plan, a, b, axes):
    """Wide product that contracts axes[0] of a with axes[1] of b."""
    dims = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=plan.precision, preferred_element_type=jnp.float32)


def _sizes(static, q, k, v):
    """Of q [b m g t x], k [b m s x] and v [b m s y], as cost.py names them."""
    b, m, g, t, x = q.shape
    sizes = {"b": b, "t": t, "s": k.shape[2], "n": m * g, "m": m, "x": x, "y": v.shape[-1]}
    return sizes | {"start": static.start, "item": q.dtype.itemsize}


def _last_seen(plan: Plan, tile, start, shape):
    """The last key that each row of a tile may see, as a row or a column."""
    row = lax.broadcasted_iota(jnp.int32, shape, int(shape[0] == 1))
    row = row + tile * plan.tiling.row
    if plan.group > 1:
        row = lax.rem(row, plan.tiling.t)
    return jnp.minimum(start + row, plan.tiling.s - 1)


def _index(plan: Plan, tile, shape):
    """The numbers of a tile's keys, as a row or a column."""
    key = lax.broadcasted_iota(jnp.int32, shape, int(shape[0] == 1))
    return key + tile * plan.tiling.key


def _mask(logits, seen, q_segments, k_segments):
    if q_segments is not None:
        seen = seen & (q_segments[0] == k_segments[0])
    return jnp.where(seen, logits, HIDDEN)


def _across(column, width: int):
    """A column, stored LANES wide, `width` wide."""
    if width <= LANES:
        return column[:, :width]
    return jnp.tile(column, (1, -(-width // LANES)))[:, :width]


def _entry(listed, entries, b, step):
    """Entry of batch row b in a flat list."""
    lists, steps = listed.entries.shape
    return entries[b * steps + step] if lists > 1 else entries[step]


def _flat(entries):
    # Scalars of more than one dimension would be padded to 8 x 128 each.
    return jnp.asarray(entries, jnp.int32).reshape(-1)


def _numbers(*numbers):
    return jnp.stack([jnp.asarray(x, jnp.int32) for x in numbers])


def _compiler_params(vmem: int):
    semantics = ("parallel", "parallel", "arbitrary")
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=vmem)


def max_units(plan: Plan, b: int, q, v) -> int:
    """Tiles of rows whose dq fits on chip beside what else is there, and whose list fits."""
    tiling, item, x = plan.tiling, q.dtype.itemsize, _padded(q.shape[-1])
    of_keys = tiling.key * (x + _padded(v.shape[-1])) * (12 + 6 * item)
    of_logits = 24 * tiling.row * tiling.key
    units = (BACKWARD_VMEM - of_keys - of_logits) // (4 * tiling.row * x)
    return max(1, min(units, visits.MOST, visits.ENTRIES // (2 * b * tiling.keys)))


def _padded(width: int) -> int:
    return -(-width // LANES) * LANES


def _tile(q, k, tiles: Tiles) -> tuple[Tiling, int]:
    """How q [b m g t x] and k [b m s x] are cut, and the heads whose rows are in one tile."""
    (g, t), s = q.shape[2:4], k.shape[2]
    group = max(n for n in range(1, g + 1) if g % n == 0 and (n == 1 or n * t <= tiles.row))
    row, rows = _even(group * t, tiles.row, ALIGN // 8)
    key, keys = _even(s, tiles.key, ALIGN)
    return Tiling(t, s, row, key, rows, keys), group


def _even(count: int, largest: int, align: int) -> tuple[int, int]:
    """(size, number) of tiles that hold `count` with little to spare; a lone one needs less alignment."""
    number = -(-count // largest)
    align = align if number == 1 else ALIGN
    return -(-count // (number * align)) * align, number


def _plan(static, q, k, q_segments, tiles) -> Plan:
    tiling, group = _tile(q, k, tiles)
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else lax.Precision.DEFAULT
    parts = q.shape[2] // group
    return Plan(tiling, group, parts, static.scale, q_segments is not None, precision)


def _pad(x, size: int, axis: int, fill=0):
    if x.shape[axis] == size:
        return x
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, pad, constant_values=fill)


def _rows(x, plan: Plan, fill=0):
    """[b m g t ...] as [b, m * parts, all rows, ...]."""
    b, m, _, t = x.shape[:4]
    x = x.reshape(b, m * plan.parts, plan.group * t, *x.shape[4:])
    return _pad(x, plan.tiling.rows * plan.tiling.row, 2, fill)


def _units(plan: Plan, units: int, x, fill):
    """[b m g t ...] as [b, m, rows of so many units, ...], a key's heads one behind the other."""
    b, m = x.shape[:2]
    x = _rows(x, plan, fill)
    x = x.reshape(b, m, plan.parts * x.shape[2], *x.shape[3:])
    return _pad(x, units * plan.tiling.row, 2, fill)


def _segments(plan: Plan, q_segments, k_segments):
    """Segments of all rows and all keys, 0 where they are padding; () if there are none."""
    if not plan.segments:
        return ()
    tiling = plan.tiling
    q_segments = _pad(jnp.tile(q_segments, (1, plan.group)), tiling.rows * tiling.row, 1)
    return q_segments, _pad(k_segments, tiling.keys * tiling.key, 1)


def _own(segments):
    """Queries of segment 0 see nothing, also not the keys of segment 0."""
    return jnp.where(segments == 0, NO_SEGMENT, segments)
