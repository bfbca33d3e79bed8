"""Table of HF names: complete, one to one, with transformations as the layout defines them."""

import dataclasses
import json
import math
import pathlib

import numpy as np
import pytest
import safetensors

from glm5_jax import presets
from glm5_jax.checkpoint import hf_names
from glm5_jax.checkpoint.hf_config import from_hf
from glm5_jax.model import glm5
from glm5_jax.parallel import tree

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
CONFIGS = {
    "tiny": presets.tiny(),
    "shared": dataclasses.replace(
        presets.tiny(), indexer_types=("full", "shared", "full", "shared"), n_shared_experts=2
    ),
    "biased and tied": dataclasses.replace(
        presets.tiny(), attention_bias=True, tie_word_embeddings=True, num_nextn_predict_layers=0
    ),
    "no indexer": dataclasses.replace(
        presets.tiny(), index_topk=None, attention="dense", model_type="glm4_moe_lite"
    ),
    "no shared expert, all MoE": dataclasses.replace(
        presets.tiny(), n_shared_experts=0, first_k_dense_replace=0
    ),
}


def table_of(cfg, fused=frozenset()):
    return hf_names.pieces(cfg, glm5.axis_letters(cfg), glm5.abstract_params(cfg), fused)


def tensors_of(cfg, fused=frozenset()) -> dict[str, tuple[int, ...]]:
    return {n: p[0].view.shape for n, p in hf_names.by_name(table_of(cfg, fused)).items()}


@pytest.mark.parametrize("golden", sorted(p.name for p in GOLDENS.glob("hf_*")))
def test_names_and_shapes_equal_transformers(golden):
    folder = GOLDENS / golden
    stored = {}
    for file in folder.glob("*.safetensors"):
        with safetensors.safe_open(file, framework="numpy") as opened:
            stored |= {n: tuple(opened.get_slice(n).get_shape()) for n in opened.keys()}
    cfg = from_hf(json.loads((folder / "config.json").read_text()))
    mtp = int(bool(hf_names.mtp_names(cfg, stored)))
    cfg = dataclasses.replace(cfg, num_nextn_predict_layers=mtp)
    for copy, original in hf_names.copies(cfg).items():
        if copy in stored:
            assert stored.pop(copy) == stored[original]
    assert tensors_of(cfg) == stored


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [
        pytest.param("glm5", 59_870, 753_864_139_008, marks=pytest.mark.slow),
        # Audited from the headers of the release; the 76 x 256 router biases come on top.
        ("glm5_2", 59_585, 753_329_921_024 + 76 * 256),
    ],
)
def test_counts_tensors_and_parameters_of_releases(name, tensors, parameters):
    shapes = tensors_of(presets.get(name))
    assert len(shapes) == tensors
    assert sum(math.prod(shape) for shape in shapes.values()) == parameters


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_maps_every_number_exactly_once(name, fused):
    cfg = CONFIGS[name]
    layers = range(cfg.first_k_dense_replace, cfg.num_hidden_layers + 1)
    table = table_of(cfg, frozenset(layers) if fused else frozenset())
    numbers, start = {}, 1
    for tensor, pieces in hf_names.by_name(table).items():
        size = math.prod(pieces[0].view.shape)
        numbers[tensor] = np.arange(start, start + size).reshape(pieces[0].view.shape)
        start += size
    leaves = {p: np.zeros(x.shape, int) for p, x in tree.flatten(glm5.abstract_params(cfg)).items()}
    for piece in table:
        leaves[piece.path][piece.at] = piece.view.of(numbers[piece.name])
    everywhere = np.concatenate([leaf.ravel() for leaf in leaves.values()])
    np.testing.assert_array_equal(np.sort(everywhere), np.arange(1, start))
    back = {tensor: np.zeros_like(x) for tensor, x in numbers.items()}
    for piece in table:
        piece.view.of(back[piece.name])[...] = leaves[piece.path][piece.at]
    for tensor in numbers:
        np.testing.assert_array_equal(back[tensor], numbers[tensor])


