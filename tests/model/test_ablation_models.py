"""Tests of models that mix full attention, windows and linear attention, on MLA's and GQA's projections."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax import presets
from glm5_jax.model import generate as decoding, glm5
from glm5_jax.model.ablations.convert import add_missing_weights, convert
from glm5_jax.model.ablations.layer import linear_attention
from glm5_jax.model.cache import init_cache
from glm5_jax.model.context import ForwardContext
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.generate import generate
from glm5_jax.parallel.mesh import Region, make_mesh
from glm5_jax.parallel.tree import flatten
from tests.oracles import ablations as oracle, attention

BASE = dataclasses.replace(
    presets.ablation("mla"),
    vocab_size=32,
    hidden_size=24,
    num_hidden_layers=5,
    first_k_dense_replace=4,
    num_attention_heads=4,
    q_lora_rank=20,
    kv_lora_rank=14,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=5,
    intermediate_size=28,
    moe_intermediate_size=8,
    n_routed_experts=4,
    num_nextn_predict_layers=0,
    max_position_embeddings=64,
    sliding_window=5,
    layer_attention=("gdn", "window", "simple_gdn", "gdn", "gdn"),
    eos_token_id=(),
    pad_token_id=None,
)
GROUPED = dict(projections="gqa", num_key_value_heads=2)
MODELS = {
    "mla": BASE,
    "gqa": dataclasses.replace(
        BASE, **GROUPED, layer_attention=("window", "gdn", "full", "simple_gdn", "full")
    ),
}
B, T, NEW = 2, 20, 4
EXECUTION = ExecutionConfig(query_block=8)
full_attention = functools.partial(dataclasses.replace, layer_attention=None)


@functools.cache
def params(cfg):
    """Returns weights so large that attention and gates are far from uniform."""

    def spread(x):
        return 8 * x if x.ndim > 2 else x

    return jax.tree.map(spread, glm5.init_params(cfg, jax.random.key(0)))


@functools.partial(jax.jit, static_argnums=2)
def forward(params, tokens, cfg, segments=None):
    return glm5.forward(params, tokens, cfg, segment_ids=segments, execution=EXECUTION).logits


TOKENS = np.random.default_rng(0).integers(0, 32, (B, T + NEW), dtype=np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_generation_equals_full_forward(name, monkeypatch):
    """The full forward scans layers, the cached one loops; a row is left-padded and prefill takes two chunks."""
    cfg, seen, plain = MODELS[name], [], decoding.advance

    def recording(*args):
        logits, cache = plain(*args)
        seen.append(np.asarray(logits))
        return logits, cache

    monkeypatch.setattr(decoding, "advance", recording)
    mask = np.ones((B, T), np.int32)
    mask[0, :3] = 0
    got = generate(
        params(cfg), TOKENS[:, :T], cfg, NEW, mask=mask, prefill_chunk=10, execution=EXECUTION
    )
    segments = np.pad(mask, ((0, 0), (0, NEW)), constant_values=1)
    full = np.asarray(forward(params(cfg), got, cfg, segments))[:, T - 1 : -1]
    np.testing.assert_allclose(np.stack(seen[1:], 1), full, atol=2e-5 * np.abs(full).max())
    np.testing.assert_array_equal(got[:, T:], full.argmax(-1))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_isolates_documents_of_a_row(name):
    cfg = MODELS[name]
    segments = np.repeat([[1, 2], [3, 4]], [9, T + NEW - 9], axis=1).astype(np.int32)
    first, second = TOKENS.copy(), TOKENS.copy()
    first[:, :9] = (first[:, :9] + 1) % 32
    second[:, 9] = (second[:, 9] + 1) % 32
    plain, other, later = (forward(params(cfg), x, cfg, segments) for x in (TOKENS, first, second))
    np.testing.assert_array_equal(plain[:, 9:], other[:, 9:])
    np.testing.assert_array_equal(plain[:, :9], later[:, :9])
    assert np.abs(plain - other)[:, :9].min(-1).max() > 1e-3
    assert np.abs(plain - later)[:, -1].max() > 1e-3  # through layers of three kinds


@pytest.mark.parametrize("kind", ["gdn", "simple_gdn"])
def test_linear_attention_on_mla_heads_equals_oracle(kind):
    """Keys are MLA's expanded keys without RoPE, with even rope columns first."""
    cfg = dataclasses.replace(BASE, dtype="float64", simple_gdn_beta=0.6)
    rng = np.random.default_rng(1)
    tree = glm5.abstract_params(cfg)["moe_layers"]
    w, gates = (
        {name: rng.standard_normal(x.shape[1:]) for name, x in tree[part].items()}
        for part in ("attn", "gdn")
    )
    x, segments = rng.standard_normal((B, T, 24)), np.repeat([[1, 2], [3, 0]], [8, 12], axis=1)
    c_q = attention.rms_norm(x @ w["q_a"], w["q_a_norm"], cfg.latent_norm_eps)
    c_kv, k_rope = np.split(x @ w["kv_a"], [cfg.kv_lora_rank], axis=-1)
    c_kv = attention.rms_norm(c_kv, w["kv_a_norm"], cfg.latent_norm_eps)
    q = np.einsum("btq,qnx->btnx", c_q, w["q_b"])
    k = np.concatenate(
        [np.einsum("btc,cnh->btnh", c_kv, w["k_b"]), k_rope[:, :, None].repeat(4, axis=2)], axis=-1
    )
    q, k = (z[..., [*range(6), 6, 8, 7, 9]] for z in (q, k))
    v = np.einsum("btc,cnu->btnu", c_kv, w["v_b"])
    if kind == "gdn":
        out = oracle.gdn(gates, x, q, k, v, segments, cfg.rms_norm_eps)
    else:
        out = oracle.simple_gdn(q, k, v, 0.6, segments)
    with jax.enable_x64(True):

        @jax.jit
        def run(w, gates, x, segments):
            none = jnp.zeros((B, T, 2))
            context = ForwardContext(
                cfg=cfg,
                execution=EXECUTION,
                region=Region(),
                cos=none,
                sin=none,
                start=0,
                num_keys=T,
                segments=segments,
                key_segments=segments,
            )
            return linear_attention(w, gates if kind == "gdn" else None, x, None, context)

        got = run(w, gates, x, jnp.asarray(segments))
    np.testing.assert_allclose(got.y, np.einsum("btnu,nud->btd", out, w["o"]), atol=1e-9)
    assert not np.asarray(got.max_logit) and got.cache is None


