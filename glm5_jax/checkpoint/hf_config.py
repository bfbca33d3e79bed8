"""Converts HuggingFace's `config.json` to `ModelConfig` and back.

It reads two forms, for `glm_moe_dsa` (GLM-5, 5.1, 5.2, 5.3) and `glm4_moe_lite` (GLM-4.7-Flash): that of the released
checkpoints, and that of transformers' `save_pretrained`, which fills in per-layer lists. Semantics follow transformers
5.23 (`configuration_glm_moe_dsa.py`). Fields that transformers ignores although they would change the model
(`scoring_func`, `rope_interleave`, ...) must have the value that this model computes.
"""

import dataclasses
import json
import logging
import os
import reprlib
import sys
import types
import typing
from typing import Any

from glm5_jax import presets
from glm5_jax.checkpoint import hf_fp8, hf_int4
from glm5_jax.config import MAX_SIZES, ModelConfig, RopeParameters

ARCHITECTURES = {
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
}

# Values of absent fields: transformers' class defaults, which are the released sizes except for theta 10000.
_ABSENT = {
    "dtype": "float32",
    "num_nextn_predict_layers": 0,
    "eos_token_id": (),
    "pad_token_id": None,
}
_ABSENT_THETA = 10_000.0
_DEFAULTS = {
    "glm_moe_dsa": dataclasses.replace(presets.glm5(), **_ABSENT),
    "glm4_moe_lite": dataclasses.replace(presets.glm4_7_flash(), **_ABSENT),
}

_ALIASES = {
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "torch_dtype": "dtype",
    "rope_scaling": "rope_parameters",
}

# Fields of the architecture, with the only supported value and its meaning.
_REQUIRED = {
    "hidden_act": ("silu", "the feed-forwards are SwiGLU"),
    "attention_dropout": (0.0, "there is no dropout"),
    "mlp_bias": (False, "the feed-forwards have no bias"),
    "moe_layer_freq": (1, "every layer after the dense ones is MoE"),
    "scoring_func": ("sigmoid", "the router scores with sigmoid"),
    "topk_method": ("noaux_tc", "experts are chosen by score plus bias within groups"),
    "moe_router_dtype": ("float32", "the router runs in float32"),
    "rope_interleave": (True, "RoPE rotates pairs (2i, 2i+1); permute the weights first"),
    "indexer_rope_interleave": (True, "GLM's indexer rotates pairs (2i, 2i+1)"),
    "partial_rotary_factor": (1.0, "all of qk_rope_head_dim is rotated"),
    "add_cross_attention": (False, "there is no cross-attention"),
    "tie_encoder_decoder": (False, "there is no encoder"),
    "pruned_heads": ({}, "every head is computed"),
}
_WRITTEN = {  # the required fields that every file of a model type has
    "glm_moe_dsa": (
        "hidden_act attention_dropout moe_layer_freq scoring_func topk_method rope_interleave "
        "indexer_rope_interleave"
    ).split(),
    "glm4_moe_lite": "hidden_act attention_dropout topk_method rope_interleave".split(),
}

# Fields of released and saved files that do not change the model. They are stored and written back.
_HARMLESS = (
    "_name_or_path chunk_size_feed_forward ep_size head_dim id2label index_share_for_mtp_iteration "
    "index_skip_topk_offset index_topk_freq index_topk_pattern is_encoder_decoder label2id layer_types "
    "output_attentions output_hidden_states output_router_logits pretraining_tp problem_type "
    "return_dict transformers_version use_cache"
).split()

# Fields that fine-tuning programs and other versions of transformers add. They concern training, generation or the
# loading of code (`auto_map`, which this project never runs). They are stored and written back, with a warning.
_ADDED = frozenset(
    "_attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash "
    "attn_implementation auto_map aux_loss_alpha bad_words_ids begin_suppress_tokens "
    "cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample early_stopping "
    "encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task forced_bos_token_id "
    "forced_eos_token_id gradient_checkpointing is_decoder length_penalty max_length min_length "
    "no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores prefix "
    "remove_invalid_values repetition_penalty return_dict_in_generate router_aux_loss_coef sep_token_id "
    "seq_aux suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p "
    "torchscript typical_p unsloth_fixed unsloth_version use_bfloat16".split()
)

