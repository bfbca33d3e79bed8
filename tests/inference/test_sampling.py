"""Drawing tokens: distributions against NumPy's, independence of the batch, and values that cannot be."""

import numpy as np
import pytest

from glm5_jax.inference.sampling import Sampling, draw, needs_truncation, param_rows

V = 12
LOGITS = np.random.default_rng(0).normal(0, 2, V).astype(np.float32)


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def oracle(logits, s: Sampling):
    """Probabilities of the tokens, one rule after the other, in float64."""
    logits = logits.astype(np.float64).copy()
    for token, bias in s.logit_bias.items():
        logits[token] += bias
    if s.temperature == 0:
        return np.eye(V)[np.argmax(logits)]
    p = softmax(logits / s.temperature)
    full = p.copy()
    if s.top_k:
        stays = sorted(range(V), key=lambda i: (-p[i], i))[: s.top_k]
        p = np.where(np.isin(np.arange(V), stays), p, 0)
        p /= p.sum()
    if s.top_p < 1:
        total, stays = 0.0, []
        for i in sorted(range(V), key=lambda i: (-p[i], i)):
            if total >= s.top_p:
                break
            stays.append(i)
            total += p[i]
        p = np.where(np.isin(np.arange(V), stays), p, 0)
    p = np.where(full >= s.min_p * full.max(), p, 0)
    return p / p.sum()


COUNT = 20_000  # of tokens drawn at once; one for all, since each count is another program
NUM_TOP = 4


def drawn(sampling, seed=0, logits=LOGITS):
    """Returns the tokens drawn at positions 0 to COUNT - 1, with the NUM_TOP likeliest of each."""
    row = param_rows([sampling] * COUNT, [seed] * COUNT, range(COUNT), 2)
    return draw(
        np.tile(logits, (COUNT, 1)), row, truncate=needs_truncation([sampling]), num_top=NUM_TOP
    )


CASES = [
    Sampling(),
    Sampling(temperature=0.5),
    Sampling(temperature=2.0),
    Sampling(top_k=3),
    Sampling(top_k=1),
    Sampling(top_p=0.6),
    Sampling(top_p=0.01),
    Sampling(min_p=0.2),
    Sampling(temperature=0.7, top_k=6, top_p=0.8, min_p=0.05),
    Sampling(logit_bias={2: 3.0, 5: -100.0}),
    Sampling(logit_bias={2: 3.0}, top_p=0.7),
]


@pytest.mark.parametrize("sampling", CASES, ids=str)
def test_draws_by_the_probabilities_that_the_rules_leave(sampling):
    """The log-probs returned are those before anything is cut."""
    got, expected = drawn(sampling), oracle(LOGITS, sampling)
    seen = np.bincount(got.tokens, minlength=V)
    assert not seen[expected == 0].any(), "a token that was cut off"
    likely = expected > 0
    chi2 = ((seen - COUNT * expected)[likely] ** 2 / (COUNT * expected)[likely]).sum()
    freedom = likely.sum() - 1
    assert chi2 <= freedom + 4 * np.sqrt(2 * freedom) + 1e-9

    logits = LOGITS.copy()
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    p = np.log(softmax(logits / sampling.temperature))
    np.testing.assert_allclose(got.logprobs, p[np.asarray(got.tokens)], atol=1e-5)
    best = np.argsort(-p)[:NUM_TOP]
    assert (np.asarray(got.top_ids) == best).all()
    np.testing.assert_allclose(got.top_logprobs, np.tile(p[best], (COUNT, 1)), atol=1e-5)


def test_greedy_takes_the_likeliest_and_tells_its_probability():
    found = drawn(Sampling(temperature=0))
    assert (np.asarray(found.tokens) == LOGITS.argmax()).all()
    np.testing.assert_allclose(found.logprobs, np.log(softmax(LOGITS)).max(), atol=1e-6)
    tied = np.zeros(V, np.float32)
    assert (np.asarray(drawn(Sampling(temperature=0), logits=tied).tokens) == 0).all()
    assert (np.asarray(drawn(Sampling(top_k=2), logits=tied).tokens) < 2).all()


def test_a_row_does_not_depend_on_its_batch():
    samplings = [CASES[i % 9] for i in range(16)]
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 2, (16, V)).astype(np.float32)
    seeds, positions = rng.integers(0, 2**62, 16), rng.integers(0, 1000, 16)
    together = draw(logits, param_rows(samplings, seeds, positions), num_top=2)
    for i in range(16):
        single = draw(
            logits[i : i + 1],
            param_rows(samplings[i : i + 1], seeds[i : i + 1], positions[i : i + 1]),
            truncate=needs_truncation(samplings[i : i + 1]),
            num_top=2,
        )
        for one, other in zip(single, together):
            np.testing.assert_array_equal(one[0], other[i])


def test_each_seed_and_position_draws_other_numbers():
    tokens = {
        (seed, first): tuple(
            np.asarray(drawn(Sampling(), seed).tokens)[first : first + 31].tolist()
        )
        for seed in (0, 1, 2**40)
        for first in (0, 1)
    }
    assert len(set(tokens.values())) == len(tokens)
    again = np.asarray(drawn(Sampling(), 1).tokens)[:31]
    assert tuple(again.tolist()) == tokens[1, 0]


def test_only_rules_that_cut_need_a_sort():
    assert not needs_truncation(
        [Sampling(), Sampling(temperature=0, top_k=5), Sampling(logit_bias={1: 2.0})]
    )
    assert needs_truncation([Sampling(), Sampling(top_p=0.9)]) and needs_truncation(
        [Sampling(min_p=0.1)]
    )


def test_names_values_out_of_range():
    values = {
        "max_tokens": [-1],
        "temperature": [-0.1, float("nan"), float("inf")],
        "top_p": [1.1, 0],
    }
    values |= {"top_k": [-1], "min_p": [2], "seed": [-1], "top_logprobs": [21]}
    for field, wrong in values.items():
        for value in wrong:
            with pytest.raises(ValueError, match=f"{field} is {value}"):
                Sampling(**{field: value})
    with pytest.raises(ValueError, match="must not be empty"):
        Sampling(stop=("a", ""))
    with pytest.raises(ValueError, match="logit_bias has 2 tokens, room is 1"):
        param_rows([Sampling(logit_bias={1: 1.0, 2: 1.0})], [0], [0], 1)
