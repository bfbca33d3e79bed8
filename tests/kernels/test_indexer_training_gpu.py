"""Tests of the indexer's training on Hopper: rings, heads in pieces, steps of queries."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat, segment_sum
from pallas_kernels.index_scores import gpu as index_scores_gpu, index_scores
from pallas_kernels.sparse_indexer_kl import gpu as sparse_indexer_kl_gpu, sparse_indexer_kl
from pallas_kernels.summed_attention_probs import (
    gpu as summed_attention_probs_gpu,
    summed_attention_probs,
)
from tests.kernels.implementations import interpreted, race_checked
from tests.oracles import indexer_kl as oracle

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def wide(*arrays):
    return tuple(np.asarray(x, np.float64) for x in arrays)


@pytest.mark.slow
def test_contracts_heads_in_pieces():
    """A ring of two holds the queries of 3 heads, and a ring of three their 12 pieces of keys."""
    q, k, start = normal(1, 5, 3, 200), normal(1, 20, 3, 200), 12
    mask = np.arange(20) <= start + np.arange(5)[:, None]
    lse = oracle.log_sum_exp(*wide(q, k), mask[None], 0.1).astype(np.float32)
    got = summed_attention_probs(
        q, k, lse, scale=0.1, start=start, implementation=race_checked("gpu")
    )
    assert not compat.has_races("gpu")
    np.testing.assert_allclose(
        got, oracle.summed_attention_probs(*wide(q, k), mask[None], 0.1), atol=2e-5
    )


@pytest.mark.slow
def test_computes_heads_in_passes():
    """The inputs have 6 tiles of keys, 3 of queries, and 3 heads."""
    q, w, k = normal(1, 140, 3, 8), normal(1, 140, 3), normal(1, 700, 8)
    dscores = normal(1, 140, 700)

    @jax.jit
    def run(*inputs):
        scores, pull = jax.vjp(
            lambda *x: index_scores(*x, implementation=interpreted("gpu")), *inputs
        )
        return scores, *pull(jnp.asarray(dscores))

    with mock.patch.multiple(index_scores_gpu, MULTIPROCESSORS=1, HEADS=2):
        got = run(q, w, k)
    want = oracle.index_scores(*wide(q, w, k))[0], *oracle.pull_scores(*wide(q, w, k, dscores))
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-4)


@pytest.mark.slow
def test_sums_queries_with_the_same_keys():
    """5 queries take steps of 2 over 4 tiles in a ring of two; 2 keys are fetched at a time."""
    b, t, s, k = 1, 5, 230, 200
    idx_q, idx_w, idx_k = normal(b, t, 3, 8), normal(b, t, 3), normal(b, s, 8)
    q, latents, lse = normal(b, t, 2, 16), normal(b, s, 16), np.full((b, t, 2), 5, np.float32)
    topk = np.stack([RNG.permutation(s)[:k] for _ in range(b * t)]).reshape(b, t, k)

    def run(implementation):
        def loss(*trained):
            return sparse_indexer_kl(
                *trained, q, latents, lse, topk, scale=0.3, implementation=implementation
            )

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(idx_q, idx_w, idx_k)

    with (
        mock.patch.object(sparse_indexer_kl_gpu, "MAX_QUERIES", 2),
        mock.patch.object(segment_sum, "PREFETCH_ROWS", 2),
    ):
        ours = run(interpreted("gpu"))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(run("xla")), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def shapes(dtype, *each):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in each]


def test_indexer_training_names_unsupported_inputs():
    b, t, s = 2, 3, 40
    indexer = (b, t, 32, 128), (b, t, 32), (b, s, 128)
    attention = (b, t, 64, 256), (b, s, 64, 256)
    topk = jax.ShapeDtypeStruct((b, t, 7), jnp.int32)
    scores, target = (
        index_scores_gpu.unsupported_reason,
        summed_attention_probs_gpu.unsupported_reason,
    )
    sparse = sparse_indexer_kl_gpu.unsupported_reason
    latents = (b, t, 64, 576), (b, s, 576)
    assert scores(*shapes(jnp.bfloat16, *indexer)) is None
    assert target(*shapes(jnp.bfloat16, *attention)) is None
    assert sparse(*shapes(jnp.bfloat16, *indexer[::2], *latents), topk) is None
    assert "float16" in scores(*shapes(jnp.float16, *indexer))
    assert "float16" in target(*shapes(jnp.float16, *attention))
    assert "float16" in sparse(*shapes(jnp.float16, *indexer[::2], *latents), topk)
    wider = (b, t, 32, 192), (b, t, 32), (b, s, 192)
    assert scores(*shapes(jnp.bfloat16, *wider)) == "index heads of 192 columns; at most 128"
    more = (b, t, 80, 128), (b, t, 80), (b, s, 128)
    assert scores(*shapes(jnp.bfloat16, *more)) == "80 index heads; at most 64"
    wider = (b, t, 8, 576), (b, s, 8, 576)
    assert target(*shapes(jnp.bfloat16, *wider)) == "heads of 576 columns; at most 256"
    more = *indexer[::2], (b, t, 96, 576), (b, s, 576)
    assert sparse(*shapes(jnp.bfloat16, *more), topk) == "96 heads; at most 64"
