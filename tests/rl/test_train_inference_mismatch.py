"""What engine and learner select for the same tokens: the same, unless something was planted, which is told where it is."""

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

# One dense layer and one of experts.
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


def drawn(count, seed=0):
    return np.random.default_rng(seed).integers(0, CFG.vocab_size, count).tolist()


@functools.cache
def records():
    """Two attempts: one of a long prompt, and one of two replies with an answer of 9 tokens between them; with the
    log-probs that an engine has for them."""
    found = []
    for runs in ((45, 10), (20, 10, 9, 10)):
        sampled = np.concatenate([np.full(count, i % 2, bool) for i, count in enumerate(runs)])
        logp = np.where(sampled, 0.0, np.nan)
        one = TokenRecord(
            token_ids=drawn(len(logp), len(runs)), loss_mask=sampled, rollout_logp=logp
        )
        # Of log-probs of 0 the distance is the engine's.
        logp[sampled] = -compare_choices(params(), [one], engine(), CFG, temperature=0.8).recorded
        found.append(dataclasses.replace(one, rollout_logp=logp))
    return found


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """The programs that all tests share, of which the first would take as long as all others."""
    records()


def attempt(made, given, seed=0, new=10):
    ids, logp = [], []
    for more in given:
        ids, logp = ids + more, logp + [np.nan] * len(more)
        [reply] = made.generate([ids], Sampling(max_tokens=new, temperature=0.8, seed=seed))
        ids, logp = ids + reply.ids, logp + reply.logprobs
    return TokenRecord(token_ids=ids, loss_mask=~np.isnan(logp), rollout_logp=logp)


def changed(path, change, weights=None):
    """The weights with one of them changed."""
    tree = jax.tree.map(lambda a: a, weights or params())
    *names, last = path.split("/")
    inner = tree
    for name in names:
        inner = inner[name]
    inner[last] = change(inner[last])
    return tree


def compared(made):
    return compare_choices(params(), records(), made, CFG, temperature=0.8)


def test_an_engine_selects_what_the_learner_does():
    found = compared(engine())
    assert found.keys.match_rate.shape == (2,) and found.experts.match_rate.shape == (1,)
    assert (
        found.metrics["mismatch/key_match_rate"]
        == found.metrics["mismatch/expert_match_rate"]
        == 1.0
    )
    assert found.metrics["mismatch/layer"] == -1 and found.metrics["mismatch/gap"] == 0.0
    assert found.logp.shape == (30,) and found.logp.max() < ROUNDING


@pytest.mark.slow
def test_agrees_on_samples_of_an_engine_at_their_temperature():
    made = engine()
    samples = [attempt(made, [drawn(45)]), attempt(made, [drawn(20), drawn(9, 1)], 1)]
    found = compare_choices(params(), samples, made, CFG, temperature=0.8)
    assert (found.keys.match_rate == 1.0).all() and (found.experts.match_rate == 1.0).all()
    assert max(found.recorded.max(), found.logp.max()) < ROUNDING
    found = compare_choices(params(), samples, made, CFG, temperature=1.0)
    assert found.recorded.max() > 0.01 and found.logp.max() < ROUNDING


def test_selects_same_keys_where_all_scores_are_equal():
    """With another rule for ties on one side, or with chance, other keys would be chosen."""
    tied = params()
    for stack in ("dense_layers", "moe_layers"):
        tied = changed(f"{stack}/indexer/q_b", jnp.zeros_like, tied)
    found = compare_choices(tied, records(), engine(tied), CFG, temperature=0.8)
    assert (found.keys.match_rate == 1.0).all() and (found.keys.gap == 0.0).all()


def test_reports_recorded_log_probs_of_another_policy():
    first, second = records()
    shifted = dataclasses.replace(first, rollout_logp=first.rollout_logp - 0.02)
    found = compare_choices(params(), [shifted, second], engine(), CFG, temperature=0.8)
    assert found.recorded.max() == pytest.approx(0.02, abs=ROUNDING)
    assert found.logp.max() < ROUNDING


def test_finds_engine_with_other_weights_and_stops_training():
    made = engine()
    made.update_weights(params(1), 1)
    told = compared(made).metrics
    assert told["mismatch/key_match_rate"] < 0.9 and told["mismatch/expert_match_rate"] < 0.9
    assert told["mismatch/layer"] == 0 and told["mismatch/gap"] > 0.05
    assert min(told["mismatch/logp_max"], told["mismatch/recorded_max"]) > 0.01
    check = functools.partial(check_mismatch, params(), records(), cfg=CFG, temperature=0.8)
    with pytest.raises(TrainingStopped, match="mismatch/gap is .*This batch was not trained on"):
        check(engine=made)
    assert check(engine=engine())["mismatch/gap"] == 0
    assert check(engine=made, config=MismatchConfig(attempts=0)) == {}


def test_an_indexer_with_other_weights_is_told_by_its_layer():
    """The first layer of experts, which is the second of all."""
    other = changed("moe_layers/indexer/q_b", lambda w: w.at[0].multiply(-1))
    found = compared(engine(other))
    assert found.keys.match_rate[0] == 1.0 and found.keys.match_rate[1] < 0.9
    assert found.keys.gap[0] == 0.0 and found.keys.gap[1] > 0.05
    assert found.metrics["mismatch/layer"] == 1
    assert found.metrics["mismatch/gap"] == found.keys.gap[1]


