"""Rows put in their places on a TPU: a copy for each, all of them under way at once."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cost import estimate
from pallas_kernels.write_rows import cost

SMEM_BYTES = 512 << 10  # for places, of 1 MiB


def refuse(rows):
    """Why it cannot take rows [s 1 w], or None."""
    if rows.ndim != 3 or rows.shape[1] != 1 or rows.dtype.itemsize != 4:
        return f"rows are {rows.dtype}{list(rows.shape[1:])}, not single ones of 32-bit numbers"
    return None


def write(static, rows, new, places, *, interpret=False):
    """rows [s 1 w] with new [m 1 w] at places int32[m]; see the package."""
    del static
    at_once = SMEM_BYTES // 4

    # Under vmap one call after the other: an operand that stays in HBM takes no further axis.
    @sequential_vmap
    def run(rows, new, places):
        for first in range(0, places.shape[0], at_once):
            part = slice(first, first + at_once)
            rows = _call(rows, new[part], places[part], interpret)
        return rows

    return run(rows, new, places)


def _call(rows, new, places, interpret):
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    return pl.pallas_call(
        _write,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[hbm, hbm],
            out_specs=hbm,
            scratch_shapes=[pltpu.SemaphoreType.DMA(())],
        ),
        out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        input_output_aliases={2: 0},
        cost_estimate=estimate(cost.write(new.shape[0], new.shape[2])),
        interpret=interpret,
        name="write_rows",
    )(places.astype(jnp.int32), new, rows)


def _write(places, new, _, rows, arrived):
    def each(act):
        def turn(i, _):
            place = places[i]

            @pl.when((place >= 0) & (place < rows.shape[0]))
            def _():
                copy = pltpu.make_async_copy(new.at[i], rows.at[place], arrived)
                act(copy)

        lax.fori_loop(0, new.shape[0], turn, None)

    each(lambda copy: copy.start())
    each(lambda copy: copy.wait())
