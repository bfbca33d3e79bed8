"""Attention over all keys and its hand-written backward against plain softmax attention in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import blocks
from pallas_kernels.flash_mla import flash_mla
from pallas_kernels.flash_mla.ref import chosen
from tests.kernels.attention_problem import (
    SCALE,
    SEGMENTS,
    B,
    N,
    S,
    T,
    X,
    Y,
    keep,
    normal,
    plain,
    topk_of,
)


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
            out, _, top = flash_mla(
                q,
                k,
                v,
                start=start_now if case["traced"] else start,
                q_segments=own,
                k_segments=None if segments is None else jnp.asarray(segments),
                topk=None if topk is None else jnp.asarray(topk),
                scale=SCALE,
                block=case["block"],
            )
            return out, top

        y, pull, top = jax.vjp(attend, q, k, v, has_aux=True)
        return y, top, *pull(jnp.asarray(dy))

    got = run(q, k, v, jnp.int32(start))
    repeat = functools.partial(np.repeat, repeats=N // heads, axis=2)
    y, top, dq, dk, dv = plain(q, repeat(k), repeat(v), dy, mask)
    dk, dv = (g.reshape(B, S, heads, N // heads, -1).sum(3) for g in (dk, dv))
    for ours, theirs in zip(got, (y, top, dq, dk, dv), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
    assert not np.asarray(got[0])[~mask.any(-1)].any()


def test_chosen():
    topk = jnp.asarray([[[0, 2, -1], [-1, -1, -1]]])
    assert chosen(topk, 4).tolist() == [[[True, False, True, False], [False] * 4]]
