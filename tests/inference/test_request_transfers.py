"""Tests transfers of requests from an engine that prefills to an engine that decodes."""

import dataclasses

import numpy as np
import pytest

from glm5_jax.inference.request import Request
from glm5_jax.model import glm5
from tests.inference.test_engine import (
    GREEDY,
    PAGE,
    generate_single,
    make_engine,
    make_prompts,
    model,
    tokens_by_version,
)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compiles the programs of both engines."""
    for engine in (make_engine(), make_engine(num_pages=60, max_num_seqs=1)):
        engine.generate(make_prompts(6, 2), GREEDY)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_transfers_requests_between_engines(temperature):
    """The pages of prompts are transferred, so the second engine, of another size, prefills nothing."""
    sampling = dataclasses.replace(GREEDY, temperature=temperature, seed=3)
    prompts = make_prompts(6, 2)
    prefill_engine, decode_engine = make_engine(), make_engine(num_pages=60, max_num_seqs=1)
    handles = [prefill_engine.submit(Request(prompt, sampling)) for prompt in prompts]
    for handle in handles:
        decode_engine.import_request(prefill_engine.export_request(handle))
    assert (
        not prefill_engine.step()
        and prefill_engine.num_free_pages == 18 - prefill_engine.num_cached_pages
    )
    while decode_engine.step():
        pass
    assert decode_engine.stats.read_tokens == 0
    for prompt, handle in zip(prompts, handles):
        got, want = handle.completion, generate_single(prompt, sampling)
        assert got.ids == want.ids
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)
    assert decode_engine.num_free_pages == 60 - decode_engine.num_cached_pages
    assert decode_engine.num_cached_pages, "the decoding engine caches the pages"


def test_rejects_incompatible_transfers():
    prefill_engine = make_engine()
    transfer = prefill_engine.export_request(prefill_engine.submit(Request([1, 2, 3], GREEDY)))
    for other, expected_error in (
        (make_engine(page_size=8), "page_size, num_speculative_tokens, .* must be the same"),
        (make_engine(version=3), "of version 0, this engine's is 3"),
        (make_engine(max_length=8), "may have 11 tokens, at most 8"),
    ):
        with pytest.raises(ValueError, match=expected_error):
            other.import_request(transfer)
        assert not other.step()
    last = prefill_engine.submit(Request([1, 2, 3], dataclasses.replace(GREEDY, max_tokens=1)))
    with pytest.raises(ValueError, match="has ended"):
        prefill_engine.export_request(last)
    cancelled = prefill_engine.export_request(prefill_engine.submit(Request([1, 2, 3], GREEDY)))
    full = make_engine()
    full.import_request(cancelled)
    cancelled.sequence.handle.cancel()
    while full.step():
        pass
    assert cancelled.sequence.handle.finish_reason == "cancelled"
    assert full.num_free_pages == 18


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["finish", "keep", "recompute"])
def test_updates_weights_while_transfers_wait(policy):
    prompts = make_prompts(4, 5)
    prefill_engine, decode_engine = make_engine(), make_engine(num_pages=60, max_num_seqs=1)
    handles = [prefill_engine.submit(Request(prompt, GREEDY)) for prompt in prompts]
    for handle in handles:
        decode_engine.import_request(prefill_engine.export_request(handle))
    decode_engine.step()
    decode_engine.update_weights(glm5.params_of(model(1)), 1, policy)
    while decode_engine.step():
        pass
    last = handles[-1].completion
    assert last.finish_reason == "length" and len(last.ids) == 8
    assert tokens_by_version(last) == (
        {0: 8} if policy == "finish" else {0: last.versions.count(0), 1: 8 - last.versions.count(0)}
    )
    before = last.versions.count(0)
    if policy == "recompute":
        sampling = dataclasses.replace(GREEDY, max_tokens=8 - before)
        assert (
            last.ids[before:]
            == generate_single(prompts[-1] + last.ids[:before], sampling, seed=1).ids
        )
    if policy == "finish":
        assert last.ids == generate_single(prompts[-1], GREEDY).ids
    assert decode_engine.num_free_pages == 60 - decode_engine.num_cached_pages
    # Pages that the new weights computed are shared; pages of the old weights are not.
    [repeated] = decode_engine.generate([[*prompts[-1], *last.ids, 1]], GREEDY)
    if policy == "recompute":
        assert repeated.cached_tokens >= len(prompts[-1]) // PAGE * PAGE
    if policy == "keep":
        assert repeated.cached_tokens == 0
    with pytest.raises(ValueError, match="resume it first"):
        prefill_engine.pause()
        prefill_engine.export_request(handles[0])
