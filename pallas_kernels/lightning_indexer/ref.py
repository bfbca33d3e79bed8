"""Index scores and their exact selection: the meaning of the kernel, by a stable sort of all scores."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32, Num

from pallas_kernels.index_scores import ref as index_scores
from pallas_kernels.mask import visible


def select(
    scores: Float[Array, "b t s"], visible: Bool[Array, "..."], k: int
) -> Int32[Array, "b t k"]:
    """Returns topk: the k best visible keys, ascending, -1 at the end if fewer are visible.

    visible: bool that broadcasts to scores. Equal scores (-0.0 equals 0.0, NaN is -inf) go to the lower index.
    """
    s, hidden = scores.shape[-1], ~jnp.broadcast_to(visible, scores.shape)
    falling = jnp.where(scores == 0, 0, -jnp.where(jnp.isnan(scores), -jnp.inf, scores))
    best = jnp.lexsort((falling, hidden), axis=-1)[..., : min(k, s)]
    best = jnp.where(jnp.take_along_axis(hidden, best, axis=-1), s, best)
    best = jnp.sort(best, axis=-1)
    return jnp.where(best == s, -1, best).astype(jnp.int32)


def select_keys(
    static,
    idx_q: Num[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    idx_k: Num[Array, "b s j"],
    k_scale: Float[Array, "b s"] | None,
    start: int | Int[Array, ""],
    q_segments: Int[Array, "b t"] | None,
    k_segments: Int[Array, "b s"] | None,
) -> Int32[Array, "b t k"]:
    """Returns topk of idx_q, idx_w over idx_k."""
    first = start if static.start is None else static.start
    queries, keys = first + jnp.arange(idx_q.shape[1]), jnp.arange(idx_k.shape[1])
    mask = visible(queries, keys, q_segments, k_segments)
    return select(_scores(idx_q, idx_w, idx_k, k_scale), mask, static.k)


def select_paged_keys(
    static,
    idx_q: Num[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    pages: Num[Array, "p z j"],
    page_table: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    page_scales: Float[Array, "p z"] | None,
) -> Int32[Array, "b t k"]:
    """Returns topk of the last t tokens of sequences of `lengths` keys in pages."""
    (b, t), table = idx_q.shape[:2], jnp.clip(page_table, 0, len(pages) - 1)
    keys = pages[table].reshape(b, -1, pages.shape[2])
    scale = None if page_scales is None else page_scales[table].reshape(b, -1)
    position = lengths[:, None, None] - t + jnp.arange(t)[:, None]
    mask = jnp.arange(keys.shape[1]) <= position
    return select(_scores(idx_q, idx_w, keys, scale), mask, static.k)


def _scores(idx_q, idx_w, idx_k, k_scale) -> Float[Array, "b t s"]:
    """Returns the scores; 8-bit numbers are exact in float32."""
    idx_q, idx_k = (x.astype(jnp.float32) if x.dtype.itemsize == 1 else x for x in (idx_q, idx_k))
    scores = index_scores.forward(None, idx_q, idx_w, idx_k)
    return scores if k_scale is None else scores * k_scale[:, None]
