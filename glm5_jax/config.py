"""Defines `ModelConfig`, the typed, frozen and validated numbers of a GLM-5 model.

Field names and meanings are those of HuggingFace's `config.json` where it has them. The defaults are the released GLM-5
(paper Table 10 and the published config). Fields that HuggingFace lacks come last, with their source.
"""

import dataclasses
import math
import re

# Kinds of attention: softmax over all keys, softmax over the last ones, Gated DeltaNet, SimpleGDN.
LAYER_KINDS = ("full", "window", "gdn", "simple_gdn")
# Maximum sizes. Tables of tensors have a row per layer and expert, so absurd sizes would use up time and memory.
MAX_SIZES = {"num_hidden_layers": 1000, "n_routed_experts": 8192}
_MAX_SIZE = 2**31 - 1  # array dimensions are 32-bit
_MAX_EXPERTS = 2**17  # over all layers; GLM-5 has 19,968
RECURRENT_KINDS = ("gdn", "simple_gdn")  # kinds with a state instead of a key cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeParameters:
    """Rotary embedding as in HF `rope_parameters`; YaRN fields count only if rope_type is "yarn".

    Attributes:
      rope_theta: base of the wavelengths.
      rope_type: "default", or "yarn" to extend the context.
      factor: YaRN's ratio of the extended to the original context.
      original_max_position_embeddings: context before the extension, in tokens; None: there is none.
      beta_fast: rotations in the original context above which YaRN keeps a wavelength.
      beta_slow: rotations in the original context below which YaRN divides a frequency by the factor.
      mscale: coefficient of YaRN's attention scale; None: not set.
      mscale_all_dim: coefficient that divides that scale; None: not set.
      attention_factor: YaRN's attention scale itself; None: computed from the others.
      truncate: whether YaRN rounds the bounds of its ramp to whole dimensions.
    """

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters of a model's matrices (`model.lora`).

    Attributes:
      rank: rank of every adapter; 0: the model has no adapters.
      alpha: numerator of the adapters' scale, alpha / rank.
      targets: regular expressions, searched in the paths of the decoder layers' matrices
        ("moe_layers/attn/q_b"). The default leaves out routed experts and indexers.
    """

    rank: int = 0
    alpha: float = 32.0
    targets: tuple[str, ...] = ("/(attn|mlp|shared)/",)

    def __post_init__(self):
        if not isinstance(self.rank, int) or self.rank < 0:
            raise ValueError(f"rank is {self.rank!r}; it must be an integer >= 0 (0: no adapters)")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"alpha is {self.alpha!r}; it must be positive")
        object.__setattr__(self, "targets", tuple(self.targets))
        if not self.targets:
            raise ValueError("targets is empty; name at least one pattern, such as '/attn/'")
        for pattern in self.targets:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"targets holds {pattern!r}, which is not a regular expression: {error}"
                ) from None

    @property
    def scale(self) -> float:
        """Returns the factor of the product of an adapter's two matrices."""
        return self.alpha / self.rank


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes and constants of one model. Raises ValueError for contradictory values.

    Attributes:
      vocab_size: entries of the vocabulary.
      hidden_size: width of the residual stream.
      num_hidden_layers: layers without the MTP layer.
      first_k_dense_replace: first layers, which have a dense MLP; the others have experts.
      num_attention_heads: heads of queries.
      q_lora_rank, kv_lora_rank: sizes of the latents of queries, and of keys and values.
      qk_nope_head_dim, qk_rope_head_dim: columns of a query or key head without and with position.
      v_head_dim: columns of a value head.
      intermediate_size, moe_intermediate_size: width of a dense MLP, and of an expert.
      n_routed_experts, num_experts_per_tok, n_shared_experts: experts of a layer, those chosen for a token, and those
        that every token passes.
      n_group, topk_group: groups of experts, and how many of them a token may choose from.
      norm_topk_prob: whether the chosen experts' weights are divided by their sum.
      routed_scaling_factor: factor of the routed experts' sum.
      index_topk: keys that the indexer selects for each query; None: no indexer (glm4_moe_lite).
      index_n_heads, index_head_dim: heads of the indexer and their columns.
      indexer_types: "full" for a layer with an indexer, "shared" for one that uses the selection of the last "full" one;
        None: all "full".
      num_nextn_predict_layers: stored MTP layers.
      rms_norm_eps: epsilon of the norms.
      rope_parameters: rotary embedding.
      max_position_embeddings: maximum tokens of a sequence.
      attention_bias: whether q_a, kv_a and o have a bias.
      tie_word_embeddings: whether the head is the embedding.
      initializer_range: standard deviation of new weights.
      eos_token_id, pad_token_id, bos_token_id: ids that end a reply, pad and begin a text; pad and begin may be None.
      dtype: dtype of the computation; parameters may be stored in a wider one.
      model_type: HuggingFace's name of the architecture.
      attention: "dense": the indexer does not run (pre-training, paper 2.1.1); "sparse": it selects keys. Not in HF.
      latent_norm_eps: epsilon of both latent norms. Not in HF's config.json; the default is that of HF's class, engines
        use 1e-5.
      index_norm_eps: epsilon of the LayerNorm of index keys. Not in HF.
      int4_group: rows that share a scale when routed experts compute as symmetric int4 (GLM-5 2.4.3, in SFT); None: they
        compute as stored. The paper says neither which weights nor which groups; community W4A8 checkpoints use 128.
      hf_extra: other fields of config.json (name, JSON), which are written back.
      projections: "mla", or "gqa" for grouped queries with heads of the same h + r and u columns (paper 2.1, table 1).
      num_key_value_heads: heads of keys and values of "gqa" (table 1).
      layer_attention: kind of each layer, one of LAYER_KINDS (paper 2.1, table 4); None: all "full".
      sliding_window: keys that a query of a "window" layer sees (GLM-5 2.1.2).
      linear_conv_kernel_dim: taps of the convolution of "gdn" layers (Gated DeltaNet).
      simple_gdn_beta: write strength of "simple_gdn" layers; not disclosed. At 1 a new value replaces the recalled one.
      lora: low-rank adapters. With a rank above 0 all other weights are frozen.
    """

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
    index_topk: int | None = 2048
    index_n_heads: int = 32
    index_head_dim: int = 128
    indexer_types: tuple[str, ...] | None = None
    num_nextn_predict_layers: int = 1
    rms_norm_eps: float = 1e-5
    rope_parameters: RopeParameters = RopeParameters()
    max_position_embeddings: int = 202752
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    eos_token_id: tuple[int, ...] = (154820, 154827, 154829)
    pad_token_id: int | None = 154820
    bos_token_id: int | None = None
    dtype: str = "bfloat16"
    model_type: str = "glm_moe_dsa"

    # Not in HF's config.json.
    attention: str = "sparse"
    latent_norm_eps: float = 1e-6
    index_norm_eps: float = 1e-6
    int4_group: int | None = None
    hf_extra: tuple[tuple[str, str], ...] = ()
    projections: str = "mla"
    num_key_value_heads: int = 8
    layer_attention: tuple[str, ...] | None = None
    sliding_window: int = 4096
    linear_conv_kernel_dim: int = 4
    simple_gdn_beta: float = 1.0
    lora: LoraConfig = LoraConfig()

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):
                object.__setattr__(self, field.name, tuple(value))
        for name in _POSITIVE:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a positive integer")
            if value > (maximum := MAX_SIZES.get(name, _MAX_SIZE)):
                raise ValueError(f"{name} is {value}; it can be at most {maximum}")
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
        self._check_lora()

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

    def _check_lora(self):
        if not self.lora.rank:
            return
        if self.int4_group is not None:
            raise ValueError(
                f"lora.rank is {self.lora.rank} and int4_group {self.int4_group}: adapters are trained next "
                "to weights that are not quantised; set int4_group=None, or lora.rank=0"
            )
        if self.projections != "mla" or self.layer_attention is not None:
            raise ValueError(
                f"lora.rank is {self.lora.rank}, and projections or layer_attention are those of an ablation; "
                "adapters are for MLA in all layers: leave them at their defaults, or set lora.rank=0"
            )

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Returns the kind of attention of each layer, one of LAYER_KINDS."""
        return self.layer_attention or ("full",) * self.num_hidden_layers

    @property
    def gdn_layers(self) -> tuple[int, ...]:
        """Returns the numbers of the Gated DeltaNet layers."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == "gdn")

    @property
    def num_key_heads(self) -> int:
        """Returns the number of key and value heads; in MLA that of the queries."""
        return self.num_key_value_heads if self.projections == "gqa" else self.num_attention_heads

    @property
    def num_moe_layers(self) -> int:
        return self.num_hidden_layers - self.first_k_dense_replace

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Returns the layers with an indexer; the others use the top-k of the nearest earlier one."""
        if self.index_topk is None:
            return ()
        if self.indexer_types is None:
            return tuple(range(self.num_hidden_layers))
        return tuple(i for i, kind in enumerate(self.indexer_types) if kind == "full")

    @property
    def softmax_scale(self) -> float:
        """Returns the scale of attention scores: (h + r)^-0.5, times YaRN's squared mscale with YaRN."""
        scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        rope = self.rope_parameters
        if rope.rope_type != "default" and rope.mscale_all_dim:
            scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
        return scale

    @property
    def arithmetic(self) -> dict[str, object]:
        """Returns the fields that change results without changing the shape of a weight, with their values.

        Checkpoints of two models with equal shapes are compared by them. Fields without effect on this model are left out.
        """
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
        """Raises ValueError if a sequence is longer than max_position_embeddings."""
        if length > self.max_position_embeddings:
            raise ValueError(
                f"sequence length {length} exceeds max_position_embeddings "
                f"{self.max_position_embeddings}; shorten the sequence or extend the model's positions"
            )

    @property
    def num_parameters(self) -> int:
        """Returns the number of weights without MTP and router biases: 743.91B for GLM-5."""
        layers = range(self.num_hidden_layers)
        total = sum(self._layer_parameters(i) for i in layers) + self.hidden_size
        tables = 1 if self.tie_word_embeddings else 2
        return total + tables * self.vocab_size * self.hidden_size

    @property
    def num_stored_parameters(self) -> int:
        """Returns the number of stored weights, with MTP and router biases: 753,864,139,008 for GLM-5."""
        d, mtp = self.hidden_size, self.num_nextn_predict_layers
        biases = (self.num_moe_layers + mtp) * self.n_routed_experts
        block = self._attention_parameters(self.index_topk is not None) + self._moe_parameters(
            self.n_routed_experts
        )
        return self.num_parameters + biases + mtp * (block + 2 * d * d + 3 * d)

    @property
    def num_active_parameters(self) -> int:
        """Returns the number of weights that one token is multiplied with; the head counts, the embedding does not."""
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
        """Returns the weights of a Gated DeltaNet layer without its projections: taps, gates and a norm."""
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
