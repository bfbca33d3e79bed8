"""Reads config.json of the released files and of transformers' save_pretrained, and writes it back."""

import dataclasses
import json
import pathlib

import pytest

from glm5_jax import presets
from glm5_jax.checkpoint.hf_config import from_hf, to_hf
from glm5_jax.config import RopeParameters

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"

# Facts of the published config.json of GLM-5 and GLM-5.1.
GLM5 = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 154820,
    "pretraining_tp": 1,
    "q_lora_rank": 2048,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "transformers_version": "5.0.2.dev0",
    "use_cache": True,
    "v_head_dim": 256,
    "vocab_size": 154880,
}
GLM5_2 = GLM5 | {
    "head_dim": 192,
    "index_share_for_mtp_iteration": True,
    "index_skip_topk_offset": 3,
    "index_topk_freq": 4,
    "index_topk_pattern": None,
    "indexer_types": ["full" if max(i - 2, 0) % 4 == 0 else "shared" for i in range(78)],
    "max_position_embeddings": 1048576,
    "moe_router_dtype": "float32",
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
}
GLM4_7_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 154820,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "transformers_version": "5.0.0rc0",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
RELEASED = {"glm5": GLM5, "glm5_2": GLM5_2, "glm4_7_flash": GLM4_7_FLASH}


def saved_form(source: dict) -> dict:
    """Returns what transformers 5.23 writes after reading a released config.json."""
    dense, layers = source["first_k_dense_replace"], source["num_hidden_layers"]
    saved = source | {
        "bos_token_id": 0,
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
        "output_router_logits": False,
        "qk_head_dim": 256,
        "transformers_version": "5.23.0",
        "use_cache": True,
    }
    if source["model_type"] == "glm4_moe_lite":
        rope = {name: saved.pop(name) for name in ("rope_theta", "partial_rotary_factor")}
        del saved["rope_scaling"]
        saved |= {"initializer_range": 0.02, "pretraining_tp": 1, "rope_interleave": True}
        return saved | {"rope_parameters": rope | {"rope_type": "default"}}
    saved |= {"layer_types": ["indexed_attention"] * layers, "mlp_bias": False, "head_dim": 64}
    return {"indexer_types": ["full"] * layers} | saved


@pytest.mark.parametrize("name", RELEASED)
def test_released_file_equals_preset(name):
    cfg = from_hf(RELEASED[name])
    assert dataclasses.replace(cfg, hf_extra=()) == presets.get(name)


@pytest.mark.parametrize("name", RELEASED)
def test_saved_form_gives_same_model(name):
    released, saved = from_hf(RELEASED[name]), from_hf(saved_form(RELEASED[name]))
    assert released.full_layers == saved.full_layers
    differing = {"hf_extra", "indexer_types", "bos_token_id"}
    for field in dataclasses.fields(released):
        if field.name not in differing:
            assert getattr(released, field.name) == getattr(saved, field.name), field.name


@pytest.mark.parametrize("form", [lambda x: x, saved_form], ids=["released", "saved"])
@pytest.mark.parametrize("name", RELEASED)
def test_writes_every_field_back(name, form):
    source = form(RELEASED[name])
    written = to_hf(from_hf(source))
    for spelling in ("rope_theta", "rope_scaling"):  # written in the present spelling
        source = {k: v for k, v in source.items() if k != spelling}
    assert {k: written.get(k, "absent") for k in source} == source
    assert from_hf(written) == from_hf(form(RELEASED[name]))


@pytest.mark.parametrize("golden", sorted(p.name for p in GOLDENS.glob("hf_*")))
def test_writes_transformers_files_back(golden):
    source = json.loads((GOLDENS / golden / "config.json").read_text())
    cfg = from_hf(source)
    written = json.loads(json.dumps(to_hf(cfg)))
    assert from_hf(written) == cfg
    for name in set(source) - {"rope_theta", "rope_scaling", "rope_parameters"}:
        assert written[name] == source[name], name
    rope = source.get("rope_parameters", {"rope_theta": source.get("rope_theta")})
    assert rope.items() <= written["rope_parameters"].items()


