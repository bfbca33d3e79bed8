"""GLM-5's projections before attention: a decoding batch, and a prompt chunk."""

import jax
import jax.numpy as jnp

from pallas_kernels.cases import Case
from pallas_kernels.mla_prologue import cost as formula, mla_prologue

DECODE = {"b": 64, "t": 1, "d": 6144, "q": 2048, "n": 64, "h": 192, "r": 64, "c": 512}
DECODE |= {"rows": 64 * 4096}
PREFILL = DECODE | {"b": 1, "t": 8192, "rows": 65536}
SMALL = {"b": 8, "t": 2, "d": 256, "q": 128, "n": 4, "h": 96, "r": 32, "c": 128, "rows": 640}


def inputs(sizes, key):
    """Returns unit inputs and weights of unit gain; the tokens' rows are consecutive in each sequence's part."""
    b, t, d, q, n, h, r, c, rows = sizes.values()
    shapes = {"q_a": (d, q), "q_b": (q, n, h + r), "kv_a": (d, c + r)}
    keys = jax.random.split(key, len(shapes) + 1)
    w = {
        name: jax.random.normal(subkey, shape, jnp.bfloat16) * shape[0] ** -0.5
        for subkey, (name, shape) in zip(keys, shapes.items())
    }
    w |= {"q_a_norm": jnp.ones(q, jnp.bfloat16), "kv_a_norm": jnp.ones(c, jnp.bfloat16)}
    angles = jnp.arange(b * t * (r // 2), dtype=jnp.float32).reshape(b, t, -1)
    start = jnp.arange(b, dtype=jnp.int32)[:, None] * (rows // b) + 5
    return {
        "x": jax.random.normal(keys[-1], (b, t, d), jnp.bfloat16),
        "w": w,
        "cos": jnp.cos(angles).astype(jnp.bfloat16),
        "sin": jnp.sin(angles).astype(jnp.bfloat16),
        "cache": jnp.zeros((rows, c + r), jnp.bfloat16),
        "slots": start + jnp.arange(t, dtype=jnp.int32),
    }


def run(inputs, sizes, implementation):
    """Returns c_q, q, latent and the cache."""
    return mla_prologue(**inputs, eps=1e-6, implementation=implementation)


def cost(sizes):
    """Cost with a cache."""
    b, t, d, q, n, h, r, c, _ = sizes.values()
    return formula.forward(b * t, d, q, n * (h + r), c + r, cached=True)


CASES = {
    "decode": Case(DECODE, inputs, run, cost, SMALL),
    "prefill": Case(PREFILL, inputs, run, cost, SMALL),
}
