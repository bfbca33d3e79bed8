"""Tests the mixture: weights, seeds, epochs, hosts and the held-out split."""

import dataclasses
import itertools
import json

import grain
import numpy as np
import pytest

from glm5_jax.data.mixture import (
    DataConfig,
    document_ids,
    held_out_rows,
    open_training_sources,
    training_documents,
    training_rows,
)
from glm5_jax.data.sources import SourceConfig, open_source
from glm5_jax.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.default()


def _source(folder, name, documents, weight=1.0):
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return SourceConfig(kind="jsonl", path=str(file), weight=weight)


def _config(*sources, **arguments):
    defaults = {"sequence_length": 16, "num_threads": 0, "held_out_fraction": 0.0}
    defaults["shuffle_window"] = 0  # keeps the rows of a document in sequence
    return DataConfig(sources=sources, **defaults | arguments)


def _rows(config, count, **streams):
    rows = iter(
        training_rows(config, open_training_sources(config, TOKENIZER), TOKENIZER, **streams)
    )
    return list(itertools.islice(rows, count))


def _documents(rows):
    """Returns the complete documents in a stream of concat rows, in order."""
    text = TOKENIZER.decode(np.concatenate([row["token_ids"] for row in rows]))
    return text.split("<|endoftext|>")[:-1]


def test_visits_each_document_once_per_epoch(tmp_path):
    texts = [f"document {number}" for number in range(40)]
    documents = _documents(_rows(_config(_source(tmp_path, "a", texts)), 100))
    epochs = documents[:40], documents[40:80]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(texts)
    assert epochs[0] != epochs[1] and epochs[0] != texts


def test_orders_documents_by_seed_only(tmp_path):
    source = _source(tmp_path, "a", [f"document {number}" for number in range(40)])
    once, repeated, other = (_documents(_rows(_config(source, seed=s), 20)) for s in (1, 1, 2))
    assert once == repeated and once != other


def test_shards_divide_documents_of_epoch(tmp_path):
    texts = [f"document {number}" for number in range(42)]
    config = _config(_source(tmp_path, "a", texts))
    shards = [_documents(_rows(config, 60, shard=i, num_shards=3)) for i in range(3)]
    assert sorted(itertools.chain(*(shard[:14] for shard in shards))) == sorted(texts)
    assert sorted(itertools.chain(*(shard[14:28] for shard in shards))) == sorted(texts)
    with pytest.raises(ValueError, match="shard is 3, there are 3"):
        _rows(config, 1, shard=3, num_shards=3)


def test_mixes_rows_by_weight_at_any_document_length(tmp_path):
    long = _source(tmp_path, "long", ["long " * 100] * 50, weight=1.0)
    short = _source(tmp_path, "short", ["short"] * 50, weight=3.0)
    rows = _rows(_config(long, short), 80)
    is_short = ["short" in TOKENIZER.decode(row["token_ids"]) for row in rows]
    assert all(sum(is_short[start : start + 8]) == 6 for start in range(0, 80, 8))


def test_shuffles_rows_over_sliding_window(tmp_path):
    texts = [f"document {number} " + "word " * 200 for number in range(10)]
    source = _source(tmp_path, "a", texts)
    plain, shuffled = (
        [row["token_ids"].tobytes() for row in _rows(config, 128)]
        for config in (_config(source), _config(source, shuffle_window=32 * 16))
    )
    assert plain != shuffled
    for position, row in enumerate(shuffled[:96]):
        assert row in plain[max(0, position - 48) : position + 48]  # the first rows move further


def test_sees_documents_again_at_same_rate_at_every_row(tmp_path):
    """A model has adapted to documents that it saw lately. So a rate that drops somewhere is a step of the loss there."""
    texts = [" ".join([str(number)] * 30) for number in range(100, 300)]
    config = _config(_source(tmp_path, "a", texts), shuffle_window=128 * 16)
    rows = _rows(config, 64 + 512)
    words = [TOKENIZER.decode(row["token_ids"]).split() for row in rows]
    documents = [max(set(row), key=row.count) for row in words]
    is_seen = [documents[i] in documents[i - 64 : i] for i in range(64, len(rows))]
    rates = np.array(is_seen).reshape(4, 16, 8).mean((0, 2))  # by position in a window of 128 rows
    assert rates.min() > rates.mean() - 0.3, rates


def test_splits_documents_without_overlap_or_loss(tmp_path):
    texts = [f"document {number}" for number in range(300)]
    source = _source(tmp_path, "a", texts)
    config = _config(source, held_out_fraction=0.2)
    held_out = _documents(held_out_rows(config, source, TOKENIZER))
    assert 30 < len(held_out) < 90
    train = [TOKENIZER.decode(ids[:-1]) for ids in training_documents(config, source, TOKENIZER)]
    assert sorted(held_out + train) == sorted(texts)
    assert set(_documents(_rows(config, 600))) == set(train)


