"""Tests engines with 8-bit pages: replies do not depend on other requests, and are near full-precision replies."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.serve import EngineConfig
from glm5_jax.inference.engine import Engine
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
def test_moves_pages_in_eight_bits_between_engines(kind):
    prompts = make_prompts(3, 2, max_length=16)
    sender, receiver = make_engine(**options(kind)), make_engine(**options(kind))
    for prompt in prompts:
        sender.generate([prompt], dataclasses.replace(GREEDY, max_tokens=0))
        part = sender.read_prefix(prompt, 0)
        if part is not None:
            receiver.write_prefix(prompt, part, 0)
        assert receiver.count_prefix(prompt) == sender.count_prefix(prompt)
    for prompt in prompts:
        [got] = receiver.generate([prompt], GREEDY)
        want = generate_single(prompt, GREEDY, **options(kind))
        assert got._replace(cached_tokens=0) == want._replace(cached_tokens=0)
    assert receiver.stats.cached_tokens


@pytest.mark.parametrize(
    "theirs, mine",
    [
        ({}, {"latent_cache": "int8"}),
        ({"latent_cache": "int8"}, {"latent_cache": "fp8"}),
        ({"index_cache": "fp8"}, {}),
        ({"index_cache": "int8"}, {"index_cache": "fp8"}),
    ],
)
def test_engines_with_other_page_formats_have_other_layouts(theirs, mine):
    """Pages of one would be read as numbers of another kind; `write_prefix` compares the layouts."""
    assert make_engine(**theirs).page_layout != make_engine(**mine).page_layout
    assert make_engine(**mine).page_layout == make_engine(**mine, num_pages=7).page_layout


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
    ids = list(range(1, 12))
    engine.generate([ids], dataclasses.replace(GREEDY, max_tokens=0))
    part = engine.read_prefix(ids, 0)
    assert part is not None
    dtypes = [array.dtype.name for array in part.arrays]
    first, *others = np.array_split(dtypes, CFG.num_hidden_layers + 1)  # the last is the MTP layer
    assert "int8" in first and all((other == first).all() for other in others)
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
