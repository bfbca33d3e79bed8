"""Maps HuggingFace tensor names to leaves of the parameter tree and back, by one table.

A row is (path of the leaf, HF name, axis letters of the HF tensor, one token per dimension). The letters of the
leaf come from the model, so a row defines the full transformation in both directions:

    n*hr      one dimension that joins two, outer first
    n*[h]u    the leaf is the bracketed part of a concatenation (h, then u)
    {e}       one tensor per expert; otherwise the letter e marks the dimension of the experts

Names are those of the released checkpoints and of transformers 5.23; no RoPE dimension is permuted.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.model import lora
from glm5_jax.parallel import axes, tree

_MODEL = (
    ("embed/weight", "model.embed_tokens.weight", "v d"),
    ("final_norm", "model.norm.weight", "d"),
    ("lm_head/weight", "lm_head.weight", "v d"),
)
# Under model.layers.N, for every layer that has the leaf.
_LAYER = (
    ("attn_norm", "input_layernorm.weight", "d"),
    ("mlp_norm", "post_attention_layernorm.weight", "d"),
    ("attn/q_a", "self_attn.q_a_proj.weight", "q d"),
    ("attn/q_a_bias", "self_attn.q_a_proj.bias", "q"),
    ("attn/q_a_norm", "self_attn.q_a_layernorm.weight", "q"),
    ("attn/q_b", "self_attn.q_b_proj.weight", "n*hr q"),
    ("attn/kv_a", "self_attn.kv_a_proj_with_mqa.weight", "cr d"),
    ("attn/kv_a_bias", "self_attn.kv_a_proj_with_mqa.bias", "cr"),
    ("attn/kv_a_norm", "self_attn.kv_a_layernorm.weight", "c"),
    ("attn/k_b", "self_attn.kv_b_proj.weight", "n*[h]u c"),
    ("attn/v_b", "self_attn.kv_b_proj.weight", "n*h[u] c"),
    ("attn/o", "self_attn.o_proj.weight", "d n*u"),
    ("attn/o_bias", "self_attn.o_proj.bias", "d"),
    ("indexer/q_b", "self_attn.indexer.wq_b.weight", "i*j q"),
    ("indexer/k", "self_attn.indexer.wk.weight", "j d"),
    ("indexer/k_norm", "self_attn.indexer.k_norm.weight", "j"),
    ("indexer/k_norm_bias", "self_attn.indexer.k_norm.bias", "j"),
    ("indexer/weights", "self_attn.indexer.weights_proj.weight", "i d"),
    ("mlp/gate", "mlp.gate_proj.weight", "f d"),
    ("mlp/up", "mlp.up_proj.weight", "f d"),
    ("mlp/down", "mlp.down_proj.weight", "d f"),
    ("router/weight", "mlp.gate.weight", "e d"),
    ("router/bias", "mlp.gate.e_score_correction_bias", "e"),
    ("experts/gate", "mlp.experts.{e}.gate_proj.weight", "f d"),
    ("experts/up", "mlp.experts.{e}.up_proj.weight", "f d"),
    ("experts/down", "mlp.experts.{e}.down_proj.weight", "d f"),
    ("shared/gate", "mlp.shared_experts.gate_proj.weight", "f d"),
    ("shared/up", "mlp.shared_experts.up_proj.weight", "f d"),
    ("shared/down", "mlp.shared_experts.down_proj.weight", "d f"),
)
# Leaves that the MTP layer has in addition to a full MoE layer.
_MTP = (
    ("enorm", "enorm.weight", "d"),
    ("hnorm", "hnorm.weight", "d"),
    ("eh_proj", "eh_proj.weight", "d dd"),
    ("norm", "shared_head.norm.weight", "d"),
)
# Layout of a layer's experts in transformers' memory; files may have it, too.
_FUSED = (
    ("experts/gate", "mlp.experts.gate_up_proj", "e [f]f d"),
    ("experts/up", "mlp.experts.gate_up_proj", "e f[f] d"),
    ("experts/down", "mlp.experts.down_proj", "e d f"),
)
# Adapters of the routed experts, as PEFT wraps the fused tensors: down outside, gate and up inside.
_EXPERT_ADAPTERS = (
    ("experts/gate_up_lora_a", "mlp.experts.base_layer.lora_A.weight", "e*o d"),
    ("experts/gate_lora_b", "mlp.experts.base_layer.lora_B.weight", "[f]f o*e"),
    ("experts/up_lora_b", "mlp.experts.base_layer.lora_B.weight", "f[f] o*e"),
    ("experts/down_lora_a", "mlp.experts.lora_A.weight", "e*o f"),
    ("experts/down_lora_b", "mlp.experts.lora_B.weight", "d o*e"),
)


def _adapter_rows() -> tuple[tuple[str, str, str], ...]:
    """Returns the rows of the adapters of all targets (`model.lora`), whose names are PEFT's."""
    rows = {row: None for row in _EXPERT_ADAPTERS}
    for path, name, hf in _LAYER:
        if not lora.is_target(path) or path.startswith("experts/"):
            continue
        outputs, inputs = hf.split()
        module = name.removesuffix(".weight")
        rows[lora.a_path(path), f"{module}.lora_A.weight", f"o {inputs}"] = None
        rows[path + lora.B, f"{module}.lora_B.weight", f"{outputs} o"] = None
    return tuple(rows)


