"""Inputs for tests of the attention kernels, and softmax attention in float64 as reference."""

import numpy as np

from tests.oracles import attention as oracle, indexer

B, T, S, N, X, Y = 2, 13, 20, 4, 6, 5
SCALE = 0.37
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


SEGMENTS = np.repeat([[0, 1, 2, 3], [4, 5, 5, 6]], [3, 5, 5, 7], axis=1)  # key segments [b s]


def keep(start, segments, topk, window=None):
    """Returns bool [b t s], True for the keys that each query attends to."""
    query = start + np.arange(T)
    mask = np.arange(S) <= query[:, None]
    if window is not None:
        mask = mask & oracle.within_window(query, np.arange(S), window)
    mask = np.broadcast_to(mask, (B, T, S))
    if segments is not None:
        q_segments = segments[:, start : start + T]
        mask = mask & (q_segments[:, :, None] == segments[:, None]) & (q_segments != 0)[..., None]
    if topk is not None:
        mask = mask & (topk[..., None] == np.arange(S)).any(-2)
    return mask


def plain(q, k, v, dy, mask):
    """Returns (y, largest logit, dq, dk, dv) of softmax attention in float64; k and v are [b s n .]."""
    q, k, v, dy = (a.astype(np.float64) for a in (q, k, v, dy))
    logits = np.where(mask[:, None], np.einsum("btnx,bsnx->bnts", q, k) * SCALE, -np.inf)
    p = oracle.softmax(logits)
    dp = np.einsum("btny,bsny->bnts", dy, v)
    ds = p * (dp - np.sum(p * dp, axis=-1, keepdims=True)) * SCALE
    dq, dk = np.einsum("bnts,bsnx->btnx", ds, k), np.einsum("bnts,btnx->bsnx", ds, q)
    y = oracle.attend(q, k, v, mask, SCALE)
    return y, logits.max(), dq, dk, np.einsum("bnts,btny->bsny", p, dy)


def lse(q, k, mask):
    """Returns float64 [b t n], the log-sum-exp of the logits of q over k [b s n x]; inf without visible keys."""
    logits = np.einsum("btnx,bsnx->btns", q.astype(np.float64), k.astype(np.float64)) * SCALE
    logits = np.where(mask[:, :, None], logits, -np.inf)
    with np.errstate(divide="ignore"):
        total = np.log(np.sum(np.exp(logits), axis=-1))
    return np.where(np.isneginf(total), np.inf, total)


def topk_of(start, segments):
    """Returns int32 [b t 4] random visible keys, -1 where fewer are visible."""
    mask = keep(start, segments, None)
    return indexer.select(RNG.random(mask.shape), mask, 4)
