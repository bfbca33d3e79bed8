"""Attention probabilities summed over heads: the target of the indexer (DeepSeek-V3.2, 2512.02556)."""

from typing import NamedTuple

from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import backends
from pallas_kernels.mask import check_segments


class Static(NamedTuple):
    """Static arguments."""

    backend: backends.Backend
    scale: float


def summed_attention_probs(
    q: Float[Array, "b t n x"],
    k: Float[Array, "b s m x"],
    lse: Float[Array, "b t n"],
    *,
    scale: float,
    start: int | Int[Array, ""] = 0,
    q_segments: Int[Array, "b t"] | None = None,
    k_segments: Int[Array, "b s"] | None = None,
    implementation: str | backends.Implementation = "auto",
) -> Float[Array, "b t s"]:
    """Returns the sum over the heads of q of their attention probabilities over k, [b t s].

    A probability is exp(scale q . k - lse), with the lse of `flash_mla` for the same scale, keys and
    visibility. It is 0 where key s is not visible to query t: visible means s <= start + t and equal segments
    (0: padding; None: one document). n is a multiple of m. The sum has the accumulation dtype. The result is
    the largest array, so t should be a block of queries. Nothing carries a gradient.

    implementation: see `backends.select_backend`. Raises ValueError if the heads of keys do not divide those of
    queries, or the segments do not match.
    """
    check_heads("summed_attention_probs", q, k)
    check_segments("summed_attention_probs", q_segments, k_segments, q.shape[:2], k.shape[:2])
    backend = backends.select_backend("summed_attention_probs", implementation, q, k)
    q, k, lse = lax.stop_gradient((q, k, lse))
    run = backend.function("forward")
    return run(Static(backend, scale), q, k, lse, start, q_segments, k_segments)


def check_heads(kernel: str, q: Float[Array, "b t n x"], k: Float[Array, "b s m x"]) -> None:
    """Raises ValueError unless the number of key heads divides the number of query heads."""
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{kernel}: {q.shape[2]} heads of queries over {k.shape[2]} of keys; it must divide them"
        )
