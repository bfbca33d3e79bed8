"""The kernel of `gpu.forward`: a block of rows against its own list of latents."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.mask import HIDDEN
from pallas_kernels.numerics import LOG2E
from pallas_kernels.sparse_flash_attention.gather import gather_all, ring

ROWS = 64  # queries x heads of a block: what a tensor core instruction takes
TILE = 64  # latents at a time: two tiles of 72 KB beside 72 KB of queries
PIECE = 128  # columns of one product: see `hopper.Ops.dot`


def parts_of(width: int) -> int:
    """How many warpgroups share the sums of so many columns: 256 of them are 128 registers a thread."""
    return -(-width // 256)


def attend(q, latents, rows, members, count, bits, *, scale, value_dim, interpret):
    """(out [g r y], lse float32[g r], largest logit float32[g r]) of g blocks of r = ROWS rows.

    q [g r x]; latents [s x]; rows int32[g c] of them for each block, members int32[g c] with the bits of
    the queries that chose it, count int32[g] of those in use; bits int32[r] of each row's query.

    One warpgroup gathers tiles into a ring of two, one makes their weights, and the others each sum
    their own columns of the values: products of one tile run beside the softmax of the next.
    """
    blocks, _, x = q.shape
    parts = parts_of(value_dim)
    part = value_dim // parts
    weigher, loader = parts, parts + 1
    row_of, column_of = (
        hopper.WGMMA.reduce(1),
        hopper.WGMMA.reduce(0),
    )  # a number per row, per column
    ops = hopper.Ops(interpret)

    def body(
        q_ref, latents_ref, rows_ref, members_ref, count_ref, bits_ref, out_ref, lse_ref, top_ref,
        *, queries, queries_in, keys, weights, factors, weighed, taken,
    ):  # fmt: skip
        block, role = lax.axis_index("block"), lax.axis_index("role")
        tiles = lax.div(count_ref[block] + (TILE - 1), TILE)

        def load():
            plgpu.set_max_registers(48, action="decrease")
            gather_all(ops, latents_ref, rows_ref.at[block], keys, tiles)

        def weigh():
            plgpu.set_max_registers(96, action="decrease")
            plgpu.copy_gmem_to_smem(q_ref.at[block], queries, queries_in)
            own = ops.load(bits_ref, layout=row_of)
            plgpu.barrier_wait(queries_in)
            shape = ROWS, TILE

            def step(i, carry):
                top, total = carry
                chosen = ops.load(members_ref, (block, pl.ds(i * TILE, TILE)), layout=column_of)
                stage = keys.stage(i)
                plgpu.barrier_wait(keys.full.at[stage])
                tile = keys.tiles.at[stage]
                logits = ops.dot(ops.zeros(shape), queries, tile, b_transposed=True) * scale
                logits = jnp.where(chose(own, chosen, shape), logits, HIDDEN)
                new = jnp.maximum(top, jnp.max(logits, axis=1))
                p = jnp.exp2((logits - hopper.over_rows(new, shape)) * LOG2E)
                factor = jnp.exp2((top - new) * LOG2E)
                total = total * factor + jnp.sum(p, axis=1)

                @pl.when(i > 0)
                def _():
                    plgpu.barrier_wait(taken)

                weights[...] = p.astype(weights.dtype)
                factors[...] = factor
                plgpu.commit_smem()
                plgpu.barrier_arrive(weighed)
                return new, total

            start = ops.full((ROWS,), HIDDEN, layout=row_of), ops.zeros((ROWS,), layout=row_of)
            top, total = lax.fori_loop(0, tiles, step, start)

            @pl.when(tiles > 0)
            def _():
                plgpu.barrier_wait(taken)

            seen = top > HIDDEN / 2
            factors[...] = jnp.where(seen, 1 / total, 0.0)
            plgpu.commit_smem()
            plgpu.barrier_arrive(weighed)
            lse_ref[block, :] = jnp.where(seen, top + jnp.log(total), jnp.inf)
            top_ref[block, :] = top

        def add():
            plgpu.set_max_registers(184, action="increase")
            columns = pl.ds(role * part, part)

            def scaled(acc):
                return acc * hopper.over_rows(ops.load(factors, layout=row_of), acc.shape)

            def step(i, acc):
                plgpu.barrier_wait(weighed)
                stage = keys.stage(i)
                acc = ops.dot(scaled(acc), weights, keys.tiles.at[stage, :, columns], most=PIECE)
                plgpu.barrier_arrive(taken)
                plgpu.barrier_arrive(keys.free.at[stage])
                return acc

            acc = lax.fori_loop(0, tiles, step, ops.zeros((ROWS, part)))
            plgpu.barrier_wait(weighed)
            # All logits are made: the queries' place holds the outcome on its way out.
            hopper.send(scaled(acc), queries, out_ref.at[block], columns)

        # One branch of one choice each, or the compiler gives every role the same registers.
        lax.cond(role == loader, load, lambda: lax.cond(role == weigher, weigh, add))

    tiled = hopper.tiled(q.dtype)
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
        # Sums over a row stay within a warp: no scratch between warps.
        compiler_params=hopper.compiler_params(approx_math=True, reduction_scratch_bytes=0),
        scratch_types={
            "queries": plgpu.SMEM((ROWS, x), q.dtype, transforms=tiled),
            "queries_in": plgpu.Barrier(),
            "keys": ring((TILE, x), parts, q.dtype, stages=2),
            "weights": plgpu.SMEM((ROWS, TILE), q.dtype, transforms=tiled),
            "factors": plgpu.SMEM((ROWS,), jnp.float32),
            "weighed": plgpu.Barrier(),
            "taken": plgpu.Barrier(num_arrivals=parts),
        },
    )
    return kernel(q, latents, rows, members, count, bits)


def chose(own, members, shape):
    """Whether the query of a row (own: its bit) is among those that chose the latent of a column."""
    return (hopper.over_rows(own, shape) & hopper.over_columns(members, shape)) != 0
