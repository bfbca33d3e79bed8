"""Row scatter on a TPU: one asynchronous copy per row, all in flight together.

Grid: (1,). Rows and new rows stay in HBM, and the result is the same memory as the rows. Only the places are on the
chip, in scalar memory (4 bytes each); more than 131,072 are several calls. VMEM is not used.

1. Start a copy for each place that is not negative and is a row.
2. Wait for all of them on one semaphore.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int, Shaped

from pallas_kernels.cost import estimate
from pallas_kernels.scatter_rows import cost

SMEM_BYTES = 512 << 10  # limit of the places, of 1 MiB in total


def unsupported_reason(rows: Shaped[Array, "s ..."]) -> str | None:
    """Returns the reason why rows are not supported, or None; they must be [s 1 w]."""
    if rows.ndim != 3 or rows.shape[1] != 1 or rows.dtype.itemsize != 4:
        return f"rows are {rows.dtype}{list(rows.shape[1:])}; it takes [s 1 w] of 32-bit numbers"
    return None


def write(
    static,
    rows: Shaped[Array, "s ..."],
    new: Shaped[Array, "m ..."],
    places: Int[Array, " m"],
    *,
    interpret: object = False,
) -> Shaped[Array, "s ..."]:
    """Writes new [m 1 w] to rows [s 1 w] at places int32[m]; see the package."""
    del static
    rows_per_call = SMEM_BYTES // 4

    # Under vmap the calls run one after the other: an operand in HBM takes no batch axis.
    @sequential_vmap
    def run(rows, new, places):
        for first in range(0, places.shape[0], rows_per_call):
            part = slice(first, first + rows_per_call)
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
        name="scatter_rows",
    )(places.astype(jnp.int32), new, rows)


def _write(places, new, _, rows, arrived):
    def for_each_row(action):
        def body(i, _):
            target_row = places[i]

            @pl.when((target_row >= 0) & (target_row < rows.shape[0]))
            def _():
                copy = pltpu.make_async_copy(new.at[i], rows.at[target_row], arrived)
                action(copy)

        lax.fori_loop(0, new.shape[0], body, None)

    for_each_row(lambda copy: copy.start())
    for_each_row(lambda copy: copy.wait())
