"""Attention over selected rows and its backward against plain softmax attention in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sparse_flash_attention import sparse_flash_attention
from tests.kernels.attention_problem import (
    SCALE,
    SEGMENTS,
    B,
    N,
    S,
    T,
    X,
    Y,
    keep,
    normal,
    plain,
    topk_of,
)


@pytest.mark.parametrize("block", [4, 64])
def test_attention_and_its_gradients_over_selected_rows(block):
    """A latent is the key of every head and its first columns the value; topk names a query's rows."""
    start = 7
    topk = topk_of(start, SEGMENTS)
    topk[0, 2] = -1
    q, latents, dy = normal(B, T, N, X), normal(B, S, X), normal(B, T, N, Y)

    @jax.jit
    def run(q, latents):
        def attend(q, latents):
            out, _, top = sparse_flash_attention(
                q, latents, jnp.asarray(topk), scale=SCALE, value_dim=Y, block=block
            )
            return out, top

        y, pull, top = jax.vjp(attend, q, latents, has_aux=True)
        return y, top, *pull(jnp.asarray(dy))

    shared = np.broadcast_to(latents[:, :, None], (B, S, N, X))
    y, top, dq, dk, dv = plain(q, shared, shared[..., :Y], dy, keep(start, SEGMENTS, topk))
    dk[..., :Y] += dv
    for ours, theirs in zip(run(q, latents), (y, top, dq, dk.sum(2)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
    assert not np.asarray(run(q, latents)[0])[0, 2].any()
