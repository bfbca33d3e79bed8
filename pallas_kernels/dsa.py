"""Sparse against dense attention of one layer, by length: what DeepSeek Sparse Attention saves.

Both forms start from projected queries and the cached latents, and end before the output projection. The dense
form expands keys and values and attends to all of them. The sparse form scores, selects, folds and attends.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.cases import Case
from pallas_kernels.cost import Cost
from pallas_kernels.flash_mla import flash_mla
from pallas_kernels.lightning_indexer import lightning_indexer
from pallas_kernels.sparse_flash_attention import sparse_flash_attention

# Sizes of one layer, by axis letters; k: selected keys.
GLM5 = {"n": 64, "h": 192, "r": 64, "u": 256, "c": 512, "i": 32, "j": 128, "k": 2048}
# Small sizes for a CPU, with the same ratios of FLOPs.
MINIATURE = {"n": 8, "h": 48, "r": 16, "u": 64, "c": 128, "i": 4, "j": 32, "k": 256}


def inputs(sizes, key, dtype=jnp.bfloat16):
    """Returns random queries, latents, up-projections and index vectors of t tokens."""
    t, n, h, r, u, c, i, j = (sizes[name] for name in "tnhrucij")
    shapes = {
        "q": (1, t, n, h + r),
        "latent": (1, t, c + r),
        "k_b": (c, n, h),
        "v_b": (c, n, u),
        "idx_q": (1, t, i, j),
        "idx_k": (1, t, j),
    }
    keys = jax.random.split(key, len(shapes) + 1)
    arrays = {
        name: jax.random.normal(subkey, shape, dtype)
        for subkey, (name, shape) in zip(keys, shapes.items())
    }
    arrays |= {name: arrays[name] * c**-0.5 for name in ("k_b", "v_b")}
    return arrays | {"idx_w": jax.random.normal(keys[-1], (1, t, i), jnp.float32)}


def dense(x, sizes, implementation="auto", block: int = 128):
    """Returns dense attention [1 t n u]: every query over all keys before it."""
    c_kv, k_rope = jnp.split(x["latent"], [sizes["c"]], axis=-1)
    k_nope = jnp.einsum("bsc,cnh->bsnh", c_kv, x["k_b"])
    v = jnp.einsum("bsc,cnu->bsnu", c_kv, x["v_b"])
    shared = jnp.broadcast_to(k_rope[:, :, None], (*k_nope.shape[:3], sizes["r"]))
    k = jnp.concatenate([k_nope, shared], axis=-1)
    scale = (sizes["h"] + sizes["r"]) ** -0.5
    return flash_mla(x["q"], k, v, scale=scale, block=block, implementation=implementation)[0]


def select(x, sizes, implementation="auto", block: int = 128):
    """Returns topk int32[1 t k]."""
    queries = (x["idx_q"], x["idx_w"], x["idx_k"])
    return lightning_indexer(*queries, sizes["k"], block=block, implementation=implementation)


def sparse(x, sizes, implementation="auto", block: int = 128, gather_block: int = 32):
    """Returns sparse attention [1 t n u]: every query over the keys that its indexer selects."""
    topk = select(x, sizes, implementation, block)
    q_nope, q_rope = jnp.split(x["q"], [sizes["h"]], axis=-1)
    q = jnp.concatenate([jnp.einsum("btnh,cnh->btnc", q_nope, x["k_b"]), q_rope], axis=-1)
    out, _, _ = sparse_flash_attention(
        q,
        x["latent"],
        topk,
        scale=(sizes["h"] + sizes["r"]) ** -0.5,
        value_dim=sizes["c"],
        block=gather_block,
        implementation=implementation,
    )
    return jnp.einsum("btnc,cnu->btnu", out, x["v_b"])


def cost(sizes) -> Cost:
    """Cost of `sparse` for the first t tokens: its products, and inputs and outputs once."""
    t, n, h, r, u, c, i, j, k = (sizes[name] for name in "tnhrucijk")
    pairs = t * (t + 1) // 2
    num_selected = sum(min(q + 1, k) for q in range(min(t, k))) + max(t - k, 0) * k
    folds = 2 * t * c * n * (h + u)
    moved = 2 * (t * n * (h + r + u) + t * (c + r) + c * n * (h + u) + t * (i + 1) * j)
    flops = folds + 2 * pairs * i * j + 2 * num_selected * n * (2 * c + r)
    return Cost(flops, moved + 4 * t * i)


def _case(t: int) -> Case:
    return Case(GLM5 | {"t": t}, inputs, sparse, cost, MINIATURE | {"t": 1024})


CASES = {f"{t // 1024}k": _case(t) for t in (4096, 8192, 16384, 32768, 65536, 131072, 202752)}