_log = logging.getLogger(__name__)
_SCHEDULE = ("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern")
_NOT_IN_HF = ("attention", "latent_norm_eps", "index_norm_eps", "int4_group")
_ALTERNATIVES = (
    "projections num_key_value_heads layer_attention sliding_window linear_conv_kernel_dim "
    "simple_gdn_beta lora"
).split()
_OURS = "glm5_jax"  # the only field that this project adds, for values that HF's fields cannot hold
_SPECIAL = (
    "model_type dtype eos_token_id rope_parameters indexer_types first_k_dense_replace".split()
)
_DERIVED = "architectures mlp_layer_types num_key_value_heads qk_head_dim".split()
_CONTAINERS = {
    "rope_parameters": dict,
    "rope_scaling": dict,
    "mlp_layer_types": list,
    "indexer_types": list,
    "layer_types": list,
    _OURS: dict,
}
_ROTARY = "rope_parameters.partial_rotary_factor"
_POSITIONS = "original_max_position_embeddings"


def _plain(model_type: str) -> dict[str, Any]:
    """Returns the fields with the same name in both forms, with their types."""
    skip = {*_SPECIAL, *_NOT_IN_HF, *_ALTERNATIVES, "hf_extra"}
    if model_type == "glm4_moe_lite":
        skip |= {"index_topk", "index_n_heads", "index_head_dim"}
    return {f.name: f.type for f in dataclasses.fields(ModelConfig) if f.name not in skip}


def from_hf(source: dict, file: str | os.PathLike = "config.json") -> ModelConfig:
    """Returns the `ModelConfig` of a parsed config.json.

    source: the dict in the file. file: its name in errors. Fields that do not change the model are stored in `hf_extra`.
    Absent fields have transformers' class defaults, but there is no MTP layer unless `num_nextn_predict_layers` is set.

    Raises ValueError with all of these:

    - unknown fields,
    - fields whose value contradicts others or the architecture,
    - a `quantization_config` of files that cannot be read (`hf_int4`, `hf_fp8`).
    """
    if not isinstance(source, dict):
        raise ValueError(f"{file} holds {reprlib.repr(source)}, not an object; fetch it again")
    model_type = source.get("model_type")
    if model_type not in list(_DEFAULTS):
        raise ValueError(
            f"{file}: model_type is {model_type!r}; use one of {', '.join(_DEFAULTS)} "
            "(deepseek_v32 differs: its indexer's RoPE is half-split)"
        )
    layers, max_layers = source.get("num_hidden_layers"), MAX_SIZES["num_hidden_layers"]
    if isinstance(layers, int) and layers > max_layers:
        # Checked first, before lists of that length are created.
        raise ValueError(f"{file}: num_hidden_layers is {layers}; it can be at most {max_layers}")
    reader = _Reader(model_type, dict(source))
    values = reader.read()
    if reader.problems:
        raise ValueError(f"{file} cannot be used:\n  " + "\n  ".join(reader.problems))
    if added := sorted(_ADDED & source.keys()):
        _log.warning(
            "%s: %s do not change what this model computes; stored", file, ", ".join(added)
        )
    try:
        return dataclasses.replace(_DEFAULTS[model_type], **values)
    except ValueError as error:
        raise ValueError(f"{file} cannot be used: {error}") from None


