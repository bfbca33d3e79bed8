"""Rotary position embedding, interleaved, with YaRN (spec: transformers' `glm_moe_dsa`).

GLM-5 rotates the pairs (0, 1), (2, 3), ... in the main attention *and* in the indexer; a port of
DeepSeek-V3.2's half-split indexer is wrong here and shows only beyond index_topk tokens.
"""

import math

import jax.numpy as jnp
import numpy as np

from glm5_jax.config import RopeParameters, yarn_mscale
from pallas_kernels.numerics import wide


def inverse_frequencies(rope: RopeParameters, dim: int) -> np.ndarray:
    """float64[dim / 2]: theta^(-2i/dim), blended towards 1/factor of it by YaRN's ramp."""
    exponents = np.arange(0, dim, 2, dtype=np.float64) / dim
    base = rope.rope_theta**-exponents
    if rope.rope_type == "default":
        return base

    def dimension_of(rotations: float) -> float:
        full = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(full) / (2 * math.log(rope.rope_theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0.0
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    return base / rope.factor * ramp + base * (1 - ramp)


def magnitude(rope: RopeParameters) -> float:
    """Factor on cos and sin; 1 without YaRN."""
    if rope.rope_type == "default":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor, 1.0)


def rope_table(rope: RopeParameters, dim: int, positions, dtype):
    """(cos, sin), each [b t dim/2] in dtype, for positions int[b t]; angles are wide."""
    inner = wide(dtype)
    frequencies = jnp.asarray(inverse_frequencies(rope, dim), inner)
    angles = positions[..., None].astype(inner) * frequencies
    scale = magnitude(rope)
    return (jnp.cos(angles) * scale).astype(dtype), (jnp.sin(angles) * scale).astype(dtype)
