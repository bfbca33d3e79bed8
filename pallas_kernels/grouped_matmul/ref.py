"""Products of rows sorted by expert: the meaning of the kernel, by `lax.ragged_dot`."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.numerics import accum_dtype


def forward(
    static, x: Float[Array, "m k"], w: Float[Array, "e k n"], group_sizes: Int[Array, " e"]
) -> Float[Array, "m n"]:
    """Returns each row times its expert's weights; rows beyond the groups give zero."""
    dtype = accum_dtype(x.dtype)
    y = lax.ragged_dot(x, w, group_sizes, preferred_element_type=dtype).astype(x.dtype)
    return jnp.where((jnp.arange(len(x)) < jnp.sum(group_sizes))[:, None], y, 0)


def backward(
    static, saved: tuple, dy: Float[Array, "m n"]
) -> tuple[Float[Array, "m k"], Float[Array, "e k n"]]:
    """Returns (dx, dw) for the inputs of `forward` and the gradient of its output."""
    x, w, group_sizes = saved
    return jax.vjp(lambda x, w: forward(static, x, w, group_sizes), x, w)[1](dy)


def swiglu_forward(
    static,
    x: Float[Array, "m d"],
    group_sizes: Int[Array, " e"],
    gate: Float[Array, "e d f"],
    up: Float[Array, "e d f"],
    down: Float[Array, "e f d"],
) -> tuple[Float[Array, "m d"], Float[Array, "m f"], Float[Array, "m f"]]:
    """Returns (y, gate product, up product)."""
    g, u = (forward(static, x, w, group_sizes) for w in (gate, up))
    return forward(static, jax.nn.silu(g) * u, down, group_sizes), g, u


def swiglu_backward(
    static, saved: tuple, dy: Float[Array, "m d"]
) -> tuple[
    Float[Array, "m d"], Float[Array, "e d f"], Float[Array, "e d f"], Float[Array, "e f d"]
]:
    """Returns (dx, dgate, dup, ddown) for the inputs of `swiglu_forward`, the two products, and the gradient of y."""
    x, group_sizes, gate, up, down, _g, _u = saved

    def swiglu(x, gate, up, down):
        return swiglu_forward(static, x, group_sizes, gate, up, down)[0]

    return jax.vjp(swiglu, x, gate, up, down)[1](dy)
