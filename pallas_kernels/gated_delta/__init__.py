"""The gated delta rule: linear attention whose state forgets by a gate and corrects what a key recalls."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import dispatch
from pallas_kernels.mask import HIDDEN
from pallas_kernels.numerics import wide


class Static(NamedTuple):
    """What is known when tracing."""

    choice: dispatch.Choice
    chunk: int


def gated_delta(
    q,
    k,
    v,
    g,
    beta,
    *,
    initial_state=None,
    segments=None,
    chunk: int = 64,
    implementation="auto",
):
    """(out [b t n u], final state wide[b n h u]) of the recurrence over t, from the initial state (None: 0):

        S_t = exp(g_t) S_(t-1) (1 - beta_t k_t k_t^T) + beta_t v_t k_t^T,    out_t = S_t q_t

    q, k [b t n h] and v [b t n u] of one dtype, scaled and normalised by the caller (the recurrence grows
    where beta |k|^2 > 2); g <= 0 [b t n] the log of the gate, -inf included; beta [b t n]. g = 0 is DeltaNet.
    A state [h u] is S transposed. segments int[b t]: the state starts from 0 where another document begins,
    and positions of segment 0 are as if they were not there (they give 0); the initial state belongs to
    the first document. All arguments carry gradients, sums are wide, and the backward keeps a state per
    chunk. One step at a time: `gated_delta_step`.

    chunk: positions whose products are made at a time. implementation: see `dispatch.choose`. ValueError
    if shapes do not fit. Source: Gated Delta Networks (arXiv 2412.06464), equation 10.
    """
    b, t, n, h = q.shape
    u = v.shape[-1]
    inner = wide(q.dtype)
    wanted = {"k": (b, t, n, h), "v": (b, t, n, u), "g": (b, t, n), "beta": (b, t, n)}
    wanted |= {"initial_state": (b, n, h, u), "segments": (b, t)}
    given = dict(k=k, v=v, g=g, beta=beta, initial_state=initial_state, segments=segments)
    for name, x in given.items():
        if x is not None and x.shape != wanted[name]:
            raise ValueError(
                f"gated_delta: {name} {x.shape} beside q {q.shape}; it must be {wanted[name]}"
            )
    if chunk < 1:
        raise ValueError(f"gated_delta: chunk {chunk}; it must be positive")
    g, beta = g.astype(inner), beta.astype(inner)
    if initial_state is None:
        initial_state = jnp.zeros((b, n, h, u), inner)
    if segments is not None:
        here = (segments != 0)[..., None]
        g = jnp.where(here, jnp.where(_starts(segments)[..., None], HIDDEN, g), 0)
        beta = jnp.where(here, beta, 0)
    # Finite, as sums of it are differences of products with 0.
    g = jnp.maximum(g, HIDDEN)
    chunk = min(chunk, -(-t // 16) * 16)
    args = [_heads_first(x, chunk) for x in (q, k, v, g, beta)]
    choice = dispatch.choose("gated_delta", implementation, *args, initial_state, chunk)
    out, state = _scan(Static(choice, chunk), *args, initial_state.astype(inner))
    out = jnp.moveaxis(out[:, :, :t], 1, 2)
    return (out if segments is None else jnp.where(here[..., None], out, 0)), state


def gated_delta_step(state, q, k, v, g, beta):
    """(out [b n u], next state) of one step of `gated_delta` from the state wide[b n h u]; q, k [b n h],
    v [b n u], g, beta [b n]."""
    inner = state.dtype
    gate, beta = jnp.exp(g.astype(inner))[..., None], beta.astype(inner)[..., None]
    both = jnp.stack([q, k], axis=2).astype(inner)
    exact = lax.Precision.HIGHEST
    recalled = gate[..., None] * jnp.einsum("bnxh,bnhu->bnxu", both, state, precision=exact)
    written = beta * (v.astype(inner) - recalled[:, :, 1])
    overlap = jnp.sum(both[:, :, 0] * both[:, :, 1], axis=-1, keepdims=True)
    out = recalled[:, :, 0] + overlap * written
    state = gate[..., None] * state + both[:, :, 1, :, None] * written[:, :, None]
    return out.astype(v.dtype), state


def _starts(segments):
    """bool[b t]: where a document begins behind another one, with padding between them or not."""
    index = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
    last = lax.cummax(jnp.where(segments != 0, index, -1), axis=1)
    last = jnp.pad(last, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    before = jnp.take_along_axis(segments, jnp.maximum(last, 0), axis=1)
    return (segments != 0) & (last >= 0) & (segments != before)


def _heads_first(x, chunk: int):
    """[b t n ...] as [b n t ...], zeros up to a whole chunk: a position of zeros changes nothing."""
    pad = [(0, 0), (0, -x.shape[1] % chunk)] + [(0, 0)] * (x.ndim - 2)
    return jnp.moveaxis(jnp.pad(x, pad), 1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(static, *args):
    return static.choice.function("forward")(static, *args)[:2]


def _saving(static, *args):
    out, state, states = static.choice.function("forward")(static, *args, keep=True)
    return (out, state), (*args[:-1], states)


def _backward(static, saved, cotangents):
    return static.choice.function("backward")(static, saved, *cotangents)


_scan.defvjp(_saving, _backward)