def test_holds_out_same_rows_for_every_seed(tmp_path):
    source = _source(tmp_path, "a", [f"document {number}" for number in range(100)])
    one, two = (
        list(held_out_rows(_config(source, held_out_fraction=0.3, seed=s), source, TOKENIZER))
        for s in (1, 2)
    )
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a["token_ids"], b["token_ids"])


def test_trains_end_of_document_token(tmp_path):
    assert document_ids("<|user|>", TOKENIZER) == [*TOKENIZER.encode("<|user|>"), 2012]
    (row,) = _rows(_config(_source(tmp_path, "a", ["x"]), sequence_length=2), 1)
    assert row["token_ids"].tolist()[1] == 2012 and row["loss_mask"].tolist() == [0, 1]


def test_rejects_split_without_documents(tmp_path):
    source = _source(tmp_path, "a", ["only one"])
    empty = _source(tmp_path, "empty", ["", ""])
    with pytest.raises(ValueError, match=r"a.jsonl' has no held-out document: 1 document"):
        held_out_rows(_config(source), source, TOKENIZER)
    message = r"empty.jsonl' has no training document: 2 document\(s\), all empty; give files with"
    with pytest.raises(ValueError, match=message):
        open_training_sources(_config(empty), TOKENIZER)
    with pytest.raises(ValueError, match="no training document"):
        open_training_sources(_config(source, held_out_fraction=1 - 1e-12), TOKENIZER)


def test_divides_single_text_file(tmp_path):
    paragraphs = [f"Paragraph {i}. " + "word " * 1000 for i in range(40)]
    (tmp_path / "my.md").write_text("\n\n".join(paragraphs))
    source = SourceConfig(kind="text", path=str(tmp_path / "my.md"))
    config = _config(source, held_out_fraction=0.3, sequence_length=512)
    texts = {
        is_training: "".join(TOKENIZER.decode(row["token_ids"]) for row in rows)
        for is_training, rows in (
            (False, held_out_rows(config, source, TOKENIZER)),
            (True, [{"token_ids": ids} for ids in training_documents(config, source, TOKENIZER)]),
        )
    }
    held_out, trained = (
        {i for i in range(40) if f"Paragraph {i}." in texts[k]} for k in (False, True)
    )
    assert held_out and trained and not held_out & trained and len(held_out | trained) == 40


def test_shipped_sources_have_both_splits():
    config = DataConfig()
    for name, source in open_training_sources(config, TOKENIZER).items():
        (source_config,) = [s for s in config.sources if s.name == name]
        assert len(source) == len(open_source(source_config))
        assert next(iter(held_out_rows(config, source_config, TOKENIZER)))["segment_ids"].all()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sources": ()}, "sources is empty"),
        ({"sources": (SourceConfig(kind="stdlib"),) * 2}, "two sources have one name"),
        ({"sequence_length": 1}, "sequence_length is 1"),
        ({"packing": "tight"}, "packing is 'tight'"),
        ({"held_out_fraction": 1.0}, r"held_out_fraction is 1.0; it must be in \[0, 1\)"),
        ({"num_shards": -1}, "num_shards is -1; it must be at least 0"),
        ({"num_threads": -1}, "num_threads is -1; it must be at least 0"),
        ({"open_rows": 0}, "open_rows is 0; it must be at least 1"),
    ],
)
def test_rejects_contradictory_config(changes, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**changes)


def test_packs_rows_ahead_with_several_threads(tmp_path):
    """A thread shuffles and packs rows while the device computes."""
    source = _source(tmp_path, "a", [f"document {number}" for number in range(4000)])
    config = _config(source, num_threads=2, shuffle_window=64 * 16, prefetch_documents=4)
    rows = iter(training_rows(config, open_training_sources(config, TOKENIZER), TOKENIZER))
    first = [next(rows)]
    state = rows.get_state()
    more = [next(rows) for _ in range(300)]
    expected = _rows(dataclasses.replace(config, num_threads=0), 301)
    for row, expected_row in zip(first + more, expected, strict=True):
        assert all(np.array_equal(row[name], expected_row[name]) for name in expected_row)
    rows.set_state(state)
    repeated = [next(rows) for _ in range(100)]
    rows.close()
    for row, expected_row in zip(repeated, more):
        assert all(np.array_equal(row[name], expected_row[name]) for name in expected_row)


def test_reads_rows_ahead_only_with_shuffle_window(tmp_path):
    source = _source(tmp_path, "a", ["document"] * 40)
    for options, is_ahead in (
        ({"num_threads": 2, "shuffle_window": 64}, True),
        ({"num_threads": 1, "shuffle_window": 64}, False),
        ({"num_threads": 2, "shuffle_window": 16}, False),
    ):
        config = _config(source, **options)
        rows = training_rows(config, open_training_sources(config, TOKENIZER), TOKENIZER)
        reads_ahead = isinstance(rows, grain.experimental.ThreadPrefetchIterDataset)
        assert reads_ahead == is_ahead, options
