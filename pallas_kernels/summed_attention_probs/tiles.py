"""Padding of queries and keys to tiles, and the visibility of tiles; used by every Pallas form."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32, Shaped


def pad_to_multiple(x: Array, axis: int, multiple: int) -> Array:
    """Pads x with zeros at the end of an axis, to a multiple."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, pad) if pad[axis][1] else x


def segments_or_ones(
    x: Shaped[Array, "b t ..."], segments: Int[Array, "b t"] | None
) -> Int32[Array, "b t"]:
    """Returns segments int32[b t] of x [b t ...], or ones for one document. Padding them gives 0: hidden."""
    return jnp.ones(x.shape[:2], jnp.int32) if segments is None else segments.astype(jnp.int32)


def find_visible_tiles(
    first: Array, q_ids: Int32[Array, "b t"], k_ids: Int32[Array, "b s"], queries: int, keys: int
) -> Bool[Array, "b query_tiles key_tiles"]:
    """Returns bool[b t/queries s/keys]: whether a query of one tile may see a key of the other.

    first: key index of query 0. q_ids int32[b t] and k_ids int32[b s]: segments, padded to tiles. The test
    compares the smallest and largest segment of each tile, so False is certain and True is not.
    """
    b, t = q_ids.shape
    tiles = k_ids.shape[1] // keys
    q_low, q_high = _segment_range(q_ids.reshape(b, t // queries, queries))
    k_low, k_high = _segment_range(k_ids.reshape(b, tiles, keys))
    query_ends = first + queries * jnp.arange(1, t // queries + 1, dtype=jnp.int32)
    overlap = (k_low[:, None] <= q_high[:, :, None]) & (k_high[:, None] >= q_low[:, :, None])
    return overlap & (keys * jnp.arange(tiles, dtype=jnp.int32) < query_ends[:, None])


def tile_spans(visible: Bool[Array, "... tiles"]) -> Int32[Array, "... 2"]:
    """Returns int32[... 2]: begin and end (exclusive) of the visible positions of the last axis; equal if none is."""
    is_any = jnp.any(visible, axis=-1)
    begin = jnp.argmax(visible, axis=-1)
    end = jnp.where(is_any, visible.shape[-1] - jnp.argmax(visible[..., ::-1], axis=-1), begin)
    return jnp.stack([begin, end], axis=-1).astype(jnp.int32)


def _segment_range(segments):
    """Returns the smallest and the largest segment of [... size], without padding."""
    is_real = segments != 0
    max_int = jnp.iinfo(jnp.int32).max
    return (
        jnp.min(jnp.where(is_real, segments, max_int), axis=-1),
        jnp.max(jnp.where(is_real, segments, 0), axis=-1),
    )
