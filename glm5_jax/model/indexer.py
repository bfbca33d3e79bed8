"""Lightning indexer: which keys each query attends to (DeepSeek-V3.2; GLM-5 paper 2.1.1).

    I[t, s] = sum_i w[t, i] relu(q[t, i] . k[s] / sqrt(j)),   topk = the k largest over visible s

The head weights are signed and have no softmax; keys negative on every head score exactly zero, so
ties are real and go to the lower index. GLM-5 rotates interleaved pairs, rope dims *first*, the
opposite order to the main heads.

It learns nothing from the language model's loss, but what the attention looks at: the divergence of its own
distribution softmax(I_t) from the attention's probabilities, summed over heads and normalised, over all
visible keys while attention is dense and over the selected ones afterwards (DeepSeek-V3.2, arXiv 2512.02556).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.eight_bits import Scaled, quantize_vectors
from pallas_kernels.indexer_kl import indexer_kl
from pallas_kernels.numerics import wide
from pallas_kernels.pointwise import layer_norm, rotate
from pallas_kernels.quantised import product
from pallas_kernels.sparse_indexer_kl import sparse_indexer_kl


class Indexer(nnx.Module):
    """Weights of the lightning indexer of a full layer."""

    def __init__(self, declare):
        self.q_b = declare.normal("q_b", "q i j")
        self.k = declare.normal("k", "d j")
        self.k_norm = declare.ones("k_norm", "j")
        self.k_norm_bias = declare.zeros("k_norm_bias", "j")
        self.weights = declare.normal("weights", "d i")


class Index(NamedTuple):
    """What an indexer says of its tokens: queries [b t i j], head weights wide[b t i] and everyone's keys
    [b s j], which a cache may hold in 8 bits."""

    q: jax.Array
    w: jax.Array
    k: jax.Array | Scaled


class Selection(NamedTuple):
    """What a layer with an indexer hands to those after it that have none: topk int32[b t k] (None: all
    visible keys), and the index behind it (None where nobody learns)."""

    topk: jax.Array | None
    index: Index | None


@jax.named_scope("indexer")
def index_keys(w, x, cos, sin, cfg):
    """idx_k [b t j] of the block's normed input x [b t d]; this is what the cache holds."""
    k = layer_norm(
        jnp.einsum("btd,dj->btj", x, w["k"]), w["k_norm"], w["k_norm_bias"], cfg.index_norm_eps
    )
    return _rotate_front(k, cos, sin, cfg)


@jax.named_scope("indexer")
def index_queries(w, x, c_q, cos, sin, cfg):
    """(idx_q [b t i j], idx_w wide[b t i]) of x and the normed query latent c_q [b t q]."""
    q = _rotate_front(product("btq,qij->btij", c_q, w["q_b"]), cos, sin, cfg)
    # The scale is applied wide: a bfloat16 product flips selections near the cut.
    heads = jnp.einsum("btd,di->bti", x, w["weights"]).astype(wide(x.dtype))
    return q, heads * cfg.index_n_heads**-0.5


def multiplied(index: Index) -> tuple[Index, jax.Array | None]:
    """(index, k_scale) as `lightning_indexer` takes them: queries of keys in 8 bits become such ones too.

    The scores keep all scales: ReLU lets those of queries, which are positive, through to the head weights.
    """
    if not isinstance(index.k, Scaled):
        return index, None
    q, scale = quantize_vectors(index.q, index.k.values.dtype)
    return Index(q, index.w * scale, index.k.values), index.k.scale


@jax.named_scope("indexer")
def index_loss(
    index: Index, q, k, lse, weight, cfg, plan, *, topk=None, start=0, segments=(None, None)
):
    """Sum over queries of weight [b t] times KL(p_t || softmax(I_t)), with gradients to the index alone.

    p_t are the probabilities of the attention whose scaled products of q [b t n x] and k [b s m x] have the
    log-sums lse [b t n]: over all visible keys (start, segments: as for `flash_mla`), or over topk
    int32[b t k] of them, for which q are the absorbed queries and k [b s 1 x] the latents.
    """
    heads = (index.q, index.w, index.k, q)
    rest = {"scale": cfg.softmax_scale, "weight": weight, "implementation": plan.kernels}
    if topk is not None:
        loss, _ = sparse_indexer_kl(*heads, k[:, :, 0], lse, topk, block=plan.gather_block, **rest)
        return loss
    rest |= {"start": start, "q_segments": segments[0], "k_segments": segments[1]}
    return indexer_kl(*heads, k, lse, block=plan.query_block, **rest)[0]


def index_shares(cfg, served: bool) -> list[float]:
    """The part of an indexer's loss that each layer gives: all of it from its own layer, or an equal part
    from each layer that it serves (IndexCache, arXiv 2603.12201: the multi-layer loss of IndexShare)."""
    full = cfg.full_layers
    if not (served and full):
        return [float(i in full) for i in range(cfg.num_hidden_layers)]
    ends = [*full[1:], cfg.num_hidden_layers]
    return [1 / (end - first) for first, end in zip(full, ends) for _ in range(first, end)]


def _rotate_front(x, cos, sin, cfg):
    front, rest = jnp.split(x, [cfg.qk_rope_head_dim], axis=-1)
    return jnp.concatenate([rotate(front, cos, sin), rest], axis=-1)
