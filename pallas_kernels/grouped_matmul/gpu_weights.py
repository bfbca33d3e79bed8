"""Kernel of the weights' gradient: every group's rows, transposed, times their gradients.

Grid: (block,), one per multiprocessor, which goes through its share of the (group, tile down, tile across) tiles of the
results: 128 by up to 256 numbers, whose float32 sums take 128 registers per thread. Shared memory, in bfloat16: a ring
of four stages of 64 rows [2 64 64] and of their gradients [64 256] (192 KiB), and output tiles (32 KiB).

- A loader warpgroup copies the group's rows, also ahead into the next tile.
- Two compute warpgroups, one half of the tile's rows each: set rows of neighbouring groups to zero at the two ends
  of a group, add x^T dy in registers, store.

A group's rows are added in their order by one block. Padding: both widths to multiples of 128.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import hopper
from pallas_kernels.grouped_matmul.gpu_rows import (
    ALIGNED,
    DEPTH,
    EMULATED,
    HALF,
    LOADER,
    PIECE,
    column_tile,
    group_bounds,
    output_tiles,
    pad_columns,
    pad_for_emulator,
    ring,
    store_piece,
)

WIDTH = (
    2 * HALF
)  # both sides are multiples of it, because two warpgroups share both sides of a tile


# Compiled once for equal shapes; SwiGLU has two products of equal shape.
@functools.partial(jax.jit, static_argnames="interpret")
def sum_products(
    x: Float[Array, "m k"],
    dy: Float[Array, "m n"],
    group_sizes: Int[Array, " e"],
    *,
    interpret: object,
) -> Float[Array, "e k n"]:
    """Returns every group's x^T dy, zeros where it has no rows.

    Rows are processed 64 at a time, from the start of their group rounded down to a multiple of ALIGNED. Rows
    of other groups at the two ends are set to zero in shared memory, because their content may be undefined.
    """
    # Sizes of the problem and of the launch.
    shape = x.shape[1], dy.shape[1]
    x, dy = pad_columns(x, WIDTH), pad_columns(dy, WIDTH)
    (m, k), n, num_groups, dtype = x.shape, dy.shape[1], group_sizes.shape[0], x.dtype
    columns = column_tile(n)
    down, across = k // (2 * HALF), n // columns
    tiles = num_groups * down * across
    blocks = min(EMULATED if interpret else hopper.MULTIPROCESSORS, tiles)
    ops = hopper.Ops(interpret)

    def body(x_ref, dy_ref, starts, ends, out_ref, *, operands, out_tiles, masked):
        block, role = lax.axis_index("block"), lax.axis_index("role")
        num_mine = lax.div(tiles - block + (blocks - 1), blocks)

        def tile_position(i):
            """Returns (group, its first row, its end, first row to read, steps, tile down, tile across)."""
            tile = block + i * blocks
            group = lax.div(tile, down * across)
            begin, end = starts[group], ends[group]
            first = lax.div(begin, ALIGNED) * ALIGNED
            steps = jnp.where(end > begin, lax.div(end - first + (DEPTH - 1), DEPTH), 0)
            rest = lax.rem(tile, down * across)
            return group, begin, end, first, steps, lax.div(rest, across), lax.rem(rest, across)

        # Loader warpgroup: rows of each group, 64 at a time.
        def load():
            plgpu.set_max_registers(40, action="decrease")

            def run_tile(i, first_step):
                *_group, first, steps, d, a = tile_position(i)

                @pl.loop(0, steps)
                def _(step):
                    rows = pl.ds(pl.multiple_of(first + step * DEPTH, ALIGNED), DEPTH)

                    def copies(stage):
                        for half in range(2):
                            half_columns = pl.ds((2 * d + half) * HALF, HALF)
                            yield x_ref.at[rows, half_columns], operands.a.at[stage, half]
                        yield dy_ref.at[rows, pl.ds(a * columns, columns)], operands.b.at[stage]

                    operands.fill(first_step + step, copies)

                return first_step + steps

            operands.drain(lax.fori_loop(0, num_mine, run_tile, jnp.int32(0)))

        # Compute warpgroups: mask rows of other groups, multiply and store.
        def add():
            plgpu.set_max_registers(232, action="increase")

            def run_tile(i, first_step):
                group, start, stop, first, steps, d, a = tile_position(i)

                # Only the first and the last step of a group may hold rows of other groups.
                def mask_rows(tile, begin, end):
                    """Sets rows of the tile outside begin to end to zero."""
                    for column in range(0, tile.shape[1], PIECE):
                        piece = pl.ds(column, PIECE)
                        values = ops.load(tile, (slice(None), piece))
                        row = ops.row_indices((tile.shape[0], PIECE))
                        is_inside = (row >= begin) & (row < end)
                        tile[:, piece] = jnp.where(is_inside, values, jnp.zeros_like(values))

                def ready(step):
                    stage = operands.wait(first_step + step)
                    base = first + step * DEPTH
                    begin, end = start - base, stop - base

                    # Each warpgroup masks its rows' columns and half of the gradients, which both multiply.
                    @pl.when((begin > 0) | (end < DEPTH))
                    def _():
                        share = pl.ds(role * (columns // 2), columns // 2)
                        mask_rows(operands.a.at[stage, role], begin, end)
                        mask_rows(operands.b.at[stage, :, share], begin, end)
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(masked)
                        plgpu.barrier_wait(masked)

                    return operands.a.at[stage, role], [operands.b.at[stage]]

                (total,) = ops.sum_products(
                    [(HALF, columns)],
                    steps,
                    ready,
                    lambda step: operands.release(first_step + step),
                    a_transposed=True,
                )
                # Store 64 columns at a time, through two tiles in turn.
                for piece in range(columns // PIECE):
                    part = lax.slice(total, (0, piece * PIECE), (HALF, (piece + 1) * PIECE))
                    rows = pl.ds((2 * d + role) * HALF, HALF)
                    store_piece(
                        ops,
                        out_tiles,
                        piece,
                        part.astype(dtype),
                        out_ref.at[group, rows, pl.ds(a * columns + piece * PIECE, PIECE)],
                    )
                return first_step + steps

            lax.fori_loop(0, num_mine, run_tile, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        lax.cond(role == LOADER, load, add)

    # Build and call the kernel.
    kernel = hopper.kernel(
        body,
        kernel_name="grouped_matmul_dw",
        interpret=interpret,
        out_type=jax.ShapeDtypeStruct((num_groups, k, n), dtype),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=3,
        thread_name="role",
        scratch_types={
            "operands": ring(4, (2, DEPTH, HALF), (DEPTH, columns), 3, dtype),
            "out_tiles": output_tiles(dtype),
            "masked": plgpu.Barrier(num_arrivals=2),
        },
    )
    x, dy = (pad_for_emulator(x) for x in (x, dy)) if interpret else (x, dy)
    return kernel(x, dy, *group_bounds(group_sizes, m))[:, : shape[0], : shape[1]]
