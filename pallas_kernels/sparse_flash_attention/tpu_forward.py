"""Kernel of `tpu.forward` and `tpu.paged`: a block of queries against the union of their rows.

Grid: (core, block of the core); the core axis has 2 entries on chips that are one device with two cores, else 1.
Neighbouring blocks run one after the other, because a block fetches the first tiles of the next one.

Blocks, for m = 8 queries x 64 heads, rows of x = 576 in 384 words, y = 512 and a union of up to c = 8 x 2048 rows:

- SMEM: places int32[1, c + 256] (65 KiB, double-buffered), and for pages the tables of two neighbouring blocks.
- VMEM, double-buffered by the pipeline: q bfloat16[m x] (576 KiB), members int32[1 c] (64 KiB), out bfloat16[m y]
  (512 KiB), stats float32[2 m].
- VMEM, scratch: two row buffers int32[128 384] (192 KiB each), running maximum and sum float32[m 128] (256 KiB
  each), sums of the values float32[m y] (1 MiB).

Phases of a program:

1. A core's first block starts the copies of its first pair of tiles.
2. For each tile: wait for its rows, start the copies of the tile two further, compute logits, mask them by
   membership, and add to the online softmax. Each lane sums its own columns; only the maximum moves across lanes.
3. Sum over lanes, normalise, write out, log-sum-exp and maximum. Rows without a member give 0 and infinity.

Padding: queries beyond t are zeros without members; entries beyond a block's count name row 0 without members, and
a block has at least one pair of tiles.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.cost import estimate
from pallas_kernels.mask import HIDDEN
from pallas_kernels.sparse_flash_attention import cost
from pallas_kernels.sparse_flash_attention.gather_union import GatherUnion
from pallas_kernels.sparse_flash_attention.tpu_copies import (
    COMPILER_PARAMS,
    BlockPlan,
    append_next_block,
    copy_row,
    dot,
    drain_copies,
    fetch_first_pair,
    masked_logits,
    member_tile,
    num_pairs,
    num_rows,
    start_copies,
    wait_for_copies,
)
from pallas_kernels.sparse_flash_attention.word_rows import LANES, WordRows, from_words


class PageTable(NamedTuple):
    """Table int32[b pages] of pages with `slots` slots; a slot number has `bits` bits."""

    table: jax.Array
    slots: int
    bits: int


def attend(
    static,
    plan: BlockPlan,
    q: Float[Array, "b t n x"],
    rows: WordRows,
    union: GatherUnion,
    pages: PageTable | None,
    k: int,
    interpret: object,
) -> tuple[Float[Array, "b t n y"], Float[Array, "b t n"], Float[Array, ""]]:
    """Returns (out, float32 lse, largest logit) of q over the rows that union names.

    pages: None if union names rows; otherwise its places hold a page's position and a slot. k: rows per query.
    """
    # Operands and their blocks.
    x, y, m, tile = q.shape[3], static.value_dim, plan.m, plan.tile
    room, words = union.rows.shape[2], rows.words
    places = append_next_block(union.rows, union.rows[..., : 2 * tile])
    in_specs = [
        plan.spec(1, places.shape[-1], space=pltpu.SMEM),
        plan.spec(1, room),
        plan.spec(m, x),
        pl.BlockSpec(memory_space=pltpu.HBM),
    ]
    members = union.members.reshape(plan.blocks, 1, room)
    operands = [places, members, plan.stack_heads(q), words]
    if pages is not None:
        shape = plan.b, plan.groups, pages.table.shape[1]
        tables = jnp.broadcast_to(pages.table[:, None], shape)
        operands.append(append_next_block(tables, tables))
        in_specs.append(plan.spec(1, operands[-1].shape[-1], space=pltpu.SMEM))
    # Call the kernel.
    row_bytes = 4 * words.shape[-1]
    costs = cost.forward(plan.b, plan.t, plan.n, k, x, y, row_bytes, q.dtype.itemsize)
    kernel = functools.partial(
        _attend_block,
        heads=plan.n,
        scale=static.scale,
        layout=rows.layout,
        pages=pages and pages[1:],
        unroll=plan.copies_per_iteration(interpret),
    )
    out, stats = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=plan.grid,
            in_specs=in_specs,
            out_specs=[plan.spec(m, y), plan.spec(2, m)],
            scratch_shapes=[
                *[pltpu.VMEM((tile, words.shape[-1]), jnp.int32)] * 2,
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.VMEM((m, min(LANES, tile)), jnp.float32),
                pltpu.VMEM((m, min(LANES, tile)), jnp.float32),
                pltpu.VMEM((m, y), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((plan.blocks, m, y), q.dtype),
            jax.ShapeDtypeStruct((plan.blocks, 2, m), jnp.float32),
        ],
        compiler_params=COMPILER_PARAMS,
        cost_estimate=estimate(costs),
        interpret=interpret,
        name="sparse_flash_attention",
    )(union.count.reshape(-1), *operands)
    lse = plan.unstack_heads(stats[:, 0])
    return plan.unstack_heads(out), lse, jnp.max(stats[:, 1])


def _attend_block(counts, places, members, q, rows, *refs, heads, scale, layout, pages, unroll):
    """Processes one block of queries: the online softmax over its union, tile by tile."""
    # Unpack the refs.
    table: Any = None
    if pages is not None:
        table, *refs = refs
    out, stats, *buffers, arrived, top, total, acc = refs
    tile, room = buffers[0].shape[0], members.shape[1]
    pairs = num_pairs(counts, tile)

    def copies(pair, slot):
        """Returns copies of that tile of a pair; the pair after the last is the next block's first."""
        is_next_block = pair >= pairs
        start = jnp.where(is_next_block, room, pair * 2 * tile) + slot * tile
        if pages is None:
            return lambda i: copy_row(
                rows.at[places[0, start + i]], buffers[slot], i, arrived.at[slot]
            )
        slots, bits = pages
        table_shift = jnp.where(is_next_block, table.shape[1] // 2, 0)

        def copy(i):
            row = places[0, start + i]
            row = table[0, table_shift + (row >> bits)] * slots + (row & (1 << bits) - 1)
            return copy_row(rows.at[row], buffers[slot], i, arrived.at[slot])

        return copy

    fetch_first_pair(copies, tile, min(unroll, 8))
    top[...] = jnp.full_like(top, HIDDEN)
    total[...] = jnp.zeros_like(total)
    acc[...] = jnp.zeros_like(acc)

    # Online softmax over a pair of tiles.
    def step(pair, _):
        for slot in range(2):
            wait_for_copies(buffers[slot], arrived.at[slot])
            keys = from_words(buffers[slot][...], layout)
            start_copies(tile, unroll, copies(pair + 1, slot))
            member_bits = member_tile(members, 2 * pair + slot, tile)
            logits = masked_logits(q[...], keys, member_bits, heads, scale)
            # Row statistics are equal in all lanes, and each lane has a part of the sums: only the maximum
            # moves across lanes.
            old_top = top[...]
            new_top = jnp.maximum(old_top, jnp.max(logits, axis=1, keepdims=True))
            decay = jnp.exp(old_top - new_top)
            parts = [jnp.exp(part - new_top) for part in _lane_pieces(logits)]
            top[...] = new_top
            total[...] = decay * total[...] + sum(parts)
            p, values = jnp.concatenate(parts, axis=1), keys[:, : acc.shape[1]]
            acc[...] = _repeat_columns(decay, acc.shape[1]) * acc[...] + dot(
                p.astype(values.dtype), values, 1, 0
            )

    lax.fori_loop(0, pairs, step, None)
    drain_copies(buffers, arrived)
    # Rows of other queries count only until the query's first row decays them to zero.
    has_rows = top[...] > HIDDEN / 2
    sums = jnp.broadcast_to(jnp.sum(total[...], axis=1, keepdims=True), top.shape)
    normalised = _repeat_columns(jnp.where(has_rows, 1 / sums, 0), acc.shape[1]) * acc[...]
    # If the block has no rows, the one that unused entries name may hold NaN.
    out[...] = jnp.where(num_rows(counts) > 0, normalised, 0).astype(out.dtype)
    lse = jnp.where(has_rows, top[...] + jnp.log(sums), jnp.inf)
    lane = lax.broadcasted_iota(jnp.int32, lse.shape, 1)
    stats[...] = jnp.where(lane == 0, lse, top[...]).T[:2]


def _lane_pieces(x):
    """Splits x [m r] into pieces of LANES columns; x itself if it has fewer."""
    return [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)]


def _repeat_columns(x, columns: int):
    """Returns [m columns] of x that is equal in all of its columns."""
    return jnp.concatenate([x] * -(-columns // x.shape[1]), axis=1)[:, :columns]
