"""Attention over selected latents on Hopper: gathered tiles in shared memory, products on tensor cores.

Kernels: `gpu_forward.attend`, and in the backward `gpu_backward.score`, `gpu_backward.spread` and `segment_sum`.

A block of 64 rows, GLM-5's 64 heads of one query, is the limit of one multiprocessor: its 64 x 512 float32 sums
take half of the registers. A model with fewer heads puts several neighbouring queries into the 64 rows, which
share the union of their latents and mask by membership. Each gathered row of 1152 bytes therefore feeds 139
kFLOP (121 per byte) whatever the blocking. Neighbouring queries run at the same time on all multiprocessors,
and the L2 cache fetches their shared rows once. If there are too few blocks, as in decoding, lists are split, and XLA
merges the results of the pieces.

The backward shares the sums of a latent among SHARING blocks: see `gpu_backward`.

Padding: rows of a block to 64 with zeros, lists to full tiles with -1 (zeros are gathered), and the columns of latents
and values so that each warpgroup has full pieces of 64.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels import backends, hopper
from pallas_kernels.blocks import join, query_runs, split
from pallas_kernels.numerics import join_pieces
from pallas_kernels.segment_sum import BLOCK_ROWS, segment_sum
from pallas_kernels.sparse_flash_attention.gather_union import MAX_QUERIES, unite
from pallas_kernels.sparse_flash_attention.gpu_backward import (
    SPREAD,
    score,
    spread,
)
from pallas_kernels.sparse_flash_attention.gpu_forward import ROWS, TILE, attend, num_parts
from pallas_kernels.sparse_flash_attention.word_rows import WordRows
from pallas_kernels.sparse_flash_attention.xla import find_rows

MAX_WIDTH = 576  # columns of a latent that fit shared memory
MAX_VALUE_WIDTH = 512  # more would need a third warpgroup, which would wait forever for registers
SHARING = 4  # blocks of rows whose gradients of a latent are summed before they go to memory
QUERIES_PER_STEP = 64  # queries whose 8-bit latents XLA converts per step: 150 MB for GLM-5
BLOCKS_PER_STEP = 512  # blocks whose gradients exist together: up to 2.4 GB for GLM-5
NONE = jnp.iinfo(jnp.int32).max


def unsupported_reason(
    q: Float[Array, "b t n x"],
    latents: Float[Array, "b s x"] | WordRows,
    topk: Int32[Array, "b t k"],
    value_dim: int,
) -> str | None:
    """Returns the reason why the arguments are not supported, or None. latents: latents or pages, in either form."""
    kind = jnp.bfloat16 if latents.dtype == jnp.int32 else latents.dtype
    if q.dtype != kind or q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"q is {q.dtype} and latents {latents.dtype}; both must be bfloat16"
    if q.dtype == jnp.float32 and backends.BACKEND_OF_PLATFORM.get(backends.platform()) == "gpu":
        return "tensor cores take no float32 in the memory order of the values"
    if q.shape[2] > ROWS:
        return f"{q.shape[2]} heads; at most {ROWS}"
    if _widths(q.shape[3], value_dim)[0] > MAX_WIDTH:
        return f"latents of {q.shape[3]} columns; at most {MAX_WIDTH}"
    if value_dim > MAX_VALUE_WIDTH:
        return f"values of {value_dim} columns; at most {MAX_VALUE_WIDTH}"
    return None


def forward(
    static,
    q: Float[Array, "b t n x"],
    latents: Float[Array, "b s x"] | WordRows,
    topk: Int32[Array, "b t k"],
    *,
    interpret: object = False,
) -> tuple[Float[Array, "b t n y"], Float[Array, "b t n"], Float[Array, ""]]:
    """See `ref.forward`."""
    width, values = _widths(q.shape[3], static.value_dim)
    blocks = _Blocks(q, latents)
    lists = blocks.lists(topk)
    cuts = num_pieces(*lists[0].shape)
    rows, members, counts = _cut(lists, cuts)
    out, lse, top = attend(
        jnp.repeat(blocks.stack(q, width), cuts, axis=0),
        blocks.table(latents, width),
        rows,
        members,
        counts,
        blocks.bits(),
        scale=static.scale,
        value_dim=values,
        interpret=interpret,
    )
    out, lse, top = _merge((out, lse, top), cuts)
    out, lse, top = (blocks.unstack(x) for x in (out, lse[..., None], top[..., None]))
    return out[..., : static.value_dim], lse[..., 0], jnp.max(top)


def paged(
    static,
    q: Float[Array, "b t n x"],
    pages: Float[Array, "p z x"] | WordRows,
    page_table: Int[Array, "b pages"],
    topk: Int32[Array, "b t k"],
    *,
    interpret: object = False,
) -> tuple[Float[Array, "b t n y"], Float[Array, "b t n"]]:
    """See `ref.paged`.

    The kernel copies rows unchanged, so for `WordRows` XLA first converts the latents of each query.
    """
    b, t, n, x = q.shape
    rows = find_rows(page_table, topk, pages.shape[1]).reshape(1, b * t, -1)
    # All pages are one batch row's latents, and all sequences its queries.
    q = q.reshape(1, b * t, n, x)
    if isinstance(pages, WordRows):
        out, lse = _attend_words(static, q, pages, rows, interpret)
    else:
        out, lse, _ = forward(static, q, pages.reshape(1, -1, x), rows, interpret=interpret)
    return out.reshape(b, t, n, -1), lse.reshape(b, t, n)


def _attend_words(static, q, pages, rows, interpret):
    """Returns (out, lse) for rows of all pages, QUERIES_PER_STEP queries per step.

    q [1 t n x]; rows int32[1 t k].
    """
    words = pages.words.reshape(-1, *pages.words.shape[2:])

    def attend_some(args):
        q, rows = (a[:, None] for a in args)  # each query has separate latents
        latents = WordRows(words[jnp.maximum(rows[:, 0], 0)], pages.layout).rows()
        indices = jnp.where(rows < 0, -1, jnp.arange(rows.shape[-1], dtype=jnp.int32))
        return tuple(a[:, 0] for a in forward(static, q, latents, indices, interpret=interpret)[:2])

    outs = [
        tuple(
            join(a, 0) for a in lax.map(attend_some, (split(q[0], run, 0), split(rows[0], run, 0)))
        )
        for run in query_runs(q.shape[1], 0, None, QUERIES_PER_STEP)
    ]
    return tuple(jnp.concatenate(parts) for parts in zip(*outs))


def num_pieces(blocks: int, capacity: int) -> int:
    """Returns how many pieces each list is split into, so that all multiprocessors have work."""
    cuts, tiles = 1, capacity // TILE
    while 2 * cuts * blocks <= hopper.MULTIPROCESSORS and tiles % (4 * cuts) == 0:
        cuts *= 2
    return cuts


def _cut(lists, cuts: int):
    """Splits each block's lists into those of `cuts` blocks with equally many tiles."""
    rows, members, count = lists
    capacity = rows.shape[1] // cuts
    first = capacity * jnp.arange(cuts, dtype=jnp.int32)
    count = jnp.clip(count[:, None] - first, 0, capacity).reshape(-1)
    return rows.reshape(-1, capacity), members.reshape(-1, capacity), count


