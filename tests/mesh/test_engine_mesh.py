"""Tests that an engine on a mesh, data-parallel in attention and expert-parallel, replies like one device."""

import dataclasses
import functools
import json
import types

import jax
import numpy as np
import pytest

from glm5_jax.inference.constraints import ReplyRules
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.quantize import rotation, table
from glm5_jax.inference.request import EngineConfig, Request
from glm5_jax.inference.sampling import Sampling
from glm5_jax.inference.server import Server, ServerConfig
from glm5_jax.inference.step_arrays import DeviceState, SamplingVariant
from glm5_jax.inference.steps import Steps
from glm5_jax.model import glm5
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.parallel.tree import flatten
from glm5_jax.text.tokenizer import Tokenizer
from launch.aot.serving_programs import flatten_leaves
from tests.inference.test_server import get, post
from tests.mesh import cases
from tests.mesh.traffic import traffic

CFG = cases.config("sparse")  # with a layer that drafts
SMALL = cases.small()
OPTIONS = dict(page_size=8, max_length=32, max_num_seqs=2, num_pages=10, prefill_chunk=32)
GROUP = 4
SAMPLING = Sampling(max_tokens=5, temperature=0, ignore_eos=True)
AXES = {"fsdp": 2, "expert": 2, "tensor": 2}  # four groups of two devices


@functools.cache
def quantised(cfg):
    """Returns (parameters, config) with every kind of quantized weight."""
    return table.quantise(*rotation.rotate(cases.params(cfg), cfg), GROUP)


def engine(mesh=None, kind="plain", cfg=SMALL, **options):
    params, cfg = (cases.params(cfg), cfg) if kind == "plain" else quantised(cfg)
    if mesh is not None:
        params = jax.device_put(params, glm5.param_shardings(cfg, mesh, params))
    return Engine(
        glm5.Glm5(cfg, params=params, mesh=mesh), config=EngineConfig(**OPTIONS | options)
    )


def programs_and_state(mesh_engine: Engine) -> tuple[Steps, DeviceState]:
    """Returns an engine's programs and the shapes of its device state."""
    _, cfg, shape, mesh, execution = mesh_engine.computation
    steps = Steps(cfg, shape, mesh, execution)
    return steps, steps.abstract_state(cfg.dtype)


def pages_per_device(mesh_engine: Engine) -> set[int]:
    pages = jax.tree.leaves(programs_and_state(mesh_engine)[1].layers)
    return {x.sharding.shard_shape(x.shape)[0] for x in pages}


SLOW = pytest.mark.slow
ENGINES = [
    ("plain", None, AXES),
    pytest.param(("plain", 0, AXES), marks=SLOW),
    pytest.param(("plain", 2, AXES), marks=SLOW),
    # Weights are sharded over `context`, requests are not.
    pytest.param(("plain", 1, {"expert": 4, "context": 2}), marks=SLOW),
    # Without an expert axis, experts are gathered for few rows.
    pytest.param(("rotated and quantised", 1, {"fsdp": 4, "tensor": 2}), marks=SLOW),
]


@pytest.fixture(params=ENGINES, ids=lambda case: f"{case[0]}-{case[1]}-{'-'.join(case[2])}")
def engines(request):
    """Returns (engine on a mesh, engine on one device, drafted tokens) with compiled programs.

    No number of drafted tokens means the small model, which has no MTP layer.
    """
    kind, num_drafts, axes = request.param
    cfg = SMALL if num_drafts is None else CFG
    pair = [
        engine(mesh, kind, cfg, num_speculative_tokens=num_drafts or 0)
        for mesh in (make_mesh(axes), None)
    ]
    for one in pair:
        one.generate([[5] * 20], SAMPLING)
    return *pair, num_drafts


