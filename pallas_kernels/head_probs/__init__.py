"""Attention probabilities summed over heads: what the indexer learns to predict (DeepSeek-V3.2, 2512.02556)."""

from typing import NamedTuple

from jax import lax

from pallas_kernels import dispatch


class Static(NamedTuple):
    """What is known when tracing."""

    choice: dispatch.Choice
    scale: float


def head_probs(
    q, k, lse, *, scale: float, start=0, q_segments=None, k_segments=None, implementation="auto"
):
    """wide[b t s], sum over the heads of q [b t n x] of their attention probabilities over k [b s m x].

    lse [b t n] is what `flash_mla` gives for the same scale, keys and visibility: a probability is
    exp(scale q . k - lse), and 0 where key s is not visible to query t (s <= start + t, segments
    int[b t] and int[b s] agree; 0: padding; None: one document). n is a multiple of m. The result
    is the largest array that exists, so t is a block of queries. Nothing carries a gradient.

    implementation: see `dispatch.choose`.
    """
    check_heads("head_probs", q, k)
    choice = dispatch.choose("head_probs", implementation, q, k)
    q, k, lse = lax.stop_gradient((q, k, lse))
    run = choice.function("forward")
    return run(Static(choice, scale), q, k, lse, start, q_segments, k_segments)


def check_heads(kernel: str, q, k):
    """ValueError unless the heads of keys divide those of queries."""
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{kernel}: {q.shape[2]} heads of queries over {k.shape[2]} of keys; it must divide them"
        )
