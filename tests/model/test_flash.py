"""Blockwise attention and its hand-written backward against plain softmax attention in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.model import blocks, dsa
from glm5_jax.model.blocks import EXTENTS, query_runs
from glm5_jax.model.flash import chosen, flash_attention
from tests.oracles import attention as oracle, indexer

B, T, S, N, X, Y = 2, 13, 20, 4, 6, 5
SCALE = 0.37
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


SEGMENTS = np.repeat([[0, 1, 2, 3], [4, 5, 5, 6]], [3, 5, 5, 7], axis=1)  # key segments [b s]


def keep(start, segments, topk):
    """bool [b t s] of the keys that each query attends to."""
    mask = np.arange(S) <= start + np.arange(T)[:, None]
    mask = np.broadcast_to(mask, (B, T, S))
    if segments is not None:
        own = segments[:, start : start + T]
        mask = mask & (own[:, :, None] == segments[:, None]) & (own != 0)[..., None]
    if topk is not None:
        mask = mask & (topk[..., None] == np.arange(S)).any(-2)
    return mask


def plain(q, k, v, dy, mask):
    """(y, largest logit, dq, dk, dv) of softmax attention in float64; k and v [b s n .]."""
    q, k, v, dy = (a.astype(np.float64) for a in (q, k, v, dy))
    logits = np.where(mask[:, None], np.einsum("btnx,bsnx->bnts", q, k) * SCALE, -np.inf)
    p = oracle.softmax(logits)
    dp = np.einsum("btny,bsny->bnts", dy, v)
    ds = p * (dp - np.sum(p * dp, axis=-1, keepdims=True)) * SCALE
    dq, dk = np.einsum("bnts,bsnx->btnx", ds, k), np.einsum("bnts,btnx->bsnx", ds, q)
    y = oracle.attend(q, k, v, mask, SCALE)
    return y, logits.max(), dq, dk, np.einsum("bnts,btny->bsny", p, dy)


def topk_of(start, segments):
    """int32 [b t 4] random visible keys, -1 where fewer are visible."""
    mask = keep(start, segments, None)
    return indexer.select(RNG.random(mask.shape), mask, 4)


@pytest.fixture
def few_extents(monkeypatch):
    """Runs of several blocks, as in sequences of more than 16 blocks."""
    monkeypatch.setattr(blocks, "EXTENTS", 2)


CASES = {
    "causal": dict(),
    "start known at run time": dict(start=7, traced=True, heads=2),
    "documents": dict(segments=True),
    "selected keys": dict(topk=True),
    "everything": dict(start=7, segments=True, topk=True),
    "one shared key": dict(heads=1, start=7, block=64),
    "a block each": dict(block=1, start=7),
}


@pytest.mark.usefixtures("few_extents")
@pytest.mark.parametrize("name", CASES)
def test_attention_and_its_gradients(name):
    case = dict(start=0, traced=False, segments=False, topk=False, heads=N, block=4) | CASES[name]
    start, heads = case["start"], case["heads"]
    segments = SEGMENTS if case["segments"] else None
    topk = topk_of(start, segments) if case["topk"] else None
    q, k, v, dy = (
        normal(B, T, N, X),
        normal(B, S, heads, X),
        normal(B, S, heads, Y),
        normal(B, T, N, Y),
    )
    mask = keep(start, segments, topk)

    @jax.jit
    def run(q, k, v, start_now):
        def attend(q, k, v):
            own = None if segments is None else jnp.asarray(segments[:, start : start + T])
            return flash_attention(
                q,
                k,
                v,
                start_now if case["traced"] else start,
                own,
                None if segments is None else jnp.asarray(segments),
                None if topk is None else jnp.asarray(topk),
                SCALE,
                case["block"],
            )

        y, pull, top = jax.vjp(attend, q, k, v, has_aux=True)
        return y, top, *pull(jnp.asarray(dy))

    got = run(q, k, v, jnp.int32(start))
    repeat = functools.partial(np.repeat, repeats=N // heads, axis=2)
    y, top, dq, dk, dv = plain(q, repeat(k), repeat(v), dy, mask)
    dk, dv = (g.reshape(B, S, heads, N // heads, -1).sum(3) for g in (dk, dv))
    for ours, theirs in zip(got, (y, top, dq, dk, dv), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
    assert not np.asarray(got[0])[~mask.any(-1)].any()


@pytest.mark.parametrize("block", [4, 64])
def test_gathered_attention_and_its_gradients(block):
    """A latent is the key and the value of every head; a query reads the rows that topk names."""
    start = 7
    topk = topk_of(start, SEGMENTS)
    topk[0, 2] = -1
    q, latents, dy = normal(B, T, N, X), normal(B, S, X), normal(B, T, N, X)

    @jax.jit
    def run(q, latents):
        def attend(q, latents):
            return dsa.gathered_attention(q, latents, jnp.asarray(topk), SCALE, block)

        y, pull, top = jax.vjp(attend, q, latents, has_aux=True)
        return y, top, *pull(jnp.asarray(dy))

    shared = np.broadcast_to(latents[:, :, None], (B, S, N, X))
    y, top, dq, dk, dv = plain(q, shared, shared, dy, keep(start, SEGMENTS, topk))
    for ours, theirs in zip(run(q, latents), (y, top, dq, (dk + dv).sum(2)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
    assert not np.asarray(run(q, latents)[0])[0, 2].any()


def test_chosen():
    topk = jnp.asarray([[[0, 2, -1], [-1, -1, -1]]])
    assert chosen(topk, 4).tolist() == [[[True, False, True, False], [False] * 4]]


@pytest.mark.parametrize("t", [1, 7, 64, 100, 1000, 2048])
@pytest.mark.parametrize("start", [0, 40, None])
@pytest.mark.parametrize("block", [1, 16, 128])
def test_runs_cover_every_query_once_and_every_key_it_sees(t, start, block):
    s = t + 50
    runs = query_runs(t, s, start, block)
    assert [q for r in runs for q in range(r.first, r.first + r.count * r.size)] == list(range(t))
    assert all(r.size <= block for r in runs)
    for run in runs:
        last = run.first + run.count * run.size - 1
        assert run.keys == s if start is None else run.keys > start + last
    if start is not None:
        assert len({run.keys for run in runs}) <= EXTENTS + 1
        # Beyond what each query sees: part of a block's triangle and of an extent's.
        wasted = sum(r.count * r.size * r.keys for r in runs) - sum(
            min(start + q + 1, s) for q in range(t)
        )
        assert wasted <= t * (block + t / EXTENTS)