def _merge(results, cuts: int):
    """Merges the results of `attend` for the pieces of each list."""
    if cuts == 1:
        return results
    return join_pieces(*(x.reshape(-1, cuts, *x.shape[1:]) for x in results), axis=1)


def backward(
    static, saved: tuple, dout: Float[Array, "b t n y"], *, interpret: object = False
) -> tuple[Float[Array, "b t n x"], Float[Array, "b s x"]]:
    """See `ref.backward`."""
    # Arrange queries and latents in blocks.
    q, latents, topk, out, lse = saved
    width, values = _widths(q.shape[3], static.value_dim)
    blocks = _Blocks(q, latents)
    table = blocks.table(latents, width)
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    # In ascending order, so that the position of a latent within its block can be counted.
    lists = blocks.lists(jnp.sort(jnp.where(topk < 0, NONE, topk)))
    numbers = (blocks.stack(x[..., None], 1)[..., 0] for x in (lse, delta))
    # dout is padded to the width of q, because `spread` multiplies both by columns.
    inputs = blocks.stack(q, width), blocks.stack(dout, width), *lists, *numbers
    # Split the blocks into steps.
    latent_rows = BLOCK_ROWS * -(-len(table) // BLOCK_ROWS)
    steps = -(-blocks.count // BLOCKS_PER_STEP)
    size = SHARING * -(-blocks.count // (steps * SHARING))
    empty = [(0, steps * size - blocks.count)]
    inputs = [jnp.pad(x, empty + [(0, 0)] * (x.ndim - 1)) for x in inputs]
    inputs = [x.reshape(steps, size, *x.shape[1:]) for x in inputs]

    # Gradients of one step, added to the totals.
    def step(totals, inputs):
        q, dout, rows, members, counts, lse, delta = inputs
        dq, scores = score(
            q,
            dout,
            table,
            rows,
            members,
            counts,
            blocks.bits(),
            lse,
            delta,
            scale=static.scale,
            value_dim=values,
            interpret=interpret,
        )
        shared = _share_latents(rows, members, latent_rows)
        sums = spread(
            q.reshape(-1, SHARING, *q.shape[1:]),
            dout.reshape(-1, SHARING, *dout.shape[1:]),
            scores.reshape(-1, scores.shape[-1]),
            shared.places,
            shared.count,
            interpret=interpret,
        )
        sums = sums.reshape(-1, width)
        return segment_sum(totals, sums, shared.order, shared.starts, interpret=interpret), dq

    dlatents, dq = lax.scan(step, jnp.zeros((latent_rows, width), jnp.float32), inputs)
    # Undo the blocking.
    dq = blocks.unstack(dq.reshape(-1, ROWS, width)[: blocks.count])
    b, s, x = latents.shape
    dlatents = dlatents[: b * s].reshape(b, s, width)[..., :x]
    return dq[..., :x], dlatents.astype(latents.dtype)


class _SharedLatents(NamedTuple):
    """Unions of SHARING blocks' latents.

    places int32[h a c] and count are arguments of `spread`, order and starts of `segment_sum`.
    """

    places: jax.Array
    count: jax.Array
    order: jax.Array
    starts: jax.Array


def _share_latents(rows, members, s: int) -> _SharedLatents:
    """Returns the shared latents of blocks with ascending lists rows int32[g c] of s latents."""
    capacity = rows.shape[1]
    union = unite(jnp.where(members != 0, rows, -1)[None], s, SHARING, SPREAD)
    union_rows, union_members = union.rows[0], union.members[0]
    block = jnp.arange(SHARING, dtype=jnp.int32)
    is_member = (union_members[:, None] >> block[:, None]) & 1
    rank = jnp.cumsum(is_member, axis=-1, dtype=jnp.int32) - 1
    first = jnp.arange(len(rows), dtype=jnp.int32).reshape(-1, SHARING, 1) * capacity
    places = jnp.where(is_member == 1, first + rank, -1)
    row_numbers = jnp.where(union_members != 0, union_rows, s).reshape(-1)
    row_numbers, order = lax.sort(
        (row_numbers, jnp.arange(len(row_numbers), dtype=jnp.int32)), num_keys=2
    )
    starts = jnp.searchsorted(row_numbers, jnp.arange(s + 1, dtype=jnp.int32)).astype(jnp.int32)
    return _SharedLatents(places=places, count=union.count[0], order=order, starts=starts)


class _Blocks:
    """Layout of b x t queries of n heads in `count` blocks of ROWS rows, and the table of latents."""

    def __init__(self, q, latents):
        self.b, self.t, self.n, _ = q.shape
        self.s = latents.shape[1]
        self.queries = min(ROWS // self.n, MAX_QUERIES)
        self.count = self.b * -(-self.t // self.queries)

    def stack(self, a, width: int):
        """Returns [b t n w] as [count ROWS width], padded with zeros."""
        short = self.count // self.b * self.queries - self.t
        a = jnp.pad(a, [(0, 0), (0, short), (0, 0), (0, width - a.shape[-1])])
        a = a.reshape(self.count, self.queries * self.n, width)
        return jnp.pad(a, [(0, 0), (0, ROWS - a.shape[1]), (0, 0)])

    def unstack(self, a):
        """Returns [count ROWS w] as [b t n w]."""
        a = a[:, : self.queries * self.n]
        return a.reshape(self.b, -1, self.n, a.shape[-1])[:, : self.t]

    def table(self, latents, width: int):
        """Returns [b s x] as [b * s, width]."""
        pad = [(0, 0), (0, 0), (0, width - latents.shape[-1])]
        return jnp.pad(latents, pad).reshape(-1, width)

    def lists(self, topk):
        """Returns (rows int32[count c] of the table, members int32[count c], used int32[count]) of each block.

        Rows without members are -1, which gives zeros; row 0 may belong to another sequence and may not be finite.
        """
        union = unite(topk, self.s, self.queries, TILE)
        rows = union.rows + self.s * jnp.arange(self.b, dtype=jnp.int32)[:, None, None]
        rows = jnp.where(union.members != 0, rows, -1)
        return *(x.reshape(self.count, -1) for x in (rows, union.members)), union.count.reshape(-1)

    def bits(self):
        """Returns int32[ROWS]: the bit of a row's query in the members of its block."""
        row = jnp.arange(ROWS, dtype=jnp.int32)
        return jnp.where(row < self.queries * self.n, jnp.left_shift(1, row // self.n), 0)


def _widths(x: int, y: int) -> tuple[int, int]:
    """Returns the columns of latents and of values, padded so that each warpgroup has full pieces of 64."""

    def padded(width: int) -> int:
        step = 64 * num_parts(width)
        return step * -(-width // step)

    return max(128, padded(max(x, padded(y)))), padded(y)
