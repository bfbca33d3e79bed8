"""Gated delta rule: linear attention whose state decays by a gate and corrects what a key recalls."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import backends
from pallas_kernels.custom_gradients import custom_vjp
from pallas_kernels.mask import HIDDEN
from pallas_kernels.numerics import accum_dtype


class Static(NamedTuple):
    """Static arguments."""

    backend: backends.Backend
    chunk: int


def gated_delta(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t n h"],
    v: Float[Array, "b t n u"],
    g: Float[Array, "b t n"],
    beta: Float[Array, "b t n"],
    *,
    initial_state: Float[Array, "b n h u"] | None = None,
    segments: Int[Array, "b t"] | None = None,
    chunk: int = 64,
    implementation: str | backends.Implementation = "auto",
) -> tuple[Float[Array, "b t n u"], Float[Array, "b n h u"]]:
    """Returns (out, final state) of the recurrence over t, from the initial state (None: 0).

        S_t = exp(g_t) S_(t-1) (1 - beta_t k_t k_t^T) + beta_t v_t k_t^T,    out_t = S_t q_t

    Arguments:
      q, k, v: one dtype; scaled and normalised by the caller (the recurrence grows where beta |k|^2 > 2).
      g: log of the gate, <= 0, -inf included. beta: write strength. g = 0 is DeltaNet.
      initial_state: S transposed, [h u] per head; belongs to the first document.
      segments: the state restarts from 0 where another document begins. Positions of segment 0 are skipped and
        give 0.
      chunk: positions that are multiplied together.
      implementation: see `backends.select_backend`.

    All arguments carry gradients. Sums and the state have the accumulation dtype. The backward keeps one state
    per chunk.
    `gated_delta_step` runs one step. Raises ValueError if shapes do not match.
    Source: Gated Delta Networks (arXiv 2412.06464), equation 10.
    """
    b, t, n, h = q.shape
    u = v.shape[-1]
    dtype = accum_dtype(q.dtype)
    shapes = {"k": (b, t, n, h), "v": (b, t, n, u), "g": (b, t, n), "beta": (b, t, n)}
    shapes |= {"initial_state": (b, n, h, u), "segments": (b, t)}
    arrays = dict(k=k, v=v, g=g, beta=beta, initial_state=initial_state, segments=segments)
    for name, x in arrays.items():
        if x is not None and x.shape != shapes[name]:
            raise ValueError(
                f"gated_delta: {name} {x.shape} with q {q.shape}; it must be {shapes[name]}"
            )
    if chunk < 1:
        raise ValueError(f"gated_delta: chunk {chunk}; it must be positive")
    g, beta = g.astype(dtype), beta.astype(dtype)
    if initial_state is None:
        initial_state = jnp.zeros((b, n, h, u), dtype)
    if segments is not None:
        is_real = (segments != 0)[..., None]
        g = jnp.where(is_real, jnp.where(_starts(segments)[..., None], HIDDEN, g), 0)
        beta = jnp.where(is_real, beta, 0)
    # Finite, because sums of it are multiplied by 0.
    g = jnp.maximum(g, HIDDEN)
    chunk = min(chunk, -(-t // 16) * 16)
    args = [_heads_first(x, chunk) for x in (q, k, v, g, beta)]
    backend = backends.select_backend("gated_delta", implementation, *args, initial_state, chunk)
    out, state = _scan(Static(backend, chunk), *args, initial_state.astype(dtype))
    out = jnp.moveaxis(out[:, :, :t], 1, 2)
    return (out if segments is None else jnp.where(is_real[..., None], out, 0)), state


def gated_delta_step(
    state: Float[Array, "b n h u"],
    q: Float[Array, "b n h"],
    k: Float[Array, "b n h"],
    v: Float[Array, "b n u"],
    g: Float[Array, "b n"],
    beta: Float[Array, "b n"],
) -> tuple[Float[Array, "b n u"], Float[Array, "b n h u"]]:
    """Returns (out, next state) of one step of `gated_delta`."""
    dtype = state.dtype
    gate, beta = jnp.exp(g.astype(dtype))[..., None], beta.astype(dtype)[..., None]
    query_and_key = jnp.stack([q, k], axis=2).astype(dtype)
    exact = lax.Precision.HIGHEST
    recalled = gate[..., None] * jnp.einsum(
        "bnxh,bnhu->bnxu", query_and_key, state, precision=exact
    )
    written = beta * (v.astype(dtype) - recalled[:, :, 1])
    overlap = jnp.sum(query_and_key[:, :, 0] * query_and_key[:, :, 1], axis=-1, keepdims=True)
    out = recalled[:, :, 0] + overlap * written
    state = gate[..., None] * state + query_and_key[:, :, 1, :, None] * written[:, :, None]
    return out.astype(v.dtype), state


def _starts(segments):
    """Returns bool[b t]: whether a document begins after another one, with or without padding between them."""
    index = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
    last = lax.cummax(jnp.where(segments != 0, index, -1), axis=1)
    last = jnp.pad(last, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    before = jnp.take_along_axis(segments, jnp.maximum(last, 0), axis=1)
    return (segments != 0) & (last >= 0) & (segments != before)


def _heads_first(x, chunk: int):
    """Transposes [b t n ...] to [b n t ...] and pads t with zeros to full chunks.

    A position of zeros changes nothing.
    """
    pad = [(0, 0), (0, -x.shape[1] % chunk)] + [(0, 0)] * (x.ndim - 2)
    return jnp.moveaxis(jnp.pad(x, pad), 1, 2)


@custom_vjp(1)
def _scan(static, *args) -> tuple[Array, Array]:
    return static.backend.function("forward")(static, *args)[:2]


def _forward_with_states(static, *args):
    out, state, states = static.backend.function("forward")(static, *args, keep=True)
    return (out, state), (*args[:-1], states)


def _backward(static, saved, cotangents):
    return static.backend.function("backward")(static, saved, *cotangents)


_scan.defvjp(_forward_with_states, _backward)
