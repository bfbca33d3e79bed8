"""GLM-5's output projection: a chunk of tokens and a vocabulary of 154,880."""

import jax
import jax.numpy as jnp

from pallas_kernels.cases import Case
from pallas_kernels.cost import sum_costs
from pallas_kernels.cross_entropy import cost, linear_cross_entropy

SIZES = {"m": 8192, "d": 6144, "v": 154880, "chunk": 1024}
SMALL = {"m": 96, "d": 128, "v": 640, "chunk": 32}


def inputs(sizes, key):
    """Returns unit hidden states and a head whose logits have unit variance."""
    m, d, v = (sizes[name] for name in "mdv")
    keys = jax.random.split(key, 3)
    return {
        "hidden": jax.random.normal(keys[0], (m, d), jnp.bfloat16),
        "head": jax.random.normal(keys[1], (d, v), jnp.bfloat16) * d**-0.5,
        "targets": jax.random.randint(keys[2], (m,), 0, v),
    }


def forward(inputs, sizes, implementation):
    """Returns (nll, log partition)."""
    return linear_cross_entropy(**inputs, chunk=sizes["chunk"], implementation=implementation)


def backward(inputs, sizes, implementation):
    """Returns the gradients of hidden and head."""

    def loss(hidden, head):
        results = forward(inputs | {"hidden": hidden, "head": head}, sizes, implementation)
        return jnp.sum(results[0]) + 1e-4 * jnp.sum(results[1] ** 2)

    return jax.grad(loss, (0, 1))(inputs["hidden"], inputs["head"])


def forward_cost(sizes):
    """Cost of all rows."""
    return cost.forward(*(sizes[name] for name in "mdv"))


def backward_cost(sizes):
    """Cost with the preceding forward."""
    return sum_costs(forward_cost(sizes), cost.backward(*(sizes[name] for name in "mdv")))


CASES = {
    "forward": Case(SIZES, inputs, forward, forward_cost, SMALL),
    "backward": Case(SIZES, inputs, backward, backward_cost, SMALL),
}
