"""Linear attention in place of GLM-5's attention: 64 heads, keys of 192 and values of 256."""

import jax
import jax.numpy as jnp

from pallas_kernels.cases import Case
from pallas_kernels.cost import sum_costs
from pallas_kernels.gated_delta import cost, gated_delta

SIZES = {"b": 1, "t": 4096, "n": 64, "h": 192, "u": 256, "chunk": 64}
LONG = SIZES | {"t": 32768}
SMALL = {"b": 1, "t": 96, "n": 2, "h": 24, "u": 32, "chunk": 32}


def inputs(sizes, key):
    """Returns unit keys and queries, a gate that halves the state in about ten positions, and sigmoid betas."""
    b, t, n, h, u = (sizes[name] for name in "btnhu")
    keys = jax.random.split(key, 5)

    def unit(key):
        x = jax.random.normal(key, (b, t, n, h))
        return (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(jnp.bfloat16)

    return {
        "q": unit(keys[0]),
        "k": unit(keys[1]),
        "v": jax.random.normal(keys[2], (b, t, n, u), jnp.bfloat16),
        "g": -0.1 * jax.random.uniform(keys[3], (b, t, n)),
        "beta": jax.nn.sigmoid(jax.random.normal(keys[4], (b, t, n))),
    }


def forward(inputs, sizes, implementation):
    """Returns (out, final state)."""
    return gated_delta(**inputs, chunk=sizes["chunk"], implementation=implementation)


def backward(inputs, sizes, implementation):
    """Returns the gradients of every argument."""

    def loss(inputs):
        out, state = forward(inputs, sizes, implementation)
        return jnp.sum(out.astype(jnp.float32) ** 2) + jnp.sum(state**2)

    return jax.grad(loss)(inputs)


def forward_cost(sizes):
    """Cost without the states that a gradient needs."""
    return cost.forward(**sizes)


def backward_cost(sizes):
    """Cost with the preceding forward."""
    return sum_costs(cost.forward(**sizes, keep=True), cost.backward(**sizes))


CASES = {
    "forward": Case(SIZES, inputs, forward, forward_cost, SMALL),
    "backward": Case(SIZES, inputs, backward, backward_cost, SMALL),
    "long_backward": Case(LONG, inputs, backward, backward_cost, SMALL),
}
