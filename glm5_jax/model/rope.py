"""Rotary position embedding (RoPE) on interleaved pairs, with YaRN (spec: transformers' `glm_moe_dsa`).

GLM-5 rotates the pairs (0, 1), (2, 3), ... in the main attention *and* in the indexer. DeepSeek-V3.2's
indexer splits the dimension into halves: a port of it is wrong here, and the error shows only beyond
index_topk tokens.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from glm5_jax.config import RopeParameters, yarn_mscale
from pallas_kernels.numerics import accum_dtype


def inverse_frequencies(rope: RopeParameters, dim: int) -> np.ndarray:
    """Returns float64[dim / 2]: theta^(-2i/dim), blended towards 1/factor of it by YaRN's ramp."""
    exponents = np.arange(0, dim, 2, dtype=np.float64) / dim
    base = rope.rope_theta**-exponents
    if rope.rope_type == "default":
        return base

    positions = rope.original_max_position_embeddings
    if positions is None:
        raise ValueError(
            f"rope_type {rope.rope_type!r} needs original_max_position_embeddings, which is None; set it"
        )

    def dimension_of(rotations: float) -> float:
        full = positions / (rotations * 2 * math.pi)
        return dim * math.log(full) / (2 * math.log(rope.rope_theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0.0
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    return base / rope.factor * ramp + base * (1 - ramp)


def magnitude(rope: RopeParameters) -> float:
    """Returns the factor on cos and sin; 1 without YaRN."""
    if rope.rope_type == "default":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor, 1.0)


def rope_table(
    rope: RopeParameters, dim: int, positions: Int[Array, "b t"], dtype
) -> tuple[Float[Array, "b t dim/2"], Float[Array, "b t dim/2"]]:
    """Returns (cos, sin) in dtype for these positions. Angles are computed in `accum_dtype(dtype)`."""
    inner = accum_dtype(dtype)
    frequencies = jnp.asarray(inverse_frequencies(rope, dim), inner)
    angles = positions[..., None].astype(inner) * frequencies
    scale = magnitude(rope)
    return (jnp.cos(angles) * scale).astype(dtype), (jnp.sin(angles) * scale).astype(dtype)
