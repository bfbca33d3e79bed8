"""KL over selected keys on Hopper: rows are gathered into shared memory, and sums over heads are computed there.

Grid of both kernels: (query,), with a warpgroup that gathers 64 rows at a time and one that computes.

1. `sum_heads` computes the target from the query's latents, and its scores from its index keys: one number per
   key. Shared memory, for 64 heads of 576 columns in bfloat16: queries (72 KiB) and a ring of two tiles of rows (144
   KiB); for 32 index heads of 128, 8 and 32 KiB.
2. XLA compares them (16 KB per query; a gather is 2.9 MB).
3. `pull_rows` gathers the index keys again, recomputes their products, and sums the gradients: of the query in
   registers, float32[128 32], of the keys as a row of 512 bytes per selected key. Shared memory: queries (8 KiB), a
   ring of two tiles of keys (32 KiB), and two tiles of masked gradients (8 KiB).
4. `segment_sum` adds these rows key by key in the order of the queries, so that the result does not depend on
   which query finishes first.

Gathers hit the L2 cache where neighbours select the same keys. The rows' gradients, 1 MB per query, are written
to and read from memory once.

Padding: lists to full tiles with -1 (zeros are gathered), columns to multiples of 64 or 128, heads to multiples of 8
with an infinite log-sum-exp, index heads to multiples of 32 with a weight of 0.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels import backends, hopper
from pallas_kernels.index_scores import gpu as scores_kernel
from pallas_kernels.index_scores.xla import head_weights
from pallas_kernels.indexer_kl.gpu import compare
from pallas_kernels.numerics import LOG2E
from pallas_kernels.segment_sum import BLOCK_ROWS, segment_sum
from pallas_kernels.sparse_flash_attention.gather import gather_all, ring
from pallas_kernels.summed_attention_probs.tiles import pad_to_multiple

# Not measured; chosen by shared memory and registers.
TILE = 64  # rows per step: the size of a tensor core instruction
MAX_QUERIES = 512  # queries per step: their gradients of rows take 537 MB for GLM-5
HEADS = 64
SWIZZLE = 64  # bytes of 32 index heads, over which the gradients of rows are contracted
MAX_WIDTH = 576  # columns of a latent: two tiles of 72 KB and 72 KB of queries


def unsupported_reason(
    idx_q: Float[Array, "b t i j"],
    idx_k: Float[Array, "b s j"],
    q: Float[Array, "b t n x"],
    latents: Float[Array, "b s x"],
    topk: Int32[Array, "b t k"],
) -> str | None:
    """Returns the reason why idx_q, idx_k or q, latents are not supported, or None."""
    dtypes = {str(x.dtype) for x in (idx_q, idx_k, q, latents)}
    if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float32"}:
        return f"inputs are {', '.join(sorted(dtypes))}; all must be bfloat16"
    if (
        idx_q.dtype == jnp.float32
        and backends.BACKEND_OF_PLATFORM.get(backends.platform()) == "gpu"
    ):
        return "tensor cores take no float32 in the memory order of latents and idx_k"
    if idx_q.shape[3] > scores_kernel.MAX_WIDTH:
        return f"index heads of {idx_q.shape[3]} columns; at most {scores_kernel.MAX_WIDTH}"
    if idx_q.shape[2] > HEADS:
        return f"{idx_q.shape[2]} index heads; at most {HEADS}"
    if q.shape[2] > HEADS:
        return f"{q.shape[2]} heads; at most {HEADS}"
    if q.shape[3] > MAX_WIDTH:
        return f"latents of {q.shape[3]} columns; at most {MAX_WIDTH}"
    return None


def forward(
    static,
    idx_q: Float[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    idx_k: Float[Array, "b s j"],
    q: Float[Array, "b t n x"],
    latents: Float[Array, "b s x"],
    lse: Float[Array, "b t n"],
    topk: Int32[Array, "b t k"],
    interpret: object = False,
) -> Float[Array, "b t"]:
    """Returns kl [b t]."""
    return _in_steps(static, idx_q, idx_w, idx_k, q, latents, lse, None, topk, interpret)


def forward_and_gradients(
    static,
    idx_q: Float[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    idx_k: Float[Array, "b s j"],
    q: Float[Array, "b t n x"],
    latents: Float[Array, "b s x"],
    lse: Float[Array, "b t n"],
    weight: Float[Array, "b t"],
    topk: Int32[Array, "b t k"],
    interpret: object = False,
) -> tuple[
    Float[Array, "b t"], Float[Array, "b t i j"], Float[Array, "b t i"], Float[Array, "b s j"]
]:
    """Returns (kl [b t], dq, dw, dk): the gradients of the sum of weight [b t] times kl."""
    return _in_steps(static, idx_q, idx_w, idx_k, q, latents, lse, weight, topk, interpret)


def _in_steps(static, idx_q, idx_w, idx_k, q, latents, lse, weight, topk, interpret) -> Any:
    """Runs the queries of all sequences in steps, over one table of latents and one of index keys."""
    # Split the queries into steps, over tables of all sequences.
    (b, t, _, j), s = idx_q.shape, idx_k.shape[1]
    steps = -(-b * t // MAX_QUERIES)
    size = -(-b * t // steps)
    start = s * jnp.arange(b, dtype=jnp.int32)[:, None, None]
    row_numbers = jnp.where(topk < 0, 0, topk + start + 1)  # 0: none, as in padding
    arrays = (idx_q, idx_w, q, lse, weight, pad_to_multiple(row_numbers, 2, TILE))
    arrays = jax.tree.map(lambda x: _cut(x, steps, size), arrays)
    latents = pad_to_multiple(latents.reshape(b * s, -1), 1, 64)
    keys = pad_to_multiple(idx_k.reshape(b * s, j), 1, 128)

    # Per-head functions of the two sums.
    def probability(logits, lse_base2):
        return jnp.exp2(logits * (static.scale * LOG2E) - lse_base2)

    def score(dots, weight):
        return jnp.maximum(dots, 0) * weight

    # Loss and gradients of one step.
    def step(dk, arrays):
        idx_q, idx_w, q, lse, weight, row_numbers = arrays
        rows, w = row_numbers - 1, head_weights(idx_q, idx_w)
        lse_base2 = LOG2E * lse.astype(jnp.float32)
        # A padding head must have a probability of 0.
        lse_base2 = jnp.pad(
            lse_base2, [(0, 0), (0, -lse_base2.shape[1] % 8)], constant_values=jnp.inf
        )
        queries = pad_to_multiple(pad_to_multiple(q, 1, 8), 2, 64)
        target = sum_heads(probability, queries, lse_base2, latents, rows, interpret)
        queries, weights = (
            pad_to_multiple(pad_to_multiple(idx_q, 1, 32), 2, 128),
            pad_to_multiple(w, 1, 32),
        )
        scores = sum_heads(score, queries, weights, keys, rows, interpret)
        is_selected = rows >= 0
        kl, dscores = compare(jnp.where(is_selected, target, 0), scores, is_selected, weight)
        if dscores is None:
            return dk, kl
        e, parts = pull_rows(queries, weights, keys, dscores, rows, interpret)
        dk = _add(dk, parts, rows, interpret)
        e = e[:, :j, : idx_q.shape[1]].swapaxes(1, 2)
        dw = jnp.sum(e * idx_q.astype(jnp.float32), axis=-1) * j**-0.5
        return dk, (kl, (e * w[..., None]).astype(idx_q.dtype), dw.astype(idx_w.dtype))

    # Scan over the steps; dk is summed.
    dk = jnp.zeros((BLOCK_ROWS * -(-b * s // BLOCK_ROWS), keys.shape[1]), jnp.float32)
    dk, out = lax.scan(step, dk, arrays)
    out = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[: b * t], out)
    out = jax.tree.map(lambda x: x.reshape(b, t, *x.shape[1:]), out)
    return (
        out if weight is None else (*out, dk[: b * s, :j].reshape(idx_k.shape).astype(idx_k.dtype))
    )


def _cut(x, steps: int, size: int):
    """Splits [b t ...] into [steps size ...], with zeros at the end."""
    x = pad_to_multiple(x.reshape(-1, *x.shape[2:]), 0, steps * size)
    return x.reshape(steps, size, *x.shape[1:])


def _add(total, parts, rows, interpret):
    """Adds parts float32[g k j] to rows int32[g k] (-1: none) of total float32[s j], query by query."""
    row_numbers = jnp.where(rows < 0, len(total), rows).reshape(-1)
    # Stable: the parts of one row stay in the order of their queries.
    row_numbers, order = lax.sort(
        (row_numbers, jnp.arange(len(row_numbers), dtype=jnp.int32)), num_keys=1
    )
    row = jnp.arange(len(total) + 1, dtype=jnp.int32)
    starts = jnp.searchsorted(row_numbers, row, method="scan_unrolled").astype(jnp.int32)
    return segment_sum(
        total, parts.reshape(-1, parts.shape[-1]), order, starts, interpret=interpret
    )


def sum_heads(
    per_head: Callable,
    q: Float[Array, "g n x"],
    numbers: Float[Array, "g n"],
    table: Float[Array, "s x"],
    rows: Int32[Array, "g k"],
    interpret: object,
) -> Float[Array, "g k"]:
    """Returns float32[g k]: per row, the sum over the heads of q [g n x] of per_head(product, number).

    rows int32[g k] of table [s x] (-1: zeros); numbers float32[g n]; n is a multiple of 8.
    """
    (g, n, x), k = q.shape, rows.shape[1]
    row_of, column_of = hopper.ROW_OF, hopper.COLUMN_OF
    ops = hopper.Ops(interpret)

    def body(q_ref, numbers_ref, table_ref, rows_ref, out_ref, *, queries, queries_in, keys):
        block, role = lax.axis_index("block"), lax.axis_index("role")

        # Loader warpgroup: gather the rows.
        def load():
            gather_all(ops, table_ref, rows_ref.at[block], keys, jnp.int32(k // TILE))

        # Compute warpgroup: products with all heads, summed.
        def add():
            plgpu.copy_gmem_to_smem(q_ref.at[block], queries, queries_in)
            shape = TILE, n
            head_numbers = ops.load(numbers_ref.at[block], (), column_of)
            plgpu.barrier_wait(queries_in)

            @pl.loop(0, k // TILE)
            def _(i):
                stage = keys.stage(i)
                plgpu.barrier_wait(keys.full.at[stage])
                dots = ops.dot(ops.zeros(shape), keys.tiles.at[stage], queries, b_transposed=True)
                plgpu.barrier_arrive(keys.free.at[stage])
                total = jnp.sum(
                    per_head(dots, hopper.broadcast_columns(head_numbers, shape)), axis=1
                )
                out_ref[block, pl.ds(i * TILE, TILE)] = ops.cast(total, row_of)

        lax.cond(role == 1, load, add)

    # Build and call the kernel.
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
            "queries": plgpu.SMEM((n, x), q.dtype, transforms=hopper.tile_transforms(q.dtype)),
            "queries_in": plgpu.Barrier(),
            "keys": ring((TILE, x), 1, q.dtype, stages=2),
        },
    )(q, numbers, table, rows)


def pull_rows(
    q: Float[Array, "g i j"],
    w: Float[Array, "g i"],
    table: Float[Array, "s j"],
    dscores: Float[Array, "g k"],
    rows: Int32[Array, "g k"],
    interpret: object,
) -> tuple[Float[Array, "g j i"], Float[Array, "g k j"]]:
    """Returns (e float32[g j i], gradients of the rows float32[g k j]) of g queries with dscores float32[g k].

    q [g i j]; w float32[g i]: head weights; table [s j]; rows int32[g k] of it. i is a multiple of 32.
    """
    (g, i, j), k = q.shape, rows.shape[1]
    row_of, column_of = hopper.ROW_OF, hopper.COLUMN_OF
    tiled = hopper.tile_transforms(q.dtype, SWIZZLE)
    ops = hopper.Ops(interpret)

    def body(
        q_ref, w_ref, table_ref, d_ref, rows_ref, e_ref, parts_ref,
        *, queries, queries_in, keys, masked_tile,
    ):  # fmt: skip
        block, role = lax.axis_index("block"), lax.axis_index("role")

        # Loader warpgroup: gather the rows.
        def load():
            gather_all(ops, table_ref, rows_ref.at[block], keys, jnp.int32(k // TILE), SWIZZLE)

        # Compute warpgroup: gradients of the query and of the rows.
        def add():
            plgpu.copy_gmem_to_smem(q_ref.at[block], queries, queries_in)
            shape = TILE, i
            weights = lax.broadcast_in_dim(ops.load(w_ref.at[block], (), column_of), shape, [1])
            plgpu.barrier_wait(queries_in)

            def step(n, e):
                window = pl.ds(n * TILE, TILE)
                dscores_row = hopper.broadcast_rows(
                    ops.load(d_ref.at[block, window], (), row_of), shape
                )
                stage = keys.stage(n)
                plgpu.barrier_wait(keys.full.at[stage])
                tile = keys.tiles.at[stage]
                dots = ops.dot(ops.zeros(shape), tile, queries, b_transposed=True)
                masked = jnp.where(dots > 0, dscores_row, ops.zeros(shape))
                # Two buffers: other warps may still read the tile of the previous step.
                factor = masked_tile.at[lax.rem(n, 2)]
                factor[...] = masked.astype(q.dtype)
                plgpu.commit_smem()
                weighted = (masked * weights).astype(q.dtype)
                # With more than 64 columns per step, one block would fill a multiprocessor.
                for first in range(0, j, 64):
                    columns = pl.ds(first, 64)
                    part = ops.dot(ops.zeros((TILE, 64)), weighted, queries.at[:, columns])
                    parts_ref[block, window, columns] = part
                e = ops.dot(e, tile, factor, a_transposed=True)
                plgpu.barrier_arrive(keys.free.at[stage])
                return e

            e_ref[block, :, :] = lax.fori_loop(0, k // TILE, step, ops.zeros((j, i)))

        lax.cond(role == 1, load, add)

    # Build and call the kernel.
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
            "masked_tile": plgpu.SMEM((2, TILE, i), q.dtype, transforms=tiled),
        },
    )(q, w, table, dscores, rows)
