"""HuggingFace's `config.json` to `ModelConfig` and back.

Reads the form in which the checkpoints are released and the form that transformers' `save_pretrained`
writes (per-layer lists filled in), for `glm_moe_dsa` (GLM-5, 5.1, 5.2, 5.3) and `glm4_moe_lite`
(GLM-4.7-Flash). Semantics follow transformers 5.23 (`configuration_glm_moe_dsa.py`); what
transformers ignores although it would change the model (`scoring_func`, `rope_interleave`, ...) must
have the value that this model computes.
"""

import dataclasses
import json
import reprlib
import types
import typing

from glm5_jax import presets
from glm5_jax.checkpoint import hf_int4
from glm5_jax.config import ModelConfig, RopeParameters

ARCHITECTURES = {
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
}

# What an absent field means: transformers' class defaults are the released sizes, but theta 10000.
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

# Fields that are part of the architecture, with the only value computed here and what it means.
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
}
_WRITTEN = {  # those of them that a file of this type always carries
    "glm_moe_dsa": (
        "hidden_act attention_dropout moe_layer_freq scoring_func topk_method rope_interleave "
        "indexer_rope_interleave"
    ).split(),
    "glm4_moe_lite": "hidden_act attention_dropout topk_method rope_interleave".split(),
}

# Fields of released and saved files that change nothing in the model; kept and written back.
_HARMLESS = (
    "_name_or_path chunk_size_feed_forward ep_size head_dim id2label index_share_for_mtp_iteration "
    "index_skip_topk_offset index_topk_freq index_topk_pattern is_encoder_decoder label2id layer_types "
    "output_attentions output_hidden_states output_router_logits pretraining_tp problem_type "
    "return_dict transformers_version use_cache"
).split()

_SCHEDULE = ("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern")
_NOT_IN_HF = ("attention", "latent_norm_eps", "index_norm_eps", "int4_group")
_ALTERNATIVES = (
    "projections num_key_value_heads layer_attention sliding_window linear_conv_kernel_dim "
    "simple_gdn_beta"
).split()
_OURS = "glm5_jax"  # the one field of our own: what HF's fields cannot say
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


def _plain(model_type: str) -> dict[str, type]:
    """Fields that both sides have under one name, with their types."""
    skip = {*_SPECIAL, *_NOT_IN_HF, *_ALTERNATIVES, "hf_extra"}
    if model_type == "glm4_moe_lite":
        skip |= {"index_topk", "index_n_heads", "index_head_dim"}
    return {f.name: f.type for f in dataclasses.fields(ModelConfig) if f.name not in skip}


def from_hf(source: dict, file="config.json") -> ModelConfig:
    """`ModelConfig` of a parsed config.json, as the dict that it holds.

    file: what errors call it. Fields that change nothing are kept in `hf_extra`. ValueError that lists
    every unknown field, every field whose value contradicts the others or the architecture, and a
    `quantization_config` of files that cannot be read (`hf_int4`). Absent fields have transformers'
    class defaults; no MTP layer unless `num_nextn_predict_layers` says so.
    """
    if not isinstance(source, dict):
        raise ValueError(f"{file} holds {reprlib.repr(source)}, not an object; fetch it again")
    model_type = source.get("model_type")
    if model_type not in list(_DEFAULTS):
        raise ValueError(
            f"{file}: model_type is {model_type!r}; use one of {', '.join(_DEFAULTS)} "
            "(deepseek_v32 differs: its indexer's RoPE is half-split)"
        )
    reader = _Reader(model_type, dict(source))
    values = reader.read()
    if reader.problems:
        raise ValueError(f"{file} cannot be used:\n  " + "\n  ".join(reader.problems))
    try:
        return dataclasses.replace(_DEFAULTS[model_type], **values)
    except ValueError as error:
        raise ValueError(f"{file} cannot be used: {error}") from None


