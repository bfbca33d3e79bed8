"""GLM-5's latents in bfloat16, as a TPU holds them: a chunk of a prompt, whose pages it fills."""

import jax
import jax.numpy as jnp

from pallas_kernels.cases import Case
from pallas_kernels.write_rows import cost as formula, write_rows

SIZES = {"m": 8192, "w": 384}
SMALL = {"m": 40, "w": 128}


def inputs(sizes, key):
    """Words of any kind, and an order of the places."""
    keys = jax.random.split(key, 3)
    shape = (sizes["m"], 1, sizes["w"])
    old, new = (
        jax.lax.bitcast_convert_type(jax.random.bits(k, shape), jnp.int32) for k in keys[:2]
    )
    return {"rows": old, "new": new, "places": jax.random.permutation(keys[2], sizes["m"])}


def run(inputs, sizes, implementation):
    """All rows."""
    return write_rows(**inputs, implementation=implementation)


def cost(sizes):
    """Each row read and written once."""
    return formula.write(sizes["m"], sizes["w"])


CASES = {"chunk": Case(SIZES, inputs, run, cost, SMALL)}
