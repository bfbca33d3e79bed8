"""Softmax attention over all visible keys: MLA below the crossover length, and without an indexer."""

import functools
from typing import NamedTuple

import jax
from jax import lax

from pallas_kernels import dispatch


class Static(NamedTuple):
    """What is known when tracing; start: key index of query 0, or None if only known at run time.
    shared: keys and values are one array. window: keys that a query sees, or None for all."""

    choice: dispatch.Choice
    scale: float
    block: int
    start: int | None
    shared: bool = False
    window: int | None = None


def flash_mla(
    q,
    k,
    v,
    *,
    scale: float,
    start=0,
    q_segments=None,
    k_segments=None,
    topk=None,
    window: int | None = None,
    block: int = 128,
    implementation="auto",
):
    """Attention of q [b t n x] over k [b s m x], v [b s m y] -> (out [b t n y], lse wide[b t n], largest logit).

    n is a multiple of m (m = 1: all heads share one key). Key s is visible to query t if
    s <= start + t, the segments int[b t], int[b s] agree (0: padding; None: one document), topk
    int32[b t k] holds s (None: all) and s > start + t - window (None: any). Sums are wide; a query
    without visible keys gives zeros and an infinite lse. Only out carries a gradient. Memory is linear in
    the length in both directions; with a window, which the Pallas forms refuse, work is too.

    The same array as k and v is read once by the Pallas forms.

    block: queries at a time of the XLA form. implementation: see `dispatch.choose`.
    """
    b, t, n, _ = q.shape
    heads = k.shape[2]
    if n % heads:
        raise ValueError(
            f"flash_mla: {n} heads of queries over {heads} of keys; it must divide them"
        )
    if window is not None and window < 1:
        raise ValueError(f"flash_mla: window {window}; it must be positive, or None for all keys")
    shared = v is k
    grouped = q.reshape(b, t, heads, n // heads, -1).transpose(0, 2, 3, 1, 4)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    known = start if isinstance(start, int) else None
    choice = dispatch.choose("flash_mla", implementation, grouped, k, v, topk, window)
    static = Static(choice, scale, block, known, shared, window)
    start = 0 if known is not None else start
    out, lse, top = _flash(static, grouped, k, v, start, q_segments, k_segments, topk)
    out = out.transpose(0, 3, 1, 2, 4).reshape(b, t, n, -1)
    lse = lse.transpose(0, 3, 1, 2).reshape(b, t, n)
    return out, lax.stop_gradient(lse), lax.stop_gradient(top)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(static, q, k, v, start, q_segments, k_segments, topk):
    run = static.choice.function("forward")
    return run(static, q, k, v, start, q_segments, k_segments, topk)


def _saving(static, *args):
    out, lse, top = _flash(static, *args)
    return (out, lse, top), (*args, out, lse)


def _backward(static, saved, cotangents):
    gradients = static.choice.function("backward")(static, saved, cotangents[0])
    return *gradients, None, None, None, None


_flash.defvjp(_saving, _backward)
