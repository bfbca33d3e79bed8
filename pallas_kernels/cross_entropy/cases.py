"""GLM-5's output projection: a chunk of tokens against 154,880 words."""

import jax
import jax.numpy as jnp

from pallas_kernels.cases import Case
from pallas_kernels.cost import Cost
from pallas_kernels.cross_entropy import linear_cross_entropy

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


def cost(products: int):
    """Of so many products of all rows with all words, reading and writing the operands once."""

    def of(sizes):
        m, d, v = (sizes[name] for name in "mdv")
        return Cost(2 * products * m * d * v, 2 * (m * d + d * v) * max(products - 1, 1))

    return of


CASES = {
    "forward": Case(SIZES, inputs, forward, cost(1), SMALL),
    "backward": Case(SIZES, inputs, backward, cost(4), SMALL),
}
