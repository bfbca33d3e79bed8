"""Tests of `ModelConfig`, its errors and its derived values."""

import dataclasses

import pytest

from glm5_jax import presets
from glm5_jax.config import LoraConfig, ModelConfig, RopeParameters, yarn_mscale
from glm5_jax.model import glm5

TINY = presets.tiny()
INVALID = [
    (dict(rms_norm_eps=-1e-5), "rms_norm_eps is -1e-05; it must be positive"),
    (dict(latent_norm_eps=float("nan")), "latent_norm_eps is nan; it must be positive"),
    (dict(hidden_size=0), "hidden_size is 0; it must be a positive integer"),
    (dict(vocab_size=12.5), "vocab_size is 12.5"),
    (dict(index_n_heads=-1), "index_n_heads is -1"),
    (dict(n_shared_experts=-1), "n_shared_experts is -1; it must be an integer >= 0"),
    (dict(qk_rope_head_dim=7), "qk_rope_head_dim is 7; RoPE needs an even one"),
    (dict(first_k_dense_replace=5), "first_k_dense_replace 5 exceeds num_hidden_layers 4"),
    (dict(num_experts_per_tok=17), "num_experts_per_tok 17 exceeds n_routed_experts 16"),
    (dict(n_group=3), "n_group 3 does not divide n_routed_experts 16"),
    (dict(topk_group=2), "topk_group 2 is outside 1..n_group 1"),
    (dict(n_group=16, topk_group=2), "at least two"),
    (
        dict(n_group=8, num_experts_per_tok=3),
        "num_experts_per_tok 3 exceeds the 2 experts of topk_group 1",
    ),
    (dict(num_nextn_predict_layers=2), "num_nextn_predict_layers is 2"),
    (dict(attention="flash"), "attention is 'flash'; use 'dense' or 'sparse'"),
    (dict(dtype="int8"), "dtype is 'int8'"),
    (dict(index_topk=None), "attention is 'sparse' but index_topk is None"),
    (dict(index_topk=0), "index_topk is 0; it must be at least 1"),
    (dict(index_head_dim=10), "index_head_dim 10 is smaller than qk_rope_head_dim 12"),
    (dict(indexer_types=("full",)), "indexer_types names 1 layers, num_hidden_layers is 4"),
    (dict(indexer_types=("full", "half", "full", "full")), "indexer_types holds .'half'."),
    (dict(indexer_types=("shared",) + ("full",) * 3), "layer 0 must be 'full'"),
    (dict(layer_attention=("window",) * 4), "layer_attention replaces sparse attention"),
    (dict(layer_attention=("full",)), "layer_attention names 1 layers, num_hidden_layers is 4"),
    (dict(layer_attention=("swa",) * 4), "layer_attention holds .'swa'.; use full, window, gdn"),
    (dict(sliding_window=0), "sliding_window is 0; it must be a positive integer"),
    (dict(linear_conv_kernel_dim=0), "linear_conv_kernel_dim is 0"),
    (dict(simple_gdn_beta=2.5), "simple_gdn_beta is 2.5; the recurrence is stable in"),
    (dict(simple_gdn_beta=0.0), "simple_gdn_beta is 0.0"),
    (dict(int4_group=48), "int4_group is 48; use an even divisor of hidden_size 128 and moe_inter"),
    (dict(int4_group=128), "int4_group is 128; use an even divisor .* moe_intermediate_size 64"),
    (dict(int4_group=1), "int4_group is 1; use an even"),
    (dict(int4_group=0), "int4_group is 0; use an even"),
    (dict(int4_group=32.0), "int4_group is 32.0; use an even"),
    (dict(projections="mqa"), "projections is 'mqa'; use 'mla' or 'gqa'"),
    (dict(projections="gqa"), "projections 'gqa' with an indexer"),
    (dict(projections="gqa", num_key_value_heads=3), "num_key_value_heads 3 does not divide"),
    (
        dict(projections="gqa", index_topk=None, attention="dense", attention_bias=True),
        "projections 'gqa' has no biases",
    ),
]


@pytest.mark.parametrize("changes,message", INVALID)
def test_rejects_contradictory_config(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changes)


