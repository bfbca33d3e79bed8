"""Softmax attention over all keys on Hopper: tiles of keys by the copy engine, products on tensor cores.

The rows of a block are queries of one head, or those of several heads that share their keys. Each block
has a range of key tiles that causality and the documents let it meet, and inside of it one where nothing is
masked: a few numbers per block, made by XLA outside of the kernels. Where there are too few blocks for all
multiprocessors, as in decoding, a block's range is cut, and XLA joins what the pieces give.

The backward goes over the meetings of queries with keys twice: once for the queries' gradient, with the
rows' sums in registers, and once for the keys' and values', with theirs. Seven products instead of five,
but no sum depends on which block is done first, and nothing but the results goes to memory.

Heads wider than 256 are for decoding over latents. Their backward, which no model of ours runs, is XLA's:
dk and dv of 64 keys would be 64 x 1152 numbers, more than the registers of a multiprocessor.
"""

import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels.flash_mla import ref, visits
from pallas_kernels.flash_mla.gpu_backward import sum_for_keys, sum_for_queries
from pallas_kernels.flash_mla.gpu_forward import (
    GROUPS,
    KEYS,
    ROWS,
    SEPARATE_KEYS,
    Seen,
    attend,
    attend_wide,
    parts_of,
)
from pallas_kernels.flash_mla.visits import Tiling
from pallas_kernels.hopper import MULTIPROCESSORS
from pallas_kernels.numerics import LOG2E, join_pieces

NARROW = 256  # columns of a head whose sums one warpgroup holds
WIDEST = 576  # for which there is shared memory
PIECE_TILES = 4  # of keys, which a piece of a block's range has at least
NO_SEGMENT = np.iinfo(np.int32).min  # of queries that see nothing


def refuse(q, k, v, topk, window=None) -> str | None:
    """Why these arguments cannot run here, or None."""
    if window is not None:
        return "it has no sliding window"
    if topk is not None:
        return "it has no membership masks (topk)"
    if not (q.dtype == k.dtype == v.dtype and q.dtype in (jnp.bfloat16, jnp.float32)):
        return f"it takes bfloat16, one for all, not {q.dtype}, {k.dtype}, {v.dtype}"
    if q.dtype == jnp.float32 and dispatch.OF_PLATFORM.get(dispatch.platform()) == "gpu":
        return "tensor cores take no float32 that lies in memory as the values do"
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        return f"keys of {q.shape[-1]} and values of {v.shape[-1]} columns; {WIDEST} at most"
    return None


