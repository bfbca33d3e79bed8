"""SimpleGDN: the delta rule on the projections of a trained attention layer (GLM-5 2.1.2).

    S_t = S_(t-1) (1 - beta k_t k_t^T) + beta v_t k_t^T,    out_t = S_t q_t

It has no convolution, gates or new parameters. The paper does not give the constant beta, nor say whether
queries and keys are normalised or rotated. This implementation:

- takes beta from `cfg.simple_gdn_beta` (1: the value that a key recalls is replaced),
- gives queries and keys unit length, for which the recurrence is stable up to beta 2,
- uses no RoPE.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from glm5_jax.model.ablations.recurrence import delta_rule
from glm5_jax.model.cache import RecurrentState
from glm5_jax.model.context import ForwardContext
from pallas_kernels.numerics import accum_dtype


def simple_gdn(
    q: Float[Array, "b t n h+r"],
    k: Float[Array, "b t y h+r"],
    v: Float[Array, "b t y u"],
    context: ForwardContext,
    cache: RecurrentState | None,
) -> tuple[Float[Array, "b t n u"], RecurrentState | None]:
    """Returns (output heads, new state) of heads q, k, v without RoPE."""
    beta = jnp.full(q.shape[:3], context.cfg.simple_gdn_beta, accum_dtype(q.dtype))
    return delta_rule(q, k, v, jnp.zeros_like(beta), beta, context, cache)
