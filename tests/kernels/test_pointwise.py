"""Tests of RMSNorm and LayerNorm against the NumPy oracle, with small variances too."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.pointwise import layer_norm, rms_norm
from tests.oracles import attention as oracle

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 3, 8)).astype(np.float32) + 0.5
WEIGHT = RNG.standard_normal(8).astype(np.float32)
BIAS = RNG.standard_normal(8).astype(np.float32)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_norms_equal_oracle(scale, eps):
    got = rms_norm(X * scale, WEIGHT, eps)
    np.testing.assert_allclose(got, oracle.rms_norm(X * scale, WEIGHT, eps), rtol=1e-5)
    got = layer_norm(X * scale, WEIGHT, BIAS, eps)
    expected = oracle.layer_norm(X.astype(np.float64) * scale, WEIGHT, BIAS, eps)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_rms_norm_multiplies_weight_in_bfloat16():
    """Like transformers, it casts to bfloat16 before it multiplies by the weight."""
    x = jnp.asarray(X * 100, jnp.bfloat16)
    got = rms_norm(x, jnp.asarray(WEIGHT, jnp.bfloat16), 1e-5)
    normed = oracle.rms_norm(np.asarray(x, np.float64), 1.0, 1e-5)
    expected = jnp.asarray(WEIGHT, jnp.bfloat16) * jnp.asarray(normed, jnp.float32).astype(x.dtype)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, expected)


def test_layer_norm_preserves_dtype():
    x = jnp.asarray(X, jnp.bfloat16)
    got = layer_norm(x, jnp.asarray(WEIGHT), jnp.asarray(BIAS), 1e-6)
    assert got.dtype == jnp.bfloat16
    expected = oracle.layer_norm(np.asarray(x, np.float64), WEIGHT, BIAS, 1e-6)
    np.testing.assert_allclose(got.astype(np.float32), expected, rtol=1e-2, atol=1e-2)
