"""Softmax attention over all keys on Hopper: the copy engine loads tiles of keys, tensor cores multiply.

The rows of a block are queries of one head, or of several heads that share their keys. Each block has a range
of key tiles that causality and the documents allow, and inside it a range without masking: a few numbers per
block, computed by XLA outside of the kernels. If there are too few blocks for all multiprocessors, as in
decoding, a block's range is split, and XLA merges the results of the pieces.

Forward: `gpu_forward.attend` for heads of up to 256 columns, `gpu_forward_wide.attend_wide` for latents.

The backward (`gpu_backward`) visits every tile pair twice: once for the queries' gradient, with the rows' sums in
registers, and once for the keys' and values', with theirs. This takes seven products instead of five, but no sum
depends on which block finishes first, and only the results go to memory.

Heads wider than 256 are for decoding over latents. Their backward, which none of our models runs, is XLA's: dk
and dv of 64 keys would be 64 x 1152 numbers, more than the registers of a multiprocessor.

Padding, all by zeros: rows to full blocks, keys to full tiles, columns to multiples of 64 (to one width for queries,
keys, values and gradients in the backward). Keys after the last are masked, and rows after the last cut off.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels import backends
from pallas_kernels.flash_mla import tile_schedule, xla
from pallas_kernels.flash_mla.gpu_backward import sum_for_keys, sum_for_queries
from pallas_kernels.flash_mla.gpu_forward import (
    GROUPS,
    KEYS,
    ROWS,
    KeyVisibility,
    attend,
)
from pallas_kernels.flash_mla.gpu_forward_wide import SEPARATE_KEYS, attend_wide, num_parts
from pallas_kernels.flash_mla.tile_schedule import Tiling
from pallas_kernels.hopper import MULTIPROCESSORS
from pallas_kernels.numerics import LOG2E, join_pieces

MAX_NARROW = 256  # columns of a head whose sums fit one warpgroup
MAX_WIDTH = 576  # columns of a head that fit shared memory
PIECE_TILES = 4  # minimum number of key tiles in a piece of a block's range
NO_SEGMENT = np.iinfo(np.int32).min  # segment of queries that see nothing


def unsupported_reason(
    q: Float[Array, "b m g t x"],
    k: Float[Array, "b m s x"],
    v: Float[Array, "b m s y"],
    topk: Int32[Array, "b t k"] | None,
    window: int | None = None,
) -> str | None:
    """Returns the reason why the arguments are not supported, or None."""
    if window is not None:
        return "it has no sliding window"
    if topk is not None:
        return "it has no membership masks (topk)"
    if not (q.dtype == k.dtype == v.dtype and q.dtype in (jnp.bfloat16, jnp.float32)):
        return f"all must be bfloat16, not {q.dtype}, {k.dtype}, {v.dtype}"
    if q.dtype == jnp.float32 and backends.BACKEND_OF_PLATFORM.get(backends.platform()) == "gpu":
        return "tensor cores take no float32 in the memory order of the values"
    if max(q.shape[-1], v.shape[-1]) > MAX_WIDTH:
        return f"keys of {q.shape[-1]} and values of {v.shape[-1]} columns; at most {MAX_WIDTH}"
    return None


def forward(
    static,
    q: Float[Array, "b m g t x"],
    k: Float[Array, "b m s x"],
    v: Float[Array, "b m s y"],
    start: int | Int[Array, ""],
    q_segments: Int[Array, "b t"] | None,
    k_segments: Int[Array, "b s"] | None,
    topk: Int32[Array, "b t k"] | None,
    *,
    interpret: object = False,
) -> tuple[Float[Array, "b m g t y"], Float[Array, "b m g t"], Float[Array, ""]]:
    """Returns (out, lse, largest logit); lse has the accumulation dtype."""
    del topk
    first, y = start if static.start is None else static.start, v.shape[-1]
    if _is_narrow(q, v) and not static.shared:
        attend_blocks: Any = attend
        row_tile, key_tile, columns = GROUPS * ROWS, KEYS, 64
    else:
        attend_blocks, row_tile, columns = attend_wide, ROWS, 64 * num_parts(y)
        key_tile = KEYS if static.shared else SEPARATE_KEYS
    v = _pad_columns(v, columns)
    # Queries are at least as wide as the values, because their shared memory also takes the output.
    q, k = (_pad_columns(x, 64, v) for x in (q, k))
    blocks = RowBlocks(q, k, row_tile, key_tile)
    tiling = blocks.tiling
    count = q.shape[0] * q.shape[1] * blocks.parts * tiling.rows
    cuts = min(MULTIPROCESSORS // count, tiling.keys // PIECE_TILES) or 1
    segments = blocks.segments(q_segments, k_segments)
    visibility = blocks.key_visibility(
        split_ranges(visible_ranges(tiling, first, segments), cuts), first, segments
    )
    keys, values = (_pad(x, tiling.keys * tiling.key, 2) for x in (k, v))
    results = attend_blocks(
        blocks.stack(q),
        keys,
        None if static.shared else values,
        visibility,
        scale=static.scale,
        interpret=interpret,
    )
    out, lse, top = (blocks.unstack(x) for x in _merge(results, row_tile, cuts))
    return out[..., :y], lse, jnp.max(top)


def backward(
    static, saved: tuple, dout: Float[Array, "b m g t y"], *, interpret: object = False
) -> tuple[Float[Array, "b m g t x"], Float[Array, "b m s x"], Float[Array, "b m s y"]]:
    """Returns (dq, dk, dv) for the inputs of `forward`, its out and lse, and the gradient of out."""
    q, k, v, start, q_segments, k_segments, _, out, lse = saved
    if not _is_narrow(q, v):
        return xla.backward(static, saved, dout)
    first = start if static.start is None else static.start
    blocks = RowBlocks(q, k, GROUPS * ROWS, KEYS)
    tiling, x, y = blocks.tiling, q.shape[-1], v.shape[-1]
    segments = blocks.segments(q_segments, k_segments)
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    numbers = blocks.stack(lse * LOG2E, jnp.inf), blocks.stack(delta)
    # One width for all; otherwise copies would leave gaps in the buffers that keys and values share.
    widest = _pad_columns(q, 64, _pad_columns(v, 64))
    q, k, v, dout = (_pad_columns(x, 64, widest) for x in (q, k, v, dout))
    keys, values = (_pad(x, tiling.keys * tiling.key, 2) for x in (k, v))
    arrays = blocks.stack(q), keys, values, blocks.stack(dout), *numbers
    options = {"scale": static.scale, "interpret": interpret}
    by_rows = visible_ranges(tiling, first, segments)
    dq = sum_for_queries(*arrays, blocks.key_visibility(by_rows, first, segments), **options)
    by_keys = GROUPS * visible_ranges(tiling, first, segments, by_keys=True)  # tiles of ROWS rows
    dk, dv = sum_for_keys(*arrays, blocks.key_visibility(by_keys, first, segments), **options)
    return blocks.unstack(dq)[..., :x], dk[:, :, : tiling.s, :x], dv[:, :, : tiling.s, :y]


def _is_narrow(q, v) -> bool:
    return max(q.shape[-1], v.shape[-1]) <= MAX_NARROW


class RowBlocks:
    """Layout of queries [b m g t .] as rows [b, m parts, rows, .] in tiles, and the tiles of the keys.

    Several of the g heads share a tile if they fit: all t queries of one head, then those of the next.
    """

    def __init__(self, q, k, row: int, key: int):
        (self.b, self.m, self.g, t, _), s = q.shape, k.shape[2]
        fitting = (n for n in range(2, self.g + 1) if self.g % n == 0 and n * t <= row)
        self.group = max(fitting, default=1)
        self.parts = self.g // self.group
        self.real = self.group * t
        self.tiling = Tiling(
            t=t, s=s, row=row, key=key, rows=-(-self.real // row), keys=-(-s // key)
        )

    def stack(self, x: Array, fill: float = 0) -> Array:
        """Returns [b m g t ...] as [b, m parts, rows, ...]."""
        x = x.reshape(self.b, self.m * self.parts, self.real, *x.shape[4:])
        return _pad(x, self.tiling.rows * self.tiling.row, 2, fill)

    def unstack(self, x: Array) -> Array:
        """Returns [b, m parts, rows, ...] as [b m g t ...]."""
        shape = self.b, self.m, self.g, self.tiling.t, *x.shape[3:]
        return x[:, :, : self.real].reshape(shape)

    def segments(
        self, q_segments: Int[Array, "b t"] | None, k_segments: Int[Array, "b s"] | None
    ) -> tuple[Array, ...]:
        """Returns the segments of all rows and all keys, 0 in padding; () without segments."""
        if q_segments is None:
            return ()
        assert k_segments is not None, "pass the segments of queries and keys, or neither"
        rows = _pad(jnp.tile(q_segments, (1, self.group)), self.tiling.rows * self.tiling.row, 1)
        return rows, _pad(k_segments, self.tiling.keys * self.tiling.key, 1)

    def key_visibility(
        self, ranges: Array | np.ndarray, first: int | Int[Array, ""], segments: tuple[Array, ...]
    ) -> KeyVisibility:
        """Returns the visibility that the kernels read; first: key index of query 0."""
        tiling = self.tiling
        row = np.arange(tiling.rows * tiling.row, dtype=np.int32)
        query = row % tiling.t if self.group > 1 else row
        last = jnp.minimum(first + query, tiling.s - 1).astype(jnp.int32)
        if segments:
            # Queries of segment 0 see nothing, also not the keys of segment 0.
            q_ids = jnp.where(segments[0] == 0, NO_SEGMENT, segments[0])
            segments = q_ids, segments[1]
        return KeyVisibility(jnp.asarray(ranges, jnp.int32), last, segments)


def visible_ranges(
    tiling: Tiling, first: int | Int[Array, ""], segments: tuple[Array, ...], by_keys: bool = False
) -> Array | np.ndarray:
    """Returns int32[l blocks 4]: `KeyVisibility.ranges` of all tiles of rows, or of keys.

    A range may contain hidden tiles, for example between the parts of a document in pieces. They are visited
    and masked.
    """
    is_visible, is_unmasked = tile_schedule.tile_visibility(tiling, first, *segments)
    if by_keys:
        is_visible, is_unmasked = is_visible.swapaxes(1, 2), is_unmasked.swapaxes(1, 2)
    xp = np if isinstance(is_visible, np.ndarray) else jnp
    inner = is_visible.shape[2]
    begin = is_visible.argmax(2)
    end = xp.where(is_visible.any(2), inner - is_visible[:, :, ::-1].argmax(2), begin)
    unmasked_begin = is_unmasked.argmax(2)
    masked_after = ~is_unmasked & (np.arange(inner) > unmasked_begin[..., None])
    unmasked_end = xp.where(masked_after.any(2), masked_after.argmax(2), inner)
    unmasked_end = xp.where(is_unmasked.any(2), unmasked_end, unmasked_begin)
    return xp.stack([begin, end, unmasked_begin, unmasked_end], axis=-1).astype(np.int32)


def split_ranges(ranges: Array | np.ndarray, cuts: int) -> Array | np.ndarray:
    """Splits each range into `cuts` consecutive ranges of about the same length."""
    if cuts == 1:
        return ranges
    xp = np if isinstance(ranges, np.ndarray) else jnp
    begin, end, *unmasked = (ranges[:, :, None, i] for i in range(4))
    piece = -(-(end - begin) // cuts)
    low = xp.minimum(begin + piece * np.arange(cuts), end)
    high = xp.minimum(low + piece, end)
    unmasked = (xp.broadcast_to(x, low.shape) for x in unmasked)
    return xp.stack([low, high, *unmasked], axis=-1).reshape(ranges.shape[0], -1, 4)


def _merge(results, row: int, cuts: int):
    """Merges the results [b h blocks rows .] of the pieces of each block's range."""
    if cuts == 1:
        return results
    pieces = (x.reshape(*x.shape[:2], -1, cuts, row, *x.shape[3:]) for x in results)
    return (x.reshape(*x.shape[:2], -1, *x.shape[4:]) for x in join_pieces(*pieces, axis=3))


def _pad_columns(x, columns: int, other=None):
    """Pads x [... c] with zero columns to a multiple of `columns`, and to at least the width of `other`."""
    width = columns * -(-x.shape[-1] // columns)
    return _pad(x, width if other is None else max(width, other.shape[-1]), x.ndim - 1)


def _pad(x, size: int, axis: int, fill: float = 0):
    if x.shape[axis] == size:
        return x
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, pad, constant_values=fill)
