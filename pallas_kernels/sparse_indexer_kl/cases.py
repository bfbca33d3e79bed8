"""GLM-5's sparse stage: 1024 queries, each with 2048 of 131,072 keys; target of 64 absorbed heads of 576."""

import jax
import jax.numpy as jnp

from pallas_kernels.cases import Case
from pallas_kernels.cost import sum_costs
from pallas_kernels.sparse_indexer_kl import cost, sparse_indexer_kl

SIZES = {"b": 1, "t": 1024, "s": 131072, "k": 2048, "n": 64, "x": 576, "i": 32, "j": 128}
SMALL = {"b": 1, "t": 4, "s": 512, "k": 128, "n": 4, "x": 64, "i": 4, "j": 32}


def inputs(sizes, key):
    """Returns unit queries, latents and index keys; selected keys spread evenly, one per stretch of the sequence."""
    b, t, s, k, n, x, i, j = (sizes[name] for name in "btsknxij")
    keys = jax.random.split(key, 6)
    step = s // k
    within = jax.random.randint(keys[5], (b, t, k), 0, step, jnp.int32)
    return {
        "idx_q": jax.random.normal(keys[0], (b, t, i, j), jnp.bfloat16),
        "idx_w": jax.random.normal(keys[1], (b, t, i)) * i**-0.5,
        "idx_k": jax.random.normal(keys[2], (b, s, j), jnp.bfloat16),
        "q": jax.random.normal(keys[3], (b, t, n, x), jnp.bfloat16),
        "latents": jax.random.normal(keys[4], (b, s, x), jnp.bfloat16),
        "lse": jnp.full((b, t, n), jnp.log(k) + 0.5, jnp.float32),
        "topk": within + step * jnp.arange(k, dtype=jnp.int32),
    }


def forward(inputs, sizes, implementation):
    """Returns (loss, kl)."""
    return sparse_indexer_kl(**inputs, scale=sizes["x"] ** -0.5, implementation=implementation)


def backward(inputs, sizes, implementation):
    """Returns (loss, kl) and the gradients of the indexer's three inputs."""

    def loss(trained):
        return forward(inputs | trained, sizes, implementation)

    trained = {name: inputs[name] for name in ("idx_q", "idx_w", "idx_k")}
    return jax.value_and_grad(loss, has_aux=True)(trained)


def forward_cost(sizes):
    """Cost of the value."""
    return cost.queries(*(sizes[name] for name in "btknxij"), gradients=False)


def backward_cost(sizes):
    """Cost with the gradients; the gradients of single rows need not go through memory."""
    b, t, i, j = (sizes[name] for name in "btij")
    moved = forward_cost(sizes).bytes + 4 * b * t * i * j
    cost_of_rows = cost.queries(*(sizes[name] for name in "btknxij"), gradients=True)
    return sum_costs(cost_of_rows, bytes=moved)


CASES = {
    "forward": Case(SIZES, inputs, forward, forward_cost, SMALL),
    "backward": Case(SIZES, inputs, backward, backward_cost, SMALL),
}
