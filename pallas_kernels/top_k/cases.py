"""GLM-5's selection alone: 2048 keys for a batch of decoding sequences, and for a chunk of a prompt."""

import jax
import jax.numpy as jnp

from pallas_kernels.cases import Case
from pallas_kernels.cost import Cost
from pallas_kernels.top_k import top_k

DECODE = {"m": 64, "s": 131072, "k": 2048}
PREFILL = {"m": 8192, "s": 65536, "k": 2048}
SMALL = {"m": 3, "s": 20000, "k": 500}


def inputs(sizes, key):
    """Normal scores."""
    return {"scores": jax.random.normal(key, (sizes["m"], sizes["s"]), jnp.float32)}


def select(inputs, sizes, implementation):
    """The places."""
    return top_k(**inputs, k=sizes["k"], implementation=implementation)


def cost(sizes):
    """Every score read and every place written once."""
    return Cost(0, 4 * sizes["m"] * (sizes["s"] + sizes["k"]), "float32")


CASES = {
    "decode": Case(DECODE, inputs, select, cost, SMALL),
    "prefill": Case(PREFILL, inputs, select, cost, SMALL),
}
