"""Projections, norms, rotation and cache write of MLA before attention, fused.

c_q = norm(x q_a)   q = c_q q_b, last r columns rotated   latent = [norm((x kv_a)[:c]), rotated (x kv_a)[c:]]
"""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels import backends


class Static(NamedTuple):
    """Static arguments."""

    backend: backends.Backend
    eps: float


class Prologue(NamedTuple):
    """Results of `mla_prologue`.

    Attributes:
      c_q: query latent [b t q].
      q: queries [b t n h+r].
      latent: latents [b t c+r].
      cache: the cache with the latents written to it, or None.
    """

    c_q: jax.Array
    q: jax.Array
    latent: jax.Array
    cache: jax.Array | None


def mla_prologue(
    x: Float[Array, "b t d"],
    w: dict[str, Array],
    cos: Float[Array, "b t r/2"],
    sin: Float[Array, "b t r/2"],
    *,
    eps: float,
    cache: Float[Array, "rows c+r"] | None = None,
    slots: Int[Array, "b t"] | None = None,
    implementation: str | backends.Implementation = "auto",
) -> Prologue:
    """Returns queries and latents of x, the normed input of a layer.

    w: q_a [d q], q_a_norm [q], q_b [q n h+r], kv_a [d c+r], kv_a_norm [c], and q_a_bias [q], kv_a_bias [c+r]
    where the model has them. cos, sin rotate the pairs (2i, 2i+1) of the last r columns of every query head and
    of the latent; the result holds first members, then second members. eps: of both RMS norms, whose statistics
    are float32. Rotated columns are not normed.

    cache [rows c+r] receives every token's latent at its row in slots (-1: none), each row at most once. Tokens
    whose rows are in the same group of 16 must be neighbours in slots. Raises ValueError if only one of cache
    and slots is passed.

    The Pallas forms have no gradient. implementation: see `backends.select_backend`.
    """
    if (cache is None) != (slots is None):
        raise ValueError("mla_prologue: cache and slots belong together; pass both or none")
    backend = backends.select_backend("mla_prologue", implementation, x, w, cache)
    run = backend.function("forward")
    c_q, q, latent, cache = run(Static(backend, eps), x, w, cos, sin, cache, slots)
    return Prologue(c_q=c_q, q=q, latent=latent, cache=cache)
