"""Index scores and their gradients: the meaning of the kernel, with the scores of all heads at once."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.numerics import accum_dtype


def forward(
    static,
    idx_q: Float[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    idx_k: Float[Array, "b s j"],
) -> Float[Array, "b t s"]:
    """Returns the scores in the accumulation dtype."""
    dtype = accum_dtype(idx_q.dtype)
    dots = jnp.einsum("btij,bsj->btis", idx_q, idx_k, preferred_element_type=dtype)
    weights = idx_w.astype(dtype) * idx_q.shape[-1] ** -0.5
    return jnp.einsum("btis,bti->bts", jax.nn.relu(dots), weights)


def backward(
    static, saved: tuple, dscores: Float[Array, "b t s"]
) -> tuple[Float[Array, "b t i j"], Float[Array, "b t i"], Float[Array, "b s j"]]:
    """Returns (dq, dw, dk) for the inputs of `forward` and the gradient of its result."""
    return jax.vjp(functools.partial(forward, static), *saved)[1](dscores)
