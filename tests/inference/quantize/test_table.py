"""Tests that the table has one rule for every leaf of every GLM model, and that the forward runs on quantised trees."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax import presets
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.quantize import rotation, table
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.sampling import Sampling
from glm5_jax.model import expert_dispatch, experts, glm5
from glm5_jax.model.generate import generate
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.parallel.tree import flatten, unflatten
from pallas_kernels.quantized_weights import Int4, Int8
from pallas_kernels.w4a8_matmul.quantize import dequantize_w4, quantize_a8
from tests.mesh import cases
from tests.oracles import quantize as oracle

GROUP = 4
CFG = cases.config(num_hidden_layers=2, indexer_types=None)
TOKENS = cases.batch()["token_ids"][:2]


@functools.cache
def quantised():
    return table.quantise(cases.params(CFG), CFG, GROUP)[0]


@functools.partial(jax.jit, static_argnames="cfg")
def run(params, cfg=CFG, tokens=TOKENS):
    out = glm5.forward(params, tokens, cfg)
    return out.logits, glm5.forward_mtp(params, out.hidden, tokens, cfg).logits


@pytest.mark.parametrize("name", presets.PRESETS)
def test_quantises_expected_leaves(name):
    cfg = presets.get(name)
    rules = table.rules_of(glm5.abstract_params(cfg))
    assert rules.keys() == flatten(glm5.abstract_params(cfg)).keys()
    blocks = ("dense_layers", "moe_layers") + ("mtp/block",) * cfg.num_nextn_predict_layers
    want = {f"{b}/attn/{w}": table.W8A8 for b in blocks for w in ("q_b", "o")}
    if cfg.index_topk:
        want |= {f"{b}/indexer/q_b": table.W8A8 for b in blocks}
    for w in ("gate", "up", "down"):
        want[f"dense_layers/mlp/{w}"] = table.W8A8
        want |= {f"{b}/shared/{w}": table.W8A8 for b in blocks[1:]}
        want |= {f"{b}/experts/{w}": table.W4A8 for b in blocks[1:]}
    assert {path: rule for path, rule in rules.items() if rule != table.KEEP} == want


def test_rejects_leaves_without_single_rule():
    table.rules_of(glm5.abstract_params(cases.config(attention_bias=True)))
    for kind in ("gqa", "gdn"):
        cfg = presets.ablation(kind)
        with pytest.raises(ValueError, match=r"other than one: .*attn/q \(0\)|gdn/\w+ \(0\)"):
            table.rules_of(glm5.abstract_params(cfg))
    twice = (*table.RULES, ("eh_proj", table.W8A8))
    with (
        mock.patch.object(table, "RULES", twice),
        pytest.raises(ValueError, match=r"mtp/eh_proj \(2\)"),
    ):
        table.rules_of(glm5.abstract_params(CFG))


def test_scales_are_per_channel_and_group():
    flat, letters = flatten(quantised()), flatten(glm5.axis_letters(CFG))
    for path, w in flatten(cases.params(CFG)).items():
        got = flat[path]
        assert got.shape == w.shape
        names = letters[path].split()
        if isinstance(got, Int8):
            inputs = {"o": "nu", "gate": "d", "up": "d", "down": "f"}.get(path.split("/")[-1], "q")
            output_names = [n for n in names if n not in inputs]
            assert got.scale.shape == tuple(w.shape[names.index(n)] for n in output_names)
            dims = tuple(i for i, n in enumerate(names) if n in inputs)
            back = got.q * np.expand_dims(got.scale, dims)
            assert np.all(np.abs(back - w) <= np.expand_dims(got.scale, dims) * 0.5001)
        elif isinstance(got, Int4):
            assert got.group == GROUP
            step = np.repeat(got.scale, GROUP, axis=-2)
            assert np.all(np.abs(dequantize_w4(got.packed, got.scale) - w) <= step * 0.5001)
        else:
            assert got is w


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda flat: flat.pop("mtp/eh_proj"), "not those of the config: mtp/eh_proj is in one"),
        (
            lambda flat: flat.update(
                {"moe_layers/attn/o": flatten(quantised())["moe_layers/attn/o"]}
            ),
            "moe_layers/attn/o is quantised already",
        ),
    ],
)
def test_rejects_other_trees(change, message):
    flat = flatten(cases.params(CFG))
    change(flat)
    with pytest.raises(ValueError, match=message):
        table.quantise(unflatten(flat), CFG, GROUP)


def test_rejects_group_size_that_does_not_divide():
    with pytest.raises(ValueError, match="8 rows in groups of 12"):
        table.quantise(cases.params(CFG), CFG, 12)


def expert_by_expert(w, x, ids):
    """Returns float64[m a d] of rows x [m d] through their experts, with both products by the oracle on integers."""

    def multiply(name, e, rows):
        group = int(w[name].group)
        q, scale = np.asarray(w[name].packed[e]), np.asarray(w[name].scale[e])
        halves = (q.astype(np.int8) << 4) >> 4, q >> 4
        integers = np.concatenate([h.reshape(-1, 1, group // 2, q.shape[-1]) for h in halves], 1)
        ints, row_scale = (np.asarray(a) for a in quantize_a8(jnp.asarray(rows, jnp.float32)))
        return oracle.w4a8(ints, row_scale, integers.reshape(-1, q.shape[-1]), scale)

    out = np.zeros((*ids.shape, x.shape[-1]))
    for m, a in np.ndindex(*ids.shape):
        row, e = x[m : m + 1], ids[m, a]
        gate = multiply("gate", e, row)
        out[m, a] = multiply("down", e, gate / (1 + np.exp(-gate)) * multiply("up", e, row))[0]
    return out


def test_experts_match_integer_oracle():
    w = jax.tree.map(lambda x: x[0], quantised()["moe_layers"]["experts"])
    draw = np.random.default_rng(0)
    x = draw.standard_normal((24, CFG.hidden_size)).astype(np.float32)
    ids = np.stack([draw.permutation(CFG.n_routed_experts)[:2] for _ in x]).astype(np.int32)
    fetched = jax.jit(experts.fetched_swiglu)(x, ids, w)
    want = expert_by_expert(w, x, ids)
    # A hidden value next to a half may round either way.
    np.testing.assert_allclose(fetched, want, rtol=0, atol=0.02 * np.abs(want).max())
    assert np.median(np.abs(fetched - want)) < 1e-6 * np.abs(want).max()
    order, inverse, counts = expert_dispatch.sort_by_expert(
        jnp.asarray(ids.reshape(-1)), CFG.n_routed_experts
    )
    sorted_output = jax.jit(experts.sorted_swiglu)(x[order // 2], counts, w)[inverse].reshape(
        want.shape
    )
    np.testing.assert_allclose(sorted_output, want, rtol=0, atol=0.02 * np.abs(want).max())
    assert np.median(np.abs(sorted_output - fetched)) < 1e-6 * np.abs(want).max()


def test_quantised_forward_is_near_plain_forward():
    want, got = run(cases.params(CFG)), run(quantised())
    for x, y in zip(got, want):
        gap = np.sqrt(np.mean((x - y) ** 2) / np.mean(y**2))
        assert 1e-3 < gap < 0.5


@pytest.mark.slow
def test_forward_accepts_unstacked_quantised_tree():
    for x, y in zip(run(glm5.unstack(quantised(), CFG)), run(quantised())):
        assert np.median(np.abs(x - y)) < 1e-4


@pytest.mark.parametrize("stack", ["dense_layers", "moe_layers", "mtp"])
def test_every_quantised_weight_affects_output(stack):
    """Doubled scales of any leaf change the outputs."""
    want = run(quantised())
    for path, w in flatten(quantised()).items():
        if path.startswith(stack) and isinstance(w, (Int4, Int8)) and "indexer" not in path:
            other = flatten(quantised()) | {path: dataclasses.replace(w, scale=2 * w.scale)}
            assert max(np.abs(x - y).max() for x, y in zip(run(unflatten(other)), want)) > 1e-3, (
                path
            )


def serve_prompts(params, cfg, **options):
    """Returns prompts, each with the four tokens that an engine generates."""
    engine = Engine(
        glm5.Glm5(cfg, params=params),
        config=EngineConfig(
            page_size=8, max_num_seqs=2, max_length=24, prefill_chunk=16, **options
        ),
    )
    replies = engine.generate(TOKENS[:, :14].tolist(), Sampling(max_tokens=4, temperature=0))
    return [[*prompt, *reply.ids] for prompt, reply in zip(TOKENS[:, :14].tolist(), replies)]


@pytest.mark.slow
def test_engine_serves_quantised_model():
    """Each token is the forward's likeliest, except where rounding changes the order."""
    rows = np.pad(serve_prompts(quantised(), CFG), ((0, 0), (0, TOKENS.shape[1] - 18)))
    logits = np.asarray(run(quantised(), CFG, rows)[0])[:, 13:17]
    chosen = np.take_along_axis(logits, rows[:, 14:18, None], -1)[..., 0]
    assert (logits.max(-1) - chosen).max() < 1e-3 < logits.std()


