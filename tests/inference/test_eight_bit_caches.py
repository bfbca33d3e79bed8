"""Tests engines with 8-bit pages: replies do not depend on other requests, and are near full-precision replies."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.serve import EngineConfig
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import Request
from glm5_jax.model import glm5
from tests.inference import test_drafts as drafts
from tests.inference.test_engine import (
    CFG,
    GREEDY,
    generate_single,
    logprobs,
    make_engine,
    make_prompts,
    mixed_samplings,
    schedule,
)

KINDS = {"int8": ("int8", "fp8"), "fp8": ("fp8", "int8")}


def options(kind, **more):
    """Returns options that give bitwise equal replies, because separate programs may round a value differently."""
    index, latent = KINDS[kind]
    return (
        dict(index_cache=index, latent_cache=latent, batch_invariant=True, prefill_chunk=8) | more
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_replies_are_bitwise_equal_in_any_batch(kind):
    """Covers batches, chunks, pages, prefixes and preemption."""
    rng = np.random.default_rng(1)
    prompts = make_prompts(7, 1)
    samplings = mixed_samplings(len(prompts), rng)
    engine = make_engine(**options(kind))
    got = schedule(engine, prompts, samplings, rng)
    assert engine.num_preempted and engine.stats.cached_tokens
    errors = []
    for prompt, sampling, reply in zip(prompts, samplings, got):
        want = generate_single(prompt, sampling, **options(kind))
        assert reply._replace(cached_tokens=0) == want._replace(cached_tokens=0)
        expected = logprobs(prompt + reply.ids, sampling.temperature or 1.0)[len(prompt) - 1 : -1]
        errors += np.abs(expected[np.arange(len(reply.ids)), reply.ids] - reply.logprobs).tolist()
    assert 1e-4 < np.median(errors) < 0.05, "near the log-probs of the forward without pages"
    assert engine.num_free_pages == 18 - engine.num_cached_pages


@pytest.mark.slow
def test_most_replies_are_equal_without_batch_invariance():
    prompts, kind = make_prompts(14, 2), "int8"
    engine = make_engine(**options(kind, batch_invariant=False, max_batched_tokens=20))
    got = engine.generate(prompts, GREEDY)
    assert engine.num_preempted and engine.stats.cached_tokens
    want = [generate_single(prompt, GREEDY, **options(kind)) for prompt in prompts]
    same = [reply.ids == expected.ids for reply, expected in zip(got, want)]
    assert np.mean(same) > 0.8
    errors = [np.subtract(a.logprobs, b.logprobs) for a, b, ok in zip(got, want, same) if ok]
    assert np.median(np.abs(np.concatenate(errors))) < 1e-5


@pytest.mark.slow
def test_logprobs_are_near_those_of_full_precision():
    """fp8 has four significant bits, int8 has seven for the largest numbers of a latent."""
    prompts, sampling = (
        make_prompts(24, 4, max_length=18),
        dataclasses.replace(GREEDY, max_tokens=1),
    )
    want = make_engine().generate(prompts, sampling)

    def median_error(**kinds):
        got = make_engine(**kinds).generate(prompts, sampling)
        same = [(a.logprobs, b.logprobs) for a, b in zip(got, want) if a.ids == b.ids]
        assert len(same) > 12
        return np.median([abs(a - b) for [a], [b] in same])

    int8, fp8 = (median_error(latent_cache=kind) for kind in KINDS)
    assert median_error() < 1e-6 < 1e-4 < int8 < fp8 < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_transfers_eight_bit_requests_between_engines(kind):
    prompts = make_prompts(3, 2, max_length=16)
    prefill_engine, decode_engine = make_engine(**options(kind)), make_engine(**options(kind))
    handles = [prefill_engine.submit(Request(prompt, GREEDY)) for prompt in prompts]
    for handle in handles:
        decode_engine.import_request(prefill_engine.export_request(handle))
    while decode_engine.step():
        pass
    assert decode_engine.stats.read_tokens == 0
    for prompt, handle in zip(prompts, handles):
        want = generate_single(prompt, GREEDY, **options(kind))
        assert handle.completion._replace(cached_tokens=0) == want._replace(cached_tokens=0)


@pytest.mark.parametrize(
    "theirs, mine",
    [
        ({}, {"latent_cache": "int8"}),
        pytest.param({"latent_cache": "int8"}, {"latent_cache": "fp8"}, marks=pytest.mark.slow),
        pytest.param({"index_cache": "fp8"}, {}, marks=pytest.mark.slow),
        pytest.param({"index_cache": "int8"}, {"index_cache": "fp8"}, marks=pytest.mark.slow),
    ],
)
def test_rejects_transfers_with_other_page_formats(theirs, mine):
    prefill_engine, other = make_engine(**theirs), make_engine(**mine)
    transfer = prefill_engine.export_request(prefill_engine.submit(Request([1, 2, 3], GREEDY)))
    with pytest.raises(ValueError, match="index_cache and latent_cache must be the same"):
        other.import_request(transfer)
    assert not other.step()


@pytest.mark.slow
def test_drafts_keep_text_of_plain_decoding():
    """Covers pages of the MTP layer in 8 bits, prefixes and preemption."""
    engine, plain = (
        drafts.make_engine(
            drafts.drafting_model(), num_speculative_tokens, num_pages=6, latent_cache="int8"
        )
        for num_speculative_tokens in (drafts.DRAFTS, 0)
    )
    bases = drafts.base_prompts()
    prompts = [bases[i % 3] + bases[(i + 1) % 3][: i % 4] for i in range(12)]
    sampling = dataclasses.replace(GREEDY, max_tokens=drafts.NEW)
    got, want = engine.generate(prompts, sampling), plain.generate(prompts, sampling)
    assert engine.num_preempted and engine.stats.cached_tokens
    same = [reply.ids == expected.ids for reply, expected in zip(got, want)]
    assert np.mean(same) > 0.8
    assert engine.num_free_pages == 6 - engine.num_cached_pages
    # The acceptance rate equals that of full-precision pages.
    full_precision = drafts.make_engine(drafts.drafting_model(), num_pages=6)
    full_precision.generate(prompts, sampling)
    mean_accepted, expected_mean = (
        np.average(range(len(counts)), weights=counts)
        for counts in (engine.stats.accepted, full_precision.stats.accepted)
    )
    assert mean_accepted == pytest.approx(expected_mean, rel=0.1) and mean_accepted > 0.2


@pytest.mark.slow
def test_drafts_with_index_keys_in_8_bits():
    engine = make_engine(
        **options(
            "int8",
            batch_invariant=False,
            num_speculative_tokens=2,
            max_num_seqs=2,
            prefill_chunk=32,
        )
    )
    mtp = engine.export_request(engine.submit(Request([1, 2, 3], GREEDY))).kv_state.mtp
    assert mtp.idx_k.values.dtype == np.int8 and mtp.latent.layout.dtype == "float8_e4m3fn"
    prompts = make_prompts(8, 5)
    got = engine.generate(prompts, GREEDY)
    want = [generate_single(prompt, GREEDY, **options("int8")) for prompt in prompts]
    assert np.mean([reply.ids == expected.ids for reply, expected in zip(got, want)]) > 0.8


def test_rejects_unknown_page_formats():
    with pytest.raises(ValueError, match="latent_cache is 'int4'; use int8, fp8 or None"):
        EngineConfig(latent_cache="int4")
    with pytest.raises(ValueError, match="index_cache is 'int4'; use int8, fp8 or None"):
        make_engine(index_cache="int4")
    cfg = dataclasses.replace(CFG, attention="dense")
    dense_model = glm5.Glm5(cfg, params=glm5.init_params(cfg, jax.random.key(0)))
    with pytest.raises(ValueError, match="index_cache is 'fp8', and the model has no indexer"):
        Engine(dense_model, config=EngineConfig(index_cache="fp8"))
    assert make_engine(latent_cache="fp8").description["latent_cache"] == "fp8"