def to_hf(cfg: ModelConfig) -> dict:
    """Returns the config.json of a model: the released form with `mlp_layer_types`, and the fields in `hf_extra`.

    `from_hf(to_hf(cfg)) == cfg`. A model that runs dense although it has an indexer is written with an index_topk that
    covers every position. Raises ValueError for a model that no HF type describes.
    """
    if (cfg.model_type == "glm_moe_dsa") != (cfg.index_topk is not None):
        raise ValueError(
            f"model_type {cfg.model_type!r} with index_topk {cfg.index_topk}: HF's glm_moe_dsa always "
            "has an indexer and glm4_moe_lite never; set model_type to match"
        )
    plain = ModelConfig()
    other = [name for name in _ALTERNATIVES if getattr(cfg, name) != getattr(plain, name)]
    if other:
        raise ValueError(
            f"HF's {cfg.model_type} has no {', '.join(other)}; save this model with the training "
            "checkpoints"
        )
    out = {name: getattr(cfg, name) for name in _plain(cfg.model_type)}
    if cfg.index_topk is not None:
        out["head_dim"] = cfg.qk_rope_head_dim
        if cfg.attention == "dense":
            out["index_topk"] = cfg.max_position_embeddings
        if cfg.indexer_types is not None:
            out["indexer_types"] = list(cfg.indexer_types)
    out |= {name: _REQUIRED[name][0] for name in _WRITTEN[cfg.model_type]}
    out |= {
        "architectures": [ARCHITECTURES[cfg.model_type]],
        "model_type": cfg.model_type,
        "dtype": cfg.dtype,
        "eos_token_id": _one_or_list(cfg.eos_token_id),
        "first_k_dense_replace": cfg.first_k_dense_replace,
        "mlp_layer_types": _mlp_layer_types(cfg.first_k_dense_replace, cfg.num_hidden_layers),
        "num_key_value_heads": cfg.num_attention_heads,
        "qk_head_dim": cfg.qk_nope_head_dim + cfg.qk_rope_head_dim,
        "rope_parameters": _rope_to_hf(cfg.rope_parameters),
    }
    extra = {name: json.loads(text) for name, text in cfg.hf_extra}
    if _ROTARY in extra:
        out["rope_parameters"]["partial_rotary_factor"] = extra.pop(_ROTARY)
    # Stored per-layer fields are adapted if depth or schedule have changed since.
    if extra.get("layer_types"):
        extra["layer_types"] = [extra["layer_types"][0]] * cfg.num_hidden_layers
    if _schedule(extra, cfg.num_hidden_layers) not in (None, cfg.indexer_types):
        extra = {k: v for k, v in extra.items() if k not in _SCHEDULE}
    out |= extra
    ours = {name: getattr(cfg, name) for name in _NOT_IN_HF}
    ours = {n: v for n, v in ours.items() if v != getattr(_DEFAULTS[cfg.model_type], n)}
    if ours.get("attention") == "dense":
        ours["index_topk"] = cfg.index_topk
    if cfg.int4_group is not None:
        out["quantization_config"] = hf_int4.config_of(cfg.int4_group)
    return out | ({_OURS: ours} if ours else {})


