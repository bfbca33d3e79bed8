"""A model with `int4_group` is the plain model with its routed experts dequantised, and nothing else."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.model import glm5, quant
from glm5_jax.model.cache import init_cache
from glm5_jax.model.draft import speculate
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
def dequantised(group: int = GROUP):
    """The weights with those of EXPERTS through int4 and back."""
    flat = flatten(cases.params(PLAIN))
    assert EXPERTS <= set(flat)
    through = jax.jit(lambda w: dequantize_w4(*quantize_w4(w, group)))
    return unflatten({p: np.asarray(through(w)) if p in EXPERTS else w for p, w in flat.items()})


def bits(x):
    return np.asarray(x).view(np.uint8)


def same_bits(got, want):
    got, want = flatten(got), flatten(want)
    assert got.keys() == want.keys()
    for path in got:
        assert got[path].dtype == want[path].dtype, path
        np.testing.assert_array_equal(bits(got[path]), bits(want[path]), err_msg=path)


@functools.partial(jax.jit, static_argnames="cfg")
def run(params, tokens, cfg, cache=None):
    """Logits of the trunk and of the MTP layer, and the cache."""
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
def test_the_forward_is_that_of_the_dequantised_weights(dtype, drafts):
    tokens = cases.batch()["token_ids"][:2]
    changes = {"dtype": dtype, "num_nextn_predict_layers": drafts}
    cfg, plain = (dataclasses.replace(c, **changes) for c in (CFG, PLAIN))
    got = run(cases.params(PLAIN), tokens, cfg)
    same_bits(got, run(dequantised(), tokens, plain))
    unlike = run(cases.params(PLAIN), tokens, plain)
    assert all(np.any(got[name] != unlike[name]) for name in got)


@pytest.mark.slow
def test_gradients_are_those_at_the_dequantised_weights():
    """Straight through: a weight's gradient is that of what stands for it, whether it rounds or not."""
    take = [jax.jit(gradient_function(c, STEP)) for c in (CFG, PLAIN)]
    params = (cases.params(PLAIN), dequantised())
    (loss, _, got), (want_loss, _, want) = (
        f(p, cases.batch(), cases.RATES) for f, p in zip(take, params)
    )
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    for path, own in flatten(want).items():  # of another program, whose sums may be fused otherwise
        most = 1e-6 * float(np.abs(own).max())
        np.testing.assert_allclose(flatten(got)[path], own, rtol=0, atol=most, err_msg=path)
    assert all(np.any(flatten(got)[path]) for path in EXPERTS)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_stands_for_a_weight_is_exact_and_its_gradient_the_identity(dtype):
    draw = np.random.default_rng(0)
    w, c = (draw.standard_normal((3, 16, 5)).astype(np.float32) for _ in range(2))
    w = jnp.asarray(w, dtype)
    got = jax.jit(quant.quantize_dequantize, static_argnums=1)(w, 8)
    assert got.dtype == jnp.float32
    same_bits({"w": got}, {"w": jax.jit(lambda w: dequantize_w4(*quantize_w4(w, 8)))(w)})
    same_bits({"w": got}, {"w": jax.jit(quant.quantize_dequantize, static_argnums=1)(got, 8)})
    gradient = jax.grad(lambda w: jnp.sum(c * quant.quantize_dequantize(w, 8)))(w)
    same_bits({"w": gradient}, {"w": jnp.asarray(c, dtype)})


@pytest.mark.slow
def test_prefill_and_decode_equal_the_full_forward():
    tokens = cases.batch()["token_ids"][:2]
    full = run(cases.params(PLAIN), tokens, CFG)["logits"]
    cache, logits = init_cache(CFG, 2, cases.LENGTH), []
    for part in (slice(0, 29), slice(29, 30), slice(30, 32)):
        out, cache = run(cases.params(PLAIN), tokens[:, part], CFG, cache)
        logits.append(out)
    atol = 1e-5 * np.abs(full).max()
    np.testing.assert_allclose(np.concatenate(logits, axis=1), full, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoding_quantises_before_the_first_token_alone(dtype):
    cfg = dataclasses.replace(CFG, dtype=dtype)
    prompts = cases.batch()["token_ids"][:1, :6]
    params, computing, *_ = prepare(cases.params(PLAIN), prompts, cfg, None, 0.0, None)
    assert computing == dataclasses.replace(PLAIN, dtype=dtype)
    want = glm5.unstack(dequantised(), PLAIN)
    for path, w in flatten(want).items():
        if "/experts/" in path:
            w = jnp.asarray(w, dtype)
        same_bits({"w": flatten(params)[path]}, {"w": w})


@pytest.mark.slow
def test_decoded_text_is_that_of_the_dequantised_weights():
    prompts = cases.batch()["token_ids"][:2, :6]
    want = generate(dequantised(), prompts, PLAIN, 6)
    np.testing.assert_array_equal(generate(cases.params(PLAIN), prompts, CFG, 6), want)
    drafted = speculate(cases.params(PLAIN), prompts, CFG, 6, num_speculative_tokens=2)
    np.testing.assert_array_equal(drafted.tokens, want)
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
def test_a_mesh_that_cuts_groups_is_refused(axes, cut):
    with pytest.raises(
        ValueError, match=f"int4 in groups of 4: mesh axes {cut}.*; use a group that divides"
    ):
        glm5.param_shardings(CFG, make_mesh(axes))
    glm5.param_shardings(PLAIN, make_mesh(axes))


def test_a_mesh_that_leaves_groups_whole_is_taken():
    for axes in ({"expert": 8}, {"fsdp": 2, "expert": 4}, {"tensor": 2, "data": 4}):
        glm5.param_shardings(CFG, make_mesh(axes))