def test_counts_cache_bytes_of_layer_kinds():
    """The state of a recurrent layer does not grow with the number of tokens."""

    def size(kind, capacity, base=BASE):
        cfg = dataclasses.replace(base, layer_attention=(kind,) * 5)
        cache = jax.eval_shape(lambda: init_cache(cfg, 3, capacity, dtype="bfloat16"))
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.layers))

    assert size("full", 7) == size("window", 7) == 5 * 3 * 7 * (14 + 4) * 2
    grouped = dataclasses.replace(BASE, **GROUPED)
    assert size("full", 7, grouped) == 5 * 3 * 7 * 2 * (6 + 4 + 5) * 2
    state = 4 * (6 + 4) * 5 * 4
    assert size("simple_gdn", 7) == size("simple_gdn", 9, grouped) == 5 * 3 * state
    assert size("gdn", 7) == 5 * 3 * (state + 3 * 4 * (10 + 10 + 5) * 2)


@pytest.mark.slow
def test_conversion_drops_indexers():
    sparse = dataclasses.replace(
        full_attention(BASE), attention="sparse", index_topk=7, index_head_dim=12
    )
    after, cfg = convert(params(sparse), sparse, BASE.layer_attention)
    assert cfg.full_layers == () and not any("indexer" in path for path in flatten(after))


