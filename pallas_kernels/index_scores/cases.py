"""GLM-5's indexer in training: a block of queries over 32,768 keys, 32 index heads of 128."""

import jax
import jax.numpy as jnp

from pallas_kernels.cases import Case
from pallas_kernels.cost import sum_costs
from pallas_kernels.index_scores import cost, index_scores

SIZES = {"b": 1, "t": 512, "s": 32768, "i": 32, "j": 128}
SMALL = {"b": 1, "t": 128, "s": 256, "i": 4, "j": 32}


def inputs(sizes, key):
    """Returns unit queries and keys, and signed head weights."""
    b, t, s, i, j = (sizes[name] for name in "btsij")
    keys = jax.random.split(key, 3)
    return {
        "idx_q": jax.random.normal(keys[0], (b, t, i, j), jnp.bfloat16),
        "idx_w": jax.random.normal(keys[1], (b, t, i)) * i**-0.5,
        "idx_k": jax.random.normal(keys[2], (b, s, j), jnp.bfloat16),
    }


def forward(inputs, sizes, implementation):
    """Returns all scores of the block."""
    return index_scores(**inputs, implementation=implementation)


def backward(inputs, sizes, implementation):
    """Returns the gradients of all three inputs."""

    def loss(*args):
        return jnp.sum(jnp.sin(index_scores(*args, implementation=implementation)))

    return jax.grad(loss, (0, 1, 2))(inputs["idx_q"], inputs["idx_w"], inputs["idx_k"])


def forward_cost(sizes):
    """Cost of all scores."""
    return cost.forward(**sizes)


def backward_cost(sizes):
    """Cost with the preceding forward; the gradient of the scores can be consumed where it is computed."""
    b, t, s, i, j = (sizes[name] for name in "btsij")
    forward, gradients = forward_cost(sizes), cost.gradients(**sizes, pairs=t * s)
    return sum_costs(forward, gradients, bytes=forward.bytes + 2 * b * (t * i + s) * j)


CASES = {
    "forward": Case(SIZES, inputs, forward, forward_cost, SMALL),
    "backward": Case(SIZES, inputs, backward, backward_cost, SMALL),
}
