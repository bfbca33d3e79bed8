"""Tests that packing keeps every token, separates documents, and trains on no first token."""

import numpy as np
import pytest

from glm5_jax.data.packing import blank_row, pack
from glm5_jax.data.record import TokenRecord, plain_record

LENGTHS = [5, 1, 12, 30, 2, 8, 3, 8, 7, 9, 4, 16]


def _records():
    """Returns documents whose tokens encode their source: 100 * document + position."""
    return [plain_record(100 * number + np.arange(size)) for number, size in enumerate(LENGTHS)]


def _pack(records, length, **arguments):
    return list(pack(records, length, **arguments))


def _segments(row):
    """Returns the tokens of each segment, and checks that a segment is contiguous."""
    ids = row["segment_ids"]
    assert (np.diff(ids[ids > 0]) >= 0).all() and not ids[np.argmin(ids > 0) :].any() or ids.all()
    return [row["token_ids"][ids == segment] for segment in range(1, ids.max() + 1)]


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_packs_every_token_once_without_mixing_documents(packing):
    rows = _pack(_records(), 8, packing=packing)
    seen = []
    for row in rows:
        assert {len(stream) for stream in row.values()} == {8}
        for segment in _segments(row):
            assert len(set(segment // 100)) == 1  # one document
            assert (np.diff(segment) == 1).all()
            seen += segment.tolist()
    assert sorted(seen) == sorted(int(i) for record in _records() for i in record.token_ids)


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_restarts_positions_and_masks_first_token(packing):
    for row in _pack(_records(), 8, packing=packing):
        for segment in range(1, row["segment_ids"].max() + 1):
            inside = row["segment_ids"] == segment
            assert row["positions"][inside].tolist() == list(range(inside.sum()))
            assert row["loss_mask"][inside].tolist() == [0.0] + [1.0] * (inside.sum() - 1)
        padding = row["segment_ids"] == 0
        for name, stream in row.items():
            assert not stream[padding].any(), name


def test_concat_cuts_at_row_end_and_pads_last_row():
    rows = _pack(_records(), 8, packing="concat")
    assert len(rows) == -(-sum(LENGTHS) // 8)
    assert all((row["segment_ids"] > 0).all() for row in rows[:-1])
    flat = np.concatenate([row["token_ids"] for row in rows])[: sum(LENGTHS)]
    assert flat.tolist() == [int(i) for record in _records() for i in record.token_ids]
    # Document 2 (12 tokens) begins at token 6 of the first row and is cut twice.
    assert rows[0]["token_ids"][6:].tolist() == [200, 201]
    assert rows[1]["token_ids"].tolist() == list(range(202, 210))
    assert rows[1]["positions"].tolist() == list(range(8))
    assert rows[1]["loss_mask"].tolist() == [0] + [1] * 7


def test_best_fit_cuts_only_documents_longer_than_row():
    pieces = [
        segment for row in _pack(_records(), 8, packing="best_fit") for segment in _segments(row)
    ]
    expected = [min(8, size - start) for size in LENGTHS for start in range(0, size, 8)]
    assert sorted(map(len, pieces)) == sorted(expected)


def test_best_fit_fills_rows_well():
    sizes = np.random.default_rng(0).integers(5, 400, size=3000)
    records = [plain_record(np.ones(size, np.int32)) for size in sizes]
    rows = _pack(records, 256, packing="best_fit")
    assert np.mean([row["segment_ids"] > 0 for row in rows]) > 0.95


def test_packs_requested_streams_with_tokens():
    record = TokenRecord(
        token_ids=[1, 2, 3],
        loss_mask=[0, 0, 1],
        rollout_logp=[np.nan, np.nan, -0.25],
        weight_version=[-1, -1, 7],
        rl_weight=[0, 0, 2],
    )
    streams = ("token_ids", "loss_mask", "rollout_logp", "weight_version", "rl_weight")
    (row,) = _pack([record] * 2, 8, packing="best_fit", streams=streams)
    assert row["rollout_logp"].tolist() == [
        0,
        0,
        -0.25,
        0,
        0,
        -0.25,
        0,
        0,
    ]  # NaN would spread to other tokens
    assert row["rl_weight"].tolist() == [0, 0, 2, 0, 0, 2, 0, 0]
    assert row["weight_version"][2] == 7 and row["weight_version"].dtype == np.int32
    assert set(row) == {*streams, "segment_ids", "positions"}
    assert not any(stream.any() for stream in blank_row(row).values())


def test_rejects_missing_stream_and_invalid_arguments():
    with pytest.raises(ValueError, match="record of 5 tokens has no advantage"):
        _pack(_records(), 8, packing="concat", streams=("token_ids", "loss_mask", "advantage"))
    with pytest.raises(ValueError, match="packing is 'tight'; use one of concat, best_fit"):
        _pack(_records(), 8, packing="tight")
    with pytest.raises(ValueError, match="row length is 1"):
        _pack(_records(), 1, packing="concat")
