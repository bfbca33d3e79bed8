"""Defines the configs of the GLM-5 family by name; `PRESETS` lists the names of the command line."""

import dataclasses

from glm5_jax.config import LAYER_KINDS, ModelConfig, RopeParameters


def glm5() -> ModelConfig:
    """Returns GLM-5 and GLM-5.1: 743.91B parameters, 78 layers + 1 MTP (paper Table 10, released config)."""
    return ModelConfig()


def glm5_2() -> ModelConfig:
    """Returns GLM-5.2: IndexShare, one indexer for four layers, and one million positions."""
    full = ["full" if max(i - 2, 0) % 4 == 0 else "shared" for i in range(78)]
    return dataclasses.replace(
        ModelConfig(),
        indexer_types=tuple(full),
        max_position_embeddings=1_048_576,
        rope_parameters=RopeParameters(rope_theta=8_000_000.0),
    )


def glm4_7_flash() -> ModelConfig:
    """Returns GLM-4.7-Flash, the small MLA model on which the paper validates DSA; without an indexer."""
    return dataclasses.replace(
        ModelConfig(),
        model_type="glm4_moe_lite",
        hidden_size=2048,
        num_hidden_layers=47,
        first_k_dense_replace=1,
        num_attention_heads=20,
        q_lora_rank=768,
        intermediate_size=10240,
        moe_intermediate_size=1536,
        n_routed_experts=64,
        num_experts_per_tok=4,
        routed_scaling_factor=1.8,
        index_topk=None,
        attention="dense",
    )


def small() -> ModelConfig:
    """Returns a model for one accelerator: GLM-5's proportions at 1.27B parameters, 0.27B of them active."""
    return dataclasses.replace(
        ModelConfig(),
        vocab_size=32768,
        hidden_size=1024,
        num_hidden_layers=12,
        first_k_dense_replace=1,
        num_attention_heads=16,
        q_lora_rank=512,
        kv_lora_rank=256,
        qk_nope_head_dim=96,
        qk_rope_head_dim=32,
        v_head_dim=128,
        intermediate_size=4096,
        moe_intermediate_size=512,
        n_routed_experts=64,
        index_n_heads=8,
        index_head_dim=64,
        index_topk=512,
        max_position_embeddings=32768,
        eos_token_id=(32732, 32739, 32741),
        pad_token_id=32732,
    )


def tiny() -> ModelConfig:
    """Returns a model for two CPU cores, with pairwise different sizes so that swapped axes cannot go unnoticed.

    n, e, f, d and v divide by 8 for meshes of 8 devices.
    """
    return dataclasses.replace(
        ModelConfig(),
        vocab_size=2048,
        hidden_size=128,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        num_attention_heads=8,
        q_lora_rank=96,
        kv_lora_rank=48,
        qk_nope_head_dim=20,
        qk_rope_head_dim=12,
        v_head_dim=24,
        intermediate_size=384,
        moe_intermediate_size=64,
        n_routed_experts=16,
        num_experts_per_tok=2,
        index_n_heads=4,
        index_head_dim=28,
        index_topk=40,
        max_position_embeddings=1024,
        rope_parameters=RopeParameters(rope_theta=10_000.0),
        eos_token_id=(2012, 2019, 2021),
        pad_token_id=2012,
        dtype="float32",
    )


def ablation(kind: str, base: ModelConfig | None = None) -> ModelConfig:
    """Returns a model (default: `tiny`) with one of the attentions that the paper compares, without an indexer.

    Args:
      kind: the attention.
        - "mla": unchanged, over all keys.
        - "gqa": grouped queries with 8 key and value heads (table 1), or half of the heads if there are fewer.
        - "window", "gdn", "simple_gdn": every second layer of that kind (GLM-5 2.1.2). A window is 1/32 of the
          positions, as 4096 is of the paper's 131072.
    """
    kinds = ("mla", "gqa", *LAYER_KINDS[1:])
    if kind not in kinds:
        raise ValueError(f"unknown ablation {kind!r}; use one of {', '.join(kinds)}")
    cfg = dataclasses.replace(
        base or tiny(),
        model_type="glm4_moe_lite",
        attention="dense",
        index_topk=None,
        indexer_types=None,
    )
    if kind == "mla":
        return cfg
    if kind == "gqa":
        heads = min(8, max(1, cfg.num_attention_heads // 2))
        return dataclasses.replace(cfg, projections="gqa", num_key_value_heads=heads)
    layers = tuple(kind if i % 2 else "full" for i in range(cfg.num_hidden_layers))
    window = max(1, cfg.max_position_embeddings // 32)
    return dataclasses.replace(cfg, layer_attention=layers, sliding_window=min(4096, window))


PRESETS = {f.__name__: f for f in (glm5, glm5_2, glm4_7_flash, small, tiny)}


def get(name: str) -> ModelConfig:
    """Returns the preset of a name. Raises ValueError with the list of names for another."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; use one of {', '.join(PRESETS)}")
    return PRESETS[name]()
