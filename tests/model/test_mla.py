"""Tests that the three forms of MLA agree and that the cheapest is selected."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax import presets
from glm5_jax.model import attention as model_attention
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.mla import Keys, Queries, cheapest_form, mla
from glm5_jax.model.rope import rope_table
from pallas_kernels.mla_prologue import mla_prologue
from tests.kernels.implementations import in_tiers
from tests.model import golden as goldens
from tests.oracles import attention, indexer

CFG = dataclasses.replace(presets.tiny(), attention_bias=True)
B, T, S = 2, 11, 17
FORMS = ("expanded", "absorbed", "gathered")


@functools.cache
def inputs():
    """Returns (weights, Queries, Keys, topk, all keys) of a packed batch; queries are the last T of S tokens."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    d, q, n, h, r, u, c = 128, 96, 8, 20, 12, 24, 48
    w = {"q_a": normal(d, q) / 9, "q_b": normal(q, n, h + r) / 4, "kv_a": normal(d, c + r) / 9}
    w |= {"k_b": normal(c, n, h) / 7, "v_b": normal(c, n, u) / 7, "o": normal(n, u, d) / 14}
    w |= {"q_a_norm": 1 + normal(q) / 9, "kv_a_norm": 1 + normal(c) / 9}
    w |= {"q_a_bias": normal(q), "kv_a_bias": normal(c + r), "o_bias": normal(d)}
    x = normal(B, S, d)
    cos, sin = rope_table(CFG.rope_parameters, r, jnp.arange(S)[None].repeat(B, 0), jnp.float32)
    segments = np.repeat([[0, 1, 2], [1, 2, 0]], [4, 8, 5], axis=1)
    late = slice(S - T, S)
    projected = mla_prologue(x, w, cos, sin, eps=CFG.latent_norm_eps)
    queries = Queries(projected.q[:, late], S - T, jnp.asarray(segments[:, late]))
    keys = Keys(projected.latent, jnp.asarray(segments))
    visible = attention.visible_keys(segments)[:, late]
    topk = indexer.select(rng.random(visible.shape), visible, 5)
    everything = indexer.select(rng.random(visible.shape), visible, S)
    return w, queries, keys, jnp.asarray(topk), jnp.asarray(everything)


@functools.partial(jax.jit, static_argnums=0)
def attend(form, w, queries, keys, topk):
    """Returns (y, largest logit, gradients of sum(sin(y)) by all weights and inputs)."""
    execution = ExecutionConfig(attention_form=form, query_block=8, gather_block=8)
    start = queries.start

    def loss(floats):
        w, q, latent = floats
        late_queries = Queries(q, start, queries.segments)
        y, top, *_ = mla(w, late_queries, Keys(latent, keys.segments), CFG, execution, topk)
        return jnp.sum(jnp.sin(y)), (y, top)

    floats = (w, queries.q, keys.latent)
    grads, out = jax.grad(loss, has_aux=True)(floats)
    return *out, grads


@functools.cache
def result(form, selected):
    w, queries, keys, topk, everything = inputs()
    chosen = {"topk": topk, "everything": everything, "dense": None}[selected]
    return attend(form, w, queries, keys, chosen)


@pytest.mark.parametrize("form", ["absorbed", "gathered"])
def test_forms_agree_on_selected_keys(form):
    expected, got = result("expanded", "topk"), result(form, "topk")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1, np.abs(b).max()))


@pytest.mark.parametrize(
    "form,selected", in_tiers([("gathered", "everything")], [("absorbed", "dense")])
)
def test_selection_of_all_keys_equals_dense(form, selected):
    expected, got = result("expanded", "dense"), result(form, selected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1, np.abs(b).max()))
    assert np.abs(result("expanded", "topk")[0] - expected[0]).max() > 1e-2


