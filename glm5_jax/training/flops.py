"""Computes model FLOPs per token from a config: the numerator of MFU, and the cost of a row for balancing.

They also hold for a length or a position that no program is traced for. "Model" FLOPs are those that the mathematics
needs, whatever program computes it (`parallel.flops` counts a program's):

- Matrix multiplications count two per multiply-add.
- The causal triangle is counted exactly.
- The backward pass counts twice the forward, and recomputation nothing. So MFU falls when a run recomputes
  more.
- With adapters, weights are frozen and a product with one counts once in the backward pass. The adapters themselves,
  less than a hundredth, are not counted.
"""

import collections
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from glm5_jax.config import RECURRENT_KINDS, ModelConfig
from pallas_kernels.chips import find_chip


def peak_flops(device_kind: str) -> float | None:
    """Returns the bfloat16 FLOP/s of one device; None where unknown (CPUs)."""
    chip = find_chip(device_kind)
    return chip.flops["bfloat16"] if chip else None


def forward_flops(cfg: ModelConfig, t: int, mtp_steps: int = 0) -> float:
    """Returns the FLOPs of one token's forward, averaged over a document of t tokens.

    With mtp_steps > 0, the MTP block and the head run that many more times. A packed row of shorter documents
    needs a little less.
    """
    return float(_forward(cfg, functools.partial(_mean_keys, t), mtp_steps))


def train_flops(
    cfg: ModelConfig,
    t: int,
    mtp_steps: int = 0,
    *,
    trains_trunk: bool = True,
    trains_indexers: bool = False,
) -> float:
    """Returns the FLOPs of one token's training step: a forward, and twice its size for the backward.

    trains_trunk: whether anything except the indexers is trained. trains_indexers: whether the indexers are
    trained: on all visible keys while attention is dense, on the selected keys afterwards. Their target is the
    attention of the same forward.
    """
    keys = functools.partial(_mean_keys, t)
    return float(_train(cfg, keys, mtp_steps, trains_trunk, trains_indexers))


def token_train_flops(
    cfg: ModelConfig,
    position: Int[ArrayLike, "..."],
    mtp_steps: int = 0,
    *,
    trains_trunk: bool = True,
    trains_indexers: bool = False,
) -> Float[Array, "..."]:
    """Returns `train_flops` of the tokens at these positions (from 0) of their documents, as float32."""
    visible = jnp.asarray(position, jnp.float32) + 1

    def keys(max_keys):
        return visible if max_keys is None else jnp.minimum(visible, max_keys)

    flops = _train(cfg, keys, mtp_steps, trains_trunk, trains_indexers)
    return jnp.broadcast_to(flops, visible.shape)


# keys(max_keys): number of keys that a query attends to, or its mean over queries, if it attends to at
# most max_keys; None: to all visible keys.
KeyCount = Callable[[int | None], float | jax.Array]


def _mean_keys(t: int, max_keys: int | None) -> float:
    """Returns the mean number of keys over the queries of a document of t tokens."""
    max_keys = t if max_keys is None else min(max_keys, t)
    return (max_keys * (max_keys + 1) / 2 + (t - max_keys) * max_keys) / t


def _forward(cfg: ModelConfig, keys: KeyCount, mtp_steps: int):
    selection = _indexers(cfg, mtp_steps, keys(None)) if cfg.attention == "sparse" else 0
    return 2.0 * (_trunk(cfg, keys, mtp_steps) + selection)


def _train(
    cfg: ModelConfig, keys: KeyCount, mtp_steps: int, trains_trunk: bool, trains_indexers: bool
):
    backward = 4.0 * _trunk(cfg, keys, mtp_steps)
    if cfg.lora.rank:
        backward -= 2.0 * _products(cfg, mtp_steps)
    total = _forward(cfg, keys, mtp_steps) + trains_trunk * backward
    if not trains_indexers:
        return total
    if cfg.attention == "sparse":
        return total + 4.0 * _indexers(cfg, mtp_steps, keys(cfg.index_topk))
    return total + 6.0 * _indexers(cfg, mtp_steps, keys(None))


def _trunk(cfg: ModelConfig, keys: KeyCount, mtp_steps: int):
    """Returns the multiply-adds per token of everything except the indexers."""
    attended = sum(n * keys(max_keys) for max_keys, n in _per_key(cfg, mtp_steps).items())
    return _products(cfg, mtp_steps) + attended


def _products(cfg: ModelConfig, mtp_steps: int) -> float:
    """Returns the multiply-adds per token of the products with weights, without the indexers'."""
    layers = sum(
        _layer(cfg, kind, i >= cfg.first_k_dense_replace) for i, kind in enumerate(cfg.layer_kinds)
    )
    head = cfg.hidden_size * cfg.vocab_size
    mtp = _layer(cfg, "full", True) + 2 * cfg.hidden_size**2 + head
    return float(layers + head + mtp_steps * mtp)


def _indexers(cfg: ModelConfig, mtp_steps: int, keys):
    """Returns the multiply-adds per token of all indexers for a number of keys per query.

    The MTP block's indexer counts once for each of its steps.
    """
    d, q, i, j = cfg.hidden_size, cfg.q_lora_rank, cfg.index_n_heads, cfg.index_head_dim
    return (len(cfg.full_layers) + mtp_steps) * (float(q * i * j + d * j + d * i) + i * j * keys)


def _per_key(cfg: ModelConfig, mtp_steps: int) -> dict[int | None, int]:
    """Returns {maximum keys of a query: multiply-adds per key} of all layers' attention."""
    per_key = collections.Counter()
    for kind in (*cfg.layer_kinds, *("full",) * mtp_steps):
        if kind in RECURRENT_KINDS:
            continue
        max_keys = cfg.sliding_window if kind == "window" else None
        max_keys = cfg.index_topk if cfg.attention == "sparse" else max_keys
        width = cfg.qk_nope_head_dim + cfg.qk_rope_head_dim + cfg.v_head_dim
        per_key[max_keys] += cfg.num_attention_heads * width
    return per_key


def _layer(cfg: ModelConfig, kind: str, is_moe: bool) -> int:
    """Returns the multiply-adds per token of one layer, without its indexer and the costs per key."""
    d, n, q, c = cfg.hidden_size, cfg.num_attention_heads, cfg.q_lora_rank, cfg.kv_lora_rank
    h, r, u = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
    total = n * u * d
    if cfg.projections == "gqa":
        total += d * n * (h + r) + d * cfg.num_key_value_heads * (h + r + u)
    else:
        total += d * q + q * n * (h + r) + d * (c + r) + c * n * (h + u)
    if kind in RECURRENT_KINDS:
        total += 3 * n * (h + r) * u  # a key's recall, the write, a query's read
    if kind == "gdn":
        taps = n * (h + r) + cfg.num_key_heads * (h + r + u)
        total += cfg.linear_conv_kernel_dim * taps + 2 * d * n + d * n * u
    if not is_moe:
        return total + 3 * d * cfg.intermediate_size
    active = cfg.num_experts_per_tok + cfg.n_shared_experts
    return total + d * cfg.n_routed_experts + 3 * d * cfg.moe_intermediate_size * active
