"""Sums over rows that are listed, in the order of the list: how gradients of gathered rows are added on Hopper."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import hopper

TOGETHER = 8  # rows of one block
AHEAD = 8  # rows on their way before the first is added
LEAST = 128  # numbers that the registers of a warpgroup take at least


def collect(totals, parts, order, starts, *, interpret):
    """totals float32[s x] and, for row i, parts[order[starts[i] : starts[i + 1]]], added one by one.

    parts float32[m x]; order int32[m]; starts int32[s + 1]; s is a multiple of TOGETHER, x of 64 and at
    least LEAST. The rows of a block lie far apart, since neighbours tend to be listed as often.
    """
    s, x = totals.shape
    blocks = s // TOGETHER
    # Where x is no multiple of LEAST, some of its columns are added twice, alike.
    windows = [pl.ds(0, x)] if x % LEAST == 0 else [pl.ds(0, x - 64), pl.ds(x - LEAST, LEAST)]

    def body(totals_ref, parts_ref, order_ref, starts_ref, out_ref):
        @pl.loop(0, TOGETHER)
        def _(n):
            row = lax.axis_index("block") + blocks * n
            begin, end = starts_ref[row], starts_ref[row + 1]

            def step(i, sums):
                first = begin + i * AHEAD
                places = [order_ref[jnp.minimum(first + n, end - 1)] for n in range(AHEAD)]
                read = [[parts_ref[place, w] for w in windows] for place in places]
                for n, part in enumerate(read):
                    wanted = first + n < end
                    sums = [jnp.where(wanted, a + b, a) for a, b in zip(sums, part)]
                return sums

            count = lax.div(end - begin + (AHEAD - 1), AHEAD)
            sums = lax.fori_loop(0, count, step, [totals_ref[row, w] for w in windows])
            for total, window in zip(sums, windows):
                out_ref[row, window] = total

    kernel = hopper.kernel(
        body,
        interpret=interpret,
        kernel_name="sparse_collect",
        out_type=jax.ShapeDtypeStruct(totals.shape, jnp.float32),
        grid=(blocks,),
        grid_names=("block",),
    )
    return kernel(totals, parts, order, starts)
