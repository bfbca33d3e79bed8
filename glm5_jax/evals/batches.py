"""Splits rows into batches of one shape, so that a program compiles once."""

from collections.abc import Iterator

import numpy as np


def batches(rows: np.ndarray, batch_size: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yields (batch, number of valid rows); the last batch is padded with copies of its first row.

    Raises ValueError if there are no rows, or batch_size is not positive.
    """
    if not len(rows) or batch_size < 1:
        raise ValueError(
            f"{len(rows)} rows in batches of batch_size {batch_size}; give at least one of both"
        )
    for first in range(0, len(rows), batch_size):
        batch = rows[first : first + batch_size]
        padding = np.repeat(batch[:1], batch_size - len(batch), axis=0)
        yield np.concatenate([batch, padding]), len(batch)
