"""Bits per byte and the n-gram baselines, against hand-computed numbers and a plain oracle."""

import collections
import itertools
import math
import tracemalloc

import numpy as np
import pytest

from glm5_jax.data.packing import blank_row
from glm5_jax.evals import base
from glm5_jax.evals.base import (
    KneserNeyBigram,
    NgramCounts,
    Unigram,
    baseline_bits_per_byte,
    bits_per_byte,
    predicted_bytes,
)

SMALL = [[0, 1, 0, 1, 0, 2]]


def _documents(num_tokens=11, vocab_size=13):
    """Returns random documents with frequent and rare tokens; the last two ids never occur."""
    rng = np.random.default_rng(3)
    p = np.arange(1, num_tokens + 1) ** 2.0
    return [rng.choice(num_tokens, size=n, p=p / p.sum()) for n in (1, 2, 40, 25, 60)]


def test_converts_nats_to_bits_per_byte():
    assert bits_per_byte(8 * math.log(2), 4) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="num_bytes is 0"):
        bits_per_byte(1.0, 0)


def test_counts_bytes_of_predicted_tokens():
    batch = {"token_ids": np.array([[0, 1, 2, 2]]), "loss_mask": np.array([[0, 1, 1, 0.0]])}
    assert predicted_bytes(batch, np.array([100, 10, 1])) == 11


def test_kneser_ney_equals_hand_computation():
    """Bigrams 01 twice, 10 twice, 02 once: D = 1 / (1 + 2 * 2). Each of 0, 1, 2 follows one token,
    so n1 = 3, n2 = 0: the continuation discount is 1 and p_cont is uniform over the 4 ids."""
    model = KneserNeyBigram.fit(NgramCounts.of(SMALL, 4))
    assert model.discount == pytest.approx(0.2)
    rest = 0.2 * 2 / 3 * 0.25
    expected = {
        (0, 1): 1.8 / 3 + rest,
        (0, 2): 0.8 / 3 + rest,
        (0, 0): rest,
        (0, 3): rest,
        (1, 0): 1.8 / 2 + 0.2 / 2 * 0.25,
        (2, 1): 0.25,  # 2 only ends the document
        (3, 3): 0.25,
    }
    pairs = np.array(list(expected))
    got = np.exp(model.log_prob(pairs[:, 0], pairs[:, 1]))
    np.testing.assert_allclose(got, list(expected.values()), rtol=1e-12)


def test_unigram_equals_hand_computation():
    """Counts 3, 2, 1, 0: D = 1 / (1 + 2 * 1), three types over four ids."""
    model = Unigram.fit(NgramCounts.of(SMALL, 4))
    discount = 1 / 3
    spread = discount * 3 / 4
    expected = [(3 - discount + spread) / 6, (2 - discount + spread) / 6]
    expected += [(1 - discount + spread) / 6, spread / 6]
    tokens = np.arange(4)
    np.testing.assert_allclose(np.exp(model.log_prob(tokens, tokens)), expected, rtol=1e-12)


@pytest.mark.parametrize("chunk", [1, 30, 2**20])
@pytest.mark.parametrize("max_tokens", [0, 1, 2, 50, 68, 127, 128, 129])
def test_counts_first_tokens(monkeypatch, chunk, max_tokens):
    monkeypatch.setattr(base, "CHUNK", chunk)
    tokens, pairs, left = collections.Counter(), collections.Counter(), max_tokens
    for document in _documents():
        ids = document[:left].tolist()
        left -= len(ids)
        tokens.update(ids)
        pairs.update(itertools.pairwise(ids))
    counts = NgramCounts.of(iter(_documents()), 13, max_tokens)
    assert counts.tokens.tolist() == [tokens[w] for w in range(13)]
    assert [divmod(pair, 13) for pair in counts.pairs.tolist()] == sorted(pairs)
    assert counts.pair_counts.tolist() == [pairs[pair] for pair in sorted(pairs)]
    assert counts.is_truncated == (max_tokens < 128)


def test_reads_only_counted_text(monkeypatch):
    monkeypatch.setattr(base, "CHUNK", 2**8)
    documents = itertools.repeat([0, 1, 2])
    counts = NgramCounts.of(documents, 4, 3001)
    assert counts.tokens.tolist() == [1001, 1000, 1000, 0] and counts.is_truncated


