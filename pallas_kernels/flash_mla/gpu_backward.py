"""Kernels of `gpu.backward`: gradients with their sums in registers, from recomputed probabilities.

`sum_for_queries`: grid (batch, head, block of 128 rows), the last blocks first. At 256 columns of bfloat16, shared
memory holds the rows of queries and of the output's gradient (64 KiB each), and a ring of three tiles [64 256] of keys
and values (96 KiB).

- A loader warpgroup copies keys and values of the block's range alternately.
- Two compute warpgroups, 64 rows each: logits, probabilities, ds = p (dp - delta), dq += ds k. The sums
  float32[64 256] take 128 registers per thread.

`sum_for_keys`: grid (batch, key head, tile of 64 keys). Shared memory holds the tile's keys and values (32 KiB each),
rings of two tiles of 64 rows of queries and of the output's gradient (64 KiB each) with their statistics, and
float32 probabilities [64 64] (16 KiB).

- A loader warpgroup copies the rows that see the tile, of all heads that share the keys.
- One compute warpgroup sums dv += p^T dout and writes p to shared memory, the other reads it and sums dk += ds^T q.

Padding: a row after the last, or one that sees nothing, has an infinite log-sum-exp and so probabilities of 0; keys
after the last are masked.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import hopper
from pallas_kernels.flash_mla.gpu_forward import (
    COLUMN_OF,
    GROUPS,
    KEYS,
    ROW_OF,
    ROWS,
    KeyRange,
    KeyVisibility,
    mask_hidden,
    ring,
    store_tile,
)
from pallas_kernels.mask import HIDDEN
from pallas_kernels.numerics import LOG2E

SLOTS = 3  # stages of the ring of `sum_for_queries`: 96 KB, in addition to 128 KB of rows


def sum_for_queries(
    q: Float[Array, "b h r x"],
    k: Float[Array, "b m s x"],
    v: Float[Array, "b m s x"],
    dout: Float[Array, "b h r x"],
    lse: Float[Array, "b h r"],
    delta: Float[Array, "b h r"],
    visibility: KeyVisibility,
    *,
    scale: float,
    interpret: object,
) -> Float[Array, "b h r x"]:
    """Returns dq of blocks of 128 rows of q, over their ranges of k and v.

    lse: in base 2, infinite where a row sees nothing. delta: the sum of out * dout. dout: gradient of out.

    Two warpgroups have 64 rows each. A third one copies keys and values alternately into one ring; its
    third stage lets copies overlap the products of the other two.
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
        key_range = KeyRange.load(ranges_ref, b, block)
        count = key_range.end - key_range.begin

        # Loader warpgroup: keys and values of the range, alternately.
        def load():
            plgpu.set_max_registers(24, action="decrease")
            head = lax.div(h, jnp.int32(parts))

            @pl.loop(0, count)
            def _(i):
                my_rows = pl.ds((key_range.begin + i) * KEYS, KEYS)
                tiles.fill(2 * i, k_ref.at[b, head, my_rows])
                tiles.fill(2 * i + 1, v_ref.at[b, head, my_rows])

            tiles.drain(2 * count)

        # Compute warpgroups: recompute the probabilities and sum dq.
        def add():
            plgpu.set_max_registers(240, action="increase")
            # This warpgroup's rows and their statistics.
            my_queries, my_douts = queries.at[role], douts.at[role]
            my_rows = pl.ds(block * size + role * ROWS, ROWS)
            arrived = rows_in.at[role]
            plgpu.copy_gmem_to_smem(q_ref.at[b, h, my_rows], my_queries, arrived)
            plgpu.copy_gmem_to_smem(dout_ref.at[b, h, my_rows], my_douts, arrived)
            last = ops.load(last_ref, (my_rows,), layout=ROW_OF)
            q_ids = ops.load(segments[0], (b, my_rows), layout=ROW_OF) if segments else None
            lse = ops.load(lse_ref, (b, h, my_rows), layout=ROW_OF)
            delta = ops.load(delta_ref, (b, h, my_rows), layout=ROW_OF)
            plgpu.barrier_wait(arrived)
            shape = ROWS, KEYS

            def mask(tile, logits):
                return mask_hidden(
                    ops, logits, tile * KEYS, last, q_ids, segments and segments[1], b
                )

            # One tile of keys. The product with the values starts from -delta: that saves a subtraction.
            def step(i, acc):
                keys = tiles.wait(2 * i)
                logits = ops.dot(ops.zeros(shape), my_queries, keys, b_transposed=True)
                logits = logits * (scale * LOG2E)
                number = key_range.begin + i
                logits = key_range.masked(number, logits, lambda logits: mask(number, logits))
                p = jnp.exp2(logits - hopper.broadcast_rows(lse, shape))
                values = tiles.wait(2 * i + 1)
                below = hopper.broadcast_rows(-delta, shape)
                ds = p * ops.dot(below, my_douts, values, b_transposed=True)
                tiles.release(2 * i + 1)
                acc = ops.dot(acc, ds.astype(q.dtype), keys)
                tiles.release(2 * i)
                return acc

            acc = lax.fori_loop(0, count, step, ops.zeros((ROWS, x)))
            # No product reads the queries any more, so their buffer can hold the output on its way to memory.
            store_tile(acc * scale, my_queries, dq_ref.at[b, h, my_rows])

        lax.cond(role == GROUPS, load, add)

    tiled = hopper.tile_transforms(q.dtype)
    # Build and call the kernel.
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
    return kernel(
        q, k, v, dout, lse, delta, visibility.ranges, visibility.last, *visibility.segments
    )


