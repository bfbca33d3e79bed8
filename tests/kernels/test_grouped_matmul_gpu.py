"""Tests of grouped_matmul on Hopper: unaligned tiles, rings, rows next to other groups."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.grouped_matmul import gpu, gpu_rows, gpu_weights
from tests.kernels.implementations import race_checked
from tests.kernels.test_grouped_matmul import slices

RNG = np.random.default_rng(3)
INTERPRET = race_checked("gpu").interpret


def draw(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


@pytest.mark.slow
def test_handles_unaligned_groups_of_several_tiles():
    """A ring of four runs five steps; tiles of groups are adjacent; some rows are unassigned."""
    sizes = (3, 131, 0, 1, 17)
    x, w = draw(160, 320), draw(5, 320, 64)
    work = gpu_rows.schedule_row_tiles(jnp.asarray(sizes), 160)
    run = functools.partial(gpu_rows.multiply, fill=True, interpret=INTERPRET)
    (y,) = jax.jit(lambda x, w: run(work, [(x, w)]))(x, w)
    assert not compat.has_races("gpu")
    expected = np.zeros(y.shape)
    for e, rows in enumerate(slices(sizes)):
        expected[rows] = np.asarray(x[rows], np.float64) @ np.asarray(w[e], np.float64)
    np.testing.assert_allclose(y, expected, atol=2e-4)
    assert not np.asarray(y[152:]).any()


@pytest.mark.slow
def test_sums_groups_that_share_aligned_rows():
    """Groups begin and end within the same eight rows; another group takes six steps."""
    sizes = (3, 2, 0, 340)
    x, dy = draw(352, 128), draw(352, 128)
    x, dy = (a.at[345:].set(jnp.nan) for a in (x, dy))
    dw = gpu_weights.sum_products(x, dy, jnp.asarray(sizes), interpret=INTERPRET)
    assert not compat.has_races("gpu")
    for got, rows in zip(dw, slices(sizes)):
        expected = np.asarray(x[rows], np.float64).T @ np.asarray(dy[rows], np.float64)
        np.testing.assert_allclose(got, expected, atol=2e-4)


def test_schedule_covers_each_row_once():
    rows, num_groups = 1000, 6
    run = jax.jit(gpu_rows.schedule_row_tiles, static_argnums=1)
    draws = RNG.multinomial(rows, np.full(num_groups, 1 / num_groups), 40)
    draws = draws * RNG.integers(0, 2, draws.shape)
    for sizes in (*draws, [rows] + [0] * 5, [0] * 6, [1] * 6, [8] * 6, [0, 127, 1, 129, 743, 0]):
        sizes = np.asarray(sizes, np.int32)
        work = jax.device_get(run(sizes, rows))
        (count,) = work.count_with_padding
        assert count <= len(work.group)
        assert work.count == np.sum(work.group[:count] < num_groups)
        owner = np.full(rows, -1)
        for group, first, begin, end in zip(work.group[:count], work.first, work.begin, work.end):
            assert first % gpu_rows.ALIGNED == 0 and 0 <= begin < end <= gpu_rows.ROWS
            assert (owner[first + begin : first + end] == -1).all()
            owner[first + begin : first + end] = group
        expected = np.repeat(np.arange(num_groups), sizes)
        np.testing.assert_array_equal(owner[: len(expected)], expected)
        assert (owner[len(expected) :] == num_groups).all()


def test_grouped_matmul_names_unsupported_dtype():
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 6144), (1, 6144, 2048)))
    assert gpu.unsupported_reason(x, w) is None
    assert "float16" in gpu.unsupported_reason(x.update(dtype=jnp.float16), w)
