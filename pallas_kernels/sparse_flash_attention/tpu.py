"""Attention over selected rows on TPUs: neighbouring queries share one gather of the union of their rows.

A block's queries, all heads, are the rows of one matrix. The rows of its union come from HBM one copy
each; membership bits tell a query's own rows. What a copy costs is the scalar instructions that start it,
so a tile's copies are written out in line, into a buffer whose address is known and whose last tile has
just been loaded: the compiler starts them in the shadow of that tile's products. Tiles go in pairs, one
for each of two buffers, and are copied whole; behind a block's last pair comes the next block's first.

The backward adds up a tile's row gradients over all queries of the block before it touches memory, and
takes the blocks in order: a row's gradient is read, added to and written back by one core at a time.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import dispatch
from pallas_kernels.cost import estimate
from pallas_kernels.mask import HIDDEN
from pallas_kernels.sparse_flash_attention import cost
from pallas_kernels.sparse_flash_attention.rows import LANES, Layout, WordRows, from_words
from pallas_kernels.sparse_flash_attention.union import Union, unite


class Blocks(NamedTuple):
    """queries: neighbours that share a gather; rows: of their union in one tile, a multiple of 8."""

    queries: int
    rows: int


# Not measured. 8 queries of 64 heads fill the matrix unit, and 128 rows are its depth.
BLOCKS = Blocks(queries=8, rows=128)
SMEM_BYTES = 768 << 10  # for indices, of 1 MiB
TWO_CORES = ("TPU v4", "TPU v5", "TPU v5p")  # chips that are one device with two cores
SPARE = 4  # tiles of rows behind the last, for the backward's entries without a row
PARAMS = pltpu.CompilerParams(
    dimension_semantics=("parallel", "arbitrary"),
    vmem_limit_bytes=48 << 20,
    disable_bounds_checks=True,  # every row that is copied is one of the array: the union holds no other
)


def refuse(q, latents, topk, value_dim):
    """Why these cannot be taken: a reason in words, or None."""
    del value_dim
    if latents.dtype not in (jnp.bfloat16, jnp.float32) or q.dtype != latents.dtype:
        return f"queries are {q.dtype} and rows {latents.dtype}, not both bfloat16 or both float32"
    queries = min(BLOCKS.queries, topk.shape[1])
    if 2 * 4 * queries * topk.shape[2] > SMEM_BYTES:
        return f"{topk.shape[2]} rows a query do not fit in scalar memory"
    numbered = latents.shape[0] * (latents.shape[1] + SPARE * BLOCKS.rows) * queries
    if numbered > jnp.iinfo(jnp.int32).max:
        return f"latents of shape {latents.shape} have more rows than 32 bits can number"
    return None


def forward(static, q, latents, topk, *, interpret=False):
    """(out [b t n y], lse float32[b t n], largest logit) of q [b t n x] over rows topk [b t k] of latents
    [b s x]."""

    # Under vmap one call after the other: an operand that stays in HBM takes no further axis.
    @sequential_vmap
    def run(q, latents, topk):
        b, s, x = latents.shape
        union = _united(topk, s)
        union = union._replace(rows=union.rows + s * jnp.arange(b, dtype=jnp.int32)[:, None, None])
        rows = _copyable(latents.reshape(b * s, x))
        return _attend(static, q, rows, union, None, topk.shape[2], interpret)

    return run(q, latents, topk)


def paged(static, q, pages, page_table, topk, *, interpret=False):
    """(out [b t n y], lse float32[b t n]) of q [b t n x] over positions topk [b t k], which page_table
    [b pages] finds in pages [p z x], an array or `WordRows`."""

    @sequential_vmap
    def run(q, pages, page_table, topk):
        slots = pages.shape[1]
        bits = (slots - 1).bit_length()
        # Page and slot apart, so that a shift finds them: scalar cores have no division.
        apart = jnp.where(topk < 0, -1, (topk // slots << bits) | (topk % slots))
        union = _united(apart, page_table.shape[1] << bits)
        rows = jax.tree.map(lambda a: a.reshape(-1, 1, a.shape[-1]), _copyable(pages))
        where = _Pages(page_table, slots, bits)
        return _attend(static, q, rows, union, where, topk.shape[2], interpret)[:2]

    return run(q, pages, page_table, topk)


def backward(static, saved, dout, *, interpret=False):
    """(dq, dlatents) for what `forward` took, out and lse that it gave, and the gradient of out."""

    @sequential_vmap
    def run(*args):
        return _differentiate(static, *args, interpret)

    return run(*saved, dout)


class _Pages(NamedTuple):
    """Where positions are: table int32[b pages] of pages with so many slots, numbered in so many bits."""

    table: jax.Array
    slots: int
    bits: int


def _copyable(rows) -> WordRows:
    """Rows [... x] in a form of which one can be copied alone."""
    if isinstance(rows, WordRows):
        return rows
    return WordRows.of(rows, Layout.exact(rows.shape[-1], rows.dtype))


def _united(topk, s: int) -> Union:
    return unite(topk, s, min(BLOCKS.queries, topk.shape[1]), 2 * BLOCKS.rows)


def num_parts(blocks: int) -> int:
    """Into how many runs of neighbours the blocks go: one per core of the device."""
    return 2 if dispatch.device_kind() in TWO_CORES and blocks % 2 == 0 else 1


def _gathered_heads(x, groups: int):
    """[b t n ...] as [b * g, m ...]: the m = queries * heads of each block, zeros for queries beyond t."""
    b, t, n, *rest = x.shape
    queries = min(BLOCKS.queries, t)
    x = jnp.pad(x, [(0, 0), (0, groups * queries - t)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(b * groups, queries * n, *rest)


def _scattered_heads(x, b: int, t: int, n: int):
    """[b * g, m ...] as [b t n ...], without the queries beyond t."""
    return x.reshape(b, -1, n, *x.shape[2:])[:, :t]


def _before_next(lists, next_first):
    """Each block's list [b g c] as [b * g, 1, c + ...], the beginning of the next block's behind it."""
    lists, next_first = (x.reshape(-1, 1, x.shape[-1]) for x in (lists, next_first))
    return jnp.concatenate([lists, jnp.roll(next_first, -1, axis=0)], axis=-1)


def _attend(static, q, rows, union, pages, k: int, interpret):
    b, t, n, x = q.shape
    groups, room = union.rows.shape[1:]
    blocks, m, y = b * groups, min(BLOCKS.queries, t) * n, static.value_dim
    parts = num_parts(blocks)
    spec = functools.partial(_spec, blocks // parts)
    places = _before_next(union.rows, union.rows[..., : 2 * BLOCKS.rows])
    in_specs = [
        spec(1, places.shape[-1], space=pltpu.SMEM),
        spec(1, room),
        spec(m, x),
        pl.BlockSpec(memory_space=pltpu.HBM),
    ]
    words = rows.words
    operands = [places, union.members.reshape(blocks, 1, room), _gathered_heads(q, groups), words]
    if pages is not None:
        tables = jnp.broadcast_to(pages.table[:, None], (b, groups, pages.table.shape[1]))
        operands.append(_before_next(tables, tables))
        in_specs.append(spec(1, operands[-1].shape[-1], space=pltpu.SMEM))
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
    lse = _scattered_heads(stats[:, 0], b, t, n)
    return _scattered_heads(out, b, t, n), lse, jnp.max(stats[:, 1])


def _attend_block(counts, places, members, q, rows, *refs, heads, scale, layout, pages, unroll):
    """One block of queries: the online softmax over its union, tile by tile."""
    table, refs = (None, refs) if pages is None else (refs[0], refs[1:])
    out, stats, *buffers, arrived, top, total, acc = refs
    tile, room = buffers[0].shape[0], members.shape[1]
    pairs = _pairs(counts, tile)

    def copies(pair, slot):
        """Of that tile of a pair; the pair behind the last is the next block's first."""
        beyond = pair >= pairs
        start = jnp.where(beyond, room, pair * 2 * tile) + slot * tile
        if pages is None:
            return lambda i: _copy(
                rows.at[places[0, start + i]], buffers[slot], i, arrived.at[slot]
            )
        slots, bits = pages
        shift = jnp.where(beyond, table.shape[1] // 2, 0)

        def copy(i):
            place = places[0, start + i]
            place = table[0, shift + (place >> bits)] * slots + (place & (1 << bits) - 1)
            return _copy(rows.at[place], buffers[slot], i, arrived.at[slot])

        return copy

    _begin(copies, tile, min(unroll, 8))
    top[...] = jnp.full_like(top, HIDDEN)
    total[...] = jnp.zeros_like(total)
    acc[...] = jnp.zeros_like(acc)

    def step(pair, _):
        for slot in range(2):
            _arrival(buffers[slot], arrived.at[slot])
            keys = from_words(buffers[slot][...], layout)
            _start(tile, unroll, copies(pair + 1, slot))
            own = _tile(members, 2 * pair + slot, tile)
            logits = _logits(q[...], keys, own, heads, scale)
            # Row statistics are the same in all lanes, sums one part in each: nothing moves across lanes
            # but for the maximum.
            before = top[...]
            now = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
            fade = jnp.exp(before - now)
            parts = [jnp.exp(part - now) for part in _lanes(logits)]
            top[...] = now
            total[...] = fade * total[...] + sum(parts)
            p, values = jnp.concatenate(parts, axis=1), keys[:, : acc.shape[1]]
            acc[...] = _wide(fade, acc.shape[1]) * acc[...] + _dot(
                p.astype(values.dtype), values, 1, 0
            )

    lax.fori_loop(0, pairs, step, None)
    _end(buffers, arrived)
    # Rows that are not a query's own count only until its first own row fades them to nothing.
    seen = top[...] > HIDDEN / 2
    sums = jnp.broadcast_to(jnp.sum(total[...], axis=1, keepdims=True), top.shape)
    out[...] = (_wide(jnp.where(seen, 1 / sums, 0), acc.shape[1]) * acc[...]).astype(out.dtype)
    lse = jnp.where(seen, top[...] + jnp.log(sums), jnp.inf)
    lane = lax.broadcasted_iota(jnp.int32, lse.shape, 1)
    stats[...] = jnp.where(lane == 0, lse, top[...]).T[:2]


def _differentiate(static, q, latents, topk, out, lse, dout, interpret):
    b, t, n, x = q.shape
    s, y, tile = latents.shape[1], static.value_dim, BLOCKS.rows
    union = _united(topk, s)
    groups, room = union.rows.shape[1:]
    blocks, m = b * groups, min(BLOCKS.queries, t) * n
    parts = num_parts(blocks)
    sums = 1 if b % parts == 0 else parts  # a batch row that two cores share has a sum in each
    # Entries without a row add nothing, to rows behind the last: those of a pair of tiles, of what is
    # written before the first tile, and of what is read behind the last, each to its own.
    stride = s + SPARE * tile
    entry = jnp.arange(room, dtype=jnp.int32)
    own = jnp.where(entry < union.count[..., None], union.rows, s + entry % (2 * tile))
    before, behind = (
        jnp.broadcast_to(s + i * tile + entry[:tile], (b, groups, tile)) for i in (2, 3)
    )
    offset = stride * jnp.arange(b, dtype=jnp.int32)[:, None, None]
    places = _before_next(
        jnp.concatenate([before, own, behind], axis=-1) + offset, own[..., : 2 * tile] + offset
    )
    rows = jnp.pad(latents, ((0, 0), (0, SPARE * tile), (0, 0))).reshape(b * stride, x)
    rows = _copyable(rows)
    costs = cost.backward(b, t, n, topk.shape[2], x, y, 4 * rows.layout.width, q.dtype.itemsize)
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    stats = jnp.stack([_gathered_heads(stat, groups) for stat in (lse, delta)], axis=1)
    spec = functools.partial(_spec, blocks // parts)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
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
            jax.ShapeDtypeStruct((sums, b * stride, 1, x), jnp.float32),
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
        _gathered_heads(q, groups),
        _gathered_heads(dout, groups),
        jnp.pad(stats, ((0, 0), (0, 6), (0, 0))),
        rows.words,
        jnp.zeros((sums, b * stride, 1, x), jnp.float32),
    )
    dlatents = jnp.sum(total.reshape(sums, b, stride, x)[:, :, :s], axis=0)
    return _scattered_heads(dq, b, t, n), dlatents.astype(latents.dtype)


def _differentiate_block(
    counts, places, members, q, dout, stats, rows, _, dq, total, *refs, heads, scale, layout, unroll
):
    """One block of queries: its own gradient, and its rows' added to the sums in HBM."""
    *buffers, old0, old1, new0, new1, acc, arrived, read, written = refs
    old, new = (old0, old1), (new0, new1)
    total = total.at[pl.program_id(0) if total.shape[0] > 1 else 0]
    tile, room = buffers[0].shape[0], members.shape[1]
    pairs = _pairs(counts, tile)

    def copies(pair, slot):
        """Of the rows of that tile of a pair; the pair behind the last is the next block's first."""
        start = tile + jnp.where(pair >= pairs, room + tile, pair * 2 * tile) + slot * tile
        return lambda i: _copy(rows.at[places[0, start + i]], buffers[slot], i, arrived.at[slot])

    def reads(j, slot):
        """Of the sums of tile j so far."""
        start = tile + jnp.where(j >= 2 * pairs, room, j * tile)
        return lambda i: _copy(total.at[places[0, start + i]], old[slot], i, read.at[slot])

    def writes(j, slot):
        start = tile + j * tile
        return lambda i: _copy(
            total.at[places[0, start + i]], new[slot], i, written.at[slot], back=True
        )

    _begin(copies, tile, min(unroll, 8))
    _start(tile, min(unroll, 8), reads(0, 0))
    acc[...] = jnp.zeros_like(acc)
    columns = stats[...].T
    lse, delta = columns[:, :1], columns[:, 1:2]

    def step(pair, _):
        for slot in range(2):
            j, other = 2 * pair + slot, 1 - slot
            _arrival(buffers[slot], arrived.at[slot])
            keys = from_words(buffers[slot][...], layout)
            # The sums of the tile before go out and those of the next come in while this is multiplied.
            moving = copies(pair + 1, slot), writes(j - 1, other), reads(j + 1, other)
            _start(tile, unroll, *moving)
            logits = _logits(q[...], keys, _tile(members, j, tile), heads, scale)
            p = jnp.exp(logits - lse)
            dp = _dot(dout[...], keys[:, : dout.shape[1]], 1, 1)
            ds = (p * (dp - delta) * scale).astype(keys.dtype)
            acc[...] += _dot(ds, keys, 1, 0)
            as_key = _dot(ds, q[...], 0, 0)
            as_value = _dot(p.astype(keys.dtype), dout[...], 0, 0)
            _arrival(old[slot], read.at[slot])

            @pl.when(j > 0)
            def _(slot=slot):
                _arrival(new[slot], written.at[slot])

            new[slot][...] = old[slot][...] + as_key
            new[slot][:, : dout.shape[1]] += as_value

    lax.fori_loop(0, pairs, step, None)
    _end(buffers, arrived)
    dq[...] = acc[...].astype(dq.dtype)
    # The next block may read any of these rows.
    _arrival(old[0], read.at[0])
    _start(tile, min(unroll, 8), writes(2 * pairs - 1, 1))
    for slot in range(2):
        _arrival(new[slot], written.at[slot])


def _spec(each: int, *shape, space=pltpu.VMEM):
    """One block's part of an array [blocks ...] whose blocks the cores share, `each` of them in order."""
    return pl.BlockSpec(
        (None, *shape), lambda part, i, _: (part * each + i, 0, 0), memory_space=space
    )


def _unroll(interpret) -> int:
    """Copies started in one turn of a loop: a whole tile's; an interpreter has nothing to gain from it."""
    return 1 if interpret else BLOCKS.rows


def _pairs(counts, tile: int):
    """Pairs of tiles of this block, at least one."""
    count = counts[pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)]
    return jnp.maximum(1, lax.div(count + 2 * tile - 1, 2 * tile))


