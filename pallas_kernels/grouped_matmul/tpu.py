"""Ragged products of sorted rows for TPU (Mosaic).

Forward: the tiles of rows go by in the order of the rows, and meet one column tile of the weights of
each group that has rows in them. Weights are fetched a whole group ahead, so that their time hides
behind all the tiles of the group before, and a group's weights are read once per column tile. A tile
that several groups share stays in VMEM while each of them writes its rows.
Backward: rows times transposed weights are the same kernel reading the weights the other way; the
weights' gradient adds up the tiles of a group, one after another, in VMEM.
SwiGLU is made of them. What lies between its products is only ever computed for tiles that hold rows: in
a buffer for the worst case everything else would be most of the memory traffic.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cost import estimate
from pallas_kernels.grouped_matmul import cost
from pallas_kernels.grouped_matmul.tiles import column_tile, in_steps, store, visits

# Not measured. Columns are as many as keep one chip's arithmetic ahead of reading the rows again for every
# column tile (v6e needs 560 FLOP a byte), rows as many as keep its multiplier busy between two loads of
# weights (by the compiler's own schedule: 128 on v5p, 256 on v6e and tpu7x).
COLUMN_BYTES = 512  # of a tile of rows: 256 of bfloat16
MIN_ROWS = 16
MAX_COLUMNS = 1536
MAX_WIDTH = 16384
WEIGHT_BYTES = 26 << 20  # two tiles of weights, in VMEM of 64 MiB
STEP = 256  # columns that are computed together
VMEM_BYTES = 56 << 20
DTYPES = (jnp.bfloat16, jnp.float32)


def refuse(x, w):
    """Why these rows and weights cannot be taken, or None."""
    if x.dtype != w.dtype or x.dtype not in DTYPES:
        return f"rows {x.dtype} and weights {w.dtype}; it takes both in bfloat16 or both in float32"
    for k, n in (w.shape[1:], w.shape[:0:-1]):
        if k > MAX_WIDTH:
            return f"rows of {k} numbers; it takes up to {MAX_WIDTH}"
        if _columns(k, n, w.dtype.itemsize) > _most_columns(k, w.dtype.itemsize):
            return f"two blocks of weights of {k} by {n} do not fit into VMEM"
    return None


def forward(static, x, w, group_sizes, *, interpret=False):
    """[m n] of x [m k], w [e k n]."""
    return _multiply(static.expected_rows, False, interpret)(x, w, group_sizes)


def backward(static, saved, dy, *, interpret=False):
    """(dx, dw) for what `forward` took and the gradient of its output."""
    x, w, group_sizes = saved
    dx = _multiply(static.expected_rows, True, interpret)(dy, w, group_sizes)
    dw = _sum_products(static.expected_rows, w.dtype, interpret)(x, dy, group_sizes)
    return dx, dw


def swiglu_forward(static, x, group_sizes, gate, up, down, *, interpret=False):
    """(y [m d], gate product [m f], up product [m f]); the products' rows without an owner are anything."""
    product = _multiply(static.expected_rows, False, interpret, fill=False)
    g, u = product(x, gate, group_sizes), product(x, up, group_sizes)
    rows = static.expected_rows
    (h,) = _row_by_row(rows, lambda g, u: (_activate(g, u),), 1, interpret)((g, u), group_sizes)
    return _multiply(static.expected_rows, False, interpret)(h, down, group_sizes), g, u


