"""Projection and cross-entropy in chunks against the NumPy oracle, with exact gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cross_entropy import linear_cross_entropy
from tests.oracles import cross_entropy

ROWS, D, V = 13, 6, 11


@pytest.fixture(scope="module")
def projection():
    rng = np.random.default_rng(0)
    hidden, head = rng.standard_normal((ROWS, D)), 2 * rng.standard_normal((D, V))
    weight = rng.random(ROWS) * (rng.random(ROWS) > 0.3)
    return hidden, head, rng.integers(0, V, ROWS).astype(np.int32), weight


@pytest.mark.parametrize("chunk", [1, 5, 13, 4096])
def test_cross_entropy_and_its_gradients(projection, chunk):
    """13 rows in chunks of 5 leave a remainder; the z-loss reaches the second output."""
    hidden, head, targets, weight = projection
    z_weight = 0.3
    expected = cross_entropy.linear_cross_entropy(hidden, head, targets, weight, z_weight)

    @jax.jit
    def run(hidden, head):
        def loss(hidden, head):
            nll, logz = linear_cross_entropy(hidden, head, targets, chunk)
            return jnp.sum(weight.astype(np.float32) * (nll + z_weight * logz**2)), nll

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, head)

    (loss, nll), (d_hidden, d_head) = run(hidden.astype(np.float32), head.astype(np.float32))
    np.testing.assert_allclose(loss, expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(-nll, expected["logp"], atol=1e-5)
    np.testing.assert_allclose(d_hidden, expected["d_hidden"], atol=1e-5)
    np.testing.assert_allclose(d_head, expected["d_weight"], atol=2e-5)


def test_logits_never_exist_as_a_whole():
    """400 rows of 5000 logits would be 8 MB, forward and backward; a chunk of 4 rows is 80 kB."""

    def loss(hidden, head):
        return linear_cross_entropy(hidden, head, jnp.zeros(400, jnp.int32), 4)[0].sum()

    shapes = (
        jax.ShapeDtypeStruct((400, 8), jnp.float32),
        jax.ShapeDtypeStruct((8, 5000), jnp.float32),
    )
    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5e6


def test_bfloat16_sums_the_head_gradient_wide(projection):
    """4096 equal rows: a bfloat16 sum would stop growing at 256 of them."""
    rows = 4096
    hidden = jnp.ones((rows, 2), jnp.bfloat16)
    head = jnp.zeros((2, 4), jnp.bfloat16)

    def loss(head):
        return linear_cross_entropy(hidden, head, jnp.zeros(rows, jnp.int32), 1)[0].sum()

    got = jax.grad(loss)(head)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        got[0].astype(np.float32), rows * np.array([-0.75, 0.25, 0.25, 0.25])
    )
