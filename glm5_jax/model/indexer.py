"""Lightning indexer: which keys each query attends to (DeepSeek-V3.2; GLM-5 paper 2.1.1).

    I[t, s] = sum_i w[t, i] relu(q[t, i] . k[s] / sqrt(j)),   topk = the k largest over visible s

The head weights are signed and have no softmax; keys negative on every head score exactly zero, so
ties are real and go to the lower index. GLM-5 rotates interleaved pairs, rope dims *first*, the
opposite order to the main heads.
"""

import jax.numpy as jnp
from flax import nnx

from pallas_kernels.numerics import wide
from pallas_kernels.pointwise import layer_norm, rotate


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
