"""Lightning indexer: chooses the keys that each query attends to (DeepSeek-V3.2; GLM-5 paper 2.1.1).

    I[t, s] = sum_i w[t, i] relu(q[t, i] . k[s] / sqrt(j)),   topk = the k largest over visible s

- Head weights are signed and have no softmax.
- Keys that are negative on every head score exactly zero, so ties are real. They go to the lower index.
- GLM-5 rotates interleaved pairs, rope dims *first*, the opposite order to the main heads.

Training (DeepSeek-V3.2, arXiv 2512.02556): the language model's loss sends the indexer no gradient. Its loss
is the KL divergence of its distribution softmax(I_t) from the attention's probabilities, summed over
heads and normalised. The divergence covers all visible keys while attention is dense, and the selected
keys afterwards.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree, Shaped

from glm5_jax.config import ModelConfig
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.parallel.params import Declare
from pallas_kernels.indexer_kl import indexer_kl
from pallas_kernels.numerics import accum_dtype
from pallas_kernels.pointwise import layer_norm, rotate
from pallas_kernels.quantized_vectors import QuantizedVectors, quantize_vectors
from pallas_kernels.quantized_weights import quantized_einsum
from pallas_kernels.sparse_indexer_kl import sparse_indexer_kl


class Indexer(nnx.Module):
    """Weights of the lightning indexer of a full layer."""

    def __init__(self, declare: Declare):
        self.q_b = declare.normal("q_b", "q i j")
        self.k = declare.normal("k", "d j")
        self.k_norm = declare.ones("k_norm", "j")
        self.k_norm_bias = declare.zeros("k_norm_bias", "j")
        self.weights = declare.normal("weights", "d i")


class Index(NamedTuple):
    """Scoring inputs of one indexer.

    Attributes:
      q: queries [b t i j] of this device.
      w: head weights [b t i] in `accum_dtype`.
      k: keys [b s j] of all devices, which a cache may hold in 8 bits.
    """

    q: Shaped[Array, "b t i j"]
    w: Float[Array, "b t i"]
    k: Shaped[Array, "b s j"] | QuantizedVectors


class Selection(NamedTuple):
    """Selected keys that a layer with an indexer passes to the following layers without one.

    Attributes:
      topk: indices of the selected keys; None: all visible keys.
      index: scores' inputs that topk was computed from; None where no layer trains on them.
    """

    topk: Int[Array, "b t k"] | None
    index: Index | None


@jax.named_scope("indexer")
def index_keys(
    w: PyTree,
    x: Float[Array, "b t d"],
    cos: Float[Array, "b t r/2"],
    sin: Float[Array, "b t r/2"],
    cfg: ModelConfig,
) -> Float[Array, "b t j"]:
    """Returns idx_k of the block's normed input x; these keys are cached."""
    k = quantized_einsum("btd,dj->btj", x, w["k"])
    k = layer_norm(k, w["k_norm"], w["k_norm_bias"], cfg.index_norm_eps)
    return _rotate_front(k, cos, sin, cfg)


@jax.named_scope("indexer")
def index_queries(
    w: PyTree,
    x: Float[Array, "b t d"],
    c_q: Float[Array, "b t q"],
    cos: Float[Array, "b t r/2"],
    sin: Float[Array, "b t r/2"],
    cfg: ModelConfig,
) -> tuple[Float[Array, "b t i j"], Float[Array, "b t i"]]:
    """Returns (idx_q, idx_w) of x and the normed query latent c_q; idx_w is in `accum_dtype`."""
    q = _rotate_front(quantized_einsum("btq,qij->btij", c_q, w["q_b"]), cos, sin, cfg)
    # The scale is applied in `accum_dtype`: a bfloat16 product flips selections near the cut-off.
    heads = jnp.einsum("btd,di->bti", x, w["weights"]).astype(accum_dtype(x.dtype))
    return q, heads * cfg.index_n_heads**-0.5


class PlainIndex(NamedTuple):
    """Scoring inputs as `lightning_indexer` takes them.

    Attributes:
      q, w, k: those of an `Index`, the keys without their scales.
      k_scale: scales of 8-bit keys; None: the keys have none.
    """

    q: Shaped[Array, "b t i j"]
    w: Float[Array, "b t i"]
    k: Shaped[Array, "b s j"]
    k_scale: Float[Array, "..."] | None


def quantize_queries_like_keys(index: Index) -> PlainIndex:
    """Returns an index whose queries have the dtype of its keys, which may be 8-bit.

    The scores include all scales. Those of the queries are positive, so they commute with ReLU and can be
    multiplied into the head weights.
    """
    if not isinstance(index.k, QuantizedVectors):
        return PlainIndex(index.q, index.w, index.k, None)
    q, scale = quantize_vectors(index.q, index.k.values.dtype)
    return PlainIndex(q, index.w * scale, index.k.values, index.k.scale)


@jax.named_scope("indexer")
def index_loss(
    index: Index,
    q: Float[Array, "b t n x"],
    k: Float[Array, "b s m x"],
    lse: Float[Array, "b t n"],
    weight: Float[Array, "b t"],
    cfg: ModelConfig,
    execution: ExecutionConfig,
    *,
    topk: Int[Array, "b t k"] | None = None,
    start: int | Int[Array, ""] = 0,
    segments: tuple[Int[Array, "b t"] | None, Int[Array, "b s"] | None] = (None, None),
) -> Float[Array, ""]:
    """Returns the sum over queries of weight times KL(p_t || softmax(I_t)). Only the index gets a gradient.

    p_t are the probabilities of the layer's attention. Its logits are the scaled products of q and k.

    Args:
      q, k: queries and keys of the attention. With topk: the absorbed queries, and latents [b s 1 x].
      lse: log-sum-exp of the attention's logits.
      weight: weight of each query.
      topk: keys that p_t covers; None: all visible keys.
      start, segments: visibility of keys, as for `flash_mla`.
    """
    assert not isinstance(index.k, QuantizedVectors), "indexers are not trained on 8-bit keys"
    options = {"scale": cfg.softmax_scale, "weight": weight, "implementation": execution.kernels}
    if topk is not None:
        loss, _ = sparse_indexer_kl(
            index.q,
            index.w,
            index.k,
            q,
            k[:, :, 0],
            lse,
            topk,
            block=execution.gather_block,
            **options,
        )
        return loss
    options |= {"start": start, "q_segments": segments[0], "k_segments": segments[1]}
    return indexer_kl(index.q, index.w, index.k, q, k, lse, block=execution.query_block, **options)[
        0
    ]


def index_loss_weights(cfg: ModelConfig, index_target: str = "own_layer") -> list[float]:
    """Returns the weight with which each layer's attention enters the loss of its indexer.

    index_target:
    - "own_layer": the layer of the indexer has weight 1, the others 0.
    - "shared_layers": all layers that use the indexer's keys have equal weights that sum to 1 (IndexCache,
      arXiv 2603.12201: the multi-layer loss of IndexShare).
    """
    full = cfg.full_layers
    if index_target == "own_layer" or not full:
        return [float(i in full) for i in range(cfg.num_hidden_layers)]
    ends = [*full[1:], cfg.num_hidden_layers]
    return [1 / (end - first) for first, end in zip(full, ends) for _ in range(first, end)]


def _rotate_front(x, cos, sin, cfg):
    front, rest = jnp.split(x, [cfg.qk_rope_head_dim], axis=-1)
    return jnp.concatenate([rotate(front, cos, sin), rest], axis=-1)
