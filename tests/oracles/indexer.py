"""The lightning indexer and its selection in NumPy float64 (DeepSeek-V3.2, arXiv 2512.02556)."""

import numpy as np


def relu(x):
    return np.maximum(x, 0.0)


def index_scores(idx_q, idx_k, idx_w):
    """Sum over index heads of weight * ReLU(query . key): [b t s].

    idx_q [b t i j] and idx_k [b s j] are rotated; idx_w [b t i] is signed and unscaled.
    Both scales, j^-0.5 on the dot product and i^-0.5 on the weights, are applied here.
    """
    heads, dim = idx_q.shape[-2:]
    dots = np.einsum("btij,bsj->btis", idx_q, idx_k) * dim**-0.5
    return np.einsum("bti,btis->bts", idx_w * heads**-0.5, relu(dots))


def select(scores, visible, k):
    """int32 [b t min(k, s)]: the best k visible keys per query, ascending, -1 at the end.

    scores [b t s], visible bool [b t s]. Equal scores (also -0.0 and +0.0) go to the lower index;
    a NaN ranks as -inf, below every number but above keys that are not visible.
    """
    scores = np.where(np.isnan(scores), -np.inf, scores) + 0.0  # -0.0 + 0.0 is +0.0
    width = min(k, scores.shape[-1])
    chosen = np.full(scores.shape[:2] + (width,), -1, np.int32)
    for row in np.ndindex(*scores.shape[:2]):
        keys = np.flatnonzero(visible[row])
        best = keys[np.argsort(-scores[row][keys], kind="stable")[:width]]
        chosen[row][: len(best)] = np.sort(best)
    return chosen


def selection_mask(topk, s):
    """bool [b t s]: True for the keys of topk [b t k]."""
    return (topk[..., None] == np.arange(s)).any(axis=-2)
