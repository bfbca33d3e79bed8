"""An engine on a mesh: attention in parallel over requests, experts over devices, the same replies."""

import functools
import json
import types

import jax
import numpy as np
import pytest

from glm5_jax.inference.engine import Engine
from glm5_jax.inference.quantize import rotation, table
from glm5_jax.inference.request import Request
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
    """(parameters, config) with every kind of weight that stands as several arrays."""
    return table.quantise(*rotation.rotate(cases.params(cfg), cfg), GROUP)


def engine(mesh=None, kind="plain", cfg=SMALL, **options):
    params, cfg = (cases.params(cfg), cfg) if kind == "plain" else quantised(cfg)
    if mesh is not None:
        params = jax.device_put(params, glm5.param_shardings(cfg, mesh, params))
    return Engine(glm5.Glm5(cfg, params=params, mesh=mesh), **OPTIONS | options)


def programs_and_state(made: Engine) -> tuple[Steps, DeviceState]:
    """Those of an engine; its pages and slots as shapes."""
    _, cfg, shape, mesh, execution = made.computation
    steps = Steps(cfg, shape, mesh, execution)
    return steps, steps.abstract_state(cfg.dtype)


def pages_on_each_device(made: Engine) -> set[int]:
    pages = jax.tree.leaves(programs_and_state(made)[1].layers)
    return {x.sharding.shard_shape(x.shape)[0] for x in pages}


@pytest.mark.parametrize(
    "kind, num_speculative_tokens, axes",
    [
        ("plain", None, AXES),
        pytest.param("plain", 0, AXES, marks=pytest.mark.slow),
        pytest.param("plain", 2, AXES, marks=pytest.mark.slow),
        # Requests are not cut over `context`, weights are.
        pytest.param("plain", 1, {"expert": 4, "context": 2}, marks=pytest.mark.slow),
        # Experts are fetched for few rows where no axis parts them.
        pytest.param("rotated and quantised", 1, {"fsdp": 4, "tensor": 2}, marks=pytest.mark.slow),
    ],
)
def test_replies_are_those_of_one_device(kind, num_speculative_tokens, axes):
    """More requests than places, of different lengths, in four groups of devices; two share a beginning.

    num_speculative_tokens: None for the small model, which cannot draft.
    """
    rng = np.random.default_rng(0)
    # Lengths that differ little run few programs.
    lengths = [(3, 9, 20, 1, 14, 7, 11, 2, 5), (17, 23, 20, 18, 24, 19, 22, 21, 17)]
    lengths = lengths[num_speculative_tokens is None]
    asked = [rng.integers(0, SMALL.vocab_size, n).tolist() for n in lengths]
    asked.append(asked[2] + [4])
    mesh, cfg = make_mesh(axes), SMALL if num_speculative_tokens is None else CFG
    made, alone = (
        engine(on, kind, cfg, num_speculative_tokens=num_speculative_tokens or 0)
        for on in (mesh, None)
    )
    got, want = made.generate(asked, SAMPLING), alone.generate(asked, SAMPLING)
    for one, other in zip(got, want):
        assert one.ids == other.ids
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert sum(made.stats.accepted) == sum(alone.stats.accepted)
    assert made.num_free_pages + made.num_cached_pages == 4 * 10
    # What continues a request goes where its beginning is.
    [first] = made.generate([asked[2]], SAMPLING)
    [again] = made.generate([asked[2] + first.ids + [3]], SAMPLING)
    assert again.cached_tokens == (16 if num_speculative_tokens else 24)
    assert pages_on_each_device(made) == {10}


def gathered_in_a_decode(made: Engine) -> int:
    """Bytes of a device's results, over the axis along which experts are cut and nothing else need be."""
    steps, device = programs_and_state(made)
    function, static = steps.program("decode", SamplingVariant())
    run = functools.partial(function, **static)
    found = traffic(run, made.computation.params, device, steps.dummy_decode(2, 4))
    return found["all_gather", ("expert",)]


