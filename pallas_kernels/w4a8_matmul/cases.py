"""GLM-5's products with int4 weights: the attention's output projection, and 32 routed experts."""

import jax
import jax.numpy as jnp

from pallas_kernels.cases import Case
from pallas_kernels.grouped_matmul.cases import even, skewed
from pallas_kernels.w4a8_matmul import cost as formula, w4a8_grouped_matmul, w4a8_matmul
from pallas_kernels.w4a8_matmul.quantize import GROUP, quantize_a8

DENSE = {"m": 4096, "k": 16384, "n": 6144}
UP = {"m": 16384, "filled": 16384, "k": 6144, "n": 2048, "e": 32}
DOWN = UP | {"k": 2048, "n": 6144}
DECODE = UP | {"m": 2048, "filled": 2048}
SMALL_DENSE = {"m": 48, "k": 256, "n": 256}
SMALL = {"m": 192, "filled": 160, "k": 256, "n": 256, "e": 4}


def inputs(group_sizes=None):
    """Returns quantized unit rows and weights; the bytes of the weights are drawn directly."""

    def make_inputs(sizes, key):
        m, k, n = (sizes[name] for name in "mkn")
        expert_shape = (sizes["e"],) if group_sizes else ()
        keys = jax.random.split(key, 3)
        x, x_scale = quantize_a8(jax.random.normal(keys[0], (m, k), jnp.bfloat16))
        scale = (
            jax.random.uniform(keys[2], (*expert_shape, k // GROUP, n), minval=0.5) * k**-0.5 / 4
        )
        arrays = {
            "x": x,
            "x_scale": x_scale,
            "w": jax.random.bits(keys[1], (*expert_shape, k // 2, n), jnp.uint8).astype(jnp.int8),
            "w_scale": scale,
        }
        return arrays | ({"group_sizes": group_sizes(sizes)} if group_sizes else {})

    return make_inputs


def dense(inputs, sizes, implementation):
    """Returns [m n]."""
    return w4a8_matmul(**inputs, implementation=implementation)


def grouped(inputs, sizes, implementation):
    """Returns [m n]."""
    return w4a8_grouped_matmul(
        **inputs, expected_rows=sizes["filled"], implementation=implementation
    )


def cost(sizes):
    """Cost of the filled rows."""
    m, k, n = (sizes[name] for name in "mkn")
    return formula.matmul(sizes.get("filled", m), m, k, n, sizes.get("e", 1), GROUP)


CASES = {
    "dense": Case(DENSE, inputs(), dense, cost, SMALL_DENSE),
    "dense_decode": Case(DENSE | {"m": 64}, inputs(), dense, cost, SMALL_DENSE),
    "experts": Case(UP, inputs(even), grouped, cost, SMALL),
    "experts_down": Case(DOWN, inputs(even), grouped, cost, SMALL),
    "experts_skewed": Case(UP, inputs(skewed), grouped, cost, SMALL),
    "experts_decode": Case(DECODE, inputs(even), grouped, cost, SMALL),
}
