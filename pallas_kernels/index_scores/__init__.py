"""Scores of the lightning indexer, with gradients: I[t, s] = sum_i w[t, i] relu(q[t, i] . k[s] / sqrt(j))."""

from typing import NamedTuple

from jaxtyping import Array, Float

from pallas_kernels import backends
from pallas_kernels.custom_gradients import custom_vjp


class Static(NamedTuple):
    """Static arguments."""

    backend: backends.Backend


def index_scores(
    idx_q: Float[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    idx_k: Float[Array, "b s j"],
    *,
    implementation: str | backends.Implementation = "auto",
) -> Float[Array, "b t s"]:
    """Returns unmasked scores [b t s] in the accumulation dtype.

    The backward computes the dot products again. Neither pass holds more than the scores, so t should be a
    block of queries.

    implementation: see `backends.select_backend`.
    """
    backend = backends.select_backend("index_scores", implementation, idx_q, idx_w, idx_k)
    return _scores(Static(backend), idx_q, idx_w, idx_k)


@custom_vjp(1)
def _scores(static, idx_q, idx_w, idx_k):
    return static.backend.function("forward")(static, idx_q, idx_w, idx_k)


def _saving(static, *args):
    return _scores(static, *args), args


def _backward(static, saved, dscores):
    return static.backend.function("backward")(static, saved, dscores)


_scores.defvjp(_saving, _backward)
