"""The sparse stage's KL and its gradients against the NumPy oracle."""

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
    watched,
)
from tests.kernels.indexer_problem import (
    SCALE,
    SEGMENTS,
    START,
    TRAINED,
    S,
    assert_equal,
    assert_summed_wide,
    expected,
    in_bfloat16,
    keep,
    log_sum_exp,
    problem,
    target_gradients,
)
from tests.oracles import indexer

K = 128


def selected(seed: int = 0):
    """int32 [b t k] visible keys at random, -1 where fewer are visible; one query has none, one has one."""
    mask = keep(START, SEGMENTS)
    topk = indexer.select(np.random.default_rng(seed).random(mask.shape), mask, 40)
    topk = np.pad(topk, [(0, 0), (0, 0), (0, K - topk.shape[-1])], constant_values=-1)
    topk[0, 3, 1:] = -1
    topk[1, 2] = -1
    return topk


def chosen(topk):
    """bool [b t s] of the same keys."""
    return indexer.selection_mask(topk, S)


def call(given, lse, topk, **options):
    """(loss, kl) of a problem whose keys are latents."""
    inputs = {name: given[name] for name in (*TRAINED, "q")}
    latents = given["k"][:, :, 0]
    options = {"weight": given["weight"], "block": 4} | options
    return sparse_indexer_kl(**inputs, latents=latents, lse=lse, topk=topk, scale=SCALE, **options)


def pulled(given, lse, topk, **options):
    """The same with the gradients."""
    return indexer_problem.pulled(lambda given: call(given, lse, topk, **options), given)


@over_implementations("sparse_indexer_kl", slow="gpu")
@pytest.mark.parametrize("block", in_tiers([64], [4]))
def test_kl_and_its_gradients(block, implementation):
    given, topk = problem(key_heads=1), selected()
    lse = log_sum_exp(given, chosen(topk))
    got = pulled(given, lse, topk, block=block, implementation=implementation)
    want = expected(given, chosen(topk))
    assert_equal(got, want)
    assert not np.asarray(got["kl"])[1, 2]
    _, kl = jax.jit(lambda: call(given, lse, topk, block=block, implementation=implementation))()
    np.testing.assert_allclose(kl, want["kl"], atol=2e-5)


@pytest.mark.slow
@over_implementations("sparse_indexer_kl")
def test_attention_hands_over_its_log_sum_exp(implementation):
    given, topk = problem(key_heads=1), selected()
    latents = given["k"][:, :, 0]
    _, lse, _ = sparse_flash_attention(given["q"], latents, topk, scale=SCALE, value_dim=8)
    _, kl = jax.jit(lambda: call(given, lse, topk, implementation=implementation))()
    np.testing.assert_allclose(kl, expected(given, chosen(topk))["kl"], atol=2e-5)


@over_implementations("sparse_indexer_kl", slow="tpu gpu")
def test_the_target_is_normalised(implementation):
    """A log-sum-exp that is off by a constant scales every probability alike."""
    given, topk = problem(key_heads=1), selected()
    lse = log_sum_exp(given, chosen(topk))
    got = pulled(given, lse - 0.7, topk, implementation=implementation)
    assert_equal(got, expected(given, chosen(topk)))


@over_implementations("sparse_indexer_kl", slow="gpu")
def test_the_target_does_not_learn(implementation):
    given, topk = problem(key_heads=1), selected()
    run = functools.partial(call, topk=topk, implementation=implementation)
    gradients = target_gradients(run, given, log_sum_exp(given, chosen(topk)))
    assert not any(np.asarray(g).any() for g in gradients)


@pytest.mark.slow
@over_implementations("sparse_indexer_kl")
def test_bfloat16_sums_wide_and_the_same_twice(implementation):
    (low, rounded), topk = in_bfloat16(problem(key_heads=1)), selected()
    lse = log_sum_exp(rounded, chosen(topk))
    got, again = (pulled(low, lse, topk, implementation=implementation) for _ in range(2))
    assert_summed_wide(low, expected(rounded, chosen(topk)), got, again)


@pytest.mark.slow
@over_implementations("sparse_indexer_kl")
def test_under_vmap(implementation):
    given, topk = problem(key_heads=1), selected()
    lse = log_sum_exp(given, chosen(topk))
    rows = jax.tree.map(lambda x: x[:, None], (given, lse, topk))

    def run(given, lse, topk):
        return call(given, lse, topk, implementation=implementation)

    _, kl = jax.jit(jax.vmap(run))(*rows)
    np.testing.assert_allclose(kl[:, 0], expected(given, chosen(topk))["kl"], atol=2e-5)


@over_implementations("sparse_indexer_kl", several_devices=True, slow="ref tpu")
def test_in_a_manual_region_of_8_devices(implementation):
    """Queries over devices, keys whole, as the model shards them: the keys' gradient is the devices' sum."""
    given = problem(key_heads=1, t=16)
    visible = keep(START, t=16)
    topk = indexer.select(np.random.default_rng(4).random(visible.shape), visible, K)
    topk = np.pad(topk, [(0, 0), (0, 0), (0, K - topk.shape[-1])], constant_values=-1)
    lse = log_sum_exp(given, chosen(topk))
    mesh = jax.make_mesh((8,), ("context",), axis_types=(AxisType.Auto,))
    split, whole = P(None, "context"), P()
    specs = {name: whole if name in ("idx_k", "k") else split for name in given}

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(specs, split, split),
        out_specs=(whole, {"idx_q": split, "idx_w": split, "idx_k": whole}),
        check_vma=False,
    )
    def run(given, lse, topk):
        def loss(trained):
            return call(given | trained, lse, topk, implementation=implementation)[0]

        value, gradients = jax.value_and_grad(loss)({name: given[name] for name in TRAINED})
        gradients["idx_k"] = jax.lax.psum(gradients["idx_k"], "context")
        return jax.lax.psum(value, "context"), gradients

    value, gradients = run(given, lse, topk)
    want = expected(given, chosen(topk))
    np.testing.assert_allclose(value, want["loss"], rtol=1e-5)
    got = {f"d_{name}": x for name, x in gradients.items()}
    assert_equal(got, want, got)


def few_queries(count, rows=2):
    """(problem, topk) of the first queries of the first rows of a batch."""
    given, topk = problem(key_heads=1), selected()
    own = ("idx_q", "idx_w", "q", "weight")
    few = {n: x[:rows, :count] if n in own else x[:rows] for n, x in given.items()}
    return few, topk[:rows, :count]


def test_kl_and_its_gradients_on_hopper():
    """Of two queries, as its emulator takes seconds for each."""
    given, topk = few_queries(2, rows=1)
    lse = log_sum_exp(given, chosen(topk))
    got = pulled(given, lse, topk, implementation=interpreted("gpu"))
    assert_equal(got, expected(given, chosen(topk)))


@pytest.mark.slow
@over_pallas_forms("sparse_indexer_kl")
def test_no_races(name):
    few, topk = few_queries(3)
    lse = log_sum_exp(few, chosen(topk))

    def loss(trained):
        return call(few | trained, lse, topk, implementation=watched(name))

    (_, kl), gradients = jax.value_and_grad(loss, has_aux=True)({n: few[n] for n in TRAINED})
    assert not compat.has_races(name)
    got = {"kl": kl} | {f"d_{n}": g for n, g in gradients.items()}
    assert_equal(got, expected(few, chosen(topk)), got)