def swiglu_backward(static, saved, dy, *, interpret=False):
    """(dx, dgate, dup, ddown) for what `swiglu_forward` took, the two products, and the gradient of y."""
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
    """Rows of a tile: a group's mean as a power of two within bounds."""
    mean = pl.next_power_of_2(-(-expected_rows // num_groups))
    most = min(COLUMN_BYTES // itemsize, -(-rows // MIN_ROWS) * MIN_ROWS)
    return min(max(mean, MIN_ROWS), most)


def _most_columns(k, itemsize):
    return min(MAX_COLUMNS, WEIGHT_BYTES // (2 * k * itemsize))


def _columns(k, n, itemsize):
    return column_tile(n, _most_columns(k, itemsize))


def _multiply(expected_rows, transposed, interpret, fill=True):
    """function(x [m k], w [e k n] or transposed w [e n k], group_sizes, plus=None) -> [m n].

    plus [m n], zero in rows without an owner, is added to the product, in its place. fill: those rows
    become zero; otherwise tiles of them are left as they are in plus, or anything.
    """

    # In sequence also because a batch cannot be a dimension of a list of visits.
    @jax.custom_batching.sequential_vmap
    def multiply(x, w, group_sizes, plus=None):
        (m, k), (e, *rest) = x.shape, w.shape
        n = rest[0] if transposed else rest[1]
        rows = row_tile(m, expected_rows, e, x.dtype.itemsize)
        columns = _columns(k, n, x.dtype.itemsize)
        halves = 2 if n % (2 * columns) == 0 else 1  # one for each core of a v5p
        tiles = n // columns // halves
        work = visits(group_sizes, m, rows)
        lists = work[2:]
        count = work.count if fill else jnp.maximum(work.filled, 1)
        buffer = (columns, k) if transposed else (k, columns)
        at_tile = pl.BlockSpec(
            (rows, columns), lambda h, j, v, g, f, s, tile, *_: (tile[v], h * tiles + j)
        )
        added = () if plus is None else (plus,)
        # Without `fill` nothing is written but the rows that are there.
        written = m if fill else expected_rows
        costs = cost.product(expected_rows, written, k, n, e, bool(added), x.dtype.itemsize)
        return pl.pallas_call(
            functools.partial(_multiply_body, transposed, tiles, columns),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(lists),
                grid=(halves, tiles, count),
                in_specs=[
                    pl.BlockSpec((rows, k), lambda h, j, v, g, f, source, *_: (source[v], 0)),
                    pl.BlockSpec(memory_space=pl.ANY),
                    *(at_tile for _ in added),
                ],
                out_specs=at_tile,
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
            input_output_aliases={len(lists) + 2: 0} if added else {},
            cost_estimate=estimate(costs),
            interpret=interpret,
            name="grouped_matmul",
        )(*lists, x, w, *added)

    return multiply


def _multiply_body(
    transposed, tiles, columns, group, following, source, tile, begin, end, x, w, *rest
):
    *plus, out, buffer, arrived, turn = rest
    half, j, v = (pl.program_id(i) for i in range(3))
    before = jnp.maximum(v - 1, 0)
    filled = end[v] > begin[v]

    def fetch(group, column_tile, slot):
        there = w.at[group]
        if there.shape != buffer.shape[1:]:
            at = pl.ds(pl.multiple_of(column_tile * columns, columns), columns)
            there = there.at[at, :] if transposed else there.at[:, at]
        return pltpu.make_async_copy(there, buffer.at[slot], arrived.at[slot])

    mine = half * tiles + j

    @pl.when(filled & (j == 0) & (v == 0))
    def _():
        turn[0] = 1
        fetch(group[0], mine, 0).start()

    @pl.when(filled & ((v == 0) | (group[v] != group[before])))
    def _():
        slot = 1 - turn[0]
        turn[0] = slot
        fetch(group[v], mine, slot).wait()
        last = following[v] < 0

        @pl.when(jnp.logical_not(last) | (j + 1 < tiles))
        def _():
            ahead = jnp.where(last, group[0], following[v])
            fetch(ahead, mine + last.astype(jnp.int32), 1 - slot).start()

    @pl.when(filled)
    def _():
        slot = turn[0]
        fresh = (v == 0) | (tile[v] != tile[before])

        def compute(at):
            weights = buffer[slot, at, :] if transposed else buffer[slot, :, at]
            y = _dot(x[...], weights, 1, 1 if transposed else 0)
            # Rows of later groups stay those of plus: it lies where out does, and may be read again.
            kept = plus[0][:, at].astype(jnp.float32) if plus else 0
            store(out, at, y + kept, fresh, begin[v], end[v], kept)

        in_steps(columns, STEP, compute)

    @pl.when(jnp.logical_not(filled))
    def _():
        out[...] = jnp.zeros(out.shape, out.dtype)


def _row_by_row(expected_rows, function, num_results, interpret):
    """function(arrays [m f], group_sizes) -> tuple of [m f] by an elementwise float32 function of them,
    for the tiles that hold rows with an owner; the others are left as they were."""

    @jax.custom_batching.sequential_vmap
    def run(arrays, group_sizes):
        m, f = arrays[0].shape
        rows = min(COLUMN_BYTES // arrays[0].dtype.itemsize, m)
        columns = column_tile(f, MAX_COLUMNS)
        filled = jnp.minimum(jnp.sum(group_sizes, dtype=jnp.int32), m)
        block = pl.BlockSpec((rows, columns), lambda j, i: (i, j))
        shape = jax.ShapeDtypeStruct((m, f), arrays[0].dtype)

        def body(*refs):
            given, results = refs[:-num_results], refs[-num_results:]

            def compute(at):
                new = function(*(ref[:, at].astype(jnp.float32) for ref in given))
                for ref, value in zip(results, new):
                    ref[:, at] = value.astype(ref.dtype)

            in_steps(columns, STEP, compute)

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
    """function(x [m k], dy [m n], group_sizes int32[e]) -> [e k n]: every group's x transposed times dy."""

    @jax.custom_batching.sequential_vmap
    def sum_products(x, dy, group_sizes):
        (m, k), n, e = x.shape, dy.shape[1], group_sizes.shape[0]
        rows = row_tile(m, expected_rows, e, x.dtype.itemsize)
        down, across = column_tile(k, MAX_COLUMNS), column_tile(n, MAX_COLUMNS)
        work = visits(group_sizes, m, rows, every_group=True)
        return pl.pallas_call(
            _sum_products_body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=4,
                grid=(k // down, n // across, work.count),
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
            cost_estimate=estimate(cost.of_weights(expected_rows, k, n, e, x.dtype.itemsize)),
            interpret=interpret,
            name="grouped_matmul_dw",
        )(work.group, work.source, work.begin, work.end, x, dy)

    return sum_products


def _sum_products_body(group, source, begin, end, x, dy, out, total):
    v = pl.program_id(2)
    fresh = (v == 0) | (group[v] != group[jnp.maximum(v - 1, 0)])
    filled = end[v] > begin[v]

    def own(block):
        row = lax.broadcasted_iota(jnp.int32, block.shape, 0)
        return jnp.where((row >= begin[v]) & (row < end[v]), block, 0)

    @pl.when(filled)
    def _():
        mine = own(x[...])

        def compute(at):
            y = _dot(mine, own(dy[:, at]), 0, 0)
            total[:, at] = jnp.where(fresh, 0, total[:, at]) + y

        in_steps(dy.shape[1], STEP, compute)

    @pl.when(jnp.logical_not(filled))
    def _():
        total[...] = jnp.zeros(total.shape, total.dtype)

    @pl.when(group[v + 1] != group[v])
    def _():
        out[...] = total[...].astype(out.dtype)


def _dot(a, b, of_a: int, of_b: int):
    """Product in float32 of two matrices, contracted over those dimensions."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a,
        b,
        (((of_a,), (of_b,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
