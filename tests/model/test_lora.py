"""Adapters: the formula, where they start, that merging changes no bit, and what they refuse."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.config import LoraConfig
from glm5_jax.model import glm5, lora
from glm5_jax.parallel.tree import flatten, map_with_path
from tests.mesh import cases

ALL = LoraConfig(rank=3, alpha=7.5, targets=("/attn/", "/mlp/", "/shared/", "/experts/"))
TOKENS = np.arange(24, dtype=np.int32).reshape(2, 12) % 64


@functools.cache
def config(dtype="float32"):
    """A dense layer and an MoE layer with adapters on all of their matrices."""
    return cases.pair("dense", index_topk=None, indexer_types=None, dtype=dtype, lora=ALL)


@functools.cache
def params(cfg):
    """Weights of cases.params; the second matrix of each adapter is random, too."""
    noise = np.random.default_rng(2)

    def draw(path, x):
        x = 0.2 * noise.standard_normal(x.shape) if lora.is_adapter(path) else x
        return jnp.asarray(x, flatten(glm5.abstract_params(cfg))[path].dtype)

    return map_with_path(draw, cases.params(cfg))


@functools.cache
def forward(cfg):
    return jax.jit(lambda params: glm5.forward(params, TOKENS, cfg).logits)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_merged_weights_compute_what_adapters_compute(dtype):
    cfg = config(dtype)
    merged = lora.merge_adapters(params(cfg), cfg)
    plain = lora.without_adapters(cfg)
    assert flatten(merged).keys() == flatten(glm5.abstract_params(plain)).keys()
    want = forward(cfg)(params(cfg))
    np.testing.assert_array_equal(forward(plain)(merged), want)
    base = {p: x for p, x in flatten(params(cfg)).items() if not lora.is_adapter(p)}
    assert all(
        np.any(flatten(merged)[p] != base[p]) for p in base if p + lora.B in flatten(params(cfg))
    )


def test_adds_product_to_stacks_of_experts():
    draw = np.random.default_rng(0)
    w, a, b = (draw.standard_normal(s) for s in ((2, 4, 5, 3, 6), (2, 4, 5, 2), (2, 4, 2, 3, 6)))
    got = lora.adapted(*(jnp.asarray(x, jnp.float32) for x in (w, a, b)), 0.5)
    np.testing.assert_allclose(
        got, w + 0.5 * np.einsum("ledo,leofg->ledfg", a, b), rtol=0, atol=1e-5
    )


def test_new_adapters_change_nothing():
    cfg = config()
    fresh = glm5.init_params(cfg, jax.random.key(0))
    adapters = {p: x for p, x in flatten(fresh).items() if lora.is_adapter(p)}
    assert all(np.any(x) == p.endswith(lora.A) for p, x in adapters.items())
    merged = flatten(lora.merge_adapters(fresh, cfg))
    assert all(np.array_equal(x, flatten(fresh)[p]) for p, x in merged.items())


def test_draws_adapters_with_variance_of_fan_in():
    cfg = dataclasses.replace(config(), lora=LoraConfig(rank=64, targets=("/attn/o$",)))
    a = flatten(glm5.init_params(cfg, jax.random.key(0)))["moe_layers/attn/o_lora_a"]
    fan_in = cfg.num_attention_heads * cfg.v_head_dim
    np.testing.assert_allclose(np.std(a), (3 * fan_in) ** -0.5, rtol=0.03)


def test_stores_frozen_weights_in_compute_dtype():
    dtypes = {p: x.dtype.name for p, x in flatten(glm5.abstract_params(config("bfloat16"))).items()}
    for path, dtype in dtypes.items():
        wide = lora.is_adapter(path) or "router/" in path
        assert dtype == ("float32" if wide else "bfloat16"), path


def test_leaves_routed_experts_and_mtp_without_adapters_by_default():
    cfg = cases.small("sparse", num_nextn_predict_layers=1, lora=LoraConfig(rank=2))
    adapted = {
        p.rpartition("/")[0] for p in flatten(glm5.abstract_params(cfg)) if lora.is_adapter(p)
    }
    assert adapted == {"moe_layers/attn", "moe_layers/shared"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": ("/atn/",)}, "'/atn/', which matches none of"),
        ({"targets": ("norm",)}, "'norm', which matches none of"),
        ({"targets": ("(",)}, "is not a regular expression"),
        ({"targets": ()}, "targets is empty"),
        ({"rank": -1}, "rank is -1"),
        ({"alpha": 0.0}, "alpha is 0.0"),
    ],
)
def test_rejects_wrong_options(change, message):
    with pytest.raises(ValueError, match=message):
        adapters = LoraConfig(**{"rank": 2} | change)
        glm5.abstract_params(cases.small("dense", lora=adapters))


def test_rejects_adapters_with_int4_experts():
    with pytest.raises(ValueError, match="set int4_group=None"):
        cases.small("dense", int4_group=4, lora=LoraConfig(rank=2))
