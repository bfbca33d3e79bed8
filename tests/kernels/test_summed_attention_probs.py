"""Tests of attention probabilities summed over heads against softmax attention in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.flash_mla import flash_mla
from pallas_kernels.summed_attention_probs import summed_attention_probs
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
    B,
    N,
    S,
    T,
    keep,
    log_sum_exp,
    problem,
    spread,
)
from tests.oracles import indexer_kl as oracle

CASES = {
    "end of a row": dict(start=S - T),
    "start of a row": dict(start=0),
    "start known at run time": dict(start=START, traced=True),
    "documents": dict(start=START, segments=True),
    "one key for all heads": dict(start=START, key_heads=1),
    "two heads to a key": dict(start=START, key_heads=2, segments=True, traced=True),
}


QUICK = {"two heads to a key"}


@over_implementations("summed_attention_probs", slow="gpu")
@pytest.mark.parametrize("name", in_tiers(QUICK, sorted(CASES.keys() - QUICK)))
def test_sums_probabilities_over_heads(name, implementation):
    case = dict(traced=False, segments=False, key_heads=N) | CASES[name]
    start, segments = case["start"], SEGMENTS if case["segments"] else None
    inputs = problem(key_heads=case["key_heads"])
    mask = keep(start, segments)
    q_segments = None if segments is None else segments[:, start : start + T]
    # The log-sum-exp of a query without visible keys has no effect.
    lse = np.nan_to_num(log_sum_exp(inputs, mask), posinf=0)

    def run(start):
        return summed_attention_probs(
            inputs["q"],
            inputs["k"],
            lse,
            scale=SCALE,
            start=start,
            q_segments=q_segments,
            k_segments=segments,
            implementation=implementation,
        )

    got = jax.jit(run)(start) if case["traced"] else jax.jit(run, static_argnums=0)(start)
    want = oracle.summed_attention_probs(inputs["q"], spread(inputs["k"]), mask, SCALE)
    np.testing.assert_allclose(got, want, atol=2e-5)
    assert not np.asarray(got)[~mask].any()
    np.testing.assert_allclose(got.sum(-1), N * mask.any(-1), atol=1e-4)


@pytest.mark.slow
@over_implementations("summed_attention_probs")
def test_probs_accept_log_sum_exp_of_attention(implementation):
    inputs = problem()
    q, k = inputs["q"], inputs["k"]
    _, lse, _ = flash_mla(q, k, k, scale=SCALE, start=START)
    run = jax.jit(
        lambda q: summed_attention_probs(
            q, k, lse, scale=SCALE, start=START, implementation=implementation
        )
    )
    want = oracle.summed_attention_probs(q, k, keep(START), SCALE)
    np.testing.assert_allclose(run(q), want, atol=2e-5)


@over_implementations("summed_attention_probs", slow="xla gpu")
def test_probs_sum_bfloat16_in_float32(implementation):
    inputs = problem()
    q, k = (inputs[name].astype(jnp.bfloat16) for name in "qk")
    rounded = inputs | {"q": np.asarray(q, np.float32), "k": np.asarray(k, np.float32)}
    lse = log_sum_exp(rounded, keep(START))
    run = jax.jit(
        lambda q: summed_attention_probs(
            q, k, lse, scale=SCALE, start=START, implementation=implementation
        )
    )
    got = run(q)
    assert got.dtype == jnp.float32
    want = oracle.summed_attention_probs(rounded["q"], rounded["k"], keep(START), SCALE)
    np.testing.assert_allclose(got, want, atol=2e-5)
    np.testing.assert_array_equal(got, run(q))


@over_implementations("summed_attention_probs", slow="gpu")
def test_probs_have_no_gradient(implementation):
    inputs = problem()
    lse = log_sum_exp(inputs, keep(START))

    def loss(q, k, lse):
        total = summed_attention_probs(
            q, k, lse, scale=SCALE, start=START, implementation=implementation
        )
        return jnp.sum(total**2)

    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(inputs["q"], inputs["k"], lse)
    assert not any(np.asarray(g).any() for g in gradients)


@pytest.mark.slow
@over_implementations("summed_attention_probs")
def test_probs_vmap(implementation):
    inputs = problem()
    lse = log_sum_exp(inputs, keep(START))

    def run(q, k, lse):
        return summed_attention_probs(
            q, k, lse, scale=SCALE, start=START, implementation=implementation
        )

    rows = (x[:, None] for x in (inputs["q"], inputs["k"], lse))
    got = jax.jit(jax.vmap(run))(*rows)[:, 0]
    want = oracle.summed_attention_probs(inputs["q"], inputs["k"], keep(START), SCALE)
    np.testing.assert_allclose(got, want, atol=2e-5)


@over_pallas_forms("summed_attention_probs", slow="tpu")
@pytest.mark.parametrize("form", in_tiers([interpreted], [race_checked]))
def test_probs_of_one_row_have_no_races(name, form):
    inputs, segments = {n: x[1:] for n, x in problem().items()}, SEGMENTS[1:]
    mask = keep(START, SEGMENTS)[1:]
    got = summed_attention_probs(
        inputs["q"],
        inputs["k"],
        log_sum_exp(inputs, mask),
        scale=SCALE,
        start=START,
        q_segments=segments[:, START : START + T],
        k_segments=segments,
        implementation=form(name),
    )
    assert form is interpreted or not compat.has_races(name)
    want = oracle.summed_attention_probs(inputs["q"], inputs["k"], mask, SCALE)
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_rejects_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="4 heads of queries over 3 of keys"):
        summed_attention_probs(
            jnp.zeros((B, T, 4, 8)), jnp.zeros((B, S, 3, 8)), jnp.zeros((B, T, 4)), scale=1
        )
