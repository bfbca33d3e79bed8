"""The kernels of `gpu.backward`.

One multiprocessor cannot hold the sums of a block's queries and of a tile's latents at the same time, so
the work is cut where least has to be carried over, at the weights p and the gradients ds of the logits: 256
bytes for a latent of a block, against 1152 that its gather takes.

`score` walks each block's own latents, as the forward does, sums the gradient of the queries, and writes
ds and p. `spread` takes several neighbouring blocks and the union of their latents, and sums for each of
these ds^T q + p^T dout over the queries. `collect` adds these sums to their latents, each latent's in the
order of the blocks: no sum depends on which block is done first.

The sums of `spread` are float32, 2304 bytes written and read again for a latent of GLM-5. For one block
alone that would be 4.6 KB for each latent of a query, and take longer than all products; four blocks of which
neighbours share nine latents of ten write 1.5 KB.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.numerics import LOG2E
from pallas_kernels.sparse_flash_attention.gather import AHEAD, gather, gather_all, ring
from pallas_kernels.sparse_flash_attention.gpu_forward import (
    PIECE,
    ROWS,
    chose,
    parts_of,
)

SCORED = 32  # latents at a time: q and dout take 136 KB, which leaves two tiles of 36 KB
WIDEST_PART = 288  # columns of a gradient of q in one warpgroup: 144 registers a thread
SWIZZLE = 64  # bytes: those of SCORED numbers, over which the gradient of q is contracted
SPREAD = 3 * ROWS  # latents at a time, 64 for each of three warpgroups


def score(q, dout, latents, rows, members, count, bits, lse, delta, *, scale, value_dim, interpret):
    """(dq [g r x], scores [g c 2r]) of g blocks of r = ROWS rows; first half of scores: ds^T, second: p^T.

    dout [g r x], of which the first value_dim columns are read; lse and delta, the sum of out * dout,
    float32[g r]; the others as for `attend`. What lies in scores beyond the tiles that count reaches is not
    written.
    """
    blocks, _, x = q.shape
    values = pl.ds(0, value_dim)
    parts = -(-x // WIDEST_PART)
    part = x // parts
    scorer, loader = parts, parts + 1
    row_of, column_of = hopper.WGMMA.reduce(1), hopper.WGMMA.reduce(0)
    ops = hopper.Ops(interpret)

    def body(
        q_ref, dout_ref, latents_ref, rows_ref, members_ref, count_ref, bits_ref, lse_ref, delta_ref,
        dq_ref, scores_ref, *, queries, douts, inputs_in, keys, ds_tiles, p_tiles, scored,
    ):  # fmt: skip
        block, role = lax.axis_index("block"), lax.axis_index("role")
        tiles = lax.div(count_ref[block] + (SCORED - 1), SCORED)

        def load():
            plgpu.set_max_registers(40, action="decrease")
            gather_all(ops, latents_ref, rows_ref.at[block], keys, tiles, SWIZZLE)

        def make_scores():
            plgpu.set_max_registers(120, action="decrease")
            plgpu.copy_gmem_to_smem(q_ref.at[block], queries, inputs_in)
            plgpu.copy_gmem_to_smem(dout_ref.at[block, :, values], douts, inputs_in)
            own = ops.load(bits_ref, layout=row_of)
            lse = ops.load(lse_ref, (block,), layout=row_of) * LOG2E
            delta = ops.load(delta_ref, (block,), layout=row_of)
            plgpu.barrier_wait(inputs_in)
            shape = ROWS, SCORED

            @pl.loop(0, tiles)
            def _(i):
                place = pl.ds(i * SCORED, SCORED)
                chosen = ops.load(members_ref, (block, place), layout=column_of)
                stage = keys.stage(i)
                plgpu.barrier_wait(keys.full.at[stage])
                tile = keys.tiles.at[stage]
                logits = ops.dot(ops.zeros(shape), queries, tile, b_transposed=True)
                tile = keys.tiles.at[stage, :, values]
                dp = ops.dot(ops.zeros(shape), douts, tile, b_transposed=True)
                p = jnp.exp2(logits * (scale * LOG2E) - hopper.over_rows(lse, shape))
                p = jnp.where(chose(own, chosen, shape), p, 0.0)
                ds = p * (dp - hopper.over_rows(delta, shape)) * scale
                # The tile of two before has been copied out; its other readers gave its latents free.
                plgpu.wait_smem_to_gmem(2, wait_read_only=True)
                ops.store_transposed(ds_tiles.at[stage], ds.astype(q.dtype))
                ops.store_transposed(p_tiles.at[stage], p.astype(q.dtype))
                plgpu.commit_smem()
                plgpu.barrier_arrive(scored.at[stage])
                to = scores_ref.at[block, place]
                plgpu.copy_smem_to_gmem(ds_tiles.at[stage], to.at[:, pl.ds(0, ROWS)])
                plgpu.copy_smem_to_gmem(p_tiles.at[stage], to.at[:, pl.ds(ROWS, ROWS)])

            plgpu.wait_smem_to_gmem(0)

        def add():
            plgpu.set_max_registers(176, action="increase")
            columns = pl.ds(role * part, part)
            plgpu.barrier_wait(inputs_in)

            def step(i, acc):
                stage = keys.stage(i)
                plgpu.barrier_wait(scored.at[stage])
                ds, tile = ds_tiles.at[stage], keys.tiles.at[stage, :, columns]
                acc = ops.dot(acc, ds, tile, a_transposed=True, most=160)
                plgpu.barrier_arrive(keys.free.at[stage])
                return acc

            acc = lax.fori_loop(0, tiles, step, ops.zeros((ROWS, part)))
            hopper.send(acc, queries, dq_ref.at[block], columns)

        lax.cond(role == loader, load, lambda: lax.cond(role == scorer, make_scores, add))

    tiled = hopper.tiled(q.dtype, SWIZZLE)
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


def spread(q, dout, scores, places, count, *, interpret):
    """float32[h c x]: gradients of the latents of h unions, summed over the a blocks that each one has.

    q and dout [h a r x]; scores [m 2r] of them as `score` gives them, its blocks and rows in one; places
    int32[h a c]: where a latent of the union stands in scores for a block, -1 if the block has none; count
    int32[h] of the latents in use: what lies beyond their tiles is not written.
    """
    unions, several, _, x = q.shape
    room = places.shape[2]
    parts = parts_of(x)
    part = x // parts
    readers = SPREAD // ROWS
    ops = hopper.Ops(interpret)

    def body(q_ref, dout_ref, scores_ref, places_ref, count_ref, sums_ref, *, scored, factors):
        union, role = lax.axis_index("union"), lax.axis_index("role")
        columns = pl.ds(lax.axis_index("part") * part, part)
        tiles = lax.div(count_ref[union] + (SPREAD - 1), SPREAD)
        pairs = (
            tiles * several
        )  # of a tile and a block, with two products each: ds^T q and p^T dout

        def load():
            plgpu.set_max_registers(40, action="decrease")

            def list_rows(i):
                tile, block = lax.div(i, jnp.int32(several)), lax.rem(i, jnp.int32(several))
                rows = places_ref.at[union, block, pl.ds(tile * SPREAD, SPREAD)]
                scored.list_rows(rows, i, pairs)

            for i in map(jnp.int32, range(AHEAD)):
                list_rows(i)

            @pl.loop(0, pairs)
            def _(i):
                list_rows(i + AHEAD)
                wanted = scored.wait_for_list(i)
                for half, rows_ref in enumerate((q_ref, dout_ref)):
                    stage = scored.wait_for_place(2 * i + half)
                    source = rows_ref.at[union, lax.rem(i, jnp.int32(several)), :, columns]
                    plgpu.copy_gmem_to_smem(source, factors.at[stage], scored.full.at[stage])
                    table = scores_ref.at[:, pl.ds(half * ROWS, ROWS)]
                    gather(ops, table, wanted, scored.tiles.at[stage])
                    plgpu.barrier_arrive(scored.full.at[stage])

            scored.drain(2 * pairs)

        def add():
            plgpu.set_max_registers(152, action="increase")

            @pl.loop(0, tiles)
            def _(tile):
                def step(i, acc):
                    stage = scored.stage(i)
                    plgpu.barrier_wait(scored.full.at[stage])
                    acc = ops.dot(acc, scored.tiles.at[stage, role], factors.at[stage], most=PIECE)
                    plgpu.barrier_arrive(scored.free.at[stage])
                    return acc

                first = 2 * several * tile
                acc = lax.fori_loop(first, first + 2 * several, step, ops.zeros((ROWS, part)))
                sums_ref[union, pl.ds(tile * SPREAD + role * ROWS, ROWS), columns] = acc

        lax.cond(role == readers, load, add)

    stages = 3
    tiled = hopper.tiled(q.dtype)
    kernel = hopper.kernel(
        body,
        kernel_name="sparse_spread",
        interpret=interpret,
        out_type=jax.ShapeDtypeStruct((unions, room, x), jnp.float32),
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
