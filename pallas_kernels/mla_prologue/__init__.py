"""What MLA does before it attends, in one go: projections to latents, their norms, queries, RoPE, cache write.

c_q = norm(x q_a)   q = c_q q_b, its last r columns rotated   latent = norm(x kv_a)[:c] then rotated[c:]
"""

from typing import NamedTuple

import jax

from pallas_kernels import dispatch


class Static(NamedTuple):
    """What is known when tracing."""

    choice: dispatch.Choice
    eps: float


class Prologue(NamedTuple):
    """c_q [b t q]; q [b t n h+r]; latent [b t c+r]; cache: with the latents in it, or None."""

    c_q: jax.Array
    q: jax.Array
    latent: jax.Array
    cache: jax.Array | None


def mla_prologue(
    x, w, cos, sin, *, eps: float, cache=None, slots=None, implementation="auto"
) -> Prologue:
    """Queries and latents of x [b t d], the normed input of a layer.

    w: q_a [d q], q_a_norm [q], q_b [q n h+r], kv_a [d c+r], kv_a_norm [c], and q_a_bias [q], kv_a_bias
    [c+r] where the model has them. cos, sin [b t r/2] rotate the pairs (2i, 2i+1) of the last r columns
    of every query head and of the latent; the result holds first members, then second members. eps: of
    both RMS norms, whose statistics are float32; what is rotated is not normed.

    cache [rows c+r] gets every token's latent at the row that slots int32[b t] names (-1: nowhere), each
    row at most once, and tokens whose rows lie in the same 16 are neighbours in slots. ValueError if only
    one of cache and slots is given.

    The Pallas forms have no gradient. implementation: see `dispatch.choose`.
    """
    if (cache is None) != (slots is None):
        raise ValueError("mla_prologue: cache and slots belong together; give both or none")
    choice = dispatch.choose("mla_prologue", implementation, x, w, cache)
    run = choice.function("forward")
    return Prologue(*run(Static(choice, eps), x, w, cos, sin, cache, slots))
