"""What only the Hopper form does: blocks that overlap, the contraction in parts, heads across blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels import compat
from pallas_kernels.mla_prologue import gpu
from pallas_kernels.pointwise import rotate
from tests.kernels.implementations import watched

EMULATOR = watched("gpu").interpret
RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


@pytest.mark.slow
def test_the_last_block_begins_within_the_one_before():
    """137 rows are 144 in two blocks of 128, 300 columns are 320 in two of 256; 192 in three parts of 64."""
    x, weights = normal(137, 192), (normal(192, 300), normal(192, 70))
    got = jax.jit(lambda x, *weights: gpu.project(x, weights, interpret=EMULATOR))(x, *weights)
    for ours, w in zip(got, weights, strict=True):
        np.testing.assert_allclose(ours, x @ w, atol=1e-4)


@pytest.mark.slow
def test_the_ends_of_heads_are_turned_wherever_they_lie():
    """Three heads of 128 columns, the last of which two blocks of 256 share; a ring of 2 for 5 steps."""
    x, w, angles = normal(72, 320), normal(320, 3 * 128), normal(72, 7)
    cos, sin = jnp.cos(angles), jnp.sin(angles)

    def run(x, w, cos, sin):
        return gpu.project(x, (w,), gpu.HeadRotation(128, cos, sin), interpret=EMULATOR)[0]

    got = jax.jit(run)(x, w, cos, sin)
    plain = (x @ w).reshape(1, 72, 3, 128)
    turned = rotate(plain[..., -14:], cos[None], sin[None])
    wanted = jnp.concatenate([plain[..., :-14], turned], axis=-1).reshape(72, -1)
    np.testing.assert_allclose(got, wanted, atol=1e-4)
    assert not compat.has_races("gpu")


def test_float32_is_refused_on_a_chip_alone():
    chip = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    mesh = AbstractMesh((1,), ("one",), axis_types=(AxisType.Auto,), abstract_device=chip)
    sizes = {"q_a": (64, 64), "q_b": (64, 1, 128), "kv_a": (64, 96), "kv_a_norm": (64,)}
    for dtype, here, there in ((jnp.float32, None, "no float32"), (jnp.bfloat16, None, None)):
        w = {name: jax.ShapeDtypeStruct(size, dtype) for name, size in sizes.items()}
        x = jax.ShapeDtypeStruct((1, 8, 64), dtype)
        assert gpu.unsupported_reason(x, w, None) is here
        with jax.sharding.use_abstract_mesh(mesh):
            reason = gpu.unsupported_reason(x, w, None)
        assert reason is there or there in reason
