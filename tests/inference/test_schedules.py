"""Two hundred random schedules against one request at a time; whatever differs is a choice of rounding."""

import dataclasses

import numpy as np
import pytest

from glm5_jax.model import glm5
from tests.inference.test_engine import (
    CFG,
    alone,
    engine,
    gap,
    logprobs,
    mixed,
    model,
    prompts,
    schedule,
)
from tests.model.golden import traced_forward

CLOSE = 1e-5
LENGTH = 64  # one program for all
KINDS = [
    {"prefill_chunk": 128},
    {"page_size": 8, "num_pages": 9, "max_num_seqs": 3},
    {"num_pages": 30, "prefill_chunk": 16},
    {"num_speculative_tokens": 2, "prefill_chunk": 128},
]


def closest_choice(ids):
    """By how little some layer chose a key or an expert for one of these tokens: the smallest score between the
    last that was chosen and the first that was not. Equal scores are no choice of rounding: the lower index wins."""
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
def test_more_tokens_bring_closer_choices():
    ids = prompts(1)[0]
    gaps = [closest_choice(ids[:count]) for count in (4, 12, len(ids))]
    assert gaps == sorted(gaps, reverse=True) and gaps[0] > gaps[-1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_fifty_random_schedules_of_a_kind(kind):
    replies = apart = 0
    largest = 0.0
    for seed in range(50):
        rng = np.random.default_rng([kind, seed])
        asked = prompts(14, 100 * kind + seed)
        samplings = mixed(len(asked), rng)
        if "num_speculative_tokens" in KINDS[kind]:
            # What is drawn with drafts is another draw of the same distribution.
            samplings = [dataclasses.replace(own, temperature=0.0) for own in samplings]
        made = engine(max_batched_tokens=int(rng.integers(8, 40)), **KINDS[kind])
        got = schedule(made, asked, samplings, rng)
        for prompt, sampling, own in zip(asked, samplings, got):
            want = alone(prompt, sampling)
            replies += 1
            ids = prompt + own.ids
            wanted = logprobs(ids, sampling.temperature or 1.0)[len(prompt) - 1 : -1]
            off = np.abs(wanted[np.arange(len(own.ids)), own.ids] - own.logprobs).max()
            if own.ids == want.ids and off < CLOSE:
                largest = max(largest, off)
                continue
            apart += 1
            token = gap(prompt, own.ids, want.ids, sampling) if own.ids != want.ids else np.inf
            choice = closest_choice(ids)
            print(f"{kind}/{seed}: {off:.1e} off; token gap {token:.1e}, choice gap {choice:.1e}")
            assert min(token, choice) < CLOSE
        assert made.num_free_pages == made.description["num_pages"] - made.num_cached_pages
    print(f"{replies} replies, {apart} apart; log-probs of the others within {largest:.1e}")
    assert apart < replies / 100
