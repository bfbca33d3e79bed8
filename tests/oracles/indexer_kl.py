"""Training loss of the sparse attention's indexer, in NumPy float64 (DeepSeek-V3.2, arXiv 2512.02556).

For every query, KL(p || softmax(I)) over its visible keys: p is the main attention's
probability, summed over heads and normalized over the keys, and I the index scores.
"""

import numpy as np

from tests.oracles.attention import softmax


def summed_attention_probs(q, k, keep, scale):
    """[b t s]: attention probabilities of q [b t n x] over k [b s n x] where keep bool [b t s], summed over heads."""
    logits = np.einsum("btnx,bsnx->bnts", q, k) * scale
    return softmax(np.where(keep[:, None], logits, -np.inf)).sum(1)


def log_sum_exp(q, k, keep, scale):
    """[b t n] of the same logits; inf for queries without keys."""
    logits = np.einsum("btnx,bsnx->btns", q, k) * scale
    top = np.max(logits, axis=-1, keepdims=True)
    total = np.sum(np.where(keep[:, :, None], np.exp(logits - top), 0.0), axis=-1)
    with np.errstate(divide="ignore"):
        return np.where(total > 0, top[..., 0] + np.log(total), np.inf)


def index_scores(idx_q, idx_w, idx_k):
    """(I, dots): I [b t s] = sum_i w [b t i] relu(dots), dots [b t i s] = q [b t i j] . k [b s j] / sqrt(j)."""
    dots = np.einsum("btij,bsj->btis", idx_q, idx_k) / np.sqrt(idx_q.shape[-1])
    return np.einsum("bti,btis->bts", idx_w, np.maximum(dots, 0.0)), dots


def pull_scores(idx_q, idx_w, idx_k, d_scores):
    """(d_idx_q, d_idx_w, d_idx_k) of the gradient of I."""
    _, dots = index_scores(idx_q, idx_w, idx_k)
    d_dots = d_scores[:, :, None] * idx_w[..., None] * (dots > 0) / np.sqrt(idx_q.shape[-1])
    return (
        np.einsum("btis,bsj->btij", d_dots, idx_k),
        np.einsum("bts,btis->bti", d_scores, np.maximum(dots, 0.0)),
        np.einsum("btis,btij->bsj", d_dots, idx_q),
    )


def indexer_kl(idx_q, idx_w, idx_k, q, k, keep, scale, weight):
    """kl [b t], loss (the sum of weight [b t] times kl), and the loss's gradients, as a dict."""
    p = summed_attention_probs(q, k, keep, scale)
    p = p / np.maximum(p.sum(-1, keepdims=True), np.finfo(np.float64).tiny)
    scores, _ = index_scores(idx_q, idx_w, idx_k)
    guess = softmax(np.where(keep, scores, -np.inf))
    ratio = np.where(keep & (p > 0), p, 1.0) / np.where(keep & (p > 0), guess, 1.0)
    kl = np.sum(p * np.log(ratio), axis=-1)
    d_scores = weight[..., None] * (guess - p)
    d_idx_q, d_idx_w, d_idx_k = pull_scores(idx_q, idx_w, idx_k, d_scores)
    return {
        "kl": kl,
        "loss": np.sum(weight * kl),
        "d_idx_q": d_idx_q,
        "d_idx_w": d_idx_w,
        "d_idx_k": d_idx_k,
    }
