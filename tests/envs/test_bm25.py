"""BM25 next to its formula, and its words."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from glm5_jax.envs.search.bm25 import Bm25, Bm25Config, words
from tests.oracles.bm25 import bm25

WORD = st.sampled_from("a bb ccc dd e".split())
TEXTS = st.lists(st.lists(WORD, min_size=1, max_size=12), min_size=1, max_size=8)


@given(TEXTS, st.lists(WORD, max_size=4), st.floats(0, 3), st.floats(0, 1))
def test_scores_equal_formula(texts, query, k1, b):
    index = Bm25([" ".join(text) for text in texts], Bm25Config(k1=k1, b=b))
    scores = index.scores(" ".join(query))
    np.testing.assert_allclose(scores, bm25(texts, query, k1, b), rtol=1e-12, atol=0)
    # The best first, of equal ones the first; none without a word in common.
    assert (
        index.search(" ".join(query), 5)
        == sorted(
            (i for i, text in enumerate(texts) if {*text} & {*query}), key=lambda i: (-scores[i], i)
        )[:5]
    )


def test_every_part_of_formula_counts():
    index = Bm25(["a x", "a a", "b", "a b c d e f g h"])
    by_hand = [
        np.log(1 + 1.5 / 3.5) * f * 2.2 / (f + 1.2 * (0.25 + 0.75 * n / 3.25))
        for f, n in ((1, 2), (2, 2), (1, 8))
    ]
    assert index.scores("a") == pytest.approx([by_hand[0], by_hand[1], 0, by_hand[2]], rel=1e-12)
    assert index.scores("a a") == pytest.approx(2 * index.scores("a"), rel=1e-12)
    assert index.search("a", 9) == [1, 0, 3] and index.search("a", 1) == [1]


def test_ranks_equal_passages_in_order():
    index = Bm25(["same words", "other", "same words", "same words"])
    assert index.search("words same", 3) == [0, 2, 3]
    assert index.search("none of it", 3) == index.search("", 3) == []


def test_words_have_no_case_or_accents():
    assert words("Akinoshū Kenji's 3.5% — ÇA, straße") == [
        "akinoshu",
        "kenji",
        "s",
        "3",
        "5",
        "ca",
        "strasse",
    ]
    assert Bm25(["Akinoshū Kenji", "kenya"]).search("AKINOSHU", 2) == [0]


def test_handles_empty_corpus_and_rejects_invalid_numbers():
    assert Bm25([]).search("a", 3) == [] and Bm25(["", "..."]).search("a", 3) == []
    for k1, b in ((-1, 0.5), (1, 1.5), (1, -0.1), (float("inf"), 0.5), (float("nan"), 0.5)):
        with pytest.raises(ValueError, match=f"k1 is {k1} and b {b}"):
            Bm25Config(k1=k1, b=b)
