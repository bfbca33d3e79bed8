"""Lightning indexer: which keys each query attends to (DeepSeek-V3.2; GLM-5 paper 2.1.1).

    I[t, s] = sum_i w[t, i] relu(q[t, i] . k[s] / sqrt(j)),   topk = the k largest over visible s

Keys negative on every head score exactly zero, so ties are real; they go to the lower index.
"""

from typing import NamedTuple

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

    block: queries at a time of the XLA form. implementation: see `dispatch.choose`.
    """
    known = start if isinstance(start, int) else None
    choice = dispatch.choose("lightning_indexer", implementation, idx_q, idx_w, idx_k, k)
    static = Static(choice, k, block, known)
    start = 0 if known is not None else start
    run = choice.function("select_keys")
    return run(static, idx_q, idx_w, idx_k, start, q_segments, k_segments)
