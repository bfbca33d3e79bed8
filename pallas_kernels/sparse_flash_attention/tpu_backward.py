"""Kernel of `tpu.backward`: gradients of a block of queries, and its part of the rows' gradients.

Grid: (core, block of the core), in order. A tile's row gradients are summed over all queries of the block before
memory is accessed. Then the kernel reads, adds to and writes the row's float32 sum in HBM, and only one core does so
at a time: no sum depends on which block finishes first. Two cores that share a sequence have a sum each, which XLA
adds.

Blocks, for m = 8 queries x 64 heads, rows of x = 576 in 384 words, y = 512, unions of up to c = 8 x 2048 rows and
tiles of 128:

- SMEM: places int32[1, c + 512] (66 KiB, double-buffered).
- VMEM, double-buffered by the pipeline: q and dq bfloat16[m x] (576 KiB each), dout bfloat16[m y] (512 KiB), members
  int32[1 c] (64 KiB), statistics float32[8 m].
- VMEM, scratch: two row buffers int32[128 384] (192 KiB each), four tiles float32[128 x] of previous and new sums
  (288 KiB each), dq float32[m x] (1.1 MiB).
- HBM: the sums float32[b (s + 4 tiles) 1 x], in place.

Phases of a program:

1. A core's first block starts the copies of its first pair of tiles; each block starts to read its first sums.
2. For each tile: wait for its rows; start the copies of the tile two further, the write of the previous tile's
   sums, and the read of the next tile's; recompute logits and probabilities; add to dq; add the tile's gradients to
   the sums that were read.
3. Write dq and the last sums, and wait for every write: the next block may read any of these rows.

Padding: entries without a member add zeros to spare rows after the sequence's last, `SPARE` tiles of them: separate
ones for a pair of tiles, for the write before the first tile, and for the read after the last.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.cost import estimate
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
    start_copies,
    wait_for_copies,
)
from pallas_kernels.sparse_flash_attention.word_rows import RowLayout, WordRows, from_words

SPARE = 4  # tiles of rows after the last one, for the entries without a row


def differentiate(
    static,
    plan: BlockPlan,
    q: Float[Array, "b t n x"],
    latents: Float[Array, "b s x"],
    union: GatherUnion,
    out: Float[Array, "b t n y"],
    lse: Float[Array, "b t n"],
    dout: Float[Array, "b t n y"],
    k: int,
    interpret: object,
) -> tuple[Float[Array, "b t n x"], Float[Array, "b s x"]]:
    """Returns (dq, dlatents) of attention over the rows of latents that union names. k: rows per query."""
    # Places of the rows and of their sums, with spare rows for entries without a row.
    (b, s, x), y, m, tile = latents.shape, static.value_dim, plan.m, plan.tile
    room = union.rows.shape[2]
    sums = (
        1 if b % plan.parts == 0 else plan.parts
    )  # a sequence that two cores share has a sum in each
    batch_stride = s + SPARE * tile
    entry = jnp.arange(room, dtype=jnp.int32)
    # Also for the gaps of a single query: the sum of row 0, which they name, may be in flight.
    padded_rows = jnp.where(union.members != 0, union.rows, s + entry % (2 * tile))
    spare_before, spare_after = (
        jnp.broadcast_to(s + i * tile + entry[:tile], (b, plan.groups, tile)) for i in (2, 3)
    )
    offset = batch_stride * jnp.arange(b, dtype=jnp.int32)[:, None, None]
    places = append_next_block(
        jnp.concatenate([spare_before, padded_rows, spare_after], axis=-1) + offset,
        padded_rows[..., : 2 * tile] + offset,
    )
    # Operands.
    rows = jnp.pad(latents, ((0, 0), (0, SPARE * tile), (0, 0))).reshape(b * batch_stride, x)
    rows = WordRows.encode(rows, RowLayout.exact(x, rows.dtype))
    row_bytes = 4 * rows.layout.width
    costs = cost.backward(b, plan.t, plan.n, k, x, y, row_bytes, q.dtype.itemsize)
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    stats = jnp.stack([plan.stack_heads(stat) for stat in (lse, delta)], axis=1)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    # Call the kernel.
    dq, total = pl.pallas_call(
        functools.partial(
            _differentiate_block,
            heads=plan.n,
            scale=static.scale,
            layout=rows.layout,
            unroll=plan.copies_per_iteration(interpret),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=plan.grid,
            in_specs=[
                plan.spec(1, places.shape[-1], space=pltpu.SMEM),
                plan.spec(1, room),
                plan.spec(m, x),
                plan.spec(m, y),
                plan.spec(8, m),
                hbm,
                hbm,
            ],
            out_specs=[plan.spec(m, x), hbm],
            scratch_shapes=[
                *[pltpu.VMEM((tile, rows.layout.width), jnp.int32)] * 2,
                *[pltpu.VMEM((tile, x), jnp.float32)] * 4,
                pltpu.VMEM((m, x), jnp.float32),
                *[pltpu.SemaphoreType.DMA((2,))] * 3,
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((plan.blocks, m, x), q.dtype),
            jax.ShapeDtypeStruct((sums, b * batch_stride, 1, x), jnp.float32),
        ],
        input_output_aliases={7: 1},
        compiler_params=COMPILER_PARAMS,
        cost_estimate=estimate(costs),
        interpret=interpret,
        name="sparse_flash_attention_backward",
    )(
        union.count.reshape(-1),
        places,
        union.members.reshape(plan.blocks, 1, room),
        plan.stack_heads(q),
        plan.stack_heads(dout),
        jnp.pad(stats, ((0, 0), (0, 6), (0, 0))),
        rows.words,
        jnp.zeros((sums, b * batch_stride, 1, x), jnp.float32),
    )
    dlatents = jnp.sum(total.reshape(sums, b, batch_stride, x)[:, :, :s], axis=0)
    return plan.unstack_heads(dq), dlatents.astype(latents.dtype)


def _differentiate_block(
    counts, places, members, q, dout, stats, rows, _, dq, total, *refs, heads, scale, layout, unroll
):
    """Processes one block of queries: their gradient, and their part of the rows' gradients in HBM."""
    # Unpack the refs.
    *buffers, old0, old1, new0, new1, acc, arrived, read, written = refs
    old_sums, new_sums = (old0, old1), (new0, new1)
    total = total.at[pl.program_id(0) if total.shape[0] > 1 else 0]
    tile, room = buffers[0].shape[0], members.shape[1]
    pairs = num_pairs(counts, tile)

    def copies(pair, slot):
        """Returns copies of the rows of that tile of a pair.

        The pair after the last is the next block's first.
        """
        start = tile + jnp.where(pair >= pairs, room + tile, pair * 2 * tile) + slot * tile
        return lambda i: copy_row(rows.at[places[0, start + i]], buffers[slot], i, arrived.at[slot])

    def reads(j, slot):
        """Returns copies of the previous sums of tile j; of spare rows after the last tile."""
        start = tile + jnp.where(j >= 2 * pairs, room, j * tile)
        return lambda i: copy_row(total.at[places[0, start + i]], old_sums[slot], i, read.at[slot])

    def writes(j, slot):
        """Returns copies of the new sums of tile j; to spare rows for tile -1."""
        start = tile + j * tile
        return lambda i: copy_row(
            total.at[places[0, start + i]], new_sums[slot], i, written.at[slot], to_hbm=True
        )

    fetch_first_pair(copies, tile, min(unroll, 8))
    start_copies(tile, min(unroll, 8), reads(0, 0))
    acc[...] = jnp.zeros_like(acc)
    columns = stats[...].T
    lse, delta = columns[:, :1], columns[:, 1:2]

    # Gradients of a pair of tiles.
    def step(pair, _):
        for slot in range(2):
            j, other = 2 * pair + slot, 1 - slot
            wait_for_copies(buffers[slot], arrived.at[slot])
            keys = from_words(buffers[slot][...], layout)
            # During these products the sums of the previous tile are written and those of the next are read.
            transfers = copies(pair + 1, slot), writes(j - 1, other), reads(j + 1, other)
            start_copies(tile, unroll, *transfers)
            logits = masked_logits(q[...], keys, member_tile(members, j, tile), heads, scale)
            p = jnp.exp(logits - lse)
            dp = dot(dout[...], keys[:, : dout.shape[1]], 1, 1)
            ds = (p * (dp - delta) * scale).astype(keys.dtype)
            acc[...] += dot(ds, keys, 1, 0)
            as_key = dot(ds, q[...], 0, 0)
            as_value = dot(p.astype(keys.dtype), dout[...], 0, 0)
            wait_for_copies(old_sums[slot], read.at[slot])

            @pl.when(j > 0)
            def _(slot=slot):
                wait_for_copies(new_sums[slot], written.at[slot])

            new_sums[slot][...] = old_sums[slot][...] + as_key
            new_sums[slot][:, : dout.shape[1]] += as_value

    lax.fori_loop(0, pairs, step, None)
    drain_copies(buffers, arrived)
    dq[...] = acc[...].astype(dq.dtype)
    # The next block may read any of these rows.
    wait_for_copies(old_sums[0], read.at[0])
    start_copies(tile, min(unroll, 8), writes(2 * pairs - 1, 1))
    for slot in range(2):
        wait_for_copies(new_sums[slot], written.at[slot])
