"""Computes a lower bound on the cost of prefill and decode on a chip: from peak rates, never a measured speed.

1. FLOPs are counted from the parameter tree, two for each multiply-add: each weight once per token that it processes,
   and each pair of a query and a key that is scored or attended to.
2. Bytes are those of weights, of the experts that the step's tokens reach, and of the cached keys that are read.
3. Components run one after another. Within one, compute and memory traffic overlap perfectly.

Not counted: intermediate results, writes to the cache, softmax and norms, communication, and idle time.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from glm5_jax.config import ModelConfig
from glm5_jax.inference.quantize import table
from glm5_jax.model import glm5
from glm5_jax.model.cache import check_formats
from glm5_jax.parallel.tree import first_match, flatten
from pallas_kernels.chips import CHIPS, Chip
from pallas_kernels.cost import Cost
from pallas_kernels.quantized_vectors import FORMATS
from pallas_kernels.quantized_weights import CompositeWeight
from pallas_kernels.sparse_flash_attention import RowLayout

DTYPE = "bfloat16"
DTYPES = {None: DTYPE, "int8": "int8", "fp8": "float8"}  # names of the chips' rates
# Dtypes in which quantised weights are multiplied.
WEIGHT_DTYPES = {None: DTYPE, table.W4A8: "int8", table.FP8: "float8"}
# Component of each weight; the first match counts. None: no product with each token, or drafts, which are not counted.
PARTS = (
    (r"^mtp/|^embed/|norm(_bias)?$|_bias$|/bias$", None),
    (r"/(experts|shared|router)/", "experts"),
    (r"/mlp/", "feed-forward"),
    (r"/indexer/", "indexer"),
    (r"/attn/", "projections"),
    (r"^lm_head/", "head"),
)
SCALE_BYTES = 4  # float32 scale of an index key in 8 bits
POSITION_BYTES = 4  # int32 position of a selected key
MILLION = 1e6
BOUND = "a bound from peaks, never a speed"
CLAIM = "the articles on GLM-5 claim 50% less cost"
SERVED = ("h200", "v5p", "v6e", "tpu7x")  # chips that are compared by default

Costs = dict[str, list[Cost]]  # {component: costs, one for each product}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serving:
    """Form in which a model is served. Raises ValueError for unknown names.

    Attributes:
      attention: "dense" over all keys or "sparse" over selected keys, whatever the model's config says.
      weights: form of the weights (`quantize.table`): "w4a8", "fp8" or None (bfloat16).
      index_cache, latent_cache: "int8", "fp8" or None (bfloat16), see `Engine`. Prefill always reads latents in
        bfloat16, because the engine gathers a row's pages into one array.
      sharing: number of adjacent queries of a prompt that share one gather of selected latents (our choice); 1: none.
    """

    attention: str = "sparse"
    weights: str | None = None
    index_cache: str | None = None
    latent_cache: str | None = None
    sharing: int = 4

    def __post_init__(self):
        if self.attention not in ("dense", "sparse"):
            raise ValueError(f"attention is {self.attention!r}; use 'dense' or 'sparse'")
        if self.weights not in WEIGHT_DTYPES:
            raise ValueError(f"weights is {self.weights!r}; use w4a8, fp8 or None")
        check_formats(self.index_cache, self.latent_cache)
        if self.sharing < 1:
            raise ValueError(f"sharing is {self.sharing}; a gather serves at least 1 query")


def prefill(
    cfg: ModelConfig, serving: Serving, length: int, prompts: int = 1, chunk: int | None = None
) -> Costs:
    """Returns the mean cost of the prefill steps of `prompts` prompts of `length` tokens.

    chunk: tokens of each prompt in a step; None: all. The head reads only the last token of each prompt and step. Dense
    attention expands keys and values of all heads (MHA). Sparse attention multiplies with latents.
    """
    chunk = min(length, length if chunk is None else chunk)
    _check(cfg, serving, length, prompts=prompts, chunk=chunk)
    # The keys of a step are those of its chunk and of all earlier ones; this is the mean.
    k, keys = _num_selected(cfg, serving, length), prompts * (length + chunk) / 2
    share = chunk / length
    causal = prompts * length * (length + 1) / 2 * share
    n, h, r = cfg.num_attention_heads, cfg.qk_nope_head_dim, cfg.qk_rope_head_dim
    costs = weight_costs(cfg, serving, prompts * chunk, drawn=prompts, indexed=k is not None)
    row = latent_bytes(cfg, None)
    if k is None:
        flops = 2 * n * (h + r + cfg.v_head_dim) * causal
        return costs | _attention(cfg, flops, row * keys)
    picked = prompts * (k * (k + 1) / 2 + (length - k) * k) * share
    gathered = row * picked / serving.sharing + POSITION_BYTES * picked
    scores = _scores(cfg, serving, causal, keys=keys, picked=picked)
    return costs | scores | _attention(cfg, _absorbed(cfg) * picked, gathered)


def decode(cfg: ModelConfig, serving: Serving, length: int, batch: int, queries: int = 1) -> Costs:
    """Returns the cost of one decode of `batch` sequences of `length` tokens, including the new ones.

    Both kinds of attention multiply with latents (MQA). queries: tokens of each sequence that are read, including
    drafts; a key is read once for all of them. The cost of drafting is not counted.
    """
    _check(cfg, serving, length, batch=batch, queries=queries)
    k, keys, tokens = _num_selected(cfg, serving, length), batch * length, batch * queries
    costs = weight_costs(cfg, serving, tokens, drawn=tokens, indexed=k is not None)
    row = latent_bytes(cfg, serving.latent_cache)
    if k is None:
        return costs | _attention(cfg, _absorbed(cfg) * keys * queries, row * keys)
    picked = batch * k
    scores = _scores(cfg, serving, keys * queries, keys=keys, picked=picked * queries)
    read = row * picked + POSITION_BYTES * picked * queries
    return costs | scores | _attention(cfg, _absorbed(cfg) * picked * queries, read)


def weight_costs(
    cfg: ModelConfig, serving: Serving, tokens: float, *, drawn: float, indexed: bool
) -> Costs:
    """Returns the cost of all products with weights in a step of `tokens` tokens.

    drawn: tokens that the head reads. indexed: whether indexers run. Each token is assumed to choose its experts
    uniformly.
    """
    share = cfg.num_experts_per_tok / cfg.n_routed_experts
    reached = 1 - (1 - share) ** tokens
    out: Costs = {}
    parts = flatten(first_match(PARTS, _weights(cfg, None)))
    for path, w in flatten(_weights(cfg, serving.weights)).items():
        part = parts.get(path)
        if cfg.tie_word_embeddings and path.startswith("embed/"):
            part = "head"
        if part is None or (part == "indexer" and not indexed):
            continue
        routed = "/experts/" in path
        num_inputs = drawn if part == "head" else tokens * (share if routed else 1)
        stored = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(w))
        read = stored * (reached if routed else 1)
        dtype = WEIGHT_DTYPES[serving.weights] if isinstance(w, CompositeWeight) else DTYPE
        out.setdefault(part, []).append(Cost(2 * math.prod(w.shape) * num_inputs, read, dtype))
    return out


def latent_bytes(cfg: ModelConfig, kind: str | None) -> int:
    """Returns the bytes of one token's c_kv and k_rope in one layer's pages.

    In 8 bits they are those of a GPU, 656 for GLM-5. A TPU pads rows to full lanes, so that they are longer.
    """
    c, r = cfg.kv_lora_rank, cfg.qk_rope_head_dim
    if kind is None:
        return jnp.dtype(DTYPE).itemsize * (c + r)
    return 4 * RowLayout(jnp.dtype(FORMATS[kind]).name, c, r, DTYPE).width


def index_bytes(cfg: ModelConfig, kind: str | None) -> int:
    """Returns the bytes of one token's index key in the pages of one layer with an indexer."""
    if kind is None:
        return jnp.dtype(DTYPE).itemsize * cfg.index_head_dim
    return cfg.index_head_dim + SCALE_BYTES


