"""Softmax attention over all visible keys: MLA below the crossover length, and without an indexer."""

from typing import NamedTuple

from jax import lax
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels import backends
from pallas_kernels.custom_gradients import custom_vjp
from pallas_kernels.mask import check_segments


class Static(NamedTuple):
    """Static arguments.

    Attributes:
      start: key index of query 0; None: known only at run time.
      shared: whether keys and values are one array.
      window: number of keys that a query sees; None: all.
    """

    backend: backends.Backend
    scale: float
    block: int
    start: int | None
    shared: bool = False
    window: int | None = None


def flash_mla(
    q: Float[Array, "b t n x"],
    k: Float[Array, "b s m x"],
    v: Float[Array, "b s m y"],
    *,
    scale: float,
    start: int | Int[Array, ""] = 0,
    q_segments: Int[Array, "b t"] | None = None,
    k_segments: Int[Array, "b s"] | None = None,
    topk: Int32[Array, "b t k"] | None = None,
    window: int | None = None,
    block: int = 128,
    implementation: str | backends.Implementation = "auto",
) -> tuple[Float[Array, "b t n y"], Float[Array, "b t n"], Float[Array, ""]]:
    """Returns attention of q over k, v: (out, log-sum-exp of the logits, largest logit).

    n is a multiple of m; m = 1 means that all heads share one key. Key s is visible to query t if
    - s <= start + t,
    - the segments agree (0: padding; None: one document),
    - topk holds s (None: all), and
    - s > start + t - window (None: any).
    Sums and the lse have the accumulation dtype. A query without visible keys gives zeros and an infinite lse.
    Only out carries a gradient. Memory is linear in the length in both directions. With a window, work is
    linear too; the Pallas forms do not support a window.

    If k and v are the same array, the Pallas forms read it once.

    block: queries per step of the XLA form. implementation: see `backends.select_backend`. Raises ValueError if
    shapes or heads do not match or the window is not positive.
    """
    b, t, n, x = q.shape
    heads = k.shape[2]
    if (k.shape[0], k.shape[3]) != (b, x) or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"flash_mla: queries {q.shape}, keys {k.shape} and values {v.shape}; it takes [b t n x], "
            "[b s m x] and [b s m y]"
        )
    if n % heads:
        raise ValueError(
            f"flash_mla: {n} heads of queries over {heads} of keys; it must divide them"
        )
    if window is not None and window < 1:
        raise ValueError(f"flash_mla: window {window}; it must be positive, or None for all keys")
    check_segments("flash_mla", q_segments, k_segments, (b, t), k.shape[:2])
    shared = v is k
    grouped = q.reshape(b, t, heads, n // heads, -1).transpose(0, 2, 3, 1, 4)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    static_start = start if isinstance(start, int) else None
    backend = backends.select_backend("flash_mla", implementation, grouped, k, v, topk, window)
    static = Static(
        backend=backend, scale=scale, block=block, start=static_start, shared=shared, window=window
    )
    start = 0 if static_start is not None else start
    out, lse, top = _flash(static, grouped, k, v, start, q_segments, k_segments, topk)
    out = out.transpose(0, 3, 1, 2, 4).reshape(b, t, n, -1)
    lse = lse.transpose(0, 3, 1, 2).reshape(b, t, n)
    return out, lax.stop_gradient(lse), lax.stop_gradient(top)


@custom_vjp(1)
def _flash(static, q, k, v, start, q_segments, k_segments, topk) -> tuple[Array, Array, Array]:
    run = static.backend.function("forward")
    return run(static, q, k, v, start, q_segments, k_segments, topk)


def _forward_with_residuals(static, *args):
    out, lse, top = _flash(static, *args)
    return (out, lse, top), (*args, out, lse)


def _backward(static, saved, cotangents):
    gradients = static.backend.function("backward")(static, saved, cotangents[0])
    return *gradients, None, None, None, None


_flash.defvjp(_forward_with_residuals, _backward)
