"""The benchmark compares outputs under the same choices, and reports the gap of each choice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks.teacher_forced_choices import choice_differences, forced_choices
from glm5_jax.model import glm5
from tests.model import golden as goldens


@pytest.fixture(scope="module")
def golden():
    return goldens.load("hf_tiny_a")


@pytest.fixture(scope="module")
def traced_forward(golden):
    ones = np.ones_like(golden.tokens)
    positions = np.broadcast_to(np.arange(ones.shape[1], dtype=np.int32), ones.shape)
    return goldens.traced_forward(golden.cfg)(golden.params, golden.tokens, ones, positions)


def follow(golden, keys, experts):
    params = glm5.unstack(golden.params, golden.cfg)
    with forced_choices(keys, experts) as apart:
        forward = jax.jit(lambda p, x: glm5.forward(p, x, golden.cfg).logits)
        logits = forward(params, golden.tokens)
        jax.effects_barrier()
    return np.asarray(logits), apart


def chosen(traced_forward):
    inside = traced_forward[1]
    return [k.copy() for k in inside["topk"]], [r.expert_ids.copy() for r in inside["routing"]]


@pytest.mark.slow
def test_traced_choices_keep_logits(golden, traced_forward):
    logits, apart = follow(golden, *chosen(traced_forward))
    np.testing.assert_allclose(logits, traced_forward[0].logits, atol=1e-5)
    assert {a.count for layers in apart.values() for a in layers} == {0}


@pytest.mark.slow
def test_follows_another_key_and_reports_gap(golden, traced_forward):
    keys, experts = chosen(traced_forward)
    query, layer = golden.tokens.shape[1] - 1, 1
    row = keys[layer][0, query]
    scores = np.asarray(traced_forward[1]["index_scores"][layer][0, query])
    other = min(set(range(query + 1)) - set(row.tolist()))
    dropped = row[0]
    keys[layer][0, query] = np.sort(np.where(row == dropped, other, row))
    logits, apart = follow(golden, keys, experts)
    assert np.abs(logits - traced_forward[0].logits)[0, query].max() > 1e-4
    assert [a.count for a in apart["keys"]][: layer + 1] == [0, 1]
    visible = traced_forward[1]["index_scores"][layer]
    picked = np.where(keys[layer] < 0, 0, keys[layer])
    largest = np.abs(np.take_along_axis(visible, picked, -1)).max()
    gap = (scores[dropped] - scores[other]) / max(largest, abs(scores[dropped]))
    assert apart["keys"][layer].gap == pytest.approx(gap, rel=1e-3)


@pytest.mark.slow
def test_follows_another_expert(golden, traced_forward):
    keys, experts = chosen(traced_forward)
    unused = min(set(range(golden.cfg.n_routed_experts)) - set(experts[0][-1].tolist()))
    experts[0][-1, 0] = unused
    logits, apart = follow(golden, keys, experts)
    assert np.abs(logits - traced_forward[0].logits)[-1, -1].max() > 1e-4
    assert apart["experts"][0].count == 1 and apart["experts"][0].gap > 0


def test_gap_is_between_best_omitted_and_worst_chosen():
    scores = jnp.array([5.0, 4, 3, -8, 1])
    count, gap, largest = choice_differences(scores, jnp.array([0, 1, 2]), jnp.array([0, 3, 4]))
    assert (int(count), float(gap), float(largest)) == (2, 12, 8)
    count, gap, _ = choice_differences(scores, jnp.array([1, 2, -1]), jnp.array([2, 1, -1]))
    assert (int(count), float(gap)) == (0, 0)
