"""SimpleGDN: a trained attention's own projections plugged into the delta rule (GLM-5 2.1.2).

    S_t = S_(t-1) (1 - beta k_t k_t^T) + beta v_t k_t^T,    out_t = S_t q_t

without convolution, gates or any new parameter. The paper does not say which constant beta is, nor whether
queries and keys are normalised or rotated: here beta is `cfg.simple_gdn_beta` (1: what a key recalls is
replaced), both have unit length, for which the recurrence is stable up to beta 2, and no RoPE.
"""

import jax.numpy as jnp

from glm5_jax.model.ablations.recurrence import delta_rule
from glm5_jax.model.cache import State
from pallas_kernels.numerics import wide


def simple_gdn(q, k, v, context, cache: State | None):
    """(out [b t n u], State or None) of heads q [b t n h+r], k [b t y h+r], v [b t y u] without RoPE."""
    beta = jnp.full(q.shape[:3], context.cfg.simple_gdn_beta, wide(q.dtype))
    return delta_rule(q, k, v, jnp.zeros_like(beta), beta, context, cache)
