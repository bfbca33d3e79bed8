"""The least that reading prompts and decoding cost on a chip: a bound from peaks, never a speed.

Products are counted from the parameter tree, two FLOPs for a multiply-add: every weight that a token meets once, and
each pair of a query and a key that it scores or attends to. Bytes are those of weights, of the experts that the step's
tokens reach, and of cached keys that are read. Left out are what passes from one product to the next, what is written
to the cache, softmax and norms, all communication, and that chips ever wait. Components follow each other; inside one,
products and memory overlap perfectly.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from glm5_jax.config import ModelConfig
from glm5_jax.core.tree import flatten, match
from glm5_jax.inference.quantize import table
from glm5_jax.model import glm5
from glm5_jax.model.cache import check_formats
from pallas_kernels.chips import CHIPS, Chip
from pallas_kernels.cost import Cost
from pallas_kernels.eight_bits import FORMATS
from pallas_kernels.quantised import Compound
from pallas_kernels.sparse_flash_attention import Layout

DTYPE = "bfloat16"
DTYPES = {None: DTYPE, "int8": "int8", "fp8": "float8"}  # as chips' rates are named
# What takes time together with what; first match. None: no product with every token, or of drafts, which are left out.
PARTS = (
    (r"^mtp/|^embed/|norm(_bias)?$|_bias$|/bias$", None),
    (r"/(experts|shared|router)/", "experts"),
    (r"/mlp/", "feed-forward"),
    (r"/indexer/", "indexer"),
    (r"/attn/", "projections"),
    (r"^lm_head/", "head"),
)
SCALE_BYTES = 4  # float32, of an index key in 8 bits
POSITION_BYTES = 4  # int32, of a selected key
MILLION = 1e6
BOUND = "a bound from peaks, never a speed"
CLAIM = "the articles on GLM-5 claim 50% less cost"
SERVED = ("h200", "v5p", "v6e", "tpu7x")  # chips that are compared where none is given

Costs = dict[str, list[Cost]]  # of every component, several where dtypes differ


@dataclasses.dataclass(frozen=True)
class Serving:
    """In which form a model is served. Construction refuses other names (ValueError).

    Attributes:
      attention: "dense" over all keys or "sparse" over those that indexers select, whatever the model's config says.
      quantised: whether weights are W4A8 (`quantize.table`), else bfloat16.
      index_cache, latent_cache: "int8", "fp8" or None (bfloat16), as of `Engine`. Prompts are read over latents in
        bfloat16 in any case, as the engine brings a row's pages together.
      sharing: neighbouring queries of a prompt that share one gather of selected latents (ours; 1 is none).
    """

    attention: str = "sparse"
    quantised: bool = False
    index_cache: str | None = None
    latent_cache: str | None = None
    sharing: int = 4

    def __post_init__(self):
        if self.attention not in ("dense", "sparse"):
            raise ValueError(f"attention is {self.attention!r}; use 'dense' or 'sparse'")
        check_formats(self.index_cache, self.latent_cache)
        if self.sharing < 1:
            raise ValueError(f"sharing is {self.sharing}; a gather serves at least 1 query")


def prefill(
    cfg: ModelConfig, serving: Serving, length: int, prompts: int = 1, chunk: int | None = None
) -> Costs:
    """Of a step that reads `chunk` tokens of each of so many prompts at once (default: all of them), the mean over the
    steps that a prompt of `length` tokens takes; the head reads the last token of each.

    Dense attention expands keys and values of every head (MHA), sparse attention multiplies with latents.
    """
    chunk = min(length, length if chunk is None else chunk)
    _check(cfg, serving, length, prompts=prompts, chunk=chunk)
    # Keys of a step: those of the chunks before it and its own.
    selects, keys = _selects(cfg, serving, length), prompts * (length + chunk) / 2
    share = chunk / length
    causal = prompts * length * (length + 1) / 2 * share
    n, h, r = cfg.num_attention_heads, cfg.qk_nope_head_dim, cfg.qk_rope_head_dim
    costs = weight_costs(cfg, serving, prompts * chunk, drawn=prompts, indexed=selects)
    row = latent_bytes(cfg, None)
    if not selects:
        flops = 2 * n * (h + r + cfg.v_head_dim) * causal
        return costs | _attention(cfg, flops, row * keys)
    k = cfg.index_topk
    picked = prompts * (k * (k + 1) / 2 + (length - k) * k) * share
    gathered = row * picked / serving.sharing + POSITION_BYTES * picked
    scores = _scores(cfg, serving, causal, keys=keys, picked=picked)
    return costs | scores | _attention(cfg, _absorbed(cfg) * picked, gathered)


def decode(cfg: ModelConfig, serving: Serving, length: int, batch: int, queries: int = 1) -> Costs:
    """Of one step of `batch` sequences that have `length` tokens each, their new ones included; both kinds of attention
    multiply with latents (MQA). queries: tokens of each that are read, drafts among them, for which a key counts as read
    once; making drafts is left out."""
    _check(cfg, serving, length, batch=batch, queries=queries)
    selects, keys, tokens = _selects(cfg, serving, length), batch * length, batch * queries
    costs = weight_costs(cfg, serving, tokens, drawn=tokens, indexed=selects)
    row = latent_bytes(cfg, serving.latent_cache)
    if not selects:
        return costs | _attention(cfg, _absorbed(cfg) * keys * queries, row * keys)
    picked = batch * cfg.index_topk
    scores = _scores(cfg, serving, keys * queries, keys=keys, picked=picked * queries)
    read = row * picked + POSITION_BYTES * picked * queries
    return costs | scores | _attention(cfg, _absorbed(cfg) * picked * queries, read)


def weight_costs(
    cfg: ModelConfig, serving: Serving, tokens: float, *, drawn: float, indexed: bool
) -> Costs:
    """Of all products with weights in a step of so many tokens, of which the head reads `drawn`. indexed: whether
    indexers run. Experts are reached as if every token chose evenly among them all."""
    share = cfg.num_experts_per_tok / cfg.n_routed_experts
    reached = 1 - (1 - share) ** tokens
    out: Costs = {}
    parts = flatten(match(PARTS, _weights(cfg, False)))
    for path, w in flatten(_weights(cfg, serving.quantised)).items():
        part = parts.get(path)
        if cfg.tie_word_embeddings and path.startswith("embed/"):
            part = "head"
        if part is None or (part == "indexer" and not indexed):
            continue
        routed = "/experts/" in path
        met = drawn if part == "head" else tokens * (share if routed else 1)
        stored = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(w))
        read = stored * (reached if routed else 1)
        dtype = "int8" if isinstance(w, Compound) else DTYPE
        out.setdefault(part, []).append(Cost(2 * math.prod(w.shape) * met, read, dtype))
    return out


def latent_bytes(cfg: ModelConfig, kind: str | None) -> int:
    """Of one token's c_kv and k_rope in one layer's pages. In 8 bits they are what a GPU holds, 656 for GLM-5; a TPU's
    rows lie in whole lanes and are longer."""
    c, r = cfg.kv_lora_rank, cfg.qk_rope_head_dim
    if kind is None:
        return jnp.dtype(DTYPE).itemsize * (c + r)
    return 4 * Layout(jnp.dtype(FORMATS[kind]).name, c, r, DTYPE).width


def index_bytes(cfg: ModelConfig, kind: str | None) -> int:
    """Of one token's index key in the pages of one layer that has an indexer."""
    if kind is None:
        return jnp.dtype(DTYPE).itemsize * cfg.index_head_dim
    return cfg.index_head_dim + SCALE_BYTES


