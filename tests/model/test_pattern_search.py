"""Tests of the beam search over layers against brute force."""

import itertools

import numpy as np
import pytest

from glm5_jax.model.ablations.patterns import search

LAYERS = 8


def quadratic(seed):
    """Returns a score with interactions between layers, and the list of the scored patterns."""
    rng = np.random.default_rng(seed)
    single, pairs = rng.standard_normal(LAYERS), rng.standard_normal((LAYERS, LAYERS))
    requested = []

    def score(params, pattern):
        requested.append(pattern)
        x = np.array([kind == "window" for kind in pattern], float)
        return params * (single @ x + x @ pairs @ x)

    return score, requested


def brute_force(score, num_converted):
    every = itertools.combinations(range(LAYERS), num_converted)
    patterns = [tuple("window" if i in at else "full" for i in range(LAYERS)) for at in every]
    return max(patterns, key=lambda pattern: score(1.0, pattern))


@pytest.mark.parametrize("seed", range(6))
def test_full_width_beam_equals_brute_force(seed):
    score, requested = quadratic(seed)
    result = search(1.0, LAYERS, score, beam=28, num_converted=4)
    assert len(requested) == len(set(requested)) == len(result.scores) == 28 + 70
    assert result.pattern == brute_force(score, 4)
    assert result.score == result.scores[result.pattern] == score(1.0, result.pattern)


def test_wider_beam_beats_greedy_search():
    """Layers 0 and 1 are the best pair, but layers 2 to 5 are better than any four with these."""
    worth = {(0, 1): 5.0, (2, 3): 4.0, (2, 3, 4, 5): 20.0}

    def score(_, pattern):
        return worth.get(tuple(i for i, kind in enumerate(pattern) if kind == "window"), 0.0)

    best = ("full",) * 2 + ("window",) * 4 + ("full",) * 2
    assert search(None, LAYERS, score, beam=2).pattern == best
    assert search(None, LAYERS, score, beam=1).score == 0


def test_passes_model_to_score():
    score, _ = quadratic(0)
    best, worst = (search(p, LAYERS, score, beam=28).pattern for p in (1.0, -1.0))
    assert best != worst and brute_force(lambda _, pattern: score(-1.0, pattern), 4) == worst


def test_breaks_ties_by_layer_order():
    result = search(None, 6, lambda *_: 0.0, kind="simple_gdn", num_converted=5, beam=3)
    assert result.pattern == ("simple_gdn",) * 5 + ("full",)
    sizes = {sum(kind == "simple_gdn" for kind in pattern) for pattern in result.scores}
    assert sizes == {2, 4, 5}


def test_converts_half_of_layers_two_per_step():
    """The paper converts half of 40 layers in about 10 steps."""
    seen = []
    search(None, 12, lambda _, pattern: seen.append(pattern.count("window")) or 0.0, beam=1)
    assert sorted(set(seen)) == [2, 4, 6] and seen[: seen.count(2)] == [2] * 66


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_converted=0), "num_converted is 0; choose 1 to 8"),
        (dict(num_converted=9), "num_converted is 9"),
        (dict(beam=0), "beam is 0 and per_step 2"),
        (dict(per_step=0), "per_step 0"),
        (dict(kind="full"), "kind is 'full'"),
        (dict(kind="swa"), "kind is 'swa'"),
        (dict(score=lambda *_: float("nan")), "score is nan for"),
    ],
)
def test_search_rejects_invalid_arguments(changes, message):
    with pytest.raises(ValueError, match=message):
        search(None, LAYERS, **({"score": lambda *_: 0.0} | changes))
