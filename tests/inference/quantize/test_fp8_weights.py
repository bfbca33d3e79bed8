"""Tests of FP8 as a quantisation of engines: which weights it has, its forward, and equal bits on every way to an engine."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax import presets
from glm5_jax.checkpoint import hf_fp8, hf_names
from glm5_jax.checkpoint.hf_export import save_hf
from glm5_jax.checkpoint.models import load_served_model
from glm5_jax.inference.engine_weights import EngineWeights
from glm5_jax.inference.quantize import table
from glm5_jax.inference.quantize.recipe import QuantizationRecipe, WeightConverter
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.shards.offer import named_arrays
from glm5_jax.model import glm5
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.parallel.fingerprint import read_fingerprint
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.parallel.tree import flatten, unflatten
from glm5_jax.rl.programs.trainer import converter_of
from glm5_jax.rl.weights.offers import make_offer
from pallas_kernels.quantized_weights import CompositeWeight, Fp8
from tests.mesh import cases

BLOCK = 8  # so that most dimensions have several blocks, and some end with a partial one
CFG = cases.config(num_hidden_layers=2, indexer_types=("full", "shared"))
NARROW = dataclasses.replace(CFG, dtype="bfloat16")
TOKENS = cases.batch()["token_ids"][:2]


@functools.cache
def quantised(cfg=CFG, block=BLOCK):
    return table.quantise(cases.params(CFG), cfg, block, table.FP8)[0]


@jax.jit
def run(params):
    out = glm5.forward(params, TOKENS, CFG)
    return out.logits, glm5.forward_mtp(params, out.hidden, TOKENS, CFG).logits


def assert_same(got, want, path):
    assert isinstance(got, CompositeWeight) == isinstance(want, CompositeWeight), path
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes() and a.shape == b.shape, path


def assert_same_trees(got, want):
    got, want = flatten(got), flatten(want)
    assert got.keys() == want.keys()
    for path, leaf in want.items():
        assert_same(got[path], leaf, path)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_fp8_weights_are_those_of_released_files(name):
    """Except kv_b, whose parts are multiplied with cached latents."""
    cfg = presets.get(name)
    abstract = glm5.abstract_params(cfg)
    pieces = hf_names.pieces(cfg, glm5.axis_letters(cfg), abstract)
    released = {piece.path for piece in pieces if hf_fp8.is_fp8_weight(piece.name)}
    rules = table.rules_of(abstract, table.FP8)
    ours = {path for path, rule in rules.items() if rule == table.FP8}
    kv_b = {path for path in rules if path.endswith(("/attn/k_b", "/attn/v_b"))}
    assert kv_b <= released and ours == released - kv_b
    assert {*rules.values()} == {table.FP8, table.KEEP}


def test_scales_are_per_block():
    flat = flatten(quantised())
    shapes = {path: leaf.scale.shape for path, leaf in flat.items() if isinstance(leaf, Fp8)}
    assert shapes["moe_layers/experts/down"] == (1, CFG.n_routed_experts, 1, 4)
    assert shapes["moe_layers/attn/q_b"] == (1, 5, CFG.num_attention_heads, 2)
    assert shapes["moe_layers/attn/o"] == (1, CFG.num_attention_heads, 2, 4)
    assert shapes["moe_layers/attn/kv_a"] == (1, 4, 4)


def test_layers_and_experts_have_bits_of_whole_model():
    converter = WeightConverter(NARROW, QuantizationRecipe(group=BLOCK, scheme=table.FP8))
    plain, letters = flatten(cases.params(CFG)), flatten(glm5.axis_letters(CFG))
    for path, leaf in flatten(quantised(NARROW)).items():
        if not letters[path].startswith("l "):
            assert_same(converter.convert(path, plain[path], plain.get), leaf, path)
            continue
        for layer, w in enumerate(plain[path]):
            want = jax.tree.map(lambda x, layer=layer: x[layer], leaf)
            assert_same(converter.convert(path, w, plain.get, layer), want, path)
        if "/experts/" in path:
            want = jax.tree.map(lambda x: x[0, 3], leaf)
            assert_same(converter.convert(path, plain[path][0, 3], plain.get, 0, 3), want, path)


def test_offered_weights_have_bits_of_quantised_model():
    """A trainer pushes the bits that an engine makes of the plain weights."""
    cfg = cases.small(dtype="bfloat16")
    params = cases.params(cfg)
    converter = converter_of(None, cfg, quantization="fp8")
    offer, _ = make_offer(params, cfg, 1, converter=converter)
    want = flatten(table.quantise(params, cfg, scheme=table.FP8)[0])
    arrays = {n: x for path, leaf in want.items() for n, x in named_arrays(path, leaf).items()}
    assert offer.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        offered = offer.arrays[name]
        assert offered.fingerprint == read_fingerprint(jnp.asarray(array, offered.dtype)), name
    assert offer.arrays["moe_layers/experts/up.values"].dtype == "float8_e4m3fn"


def test_engine_quantises_plain_weights_that_it_loads():
    model = glm5.Glm5(NARROW, params=quantised(NARROW))
    weights = EngineWeights(model, ExecutionConfig())
    want = weights.params
    weights.load(jax.tree.map(np.zeros_like, cases.params(CFG)))
    weights.load(cases.params(CFG))
    assert_same_trees(weights.params, want)


def test_checkpoint_is_quantised_while_it_is_loaded(tmp_path):
    save_hf(cases.params(CFG), tmp_path / "plain", cfg=CFG)
    convert = table.make_leaf_converter("fp8")
    loaded = load_served_model(tmp_path / "plain", convert=convert)
    params = glm5.params_of(loaded)
    assert_same_trees(params, table.quantise(cases.params(CFG), CFG, scheme=table.FP8)[0])
    assert table.quantise_model(loaded, "fp8") is loaded
    plain = load_served_model(tmp_path / "plain")
    assert table.quantise_model(plain, None) is plain
    assert_same_trees(glm5.params_of(table.quantise_model(plain, "fp8")), params)


def test_fp8_forward_is_near_plain_forward():
    cfg = cases.small("dense", index_topk=None)
    forward = jax.jit(lambda params: glm5.forward(params, TOKENS, cfg).logits)
    want = forward(cases.params(cfg))
    got = forward(table.quantise(cases.params(cfg), cfg, BLOCK, table.FP8)[0])
    gap = np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))
    assert 1e-3 < gap < 0.4  # random weights choose other experts after small changes


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["dense_layers", "moe_layers", "mtp"])
def test_every_fp8_weight_affects_output(stack):
    """Doubled scales of every second block of any leaf change the outputs."""
    want = run(quantised())
    for path, w in flatten(quantised()).items():
        if path.startswith(stack) and isinstance(w, Fp8) and "indexer" not in path:
            factor = 1 + np.arange(w.scale.size, dtype=np.float32).reshape(w.scale.shape) % 2
            other = flatten(quantised()) | {path: dataclasses.replace(w, scale=factor * w.scale)}
            assert max(np.abs(x - y).max() for x, y in zip(run(unflatten(other)), want)) > 1e-3, (
                path
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes", [{"expert": 2, "context": 2, "data": 2}, {"fsdp": 2, "tensor": 2, "context": 2}]
)
def test_fp8_forward_on_mesh_equals_one_device(axes):
    cfg = dataclasses.replace(CFG, moe_intermediate_size=16)
    params, _ = table.quantise(cases.params(cfg), cfg, BLOCK, table.FP8)
    mesh = make_mesh(axes)
    sharded = jax.device_put(params, glm5.param_shardings(cfg, mesh, params))
    one, many = (
        jax.jit(functools.partial(glm5.forward, cfg=cfg, mesh=m))(p, cases.batch()["token_ids"])
        for m, p in ((None, params), (mesh, sharded))
    )
    # A value next to the middle of two may round either way.
    assert np.median(np.abs(one.logits - many.logits)) < 1e-5


def test_mesh_shards_between_blocks():
    shardings = glm5.param_shardings(CFG, make_mesh(fsdp=2, context=2, data=2), quantised())
    gate = flatten(shardings)["dense_layers/mlp/gate"]
    assert gate.values.spec == gate.scale.spec and gate.values.spec[1:] != (None, None)
    message = "FP8 in blocks of 8: mesh axis tensor=2 cuts the width 8 of moe_layers/experts/down"
    with pytest.raises(ValueError, match=message):
        glm5.param_shardings(CFG, make_mesh(tensor=2, data=4), quantised())


def test_rejects_other_formats():
    with pytest.raises(ValueError, match="quantization is 'fp4'; use fp8 or None"):
        EngineConfig(quantization="fp4")
    trained = dataclasses.replace(CFG, int4_group=4)
    with pytest.raises(ValueError, match="trained with experts as int4 in groups of 4"):
        converter_of(None, trained, quantization="fp8")
    params, cfg = table.quantise(cases.params(CFG), CFG, 4)
    with pytest.raises(ValueError, match="'fp8', and the checkpoint is quantised already"):
        table.quantise_model(glm5.Glm5(cfg, params=params), "fp8")