def sum_for_keys(
    q: Float[Array, "b h r x"],
    k: Float[Array, "b m s x"],
    v: Float[Array, "b m s x"],
    dout: Float[Array, "b h r x"],
    lse: Float[Array, "b h r"],
    delta: Float[Array, "b h r"],
    visibility: KeyVisibility,
    *,
    scale: float,
    interpret: object,
) -> tuple[Float[Array, "b m s x"], Float[Array, "b m s x"]]:
    """Returns (dk, dv) [b m s x] of tiles of 64 keys, over their ranges of tiles of 64 rows.

    The arguments are those of `sum_for_queries`, except that the ranges of `visibility` are those of the keys.

    One warpgroup computes the probabilities and sums dv. Another computes the gradient of the logits and sums
    dk. Each has two products. A third one copies rows. Keys come first everywhere, so that the operand over
    which a product sums is in its warpgroup's registers.
    """
    (b, h, _, x), (m, s) = q.shape, k.shape[1:3]
    parts = h // m
    ops = hopper.Ops(interpret)

    def body(
        q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, ranges_ref, last_ref, *refs,
        keys, values, tile_in, queries, douts, weights, weights_ready, weights_free,
    ):  # fmt: skip
        *segments, dk_ref, dv_ref = refs
        b, head, role = (lax.axis_index(name) for name in ("batch", "head", "role"))
        tile = lax.axis_index("tile")
        row_range = KeyRange.load(ranges_ref, b, tile)
        tiles_per_head = row_range.end - row_range.begin
        count = parts * tiles_per_head
        key_slice = pl.ds(tile * KEYS, KEYS)
        shape = KEYS, ROWS

        # Loader warpgroup: queries and output gradients with their statistics.
        def load():
            plgpu.set_max_registers(24, action="decrease")

            @pl.loop(0, count)
            def _(i):
                h = head * parts + lax.div(i, tiles_per_head)
                rows = pl.ds((row_range.begin + lax.rem(i, tiles_per_head)) * ROWS, ROWS)
                queries.fill(i, q_ref.at[b, h, rows], extras=lse_ref.at[b, h, rows])
                douts.fill(i, dout_ref.at[b, h, rows], extras=delta_ref.at[b, h, rows])

            queries.drain(count)
            douts.drain(count)

        # First compute warpgroup: probabilities and dv.
        def sum_values():
            plgpu.set_max_registers(240, action="increase")
            # The tile of keys and its segments.
            plgpu.copy_gmem_to_smem(k_ref.at[b, head, key_slice], keys, tile_in.at[0])
            key_ids: Any = (
                ops.load(segments[1], (b, key_slice), layout=ROW_OF) if segments else None
            )
            plgpu.barrier_wait(tile_in.at[0])

            def mask(number, logits):
                rows = pl.ds(number * ROWS, ROWS)
                last = ops.load(last_ref, (rows,), layout=COLUMN_OF) - tile * KEYS
                key = ops.cast(lax.broadcasted_iota(jnp.int32, shape, 0))
                is_visible = key <= hopper.broadcast_columns(last, shape)
                if segments:
                    q_ids = ops.load(segments[0], (b, rows), layout=COLUMN_OF)
                    is_visible = is_visible & (
                        hopper.broadcast_rows(key_ids, shape)
                        == hopper.broadcast_columns(q_ids, shape)
                    )
                return jnp.where(is_visible, logits, HIDDEN)

            # One tile of rows. The queries are released before the softmax; the other warpgroup still reads them.
            def step(i, acc):
                rows = queries.wait(i)
                logits = ops.dot(ops.zeros(shape), keys, rows, b_transposed=True) * (scale * LOG2E)
                lse = ops.load(queries.extras.at[queries.stage(i)], layout=COLUMN_OF)
                queries.release(i)
                number = row_range.begin + lax.rem(i, tiles_per_head)
                logits = row_range.masked(number, logits, lambda logits: mask(number, logits))
                p = jnp.exp2(logits - hopper.broadcast_columns(lse, shape))

                @pl.when(i > 0)
                def _():
                    plgpu.barrier_wait(weights_free)

                weights[...] = p
                plgpu.commit_smem()
                plgpu.barrier_arrive(weights_ready)
                acc = ops.dot(acc, p.astype(dout.dtype), douts.wait(i))
                douts.release(i)
                return acc

            acc = lax.fori_loop(0, count, step, ops.zeros((KEYS, x)))

            @pl.when(count > 0)
            def _():
                plgpu.barrier_wait(weights_free)

            # Only this warpgroup reads the keys, so their buffer can hold the output on its way to memory.
            store_tile(acc, keys, dv_ref.at[b, head, key_slice])

        # Second compute warpgroup: gradients of the logits and dk.
        def sum_keys():
            plgpu.set_max_registers(240, action="increase")
            plgpu.copy_gmem_to_smem(v_ref.at[b, head, key_slice], values, tile_in.at[1])
            plgpu.barrier_wait(tile_in.at[1])

            def step(i, acc):
                rows = douts.wait(i)
                delta = ops.load(douts.extras.at[douts.stage(i)], layout=COLUMN_OF)
                below = hopper.broadcast_columns(-delta, shape)
                dp = ops.dot(below, values, rows, b_transposed=True)
                douts.release(i)
                plgpu.barrier_wait(weights_ready)
                ds = ops.load(weights) * dp
                plgpu.barrier_arrive(weights_free)
                acc = ops.dot(acc, ds.astype(q.dtype), queries.wait(i))
                queries.release(i)
                return acc

            acc = lax.fori_loop(0, count, step, ops.zeros((KEYS, x)))
            store_tile(acc * scale, values, dk_ref.at[b, head, key_slice])

        lax.cond(role == 2, load, lambda: lax.cond(role == 0, sum_values, sum_keys))

    tiled = hopper.tile_transforms(k.dtype)
    # Build and call the kernel.
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
            "queries": ring((ROWS, x), q.dtype, readers=2, has_extras=True),
            "douts": ring((ROWS, x), q.dtype, readers=2, has_extras=True),
            "weights": plgpu.SMEM(
                (KEYS, ROWS), jnp.float32, transforms=hopper.tile_transforms(jnp.float32)
            ),
            "weights_ready": plgpu.Barrier(),
            "weights_free": plgpu.Barrier(),
        },
    )
    return kernel(
        q, k, v, dout, lse, delta, visibility.ranges, visibility.last, *visibility.segments
    )