@pytest.mark.parametrize(
    "projections",
    [pytest.param({}, id="mla", marks=pytest.mark.slow), pytest.param(GROUPED, id="gqa")],
)
def test_conversion_preserves_weights(projections):
    old = dataclasses.replace(full_attention(BASE), **projections)
    kinds = BASE.layer_attention
    before = params(old)
    after, cfg = convert(before, old, list(kinds))
    assert cfg == dataclasses.replace(BASE, **projections)
    shapes = flatten(glm5.abstract_params(cfg))
    after, before = flatten(after), flatten(before)
    assert {p: x.shape for p, x in after.items()} == {p: x.shape for p, x in shapes.items()}
    new = set(after) - set(before)
    assert new == {path for path in shapes if "/gdn/" in path}
    assert all(after[path] is x for path, x in before.items())


@pytest.mark.slow
def test_window_of_full_length_equals_full_attention():
    old = dataclasses.replace(full_attention(BASE), num_hidden_layers=2, first_k_dense_replace=2)
    wide = dataclasses.replace(old, sliding_window=T + NEW)
    converted, cfg = convert(params(old), wide, ("window",) * 2)
    assert cfg.layer_attention == ("window",) * 2
    full = forward(params(old), TOKENS, old)
    np.testing.assert_allclose(
        forward(converted, TOKENS, cfg), full, atol=1e-5 * np.abs(full).max()
    )
    narrow = forward(converted, TOKENS, dataclasses.replace(cfg, sliding_window=T + NEW - 1))
    np.testing.assert_allclose(narrow[:, :-1], full[:, :-1], atol=1e-5 * np.abs(full).max())
    assert np.abs(narrow[:, -1] - full[:, -1]).max() > 1e-3


def test_initializes_neutral_gates():
    """The convolution is the identity, beta is 0.5, the gate -0.001; the output gate is zero but trainable."""
    cfg = dataclasses.replace(full_attention(BASE), dtype="float64")
    after, cfg = convert(params(full_attention(BASE)), cfg, ("gdn",) * 5)
    gates = jax.tree.map(lambda x: np.float64(x[0]), after["dense_layers"]["gdn"])
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((1, T, 4, width)) for width in (10, 10, 5))
    x, one = rng.standard_normal((1, T, 24)), np.ones((1, T), int)
    gates["gate"] = rng.standard_normal(gates["gate"].shape)
    got = oracle.gdn(gates, x, q, k, v, one, cfg.rms_norm_eps)
    rates = np.full((1, T, 4), -0.001), np.full((1, T, 4), 0.5)
    want = oracle.linear(*(oracle.silu(z) for z in (q, k, v)), *rates, one, oracle.recurrent)
    want = attention.rms_norm(want, np.ones(5), cfg.rms_norm_eps)
    want = want * oracle.silu(np.einsum("btd,dnu->btnu", x, gates["gate"]))
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert not after["moe_layers"]["gdn"]["gate"].any()


@pytest.mark.parametrize("mesh", [None, pytest.param({"fsdp": 8}, marks=pytest.mark.slow)], ids=str)
def test_initializes_missing_weights_like_new_model(mesh):
    dense = dataclasses.replace(full_attention(BASE), num_hidden_layers=2, first_k_dense_replace=2)
    sparse = dataclasses.replace(dense, attention="sparse", index_topk=7, index_head_dim=12)
    mesh = mesh and make_mesh(mesh)
    old = glm5.init_params(dense, jax.random.key(1), mesh=mesh)
    completed = flatten(add_missing_weights(old, sparse, jax.random.key(2), mesh=mesh))
    fresh, old = flatten(glm5.init_params(sparse, jax.random.key(2), mesh=mesh)), flatten(old)
    assert completed.keys() == fresh.keys() and completed.keys() > old.keys()
    for path, weight in completed.items():
        if path in old:
            assert weight is old[path]
        else:
            assert weight.sharding == fresh[path].sharding
            np.testing.assert_array_equal(weight, fresh[path], err_msg=path)


def test_conversion_rejects_recurrent_model():
    with pytest.raises(
        ValueError, match="has gdn, simple_gdn layers; convert one of full attention"
    ):
        convert(params(BASE), BASE, ("full",) * 5)
    with pytest.raises(ValueError, match="layer_attention names 2 layers"):
        convert({}, full_attention(BASE), ("full", "window"))
