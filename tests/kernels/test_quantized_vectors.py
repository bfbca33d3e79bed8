"""Tests of vectors and rows in 8 bits against the NumPy oracle, and of rows stored as words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantized_vectors import FORMATS, quantize_vectors
from pallas_kernels.sparse_flash_attention import RowLayout, WordRows
from tests.kernels.implementations import in_tiers
from tests.oracles import eight_bits as oracle

over_kinds = pytest.mark.parametrize("kind", FORMATS)


def vectors(*shape):
    """Returns vectors with zeros and with numbers at both ends of float32's range."""
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    x[0, 0] = 0
    x[0, 1] *= 1e37
    x[0, 2] *= 1e-30
    x[0, 3] *= 1e-40
    x[0, 4, 1:] = 0
    return x


def layout(kind, values=512, rest=64, dtype="bfloat16"):
    return RowLayout(jnp.dtype(FORMATS[kind]).name, values, rest, dtype)


@over_kinds
def test_dequantized_vectors_equal_oracle(kind):
    x = vectors(9, 7, 64)
    values, scale = jax.jit(quantize_vectors, static_argnums=1)(x, FORMATS[kind])
    assert values.dtype == FORMATS[kind] and scale.shape == (9, 7) and scale.dtype == jnp.float32
    wide = x.astype(np.float64)
    back = np.asarray(values, np.float64) * np.asarray(scale, np.float64)[..., None]
    np.testing.assert_allclose(back, oracle.quantize_dequantize(wide, kind), rtol=1e-6)
    assert (np.abs(back - wide) <= oracle.bound(wide, kind) * (1 + 1e-6)).all()
    # The bound is tight, and no vector is lost.
    assert (np.abs(back - wide) > oracle.bound(wide, kind) * 0.9).any()
    assert np.isfinite(back).all() and not back[0, 0].any() and not back[0, 3].any()
    assert back[0, 4, 0] == pytest.approx(x[0, 4, 0], rel=1e-5)


@over_kinds
@pytest.mark.parametrize(
    ("values", "rest", "dtype", "groups"),
    [
        pytest.param(512, 64, "bfloat16", 4, id="GLM-5"),
        pytest.param(256, 32, "float32", 2, id="half a group in a plane", marks=pytest.mark.slow),
        pytest.param(48, 12, "float32", 1, id="tiny", marks=pytest.mark.slow),
        pytest.param(37, 5, "bfloat16", 1, id="odd", marks=pytest.mark.slow),
        pytest.param(130, 3, "bfloat16", 2, id="a group across planes"),
    ],
)
def test_word_rows_round_trip(kind, values, rest, dtype, groups):
    x = vectors(2, 6, values + rest)
    form = layout(kind, values, rest, dtype)
    rows = jax.jit(WordRows.encode, static_argnums=1)(jnp.asarray(x), form)
    assert rows.shape == x.shape and rows.dtype == dtype and rows.ndim == 3
    assert rows.words.shape[2:] == (1, sum(form.parts)) and form.parts[2] == groups
    back = np.asarray(jax.jit(WordRows.rows)(rows), np.float64)
    want = oracle.quantize_dequantize(x[..., :values].astype(np.float64), kind, values // groups)
    want = np.asarray(jnp.asarray(want, jnp.float32).astype(dtype), np.float64)
    # The product may round to the other neighbour.
    np.testing.assert_allclose(
        back[..., :values], want, rtol=2**-8 if dtype == "bfloat16" else 1e-6
    )
    np.testing.assert_array_equal(
        back[..., values:], np.asarray(jnp.asarray(x, dtype)[..., values:])
    )


@over_kinds
def test_row_of_glm5_has_656_bytes(kind):
    form = layout(kind)
    assert form.group == 128 and 4 * np.array(form.parts).sum() == 512 + 4 * 4 + 2 * 64 == 656


@over_kinds
def test_decodes_every_8_bit_value(kind):
    """All bit patterns decode like XLA's type, except NaN."""
    octets = np.arange(256, dtype=np.uint8)
    want = np.asarray(octets.view(jnp.dtype(FORMATS[kind])), np.float32)
    words = octets.reshape(4, 64).astype(np.uint32)
    words = sum(words[p] << 8 * p for p in range(4)).view(np.int32)
    ones = np.ones(2, np.float32).view(np.int32)
    rows = WordRows(
        jnp.asarray(np.concatenate([words, ones]))[None], layout(kind, 256, 0, "float32")
    )
    got, number = np.asarray(jax.jit(WordRows.rows)(rows)), ~np.isnan(want)
    assert number.sum() == (256 if kind == "int8" else 254)
    np.testing.assert_array_equal(got[number], want[number])


@over_kinds
def test_non_finite_value_affects_its_group_only(kind):
    x = np.ones((3, 256 + 4), np.float32)
    x[0, 5], x[1, 200] = np.inf, np.nan
    form = layout(kind, 256, 4, "float32")
    got = np.isfinite(jax.jit(lambda x: WordRows.encode(x, form).rows())(x))
    assert not got[0, 5] and not got[1, 200]
    assert got[0, 128:].all() and got[1, :128].all() and got[1, 256:].all() and got[2].all()


@pytest.mark.parametrize("x", in_tiers([257, 576], [1, 128, 256, 288]))
def test_exact_rows_round_trip_bitwise(x):
    bits = np.random.default_rng(0).integers(0, 2**16, (3, 5, x)).astype(np.uint16)
    bits = np.where((bits & 0x7F80) == 0x7F80, 0x7F80, bits)  # infinity instead of NaN
    bits = np.where((bits & 0x7F80) == 0, bits & 0x8000, bits)  # zero instead of denormals
    x16 = jax.lax.bitcast_convert_type(jnp.asarray(bits, jnp.uint16), jnp.bfloat16)
    for rows, lanes in ((x16, -(-x // 256)), (x16.astype(jnp.float32), -(-x // 128))):
        words = jax.jit(WordRows.encode, static_argnums=1)(rows, RowLayout.exact(x, rows.dtype))
        assert words.shape == rows.shape and words.dtype == rows.dtype
        assert words.words.shape == (3, 5, 1, 128 * lanes) and words.words.dtype == jnp.int32
        back = jax.jit(WordRows.rows)(words)
        assert back.dtype == rows.dtype
        back = jax.lax.bitcast_convert_type(back.astype(jnp.bfloat16), jnp.uint16)
        np.testing.assert_array_equal(back, bits)


def test_rejects_other_quantized_dtypes():
    with pytest.raises(ValueError, match="float16; use int8 or float8_e4m3fn"):
        quantize_vectors(jnp.ones(3), "float16")