def component_seconds(costs: list[Cost], chip: Chip) -> float:
    """Of one component on one chip. A dtype that its data sheet gives no rate for counts at bfloat16's."""
    computing = sum(one.flops / chip.flops.get(one.dtype, chip.flops[DTYPE]) for one in costs)
    return max(computing, sum(one.bytes for one in costs) / chip.bandwidth)


def chip_seconds(costs: Costs, chip: Chip) -> float:
    """Of all components, one after the other: on so many chips it takes at least this long divided by them."""
    return sum(component_seconds(own, chip) for own in costs.values())


def arms(chip: Chip) -> dict[str, Serving]:
    """The forms that are compared, by name: caches in the 8 bits that the chip multiplies fastest."""
    kind = "fp8" if chip.flops.get("float8", 0) > chip.flops[DTYPE] else "int8"
    packed = {"quantised": True, "index_cache": kind, "latent_cache": kind}
    return {"dense": Serving("dense"), "DSA": Serving(), "DSA W4A8": Serving(**packed)}


@dataclasses.dataclass(frozen=True)
class TokenCost:
    """The least that a million tokens cost on chips of one kind, in chip-seconds.

    Attributes:
      stage: "prefill", of prompts of `length` tokens, or "decode", of sequences that have as many.
      batch: prompts that are read at once, or sequences that decode at once.
      chip: its key in `pallas_kernels.chips.CHIPS`.
      seconds: {form of `arms`: {component: chip-seconds}}, of those that the model can have.
    """

    stage: str
    length: int
    batch: int
    chip: str
    seconds: dict[str, dict[str, float]]

    @classmethod
    def of(cls, cfg: ModelConfig, chip: str, stage: str, length: int, batch: int) -> "TokenCost":
        """ValueError for a length that the model has not."""
        own, tokens = CHIPS[chip], batch * (length if stage == "prefill" else 1)
        seconds = {}
        for name, serving in arms(own).items():
            if _possible(cfg, serving):
                costs = {"prefill": prefill, "decode": decode}[stage](cfg, serving, length, batch)
                each = {part: component_seconds(c, own) for part, c in costs.items()}
                seconds[name] = {part: s * MILLION / tokens for part, s in each.items()}
        return cls(stage, length, batch, chip, seconds)

    @property
    def totals(self) -> dict[str, float]:
        """{form: chip-seconds}."""
        return {name: sum(parts.values()) for name, parts in self.seconds.items()}

    @property
    def saved(self) -> float | None:
        """Share of the dense cost that DSA with W4A8 leaves out."""
        totals = self.totals
        return 1 - totals["DSA W4A8"] / totals["dense"] if "DSA W4A8" in totals else None


