"""MLA over selected latents (DeepSeek Sparse Attention): work linear in the length after selection."""

import functools
from typing import NamedTuple

import jax
from jax import lax

from pallas_kernels import dispatch


class Static(NamedTuple):
    """What is known when tracing."""

    choice: dispatch.Choice
    scale: float
    block: int
    value_dim: int


def sparse_flash_attention(
    q, latents, topk, *, scale: float, value_dim: int, block: int = 32, implementation="auto"
):
    """Attention of absorbed queries q [b t n x] over their own rows of latents [b s x], keys whole and
    values in their first value_dim columns -> (out [b t n value_dim], lse wide[b t n], largest logit).

    topk int32[b t k] names the rows (-1: none), each at most once. Sums are wide; a query without rows
    gives zeros and an infinite lse. Only out carries a gradient.

    block: queries at a time of the XLA form. implementation: see `dispatch.choose`.
    """
    choice = dispatch.choose("sparse_flash_attention", implementation, q, latents, topk, value_dim)
    static = Static(choice, scale, block, value_dim)
    out, lse, top = _sparse(static, q, latents, topk)
    return out, lax.stop_gradient(lse), lax.stop_gradient(top)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sparse(static, q, latents, topk):
    return static.choice.function("forward")(static, q, latents, topk)


def _saving(static, *args):
    out, lse, top = _sparse(static, *args)
    return (out, lse, top), (*args, out, lse)


def _backward(static, saved, cotangents):
    return *static.choice.function("backward")(static, saved, cotangents[0]), None


_sparse.defvjp(_saving, _backward)
