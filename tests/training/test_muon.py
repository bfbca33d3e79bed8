"""Tests of Muon Split on one device: its blocks, and one step of each."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from glm5_jax import presets
from glm5_jax.model import glm5
from glm5_jax.parallel import tree
from glm5_jax.training import muon
from glm5_jax.training.muon import layout_of, newton_schulz, orthogonalize, scale_by_muon
from tests.oracles import muon as oracle

# A quintic that converges to exact orthogonality, while the public one stops at 0.68 .. 1.13.
CONVERGING = {"coefficients": (15 / 8, -10 / 8, 3 / 8), "steps": 40}


def random_array(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def apply(letters, updates, **options):
    options = {"dtype": "float32"} | options
    return orthogonalize(letters, **options).update(updates, optax.EmptyState())[0]


TINY = presets.tiny()
ABLATION = dataclasses.replace(presets.ablation("gqa"), layer_attention=("gdn",) * 4)
BLOCKS = [  # model, path, split, number of blocks, size of each
    (TINY, "moe_layers/attn/q_a", "head", 3, (128, 96)),
    (TINY, "moe_layers/attn/q_b", "head", 3 * 8, (96, 32)),
    (TINY, "moe_layers/attn/q_b", "whole", 3, (96, 8 * 32)),
    (TINY, "moe_layers/attn/kv_a", "head", 3, (128, 60)),
    (TINY, "moe_layers/attn/k_b", "head", 3 * 8, (48, 20)),
    (TINY, "moe_layers/attn/k_b", "whole", 3, (48, 8 * 20)),
    (TINY, "moe_layers/attn/v_b", "head", 3 * 8, (48, 24)),
    (TINY, "moe_layers/attn/o", "head", 3, (8 * 24, 128)),
    (TINY, "dense_layers/mlp/down", "head", 1, (384, 128)),
    (TINY, "moe_layers/router/weight", "head", 3, (128, 16)),
    (TINY, "moe_layers/experts/gate", "head", 3 * 16, (128, 64)),
    (TINY, "moe_layers/experts/down", "whole", 3 * 16, (64, 128)),
    (TINY, "moe_layers/shared/up", "head", 3, (128, 64)),
    (TINY, "mtp/eh_proj", "head", 1, (256, 128)),
    (TINY, "mtp/block/attn/v_b", "head", 8, (48, 24)),
    (TINY, "mtp/block/attn/o", "head", 1, (8 * 24, 128)),
    (TINY, "mtp/block/experts/up", "head", 16, (128, 64)),
    (TINY, "mtp/block/router/weight", "head", 1, (128, 16)),
    (ABLATION, "moe_layers/attn/q", "head", 3 * 8, (128, 32)),
    (ABLATION, "moe_layers/attn/k", "head", 3 * 4, (128, 32)),
    (ABLATION, "moe_layers/attn/v", "head", 3 * 4, (128, 24)),
    (ABLATION, "mtp/block/attn/v", "head", 4, (128, 24)),
    (ABLATION, "moe_layers/attn/k", "whole", 3, (128, 4 * 32)),
    (ABLATION, "moe_layers/attn/o", "head", 3, (8 * 24, 128)),
    (ABLATION, "moe_layers/gdn/a", "head", 3, (128, 8)),
    (ABLATION, "moe_layers/gdn/gate", "head", 3, (128, 8 * 24)),
]


def test_layouts_divide_weights_into_blocks():
    trees = {
        cfg: (tree.flatten(glm5.axis_letters(cfg)), tree.flatten(glm5.abstract_params(cfg)))
        for cfg in (TINY, ABLATION)
    }
    for cfg, path, split, number, block in BLOCKS:
        letters, shapes = trees[cfg]
        shape = shapes[path].shape
        assert layout_of(path, letters[path], split).size(shape) == block, (path, split)
        assert np.prod(shape) == number * np.prod(block), (path, split)


def test_blocks_are_slices_of_named_dimensions():
    x = random_array(2, 6, 3, 4)
    blocks = np.asarray(layout_of("attn/q_b", "l q n hr").to_blocks(jnp.asarray(x)))
    np.testing.assert_array_equal(blocks, [x[i, :, j] for i in range(2) for j in range(3)])
    merged = layout_of("attn/o", "l n u d").to_blocks(jnp.asarray(x)).reshape(2, 18, 4)
    np.testing.assert_array_equal(merged, x.reshape(2, 18, 4))


def test_layout_rejects_non_matrices():
    for letters in ("l d", "d", "l e d f", "t d f h"):
        with pytest.raises(ValueError, match="some/norm .* is not a stack of matrices"):
            layout_of("some/norm", letters)


def test_layout_rejects_unknown_split():
    with pytest.raises(ValueError, match="split is 'heads'; use 'head' or 'whole'"):
        layout_of("attn/q_b", "q n hr", "heads")


@pytest.mark.parametrize("shape", [(2, 24, 64), (2, 64, 24), (3, 32, 32), (1, 1, 5)])
def test_newton_schulz_equals_oracle(shape):
    x = random_array(*shape)
    got = newton_schulz(jnp.asarray(x), oracle.PUBLIC_COEFFICIENTS, 5)
    want = [oracle.newton_schulz(m) for m in x]
    np.testing.assert_allclose(got, want, atol=2e-5)
    other = newton_schulz(jnp.asarray(x), (2.0, -1.5, 0.4), 3)
    want = [oracle.newton_schulz(m, (2.0, -1.5, 0.4), 3) for m in x]
    np.testing.assert_allclose(other, want, atol=2e-5)


def test_newton_schulz_equals_optax():
    x = jnp.asarray(random_array(24, 64))
    plain = optax.contrib.scale_by_muon(beta=0.0, nesterov=False)
    want, _ = plain.update(x, plain.init(x))
    got = newton_schulz(x[None], oracle.PUBLIC_COEFFICIENTS, 5)[0]
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_newton_schulz_ignores_scale_and_preserves_zeros():
    x = jnp.asarray(random_array(2, 12, 20))
    y = newton_schulz(x, oracle.PUBLIC_COEFFICIENTS, 5)
    small = newton_schulz(x * 2.0**-30, oracle.PUBLIC_COEFFICIENTS, 5)
    np.testing.assert_array_equal(small, y)
    assert not newton_schulz(0 * x, oracle.PUBLIC_COEFFICIENTS, 5).any()


def test_newton_schulz_runs_large_stacks_in_chunks(monkeypatch):
    x = jnp.asarray(random_array(7, 6, 10))
    want = newton_schulz(x, oracle.PUBLIC_COEFFICIENTS, 5)
    monkeypatch.setattr(muon, "MAX_ELEMENTS", 3 * 60)
    got = newton_schulz(x, oracle.PUBLIC_COEFFICIENTS, 5)
    np.testing.assert_allclose(got, want, atol=1e-6)
    chunked = str(jax.make_jaxpr(lambda x: newton_schulz(x, oracle.PUBLIC_COEFFICIENTS, 5))(x))
    assert "f32[3,6,10]" in chunked and "f32[7,6,6]" not in chunked


def test_orthogonalizes_each_head():
    letters, x = {"attn": {"q_b": "q n hr"}}, {"attn": {"q_b": random_array(64, 8, 24)}}

    def singular_values(split):
        y = np.asarray(apply(letters, x, split=split)["attn"]["q_b"])
        scale = 0.2 * np.sqrt(64 if split == "head" else 8 * 24)
        return np.linalg.svd(np.moveaxis(y, 1, 0) / scale, compute_uv=False)

    values = singular_values("head")
    assert values.shape == (8, 24) and 0.67 < values.min() and values.max() < 1.14
    assert singular_values("whole").min() < 0.6  # the heads of one large orthogonal matrix are not


def test_split_equals_an_independent_muon_per_head():
    x = random_array(2, 16, 5, 12)
    split_update = apply({"attn": {"k_b": "l c n h"}}, {"attn": {"k_b": x}})["attn"]["k_b"]
    for layer in range(2):
        for head in range(5):
            single = apply({"w": "c h"}, {"w": x[layer, :, head]})["w"]
            np.testing.assert_allclose(split_update[layer, :, head], single, atol=2e-6)


@pytest.mark.parametrize(
    ("path", "letters", "shape"),
    [
        ("attn/q_b", "l q n hr", (2, 40, 3, 16)),
        ("attn/o", "l n u d", (2, 3, 8, 40)),
        ("experts/gate", "l e d f", (2, 3, 20, 36)),
        ("router/weight", "d e", (24, 24)),
    ],
)
def test_update_rms_is_constant_over_shapes(path, letters, shape):
    updates, letters = tree.unflatten({path: random_array(*shape)}), tree.unflatten({path: letters})
    exact = jax.tree.leaves(apply(letters, updates, **CONVERGING))[0]
    assert np.sqrt(np.mean(np.square(exact))) == pytest.approx(0.2, rel=1e-3)
    public = jax.tree.leaves(apply(letters, updates))[0]
    assert np.sqrt(np.mean(np.square(public))) == pytest.approx(0.2, rel=0.25)
    other = jax.tree.leaves(apply(letters, updates, rms=0.5))[0]
    np.testing.assert_allclose(other, public * 2.5, rtol=1e-5)


def test_bfloat16_iteration_returns_dtype_of_updates():
    letters, x = {"w": "d f"}, {"w": random_array(32, 48)}
    exact, rounded = apply(letters, x)["w"], apply(letters, x, dtype="bfloat16")["w"]
    assert rounded.dtype == jnp.float32
    error = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
    assert 1e-4 < error < 0.03


def test_stacks_weights_of_equal_shape():
    letters = {"experts": {"gate": "l e d f", "up": "l e d f"}, "shared": {"up": "d f"}}
    shapes = {"experts": {"gate": (2, 3, 8, 12), "up": (1, 3, 8, 12)}, "shared": {"up": (8, 12)}}
    x = jax.tree.map(
        lambda s: random_array(*s, seed=s[0]), shapes, is_leaf=lambda s: isinstance(s, tuple)
    )
    y = apply(letters, x)
    for path, leaf in tree.flatten(x).items():
        got = np.asarray(tree.flatten(y)[path]).reshape(-1, 8, 12)
        for block, update in zip(leaf.reshape(-1, 8, 12), got, strict=True):
            want = 0.2 * np.sqrt(12) * oracle.newton_schulz(block)
            np.testing.assert_allclose(update, want, atol=2e-5)


@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_equals_oracle(nesterov):
    letters = {"w": "d f"}
    tx = scale_by_muon(letters, momentum=0.8, nesterov=nesterov, dtype="float32")
    state = tx.init({"w": jnp.zeros((10, 16))})
    momentum = np.zeros((10, 16))
    for step in range(4):
        g = random_array(10, 16, seed=step) * 10.0**step
        updates, state = tx.update({"w": jnp.asarray(g)}, state)
        want, momentum = oracle.muon_step(
            np.zeros((10, 16)), momentum, g, rate=-1.0, beta=0.8, nesterov=nesterov, decay=0.0
        )
        np.testing.assert_allclose(updates["w"], want, atol=3e-5)


def test_state_is_float32_momentum():
    tx = scale_by_muon({"w": "d f"})
    state = tx.init({"w": jnp.zeros((4, 6), jnp.bfloat16)})
    updates, state = tx.update({"w": jnp.ones((4, 6), jnp.bfloat16)}, state)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(state)] == [((4, 6), jnp.float32)]
