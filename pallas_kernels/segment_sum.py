"""Sums of listed rows in the order of the list; adds gradients of gathered rows deterministically on Hopper.

Grid: (block,), one warpgroup for 8 rows that lie far apart. No shared memory: a row's sum is in registers, x / 128
float32 per thread, and 8 listed rows are loaded ahead. Each row has one block and one order of its sums.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int32

from pallas_kernels import hopper

BLOCK_ROWS = 8  # rows of one block
PREFETCH_ROWS = 8  # rows in flight before the first is added
MIN_COLUMNS = 128  # minimum width of an array in the registers of a warpgroup


def segment_sum(
    totals: Float[Array, "s x"],
    parts: Float[Array, "m x"],
    order: Int32[Array, " m"],
    starts: Int32[Array, " s+1"],
    *,
    interpret: object,
) -> Float[Array, "s x"]:
    """Adds parts[order[starts[i] : starts[i + 1]]] one by one to row i of totals float32[s x].

    parts float32[m x]; order int32[m]; starts int32[s + 1]. s is a multiple of BLOCK_ROWS, x is a multiple of
    64 and at least MIN_COLUMNS. The rows of a block lie far apart, because neighbours tend to have lists of
    equal length.
    """
    s, x = totals.shape
    blocks = s // BLOCK_ROWS
    # Where x is not a multiple of MIN_COLUMNS, the two windows overlap: both compute the same sums there.
    windows = (
        [pl.ds(0, x)]
        if x % MIN_COLUMNS == 0
        else [pl.ds(0, x - 64), pl.ds(x - MIN_COLUMNS, MIN_COLUMNS)]
    )

    # One block sums BLOCK_ROWS rows.
    def body(totals_ref, parts_ref, order_ref, starts_ref, out_ref):
        @pl.loop(0, BLOCK_ROWS)
        def _(n):
            row = lax.axis_index("block") + blocks * n
            begin, end = starts_ref[row], starts_ref[row + 1]

            def step(i, sums):
                first = begin + i * PREFETCH_ROWS
                indices = [order_ref[jnp.minimum(first + n, end - 1)] for n in range(PREFETCH_ROWS)]
                loaded = [[parts_ref[index, w] for w in windows] for index in indices]
                for n, part in enumerate(loaded):
                    is_listed = first + n < end
                    sums = [jnp.where(is_listed, a + b, a) for a, b in zip(sums, part)]
                return sums

            count = lax.div(end - begin + (PREFETCH_ROWS - 1), PREFETCH_ROWS)
            sums = lax.fori_loop(0, count, step, [totals_ref[row, w] for w in windows])
            for total, window in zip(sums, windows):
                out_ref[row, window] = total

    # Build and call the kernel.
    kernel = hopper.kernel(
        body,
        interpret=interpret,
        kernel_name="sparse_collect",
        out_type=jax.ShapeDtypeStruct(totals.shape, jnp.float32),
        grid=(blocks,),
        grid_names=("block",),
    )
    return kernel(totals, parts, order, starts)
