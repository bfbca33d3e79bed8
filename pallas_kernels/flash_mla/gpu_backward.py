"""The kernels of `gpu.backward`: gradients with their sums in registers, from recomputed probabilities."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.flash_mla.gpu_forward import (
    COLUMN_OF,
    GROUPS,
    KEYS,
    ROW_OF,
    ROWS,
    Range,
    Seen,
    hidden,
    ring,
    send_all,
)
from pallas_kernels.mask import HIDDEN
from pallas_kernels.numerics import LOG2E

SLOTS = 3  # of the ring of `sum_for_queries`: 96 KB beside 128 KB of rows


def sum_for_queries(q, k, v, dout, lse, delta, seen: Seen, *, scale, interpret):
    """dq [b h r x] of blocks of 128 rows of q [b h r x], over their ranges of k and v [b m s x].

    lse float32[b h r] in the unit of exp2, infinite where a row sees nothing; delta float32[b h r]: the sum
    of out * dout, with dout [b h r x] the gradient of out.

    Two warpgroups have 64 rows each. A third copies keys and values in turn into one ring: what its third
    place lets wait is hidden behind the products of the other two.
    """
    (b, h, rows, x), m = q.shape, k.shape[1]
    size = GROUPS * ROWS
    blocks, parts = rows // size, h // m
    ops = hopper.Ops(interpret)

    def body(
        q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, ranges_ref, last_ref, *refs,
        queries, douts, rows_in, tiles,
    ):  # fmt: skip
        *segments, dq_ref = refs
        b, h, role = (lax.axis_index(name) for name in ("batch", "head", "role"))
        block = blocks - 1 - lax.axis_index("block")
        met = Range.of(ranges_ref, b, block)
        count = met.end - met.begin

        def load():
            plgpu.set_max_registers(24, action="decrease")
            head = lax.div(h, jnp.int32(parts))

            @pl.loop(0, count)
            def _(i):
                place = pl.ds((met.begin + i) * KEYS, KEYS)
                tiles.fill(2 * i, k_ref.at[b, head, place])
                tiles.fill(2 * i + 1, v_ref.at[b, head, place])

            tiles.drain(2 * count)

        def add():
            plgpu.set_max_registers(240, action="increase")
            mine, my_douts = queries.at[role], douts.at[role]
            place = pl.ds(block * size + role * ROWS, ROWS)
            arrived = rows_in.at[role]
            plgpu.copy_gmem_to_smem(q_ref.at[b, h, place], mine, arrived)
            plgpu.copy_gmem_to_smem(dout_ref.at[b, h, place], my_douts, arrived)
            last = ops.load(last_ref, (place,), layout=ROW_OF)
            own = ops.load(segments[0], (b, place), layout=ROW_OF) if segments else None
            lse = ops.load(lse_ref, (b, h, place), layout=ROW_OF)
            delta = ops.load(delta_ref, (b, h, place), layout=ROW_OF)
            plgpu.barrier_wait(arrived)
            shape = ROWS, KEYS

            def mask(tile, logits):
                return hidden(ops, logits, tile * KEYS, last, own, segments and segments[1], b)

            def step(i, acc):
                keys = tiles.wait(2 * i)
                logits = ops.dot(ops.zeros(shape), mine, keys, b_transposed=True)
                logits = logits * (scale * LOG2E)
                number = met.begin + i
                logits = met.masked(number, logits, lambda logits: mask(number, logits))
                p = jnp.exp2(logits - hopper.over_rows(lse, shape))
                values = tiles.wait(2 * i + 1)
                below = hopper.over_rows(-delta, shape)
                ds = p * ops.dot(below, my_douts, values, b_transposed=True)
                tiles.release(2 * i + 1)
                acc = ops.dot(acc, ds.astype(q.dtype), keys)
                tiles.release(2 * i)
                return acc

            acc = lax.fori_loop(0, count, step, ops.zeros((ROWS, x)))
            send_all(acc * scale, mine, dq_ref.at[b, h, place])

        lax.cond(role == GROUPS, load, add)

    tiled = hopper.tiled(q.dtype)
    kernel = hopper.kernel(
        body,
        kernel_name="flash_mla_sum_for_queries",
        interpret=interpret,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(b, h, blocks),
        grid_names=("batch", "head", "block"),
        num_threads=GROUPS + 1,
        thread_name="role",
        compiler_params=hopper.compiler_params(approx_math=True, reduction_scratch_bytes=0),
        scratch_types={
            "queries": plgpu.SMEM((GROUPS, ROWS, x), q.dtype, transforms=tiled),
            "douts": plgpu.SMEM((GROUPS, ROWS, x), q.dtype, transforms=tiled),
            "rows_in": plgpu.Barrier(num_barriers=GROUPS, num_arrivals=2),
            "tiles": ring((KEYS, x), k.dtype, readers=GROUPS, stages=SLOTS),
        },
    )
    return kernel(q, k, v, dout, lse, delta, seen.ranges, seen.last, *seen.segments)


def sum_for_keys(q, k, v, dout, lse, delta, seen: Seen, *, scale, interpret):
    """(dk, dv) [b m s x] of tiles of 64 keys, over their ranges of tiles of 64 rows; the arguments
    are those of `sum_for_queries`, but for `seen`, whose ranges are those of the keys.

    One warpgroup makes the probabilities and sums dv, another the gradient of the logits and sums dk, two
    products each; a third copies rows. Keys come first everywhere: what a product sums over is then what
    its warpgroup has in registers.
    """
    (b, h, _, x), (m, s) = q.shape, k.shape[1:3]
    parts = h // m
    ops = hopper.Ops(interpret)

    def body(
        q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, ranges_ref, last_ref, *refs,
        keys, values, tile_in, queries, douts, weights, made, taken,
    ):  # fmt: skip
        *segments, dk_ref, dv_ref = refs
        b, head, role = (lax.axis_index(name) for name in ("batch", "head", "role"))
        tile = lax.axis_index("tile")
        met = Range.of(ranges_ref, b, tile)
        each = met.end - met.begin
        count = parts * each
        place = pl.ds(tile * KEYS, KEYS)
        shape = KEYS, ROWS

        def load():
            plgpu.set_max_registers(24, action="decrease")

            @pl.loop(0, count)
            def _(i):
                h = head * parts + lax.div(i, each)
                rows = pl.ds((met.begin + lax.rem(i, each)) * ROWS, ROWS)
                queries.fill(i, q_ref.at[b, h, rows], beside=lse_ref.at[b, h, rows])
                douts.fill(i, dout_ref.at[b, h, rows], beside=delta_ref.at[b, h, rows])

            queries.drain(count)
            douts.drain(count)

        def sum_values():
            plgpu.set_max_registers(240, action="increase")
            plgpu.copy_gmem_to_smem(k_ref.at[b, head, place], keys, tile_in.at[0])
            of = ops.load(segments[1], (b, place), layout=ROW_OF) if segments else None
            plgpu.barrier_wait(tile_in.at[0])

            def mask(number, logits):
                rows = pl.ds(number * ROWS, ROWS)
                last = ops.load(last_ref, (rows,), layout=COLUMN_OF) - tile * KEYS
                key = ops.cast(lax.broadcasted_iota(jnp.int32, shape, 0))
                seen = key <= hopper.over_columns(last, shape)
                if segments:
                    own = ops.load(segments[0], (b, rows), layout=COLUMN_OF)
                    seen = seen & (hopper.over_rows(of, shape) == hopper.over_columns(own, shape))
                return jnp.where(seen, logits, HIDDEN)

            def step(i, acc):
                rows = queries.wait(i)
                logits = ops.dot(ops.zeros(shape), keys, rows, b_transposed=True) * (scale * LOG2E)
                lse = ops.load(queries.beside.at[queries.stage(i)], layout=COLUMN_OF)
                queries.release(i)
                number = met.begin + lax.rem(i, each)
                logits = met.masked(number, logits, lambda logits: mask(number, logits))
                p = jnp.exp2(logits - hopper.over_columns(lse, shape))

                @pl.when(i > 0)
                def _():
                    plgpu.barrier_wait(taken)

                weights[...] = p
                plgpu.commit_smem()
                plgpu.barrier_arrive(made)
                acc = ops.dot(acc, p.astype(dout.dtype), douts.wait(i))
                douts.release(i)
                return acc

            acc = lax.fori_loop(0, count, step, ops.zeros((KEYS, x)))

            @pl.when(count > 0)
            def _():
                plgpu.barrier_wait(taken)

            # This warpgroup alone has read the keys: their place holds the outcome on its way out.
            send_all(acc, keys, dv_ref.at[b, head, place])

        def sum_keys():
            plgpu.set_max_registers(240, action="increase")
            plgpu.copy_gmem_to_smem(v_ref.at[b, head, place], values, tile_in.at[1])
            plgpu.barrier_wait(tile_in.at[1])

            def step(i, acc):
                rows = douts.wait(i)
                delta = ops.load(douts.beside.at[douts.stage(i)], layout=COLUMN_OF)
                below = hopper.over_columns(-delta, shape)
                dp = ops.dot(below, values, rows, b_transposed=True)
                douts.release(i)
                plgpu.barrier_wait(made)
                ds = ops.load(weights) * dp
                plgpu.barrier_arrive(taken)
                acc = ops.dot(acc, ds.astype(q.dtype), queries.wait(i))
                queries.release(i)
                return acc

            acc = lax.fori_loop(0, count, step, ops.zeros((KEYS, x)))
            send_all(acc * scale, values, dk_ref.at[b, head, place])

        lax.cond(role == 2, load, lambda: lax.cond(role == 0, sum_values, sum_keys))

    tiled = hopper.tiled(k.dtype)
    kernel = hopper.kernel(
        body,
        kernel_name="flash_mla_sum_for_keys",
        interpret=interpret,
        out_type=(
            jax.ShapeDtypeStruct(k.shape, k.dtype),
            jax.ShapeDtypeStruct(v.shape, v.dtype),
        ),
        grid=(b, m, s // KEYS),
        grid_names=("batch", "head", "tile"),
        num_threads=3,
        thread_name="role",
        compiler_params=hopper.compiler_params(approx_math=True, reduction_scratch_bytes=0),
        scratch_types={
            "keys": plgpu.SMEM((KEYS, x), k.dtype, transforms=tiled),
            "values": plgpu.SMEM((KEYS, x), v.dtype, transforms=tiled),
            "tile_in": plgpu.Barrier(num_barriers=2),
            "queries": ring((ROWS, x), q.dtype, readers=2, beside=True),
            "douts": ring((ROWS, x), q.dtype, readers=2, beside=True),
            "weights": plgpu.SMEM((KEYS, ROWS), jnp.float32, transforms=hopper.tiled(jnp.float32)),
            "made": plgpu.Barrier(),
            "taken": plgpu.Barrier(),
        },
    )
    return kernel(q, k, v, dout, lse, delta, seen.ranges, seen.last, *seen.segments)