def test_mesh_engine_replies_like_one_device(engines):
    """Four DP ranks serve more requests than they have slots; two requests share a prefix."""
    mesh_engine, single_engine, num_speculative_tokens = engines
    rng = np.random.default_rng(0)
    # Similar lengths need few programs.
    lengths = [(3, 9, 20, 1, 14, 7, 11, 2, 5), (17, 23, 20, 18, 24, 19, 22, 21, 17)]
    lengths = lengths[num_speculative_tokens is None]
    prompts = [rng.integers(0, SMALL.vocab_size, n).tolist() for n in lengths]
    prompts.append(prompts[2] + [4])
    got, want = mesh_engine.generate(prompts, SAMPLING), single_engine.generate(prompts, SAMPLING)
    for one, other in zip(got, want):
        assert one.ids == other.ids
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert sum(mesh_engine.stats.accepted) == sum(single_engine.stats.accepted)
    assert mesh_engine.num_free_pages + mesh_engine.num_cached_pages == 4 * 10
    # A continued request goes to the rank that caches its prefix.
    [first] = mesh_engine.generate([prompts[2]], SAMPLING)
    [again] = mesh_engine.generate([prompts[2] + first.ids + [3]], SAMPLING)
    assert again.cached_tokens == (16 if num_speculative_tokens else 24)
    assert pages_per_device(mesh_engine) == {10}


@pytest.mark.slow
@pytest.mark.parametrize("num_speculative_tokens", [0, 2])
def test_masks_replies_and_scores_prompts_like_one_device(num_speculative_tokens):
    rng, end = np.random.default_rng(1), 7
    rules = ReplyRules(thinking_budget=2, thinking_end=end)
    sampling = dataclasses.replace(SAMPLING, prompt_logprobs=True)
    prompts = [rng.integers(0, CFG.vocab_size, n).tolist() for n in (17, 23, 20, 18, 24)]
    requests = [
        Request(ids, sampling, rules=rules if i % 2 else None) for i, ids in enumerate(prompts)
    ]
    results = []
    for mesh in (make_mesh(AXES), None):
        server = engine(mesh, cfg=CFG, num_speculative_tokens=num_speculative_tokens)
        results.append([server.submit(request) for request in requests])
        while server.step():
            pass
    for on_mesh, single_engine in zip(*results):
        assert on_mesh.completion.ids == single_engine.completion.ids
        scores = (
            [token.logprob for token in handle.prompt_tokens] for handle in (on_mesh, single_engine)
        )
        np.testing.assert_allclose(*scores, atol=1e-5)
        assert len(single_engine.prompt_tokens) == len(single_engine.request.ids) - 1
        assert single_engine.request.rules is None or end in single_engine.completion.ids[:3]


def expert_bytes_of_decode(mesh_engine: Engine) -> int:
    """Returns the bytes that a decode gathers over the expert axis, along which experts stay sharded."""
    steps, device = programs_and_state(mesh_engine)
    function, static = steps.program("decode", SamplingVariant())
    run = functools.partial(function, **static)
    num_bytes = traffic(run, mesh_engine.computation.params, device, steps.dummy_decode(2, 4))
    return num_bytes["all_gather", ("expert",)]


@pytest.mark.parametrize("kind", ["plain", pytest.param("quantised", marks=pytest.mark.slow)])
def test_gathers_no_replicated_weights(kind):
    """All weights but experts, embedding and head are replicated, after an update too."""
    mesh = make_mesh(AXES)
    mesh_engine, sharded_engine = engine(mesh, kind, replicated=True), engine(mesh, kind)
    if kind == "plain":
        params = jax.device_put(cases.params(SMALL), glm5.param_shardings(SMALL, mesh))
        mesh_engine.update_weights(params, 2)
    for path, leaf in flatten(flatten_leaves(mesh_engine.computation.params)).items():
        over = {axis for part in leaf.sharding.spec for axis in np.atleast_1d(part or ())}
        if "/experts/" not in path and not path.startswith(("embed", "lm_head")):
            assert over <= {"tensor"}, path  # feed-forward layers stay sharded
    # For the vocabulary, devices exchange tokens and logits instead of tables.
    replicated, sharded = (
        expert_bytes_of_decode(mesh_engine),
        expert_bytes_of_decode(sharded_engine),
    )
    tables = [
        flatten(mesh_engine.computation.params)[f"{name}/weight"] for name in ("embed", "lm_head")
    ]
    assert 0 < replicated < min(table.nbytes for table in tables) < sharded


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "quantised"])
def test_replicated_weights_reply_like_one_device(kind):
    mesh = make_mesh(AXES)
    mesh_engine, single_engine = engine(mesh, kind, replicated=True), engine(None, kind)
    prompts = [[5, 2, 7], [1], [9, 9, 3, 4]]

    def assert_same_replies():
        got, want = (
            mesh_engine.generate(prompts, SAMPLING),
            single_engine.generate(prompts, SAMPLING),
        )
        assert [one.ids for one in got] == [one.ids for one in want]
        for one, other in zip(got, want):
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)

    assert_same_replies()
    if kind == "plain":
        params = jax.tree.map(lambda x: x * 1.5, cases.params(SMALL))
        mesh_engine.update_weights(jax.device_put(params, glm5.param_shardings(SMALL, mesh)), 2)
        single_engine.update_weights(params, 2)
        assert_same_replies()


