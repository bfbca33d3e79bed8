"""`ModelConfig`: every number that defines a GLM-5 model, typed, frozen and validated.

Field names and meanings are those of HuggingFace's `config.json` where it has them; the defaults are
the released GLM-5 (paper Table 10, and the published config). Fields that HuggingFace lacks stand at
the end with their source.
"""

import dataclasses
import math

# Of a layer: softmax over all keys, softmax over the last ones, Gated DeltaNet, SimpleGDN.
LAYER_KINDS = ("full", "window", "gdn", "simple_gdn")
# Tables of tensors have a row for each layer and expert, so a config of absurd sizes would take all time and memory.
MAX_SIZES = {"num_hidden_layers": 1000, "n_routed_experts": 8192}
_MAX_SIZE = 2**31 - 1  # of a dimension of an array
_MAX_EXPERTS = 2**17  # of all layers; GLM-5 has 19,968
RECURRENT_KINDS = ("gdn", "simple_gdn")  # those that keep a state instead of keys


@dataclasses.dataclass(frozen=True)
class RopeParameters:
    """Rotary embedding as in HF `rope_parameters`; YaRN fields count only if rope_type is "yarn"."""

    rope_theta: float = 1_000_000.0
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self):
        if self.rope_type not in ("default", "yarn"):
            raise ValueError(
                f"rope_parameters.rope_type is {self.rope_type!r}; use 'default' or 'yarn'"
            )
        if self.rope_type == "yarn" and not self.original_max_position_embeddings:
            raise ValueError("rope_type 'yarn' needs original_max_position_embeddings")
        if self.rope_theta <= 1:
            raise ValueError(f"rope_parameters.rope_theta is {self.rope_theta}; it must exceed 1")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of one model. Construction refuses contradictory values (ValueError)."""

    vocab_size: int = 154880
    hidden_size: int = 6144
    num_hidden_layers: int = 78
    first_k_dense_replace: int = 3
    num_attention_heads: int = 64
    q_lora_rank: int = 2048
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 192
    qk_rope_head_dim: int = 64
    v_head_dim: int = 256
    intermediate_size: int = 12288
    moe_intermediate_size: int = 2048
    n_routed_experts: int = 256
    num_experts_per_tok: int = 8
    n_shared_experts: int = 1
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    index_topk: int | None = 2048  # None: no indexer at all (glm4_moe_lite)
    index_n_heads: int = 32
    index_head_dim: int = 128
    indexer_types: tuple[str, ...] | None = None  # None: every layer "full"
    num_nextn_predict_layers: int = 1  # stored MTP layers
    rms_norm_eps: float = 1e-5
    rope_parameters: RopeParameters = RopeParameters()
    max_position_embeddings: int = 202752
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    eos_token_id: tuple[int, ...] = (154820, 154827, 154829)
    pad_token_id: int | None = 154820
    bos_token_id: int | None = None
    dtype: str = "bfloat16"  # of the computation; parameters may be stored wider
    model_type: str = "glm_moe_dsa"

    # Not in HF's config.json.
    attention: str = "sparse"  # "dense": the indexer does not run (pre-training, paper 2.1.1)
    latent_norm_eps: float = 1e-6  # HF's class default for both latent norms; the engines use 1e-5
    index_norm_eps: float = 1e-6  # LayerNorm of the index keys, the same everywhere
    # The routed experts compute as symmetric int4 with a scale for so many rows (GLM-5 2.4.3, in SFT); None:
    # as they are stored. Which weights and groups is undisclosed; community W4A8 checkpoints have 128.
    int4_group: int | None = None
    hf_extra: tuple[tuple[str, str], ...] = ()  # harmless config.json fields (name, JSON), kept
    # The paper's alternatives (GLM-5 2.1, tables 1 and 4), which have no form in HF's types.
    projections: str = "mla"  # "gqa": grouped queries with heads of the same h + r and u columns
    num_key_value_heads: int = 8  # of "gqa", table 1
    # A kind of LAYER_KINDS for each layer; None: all full.
    layer_attention: tuple[str, ...] | None = None
    sliding_window: int = 4096  # keys that a query of a "window" layer sees, GLM-5 2.1.2
    linear_conv_kernel_dim: int = 4  # taps of "gdn" layers, Gated DeltaNet
    simple_gdn_beta: float = 1.0  # of "simple_gdn" layers; not printed, 1 replaces what is recalled

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):
                object.__setattr__(self, field.name, tuple(value))
        for name in _POSITIVE:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a positive integer")
            if value > (most := MAX_SIZES.get(name, _MAX_SIZE)):
                raise ValueError(f"{name} is {value}; it can be at most {most}")
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} is {value!r}; it must be an integer >= 0")
        for name in ("rms_norm_eps", "latent_norm_eps", "index_norm_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be positive")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim is {self.qk_rope_head_dim}; RoPE needs an even one")
        if self.first_k_dense_replace > self.num_hidden_layers:
            raise ValueError(
                f"first_k_dense_replace {self.first_k_dense_replace} exceeds "
                f"num_hidden_layers {self.num_hidden_layers}"
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} exceeds "
                f"n_routed_experts {self.n_routed_experts}"
            )
        if (experts := self.num_hidden_layers * self.n_routed_experts) > _MAX_EXPERTS:
            raise ValueError(
                f"num_hidden_layers {self.num_hidden_layers} with n_routed_experts {self.n_routed_experts} are "
                f"{experts} experts; there can be at most {_MAX_EXPERTS}"
            )
        if self.n_routed_experts % self.n_group:
            raise ValueError(
                f"n_group {self.n_group} does not divide n_routed_experts {self.n_routed_experts}"
            )
        if not 1 <= self.topk_group <= self.n_group:
            raise ValueError(f"topk_group {self.topk_group} is outside 1..n_group {self.n_group}")
        group = self.n_routed_experts // self.n_group
        if self.n_group > 1 and group < 2:
            raise ValueError("a group of experts needs at least two (its score sums the best two)")
        if self.num_experts_per_tok > self.topk_group * group:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} exceeds the "
                f"{self.topk_group * group} experts of topk_group {self.topk_group} groups"
            )
        if self.num_nextn_predict_layers > 1:
            raise ValueError(
                f"num_nextn_predict_layers is {self.num_nextn_predict_layers}; "
                "GLM-5 stores one MTP layer and runs it several times"
            )
        if self.attention not in ("dense", "sparse"):
            raise ValueError(f"attention is {self.attention!r}; use 'dense' or 'sparse'")
        if self.dtype not in ("bfloat16", "float16", "float32", "float64"):
            raise ValueError(f"dtype is {self.dtype!r}; use bfloat16, float16, float32 or float64")
        if self.index_topk is None:
            if self.attention == "sparse":
                raise ValueError("attention is 'sparse' but index_topk is None; set one of them")
        else:
            if self.index_topk < 1:
                raise ValueError(f"index_topk is {self.index_topk}; it must be at least 1")
            if self.index_head_dim < self.qk_rope_head_dim:
                raise ValueError(
                    f"index_head_dim {self.index_head_dim} is smaller than "
                    f"qk_rope_head_dim {self.qk_rope_head_dim}, which it must hold"
                )
        if self.indexer_types is not None:
            if len(self.indexer_types) != self.num_hidden_layers:
                raise ValueError(
                    f"indexer_types names {len(self.indexer_types)} layers, "
                    f"num_hidden_layers is {self.num_hidden_layers}"
                )
            unknown = sorted(set(self.indexer_types) - {"full", "shared"})
            if unknown:
                raise ValueError(f"indexer_types holds {unknown}; use 'full' or 'shared'")
            if self.indexer_types[0] != "full":
                raise ValueError("indexer_types starts with 'shared'; layer 0 must be 'full'")

        self._check_int4()
        self._check_alternatives()

    def _check_int4(self):
        group, rows = self.int4_group, (self.hidden_size, self.moe_intermediate_size)
        if group is None:
            return
        if not isinstance(group, int) or group < 2 or group % 2 or any(n % group for n in rows):
            raise ValueError(
                f"int4_group is {group!r}; use an even divisor of hidden_size {rows[0]} and "
                f"moe_intermediate_size {rows[1]}, the rows of the experts' matrices, or None"
            )

    def _check_alternatives(self):
        if self.projections not in ("mla", "gqa"):
            raise ValueError(f"projections is {self.projections!r}; use 'mla' or 'gqa'")
        if self.projections == "gqa":
            if self.num_attention_heads % self.num_key_value_heads:
                raise ValueError(
                    f"num_key_value_heads {self.num_key_value_heads} does not divide "
                    f"num_attention_heads {self.num_attention_heads}"
                )
            if self.index_topk is not None:
                raise ValueError(
                    "projections 'gqa' with an indexer, which reads MLA's query latent; set "
                    "index_topk=None and attention='dense'"
                )
            if self.attention_bias:
                raise ValueError("projections 'gqa' has no biases; set attention_bias=False")
        if not 0 < self.simple_gdn_beta <= 2:
            raise ValueError(
                f"simple_gdn_beta is {self.simple_gdn_beta!r}; the recurrence is stable in (0, 2]"
            )
        if self.layer_attention is None:
            return
        if len(self.layer_attention) != self.num_hidden_layers:
            raise ValueError(
                f"layer_attention names {len(self.layer_attention)} layers, "
                f"num_hidden_layers is {self.num_hidden_layers}"
            )
        unknown = sorted(set(self.layer_attention) - set(LAYER_KINDS))
        if unknown:
            raise ValueError(f"layer_attention holds {unknown}; use {', '.join(LAYER_KINDS)}")
        if self.index_topk is not None and set(self.layer_attention) != {"full"}:
            raise ValueError(
                "layer_attention replaces sparse attention and has no indexer; set index_topk=None and "
                "attention='dense', or leave it out"
            )

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of attention of every layer, one of LAYER_KINDS."""
        return self.layer_attention or ("full",) * self.num_hidden_layers

    @property
    def gdn_layers(self) -> tuple[int, ...]:
        """Layers with the gates and taps of Gated DeltaNet."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == "gdn")

    @property
    def num_key_heads(self) -> int:
        """Heads of keys and values: as many as queries have in MLA."""
        return self.num_key_value_heads if self.projections == "gqa" else self.num_attention_heads

    @property
    def num_moe_layers(self) -> int:
        return self.num_hidden_layers - self.first_k_dense_replace

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers that own an indexer; the others reuse the nearest earlier one's top-k."""
        if self.index_topk is None:
            return ()
        if self.indexer_types is None:
            return tuple(range(self.num_hidden_layers))
        return tuple(i for i, kind in enumerate(self.indexer_types) if kind == "full")

    @property
    def softmax_scale(self) -> float:
        """(h + r)^-0.5, times YaRN's squared mscale where rope_type asks for it."""
        scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        rope = self.rope_parameters
        if rope.rope_type != "default" and rope.mscale_all_dim:
            scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
        return scale

    @property
    def arithmetic(self) -> dict[str, object]:
        """{field: value} of what the same weights compute otherwise with, as no shape tells; those alone that count
        in this model."""
        names, kinds, rope = ["attention", "rms_norm_eps"], self.layer_kinds, self.rope_parameters
        if self.projections == "mla":
            names.append("latent_norm_eps")
        if self.num_moe_layers or self.num_nextn_predict_layers:
            names += _ROUTING
        names += ["index_topk"] * (self.attention == "sparse")
        names += ["index_norm_eps"] * (self.index_topk is not None)
        names += ["sliding_window"] * ("window" in kinds)
        names += ["simple_gdn_beta"] * ("simple_gdn" in kinds)
        out = {name: getattr(self, name) for name in names} | {"layer_attention": kinds}
        if full := self.full_layers:
            types = ("full" if i in full else "shared" for i in range(self.num_hidden_layers))
            out["indexer_types"] = tuple(types)
        used = ("rope_type", "rope_theta") if rope.rope_type == "default" else vars(rope)
        return out | {f"rope_parameters.{name}": getattr(rope, name) for name in used}

    def check_length(self, length: int) -> None:
        """ValueError if a sequence is longer than the model's positions."""
        if length > self.max_position_embeddings:
            raise ValueError(
                f"sequence length {length} exceeds max_position_embeddings "
                f"{self.max_position_embeddings}; shorten the sequence or extend the model's positions"
            )

    @property
    def num_parameters(self) -> int:
        """Weights without MTP and without router bias buffers: 743.91B for GLM-5."""
        layers = range(self.num_hidden_layers)
        total = sum(self._layer_parameters(i) for i in layers) + self.hidden_size
        tables = 1 if self.tie_word_embeddings else 2
        return total + tables * self.vocab_size * self.hidden_size

    @property
    def num_stored_parameters(self) -> int:
        """Everything a checkpoint holds, MTP and bias buffers included: 753,864,139,008 for GLM-5."""
        d, mtp = self.hidden_size, self.num_nextn_predict_layers
        biases = (self.num_moe_layers + mtp) * self.n_routed_experts
        block = self._attention_parameters(self.index_topk is not None) + self._moe_parameters(
            self.n_routed_experts
        )
        return self.num_parameters + biases + mtp * (block + 2 * d * d + 3 * d)

    @property
    def num_active_parameters(self) -> int:
        """Weights that one token's forward multiplies with, head included, embedding not."""
        idle = self.n_routed_experts - self.num_experts_per_tok
        expert = 3 * self.hidden_size * self.moe_intermediate_size
        table = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        return self.num_parameters - table - self.num_moe_layers * idle * expert

    def _attention_parameters(self, full: bool) -> int:
        d, n, q, c = self.hidden_size, self.num_attention_heads, self.q_lora_rank, self.kv_lora_rank
        h, r, u = self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim
        total = n * u * d + 2 * d
        if self.projections == "gqa":
            total += d * n * (h + r) + d * self.num_key_value_heads * (h + r + u)
        else:
            total += d * q + q + q * n * (h + r) + d * (c + r) + c + c * n * (h + u)
        if self.attention_bias:
            total += q + c + r + d
        if full:
            i, j = self.index_n_heads, self.index_head_dim
            total += q * i * j + d * j + 2 * j + d * i
        return total

    def _moe_parameters(self, experts: int) -> int:
        wide = experts + self.n_shared_experts
        return self.hidden_size * (self.n_routed_experts + 3 * wide * self.moe_intermediate_size)

    def _gdn_parameters(self) -> int:
        """What a layer of Gated DeltaNet has beside its projections: taps, gates and a norm."""
        d, n, y, u = self.hidden_size, self.num_attention_heads, self.num_key_heads, self.v_head_dim
        x = self.qk_nope_head_dim + self.qk_rope_head_dim
        taps = (n * x + y * (x + u)) * self.linear_conv_kernel_dim
        return taps + 2 * d * n + 2 * n + d * n * u + u

    def _layer_parameters(self, layer: int) -> int:
        attention = self._attention_parameters(layer in self.full_layers)
        if layer in self.gdn_layers:
            attention += self._gdn_parameters()
        if layer < self.first_k_dense_replace:
            return attention + 3 * self.hidden_size * self.intermediate_size
        return attention + self._moe_parameters(self.n_routed_experts)


_ROUTING = (
    "int4_group num_experts_per_tok n_group topk_group norm_topk_prob routed_scaling_factor"
).split()
_POSITIVE = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads q_lora_rank kv_lora_rank "
    "qk_nope_head_dim qk_rope_head_dim v_head_dim intermediate_size moe_intermediate_size "
    "n_routed_experts num_experts_per_tok n_group topk_group max_position_embeddings "
    "index_n_heads index_head_dim num_key_value_heads sliding_window linear_conv_kernel_dim"
).split()
_NOT_NEGATIVE = "first_k_dense_replace n_shared_experts num_nextn_predict_layers".split()


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's magnitude correction m(mscale) = 0.1 mscale ln(factor) + 1, and 1 up to factor 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
