"""Queries and keys in whole tiles, and which tiles see each other: for every Pallas form."""

import jax.numpy as jnp


def padded(x, axis: int, multiple: int):
    """x with zeros behind its last place along axis, to a multiple."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, pad) if pad[axis][1] else x


def segments_of(x, segments):
    """int32[b t] of x [b t ...]: the segments, or ones for one document. Padded, they are 0: unseen."""
    return jnp.ones(x.shape[:2], jnp.int32) if segments is None else segments.astype(jnp.int32)


def may_see(first, own, segments, queries: int, keys: int):
    """bool[b t/queries s/keys]: whether a query of a tile may see a key of another.

    first: key index of query 0; own int32[b t] and segments int32[b s] are whole tiles. By the least and
    the largest segment of each tile, so that what it denies is certain and what it allows is not.
    """
    b, t = own.shape
    tiles = segments.shape[1] // keys
    least, most = _extremes(own.reshape(b, t // queries, queries))
    low, high = _extremes(segments.reshape(b, tiles, keys))
    last = first + queries * jnp.arange(1, t // queries + 1, dtype=jnp.int32)
    overlap = (low[:, None] <= most[:, :, None]) & (high[:, None] >= least[:, :, None])
    return overlap & (keys * jnp.arange(tiles, dtype=jnp.int32) < last[:, None])


def spans(seen):
    """int32[... 2]: the first and the last-but-one place of the last axis that is seen; none: equal ones."""
    some = jnp.any(seen, axis=-1)
    begin = jnp.argmax(seen, axis=-1)
    end = jnp.where(some, seen.shape[-1] - jnp.argmax(seen[..., ::-1], axis=-1), begin)
    return jnp.stack([begin, end], axis=-1).astype(jnp.int32)


def _extremes(segments):
    """Least and largest segment of [... size], padding apart."""
    real = segments != 0
    big = jnp.iinfo(jnp.int32).max
    return (
        jnp.min(jnp.where(real, segments, big), axis=-1),
        jnp.max(jnp.where(real, segments, 0), axis=-1),
    )