def forward(static, q, k, v, start, q_segments, k_segments, topk, *, interpret=False):
    """(out [b m g t y], lse wide[b m g t], largest logit) of q [b m g t x] over k [b m s x], v [b m s y]."""
    del topk
    first, y = start if static.start is None else static.start, v.shape[-1]
    if _is_narrow(q, v) and not static.shared:
        run, row, key, columns = attend, GROUPS * ROWS, KEYS, 64
    else:
        run, row, columns = attend_wide, ROWS, 64 * parts_of(y)
        key = KEYS if static.shared else SEPARATE_KEYS
    v = _widened(v, columns)
    # Not narrower than the values: the queries' place takes the outcome.
    q, k = (_widened(x, 64, v) for x in (q, k))
    blocks = Blocks(q, k, row, key)
    tiling = blocks.tiling
    count = q.shape[0] * q.shape[1] * blocks.parts * tiling.rows
    cuts = min(MULTIPROCESSORS // count, tiling.keys // PIECE_TILES) or 1
    segments = blocks.segments(q_segments, k_segments)
    seen = blocks.seen(cut_ranges(ranges_of(tiling, first, segments), cuts), first, segments)
    keys, values = (_pad(x, tiling.keys * tiling.key, 2) for x in (k, v))
    values = None if static.shared else values
    made = run(blocks.stack(q), keys, values, seen, scale=static.scale, interpret=interpret)
    out, lse, top = (blocks.unstack(x) for x in _merge(made, row, cuts))
    return out[..., :y], lse, jnp.max(top)


def backward(static, saved, dout, *, interpret=False):
    """(dq, dk, dv) for what `forward` took, out and lse that it gave, and the gradient of out."""
    q, k, v, start, q_segments, k_segments, _, out, lse = saved
    if not _is_narrow(q, v):
        return ref.backward(static, saved, dout)
    first = start if static.start is None else static.start
    blocks = Blocks(q, k, GROUPS * ROWS, KEYS)
    tiling, x, y = blocks.tiling, q.shape[-1], v.shape[-1]
    segments = blocks.segments(q_segments, k_segments)
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    numbers = blocks.stack(lse * LOG2E, jnp.inf), blocks.stack(delta)
    # One width for all, or copies would leave gaps in the places that keys and values share.
    wide = _widened(q, 64, _widened(v, 64))
    q, k, v, dout = (_widened(x, 64, wide) for x in (q, k, v, dout))
    keys, values = (_pad(x, tiling.keys * tiling.key, 2) for x in (k, v))
    arrays = blocks.stack(q), keys, values, blocks.stack(dout), *numbers
    named = {"scale": static.scale, "interpret": interpret}
    by_rows = ranges_of(tiling, first, segments)
    dq = sum_for_queries(*arrays, blocks.seen(by_rows, first, segments), **named)
    by_keys = GROUPS * ranges_of(tiling, first, segments, by_keys=True)  # tiles of ROWS rows
    dk, dv = sum_for_keys(*arrays, blocks.seen(by_keys, first, segments), **named)
    return blocks.unstack(dq)[..., :x], dk[:, :, : tiling.s, :x], dv[:, :, : tiling.s, :y]


def _is_narrow(q, v) -> bool:
    return max(q.shape[-1], v.shape[-1]) <= NARROW


class Blocks:
    """How q [b m g t .] lies in rows [b, m parts, rows, .], cut into tiles, and the keys' tiles.

    Several of the g heads, all t queries of one behind those of the other, share a tile if they fit into it.
    """

    def __init__(self, q, k, row: int, key: int):
        (self.b, self.m, self.g, t, _), s = q.shape, k.shape[2]
        fitting = (n for n in range(2, self.g + 1) if self.g % n == 0 and n * t <= row)
        self.group = max(fitting, default=1)
        self.parts = self.g // self.group
        self.real = self.group * t
        self.tiling = Tiling(t, s, row, key, -(-self.real // row), -(-s // key))

    def stack(self, x, fill=0):
        """[b m g t ...] as [b, m parts, rows, ...]."""
        x = x.reshape(self.b, self.m * self.parts, self.real, *x.shape[4:])
        return _pad(x, self.tiling.rows * self.tiling.row, 2, fill)

    def unstack(self, x):
        """[b, m parts, rows, ...] as [b m g t ...]."""
        shape = self.b, self.m, self.g, self.tiling.t, *x.shape[3:]
        return x[:, :, : self.real].reshape(shape)

    def segments(self, q_segments, k_segments):
        """Segments of all rows and all keys, 0 where they are padding; () if there are none."""
        if q_segments is None:
            return ()
        rows = _pad(jnp.tile(q_segments, (1, self.group)), self.tiling.rows * self.tiling.row, 1)
        return rows, _pad(k_segments, self.tiling.keys * self.tiling.key, 1)

    def seen(self, ranges, first, segments) -> Seen:
        """What the kernels read; first: the key index of query 0."""
        tiling = self.tiling
        row = np.arange(tiling.rows * tiling.row, dtype=np.int32)
        query = row % tiling.t if self.group > 1 else row
        last = jnp.minimum(first + query, tiling.s - 1).astype(jnp.int32)
        if segments:
            # Queries of segment 0 see nothing, also not the keys of segment 0.
            own = jnp.where(segments[0] == 0, NO_SEGMENT, segments[0])
            segments = own, segments[1]
        return Seen(jnp.asarray(ranges, jnp.int32), last, segments)


def ranges_of(tiling: Tiling, first, segments, by_keys: bool = False):
    """int32[l blocks 4]: `Seen.ranges` of all tiles of rows, or of keys.

    Tiles in a range that nobody sees, as between the parts of a document that lies in pieces, are gone
    through and masked.
    """
    met, whole = visits.meetings(tiling, first, *segments)
    if by_keys:
        met, whole = met.swapaxes(1, 2), whole.swapaxes(1, 2)
    numbers = np if isinstance(met, np.ndarray) else jnp
    inner = met.shape[2]
    begin = met.argmax(2)
    end = numbers.where(met.any(2), inner - met[:, :, ::-1].argmax(2), begin)
    first_whole = whole.argmax(2)
    behind = ~whole & (np.arange(inner) > first_whole[..., None])
    end_whole = numbers.where(behind.any(2), behind.argmax(2), inner)
    end_whole = numbers.where(whole.any(2), end_whole, first_whole)
    return numbers.stack([begin, end, first_whole, end_whole], axis=-1).astype(np.int32)


def cut_ranges(ranges, cuts: int):
    """Each range as `cuts` of about the same length, one behind the other."""
    if cuts == 1:
        return ranges
    numbers = np if isinstance(ranges, np.ndarray) else jnp
    begin, end, *whole = (ranges[:, :, None, i] for i in range(4))
    piece = -(-(end - begin) // cuts)
    low = numbers.minimum(begin + piece * np.arange(cuts), end)
    high = numbers.minimum(low + piece, end)
    whole = (numbers.broadcast_to(x, low.shape) for x in whole)
    return numbers.stack([low, high, *whole], axis=-1).reshape(ranges.shape[0], -1, 4)


def _merge(made, row: int, cuts: int):
    """What the pieces of each block's range give [b h blocks rows .], as one."""
    if cuts == 1:
        return made
    cut = (x.reshape(*x.shape[:2], -1, cuts, row, *x.shape[3:]) for x in made)
    return (x.reshape(*x.shape[:2], -1, *x.shape[4:]) for x in join_pieces(*cut, axis=3))


def _widened(x, columns: int, other=None):
    """x [... c] with columns of zeros up to a multiple, and to no less than the other has."""
    width = columns * -(-x.shape[-1] // columns)
    return _pad(x, width if other is None else max(width, other.shape[-1]), x.ndim - 1)


def _pad(x, size: int, axis: int, fill=0):
    if x.shape[axis] == size:
        return x
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, pad, constant_values=fill)
