"""MLA over selected latents (DeepSeek Sparse Attention): after selection, work is linear in the length."""

from typing import NamedTuple

from jax import lax
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels import backends
from pallas_kernels.custom_gradients import custom_vjp
from pallas_kernels.sparse_flash_attention.word_rows import LANES, RowLayout, WordRows

__all__ = [
    "LANES",
    "RowLayout",
    "WordRows",
    "paged_sparse_attention",
    "sparse_flash_attention",
]

BLOCK = 32  # queries per step of the XLA form


class Static(NamedTuple):
    """Static arguments."""

    backend: backends.Backend
    scale: float
    block: int
    value_dim: int


def sparse_flash_attention(
    q: Float[Array, "b t n x"],
    latents: Float[Array, "b s x"],
    topk: Int32[Array, "b t k"],
    *,
    scale: float,
    value_dim: int,
    block: int = BLOCK,
    implementation: str | backends.Implementation = "auto",
) -> tuple[Float[Array, "b t n y"], Float[Array, "b t n"], Float[Array, ""]]:
    """Returns attention of absorbed queries over their selected latents: (out, log-sum-exp, largest logit).

    The keys are full latents, the values their first value_dim columns. topk names the rows of latents (-1:
    none), each at most once. Sums and the lse have the accumulation dtype. A query without rows gives zeros and
    an infinite lse. Only out carries a gradient.

    block: queries per step of the XLA form. implementation: see `backends.select_backend`. Raises ValueError if
    the shapes do not match.
    """
    b, t, _, x = q.shape
    if topk.shape[:2] != (b, t) or (latents.shape[0], latents.shape[2]) != (b, x) or value_dim > x:
        raise ValueError(
            f"sparse_flash_attention: q {q.shape}, latents {latents.shape}, topk {topk.shape}, value_dim "
            f"{value_dim}; it takes [b t n x], [b s x], [b t k] and at most x"
        )
    backend = backends.select_backend(
        "sparse_flash_attention", implementation, q, latents, topk, value_dim
    )
    static = Static(backend=backend, scale=scale, block=block, value_dim=value_dim)
    out, lse, top = _sparse(static, q, latents, topk)
    return out, lax.stop_gradient(lse), lax.stop_gradient(top)


def paged_sparse_attention(
    q: Float[Array, "b t n x"],
    pages: Float[Array, "p z x"] | WordRows,
    page_table: Int[Array, "b pages"],
    topk: Int32[Array, "b t k"],
    *,
    scale: float,
    value_dim: int,
    implementation: str | backends.Implementation = "auto",
) -> tuple[Float[Array, "b t n y"], Float[Array, "b t n"]]:
    """Returns the same over a paged cache, for decoding: (out, log-sum-exp).

    topk names positions of a query's sequence (-1: none), each at most once. Position i of sequence b is slot
    i % z of page page_table[b, i // z], for pages [p z x]. page_table may hold anything where topk names no
    position. pages may also be `WordRows`. A TPU copies single rows only in this form, and converts all others at
    every call. Only the selected rows are read: on a TPU inside the kernel, elsewhere by XLA. Nothing carries a
    gradient.

    implementation: see `backends.select_backend`. Raises ValueError if the shapes do not match.
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
    backend = backends.select_backend(
        "sparse_flash_attention", implementation, q, pages, topk, value_dim
    )
    static = Static(backend=backend, scale=scale, block=BLOCK, value_dim=value_dim)
    q, pages = lax.stop_gradient((q, pages))
    return backend.function("paged")(static, q, pages, page_table, topk)


@custom_vjp(1)
def _sparse(static, q, latents, topk) -> tuple[Array, Array, Array]:
    return static.backend.function("forward")(static, q, latents, topk)


def _forward_with_residuals(static, *args):
    out, lse, top = _sparse(static, *args)
    return (out, lse, top), (*args, out, lse)


def _backward(static, saved, cotangents):
    return *static.backend.function("backward")(static, saved, cotangents[0]), None


_sparse.defvjp(_forward_with_residuals, _backward)
