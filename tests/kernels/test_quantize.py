"""Tests of int4 weights and int8 activations against NumPy: rounding, packing, requantization."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.w4a8_matmul.quantize import (
    dequantize_w4,
    pack_int4,
    quantize_a8,
    quantize_w4,
    unpack_int4,
)
from tests.oracles import quantize as oracle

K, N, GROUP = 48, 30, 16
WEIGHTS, ROWS = jax.jit(quantize_w4, static_argnums=1), jax.jit(quantize_a8)


@pytest.fixture(scope="module")
def w():
    """Returns weights [k n] whose groups and columns differ by many orders of magnitude."""
    rng = np.random.default_rng(0)
    sizes = 10.0 ** rng.uniform(-30, 30, (K // GROUP, 1, N))
    groups = rng.standard_normal((K // GROUP, GROUP, N)) * sizes
    return groups.reshape(K, N).astype(np.float32)


def assert_same_bits(a, b):
    for x, y in zip(a, b):
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))


def assert_nearest(x, q, scale, max_int, axis):
    """Checks integers and scales of x against the oracle in float64."""
    x, q = x.astype(np.float64), np.asarray(q, np.float64)
    _, exact = oracle.quantize(x, max_int, axis)
    np.testing.assert_allclose(scale, exact, rtol=2.0 ** -(23 - max_int.bit_length()))
    wide = np.expand_dims(np.asarray(scale, np.float64), axis)
    np.testing.assert_array_equal(q, np.rint((x / wide).astype(np.float32)))
    assert (np.abs(q).max(axis) == max_int).all(), "a group's maximum is not the largest integer"
    assert (np.abs(x - q * wide) <= 0.5 * wide * (1 + 1e-6)).all()


def test_rounds_weights_to_nearest(w):
    packed, scale = WEIGHTS(w, GROUP)
    assert packed.dtype == jnp.int8 and packed.shape == (K // 2, N)
    assert scale.dtype == jnp.float32 and scale.shape == (K // GROUP, N)
    q = np.asarray(unpack_int4(packed, GROUP))
    assert_nearest(oracle.by_group(w, GROUP), oracle.by_group(q, GROUP), scale, 7, 1)


def test_rounds_activations_to_nearest(w):
    q, scale = ROWS(w.T)
    assert q.dtype == jnp.int8 and q.shape == (N, K) and scale.shape == (N,)
    assert_nearest(w.T, q, scale, 127, 1)


def test_rounds_halves_to_even():
    w = np.array([7, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -7], np.float32)[:, None]
    packed, scale = WEIGHTS(w, 8)
    assert scale == 1
    assert unpack_int4(packed, 8)[:, 0].tolist() == [7, 0, 2, 2, 0, -2, -2, -7]
    q, scale = ROWS(np.array([127, 0.5, 1.5, -2.5, -126.5, -127], np.float32))
    assert scale == 1 and q.tolist() == [127, 0, 2, -2, -126, -127]


def test_requantizes_to_same_bits(w):
    """Seven times max / 7 would round in most groups."""
    packed, scale = WEIGHTS(w, GROUP)
    back = dequantize_w4(packed, scale)
    q = oracle.by_group(np.asarray(unpack_int4(packed, GROUP)), GROUP).astype(np.float64)
    exact = q * np.asarray(scale, np.float64)[:, None]
    np.testing.assert_array_equal(np.asarray(back, np.float64), exact.reshape(K, N))
    assert_same_bits((packed, scale), WEIGHTS(back, GROUP))

    q, scale = ROWS(w)
    assert_same_bits((q, scale), ROWS(q * scale[:, None]))


def test_packs_two_integers_per_byte():
    q = np.array([[1], [-2], [3], [-8]], np.int8)
    assert np.asarray(pack_int4(q, 4)).view(np.uint8).tolist() == [[0x31], [0x8E]]
    rng = np.random.default_rng(1)
    q = rng.integers(-8, 8, (2, K, N)).astype(np.int8)
    packed = pack_int4(q, GROUP)
    np.testing.assert_array_equal(packed, [oracle.pack(part, GROUP) for part in q])
    np.testing.assert_array_equal(unpack_int4(packed, GROUP), q)


def test_packing_round_trips_every_byte():
    every = np.arange(256, dtype=np.uint8).view(np.int8)[:, None]
    q = np.asarray(unpack_int4(every, 512))
    assert q.min() == -8 and q.max() == 7 and len({*zip(q[:256, 0], q[256:, 0])}) == 256
    np.testing.assert_array_equal(pack_int4(q, 512), every)


def test_quantization_commutes_with_slicing(w):
    packed, scale = WEIGHTS(w, GROUP)
    assert_same_bits(WEIGHTS(w[GROUP:, 3:7], GROUP), (packed[GROUP // 2 :, 3:7], scale[1:, 3:7]))
    assert_same_bits(
        WEIGHTS(np.stack([w, -w]), GROUP),
        [np.stack(p) for p in zip((packed, scale), WEIGHTS(-w, GROUP))],
    )
    assert_same_bits([unpack_int4(WEIGHTS(-w, GROUP)[0], GROUP)], [-unpack_int4(packed, GROUP)])


@pytest.mark.parametrize("value", [0.0, 1e-45, -5e-38])
def test_quantizes_denormals_to_zero(w, value):
    w = w.copy()
    w[:GROUP, 2], w[GROUP:, 3] = value, value
    packed, scale = WEIGHTS(w, GROUP)
    assert scale[0, 2] == 1 and (scale[1:, 3] == 1).all() and np.isfinite(scale).all()
    back = dequantize_w4(packed, scale)
    assert not back[:GROUP, 2].any() and not back[GROUP:, 3].any()
    assert_same_bits((packed, scale), WEIGHTS(back, GROUP))
    q, scale = ROWS(np.full((2, 8), value, np.float32))
    assert (scale == 1).all() and not q.any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_propagates_non_finite_values(w, value):
    w = w.copy()
    w[3, 2] = value
    back = np.asarray(dequantize_w4(*WEIGHTS(w, GROUP)))
    assert not np.isfinite(back[:GROUP, 2]).any()
    assert np.isfinite(np.delete(back, 2, axis=1)).all() and np.isfinite(back[GROUP:]).all()
    scale = np.asarray(ROWS(w)[1])
    assert not np.isfinite(scale[3]) and np.isfinite(np.delete(scale, 3)).all()


def test_quantizes_bfloat16_exactly(w):
    low = jnp.asarray(w, jnp.bfloat16)
    assert_same_bits(WEIGHTS(low, GROUP), WEIGHTS(low.astype(jnp.float32), GROUP))
    assert_same_bits(ROWS(low), ROWS(low.astype(jnp.float32)))


@pytest.mark.parametrize("group", [0, 1, 3, 32, -16])
def test_rejects_invalid_group_size(w, group):
    with pytest.raises(ValueError, match=f"48 rows in groups of {group}"):
        quantize_w4(w, group)


def test_accepts_group_of_all_rows(w):
    assert WEIGHTS(w, K)[1].shape == (1, N)
