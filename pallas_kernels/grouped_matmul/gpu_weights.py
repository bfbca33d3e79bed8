"""The kernel of the weights' gradient: every group's rows, transposed, times their gradients."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.grouped_matmul.gpu_rows import (
    ALIGNED,
    DEPTH,
    EMULATED,
    HALF,
    LOADER,
    PIECE,
    bounds_of,
    column_tile,
    exits,
    reachable,
    ring,
    send,
    widened,
)

WIDTH = 2 * HALF  # of what goes into a tile: two warpgroups share both of its sides


# Compiled once for equal shapes, of which SwiGLU has two.
@functools.partial(jax.jit, static_argnames="interpret")
def sum_products(x, dy, group_sizes, *, interpret):
    """[e k n] of x [m k], dy [m n]: every group's x^T dy, zeros where it has no rows.

    Rows go by 64 at a time from where their group begins, down to a multiple of ALIGNED. Those that are
    not its own, at the two ends, are made zero in shared memory: what lies there may be anything.
    """
    shape = x.shape[1], dy.shape[1]
    x, dy = widened(x, WIDTH), widened(dy, WIDTH)
    (m, k), n, num_groups, dtype = x.shape, dy.shape[1], group_sizes.shape[0], x.dtype
    columns = column_tile(n)
    down, across = k // (2 * HALF), n // columns
    tiles = num_groups * down * across
    blocks = min(EMULATED if interpret else hopper.MULTIPROCESSORS, tiles)
    ops = hopper.Ops(interpret)

    def body(x_ref, dy_ref, starts, ends, out_ref, *, operands, leaving, cleaned):
        block, role = lax.axis_index("block"), lax.axis_index("role")
        mine = lax.div(tiles - block + (blocks - 1), blocks)

        def place(i):
            """(group, its first row, its last, first row to read, steps, tile down, tile across)."""
            tile = block + i * blocks
            group = lax.div(tile, down * across)
            begin, end = starts[group], ends[group]
            first = lax.div(begin, ALIGNED) * ALIGNED
            steps = jnp.where(end > begin, lax.div(end - first + (DEPTH - 1), DEPTH), 0)
            rest = lax.rem(tile, down * across)
            return group, begin, end, first, steps, lax.div(rest, across), lax.rem(rest, across)

        def load():
            plgpu.set_max_registers(40, action="decrease")

            def one(i, at):
                _, _, _, first, steps, d, a = place(i)

                @pl.loop(0, steps)
                def _(step):
                    rows = pl.ds(pl.multiple_of(first + step * DEPTH, ALIGNED), DEPTH)

                    def copies(stage):
                        for half in range(2):
                            own = pl.ds((2 * d + half) * HALF, HALF)
                            yield x_ref.at[rows, own], operands.a.at[stage, half]
                        yield dy_ref.at[rows, pl.ds(a * columns, columns)], operands.b.at[stage]

                    operands.fill(at + step, copies)

                return at + steps

            operands.drain(lax.fori_loop(0, mine, one, jnp.int32(0)))

        def add():
            plgpu.set_max_registers(232, action="increase")

            def one(i, at):
                group, start, stop, first, steps, d, a = place(i)

                def clean(tile, begin, end):
                    """Zeros where rows of the tile are not between begin and end."""
                    for column in range(0, tile.shape[1], PIECE):
                        piece = pl.ds(column, PIECE)
                        old = ops.load(tile, (slice(None), piece))
                        row = ops.rows(old.shape)
                        kept = (row >= begin) & (row < end)
                        tile[:, piece] = jnp.where(kept, old, jnp.zeros_like(old))

                def ready(step):
                    stage = operands.wait(at + step)
                    base = first + step * DEPTH
                    begin, end = start - base, stop - base

                    @pl.when((begin > 0) | (end < DEPTH))
                    def _():
                        share = pl.ds(role * (columns // 2), columns // 2)
                        clean(operands.a.at[stage, role], begin, end)
                        clean(operands.b.at[stage, :, share], begin, end)
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(cleaned)
                        plgpu.barrier_wait(cleaned)

                    return operands.a.at[stage, role], [operands.b.at[stage]]

                (total,) = ops.sum_products(
                    [(HALF, columns)],
                    steps,
                    ready,
                    lambda step: operands.release(at + step),
                    a_transposed=True,
                )
                for piece in range(columns // PIECE):
                    part = lax.slice(total, (0, piece * PIECE), (HALF, (piece + 1) * PIECE))
                    rows = pl.ds((2 * d + role) * HALF, HALF)
                    send(
                        ops,
                        leaving,
                        piece,
                        part.astype(dtype),
                        out_ref.at[group, rows, pl.ds(a * columns + piece * PIECE, PIECE)],
                    )
                return at + steps

            lax.fori_loop(0, mine, one, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        lax.cond(role == LOADER, load, add)

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
            "leaving": exits(dtype),
            "cleaned": plgpu.Barrier(num_arrivals=2),
        },
    )
    x, dy = (reachable(x) for x in (x, dy)) if interpret else (x, dy)
    return kernel(x, dy, *bounds_of(group_sizes, m))[:, : shape[0], : shape[1]]
