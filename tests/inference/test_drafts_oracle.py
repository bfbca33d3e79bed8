"""Tests that drafts equal training's chain over one cache, and that drafts that agree with the text are accepted."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from glm5_jax.inference import steps
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import EngineConfig, Request
from glm5_jax.inference.sampling import Sampling
from glm5_jax.model import glm5
from glm5_jax.model.generate import generate
from tests.inference.draft_problem import DRAFTS, HOT, MASK, MTP, NEW, fixture, make_predictable
from tests.oracles import glm5 as oracle

MIN_DIFFERENCE = 0.05  # minimum difference between logits of different chains, for these weights
ROUNDS = []  # (drafts [k], their distributions [k v]) of every verification
rejection_sample = steps.rejection_sample
# One sequence runs at a time, in pages that the previous sequence has freed. Only this file uses these
# shapes, so that no other test runs a program that fills ROUNDS.
OPTIONS = EngineConfig(
    num_speculative_tokens=DRAFTS,
    page_size=5,
    num_pages=6,
    max_length=30,
    max_num_seqs=1,
    prefill_chunk=15,
)


def record_round(key, drafts, draft_probs, probs):
    """Runs `rejection_sample` and appends its drafts to ROUNDS."""
    jax.debug.callback(lambda *x: ROUNDS.append(tuple(map(np.array, x))), drafts[0], draft_probs[0])
    return rejection_sample(key, drafts, draft_probs, probs)


@pytest.fixture(autouse=True, scope="module")
def compiled():
    """Compiles the engine's programs with `record_round`."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(steps, "rejection_sample", record_round)
        cfg, params, *_ = fixture()
        for _ in decode(params, Sampling(max_tokens=2, temperature=HOT, ignore_eos=True)):
            pass
        yield


def decode(params, sampling):
    """Yields (prompt, ids of the reply, rounds) of each prompt.

    A round is (length of the reply before it, length after it, drafts, distributions).
    """
    cfg, _, prompts, *_ = fixture()
    engine = Engine(glm5.Glm5(cfg, params=params), config=OPTIONS)
    for prompt, mask in zip(prompts, MASK):
        ROUNDS.clear()
        lengths, request = [], Request(prompt[mask == 1].tolist(), sampling)
        handle = engine.submit(request, lambda handle, to=lengths: to.append(handle.num_tokens))
        while engine.step():
            pass
        jax.effects_barrier()
        assert lengths[0] == 1 and len(ROUNDS) >= len(lengths) - 1
        pairs = zip(lengths, lengths[1:], ROUNDS)
        rounds = [(before, after, *round_) for before, after, round_ in pairs]
        yield np.array(request.ids), np.array(handle.completion.ids), rounds


def draft_rounds(params):
    """Yields (text [1 t], drafts [1 k], logits [1 k v] up to a constant) before every other verification."""
    sampling = Sampling(max_tokens=NEW, temperature=HOT, seed=3, ignore_eos=True)
    counts = set()
    for prompt, ids, rounds in decode(params, sampling):
        counts |= {after - before for before, after, *_ in rounds}
        for before, _, drafts, probs in rounds[::2]:
            text = np.concatenate([prompt, ids[:before]])
            yield text[None], drafts[None], HOT * np.log(probs)[None]
    assert len(counts) > 2


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def assert_close(got, expected):
    expected = HOT * log_softmax(expected / HOT)
    np.testing.assert_allclose(got, expected, atol=2e-4)


def test_drafts_equal_oracle():
    """At every verification, neither cache holds entries of rejected drafts or of other sequences."""
    _, params, _, config, weights = fixture()
    differences = []
    for text, drafts, logits in draft_rounds(params):
        hidden = oracle.forward(weights, config, text)["final_hidden"][:, :-1]
        expected = oracle.draft(weights, config, text, hidden, drafts)
        assert_close(logits, expected)
        # The test would detect a chain of unnormalised states, whose length hnorm removes.
        first = oracle.mtp(weights, config, text, hidden)[0]["hidden"][:, -1:]
        joined = np.concatenate([hidden, first / weights[MTP + "shared_head.norm.weight"]], 1)
        known = np.concatenate([text, drafts[:, :1]], 1)
        other = oracle.mtp(weights, config, known, joined)[0]["logits"][:, -1]
        differences.append(np.abs(log_softmax(other) - log_softmax(expected[:, 1])).max())
    assert min(differences) > MIN_DIFFERENCE


@pytest.mark.slow
def test_drafts_equal_training_in_first_step():
    """In later steps, drafts attend to entries of the trunk, and training attends to entries of the same step."""
    _, params, _, config, weights = fixture()
    differences = []
    for text, drafts, logits in draft_rounds(params):
        known = np.concatenate([text, drafts], 1)
        hidden = oracle.forward(weights, config, known)["final_hidden"]
        chain = oracle.mtp(weights, config, known, hidden, steps=DRAFTS)
        position = text.shape[1] - 2
        assert_close(logits[:, 0], chain[0]["logits"][:, position])
        second = log_softmax(chain[1]["logits"][:, position] / HOT) * HOT
        differences.append(np.abs(logits[:, 1] - second).max())
    assert max(differences) > MIN_DIFFERENCE


@pytest.mark.slow
def test_drafts_equal_training_without_attention():
    _, params, _, config, weights = fixture()
    weight_name = MTP + "self_attn.o_proj.weight"
    weights = weights | {weight_name: 0 * weights[weight_name]}
    params = jax.tree.map(lambda x: x, params)
    params["mtp"]["block"]["attn"]["o"] = 0 * params["mtp"]["block"]["attn"]["o"]
    for text, drafts, logits in draft_rounds(params):
        known = np.concatenate([text, drafts], 1)
        hidden = oracle.forward(weights, config, known)["final_hidden"]
        for k, step in enumerate(oracle.mtp(weights, config, known, hidden, steps=DRAFTS)):
            assert_close(logits[:, k], step["logits"][:, text.shape[1] - 2])


@functools.cache
def plain_text():
    """Returns the greedy text [3 NEW] of plain decoding."""
    cfg, params, prompts, *_ = fixture()
    return generate(make_predictable(params), prompts, cfg, NEW, mask=MASK)[:, -NEW:]


def test_accepts_drafts_that_agree_with_decoding():
    _, params, *_ = fixture()
    sampling = dataclasses.replace(Sampling(max_tokens=NEW, ignore_eos=True), temperature=0.0)
    counts = set()
    for (_, ids, rounds), want in zip(decode(make_predictable(params), sampling), plain_text()):
        np.testing.assert_array_equal(ids, want)
        for before, after, drafts, _ in rounds:
            agree = np.cumprod(np.append(drafts, -1)[: NEW - before] == want[before:][: DRAFTS + 1])
            assert after - before == min(1 + agree.sum(), NEW - before)
            counts.add(after - before)
    assert {1, 2} < counts
