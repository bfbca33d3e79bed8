"""Tests two hundred random schedules against one request at a time. Differences must come from rounding."""

import dataclasses

import numpy as np
import pytest

from glm5_jax.model import glm5
from tests.inference.test_engine import (
    CFG,
    generate_single,
    logprobs,
    make_engine,
    make_prompts,
    mixed_samplings,
    model,
    schedule,
    score_gap,
)
from tests.model.golden import traced_forward

CLOSE = 1e-5
LENGTH = 64  # one length, to compile one program
KINDS = [
    {"prefill_chunk": 128},
    {"page_size": 8, "num_pages": 9, "max_num_seqs": 3},
    {"num_pages": 30, "prefill_chunk": 16},
    {"num_speculative_tokens": 2, "prefill_chunk": 128},
]


def closest_choice(ids):
    """Returns the smallest margin by which any layer chose a key or an expert for these tokens.

    The margin is the difference between the lowest chosen score and the highest score not chosen. Equal scores do not
    count, because the lower index wins.
    """
    row, real = np.zeros((1, LENGTH), np.int32), np.zeros((1, LENGTH), np.int32)
    row[0, : len(ids)], real[0, : len(ids)] = ids, 1
    positions = np.arange(LENGTH, dtype=np.int32)[None]
    _, inside = traced_forward(CFG)(glm5.params_of(model()), row, real, positions)
    gaps = []
    for scores in inside["index_scores"]:
        for t in range(CFG.index_topk, len(ids)):
            ranked = np.sort(scores[0, t, : t + 1])[::-1]
            gaps.append(ranked[CFG.index_topk - 1] - ranked[CFG.index_topk])
    for routing in inside["routing"]:
        ranked = np.sort(routing.probs[: len(ids)], axis=-1)[:, ::-1]
        last = CFG.num_experts_per_tok
        gaps += (ranked[:, last - 1] - ranked[:, last]).tolist()
    return min(gap for gap in gaps if gap > 0)


@pytest.mark.slow
def test_more_tokens_have_closer_choices():
    ids = make_prompts(1)[0]
    gaps = [closest_choice(ids[:count]) for count in (4, 12, len(ids))]
    assert gaps == sorted(gaps, reverse=True) and gaps[0] > gaps[-1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_matches_single_requests_in_random_schedules(kind):
    replies = num_different = 0
    largest = 0.0
    for seed in range(50):
        rng = np.random.default_rng([kind, seed])
        prompts = make_prompts(14, 100 * kind + seed)
        samplings = mixed_samplings(len(prompts), rng)
        if "num_speculative_tokens" in KINDS[kind]:
            # Sampling with drafts gives another draw of the same distribution.
            samplings = [dataclasses.replace(sampling, temperature=0.0) for sampling in samplings]
        engine = make_engine(max_batched_tokens=int(rng.integers(8, 40)), **KINDS[kind])
        got = schedule(engine, prompts, samplings, rng)
        for prompt, sampling, reply in zip(prompts, samplings, got):
            want = generate_single(prompt, sampling)
            replies += 1
            ids = prompt + reply.ids
            expected_logprobs = logprobs(ids, sampling.temperature or 1.0)[len(prompt) - 1 : -1]
            error = np.abs(
                expected_logprobs[np.arange(len(reply.ids)), reply.ids] - reply.logprobs
            ).max()
            if reply.ids == want.ids and error < CLOSE:
                largest = max(largest, error)
                continue
            num_different += 1
            token = (
                score_gap(prompt, reply.ids, want.ids, sampling)
                if reply.ids != want.ids
                else np.inf
            )
            choice = closest_choice(ids)
            print(f"{kind}/{seed}: {error:.1e} off; token gap {token:.1e}, choice gap {choice:.1e}")
            assert min(token, choice) < CLOSE
        assert engine.num_free_pages == engine.description["num_pages"] - engine.num_cached_pages
    print(f"{replies} replies, {num_different} apart; log-probs of the others within {largest:.1e}")
    assert num_different < replies / 100