_LAYER += _adapter_rows()
FLOAT32 = "router/bias"  # the leaf that is float32 in every checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class Factor:
    """Part of an HF dimension that belongs to a letter of a leaf: `size` entries from `offset` on, of `total`."""

    letter: str
    size: int
    offset: int
    total: int

    def bounds(self, wanted: dict[str, slice]) -> tuple[int, int]:
        """Returns (start, stop) in the HF dimension for the wanted slice of the letter; without one, for all of it."""
        part = wanted.get(self.letter, slice(0, self.size))
        return self.offset + part.start, self.offset + part.stop


class StoredTensor(Protocol):
    """Tensor in files; indexing with slices reads that part."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def __getitem__(self, index: Any) -> np.ndarray: ...


def check_scales(name: str, scale: np.ndarray) -> np.ndarray:
    """Returns the scales of a quantised weight. Raises ValueError unless they are finite and not negative."""
    numbers = scale.astype(np.float32)
    if not (np.isfinite(numbers) & (numbers >= 0)).all():
        raise ValueError(
            f"{name} has scales that are negative or not finite; fetch the checkpoint again"
        )
    return scale


@dataclasses.dataclass(frozen=True)
class View:
    """Position of a leaf's numbers (or those of one layer or expert) in an HF tensor.

    Attributes:
      dims: factors of each HF dimension, outer first.
      letters: letters of the leaf's dimensions, in its order.
    """

    dims: tuple[tuple[Factor, ...], ...]
    letters: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the HF tensor."""
        return tuple(math.prod(f.total for f in factors) for factors in self.dims)

    def of(self, tensor: Any, ranges: Sequence[slice] | None = None) -> np.ndarray:
        """Returns the numbers in the leaf's layout, as a NumPy view if `tensor` is a contiguous array.

        - tensor: array, or an object that returns one when indexed with slices, such as a safetensors slice. Only the
          needed rows and columns are read.
        - ranges: slice(start, stop) of each of the leaf's dimensions; None: the full leaf.
        """
        wanted = dict(zip(self.letters, ranges)) if ranges else {}
        cut, shape, parts, order = [], [], [], []
        for outer, *inner in self.dims:
            width = math.prod(f.total for f in inner)
            start, stop = outer.bounds(wanted)
            cut.append(slice(start * width, stop * width))
            shape += [stop - start, *(f.total for f in inner)]
            parts += [slice(None), *(slice(*f.bounds(wanted)) for f in inner)]
            order += [outer.letter, *(f.letter for f in inner)]
        block = tensor[tuple(cut)].reshape(shape)[tuple(parts)]
        return block.transpose([order.index(letter) for letter in self.letters])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """Part of a leaf that comes from one HF tensor: `leaf[at] = view.of(tensor)`.

    Attributes:
      path: path of the leaf.
      at: index in the layer stack and of the expert, if the tensor is one of many.
      name: name of the HF tensor.
      view: position of the part in the HF tensor.
    """

    path: str
    at: tuple[int, ...]
    name: str
    view: View


def fill(
    pieces: list[Piece], ranges: Sequence[slice], dtype: DTypeLike, read: Callable
) -> np.ndarray:
    """Assembles a slice of a leaf from its pieces.

    ranges: slice(start, stop) of each dimension of the leaf. read(piece, ranges): returns the slice of one piece.
    """
    part = np.empty([r.stop - r.start for r in ranges], dtype)
    for piece in pieces:
        depth = len(piece.at)
        if all(r.start <= i < r.stop for i, r in zip(piece.at, ranges)):
            inside = tuple(i - r.start for i, r in zip(piece.at, ranges))
            part[inside] = read(piece, ranges[depth:])
    return part


