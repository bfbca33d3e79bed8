"""Tests of mla_prologue on Hopper: overlapping blocks, a split contraction, heads across blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels import compat
from pallas_kernels.mla_prologue import gpu
from pallas_kernels.pointwise import rotate
from tests.kernels.implementations import race_checked

EMULATOR = race_checked("gpu").interpret
RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


@pytest.mark.slow
def test_last_block_overlaps_previous():
    """Blocks of 128 rows and 256 columns overlap in 144 padded rows and 320 padded columns."""
    x, weights = normal(137, 192), (normal(192, 300), normal(192, 70))
    got = jax.jit(lambda x, *weights: gpu.project(x, weights, interpret=EMULATOR))(x, *weights)
    for ours, w in zip(got, weights, strict=True):
        np.testing.assert_allclose(ours, x @ w, atol=1e-4)


@pytest.mark.slow
def test_rotates_head_ends_across_blocks():
    """Blocks of 256 columns share the last of three heads; a ring of 2 runs 5 steps."""
    x, w, angles = normal(72, 320), normal(320, 3 * 128), normal(72, 7)
    cos, sin = jnp.cos(angles), jnp.sin(angles)

    def run(x, w, cos, sin):
        return gpu.project(x, (w,), gpu.HeadRotation(128, cos, sin), interpret=EMULATOR)[0]

    got = jax.jit(run)(x, w, cos, sin)
    plain = (x @ w).reshape(1, 72, 3, 128)
    rotated = rotate(plain[..., -14:], cos[None], sin[None])
    wanted = jnp.concatenate([plain[..., :-14], rotated], axis=-1).reshape(72, -1)
    np.testing.assert_allclose(got, wanted, atol=1e-4)
    assert not compat.has_races("gpu")


def test_rejects_float32_only_on_chip():
    chip = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    mesh = AbstractMesh((1,), ("one",), axis_types=(AxisType.Auto,), abstract_device=chip)
    sizes = {"q_a": (64, 64), "q_b": (64, 1, 128), "kv_a": (64, 96), "kv_a_norm": (64,)}
    for dtype, reason_on_cpu, reason_on_chip in (
        (jnp.float32, None, "no float32"),
        (jnp.bfloat16, None, None),
    ):
        w = {name: jax.ShapeDtypeStruct(size, dtype) for name, size in sizes.items()}
        x = jax.ShapeDtypeStruct((1, 8, 64), dtype)
        assert gpu.unsupported_reason(x, w, None) is reason_on_cpu
        with jax.sharding.use_abstract_mesh(mesh):
            reason = gpu.unsupported_reason(x, w, None)
        assert reason is reason_on_chip or reason_on_chip in reason
