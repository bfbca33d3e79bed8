"""Lightning indexer: which keys each query attends to (DeepSeek-V3.2; GLM-5 paper 2.1.1).

    I[t, s] = sum_i w[t, i] relu(q[t, i] . k[s] / sqrt(j)),   topk = the k largest over visible s

The head weights are signed and have no softmax; keys negative on every head score exactly zero, so
ties are real and go to the lower index. GLM-5 rotates interleaved pairs, rope dims *first*, the
opposite order to the main heads.
"""

import jax.numpy as jnp
from flax import nnx
from jax import lax

from glm5_jax.core.numerics import wide
from glm5_jax.model.norm import layer_norm
from glm5_jax.model.rope import rotate


class Indexer(nnx.Module):
    """Weights of the lightning indexer of a full layer."""

    def __init__(self, declare):
        self.q_b = declare.normal("q_b", "q i j")
        self.k = declare.normal("k", "d j")
        self.k_norm = declare.ones("k_norm", "j")
        self.k_norm_bias = declare.zeros("k_norm_bias", "j")
        self.weights = declare.normal("weights", "d i")


def index_keys(w, x, cos, sin, cfg):
    """idx_k [b t j] of the block's normed input x [b t d]; this is what the cache holds."""
    k = layer_norm(
        jnp.einsum("btd,dj->btj", x, w["k"]), w["k_norm"], w["k_norm_bias"], cfg.index_norm_eps
    )
    return _rotate_front(k, cos, sin, cfg)


def index_queries(w, x, c_q, cos, sin, cfg):
    """(idx_q [b t i j], idx_w wide[b t i]) of x and the normed query latent c_q [b t q]."""
    q = _rotate_front(jnp.einsum("btq,qij->btij", c_q, w["q_b"]), cos, sin, cfg)
    # The scale is applied wide: a bfloat16 product flips selections near the cut.
    heads = jnp.einsum("btd,di->bti", x, w["weights"]).astype(wide(x.dtype))
    return q, heads * cfg.index_n_heads**-0.5


def _rotate_front(x, cos, sin, cfg):
    front, rest = jnp.split(x, [cfg.qk_rope_head_dim], axis=-1)
    return jnp.concatenate([rotate(front, cos, sin), rest], axis=-1)


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
