"""Concentration of attention, compared with the oracle's forward, by layer and query."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax import presets
from glm5_jax.evals import attention_mass
from glm5_jax.evals.attention_mass import MassConfig
from glm5_jax.model import glm5
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.indexer import Selection
from pallas_kernels import blocks
from tests.model import golden as goldens
from tests.oracles import attention, glm5 as oracle, indexer
from tests.oracles.attention_mass import of_query

SHARED = "hf_tiny_b"  # some of its layers reuse the index of the layer before
TOP_K, LEVELS = (1, 4, 13), (0.5, 0.9)
EDGES = (2, 9, 21)


@functools.cache
def oracle_masses(kind):
    """Returns {layer: [b t] of (p, index scores) over the visible keys} of the oracle's forward of a kind."""
    golden = goldens.load(SHARED)
    config, weights = oracle.load(goldens.FOLDER / SHARED)
    tokens = golden.tokens
    segments = np.ones_like(tokens)
    out = oracle.forward(weights, config, tokens, attention_kind=kind)
    turns = oracle.turns_of(config, oracle.positions_of(segments))
    visible, scores, per_layer = attention.visible_keys(segments), None, []
    for layer in range(config["num_hidden_layers"]):
        p = oracle.part(weights, f"model.layers.{layer}")
        x = attention.rms_norm(
            out["hidden_states"][layer], p["input_layernorm.weight"], config["rms_norm_eps"]
        )
        parts = oracle.mla(
            oracle.part(p, "self_attn"), config, x, turns, visible, None, sparse=False
        )
        scores = parts[3] if parts[3] is not None else scores
        per_layer.append((parts[4], scores))
    return per_layer, visible


@functools.cache
def measured_masses(kind):
    golden = goldens.load(SHARED)
    cfg, params = golden.to_float64()
    cfg = dataclasses.replace(cfg, attention=kind)
    config = MassConfig(top_k=TOP_K, levels=LEVELS, edges=EDGES)
    with jax.enable_x64(True):
        return attention_mass.attention_mass(
            params, cfg, golden.tokens, config, execution=ExecutionConfig(query_block=11)
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_equals_oracle_attention_and_index(kind):
    masses = measured_masses(kind)
    layers, visible = oracle_masses(kind)
    rows = len(layers[0][0])
    assert [(m.layer, m.start, m.end) for m in masses] == [
        (layer, *edges) for layer in range(len(layers)) for edges in zip(EDGES, EDGES[1:])
    ]
    for m in masses:
        p, scores = layers[m.layer]
        for i, k in enumerate(TOP_K):
            chosen = indexer.select(scores, visible, k)
            for j, level in enumerate(LEVELS):
                queries = [
                    of_query(p[b, t, : t + 1], chosen[b, t][chosen[b, t] >= 0], k, level)
                    for b in range(rows)
                    for t in range(m.start - 1, m.end - 1)
                ]
                want = np.mean(queries, axis=0)
                got = (m.selected[i], m.best[i], m.recent[i], m.keys[j])
                np.testing.assert_allclose(got, want, rtol=1e-6)
                spared = [
                    1 - keys / (t + 1)
                    for (_, _, _, keys), t in zip(queries, [*range(m.start - 1, m.end - 1)] * rows)
                ]
                np.testing.assert_allclose(m.redundant[j], np.mean(spared), rtol=1e-6)
            assert m.recent[i] <= m.best[i] + 1e-9 and m.selected[i] <= m.best[i] + 1e-9


def shares(p, scores, config):
    """Returns [measures t] of one row, in NumPy."""
    visible = np.arange(p.shape[1]) + 1
    result = attention_mass.shares(jnp.asarray(p), jnp.asarray(scores), visible, config)
    return np.moveaxis(np.asarray(result), -1, 0)[:, 0]


def test_perfect_index_selects_best_and_reversed_index_worst():
    p = np.tril(np.random.default_rng(0).random((1, 12, 12)))
    config = MassConfig(top_k=(3,), levels=(0.9,))
    selected, best, _, _ = shares(p, p, config)
    np.testing.assert_allclose(selected, best, rtol=1e-6)
    selected, best, _, _ = shares(p, -p, config)
    assert np.all(selected[3:] < best[3:])


def test_breaks_ties_by_lower_index_and_ranks_nan_last():
    p = np.tril(np.arange(1.0, 7)[None] * np.ones((6, 1)))[None]
    scores = np.zeros((1, 6, 6))
    scores[..., 1] = -0.0
    scores[..., 0] = np.nan
    selected, *_ = shares(p, scores, MassConfig(top_k=(1, 2), levels=(0.9,)))
    np.testing.assert_allclose(selected[-1], 2 / 21, rtol=1e-6)
    selected, *_ = shares(p, scores, MassConfig(top_k=(5,), levels=(0.9,)))
    np.testing.assert_allclose(selected[-1], 20 / 21, rtol=1e-6)


def test_uniform_attention_needs_share_of_keys():
    t = 40
    p = np.tril(np.full((1, t, t), 0.7))
    result = shares(p, np.zeros_like(p), MassConfig(top_k=(4,), levels=(0.9,)))
    np.testing.assert_allclose(result[:, -1], [0.1, 0.1, 0.1, 36], rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": ()}, "top_k is"),
        ({"top_k": (0,)}, "positive number of keys"),
        ({"levels": (1.0,)}, "between 0 and 1"),
        ({"edges": (3,)}, "at least two"),
        ({"edges": (0, 4)}, "from 1 on"),
        ({"edges": (4, 4)}, "must ascend"),
    ],
)
def test_rejects_config_out_of_range(fields, message):
    with pytest.raises(ValueError, match=message):
        MassConfig(**fields)


