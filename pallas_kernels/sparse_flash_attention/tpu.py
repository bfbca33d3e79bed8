"""Attention over selected rows on TPUs: neighbouring queries share one gather of the union of their rows.

Grid: (core, block of queries). All heads of a block's queries are the rows of one matrix. Each row of the
block's union is copied from HBM separately; membership bits mark the rows of each query.

The cost of a copy is the scalar instructions that start it. Therefore a tile's copies are unrolled, into a
buffer at a known address whose last tile has just been loaded: the compiler starts them in the shadow of that
tile's products. Tiles come in pairs, one per buffer, and are always copied fully. After a block's last pair
comes the next block's first.

The backward sums a tile's row gradients over all queries of the block before it accesses memory, and processes
the blocks in order: only one core at a time reads, adds to and writes a row's gradient.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels import backends
from pallas_kernels.cost import estimate
from pallas_kernels.mask import HIDDEN
from pallas_kernels.sparse_flash_attention import cost
from pallas_kernels.sparse_flash_attention.gather_union import GatherUnion, unite
from pallas_kernels.sparse_flash_attention.word_rows import LANES, RowLayout, WordRows, from_words


class BlockSizes(NamedTuple):
    """Sizes of a block.

    Attributes:
      queries: neighbours that share a gather.
      rows: rows of their union per tile, a multiple of 8.
    """

    queries: int
    rows: int


# Not measured. 8 queries of 64 heads fill the matrix unit, and 128 rows are its depth.
BLOCKS = BlockSizes(queries=8, rows=128)
SMEM_BYTES = 768 << 10  # limit of the indices, of 1 MiB in total
TWO_CORES = ("TPU v4", "TPU v5", "TPU v5p")  # chips that are one device with two cores
SPARE = 4  # tiles of rows after the last one, for the backward's entries without a row
PARAMS = pltpu.CompilerParams(
    dimension_semantics=("parallel", "arbitrary"),
    vmem_limit_bytes=48 << 20,
    disable_bounds_checks=True,  # the union only holds rows of the array
)


def unsupported_reason(
    q: Float[Array, "b t n x"],
    latents: Float[Array, "b s x"] | WordRows,
    topk: Int32[Array, "b t k"],
    value_dim: int,
) -> str | None:
    """Returns the reason why the arguments are not supported, or None."""
    del value_dim
    if latents.dtype not in (jnp.bfloat16, jnp.float32) or q.dtype != latents.dtype:
        return f"queries are {q.dtype} and rows {latents.dtype}, not both bfloat16 or both float32"
    queries = min(BLOCKS.queries, topk.shape[1])
    if 2 * 4 * queries * topk.shape[2] > SMEM_BYTES:
        return f"{topk.shape[2]} rows per query do not fit in scalar memory"
    numbered = latents.shape[0] * (latents.shape[1] + SPARE * BLOCKS.rows) * queries
    if numbered > jnp.iinfo(jnp.int32).max:
        return f"latents of shape {latents.shape} have more rows than 32 bits can number"
    return None


def forward(
    static,
    q: Float[Array, "b t n x"],
    latents: Float[Array, "b s x"] | WordRows,
    topk: Int32[Array, "b t k"],
    *,
    interpret: object = False,
) -> tuple[Float[Array, "b t n y"], Float[Array, "b t n"], Float[Array, ""]]:
    """Returns (out, lse, largest logit) of q over the rows topk of latents; lse is float32."""

    # Under vmap the calls run one after the other: an operand in HBM takes no batch axis.
    @sequential_vmap
    def run(q, latents, topk):
        b, s, x = latents.shape
        union = _unite(topk, s)
        union = union._replace(rows=union.rows + s * jnp.arange(b, dtype=jnp.int32)[:, None, None])
        rows = _copyable(latents.reshape(b * s, x))
        return _attend(static, q, rows, union, None, topk.shape[2], interpret)

    return run(q, latents, topk)


def paged(
    static,
    q: Float[Array, "b t n x"],
    pages: Float[Array, "p z x"] | WordRows,
    page_table: Int[Array, "b pages"],
    topk: Int32[Array, "b t k"],
    *,
    interpret: object = False,
) -> tuple[Float[Array, "b t n y"], Float[Array, "b t n"]]:
    """Returns (out, lse) of q over positions topk of its sequence; lse is float32.

    page_table maps the positions to pages, an array or `WordRows`.
    """

    @sequential_vmap
    def run(q, pages, page_table, topk):
        slots = pages.shape[1]
        bits = (slots - 1).bit_length()
        # Page and slot in separate bits, so that a shift extracts them: scalar cores have no division.
        page_and_slot = jnp.where(topk < 0, -1, (topk // slots << bits) | (topk % slots))
        union = _unite(page_and_slot, page_table.shape[1] << bits)
        rows = jax.tree.map(lambda a: a.reshape(-1, 1, a.shape[-1]), _copyable(pages))
        pages_table = _PageTable(page_table, slots, bits)
        return _attend(static, q, rows, union, pages_table, topk.shape[2], interpret)[:2]

    return run(q, pages, page_table, topk)


def backward(
    static, saved: tuple, dout: Float[Array, "b t n y"], *, interpret: object = False
) -> tuple[Float[Array, "b t n x"], Float[Array, "b s x"]]:
    """Returns (dq, dlatents) for the inputs of `forward`, its out and lse, and the gradient of out."""

    @sequential_vmap
    def run(q, latents, topk, out, lse, dout):
        return _differentiate(static, q, latents, topk, out, lse, dout, interpret)

    return run(*saved, dout)


class _PageTable(NamedTuple):
    """Table int32[b pages] of pages with `slots` slots; a slot number has `bits` bits."""

    table: jax.Array
    slots: int
    bits: int


def _copyable(rows) -> WordRows:
    """Returns rows [... x] in a form whose rows can be copied separately."""
    if isinstance(rows, WordRows):
        return rows
    return WordRows.encode(rows, RowLayout.exact(rows.shape[-1], rows.dtype))


def _unite(topk, s: int) -> GatherUnion:
    return unite(topk, s, min(BLOCKS.queries, topk.shape[1]), 2 * BLOCKS.rows)


def num_parts(blocks: int) -> int:
    """Returns the number of runs of neighbouring blocks: one per core of the device."""
    return 2 if backends.device_kind() in TWO_CORES and blocks % 2 == 0 else 1


def _stack_heads(x, groups: int):
    """Returns [b t n ...] as [b * g, m ...]: the m = queries * heads of each block.

    Queries beyond t are zeros.
    """
    b, t, n, *rest = x.shape
    queries = min(BLOCKS.queries, t)
    x = jnp.pad(x, [(0, 0), (0, groups * queries - t)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(b * groups, queries * n, *rest)


def _unstack_heads(x, b: int, t: int, n: int):
    """Returns [b * g, m ...] as [b t n ...], without the queries beyond t."""
    return x.reshape(b, -1, n, *x.shape[2:])[:, :t]


def _append_next_block(lists, next_first):
    """Returns each block's list followed by the beginning of the next block's list.

    lists [b g c] become [b * g, 1, c + ...].
    """
    lists, next_first = (x.reshape(-1, 1, x.shape[-1]) for x in (lists, next_first))
    return jnp.concatenate([lists, jnp.roll(next_first, -1, axis=0)], axis=-1)


def _attend(static, q, rows, union, pages, k: int, interpret):
    # Sizes and the parts of each core.
    b, t, n, x = q.shape
    groups, room = union.rows.shape[1:]
    blocks, m, y = b * groups, min(BLOCKS.queries, t) * n, static.value_dim
    parts = num_parts(blocks)
    spec = functools.partial(_spec, blocks // parts)
    places = _append_next_block(union.rows, union.rows[..., : 2 * BLOCKS.rows])
    # Operands and their blocks.
    in_specs = [
        spec(1, places.shape[-1], space=pltpu.SMEM),
        spec(1, room),
        spec(m, x),
        pl.BlockSpec(memory_space=pltpu.HBM),
    ]
    words = rows.words
    operands = [places, union.members.reshape(blocks, 1, room), _stack_heads(q, groups), words]
    if pages is not None:
        tables = jnp.broadcast_to(pages.table[:, None], (b, groups, pages.table.shape[1]))
        operands.append(_append_next_block(tables, tables))
        in_specs.append(spec(1, operands[-1].shape[-1], space=pltpu.SMEM))
    # Call the kernel.
    costs = cost.forward(b, t, n, k, x, y, 4 * words.shape[-1], q.dtype.itemsize)
    kernel = functools.partial(
        _attend_block,
        heads=n,
        scale=static.scale,
        layout=rows.layout,
        pages=pages and pages[1:],
        unroll=_unroll(interpret),
    )
    out, stats = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(parts, blocks // parts),
            in_specs=in_specs,
            out_specs=[spec(m, y), spec(2, m)],
            scratch_shapes=[
                *[pltpu.VMEM((BLOCKS.rows, words.shape[-1]), jnp.int32)] * 2,
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.VMEM((m, min(LANES, BLOCKS.rows)), jnp.float32),
                pltpu.VMEM((m, min(LANES, BLOCKS.rows)), jnp.float32),
                pltpu.VMEM((m, y), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((blocks, m, y), q.dtype),
            jax.ShapeDtypeStruct((blocks, 2, m), jnp.float32),
        ],
        compiler_params=PARAMS,
        cost_estimate=estimate(costs),
        interpret=interpret,
        name="sparse_flash_attention",
    )(union.count.reshape(-1), *operands)
    lse = _unstack_heads(stats[:, 0], b, t, n)
    return _unstack_heads(out, b, t, n), lse, jnp.max(stats[:, 1])


def _attend_block(counts, places, members, q, rows, *refs, heads, scale, layout, pages, unroll):
    """Processes one block of queries: the online softmax over its union, tile by tile."""
    # Unpack the refs.
    table: Any = None
    if pages is not None:
        table, *refs = refs
    out, stats, *buffers, arrived, top, total, acc = refs
    tile, room = buffers[0].shape[0], members.shape[1]
    pairs = _pairs(counts, tile)

    def copies(pair, slot):
        """Returns copies of that tile of a pair; the pair after the last is the next block's first."""
        is_next_block = pair >= pairs
        start = jnp.where(is_next_block, room, pair * 2 * tile) + slot * tile
        if pages is None:
            return lambda i: _copy(
                rows.at[places[0, start + i]], buffers[slot], i, arrived.at[slot]
            )
        slots, bits = pages
        table_shift = jnp.where(is_next_block, table.shape[1] // 2, 0)

        def copy(i):
            row = places[0, start + i]
            row = table[0, table_shift + (row >> bits)] * slots + (row & (1 << bits) - 1)
            return _copy(rows.at[row], buffers[slot], i, arrived.at[slot])

        return copy

    _fetch_first_pair(copies, tile, min(unroll, 8))
    top[...] = jnp.full_like(top, HIDDEN)
    total[...] = jnp.zeros_like(total)
    acc[...] = jnp.zeros_like(acc)

    # Online softmax over a pair of tiles.
    def step(pair, _):
        for slot in range(2):
            _wait_for_copies(buffers[slot], arrived.at[slot])
            keys = from_words(buffers[slot][...], layout)
            _start(tile, unroll, copies(pair + 1, slot))
            member_bits = _tile(members, 2 * pair + slot, tile)
            logits = _logits(q[...], keys, member_bits, heads, scale)
            # Row statistics are equal in all lanes, and each lane has a part of the sums: only the maximum
            # moves across lanes.
            old_top = top[...]
            new_top = jnp.maximum(old_top, jnp.max(logits, axis=1, keepdims=True))
            decay = jnp.exp(old_top - new_top)
            parts = [jnp.exp(part - new_top) for part in _lane_pieces(logits)]
            top[...] = new_top
            total[...] = decay * total[...] + sum(parts)
            p, values = jnp.concatenate(parts, axis=1), keys[:, : acc.shape[1]]
            acc[...] = _repeat_columns(decay, acc.shape[1]) * acc[...] + _dot(
                p.astype(values.dtype), values, 1, 0
            )

    lax.fori_loop(0, pairs, step, None)
    _drain_copies(buffers, arrived)
    # Rows of other queries count only until the query's first row decays them to zero.
    has_rows = top[...] > HIDDEN / 2
    sums = jnp.broadcast_to(jnp.sum(total[...], axis=1, keepdims=True), top.shape)
    out[...] = (_repeat_columns(jnp.where(has_rows, 1 / sums, 0), acc.shape[1]) * acc[...]).astype(
        out.dtype
    )
    lse = jnp.where(has_rows, top[...] + jnp.log(sums), jnp.inf)
    lane = lax.broadcasted_iota(jnp.int32, lse.shape, 1)
    stats[...] = jnp.where(lane == 0, lse, top[...]).T[:2]


def _differentiate(static, q, latents, topk, out, lse, dout, interpret):
    # Sizes and the union of rows.
    b, t, n, x = q.shape
    s, y, tile = latents.shape[1], static.value_dim, BLOCKS.rows
    union = _unite(topk, s)
    groups, room = union.rows.shape[1:]
    blocks, m = b * groups, min(BLOCKS.queries, t) * n
    parts = num_parts(blocks)
    sums = 1 if b % parts == 0 else parts  # a batch row that two cores share has a sum in each
    # Entries without a row add zeros to spare rows after the last: separate ones for a pair of tiles, for the
    # write before the first tile, and for the read after the last.
    batch_stride = s + SPARE * tile
    entry = jnp.arange(room, dtype=jnp.int32)
    padded_rows = jnp.where(entry < union.count[..., None], union.rows, s + entry % (2 * tile))
    spare_before, spare_after = (
        jnp.broadcast_to(s + i * tile + entry[:tile], (b, groups, tile)) for i in (2, 3)
    )
    offset = batch_stride * jnp.arange(b, dtype=jnp.int32)[:, None, None]
    places = _append_next_block(
        jnp.concatenate([spare_before, padded_rows, spare_after], axis=-1) + offset,
        padded_rows[..., : 2 * tile] + offset,
    )
    # Operands.
    rows = jnp.pad(latents, ((0, 0), (0, SPARE * tile), (0, 0))).reshape(b * batch_stride, x)
    rows = _copyable(rows)
    costs = cost.backward(b, t, n, topk.shape[2], x, y, 4 * rows.layout.width, q.dtype.itemsize)
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    stats = jnp.stack([_stack_heads(stat, groups) for stat in (lse, delta)], axis=1)
    spec = functools.partial(_spec, blocks // parts)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    # Call the kernel.
    dq, total = pl.pallas_call(
        functools.partial(
            _differentiate_block,
            heads=n,
            scale=static.scale,
            layout=rows.layout,
            unroll=_unroll(interpret),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(parts, blocks // parts),
            in_specs=[
                spec(1, places.shape[-1], space=pltpu.SMEM),
                spec(1, room),
                spec(m, x),
                spec(m, y),
                spec(8, m),
                hbm,
                hbm,
            ],
            out_specs=[spec(m, x), hbm],
            scratch_shapes=[
                *[pltpu.VMEM((tile, rows.layout.width), jnp.int32)] * 2,
                *[pltpu.VMEM((tile, x), jnp.float32)] * 4,
                pltpu.VMEM((m, x), jnp.float32),
                *[pltpu.SemaphoreType.DMA((2,))] * 3,
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((blocks, m, x), q.dtype),
            jax.ShapeDtypeStruct((sums, b * batch_stride, 1, x), jnp.float32),
        ],
        input_output_aliases={7: 1},
        compiler_params=PARAMS,
        cost_estimate=estimate(costs),
        interpret=interpret,
        name="sparse_flash_attention_backward",
    )(
        union.count.reshape(-1),
        places,
        union.members.reshape(blocks, 1, room),
        _stack_heads(q, groups),
        _stack_heads(dout, groups),
        jnp.pad(stats, ((0, 0), (0, 6), (0, 0))),
        rows.words,
        jnp.zeros((sums, b * batch_stride, 1, x), jnp.float32),
    )
    dlatents = jnp.sum(total.reshape(sums, b, batch_stride, x)[:, :, :s], axis=0)
    return _unstack_heads(dq, b, t, n), dlatents.astype(latents.dtype)


def _differentiate_block(
    counts, places, members, q, dout, stats, rows, _, dq, total, *refs, heads, scale, layout, unroll
):
    """Processes one block of queries: their gradient, and their part of the rows' gradients in HBM."""
    # Unpack the refs.
    *buffers, old0, old1, new0, new1, acc, arrived, read, written = refs
    old_sums, new_sums = (old0, old1), (new0, new1)
    total = total.at[pl.program_id(0) if total.shape[0] > 1 else 0]
    tile, room = buffers[0].shape[0], members.shape[1]
    pairs = _pairs(counts, tile)

    def copies(pair, slot):
        """Returns copies of the rows of that tile of a pair.

        The pair after the last is the next block's first.
        """
        start = tile + jnp.where(pair >= pairs, room + tile, pair * 2 * tile) + slot * tile
        return lambda i: _copy(rows.at[places[0, start + i]], buffers[slot], i, arrived.at[slot])

    def reads(j, slot):
        """Returns copies of the previous sums of tile j."""
        start = tile + jnp.where(j >= 2 * pairs, room, j * tile)
        return lambda i: _copy(total.at[places[0, start + i]], old_sums[slot], i, read.at[slot])

    def writes(j, slot):
        start = tile + j * tile
        return lambda i: _copy(
            total.at[places[0, start + i]], new_sums[slot], i, written.at[slot], to_hbm=True
        )

    _fetch_first_pair(copies, tile, min(unroll, 8))
    _start(tile, min(unroll, 8), reads(0, 0))
    acc[...] = jnp.zeros_like(acc)
    columns = stats[...].T
    lse, delta = columns[:, :1], columns[:, 1:2]

    # Gradients of a pair of tiles.
    def step(pair, _):
        for slot in range(2):
            j, other = 2 * pair + slot, 1 - slot
            _wait_for_copies(buffers[slot], arrived.at[slot])
            keys = from_words(buffers[slot][...], layout)
            # During these products the sums of the previous tile are written and those of the next are read.
            transfers = copies(pair + 1, slot), writes(j - 1, other), reads(j + 1, other)
            _start(tile, unroll, *transfers)
            logits = _logits(q[...], keys, _tile(members, j, tile), heads, scale)
            p = jnp.exp(logits - lse)
            dp = _dot(dout[...], keys[:, : dout.shape[1]], 1, 1)
            ds = (p * (dp - delta) * scale).astype(keys.dtype)
            acc[...] += _dot(ds, keys, 1, 0)
            as_key = _dot(ds, q[...], 0, 0)
            as_value = _dot(p.astype(keys.dtype), dout[...], 0, 0)
            _wait_for_copies(old_sums[slot], read.at[slot])

            @pl.when(j > 0)
            def _(slot=slot):
                _wait_for_copies(new_sums[slot], written.at[slot])

            new_sums[slot][...] = old_sums[slot][...] + as_key
            new_sums[slot][:, : dout.shape[1]] += as_value

    lax.fori_loop(0, pairs, step, None)
    _drain_copies(buffers, arrived)
    dq[...] = acc[...].astype(dq.dtype)
    # The next block may read any of these rows.
    _wait_for_copies(old_sums[0], read.at[0])
    _start(tile, min(unroll, 8), writes(2 * pairs - 1, 1))
    for slot in range(2):
        _wait_for_copies(new_sums[slot], written.at[slot])


def _spec(blocks_per_core: int, *shape, space=pltpu.VMEM):
    """Returns one block's part of an array [blocks ...]; each core has `blocks_per_core` of them in order."""
    return pl.BlockSpec(
        (None, *shape), lambda part, i, _: (part * blocks_per_core + i, 0, 0), memory_space=space
    )


def _unroll(interpret) -> int:
    """Returns the number of copies started per loop iteration: a full tile.

    It is 1 in an interpreter, which gains nothing from unrolling.
    """
    return 1 if interpret else BLOCKS.rows


def _pairs(counts, tile: int):
    """Returns the number of pairs of tiles of this block, at least one."""
    count = counts[pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)]
    return jnp.maximum(1, lax.div(count + 2 * tile - 1, 2 * tile))


def _fetch_first_pair(copies, tile: int, unroll: int):
    """Fetches the first pair of tiles of a core's first block; those of other blocks are already in flight."""

    @pl.when(pl.program_id(1) == 0)
    def _():
        for slot in range(2):
            _start(tile, unroll, copies(0, slot))


def _drain_copies(buffers, arrived):
    """Waits for all copies after a core's last block."""

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        for slot in range(2):
            _wait_for_copies(buffers[slot], arrived.at[slot])


def _copy(row, buffer, i, semaphore, to_hbm=False):
    """Returns the copy of one row in HBM to row i of a buffer, or back."""
    buffer_row = buffer.at[pl.ds(i, 1)]
    return pltpu.make_async_copy(*((buffer_row, row) if to_hbm else (row, buffer_row)), semaphore)


def _start(count: int, unroll: int, *copies):
    """Starts copy(i) for i below count, `unroll` per loop iteration; without a loop if unroll is count."""

    def start_one(i, _):
        for copy in copies:
            copy(i).start()

    if unroll == count:
        for i in range(count):
            start_one(i, None)
    else:
        lax.fori_loop(0, count, start_one, None, unroll=unroll)


def _wait_for_copies(buffer, semaphore):
    """Waits for as many bytes as the buffer has: for all row copies into it, or out of it."""
    pltpu.make_async_copy(buffer, buffer, semaphore).wait()


def _tile(members, j, tile: int):
    return members[:, pl.ds(pl.multiple_of(j * tile, tile), tile)]


def _lane_pieces(x):
    """Splits x [m r] into pieces of LANES columns; x itself if it has fewer."""
    return [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)]


def _repeat_columns(x, columns: int):
    """Returns [m columns] of x that is equal in all of its columns."""
    return jnp.concatenate([x] * -(-columns // x.shape[1]), axis=1)[:, :columns]


def _dot(a, b, left: int, right: int):
    """Multiplies a and b along these dimensions in float32."""
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((left,), (right,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)


def _logits(q, keys, members, heads: int, scale: float):
    """Returns [m r]: HIDDEN where members int32[1 r] lacks the bit of the query."""
    bias = [
        jnp.broadcast_to(jnp.where(members & (1 << a) != 0, 0.0, HIDDEN), (heads, keys.shape[0]))
        for a in range(q.shape[0] // heads)
    ]
    return scale * _dot(q, keys, 1, 1) + jnp.concatenate(bias, axis=0)
