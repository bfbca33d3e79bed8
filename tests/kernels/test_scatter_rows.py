"""Tests of scatter_rows, which writes rows into slots of a cache, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.scatter_rows import scatter_rows, tpu
from tests.kernels.implementations import (
    interpreted,
    over_implementations,
    over_pallas_forms,
    race_checked,
)

S, M, W = 50, 12, 128
SLOTS = np.array([7, 0, -1, 49, 50, 3, 4, 5, -50, 1000, 20, 6], np.int32)


def problem():
    rng = np.random.default_rng(0)
    rows, new = (rng.integers(-(2**31), 2**31, (n, 1, W)).astype(np.int32) for n in (S, M))
    want = rows.copy()
    real = (SLOTS >= 0) & (SLOTS < S)
    want[SLOTS[real]] = new[real]
    return rows, new, want


@over_implementations("scatter_rows")
def test_scatters_rows_and_preserves_others(implementation):
    rows, new, want = problem()
    write = jax.jit(lambda *a: scatter_rows(*a, implementation=implementation))
    np.testing.assert_array_equal(write(rows, new, SLOTS), want)
    nowhere = np.full(M, -1, np.int32)
    np.testing.assert_array_equal(write(rows, new, nowhere), rows)


@over_implementations("scatter_rows")
def test_scatter_rows_vmaps(implementation):
    rows, new, want = problem()
    got = jax.vmap(lambda *a: scatter_rows(*a, implementation=implementation))(
        *(np.stack([a, a]) for a in (rows, new)), np.stack([SLOTS, np.full(M, S, np.int32)])
    )
    np.testing.assert_array_equal(got, np.stack([want, rows]))


@over_pallas_forms("scatter_rows")
def test_scatters_more_rows_than_fit_at_once(name, monkeypatch):
    monkeypatch.setattr(tpu, "SMEM_BYTES", 4 * 5)
    rows, new, want = problem()
    got = scatter_rows(rows, new, SLOTS, implementation=interpreted(name))
    np.testing.assert_array_equal(got, want)


@over_pallas_forms("scatter_rows")
def test_scatter_rows_has_no_races(name):
    rows, new, want = problem()
    got = scatter_rows(rows, new, SLOTS, implementation=race_checked(name))
    np.testing.assert_array_equal(got, want)
    assert not compat.has_races(name)


@over_pallas_forms("scatter_rows")
@pytest.mark.parametrize(("shape", "dtype"), [((8, 1, 128), "bfloat16"), ((8, 128), "int32")])
def test_rejects_rows_of_other_shape_or_dtype(name, shape, dtype):
    rows = jnp.zeros(shape, dtype)
    with pytest.raises(ValueError, match="it takes .s 1 w. of 32-bit numbers"):
        scatter_rows(rows, rows, jnp.arange(8), implementation=interpreted(name))
