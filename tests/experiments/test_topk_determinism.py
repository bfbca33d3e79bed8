"""Other rules of selection: their keys, the equality of the forward, and the verdicts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.ablations import retriever, topk_determinism
from experiments.ablations.selection_rules import (
    approx_native,
    approx_on_tpu,
    exact,
    group_size,
    in_bfloat16,
    in_float8,
    lax_top_k,
    random_ties,
    rollout,
    rounded_ties,
    train,
)
from glm5_jax.checkpoint import store
from glm5_jax.model import glm5
from glm5_jax.model.indexer import Index
from glm5_jax.text.tokenizer import Tokenizer
from tests.oracles import attention, indexer, indexer_kl

pytestmark = pytest.mark.usefixtures("without_pictures")

CFG = retriever.model(1, attention="sparse", index_topk=4, eos_token_id=(), pad_token_id=None)
NONE = (None, None)
KEYS = [jax.random.key(i) for i in range(3)]


def index_of(t=12, seed=0, heads=8):
    """Returns an index of one row with few tied keys."""
    rng = np.random.default_rng(seed)
    shapes = ((1, t, heads, 8), (1, t, heads), (1, t, 8))
    return Index(*(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes))


def exact_keys(index, k):
    """Returns the keys of the exact rule, by the oracle."""
    scores, _ = indexer_kl.index_scores(*(np.asarray(x, np.float64) for x in index))
    seen = attention.visible_keys(np.ones(scores.shape[:2], int))
    return indexer.select(scores, seen, k)


@pytest.mark.parametrize("rule", [exact, lax_top_k, random_ties, approx_native])
def test_all_rules_take_best_keys_without_ties(rule):
    index = index_of()
    np.testing.assert_array_equal(rule(index, 0, NONE, 4, KEYS[0]), exact_keys(index, 4))


@pytest.mark.slow
def test_rules_respect_documents_and_query_offset():
    index = index_of()
    segments = np.array([[1] * 7 + [2] * 4 + [0]])
    seen = attention.visible_keys(segments)
    scores, _ = indexer_kl.index_scores(*(np.asarray(x, np.float64) for x in index))
    want = indexer.select(scores, seen, 3)
    late = Index(index.q[:, 5:], index.w[:, 5:], index.k)
    for rule in (exact, random_ties):
        got = rule(late, 5, (segments[:, 5:], segments), 3, KEYS[0])
        np.testing.assert_array_equal(got, want[:, 5:])


@pytest.mark.slow
def test_random_ties_change_only_equal_scores():
    index = index_of(t=40)
    same = index._replace(k=index.k.at[:, 10:30].set(index.k[:, :1]))  # 21 equal scores
    right = exact(same, 0, NONE, 6, KEYS[0])
    scores, _ = indexer_kl.index_scores(*(np.asarray(x, np.float64) for x in same))
    drawn = [np.asarray(random_ties(same, 0, NONE, 6, key)) for key in KEYS]
    differ = 0
    for t in range(6, 40):
        values = [np.sort(scores[0, t][x[0, t]]) for x in (np.asarray(right), *drawn)]
        for got in values[1:]:
            np.testing.assert_allclose(got, values[0], rtol=1e-5)
        differ += len({tuple(x[0, t]) for x in drawn}) > 1
    assert differ > 5
    np.testing.assert_array_equal(drawn[0], random_ties(same, 0, NONE, 6, KEYS[0]))


@pytest.mark.slow
def test_rounded_scores_tie_more_often():
    index = index_of(t=200)
    rounded = [np.asarray(rounded_ties(index, 0, NONE, 8, key)) for key in KEYS]
    again = [np.asarray(random_ties(index, 0, NONE, 8, key)) for key in KEYS]
    assert topk_determinism.differing_share(rounded[0][None], rounded[1][None]) > 0.01
    assert topk_determinism.differing_share(again[0][None], again[1][None]) == 0


def test_group_sizes_equal_those_of_jax():
    assert (group_size(131_072, 2048), group_size(202_752, 2048)) == (2, 4)
    assert group_size(128, 8) == 1


def test_tpu_rule_keeps_best_key_of_group():
    index = index_of(t=14)
    got = np.asarray(approx_on_tpu(index, 0, NONE, 3, None, size=3))
    scores, _ = indexer_kl.index_scores(*(np.asarray(x, np.float64) for x in index))
    for t in range(14):
        groups = [[s for s in range(t + 1) if s // 3 == g] for g in range(5)]
        winners = [max(group, key=lambda s: scores[0, t, s]) for group in groups if group]
        best = sorted(sorted(winners, key=lambda s: -scores[0, t, s])[:3])
        np.testing.assert_array_equal(got[0, t], best + [-1] * (3 - len(best)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "dtype"), [(in_bfloat16, "bfloat16"), (in_float8, "float8_e4m3fn")]
)
def test_coarse_index_equals_exact_rule_on_rounded_numbers(rule, dtype):
    index = index_of(t=200)

    def rounded(x):
        x = np.asarray(x)
        scale = np.abs(x).max(-1, keepdims=True) / 448 if dtype != "bfloat16" else np.float32(1)
        return np.asarray((x / scale).astype(jnp.dtype(dtype)), np.float64) * scale

    coarse = Index(rounded(index.q), index.w, rounded(index.k))
    got, want = np.asarray(rule(index, 0, NONE, 4, None)), exact_keys(coarse, 4)
    assert np.mean(np.all(got == want, -1)) > 0.95  # the others are ties up to the last bits
    assert np.any(got != exact_keys(index, 4))


@functools.cache
def weights():
    return glm5.init_params(CFG, jax.random.key(5))


def rows(b=2, t=24):
    return jax.random.randint(jax.random.key(1), (b, t), 0, CFG.vocab_size)


@pytest.mark.slow
def test_exact_rule_equals_forward_bitwise():
    layers = glm5.unstack(weights(), CFG)
    out = train(layers, rows(), CFG, exact, KEYS[0])
    model = jax.jit(lambda p, x: glm5.forward(p, x, CFG).logits)(layers, rows())
    np.testing.assert_array_equal(out.logits, model)
    again = train(layers, rows(), CFG, exact, KEYS[1])
    np.testing.assert_array_equal(out.logits, again.logits)


@pytest.mark.slow
def test_rollout_equals_training_row():
    layers = glm5.unstack(weights(), CFG)
    full = train(layers, rows(), CFG, exact, KEYS[0])
    rolled = rollout(layers, rows(), CFG, exact, KEYS[0], 32)
    np.testing.assert_array_equal(full.topk, rolled.topk)
    np.testing.assert_allclose(full.logits, rolled.logits, atol=2e-5)
    other = train(layers, rows(), CFG, lambda *args: exact(*args) * 0, KEYS[0])
    assert np.abs(other.logits - full.logits).max() > 1e-3  # the selection decides


def test_counts_differences_only_where_keys_are_omitted():
    one = np.zeros((1, 1, 6, 2), int)
    one[..., 1] = 1
    other = one.copy()
    other[0, 0, 0] = 9  # sees one key: nothing to select
    other[0, 0, 3] = (1, 4)
    assert topk_determinism.differing_share(one, other) == 0.25
    assert topk_determinism.shared_keys(other, one) == 0.875
    assert topk_determinism.shared_keys(one, one) == 1


@pytest.mark.slow
def test_compares_rules_on_trained_weights(tmp_path, monkeypatch):
    """Reads a folder with the weights and the tokenizer of a model, for two rules."""
    monkeypatch.setattr(retriever, "CURRICULUM", ((36, 1),))
    setup = dataclasses.replace(topk_determinism.get_config(), top_k=4, capacity=48, rows=3)
    trial = topk_determinism.arm(setup, tmp_path).trial(seed=1)
    cfg = trial.stages[-1].model
    Tokenizer.load(retriever.tokenizer(tmp_path)).save(tmp_path / "run" / "tokenizer")
    params = glm5.init_params(cfg, jax.random.key(0))
    monkeypatch.setattr(store, "load_params", lambda folder, abstract: params)
    few = {"exact": (exact, exact), "bad": (exact, lambda *args: exact(*args) * 0)}
    monkeypatch.setattr(topk_determinism, "RULES", few)
    row = topk_determinism.measure(setup, trial, tmp_path / "run")
    good, bad = row["rules"]["exact"], row["rules"]["bad"]
    assert good["twice"] == good["rolled"] == good["twice_logp"] == 0
    assert good["held"] == 1 and good["max_logp"] < 1e-4 and good["clipped"] == 0
    assert bad["rolled"] > 0.9 and bad["held"] < 0.5 and bad["max_logp"] > 1e-2
    assert len(good["quantiles"]) == 21 and good["quantiles"][-1] == good["max_logp"]
    assert {*row["tied"]} == {"float32", "bfloat16"}


def fake_row(exact_logp=1e-7, twice=0.0):
    def rule(mean, rolled, twice):
        return {
            "twice": twice,
            "rolled": rolled,
            "held": 1 - rolled,
            "twice_logp": twice,
            "mean_logp": mean,
            "max_logp": 10 * mean,
            "clipped": 0.0,
            "solved": 0.9,
            "quantiles": [mean * i for i in range(21)],
        }

    rules = {"exact": rule(exact_logp, 0.0, twice), "random ties": rule(1e-2, 0.5, 0.4)}
    tied = {"float32": 0.1, "bfloat16": 0.3}
    return [{"rules": rules, "tied": tied} for _ in range(3)]


@pytest.mark.parametrize(
    ("fields", "first", "second"),
    [
        ({}, "bitwise the same log-probabilities", "below 1e-06: met"),
        ({"exact_logp": 1e-5}, "bitwise the same", "below 1e-06: not met"),
        ({"twice": 1e-3}, "they differ: not met", "below 1e-06: met"),
    ],
)
def test_verdicts_follow_rows(fields, first, second):
    result = topk_determinism.finding(topk_determinism.get_config(), fake_row(**fields), "command")
    assert first in result.verdicts[0] and result.verdicts[1].endswith(second)
    assert "random ties: 50.00% of the sets differ" in result.verdicts[2]
    assert "10.00% ± 0.00%" in result.verdicts[3] and "30.00%" in result.verdicts[3]
    sets, logs = result.tables
    assert (
        [row[0] for row in sets.rows] == [row[0] for row in logs.rows] == ["exact", "random ties"]
    )


@pytest.mark.parametrize("variant", ["tiny", "small"])
def test_model_becomes_sparse_after_indexer_warm_up(variant, tmp_path):
    setup = topk_determinism.get_config(variant)
    stages = topk_determinism.arm(setup, tmp_path).stages
    assert [s.model.attention for s in stages] == ["dense"] * (len(stages) - 1) + ["sparse"]
    assert [s.model.index_topk for s in stages[-2:]] == [setup.top_k] * 2
    assert stages[-2].may_differ == ("indexer",) and stages[-2].optimizer.frozen
    assert not stages[-1].optimizer.frozen
    assert stages[-1].data == stages[-2].data
    assert stages[-1].data.sequence_length < setup.capacity
    assert setup.capacity <= stages[-1].model.max_position_embeddings
