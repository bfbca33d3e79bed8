"""GLM-5's output projection: a chunk of tokens against 154,880 words."""

import jax
import jax.numpy as jnp

from pallas_kernels.cases import Case
from pallas_kernels.cost import together
from pallas_kernels.cross_entropy import cost, linear_cross_entropy

SIZES = {"m": 8192, "d": 6144, "v": 154880, "chunk": 1024}
SMALL = {"m": 96, "d": 128, "v": 640, "chunk": 32}


def inputs(sizes, key):
    """Unit hidden states and a head whose logits have unit variance."""
    m, d, v = (sizes[name] for name in "mdv")
    keys = jax.random.split(key, 3)
    return {
        "hidden": jax.random.normal(keys[0], (m, d), jnp.bfloat16),
        "head": jax.random.normal(keys[1], (d, v), jnp.bfloat16) * d**-0.5,
        "targets": jax.random.randint(keys[2], (m,), 0, v),
    }


def forward(inputs, sizes, implementation):
    """(nll, log partition)."""
    return linear_cross_entropy(**inputs, chunk=sizes["chunk"], implementation=implementation)


def backward(inputs, sizes, implementation):
    """Gradients of hidden and head."""

    def loss(hidden, head):
        both = forward(inputs | {"hidden": hidden, "head": head}, sizes, implementation)
        return jnp.sum(both[0]) + 1e-4 * jnp.sum(both[1] ** 2)

    return jax.grad(loss, (0, 1))(inputs["hidden"], inputs["head"])


def forward_cost(sizes):
    """Of all rows."""
    return cost.forward(*(sizes[name] for name in "mdv"))


def backward_cost(sizes):
    """With the forward before it."""
    return together(forward_cost(sizes), cost.backward(*(sizes[name] for name in "mdv")))


CASES = {
    "forward": Case(SIZES, inputs, forward, forward_cost, SMALL),
    "backward": Case(SIZES, inputs, backward, backward_cost, SMALL),
}
