"""Model FLOPs from shapes, and the peak of known devices.

"Model" FLOPs are what the mathematics needs: matrix multiplications, two per multiply-add, the causal
triangle counted exactly, the backward pass twice the forward, and nothing for recomputation. So MFU
falls when a run recomputes more. (XLA's own `cost_analysis` counts the body of a loop once.)
"""

import collections
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from glm5_jax.config import RECURRENT_KINDS, ModelConfig
from pallas_kernels.chips import chip_of


def peak_flops(device_kind: str) -> float | None:
    """bfloat16 FLOP/s of one device, or None where it is not known (CPUs)."""
    chip = chip_of(device_kind)
    return chip.flops["bfloat16"] if chip else None


def forward_flops(cfg: ModelConfig, t: int, mtp_steps: int = 0) -> float:
    """FLOPs of one token's forward, averaged over a document of t tokens.

    With mtp_steps > 0, the MTP block and the head run that many times more. A packed row of shorter
    documents needs a little less.
    """
    return _forward(cfg, functools.partial(_mean_keys, t), mtp_steps)


def train_flops(
    cfg: ModelConfig, t: int, mtp_steps: int = 0, *, trunk: bool = True, indexers: bool = False
) -> float:
    """FLOPs of one token's training step: a forward, and a backward of twice its size of what learns.

    trunk: whether anything but the indexers does. indexers: whether they do, from all visible keys while
    attention is dense, from the selected ones afterwards; the attention they follow is the forward's own.
    """
    return _train(cfg, functools.partial(_mean_keys, t), mtp_steps, trunk, indexers)


def token_train_flops(
    cfg: ModelConfig, position, mtp_steps: int = 0, *, trunk: bool = True, indexers: bool = False
):
    """float32[...]: `train_flops` of the tokens at these positions int[...] (from 0) of their documents."""
    seen = jnp.asarray(position, jnp.float32) + 1

    def keys(most):
        return seen if most is None else jnp.minimum(seen, most)

    return jnp.broadcast_to(_train(cfg, keys, mtp_steps, trunk, indexers), seen.shape)


# Keys of a query, or their mean over some: keys(most) where it takes at most so many, keys(None) all that it sees.
Keys = Callable[[int | None], float | jax.Array]


def _mean_keys(t: int, most: int | None) -> float:
    """Over the queries of a document of t tokens."""
    most = t if most is None else min(most, t)
    return (most * (most + 1) / 2 + (t - most) * most) / t


def _forward(cfg: ModelConfig, keys: Keys, mtp_steps: int):
    selection = _indexers(cfg, mtp_steps, keys(None)) if cfg.attention == "sparse" else 0
    return 2.0 * (_trunk(cfg, keys, mtp_steps) + selection)


def _train(cfg: ModelConfig, keys: Keys, mtp_steps: int, trunk: bool, indexers: bool):
    total = _forward(cfg, keys, mtp_steps) + trunk * 4.0 * _trunk(cfg, keys, mtp_steps)
    if not indexers:
        return total
    if cfg.attention == "sparse":
        return total + 4.0 * _indexers(cfg, mtp_steps, keys(cfg.index_topk))
    return total + 6.0 * _indexers(cfg, mtp_steps, keys(None))


def _trunk(cfg: ModelConfig, keys: Keys, mtp_steps: int):
    """Multiply-adds per token of everything but the indexers."""
    layers = sum(
        _layer(cfg, kind, i >= cfg.first_k_dense_replace) for i, kind in enumerate(cfg.layer_kinds)
    )
    head = cfg.hidden_size * cfg.vocab_size
    mtp = _layer(cfg, "full", True) + 2 * cfg.hidden_size**2 + head
    attended = sum(n * keys(most) for most, n in _per_key(cfg, mtp_steps).items())
    return float(layers + head + mtp_steps * mtp) + attended


def _indexers(cfg: ModelConfig, mtp_steps: int, keys):
    """Multiply-adds per token of all indexers, the MTP block's at each of its steps, for so many keys."""
    d, q, i, j = cfg.hidden_size, cfg.q_lora_rank, cfg.index_n_heads, cfg.index_head_dim
    return (len(cfg.full_layers) + mtp_steps) * (float(q * i * j + d * j + d * i) + i * j * keys)


def _per_key(cfg: ModelConfig, mtp_steps: int) -> dict[int | None, int]:
    """Multiply-adds of all layers' attention for each key of a query, by how many keys it takes at most."""
    found = collections.Counter()
    for kind in (*cfg.layer_kinds, *("full",) * mtp_steps):
        if kind in RECURRENT_KINDS:
            continue
        most = cfg.sliding_window if kind == "window" else None
        most = cfg.index_topk if cfg.attention == "sparse" else most
        width = cfg.qk_nope_head_dim + cfg.qk_rope_head_dim + cfg.v_head_dim
        found[most] += cfg.num_attention_heads * width
    return found


def _layer(cfg: ModelConfig, kind: str, moe: bool) -> int:
    """Multiply-adds per token of one layer without its indexer, and without what each key costs."""
    d, n, q, c = cfg.hidden_size, cfg.num_attention_heads, cfg.q_lora_rank, cfg.kv_lora_rank
    h, r, u = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
    total = n * u * d
    if cfg.projections == "gqa":
        total += d * n * (h + r) + d * cfg.num_key_value_heads * (h + r + u)
    else:
        total += d * q + q * n * (h + r) + d * (c + r) + c * n * (h + u)
    if kind in RECURRENT_KINDS:
        total += 3 * n * (h + r) * u  # what a key recalls, what is written, what a query reads
    if kind == "gdn":
        taps = n * (h + r) + cfg.num_key_heads * (h + r + u)
        total += cfg.linear_conv_kernel_dim * taps + 2 * d * n + d * n * u
    if not moe:
        return total + 3 * d * cfg.intermediate_size
    active = cfg.num_experts_per_tok + cfg.n_shared_experts
    return total + d * cfg.n_routed_experts + 3 * d * cfg.moe_intermediate_size * active