def component_seconds(costs: list[Cost], chip: Chip) -> float:
    """Returns the time of one component on one chip. A dtype without a rate in the data sheet counts as bfloat16."""
    computing = sum(one.flops / chip.flops.get(one.dtype, chip.flops[DTYPE]) for one in costs)
    return max(computing, sum(one.bytes for one in costs) / chip.bandwidth)


def chip_seconds(costs: Costs, chip: Chip) -> float:
    """Returns the time of all components on one chip; n chips take at least 1/n of it."""
    return sum(component_seconds(one, chip) for one in costs.values())


def arms(chip: Chip) -> dict[str, Serving]:
    """Returns the compared forms by name, with caches in the 8-bit format that the chip multiplies fastest."""
    kind = "fp8" if chip.flops.get("float8", 0) > chip.flops[DTYPE] else "int8"
    packed = Serving(weights=table.W4A8, index_cache=kind, latent_cache=kind)
    return {"dense": Serving(attention="dense"), "DSA": Serving(), "DSA W4A8": packed}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenCost:
    """Lower bound on the cost of a million tokens, in chip-seconds.

    Attributes:
      stage: "prefill" of prompts of `length` tokens, or "decode" of sequences of `length` tokens.
      length: tokens of each prompt or sequence.
      batch: prompts, or sequences, of a step.
      chip: key in `pallas_kernels.chips.CHIPS`.
      seconds: {form of `arms`: {component: chip-seconds}} of the forms that the model supports.
    """

    stage: str
    length: int
    batch: int
    chip: str
    seconds: dict[str, dict[str, float]]

    @classmethod
    def of(cls, cfg: ModelConfig, chip: str, stage: str, length: int, batch: int) -> "TokenCost":
        """Computes the cost. Raises ValueError for a length that the model does not support."""
        rates, tokens = CHIPS[chip], batch * (length if stage == "prefill" else 1)
        seconds = {}
        for name, serving in arms(rates).items():
            if _is_supported(cfg, serving):
                costs = {"prefill": prefill, "decode": decode}[stage](cfg, serving, length, batch)
                each = {part: component_seconds(c, rates) for part, c in costs.items()}
                seconds[name] = {part: s * MILLION / tokens for part, s in each.items()}
        return cls(stage=stage, length=length, batch=batch, chip=chip, seconds=seconds)

    @property
    def totals(self) -> dict[str, float]:
        """{form: chip-seconds} of all components together."""
        return {name: sum(parts.values()) for name, parts in self.seconds.items()}

    @property
    def saved(self) -> float | None:
        """Share of the dense cost that DSA with W4A8 saves; None if the model does not support it."""
        totals = self.totals
        return 1 - totals["DSA W4A8"] / totals["dense"] if "DSA W4A8" in totals else None


