"""Tests of orthogonal bases, and that the bits of products with them do not depend on the part of a weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.inference.quantize.hadamard import (
    hadamard,
    random_basis,
    times_basis,
    times_hadamard,
)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 12, 20, 24, 48, 96, 128, 768])
def test_hadamard_matrices_are_orthogonal(size):
    h = hadamard(size)
    assert np.all(np.abs(h) == 1)
    np.testing.assert_array_equal(h @ h.T, size * np.eye(size))


@pytest.mark.parametrize("size", [1, 2, 8, 12, 20, 48, 128])
def test_additions_equal_product_with_matrix(size):
    x = np.random.default_rng(0).integers(-9, 9, (3, 2, size)).astype(np.float32)
    np.testing.assert_array_equal(times_hadamard(jnp.asarray(x)), x @ hadamard(size))


@pytest.mark.parametrize("size", [3, 10, 36])
def test_uses_random_basis_for_other_sizes(size):
    assert hadamard(size) is None
    basis = random_basis(size, [0])
    assert basis.signs is None
    np.testing.assert_allclose(basis.matrix @ basis.matrix.T, np.eye(size), atol=1e-12)
    with pytest.raises(ValueError, match=f"of size {size} is known"):
        times_hadamard(jnp.ones(size))


def test_bases_depend_on_seed():
    assert np.any(random_basis(8, [0]).matrix != random_basis(8, [1]).matrix)


def test_spreads_large_channel_over_all_channels():
    x = np.zeros(128)
    x[5] = 100.0
    np.testing.assert_allclose(np.abs(x @ random_basis(128, [0]).matrix), 100 / np.sqrt(128))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_rotates_part_of_dimension(dim):
    """Numbers beyond the space, such as the rotary part of a latent, stay as they are."""
    w = np.random.default_rng(0).standard_normal((30, 30, 30))
    for size in (24, 10):  # with a Hadamard matrix and without one
        with jax.enable_x64(True):
            basis = random_basis(size, [0])
            got = times_basis(jnp.asarray(w), basis, dim=dim, size=size)
        first, rest = np.split(w, [size], axis=dim)
        turned = np.moveaxis(np.tensordot(first, basis.matrix, (dim, 0)), -1, dim)
        np.testing.assert_allclose(got, np.concatenate([turned, rest], dim), atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_part_of_weight(dtype):
    """A product of matrices rounds differently for other numbers of rows."""
    w = jnp.asarray(np.random.default_rng(0).standard_normal((6, 5, 96)), dtype)
    basis = random_basis(96, [0])
    all_rows = np.asarray(times_basis(w, basis, dim=2, size=96))
    for part in (np.s_[:1], np.s_[2:5, 1:4], np.s_[5, 4:]):
        one = w[part]
        got = np.asarray(times_basis(one, basis, dim=one.ndim - 1, size=96))
        assert got.tobytes() == np.ascontiguousarray(all_rows[part]).tobytes()
