"""Tests of RoPE against the NumPy oracle in complex numbers: interleaved pairs, theta, YaRN."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.config import ModelConfig, RopeParameters
from glm5_jax.model import rope
from pallas_kernels.pointwise import rotate
from tests.oracles import attention as oracle

YARN = RopeParameters(
    rope_theta=100.0,
    rope_type="yarn",
    factor=4.0,
    original_max_position_embeddings=32,
    beta_fast=4.0,
    beta_slow=0.25,
)
CASES = {
    "plain": RopeParameters(rope_theta=10_000.0),
    "other theta": RopeParameters(rope_theta=8e6),
    "yarn": YARN,
    "yarn with mscale": dataclasses.replace(YARN, mscale=0.9, mscale_all_dim=0.6),
    "yarn with one mscale": dataclasses.replace(YARN, mscale_all_dim=0.6),
    "yarn with attention_factor": dataclasses.replace(YARN, attention_factor=1.3),
    "yarn without truncation": dataclasses.replace(YARN, truncate=False),
    "yarn with released betas": dataclasses.replace(
        YARN, rope_theta=1e6, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=4096
    ),
    "yarn beyond the last pair": dataclasses.replace(YARN, beta_fast=1e-9, beta_slow=1e-10),
    "yarn with ramp of width zero": dataclasses.replace(YARN, beta_slow=4.0, truncate=False),
    "yarn that shrinks": dataclasses.replace(YARN, factor=0.5),
}
DIM = 16


@pytest.fixture(params=CASES)
def parameters(request):
    return CASES[request.param]


def test_rope_frequencies_equal_oracle(parameters):
    frequencies, magnitude = oracle.rope_frequencies(dataclasses.asdict(parameters), DIM, 128)
    np.testing.assert_allclose(rope.inverse_frequencies(parameters, DIM), frequencies, rtol=1e-12)
    assert rope.magnitude(parameters) == pytest.approx(magnitude, rel=1e-12)


def test_rotation_equals_oracle(parameters):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 3, DIM)).astype(np.float32)
    positions = np.array([[0, 1, 2, 3, 4], [7, 8, 90, 0, 1]], np.int32)
    cos, sin = rope.rope_table(parameters, DIM, positions, jnp.float32)
    turns = oracle.rope_turns(
        *oracle.rope_frequencies(dataclasses.asdict(parameters), DIM, 128), positions
    )
    expected = oracle.rope_interleaved(x.astype(np.float64), turns)
    np.testing.assert_allclose(rotate(jnp.asarray(x), cos, sin), expected, atol=1e-4)
    one_head = rotate(jnp.asarray(x[:, :, 0]), cos, sin)
    np.testing.assert_allclose(one_head, expected[:, :, 0], atol=1e-4)


def test_computes_angles_in_float32():
    """A bfloat16 position has 8 bits: 1001 and 1002 would be the same."""
    positions = jnp.array([[1001, 1002]])
    cos, _ = rope.rope_table(CASES["plain"], DIM, positions, jnp.bfloat16)
    exact, _ = rope.rope_table(CASES["plain"], DIM, positions, jnp.float32)
    assert cos.dtype == jnp.bfloat16
    np.testing.assert_array_equal(cos, exact.astype(jnp.bfloat16))
    assert cos[0, 0, 0] != cos[0, 1, 0]


@pytest.mark.parametrize("name", ["plain", "yarn", "yarn with mscale", "yarn that shrinks"])
def test_softmax_scale_equals_oracle(name):
    cfg = ModelConfig(rope_parameters=CASES[name], max_position_embeddings=128)
    head = cfg.qk_nope_head_dim + cfg.qk_rope_head_dim
    expected = oracle.softmax_scale(dataclasses.asdict(CASES[name]), head, 128)
    assert cfg.softmax_scale == pytest.approx(expected, rel=1e-12)