def flops(costs: Costs, *components: str) -> float:
    """Of these components, those that are not there being 0; of all without a name."""
    return sum(one.flops for name in components or costs for one in costs.get(name, ()))


def _possible(cfg: ModelConfig, serving: Serving) -> bool:
    """Whether the model has what is served in this form: indexers, rows of experts in whole groups."""
    selects = serving.attention == "dense" or cfg.index_topk is not None
    rows, group = (cfg.hidden_size, cfg.moe_intermediate_size), cfg.int4_group or table.GROUP
    return selects and not (serving.quantised and any(n % group for n in rows))


@functools.lru_cache(maxsize=8)
def _weights(cfg: ModelConfig, quantised: bool):
    """The parameter tree in bfloat16 or W4A8, as shapes."""
    plain = glm5.abstract(cfg, DTYPE)
    if not quantised:
        return plain
    return jax.eval_shape(lambda params: table.quantise(params, cfg)[0], plain)


def _check(cfg: ModelConfig, serving: Serving, length: int, **counts: int) -> None:
    for name, value in ({"length": length} | counts).items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be positive")
    cfg.check_length(length)
    if serving.attention == "sparse" and cfg.index_topk is None:
        raise ValueError("attention is 'sparse', and the model has no indexer; use 'dense'")


def _selects(cfg: ModelConfig, serving: Serving, length: int) -> bool:
    """Up to index_topk keys sparse attention is dense; that index keys are cached even so is left out."""
    return serving.attention == "sparse" and length > cfg.index_topk


def _absorbed(cfg: ModelConfig) -> int:
    """FLOPs of a query of all heads with one latent, as key and as value."""
    return 2 * cfg.num_attention_heads * (2 * cfg.kv_lora_rank + cfg.qk_rope_head_dim)


def _attention(cfg: ModelConfig, flops: float, read: float) -> Costs:
    """All layers, of which this is one."""
    layers = cfg.num_hidden_layers
    return {"attention": [Cost(layers * flops, layers * read, DTYPE)]}


def _scores(cfg: ModelConfig, serving: Serving, pairs: float, keys: float, picked: float) -> Costs:
    """Of all indexers' scores; only what is selected ever leaves the chip's own memory."""
    layers, kind = len(cfg.full_layers), serving.index_cache
    products = 2 * cfg.index_n_heads * cfg.index_head_dim * pairs
    moved = index_bytes(cfg, kind) * keys + POSITION_BYTES * picked
    return {"scores": [Cost(layers * products, layers * moved, DTYPES[kind])]}
