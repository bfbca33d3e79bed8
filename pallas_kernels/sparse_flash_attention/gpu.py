"""Attention over selected latents on Hopper: gathered tiles in shared memory, products on tensor cores.

A block of 64 rows, GLM-5's 64 heads of one query, is what one multiprocessor can work on: its 64 x 512 sums
in float32 take half of the registers. A model with fewer heads puts several neighbouring queries into the
64 rows, which then share the union of their latents and mask by membership. So each row of 1152 bytes that
is gathered feeds 139 kFLOP (121 per byte), whatever the blocking; neighbouring queries run at the same time
on all multiprocessors, and it is the second-level cache that fetches their shared rows once.

The backward shares what it sums for a latent among SHARING blocks: see `gpu_backward`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import dispatch, hopper
from pallas_kernels.blocks import join, query_runs, split
from pallas_kernels.collect import TOGETHER, collect
from pallas_kernels.numerics import join_pieces
from pallas_kernels.sparse_flash_attention.gpu_backward import (
    SPREAD,
    score,
    spread,
)
from pallas_kernels.sparse_flash_attention.gpu_forward import ROWS, TILE, attend, parts_of
from pallas_kernels.sparse_flash_attention.ref import rows_of
from pallas_kernels.sparse_flash_attention.rows import WordRows
from pallas_kernels.sparse_flash_attention.union import MOST_QUERIES, unite

WIDEST = 576  # columns of a latent for which there is shared memory
WIDEST_VALUES = 512  # a third warpgroup for more would wait forever for registers
SHARING = 4  # blocks of rows whose gradients of a latent are summed before they go to memory
QUERIES_AT_ONCE = 64  # whose latents XLA makes of 8 bits at a time: 150 MB for GLM-5
AT_ONCE = 512  # blocks whose gradients exist at a time: 2.4 GB at the worst for GLM-5
NONE = jnp.iinfo(jnp.int32).max


def refuse(q, latents, topk, value_dim) -> str | None:
    """Why this form cannot take these arguments, or None; latents: also pages, in either form."""
    kind = jnp.bfloat16 if latents.dtype == jnp.int32 else latents.dtype
    if q.dtype != kind or q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"q is {q.dtype} and latents {latents.dtype}; both must be bfloat16"
    if q.dtype == jnp.float32 and dispatch.OF_PLATFORM.get(dispatch.platform()) == "gpu":
        return "tensor cores take no float32 that lies in memory as the values do"
    if q.shape[2] > ROWS:
        return f"{q.shape[2]} heads; {ROWS} at most"
    if _widths(q.shape[3], value_dim)[0] > WIDEST:
        return f"latents of {q.shape[3]} columns; {WIDEST} at most"
    if value_dim > WIDEST_VALUES:
        return f"values of {value_dim} columns; {WIDEST_VALUES} at most"
    return None


def forward(static, q, latents, topk, *, interpret=False):
    """As `ref.forward`."""
    width, values = _widths(q.shape[3], static.value_dim)
    blocks = _Blocks(q, latents)
    lists = blocks.lists(topk)
    cuts = num_pieces(*lists[0].shape)
    out, lse, top = attend(
        jnp.repeat(blocks.stack(q, width), cuts, axis=0),
        blocks.table(latents, width),
        *_cut(*lists, cuts),
        blocks.bits(),
        scale=static.scale,
        value_dim=values,
        interpret=interpret,
    )
    out, lse, top = _merge((out, lse, top), cuts)
    out, lse, top = (blocks.unstack(x) for x in (out, lse[..., None], top[..., None]))
    return out[..., : static.value_dim], lse[..., 0], jnp.max(top)


def paged(static, q, pages, page_table, topk, *, interpret=False):
    """As `ref.paged`; of `WordRows` XLA makes the latents of each query first: the kernel copies rows as they are."""
    b, t, n, x = q.shape
    rows = rows_of(page_table, topk, pages.shape[1]).reshape(1, b * t, -1)
    # All pages are one batch row's latents, and all sequences its queries.
    q = q.reshape(1, b * t, n, x)
    if isinstance(pages, WordRows):
        out, lse = _of_words(static, q, pages, rows, interpret)
    else:
        out, lse, _ = forward(static, q, pages.reshape(1, -1, x), rows, interpret=interpret)
    return out.reshape(b, t, n, -1), lse.reshape(b, t, n)


def _of_words(static, q, pages, rows, interpret):
    """(out, lse) of q [1 t n x] over rows int32[1 t k] of all pages, QUERIES_AT_ONCE at a time."""
    words = pages.words.reshape(-1, *pages.words.shape[2:])

    def some(args):
        q, rows = (a[:, None] for a in args)  # each query's latents are its own
        latents = WordRows(words[jnp.maximum(rows[:, 0], 0)], pages.layout).rows()
        own = jnp.where(rows < 0, -1, jnp.arange(rows.shape[-1], dtype=jnp.int32))
        return tuple(a[:, 0] for a in forward(static, q, latents, own, interpret=interpret)[:2])

    outs = [
        tuple(join(a, 0) for a in lax.map(some, (split(q[0], run, 0), split(rows[0], run, 0))))
        for run in query_runs(q.shape[1], 0, None, QUERIES_AT_ONCE)
    ]
    return tuple(jnp.concatenate(parts) for parts in zip(*outs))


def num_pieces(blocks: int, room: int) -> int:
    """Into how many pieces the lists of so few blocks are cut, for all multiprocessors to have work."""
    cuts, tiles = 1, room // TILE
    while 2 * cuts * blocks <= hopper.MULTIPROCESSORS and tiles % (4 * cuts) == 0:
        cuts *= 2
    return cuts


def _cut(rows, members, count, cuts: int):
    """The lists of `cuts` blocks for each one, of as many tiles each."""
    room = rows.shape[1] // cuts
    first = room * jnp.arange(cuts, dtype=jnp.int32)
    count = jnp.clip(count[:, None] - first, 0, room).reshape(-1)
    return rows.reshape(-1, room), members.reshape(-1, room), count


def _merge(made, cuts: int):
    """What `attend` gives for the pieces of each list, as one."""
    if cuts == 1:
        return made
    return join_pieces(*(x.reshape(-1, cuts, *x.shape[1:]) for x in made), axis=1)


def backward(static, saved, dout, *, interpret=False):
    """As `ref.backward`."""
    q, latents, topk, out, lse = saved
    width, values = _widths(q.shape[3], static.value_dim)
    blocks = _Blocks(q, latents)
    table = blocks.table(latents, width)
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    # In ascending order: the place of a latent among its block's own can then be counted.
    lists = blocks.lists(jnp.sort(jnp.where(topk < 0, NONE, topk)))
    numbers = (blocks.stack(x[..., None], 1)[..., 0] for x in (lse, delta))
    # As wide as q, zeros where there are no values: `spread` multiplies both by columns.
    inputs = blocks.stack(q, width), blocks.stack(dout, width), *lists, *numbers
    latent_rows = TOGETHER * -(-len(table) // TOGETHER)
    steps = -(-blocks.count // AT_ONCE)
    size = SHARING * -(-blocks.count // (steps * SHARING))
    empty = [(0, steps * size - blocks.count)]
    inputs = [jnp.pad(x, empty + [(0, 0)] * (x.ndim - 1)) for x in inputs]
    inputs = [x.reshape(steps, size, *x.shape[1:]) for x in inputs]

    def step(totals, inputs):
        q, dout, *lists, lse, delta = inputs
        dq, scores = score(
            q,
            dout,
            table,
            *lists,
            blocks.bits(),
            lse,
            delta,
            scale=static.scale,
            value_dim=values,
            interpret=interpret,
        )
        rows, members, _ = lists
        shared = _share(rows, members, latent_rows)
        sums = spread(
            *(x.reshape(-1, SHARING, *x.shape[1:]) for x in (q, dout)),
            scores.reshape(-1, scores.shape[-1]),
            shared.places,
            shared.count,
            interpret=interpret,
        )
        sums = sums.reshape(-1, width)
        return collect(totals, sums, shared.order, shared.starts, interpret=interpret), dq

    dlatents, dq = lax.scan(step, jnp.zeros((latent_rows, width), jnp.float32), inputs)
    dq = blocks.unstack(dq.reshape(-1, ROWS, width)[: blocks.count])
    b, s, x = latents.shape
    dlatents = dlatents[: b * s].reshape(b, s, width)[..., :x]
    return dq[..., :x], dlatents.astype(latents.dtype)


class _Shared(NamedTuple):
    """Unions of SHARING blocks' latents: places int32[h a c] and count as `spread` takes them, and order
    and starts as `collect` does."""

    places: jax.Array
    count: jax.Array
    order: jax.Array
    starts: jax.Array


def _share(rows, members, s: int) -> _Shared:
    """What blocks with ascending lists rows int32[g c] of s latents share."""
    room = rows.shape[1]
    union = unite(jnp.where(members != 0, rows, -1)[None], s, SHARING, SPREAD)
    union_rows, union_members = union.rows[0], union.members[0]
    block = jnp.arange(SHARING, dtype=jnp.int32)
    mine = (union_members[:, None] >> block[:, None]) & 1
    rank = jnp.cumsum(mine, axis=-1, dtype=jnp.int32) - 1
    first = jnp.arange(len(rows), dtype=jnp.int32).reshape(-1, SHARING, 1) * room
    places = jnp.where(mine == 1, first + rank, -1)
    named = jnp.where(union_members != 0, union_rows, s).reshape(-1)
    named, order = lax.sort((named, jnp.arange(len(named), dtype=jnp.int32)), num_keys=2)
    starts = jnp.searchsorted(named, jnp.arange(s + 1, dtype=jnp.int32)).astype(jnp.int32)
    return _Shared(places, union.count[0], order, starts)


class _Blocks:
    """How b x t queries of n heads lie in `count` blocks of ROWS rows, and latents in one table."""

    def __init__(self, q, latents):
        self.b, self.t, self.n, _ = q.shape
        self.s = latents.shape[1]
        self.queries = min(ROWS // self.n, MOST_QUERIES)
        self.count = self.b * -(-self.t // self.queries)

    def stack(self, a, width: int):
        """[b t n w] as [count ROWS width], zeros where there is none."""
        short = self.count // self.b * self.queries - self.t
        a = jnp.pad(a, [(0, 0), (0, short), (0, 0), (0, width - a.shape[-1])])
        a = a.reshape(self.count, self.queries * self.n, width)
        return jnp.pad(a, [(0, 0), (0, ROWS - a.shape[1]), (0, 0)])

    def unstack(self, a):
        """[count ROWS w] as [b t n w]."""
        a = a[:, : self.queries * self.n]
        return a.reshape(self.b, -1, self.n, a.shape[-1])[:, : self.t]

    def table(self, latents, width: int):
        """[b s x] as [b * s, width]."""
        pad = [(0, 0), (0, 0), (0, width - latents.shape[-1])]
        return jnp.pad(latents, pad).reshape(-1, width)

    def lists(self, topk):
        """(rows int32[count c] of the table, members int32[count c], used int32[count]) of each block.

        Rows without members are -1: zeros, where row 0 may be of another sequence and not finite.
        """
        union = unite(topk, self.s, self.queries, TILE)
        rows = union.rows + self.s * jnp.arange(self.b, dtype=jnp.int32)[:, None, None]
        rows = jnp.where(union.members != 0, rows, -1)
        return *(x.reshape(self.count, -1) for x in (rows, union.members)), union.count.reshape(-1)

    def bits(self):
        """int32[ROWS]: the bit of a row's query in the members of its block."""
        row = jnp.arange(ROWS, dtype=jnp.int32)
        return jnp.where(row < self.queries * self.n, jnp.left_shift(1, row // self.n), 0)


def _widths(x: int, y: int) -> tuple[int, int]:
    """Columns of latents and of values, padded so that each warpgroup has whole pieces of 64."""

    def padded(width: int) -> int:
        step = 64 * parts_of(width)
        return step * -(-width // step)

    return max(128, padded(max(x, padded(y)))), padded(y)
