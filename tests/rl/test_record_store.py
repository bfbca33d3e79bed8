"""Records of finished rollouts at the gateway: their encoding, their files and their retention."""

import os

import numpy as np
import pytest

from glm5_jax.data.record import TokenRecord
from glm5_jax.rl.rollouts.record_codec import decode_records, digest_of, encode_records
from glm5_jax.rl.rollouts.record_store import RecordStore
from glm5_jax.rl.rollouts.session_journal import JournalError
from tests.metrics.test_jsonl import limit_file_size
from tests.rl.test_trajectory import record

NAN = float("nan")


def test_decodes_encoded_records():
    records = [
        TokenRecord(
            token_ids=[5, 6, 2**31 - 1],
            loss_mask=[0, 1, 0],
            rollout_logp=[NAN, -1e-30, NAN],
            weight_version=[-1, 3, -1],
            status="truncated",
        ),
        record([-1, 2, 2, -1]),
    ]
    content = encode_records(records)
    decoded = decode_records(content, rollout_id="g-0", group_id="g")
    for before, after in zip(records, decoded, strict=True):
        assert (after.status, after.rollout_id, after.group_id) == (before.status, "g-0", "g")
        streams = before.streams()
        assert after.streams().keys() == streams.keys()
        for name, stream in streams.items():
            np.testing.assert_array_equal(getattr(after, name), stream)
    assert encode_records(decoded) == content and encode_records([]) != content
    assert digest_of(encode_records(decoded)) == digest_of(content)


@pytest.mark.parametrize(
    "content", [b"", b"\xc1", b"[]", encode_records([record([-1, 2])])[:-1], b"\x91\x92\xa1x\x80"]
)
def test_rejects_invalid_bytes(content):
    with pytest.raises(ValueError):
        decode_records(content)


class Clock:
    """Clock that a test sets."""

    def __init__(self, now=1e9):
        self.now = now

    def __call__(self):
        return self.now


@pytest.mark.parametrize("has_folder", [False, True])
def test_keeps_records_until_they_are_deleted_or_expire(tmp_path, has_folder):
    clock = Clock()
    store = RecordStore(tmp_path / "records" if has_folder else None, clock)
    store.write("a", b"one")
    clock.now += 60
    store.write("b", b"two")
    assert store.rollout_ids == ["a", "b"] and store.read("a") == b"one"
    store.expire(60.0)
    assert store.rollout_ids == ["a", "b"]
    clock.now += 1
    store.expire(60.0)
    assert store.rollout_ids == ["b"] and store.read("a") is None and "a" not in store
    for _ in range(2):
        store.delete("b")
    assert store.read("b") is None
    assert not has_folder or not list((tmp_path / "records").iterdir())


def test_reads_files_of_earlier_process(tmp_path):
    RecordStore(tmp_path).write("a", b"one")
    (tmp_path / "b.records.new").write_bytes(b"cut of")
    os.utime(tmp_path / "a.records", (1000, 1000))
    clock = Clock(1500.0)
    store = RecordStore(tmp_path, clock)
    assert store.rollout_ids == ["a"] and store.read("a") == b"one"
    assert [path.name for path in tmp_path.iterdir()] == ["a.records"]
    (tmp_path / "a.records").unlink()
    assert store.read("a") is None
    store.expire(499.0)
    assert store.rollout_ids == []


def test_stores_nothing_on_full_disk(tmp_path):
    store = RecordStore(tmp_path)
    with limit_file_size(10), pytest.raises(JournalError, match="cannot be written"):
        store.write("a", bytes(1000))
    assert "a" not in store and not list(tmp_path.iterdir())
