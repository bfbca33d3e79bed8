"""The beam search over layers: exact where brute force can check it, and never twice the same pattern."""

import itertools

import numpy as np
import pytest

from glm5_jax.model.ablations.patterns import search

LAYERS = 8


def quadratic(seed):
    """A score with interactions between layers, and the log of the patterns that it was asked for."""
    rng = np.random.default_rng(seed)
    alone, pairs = rng.standard_normal(LAYERS), rng.standard_normal((LAYERS, LAYERS))
    asked = []

    def score(params, pattern):
        asked.append(pattern)
        x = np.array([kind == "window" for kind in pattern], float)
        return params * (alone @ x + x @ pairs @ x)

    return score, asked


def brute_force(score, num_converted):
    every = itertools.combinations(range(LAYERS), num_converted)
    patterns = [tuple("window" if i in at else "full" for i in range(LAYERS)) for at in every]
    return max(patterns, key=lambda pattern: score(1.0, pattern))


@pytest.mark.parametrize("seed", range(6))
def test_a_beam_as_wide_as_a_step_is_brute_force(seed):
    score, asked = quadratic(seed)
    found = search(1.0, LAYERS, score, beam=28, num_converted=4)
    assert len(asked) == len(set(asked)) == len(found.scores) == 28 + 70
    assert found.pattern == brute_force(score, 4)
    assert found.score == found.scores[found.pattern] == score(1.0, found.pattern)


def test_a_wider_beam_finds_what_a_greedy_search_misses():
    """Layers 0 and 1 are the best two, and 2 to 5 together better than any four with these."""
    worth = {(0, 1): 5.0, (2, 3): 4.0, (2, 3, 4, 5): 20.0}

    def score(_, pattern):
        return worth.get(tuple(i for i, kind in enumerate(pattern) if kind == "window"), 0.0)

    best = ("full",) * 2 + ("window",) * 4 + ("full",) * 2
    assert search(None, LAYERS, score, beam=2).pattern == best
    assert search(None, LAYERS, score, beam=1).score == 0


def test_the_model_is_handed_to_the_score():
    score, _ = quadratic(0)
    best, worst = (search(p, LAYERS, score, beam=28).pattern for p in (1.0, -1.0))
    assert best != worst and brute_force(lambda _, pattern: score(-1.0, pattern), 4) == worst


def test_equal_scores_go_to_the_first_layers_and_an_odd_number_ends_with_one():
    found = search(None, 6, lambda *_: 0.0, kind="simple_gdn", num_converted=5, beam=3)
    assert found.pattern == ("simple_gdn",) * 5 + ("full",)
    sizes = {sum(kind == "simple_gdn" for kind in pattern) for pattern in found.scores}
    assert sizes == {2, 4, 5}


def test_half_of_the_layers_by_default_and_two_a_step():
    """As the paper's 40 layers in about 10 steps."""
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
def test_what_cannot_be_searched_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        search(None, LAYERS, **({"score": lambda *_: 0.0} | changes))