def test_a_router_with_another_bias_is_told_by_its_layer():
    other = changed("moe_layers/router/bias", lambda b: b.at[0, :8].add(0.5))
    found = compared(engine(other))
    assert (found.keys.match_rate == 1.0).all()
    assert found.experts.match_rate[0] < 0.9 and found.experts.gap[0] > 0.05
    assert found.metrics["mismatch/layer"] == 1
    assert found.metrics["mismatch/gap"] == found.experts.gap[0]
    # The gap is one of biased scores: here the learner's experts have the bias.
    found = compare_choices(other, records(), engine(), CFG, temperature=0.8)
    assert found.experts.gap[0] > 0.2
    assert found.logp.max() > ROUNDING


@pytest.mark.slow
def test_half_the_precision_is_a_matter_of_rounding():
    told = compared(engine(cfg=dataclasses.replace(CFG, dtype="bfloat16"))).metrics
    assert 0.9 < told["mismatch/key_match_rate"] < 1.0
    assert 0 < told["mismatch/gap"] < 2 * jnp.finfo(jnp.bfloat16).eps
    assert told["mismatch/logp_max"] > 10 * ROUNDING


@pytest.mark.slow
def test_index_keys_in_8_bits_are_the_engines_own():
    found = compared(engine(index_cache="int8"))
    assert 0.9 < found.keys.match_rate.mean() < 1.0
    assert 0 < found.metrics["mismatch/gap"] < 0.02


@pytest.mark.slow
def test_a_row_of_which_no_key_is_left_out_has_none_to_compare():
    cfg = dataclasses.replace(CFG, index_topk=128)
    told = compare_choices(params(), records(), engine(cfg=cfg), cfg, temperature=0.8).metrics
    assert "mismatch/key_match_rate" not in told and told["mismatch/expert_match_rate"] == 1.0


@pytest.mark.slow
def test_an_engine_reads_all_of_a_short_attempt_without_selecting():
    """Its pages hold no more keys than are selected; the learner's row does."""
    made = engine(page_size=2)
    found = compare_choices(
        params(), [attempt(made, [[1, 2, 3, 4]], new=4)], made, CFG, temperature=0.8
    )
    assert (found.keys.match_rate == 1.0).all() and found.logp.max() < ROUNDING


def test_another_model_in_the_engine_is_refused():
    made = engine(cfg=dataclasses.replace(CFG, index_topk=16))
    with pytest.raises(ValueError, match="index_topk is 16 in the engine and 12 in the learner"):
        compared(made)


@pytest.mark.slow
def test_a_model_that_chooses_nothing_has_log_probs_alone():
    cfg = one_layer(vocab_size=CFG.vocab_size)
    weights = glm5.params_of(glm5.Glm5(cfg, rngs=nnx.Rngs(0)))
    made = engine(weights, cfg)
    told = compare_choices(
        weights, [attempt(made, [[1, 2, 3]])], made, cfg, temperature=0.8
    ).metrics
    assert max(told["mismatch/logp_max"], told["mismatch/recorded_max"]) < ROUNDING
    assert told["mismatch/layer"] == -1
    assert "mismatch/key_match_rate" not in told and "mismatch/expert_match_rate" not in told


def test_nothing_sampled_is_nothing_to_compare():
    assert (
        compare_choices(
            params(), [TokenRecord(token_ids=[1, 2, 3], loss_mask=[0, 0, 0])], engine(), CFG
        )
        is None
    )


def test_a_difference_is_measured_by_the_scores_behind_it():
    """By hand: of two queries over four keys, the first has one key exchanged, the second lost one."""
    scores = jnp.asarray([[[4.0, 3.0, 2.5, -8.0], [1.0, 2.0, 3.0, 4.0]]])
    ours = jnp.asarray([[[0, 1], [2, 3]]])
    theirs = jnp.asarray([[[0, 2], [3, -1]]])
    one = jnp.asarray([[True, False]])
    assert measure_difference(scores, ours, theirs, one) == (0.5, 0.5, 4.0)
    assert measure_difference(scores, ours, theirs, ~one) == (0.5, np.inf, 4.0)
    assert measure_difference(scores, ours, ours[..., ::-1], one | ~one) == (2.0, 0.0, 4.0)
    gaps = [relative_gap(gap, largest) for gap, largest in ((0.5, 4.0), (np.inf, 4.0), (0.0, 0.0))]
    assert gaps == [0.125, MAX_GAP, 0]


@pytest.mark.parametrize("weights", [None, 1])
def test_metrics_are_numbers_under_their_names(weights):
    made = engine(weights and params(1))
    told = compare_choices(params(), records()[:1], made, CFG, temperature=0.8).metrics
    names = [f"{of}_{over}" for of in ("logp", "recorded") for over in ("max", "mean")]
    names += ["key_match_rate", "expert_match_rate", "layer", "gap"]
    assert told.keys() == {f"mismatch/{name}" for name in names}
    assert all(type(value) is float for value in told.values())
