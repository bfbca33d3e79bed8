"""Tests of the train step: its updates, skipped batches and metrics."""

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
from glm5_jax.training.step import make_step
from glm5_jax.training.step_config import StepConfig
from tests.mesh import cases

BIAS_RATE = 1e-2
TOKENS = cases.ROWS * cases.LENGTH
TWO_PHASES = {  # both change after two steps
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
        **TWO_PHASES,
    )
    optimizer = OptimizerConfig(ns_dtype="float32", frozen=frozen)
    return make_step(CFG, config, optimizer, RATES)


def initial_state(step):
    params = jax.tree.map(jnp.asarray, cases.params(CFG))
    return step.initialise(jax.random.key(0), params)


def run_steps(step, batches):
    """Returns host copies of all states, with the initial one, and metrics of one step per batch."""
    state = initial_state(step)
    states, metrics = [jax.device_get(state)], []
    for batch in batches:
        state, values = step.train(state, batch)
        states.append(jax.device_get(state))
        metrics.append(jax.device_get(values))
    return states, metrics


def nan_batch():
    batch = dict(cases.batch())
    return batch | {"ce_weight": np.where(batch["loss_mask"] > 0, np.nan, batch["ce_weight"])}


@pytest.fixture(scope="module")
def three_steps():
    return run_steps(build(), [cases.batch()] * 3)


def flat_params(state):
    return tree.flatten(state["params"])


def test_updates_all_weights_and_reduces_loss(three_steps):
    states, metrics = three_steps
    before, after = flat_params(states[0]), flat_params(states[1])
    unchanged = {path for path in before if np.array_equal(before[path], after[path])}
    assert {
        p for p in unchanged if "indexer" not in p
    } == set()  # dense attention does not use the indexer
    assert metrics[2]["loss"]["ce"] < metrics[0]["loss"]["ce"]
    assert [m["skipped"] for m in metrics] == [False] * 3


@pytest.mark.parametrize("is_committed", [False, True], ids=["initialized", "from a checkpoint"])
def test_compiles_once(is_committed):
    """Loaded weights are committed to a device, and so are all results of programs with such arguments."""
    step = build()
    params = jax.tree.map(jnp.asarray, cases.params(CFG))
    state = step.initialise(
        jax.random.key(0), jax.device_put(params, jax.devices()[0]) if is_committed else params
    )
    before = step.train._cache_size()
    for _ in range(2):
        state, _ = step.train(state, cases.batch())
    assert step.train._cache_size() <= max(before, 1)


def test_reports_learning_rate_of_schedule(three_steps):
    _, metrics = three_steps
    np.testing.assert_allclose([m["learning_rate"] for m in metrics], [1e-2, 9e-3, 8e-3], rtol=1e-5)


def test_skips_non_finite_batch():
    states, [metrics] = run_steps(build(), [nan_batch()])
    assert metrics["skipped"]
    for part in ("params", "optimizer"):
        jax.tree.map(np.testing.assert_array_equal, states[1][part], states[0][part])
    assert (states[1]["step"], states[1]["tokens"]) == (1, TOKENS)


def test_skipped_step_advances_schedule():
    """The first update is the same, but one step later, at 0.9 of the rate."""
    plain, late = (
        run_steps(build(), b)[0] for b in ([cases.batch()], [nan_batch(), cases.batch()])
    )
    (zero, first), (_, _, second) = plain, late
    for path in ("moe_layers/attn/q_b", "embed/weight"):  # Muon, AdamW
        before, one, two = (flat_params(state)[path] for state in (zero, first, second))
        np.testing.assert_allclose(two - before, 0.9 * (one - before), atol=2e-6, err_msg=path)
        assert 1e-3 < np.abs(one - before).max() < 3e-2, path  # near the rate of 1e-2


def test_router_biases_move_towards_balance(three_steps):
    states, _ = three_steps
    loss = jax.jit(loss_function(CFG, dataclasses.replace(cases.STEP, mtp_steps=MTP_STEPS)))
    _, parts = loss(states[0]["params"], cases.batch(), cases.RATES)
    loads = np.split(np.asarray(parts.load), [CFG.num_moe_layers])
    for path, load in zip(BIASES, loads):
        wanted = BIAS_RATE * np.sign(load.mean(-1, keepdims=True) - load)
        bias = [flat_params(state)[path].reshape(load.shape) for state in states]
        np.testing.assert_allclose(bias[1] - bias[0], wanted, atol=1e-6)
        assert np.abs(wanted).max() > 0
        assert not np.array_equal(bias[2], bias[1])
        np.testing.assert_array_equal(bias[3], bias[2])
    assert not np.array_equal(
        np.sign(loads[1].mean() - loads[1][0]),
        np.sign(loads[0].mean(-1, keepdims=True) - loads[0])[0],
    )


@pytest.mark.slow
def test_frozen_layer_preserves_router_bias():
    (before, after), _ = run_steps(build(frozen=("moe_layers/",)), [cases.batch()])
    moved = {
        path for path, x in flat_params(after).items() if np.any(x != flat_params(before)[path])
    }
    assert BIASES[1] in moved and not any(path.startswith("moe_layers/") for path in moved)


def test_mtp_weight_changes_after_tokens(three_steps):
    _, metrics = three_steps
    z, balance = cases.STEP.z_weight, cases.STEP.balance_weight
    for values, weight in zip(metrics, (0.3, 0.3, 0.0)):
        loss = values["loss"]
        rest = loss["ce"] + balance * loss["balance"] + z * loss["z"]
        assert loss["total"] == pytest.approx(rest + weight * loss["mtp"], rel=1e-5)
        assert loss["mtp"] > 1


def test_counts_microbatches_of_batch():
    """The sizes are those of pre-training's ramp on 1,024 devices, and on fewer."""
    step = StepConfig(rows_per_device=4)
    assert [step.microbatches(rows, 1024) for rows in (4096, 8192, 12288, 16384)] == [1, 2, 3, 4]
    assert step.microbatches(16384, 512) == 8
    assert step.microbatches(5 * 1024, 1024) == 5 and step.microbatches(6 * 1024, 1024) == 2
    assert StepConfig().microbatches(16384, 4) == 1


@pytest.mark.slow
def test_microbatches_equal_full_batch(three_steps):
    states, metrics = run_steps(build(rows_per_device=4), [cases.batch()])
    for path, x in flat_params(states[1]).items():
        np.testing.assert_allclose(x, flat_params(three_steps[0][1])[path], atol=1e-5, err_msg=path)
    for name, value in metrics[0]["loss"].items():
        assert value == pytest.approx(three_steps[1][0]["loss"][name], rel=1e-5)


def test_step_config_rejects_invalid_values():
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
