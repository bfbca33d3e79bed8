"""Lightning indexer: which keys each query attends to (DeepSeek-V3.2; GLM-5 paper 2.1.1).

    I[t, s] = sum_i w[t, i] relu(q[t, i] . k[s] / sqrt(j)),   topk = the k largest over visible s

Keys negative on every head score exactly zero, so ties are real; they go to the lower index.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels import dispatch
from pallas_kernels.index_scores import index_scores as index_scores
from pallas_kernels.lightning_indexer.ref import select as select


class Static(NamedTuple):
    """What is known when tracing; start: key index of query 0, or None if only known at run time."""

    choice: dispatch.Choice
    k: int
    block: int
    start: int | None


def lightning_indexer(
    idx_q,
    idx_w,
    idx_k,
    k: int,
    *,
    k_scale=None,
    start=0,
    q_segments=None,
    k_segments=None,
    block: int = 128,
    implementation="auto",
):
    """topk int32[b t min(k, s)] of queries idx_q [b t i j] with head weights idx_w [b t i] over idx_k [b s j].

    The k best visible keys of every query, ascending, -1 at the end where fewer are visible. Key s is
    visible to query t if s <= start + t and the segments int[b t], int[b s] agree (0: padding; None: one
    document). Scores compare as a stable descending sort in which -0.0 equals 0.0 and NaN is -inf: equal
    scores go to the lower index. Exact on every platform, and never differentiated.

    idx_q and idx_k may be quantised (`eight_bits.quantize_vectors`): a key's score is multiplied by its k_scale
    float32[b s], and whoever quantises the queries multiplies idx_w by their scale.

    block: queries at a time of the XLA form. implementation: see `dispatch.choose`.
    """
    idx_q, idx_w, idx_k, k_scale = lax.stop_gradient((idx_q, idx_w, idx_k, k_scale))
    known = start if isinstance(start, int) else None
    choice = dispatch.choose("lightning_indexer", implementation, idx_q, idx_w, idx_k, k)
    static = Static(choice, k, block, known)
    start = 0 if known is not None else start
    run = choice.function("select_keys")
    return run(static, idx_q, idx_w, idx_k, k_scale, start, q_segments, k_segments)


def paged_lightning_indexer(
    idx_q,
    idx_w,
    pages,
    page_table,
    lengths,
    k: int,
    *,
    page_scales=None,
    implementation="auto",
):
    """topk int32[b t k] of the last t tokens of b sequences, whose index keys lie in pages [p z j].

    Key s of sequence b is pages[page_table[b, s // z], s % z]; page_table int[b n] may hold anything behind
    the ceil(lengths[b] / z) pages that are in use. The keys of the new tokens are there already: query t of
    idx_q [b t i j] stands at position lengths[b] - t_total + t and sees the keys up to itself. topk are
    positions in the sequence, chosen and ordered as in `lightning_indexer`; a sequence of length 0 has none.

    page_scales float32[p z]: the k_scale of quantised keys. implementation: see `dispatch.choose`.
    """
    idx_q, idx_w, pages, page_scales = lax.stop_gradient((idx_q, idx_w, pages, page_scales))
    choice = dispatch.choose(
        "lightning_indexer", implementation, idx_q, idx_w, pages, k, page_table
    )
    run = choice.function("select_paged_keys")
    topk = run(Static(choice, k, 1, None), idx_q, idx_w, pages, page_table, lengths, page_scales)
    missing = k - topk.shape[-1]
    return jnp.pad(topk, ((0, 0), (0, 0), (0, missing)), constant_values=-1)
