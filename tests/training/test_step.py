"""The train step itself: what it moves, what a bad batch leaves alone, what it reports."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.parallel import tree
from glm5_jax.training.gradients import loss_function
from glm5_jax.training.optimizer import OptimizerConfig
from glm5_jax.training.schedule import ScheduleConfig, TwoPhaseConfig, make_schedule
from glm5_jax.training.step import StepConfig, make_step
from tests.mesh import cases

BIAS_RATE = 1e-2
TOKENS = cases.ROWS * cases.LENGTH
SWITCHES = {  # both after two steps
    "bias_update_rate": TwoPhaseConfig(before=BIAS_RATE, after=0.0, tokens=2 * TOKENS),
    "mtp_weight": TwoPhaseConfig(before=0.3, after=0.0, tokens=2 * TOKENS),
}
RATES = make_schedule(
    ScheduleConfig(kind="linear", peak=1e-2, end=0, warmup_steps=0, total_steps=11)
)
BIASES = ("moe_layers/router/bias", "mtp/block/router/bias")
CFG = cases.small("dense", num_nextn_predict_layers=1)
MTP_STEPS = 1


@functools.cache
def build(rows_per_device: int | None = None, frozen=()):
    config = dataclasses.replace(
        cases.STEP,
        rows_per_device=rows_per_device,
        index_weight=0.0,
        mtp_steps=MTP_STEPS,
        query_block=cases.LENGTH,
        remat="none",
        **SWITCHES,
    )
    optimizer = OptimizerConfig(ns_dtype="float32", frozen=frozen)
    return make_step(CFG, config, optimizer, RATES)


def start(step):
    params = jax.tree.map(jnp.asarray, cases.params(CFG))
    return step.initialise(jax.random.key(0), params)


def steps(step, batches):
    """States (host copies, the first one included) and metrics of a step per batch."""
    state = start(step)
    states, metrics = [jax.device_get(state)], []
    for batch in batches:
        state, found = step.train(state, batch)
        states.append(jax.device_get(state))
        metrics.append(jax.device_get(found))
    return states, metrics


def broken():
    batch = dict(cases.batch())
    return batch | {"ce_weight": np.where(batch["loss_mask"] > 0, np.nan, batch["ce_weight"])}


@pytest.fixture(scope="module")
def three():
    return steps(build(), [cases.batch()] * 3)


def flat(state):
    return tree.flatten(state["params"])


def test_every_weight_moves_and_the_loss_falls(three):
    states, metrics = three
    before, after = flat(states[0]), flat(states[1])
    still = {path for path in before if np.array_equal(before[path], after[path])}
    assert {p for p in still if "indexer" not in p} == set()  # dense attention leaves it idle
    assert metrics[2]["loss"]["ce"] < metrics[0]["loss"]["ce"]
    assert [m["skipped"] for m in metrics] == [False] * 3


@pytest.mark.parametrize("bound", [False, True], ids=["made here", "from a checkpoint"])
def test_one_program_makes_all_steps(bound):
    """Given weights are bound to their device; the results of a program with such arguments are bound, all of them."""
    step = build()
    params = jax.tree.map(jnp.asarray, cases.params(CFG))
    state = step.initialise(
        jax.random.key(0), jax.device_put(params, jax.devices()[0]) if bound else params
    )
    before = step.train._cache_size()
    for _ in range(2):
        state, _ = step.train(state, cases.batch())
    assert step.train._cache_size() <= max(before, 1)


def test_the_reported_learning_rate_follows_the_schedule(three):
    _, metrics = three
    np.testing.assert_allclose([m["learning_rate"] for m in metrics], [1e-2, 9e-3, 8e-3], rtol=1e-5)


def test_a_batch_that_is_not_finite_changes_no_weight_and_no_moment():
    states, [found] = steps(build(), [broken()])
    assert found["skipped"]
    for part in ("params", "optimizer"):
        jax.tree.map(np.testing.assert_array_equal, states[1][part], states[0][part])
    assert (states[1]["step"], states[1]["tokens"]) == (1, TOKENS)


def test_a_skipped_step_does_not_hold_up_the_schedule():
    """The same first update, one step later and so at 0.9 of the rate."""
    plain, late = (steps(build(), b)[0] for b in ([cases.batch()], [broken(), cases.batch()]))
    (zero, first), (_, _, second) = plain, late
    for path in ("moe_layers/attn/q_b", "embed/weight"):  # Muon, AdamW
        before, one, two = (flat(state)[path] for state in (zero, first, second))
        np.testing.assert_allclose(two - before, 0.9 * (one - before), atol=2e-6, err_msg=path)
        assert 1e-3 < np.abs(one - before).max() < 3e-2, path  # about the rate of 1e-2


def test_router_biases_move_towards_balance_until_the_switch(three):
    states, _ = three
    loss = jax.jit(loss_function(CFG, dataclasses.replace(cases.STEP, mtp_steps=MTP_STEPS)))
    _, parts = loss(states[0]["params"], cases.batch(), cases.RATES)
    loads = np.split(np.asarray(parts.load), [CFG.num_moe_layers])
    for path, load in zip(BIASES, loads):
        wanted = BIAS_RATE * np.sign(load.mean(-1, keepdims=True) - load)
        bias = [flat(state)[path].reshape(load.shape) for state in states]
        np.testing.assert_allclose(bias[1] - bias[0], wanted, atol=1e-6)
        assert np.abs(wanted).max() > 0
        assert not np.array_equal(bias[2], bias[1])
        np.testing.assert_array_equal(bias[3], bias[2])
    assert not np.array_equal(
        np.sign(loads[1].mean() - loads[1][0]),
        np.sign(loads[0].mean(-1, keepdims=True) - loads[0])[0],
    )


@pytest.mark.slow
def test_a_frozen_layer_s_router_bias_stays():
    (before, after), _ = steps(build(frozen=("moe_layers/",)), [cases.batch()])
    moved = {path for path, x in flat(after).items() if np.any(x != flat(before)[path])}
    assert BIASES[1] in moved and not any(path.startswith("moe_layers/") for path in moved)


def test_the_weight_of_multi_token_prediction_switches_with_the_tokens_seen(three):
    _, metrics = three
    z, balance = cases.STEP.z_weight, cases.STEP.balance_weight
    for found, weight in zip(metrics, (0.3, 0.3, 0.0)):
        loss = found["loss"]
        rest = loss["ce"] + balance * loss["balance"] + z * loss["z"]
        assert loss["total"] == pytest.approx(rest + weight * loss["mtp"], rel=1e-5)
        assert loss["mtp"] > 1


def test_a_larger_batch_comes_in_more_microbatches():
    """Of 1,024 devices, along pre-training's ramp, and of as many as are left."""
    step = StepConfig(rows_per_device=4)
    assert [step.microbatches(rows, 1024) for rows in (4096, 8192, 12288, 16384)] == [1, 2, 3, 4]
    assert step.microbatches(16384, 512) == 8
    assert step.microbatches(5 * 1024, 1024) == 5 and step.microbatches(6 * 1024, 1024) == 2
    assert StepConfig().microbatches(16384, 4) == 1


@pytest.mark.slow
def test_microbatches_add_up_to_the_batch(three):
    states, metrics = steps(build(rows_per_device=4), [cases.batch()])
    for path, x in flat(states[1]).items():
        np.testing.assert_allclose(x, flat(three[0][1])[path], atol=1e-5, err_msg=path)
    for name, value in metrics[0]["loss"].items():
        assert value == pytest.approx(three[1][0]["loss"][name], rel=1e-5)


def test_names_values_that_cannot_work():
    for field, value in (
        ("remat", "banana"),
        ("loss_chunk", 0),
        ("rows_per_device", 0),
        ("token_chunk", 0),
        ("expert_slices", 0),
        ("query_block", -1),
        ("mtp_steps", -1),
        ("reduce_dtype", "foo"),
        ("accumulate", "twice"),
        ("index_weight", float("nan")),
    ):
        with pytest.raises(ValueError, match=f"{field} is {value!r}"):
            StepConfig(**{field: value})
