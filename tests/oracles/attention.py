"""MLA's formulas in NumPy float64, one function each; axis letters of glm5_jax/parallel/axes.py.

Source: DeepSeek-V2 (arXiv 2405.04434, section 2.1), YaRN (arXiv 2309.00071), and the conventions of
transformers' `glm_moe_dsa`. The code is written for readers, not for speed.
"""

import math

import numpy as np


def rms_norm(x, weight, eps):
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension."""
    return weight * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def layer_norm(x, weight, bias, eps):
    """weight * (x - mean) / sqrt(variance + eps) + bias over the last dimension."""
    centred = x - np.mean(x, axis=-1, keepdims=True)
    variance = np.mean(centred * centred, axis=-1, keepdims=True)
    return weight * centred / np.sqrt(variance + eps) + bias


def softmax(x):
    """Computes softmax over the last dimension; entries of -inf are 0, also in a row of only -inf."""
    top = np.max(x, axis=-1, keepdims=True)
    e = np.exp(x - np.where(np.isfinite(top), top, 0.0))
    return e / np.maximum(np.sum(e, axis=-1, keepdims=True), np.finfo(np.float64).tiny)


def yarn_mscale(factor, mscale):
    """0.1 mscale ln(factor) + 1, and 1 if the context is not extended."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_frequencies(rope, dim, max_positions):
    """(inverse frequencies [dim / 2], factor on cos and sin) of HF's `rope_parameters` dict."""
    base = rope.get("rope_theta", 10000.0)
    plain = np.array([base ** (-2.0 * pair / dim) for pair in range(dim // 2)])
    if rope.get("rope_type", "default") == "default":
        return plain, 1.0
    original = rope.get("original_max_position_embeddings") or max_positions
    factor = rope.get("factor") or max_positions / original

    def pair_index(rotations):
        """Returns the index of the pair with this number of rotations over the original context."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = pair_index(rope.get("beta_fast") or 32)
    high = pair_index(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = (high - low) or 0.001
    stretched = np.array([min(max((pair - low) / span, 0.0), 1.0) for pair in range(dim // 2)])
    frequencies = stretched * plain / factor + (1 - stretched) * plain

    magnitude = rope.get("attention_factor")
    if magnitude is None:
        mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
        if mscale and all_dim:
            magnitude = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
        else:
            magnitude = yarn_mscale(factor, 1.0)
    return frequencies, magnitude


def softmax_scale(rope, qk_head_dim, max_positions):
    """(h + r)^-0.5, times m(mscale_all_dim)^2 where RoPE is stretched and the field is set."""
    scale = qk_head_dim**-0.5
    if rope.get("rope_type", "default") != "default" and rope.get("mscale_all_dim"):
        original = rope.get("original_max_position_embeddings") or max_positions
        factor = rope.get("factor") or max_positions / original
        scale *= yarn_mscale(factor, rope["mscale_all_dim"]) ** 2
    return scale


def rope_turns(frequencies, magnitude, positions):
    """Unit complex numbers exp(i * position * frequency), times magnitude: [b t r/2]."""
    return magnitude * np.exp(1j * positions[..., None] * frequencies)


def rope_interleaved(x, turns):
    """Rotates the pairs (x0, x1), (x2, x3), ... of x [b t ... r] as complex numbers.

    The result has all real parts, then all imaginary parts, like in transformers. Dot products do not depend on this
    order, because queries and keys share it.
    """
    turns = turns.reshape(turns.shape[:2] + (1,) * (x.ndim - 3) + turns.shape[2:])
    rotated = (x[..., 0::2] + 1j * x[..., 1::2]) * turns
    return np.concatenate([rotated.real, rotated.imag], axis=-1)


def visible_keys(segment_ids):
    """bool [b t s]: the key is not later than the query and has its segment, which is not 0."""
    t = segment_ids.shape[1]
    causal = np.arange(t)[None, :] <= np.arange(t)[:, None]
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return causal & same & (segment_ids != 0)[:, None, :]


def within_window(query_index, key_index, window):
    """bool [t s]: the key is at the query's position, at one of the window - 1 before it, or later."""
    return query_index[:, None] - key_index[None, :] < window


def attend(query, key, value, keep, scale):
    """softmax(query . key * scale) . value over the keys of `keep`: [b t n u]; zeros without keys.

    query [b t n x], key [b s n x], value [b s n u], keep bool [b t s].
    """
    logits = np.einsum("btnx,bsnx->bnts", query, key) * scale
    weights = softmax(np.where(keep[:, None], logits, -np.inf))
    return np.einsum("bnts,bsnu->btnu", weights, value)
