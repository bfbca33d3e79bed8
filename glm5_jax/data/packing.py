"""Packs records of any length into rows of one length, several records to a row.

There are two methods, and both use every token:

  "concat"    random truncation, as in GLM's pre-training (GLM-4.5 report, section 2.3): the
              shuffled records are concatenated and split every `length` tokens. A record is split
              where a row ends, at a different position in each epoch, and its rest opens the next row.
              There is no padding.
  "best_fit"  as from mid-training on (same section): a record goes into the open row that it
              fills best (of `open_rows` at the same time), so that it is split only if it exceeds
              `length`. The ends of rows are padding.

Each record, or piece of one, is a segment of its row: attention stays inside it, positions start
at 0 and its first token is not trained on, because the row has no context to predict it from.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from glm5_jax.data.record import STREAMS, TokenRecord

# Imported late, because it takes a quarter of a second, and most errors of users come before the first row.
if TYPE_CHECKING:
    import grain

PACKINGS = ("concat", "best_fit")
PLAIN_STREAMS = ("token_ids", "loss_mask", "ce_weight")


def pack(
    records: "grain.IterDataset | Sequence[TokenRecord]",
    length: int,
    *,
    packing: str,
    streams: Sequence[str] = PLAIN_STREAMS,
    open_rows: int = 64,
) -> "grain.IterDataset":
    """Packs `TokenRecord`s, a dataset or a sequence, into rows of `length` tokens; its state resumes exactly.

    A row is a dict of arrays [t]: the streams (which every record must have; NaN becomes 0), `segment_ids` int32 (1.. in
    order, 0 for padding) and `positions` int32. The last row of a finite dataset is padded. open_rows: see the module's
    docstring.

    Raises ValueError for a `packing` not in `PACKINGS`, and for a record that lacks a stream.
    """
    import grain

    if packing not in PACKINGS:
        raise ValueError(f"packing is {packing!r}; use one of {', '.join(PACKINGS)}")
    if length < 2:
        raise ValueError(f"the row length is {length}; it must be at least 2")
    if not isinstance(records, grain.IterDataset):
        records = grain.MapDataset.source(records).to_iter_dataset(grain.ReadOptions(0, 0))
    # The packers split and join one structured array, so that all streams stay aligned.
    dtype = np.dtype([(name, STREAMS[name]) for name in streams])
    tables = records.map(lambda record: {"record": _table(record, dtype)})
    if packing == "concat":
        rows = grain.experimental.ConcatThenSplitIterDataset(
            tables, length_struct={"record": length}
        )
    else:
        rows = grain.experimental.BestFitPackIterDataset(
            grain.experimental.FlatMapIterDataset(tables, _make_cut(length)),
            length_struct={"record": length},
            num_packing_bins=open_rows,
        )
    return rows.map(_row)


def blank_row(row: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns a row of padding with the streams and the length of `row`."""
    return {name: np.zeros_like(stream) for name, stream in row.items()}


def _make_cut(length: int) -> "grain.experimental.FlatMapTransform":
    """Returns the transform that splits records which exceed a row."""
    import grain

    class Cut(grain.experimental.FlatMapTransform):
        max_fan_out = 0  # iterators ignore it

        def flat_map(self, element):
            table = element["record"]
            starts = range(0, len(table), length)
            return [{"record": table[start : start + length]} for start in starts]

    return Cut()


def _table(record: TokenRecord, dtype: np.dtype) -> np.ndarray:
    table = np.zeros(len(record), dtype)
    assert dtype.names is not None, "the dtype has a field for each stream"
    for name in dtype.names:
        stream = getattr(record, name)
        if stream is None:
            raise ValueError(f"a record of {len(record)} tokens has no {name}; fill it first")
        table[name] = np.nan_to_num(stream, nan=0.0) if stream.dtype.kind == "f" else stream
    return table


def _row(packed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    table, positions = packed["record"], packed["record_positions"]
    assert table.dtype.names is not None, "the table has a field for each stream"
    row = {name: np.ascontiguousarray(table[name]) for name in table.dtype.names}
    row["loss_mask"] = np.where(positions > 0, row["loss_mask"], 0).astype(np.float32)
    return row | {"segment_ids": packed["record_segment_ids"], "positions": positions}
