"""Tests an engine that drafts: equal text if greedy, equal distribution if sampled, and log-probs of the trunk."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.sampling import Sampling
from glm5_jax.model import glm5
from tests.inference.draft_problem import DRAFTS, HOT, NEW, fixture, is_plausible, make_predictable
from tests.inference.test_engine import GREEDY

forward = jax.jit(glm5.forward, static_argnames="cfg")


@functools.cache
def drafting_model(vocab_size=None, noise=0.0):
    """Returns a one-layer model whose drafts are often accepted, less often with more noise. vocab_size: number of
    tokens to keep; None: all.
    """
    cfg, params, *_ = fixture()
    params = make_predictable(params)
    if vocab_size:
        params["embed"]["weight"] = params["embed"]["weight"][:vocab_size]
        params["lm_head"]["weight"] = params["lm_head"]["weight"][:, :vocab_size]
    weight = params["mtp"]["eh_proj"]
    weight += noise * np.random.default_rng(0).normal(size=weight.shape).astype(np.float32)
    cfg = dataclasses.replace(cfg, vocab_size=vocab_size or cfg.vocab_size, eos_token_id=())
    return glm5.Glm5(cfg, params=params)


def make_engine(model, num_speculative_tokens=DRAFTS, **options):
    # One width of page tables and two of batches, because each width compiles a separate program.
    options = dict(page_size=8, max_length=32, max_num_seqs=2, prefill_chunk=32) | options
    return Engine(
        model, config=EngineConfig(num_speculative_tokens=num_speculative_tokens, **options)
    )


def base_prompts():
    """Returns three prompts of different lengths."""
    *_, prompts, _, _ = fixture()
    return [prompts[i, first:].tolist() for i, first in enumerate((0, 4, 2))]


def logprobs(model, ids, temperature=1.0):
    """Returns log-probs [t v] of one forward over all of ids, padded to 32 tokens to compile one program."""
    row = np.zeros((1, 32), np.int32)
    row[0, : len(ids)] = ids
    logits = forward(glm5.params_of(model), row, cfg=model.cfg).logits[0, : len(ids)]
    return np.asarray(jax.nn.log_softmax(logits / temperature))


def test_text_does_not_depend_on_drafts_or_preemption():
    """Every token is the trunk's likeliest, also with cached prefixes."""
    model, bases = drafting_model(), base_prompts()
    prompts = [bases[i % 3] + bases[(i + 1) % 3][: i % 4] for i in range(12)]
    engine = make_engine(model, num_pages=6)
    replies = engine.generate(prompts, dataclasses.replace(GREEDY, max_tokens=NEW))
    assert engine.num_preempted and engine.stats.cached_tokens
    for prompt, reply in zip(prompts, replies):
        want = logprobs(model, prompt + reply.ids)[len(prompt) - 1 : -1]
        chosen = want[np.arange(NEW), reply.ids]
        np.testing.assert_allclose(reply.logprobs, chosen, atol=1e-5)
        assert (want.max(-1) - chosen < 1e-5).all()
    assert engine.num_free_pages == 6 - engine.num_cached_pages