@pytest.mark.parametrize(
    "fields,message",
    [
        (dict(rope_type="linear"), "rope_type is 'linear'; use 'default' or 'yarn'"),
        (dict(rope_type="yarn"), "needs original_max_position_embeddings"),
        (dict(rope_theta=1.0), "rope_theta is 1.0; it must exceed 1"),
    ],
)
def test_rejects_invalid_rope_parameters(fields, message):
    with pytest.raises(ValueError, match=message):
        RopeParameters(**fields)


def test_converts_lists_to_tuples():
    cfg = dataclasses.replace(TINY, eos_token_id=[1, 2], indexer_types=["full"] + ["shared"] * 3)
    assert cfg.eos_token_id == (1, 2) and {cfg: 1}[cfg] == 1


def test_lists_full_layers():
    assert TINY.full_layers == (0, 1, 2, 3)
    shared = dataclasses.replace(TINY, indexer_types=("full", "shared", "full", "shared"))
    assert shared.full_layers == (0, 2)
    assert presets.glm4_7_flash().full_layers == ()


def test_lists_layer_kinds():
    assert TINY.layer_kinds == ("full",) * 4 and TINY.gdn_layers == ()
    kinds = ("gdn", "window", "simple_gdn", "gdn")
    dense = dataclasses.replace(TINY, attention="dense", index_topk=None)
    mixed = dataclasses.replace(dense, layer_attention=kinds)
    assert mixed.layer_kinds == kinds and mixed.gdn_layers == (0, 3) and mixed.num_key_heads == 8
    same = dataclasses.replace(TINY, layer_attention=["full"] * 4)  # with sparse attention too
    assert same.layer_attention == ("full",) * 4
    assert presets.ablation("gqa").num_key_heads == 4


# A different value for each field of the model.
OTHER_VALUES = {
    field.name: getattr(TINY, field.name) * 2
    for field in dataclasses.fields(ModelConfig)
    if type(getattr(TINY, field.name)) in (int, float)
} | {
    "n_group": 4,
    "num_experts_per_tok": 3,
    "norm_topk_prob": not TINY.norm_topk_prob,
    "indexer_types": ("full", "shared", "full", "full"),
    "num_nextn_predict_layers": 0,
    "rope_parameters": RopeParameters(rope_theta=77.0),
    "lora": LoraConfig(rank=2),
    "attention_bias": True,
    "tie_word_embeddings": not TINY.tie_word_embeddings,
    "attention": "dense",
    "int4_group": 32,
    "layer_attention": ("full", "window", "full", "full"),
    "projections": "gqa",
}
# Fields that change no number, or (the last three) no number of this model.
UNUSED = set(
    "max_position_embeddings initializer_range eos_token_id pad_token_id bos_token_id dtype model_type hf_extra "
    "num_key_value_heads linear_conv_kernel_dim topk_group".split()
)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(ModelConfig)])
def test_arithmetic_includes_fields_without_effect_on_shapes(field):
    if field in UNUSED:
        return
    mixed = {"layer_attention": ("full", "window", "simple_gdn", "full")}
    plain = {"index_topk": None, "attention": "dense"}
    base = TINY
    if field in ("layer_attention", "projections", "sliding_window", "simple_gdn_beta"):
        base = dataclasses.replace(TINY, **plain, **mixed)
    other = dataclasses.replace(base, **{field: OTHER_VALUES[field]})
    ours, theirs = base.arithmetic, other.arithmetic
    odd = {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}
    if field == "rope_parameters":
        assert odd == {"rope_parameters.rope_theta"}
    elif glm5.abstract_params(base) == glm5.abstract_params(other):
        assert odd == {field}


def test_defaults_equal_glm5():
    assert ModelConfig() == presets.glm5()
    assert ModelConfig().num_moe_layers == 75
    assert ModelConfig().softmax_scale == 1 / 16


def test_computes_yarn_mscale():
    assert yarn_mscale(1.0, 3.0) == yarn_mscale(0.5, 3.0) == 1.0
    assert yarn_mscale(40.0, 1.0) == pytest.approx(1.36888, abs=1e-5)
