"""What the Hopper form of the indexer cuts into pieces: chunks, query tiles, parts of the keys, heads, widths."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.lightning_indexer import gpu, lightning_indexer
from tests.kernels.implementations import interpreted, watched
from tests.oracles import indexer as oracle


def problem(b, t, s, i, j, start, dtype=jnp.float32, seed=0):
    """(q, w, k, segments of queries, of keys) of two or three documents a row, with padding at the front."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((b, t, i, j)), rng.standard_normal((b, s, j))
    w = rng.standard_normal((b, t, i)) * i**-0.5
    q, w, k = (jnp.asarray(x, dtype) for x in (q, w, k))
    of_keys = np.sort(rng.integers(0, 4, (b, s)), axis=1).astype(np.int32)
    return q, w, k, jnp.asarray(of_keys[:, start : start + t]), jnp.asarray(of_keys)


def expected(q, w, k, own, of, start, count):
    q, w, k = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, w, k))
    t, s = q.shape[1], k.shape[1]
    scores = oracle.index_scores(q, k, w * q.shape[2] ** 0.5)
    visible = np.broadcast_to(np.arange(s) <= start + np.arange(t)[:, None], (len(q), t, s))
    if own is not None:
        own, of = np.asarray(own), np.asarray(of)
        visible = visible & (own[:, :, None] == of[:, None]) & (own != 0)[..., None]
    return oracle.select(scores, visible, count)


def cut(**sizes):
    """Other block sizes, so that small problems are cut as large ones are."""
    return mock.patch.multiple(gpu, **sizes)


CUTS = {
    "chunks": {"SCORES": 8 * 4 * 4096},
    "keys in two parts": {"MULTIPROCESSORS": 4},
    "heads in two passes": {"HEADS": 2, "MULTIPROCESSORS": 2},
    "queries beside the keys": {"HEADS": 2, "SLICE": 64, "BUDGET": 120_000, "MULTIPROCESSORS": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CUTS)
def test_cuts(name):
    q, w, k, own, of = problem(2, 12, 400, 4, 24, 380)
    with cut(**CUTS[name]):
        run = jax.jit(
            lambda start: lightning_indexer(
                q,
                w,
                k,
                50,
                start=start,
                q_segments=own,
                k_segments=of,
                implementation=interpreted("gpu"),
            )
        )
        got = run(380)
    np.testing.assert_array_equal(got, expected(q, w, k, own, of, 380, 50))


@pytest.mark.slow
def test_long_rows_of_bfloat16():
    """More keys than are held at a time; ring and turns go round."""
    q, w, k, *_ = problem(1, 8, 9000, 2, 64, 8992, jnp.bfloat16)
    with cut(MULTIPROCESSORS=1):
        got = lightning_indexer(q, w, k, 300, start=8992, implementation=interpreted("gpu"))
    np.testing.assert_array_equal(got, expected(q, w, k, None, None, 8992, 300))


@pytest.mark.slow
def test_has_no_races():
    q, w, k, own, of = problem(1, 8, 900, 2, 16, 892, jnp.bfloat16)
    with cut(MULTIPROCESSORS=1):
        run = jax.jit(
            lambda: lightning_indexer(
                q, w, k, 40, start=892, q_segments=own, k_segments=of, implementation=watched("gpu")
            )
        )
        first = jax.block_until_ready(run())
        assert not compat.has_races("gpu")
        np.testing.assert_array_equal(first, run())
    np.testing.assert_array_equal(first, expected(q, w, k, own, of, 892, 40))


def test_three_bfloat16_are_a_float32():
    rng = np.random.default_rng(3)
    a, b = (
        rng.standard_normal((64, 32)).astype(np.float32) * 10.0 ** rng.integers(-9, 9) for _ in "ab"
    )
    left, right = jax.jit(
        lambda: (gpu.split_float32(a, gpu.LEFT_PARTS), gpu.split_float32(b, gpu.RIGHT_PARTS))
    )()
    got = np.einsum("tj,sj->ts", np.asarray(left, np.float64), np.asarray(right, np.float64))
    exact = np.einsum("tj,sj->ts", a.astype(np.float64), b.astype(np.float64))
    size = np.einsum("tj,sj->ts", abs(a.astype(np.float64)), abs(b.astype(np.float64)))
    assert np.max(abs(got - exact) / size) < 2**-24
