"""Gated delta rule: the meaning of the kernel, position by position.

S = exp(g) S;    S = S + beta k (v - S^T k)^T;    out = S^T q
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def forward(
    static,
    q: Float[Array, "b n t h"],
    k: Float[Array, "b n t h"],
    v: Float[Array, "b n t u"],
    g: Float[Array, "b n t"],
    beta: Float[Array, "b n t"],
    state: Float[Array, "b n h u"],
    *,
    keep: bool = False,
) -> tuple[Float[Array, "b n t u"], Float[Array, "b n h u"], Float[Array, "b n h u"] | None]:
    """Returns (out, final state, initial state if keep); g, beta and the states have the accumulation dtype."""

    def step(state, xs):
        q, k, v, g, beta = xs
        state = jnp.exp(g)[..., None, None] * state
        written = beta[..., None] * (v - jnp.einsum("bnhu,bnh->bnu", state, k, precision="highest"))
        state = state + k[..., None] * written[..., None, :]
        return state, jnp.einsum("bnhu,bnh->bnu", state, q, precision="highest")

    xs = tuple(jnp.moveaxis(x, 2, 0).astype(state.dtype) for x in (q, k, v, g, beta))
    final, out = lax.scan(step, state, xs)
    return jnp.moveaxis(out, 0, 2).astype(v.dtype), final, state if keep else None


def backward(
    static, saved: tuple, dout: Float[Array, "b n t u"], dstate: Float[Array, "b n h u"]
) -> tuple[Array, ...]:
    """Returns the gradients of the inputs of `forward`, which saved holds."""

    def run(q, k, v, g, beta, state):
        return forward(static, q, k, v, g, beta, state)[:2]

    return jax.vjp(run, *saved)[1]((dout, dstate))