def _begin(copies, tile: int, unroll: int):
    """A core's first block fetches its first pair of tiles; the others find theirs on the way."""

    @pl.when(pl.program_id(1) == 0)
    def _():
        for slot in range(2):
            _start(tile, unroll, copies(0, slot))


def _end(buffers, arrived):
    """Behind a core's last block nothing stays on the way."""

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        for slot in range(2):
            _arrival(buffers[slot], arrived.at[slot])


def _copy(row, buffer, i, semaphore, back=False):
    """Of one row in HBM into row i of a buffer, or back."""
    inner = buffer.at[pl.ds(i, 1)]
    return pltpu.make_async_copy(*((inner, row) if back else (row, inner)), semaphore)


def _start(count: int, unroll: int, *copies):
    """Starts copy(i) for i below count, so many in one turn of a loop; all of them: without a loop."""

    def turn(i, _):
        for copy in copies:
            copy(i).start()

    if unroll == count:
        for i in range(count):
            turn(i, None)
    else:
        lax.fori_loop(0, count, turn, None, unroll=unroll)


def _arrival(buffer, semaphore):
    """Waits for as many bytes as the buffer has: for all the row copies into it, or out of it."""
    pltpu.make_async_copy(buffer, buffer, semaphore).wait()


def _tile(members, j, tile: int):
    return members[:, pl.ds(pl.multiple_of(j * tile, tile), tile)]


def _lanes(x):
    """x [m r] in pieces of LANES columns, or as it is if it has fewer."""
    return [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)]


def _wide(x, columns: int):
    """[m columns] of x that is the same in all of its columns."""
    return jnp.concatenate([x] * -(-columns // x.shape[1]), axis=1)[:, :columns]


def _dot(a, b, left: int, right: int):
    """a and b multiplied along these dimensions, float32."""
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((left,), (right,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)


def _logits(q, keys, members, heads: int, scale: float):
    """[m r]: HIDDEN where members int32[1 r] lacks the bit of the query."""
    bias = [
        jnp.broadcast_to(jnp.where(members & (1 << a) != 0, 0.0, HIDDEN), (heads, keys.shape[0]))
        for a in range(q.shape[0] // heads)
    ]
    return scale * _dot(q, keys, 1, 1) + jnp.concatenate(bias, axis=0)