@pytest.mark.parametrize(
    "cfg",
    [
        dataclasses.replace(presets.tiny(), attention="dense", index_topk=None),
        presets.ablation("gqa"),
    ],
)
def test_rejects_model_without_indexers(cfg):
    with pytest.raises(ValueError, match="with indexers"):
        attention_mass.attention_mass({}, cfg, np.zeros((1, 8), np.int32), MassConfig(top_k=(2,)))


def test_rejects_rows_shorter_than_edges():
    with pytest.raises(ValueError, match="last query sees 8 keys"):
        attention_mass.attention_mass(
            {}, presets.tiny(), np.zeros((1, 8), np.int32), MassConfig(top_k=(2,), edges=(1, 10))
        )


def test_default_buckets_are_powers_of_two(monkeypatch):
    measures = np.zeros((1, 1, 9, 5))
    monkeypatch.setattr(attention_mass, "measure_layers", lambda *_: measures[:, :, :, :5])
    monkeypatch.setattr(glm5, "unstack", lambda params, cfg: params)
    buckets = attention_mass.attention_mass(
        {}, presets.tiny(), np.zeros((1, 9), np.int32), MassConfig(top_k=(2,))
    )
    assert [(m.start, m.end) for m in buckets] == [(1, 2), (2, 4), (4, 8), (8, 10)]


def test_short_last_batch_counts_its_rows_once(monkeypatch):
    """Three rows in batches of two: the row that pads the last batch is not measured twice."""

    def fake(params, tokens, *_):
        return np.broadcast_to(tokens[None, :, :, None], (1, *tokens.shape, 5)).astype(float)

    monkeypatch.setattr(attention_mass, "measure_layers", fake)
    monkeypatch.setattr(glm5, "unstack", lambda params, cfg: params)
    rows = np.repeat([[1], [2], [6]], 4, axis=1).astype(np.int32)
    config = MassConfig(top_k=(2,), edges=(1, 5))
    (mass,) = attention_mass.attention_mass({}, presets.tiny(), rows, config, batch_size=2)
    assert mass.selected == (3.0,)


def largest(jaxpr) -> int:
    """Returns the elements of the largest array in any equation of a jaxpr, inside loops and calls too."""
    sizes = [v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars if hasattr(v.aval, "size")]
    inner = [
        getattr(leaf, "jaxpr", leaf)
        for eqn in jaxpr.eqns
        for leaf in jax.tree.leaves(
            tuple(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        )
        if hasattr(leaf, "eqns")
    ]
    return max([*sizes, *map(largest, inner)], default=0)


def test_makes_no_array_per_head_query_and_key(monkeypatch):
    monkeypatch.setattr(blocks, "EXTENTS", 2)  # lengths of keys, for less to trace
    t = 2048
    cfg = dataclasses.replace(
        presets.tiny(), num_hidden_layers=1, attention="dense", max_position_embeddings=t
    )
    params = jax.eval_shape(lambda p: glm5.unstack(p, cfg), glm5.abstract_params(cfg))
    name, w = "dense_layers", params["dense_layers"][0]
    x = jax.ShapeDtypeStruct((1, t, cfg.hidden_size), jnp.float32)
    config = MassConfig(top_k=(40,))

    def layer(w, x):
        none = Selection(None, None)
        return attention_mass.measure_layer(
            w, x, None, none, name, cfg, config, ExecutionConfig(query_block=64)
        )

    num_elements = largest(jax.make_jaxpr(layer)(w, x).jaxpr)
    assert num_elements < t * t
