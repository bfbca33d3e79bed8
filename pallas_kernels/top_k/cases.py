"""GLM-5's selection without the scoring: 2048 keys for a decoding batch, and for a prompt chunk."""

import jax
import jax.numpy as jnp

from pallas_kernels.cases import Case
from pallas_kernels.cost import Cost
from pallas_kernels.top_k import top_k

DECODE = {"m": 64, "s": 131072, "k": 2048}
PREFILL = {"m": 8192, "s": 65536, "k": 2048}
SMALL = {"m": 3, "s": 20000, "k": 500}


def inputs(sizes, key):
    """Returns normal scores."""
    return {"scores": jax.random.normal(key, (sizes["m"], sizes["s"]), jnp.float32)}


def select(inputs, sizes, implementation):
    """Returns the indices of the k largest."""
    return top_k(**inputs, k=sizes["k"], implementation=implementation)


def cost(sizes):
    """Cost of reading every score and writing every index once."""
    return Cost(0, 4 * sizes["m"] * (sizes["s"] + sizes["k"]), "float32")


CASES = {
    "decode": Case(DECODE, inputs, select, cost, SMALL),
    "prefill": Case(PREFILL, inputs, select, cost, SMALL),
}
