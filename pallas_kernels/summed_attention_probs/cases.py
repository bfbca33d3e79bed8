"""GLM-5's warm-up of the indexer: a block of queries over 32,768 keys, 64 heads of 256."""

import jax
import jax.numpy as jnp

from pallas_kernels.cases import Case
from pallas_kernels.cost import visible_pairs
from pallas_kernels.summed_attention_probs import cost as formula, summed_attention_probs

SIZES = {"b": 1, "t": 512, "s": 32768, "n": 64, "x": 256}
SMALL = {"b": 1, "t": 128, "s": 256, "n": 2, "x": 64}


def inputs(sizes, key):
    """Returns unit queries and keys, and the log-sum-exp of unit logits over all keys."""
    b, t, s, n, x = (sizes[name] for name in "btsnx")
    keys = jax.random.split(key)
    return {
        "q": jax.random.normal(keys[0], (b, t, n, x), jnp.bfloat16),
        "k": jax.random.normal(keys[1], (b, s, n, x), jnp.bfloat16),
        "lse": jnp.full((b, t, n), jnp.log(s) + 0.5, jnp.float32),
    }


def forward(inputs, sizes, implementation):
    """Probabilities of the last t queries of s tokens."""
    scale, start = sizes["x"] ** -0.5, sizes["s"] - sizes["t"]
    return summed_attention_probs(**inputs, scale=scale, start=start, implementation=implementation)


def cost(sizes):
    """Cost of the last t queries of s tokens."""
    b, t, s, n, x = (sizes[name] for name in "btsnx")
    return formula.forward(b, t, s, n, n, x, visible_pairs(t, s, s - t))


CASES = {"forward": Case(SIZES, inputs, forward, cost, SMALL)}
