"""Similar documents are found and interleaved; nothing is lost, and the order within each stays."""

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


def _records():
    """Records whose tokens tell where they come from: 100 * record + position."""
    return [plain_record(100 * number + np.arange(size)) for number, size in enumerate(LENGTHS)]


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 100])
def test_weaving_keeps_every_token_with_its_streams_and_the_order_within_each_record(chunk):
    woven = interleave_records(_records(), chunk)
    for number, record in enumerate(_records()):
        mine = woven.token_ids // 100 == number
        for name, stream in record.streams().items():
            np.testing.assert_array_equal(woven.streams()[name][mine], stream)
    assert len(woven) == sum(LENGTHS)


def test_chunks_take_turns_until_their_records_end():
    woven = interleave_records(_records(), 3)
    runs = [(int(n), len(list(run))) for n, run in itertools.groupby(woven.token_ids // 100)]
    want = [(0, 3), (1, 3), (2, 1), (3, 3), (0, 2), (1, 3), (3, 3), (1, 3), (3, 1), (1, 3)]
    assert runs == want


def test_the_first_token_of_a_record_is_not_trained_on_but_that_of_a_later_chunk_is():
    woven = interleave_records(_records(), 3)
    np.testing.assert_array_equal(woven.loss_mask, woven.token_ids % 100 > 0)


def test_records_with_different_streams_are_refused():
    other = TokenRecord(token_ids=[1, 2], loss_mask=[0, 1])
    with pytest.raises(ValueError, match="records to interleave have streams .*'ce_weight'.* fill"):
        interleave_records([_records()[0], other], 2)


def _words(*numbers):
    return " ".join(f"word{number}" for number in numbers)


def _group(texts, config):
    return group_similar([sketch(text, config) for text in texts], list(map(len, texts)), config)


@pytest.mark.parametrize("shingle", [1, 2])
def test_the_estimate_is_near_the_jaccard_index(shingle):
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


def test_a_sketch_knows_words_alone_and_each_once():
    config = InterleaveConfig()
    np.testing.assert_array_equal(
        sketch("To be, or NOT to be!", config), sketch("be not\nor to", config)
    )
    assert (sketch("?!", config) == EMPTY).all()
    assert similarity(sketch("", config), sketch("", config)) == 0
    ordered = InterleaveConfig(shingle=2)
    assert (sketch("a b c", ordered) != sketch("c b a", ordered)).any()


def test_a_hash_never_moves_since_positions_in_the_data_refer_to_groups():
    def splitmix(state):  # the published generator; its first number from state 0 is known
        z = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    assert splitmix(0) == 0xE220A8397B1DCDAF
    crc = [zlib.crc32(word) for word in (b"two", b"words")]
    for config, least in (
        (InterleaveConfig(bins=1), min(map(splitmix, crc))),
        (InterleaveConfig(bins=1, shingle=2), splitmix(splitmix(crc[0]) ^ crc[1])),
    ):
        assert int(sketch("Two words", config)[0]) == least


def test_groups_are_of_the_most_similar_and_hold_every_document_once():
    subjects = [range(0, 60), range(100, 160), range(200, 260)]
    texts = []
    for number in range(12):  # 0, 3, 6, 9 on the first subject, and so on
        subject = subjects[number % 3]
        texts.append(_words(*subject, *range(1000 * number + 1000, 1000 * number + 1020)))
    texts.insert(5, _words(*range(50_000, 50_050)))  # like none
    config = InterleaveConfig(documents=3)
    groups = _group(texts, config)
    assert sorted(itertools.chain(*groups)) == list(range(13))
    renumbered = [[n - (n > 5) for n in members] for members in groups if members != [5]]
    assert [5] in groups and max(map(len, groups)) == 3
    assert all(len({n % 3 for n in members}) == 1 for members in renumbered)


def test_the_closest_comes_first_and_ties_go_to_the_lower_number():
    base = list(range(100))
    texts = [_words(*base), _words(*base[:60]), _words(*base[:90]), _words(*base[:90])]
    config = InterleaveConfig(documents=3, min_similarity=0.01)
    assert _group(texts, config) == [[0, 2, 3], [1]]


def test_a_group_takes_what_still_fits_and_a_document_may_exceed_it_alone():
    base = list(range(100))
    texts = [_words(*base), _words(*base[:90]), _words(*base[:60]), _words(*base[:50])]
    size = [len(text) for text in texts]
    for characters, want in (
        (size[0] + size[1] + size[3], [[0, 1, 3], [2]]),  # 2 is closer than 3 and too long
        (size[0] + size[1] + size[3] - 1, [[0, 1], [2, 3]]),
        (1, [[0], [1], [2], [3]]),
        (None, [[0, 1, 2, 3]]),
    ):
        assert _group(texts, InterleaveConfig(characters=characters)) == want


def test_what_all_documents_share_is_not_looked_up_but_counts(monkeypatch):
    monkeypatch.setattr(interleave, "MAX_SHARED", 3)
    config = InterleaveConfig(documents=2)
    texts = [
        _words(*range(50), *range(1000 + 30 * (i // 2), 1030 + 30 * (i // 2))) for i in range(8)
    ]
    assert _group(texts, config) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert _group([_words(*range(50))] * 8, config) == [[i] for i in range(8)]
    assert _group([], config) == []


def test_interleaved_documents_are_groups_of_the_chosen_ones():
    texts = [_words(*range(40)), "other", _words(*range(41)), _words(*range(39))]
    documents = [Document.of(text) for text in texts]
    source = Interleaved(documents, [0, 1, 3], InterleaveConfig(chunk=7))
    found = [source[i] for i in range(len(source))]
    assert [document.texts() for document in found] == [(texts[0], texts[3]), (texts[1],)]
    assert all(document.chunk == 7 for document in found)


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
def test_contradictory_configs_of_interleaving_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        InterleaveConfig(**arguments)
