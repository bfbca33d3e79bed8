"""Tests of block-wise FP8 weights, and of products with them, against the NumPy oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.fp8_blocks import (
    block_of,
    fp8_grouped_matmul,
    quantize_blocks,
    spread_scale,
)
from pallas_kernels.quantized_weights import Fp8, quantized_einsum
from tests.kernels.implementations import in_tiers
from tests.oracles import fp8_blocks as oracle

BLOCK = 8
# {equation: (shape of x, shape of w, dimensions with blocks, shape of w as the oracle has it)}
CASES = {
    "...d,df->...f": ((2, 3, 20), (20, 27), (0, 1), (1, 20, 1, 27)),
    "btq,qnx->btnx": ((2, 3, 16), (16, 3, 12), (0, 2), (1, 16, 3, 12)),
    "btnu,nud->btd": ((2, 3, 4, 12), (4, 12, 17), (1, 2), (4, 12, 1, 17)),
}


def normal(*shape, seed=0):
    """Returns numbers whose magnitude differs from one part to the next."""
    draw = np.random.default_rng(seed)
    return (draw.standard_normal(shape) * 10.0 ** draw.integers(-3, 3, shape)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=(1, 2))
def quantize(w, dims, block):
    return quantize_blocks(w, dims, block)


def dequantize(weight, dims):
    """Returns float64 of an `Fp8` weight."""
    scale = np.asarray(weight.scale, np.float64)
    for dim in dims:
        scale = np.repeat(scale, weight.group, axis=dim)
    return (
        np.asarray(weight.values, np.float64)
        * scale[tuple(slice(0, n) for n in weight.values.shape)]
    )


@pytest.mark.parametrize("equation", CASES)
def test_quantized_weight_equals_oracle(equation):
    _, shape, dims, heads = CASES[equation]
    w = normal(*shape)
    w[..., 1:9] *= 1e30
    w.reshape(heads)[0, :8, 0, :8] = 0
    weight = Fp8(*quantize(w, dims, BLOCK))
    assert (weight.values.dtype, weight.scale.dtype) == (jnp.float8_e4m3fn, jnp.float32)
    assert weight.shape == shape and weight.group == BLOCK
    want = oracle.quantize_weight(w.astype(np.float64).reshape(heads), BLOCK)
    # XLA divides by 448 with an error of a bit of float32, which may round the scale's 20 bits the other way.
    np.testing.assert_allclose(dequantize(weight, dims).reshape(heads), want, rtol=2**-19)


def test_quantizing_dequantized_weight_gives_same_bits():
    w = normal(40, 24)
    first = quantize(w, (0, 1), BLOCK)
    back = dequantize(Fp8(*first), (0, 1)).astype(np.float32)
    again = quantize(back, (0, 1), BLOCK)
    for a, b in zip(first, again):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_layers_quantize_like_one_weight():
    w = normal(3, 16, 2, 12)
    stack = quantize(w, (1, 3), BLOCK)
    for layer in range(3):
        for a, b in zip(quantize(w[layer], (0, 2), BLOCK), stack):
            assert np.asarray(a).tobytes() == np.asarray(b[layer]).tobytes()


def test_number_that_is_not_finite_affects_its_block_only():
    w = np.ones((16, 16), np.float32)
    w[3, 3], w[12, 3] = np.nan, np.inf
    weight = Fp8(*quantize(w, (0, 1), BLOCK))
    np.testing.assert_array_equal(np.isfinite(weight.scale), [[False, True], [False, True]])
    assert np.isfinite(np.asarray(weight.values[:, 8:], np.float32)).all()


@pytest.mark.parametrize(
    ("shape", "scale", "block"),
    [
        ((6144, 576), (48, 5), 128),
        ((2048, 64, 256), (16, 64, 2), 128),
        ((96, 128), (1, 1), 128),
        ((128, 384), (1, 3), 128),
        ((20, 27), (3, 4), 8),
        ((4, 12, 17), (4, 2, 3), 8),
    ],
)
def test_block_follows_from_shapes(shape, scale, block):
    assert block_of(shape, scale) == block


def test_rejects_block_that_is_no_power_of_two():
    with pytest.raises(ValueError, match="blocks of 12 x 12: the side must be a power of two"):
        quantize_blocks(jnp.ones((24, 24)), (0, 1), 12)


@pytest.mark.parametrize("equation", CASES)
@pytest.mark.parametrize("dtype", in_tiers([jnp.bfloat16], [jnp.float32]))
def test_fp8_einsum_equals_oracle(equation, dtype):
    x_shape, shape, dims, heads = CASES[equation]
    x, w = jnp.asarray(normal(*x_shape, seed=1), dtype), normal(*shape)
    got = jax.jit(quantized_einsum, static_argnums=0)(equation, x, Fp8(*quantize(w, dims, BLOCK)))
    rows = np.asarray(x, np.float64).reshape(6, *heads[:2])
    wide = w.astype(np.float64).reshape(heads)
    want = oracle.product(rows, wide, BLOCK)
    plain = jnp.einsum(equation, x.astype(jnp.float32), w)
    assert got.dtype == dtype and got.shape == plain.shape
    # Sums may cancel, so that the error is relative to the sum of magnitudes.
    size = np.einsum("mhi,hijo->mjo", np.abs(rows), np.abs(wide))
    rtol = 1e-5 if dtype == jnp.float32 else 2**-8
    assert (np.abs(np.asarray(got, np.float64).reshape(want.shape) - want) <= rtol * size).all()
    # A number of few bits is wrong by at most a 16th, and one of the smallest by half a step of its block.
    assert 1e-3 < np.abs(want - np.reshape(plain, want.shape)).max() / size.max() < 2 / 16


@pytest.mark.parametrize("sizes", [(9, 0, 30, 1), (0, 0, 0, 0), (40, 0, 0, 0)])
def test_fp8_grouped_matmul_equals_oracle(sizes):
    """Rows beyond the groups give zero, also where one expert has more rows than the joint product holds."""
    k, n, m = 20, 12, 44
    x, w = normal(m, k, seed=1), normal(4, k, n)
    weights = quantize(w, (1, 2), BLOCK)
    got = jax.jit(fp8_grouped_matmul)(x, *weights, jnp.asarray(sizes))
    wide, start = x.astype(np.float64)[:, None], 0
    for e, size in enumerate(sizes):
        rows, weight = wide[start : start + size], w[e].astype(np.float64)[None, :, None]
        want = oracle.product(rows, weight, BLOCK)[:, 0]
        scale = np.abs(rows[:, 0]) @ np.abs(w[e])
        assert (np.abs(got[start : start + size] - want) <= 1e-5 * scale).all()
        start += size
    assert not np.asarray(got[start:]).any()


def test_spreads_scale_of_partial_block():
    np.testing.assert_array_equal(spread_scale(jnp.array([1.0, 2.0]), 11, 8), [1] * 8 + [2] * 3)


def test_sharding_splits_between_blocks_only():
    weight = Fp8(*quantize(normal(2, 16, 3, 20), (1, 3), BLOCK))
    sizes = []
    weight.map_arrays(lambda letters, shape: sizes.append(shape), "l q n hr", weight.shape)
    # Two blocks of 16 rows; 20 columns end with a partial block, so that they stay in one place.
    assert sizes == [(2, 2, 3, 1)] * 2
    shard = jax.tree.map(lambda x: x[:, : x.shape[1] // 2], weight)
    assert shard.group == BLOCK
    sizes.clear()
    shard.map_arrays(lambda letters, shape: sizes.append(shape), "l q n hr", weight.shape)
    assert sizes == [(2, 2, 3, 1)] * 2
