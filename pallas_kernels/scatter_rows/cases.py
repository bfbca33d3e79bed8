"""GLM-5's latents in bfloat16 in a TPU's form: a prompt chunk that fills its pages."""

import jax
import jax.numpy as jnp

from pallas_kernels.cases import Case
from pallas_kernels.scatter_rows import cost as formula, scatter_rows

SIZES = {"m": 8192, "w": 384}
SMALL = {"m": 40, "w": 128}


def inputs(sizes, key):
    """Returns random words, and a permutation of the places."""
    keys = jax.random.split(key, 3)
    shape = (sizes["m"], 1, sizes["w"])
    rows, new = (
        jax.lax.bitcast_convert_type(jax.random.bits(k, shape), jnp.int32) for k in keys[:2]
    )
    return {"rows": rows, "new": new, "places": jax.random.permutation(keys[2], sizes["m"])}


def run(inputs, sizes, implementation):
    """Writes all rows."""
    return scatter_rows(**inputs, implementation=implementation)


def cost(sizes):
    """Cost of reading and writing each row once."""
    return formula.write(sizes["m"], sizes["w"])


CASES = {"chunk": Case(SIZES, inputs, run, cost, SMALL)}
