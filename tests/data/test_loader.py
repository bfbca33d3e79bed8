"""Tests that the loader resumes exactly from a JSON position, at any batch size and number of hosts."""

import json
import pathlib

import numpy as np
import pytest

from glm5_jax.data.loader import Loader, held_out_batches
from glm5_jax.data.mixture import DataConfig
from glm5_jax.data.sources import SourceConfig
from glm5_jax.text.tokenizer import DEFAULT_PATH, Tokenizer

TOKENIZER = Tokenizer.default()
SIZES = [2, 1, 4, 8, 3, 9]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    configs = []
    for name, weight in (("a", 0.7), ("b", 0.3)):
        texts = [f"{name}{number} " + "word " * rng.integers(0, 90) for number in range(60)]
        file = folder / f"{name}.jsonl"
        file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
        configs.append(SourceConfig(kind="jsonl", path=str(file), weight=weight))
    return tuple(configs)


def config_of(sources, **arguments):
    defaults = {"sequence_length": 24, "held_out_fraction": 0.2, "shuffle_window": 24 * 9}
    return DataConfig(sources=sources, **defaults | arguments)


def assert_same_batch(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_batch_has_streams_of_train_step(sources):
    loader = Loader(config_of(sources), TOKENIZER)
    batch = loader.next(3)
    loader.close()
    assert {name: (stream.dtype, stream.shape) for name, stream in batch.items()} == {
        "token_ids": (np.int32, (3, 24)),
        "segment_ids": (np.int32, (3, 24)),
        "positions": (np.int32, (3, 24)),
        "loss_mask": (np.float32, (3, 24)),
        "ce_weight": (np.float32, (3, 24)),
    }
    with pytest.raises(ValueError, match="batch_size is 0"):
        loader.next(0)
    with pytest.raises(ValueError, match="closed"):
        loader.next(1)


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize("num_threads", [0, 2])
def test_resumes_after_any_batch(sources, packing, num_threads):
    config = config_of(sources, packing=packing, num_threads=num_threads, open_rows=7)
    loader = Loader(config, TOKENIZER)
    states, batches = [], []
    for size in SIZES:
        states.append(json.dumps(loader.state()))
        batches.append(loader.next(size))
    loader.close()
    for start, state in enumerate(states):
        resumed = Loader(config, TOKENIZER)
        resumed.next(start + 1)  # restoring works from any position
        resumed.restore(json.loads(state))
        assert json.dumps(resumed.state()) == state
        for size, batch in zip(SIZES[start:], batches[start:], strict=True):
            assert_same_batch(resumed.next(size), batch)
        resumed.close()


def test_state_is_snapshot(sources):
    loader = Loader(config_of(sources), TOKENIZER)
    state = loader.state()
    batch = loader.next(6)
    loader.restore(state)
    assert_same_batch(loader.next(6), batch)
    loader.close()


def test_changes_batch_size_without_losing_rows(sources):
    config = config_of(sources)
    ramped, constant = Loader(config, TOKENIZER), Loader(config, TOKENIZER)
    rows = [ramped.next(size)["token_ids"] for size in (1, 2, 3, 6)]
    np.testing.assert_array_equal(np.concatenate(rows), constant.next(12)["token_ids"])
    ramped.close()
    constant.close()


def test_threads_do_not_change_rows(sources):
    loaders = [Loader(config_of(sources, num_threads=n), TOKENIZER) for n in (0, 3)]
    for _ in range(5):
        assert_same_batch(*(loader.next(8) for loader in loaders))
    for loader in loaders:
        loader.close()


def test_rejects_position_on_other_data(sources):
    config = config_of(sources)
    loader = Loader(config, TOKENIZER)
    state = loader.state()
    loader.check(json.loads(json.dumps(state)))
    with pytest.raises(ValueError, match="was saved with shuffle None, this run has sliding"):
        loader.check({name: value for name, value in state.items() if name != "shuffle"})
    loader.close()
    others = {
        "sources": Loader(config_of(sources[:1]), TOKENIZER),
        "sequence_length": Loader(config_of(sources, sequence_length=32), TOKENIZER),
        "tokenizer": Loader(config, tokenizer_with_swapped_ids()),
    }
    for name, other in others.items():
        before = other.state()
        for take in (other.check, other.restore):
            with pytest.raises(
                ValueError, match=f"was saved with {name} .*resume with the same data"
            ):
                take(state)
        assert other.state() == before
        other.close()


def joined_batches(loaders, sizes):
    """Yields batches of all hosts together."""
    for size in sizes:
        parts = [loader.next(size // len(loaders)) for loader in loaders]
        yield {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def host_loaders(config, count):
    return [Loader(config, TOKENIZER, process_index=i, process_count=count) for i in range(count)]


def joined_position(loaders):
    """Returns the position that all hosts save, after a JSON round trip."""
    states = [json.loads(json.dumps(loader.state())) for loader in loaders]
    rows = {stream: row for state in states for stream, row in state["rows"].items()}
    return states[0] | {"rows": rows}


@pytest.mark.parametrize(
    "count", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 6, 12))]
)
def test_batches_do_not_depend_on_number_of_hosts(sources, count):
    config = config_of(sources, num_threads=2)
    sizes = [12, 24, 12]
    four = host_loaders(config, 4)
    expected = list(joined_batches(four, sizes))
    assert joined_position(four)["streams"] == 4
    before, others, resumed = (
        host_loaders(config, 4),
        host_loaders(config, count),
        host_loaders(config, 4),
    )
    results = list(joined_batches(before, sizes[:1]))
    for current, next_ in ((before, others), (others, resumed)):
        position = joined_position(current)
        for loader in next_:
            loader.check(position)
            loader.restore(position)
        results += joined_batches(
            next_, sizes[len(results) : len(results) + (1 if next_ is others else 2)]
        )
    for a, b in zip(results, expected, strict=True):
        assert_same_batch(a, b)
    assert joined_position(resumed) == joined_position(four)
    for loader in [*four, *before, *others, *resumed]:
        loader.close()


def test_fixed_shards_give_same_batches_for_any_hosts(sources):
    config = config_of(sources, num_shards=4)
    one, four = host_loaders(config, 1), host_loaders(config, 4)
    for a, b in zip(joined_batches(one, [8, 16]), joined_batches(four, [8, 16]), strict=True):
        assert_same_batch(a, b)
    # Each host reads only the shards of its rows.
    assert [list(loader.state()["rows"]) for loader in four] == [["0"], ["1"], ["2"], ["3"]]
    with pytest.raises(ValueError, match="a batch of 6 rows cannot be divided among the 4 shards"):
        one[0].next(6)
    with pytest.raises(ValueError, match=r"lacks shards \[1, 2, 3\] of 4; join"):
        one[0].check(four[0].state())
    for loader in [*one, *four]:
        loader.close()


def test_rejects_process_index_out_of_range(sources):
    with pytest.raises(ValueError, match="process_index is 2 of process_count 2"):
        Loader(config_of(sources), TOKENIZER, process_index=2, process_count=2)


def tokenizer_with_swapped_ids():
    """Returns a tokenizer as large as the shipped one, with two ids swapped."""
    definition = json.loads(DEFAULT_PATH.read_text("utf-8"))
    vocabulary = definition["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    return Tokenizer(json.dumps(definition))


def test_rejects_position_on_changed_text(sources):
    file = pathlib.Path(sources[0].path)
    before, config = file.read_text(), config_of(sources)
    loader = Loader(config, TOKENIZER)
    state = loader.state()
    loader.close()
    try:
        file.write_text(before.replace("a59 ", "A59 "))
        changed = Loader(config, TOKENIZER)
    finally:
        file.write_text(before)
    with pytest.raises(ValueError, match="was saved with sources .*60 documents .*60 documents"):
        changed.restore(state)
    changed.close()


def test_position_does_not_depend_on_threads_or_hosts(sources):
    shapes = [
        ({"num_threads": 0}, {}),
        ({"num_threads": 3, "prefetch_documents": 5}, {}),
        ({}, {"process_index": 1, "process_count": 2}),
    ]
    states = []
    for arguments, host in shapes:
        loader = Loader(config_of(sources, **arguments), TOKENIZER, **host)
        states.append(loader.state())
        loader.close()
    for name in ("sources", "tokenizer"):
        assert states[0][name] == states[1][name] == states[2][name]


@pytest.mark.parametrize("num_threads", [0, 2])
def test_names_line_changed_after_opening(tmp_path, num_threads):
    lines = "\n".join(json.dumps({"text": f"document {number}"}) for number in range(1000))
    (tmp_path / "x.jsonl").write_text(lines)
    source = SourceConfig(kind="jsonl", path=str(tmp_path / "x.jsonl"))
    loader = Loader(config_of((source,), num_threads=num_threads), TOKENIZER)
    (tmp_path / "x.jsonl").write_text(lines.replace("text", "body"))
    with pytest.raises(ValueError, match="x.jsonl, line .* has no string at 'text'") as error:
        for _ in range(100):
            loader.next(8)
    assert "\n" not in str(error.value)
    loader.close()


def test_held_out_batches_are_finite_and_repeatable(sources):
    config = config_of(sources)
    once, again = (list(held_out_batches(config, sources[0], TOKENIZER, 4)) for _ in range(2))
    assert {batch["token_ids"].shape for batch in once} == {(4, 24)}
    for a, b in zip(once, again, strict=True):
        assert_same_batch(a, b)
    used = np.concatenate([batch["segment_ids"].max(axis=1) > 0 for batch in once])
    assert used[0] and (np.diff(used.astype(int)) <= 0).all()  # blank rows only at the end
    few = list(held_out_batches(config, sources[0], TOKENIZER, 4, max_rows=6))
    assert len(few) == 2 and (few[1]["segment_ids"].max(axis=1) > 0).tolist() == [1, 1, 0, 0]
    assert_same_batch(few[0], once[0])