def to_hf(cfg: ModelConfig) -> dict:
    """config.json of a model: the released form with `mlp_layer_types`, and the fields in `hf_extra`.

    `from_hf(to_hf(cfg)) == cfg`. A model that runs dense although it has an indexer is written with
    an index_topk that covers every position. ValueError for a model that HF has no type for.
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
    # Kept per-layer fields follow a depth or schedule that was changed since.
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
    """Reads one file's fields; what is wrong with them collects in `problems`."""

    model_type: str
    given: dict
    problems: list[str] = dataclasses.field(default_factory=list)

    def read(self) -> dict:
        """Arguments of `ModelConfig`."""
        plain = _plain(self.model_type)
        known = {*plain, *_SPECIAL, *_DERIVED, *_ALIASES, *_REQUIRED, *_HARMLESS, _OURS}
        known |= {"quantization_config", "rope_theta", _POSITIONS}
        if self.model_type == "glm4_moe_lite":
            known -= {"indexer_types", *_SCHEDULE}
        unknown = sorted(set(self.given) - known)
        if unknown:
            fix = "remove those that do not change the model"
            self.problems.append(f"unknown fields: {', '.join(unknown)}; {fix}")
        kept = {k: v for k, v in self.given.items() if k in _HARMLESS}
        # Null stands for absent, but an explicit null size is wrong (q_lora_rank: no q latent).
        self.given = {k: v for k, v in self.given.items() if v is not None or k in plain}
        for name, kind in _CONTAINERS.items():
            if not isinstance(self.given.get(name, kind()), kind):
                self._wrong(name, self.given.pop(name), f"it must be of type {kind.__name__}")
        for old, new in _ALIASES.items():
            if old in self.given:
                stated = self.given.setdefault(new, self.given[old])
                self._same(old, self.given[old], stated, f"{new} is")

        size = dict(vars(_DEFAULTS[self.model_type]))
        values = {
            name: self._typed(name, self.given[name], kind, size[name])
            for name, kind in plain.items()
            if name in self.given
        }
        size |= values
        layers = size["num_hidden_layers"]
        if "dtype" in self.given:
            values["dtype"] = self._typed("dtype", self.given["dtype"], str, size["dtype"])
        if "eos_token_id" in self.given:
            eos = self.given["eos_token_id"]
            eos = eos if isinstance(eos, list) else [eos]
            values["eos_token_id"] = tuple(self._typed("eos_token_id", i, int, 0) for i in eos)
        values["first_k_dense_replace"] = self._dense_layers(layers)
        values["indexer_types"] = self._indexer_types(layers)
        values["rope_parameters"] = self._rope(size["max_position_embeddings"], kept)
        self._check_required(kept)
        self._check_derived(size, kept)
        values |= self._ours()
        values["hf_extra"] = tuple((k, json.dumps(kept[k], sort_keys=True)) for k in sorted(kept))
        return values

    def _wrong(self, name, value, fix):
        self.problems.append(f"{name} is {value!r}; {fix}")

    def _same(self, name, value, other, reason):
        if value != other:
            self._wrong(name, value, f"{reason} {other!r}; make them agree or remove {name}")

    def _typed(self, name, value, kind, fallback):
        kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
        good = (float, int) if float in kinds else kinds
        if not isinstance(value, good) or (isinstance(value, bool) and bool not in kinds):
            self._wrong(name, value, f"it must be of type {kinds[0].__name__}")
            return fallback
        return float(value) if float in kinds else value

    def _check_required(self, kept: dict):
        for name, (required, reason) in _REQUIRED.items():
            value = self.given.get(name, required)
            if value != required:
                self._wrong(name, value, f"it must be {required!r}: {reason}")
            elif name in self.given and name not in _WRITTEN[self.model_type]:
                kept[name] = value
        problem = hf_int4.problem_of(self.given.get("quantization_config"))
        if "quantization_config" in self.given and problem:
            self.problems.append(problem)

    def _check_derived(self, size: dict, kept: dict):
        """Fields that repeat others; GLM-5.2 and 5.3 have a `head_dim` that nothing reads."""
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
        get = self.given.get
        for name, (value, reason) in repeats.items():
            self._same(name, get(name, value), value, reason)
        if get("head_dim") == r and self.model_type != "glm4_moe_lite":
            del kept["head_dim"]
        kinds = ("full_attention",)
        if self.model_type == "glm_moe_dsa":
            kinds = ("indexed_attention", "deepseek_sparse_attention")
        if get("layer_types") not in [None, *([kind] * layers for kind in kinds)]:
            self._wrong(
                "layer_types",
                get("layer_types"),
                f"it must be {layers} times {kinds[0]!r}",
            )

    def _dense_layers(self, layers: int) -> int:
        """The list wins, as in transformers, whose `save_pretrained` leaves a stale count beside it."""
        kinds = self.given.get("mlp_layer_types")
        if kinds is None:
            default = min(_DEFAULTS[self.model_type].first_k_dense_replace, layers)
            stated = self.given.get("first_k_dense_replace", default)
            if self.model_type == "glm4_moe_lite":
                reason = "transformers reads mlp_layer_types alone, and without it the count is"
                self._same("first_k_dense_replace", stated, default, reason)
            return self._typed("first_k_dense_replace", stated, int, default)
        dense = kinds.count("dense")
        if kinds != _mlp_layer_types(dense, layers):
            fix = f"it must be {layers} layers, the 'dense' ones before the 'sparse' ones"
            self._wrong("mlp_layer_types", kinds, fix)
        return min(dense, layers)

    def _indexer_types(self, layers: int) -> tuple[str, ...] | None:
        stated = self.given.get("indexer_types")
        try:
            scheduled = _schedule(self.given, layers)
        except (KeyError, TypeError):
            names = {n: self.given[n] for n in _SCHEDULE if n in self.given}
            fix = "use an integer period and offset, or a pattern of F and S"
            self._wrong(" ".join(names), list(names.values()), fix)
            return None
        if stated is None:
            return scheduled
        if scheduled is not None:
            names = ", ".join(n for n in _SCHEDULE if n in self.given)
            self._same("indexer_types", stated, list(scheduled), f"{names} give")
        return tuple(self._typed("indexer_types", kind, str, "full") for kind in stated)

    def _rope(self, max_positions: int, kept: dict) -> RopeParameters:
        fields = {k: v for k, v in self.given.get("rope_parameters", {}).items() if v is not None}
        for name, value in (
            ("rope_type", fields.pop("type", None)),
            ("rope_theta", self.given.get("rope_theta")),
            (_POSITIONS, self.given.get(_POSITIONS)),
        ):
            if value is not None:
                stated = fields.setdefault(name, value)
                self._same(name, value, stated, "rope_parameters says")
        rotary = fields.pop("partial_rotary_factor", None)
        if rotary is not None:
            kept[_ROTARY] = rotary
            required, reason = _REQUIRED["partial_rotary_factor"]
            self._same(_ROTARY, rotary, required, f"{reason}, that is")
        if fields.get("rope_type") == "yarn":
            fields.setdefault(_POSITIONS, max_positions)
        known = {f.name: f.type for f in dataclasses.fields(RopeParameters)}
        for name in sorted(set(fields) - set(known)):
            fix = f"remove it or use {', '.join(known)}"
            self._wrong(f"rope_parameters.{name}", fields.pop(name), fix)
        fields = {"rope_theta": _ABSENT_THETA} | fields
        for name, value in fields.items():
            fallback = getattr(RopeParameters, name)
            fields[name] = self._typed(f"rope_parameters.{name}", value, known[name], fallback)
        try:
            return RopeParameters(**fields)
        except ValueError as error:
            self.problems.append(str(error))
            return RopeParameters()

    def _ours(self) -> dict:
        ours, defaults = self.given.get(_OURS, {}), _DEFAULTS[self.model_type]
        fields = {f.name: f.type for f in dataclasses.fields(ModelConfig)}
        known = (*_NOT_IN_HF, "index_topk")
        for name in sorted(set(ours) - set(known)):
            self._wrong(f"{_OURS}.{name}", ours[name], "remove it: there is no such field")
        return {
            n: self._typed(f"{_OURS}.{n}", ours[n], fields[n], getattr(defaults, n))
            for n in known
            if n in ours
        }


def _schedule(fields: dict, layers: int) -> tuple[str, ...] | None:
    """IndexShare's layer kinds from a pattern, or from a period and an offset; None without them.

    KeyError for an unknown letter or kind of the pattern.
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
    """Theta and type, and for another type than the default whatever is set."""
    names = ("rope_theta", "rope_type") if rope.rope_type == "default" else vars(rope)
    return {n: getattr(rope, n) for n in names if getattr(rope, n) is not None}