def flops(costs: Costs, *components: str) -> float:
    """Returns the FLOPs of these components, 0 for missing ones; without a name, of all."""
    return sum(one.flops for name in components or costs for one in costs.get(name, ()))


def _is_supported(cfg: ModelConfig, serving: Serving) -> bool:
    """Returns whether the model supports a form: it needs indexers, and expert rows that groups divide."""
    selects = serving.attention == "dense" or cfg.index_topk is not None
    rows, group = (cfg.hidden_size, cfg.moe_intermediate_size), cfg.int4_group or table.GROUP
    return selects and not (serving.weights == table.W4A8 and any(n % group for n in rows))


@functools.lru_cache(maxsize=8)
def _weights(cfg: ModelConfig, scheme: str | None):
    """Returns the parameter tree in bfloat16, or quantised by a scheme, as shapes."""
    plain = glm5.abstract_params(cfg, DTYPE)
    if scheme is None:
        return plain
    return jax.eval_shape(lambda params: table.quantise(params, cfg, scheme=scheme)[0], plain)


def _check(cfg: ModelConfig, serving: Serving, length: int, **counts: int) -> None:
    """Raises ValueError for counts, a length or a form that the model does not support."""
    for name, value in ({"length": length} | counts).items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be positive")
    cfg.check_length(length)
    if serving.attention == "sparse" and cfg.index_topk is None:
        raise ValueError("attention is 'sparse', and the model has no indexer; use 'dense'")


def _num_selected(cfg: ModelConfig, serving: Serving, length: int) -> int | None:
    """Returns the number of keys that indexers select; None: all are read, and cached index keys are not counted."""
    k = cfg.index_topk
    return k if serving.attention == "sparse" and k is not None and length > k else None


def _absorbed(cfg: ModelConfig) -> int:
    """Returns the FLOPs of all heads of a query with one latent, as key and as value."""
    return 2 * cfg.num_attention_heads * (2 * cfg.kv_lora_rank + cfg.qk_rope_head_dim)


def _attention(cfg: ModelConfig, flops: float, read: float) -> Costs:
    """Returns the cost of all layers from that of one."""
    layers = cfg.num_hidden_layers
    return {"attention": [Cost(layers * flops, layers * read, DTYPE)]}


def _scores(cfg: ModelConfig, serving: Serving, pairs: float, keys: float, picked: float) -> Costs:
    """Returns the cost of all indexers' scores. Only the selected positions are written to memory."""
    layers, kind = len(cfg.full_layers), serving.index_cache
    products = 2 * cfg.index_n_heads * cfg.index_head_dim * pairs
    moved = index_bytes(cfg, kind) * keys + POSITION_BYTES * picked
    return {"scores": [Cost(layers * products, layers * moved, DTYPES[kind])]}
