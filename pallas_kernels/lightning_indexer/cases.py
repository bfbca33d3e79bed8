"""GLM-5's indexer: 32 heads of 128 and one key of 128 per token, 2048 keys selected."""

import jax
import jax.numpy as jnp

from pallas_kernels.cases import Case
from pallas_kernels.lightning_indexer import (
    cost as formula,
    lightning_indexer,
    paged_lightning_indexer,
)
from pallas_kernels.quantized_vectors import quantize_vectors

HEADS = {"i": 32, "j": 128, "k": 2048}
PREFILL = {"b": 1, "t": 8192, "s": 65536} | HEADS
SMALL = {"b": 1, "t": 24, "s": 1300, "i": 4, "j": 128, "k": 128}
# The last token of every sequence; z: keys per page.
DECODE = {"b": 64, "t": 1, "s": 131072, "z": 64} | HEADS
SMALL_DECODE = {"b": 3, "t": 1, "s": 1536, "z": 64, "i": 8, "j": 128, "k": 128}


def keys_and_queries(dtype):
    """Returns a function that makes queries and keys of unit variance in dtype, with scales if quantized."""

    def make_inputs(sizes, key):
        b, t, s, i, j = (sizes[name] for name in "btsij")
        keys = jax.random.split(key, 3)
        q = jax.random.normal(keys[0], (b, t, i, j), jnp.bfloat16)
        k = jax.random.normal(keys[1], (b, s, j), jnp.bfloat16)
        w = jax.random.normal(keys[2], (b, t, i), jnp.float32) * i**-0.5
        if dtype == "bfloat16":
            return {"idx_q": q, "idx_w": w, "idx_k": k}
        q, scale = quantize_vectors(q, dtype)
        k, k_scale = quantize_vectors(k, dtype)
        return {"idx_q": q, "idx_w": w * scale, "idx_k": k, "k_scale": k_scale}

    return make_inputs


def in_pages(dtype):
    """Returns a function that makes the same inputs with keys in pages, in random order."""

    def make_inputs(sizes, key):
        b, s, z, j = (sizes[name] for name in "bszj")
        arrays = keys_and_queries(dtype)(sizes, key)
        order = jax.random.permutation(key, b * s // z).astype(jnp.int32)
        arrays["pages"] = arrays.pop("idx_k").reshape(-1, z, j)
        if "k_scale" in arrays:
            arrays["page_scales"] = arrays.pop("k_scale").reshape(-1, z)
        return arrays | {"page_table": order.reshape(b, -1), "lengths": jnp.full(b, s, jnp.int32)}

    return make_inputs


def select(inputs, sizes, implementation):
    """Returns topk of the last t of s tokens."""
    start = sizes["s"] - sizes["t"]
    return lightning_indexer(
        **inputs, k=sizes["k"], start=start, block=32, implementation=implementation
    )


def select_paged(inputs, sizes, implementation):
    """Returns topk of the last t of s tokens."""
    return paged_lightning_indexer(**inputs, k=sizes["k"], implementation=implementation)


def cost(dtype):
    """Returns the cost of the last t queries of s tokens."""

    def case_cost(sizes):
        b, t, s, i, j, k = (sizes[name] for name in "btsijk")
        return formula.select(b, t, s, i, j, k, s - t, dtype, dtype != "bfloat16")

    return case_cost


def prefill(dtype, **changed):
    """Returns a case of many queries."""
    name = dtype.partition("_")[0]
    return Case(PREFILL | changed, keys_and_queries(dtype), select, cost(name), SMALL)


def decode(dtype, **changed):
    """Returns a case of one or a few queries per sequence."""
    name = dtype.partition("_")[0]
    return Case(DECODE | changed, in_pages(dtype), select_paged, cost(name), SMALL_DECODE)


CASES = {
    "prefill": prefill("bfloat16"),
    "prefill_int8": prefill("int8"),
    "prefill_float8": prefill("float8_e4m3fn"),
    # A share of the queries of a long sequence, as under context parallelism.
    "prefill_128k": prefill("bfloat16", t=1024, s=131072),
    "prefill_200k": prefill("bfloat16", t=1024, s=202752),
    "decode": decode("bfloat16"),
    "decode_int8": decode("int8"),
    "decode_float8": decode("float8_e4m3fn"),
    "decode_drafts": decode("bfloat16", t=4, b=16),
}
