"""The gated delta rule in XLA: a scan over chunks, and backwards over them from the states it kept."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gated_delta import chunk
from pallas_kernels.numerics import wide


def forward(static, q, k, v, g, beta, state, *, keep=False):
    """(out [b n t u], final state wide[b n h u], states [c b n h u] before each chunk, or None)
    of q, k [b n t h], v [b n t u], g, beta wide[b n t] and the state wide[b n h u]."""
    args = (_chunks(static, x) for x in (q, k, v, g, beta))

    def one(state, args):
        out, after = _run(*args, state)
        return after, (out.astype(v.dtype), state if keep else None)

    state, (out, states) = lax.scan(one, state, tuple(args))
    return _join(out), state, states


def backward(static, saved, dout, dstate):
    """Gradients of what `forward` took, of which saved holds all but the state, and the states it kept."""
    *args, states = saved

    def one(dstate, args):
        *args, state, dout = args
        (out, _), pull = jax.vjp(_run, *args, state)
        *grads, dstate = pull((dout.astype(out.dtype), dstate))
        return dstate, tuple(grads)

    xs = (*(_chunks(static, x) for x in args), states, _chunks(static, dout))
    dstate, grads = lax.scan(one, dstate, xs, reverse=True)
    return *(_join(x) for x in grads), dstate


def _run(q, k, v, g, beta, state):
    """`chunk.run` over b and n at once."""
    b, n, t, _ = q.shape

    def flat(x):
        return x.astype(wide(x.dtype)).reshape(b * n, *x.shape[2:])

    q, k, v, g, beta, state = (flat(x) for x in (q, k, v, g[:, :, None], beta[:, :, None], state))
    out, state = chunk.run(False, q, k, v, g, beta, state)
    return out.reshape(b, n, *out.shape[1:]), state.reshape(b, n, *state.shape[1:])


def _chunks(static, x):
    """[b n t ...] as [c b n t ...]."""
    b, n, t, *rest = x.shape
    return jnp.moveaxis(x.reshape(b, n, t // static.chunk, static.chunk, *rest), 2, 0)


def _join(x):
    c, b, n, t, *rest = x.shape
    return jnp.moveaxis(x, 0, 2).reshape(b, n, c * t, *rest)
