"""Rejection sampling of drafted tokens, which leaves the distribution of the text unchanged.

Source: Leviathan et al. 2023, algorithm 1.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rejection_sample(
    key: Array,
    drafts: Int[Array, "b k"],
    draft_probs: Float[Array, "b k v"],
    probs: Float[Array, "b k+1 v"],
) -> tuple[Int[Array, "b k+1"], Int[Array, " b"]]:
    """Accepts or rejects drafts; returns (tokens, number of valid tokens per row).

    drafts were drawn from q = draft_probs; p = probs are the model's distributions, before each draft and
    after the last.

    - A draft is accepted with probability min(1, p / q).
    - The first rejected draft is replaced by a draw from max(p - q, 0).
    - If all are accepted, one more token is drawn from p.

    For every q, each of the first `count` tokens has the distribution p. The tokens after them are undefined.
    """
    accept_key, draw_key = jax.random.split(key)
    chances = jnp.take_along_axis(probs[:, :-1], drafts[..., None], -1)[..., 0]
    proposed = jnp.take_along_axis(draft_probs, drafts[..., None], -1)[..., 0]
    accepted = jax.random.uniform(accept_key, drafts.shape, probs.dtype) * proposed < chances
    count = jnp.cumprod(accepted.astype(jnp.int32), 1).sum(1) + 1
    model = _last_valid(probs, count)
    padded = jnp.pad(draft_probs, ((0, 0), (0, 1), (0, 0)))
    residual = jnp.maximum(model - _last_valid(padded, count), 0)
    # If p and q differ only by rounding, max(p - q, 0) may be zero everywhere.
    residual = jnp.where(residual.sum(-1, keepdims=True) > 0, residual, model)
    drawn = jax.random.categorical(draw_key, jnp.log(residual), axis=-1).astype(jnp.int32)
    tokens = jnp.pad(drafts, ((0, 0), (0, 1)))
    is_drawn = jnp.arange(tokens.shape[1]) == count[:, None] - 1
    return jnp.where(is_drawn, drawn[:, None], tokens), count


def _last_valid(x, count):
    """Returns x [b t ...] at the last of the first `count` int[b] positions."""
    at = jnp.maximum(count - 1, 0).reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.take_along_axis(x, at, 1)[:, 0]
