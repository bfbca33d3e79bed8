"""Tests of program hashes."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from glm5_jax.parallel.program_hash import program_hash


def make_doubling():
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    return kernel


def make_doubling_at_other_line():
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    return kernel


def make_tripling():
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 3

    return kernel


def on_tpu(kernel, x):
    return pl.pallas_call(kernel, out_shape=x)(x)


def on_gpu(kernel, x):
    return plgpu.kernel(kernel, out_type=x)(x)


def lower(call, platform, kernel):
    traced = jax.jit(lambda x: call(kernel, x)).trace(jnp.ones((8, 128)))
    return traced.lower(lowering_platforms=(platform,))


@pytest.mark.parametrize(("call", "platform"), [(on_tpu, "tpu"), (on_gpu, "cuda")])
def test_hash_ignores_source_location_of_kernel(call, platform):
    first, second, third = (
        lower(call, platform, make())
        for make in (make_doubling, make_doubling_at_other_line, make_tripling)
    )
    assert first.as_text() != second.as_text()
    assert program_hash(first) == program_hash(second) != program_hash(third)


def test_hash_differs_between_programs_without_kernels():
    x = jnp.ones(4)
    double, again, triple = (
        jax.jit(f).lower(x) for f in (lambda x: x * 2, lambda x: x * 2, lambda x: x * 3)
    )
    assert program_hash(double) == program_hash(again) != program_hash(triple)