def test_counting_memory_is_constant(monkeypatch):
    monkeypatch.setattr(base, "CHUNK", 2**14)
    document = list(range(1000))
    tracemalloc.start()
    try:
        NgramCounts.of(itertools.repeat(document, 500), 1000)
        assert tracemalloc.get_traced_memory()[1] < 2e6  # the ids take 4e6 bytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", [Unigram, KneserNeyBigram])
def test_probabilities_sum_to_one_after_every_token(kind):
    model = kind.fit(NgramCounts.of(_documents(), 13))
    tokens = np.arange(13)
    for previous in range(13):
        p = np.exp(model.log_prob(np.full(13, previous), tokens))
        assert (p > 0).all() and p.sum() == pytest.approx(1.0, abs=1e-12)


def _oracle(documents, vocab_size):
    """Returns Kneser-Ney with dictionaries, written from its definition."""
    pairs = collections.Counter()
    for document in documents:
        pairs.update(zip(document[:-1].tolist(), document[1:].tolist(), strict=True))

    def estimate(counts):
        once, twice = (sum(c == n for c in counts) for n in (1, 2))
        return once / (once + 2 * twice)

    followed = collections.Counter(w for _, w in pairs)
    discount, discount_cont = estimate(pairs.values()), estimate(followed.values())

    def p_cont(w):
        mass = discount_cont * len(followed)
        return (max(followed[w] - discount_cont, 0) + mass / vocab_size) / len(pairs)

    def p(u, w):
        after = {x: c for (v, x), c in pairs.items() if v == u}
        if not after:
            return p_cont(w)
        total = sum(after.values())
        direct = max(after.get(w, 0) - discount, 0) / total
        return direct + discount * len(after) / total * p_cont(w)

    return p


def test_kneser_ney_equals_its_definition():
    documents = _documents()
    model, oracle = KneserNeyBigram.fit(NgramCounts.of(documents, 13)), _oracle(documents, 13)
    previous, tokens = (grid.ravel() for grid in np.meshgrid(np.arange(13), np.arange(13)))
    expected = [oracle(u, w) for u, w in zip(previous, tokens, strict=True)]
    np.testing.assert_allclose(np.exp(model.log_prob(previous, tokens)), expected, rtol=1e-12)


def test_unseen_tokens_have_mass_without_singletons():
    model = Unigram.fit(NgramCounts.of([[0, 0, 1, 1]], 4))
    p = np.exp(model.log_prob(np.zeros(4, int), np.arange(4)))
    np.testing.assert_allclose(p, [1.75 / 4, 1.75 / 4, 0.25 / 4, 0.25 / 4])


def test_rejects_empty_counts():
    with pytest.raises(ValueError, match="no tokens to count"):
        Unigram.fit(NgramCounts.of([], 4))
    with pytest.raises(ValueError, match="no tokens to count"):
        KneserNeyBigram.fit(NgramCounts.of([[1], [2]], 4))


def test_scores_only_predicted_tokens():
    model = KneserNeyBigram.fit(NgramCounts.of(SMALL, 4))
    batch = {
        "token_ids": np.array([[0, 1, 0, 2], [3, 3, 0, 0]]),
        "loss_mask": np.array([[0, 1, 0, 1], [0, 0, 0, 0.0]], np.float32),
    }
    nll = -float(model.log_prob(np.array([0, 0]), np.array([1, 2])).sum())
    sizes = np.array([9, 3, 2, 9])
    expected = nll / math.log(2) / 5
    assert baseline_bits_per_byte(model, [batch], sizes) == pytest.approx(expected)
    assert baseline_bits_per_byte(model, [batch, blank_row(batch)], sizes) == pytest.approx(
        expected
    )


def test_bigram_beats_unigram_on_ordered_text():
    documents = [np.tile([0, 1, 2, 3], 30) for _ in range(3)]
    batch = {"token_ids": documents[0][None], "loss_mask": np.ones((1, 120), np.float32)}
    batch["loss_mask"][:, 0] = 0
    unigram, bigram = (
        baseline_bits_per_byte(kind.fit(NgramCounts.of(documents, 8)), [batch], np.ones(8, int))
        for kind in (Unigram, KneserNeyBigram)
    )
    assert unigram == pytest.approx(2.0, abs=0.05) and bigram < 0.1
