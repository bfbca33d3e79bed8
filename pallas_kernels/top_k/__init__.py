"""Exact, deterministic k largest of long rows; equal values go to the lower index."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int32

from pallas_kernels import backends


class Static(NamedTuple):
    """Static arguments."""

    backend: backends.Backend
    k: int


def top_k(
    scores: Float[Array, "m s"], k: int, *, implementation: str | backends.Implementation = "auto"
) -> Int32[Array, "m k"]:
    """Returns the indices of the k largest of each row of scores, ascending: int32[m min(k, s)].

    They are those of a stable descending sort in which -0.0 equals 0.0 and NaN is -inf, so equal scores go to
    the lower index. Not differentiable.

    implementation: see `backends.select_backend`.
    """
    k = min(k, scores.shape[-1])
    backend = backends.select_backend("top_k", implementation, scores, k)
    return backend.function("select")(Static(backend, k), scores)
