"""Kernels of `gpu.backward`.

One multiprocessor cannot hold the sums of a block's queries and of a tile's latents at the same time. The work
is split where the least data crosses: at the weights p and the gradients ds of the logits, 256 bytes per latent
of a block, compared with the 1152 bytes of its gather.

1. `score` visits each block's latents like the forward, sums the gradient of the queries, and writes ds and p. Grid:
   (block of 64 rows). Shared memory, for GLM-5 in bfloat16: queries (72 KiB) and output gradients (64 KiB), a ring of
   two tiles of 32 latents (72 KiB), two tiles each of ds and p (16 KiB). A loader warpgroup gathers, a score warpgroup
   computes ds and p, and two others sum 288 columns of dq each, 144 registers per thread.
2. `spread` takes several neighbouring blocks and the union of their latents, and sums ds^T q + p^T dout over the
   queries for each latent. Grid: (union of four blocks, part of the columns). Shared memory: a ring of three stages of
   192 gathered rows of scores (72 KiB) and of 192 columns of queries or output gradients (72 KiB). A loader warpgroup
   gathers, and three others sum 64 latents each in registers.
3. `segment_sum` adds these sums to their latents, in the order of the blocks, so that no sum depends on which
   block finishes first.

The sums of `spread` are float32: 2304 bytes per latent of GLM-5 are written and read again. With one block per
union this would be 4.6 KB per latent of a query, and take longer than all products. Four blocks whose
neighbours share nine of ten latents write 1.5 KB.

Padding: entries without a member give weights of 0; tiles after a list's last entry are neither written nor read.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels import hopper
from pallas_kernels.numerics import LOG2E
from pallas_kernels.sparse_flash_attention.gather import PREFETCH_LISTS, gather, gather_all, ring
from pallas_kernels.sparse_flash_attention.gpu_forward import (
    PIECE,
    ROWS,
    is_selected,
    num_parts,
)

SCORED = 32  # latents per step: q and dout take 136 KB, which leaves two tiles of 36 KB
MAX_PART_WIDTH = 288  # columns of a gradient of q in one warpgroup: 144 registers per thread
SWIZZLE = 64  # bytes of SCORED numbers, over which the gradient of q is contracted
SPREAD = 3 * ROWS  # latents per step, 64 for each of three warpgroups


def score(
    q: Float[Array, "g r x"],
    dout: Float[Array, "g r x"],
    latents: Float[Array, "s x"],
    rows: Int32[Array, "g c"],
    members: Int32[Array, "g c"],
    count: Int32[Array, " g"],
    bits: Int32[Array, " r"],
    lse: Float[Array, "g r"],
    delta: Float[Array, "g r"],
    *,
    scale: float,
    value_dim: int,
    interpret: object,
) -> tuple[Float[Array, "g r x"], Float[Array, "g c 2*r"]]:
    """Returns (dq, scores) of g blocks of r = ROWS rows; scores hold ds^T, then p^T.

    Only the first value_dim columns of dout are read. delta: the sum of out * dout. The other arguments as for
    `attend`.
    Scores beyond the tiles that count reaches are not written.
    """
    blocks, _, x = q.shape
    values = pl.ds(0, value_dim)
    parts = -(-x // MAX_PART_WIDTH)
    part = x // parts
    scorer, loader = parts, parts + 1
    row_of, column_of = hopper.ROW_OF, hopper.COLUMN_OF
    ops = hopper.Ops(interpret)

    def body(
        q_ref, dout_ref, latents_ref, rows_ref, members_ref, count_ref, bits_ref, lse_ref, delta_ref,
        dq_ref, scores_ref, *, queries, douts, inputs_in, keys, ds_tiles, p_tiles, scored,
    ):  # fmt: skip
        block, role = lax.axis_index("block"), lax.axis_index("role")
        tiles = lax.div(count_ref[block] + (SCORED - 1), SCORED)

        # Loader warpgroup: gather the latents.
        def load():
            plgpu.set_max_registers(40, action="decrease")
            gather_all(ops, latents_ref, rows_ref.at[block], keys, tiles, SWIZZLE)

        # Score warpgroup: p and ds of each tile.
        def make_scores():
            plgpu.set_max_registers(120, action="decrease")
            plgpu.copy_gmem_to_smem(q_ref.at[block], queries, inputs_in)
            plgpu.copy_gmem_to_smem(dout_ref.at[block, :, values], douts, inputs_in)
            query_bits = ops.load(bits_ref, layout=row_of)
            lse = ops.load(lse_ref, (block,), layout=row_of) * LOG2E
            delta = ops.load(delta_ref, (block,), layout=row_of)
            plgpu.barrier_wait(inputs_in)
            shape = ROWS, SCORED

            # One tile: both products, then p and ds, transposed so that `spread` can gather their rows.
            @pl.loop(0, tiles)
            def _(i):
                window = pl.ds(i * SCORED, SCORED)
                chosen = ops.load(members_ref, (block, window), layout=column_of)
                stage = keys.stage(i)
                plgpu.barrier_wait(keys.full.at[stage])
                tile = keys.tiles.at[stage]
                logits = ops.dot(ops.zeros(shape), queries, tile, b_transposed=True)
                tile = keys.tiles.at[stage, :, values]
                dp = ops.dot(ops.zeros(shape), douts, tile, b_transposed=True)
                p = jnp.exp2(logits * (scale * LOG2E) - hopper.broadcast_rows(lse, shape))
                p = jnp.where(is_selected(query_bits, chosen, shape), p, 0.0)
                ds = p * (dp - hopper.broadcast_rows(delta, shape)) * scale
                # The tile two steps earlier has been copied out; its other readers have freed its latents.
                plgpu.wait_smem_to_gmem(2, wait_read_only=True)
                ops.store_transposed(ds_tiles.at[stage], ds.astype(q.dtype))
                ops.store_transposed(p_tiles.at[stage], p.astype(q.dtype))
                plgpu.commit_smem()
                plgpu.barrier_arrive(scored.at[stage])
                target = scores_ref.at[block, window]
                plgpu.copy_smem_to_gmem(ds_tiles.at[stage], target.at[:, pl.ds(0, ROWS)])
                plgpu.copy_smem_to_gmem(p_tiles.at[stage], target.at[:, pl.ds(ROWS, ROWS)])

            plgpu.wait_smem_to_gmem(0)

        # Sum warpgroups: gradient of the queries, by columns.
        def add():
            plgpu.set_max_registers(176, action="increase")
            columns = pl.ds(role * part, part)
            plgpu.barrier_wait(inputs_in)

            def step(i, acc):
                stage = keys.stage(i)
                plgpu.barrier_wait(scored.at[stage])
                ds, tile = ds_tiles.at[stage], keys.tiles.at[stage, :, columns]
                acc = ops.dot(acc, ds, tile, a_transposed=True, max_columns=160)
                plgpu.barrier_arrive(keys.free.at[stage])
                return acc

            acc = lax.fori_loop(0, tiles, step, ops.zeros((ROWS, part)))
            hopper.store_via_smem(acc, queries, dq_ref.at[block], columns)

        lax.cond(role == loader, load, lambda: lax.cond(role == scorer, make_scores, add))

    # Build and call the kernel.
    tiled = hopper.tile_transforms(q.dtype, SWIZZLE)
    kernel = hopper.kernel(
        body,
        kernel_name="sparse_score",
        interpret=interpret,
        out_type=(
            jax.ShapeDtypeStruct((blocks, ROWS, x), q.dtype),
            jax.ShapeDtypeStruct((blocks, rows.shape[1], 2 * ROWS), q.dtype),
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=parts + 2,
        thread_name="role",
        compiler_params=hopper.compiler_params(approx_math=True, reduction_scratch_bytes=0),
        scratch_types={
            "queries": plgpu.SMEM((ROWS, x), q.dtype, transforms=tiled),
            "douts": plgpu.SMEM((ROWS, value_dim), q.dtype, transforms=tiled),
            "inputs_in": plgpu.Barrier(num_arrivals=2),
            "keys": ring((SCORED, x), parts, q.dtype, stages=2, swizzle=SWIZZLE),
            "ds_tiles": plgpu.SMEM((2, SCORED, ROWS), q.dtype, transforms=tiled),
            "p_tiles": plgpu.SMEM((2, SCORED, ROWS), q.dtype, transforms=tiled),
            "scored": plgpu.Barrier(num_barriers=2),
        },
    )
    return kernel(q, dout, latents, rows, members, count, bits, lse, delta)


def spread(
    q: Float[Array, "h a r x"],
    dout: Float[Array, "h a r x"],
    scores: Float[Array, "m 2*r"],
    places: Int32[Array, "h a c"],
    count: Int32[Array, " h"],
    *,
    interpret: object,
) -> Float[Array, "h c x"]:
    """Returns float32[h c x]: gradients of the latents of h unions, summed over the a blocks of each union.

    scores: those of `score`, with blocks and rows merged. places: row in scores of a union's latent for each
    block, -1 if
    the block does not have it. count: number of used latents. Tiles beyond count are not written.
    """
    unions, num_blocks, _, x = q.shape
    capacity = places.shape[2]
    parts = num_parts(x)
    part = x // parts
    readers = SPREAD // ROWS
    ops = hopper.Ops(interpret)

    def body(q_ref, dout_ref, scores_ref, places_ref, count_ref, sums_ref, *, scored, factors):
        union, role = lax.axis_index("union"), lax.axis_index("role")
        columns = pl.ds(lax.axis_index("part") * part, part)
        tiles = lax.div(count_ref[union] + (SPREAD - 1), SPREAD)
        # Pairs of a tile and a block, with two products each: ds^T q and p^T dout.
        pairs = tiles * num_blocks

        # Loader warpgroup: gather scores, and copy q and dout.
        def load():
            plgpu.set_max_registers(40, action="decrease")

            def list_rows(i):
                tile, block = lax.div(i, jnp.int32(num_blocks)), lax.rem(i, jnp.int32(num_blocks))
                rows = places_ref.at[union, block, pl.ds(tile * SPREAD, SPREAD)]
                scored.list_rows(rows, i, pairs)

            for i in map(jnp.int32, range(PREFETCH_LISTS)):
                list_rows(i)

            @pl.loop(0, pairs)
            def _(i):
                list_rows(i + PREFETCH_LISTS)
                row_list = scored.wait_for_list(i)
                for half, rows_ref in enumerate((q_ref, dout_ref)):
                    stage = scored.wait_for_stage(2 * i + half)
                    source = rows_ref.at[union, lax.rem(i, jnp.int32(num_blocks)), :, columns]
                    plgpu.copy_gmem_to_smem(source, factors.at[stage], scored.full.at[stage])
                    table = scores_ref.at[:, pl.ds(half * ROWS, ROWS)]
                    gather(ops, table, row_list, scored.tiles.at[stage])
                    plgpu.barrier_arrive(scored.full.at[stage])

            scored.drain(2 * pairs)

        # Compute warpgroups: 64 latents each.
        def add():
            plgpu.set_max_registers(152, action="increase")

            @pl.loop(0, tiles)
            def _(tile):
                def step(i, acc):
                    stage = scored.stage(i)
                    plgpu.barrier_wait(scored.full.at[stage])
                    acc = ops.dot(
                        acc, scored.tiles.at[stage, role], factors.at[stage], max_columns=PIECE
                    )
                    plgpu.barrier_arrive(scored.free.at[stage])
                    return acc

                first = 2 * num_blocks * tile
                acc = lax.fori_loop(first, first + 2 * num_blocks, step, ops.zeros((ROWS, part)))
                sums_ref[union, pl.ds(tile * SPREAD + role * ROWS, ROWS), columns] = acc

        lax.cond(role == readers, load, add)

    # Build and call the kernel.
    stages = 3
    tiled = hopper.tile_transforms(q.dtype)
    kernel = hopper.kernel(
        body,
        kernel_name="sparse_spread",
        interpret=interpret,
        out_type=jax.ShapeDtypeStruct((unions, capacity, x), jnp.float32),
        grid=(unions, parts),
        grid_names=("union", "part"),
        num_threads=readers + 1,
        thread_name="role",
        scratch_types={
            "scored": ring((readers, ROWS, ROWS), readers, q.dtype, stages=stages, arrivals=2),
            "factors": plgpu.SMEM((stages, ROWS, part), q.dtype, transforms=tiled),
        },
    )
    return kernel(q, dout, scores, places, count)
