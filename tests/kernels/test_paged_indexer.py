"""Tests of the indexer over pages of keys against the NumPy oracle, per sequence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.lightning_indexer import paged_lightning_indexer, tpu
from pallas_kernels.quantized_vectors import quantize_vectors
from tests.kernels.implementations import (
    interpreted,
    over_implementations,
    over_pallas_forms,
    race_checked,
)
from tests.oracles import indexer as oracle

over_all = over_implementations("lightning_indexer")
PAGES, Z, J = 13, 128, 16  # 3 sequences of up to 4 pages
LENGTHS = ((400, 512, 150), (1, 2, 130), (0, 256, 511), (128, 3, 0))


@pytest.fixture(autouse=True)
def short_steps(monkeypatch):
    """Makes several steps per sequence; buffers are refilled while another is in use."""
    for name, value in {"STEP_TILES": 2, "STEP": 256, "RING": 2}.items():
        monkeypatch.setattr(tpu, name, value)


def problem(t, heads, dtype=jnp.float32):
    """Returns (q, w, pages, page table) of small integers, whose scores are exact in every precision and tie."""
    rng = np.random.default_rng(5)
    shapes = (3, t, heads, J), (3, t, heads), (PAGES, Z, J)
    q, w, pages = (jnp.asarray(rng.integers(-2, 3, shape), jnp.float32) for shape in shapes)
    table = jnp.asarray(rng.permutation(PAGES)[:12].reshape(3, 4), jnp.int32)
    return q.astype(dtype), w, pages.astype(dtype), table


@functools.cache
def selector(implementation, k):
    """Returns a jitted paged_lightning_indexer of k keys."""
    return jax.jit(
        lambda *args, page_scales=None: paged_lightning_indexer(
            *args, k, page_scales=page_scales, implementation=implementation
        )
    )


def expected(q, w, pages, table, lengths, k, scales=None):
    """Returns NumPy's selection from each sequence's gathered keys; the queries are at its end."""
    q, w, pages = (np.asarray(x, np.float64) for x in (q, w, pages))
    t, heads = q.shape[1:3]
    # The oracle divides by the root of the number of heads; with 16 heads ties stay ties.
    q = np.pad(q, ((0, 0), (0, 0), (0, 16 - heads), (0, 0)))
    w = np.pad(w, ((0, 0), (0, 0), (0, 16 - heads)))
    selected = np.full((len(q), t, k), -1)
    for row, length in enumerate(lengths):
        keys = pages[table[row]].reshape(1, -1, J)
        scores = oracle.index_scores(q[row][None], keys, w[row][None])
        if scales is not None:
            scores = scores * np.asarray(scales, np.float64)[table[row]].reshape(-1)
        seen = np.arange(keys.shape[1]) <= length - t + np.arange(t)[:, None]
        best = oracle.select(scores, seen[None], k)[0]
        selected[row, :, : best.shape[1]] = best
    return selected


@over_implementations("lightning_indexer", slow="gpu")
@pytest.mark.parametrize(
    ("t", "heads", "dtype", "k"),
    [
        pytest.param(1, 8, jnp.bfloat16, 9, id="one query"),
        pytest.param(2, 4, jnp.float32, 9, id="two queries", marks=pytest.mark.slow),
        pytest.param(3, 1, jnp.float32, 9, id="three queries", marks=pytest.mark.slow),
        pytest.param(1, 3, jnp.float32, 200, id="odd heads, all keys", marks=pytest.mark.slow),
    ],
)
def test_selects_over_pages(implementation, t, heads, dtype, k):
    args = problem(t, heads, dtype)
    for lengths in LENGTHS:
        first, second = (selector(implementation, k)(*args, jnp.asarray(lengths)) for _ in range(2))
        assert first.shape == (3, t, k) and first.dtype == jnp.int32
        np.testing.assert_array_equal(first, expected(*args, lengths, k))
        np.testing.assert_array_equal(first, second)


@pytest.mark.slow
@over_all
def test_selects_from_quantized_pages(implementation):
    dtype = "int8"
    rng = np.random.default_rng(6)
    q, q_scale = quantize_vectors(jnp.asarray(rng.standard_normal((3, 1, 8, J))), dtype)
    pages, scales = quantize_vectors(jnp.asarray(rng.standard_normal((PAGES, Z, J))), dtype)
    w = jnp.asarray(rng.standard_normal((3, 1, 8)), jnp.float32) * q_scale
    args = q, w, pages, problem(1, 1)[3]
    lengths = LENGTHS[0]
    got = selector(implementation, 9)(*args, jnp.asarray(lengths), page_scales=scales)
    np.testing.assert_array_equal(got, expected(*args, lengths, 9, scales))
    assert (np.asarray(got) != expected(*args, lengths, 9)).any()


@over_all
def test_ignores_unused_pages(implementation):
    """Keys after a sequence's end and later table entries are never used."""
    q, w, pages, table = problem(1, 8, jnp.bfloat16)
    lengths = (130, 270, 512)
    run = selector(implementation, 9)
    spoiled = np.asarray(pages, np.float32)
    page_table = np.asarray(table)
    for row, length in enumerate(lengths):
        last = -(-length // Z) - 1
        spoiled[page_table[row, last], (length - 1) % Z + 1 :] = np.nan
        spoiled[page_table[row, last + 1 :]] = np.inf
        page_table = page_table.copy()
        page_table[row, last + 1 :] = (-1, 10**6, 7)[: 3 - last]
    got = run(
        q, w, jnp.asarray(spoiled, jnp.bfloat16), jnp.asarray(page_table), jnp.asarray(lengths)
    )
    np.testing.assert_array_equal(got, expected(q, w, pages, table, lengths, 9))


@pytest.mark.slow
@over_pallas_forms("lightning_indexer")
def test_paged_selection_has_no_races(name):
    args = problem(2, 4)
    got = selector(race_checked(name), 9)(*args, jnp.asarray(LENGTHS[0]))
    assert not compat.has_races(name)
    np.testing.assert_array_equal(got, expected(*args, LENGTHS[0], 9))


@over_pallas_forms("lightning_indexer")
def test_pallas_forms_reject_unsupported_pages(name):
    q, w, pages, table = problem(1, 8)
    run = functools.partial(paged_lightning_indexer, implementation=interpreted(name))
    with pytest.raises(ValueError, match="pages of 12 keys"):
        run(q, w, pages[:, :12], table, jnp.asarray(LENGTHS[0]), 9)
    many = jnp.ones((3, 9, 8, J))
    with pytest.raises(ValueError, match="9 queries per sequence"):
        run(many, many[..., 0], pages, table, jnp.asarray(LENGTHS[0]), 9)
