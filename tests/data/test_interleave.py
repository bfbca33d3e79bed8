"""Tests grouping and interleaving of similar documents: nothing is lost, and the order within each document stays."""

import itertools
import zlib

import numpy as np
import pytest

from glm5_jax.data import interleave
from glm5_jax.data.document import Document
from glm5_jax.data.interleave import (
    EMPTY,
    InterleaveConfig,
    Interleaved,
    group_similar,
    interleave_records,
    similarity,
    sketch,
)
from glm5_jax.data.record import TokenRecord, plain_record

LENGTHS = (5, 12, 1, 7)


def make_records():
    """Returns records whose tokens encode their source: 100 * record + position."""
    return [plain_record(100 * number + np.arange(size)) for number, size in enumerate(LENGTHS)]


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 100])
def test_interleaving_keeps_tokens_streams_and_order(chunk):
    interleaved = interleave_records(make_records(), chunk)
    for number, record in enumerate(make_records()):
        is_of_record = interleaved.token_ids // 100 == number
        for name, stream in record.streams().items():
            np.testing.assert_array_equal(interleaved.streams()[name][is_of_record], stream)
    assert len(interleaved) == sum(LENGTHS)


def test_alternates_chunks_until_records_end():
    interleaved = interleave_records(make_records(), 3)
    runs = [(int(n), len(list(run))) for n, run in itertools.groupby(interleaved.token_ids // 100)]
    want = [(0, 3), (1, 3), (2, 1), (3, 3), (0, 2), (1, 3), (3, 3), (1, 3), (3, 1), (1, 3)]
    assert runs == want


def test_masks_first_token_of_record_only():
    interleaved = interleave_records(make_records(), 3)
    np.testing.assert_array_equal(interleaved.loss_mask, interleaved.token_ids % 100 > 0)


def test_rejects_records_with_different_streams():
    other = TokenRecord(token_ids=[1, 2], loss_mask=[0, 1])
    with pytest.raises(ValueError, match="records to interleave have streams .*'ce_weight'.* fill"):
        interleave_records([make_records()[0], other], 2)


def make_words(*numbers):
    return " ".join(f"word{number}" for number in numbers)


def group_texts(texts, config):
    return group_similar([sketch(text, config) for text in texts], list(map(len, texts)), config)


@pytest.mark.parametrize("shingle", [1, 2])
def test_similarity_estimates_jaccard_index(shingle):
    config = InterleaveConfig(bins=1024, shingle=shingle)
    rng = np.random.default_rng(0)
    for share in (0.0, 0.2, 0.5, 0.9, 1.0):
        texts = [[f"w{i}" for i in rng.permutation(4000)] for _ in range(2)]
        cut = int(share * 4000)
        texts[1] = texts[0][:cut] + [f"v{i}" for i in range(4000 - cut)]
        sets = [
            {tuple(words[i : i + shingle]) for i in range(len(words) - shingle + 1)}
            for words in texts
        ]
        exact = len(sets[0] & sets[1]) / len(sets[0] | sets[1])
        a, b = (sketch(" ".join(words), config) for words in texts)
        assert abs(similarity(a, b) - exact) < 4 * 0.5 / np.sqrt(config.bins)
        assert share in (0.0, 1.0) or 0.05 < exact < 0.95


def test_sketch_depends_on_set_of_words():
    config = InterleaveConfig()
    np.testing.assert_array_equal(
        sketch("To be, or NOT to be!", config), sketch("be not\nor to", config)
    )
    assert (sketch("?!", config) == EMPTY).all()
    assert similarity(sketch("", config), sketch("", config)) == 0
    ordered = InterleaveConfig(shingle=2)
    assert (sketch("a b c", ordered) != sketch("c b a", ordered)).any()


def test_hash_is_fixed():
    """Saved positions in the data refer to groups, which the hash determines."""

    def splitmix(state):  # the published generator, checked by its first number from state 0
        z = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    assert splitmix(0) == 0xE220A8397B1DCDAF
    crc = [zlib.crc32(word) for word in (b"two", b"words")]
    for config, smallest in (
        (InterleaveConfig(bins=1), min(map(splitmix, crc))),
        (InterleaveConfig(bins=1, shingle=2), splitmix(splitmix(crc[0]) ^ crc[1])),
    ):
        assert int(sketch("Two words", config)[0]) == smallest


def test_groups_most_similar_documents_once_each():
    subjects = [range(0, 60), range(100, 160), range(200, 260)]
    texts = []
    for number in range(12):  # 0, 3, 6, 9 on the first subject, and so on
        subject = subjects[number % 3]
        texts.append(make_words(*subject, *range(1000 * number + 1000, 1000 * number + 1020)))
    texts.insert(5, make_words(*range(50_000, 50_050)))  # unlike the others
    config = InterleaveConfig(documents=3)
    groups = group_texts(texts, config)
    assert sorted(itertools.chain(*groups)) == list(range(13))
    renumbered = [[n - (n > 5) for n in members] for members in groups if members != [5]]
    assert [5] in groups and max(map(len, groups)) == 3
    assert all(len({n % 3 for n in members}) == 1 for members in renumbered)


def test_groups_closest_first_and_breaks_ties_by_index():
    base = list(range(100))
    texts = [
        make_words(*base),
        make_words(*base[:60]),
        make_words(*base[:90]),
        make_words(*base[:90]),
    ]
    config = InterleaveConfig(documents=3, min_similarity=0.01)
    assert group_texts(texts, config) == [[0, 2, 3], [1]]


def test_fills_groups_up_to_character_limit():
    base = list(range(100))
    texts = [
        make_words(*base),
        make_words(*base[:90]),
        make_words(*base[:60]),
        make_words(*base[:50]),
    ]
    size = [len(text) for text in texts]
    for characters, want in (
        (size[0] + size[1] + size[3], [[0, 1, 3], [2]]),  # 2 is closer than 3 and too long
        (size[0] + size[1] + size[3] - 1, [[0, 1], [2, 3]]),
        (1, [[0], [1], [2], [3]]),
        (None, [[0, 1, 2, 3]]),
    ):
        assert group_texts(texts, InterleaveConfig(characters=characters)) == want


def test_counts_shared_words_without_looking_them_up(monkeypatch):
    monkeypatch.setattr(interleave, "MAX_SHARED", 3)
    config = InterleaveConfig(documents=2)
    texts = [
        make_words(*range(50), *range(1000 + 30 * (i // 2), 1030 + 30 * (i // 2))) for i in range(8)
    ]
    assert group_texts(texts, config) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert group_texts([make_words(*range(50))] * 8, config) == [[i] for i in range(8)]
    assert group_texts([], config) == []


def test_interleaves_groups_of_selected_documents():
    texts = [make_words(*range(40)), "other", make_words(*range(41)), make_words(*range(39))]
    documents = [Document.of(text) for text in texts]
    source = Interleaved(documents, [0, 1, 3], InterleaveConfig(chunk=7))
    results = [source[i] for i in range(len(source))]
    assert [document.texts() for document in results] == [(texts[0], texts[3]), (texts[1],)]
    assert all(document.chunk == 7 for document in results)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"documents": 1}, "documents is 1; it must be at least 2"),
        ({"chunk": 0}, "chunk is 0"),
        ({"characters": 0}, "characters is 0; it must be positive, or None"),
        ({"shingle": 0}, "shingle is 0"),
        ({"bins": 0}, "bins is 0"),
        ({"min_similarity": 0.0}, r"min_similarity is 0.0; it must be in \(0, 1\]"),
        ({"min_similarity": float("nan")}, "min_similarity is nan"),
    ],
)
def test_rejects_contradictory_interleaving(arguments, message):
    with pytest.raises(ValueError, match=message):
        InterleaveConfig(**arguments)