@dataclasses.dataclass
class _Reader:
    """Reader of one file's fields, which collects errors in `problems`."""

    model_type: str
    fields: dict
    problems: list[str] = dataclasses.field(default_factory=list)

    def read(self) -> dict:
        """Returns the arguments of `ModelConfig`."""
        # Unknown fields, and fields to store.
        plain = _plain(self.model_type)
        known = {*plain, *_SPECIAL, *_DERIVED, *_ALIASES, *_REQUIRED, *_HARMLESS, *_ADDED, _OURS}
        known |= {"quantization_config", "rope_theta", _POSITIONS}
        if self.model_type == "glm4_moe_lite":
            known -= {"indexer_types", *_SCHEDULE}
        unknown = sorted(set(self.fields) - known)
        if unknown:
            fix = "they may change what the model computes; remove those that do not"
            self.problems.append(f"unknown fields: {', '.join(unknown):.500}; {fix}")
        extra = {k: v for k, v in self.fields.items() if k in _HARMLESS or k in _ADDED}
        # Null means absent, but an explicit null size is an error (q_lora_rank: no q latent).
        self.fields = {k: v for k, v in self.fields.items() if v is not None or k in plain}
        for name, kind in _CONTAINERS.items():
            if not isinstance(self.fields.get(name, kind()), kind):
                self._add_problem(
                    name, self.fields.pop(name), f"it must be of type {kind.__name__}"
                )
        for old, new in _ALIASES.items():
            if old in self.fields:
                stated = self.fields.setdefault(new, self.fields[old])
                self._check_equal(old, self.fields[old], stated, f"{new} is")

        # Fields with the same name in both forms, then the others.
        size = dict(vars(_DEFAULTS[self.model_type]))
        values = {
            name: self._convert(name, self.fields[name], kind, size[name])
            for name, kind in plain.items()
            if name in self.fields
        }
        size |= values
        layers = size["num_hidden_layers"]
        if "dtype" in self.fields:
            values["dtype"] = self._convert("dtype", self.fields["dtype"], str, size["dtype"])
        if "eos_token_id" in self.fields:
            eos = self.fields["eos_token_id"]
            eos = eos if isinstance(eos, list) else [eos]
            values["eos_token_id"] = tuple(self._convert("eos_token_id", i, int, 0) for i in eos)
        values["first_k_dense_replace"] = self._dense_layers(layers)
        values["indexer_types"] = self._indexer_types(layers)
        values["rope_parameters"] = self._rope(size["max_position_embeddings"], extra)
        self._check_required(extra)
        self._check_derived(size, extra)
        values |= self._ours()
        values["hf_extra"] = tuple((k, json.dumps(extra[k], sort_keys=True)) for k in sorted(extra))
        return values

    def _add_problem(self, name, value, fix):
        self.problems.append(f"{name} is {reprlib.repr(value)}; {fix}")

    def _check_equal(self, name, value, other, reason):
        if value != other:
            self._add_problem(name, value, f"{reason} {other!r}; make them agree or remove {name}")

    def _convert(self, name: str, value: Any, kind: Any, fallback: Any) -> Any:
        kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
        good = (float, int) if float in kinds else kinds
        if not isinstance(value, good) or (isinstance(value, bool) and bool not in kinds):
            self._add_problem(name, value, f"it must be of type {kinds[0].__name__}")
            return fallback
        if float not in kinds:
            return value
        if not abs(value) <= sys.float_info.max:  # NaN, infinity, or an integer that overflows
            self._add_problem(name, value, "it must be finite")
            return fallback
        return float(value)

    def _check_required(self, extra: dict):
        for name, (required, reason) in _REQUIRED.items():
            value = self.fields.get(name, required)
            if value != required:
                self._add_problem(name, value, f"it must be {required!r}: {reason}")
            elif name in self.fields and name not in _WRITTEN[self.model_type]:
                extra[name] = value
        quantised = self.fields.get("quantization_config")
        if hf_fp8.is_fp8(quantised):
            problem = hf_fp8.problem_of(quantised)
        else:
            problem = hf_int4.problem_of(quantised)
        if "quantization_config" in self.fields and problem:
            self.problems.append(problem)

    def _check_derived(self, size: dict, extra: dict):
        """Checks fields that repeat others; GLM-5.2 and 5.3 have a `head_dim` that no code reads."""
        heads, layers, r = (
            size[n] for n in ("num_attention_heads", "num_hidden_layers", "qk_rope_head_dim")
        )
        repeats = {
            "num_key_value_heads": (
                heads,
                "MLA has a key and value per head; num_attention_heads is",
            ),
            "qk_head_dim": (size["qk_nope_head_dim"] + r, "qk_nope_head_dim + qk_rope_head_dim is"),
            "architectures": ([ARCHITECTURES[self.model_type]], "this model is"),
        }
        if self.model_type == "glm4_moe_lite":  # there transformers takes it for the RoPE width
            repeats["head_dim"] = (r, "qk_rope_head_dim is")
        get = self.fields.get
        for name, (value, reason) in repeats.items():
            self._check_equal(name, get(name, value), value, reason)
        if get("head_dim") == r and self.model_type != "glm4_moe_lite":
            del extra["head_dim"]
        kinds = ("full_attention",)
        if self.model_type == "glm_moe_dsa":
            kinds = ("indexed_attention", "deepseek_sparse_attention")
        if get("layer_types") not in [None, *([kind] * layers for kind in kinds)]:
            self._add_problem(
                "layer_types",
                get("layer_types"),
                f"it must be {layers} times {kinds[0]!r}",
            )

    def _dense_layers(self, layers: int) -> int:
        """Returns the number of dense layers. The list has priority over the count, as in transformers.

        The reason is that `save_pretrained` leaves a stale count next to the list.
        """
        kinds = self.fields.get("mlp_layer_types")
        if kinds is None:
            default = min(_DEFAULTS[self.model_type].first_k_dense_replace, layers)
            stated = self.fields.get("first_k_dense_replace", default)
            if self.model_type == "glm4_moe_lite":
                reason = "transformers reads mlp_layer_types alone, and without it the count is"
                self._check_equal("first_k_dense_replace", stated, default, reason)
            return self._convert("first_k_dense_replace", stated, int, default)
        dense = kinds.count("dense")
        if len(kinds) != layers or kinds != _mlp_layer_types(dense, layers):
            fix = f"it must be {layers} layers, the 'dense' ones before the 'sparse' ones"
            self._add_problem("mlp_layer_types", kinds, fix)
        return min(dense, layers)

    def _indexer_types(self, layers: int) -> tuple[str, ...] | None:
        stated = self.fields.get("indexer_types")
        try:
            scheduled = _schedule(self.fields, layers)
        except (KeyError, TypeError):
            names = {n: self.fields[n] for n in _SCHEDULE if n in self.fields}
            fix = "use an integer period and offset, or a pattern of F and S"
            self._add_problem(" ".join(names), list(names.values()), fix)
            return None
        if stated is None:
            return scheduled
        if scheduled is not None:
            names = ", ".join(n for n in _SCHEDULE if n in self.fields)
            self._check_equal("indexer_types", stated, list(scheduled), f"{names} give")
        return tuple(self._convert("indexer_types", kind, str, "full") for kind in stated)

    def _rope(self, max_positions: int, extra: dict) -> RopeParameters:
        stated_rope = self.fields.get("rope_parameters", {})
        fields: dict[str, Any] = {k: v for k, v in stated_rope.items() if v is not None}
        for name, value in (
            ("rope_type", fields.pop("type", None)),
            ("rope_theta", self.fields.get("rope_theta")),
            (_POSITIONS, self.fields.get(_POSITIONS)),
        ):
            if value is not None:
                stated = fields.setdefault(name, value)
                self._check_equal(name, value, stated, "rope_parameters says")
        rotary = fields.pop("partial_rotary_factor", None)
        if rotary is not None:
            extra[_ROTARY] = rotary
            required, reason = _REQUIRED["partial_rotary_factor"]
            self._check_equal(_ROTARY, rotary, required, f"{reason}, that is")
        if fields.get("rope_type") == "yarn":
            fields.setdefault(_POSITIONS, max_positions)
        known = {f.name: f.type for f in dataclasses.fields(RopeParameters)}
        for name in sorted(set(fields) - set(known)):
            fix = f"remove it or use {', '.join(known)}"
            self._add_problem(f"rope_parameters.{name}", fields.pop(name), fix)
        fields = {"rope_theta": _ABSENT_THETA} | fields
        for name, value in fields.items():
            fallback = getattr(RopeParameters, name)
            fields[name] = self._convert(f"rope_parameters.{name}", value, known[name], fallback)
        try:
            return RopeParameters(**fields)
        except ValueError as error:
            self.problems.append(str(error))
            return RopeParameters()

    def _ours(self) -> dict:
        ours, defaults = self.fields.get(_OURS, {}), _DEFAULTS[self.model_type]
        fields = {f.name: f.type for f in dataclasses.fields(ModelConfig)}
        known = (*_NOT_IN_HF, "index_topk")
        for name in sorted(set(ours) - set(known)):
            self._add_problem(f"{_OURS}.{name}", ours[name], "remove it: there is no such field")
        return {
            n: self._convert(f"{_OURS}.{n}", ours[n], fields[n], getattr(defaults, n))
            for n in known
            if n in ours
        }


