"""Kernel of `gpu.forward`: a block of rows against its list of latents.

Grid: (block of 64 rows). Shared memory, for latents of 576 columns in bfloat16: the rows' queries [64 576] (72 KiB), a
ring of two gathered tiles of 64 latents (144 KiB), one tile of weights [64 64] (8 KiB) with a factor per row, and three
lists of rows.

- A loader warpgroup gathers the tiles.
- A weight warpgroup computes logits and the online softmax, and writes weights and rescaling factors.
- The other warpgroups (two for 512 columns) each sum some columns of the values in registers, float32[64 256], 128 per
  thread. The output passes through the queries' buffer.

Products of one tile run during the softmax of the next. A row without latents gives 0 and an infinite log-sum-exp.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels import hopper
from pallas_kernels.mask import HIDDEN
from pallas_kernels.numerics import LOG2E
from pallas_kernels.sparse_flash_attention.gather import gather_all, ring

ROWS = 64  # queries x heads of a block: the size of a tensor core instruction
TILE = 64  # latents per step: two tiles of 72 KB and 72 KB of queries
PIECE = 128  # columns of one product: see `hopper.Ops.dot`


def num_parts(width: int) -> int:
    """Returns how many warpgroups share the sums of `width` columns; 256 columns take 128 registers per thread."""
    return -(-width // 256)


def attend(
    q: Float[Array, "g r x"],
    latents: Float[Array, "s x"],
    rows: Int32[Array, "g c"],
    members: Int32[Array, "g c"],
    count: Int32[Array, " g"],
    bits: Int32[Array, " r"],
    *,
    scale: float,
    value_dim: int,
    interpret: object,
) -> tuple[Float[Array, "g r y"], Float[Array, "g r"], Float[Array, "g r"]]:
    """Returns (out [g r y], lse float32[g r], largest logit float32[g r]) of g blocks of r = ROWS rows.

    q [g r x]; latents [s x]; rows int32[g c]: rows of latents per block; members int32[g c]: bits of the
    queries that selected the row; count int32[g]: used entries; bits int32[r]: the bit of each row's query.

    One warpgroup gathers tiles into a ring of two, one computes their weights, and the others each sum some
    columns of the values. Products of one tile run during the softmax of the next.
    """
    blocks, _, x = q.shape
    parts = num_parts(value_dim)
    part = value_dim // parts
    weigher, loader = parts, parts + 1
    # Layouts of one number per row and per column.
    row_of, column_of = hopper.ROW_OF, hopper.COLUMN_OF
    ops = hopper.Ops(interpret)

    def body(
        q_ref, latents_ref, rows_ref, members_ref, count_ref, bits_ref, out_ref, lse_ref, top_ref,
        *, queries, queries_in, keys, weights, factors, weights_ready, weights_free,
    ):  # fmt: skip
        block, role = lax.axis_index("block"), lax.axis_index("role")
        tiles = lax.div(count_ref[block] + (TILE - 1), TILE)

        # Loader warpgroup: gather the latents.
        def load():
            plgpu.set_max_registers(48, action="decrease")
            gather_all(ops, latents_ref, rows_ref.at[block], keys, tiles)

        # Weight warpgroup: logits and online softmax.
        def compute_weights():
            plgpu.set_max_registers(96, action="decrease")
            # The rows' queries.
            plgpu.copy_gmem_to_smem(q_ref.at[block], queries, queries_in)
            query_bits = ops.load(bits_ref, layout=row_of)
            plgpu.barrier_wait(queries_in)
            shape = ROWS, TILE

            # Weights of one tile. They are computed before the wait for the readers of the previous weights.
            def step(i, carry):
                top, total = carry
                member_bits = ops.load(
                    members_ref, (block, pl.ds(i * TILE, TILE)), layout=column_of
                )
                stage = keys.stage(i)
                plgpu.barrier_wait(keys.full.at[stage])
                tile = keys.tiles.at[stage]
                logits = ops.dot(ops.zeros(shape), queries, tile, b_transposed=True) * scale
                logits = jnp.where(is_selected(query_bits, member_bits, shape), logits, HIDDEN)
                new_top = jnp.maximum(top, jnp.max(logits, axis=1))
                p = jnp.exp2((logits - hopper.broadcast_rows(new_top, shape)) * LOG2E)
                factor = jnp.exp2((top - new_top) * LOG2E)
                total = total * factor + jnp.sum(p, axis=1)

                @pl.when(i > 0)
                def _():
                    plgpu.barrier_wait(weights_free)

                weights[...] = p.astype(weights.dtype)
                factors[...] = factor
                plgpu.commit_smem()
                plgpu.barrier_arrive(weights_ready)
                return new_top, total

            start = ops.full((ROWS,), HIDDEN, layout=row_of), ops.zeros((ROWS,), layout=row_of)
            top, total = lax.fori_loop(0, tiles, step, start)

            # The last factor normalises the sums.
            @pl.when(tiles > 0)
            def _():
                plgpu.barrier_wait(weights_free)

            has_rows = top > HIDDEN / 2
            factors[...] = jnp.where(has_rows, 1 / total, 0.0)
            plgpu.commit_smem()
            plgpu.barrier_arrive(weights_ready)
            lse_ref[block, :] = jnp.where(has_rows, top + jnp.log(total), jnp.inf)
            top_ref[block, :] = top

        # Sum warpgroups: each sums some columns of the values.
        def add():
            plgpu.set_max_registers(184, action="increase")
            columns = pl.ds(role * part, part)

            def rescale(acc):
                return acc * hopper.broadcast_rows(ops.load(factors, layout=row_of), acc.shape)

            def step(i, acc):
                plgpu.barrier_wait(weights_ready)
                stage = keys.stage(i)
                acc = ops.dot(
                    rescale(acc), weights, keys.tiles.at[stage, :, columns], max_columns=PIECE
                )
                plgpu.barrier_arrive(weights_free)
                plgpu.barrier_arrive(keys.free.at[stage])
                return acc

            acc = lax.fori_loop(0, tiles, step, ops.zeros((ROWS, part)))
            plgpu.barrier_wait(weights_ready)
            # All logits are computed, so the queries' buffer can hold the output on its way to memory.
            hopper.store_via_smem(rescale(acc), queries, out_ref.at[block], columns)

        # One branch per role: otherwise the compiler gives every role the same number of registers.
        lax.cond(role == loader, load, lambda: lax.cond(role == weigher, compute_weights, add))

    # Build and call the kernel.
    tiled = hopper.tile_transforms(q.dtype)
    kernel = hopper.kernel(
        body,
        kernel_name="sparse_attend",
        interpret=interpret,
        out_type=(
            jax.ShapeDtypeStruct((blocks, ROWS, value_dim), q.dtype),
            jax.ShapeDtypeStruct((blocks, ROWS), jnp.float32),
            jax.ShapeDtypeStruct((blocks, ROWS), jnp.float32),
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=parts + 2,
        thread_name="role",
        # Sums over a row stay within a warp, so no scratch between warps is needed.
        compiler_params=hopper.compiler_params(approx_math=True, reduction_scratch_bytes=0),
        scratch_types={
            "queries": plgpu.SMEM((ROWS, x), q.dtype, transforms=tiled),
            "queries_in": plgpu.Barrier(),
            "keys": ring((TILE, x), parts, q.dtype, stages=2),
            "weights": plgpu.SMEM((ROWS, TILE), q.dtype, transforms=tiled),
            "factors": plgpu.SMEM((ROWS,), jnp.float32),
            "weights_ready": plgpu.Barrier(),
            "weights_free": plgpu.Barrier(num_arrivals=parts),
        },
    )
    return kernel(q, latents, rows, members, count, bits)


def is_selected(
    query_bits: Int32[Array, " r"], members: Int32[Array, " c"], shape: tuple[int, int]
) -> Bool[Array, "r c"]:
    """Returns whether the query of a row selected the latent of a column; query_bits: the bits of the queries."""
    return (
        hopper.broadcast_rows(query_bits, shape) & hopper.broadcast_columns(members, shape)
    ) != 0
