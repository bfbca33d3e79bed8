"""Tests of the k largest of long rows against a stable sort, with rows in pieces and worst cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backends, compat
from pallas_kernels.top_k import gpu, top_k
from tests.kernels.implementations import (
    interpreted,
    marks,
    over_implementations,
    over_pallas_forms,
    race_checked,
)
from tests.oracles import indexer as oracle

S = 5 * gpu.STAGE + 1000  # the candidates fill their buffer more than once


def score_rows(s):
    """Returns random rows, and worst cases of a selection that stores candidates above a threshold."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(s)
    coarse = np.round(rng.standard_normal(s), 1)
    zeros = np.where(np.arange(s) % 2, 0.0, -0.0)
    lowest = np.where(np.arange(s) < s - 7, -np.inf, np.nan)
    special = rng.choice([0.0, -0.0, 1.0, -1.0, np.nan, np.inf, -np.inf, 1e-40, -1e-40], s)
    some = [normal, np.sort(normal), np.sort(normal)[::-1], coarse, zeros, lowest, special]
    return np.stack([*some, -np.abs(normal)]).astype(np.float32)


def expected(scores, k):
    return oracle.select(scores[None], np.ones((1, *scores.shape), bool), k)[0]


SHAPES = ((S, 600), (S, 2048), (700, 64), (9, 20))
QUICK = {"xla": ((9, 20),), "gpu": ((700, 64),)}


@pytest.mark.parametrize(
    ("implementation", "s", "k"),
    [
        pytest.param(*p.values, s, k, id=f"{s}-{k}-{p.id}", marks=marks((s, k) not in QUICK[p.id]))
        for p in over_implementations("top_k").args[1]
        for s, k in SHAPES
    ],
)
def test_top_k_equals_stable_sort(implementation, s, k):
    scores = score_rows(s)
    got = jax.jit(lambda x: top_k(x, k, implementation=implementation))(scores)
    np.testing.assert_array_equal(got, expected(scores, k))


@pytest.mark.slow
@over_pallas_forms("top_k")
def test_top_k_vmaps(name):
    scores = score_rows(300)[:4].reshape(2, 2, 300)
    got = jax.vmap(lambda x: top_k(x, 20, implementation=interpreted(name)))(scores)
    np.testing.assert_array_equal(got.reshape(4, 20), expected(scores.reshape(4, 300), 20))


@pytest.mark.slow
@over_pallas_forms("top_k")
def test_top_k_has_no_races(name):
    scores = score_rows(S)[:2]
    run = jax.jit(lambda x: top_k(x, 600, implementation=race_checked(name)))
    first = jax.block_until_ready(run(scores))
    assert not compat.has_races(name)
    np.testing.assert_array_equal(first, run(scores))
    np.testing.assert_array_equal(first, expected(scores, 600))


@pytest.mark.slow
def test_selects_within_bounds():
    scores, bounds = score_rows(S), np.array([[0, S], [5, 4096], [9000, 9003], [4097, S - 1]])
    bounds = np.concatenate([bounds, [[0, 0], [7, 7], [8192, 20000], [1, 13000]]]).astype(np.int32)
    padded = np.pad(scores, ((0, 0), (0, -S % gpu.STAGE)), constant_values=np.inf)
    got = gpu.select_rows(padded, bounds, 100, interpret=compat.emulator_params("gpu"))
    place = np.arange(S)
    inside = (place >= bounds[:, :1]) & (place < bounds[:, 1:])
    np.testing.assert_array_equal(got, oracle.select(scores[None], inside[None], 100)[0])


def test_ordered_bits_compare_like_scores():
    x = np.array(
        [np.nan, -np.inf, -3e38, -1, -1e-40, -0.0, 0.0, 1e-40, 1, 3e38, np.inf], np.float32
    )
    got = np.asarray(gpu.to_ordered_bits(jnp.asarray(x))).tolist()
    assert got == sorted(got) and len(set(got)) == len(x) - 2
    assert got[0] == got[1] and got[5] == got[6] and got[0] > gpu.INVISIBLE


def test_top_k_rejects_unsupported_inputs():
    named = backends.make_interpreted("gpu", compat.emulator_params("gpu"))
    with pytest.raises(ValueError, match="not float32"):
        top_k(jnp.zeros((1, 8), jnp.bfloat16), 2, implementation=named)
    with pytest.raises(ValueError, match=f"room for k = {gpu.MAX_K}, not {gpu.MAX_K + 1}"):
        top_k(jnp.zeros((1, 99999)), gpu.MAX_K + 1, implementation=named)
