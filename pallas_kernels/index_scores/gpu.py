"""Index scores and their gradients on Hopper: head scores stay in registers, in all three kernels.

The forward has keys along the rows of its products and (head, query) along their columns, eight queries
wide, as `lightning_indexer` has: a thread holds all heads of its queries. The backward is two kernels,
each with products of 64 queries and keys of one head: `sum_keys` walks the keys of a query tile and sums
e (see `ref.pulled`), `sum_queries` walks the queries of a key tile and sums dk. So both sums stay in
registers and have one order, for one product of queries and keys more than the three that are needed;
dk in one pass with e would take float32[s j] for every tile of queries through memory.

dI is rounded to the dtype of the queries before it is read, as each head's part of it is anyway, and lies
in memory with queries first and with keys first: at GLM-5's block of 512 queries over 32,768 keys that is
134 MB through memory once more, and a hundredth of the products' time.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch, hopper
from pallas_kernels.head_probs.tiles import padded, spans
from pallas_kernels.hopper import MULTIPROCESSORS
from pallas_kernels.index_scores.ref import head_weights

# Timed on an H200 (2026-11-26, experiments/kernels_h200.jsonl), other sizes were not; chosen by shared
# memory, registers and the number of processors.
QUERIES = 8  # of a tile of the forward: the width of the tensor cores' smallest product
KEYS = 128  # of a tile: 64 for each of two warpgroups of the forward and of `sum_queries`
HEADS = 32  # of a product of the forward: 256 columns, 128 registers of each thread
ROWS = 64  # queries of a tile of the backward
RING = 4  # tiles in flight at most
WIDEST = 128  # columns of a head: as many float32 of 64 rows are 64 registers of each thread
BUDGET = hopper.SMEM_BYTES - 1024  # bytes of tiles: barriers and alignment take some


def refuse(idx_q, idx_w, idx_k):
    """Why idx_q [b t i j] with idx_w [b t i] over idx_k [b s j] cannot run here, or None."""
    if idx_q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"idx_q is {idx_q.dtype}; bfloat16 is taken"
    if idx_q.dtype != idx_k.dtype:
        return f"idx_q is {idx_q.dtype} and idx_k {idx_k.dtype}"
    if idx_q.dtype == jnp.float32 and dispatch.OF_PLATFORM.get(dispatch.platform()) == "gpu":
        return "tensor cores take no float32 that lies in memory as idx_q and idx_k do"
    if idx_w.dtype == jnp.float64:
        return "idx_w is float64"
    if idx_q.shape[-1] > WIDEST:
        return f"index heads of {idx_q.shape[-1]} columns; {WIDEST} at most"
    if idx_q.shape[2] > 2 * HEADS:
        return f"{idx_q.shape[2]} index heads; {2 * HEADS} at most"
    return None


def forward(static, idx_q, idx_w, idx_k, interpret=False):
    """wide[b t s] of idx_q [b t i j], idx_w [b t i], idx_k [b s j]."""
    q, w, k = whole_tiles(idx_q, idx_w, idx_k, QUERIES)
    whole = jnp.array([0, k.shape[1] // KEYS], jnp.int32)
    everywhere = jnp.broadcast_to(whole, (q.shape[0], q.shape[1] // QUERIES, 2))
    out = scores(q, w, k, everywhere, interpret)
    return out[:, : idx_q.shape[1], : idx_k.shape[1]]


def backward(static, saved, dscores, interpret=False):
    """(dq, dw, dk) for what `forward` took and the gradient of what it gave."""
    idx_q, idx_w, idx_k = saved
    k = padded(idx_k, 1, KEYS)
    seen = jnp.ones((len(k), -(-idx_q.shape[1] // ROWS), k.shape[1] // KEYS), bool)
    dq, dw, dk = gradients(idx_q, idx_w, k, padded(dscores, 2, KEYS), seen, interpret)
    return dq, dw, dk[:, : idx_k.shape[1]].astype(idx_k.dtype)


def whole_tiles(idx_q, idx_w, idx_k, rows: int):
    """(q [b t i j], w float32[b t i] with the scale of the dot products, k [b s j]) with zeros behind, to
    whole tiles, of so many rows of queries."""
    w = padded(head_weights(idx_q, idx_w), 1, rows)
    q = padded(padded(idx_q, 1, rows), 3, 64)
    return q, w, padded(padded(idx_k, 1, KEYS), 2, 64)


def gradients(idx_q, idx_w, idx_k, dscores, seen, interpret):
    """(dq, dw, float32 dk) of idx_q [b t i j], idx_w [b t i], idx_k [b s j] and dscores [b t s], where s is a
    multiple of KEYS.

    seen bool[b t/ROWS s/KEYS]: only such tiles are read.
    """
    q, w, k = whole_tiles(idx_q, idx_w, idx_k, ROWS)
    dscores = padded(dscores.astype(q.dtype), 1, ROWS)
    e = sum_keys(q, k, dscores, spans(seen), interpret)
    dk = sum_queries(q, w, k, dscores.swapaxes(1, 2), spans(seen.swapaxes(1, 2)), interpret)
    _, t, i, j = idx_q.shape
    e = e[:, :i, :t, :j].swapaxes(1, 2)
    dw = jnp.sum(e * idx_q.astype(jnp.float32), axis=-1) * j**-0.5
    dq = e * head_weights(idx_q, idx_w)[..., None]
    return dq.astype(idx_q.dtype), dw.astype(idx_w.dtype), dk[..., :j]


def scores(q, w, k, spans, interpret):
    """float32[b t s] of `whole_tiles`; key tiles outside the spans int32[b t/QUERIES 2] are not written."""
    (b, t, i, j), s = q.shape, k.shape[1]
    passes = next(n for n in range(-(-i // HEADS), i + 1) if i % n == 0)
    heads = i // passes
    columns = heads * QUERIES
    tiles = t // QUERIES
    # A tile's weights lie as the columns of its products do.
    w = w.reshape(b, tiles, QUERIES, i).swapaxes(2, 3).reshape(b, tiles, i * QUERIES)
    parts = max(1, min(MULTIPROCESSORS // (b * tiles), s // KEYS))
    size = q.dtype.itemsize
    ring = max(2, min(RING, (BUDGET - i * QUERIES * j * size) // (KEYS * j * size)))
    ops = hopper.Ops(interpret)

    def body(q_ref, w_ref, k_ref, spans_ref, out_ref, q_tile, k_ring, q_ready, full, free, turn):
        batch, tile, part = (lax.axis_index(name) for name in ("batch", "tile", "part"))
        role = lax.axis_index("role")
        first, last = spans_ref[batch, tile, 0], spans_ref[batch, tile, 1]
        begin = first + lax.div((last - first) * part, parts)
        count = first + lax.div((last - first) * (part + 1), parts) - begin
        queries = pl.ds(tile * QUERIES, QUERIES)

        @pl.when((role == 2) & (count > 0))
        def _fetch():
            plgpu.set_max_registers(40, action="decrease")
            for head in range(i):
                to = q_tile.at[pl.ds(head * QUERIES, QUERIES)]
                plgpu.copy_gmem_to_smem(q_ref.at[batch, queries, head], to, q_ready)

            @pl.loop(0, count)
            def _(n):
                slot = lax.rem(n, ring)
                pl.when(n >= ring)(lambda: plgpu.barrier_wait(free.at[slot]))
                keys = pl.ds((begin + n) * KEYS, KEYS)
                plgpu.copy_gmem_to_smem(k_ref.at[batch, keys], k_ring.at[slot], full.at[slot])

            pl.loop(0, jnp.minimum(count, ring))(lambda slot: plgpu.barrier_wait(free.at[slot]))

        @pl.when((role < 2) & (count > 0))
        def _sum():
            plgpu.set_max_registers(232, action="increase")
            along_columns = hopper.WGMMA.reduce(0)
            weights = [
                ops.load(w_ref.at[batch, tile, pl.ds(n * columns, columns)], (), along_columns)
                for n in range(passes)
            ]
            # The warpgroups take turns, so that one sums while the other's products run.
            pl.when(role == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))
            plgpu.barrier_wait(q_ready)

            @pl.loop(0, count)
            def _(n):
                slot = lax.rem(n, ring)
                plgpu.barrier_wait(full.at[slot])
                own = k_ring.at[slot, pl.ds(role * 64, 64)]
                sums = [ops.zeros((64, QUERIES))] * 2  # two chains hide the latency of adding
                for of in range(passes):
                    plgpu.barrier_wait(turn.at[role])
                    dots = ops.dot(
                        ops.zeros((64, columns)),
                        own,
                        q_tile.at[pl.ds(of * columns, columns)],
                        b_transposed=True,
                        issued=lambda: plgpu.barrier_arrive(turn.at[1 - role]),
                    )
                    each = jnp.maximum(dots, 0)
                    each *= hopper.over_columns(weights[of], dots.shape)
                    for head in range(heads):
                        some = head * QUERIES, (head + 1) * QUERIES
                        one = lax.slice(each, (0, some[0]), (64, some[1]))
                        sums[head % 2] = sums[head % 2] + one
                plgpu.barrier_arrive(free.at[slot])
                keys = pl.ds((begin + n) * KEYS + role * 64, 64)
                ops.store_transposed(out_ref.at[batch, queries, keys], sums[0] + sums[1])

            pl.when(role == 0)(lambda: plgpu.barrier_wait(turn.at[0]))

    tiled = hopper.tiled(q.dtype)
    return hopper.kernel(
        body,
        interpret=interpret,
        kernel_name="index_scores",
        out_type=jax.ShapeDtypeStruct((b, t, s), jnp.float32),
        grid=(b, tiles, parts),
        grid_names=("batch", "tile", "part"),
        num_threads=3,
        thread_name="role",
        scratch_types=[
            plgpu.SMEM((i * QUERIES, j), q.dtype, transforms=tiled),
            plgpu.SMEM((ring, KEYS, j), q.dtype, transforms=tiled),
            plgpu.Barrier(num_arrivals=i),
            plgpu.Barrier(num_barriers=ring),
            plgpu.Barrier(num_barriers=ring, num_arrivals=2),
            plgpu.Barrier(num_barriers=2),
        ],
    )(q, w, k, spans)


def sum_keys(q, k, dscores, spans, interpret):
    """e float32[b i t j]: for each head sum_s [q . k_s > 0] dI_s k_s, over the spans int32[b t/ROWS 2] of keys.

    A block is 64 queries of two heads, one for each of two warpgroups; i is made even.
    """
    q = padded(q, 2, 2)
    b, t, i, j = q.shape
    ring = 3
    ops = hopper.Ops(interpret)

    def body(q_ref, k_ref, d_ref, spans_ref, e_ref, q_tile, k_ring, d_ring, q_ready, full, free):
        batch, tile, pair = (lax.axis_index(name) for name in ("batch", "tile", "pair"))
        role = lax.axis_index("role")
        first, last = spans_ref[batch, tile, 0], spans_ref[batch, tile, 1]
        rows = pl.ds(tile * ROWS, ROWS)

        def load():
            plgpu.set_max_registers(40, action="decrease")
            for n in range(2):
                source = q_ref.at[batch, rows, 2 * pair + n]
                plgpu.copy_gmem_to_smem(source, q_tile.at[n], q_ready.at[n])

            @pl.loop(0, last - first)
            def _(n):
                slot = lax.rem(n, ring)
                pl.when(n >= ring)(lambda: plgpu.barrier_wait(free.at[slot]))
                keys = pl.ds((first + n) * KEYS, KEYS)
                plgpu.copy_gmem_to_smem(k_ref.at[batch, keys], k_ring.at[slot], full.at[slot])
                source = d_ref.at[batch, rows, keys]
                plgpu.copy_gmem_to_smem(source, d_ring.at[slot], full.at[slot])

            pl.loop(0, jnp.minimum(last - first, ring))(
                lambda slot: plgpu.barrier_wait(free.at[slot])
            )

        def add():
            plgpu.set_max_registers(232, action="increase")
            plgpu.barrier_wait(q_ready.at[role])

            def step(n, e):
                slot = lax.rem(n, ring)
                plgpu.barrier_wait(full.at[slot])
                shape = ROWS, KEYS
                dots = ops.dot(
                    ops.zeros(shape), q_tile.at[role], k_ring.at[slot], b_transposed=True
                )
                given = ops.load(d_ring.at[slot])
                passed = jnp.where(dots > 0, given, ops.zeros(shape, q.dtype))
                e = ops.dot(e, passed, k_ring.at[slot])
                plgpu.barrier_arrive(free.at[slot])
                return e

            e_ref[batch, 2 * pair + role, rows, :] = lax.fori_loop(
                0, last - first, step, ops.zeros((ROWS, j))
            )

        lax.cond(role == 2, load, add)

    tiled = hopper.tiled(q.dtype)
    return hopper.kernel(
        body,
        interpret=interpret,
        kernel_name="index_scores_sum_keys",
        out_type=jax.ShapeDtypeStruct((b, i, t, j), jnp.float32),
        grid=(b, t // ROWS, i // 2),
        grid_names=("batch", "tile", "pair"),
        num_threads=3,
        thread_name="role",
        scratch_types=[
            plgpu.SMEM((2, ROWS, j), q.dtype, transforms=tiled),
            plgpu.SMEM((ring, KEYS, j), q.dtype, transforms=tiled),
            plgpu.SMEM((ring, ROWS, KEYS), q.dtype, transforms=tiled),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=ring, num_arrivals=2),
            plgpu.Barrier(num_barriers=ring, num_arrivals=2),
        ],
    )(q, k, dscores, spans)


def sum_queries(q, w, k, dscores, spans, interpret):
    """dk float32[b s j]: sum over queries and heads of [q . k > 0] dI w q, over the spans int32[b s/KEYS 2] of
    queries; dscores keys first, [b s t].

    A block is 128 keys, 64 for each of two warpgroups. What comes is a tile of dI and behind it the tile of
    queries of each head.
    """
    (b, _, i, j), s = q.shape, k.shape[1]
    w = w.swapaxes(1, 2)
    ring = 6
    ops = hopper.Ops(interpret)

    def body(
        q_ref, w_ref, k_ref, d_ref, spans_ref, dk_ref,
        k_tile, q_ring, d_ring, k_ready, full, free, d_full, d_free,
    ):  # fmt: skip
        batch, tile, role = (lax.axis_index(name) for name in ("batch", "tile", "role"))
        first, last = spans_ref[batch, tile, 0], spans_ref[batch, tile, 1]
        count = last - first
        keys = pl.ds(tile * KEYS, KEYS)

        def load():
            plgpu.set_max_registers(40, action="decrease")
            plgpu.copy_gmem_to_smem(k_ref.at[batch, keys], k_tile, k_ready)

            @pl.loop(0, count)
            def _(n):
                rows, at = pl.ds((first + n) * ROWS, ROWS), lax.rem(n, 2)
                pl.when(n >= 2)(lambda: plgpu.barrier_wait(d_free.at[at]))
                source = d_ref.at[batch, keys, rows]
                plgpu.copy_gmem_to_smem(source, d_ring.at[at], d_full.at[at])

                @pl.loop(0, i)
                def _(head):
                    step = n * i + head
                    slot = lax.rem(step, ring)
                    pl.when(step >= ring)(lambda: plgpu.barrier_wait(free.at[slot]))
                    source = q_ref.at[batch, rows, head]
                    plgpu.copy_gmem_to_smem(source, q_ring.at[slot], full.at[slot])

            pl.loop(0, jnp.minimum(count * i, ring))(lambda n: plgpu.barrier_wait(free.at[n]))
            pl.loop(0, jnp.minimum(count, 2))(lambda n: plgpu.barrier_wait(d_free.at[n]))

        def add():
            plgpu.set_max_registers(232, action="increase")
            own = pl.ds(role * 64, 64)
            shape = 64, ROWS
            plgpu.barrier_wait(k_ready)

            def walk(n, dk):
                at = lax.rem(n, 2)
                plgpu.barrier_wait(d_full.at[at])
                given = ops.load(d_ring.at[at, own])
                rows = pl.ds((first + n) * ROWS, ROWS)

                def step(head, dk):
                    slot = lax.rem(n * i + head, ring)
                    weights = ops.load(w_ref.at[batch, head, rows], (), hopper.WGMMA.reduce(0))
                    plgpu.barrier_wait(full.at[slot])
                    dots = ops.dot(
                        ops.zeros(shape), k_tile.at[own], q_ring.at[slot], b_transposed=True
                    )
                    passed = jnp.where(dots > 0, given.astype(jnp.float32), ops.zeros(shape))
                    passed *= hopper.over_columns(weights, shape)
                    dk = ops.dot(dk, passed.astype(q.dtype), q_ring.at[slot])
                    plgpu.barrier_arrive(free.at[slot])
                    return dk

                dk = lax.fori_loop(0, i, step, dk)
                plgpu.barrier_arrive(d_free.at[at])
                return dk

            place = pl.ds(tile * KEYS + role * 64, 64)
            dk_ref[batch, place, :] = lax.fori_loop(0, count, walk, ops.zeros((64, j)))

        lax.cond(role == 2, load, add)

    tiled = hopper.tiled(q.dtype)
    return hopper.kernel(
        body,
        interpret=interpret,
        kernel_name="index_scores_sum_queries",
        out_type=jax.ShapeDtypeStruct((b, s, j), jnp.float32),
        grid=(b, s // KEYS),
        grid_names=("batch", "tile"),
        num_threads=3,
        thread_name="role",
        scratch_types=[
            plgpu.SMEM((KEYS, j), q.dtype, transforms=tiled),
            plgpu.SMEM((ring, ROWS, j), q.dtype, transforms=tiled),
            plgpu.SMEM((2, KEYS, ROWS), q.dtype, transforms=tiled),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=ring),
            plgpu.Barrier(num_barriers=ring, num_arrivals=2),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2, num_arrivals=2),
        ],
    )(q, w, k, dscores, spans)
