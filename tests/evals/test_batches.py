"""Batches of one shape hold every row once."""

import numpy as np
import pytest

from glm5_jax.evals.batches import batches


@pytest.mark.parametrize("count", [1, 3, 4, 7])
def test_covers_every_row_once_in_equal_shapes(count):
    rows = np.arange(2 * count).reshape(count, 2)
    result = list(batches(rows, 3))
    assert {batch.shape for batch, _ in result} == {(3, 2)}
    assert np.array_equal(np.concatenate([batch[:n] for batch, n in result]), rows)


@pytest.mark.parametrize("count,size", [(0, 2), (2, 0), (2, -1)])
def test_rejects_empty_batches(count, size):
    with pytest.raises(ValueError, match=f"{count} rows in batches of batch_size {size}"):
        next(batches(np.zeros((count, 2)), size))
