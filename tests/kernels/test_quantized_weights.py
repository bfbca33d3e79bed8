"""Tests of the rounding of weights to 8 bits and of products with them, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla_prologue import gpu, mla_prologue, tpu
from pallas_kernels.quantized_weights import Int4, Int8, quantized_einsum
from pallas_kernels.w4a8_matmul.quantize import quantize_a8, quantize_w4, round_w8
from tests.kernels.implementations import in_tiers
from tests.oracles import quantize as oracle


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("axes", [(0,), (0, 1)], ids=str)
def test_rounds_weights_with_scale_per_output(axes):
    w = normal(6, 4, 5)
    w[..., 2] = 0
    q, scale = round_w8(w, axes)
    assert (q.dtype, scale.dtype) == (jnp.int8, jnp.float32)
    assert scale.shape == w.shape[len(axes) :]
    want, want_scale = oracle.quantize(w.astype(np.float64), 127, axes)
    np.testing.assert_allclose(scale, want_scale, rtol=2**-16)
    assert np.abs(np.asarray(q) - want).max() <= 1
    assert np.all(np.abs(np.asarray(q)).max(axes) == np.where(want.any(axes), 127, 0))
    assert np.all(np.abs(q * np.expand_dims(scale, axes) - w) <= np.expand_dims(scale, axes) / 2)


# The products of the model: [in out], output heads, input heads.
CASES = {
    "...d,df->...f": ((2, 3, 6), (6, 5), (0,)),
    "btq,qnx->btnx": ((2, 3, 6), (6, 4, 5), (0,)),
    "btnu,nud->btd": ((2, 3, 4, 5), (4, 5, 6), (0, 1)),
}


@pytest.mark.parametrize("equation", CASES)
@pytest.mark.parametrize("dtype", in_tiers([jnp.bfloat16], [jnp.float32]))
def test_quantized_einsum_equals_integer_product(equation, dtype):
    x_shape, w_shape, axes = CASES[equation]
    x, w = jnp.asarray(normal(*x_shape), dtype), normal(*w_shape, seed=1)
    # A row and a column a thousand times the others need separate scales.
    x, w = x.at[0, 1].multiply(1000), w * np.where(np.arange(w_shape[-1]) == 1, 1000, 1)
    weight = Int8(*round_w8(w, axes))
    got = jax.jit(quantized_einsum, static_argnums=0)(equation, x, weight)
    size = int(np.prod([w_shape[a] for a in axes]))
    rows, scale = (np.asarray(a) for a in quantize_a8(x.reshape(-1, size)))
    want = oracle.w8a8(
        rows, scale, np.asarray(weight.q).reshape(size, -1), np.asarray(weight.scale).reshape(-1)
    )
    assert got.dtype == dtype
    plain = jnp.einsum(equation, x.astype(jnp.float32), jnp.asarray(w, jnp.float32))
    assert got.shape == plain.shape
    rtol = 1e-6 if dtype == jnp.float32 else 2**-8
    np.testing.assert_allclose(np.asarray(got, np.float64).reshape(want.shape), want, rtol=rtol)
    # Each term is wrong by half a step of either factor, and by the product of both errors.
    limit = np.abs(rows * scale[:, None]).max(-1)[:, None] * np.abs(w).max(axes).reshape(-1)
    assert np.all(np.abs(want - np.reshape(plain, want.shape)) <= 1.02 * size * limit / 127)


def test_quantized_einsum_of_float_weight_is_einsum():
    x, w = normal(2, 3, 6), normal(6, 5)
    einsum = jax.make_jaxpr(lambda x, w: jnp.einsum("...d,df->...f", x, w))(x, w)
    assert str(jax.make_jaxpr(lambda x, w: quantized_einsum("...d,df->...f", x, w))(x, w)) == str(
        einsum
    )


def test_quantized_weights_have_logical_shape():
    w = normal(3, 2, 8, 5)
    assert Int8(*round_w8(w, (2,))).shape == w.shape
    packed = Int4(*jax.jit(quantize_w4, static_argnums=1)(w, 4))
    assert (packed.shape, packed.group) == (w.shape, 4)
    assert jax.tree.map(lambda x: x[0], packed).shape == w.shape[1:]
    assert packed.astype(jnp.bfloat16) is packed


@pytest.mark.parametrize("form", [tpu, gpu], ids=["tpu", "gpu"])
def test_fused_prologues_reject_quantized_weights(form):
    """ "auto" then selects XLA's form, which accepts them."""
    sizes = {"q_a": (256, 128), "q_b": (128, 4, 128), "kv_a": (256, 160), "kv_a_norm": (128,)}
    w = {name: jnp.ones(shape, jnp.bfloat16) for name, shape in sizes.items()}
    x = jnp.ones((1, 8, 256), jnp.bfloat16)
    assert form.unsupported_reason(x, w, None) is None
    quantized = w | {"q_b": Int8(*round_w8(w["q_b"], (0,)))}
    assert "weights must all be" in form.unsupported_reason(x, quantized, None)


def test_prologue_accepts_quantized_query_projection():
    b, t, d, q, n, h, r, c = 2, 3, 16, 12, 4, 6, 4, 8
    w = {"q_a": normal(d, q), "q_b": normal(q, n, h + r), "kv_a": normal(d, c + r)}
    w |= {"q_a_norm": np.ones(q, np.float32), "kv_a_norm": np.ones(c, np.float32)}
    angles = normal(b, t, r // 2)
    turns = np.cos(angles), np.sin(angles)
    x = normal(b, t, d, seed=2)
    run = jax.jit(lambda x, w: mla_prologue(x, w, *turns, eps=1e-6, implementation="xla"))
    plain = run(x, w)
    weight = Int8(*round_w8(w["q_b"], (0,)))
    got = run(x, w | {"q_b": weight})
    np.testing.assert_array_equal(got.latent, plain.latent)
    rows, scale = (np.asarray(a) for a in quantize_a8(got.c_q.reshape(-1, q)))
    want = oracle.w8a8(
        rows, scale, np.asarray(weight.q).reshape(q, -1), np.asarray(weight.scale).reshape(-1)
    )
    want = want.reshape(b, t, n, h + r)
    np.testing.assert_allclose(got.q[..., :h], want[..., :h], rtol=1e-5, atol=1e-5)
    even, odd = want[..., h::2], want[..., h + 1 :: 2]
    cos, sin = (a[:, :, None] for a in turns)
    rotated = np.concatenate([even * cos - odd * sin, odd * cos + even * sin], -1)
    np.testing.assert_allclose(got.q[..., h:], rotated, rtol=1e-5, atol=1e-5)
