"""Gated DeltaNet (arXiv 2412.06464) on the projections of the attention layer that it replaces.

    q, k, v = SiLU(conv(x W))    q, k of unit length    beta = sigmoid(x b)
    alpha = exp(-exp(a_log) softplus(x a + dt_bias))
    S_t = alpha_t S_(t-1) (1 - beta_t k_t k_t^T) + beta_t v_t k_t^T,    o_t = S_t q_t
    out = RMSNorm(o) SiLU(x gate)

The convolution is causal and covers the last w inputs of each channel. x W are MLA's or GQA's heads
without RoPE.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PyTree

from glm5_jax.model.ablations.recurrence import delta_rule
from glm5_jax.model.cache import RecurrentState
from glm5_jax.model.context import ForwardContext
from glm5_jax.parallel.params import Declare
from pallas_kernels.numerics import accum_dtype
from pallas_kernels.pointwise import rms_norm

# Mean and standard deviation of the public implementations' initial values: a_log = log U(0, 16), dt_bias
# so that softplus(dt_bias) is log-uniform in [0.001, 0.1], taps uniform within w^-1/2 for w = 4.
A_LOG, DT_BIAS, TAPS = (1.77, 1.0), (-4.6, 1.33), (0.0, 0.29)


class Gdn(nnx.Module):
    """Weights that a layer has in addition to its attention: taps, gates and the output norm."""

    def __init__(self, declare: Declare):
        self.conv_q = declare.normal_around("conv_q", "n hr w", *TAPS)
        self.conv_k = declare.normal_around("conv_k", "y hr w", *TAPS)
        self.conv_v = declare.normal_around("conv_v", "y u w", *TAPS)
        self.a = declare.normal("a", "d n")
        self.a_log = declare.normal_around("a_log", "n", *A_LOG)
        self.dt_bias = declare.normal_around("dt_bias", "n", *DT_BIAS)
        self.b = declare.normal("b", "d n")
        self.gate = declare.normal("gate", "d n u")
        self.norm = declare.ones("norm", "u")


def gdn(
    w: PyTree,
    x: Float[Array, "b t d"],
    q: Float[Array, "b t n h+r"],
    k: Float[Array, "b t y h+r"],
    v: Float[Array, "b t y u"],
    context: ForwardContext,
    cache: RecurrentState | None,
) -> tuple[Float[Array, "b t n u"], RecurrentState | None]:
    """Returns (output heads, new state) of the normed input x and its heads q, k, v without RoPE."""
    inner, n = accum_dtype(x.dtype), q.shape[2]

    def gates(name):
        return jnp.einsum("btd,dn->btn", x, w[name], preferred_element_type=inner)

    beta = jax.nn.sigmoid(gates("b"))
    rate = jax.nn.softplus(gates("a") + w["dt_bias"].astype(inner))
    g = -jnp.exp(w["a_log"].astype(inner)) * rate
    per_head = (jnp.repeat(taps, n // len(taps), axis=0) for taps in (w["conv_k"], w["conv_v"]))
    taps = jnp.concatenate([w["conv_q"], *per_head], axis=1)
    out, cache = delta_rule(q, k, v, g, beta, context, cache, taps)
    out = rms_norm(out, w["norm"], context.cfg.rms_norm_eps)
    return out * jax.nn.silu(jnp.einsum("btd,dnu->btnu", x, w["gate"])), cache
