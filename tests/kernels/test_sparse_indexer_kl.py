"""Tests of the sparse stage's KL and its gradients against the NumPy oracle."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from pallas_kernels import compat
from pallas_kernels.sparse_flash_attention import sparse_flash_attention
from pallas_kernels.sparse_indexer_kl import sparse_indexer_kl
from tests.kernels import indexer_problem
from tests.kernels.implementations import (
    in_tiers,
    interpreted,
    over_implementations,
    over_pallas_forms,
    race_checked,
)
from tests.kernels.indexer_problem import (
    SCALE,
    SEGMENTS,
    START,
    TRAINED,
    S,
    assert_equal,
    assert_summed_in_float32,
    expected,
    in_bfloat16,
    keep,
    log_sum_exp,
    problem,
    target_gradients,
)
from tests.oracles import indexer

K = 128


def random_topk(seed: int = 0):
    """Returns int32 [b t k] random visible keys, padded with -1; one query has none and one has one."""
    mask = keep(START, SEGMENTS)
    topk = indexer.select(np.random.default_rng(seed).random(mask.shape), mask, 40)
    topk = np.pad(topk, [(0, 0), (0, 0), (0, K - topk.shape[-1])], constant_values=-1)
    topk[0, 3, 1:] = -1
    topk[1, 2] = -1
    return topk


def selection_mask(topk):
    """Returns bool [b t s], True for the keys of topk."""
    return indexer.selection_mask(topk, S)


def call(inputs, lse, topk, **options):
    """Returns (loss, kl) of inputs whose keys are latents."""
    args = {name: inputs[name] for name in (*TRAINED, "q")}
    latents = inputs["k"][:, :, 0]
    options = {"weight": inputs["weight"], "block": 4} | options
    return sparse_indexer_kl(**args, latents=latents, lse=lse, topk=topk, scale=SCALE, **options)


def with_gradients(inputs, lse, topk, **options):
    """Returns (loss, kl) and the gradients by name."""
    return indexer_problem.with_gradients(lambda inputs: call(inputs, lse, topk, **options), inputs)


@over_implementations("sparse_indexer_kl", slow="gpu")
@pytest.mark.parametrize("block", in_tiers([64], [4]))
def test_sparse_kl_and_gradients_equal_oracle(block, implementation):
    inputs, topk = problem(key_heads=1), random_topk()
    lse = log_sum_exp(inputs, selection_mask(topk))
    got = with_gradients(inputs, lse, topk, block=block, implementation=implementation)
    want = expected(inputs, selection_mask(topk))
    assert_equal(got, want)
    assert not np.asarray(got["kl"])[1, 2]
    _, kl = jax.jit(lambda: call(inputs, lse, topk, block=block, implementation=implementation))()
    np.testing.assert_allclose(kl, want["kl"], atol=2e-5)


@pytest.mark.slow
@over_implementations("sparse_indexer_kl")
def test_sparse_kl_accepts_log_sum_exp_of_attention(implementation):
    inputs, topk = problem(key_heads=1), random_topk()
    latents = inputs["k"][:, :, 0]
    _, lse, _ = sparse_flash_attention(inputs["q"], latents, topk, scale=SCALE, value_dim=8)
    _, kl = jax.jit(lambda: call(inputs, lse, topk, implementation=implementation))()
    np.testing.assert_allclose(kl, expected(inputs, selection_mask(topk))["kl"], atol=2e-5)


@over_implementations("sparse_indexer_kl", slow="tpu gpu")
def test_sparse_kl_normalizes_target(implementation):
    """A constant error of the log-sum-exp scales all probabilities equally."""
    inputs, topk = problem(key_heads=1), random_topk()
    lse = log_sum_exp(inputs, selection_mask(topk))
    got = with_gradients(inputs, lse - 0.7, topk, implementation=implementation)
    assert_equal(got, expected(inputs, selection_mask(topk)))


@over_implementations("sparse_indexer_kl", slow="gpu")
def test_sparse_kl_target_has_no_gradient(implementation):
    inputs, topk = problem(key_heads=1), random_topk()
    run = functools.partial(call, topk=topk, implementation=implementation)
    gradients = target_gradients(run, inputs, log_sum_exp(inputs, selection_mask(topk)))
    assert not any(np.asarray(g).any() for g in gradients)


@pytest.mark.slow
@over_implementations("sparse_indexer_kl")
def test_sparse_kl_sums_bfloat16_in_float32(implementation):
    (low, rounded), topk = in_bfloat16(problem(key_heads=1)), random_topk()
    lse = log_sum_exp(rounded, selection_mask(topk))
    got, again = (with_gradients(low, lse, topk, implementation=implementation) for _ in range(2))
    assert_summed_in_float32(low, expected(rounded, selection_mask(topk)), got, again)


@pytest.mark.slow
@over_implementations("sparse_indexer_kl")
def test_sparse_kl_vmaps(implementation):
    inputs, topk = problem(key_heads=1), random_topk()
    lse = log_sum_exp(inputs, selection_mask(topk))
    rows = jax.tree.map(lambda x: x[:, None], (inputs, lse, topk))

    def run(inputs, lse, topk):
        return call(inputs, lse, topk, implementation=implementation)

    _, kl = jax.jit(jax.vmap(run))(*rows)
    np.testing.assert_allclose(kl[:, 0], expected(inputs, selection_mask(topk))["kl"], atol=2e-5)


@over_implementations("sparse_indexer_kl", several_devices=True, slow="xla tpu")
def test_sparse_kl_shards_queries_over_8_devices(implementation):
    """Queries are sharded are sharded and keys are not; the keys' gradient is the sum over devices."""
    inputs = problem(key_heads=1, t=16)
    visible = keep(START, t=16)
    topk = indexer.select(np.random.default_rng(4).random(visible.shape), visible, K)
    topk = np.pad(topk, [(0, 0), (0, 0), (0, K - topk.shape[-1])], constant_values=-1)
    lse = log_sum_exp(inputs, selection_mask(topk))
    mesh = jax.make_mesh((8,), ("context",), axis_types=(AxisType.Auto,))
    split, replicated = P(None, "context"), P()
    specs = {name: replicated if name in ("idx_k", "k") else split for name in inputs}

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(specs, split, split),
        out_specs=(replicated, {"idx_q": split, "idx_w": split, "idx_k": replicated}),
        check_vma=False,
    )
    def run(inputs, lse, topk):
        def loss(trained):
            return call(inputs | trained, lse, topk, implementation=implementation)[0]

        value, gradients = jax.value_and_grad(loss)({name: inputs[name] for name in TRAINED})
        gradients["idx_k"] = jax.lax.psum(gradients["idx_k"], "context")
        return jax.lax.psum(value, "context"), gradients

    value, gradients = run(inputs, lse, topk)
    want = expected(inputs, selection_mask(topk))
    np.testing.assert_allclose(value, want["loss"], rtol=1e-5)
    got = {f"d_{name}": x for name, x in gradients.items()}
    assert_equal(got, want, got)


