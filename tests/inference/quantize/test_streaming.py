"""Tests that a model is quantised a weight at a time, with bounded reads."""

import functools
import weakref

import jax
import numpy as np
import pytest

from glm5_jax.checkpoint.hf_export import save_hf
from glm5_jax.checkpoint.models import load_model
from glm5_jax.inference.quantize import calibrate, rotation, streaming, table
from glm5_jax.inference.quantize.recipe import QuantizationRecipe, WeightConverter
from glm5_jax.model import glm5
from glm5_jax.parallel.tree import flatten, unflatten
from tests.mesh import cases

CFG = cases.small(dtype="float32")
GROUP = 4


class HeldNumbers:
    """Counts the numbers that were read and are still in memory.

    Attributes:
      now: numbers in memory.
      peak: maximum of `now`.
    """

    def __init__(self):
        self.now = self.peak = 0

    def add(self, part):
        self.now += part.size
        self.peak = max(self.peak, self.now)
        weakref.finalize(part, self._remove, part.size)

    def _remove(self, size):
        self.now -= size


class CountedSource:
    """Weight whose reads are counted. held: receives every part.

    Attributes:
      shape, dtype: shape and dtype of the weight.
      read_sizes: numbers of each read.
    """

    def __init__(self, array, held=None):
        self.shape, self.dtype = array.shape, array.dtype
        self.read_sizes = []
        self._array, self._held = array, held

    def __getitem__(self, index):
        part = self._array[tuple(index)]
        self.read_sizes.append(part.size)
        if self._held is not None:
            part = part.copy()
            self._held.add(part)
        return part


@functools.cache
def params():
    return {path: np.asarray(x) for path, x in flatten(cases.params(CFG)).items()}


@pytest.fixture
def converter():
    return WeightConverter(CFG, QuantizationRecipe(group=GROUP))


def test_written_model_equals_one_quantised_at_once(converter, tmp_path):
    sources = {path: CountedSource(x) for path, x in params().items()}
    leaves = streaming.converted_leaves(sources, converter)
    assert all(not source.read_sizes for source in sources.values())  # shapes need no weights
    save_hf(leaves, tmp_path / "out", cfg=converter.cfg)
    loaded = flatten(glm5.params_of(load_model(tmp_path / "out")))
    expected = flatten(table.quantise(unflatten(params()), CFG, GROUP)[0])
    assert loaded.keys() == expected.keys()
    for path, leaf in expected.items():
        for a, b in zip(jax.tree.leaves(loaded[path]), jax.tree.leaves(leaf), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path
    assert streaming.num_bytes_of(leaves) == streaming.num_bytes_of(unflatten(expected))
    # Each number was read once, and of experts one at a time.
    for path, source in sources.items():
        assert sum(source.read_sizes) == np.prod(source.shape), path
        if "/experts/" in path:
            assert {*source.read_sizes} == {np.prod(source.shape[2:])}


def test_reads_large_plain_weight_in_parts(converter, monkeypatch):
    monkeypatch.setattr(streaming, "MAX_NUMBERS", 3 * CFG.hidden_size)
    source = CountedSource(params()["embed/weight"])
    sources = params() | {"embed/weight": source}
    leaf = streaming.converted_leaves(sources, converter)["embed"]["weight"]
    np.testing.assert_array_equal(leaf[()], params()["embed/weight"])
    assert max(source.read_sizes) == 3 * CFG.hidden_size
    assert sum(source.read_sizes) == np.prod(source.shape)


def test_calibration_never_holds_all_experts_of_layer():
    """The experts of a layer of GLM-5 take 19 GB in bfloat16."""
    cfg = cases.small("dense", index_topk=None, moe_intermediate_size=128)
    held = HeldNumbers()
    weights = {path: np.asarray(x) for path, x in flatten(cases.params(cfg)).items()}
    sources = {path: CountedSource(x, held) for path, x in weights.items()}
    recipe = QuantizationRecipe(group=None, rotation_seed=0)
    rotated = streaming.converted_leaves(sources, WeightConverter(cfg, recipe))
    tokens = cases.batch()["token_ids"][:1]
    scales = calibrate.smoothing_scales(rotated, cfg, tokens, GROUP)
    layer = 3 * weights["moe_layers/experts/up"][0].size
    rest = [x for path, x in weights.items() if "/experts/" not in path]
    assert held.peak < sum(x.size for x in rest) + layer / 2 < layer
    plain = calibrate.smoothing_scales(
        rotation.rotate(unflatten(weights), cfg)[0], cfg, tokens, GROUP
    )
    assert scales.keys() == plain.keys()
    for path, scale in plain.items():
        assert scale.shape == scales[path].shape
        np.testing.assert_allclose(scale, scales[path], rtol=1e-4)


def test_reads_layer_of_experts(converter):
    leaf = streaming.converted_leaves(params(), converter)["moe_layers"]["experts"]["up"]
    want = table.quantised(table.W4A8, params()["moe_layers/experts/up"], "", GROUP, "float32")
    np.testing.assert_array_equal(leaf.packed[0], np.asarray(want.packed)[0])
    np.testing.assert_array_equal(leaf.scale[0, 2], np.asarray(want.scale)[0, 2])