@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets_survive_round_trip(name):
    assert from_hf(to_hf(presets.get(name))) == presets.get(name)


def test_fields_without_hf_name_survive_round_trip():
    cfg = dataclasses.replace(
        presets.tiny(), attention="dense", latent_norm_eps=1e-5, index_norm_eps=1e-5
    )
    written = to_hf(cfg)
    assert from_hf(written) == cfg
    # transformers always runs the indexer: it must select every key there.
    assert written["index_topk"] == cfg.max_position_embeddings
    with pytest.raises(ValueError, match="glm5_jax.speed"):
        from_hf(written | {"glm5_jax": {"speed": 1}})
    assert from_hf(written | {"glm5_jax": {"index_norm_eps": 1}}).index_norm_eps == 1.0


def test_absent_fields_take_defaults_of_transformers():
    cfg = from_hf({"model_type": "glm_moe_dsa"})
    assert cfg.rope_parameters.rope_theta == 10_000.0
    assert cfg.num_nextn_predict_layers == 0
    assert (cfg.eos_token_id, cfg.pad_token_id, cfg.bos_token_id) == ((), None, None)
    assert cfg.dtype == "float32"
    assert cfg.hidden_size == 6144 and cfg.first_k_dense_replace == 3
    lite = from_hf({"model_type": "glm4_moe_lite"})
    assert lite.hidden_size == 2048 and lite.first_k_dense_replace == 1


@pytest.mark.parametrize(
    ("spelling", "field", "value"),
    [
        ({"num_experts": 16}, "n_routed_experts", 16),
        ({"num_local_experts": 16}, "n_routed_experts", 16),
        ({"torch_dtype": "float16"}, "dtype", "float16"),
        ({"eos_token_id": 7}, "eos_token_id", (7,)),
        ({"eos_token_id": [7, 8]}, "eos_token_id", (7, 8)),
        ({"eos_token_id": None}, "eos_token_id", ()),
        ({"rope_theta": 5e5}, "rope_parameters", RopeParameters(rope_theta=5e5)),
        ({"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2}, "first_k_dense_replace", 2),
        # The list wins, because save_pretrained leaves the class default next to it.
        (
            {"mlp_layer_types": ["dense"] + ["sparse"] * 3, "first_k_dense_replace": 3},
            "first_k_dense_replace",
            1,
        ),
        ({"layer_types": ["deepseek_sparse_attention"] * 4}, "num_hidden_layers", 4),
        ({"index_topk_pattern": "FSSF"}, "full_layers", (0, 3)),
        ({"index_topk_pattern": ["full", "full", "shared", "full"]}, "full_layers", (0, 1, 3)),
        ({"index_topk_freq": 2}, "full_layers", (0, 1, 3)),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, "full_layers", (0, 2)),
        ({"index_topk_freq": 1, "index_topk_pattern": "FSFS"}, "full_layers", (0, 2)),
        ({"index_topk_freq": 0}, "full_layers", (0, 1, 2, 3)),
    ],
    ids=str,
)
def test_reads_alternative_spellings(spelling, field, value):
    source = {"model_type": "glm_moe_dsa", "num_hidden_layers": 4} | spelling
    cfg = from_hf(source)
    assert getattr(cfg, field) == value
    assert from_hf(to_hf(cfg)) == cfg


def test_yarn_spellings_give_same_rope():
    fields = {"factor": 4, "mscale": 1.0, "mscale_all_dim": 0.5}
    base = {"model_type": "glm_moe_dsa", "max_position_embeddings": 4096}
    now = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **fields}}
    then = {"rope_theta": 1000000, "rope_scaling": {"type": "yarn", **fields}}
    assert from_hf(base | now).rope_parameters == from_hf(base | then).rope_parameters
    rope = from_hf(base | now).rope_parameters
    assert rope.original_max_position_embeddings == 4096
    assert (rope.factor, rope.mscale, rope.mscale_all_dim) == (4.0, 1.0, 0.5)
    outside = from_hf(base | now | {"original_max_position_embeddings": 512}).rope_parameters
    assert outside.original_max_position_embeddings == 512