@pytest.mark.slow
def test_8_bit_pages_on_mesh_reply_like_one_device():
    """Sums over several devices may round to another 8-bit value, so one reply may differ."""
    kinds = {"index_cache": "fp8", "latent_cache": "int8"}
    rng = np.random.default_rng(1)
    prompts = [
        rng.integers(0, SMALL.vocab_size, n).tolist() for n in (3, 9, 20, 1, 14, 7, 11, 2, 5)
    ]
    mesh_engine = engine(make_mesh(AXES), **kinds)
    got, want = mesh_engine.generate(prompts, SAMPLING), engine(**kinds).generate(prompts, SAMPLING)
    same = [one for one in zip(got, want) if one[0].ids == one[1].ids]
    assert len(same) >= 8
    off = [np.subtract(one.logprobs, other.logprobs) for one, other in same]
    assert np.median(np.abs(np.concatenate(off))) < 1e-5
    assert pages_per_device(mesh_engine) == {10}


def test_caches_prefix_in_requested_dp_rank():
    mesh_engine = engine(make_mesh(AXES))
    question = np.random.default_rng(2).integers(0, SMALL.vocab_size, 20).tolist()

    def turn(ids, rank):
        handle = mesh_engine.submit(Request(ids, SAMPLING, dp_rank=rank))
        while mesh_engine.step():
            pass
        return handle.completion

    first = turn(question, 2)
    further = question + first.ids + [3]
    second = {rank: turn(further, rank) for rank in (1, 2, None)}
    assert {rank: reply.cached_tokens for rank, reply in second.items()} == {1: 0, 2: 24, None: 24}
    assert second[1].ids == second[2].ids == second[None].ids
    assert mesh_engine.dp_size == 4
    with pytest.raises(
        ValueError, match="dp_rank is 4; there are 4 data-parallel ranks, numbered from 0"
    ):
        mesh_engine.submit(Request(question, SAMPLING, dp_rank=4))

    with Server(mesh_engine, Tokenizer.load("bytes"), ServerConfig(port=0)).running() as url:
        server = types.SimpleNamespace(url=url)
        assert json.loads(get(server, "/server_info")[1])["dp_size"] == 4
        body = {"input_ids": further, "sampling_params": {"max_new_tokens": 5, "temperature": 0}}
        for rank, cached in ((3, 0), (3, 24), (0, 0), (1, 24)):
            status, response = post(server, "/generate", body | {"data_parallel_rank": rank})
            assert status == 200 and response["meta_info"]["cached_tokens"] == cached
            assert response["output_ids"] == second[1].ids
        status, response = post(server, "/generate", body | {"data_parallel_rank": 4})
        assert (
            status == 400
            and "there are 4 data-parallel ranks, numbered from 0" in response["error"]["message"]
        )


def test_updates_sharded_weights():
    mesh = make_mesh(AXES)
    mesh_engine = engine(mesh)
    params = jax.tree.map(lambda x: x * 1.5, cases.params(SMALL))
    params = jax.device_put(params, glm5.param_shardings(SMALL, mesh))
    before = mesh_engine.generate([[1, 2, 3]], SAMPLING)[0]
    mesh_engine.update_weights(params, 2)
    after = mesh_engine.generate([[1, 2, 3]], SAMPLING)[0]
    assert after.versions == [2] * 5 and not np.allclose(after.logprobs, before.logprobs)
