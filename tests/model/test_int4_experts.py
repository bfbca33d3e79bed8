"""Tests that a model with `int4_group` equals the plain model with dequantized routed experts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.model import glm5, quant
from glm5_jax.model.cache import init_cache
from glm5_jax.model.generate import generate, prepare
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.parallel.tree import flatten, unflatten
from glm5_jax.training.gradients import gradient_function
from pallas_kernels.w4a8_matmul.quantize import dequantize_w4, quantize_w4
from tests.kernels.implementations import in_tiers
from tests.mesh import cases

GROUP = 4
# A MoE layer and the MTP layer.
PLAIN = cases.config(
    "dense", num_hidden_layers=1, first_k_dense_replace=0, index_topk=None, indexer_types=None
)
CFG = dataclasses.replace(PLAIN, int4_group=GROUP)
STEP = dataclasses.replace(cases.STEP, index_weight=0.0, mtp_steps=1)
EXPERTS = {
    f"{stack}/experts/{w}" for stack in ("moe_layers", "mtp/block") for w in ("gate", "up", "down")
}


@functools.cache
def dequantized_params(group: int = GROUP):
    """Returns the weights, with those of EXPERTS quantized to int4 and dequantized."""
    flat = flatten(cases.params(PLAIN))
    assert EXPERTS <= set(flat)
    through = jax.jit(lambda w: dequantize_w4(*quantize_w4(w, group)))
    return unflatten({p: np.asarray(through(w)) if p in EXPERTS else w for p, w in flat.items()})


def bits(x):
    return np.asarray(x).view(np.uint8)


def assert_same_bits(got, want):
    got, want = flatten(got), flatten(want)
    assert got.keys() == want.keys()
    for path in got:
        assert got[path].dtype == want[path].dtype, path
        np.testing.assert_array_equal(bits(got[path]), bits(want[path]), err_msg=path)


@functools.partial(jax.jit, static_argnames="cfg")
def run(params, tokens, cfg, cache=None):
    """Returns logits of the trunk and of the MTP layer, or logits and cache."""
    out = glm5.forward(params, tokens, cfg, cache=cache)
    if cache is not None:
        return out.logits, out.cache
    if not cfg.num_nextn_predict_layers:
        return {"logits": out.logits}
    drafted = glm5.forward_mtp(params, out.hidden, tokens, cfg)
    return {"logits": out.logits, "drafted": drafted.logits}


@pytest.mark.parametrize(
    ("dtype", "drafts"), in_tiers([("float32", 0)], [("float32", 1), ("bfloat16", 1)])
)
def test_int4_forward_equals_dequantized_forward(dtype, drafts):
    tokens = cases.batch()["token_ids"][:2]
    changes = {"dtype": dtype, "num_nextn_predict_layers": drafts}
    cfg, plain = (dataclasses.replace(c, **changes) for c in (CFG, PLAIN))
    got = run(cases.params(PLAIN), tokens, cfg)
    assert_same_bits(got, run(dequantized_params(), tokens, plain))
    unlike = run(cases.params(PLAIN), tokens, plain)
    assert all(np.any(got[name] != unlike[name]) for name in got)


@pytest.mark.slow
def test_int4_gradients_equal_dequantized_gradients():
    """The estimator is straight-through: the gradient ignores the rounding."""
    take = [jax.jit(gradient_function(c, STEP)) for c in (CFG, PLAIN)]
    params = (cases.params(PLAIN), dequantized_params())
    (loss, _, got), (want_loss, _, want) = (
        f(p, cases.batch(), cases.RATES) for f, p in zip(take, params)
    )
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    got = flatten(got)
    for path, expected in flatten(want).items():  # another program may fuse other sums
        atol = 1e-6 * float(np.abs(expected).max())
        np.testing.assert_allclose(got[path], expected, rtol=0, atol=atol, err_msg=path)
    assert all(np.any(got[path]) for path in EXPERTS)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_fake_quantization_is_straight_through(dtype):
    draw = np.random.default_rng(0)
    w, c = (draw.standard_normal((3, 16, 5)).astype(np.float32) for _ in range(2))
    w = jnp.asarray(w, dtype)
    got = jax.jit(quant.quantize_dequantize, static_argnums=1)(w, 8)
    assert got.dtype == jnp.float32
    assert_same_bits({"w": got}, {"w": jax.jit(lambda w: dequantize_w4(*quantize_w4(w, 8)))(w)})
    assert_same_bits(
        {"w": got}, {"w": jax.jit(quant.quantize_dequantize, static_argnums=1)(got, 8)}
    )
    gradient = jax.grad(lambda w: jnp.sum(c * quant.quantize_dequantize(w, 8)))(w)
    assert_same_bits({"w": gradient}, {"w": jnp.asarray(c, dtype)})


@pytest.mark.slow
def test_int4_prefill_and_decode_equal_full_forward():
    tokens = cases.batch()["token_ids"][:2]
    full = run(cases.params(PLAIN), tokens, CFG)["logits"]
    cache, logits = init_cache(CFG, 2, cases.LENGTH), []
    for part in (slice(0, 29), slice(29, 30), slice(30, 32)):
        out, cache = run(cases.params(PLAIN), tokens[:, part], CFG, cache)
        logits.append(out)
    atol = 1e-5 * np.abs(full).max()
    np.testing.assert_allclose(np.concatenate(logits, axis=1), full, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prepare_dequantizes_experts_once(dtype):
    cfg = dataclasses.replace(CFG, dtype=dtype)
    prompts = cases.batch()["token_ids"][:1, :6]
    params, computing, *_ = prepare(cases.params(PLAIN), prompts, cfg, None, 0.0, None)
    assert computing == dataclasses.replace(PLAIN, dtype=dtype)
    want = glm5.unstack(dequantized_params(), PLAIN)
    for path, w in flatten(want).items():
        if "/experts/" in path:
            w = jnp.asarray(w, dtype)
        assert_same_bits({"w": flatten(params)[path]}, {"w": w})


@pytest.mark.slow
def test_int4_generation_equals_dequantized_generation():
    prompts = cases.batch()["token_ids"][:, :6]
    want = generate(dequantized_params(), prompts, PLAIN, 6)
    np.testing.assert_array_equal(generate(cases.params(PLAIN), prompts, CFG, 6), want)
    assert np.any(want != generate(cases.params(PLAIN), prompts, PLAIN, 6))


@pytest.mark.parametrize(
    ("axes", "cut"),
    [
        (
            {"fsdp": 4, "context": 2},
            "fsdp=4 . context=2 cut moe_layers/experts/down into shards of 1 rows",
        ),
        ({"tensor": 4, "data": 2}, "tensor=4 cut moe_layers/experts/down into shards of 2 rows"),
        ({"fsdp": 8}, "fsdp=8 cut moe_layers/experts/down into shards of 1 rows"),
    ],
    ids=str,
)
def test_rejects_mesh_that_splits_groups(axes, cut):
    with pytest.raises(
        ValueError, match=f"int4 in groups of 4: mesh axes {cut}.*; use a group that divides"
    ):
        glm5.param_shardings(CFG, make_mesh(axes))
    glm5.param_shardings(PLAIN, make_mesh(axes))


def test_accepts_mesh_that_preserves_groups():
    for axes in ({"expert": 8}, {"fsdp": 2, "expert": 4}, {"tensor": 2, "data": 4}):
        glm5.param_shardings(CFG, make_mesh(axes))
