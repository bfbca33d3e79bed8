"""Ragged products of sorted rows for TPU (Mosaic): two kernels, and one for the elementwise part of SwiGLU.

`_multiply`: rows times their groups' weights. Grid: (half of the columns, column tile, schedule entry), entries
innermost and in order; an entry is a tile of rows and a group with rows in it (`tiles`).

- Blocks for GLM-5's gate and up, k = 6144 and n = 2048 in bfloat16, double-buffered by the pipeline: rows [256 k]
  (3 MiB), result [256 1024] (512 KiB).
- Scratch VMEM: two tiles of weights [k 1024] (12 MiB each). A group's weights are copied while the tiles of the
  previous group are multiplied, and read once per column tile.
- Phases: at a new group wait for its weights and start the next copy; multiply 256 columns at a time; write the rows
  of this group. A tile shared by several groups stays in VMEM while each of them writes its rows. Tiles without rows
  are set to zero.

Backward: rows times transposed weights are the same kernel, reading the weights transposed.

`_sum_products`: the weights' gradient. Grid: (tile of x's columns, tile of dy's columns, schedule entry). Scratch VMEM
holds the float32 sum [1536 1024] (6 MiB) of a group over its tiles of rows; rows of other groups are set to zero
before the product. A group without rows has one entry, which writes zeros.

`_row_by_row`: SwiGLU between its products. Grid: (column tile, tile with rows). Tiles without rows are not computed: in
a worst-case buffer they would be most of the memory traffic.

Padding: none. The last tile of rows may end after the last row; those rows belong to no group.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.cost import estimate
from pallas_kernels.grouped_matmul import cost
from pallas_kernels.grouped_matmul.tiles import (
    column_tile,
    for_each_column_step,
    schedule_row_tiles,
    store_rows,
)

# Not measured. The number of columns keeps arithmetic ahead of reading the rows again for every column tile (v6e
# needs 560 FLOP per byte). The number of rows keeps the multiplier busy between two loads of weights (by the
# compiler's schedule: 128 on v5p, 256 on v6e and tpu7x).
COLUMN_BYTES = 512  # bytes of a column of a row tile: 256 rows of bfloat16
MIN_ROWS = 16
MAX_COLUMNS = 1536
MAX_WIDTH = 16384
WEIGHT_BYTES = 26 << 20  # two tiles of weights, in VMEM of 64 MiB
STEP = 256  # columns that are computed together
VMEM_BYTES = 56 << 20
DTYPES = (jnp.bfloat16, jnp.float32)


def unsupported_reason(x: Float[Array, "m k"], w: Float[Array, "e k n"]) -> str | None:
    """Returns the reason why these rows and weights are not supported, or None."""
    if x.dtype != w.dtype or x.dtype not in DTYPES:
        return f"rows {x.dtype} and weights {w.dtype}; both must be bfloat16 or both float32"
    for k, n in (w.shape[1:], w.shape[:0:-1]):
        if k > MAX_WIDTH:
            return f"rows of {k} numbers; it takes up to {MAX_WIDTH}"
        if _columns(k, n, w.dtype.itemsize) > _max_columns(k, w.dtype.itemsize):
            return f"two blocks of weights of {k} by {n} do not fit into VMEM"
    return None


def forward(
    static,
    x: Float[Array, "m k"],
    w: Float[Array, "e k n"],
    group_sizes: Int[Array, " e"],
    *,
    interpret: object = False,
) -> Float[Array, "m n"]:
    """Returns [m n] of x [m k], w [e k n]."""
    return _multiply(static.expected_rows, False, interpret)(x, w, group_sizes)


def backward(
    static, saved: tuple, dy: Float[Array, "m n"], *, interpret: object = False
) -> tuple[Float[Array, "m k"], Float[Array, "e k n"]]:
    """Returns (dx, dw) for the inputs of `forward` and the gradient of its output."""
    x, w, group_sizes = saved
    dx = _multiply(static.expected_rows, True, interpret)(dy, w, group_sizes)
    dw = _sum_products(static.expected_rows, w.dtype, interpret)(x, dy, group_sizes)
    return dx, dw


def swiglu_forward(
    static,
    x: Float[Array, "m d"],
    group_sizes: Int[Array, " e"],
    gate: Float[Array, "e d f"],
    up: Float[Array, "e d f"],
    down: Float[Array, "e f d"],
    *,
    interpret: object = False,
) -> tuple[Float[Array, "m d"], Float[Array, "m f"], Float[Array, "m f"]]:
    """Returns (y, gate product, up product); rows of the products without an expert are undefined."""
    multiply = _multiply(static.expected_rows, False, interpret, fill=False)
    g, u = multiply(x, gate, group_sizes), multiply(x, up, group_sizes)
    rows = static.expected_rows
    (h,) = _row_by_row(rows, lambda g, u: (_activate(g, u),), 1, interpret)((g, u), group_sizes)
    return _multiply(static.expected_rows, False, interpret)(h, down, group_sizes), g, u


def swiglu_backward(
    static, saved: tuple, dy: Float[Array, "m d"], *, interpret: object = False
) -> tuple[
    Float[Array, "m d"], Float[Array, "e d f"], Float[Array, "e d f"], Float[Array, "e f d"]
]:
    """Returns (dx, dgate, dup, ddown) for the inputs of `swiglu_forward`, the two products, and the gradient of y."""
    x, group_sizes, gate, up, down, g, u = saved

    def gradients(g, u, dh):
        h, pull = jax.vjp(_activate, g, u)
        return h, *pull(dh)

    back = functools.partial(_multiply, static.expected_rows, True, interpret)
    dh = back(fill=False)(dy, down, group_sizes)
    between = _row_by_row(static.expected_rows, gradients, 3, interpret)
    h, dg, du = between((g, u, dh), group_sizes)
    dx = back(fill=False)(du, up, group_sizes, back()(dg, gate, group_sizes))
    over_rows = _sum_products(static.expected_rows, gate.dtype, interpret)
    return dx, *(over_rows(a, b, group_sizes) for a, b in ((x, dg), (x, du), (h, dy)))


def _activate(g, u):
    return jax.nn.silu(g) * u


def row_tile(rows: int, expected_rows: int, num_groups: int, itemsize: int) -> int:
    """Returns the rows of a tile: a group's mean as a power of two within bounds."""
    mean = pl.next_power_of_2(-(-expected_rows // num_groups))
    max_rows = min(COLUMN_BYTES // itemsize, -(-rows // MIN_ROWS) * MIN_ROWS)
    return min(max(mean, MIN_ROWS), max_rows)


def _max_columns(k, itemsize):
    return min(MAX_COLUMNS, WEIGHT_BYTES // (2 * k * itemsize))


def _columns(k, n, itemsize):
    return column_tile(n, _max_columns(k, itemsize))


def _multiply(expected_rows, transposed, interpret, fill=True):
    """Returns a function (x, w, group_sizes, plus=None) -> [m n].

    x [m k]; w [e k n], or [e n k] if transposed. plus [m n], zero in rows without an expert, is added to the
    product in place. fill: those rows become zero; otherwise tiles of them keep their content of plus, or are
    undefined.
    """

    # Sequential also because a schedule cannot have a batch dimension.
    @jax.custom_batching.sequential_vmap
    def multiply(x, w, group_sizes, plus=None):
        (m, k), (e, *rest) = x.shape, w.shape
        n = rest[0] if transposed else rest[1]
        # Tile sizes and schedule.
        rows = row_tile(m, expected_rows, e, x.dtype.itemsize)
        columns = _columns(k, n, x.dtype.itemsize)
        halves = 2 if n % (2 * columns) == 0 else 1  # one for each core of a v5p
        tiles = n // columns // halves
        schedule = schedule_row_tiles(group_sizes, m, rows)
        lists = schedule[2:]
        count = schedule.count if fill else jnp.maximum(schedule.filled, 1)
        # Blocks, cost and call.
        buffer = (columns, k) if transposed else (k, columns)
        out_spec = pl.BlockSpec(
            (rows, columns), lambda h, j, v, g, f, s, tile, *_: (tile[v], h * tiles + j)
        )
        addends = () if plus is None else (plus,)
        # Without `fill` only the filled rows are written.
        written = m if fill else expected_rows
        costs = cost.matmul(expected_rows, written, k, n, e, bool(addends), x.dtype.itemsize)
        return pl.pallas_call(
            functools.partial(_multiply_body, transposed, tiles, columns),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(lists),
                grid=(halves, tiles, count),
                in_specs=[
                    pl.BlockSpec((rows, k), lambda h, j, v, g, f, source, *_: (source[v], 0)),
                    pl.BlockSpec(memory_space=pl.ANY),
                    *(out_spec for _ in addends),
                ],
                out_specs=out_spec,
                scratch_shapes=[
                    pltpu.VMEM((2, *buffer), w.dtype),
                    pltpu.SemaphoreType.DMA((2,)),
                    pltpu.SMEM((1,), jnp.int32),
                ],
            ),
            out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary", "arbitrary"),
                vmem_limit_bytes=VMEM_BYTES,
            ),
            input_output_aliases={len(lists) + 2: 0} if addends else {},
            cost_estimate=estimate(costs),
            interpret=interpret,
            name="grouped_matmul",
        )(*lists, x, w, *addends)

    return multiply


def _multiply_body(
    transposed, tiles, columns, group, following, source, tile, begin, end, x, w, *rest
):
    *plus, out, buffer, arrived, current_slot = rest
    half, j, v = (pl.program_id(i) for i in range(3))
    before = jnp.maximum(v - 1, 0)
    filled = end[v] > begin[v]

    # Weights are double-buffered: a group's tile is loaded while the previous one is used.
    def fetch(group, column_tile, slot):
        source_ref = w.at[group]
        if source_ref.shape != buffer.shape[1:]:
            columns_slice = pl.ds(pl.multiple_of(column_tile * columns, columns), columns)
            source_ref = (
                source_ref.at[columns_slice, :] if transposed else source_ref.at[:, columns_slice]
            )
        return pltpu.make_async_copy(source_ref, buffer.at[slot], arrived.at[slot])

    my_tile = half * tiles + j

    # First step: start the first copy.
    @pl.when(filled & (j == 0) & (v == 0))
    def _():
        current_slot[0] = 1
        fetch(group[0], my_tile, 0).start()

    # New group: wait for its weights, and start the copy of the next group's.
    @pl.when(filled & ((v == 0) | (group[v] != group[before])))
    def _():
        slot = 1 - current_slot[0]
        current_slot[0] = slot
        fetch(group[v], my_tile, slot).wait()
        last = following[v] < 0

        @pl.when(jnp.logical_not(last) | (j + 1 < tiles))
        def _():
            next_group = jnp.where(last, group[0], following[v])
            fetch(next_group, my_tile + last.astype(jnp.int32), 1 - slot).start()

    @pl.when(filled)
    def _():
        # Multiply, and write the rows of this group.
        slot = current_slot[0]
        is_first_write = (v == 0) | (tile[v] != tile[before])

        def compute(columns_slice):
            weights = (
                buffer[slot, columns_slice, :] if transposed else buffer[slot, :, columns_slice]
            )
            y = _dot(x[...], weights, 1, 1 if transposed else 0)
            # Rows of later groups keep the content of plus: it aliases out, and is read again for them.
            previous = plus[0][:, columns_slice].astype(jnp.float32) if plus else 0
            store_rows(out, columns_slice, y + previous, is_first_write, begin[v], end[v], previous)

        for_each_column_step(columns, STEP, compute)

    # Tile without rows: write zeros.
    @pl.when(jnp.logical_not(filled))
    def _():
        out[...] = jnp.zeros(out.shape, out.dtype)


def _row_by_row(expected_rows, function, num_results, interpret):
    """Returns a function (arrays [m f], group_sizes) -> tuple of [m f] that applies an elementwise float32 function.

    It processes the tiles that hold rows with an expert, and leaves the others as they were.
    """

    @jax.custom_batching.sequential_vmap
    def run(arrays, group_sizes):
        # Only tiles with rows are in the grid.
        m, f = arrays[0].shape
        rows = min(COLUMN_BYTES // arrays[0].dtype.itemsize, m)
        columns = column_tile(f, MAX_COLUMNS)
        filled = jnp.minimum(jnp.sum(group_sizes, dtype=jnp.int32), m)
        block = pl.BlockSpec((rows, columns), lambda j, i: (i, j))
        shape = jax.ShapeDtypeStruct((m, f), arrays[0].dtype)

        # Applies the function in steps of columns.
        def body(*refs):
            input_refs, results = refs[:-num_results], refs[-num_results:]

            def compute(columns_slice):
                values = function(
                    *(ref[:, columns_slice].astype(jnp.float32) for ref in input_refs)
                )
                for ref, value in zip(results, values):
                    ref[:, columns_slice] = value.astype(ref.dtype)

            for_each_column_step(columns, STEP, compute)

        # Call the kernel.
        return pl.pallas_call(
            body,
            grid=(f // columns, jnp.maximum(-(-filled // rows), 1)),
            in_specs=[block for _ in arrays],
            out_specs=[block] * num_results,
            out_shape=[shape] * num_results,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
            ),
            cost_estimate=estimate(
                cost.row_by_row(
                    expected_rows, f, len(arrays), num_results, arrays[0].dtype.itemsize
                )
            ),
            interpret=interpret,
            name="grouped_swiglu_rows",
        )(*arrays)

    return run


def _sum_products(expected_rows, dtype, interpret):
    """Returns a function (x [m k], dy [m n], group_sizes int32[e]) -> [e k n]: every group's x^T dy."""

    @jax.custom_batching.sequential_vmap
    def sum_products(x, dy, group_sizes):
        # Tile sizes and schedule.
        (m, k), n, e = x.shape, dy.shape[1], group_sizes.shape[0]
        rows = row_tile(m, expected_rows, e, x.dtype.itemsize)
        down, across = column_tile(k, MAX_COLUMNS), column_tile(n, MAX_COLUMNS)
        schedule = schedule_row_tiles(group_sizes, m, rows, every_group=True)
        # Call the kernel.
        return pl.pallas_call(
            _sum_products_body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=4,
                grid=(k // down, n // across, schedule.count),
                in_specs=[
                    pl.BlockSpec((rows, down), lambda i, j, v, g, source, *_: (source[v], i)),
                    pl.BlockSpec((rows, across), lambda i, j, v, g, source, *_: (source[v], j)),
                ],
                out_specs=pl.BlockSpec(
                    (None, down, across), lambda i, j, v, group, *_: (group[v], i, j)
                ),
                scratch_shapes=[pltpu.VMEM((down, across), jnp.float32)],
            ),
            out_shape=jax.ShapeDtypeStruct((e, k, n), dtype),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary"),
                vmem_limit_bytes=VMEM_BYTES,
            ),
            cost_estimate=estimate(cost.weight_gradient(expected_rows, k, n, e, x.dtype.itemsize)),
            interpret=interpret,
            name="grouped_matmul_dw",
        )(schedule.group, schedule.source, schedule.begin, schedule.end, x, dy)

    return sum_products


def _sum_products_body(group, source, begin, end, x, dy, out, total):
    v = pl.program_id(2)
    is_first = (v == 0) | (group[v] != group[jnp.maximum(v - 1, 0)])
    filled = end[v] > begin[v]

    def mask_rows(block):
        row = lax.broadcasted_iota(jnp.int32, block.shape, 0)
        return jnp.where((row >= begin[v]) & (row < end[v]), block, 0)

    @pl.when(filled)
    def _():
        x_rows = mask_rows(x[...])

        def compute(columns_slice):
            y = _dot(x_rows, mask_rows(dy[:, columns_slice]), 0, 0)
            total[:, columns_slice] = jnp.where(is_first, 0, total[:, columns_slice]) + y

        for_each_column_step(dy.shape[1], STEP, compute)

    @pl.when(jnp.logical_not(filled))
    def _():
        total[...] = jnp.zeros(total.shape, total.dtype)

    @pl.when(group[v + 1] != group[v])
    def _():
        out[...] = total[...].astype(out.dtype)


def _dot(a, b, of_a: int, of_b: int):
    """Returns the float32 product of two matrices, contracted over those dimensions."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a,
        b,
        (((of_a,), (of_b,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