@pytest.mark.parametrize("num_top", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_returns_trunk_logprobs_for_drafted_tokens(num_top):
    model, prompts = drafting_model(), base_prompts()
    sampling = dataclasses.replace(
        GREEDY, temperature=HOT, seed=1, top_logprobs=num_top, max_tokens=NEW
    )
    engine = make_engine(model, num_pages=6)
    for prompt, reply in zip(prompts, engine.generate(prompts, sampling)):
        want = logprobs(model, prompt + reply.ids, HOT)[len(prompt) - 1 : -1]
        np.testing.assert_allclose(reply.logprobs, want[np.arange(NEW), reply.ids], atol=1e-5)
        tops = [[value for _, value in top] for top in reply.top]
        np.testing.assert_allclose(tops, np.sort(want)[:, ::-1][:, :num_top], atol=1e-5)
    assert sum(engine.stats.accepted[1:])


def joint_probs(model, prompt, sampling):
    """Returns probabilities [v v v] of the three tokens after a prompt."""
    v = model.cfg.vocab_size
    pairs = np.stack(np.meshgrid(np.arange(v), np.arange(v), indexing="ij"), -1).reshape(-1, 2)
    ids = np.concatenate([np.tile(prompt, (len(pairs), 1)), pairs], 1)
    logits = np.asarray(forward(glm5.params_of(model), ids, cfg=model.cfg).logits[:, -3:], float)
    weights = np.exp((logits - logits.max(-1, keepdims=True)) / sampling.temperature)
    if sampling.top_k:
        smallest = np.sort(weights, -1)[..., -sampling.top_k, None]
        weights = np.where(weights >= smallest, weights, 0)
    first, second, third = np.moveaxis(weights / weights.sum(-1, keepdims=True), 1, 0)
    first, second = first[0], second.reshape(v, v, v)[:, 0]
    return first[:, None, None] * second[:, :, None] * third.reshape(v, v, v)


@pytest.mark.slow
@pytest.mark.parametrize(
    "noise, temperature, top_k, min_rate, max_rate, total",
    [
        (1.0, 2.5, 0, 0.3, 0.4, 600),
        pytest.param(1.0, 2.5, 0, 0.3, 0.4, 3000, marks=pytest.mark.slow),
        pytest.param(0.0, 8.0, 9, 0.65, 0.8, 3000, marks=pytest.mark.slow),
    ],
)
def test_samples_from_distribution_of_model(noise, temperature, top_k, min_rate, max_rate, total):
    """Chi-square test of the three tokens after a prompt, whether they were drafted or not."""
    model, prompt = drafting_model(12, noise), [1, 2, 3, 4]
    sampling = Sampling(temperature=temperature, top_k=top_k, max_tokens=4)
    engine = make_engine(model, 2, max_num_seqs=8)  # few rows need few programs
    drawn = np.array([reply.ids[:3] for reply in engine.generate([prompt] * total, sampling)])
    accepted = np.array(engine.stats.accepted)
    rate = accepted @ (0, 1, 2) / accepted.sum() / 2
    assert min_rate < rate < max_rate
    probs = joint_probs(model, prompt, sampling)
    v = model.cfg.vocab_size
    counts = np.zeros((v, v, v))
    np.add.at(counts, tuple(drawn.T), 1)
    for axes in ((1, 2), (0, 2), (0, 1), (0,), (2,), ()):
        assert is_plausible(counts.sum(axes).ravel(), probs.sum(axes).ravel(), total)
    # The test detects another distribution.
    other = joint_probs(model, prompt, dataclasses.replace(sampling, temperature=temperature / 2))
    assert not is_plausible(counts.ravel(), other.ravel(), total)


def test_rejects_drafts_without_mtp_layer():
    model = drafting_model()
    cfg = dataclasses.replace(model.cfg, num_nextn_predict_layers=0)
    params = {k: v for k, v in glm5.params_of(model).items() if k != "mtp"}
    with pytest.raises(
        ValueError, match="num_speculative_tokens is 2, and the model has no MTP layer; use 0"
    ):
        make_engine(glm5.Glm5(cfg, params=params), 2)


def test_moved_pages_hold_those_of_drafting_layer():
    """Drafts after them are accepted as often as after a prefill of this engine."""
    model, prompt = drafting_model(), [*base_prompts()[0], 5, 7, 9, 11, 5, 7, 9]
    sampling = dataclasses.replace(GREEDY, max_tokens=NEW)
    sender, receiver, alone = (make_engine(model) for _ in range(3))
    sender.generate([prompt], dataclasses.replace(GREEDY, max_tokens=0))
    part = sender.read_prefix(prompt, 0)
    assert part is not None and receiver.write_prefix(prompt, part, 0) == part.count
    for engine in (alone, receiver):
        engine.generate([prompt], sampling)
    assert receiver.stats.cached_tokens == part.count * sender.page_size > 0
    assert receiver.stats.accepted == alone.stats.accepted
    assert sum(receiver.stats.accepted[1:]) > 0