def _schedule(fields: dict, layers: int) -> tuple[str, ...] | None:
    """Returns IndexShare's layer kinds from a pattern, or from a period and an offset; None if there are neither.

    Raises KeyError for an unknown letter or kind in the pattern.
    """
    pattern = fields.get("index_topk_pattern")
    if pattern is not None:
        kinds = {"F": "full", "S": "shared", "full": "full", "shared": "shared"}
        return tuple(kinds[kind] for kind in pattern)
    if fields.get("index_topk_freq") is None:
        return None
    period = max(fields["index_topk_freq"], 1)
    offset = fields.get("index_skip_topk_offset")
    offset = 2 if offset is None else offset
    return tuple(
        "full" if max(i - offset + 1, 0) % period == 0 else "shared" for i in range(layers)
    )


def _mlp_layer_types(dense: int, layers: int) -> list[str]:
    return ["dense"] * dense + ["sparse"] * (layers - dense)


def _one_or_list(ids: tuple[int, ...]):
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)


def _rope_to_hf(rope: RopeParameters) -> dict:
    """Returns theta and type, and for types other than the default all fields that are set."""
    names = ("rope_theta", "rope_type") if rope.rope_type == "default" else vars(rope)
    return {n: getattr(rope, n) for n in names if getattr(rope, n) is not None}
