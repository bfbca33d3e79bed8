"""Tests the minimum cost of serving: FLOPs equal those of the forward, bytes equal those of weights and pages."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import pytest

from glm5_jax import presets
from glm5_jax.inference import serving_cost
from glm5_jax.inference.quantize import table
from glm5_jax.inference.serving_cost import Serving, TokenCost
from glm5_jax.model import attention, block, expert_dispatch, glm5, moe
from glm5_jax.model.cache import PagedCache, init_pages
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.parallel.flops import count_flops
from glm5_jax.parallel.tree import flatten
from pallas_kernels import blocks
from pallas_kernels.chips import CHIPS
from pallas_kernels.cost import Cost
from pallas_kernels.lightning_indexer import xla as indexer
from tests.mesh import cases

CFG = cases.config()  # three layers, the last one without an indexer; 11 keys are selected
GLM5 = presets.glm5()
DENSE, DSA = Serving(attention="dense"), Serving(attention="sparse", sharing=4)
W4A8 = Serving(attention="sparse", weights="w4a8", index_cache="fp8", latent_cache="fp8")
ROWS, LENGTH, SLOTS = 4, 16, 8

# The function of the forward that computes each component, and the modules that call it.
PLACES = {
    "prologue": ("mla_prologue", attention),
    "keys": ("index_keys", attention),
    "queries": ("index_queries", attention),
    "scores": ("_index_scores", indexer),
    "mla": ("mla", attention),
    "paged_mla": ("paged_mla", attention),
    "route": ("route", moe),
    "routed": ("routed_experts", moe),
    "mlp": ("mlp", block, moe),
    "head": ("compute_logits", glm5),
}


@pytest.fixture
def count_by_scope(monkeypatch):
    """Returns a function that counts FLOPs in each of PLACES, and all FLOPs under "".

    Block sizes are not rounded up: every query sees only its keys, and every row goes only through its experts.
    """
    monkeypatch.setattr(blocks, "EXTENTS", LENGTH)
    monkeypatch.setattr(expert_dispatch, "FETCH_SHARE", math.inf)
    jax.clear_caches()  # drops layers that were traced without scopes
    for name, (attribute, *modules) in PLACES.items():
        original = getattr(modules[0], attribute)

        def call_in_scope(*args, original=original, name=f"counted_{name}", **kwargs):
            with jax.named_scope(name):
                return original(*args, **kwargs)

        for module in modules:
            monkeypatch.setattr(module, attribute, call_in_scope)

    def count(function, *args, places=tuple(PLACES)):
        scopes = {name: f"counted_{name}" for name in places} | {"": None}
        return {
            name: count_flops(function, *args, scope=scope, while_trips=0)
            for name, scope in scopes.items()
        }

    yield count
    jax.clear_caches()


def config(attention: str, quantised: bool):
    return dataclasses.replace(CFG, attention=attention, int4_group=4 if quantised else None)


def weights(cfg, quantised: bool):
    """Returns (parameters by layer, the config that computes with them).

    In a scanned stack with some layers without an indexer, every layer would count as if it had one.
    """
    params, plain = glm5.abstract_params(cfg), dataclasses.replace(cfg, int4_group=None)
    if quantised:
        params = jax.eval_shape(lambda params: table.quantise(params, cfg)[0], params)
    return jax.eval_shape(lambda params: glm5.unstack(params, plain), params), plain


def compare(counts: dict, costs: dict, cfg, tokens: int, pairs: int, waste: int, drawn: int):
    """Checks the FLOPs of every component.

    XLA's forms do more: `waste` FLOPs of attention, a weighted sum over the index heads of a pair, and one over the
    experts of a token. drawn: number of tokens with logits for each that the cost counts.
    """
    got = {name: serving_cost.flops(costs, name) for name in costs}
    n, i = cfg.num_attention_heads, cfg.index_n_heads
    assert n != i
    attended = counts["mla"] + counts["paged_mla"]
    assert counts["prologue"] + attended - waste == got["projections"] + got["attention"]
    sums = 2 * i * pairs * len(cfg.full_layers)
    if "scores" in got:
        assert counts["scores"] - sums == got["scores"]
        assert counts["keys"] + counts["queries"] == got["indexer"]
    else:
        assert cfg.attention == "dense" and counts["scores"] == counts["keys"] == 0
    combined = 2 * tokens * cfg.num_experts_per_tok * cfg.hidden_size * cfg.num_moe_layers
    experts = counts["route"] + counts["routed"] + counts["mlp"] - combined
    assert experts == pytest.approx(got["experts"] + got["feed-forward"], rel=1e-12)
    assert counts["head"] == got["head"] * drawn
    # All other work is small: loads and balance of experts, and counting in the selection.
    assert sum(counts[name] for name in PLACES) <= counts[""]


@pytest.mark.parametrize(
    ("attention", "quantised"),
    [
        pytest.param("sparse", True, marks=pytest.mark.slow),
        ("dense", False),
        pytest.param("dense", True, marks=pytest.mark.slow),
        pytest.param("sparse", False, marks=pytest.mark.slow),
    ],
)
def test_prefill_flops_equal_those_of_forward(attention, quantised, count_by_scope):
    cfg = config(attention, quantised)
    params, plain = weights(cfg, quantised)
    form = {"dense": "expanded", "sparse": "gathered"}[attention]
    execution = ExecutionConfig(attention_form=form, query_block=1)
    tokens = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
    counts = count_by_scope(
        lambda p, x: glm5.forward(p, x, plain, execution=execution).logits, params, tokens
    )
    costs = serving_cost.prefill(
        cfg, Serving(attention=attention, weights="w4a8" if quantised else None), LENGTH
    )
    triangle, waste = LENGTH * (LENGTH + 1) // 2, 0
    if attention == "sparse":
        # Queries with fewer visible keys still gather index_topk of them, and values are multiplied with complete rows.
        n, c, r, k = (
            cfg.num_attention_heads,
            cfg.kv_lora_rank,
            cfg.qk_rope_head_dim,
            cfg.index_topk,
        )
        picked = k * (k + 1) // 2 + (LENGTH - k) * k
        flops_per_key = 2 * n * (2 * c + r)
        waste = cfg.num_hidden_layers * (
            flops_per_key * (LENGTH * k - picked) + 2 * n * r * LENGTH * k
        )
    compare(counts, costs, cfg, LENGTH, triangle, waste, drawn=LENGTH)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("attention", ["dense", "sparse"])
def test_decode_flops_equal_those_of_forward(attention, quantised, count_by_scope):
    cfg = config(attention, quantised)
    params, plain = weights(cfg, quantised)
    pages = jax.eval_shape(lambda: init_pages(plain, ROWS * LENGTH // SLOTS, SLOTS))
    int32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    cache = PagedCache(pages, int32((ROWS, LENGTH // SLOTS)), int32((ROWS,)))

    def step(params, tokens, cache):
        return glm5.forward(params, tokens, plain, cache=cache).logits

    counts = count_by_scope(step, params, int32((ROWS, 1)), cache)
    costs = serving_cost.decode(
        cfg, Serving(attention=attention, weights="w4a8" if quantised else None), LENGTH, ROWS
    )
    keys = ROWS * (cfg.index_topk if attention == "sparse" else LENGTH)
    n, r = cfg.num_attention_heads, cfg.qk_rope_head_dim
    waste = cfg.num_hidden_layers * 2 * n * r * keys  # values are multiplied with complete rows
    compare(counts, costs, cfg, ROWS, ROWS * LENGTH, waste, drawn=1)


def test_components_cover_most_flops_of_real_layers(count_by_scope):
    """Compares all FLOPs of a decode of four layers of GLM-5's sizes with the sum of the components."""
    cfg = dataclasses.replace(GLM5, num_hidden_layers=4)
    length, rows = 8192, 32
    pages = jax.eval_shape(lambda: init_pages(cfg, rows * length // 64, 64))
    int32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    cache = PagedCache(pages, int32((rows, length // 64)), int32((rows,)))

    def step(params, tokens, cache):
        return glm5.forward(params, tokens, cfg, cache=cache).logits

    total = count_by_scope(step, glm5.abstract_params(cfg), int32((rows, 1)), cache, places=())[""]
    known = serving_cost.flops(serving_cost.decode(cfg, DSA, length, rows))
    assert known < total < 1.03 * known


def test_tied_head_costs_same():
    tied = dataclasses.replace(CFG, tie_word_embeddings=True)
    untied_cost, tied_cost = (
        serving_cost.decode(cfg, DENSE, LENGTH, ROWS)["head"] for cfg in (CFG, tied)
    )
    assert untied_cost == tied_cost == [Cost(2 * ROWS * 64 * 32, 2 * 64 * 32)]


def test_step_reads_weights_once_and_reached_experts():
    for serving in (DSA, W4A8):
        params = glm5.abstract_params(GLM5, jnp.bfloat16)
        if serving.weights:
            params = jax.eval_shape(lambda tree: table.quantise(tree, GLM5)[0], params)
        stored = {
            path: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(w))
            for path, w in flatten(params).items()
            if "norm" not in path and not path.startswith(("mtp/", "embed/")) and "bias" not in path
        }
        routed = sum(size for path, size in stored.items() if "/experts/" in path)
        rest = sum(stored.values()) - routed
        for batch, reached in ((1, 8 / 256), (2, 1 - (1 - 8 / 256) ** 2), (10_000, 1)):
            costs = serving_cost.weight_costs(GLM5, serving, batch, drawn=batch, indexed=True)
            read = sum(cost.bytes for component in costs.values() for cost in component)
            assert read == pytest.approx(rest + reached * routed, rel=1e-9)
    assert routed == 75 * 256 * 3 * 6144 * 2048 * (0.5 + 4 / 128)


def test_quantised_weights_multiply_in_8_bits():
    costs = serving_cost.prefill(GLM5, W4A8, 8192)
    int8 = {
        name: sum(cost.flops for cost in component if cost.dtype == "int8")
        for name, component in costs.items()
    }
    per_layer = 2048 * 64 * 256 + 64 * 256 * 6144  # q_b and o
    assert int8["projections"] == 2 * 8192 * 78 * per_layer
    assert int8["indexer"] == 2 * 8192 * 78 * 2048 * 32 * 128
    assert int8["experts"] == 2 * 8192 * 75 * 9 * 3 * 6144 * 2048
    assert int8["head"] == int8["attention"] == 0
    assert {cost.dtype for cost in costs["scores"]} == {"float8"}


def test_fp8_weights_are_one_byte_each():
    """All products of GLM-5's layers are in FP8, except those of the parts of kv_b."""
    costs = serving_cost.weight_costs(GLM5, Serving(weights="fp8"), 1, drawn=1, indexed=True)
    fp8 = [cost for component in costs.values() for cost in component if cost.dtype == "float8"]
    plain = [cost for component in costs.values() for cost in component if cost not in fp8]
    latents = 78 * 512 * 64 * (192 + 256)
    assert sum(cost.flops for cost in plain if cost in costs["projections"]) == 2 * latents
    experts = [cost for cost in costs["experts"] if cost in fp8]
    scale_bytes = 4 / 128**2
    num_weights = 75 * 3 * 6144 * 2048 * 9  # those of eight experts and of the shared one
    assert sum(cost.bytes for cost in experts) == pytest.approx(num_weights * (1 + scale_bytes))


@pytest.mark.parametrize("kind", [None, "int8", "fp8"])
def test_token_bytes_equal_those_of_engine_pages(kind):
    [pages] = jax.eval_shape(
        lambda: init_pages(
            GLM5, 1, 1, "bfloat16", num_layers=1, index_cache=kind, latent_cache=kind
        )
    )
    page_bytes = [sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(page)) for page in pages]
    got = serving_cost.latent_bytes(GLM5, kind), serving_cost.index_bytes(GLM5, kind)
    assert list(got) == page_bytes
    # The fp8 bytes equal those of DeepSeek's cache (spec/performance.md 2.4).
    assert got == ((1152, 256) if kind is None else (656, 132))


def per_layer(costs, name, layers=78, chip="h200"):
    """Returns milliseconds per layer."""
    return 1e3 * serving_cost.component_seconds(costs[name], CHIPS[chip]) / layers


@pytest.mark.parametrize(
    ("length", "proj", "moe", "score", "score8", "sparse", "mha"),
    [
        (4096, 1.4, 2.8, 0.07, 0.03, 0.9, 0.6),
        (32768, 11.6, 22.6, 4.5, 2.2, 9.2, 35.6),
        (131072, 46.2, 90.5, 71, 36, 37.5, 569),
        (202752, 71.5, 140, 170, 85, 58.2, 1362),
    ],
)
def test_prefill_times_on_h200_match_published(length, proj, moe, score, score8, sparse, mha):
    """Milliseconds a layer, to within 2%. A separate script computed them from the published shapes to two digits
    (performance.md 2.2). It counts the indexer's projections as the attention's.
    """
    cfg = GLM5
    dense, dsa, packed = (serving_cost.prefill(cfg, s, length) for s in (DENSE, DSA, W4A8))
    both = per_layer(dsa, "projections") + per_layer(dsa, "indexer")
    close = functools.partial(pytest.approx, rel=0.02, abs=0.05)
    assert both == close(proj)
    assert per_layer(dsa, "scores") == close(score)
    assert per_layer(packed, "scores") == close(score8)
    assert per_layer(dsa, "attention") == close(sparse)
    assert per_layer(dense, "attention") == close(mha)
    if length > 4096:  # in shorter prompts reading weights takes longer, which the script ignores
        assert per_layer(dense, "experts", 75) == close(moe)


@pytest.mark.parametrize(
    ("length", "attention", "model"),
    [
        (8192, 0.95, 0.99),
        (16384, 1.61, 1.15),
        (32768, 2.62, 1.46),
        (65536, 3.91, 2.00),
        (131072, 5.24, 2.86),
        (202752, 5.96, 3.56),
    ],
)
def test_flop_ratios_by_length_match_published(length, attention, model):
    """Dense over DSA to two decimals (performance.md 2.3). There every token passes the head, 2.3% of the other FLOPs,
    and the projections of indexers are on both sides.
    """
    dense, dsa = (serving_cost.prefill(GLM5, s, length) for s in (DENSE, DSA))
    names = ("scores", "attention")
    ratio = serving_cost.flops(dense, *names) / serving_cost.flops(dsa, *names)
    assert ratio == pytest.approx(attention, abs=0.006)
    assert serving_cost.flops(dense) / serving_cost.flops(dsa) == pytest.approx(model, rel=0.03)


@pytest.mark.parametrize(
    ("length", "index", "sparse", "dense"), [(4096, 7, 16, 32), (131072, 224, 16, 1007)]
)
def test_decode_times_on_h200_match_published(length, index, sparse, dense):
    """Microseconds a layer of 32 sequences in bf16, to within 2%, because performance.md 2.5 has two digits."""
    costs, all_keys = (serving_cost.decode(GLM5, s, length, 32) for s in (DSA, DENSE))
    close = functools.partial(pytest.approx, rel=0.02, abs=0.5)
    assert 1e3 * per_layer(costs, "scores") == close(index)
    assert 1e3 * per_layer(costs, "attention") == close(sparse)
    assert 1e3 * per_layer(all_keys, "attention") == close(dense)
    assert 1e3 * per_layer(costs, "experts", 75) == pytest.approx(2584, rel=0.002)


def test_cache_bytes_of_decode_match_published_ratios():
    """Dense over DSA in bytes of the cache, to within 2%, because performance.md 2.3 has two digits (last column)."""

    def read(serving, length):
        costs = serving_cost.decode(GLM5, serving, length, 1)
        return sum(cost.bytes for name in ("scores", "attention") for cost in costs.get(name, ()))

    for length, bf16, keys8 in ((8192, 2.1, 2.7), (32768, 3.5, 5.7), (202752, 4.3, 8.0)):
        dense = read(DENSE, length)
        assert dense / read(DSA, length) == pytest.approx(bf16, rel=0.02, abs=0.05)
        packed = dataclasses.replace(DSA, index_cache="fp8")
        assert dense / read(packed, length) == pytest.approx(keys8, rel=0.02)


def test_component_takes_longer_of_compute_and_memory():
    rates = {"flops": {"bfloat16": 100.0, "int8": 200.0}, "bandwidth": 10.0}
    chip = dataclasses.replace(CHIPS["h200"], **rates)
    products = [Cost(300, 5, "bfloat16"), Cost(400, 5, "int8")]
    assert serving_cost.component_seconds(products, chip) == 5
    assert serving_cost.component_seconds([Cost(300, 60, "bfloat16")], chip) == 6
    assert serving_cost.component_seconds([Cost(300, 0, "float8")], chip) == 3, (
        "float8 has no rate and uses another"
    )
    both = {"a": products, "b": [Cost(300, 60)]}
    assert serving_cost.chip_seconds(both, chip) == 11
    assert serving_cost.flops(both) == 1000 and serving_cost.flops(both, "b", "c") == 300


def test_queries_that_share_gather_read_rows_once():
    unshared, shared = (
        serving_cost.prefill(GLM5, dataclasses.replace(DSA, sharing=n), 131072)["attention"][0]
        for n in (1, 4)
    )
    rows = 78 * 1152 * (2048 * 2049 / 2 + (131072 - 2048) * 2048)
    assert unshared.bytes - shared.bytes == pytest.approx(rows * 3 / 4, rel=1e-12)
    assert unshared.flops == shared.flops


@pytest.mark.parametrize("serving", [DENSE, DSA, W4A8])
def test_batched_prompts_share_only_weights(serving):
    single, four = (serving_cost.prefill(GLM5, serving, 8192, prompts) for prompts in (1, 4))
    for name, component in single.items():
        for single_cost, batch_cost in zip(component, four[name], strict=True):
            assert batch_cost.flops == pytest.approx(4 * single_cost.flops, rel=1e-12)
            shared = name not in ("scores", "attention")
            assert batch_cost.bytes == pytest.approx(
                (1 if shared else 4) * single_cost.bytes, rel=1e-12
            )


@pytest.mark.parametrize("serving", [DENSE, DSA, W4A8])
def test_chunk_costs_add_up_to_prefill(serving):
    length, chunk = 65536, 4096
    full = serving_cost.prefill(GLM5, serving, length)
    step = serving_cost.prefill(GLM5, serving, length, chunk=chunk)
    for name, component in full.items():
        for full_cost, chunk_cost in zip(component, step[name], strict=True):
            if name != "head":  # the head reads one token of each chunk
                assert chunk_cost.flops * 16 == pytest.approx(full_cost.flops, rel=1e-12)
    assert step["head"] == full["head"]
    assert [cost.bytes for cost in step["feed-forward"]] == [
        cost.bytes for cost in full["feed-forward"]
    ]
    if serving is DENSE:
        # The chunks read 1, 2, ... 16 chunks of keys.
        [full_cost], [chunk_cost] = full["attention"], step["attention"]
        assert 16 * chunk_cost.bytes == pytest.approx(
            full_cost.bytes * sum(range(1, 17)) / 16, rel=1e-12
        )
    assert serving_cost.prefill(GLM5, serving, 4096, chunk=8192) == serving_cost.prefill(
        GLM5, serving, 4096
    )


@pytest.mark.parametrize("serving", [DENSE, DSA, W4A8])
def test_verified_tokens_share_reads_of_keys(serving):
    one, five = (serving_cost.decode(GLM5, serving, 65536, 8, queries) for queries in (1, 5))
    separate = serving_cost.decode(GLM5, serving, 65536, 40)
    for name, component in five.items():
        assert serving_cost.flops(five, name) == pytest.approx(5 * serving_cost.flops(one, name))
        if name not in ("scores", "attention"):
            assert component == separate[name], "weights are read for the same number of tokens"
    chosen = 0 if serving is DENSE else 4 * 8 * 4 * 2048 * 78  # each query has its selected keys
    for name in {"scores", "attention"} & {*five}:
        assert five[name][0].bytes - one[name][0].bytes == pytest.approx(chosen)


def test_caches_use_fastest_8_bit_type_of_chip():
    forms = {name: serving_cost.arms(CHIPS[name])["DSA W4A8"] for name in serving_cost.SERVED}
    assert {name: serving.index_cache for name, serving in forms.items()} == {
        "h200": "fp8",
        "v5p": "int8",
        "v6e": "int8",
        "tpu7x": "fp8",
    }


def test_model_without_indexers_has_only_dense_cost():
    cost = TokenCost.of(presets.glm4_7_flash(), "h200", "decode", 4096, 8)
    assert cost.totals.keys() == {"dense"} and cost.saved is None
    # A model whose expert rows do not divide into groups has no W4A8 cost.
    cost = TokenCost.of(dataclasses.replace(CFG, int4_group=None), "h200", "decode", 16, 8)
    assert cost.totals.keys() == {"dense", "DSA"} and cost.saved is None


def test_sparse_cost_equals_dense_for_short_contexts():
    for length in (1, 2047, 2048):
        assert serving_cost.prefill(GLM5, DSA, length) == serving_cost.prefill(GLM5, DENSE, length)
        assert serving_cost.decode(GLM5, DSA, length, 3) == serving_cost.decode(
            GLM5, DENSE, length, 3
        )
    assert "scores" in serving_cost.decode(GLM5, DSA, 2049, 3)


def test_rejects_invalid_arguments():
    prefill, decode = serving_cost.prefill, serving_cost.decode
    for message, call in {
        "attention is 'local'; use 'dense' or 'sparse'": lambda: Serving(attention="local"),
        "index_cache is 'int4'; use int8, fp8 or None": lambda: Serving(index_cache="int4"),
        "weights is 'int3'; use w4a8, fp8 or None": lambda: Serving(weights="int3"),
        "sharing is 0": lambda: Serving(sharing=0),
        "length is 0; it must be positive": lambda: prefill(GLM5, DSA, 0),
        "prompts is 0; it must be positive": lambda: prefill(GLM5, DSA, 4096, 0),
        "exceeds max_position_embeddings": lambda: prefill(GLM5, DSA, 202753),
        "chunk is 0; it must be positive": lambda: prefill(GLM5, DSA, 4096, chunk=0),
        "batch is 0; it must be positive": lambda: decode(GLM5, DSA, 4096, 0),
        "queries is 0; it must be positive": lambda: decode(GLM5, DSA, 4096, 1, 0),
        "'sparse', and the model has no indexer; use 'dense'": lambda: prefill(
            presets.glm4_7_flash(), DSA, 4096
        ),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