@pytest.mark.parametrize("kind", ["plain", pytest.param("quantised", marks=pytest.mark.slow)])
def test_gathers_no_weights_that_every_device_has(kind):
    """All but experts, embedding and head; new weights too, which arrive cut."""
    mesh = make_mesh(AXES)
    made, cut = engine(mesh, kind, replicated=True), engine(mesh, kind)
    if kind == "plain":
        params = jax.device_put(cases.params(SMALL), glm5.param_shardings(SMALL, mesh))
        made.update_weights(params, 2)
    for path, leaf in flatten(flatten_leaves(made.computation.params)).items():
        over = {axis for part in leaf.sharding.spec for axis in np.atleast_1d(part or ())}
        if "/experts/" not in path and not path.startswith(("embed", "lm_head")):
            assert over <= {"tensor"}, path  # a feed-forward's width stays cut
    # Of the vocabulary's tables tokens and logits travel.
    sent, whole = gathered_in_a_decode(made), gathered_in_a_decode(cut)
    tables = [flatten(made.computation.params)[f"{name}/weight"] for name in ("embed", "lm_head")]
    assert 0 < sent < min(table.nbytes for table in tables) < whole


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "quantised"])
def test_replies_of_weights_that_every_device_has_are_those_of_one_device(kind):
    mesh = make_mesh(AXES)
    made, alone = engine(mesh, kind, replicated=True), engine(None, kind)
    asked = [[5, 2, 7], [1], [9, 9, 3, 4]]

    def assert_alike():
        got, want = made.generate(asked, SAMPLING), alone.generate(asked, SAMPLING)
        assert [one.ids for one in got] == [one.ids for one in want]
        for one, other in zip(got, want):
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)

    assert_alike()
    if kind == "plain":
        params = jax.tree.map(lambda x: x * 1.5, cases.params(SMALL))
        made.update_weights(jax.device_put(params, glm5.param_shardings(SMALL, mesh)), 2)
        alone.update_weights(params, 2)
        assert_alike()


@pytest.mark.slow
def test_pages_in_eight_bits_are_shared_out_alike():
    """The sums of several devices may put a value on the other side of a border: a reply may then be another."""
    kinds = {"index_cache": "fp8", "latent_cache": "int8"}
    rng = np.random.default_rng(1)
    asked = [rng.integers(0, SMALL.vocab_size, n).tolist() for n in (3, 9, 20, 1, 14, 7, 11, 2, 5)]
    made = engine(make_mesh(AXES), **kinds)
    got, want = made.generate(asked, SAMPLING), engine(**kinds).generate(asked, SAMPLING)
    same = [one for one in zip(got, want) if one[0].ids == one[1].ids]
    assert len(same) >= 8
    off = [np.subtract(one.logprobs, other.logprobs) for one, other in same]
    assert np.median(np.abs(np.concatenate(off))) < 1e-5
    assert pages_on_each_device(made) == {10}


def test_a_session_s_prefix_is_cached_in_the_group_that_it_names_and_in_no_other():
    """By `Request.dp_rank`, then as a router asks."""
    made = engine(make_mesh(AXES))
    question = np.random.default_rng(2).integers(0, SMALL.vocab_size, 20).tolist()

    def turn(ids, group):
        handle = made.submit(Request(ids, SAMPLING, dp_rank=group))
        while made.step():
            pass
        return handle.completion

    first = turn(question, 2)
    further = question + first.ids + [3]
    second = {group: turn(further, group) for group in (1, 2, None)}
    assert {group: own.cached_tokens for group, own in second.items()} == {1: 0, 2: 24, None: 24}
    assert second[1].ids == second[2].ids == second[None].ids
    assert made.dp_size == 4
    with pytest.raises(
        ValueError, match="dp_rank is 4; there are 4 data-parallel ranks, numbered from 0"
    ):
        made.submit(Request(question, SAMPLING, dp_rank=4))

    with Server(made, Tokenizer.load("bytes"), ServerConfig(port=0)).running() as url:
        server = types.SimpleNamespace(url=url)
        assert json.loads(get(server, "/server_info")[1])["dp_size"] == 4
        body = {"input_ids": further, "sampling_params": {"max_new_tokens": 5, "temperature": 0}}
        for rank, cached in ((3, 0), (3, 24), (0, 0), (1, 24)):
            status, told = post(server, "/generate", body | {"data_parallel_rank": rank})
            assert status == 200 and told["meta_info"]["cached_tokens"] == cached
            assert told["output_ids"] == second[1].ids
        status, told = post(server, "/generate", body | {"data_parallel_rank": 4})
        assert (
            status == 400
            and "there are 4 data-parallel ranks, numbered from 0" in told["error"]["message"]
        )


def test_new_weights_arrive_sharded():
    mesh = make_mesh(AXES)
    made = engine(mesh)
    params = jax.tree.map(lambda x: x * 1.5, cases.params(SMALL))
    params = jax.device_put(params, glm5.param_shardings(SMALL, mesh))
    before = made.generate([[1, 2, 3]], SAMPLING)[0]
    made.update_weights(params, 2)
    after = made.generate([[1, 2, 3]], SAMPLING)[0]
    assert after.versions == [2] * 5 and not np.allclose(after.logprobs, before.logprobs)
