"""The routed experts' weights, and their use where few rows meet many experts, as in decoding."""

import jax.numpy as jnp
from flax import nnx

from pallas_kernels.grouped_matmul.ref import swiglu


class Experts(nnx.Module):
    """Gate, up and down matrices of every routed expert."""

    def __init__(self, declare):
        self.gate = declare.normal("gate", "e d f")
        self.up = declare.normal("up", "e d f")
        self.down = declare.normal("down", "e f d")


# Fetching a row's weights reads, writes and reads them: up to this many rows per expert it is cheaper
# than reading all experts once (measured on CPU).
FETCH_SHARE = 0.5


def fetched_swiglu(x, expert_ids, w):
    """SwiGLU of x [m d] in each of its experts int32[m a] -> [m a d], by a copy of their weights."""
    m, a = expert_ids.shape
    own = (
        jnp.take(v, expert_ids.reshape(-1), axis=0, mode="clip")
        for v in (w["gate"], w["up"], w["down"])
    )
    y, _, _ = swiglu(jnp.repeat(x, a, axis=0)[:, None], *own)
    return y.reshape(m, a, -1)
