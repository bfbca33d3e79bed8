"""Grouped-query attention (GQA), the paper's baseline for MLA (GLM-5 table 1, "GQA-8").

- Every key and value head serves n / y query heads.
- The last r of a head's h + r columns carry RoPE, in pairs (2i, 2i+1); the others carry no position, as
  in MLA's heads. GLM-4.5 rotates half of a head's 128 columns (arXiv 2508.06471). Which half, and how
  pairs lie, is the order of the columns and changes no result.
- The paper does not say whether its baseline has biases, or norms of queries and keys. As in MLA, this
  one has none.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.mla import Queries, dense_attention
from glm5_jax.parallel.params import Declare
from pallas_kernels.pointwise import rotate


class Gqa(nnx.Module):
    """Weights: queries of n heads, keys and values of y heads, and the output."""

    def __init__(self, declare: Declare):
        self.q = declare.normal("q", "d n hr")
        self.k = declare.normal("k", "d y hr")
        self.v = declare.normal("v", "d y u")
        self.o = declare.normal("o", "n u d")


def gqa_heads(
    w: PyTree, x: Float[Array, "b t d"]
) -> tuple[Float[Array, "b t n h+r"], Float[Array, "b t y h+r"], Float[Array, "b t y u"]]:
    """Returns (q, k, v) of the normed input x, before RoPE."""
    q = jnp.einsum("btd,dnx->btnx", x, w["q"])
    return q, jnp.einsum("btd,dyx->btyx", x, w["k"]), jnp.einsum("btd,dyu->btyu", x, w["v"])


def rotate_last(
    x: Float[Array, "b t n h+r"], cos: Float[Array, "b t r/2"], sin: Float[Array, "b t r/2"]
) -> Float[Array, "b t n h+r"]:
    """Rotates the last r columns of each head by cos and sin."""
    nope, rope = jnp.split(x, [x.shape[-1] - 2 * cos.shape[-1]], axis=-1)
    return jnp.concatenate([nope, rotate(rope, cos, sin)], axis=-1)


def gqa(
    w: PyTree,
    queries: Queries,
    k: Float[Array, "b s y h+r"],
    v: Float[Array, "b s y u"],
    key_segments: Int[Array, "b s"] | None,
    cfg: ModelConfig,
    execution: ExecutionConfig,
    window: int | None = None,
) -> tuple[Float[Array, "b t d"], Float[Array, ""]]:
    """Returns (attention output, largest logit). The logit carries no gradient.

    k, v: rotated keys and values of all positions. window: as for `flash_mla`.
    """
    attend = dense_attention(queries, key_segments, cfg, execution, window=window)
    out, _, top = attend(queries.q, k, v)
    return jnp.einsum("btnu,nud->btd", out, w["o"]), top
