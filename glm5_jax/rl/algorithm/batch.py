"""Records side by side: the rows of a batch that the learner reads."""

from collections.abc import Sequence

import numpy as np

from glm5_jax.data.record import STREAMS, TokenRecord


def lay_out(
    records: Sequence[TokenRecord], length: int, multiple: int, streams: Sequence[str]
) -> tuple[dict[str, np.ndarray], list[list[TokenRecord]]]:
    """A batch of arrays [b length] with these streams, `segment_ids` and `positions`; those that a record lacks are 0.
    And the records of each row, in the order of their segments.

    Longest first, each goes into the row with the least room that holds it. b is multiple times a power of two,
    so that few programs serve all batches; the last rows may be empty. ValueError for a record that exceeds a
    row.
    """
    rows: list[list[TokenRecord]] = []
    room: list[int] = []
    for record in sorted(records, key=len, reverse=True):
        if len(record) > length:
            raise ValueError(
                f"rollout {record.rollout_id!r} has {len(record)} tokens, a row {length}; let rows be as long as "
                "the engine's replies can be"
            )
        fitting = [i for i, left in enumerate(room) if left >= len(record)]
        if not fitting:
            rows.append([])
            room.append(length)
            fitting = [len(rows) - 1]
        row = min(fitting, key=room.__getitem__)
        rows[row].append(record)
        room[row] -= len(record)
    count = multiple
    while count < len(rows):
        count *= 2
    placed, places, segments, positions = [], [], [], []
    for i, own in enumerate(rows):
        at = i * length
        for segment, record in enumerate(own, 1):
            position = np.arange(len(record))
            placed.append(record)
            places.append(at + position)
            segments.append(np.full(len(record), segment))
            positions.append(position)
            at += len(record)

    def spread(parts, dtype):
        flat = np.zeros(count * length, dtype)
        if parts:
            flat[np.concatenate(places)] = np.concatenate(parts)
        if flat.dtype.kind == "f":
            flat = np.nan_to_num(flat)  # a number that is not there has no weight
        return flat.reshape(count, length)

    batch = {}
    for name in streams:
        own = (getattr(record, name) for record in placed)
        filled = [np.zeros(len(r)) if v is None else v for r, v in zip(placed, own)]
        batch[name] = spread(filled, STREAMS[name])
    batch["segment_ids"] = spread(segments, np.int32)
    batch["positions"] = spread(positions, np.int32)
    return batch, rows
