"""Choices of engine and trainer for the same tokens are equal; where a difference is planted, its layer is reported."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from glm5_jax import presets
from glm5_jax.data.record import TokenRecord
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.sampling import Sampling
from glm5_jax.model import glm5
from glm5_jax.rl.trainers.mismatch_monitor import MismatchConfig, check_mismatch
from glm5_jax.rl.trainers.train_inference_mismatch import (
    MAX_GAP,
    compare_choices,
    measure_difference,
    relative_gap,
)
from glm5_jax.training.metrics import TrainingStopped
from tests.model.small import one_layer

# One dense layer and one MoE layer.
CFG = dataclasses.replace(
    presets.tiny(),
    num_hidden_layers=2,
    index_topk=12,
    max_position_embeddings=128,
    eos_token_id=(),
    pad_token_id=None,
)
ROUNDING = 1e-5


@functools.cache
def params(seed=0):
    return glm5.params_of(glm5.Glm5(CFG, rngs=nnx.Rngs(seed)))


def engine(weights=None, cfg=CFG, **options):
    model = glm5.Glm5(cfg, params=weights or params())
    return Engine(
        model, config=EngineConfig(**dict(page_size=4, max_num_seqs=4, prefill_chunk=32) | options)
    )


def random_ids(count, seed=0):
    """Returns `count` random token ids."""
    return np.random.default_rng(seed).integers(0, CFG.vocab_size, count).tolist()


@functools.cache
def records():
    """Returns two attempts with the log-probs of an engine.

    The first has a long prompt. The second has two replies, with a tool result of 9 tokens between them.
    """
    attempts = []
    for runs in ((45, 10), (20, 10, 9, 10)):
        sampled = np.concatenate([np.full(count, i % 2, bool) for i, count in enumerate(runs)])
        logp = np.where(sampled, 0.0, np.nan)
        attempt_record = TokenRecord(
            token_ids=random_ids(len(logp), len(runs)), loss_mask=sampled, rollout_logp=logp
        )
        # Recorded log-probs are 0, so that the difference is the engine's log-prob.
        logp[sampled] = -compare_choices(
            params(), [attempt_record], engine(), CFG, temperature=0.8
        ).recorded
        attempts.append(dataclasses.replace(attempt_record, rollout_logp=logp))
    return attempts


@pytest.fixture(scope="module", autouse=True)
def compile_shared_programs():
    """Compiles the programs that all tests share; otherwise the first test would pay for all."""
    records()


def attempt(inference_engine, parts, seed=0, new=10):
    """Returns an attempt that an engine samples: each part of the prompt is followed by a reply."""
    ids, logp = [], []
    for part in parts:
        ids, logp = ids + part, logp + [np.nan] * len(part)
        [reply] = inference_engine.generate(
            [ids], Sampling(max_tokens=new, temperature=0.8, seed=seed)
        )
        ids, logp = ids + reply.ids, logp + reply.logprobs
    return TokenRecord(token_ids=ids, loss_mask=~np.isnan(logp), rollout_logp=logp)


def change_weight(path, change, weights=None):
    """Returns the weights with one leaf changed."""
    tree = jax.tree.map(lambda a: a, weights or params())
    *names, last = path.split("/")
    inner = tree
    for name in names:
        inner = inner[name]
    inner[last] = change(inner[last])
    return tree


def compare_with(inference_engine):
    """Compares an engine with the trainer's choices for `records`."""
    return compare_choices(params(), records(), inference_engine, CFG, temperature=0.8)


def test_engine_and_trainer_choose_equally():
    comparison = compare_with(engine())
    assert comparison.keys.match_rate.shape == (2,) and comparison.experts.match_rate.shape == (1,)
    assert (
        comparison.metrics["mismatch/key_match_rate"]
        == comparison.metrics["mismatch/expert_match_rate"]
        == 1.0
    )
    assert comparison.metrics["mismatch/layer"] == -1 and comparison.metrics["mismatch/gap"] == 0.0
    assert comparison.logp.shape == (30,) and comparison.logp.max() < ROUNDING


