"""KL over selected keys on Hopper: rows are gathered into shared memory, and sums over heads made from there.

A block is one query. `sum_heads` makes its target from its latents and its scores from its index keys, a
number a key; XLA compares them (16 KB a query, where a gather takes 2.9 MB); `pull_rows` gathers the index
keys again, makes their products again, and sums the gradients: of the query in registers, of the keys as a
row of 512 bytes for each selected one. `collect` adds these key by key in the order of the queries, so that
no sum depends on which query is done first. All gathers are from the second-level cache where neighbours
choose alike; the rows' gradients, 1 MB a query, go through memory twice.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch, hopper
from pallas_kernels.collect import TOGETHER, collect
from pallas_kernels.head_probs.tiles import padded
from pallas_kernels.index_scores import gpu as scores_kernel
from pallas_kernels.index_scores.ref import head_weights
from pallas_kernels.indexer_kl.gpu import compare
from pallas_kernels.numerics import LOG2E
from pallas_kernels.sparse_flash_attention.gather import gather_all, ring

# Not measured; by shared memory and registers alone.
TILE = 64  # rows at a time: what a tensor core instruction takes
AT_ONCE = 512  # queries whose gradients of rows exist at a time: 537 MB for GLM-5
HEADS = 64
SWIZZLE = 64  # bytes: those of 32 index heads, over which the gradients of rows are contracted
WIDEST = 576  # columns of a latent: two tiles of 72 KB beside 72 KB of queries


def refuse(idx_q, idx_k, q, latents, topk):
    """Why the scores of idx_q, idx_k and the probabilities of q, latents cannot run here, or None."""
    dtypes = {str(x.dtype) for x in (idx_q, idx_k, q, latents)}
    if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float32"}:
        return f"inputs are {', '.join(sorted(dtypes))}; all must be bfloat16"
    if idx_q.dtype == jnp.float32 and dispatch.OF_PLATFORM.get(dispatch.platform()) == "gpu":
        return "tensor cores take no float32 that lies in memory as latents and idx_k do"
    if idx_q.shape[3] > scores_kernel.WIDEST:
        return f"index heads of {idx_q.shape[3]} columns; {scores_kernel.WIDEST} at most"
    if idx_q.shape[2] > HEADS:
        return f"{idx_q.shape[2]} index heads; {HEADS} at most"
    if q.shape[2] > HEADS:
        return f"{q.shape[2]} heads; {HEADS} at most"
    if q.shape[3] > WIDEST:
        return f"latents of {q.shape[3]} columns; {WIDEST} at most"
    return None


def forward(static, idx_q, idx_w, idx_k, q, latents, lse, topk, interpret=False):
    """kl wide[b t]."""
    return _in_steps(static, idx_q, idx_w, idx_k, q, latents, lse, None, topk, interpret)


def forward_and_gradients(
    static, idx_q, idx_w, idx_k, q, latents, lse, weight, topk, interpret=False
):
    """(kl wide[b t], dq, dw, dk): the gradients of the sum of weight [b t] times kl."""
    return _in_steps(static, idx_q, idx_w, idx_k, q, latents, lse, weight, topk, interpret)


def _in_steps(static, idx_q, idx_w, idx_k, q, latents, lse, weight, topk, interpret):
    """All queries of all sequences in steps, over one table of latents and one of index keys."""
    (b, t, _, j), s = idx_q.shape, idx_k.shape[1]
    steps = -(-b * t // AT_ONCE)
    size = -(-b * t // steps)
    start = s * jnp.arange(b, dtype=jnp.int32)[:, None, None]
    place = jnp.where(topk < 0, 0, topk + start + 1)  # 0, as what is padded: none
    arrays = (idx_q, idx_w, q, lse, weight, padded(place, 2, TILE))
    arrays = jax.tree.map(lambda x: _cut(x, steps, size), arrays)
    latents = padded(latents.reshape(b * s, -1), 1, 64)
    keys = padded(idx_k.reshape(b * s, j), 1, 128)

    def probability(logits, norm):
        return jnp.exp2(logits * (static.scale * LOG2E) - norm)

    def score(dots, weight):
        return jnp.maximum(dots, 0) * weight

    def step(dk, arrays):
        idx_q, idx_w, q, lse, weight, place = arrays
        rows, w = place - 1, head_weights(idx_q, idx_w)
        norm = LOG2E * lse.astype(jnp.float32)
        # A head that is padded has a probability of 0, and a weight.
        norm = jnp.pad(norm, [(0, 0), (0, -norm.shape[1] % 8)], constant_values=jnp.inf)
        queries = padded(padded(q, 1, 8), 2, 64)
        target = sum_heads(probability, queries, norm, latents, rows, interpret)
        queries, weights = padded(padded(idx_q, 1, 32), 2, 128), padded(w, 1, 32)
        scores = sum_heads(score, queries, weights, keys, rows, interpret)
        some = rows >= 0
        kl, dscores = compare(jnp.where(some, target, 0), scores, some, weight)
        if weight is None:
            return dk, kl
        e, parts = pull_rows(queries, weights, keys, dscores, rows, interpret)
        dk = _add(dk, parts, rows, interpret)
        e = e[:, :j, : idx_q.shape[1]].swapaxes(1, 2)
        dw = jnp.sum(e * idx_q.astype(jnp.float32), axis=-1) * j**-0.5
        return dk, (kl, (e * w[..., None]).astype(idx_q.dtype), dw.astype(idx_w.dtype))

    dk = jnp.zeros((TOGETHER * -(-b * s // TOGETHER), keys.shape[1]), jnp.float32)
    dk, out = lax.scan(step, dk, arrays)
    out = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[: b * t], out)
    out = jax.tree.map(lambda x: x.reshape(b, t, *x.shape[1:]), out)
    return (
        out if weight is None else (*out, dk[: b * s, :j].reshape(idx_k.shape).astype(idx_k.dtype))
    )


def _cut(x, steps: int, size: int):
    """[steps size ...] of [b t ...], with zeros behind."""
    x = padded(x.reshape(-1, *x.shape[2:]), 0, steps * size)
    return x.reshape(steps, size, *x.shape[1:])


def _add(total, parts, rows, interpret):
    """total float32[s j] and the parts float32[g k j] of its rows int32[g k] (-1: none), query by query."""
    named = jnp.where(rows < 0, len(total), rows).reshape(-1)
    # Stable: those of one row stay in the order of their queries.
    named, order = lax.sort((named, jnp.arange(len(named), dtype=jnp.int32)), num_keys=1)
    row = jnp.arange(len(total) + 1, dtype=jnp.int32)
    starts = jnp.searchsorted(named, row, method="scan_unrolled").astype(jnp.int32)
    return collect(total, parts.reshape(-1, parts.shape[-1]), order, starts, interpret=interpret)


def sum_heads(each, q, numbers, table, rows, interpret):
    """float32[g k]: for the rows int32[g k] of table [s x] (-1: zeros), the sum over the heads of q [g n x] of
    each(product, number), with numbers float32[g n]; n is a multiple of 8."""
    (g, n, x), k = q.shape, rows.shape[1]
    row_of, column_of = hopper.WGMMA.reduce(1), hopper.WGMMA.reduce(0)
    ops = hopper.Ops(interpret)

    def body(q_ref, numbers_ref, table_ref, rows_ref, out_ref, *, queries, queries_in, keys):
        block, role = lax.axis_index("block"), lax.axis_index("role")

        def load():
            gather_all(ops, table_ref, rows_ref.at[block], keys, jnp.int32(k // TILE))

        def add():
            plgpu.copy_gmem_to_smem(q_ref.at[block], queries, queries_in)
            shape = TILE, n
            own = ops.load(numbers_ref.at[block], (), column_of)
            plgpu.barrier_wait(queries_in)

            @pl.loop(0, k // TILE)
            def _(i):
                stage = keys.stage(i)
                plgpu.barrier_wait(keys.full.at[stage])
                dots = ops.dot(ops.zeros(shape), keys.tiles.at[stage], queries, b_transposed=True)
                plgpu.barrier_arrive(keys.free.at[stage])
                total = jnp.sum(each(dots, hopper.over_columns(own, shape)), axis=1)
                out_ref[block, pl.ds(i * TILE, TILE)] = ops.cast(total, row_of)

        lax.cond(role == 1, load, add)

    return hopper.kernel(
        body,
        interpret=interpret,
        kernel_name="sparse_sum_heads",
        out_type=jax.ShapeDtypeStruct((g, k), jnp.float32),
        grid=(g,),
        grid_names=("block",),
        num_threads=2,
        thread_name="role",
        # Sums over a row stay within a warp: no scratch between warps.
        compiler_params=hopper.compiler_params(approx_math=True, reduction_scratch_bytes=0),
        scratch_types={
            "queries": plgpu.SMEM((n, x), q.dtype, transforms=hopper.tiled(q.dtype)),
            "queries_in": plgpu.Barrier(),
            "keys": ring((TILE, x), 1, q.dtype, stages=2),
        },
    )(q, numbers, table, rows)


def pull_rows(q, w, table, dscores, rows, interpret):
    """(e float32[g j i], gradients of the rows float32[g k j]) of g queries with dscores float32[g k].

    q [g i j] and w float32[g i], the head weights; table [s j], rows int32[g k] of it; i is a multiple of
    32.
    """
    (g, i, j), k = q.shape, rows.shape[1]
    row_of, column_of = hopper.WGMMA.reduce(1), hopper.WGMMA.reduce(0)
    tiled = hopper.tiled(q.dtype, SWIZZLE)
    ops = hopper.Ops(interpret)

    def body(
        q_ref, w_ref, table_ref, d_ref, rows_ref, e_ref, parts_ref,
        *, queries, queries_in, keys, passed_tile,
    ):  # fmt: skip
        block, role = lax.axis_index("block"), lax.axis_index("role")

        def load():
            gather_all(ops, table_ref, rows_ref.at[block], keys, jnp.int32(k // TILE), SWIZZLE)

        def add():
            plgpu.copy_gmem_to_smem(q_ref.at[block], queries, queries_in)
            shape = TILE, i
            weights = lax.broadcast_in_dim(ops.load(w_ref.at[block], (), column_of), shape, [1])
            plgpu.barrier_wait(queries_in)

            def step(n, e):
                place = pl.ds(n * TILE, TILE)
                given = hopper.over_rows(ops.load(d_ref.at[block, place], (), row_of), shape)
                stage = keys.stage(n)
                plgpu.barrier_wait(keys.full.at[stage])
                tile = keys.tiles.at[stage]
                dots = ops.dot(ops.zeros(shape), tile, queries, b_transposed=True)
                passed = jnp.where(dots > 0, given, ops.zeros(shape))
                # Two places: other warps may still multiply what the step before has written.
                factor = passed_tile.at[lax.rem(n, 2)]
                factor[...] = passed.astype(q.dtype)
                plgpu.commit_smem()
                weighted = (passed * weights).astype(q.dtype)
                for first in range(
                    0, j, 64
                ):  # more at a time, and one block fills a multiprocessor
                    columns = pl.ds(first, 64)
                    part = ops.dot(ops.zeros((TILE, 64)), weighted, queries.at[:, columns])
                    parts_ref[block, place, columns] = part
                e = ops.dot(e, tile, factor, a_transposed=True)
                plgpu.barrier_arrive(keys.free.at[stage])
                return e

            e_ref[block, :, :] = lax.fori_loop(0, k // TILE, step, ops.zeros((j, i)))

        lax.cond(role == 1, load, add)

    return hopper.kernel(
        body,
        interpret=interpret,
        kernel_name="sparse_pull_rows",
        out_type=(
            jax.ShapeDtypeStruct((g, j, i), jnp.float32),
            jax.ShapeDtypeStruct((g, k, j), jnp.float32),
        ),
        grid=(g,),
        grid_names=("block",),
        num_threads=2,
        thread_name="role",
        scratch_types={
            "queries": plgpu.SMEM((i, j), q.dtype, transforms=tiled),
            "queries_in": plgpu.Barrier(),
            "keys": ring((TILE, j), 1, q.dtype, stages=2, swizzle=SWIZZLE),
            "passed_tile": plgpu.SMEM((2, TILE, i), q.dtype, transforms=tiled),
        },
    )(q, w, table, dscores, rows)
