"""Index scores and their exact selection in XLA, in blocks of queries: memory is linear in the length."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import join, query_runs, split
from pallas_kernels.mask import visible
from pallas_kernels.numerics import wide


def select_keys(static, idx_q, idx_w, idx_k, start, q_segments, k_segments):
    """topk int32[b t k] of idx_q [b t i j], idx_w [b t i] over idx_k [b s j]."""
    s, k, block = idx_k.shape[1], static.k, static.block
    start = start if static.start is None else static.start
    width = min(k, s)
    parts = []
    for run in query_runs(idx_q.shape[1], s, start, block):
        keys = idx_k[:, : run.keys]
        segments = None if k_segments is None else k_segments[:, : run.keys]

        def one(args, run=run, keys=keys, segments=segments):
            q, w, own, offset = args
            query_index = start + offset + jnp.arange(run.size, dtype=jnp.int32)
            key_index = jnp.arange(run.keys, dtype=jnp.int32)
            mask = visible(query_index, key_index, own, segments)
            picked = select(index_scores(q, w, keys), mask, k)
            missing = width - picked.shape[-1]
            return jnp.pad(picked, ((0, 0), (0, 0), (0, missing)), constant_values=-1)

        offsets = run.first + run.size * jnp.arange(run.count, dtype=jnp.int32)
        args = (split(idx_q, run, 1), split(idx_w, run, 1), split(q_segments, run, 1), offsets)
        parts.append(join(lax.map(one, args), 1))
    return jnp.concatenate(parts, axis=1)


def index_scores(idx_q, idx_w, idx_k):
    """wide[b t s] scores of idx_q [b t i j], idx_w [b t i] against idx_k [b s j], unmasked."""
    inner = wide(idx_q.dtype)
    dots = jnp.einsum("btij,bsj->btis", idx_q, idx_k, preferred_element_type=inner)
    return jnp.einsum("btis,bti->bts", jnp.maximum(dots, 0), idx_w * idx_q.shape[-1] ** -0.5)


def select(scores, visible, k: int):
    """topk int32[b t k]: the k best visible keys, ascending, -1 at the end where fewer are visible.

    scores [b t s], visible bool broadcastable to it. Equal scores (-0.0 equals 0.0, NaN is -inf) go
    to the lower index. Exact: the k-th value is found bit by bit from counts, without sorting.
    """
    s = scores.shape[-1]
    k = min(k, s)
    keys = _ordered_bits(scores, visible)
    cut = _kth_largest(keys, k)
    above, level = keys > cut, (keys == cut) & visible
    spare = k - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    tied = jnp.any(jnp.sum(level, axis=-1, keepdims=True, dtype=jnp.int32) > spare)
    first = lax.cond(tied, lambda: level & (_running_count(level) <= spare), lambda: level)
    chosen = above | first
    # The n-th key chosen goes to place n of its row, the others nowhere. In one dimension: XLA writes the
    # indices of a scatter out, coordinate by coordinate.
    rows = scores.size // s
    rank = (_running_count(chosen) - 1).reshape(rows, s)
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    place = jnp.where(chosen.reshape(rows, s), row * k + rank, rows * k)
    key = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32), (rows, s))
    topk = jnp.full(rows * k, -1, jnp.int32).at[place.reshape(-1)].set(key.reshape(-1), mode="drop")
    return topk.reshape(*scores.shape[:-1], k)


def _running_count(mask):
    """How many of mask [... s] are true up to each place. Two small triangular products are several
    times faster than a cumulative sum, on any platform."""
    s = mask.shape[-1]
    pad = [(0, 0)] * (mask.ndim - 1) + [(0, -s % 64)]
    tiles = jnp.pad(mask, pad).reshape(*mask.shape[:-1], -1, 64).astype(jnp.float32)
    within = tiles @ jnp.triu(jnp.ones((64, 64), jnp.float32))
    totals = within[..., -1]
    before = totals @ jnp.triu(jnp.ones((totals.shape[-1],) * 2, jnp.float32), 1)
    count = (within + before[..., None]).reshape(*mask.shape[:-1], -1)
    return count[..., :s].astype(jnp.int32)


def _ordered_bits(scores, visible):
    """Signed integers that compare like the scores; the smallest integer for what is not visible."""
    bits = {4: jnp.int32, 8: jnp.int64}[scores.dtype.itemsize]
    # -0.0 becomes 0.0 (not by adding 0.0, which XLA folds away).
    scores = jnp.where(scores == 0, 0, jnp.where(jnp.isnan(scores), -jnp.inf, scores))
    raw = lax.bitcast_convert_type(scores, bits)
    ordered = jnp.where(raw < 0, raw ^ jnp.iinfo(bits).max, raw)
    return jnp.where(visible, ordered, jnp.iinfo(bits).min)


def _kth_largest(keys, k: int):
    """The k-th largest of integers [... s], as [... 1], from the highest bit down."""
    info = jnp.iinfo(keys.dtype)

    def bit(i, found):
        # Wraps for the sign bit, as it should.
        candidate = found + jnp.left_shift(
            jnp.ones((), keys.dtype), (info.bits - 1 - i).astype(keys.dtype)
        )
        # Counted in float32, exact below 2^24 keys: integer sums do not vectorise on CPU.
        count = jnp.sum((keys >= candidate).astype(jnp.float32), axis=-1, keepdims=True)
        return jnp.where(count >= k, candidate, found)

    lowest = jnp.full((*keys.shape[:-1], 1), info.min, keys.dtype)
    return lax.fori_loop(0, info.bits, bit, lowest, unroll=8)
