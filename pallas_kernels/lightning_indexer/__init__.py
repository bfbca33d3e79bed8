"""Lightning indexer: which keys each query attends to (DeepSeek-V3.2; GLM-5 paper 2.1.1).

    I[t, s] = sum_i w[t, i] relu(q[t, i] . k[s] / sqrt(j)),   topk = the k largest over visible s

Keys negative on every head score exactly zero, so ties do occur; they go to the lower index.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32, Num

from pallas_kernels import backends
from pallas_kernels.index_scores import index_scores as index_scores
from pallas_kernels.lightning_indexer.xla import select as select
from pallas_kernels.mask import check_segments


class Static(NamedTuple):
    """Static arguments. start: key index of query 0; None: known only at run time."""

    backend: backends.Backend
    k: int
    block: int
    start: int | None


def lightning_indexer(
    idx_q: Num[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    idx_k: Num[Array, "b s j"],
    k: int,
    *,
    k_scale: Float[Array, "b s"] | None = None,
    start: int | Int[Array, ""] = 0,
    q_segments: Int[Array, "b t"] | None = None,
    k_segments: Int[Array, "b s"] | None = None,
    block: int = 128,
    implementation: str | backends.Implementation = "auto",
) -> Int32[Array, "b t k"]:
    """Returns the k best visible keys of every query, ascending: topk [b t min(k, s)].

    -1 fills the end if fewer keys are visible. Key s is visible to query t if s <= start + t and the segments
    agree (0: padding; None: one document). Scores compare as in a stable descending sort in which -0.0 equals
    0.0 and NaN is -inf: equal scores go to the lower index. Exact on every platform, and not differentiable.

    idx_q and idx_k may be quantized (`quantized_vectors.quantize_vectors`). A key's score is multiplied by its
    k_scale; the caller multiplies idx_w by the scales of quantized queries.

    block: queries per step of the XLA form. implementation: see `backends.select_backend`. Raises ValueError if
    the segments do not match.
    """
    check_segments("lightning_indexer", q_segments, k_segments, idx_q.shape[:2], idx_k.shape[:2])
    idx_q, idx_w, idx_k, k_scale = lax.stop_gradient((idx_q, idx_w, idx_k, k_scale))
    static_start = start if isinstance(start, int) else None
    backend = backends.select_backend("lightning_indexer", implementation, idx_q, idx_w, idx_k, k)
    static = Static(backend=backend, k=k, block=block, start=static_start)
    start = 0 if static_start is not None else start
    run = backend.function("select_keys")
    return run(static, idx_q, idx_w, idx_k, k_scale, start, q_segments, k_segments)


def paged_lightning_indexer(
    idx_q: Num[Array, "b t i j"],
    idx_w: Float[Array, "b t i"],
    pages: Num[Array, "p z j"],
    page_table: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    k: int,
    *,
    page_scales: Float[Array, "p z"] | None = None,
    implementation: str | backends.Implementation = "auto",
) -> Int32[Array, "b t k"]:
    """Returns topk [b t k] of the last t tokens of b sequences, whose index keys are in pages.

    Key s of sequence b is pages[page_table[b, s // z], s % z]. page_table may hold anything after the
    ceil(lengths[b] / z) used pages. The pages already hold the keys of the new tokens: query t has position
    lengths[b] - t_total + t and sees the keys up to itself. topk are positions in the sequence, selected and
    ordered as in `lightning_indexer`; a sequence of length 0 has none.

    page_scales: the k_scale of quantized keys. implementation: see `backends.select_backend`.
    """
    idx_q, idx_w, pages, page_scales = lax.stop_gradient((idx_q, idx_w, pages, page_scales))
    backend = backends.select_backend(
        "lightning_indexer", implementation, idx_q, idx_w, pages, k, page_table
    )
    run = backend.function("select_paged_keys")
    topk = run(
        Static(backend=backend, k=k, block=1, start=None),
        idx_q,
        idx_w,
        pages,
        page_table,
        lengths,
        page_scales,
    )
    missing = k - topk.shape[-1]
    return jnp.pad(topk, ((0, 0), (0, 0), (0, missing)), constant_values=-1)
