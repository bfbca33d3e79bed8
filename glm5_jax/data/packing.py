"""Packing: records of any length become rows of one length, several records to a row.

Two ways, both keeping every token:

  "concat"    random truncation, as in GLM's pre-training (GLM-4.5 report, section 2.3): the
              shuffled records are laid end to end and cut every `length` tokens. A record is cut
              wherever a row happens to end, elsewhere in each epoch; its rest opens the next row.
              There is no padding.
  "best_fit"  as from mid-training on (same section): a record goes whole into the open row that it
              fills best (of `open_rows` at a time), so that it is cut only where it exceeds
              `length`. The ends of rows are padding.

Each record, or piece of one, is a segment of its row: attention stays inside it, positions start
at 0 and its first token is not trained on, since the row holds nothing to predict it from.
"""

import dataclasses
from collections.abc import Sequence

import grain
import numpy as np

from glm5_jax.data.record import STREAMS, TokenRecord

PACKINGS = ("concat", "best_fit")
PLAIN_STREAMS = ("token_ids", "loss_mask", "ce_weight")


def pack(
    records: grain.IterDataset | Sequence[TokenRecord],
    length: int,
    *,
    packing: str,
    streams: Sequence[str] = PLAIN_STREAMS,
    open_rows: int = 64,
) -> grain.IterDataset:
    """Rows of `length` tokens from a dataset of `TokenRecord`s, or some in their order; its state resumes exactly.

    A row is a dict of arrays [t]: `streams` (all of which every record must have filled; NaN
    becomes 0), `segment_ids` int32 (1.. in order, 0 padding) and `positions` int32. The last row
    of a finite dataset may be short, that is padded.
    Raises ValueError for a `packing` not in `PACKINGS`, and for a record that lacks a stream.
    """
    if packing not in PACKINGS:
        raise ValueError(f"packing is {packing!r}; use one of {', '.join(PACKINGS)}")
    if length < 2:
        raise ValueError(f"the row length is {length}; it must be at least 2")
    if not isinstance(records, grain.IterDataset):
        records = grain.MapDataset.source(records).to_iter_dataset(grain.ReadOptions(0, 0))
    # The packers cut and join one structured array, so that no stream can slip against another.
    dtype = np.dtype([(name, STREAMS[name]) for name in streams])
    tables = records.map(lambda record: {"record": _table(record, dtype)})
    if packing == "concat":
        rows = grain.experimental.ConcatThenSplitIterDataset(
            tables, length_struct={"record": length}
        )
    else:
        rows = grain.experimental.BestFitPackIterDataset(
            grain.experimental.FlatMapIterDataset(tables, _Cut(length)),
            length_struct={"record": length},
            num_packing_bins=open_rows,
        )
    return rows.map(_row)


def blank_row(row: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A row like `row` that is all padding."""
    return {name: np.zeros_like(stream) for name, stream in row.items()}


@dataclasses.dataclass(frozen=True)
class _Cut(grain.experimental.FlatMapTransform):
    """Cuts records that exceed a row."""

    length: int
    max_fan_out: int = 0  # of no meaning for iterators

    def flat_map(self, element):
        table = element["record"]
        starts = range(0, len(table), self.length)
        return [{"record": table[start : start + self.length]} for start in starts]


def _table(record: TokenRecord, dtype: np.dtype) -> np.ndarray:
    table = np.zeros(len(record), dtype)
    for name in dtype.names:
        stream = getattr(record, name)
        if stream is None:
            raise ValueError(f"a record of {len(record)} tokens has no {name}; fill it first")
        table[name] = np.nan_to_num(stream, nan=0.0) if stream.dtype.kind == "f" else stream
    return table


def _row(packed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    table, positions = packed["record"], packed["record_positions"]
    row = {name: np.ascontiguousarray(table[name]) for name in table.dtype.names}
    row["loss_mask"] = np.where(positions > 0, row["loss_mask"], 0).astype(np.float32)
    return row | {"segment_ids": packed["record_segment_ids"], "positions": positions}
