"""Output projection and cross-entropy: the meaning of the kernel, with all logits at once."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.numerics import accum_dtype


def forward(
    static, hidden: Float[Array, "m d"], head: Float[Array, "d v"], targets: Int[Array, " m"]
) -> tuple[Float[Array, " m"], Float[Array, " m"]]:
    """Returns (nll, log partition), [m], in the accumulation dtype."""
    logits = jnp.matmul(hidden, head, preferred_element_type=accum_dtype(hidden.dtype))
    logz = jax.nn.logsumexp(logits, axis=-1)
    return logz - jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0], logz


def backward(
    static, saved: tuple, dnll: Float[Array, " m"], dlogz: Float[Array, " m"]
) -> tuple[Float[Array, "m d"], Float[Array, "d v"]]:
    """Returns (dhidden, dhead) for the inputs of `forward`, its log partition, and the gradients of both results."""
    hidden, head, targets, _ = saved
    pull = jax.vjp(lambda hidden, head: forward(static, hidden, head, targets), hidden, head)[1]
    return pull((dnll, dlogz))
