"""The latent cache: c_kv and k_rope of every token, c + r numbers a layer, and idx_k, j a full one."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class LayerCache(NamedTuple):
    """latent [b s c+r]: c_kv, then k_rope; idx_k [b s j], None where the layer has no indexer."""

    latent: jax.Array
    idx_k: jax.Array | None


class Cache(NamedTuple):
    """layers: one `LayerCache` per layer, in order. segments int[b s] (0: empty or padding). length
    int32[]: tokens written so far, the same for every row (shorter prompts are padded on the left)."""

    layers: tuple[LayerCache, ...]
    segments: jax.Array
    length: jax.Array


def init_cache(cfg, batch: int, capacity: int, dtype=None, num_layers: int | None = None) -> Cache:
    """An empty cache for `capacity` tokens; dtype defaults to the config's compute dtype.

    num_layers overrides the depth (1 for the MTP block).
    """
    dtype = jnp.dtype(dtype or cfg.dtype)

    def layer(i):
        indexed = cfg.attention == "sparse" and (num_layers is not None or i in cfg.full_layers)
        return LayerCache(
            jnp.zeros((batch, capacity, cfg.kv_lora_rank + cfg.qk_rope_head_dim), dtype),
            jnp.zeros((batch, capacity, cfg.index_head_dim), dtype) if indexed else None,
        )

    layers = tuple(layer(i) for i in range(num_layers or cfg.num_hidden_layers))
    return Cache(layers, jnp.zeros((batch, capacity), jnp.int32), jnp.zeros((), jnp.int32))


def write(buffer, new, length):
    """buffer [b s ...] with new [b t ...] at s = length."""
    start = (0, length) + (0,) * (buffer.ndim - 2)
    written = lax.dynamic_update_slice(buffer, new.astype(buffer.dtype), start)
    # Without the barrier XLA:CPU writes once for every reader, each time into a copy of the buffer.
    return lax.optimization_barrier(written)
