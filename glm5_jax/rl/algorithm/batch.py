"""Packs records into the rows of a batch that the learner reads."""

from collections.abc import Sequence

import numpy as np

from glm5_jax.data.record import STREAMS, TokenRecord


def pack_records(
    records: Sequence[TokenRecord], length: int, multiple: int, streams: Sequence[str]
) -> tuple[dict[str, np.ndarray], list[list[TokenRecord]]]:
    """Returns (batch, records of each row); the records of a row are in the order of their segments.

    The longest records are packed first, each into the row with the least free room that holds it. The number of rows
    b is `multiple` times a power of two, so that few compiled programs serve all batches; the last rows may be empty.
    Raises ValueError if a record exceeds a row.

    Args:
      records: records to pack.
      length: tokens of a row.
      multiple: divisor of the number of rows.
      streams: names of the streams that the batch gets, beyond `segment_ids` and `positions`. All are arrays
        [b length]. A stream that a record lacks is 0 there.
    """
    rows, num_rows = _assign_rows(records, length), multiple
    while num_rows < len(rows):
        num_rows *= 2
    # Flat places of the tokens of all records, row by row.
    ordered, places, segments, positions = [], [], [], []
    for i, row in enumerate(rows):
        start = i * length
        for segment, record in enumerate(row, 1):
            position = np.arange(len(record))
            ordered.append(record)
            places.append(start + position)
            segments.append(np.full(len(record), segment))
            positions.append(position)
            start += len(record)

    def scatter(parts: Sequence[np.ndarray], dtype) -> np.ndarray:
        flat = np.zeros(num_rows * length, dtype)
        if parts:
            flat[np.concatenate(places)] = np.concatenate(parts)
        if flat.dtype.kind == "f":
            flat = np.nan_to_num(flat)  # NaN marks a missing number, whose weight is 0
        return flat.reshape(num_rows, length)

    batch = {}
    for name in streams:
        values = [getattr(record, name) for record in ordered]
        parts = [np.zeros(len(r)) if v is None else v for r, v in zip(ordered, values)]
        batch[name] = scatter(parts, STREAMS[name])
    batch["segment_ids"] = scatter(segments, np.int32)
    batch["positions"] = scatter(positions, np.int32)
    return batch, rows


def _assign_rows(records: Sequence[TokenRecord], length: int) -> list[list[TokenRecord]]:
    """Returns the records of each row by best-fit decreasing. Raises ValueError if a record exceeds a row."""
    rows: list[list[TokenRecord]] = []
    room: list[int] = []  # free tokens of each row
    for record in sorted(records, key=len, reverse=True):
        if len(record) > length:
            raise ValueError(
                f"rollout {record.rollout_id!r} has {len(record)} tokens, a row {length}; let rows be as long as "
                "the engine's replies can be"
            )
        fitting = [i for i, free in enumerate(room) if free >= len(record)]
        if not fitting:
            rows.append([])
            room.append(length)
            fitting = [len(rows) - 1]
        row = min(fitting, key=room.__getitem__)
        rows[row].append(record)
        room[row] -= len(record)
    return rows
