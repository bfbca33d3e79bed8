"""Tests sampling: distributions against NumPy's, independence of the batch, and invalid values."""

import numpy as np
import pytest

from glm5_jax.inference.sampling import Sampling, draw, needs_truncation, param_rows

V = 12
LOGITS = np.random.default_rng(0).normal(0, 2, V).astype(np.float32)


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def oracle(logits, s: Sampling):
    """Returns probabilities of the tokens in float64, by applying one rule after the other."""
    logits = logits.astype(np.float64).copy()
    for token, bias in s.logit_bias.items():
        logits[token] += bias
    if s.temperature == 0:
        return np.eye(V)[np.argmax(logits)]
    p = softmax(logits / s.temperature)
    full = p.copy()
    if s.top_k:
        retained = sorted(range(V), key=lambda i: (-p[i], i))[: s.top_k]
        p = np.where(np.isin(np.arange(V), retained), p, 0)
        p /= p.sum()
    if s.top_p < 1:
        total, retained = 0.0, []
        for i in sorted(range(V), key=lambda i: (-p[i], i)):
            if total >= s.top_p:
                break
            retained.append(i)
            total += p[i]
        p = np.where(np.isin(np.arange(V), retained), p, 0)
    p = np.where(full >= s.min_p * full.max(), p, 0)
    return p / p.sum()


COUNT = (
    20_000  # tokens sampled at once; a single value, because each count compiles a separate program
)
NUM_TOP = 4


def sample_tokens(sampling, seed=0, logits=LOGITS):
    """Samples tokens at positions 0 to COUNT - 1, and returns them with the NUM_TOP likeliest of each."""
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
def test_samples_by_truncated_probabilities(sampling):
    """Log-probs are those before truncation."""
    got, expected = sample_tokens(sampling), oracle(LOGITS, sampling)
    seen = np.bincount(got.tokens, minlength=V)
    assert not seen[expected == 0].any(), "a truncated token was sampled"
    is_possible = expected > 0
    chi2 = ((seen - COUNT * expected)[is_possible] ** 2 / (COUNT * expected)[is_possible]).sum()
    freedom = is_possible.sum() - 1
    assert chi2 <= freedom + 4 * np.sqrt(2 * freedom) + 1e-9

    logits = LOGITS.copy()
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    p = np.log(softmax(logits / sampling.temperature))
    np.testing.assert_allclose(got.logprobs, p[np.asarray(got.tokens)], atol=1e-5)
    best = np.argsort(-p)[:NUM_TOP]
    assert (np.asarray(got.top_ids) == best).all()
    np.testing.assert_allclose(got.top_logprobs, np.tile(p[best], (COUNT, 1)), atol=1e-5)


def test_greedy_takes_likeliest_token():
    output = sample_tokens(Sampling(temperature=0))
    assert (np.asarray(output.tokens) == LOGITS.argmax()).all()
    np.testing.assert_allclose(output.logprobs, np.log(softmax(LOGITS)).max(), atol=1e-6)
    tied = np.zeros(V, np.float32)
    assert (np.asarray(sample_tokens(Sampling(temperature=0), logits=tied).tokens) == 0).all()
    assert (np.asarray(sample_tokens(Sampling(top_k=2), logits=tied).tokens) < 2).all()


def test_reports_all_tokens_of_small_vocabulary():
    row = param_rows([Sampling(temperature=0)], [0], [0], 2)
    output = draw(LOGITS[None], row, truncate=False, num_top=V + 8)
    assert output.top_ids[0].tolist() == np.argsort(-LOGITS).tolist()


def test_row_does_not_depend_on_batch():
    samplings = [CASES[i % 9] for i in range(16)]
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 2, (16, V)).astype(np.float32)
    seeds, positions = rng.integers(0, 2**62, 16), rng.integers(0, 1000, 16)
    batched = draw(logits, param_rows(samplings, seeds, positions), num_top=2)
    for i in range(16):
        single = draw(
            logits[i : i + 1],
            param_rows(samplings[i : i + 1], seeds[i : i + 1], positions[i : i + 1]),
            truncate=needs_truncation(samplings[i : i + 1]),
            num_top=2,
        )
        for one, other in zip(single, batched):
            np.testing.assert_array_equal(one[0], other[i])


def test_tokens_depend_on_seed_and_position():
    tokens = {
        (seed, first): tuple(
            np.asarray(sample_tokens(Sampling(), seed).tokens)[first : first + 31].tolist()
        )
        for seed in (0, 1, 2**40)
        for first in (0, 1)
    }
    assert len(set(tokens.values())) == len(tokens)
    repeated = np.asarray(sample_tokens(Sampling(), 1).tokens)[:31]
    assert tuple(repeated.tolist()) == tokens[1, 0]


def test_only_truncating_rules_need_sort():
    assert not needs_truncation(
        [Sampling(), Sampling(temperature=0, top_k=5), Sampling(logit_bias={1: 2.0})]
    )
    assert needs_truncation([Sampling(), Sampling(top_p=0.9)]) and needs_truncation(
        [Sampling(min_p=0.1)]
    )


def test_rejects_values_out_of_range():
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
