"""Tests long documents, interleaving and tasks in a mixture: split, resumption, hosts and shares."""

import collections
import dataclasses
import itertools
import json
import time

import numpy as np
import pytest

from glm5_jax.data import mixture
from glm5_jax.data.interleave import InterleaveConfig
from glm5_jax.data.loader import Loader, held_out_batches
from glm5_jax.data.long_context import (
    STAGES,
    MidTrainingShares,
    TaskSourceConfig,
    mid_training_sources,
)
from glm5_jax.data.mixture import (
    DataConfig,
    held_out_rows,
    open_training_sources,
    training_documents,
    training_rows,
)
from glm5_jax.data.sources import SourceConfig, is_held_out, open_source
from glm5_jax.data.synthetic import LongContextTaskConfig
from glm5_jax.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.default()
FRACTION = 0.3
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Writes 30 repositories of 1 to 6 files, and a book of paragraphs as long as a passage."""
    root, rng = tmp_path_factory.mktemp("texts"), np.random.default_rng(0)
    for number in range(30):
        (root / f"r{number}").mkdir()
        for file in range(1 + number % 6):
            words = rng.integers(0, 40, 20) + 40 * (number % 3)
            text = f"<{number}.{file}> " + " ".join(f"w{word}" for word in words)
            (root / f"r{number}" / f"{file}.py").write_text(text)
    book = "\n\n".join(f"<p{number}> " + "x" * 4000 for number in range(40))
    (root / "book.txt").write_text(book)
    return root


def _sources(folder):
    files = str(folder / "r*" / "*.py")
    interleaving = InterleaveConfig(documents=3, chunk=16, min_similarity=0.05)
    haystack = SourceConfig(kind="passages", path=str(folder / "book.txt"))
    needle = LongContextTaskConfig(length=128, size=50, source=haystack)
    return {
        "file": SourceConfig(kind="text", path=files),
        "repository": SourceConfig(kind="repositories", path=files, min_characters=200),
        "book": SourceConfig(kind="books", path=str(folder / "*.txt")),
        "interleaved": SourceConfig(kind="text", path=files, interleave=interleaving),
        "needle": TaskSourceConfig(tasks=needle),
        "mrcr": TaskSourceConfig(
            tasks=LongContextTaskConfig(
                kind="mrcr", length=128, surface="tokens", size=40, reply_tokens=4
            )
        ),
    }


def _config(*sources, **arguments):
    defaults = {"sequence_length": 128, "num_threads": 0, "held_out_fraction": FRACTION}
    defaults |= {"packing": "best_fit", "open_rows": 5, "shuffle_window": 0}
    return DataConfig(sources=sources, **defaults | arguments)


def _texts(config, source):
    """Returns the text of each training document, once, and of each held-out row."""
    rows = held_out_rows(config, source, TOKENIZER)
    held_out = [TOKENIZER.decode(row["token_ids"]) for row in rows]
    return [
        TOKENIZER.decode(ids) for ids in training_documents(config, source, TOKENIZER)
    ], held_out


def _units(folder):
    """Returns for each file and passage, by its mark, whether it is held out."""
    units = {}
    for kind, path in (("text", "r*/*.py"), ("passages", "book.txt")):
        source = open_source(SourceConfig(kind=kind, path=str(folder / path)))
        for text in (source[i] for i in range(len(source))):
            units[text[: text.index(">") + 1]] = is_held_out(text, FRACTION)
    return units


@pytest.mark.parametrize("name", ["file", "repository", "book", "interleaved", "needle"])
def test_splits_texts_equally_in_every_source(folder, name):
    units = _units(folder)
    assert 10 < sum(units.values()) < len(units) - 10
    source = _sources(folder)[name]
    train, held_out = _texts(_config(source), source)
    units_by_side = [
        {unit for unit in units if unit in "".join(texts)} for texts in (train, held_out)
    ]
    assert units_by_side[0] and units_by_side[1]
    assert not any(units[unit] for unit in units_by_side[0]) and all(
        units[unit] for unit in units_by_side[1]
    )
    if name in ("file", "book", "interleaved"):  # nothing is lost
        assert units_by_side[0] | units_by_side[1] == {
            u for u in units if ("p" in u) == (name == "book")
        }


def test_selects_documents_by_length(folder):
    files = str(folder / "r*" / "*.py")
    documents = open_source(SourceConfig(kind="text", path=files))
    sizes = sorted(len(documents[i]) for i in range(len(documents)))
    middle = sizes[len(sizes) // 2]
    for arguments, count in (
        ({"min_characters": middle}, sum(size >= middle for size in sizes)),
        ({"max_characters": middle}, sum(size < middle for size in sizes)),
        ({"min_characters": middle, "max_characters": middle + 1}, sizes.count(middle)),
    ):
        source = SourceConfig(kind="text", path=files, **arguments)
        config = _config(source, held_out_fraction=0.0)
        assert len(list(training_documents(config, source, TOKENIZER))) == count > 0
    # The length of a repository includes its held-out parts.
    source = _sources(folder)["repository"]
    config = _config(source)
    train, _ = _texts(config, source)
    unfiltered, _ = _texts(config, dataclasses.replace(source, min_characters=0))
    assert min(map(len, train)) < 200 and 0 < len(train) < len(unfiltered)
    with pytest.raises(ValueError, match=r"\[9999999:None\]' has no training document: 30 doc"):
        none = dataclasses.replace(source, min_characters=9_999_999)
        open_training_sources(_config(none), TOKENIZER)
    with pytest.raises(ValueError, match="none of 105 documents is that long"):
        none = dataclasses.replace(_sources(folder)["interleaved"], min_characters=9_999_999)
        open_training_sources(_config(none), TOKENIZER)


def test_interleaves_similar_documents_in_one_segment(folder):
    source = _sources(folder)["interleaved"]
    subjects, sizes, units = [], [], _units(folder)
    for text in _texts(_config(source), source)[0]:
        marks = [mark for mark in units if mark in text]
        subjects.append({int(mark[1:].split(".")[0]) % 3 for mark in marks})
        sizes.append(len(marks))
        assert text.count(END) == len(marks)
        # The first chunk of each document, with its mark, comes before the end of every document.
        assert max(map(text.index, marks)) < text.index(END)
    assert np.mean([len(subject) == 1 for subject in subjects]) > 0.9
    assert set(sizes) == {1, 2, 3}  # some members are held out


def test_packing_keeps_loss_mask_of_task(folder):
    source = _sources(folder)["mrcr"]
    config = _config(source, sequence_length=300)
    rows = iter(training_rows(config, open_training_sources(config, TOKENIZER), TOKENIZER))
    records = open_training_sources(config, TOKENIZER)[source.name]
    masks = {tuple(r.token_ids.tolist()): r.loss_mask for r in (records[i] for i in range(40))}
    for row in itertools.islice(rows, 20):
        assert row["segment_ids"].max() == 2 and (row["segment_ids"] == 0).sum() == 300 - 2 * 128
        for segment in (1, 2):
            inside = row["segment_ids"] == segment
            mask = masks[tuple(row["token_ids"][inside].tolist())]
            np.testing.assert_array_equal(row["loss_mask"][inside], mask)
            assert 0 < mask.sum() < 10


@pytest.mark.parametrize("name", ["interleaved", "repository", "needle"])
def test_shards_divide_items_of_two_epochs(folder, name):
    source = _sources(folder)[name]
    if name != "needle":
        source = dataclasses.replace(source, min_characters=0)
    # No document exceeds a row, and rows keep the order of their documents.
    config = _config(source, sequence_length=1500, open_rows=1, held_out_fraction=0.0)
    items = open_training_sources(config, TOKENIZER)
    count, seen, epoch = len(items[source.name]), collections.Counter(), collections.Counter()
    for stream in range(2):
        rows = training_rows(config, items, TOKENIZER, shard=stream, num_shards=2)
        documents = itertools.chain.from_iterable(map(_segments, rows))
        documents_of_shard = list(itertools.islice(documents, count))
        seen.update(documents_of_shard)
        epoch.update(documents_of_shard[: count // 2])
    expected = training_documents(config, source, TOKENIZER)
    assert seen == collections.Counter({tuple(ids): 2 for ids in expected}) and len(seen) == count
    assert set(epoch.values()) == {1}


def _segments(row):
    ids = row["segment_ids"]
    return [tuple(row["token_ids"][ids == n].tolist()) for n in range(1, ids.max() + 1)]


@pytest.mark.parametrize("num_threads", [0, 2])
def test_resumes_long_context_after_any_batch(folder, num_threads):
    names = ["repository", "interleaved", "needle", "mrcr"]
    sources = [_sources(folder)[name] for name in names]
    config = _config(*sources, num_threads=num_threads, shuffle_window=128 * 3, open_rows=2)
    loader = Loader(config, TOKENIZER)
    states, batches = [], []
    for size in (3, 2, 9):
        states.append(json.dumps(loader.state()))
        batches.append(loader.next(size))
    loader.close()
    resumed = Loader(config, TOKENIZER)
    for start, state in enumerate(states):
        resumed.restore(json.loads(state))
        assert json.dumps(resumed.state()) == state
        for batch in batches[start:]:
            repeated = resumed.next(len(batch["token_ids"]))
            for name in batch:
                np.testing.assert_array_equal(repeated[name], batch[name])
    resumed.close()


class _Counting:
    """Source that records which items are read."""

    def __init__(self, items):
        self._items, self.read = items, []

    @property
    def mean_tokens(self):
        return self._items.mean_tokens

    def __len__(self):
        return len(self._items)

    def __getitem__(self, index):
        self.read.append(index)
        return self._items[index]


@pytest.mark.parametrize("name, max_reads", [("file", 10), ("mrcr", 5)])
def test_limits_read_ahead_of_long_items(folder, name, max_reads, monkeypatch):
    monkeypatch.setattr(mixture, "READ_AHEAD", 500)  # characters; a file has about 90
    source = _sources(folder)[name]
    config = _config(source, num_threads=1, held_out_fraction=0.0, open_rows=1)
    items = _Counting(open_training_sources(config, TOKENIZER)[source.name])
    rows = iter(training_rows(config, {source.name: items}, TOKENIZER))
    items.read.clear()  # drops the reads of the length estimate
    next(rows)
    time.sleep(0.5)
    rows.close()
    assert 1 <= len(items.read) <= max_reads < config.prefetch_documents


def test_rejects_position_on_other_tasks(folder):
    source = _sources(folder)["mrcr"]
    loaders = [
        Loader(_config(dataclasses.replace(source, tasks=tasks)), TOKENIZER)
        for tasks in (
            source.tasks,
            dataclasses.replace(source.tasks, seed=1),
            dataclasses.replace(source.tasks, loss="all"),
            dataclasses.replace(source.tasks, size=41),
        )
    ]
    state = loaders[0].state()
    loaders[0].check(state)
    for other in loaders[1:]:
        with pytest.raises(ValueError, match="was saved with sources .*resume with the same data"):
            other.check(state)


def test_mixes_rows_of_tasks_by_weight(folder):
    files, tasks = _sources(folder)["file"], _sources(folder)["mrcr"]
    config = _config(dataclasses.replace(files, weight=3.0), dataclasses.replace(tasks, weight=1.0))
    rows = training_rows(config, open_training_sources(config, TOKENIZER), TOKENIZER)
    is_task = [row["loss_mask"].sum() < 10 for row in itertools.islice(rows, 80)]
    assert all(sum(is_task[start : start + 8]) == 2 for start in range(0, 80, 8))


def test_held_out_tasks_are_separate_and_repeatable(folder):
    for name in ("mrcr", "needle"):
        source = _sources(folder)[name]
        config = _config(source)
        first, second = (list(held_out_batches(config, source, TOKENIZER, 8)) for _ in range(2))
        for a, b in zip(first, second, strict=True):
            np.testing.assert_array_equal(a["token_ids"], b["token_ids"])
        held_out = {
            tuple(row.tolist()) for batch in first for row in batch["token_ids"] if row.any()
        }
        train = {tuple(ids) for ids in training_documents(config, source, TOKENIZER)}
        assert len(held_out) == source.tasks.size and not held_out & train
        with pytest.raises(ValueError, match="nothing is held out; raise held_out_fraction"):
            held_out_rows(_config(source, held_out_fraction=0.0), source, TOKENIZER)


def test_rejects_tasks_without_room_or_text(folder):
    source = _sources(folder)["needle"]
    for changes in ({"packing": "concat"}, {"sequence_length": 127}):
        with pytest.raises(
            ValueError, match="split samples of source 'needle:text:128', which have up to 128 tok"
        ):
            _config(source, **changes)
    with pytest.raises(ValueError, match="two sources have one name"):
        _config(source, source)
    with pytest.raises(ValueError, match="weight of source 'needle:text:128' is 0"):
        dataclasses.replace(source, weight=0)
    (folder / "one.md").write_text("a single text")
    tasks = dataclasses.replace(
        source.tasks, source=SourceConfig(kind="text", path=str(folder / "one.md"))
    )
    config = _config(dataclasses.replace(source, tasks=tasks), held_out_fraction=1 - 1e-12)
    with pytest.raises(ValueError, match="one.md' has no training document: 1 doc"):
        open_training_sources(config, TOKENIZER)


@pytest.mark.parametrize("length", STAGES)
def test_stages_follow_shares_of_paper(length):
    shares = STAGES[length]
    short = (SourceConfig(kind="shakespeare", weight=3.0), SourceConfig(kind="stdlib"))
    long = (SourceConfig(kind="shakespeare_book"), SourceConfig(kind="stdlib_packages"))
    sources = mid_training_sources(short, long, shares, length)
    assert sum(source.weight for source in sources) == pytest.approx(1)
    by_use = collections.Counter()
    for source in sources:
        if isinstance(source, TaskSourceConfig):
            by_use["recall"] += source.weight
            assert source.tasks.kind == "mrcr" and source.length == length
        elif source.interleave:
            by_use["interleaved"] += source.weight
            assert source.interleave.characters == 4 * length
        else:
            by_use["long" if source.min_characters else "short"] += source.weight
            assert source.min_characters in (0, 2 * length)
            assert source.max_characters in (None, 2 * length)
    for use, weight in by_use.items():
        assert weight == pytest.approx(getattr(shares, use))
    assert sources[0].weight == pytest.approx(3 * sources[1].weight)
    # The paper up-samples long documents in later stages, and trains a little recall at 200K only.
    order = list(STAGES)
    later = [STAGES[other] for other in order[order.index(length) :]]
    assert all(other.long >= shares.long for other in later)
    assert (shares.recall > 0) == (length == 202_752) and shares.recall < 0.1
    DataConfig(sources=sources, sequence_length=length, packing="best_fit")


def test_stage_accepts_custom_interleaving_and_recall():
    short, tasks = (
        (SourceConfig(kind="stdlib"),),
        LongContextTaskConfig(kind="multi_key", length=256, surface="tokens"),
    )
    shares = MidTrainingShares(long=0.5, interleaved=0.0, recall=0.2)
    sources = mid_training_sources(short, short, shares, 256, characters_per_token=3, recall=tasks)
    assert [source.name for source in sources] == [
        "stdlib[0:384]",
        "stdlib[384:None]",
        "multi_key:tokens:256",
    ]
    assert [source.weight for source in sources] == pytest.approx([0.3, 0.5, 0.2])
    interleaving = InterleaveConfig(chunk=5)
    sources = mid_training_sources(short, short, STAGES[32_768], 256, interleave=interleaving)
    assert sources[-1].interleave == interleaving
    for shares in ((0.9, 0.1), (-0.1, 0.1), (0.5, 0.1, 0.5), (float("nan"), 0.1)):
        with pytest.raises(ValueError, match="the shares are long "):
            MidTrainingShares(*shares)