@pytest.mark.parametrize("form", in_tiers(["absorbed"], ["expanded"]))
def test_window_equals_selection_of_last_keys(form):
    w, queries, keys, *_ = inputs()
    last = S - T + np.arange(T)[:, None] - np.arange(4)[::-1]
    topk = jnp.asarray(np.broadcast_to(last, (B, T, 4)), jnp.int32)
    execution = ExecutionConfig(attention_form=form, query_block=8)
    attended = jax.jit(
        lambda topk, window: mla(w, queries, keys, CFG, execution, topk, window), static_argnums=1
    )
    want, got = attended(topk, None), attended(None, 4)
    for a, b in zip(got[:2], want[:2], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
    # The log-sum-exp is infinite for queries without visible keys.
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-5, atol=1e-5)
    assert np.abs(got[0] - result(form, "dense")[0]).max() > 1e-2


def test_padding_attends_to_no_key():
    w, queries, *_ = inputs()
    padding = np.asarray(queries.segments) == 0
    assert padding.any()
    for form in FORMS:
        y = np.asarray(result(form, "topk")[0])
        np.testing.assert_allclose(y[padding], np.broadcast_to(w["o_bias"], y[padding].shape))


def shapes(t, s, cfg, k=None, start=0):
    n = cfg.num_attention_heads
    queries = Queries(jax.ShapeDtypeStruct((1, t, n, 1), jnp.float32), start, None)
    width = cfg.kv_lora_rank + cfg.qk_rope_head_dim
    keys = Keys(jax.ShapeDtypeStruct((1, s, width), jnp.float32), None)
    topk = None if k is None else jax.ShapeDtypeStruct((1, t, k), jnp.int32)
    return queries, keys, cfg, topk


def test_selects_cheapest_form():
    glm5 = presets.glm5()
    assert cheapest_form(*shapes(4096, 4096, glm5)) == "expanded"
    assert cheapest_form(*shapes(1, 4096, glm5, start=jnp.int32(7))) == "absorbed"
    assert cheapest_form(*shapes(1, 65536, glm5, 2048, jnp.int32(7))) == "gathered"
    assert cheapest_form(*shapes(131072, 131072, glm5, 2048)) == "gathered"
    assert cheapest_form(*shapes(4096, 4096, glm5, 2048)) == "expanded"
    # It is cheaper not to expand keys outside all windows.
    assert cheapest_form(*shapes(4096, 65536, glm5, start=61440)) == "expanded"
    assert cheapest_form(*shapes(4096, 65536, glm5, start=61440), window=4096) == "absorbed"


def test_rejects_unknown_form():
    with pytest.raises(ValueError, match="attention form 'flash'; use expanded"):
        mla(*inputs()[:3], CFG, ExecutionConfig(attention_form="flash"))


def test_selects_only_beyond_index_topk_keys(monkeypatch):
    """With up to index_topk keys sparse attention skips the indexer."""
    golden = goldens.load("hf_tiny_a")
    k = golden.cfg.index_topk

    def forward(t):
        tokens = jax.ShapeDtypeStruct((1, t), jnp.int32)
        run = functools.partial(goldens.glm5.forward, cfg=golden.cfg)
        jax.eval_shape(lambda p, x: run(p, x), golden.params, tokens)

    def lightning_indexer(*args, **named):
        raise AssertionError("selected")

    monkeypatch.setattr(model_attention, "lightning_indexer", lightning_indexer)
    forward(k - 1)
    forward(k)
    with pytest.raises(AssertionError, match="selected"):
        forward(k + 1)


def test_sparse_equals_dense_up_to_index_topk():
    golden = goldens.load("hf_tiny_a")
    dense = dataclasses.replace(golden.cfg, attention="dense")
    k, tokens = golden.cfg.index_topk, golden.tokens
    out = jax.jit(goldens.glm5.forward, static_argnums=2)(golden.params, tokens, dense)
    far = np.abs(out.logits - golden.arrays["logits"]).max((0, 2))
    assert (far[:k] < 2e-4).all() and far[k] > 1e-2 and (far[k:] > 1e-2).mean() > 0.9
