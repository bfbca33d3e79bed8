"""Gated delta rule in XLA: a scan over chunks, and a reverse scan from the kept states."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.gated_delta import chunk
from pallas_kernels.numerics import accum_dtype


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
) -> tuple[Float[Array, "b n t u"], Float[Array, "b n h u"], Float[Array, "..."] | None]:
    """Returns (out, final state, states [c b n h u] before each chunk, or None).

    g, beta and the states have the accumulation dtype.
    """
    args = (_chunks(static, x) for x in (q, k, v, g, beta))

    def run_step(state, args):
        q, k, v, g, beta = args
        out, after = _run(q, k, v, g, beta, state)
        return after, (out.astype(v.dtype), state if keep else None)

    state, (out, states) = lax.scan(run_step, state, tuple(args))
    return _join(out), state, states


def backward(
    static, saved: tuple, dout: Float[Array, "b n t u"], dstate: Float[Array, "b n h u"]
) -> tuple[Array, ...]:
    """Returns the gradients of the inputs of `forward`.

    saved holds these inputs without the state, and the stored states.
    """
    *args, states = saved

    def run_step(dstate, args):
        *args, state, dout = args
        (out, _), pull = jax.vjp(_run, *args, state)
        *grads, dstate = pull((dout.astype(out.dtype), dstate))
        return dstate, tuple(grads)

    xs = (*(_chunks(static, x) for x in args), states, _chunks(static, dout))
    dstate, grads = lax.scan(run_step, dstate, xs, reverse=True)
    return *(_join(x) for x in grads), dstate


def _run(q, k, v, g, beta, state):
    """`chunk.run_chunk` with b and n merged."""
    b, n, t, _ = q.shape

    def flat(x):
        return x.astype(accum_dtype(x.dtype)).reshape(b * n, *x.shape[2:])

    q, k, v, g, beta, state = (flat(x) for x in (q, k, v, g[:, :, None], beta[:, :, None], state))
    out, state = chunk.run_chunk(False, q, k, v, g, beta, state)
    return out.reshape(b, n, *out.shape[1:]), state.reshape(b, n, *state.shape[1:])


def _chunks(static, x):
    """Reshapes [b n t ...] to [c b n t ...]."""
    b, n, t, *rest = x.shape
    return jnp.moveaxis(x.reshape(b, n, t // static.chunk, static.chunk, *rest), 2, 0)


def _join(x):
    c, b, n, t, *rest = x.shape
    return jnp.moveaxis(x, 0, 2).reshape(b, n, c * t, *rest)