def test_transformations_match_layout():
    cfg = presets.tiny()
    n, h, r, u = (
        cfg.num_attention_heads,
        cfg.qk_nope_head_dim,
        cfg.qk_rope_head_dim,
        cfg.v_head_dim,
    )
    i, j = cfg.index_n_heads, cfg.index_head_dim
    table = {(p.path, p.at): p for p in table_of(cfg)}
    rng = np.random.default_rng(0)

    def leaf(path, at, name):
        piece = table[path, at]
        assert piece.name == name
        x = rng.normal(size=piece.view.shape)
        return x, piece.view.of(x)

    layer = "model.layers.2.self_attn."
    x, w = leaf("moe_layers/attn/q_b", (1,), layer + "q_b_proj.weight")
    for head in range(n):  # rows of a head: nope, then rope
        np.testing.assert_array_equal(w[:, head], x[head * (h + r) : (head + 1) * (h + r)].T)
    x, w = leaf("moe_layers/attn/k_b", (1,), layer + "kv_b_proj.weight")
    for head in range(n):  # rows of a head: key, then value
        np.testing.assert_array_equal(w[:, head], x[head * (h + u) : head * (h + u) + h].T)
    x, w = leaf("moe_layers/attn/v_b", (1,), layer + "kv_b_proj.weight")
    for head in range(n):
        np.testing.assert_array_equal(w[:, head], x[head * (h + u) + h : (head + 1) * (h + u)].T)
    x, w = leaf("moe_layers/attn/o", (1,), layer + "o_proj.weight")
    for head in range(n):
        np.testing.assert_array_equal(w[head], x[:, head * u : (head + 1) * u].T)
    x, w = leaf("moe_layers/indexer/q_b", (1,), layer + "indexer.wq_b.weight")
    for head in range(i):
        np.testing.assert_array_equal(w[:, head], x[head * j : (head + 1) * j].T)
    for path, name in [
        ("moe_layers/attn/kv_a", layer + "kv_a_proj_with_mqa.weight"),
        ("moe_layers/attn/q_a", layer + "q_a_proj.weight"),
        ("moe_layers/indexer/k", layer + "indexer.wk.weight"),
        ("moe_layers/indexer/weights", layer + "indexer.weights_proj.weight"),
        ("moe_layers/router/weight", "model.layers.2.mlp.gate.weight"),
        ("moe_layers/shared/down", "model.layers.2.mlp.shared_experts.down_proj.weight"),
    ]:
        x, w = leaf(path, (1,), name)
        np.testing.assert_array_equal(w, x.T)
    x, w = leaf("moe_layers/experts/gate", (1, 5), "model.layers.2.mlp.experts.5.gate_proj.weight")
    np.testing.assert_array_equal(w, x.T)
    x, w = leaf("mtp/eh_proj", (), "model.layers.4.eh_proj.weight")
    np.testing.assert_array_equal(w, x.T)
    x, w = leaf("mtp/block/attn/q_a", (), "model.layers.4.self_attn.q_a_proj.weight")
    np.testing.assert_array_equal(w, x.T)
    x, w = leaf("embed/weight", (), "model.embed_tokens.weight")
    np.testing.assert_array_equal(w, x)
    x, w = leaf("lm_head/weight", (), "lm_head.weight")
    np.testing.assert_array_equal(w, x.T)


def test_fused_experts_hold_gate_rows_before_up_rows():
    cfg = presets.tiny()
    f = cfg.moe_intermediate_size
    table = {(p.path, p.at): p for p in table_of(cfg, frozenset([2]))}
    gate, up, down = (table[f"moe_layers/experts/{x}", (1,)] for x in ("gate", "up", "down"))
    assert gate.name == up.name == "model.layers.2.mlp.experts.gate_up_proj"
    x = np.random.default_rng(0).normal(size=gate.view.shape)
    np.testing.assert_array_equal(gate.view.of(x), x[:, :f].swapaxes(1, 2))
    np.testing.assert_array_equal(up.view.of(x), x[:, f:].swapaxes(1, 2))
    x = np.random.default_rng(0).normal(size=down.view.shape)
    np.testing.assert_array_equal(down.view.of(x), x.swapaxes(1, 2))
    assert ("moe_layers/experts/gate", (0, 0)) in table  # the other layers are not fused


def test_numbers_indexers_by_full_layers():
    table = table_of(CONFIGS["shared"])
    names = {(p.path, p.at): p.name for p in table if p.path.endswith("indexer/k")}
    prefix, suffix = "model.layers.", ".self_attn.indexer.wk.weight"
    assert names == {
        ("dense_layers/indexer/k", (0,)): f"{prefix}0{suffix}",
        ("moe_layers/indexer/k", (0,)): f"{prefix}2{suffix}",
        ("mtp/block/indexer/k", ()): f"{prefix}4{suffix}",
    }


def test_part_of_leaf_reads_only_its_numbers():
    cfg = presets.tiny()
    rng = np.random.default_rng(0)

    class Counting:
        """Array that counts the numbers read from it."""

        def __init__(self, x):
            self.x, self.read = x, 0

        def __getitem__(self, index):
            self.read += self.x[index].size
            return self.x[index]

    for piece in table_of(cfg, frozenset([2])):
        source = Counting(rng.normal(size=piece.view.shape))
        full = piece.view.of(source.x)
        ranges = [slice(n // 4, n // 2) for n in full.shape]
        part = piece.view.of(source, ranges)
        np.testing.assert_array_equal(part, full[tuple(ranges)])
        joined = math.prod(f.total for dim in piece.view.dims for f in dim[1:])
        rows = math.prod(r.stop - r.start for r in ranges)
        inner = math.prod(
            r.stop - r.start
            for letter, r in zip(piece.view.letters, ranges)
            if letter in {f.letter for dim in piece.view.dims for f in dim[1:]}
        )
        assert source.read == rows // inner * joined


def test_rejects_leaf_without_name():
    cfg = presets.tiny()
    letters = glm5.axis_letters(cfg) | {"gate": {"scale": "d"}}
    shapes = glm5.abstract_params(cfg) | {
        "gate": {"scale": glm5.abstract_params(cfg)["final_norm"]}
    }
    with pytest.raises(ValueError, match="no HF name for the leaves gate/scale"):
        hf_names.pieces(cfg, letters, shapes)
