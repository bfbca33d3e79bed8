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
    batch = {name: np.zeros((count, length), STREAMS[name]) for name in streams}
    batch |= {name: np.zeros((count, length), np.int32) for name in ("segment_ids", "positions")}
    for i, own in enumerate(rows):
        at = 0
        for segment, record in enumerate(own, 1):
            here = slice(at, at + len(record))
            for name in streams:
                values = getattr(record, name)
                if values is not None:
                    # A number that is not there has no weight.
                    batch[name][i, here] = (
                        np.nan_to_num(values) if values.dtype.kind == "f" else values
                    )
            batch["segment_ids"][i, here] = segment
            batch["positions"][i, here] = np.arange(len(record))
            at += len(record)
    return batch, rows