def test_extra_fields_follow_changed_model():
    cfg = from_hf(saved_form(GLM5_2))
    short = dataclasses.replace(cfg, num_hidden_layers=7, indexer_types=("full",) * 7)
    written = to_hf(short)
    assert written["layer_types"] == ["indexed_attention"] * 7
    assert "index_topk_freq" not in written
    assert from_hf(written).full_layers == tuple(range(7))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scoring_func": "softmax"}, ["scoring_func", "'softmax'", "'sigmoid'"]),
        ({"topk_method": "greedy"}, ["topk_method", "'greedy'", "'noaux_tc'"]),
        ({"rope_interleave": False}, ["rope_interleave", "False", "permute"]),
        ({"indexer_rope_interleave": False}, ["indexer_rope_interleave", "False"]),
        ({"moe_layer_freq": 2}, ["moe_layer_freq", "2", "1"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "SwiGLU"]),
        ({"attention_dropout": 0.1}, ["attention_dropout", "0.1", "0.0"]),
        ({"mlp_bias": True}, ["mlp_bias", "True"]),
        ({"moe_router_dtype": "bfloat16"}, ["moe_router_dtype", "'bfloat16'"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"num_key_value_heads": 8}, ["num_key_value_heads", "8", "64"]),
        ({"qk_head_dim": 192}, ["qk_head_dim", "192", "256"]),
        ({"architectures": ["GlmMoeDsaModel"]}, ["architectures", "GlmMoeDsaForCausalLM"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config", "dequantise"]),
        ({"mlp_layer_types": ["sparse", "dense"]}, ["mlp_layer_types", "78 layers"]),
        ({"mlp_layer_types": ["sparse"] * 77 + ["dense"]}, ["mlp_layer_types", "before"]),
        ({"layer_types": ["full_attention"] * 78}, ["layer_types", "indexed_attention"]),
        ({"layer_types": ["indexed_attention"]}, ["layer_types", "78 times"]),
        ({"indexer_types": ["full"] * 78, "index_topk_freq": 4}, ["indexer_types", "freq"]),
        ({"index_topk_pattern": "FX"}, ["index_topk_pattern", "FX", "F and S"]),
        ({"index_topk_freq": "4"}, ["index_topk_freq", "integer"]),
        ({"num_experts": 8}, ["num_experts", "8", "256"]),
        ({"torch_dtype": "float16"}, ["torch_dtype", "'float16'", "'bfloat16'"]),
        ({"rope_theta": 10000}, ["rope_theta", "10000", "1000000"]),
        ({"rope_parameters": {"rope_type": "llama3"}}, ["rope_type", "'llama3'", "yarn"]),
        ({"rope_parameters": {"low_freq_factor": 1}}, ["rope_parameters.low_freq_factor"]),
        ({"rope_parameters": {"rope_theta": "1e6"}}, ["rope_parameters.rope_theta", "float"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor", "0.5"]),
        ({"rope_parameters": "yarn"}, ["rope_parameters", "'yarn'", "dict"]),
        ({"indexer_types": "full"}, ["indexer_types", "'full'", "list"]),
        ({"indexer_types": [["full"]] * 78}, ["indexer_types", "['full']", "str"]),
        ({"mlp_layer_types": 3}, ["mlp_layer_types", "3", "list"]),
        ({"hidden_size": "6144"}, ["hidden_size", "'6144'", "int"]),
        ({"hidden_size": True}, ["hidden_size", "True", "int"]),
        ({"q_lora_rank": None}, ["q_lora_rank", "None", "int"]),
        ({"norm_topk_prob": 1}, ["norm_topk_prob", "1", "bool"]),
        ({"eos_token_id": ["a"]}, ["eos_token_id", "'a'"]),
        ({"first_k_dense_replace": 99}, ["first_k_dense_replace", "99"]),
        ({"dtype": "int8"}, ["dtype", "'int8'"]),
        ({"dtype": []}, ["dtype is []", "str"]),
        ({"glm5_jax": {"latent_norm_eps": "x"}}, ["glm5_jax.latent_norm_eps", "'x'", "float"]),
        ({"glm5_jax": {"index_norm_eps": None}}, ["glm5_jax.index_norm_eps", "None", "float"]),
        ({"glm5_jax": {"index_topk": "8"}}, ["glm5_jax.index_topk", "'8'", "int"]),
        ({"glm5_jax": {"attention": 3}}, ["glm5_jax.attention", "3", "str"]),
        ({"glm5_jax": {"attention": "full"}}, ["attention", "'full'", "'dense'"]),
        ({"model_type": "deepseek_v32"}, ["deepseek_v32", "glm_moe_dsa"]),
        ({"model_type": ["glm_moe_dsa"]}, ["model_type", "['glm_moe_dsa']"]),
    ],
    ids=str,
)
def test_names_contradiction_with_value_and_fix(change, words):
    with pytest.raises(ValueError) as error:
        from_hf(GLM5 | change, "x/config.json")
    for word in ["x/config.json", *words]:
        assert word in str(error.value)


def test_rejects_config_that_is_no_object():
    with pytest.raises(ValueError, match=r"config.json holds \[\], not an object; fetch it again"):
        from_hf([])


def test_reports_all_bad_fields_in_one_error():
    source = GLM5 | {"sliding_window": 4096, "mhc_streams": None, "scoring_func": "softmax"}
    with pytest.raises(ValueError) as error:
        from_hf(source)
    for word in ("mhc_streams, sliding_window", "scoring_func"):
        assert word in str(error.value)


def test_rejects_indexer_fields_of_model_without_indexer():
    with pytest.raises(
        ValueError, match="unknown fields: index_topk, index_topk_freq, indexer_types"
    ):
        from_hf(GLM4_7_FLASH | {"index_topk": 8, "indexer_types": ["full"], "index_topk_freq": 1})
    with pytest.raises(ValueError, match="head_dim is 192; qk_rope_head_dim is 64"):
        from_hf(GLM4_7_FLASH | {"head_dim": 192})


def test_glm4_moe_lite_reads_dense_layers_from_list():
    with pytest.raises(ValueError, match="first_k_dense_replace is 2; .* is 1; make them agree"):
        from_hf(GLM4_7_FLASH | {"first_k_dense_replace": 2})
    kinds = ["dense"] * 2 + ["sparse"] * 45
    cfg = from_hf(GLM4_7_FLASH | {"first_k_dense_replace": 2, "mlp_layer_types": kinds})
    assert cfg.first_k_dense_replace == 2


@pytest.mark.parametrize(
    "cfg",
    [
        dataclasses.replace(presets.tiny(), index_topk=None, attention="dense"),
        dataclasses.replace(presets.glm4_7_flash(), index_topk=2048),
    ],
    ids=["no indexer", "an indexer"],
)
def test_rejects_writing_type_unknown_to_hf(cfg):
    with pytest.raises(ValueError, match="set model_type to match"):
        to_hf(cfg)


@pytest.mark.parametrize(
    ("cfg", "fields"),
    [
        (presets.ablation("gqa"), "projections, num_key_value_heads"),
        (presets.ablation("window"), "layer_attention, sliding_window"),
        (dataclasses.replace(presets.tiny(), simple_gdn_beta=0.5), "simple_gdn_beta"),
    ],
)
def test_rejects_writing_fields_unknown_to_hf(cfg, fields):
    with pytest.raises(ValueError, match=f"HF's {cfg.model_type} has no {fields}; save this model"):
        to_hf(cfg)


def test_writes_ablation_without_indexer():
    written = to_hf(presets.ablation("mla"))
    assert written["model_type"] == "glm4_moe_lite" and to_hf(from_hf(written)) == written
