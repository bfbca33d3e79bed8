"""Attention probabilities summed over heads on Hopper: the sum stays in registers while the heads go by.

A block is 128 queries, 64 for each of two warpgroups, by 256 keys, whose sums in float32 are half of the
registers. For a head it reads 128 rows of queries and 256 of keys, 85 FLOP per byte from the second-level
cache; blocks of the same keys run at the same time, so that memory gives these once.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch, hopper
from pallas_kernels.head_probs.tiles import may_see, padded, segments_of
from pallas_kernels.numerics import LOG2E

# Timed on an H200 (2026-11-26, experiments/kernels_h200.jsonl), other sizes were not; chosen by shared memory
# and registers: 128 KB for the queries of two heads of 256 columns,
# 96 KB for tiles of keys.
QUERIES = 128
KEYS = 256
HALF = KEYS // 2  # columns of one product
RING = 3  # tiles of HALF keys and `_slice` columns in flight
WIDEST = 256


def refuse(q, k):
    """Why q [b t n x] over k [b s m x] cannot run here, or None."""
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"q is {q.dtype}; bfloat16 is taken"
    if q.dtype != k.dtype:
        return f"q is {q.dtype} and k {k.dtype}"
    if q.dtype == jnp.float32 and dispatch.OF_PLATFORM.get(dispatch.platform()) == "gpu":
        return "tensor cores take no float32 that lies in memory as q and k do"
    if q.shape[-1] > WIDEST:
        return f"heads of {q.shape[-1]} columns; {WIDEST} at most"
    return None


def forward(static, q, k, lse, start, q_segments, k_segments, interpret=False):
    """wide[b t s] of q [b t n x], k [b s m x], lse [b t n]."""
    own, segments = segments_of(q, q_segments), segments_of(k, k_segments)
    keys = whole_tiles(k, KEYS), padded(segments, 1, KEYS)
    return summed(static.scale, start, q, lse, own, *keys, interpret)[..., : k.shape[1]]


def whole_tiles(x, rows: int):
    """q or k [b rows n x] with zeros behind, to so many rows and to 64 columns."""
    return padded(padded(x, 1, rows), 3, 64)


def summed(scale, start, q, lse, own, k, segments, interpret):
    """float32[b t s], 0 where not visible, of q [b t n x], lse [b t n], own int32[b t], k in `whole_tiles` and
    segments int32[b s] with it; start: key index of query 0."""
    asked = q.shape[1]
    q, lse, own = whole_tiles(q, QUERIES), padded(lse, 1, QUERIES), padded(own, 1, QUERIES)
    (b, t, n, x), (_, s, m, _) = q.shape, k.shape
    width = 128 if x % 128 == 0 else 64  # columns of one product's contraction
    pieces = x // width
    first = jnp.asarray(start, jnp.int32).reshape(1)
    seen = may_see(first[0], own, segments, QUERIES, KEYS).astype(jnp.int32)
    lse = LOG2E * lse.astype(jnp.float32).swapaxes(1, 2)
    row_of, column_of = hopper.WGMMA.reduce(1), hopper.WGMMA.reduce(0)
    ops = hopper.Ops(interpret)

    def body(
        q_ref, k_ref, lse_ref, first_ref, seen_ref, own_ref, segments_ref, out_ref,
        q_ring, k_ring, q_full, q_free, full, free, turn,
    ):  # fmt: skip
        batch, column, tile = (lax.axis_index(name) for name in ("batch", "column", "tile"))
        role = lax.axis_index("role")
        heads = n * seen_ref[batch, tile, column]

        def load():
            plgpu.set_max_registers(24, action="decrease")

            @pl.loop(0, heads)
            def _(head):
                at = lax.rem(head, 2)
                pl.when(head >= 2)(lambda: plgpu.barrier_wait(q_free.at[at]))
                source = q_ref.at[batch, pl.ds(tile * QUERIES, QUERIES), head]
                plgpu.copy_gmem_to_smem(source, q_ring.at[at], q_full.at[at])

                @pl.loop(0, 2 * pieces)
                def _(piece):
                    step = 2 * pieces * head + piece
                    slot = lax.rem(step, RING)
                    pl.when(step >= RING)(lambda: plgpu.barrier_wait(free.at[slot]))
                    rows = pl.ds(column * KEYS + lax.div(piece, pieces) * HALF, HALF)
                    columns = pl.ds(lax.rem(piece, pieces) * width, width)
                    source = k_ref.at[batch, rows, lax.div(head, n // m), columns]
                    plgpu.copy_gmem_to_smem(source, k_ring.at[slot], full.at[slot])

            copied = 2 * pieces * heads
            pl.loop(0, jnp.minimum(heads, 2))(lambda at: plgpu.barrier_wait(q_free.at[at]))
            pl.loop(0, jnp.minimum(copied, RING))(lambda slot: plgpu.barrier_wait(free.at[slot]))

        def add():
            plgpu.set_max_registers(240, action="increase")
            own_rows = pl.ds(role * 64, 64)
            rows = pl.ds(tile * QUERIES + role * 64, 64)
            shape = 64, HALF
            # The warpgroups take turns, so that one's exponentials run beside the other's products.
            pl.when(role == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))

            def hand_over():
                plgpu.barrier_arrive(turn.at[1 - role])

            def step(head, totals):
                at = lax.rem(head, 2)
                norm = hopper.over_rows(ops.load(lse_ref.at[batch, head, rows], (), row_of), shape)
                plgpu.barrier_wait(q_full.at[at])
                more = []
                for half, total in enumerate(totals):
                    plgpu.barrier_wait(turn.at[role])
                    logits = ops.zeros(shape)
                    for piece in range(pieces):
                        slot = lax.rem((2 * head + half) * pieces + piece, RING)
                        plgpu.barrier_wait(full.at[slot])
                        turns = {"issued": hand_over} if piece == pieces - 1 else {}
                        queries = q_ring.at[at, own_rows, pl.ds(piece * width, width)]
                        keys = k_ring.at[slot]
                        logits = ops.dot(logits, queries, keys, b_transposed=True, **turns)
                        plgpu.barrier_arrive(free.at[slot])
                    if half == 1:
                        plgpu.barrier_arrive(q_free.at[at])
                    more.append(total + jnp.exp2(logits * (scale * LOG2E) - norm))
                return more

            totals = lax.fori_loop(0, heads, step, [ops.zeros(shape)] * 2)
            pl.when(role == 0)(lambda: plgpu.barrier_wait(turn.at[0]))
            query = ops.cast(lax.iota(jnp.int32, 64), row_of)
            query = hopper.over_rows(query + (first_ref[0] + tile * QUERIES + role * 64), shape)
            own = hopper.over_rows(ops.load(own_ref.at[batch, rows], (), row_of), shape)
            for half, total in enumerate(totals):
                begin = column * KEYS + half * HALF
                columns = pl.ds(begin, HALF)
                key = ops.cast(lax.iota(jnp.int32, HALF), column_of) + begin
                of = ops.load(segments_ref.at[batch, columns], (), column_of)
                key, of = (hopper.over_columns(a, shape) for a in (key, of))
                mask = (key <= query) & (own == of) & (own != 0)
                out_ref[batch, rows, columns] = jnp.where(mask, total, 0.0)

        lax.cond(role == 2, load, add)

    tiled = hopper.tiled(q.dtype)
    total = hopper.kernel(
        body,
        interpret=interpret,
        kernel_name="head_probs",
        out_type=jax.ShapeDtypeStruct((b, t, s), jnp.float32),
        grid=(b, s // KEYS, t // QUERIES),
        grid_names=("batch", "column", "tile"),
        num_threads=3,
        thread_name="role",
        compiler_params=hopper.compiler_params(approx_math=True),
        scratch_types=[
            plgpu.SMEM((2, QUERIES, x), q.dtype, transforms=tiled),
            plgpu.SMEM((RING, HALF, width), q.dtype, transforms=tiled),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2, num_arrivals=2),
            plgpu.Barrier(num_barriers=RING),
            plgpu.Barrier(num_barriers=RING, num_arrivals=2),
            plgpu.Barrier(num_barriers=2),
        ],
    )(q, k, lse, first, seen, own, segments)
    return total[:, :asked]