def few_queries(count, rows=2):
    """Returns (inputs, topk) of the first queries of the first batch rows."""
    inputs, topk = problem(key_heads=1), random_topk()
    query_names = ("idx_q", "idx_w", "q", "weight")
    few = {n: x[:rows, :count] if n in query_names else x[:rows] for n, x in inputs.items()}
    return few, topk[:rows, :count]


def test_hopper_sparse_kl_equals_oracle():
    """Uses two queries because Hopper's emulator takes seconds for each."""
    inputs, topk = few_queries(2, rows=1)
    lse = log_sum_exp(inputs, selection_mask(topk))
    got = with_gradients(inputs, lse, topk, implementation=interpreted("gpu"))
    assert_equal(got, expected(inputs, selection_mask(topk)))


@pytest.mark.slow
@over_pallas_forms("sparse_indexer_kl")
def test_sparse_kl_has_no_races(name):
    few, topk = few_queries(3)
    lse = log_sum_exp(few, selection_mask(topk))

    def loss(trained):
        return call(few | trained, lse, topk, implementation=race_checked(name))

    (_, kl), gradients = jax.value_and_grad(loss, has_aux=True)({n: few[n] for n in TRAINED})
    assert not compat.has_races(name)
    got = {"kl": kl} | {f"d_{n}": g for n, g in gradients.items()}
    assert_equal(got, expected(few, selection_mask(topk)), got)
