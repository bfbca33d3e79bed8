"""When two programs have one hash."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glm5_jax.parallel.program_hash import program_hash


def doubling():
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    return kernel


def doubling_elsewhere():
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    return kernel


def tripling():
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 3

    return kernel


def on_tpu(kernel, x):
    return pl.pallas_call(kernel, out_shape=x)(x)


def on_gpu(kernel, x):
    return plgpu.kernel(kernel, out_type=x)(x)


def lowered(call, platform, kernel):
    traced = jax.jit(lambda x: call(kernel, x)).trace(jnp.ones((8, 128)))
    return traced.lower(lowering_platforms=(platform,))


@pytest.mark.parametrize(("call", "platform"), [(on_tpu, "tpu"), (on_gpu, "cuda")])
def test_where_a_kernel_stands_in_its_file_makes_no_other_program(call, platform):
    first, second, third = (
        lowered(call, platform, make()) for make in (doubling, doubling_elsewhere, tripling)
    )
    assert first.as_text() != second.as_text()
    assert program_hash(first) == program_hash(second) != program_hash(third)


def test_a_program_without_kernels_is_told_from_others():
    x = jnp.ones(4)
    double, again, triple = (
        jax.jit(f).lower(x) for f in (lambda x: x * 2, lambda x: x * 2, lambda x: x * 3)
    )
    assert program_hash(double) == program_hash(again) != program_hash(triple)