@pytest.mark.slow
def test_log_probs_agree_at_sampling_temperature():
    inference_engine = engine()
    samples = [
        attempt(inference_engine, [random_ids(45)]),
        attempt(inference_engine, [random_ids(20), random_ids(9, 1)], 1),
    ]
    comparison = compare_choices(params(), samples, inference_engine, CFG, temperature=0.8)
    assert (comparison.keys.match_rate == 1.0).all() and (
        comparison.experts.match_rate == 1.0
    ).all()
    assert max(comparison.recorded.max(), comparison.logp.max()) < ROUNDING
    comparison = compare_choices(params(), samples, inference_engine, CFG, temperature=1.0)
    assert comparison.recorded.max() > 0.01 and comparison.logp.max() < ROUNDING


def test_selects_same_keys_where_all_scores_are_equal():
    """Fails if one side breaks ties by another rule, or at random."""
    tied = params()
    for stack in ("dense_layers", "moe_layers"):
        tied = change_weight(f"{stack}/indexer/q_b", jnp.zeros_like, tied)
    comparison = compare_choices(tied, records(), engine(tied), CFG, temperature=0.8)
    assert (comparison.keys.match_rate == 1.0).all() and (comparison.keys.gap == 0.0).all()


def test_reports_recorded_log_probs_of_other_policy():
    first, second = records()
    shifted = dataclasses.replace(first, rollout_logp=first.rollout_logp - 0.02)
    comparison = compare_choices(params(), [shifted, second], engine(), CFG, temperature=0.8)
    assert comparison.recorded.max() == pytest.approx(0.02, abs=ROUNDING)
    assert comparison.logp.max() < ROUNDING


def test_stops_training_if_engine_has_other_weights():
    inference_engine = engine()
    inference_engine.update_weights(params(1), 1)
    metrics = compare_with(inference_engine).metrics
    assert metrics["mismatch/key_match_rate"] < 0.9 and metrics["mismatch/expert_match_rate"] < 0.9
    assert metrics["mismatch/layer"] == 0 and metrics["mismatch/gap"] > 0.05
    assert min(metrics["mismatch/logp_max"], metrics["mismatch/recorded_max"]) > 0.01
    check = functools.partial(check_mismatch, params(), records(), cfg=CFG, temperature=0.8)
    with pytest.raises(TrainingStopped, match="mismatch/gap is .*This batch was not trained on"):
        check(engine=inference_engine)
    assert check(engine=engine())["mismatch/gap"] == 0
    assert check(engine=inference_engine, config=MismatchConfig(attempts=0)) == {}


def test_reports_layer_of_changed_indexer():
    """The first MoE layer, which is the second of all layers."""
    other = change_weight("moe_layers/indexer/q_b", lambda w: w.at[0].multiply(-1))
    comparison = compare_with(engine(other))
    assert comparison.keys.match_rate[0] == 1.0 and comparison.keys.match_rate[1] < 0.9
    assert comparison.keys.gap[0] == 0.0 and comparison.keys.gap[1] > 0.05
    assert comparison.metrics["mismatch/layer"] == 1
    assert comparison.metrics["mismatch/gap"] == comparison.keys.gap[1]


def test_reports_layer_of_changed_router_bias():
    other = change_weight("moe_layers/router/bias", lambda b: b.at[0, :8].add(0.5))
    comparison = compare_with(engine(other))
    assert (comparison.keys.match_rate == 1.0).all()
    assert comparison.experts.match_rate[0] < 0.9 and comparison.experts.gap[0] > 0.05
    assert comparison.metrics["mismatch/layer"] == 1
    assert comparison.metrics["mismatch/gap"] == comparison.experts.gap[0]
    # The gap is measured on biased scores: now the trainer's experts have the bias.
    comparison = compare_choices(other, records(), engine(), CFG, temperature=0.8)
    assert comparison.experts.gap[0] > 0.2
    assert comparison.logp.max() > ROUNDING


@pytest.mark.slow
def test_bfloat16_engine_differs_by_rounding_only():
    metrics = compare_with(engine(cfg=dataclasses.replace(CFG, dtype="bfloat16"))).metrics
    assert 0.9 < metrics["mismatch/key_match_rate"] < 1.0
    assert 0 < metrics["mismatch/gap"] < 2 * jnp.finfo(jnp.bfloat16).eps
    assert metrics["mismatch/logp_max"] > 10 * ROUNDING


