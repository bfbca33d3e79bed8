"""MLA over selected latents (DeepSeek Sparse Attention): work linear in the length after selection."""

import functools
from typing import NamedTuple

import jax
from jax import lax

from pallas_kernels import dispatch
from pallas_kernels.sparse_flash_attention.rows import LANES, Layout, WordRows

__all__ = [
    "LANES",
    "Layout",
    "WordRows",
    "paged_sparse_attention",
    "sparse_flash_attention",
]

BLOCK = 32  # queries at a time of the XLA form


class Static(NamedTuple):
    """What is known when tracing."""

    choice: dispatch.Choice
    scale: float
    block: int
    value_dim: int


def sparse_flash_attention(
    q, latents, topk, *, scale: float, value_dim: int, block: int = BLOCK, implementation="auto"
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


def paged_sparse_attention(
    q, pages, page_table, topk, *, scale: float, value_dim: int, implementation="auto"
):
    """The same over a paged cache, for decoding: q [b t n x] -> (out [b t n value_dim], lse wide[b t n]).

    topk int32[b t k] names positions of a query's own sequence (-1: none), each at most once; position i of
    sequence b is slot i % z of page page_table[b, i // z], for pages [p z x] and page_table int32[b pages].
    pages may also be `WordRows`: a TPU copies single rows of no other form, and makes all others into it at every
    call. Of them only rows that are chosen are read: on a TPU inside the kernel, elsewhere by XLA. Nothing carries a
    gradient.

    implementation: see `dispatch.choose`. ValueError if the shapes do not belong together.
    """
    if topk.shape[:2] != q.shape[:2] or page_table.shape[:1] != q.shape[:1]:
        raise ValueError(
            f"paged_sparse_attention: q {q.shape}, topk {topk.shape}, page_table {page_table.shape}; "
            "give topk the first two dimensions of q, and page_table the first"
        )
    if pages.ndim != 3 or pages.shape[2] != q.shape[3]:
        raise ValueError(
            f"paged_sparse_attention: pages {pages.dtype}{pages.shape} for q {q.shape}; use pages [p z x] "
            "with the last dimension of q"
        )
    choice = dispatch.choose("sparse_flash_attention", implementation, q, pages, topk, value_dim)
    static = Static(choice, scale, BLOCK, value_dim)
    q, pages = lax.stop_gradient((q, pages))
    return choice.function("paged")(static, q, pages, page_table, topk)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sparse(static, q, latents, topk):
    return static.choice.function("forward")(static, q, latents, topk)


def _saving(static, *args):
    out, lse, top = _sparse(static, *args)
    return (out, lse, top), (*args, out, lse)


def _backward(static, saved, cotangents):
    return *static.choice.function("backward")(static, saved, cotangents[0]), None


_sparse.defvjp(_saving, _backward)
