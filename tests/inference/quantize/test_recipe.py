"""Tests that weights converted one layer or expert at a time are, bit for bit, those of a model quantised at once."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax import presets
from glm5_jax.inference.quantize import calibrate, rotation, table
from glm5_jax.inference.quantize.recipe import FILE, QuantizationRecipe, WeightConverter
from glm5_jax.model import glm5
from glm5_jax.parallel.tree import flatten
from pallas_kernels.quantized_weights import CompositeWeight
from tests.mesh import cases

GROUP = 4
# Every space has a Hadamard matrix, as in GLM-5.
CFG = cases.config(
    num_hidden_layers=2,
    indexer_types=("full", "shared"),
    hidden_size=24,
    q_lora_rank=12,
    kv_lora_rank=16,
    v_head_dim=20,
)


@functools.cache
def params():
    draw = np.random.default_rng(0)
    shapes = flatten(glm5.abstract_params(CFG))
    flat = {p: draw.standard_normal(x.shape).astype(np.float32) for p, x in shapes.items()}
    return {path: jnp.asarray(w) for path, w in flat.items()}


def scales():
    """Returns scales between up- and down-projections."""
    draw = np.random.default_rng(1)
    ups = {path: w for path, w in params().items() if path.endswith("/up") and "mtp" not in path}
    return {
        path.removesuffix("/up"): draw.uniform(0.5, 2, (*w.shape[:-2], w.shape[-1])).astype("f4")
        for path, w in ups.items()
    }


def quantised_at_once():
    """Returns {path: leaf} of the steps of experiments/quantise.py on all weights."""
    turned, cfg = rotation.rotate(unflattened(params()), CFG, seed=3)
    flat = flatten(turned)
    for part, scale in scales().items():
        flat[f"{part}/up"] = calibrate.scale_up(flat[f"{part}/up"], scale)
        flat[f"{part}/down"] = calibrate.scale_down(flat[f"{part}/down"], scale)
    return flatten(table.quantise(unflattened(flat), cfg, GROUP)[0])


def unflattened(flat):
    structure = jax.tree.structure(glm5.abstract_params(CFG))
    order = flatten(glm5.abstract_params(CFG))
    return jax.tree.unflatten(structure, [flat[path] for path in order])


@pytest.fixture
def converter():
    return WeightConverter(CFG, QuantizationRecipe(group=GROUP, rotation_seed=3, scales=scales()))


def test_layers_and_experts_have_bits_of_whole_model(converter):
    expected, letters = quantised_at_once(), flatten(glm5.axis_letters(CFG))
    assert expected.keys() == flatten(glm5.abstract_params(converter.cfg)).keys()
    for path, leaf in expected.items():
        source = params()[converter.source(path)]
        by_layer = letters[path].startswith("l ")
        for layer in range(len(source)) if by_layer else (None,):
            w = source if layer is None else source[layer]
            want = leaf if layer is None else entry_of(leaf, layer)
            assert_same(converter.convert(path, w, params().__getitem__, layer), want, path)
            if "/experts/" not in path or layer is None:
                continue
            one = converter.convert(path, w[1], params().__getitem__, layer, 1)
            assert_same(one, entry_of(want, 1), path)


def entry_of(leaf, index):
    """Returns one layer or expert of a leaf."""
    return jax.tree.map(lambda x: x[index], leaf)


def assert_same(got, want, path):
    assert isinstance(got, CompositeWeight) == isinstance(want, CompositeWeight), path
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes() and a.shape == b.shape, path


def test_plain_recipe_only_quantises():
    converter = WeightConverter(CFG, QuantizationRecipe(group=GROUP))
    assert converter.cfg == dataclasses.replace(CFG, int4_group=None)
    path = "moe_layers/attn/q_b"
    w = params()[path][0]
    want = table.quantised(table.W8A8, w, "q n hr", None, "float32")
    assert_same(converter.convert(path, w, params().__getitem__, 0), want, path)
    path = "moe_layers/attn_norm"
    assert_same(converter.convert(path, w, {}.__getitem__, 0), w, path)


def test_recipe_is_equal_after_reading(tmp_path):
    recipe = QuantizationRecipe(group=GROUP, rotation_seed=3, scales=scales())
    recipe.save(tmp_path)
    read = QuantizationRecipe.read(tmp_path)
    assert read is not None and (read.group, read.rotation_seed) == (GROUP, 3)
    assert read.scales.keys() == recipe.scales.keys()
    for path, scale in recipe.scales.items():
        np.testing.assert_array_equal(read.scales[path], scale)
    QuantizationRecipe(group=8).save(tmp_path)
    read = QuantizationRecipe.read(tmp_path)
    assert read is not None and (read.group, read.rotation_seed, read.scales) == (8, None, {})


def test_rejects_recipe_of_other_model(tmp_path):
    assert QuantizationRecipe.read(tmp_path) is None
    (tmp_path / FILE).write_bytes(b"junk")
    with pytest.raises(ValueError, match="is no recipe"):
        QuantizationRecipe.read(tmp_path)
    wrong = {"dense_layers/mlp": np.ones((1, 3), np.float32)}
    with pytest.raises(ValueError, match=r"scales \[1, 3\] of dense_layers/mlp, not of this model"):
        WeightConverter(CFG, QuantizationRecipe(group=GROUP, scales=wrong))
    with pytest.raises(ValueError, match="own attention .MLA. can be rotated"):
        WeightConverter(presets.ablation("gqa"), QuantizationRecipe(group=GROUP, rotation_seed=0))