@pytest.mark.slow
def test_engine_with_int8_index_keys_differs_slightly():
    comparison = compare_with(engine(index_cache="int8"))
    assert 0.9 < comparison.keys.match_rate.mean() < 1.0
    assert 0 < comparison.metrics["mismatch/gap"] < 0.02


@pytest.mark.slow
def test_compares_no_keys_if_all_are_selected():
    cfg = dataclasses.replace(CFG, index_topk=128)
    metrics = compare_choices(params(), records(), engine(cfg=cfg), cfg, temperature=0.8).metrics
    assert "mismatch/key_match_rate" not in metrics and metrics["mismatch/expert_match_rate"] == 1.0


@pytest.mark.slow
def test_short_attempt_needs_no_selection_in_engine():
    """The engine's pages hold no more keys than are selected; the trainer's row holds more."""
    inference_engine = engine(page_size=2)
    comparison = compare_choices(
        params(),
        [attempt(inference_engine, [[1, 2, 3, 4]], new=4)],
        inference_engine,
        CFG,
        temperature=0.8,
    )
    assert (comparison.keys.match_rate == 1.0).all() and comparison.logp.max() < ROUNDING


def test_rejects_engine_with_other_model():
    inference_engine = engine(cfg=dataclasses.replace(CFG, index_topk=16))
    with pytest.raises(ValueError, match="index_topk is 16 in the engine and 12 in the learner"):
        compare_with(inference_engine)


@pytest.mark.slow
def test_model_without_choices_compares_log_probs_only():
    cfg = one_layer(vocab_size=CFG.vocab_size)
    weights = glm5.params_of(glm5.Glm5(cfg, rngs=nnx.Rngs(0)))
    inference_engine = engine(weights, cfg)
    metrics = compare_choices(
        weights, [attempt(inference_engine, [[1, 2, 3]])], inference_engine, cfg, temperature=0.8
    ).metrics
    assert max(metrics["mismatch/logp_max"], metrics["mismatch/recorded_max"]) < ROUNDING
    assert metrics["mismatch/layer"] == -1
    assert "mismatch/key_match_rate" not in metrics and "mismatch/expert_match_rate" not in metrics


def test_compares_nothing_without_sampled_tokens():
    assert (
        compare_choices(
            params(), [TokenRecord(token_ids=[1, 2, 3], loss_mask=[0, 0, 0])], engine(), CFG
        )
        is None
    )


def test_measures_difference_by_scores():
    """Two queries over four keys: the first has one key exchanged, the second lacks one."""
    scores = jnp.asarray([[[4.0, 3.0, 2.5, -8.0], [1.0, 2.0, 3.0, 4.0]]])
    ours = jnp.asarray([[[0, 1], [2, 3]]])
    theirs = jnp.asarray([[[0, 2], [3, -1]]])
    first = jnp.asarray([[True, False]])
    assert measure_difference(scores, ours, theirs, first) == (0.5, 0.5, 4.0)
    assert measure_difference(scores, ours, theirs, ~first) == (0.5, np.inf, 4.0)
    assert measure_difference(scores, ours, ours[..., ::-1], first | ~first) == (2.0, 0.0, 4.0)
    gaps = [relative_gap(gap, largest) for gap, largest in ((0.5, 4.0), (np.inf, 4.0), (0.0, 0.0))]
    assert gaps == [0.125, MAX_GAP, 0]


@pytest.mark.parametrize("weights", [None, 1])
def test_metrics_are_floats_with_expected_names(weights):
    inference_engine = engine(weights and params(1))
    metrics = compare_choices(
        params(), records()[:1], inference_engine, CFG, temperature=0.8
    ).metrics
    names = [
        f"{quantity}_{reduction}"
        for quantity in ("logp", "recorded")
        for reduction in ("max", "mean")
    ]
    names += ["key_match_rate", "expert_match_rate", "layer", "gap"]
    assert metrics.keys() == {f"mismatch/{name}" for name in names}
    assert all(type(value) is float for value in metrics.values())