def pieces(
    cfg: ModelConfig,
    letters: PyTree,
    shapes: PyTree,
    fused: frozenset[int] = frozenset(),
    may_differ: Sequence[str] = (),
) -> list[Piece]:
    """Returns all (leaf, HF tensor) pairs of a model, leaf by leaf.

    - letters, shapes: trees of the model's axis letters and of objects with `.shape`.
    - fused: layers whose experts are stored in fused tensors.
    - may_differ: patterns of paths that the table may lack.

    Each number of each leaf is in exactly one piece, and so is each number of each HF tensor. Raises ValueError for
    a leaf that the table lacks.
    """
    out = []
    shapes = tree.flatten(shapes)
    for path, names in tree.flatten(letters).items():
        sizes = axes.sizes(cfg) | dict(zip(names.split(), shapes[path].shape, strict=True))
        for position, layer, row_path, rows in _layers(cfg, path):
            if layer in fused and any(row_path == r[0] for r in _FUSED):
                rows = _FUSED
            for name, hf in [row[1:] for row in rows if row[0] == row_path]:
                prefix = "" if layer is None else f"model.layers.{layer}."
                per_expert = "{e}" in name
                inner = [x for x in names.split() if x != "l" and not (per_expert and x == "e")]
                view = View(tuple(_factors(dim, sizes) for dim in hf.split()), tuple(inner))
                for expert in range(sizes["e"]) if per_expert else [None]:
                    at = tuple(i for i in (position, expert) if i is not None)
                    out.append(
                        Piece(path=path, at=at, name=prefix + name.format(e=expert), view=view)
                    )
    unknown = sorted(set(shapes) - {p.path for p in out})
    unknown = [path for path in unknown if not tree.matches_any(may_differ, path)]
    if unknown:
        raise ValueError(
            f"no HF name for the leaves {', '.join(unknown)}; initialise them (may_differ), or use a "
            "training checkpoint"
        )
    return out


def by_name(table: list[Piece]) -> dict[str, list[Piece]]:
    """Returns {HF name: its pieces}, embedding first, then layer by layer, then final norm and head."""
    named = collections.defaultdict(list)
    for piece in table:
        named[piece.name].append(piece)

    def rank(name):
        numbers = [int(n) for n in re.findall(r"\d+", name)]
        section = 0 if "embed_tokens" in name else 1 if name.startswith("model.layers.") else 2
        return section, numbers[:1], len(numbers), numbers, name

    return {name: named[name] for name in sorted(named, key=rank)}


def fused_layers(names: Iterable[str]) -> frozenset[int]:
    """Returns the layers whose experts are fused in a file with these tensor names."""
    pattern = r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)"
    matches = (re.fullmatch(pattern, name) for name in names)
    return frozenset(int(m[1]) for m in matches if m)


def mtp_names(cfg: ModelConfig, names: Iterable[str]) -> list[str]:
    """Returns the names that belong to the MTP layer, which is numbered after the last decoder layer."""
    prefix = f"model.layers.{cfg.num_hidden_layers}."
    return [name for name in names if name.startswith(prefix)]


def copies(cfg: ModelConfig) -> dict[str, str]:
    """Returns {tensor that a file may repeat: its original}: embedding and head, in the MTP layer or tied."""
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    mtp = f"model.layers.{cfg.num_hidden_layers}"
    tied = {head: embed} if cfg.tie_word_embeddings else {}
    repeated = {
        f"{mtp}.embed_tokens.weight": embed,
        f"{mtp}.shared_head.head.weight": tied.get(head, head),
    }
    return tied | repeated


def _layers(cfg: ModelConfig, path: str):
    """Returns (index in the stack, HF layer number, path in the rows, rows) of every layer of a leaf."""
    first, last = cfg.first_k_dense_replace, cfg.num_hidden_layers
    stack, _, rest = path.partition("/")
    if stack == "mtp":
        inner = rest.removeprefix("block/")
        return [(None, last, inner, _LAYER if inner != rest else _MTP)]
    if stack not in ("dense_layers", "moe_layers"):
        return [(None, None, path, _MODEL)]
    layers = range(first) if stack == "dense_layers" else range(first, last)
    if rest.startswith("indexer/"):
        layers = [i for i in layers if i in cfg.full_layers]
    return [(position, layer, rest, _LAYER) for position, layer in enumerate(layers)]


def _factors(dim: str, sizes: dict[str, int]) -> tuple[Factor, ...]:
    """Parses one HF dimension of a row, e.g. "n*[h]u", into its factors."""
    out = []
    for part in dim.split("*"):
        if "[" not in part:
            out.append(Factor(letter=part, size=sizes[part], offset=0, total=sizes[part]))
            continue
        match = re.fullmatch(r"(\w*)\[(\w)\](\w*)", part)
        assert match is not None, f"{part!r} is no dimension such as 'n*[h]u'"
        before, letter, after = match.groups()
        total = sum(sizes[x] for x in before + letter + after)
        out.append(
            Factor(
                letter=letter, size=sizes[letter], offset=sum(sizes[x] for x in before), total=total
            )
        )
    return tuple(out)
