"""Int8 rows times int4 weights for TPU (Mosaic).

Grid: (column tile, schedule entry), the entries in order. Tiles of rows are paired with the column tiles of their
group's weights as in `grouped_matmul.tpu`; weights without experts are those of one group.

Blocks, for k = 6144 in groups of 128, double-buffered by the pipeline: rows int8[128 k] (768 KiB), scales of the rows,
packed weights int8[k/2 1024] (3 MiB), scales float32[k/128 1024] (192 KiB), result [128 1024] (256 KiB in bfloat16).
The float32 sums of 256 columns at a time stay in registers.

Phases of a program: for each 256 columns unpack a group's weights, multiply (exact in int32), scale, and add in float32
over the groups in their order; scale the rows; write the rows of this group. Tiles without rows are set to zero.

Bytes are unpacked in VMEM, 32 bits at a time. Each half byte, left in its place, is sixteen times its integer in two's
complement: one mask gives the high integers, and a shift with the mask the low ones. The factor sixteen is divided
out at the end, where this is exact.

Padding: none of rows and weights; the scales of the rows are padded to full tiles.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Int8

from pallas_kernels.cost import estimate
from pallas_kernels.grouped_matmul.tiles import (
    column_tile,
    for_each_column_step,
    schedule_row_tiles,
    store_rows,
)
from pallas_kernels.w4a8_matmul import cost

# Not measured. A sum of MAX_ROWS by STEP takes half of the vector registers. By the compiler's schedule on v5p,
# eight groups in one loop iteration take two thirds of the instructions of eight iterations.
MIN_ROWS, MAX_ROWS = 32, 128
MAX_COLUMNS = 1024
STEP = 256
GROUPS_PER_STEP = (8, 4, 2, 1)
WEIGHT_BYTES = 20 << 20  # two tiles of weights and scales
VMEM_BYTES = 48 << 20
HIGH_HALVES = -0x0F0F0F10  # 0xF0F0F0F0


def unsupported_reason(
    x: Int8[Array, "m k"], w: Int8[Array, "..."], w_scale: Float[Array, "..."]
) -> str | None:
    """Returns the reason why these rows and weights are not supported, or None."""
    k, (groups, n) = x.shape[1], w_scale.shape[-2:]
    group = k // groups
    # A tpu7x multiplies integers as bfloat16: sums are exact up to 2**24.
    if group % 128 or group > 1024:
        return f"groups of {group} rows of weights; it takes 128 to 1024, in steps of 128"
    if _columns(k, groups, n) > _max_columns(k, groups):
        return f"two blocks of weights of {k} by {n} do not fit into VMEM"
    return None


def _max_columns(k, groups):
    return min(MAX_COLUMNS, WEIGHT_BYTES // (k + 8 * groups))


def _columns(k, groups, n):
    return column_tile(n, _max_columns(k, groups))


def forward(
    static,
    x: Int8[Array, "m k"],
    x_scale: Float[Array, " m"],
    w: Int8[Array, "..."],
    w_scale: Float[Array, "..."],
    group_sizes: Int[Array, " e"] | None,
    *,
    interpret: object = False,
) -> Float[Array, "m n"]:
    """Returns [m n]; group_sizes None: weights without a leading expert axis."""
    if group_sizes is None:
        w, w_scale = w[None], w_scale[None]
        group_sizes = jnp.full(1, x.shape[0], jnp.int32)
    multiply = _multiply(static.group, static.expected_rows, static.out_dtype, interpret)
    return multiply(x, x_scale, w, w_scale, group_sizes)


def _multiply(group, expected_rows, out_dtype, interpret):
    # Sequential, because a schedule cannot have a batch dimension.
    @jax.custom_batching.sequential_vmap
    def multiply(x, x_scale, w, w_scale, group_sizes):
        # Tile sizes and schedule.
        (m, k), (e, groups, n) = x.shape, w_scale.shape
        mean = pl.next_power_of_2(-(-expected_rows // e))
        rows = min(max(mean, MIN_ROWS), MAX_ROWS)
        columns = _columns(k, groups, n)
        schedule = schedule_row_tiles(group_sizes, m, rows)
        # One row per tile: as a column, every scale would take a row of lanes in memory.
        x_scale = jnp.pad(x_scale, (0, -m % rows)).reshape(-1, 1, rows)
        # Call the kernel.
        return pl.pallas_call(
            functools.partial(_body, group),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=5,
                grid=(n // columns, schedule.count),
                in_specs=[
                    pl.BlockSpec((rows, k), lambda j, v, g, source, *_: (source[v], 0)),
                    pl.BlockSpec((None, 1, rows), lambda j, v, g, source, *_: (source[v], 0, 0)),
                    pl.BlockSpec((None, k // 2, columns), lambda j, v, group, *_: (group[v], 0, j)),
                    pl.BlockSpec((None, groups, columns), lambda j, v, group, *_: (group[v], 0, j)),
                ],
                out_specs=pl.BlockSpec((rows, columns), lambda j, v, g, s, tile, *_: (tile[v], j)),
            ),
            out_shape=jax.ShapeDtypeStruct((m, n), out_dtype),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
            ),
            cost_estimate=estimate(
                cost.matmul(expected_rows, m, k, n, e, group, out_dtype.itemsize)
            ),
            interpret=interpret,
            name="w4a8_matmul",
        )(
            schedule.group,
            schedule.source,
            schedule.tile,
            schedule.begin,
            schedule.end,
            x,
            x_scale,
            w,
            w_scale,
        )

    return multiply


def _body(size, group, source, tile, begin, end, x, x_scale, w, w_scale, out):
    v = pl.program_id(1)
    filled = end[v] > begin[v]

    @pl.when(filled)
    def _():
        is_first_write = (v == 0) | (tile[v] != tile[jnp.maximum(v - 1, 0)])
        num_groups = w_scale.shape[0]
        groups_per_step = next(u for u in GROUPS_PER_STEP if num_groups % u == 0)
        row_scales = x_scale[...].reshape(x.shape[0], 1) * (1 / 16)

        # One column step: sum over the groups.
        def compute(column_slice):
            def add(g, total):
                group_rows = pl.ds(pl.multiple_of(g * size, size), size)
                byte_rows = pl.ds(pl.multiple_of(g * (size // 2), size // 2), size // 2)
                sums = lax.dot_general(
                    x[:, group_rows],
                    _sixteenfold(w[byte_rows, column_slice]),
                    (((1,), (0,)), ((), ())),
                    preferred_element_type=jnp.int32,
                )
                return total + sums.astype(jnp.float32) * w_scale[pl.ds(g, 1), column_slice]

            def add_groups(i, total):
                for u in range(groups_per_step):
                    total = add(i * groups_per_step + u, total)
                return total

            zeros = jnp.zeros(out[:, column_slice].shape, jnp.float32)
            y = lax.fori_loop(0, num_groups // groups_per_step, add_groups, zeros) * row_scales
            store_rows(out, column_slice, y, is_first_write, begin[v], end[v])

        for_each_column_step(out.shape[1], STEP, compute)

    # Tile without rows: write zeros.
    @pl.when(jnp.logical_not(filled))
    def _():
        out[...] = jnp.zeros(out.shape, out.dtype)


def _sixteenfold(packed):
    """Returns int8[2i n] of bytes int8[i n]: sixteen times the integers, the low halves first."""
    words = pltpu.bitcast(packed, jnp.int32)
    halves = ((words << 4) & HIGH_HALVES, words & HIGH_HALVES)
    return jnp.concatenate([pltpu.bitcast(x, jnp.int8) for x in halves], axis=0)
