"""Tests of the indexer's pieces on Hopper: chunks, query tiles, parts of the keys, heads, widths."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.lightning_indexer import gpu, lightning_indexer
from tests.kernels.implementations import interpreted, race_checked
from tests.oracles import indexer as oracle


def problem(b, t, s, i, j, start, dtype=jnp.float32, seed=0):
    """Returns (q, w, k, q_segments, k_segments) of two or three documents per row, padded at the front."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((b, t, i, j)), rng.standard_normal((b, s, j))
    w = rng.standard_normal((b, t, i)) * i**-0.5
    q, w, k = (jnp.asarray(x, dtype) for x in (q, w, k))
    segments = np.sort(rng.integers(0, 4, (b, s)), axis=1).astype(np.int32)
    return q, w, k, jnp.asarray(segments[:, start : start + t]), jnp.asarray(segments)


def expected(q, w, k, q_segments, k_segments, start, count):
    q, w, k = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, w, k))
    t, s = q.shape[1], k.shape[1]
    scores = oracle.index_scores(q, k, w * q.shape[2] ** 0.5)
    visible = np.broadcast_to(np.arange(s) <= start + np.arange(t)[:, None], (len(q), t, s))
    if q_segments is not None:
        q_segments, k_segments = np.asarray(q_segments), np.asarray(k_segments)
        visible = (
            visible & (q_segments[:, :, None] == k_segments[:, None]) & (q_segments != 0)[..., None]
        )
    return oracle.select(scores, visible, count)


def patched_sizes(**sizes):
    """Patches block sizes, so that small inputs are divided like large ones."""
    return mock.patch.multiple(gpu, **sizes)


CUTS = {
    "chunks": {"SCORES": 8 * 4 * 4096},
    "keys in two parts": {"MULTIPROCESSORS": 4},
    "heads in two passes": {"HEADS": 2, "MULTIPROCESSORS": 2},
    "queries next to the keys": {"HEADS": 2, "SLICE": 64, "BUDGET": 120_000, "MULTIPROCESSORS": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CUTS)
def test_selects_with_small_blocks(name):
    q, w, k, q_segments, k_segments = problem(2, 12, 400, 4, 24, 380)
    with patched_sizes(**CUTS[name]):
        run = jax.jit(
            lambda start: lightning_indexer(
                q,
                w,
                k,
                50,
                start=start,
                q_segments=q_segments,
                k_segments=k_segments,
                implementation=interpreted("gpu"),
            )
        )
        got = run(380)
    np.testing.assert_array_equal(got, expected(q, w, k, q_segments, k_segments, 380, 50))


@pytest.mark.slow
def test_selects_from_long_bfloat16_rows():
    """The keys exceed the buffers, so the ring wraps."""
    q, w, k, *_ = problem(1, 8, 9000, 2, 64, 8992, jnp.bfloat16)
    with patched_sizes(MULTIPROCESSORS=1):
        got = lightning_indexer(q, w, k, 300, start=8992, implementation=interpreted("gpu"))
    np.testing.assert_array_equal(got, expected(q, w, k, None, None, 8992, 300))


@pytest.mark.slow
def test_hopper_selection_has_no_races():
    q, w, k, q_segments, k_segments = problem(1, 8, 900, 2, 16, 892, jnp.bfloat16)
    with patched_sizes(MULTIPROCESSORS=1):
        run = jax.jit(
            lambda: lightning_indexer(
                q,
                w,
                k,
                40,
                start=892,
                q_segments=q_segments,
                k_segments=k_segments,
                implementation=race_checked("gpu"),
            )
        )
        first = jax.block_until_ready(run())
        assert not compat.has_races("gpu")
        np.testing.assert_array_equal(first, run())
    np.testing.assert_array_equal(first, expected(q, w, k, q_segments, k_segments, 892, 40))


def test_splits_float32_into_three_bfloat16():
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