@pytest.mark.slow
def test_engine_serves_rotated_quantised_model_with_drafts():
    params, cfg = table.quantise(*rotation.rotate(cases.params(CFG), CFG), GROUP)
    model = glm5.Glm5(cfg, params=params)
    assert flatten(glm5.params_of(model)).keys() == flatten(params).keys()
    want = generate(params, TOKENS[:, :14], cfg, 4)
    assert serve_prompts(params, cfg, num_speculative_tokens=1) == want.tolist()


def quantised_on(mesh):
    return jax.device_put(quantised(), glm5.param_shardings(CFG, mesh, quantised()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [{"expert": 2, "context": 2, "tensor": 2}, {"fsdp": 2, "tensor": 2, "context": 2}],
)
def test_quantised_forward_on_mesh_equals_single_device(axes):
    mesh = make_mesh(axes)
    got = jax.jit(functools.partial(glm5.forward, cfg=CFG, mesh=mesh))(
        quantised_on(mesh), TOKENS
    ).logits
    # The scale of a row covers all its shards, so only integers next to a half may differ.
    assert np.median(np.abs(got - run(quantised())[0])) < 1e-5


def test_mesh_shards_int4_between_groups():
    """fsdp=8 does not divide the two groups of rows of down, so it shards the columns. Small arrays stay replicated,
    unless they are used in shards.
    """
    for axes in ({"fsdp": 8}, {"tensor": 2, "context": 2, "expert": 2}):
        for path, w in flatten(quantised_on(make_mesh(axes))).items():
            if isinstance(w, Int8):
                is_replicated = "tensor" not in axes or not path.endswith(("gate", "up"))
                assert w.scale.sharding.is_fully_replicated == is_replicated, path
            if isinstance(w, Int4):
                packed, scale = (x.sharding.shard_shape(x.shape) for x in (w.packed, w.scale))
                assert packed == (*scale[:-2], scale[-2] * GROUP // 2, scale[-1]), path
                assert w.packed.size >= np.prod(packed) * (8 if "fsdp" in axes else 4)
    cut = "tensor=4 cut moe_layers/experts/down into shards of 2 rows, which are not whole groups"
    with pytest.raises(ValueError, match=f"int4 in groups of 4: mesh axes {cut}"):
        quantised_on(make_mesh(tensor=4, data=2))
