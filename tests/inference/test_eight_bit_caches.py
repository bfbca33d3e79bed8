"""An engine whose pages are in 8 bits: the same replies however they are served, near those of whole pages."""

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
    alone,
    engine,
    logprobs,
    mixed,
    prompts,
    schedule,
)

KINDS = {"int8": ("int8", "fp8"), "fp8": ("fp8", "int8")}


def options(kind, **more):
    """Bitwise the same whatever else is served: of two programs a value on a border may be rounded apart."""
    index, latent = KINDS[kind]
    return (
        dict(index_cache=index, latent_cache=latent, batch_invariant=True, prefill_chunk=8) | more
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_replies_have_the_same_bits_whatever_else_is_served(kind):
    """Batches, chunks, pages, prefixes and pre-emption."""
    rng = np.random.default_rng(1)
    asked = prompts(7, 1)
    samplings = mixed(len(asked), rng)
    made = engine(**options(kind))
    got = schedule(made, asked, samplings, rng)
    assert made.num_preempted and made.stats.cached_tokens
    errors = []
    for prompt, sampling, own in zip(asked, samplings, got):
        want = alone(prompt, sampling, **options(kind))
        assert own._replace(cached_tokens=0) == want._replace(cached_tokens=0)
        whole = logprobs(prompt + own.ids, sampling.temperature or 1.0)[len(prompt) - 1 : -1]
        errors += np.abs(whole[np.arange(len(own.ids)), own.ids] - own.logprobs).tolist()
    assert 1e-4 < np.median(errors) < 0.05, "near the log-probs of the forward without pages"
    assert made.num_free_pages == 18 - made.num_cached_pages


@pytest.mark.slow
def test_most_replies_are_the_same_in_batches_of_any_shape():
    asked, kind = prompts(14, 2), "int8"
    made = engine(**options(kind, batch_invariant=False, max_batched_tokens=20))
    got = made.generate(asked, GREEDY)
    assert made.num_preempted and made.stats.cached_tokens
    want = [alone(prompt, GREEDY, **options(kind)) for prompt in asked]
    same = [one.ids == other.ids for one, other in zip(got, want)]
    assert np.mean(same) > 0.8
    off = [np.subtract(a.logprobs, b.logprobs) for a, b, ok in zip(got, want, same) if ok]
    assert np.median(np.abs(np.concatenate(off))) < 1e-5


@pytest.mark.slow
def test_log_probs_are_near_those_of_whole_pages():
    """fp8 has four significant bits, int8 of a latent's largest numbers seven."""
    asked, one = prompts(24, 4, most=18), dataclasses.replace(GREEDY, max_tokens=1)
    want = engine().generate(asked, one)

    def off(**kinds):
        got = engine(**kinds).generate(asked, one)
        same = [(a.logprobs, b.logprobs) for a, b in zip(got, want) if a.ids == b.ids]
        assert len(same) > 12
        return np.median([abs(a - b) for [a], [b] in same])

    int8, fp8 = (off(latent_cache=kind) for kind in KINDS)
    assert off() < 1e-6 < 1e-4 < int8 < fp8 < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_one_engine_reads_and_another_decodes(kind):
    asked = prompts(3, 2, most=16)
    reads, decodes = engine(**options(kind)), engine(**options(kind))
    handles = [reads.submit(Request(prompt, GREEDY)) for prompt in asked]
    for handle in handles:
        decodes.import_request(reads.export_request(handle))
    while decodes.step():
        pass
    assert decodes.stats.read_tokens == 0
    for prompt, handle in zip(asked, handles):
        want = alone(prompt, GREEDY, **options(kind))
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
def test_rejects_transfers_with_other_kinds_of_pages(theirs, mine):
    reads, other = engine(**theirs), engine(**mine)
    transfer = reads.export_request(reads.submit(Request([1, 2, 3], GREEDY)))
    with pytest.raises(ValueError, match="index_cache and latent_cache must be the same"):
        other.import_request(transfer)
    assert not other.step()


@pytest.mark.slow
def test_drafts_write_what_plain_decoding_writes():
    """With pages of the MTP layer in 8 bits too, prefixes and pre-emption."""
    made, plain = (
        drafts.engine(drafts.foreseeing(), num_speculative_tokens, num_pages=6, latent_cache="int8")
        for num_speculative_tokens in (drafts.DRAFTS, 0)
    )
    own = drafts.rows()
    asked = [own[i % 3] + own[(i + 1) % 3][: i % 4] for i in range(12)]
    sampling = dataclasses.replace(GREEDY, max_tokens=drafts.NEW)
    got, want = made.generate(asked, sampling), plain.generate(asked, sampling)
    assert made.num_preempted and made.stats.cached_tokens
    same = [one.ids == other.ids for one, other in zip(got, want)]
    assert np.mean(same) > 0.8
    assert made.num_free_pages == 6 - made.num_cached_pages
    # And as many drafts are kept as over whole pages.
    whole = drafts.engine(drafts.foreseeing(), num_pages=6)
    whole.generate(asked, sampling)
    kept, wanted = (
        np.average(range(len(counts)), weights=counts)
        for counts in (made.stats.accepted, whole.stats.accepted)
    )
    assert kept == pytest.approx(wanted, rel=0.1) and kept > 0.2


@pytest.mark.slow
def test_drafts_over_index_keys_in_8_bits():
    made = engine(
        **options(
            "int8",
            batch_invariant=False,
            num_speculative_tokens=2,
            max_num_seqs=2,
            prefill_chunk=32,
        )
    )
    mtp = made.export_request(made.submit(Request([1, 2, 3], GREEDY))).kv_state.mtp
    assert mtp.idx_k.values.dtype == np.int8 and mtp.latent.layout.dtype == "float8_e4m3fn"
    asked = prompts(8, 5)
    got = made.generate(asked, GREEDY)
    want = [alone(prompt, GREEDY, **options("int8")) for prompt in asked]
    assert np.mean([one.ids == other.ids for one, other in zip(got, want)]) > 0.8


def test_unknown_kinds_are_refused_before_the_model_is_loaded():
    with pytest.raises(ValueError, match="latent_cache is 'int4'; use int8, fp8 or None"):
        EngineConfig(latent_cache="int4")
    with pytest.raises(ValueError, match="index_cache is 'int4'; use int8, fp8 or None"):
        engine(index_cache="int4")
    cfg = dataclasses.replace(CFG, attention="dense")
    made = glm5.Glm5(cfg, params=glm5.init_params(cfg, jax.random.key(0)))
    with pytest.raises(ValueError, match="index_cache is 'fp8', and the model has no indexer"):
        Engine(made, config=EngineConfig(index_cache="fp8"))
    assert engine(latent_cache="fp8").description["latent_cache"] == "fp8"
