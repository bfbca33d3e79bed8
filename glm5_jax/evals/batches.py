"""Rows in batches of one shape, so that a program compiles once."""

from collections.abc import Iterator

import numpy as np


def batches(rows: np.ndarray, batch_size: int) -> Iterator[tuple[np.ndarray, int]]:
    """(batch, how many of its rows count): the last batch is filled up with its first row. ValueError if
    there are no rows, or batch_size is not positive."""
    if not len(rows) or batch_size < 1:
        raise ValueError(
            f"{len(rows)} rows in batches of batch_size {batch_size}; give at least one of both"
        )
    for first in range(0, len(rows), batch_size):
        own = rows[first : first + batch_size]
        yield np.concatenate([own, np.repeat(own[:1], batch_size - len(own), axis=0)]), len(own)
