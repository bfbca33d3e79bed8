"""An engine that drafts: the same text when greedy, the same distribution when not, and log-probs of the trunk."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.sampling import Sampling
from glm5_jax.model import glm5
from tests.inference.draft_problem import DRAFTS, HOT, NEW, fixture, foresighted, likely
from tests.inference.test_engine import GREEDY

forward = jax.jit(glm5.forward, static_argnames="cfg")


@functools.cache
def foreseeing(vocab_size=None, noise=0.0):
    """A model of one layer whose drafts are often kept, the less the more noise; with vocab_size, of the first
    tokens alone."""
    cfg, params, *_ = fixture()
    params = foresighted(params)
    if vocab_size:
        params["embed"]["weight"] = params["embed"]["weight"][:vocab_size]
        params["lm_head"]["weight"] = params["lm_head"]["weight"][:, :vocab_size]
    weight = params["mtp"]["eh_proj"]
    weight += noise * np.random.default_rng(0).normal(size=weight.shape).astype(np.float32)
    cfg = dataclasses.replace(cfg, vocab_size=vocab_size or cfg.vocab_size, eos_token_id=())
    return glm5.Glm5(cfg, params=params)


def engine(model, num_speculative_tokens=DRAFTS, **options):
    # One width of tables and two of batches: each is another program.
    options = dict(page_size=8, max_length=32, max_num_seqs=2, prefill_chunk=32) | options
    return Engine(
        model, config=EngineConfig(num_speculative_tokens=num_speculative_tokens, **options)
    )


def rows():
    """Returns prompts of different lengths."""
    *_, prompts, _, _ = fixture()
    return [prompts[i, first:].tolist() for i, first in enumerate((0, 4, 2))]


def logprobs(model, ids, temperature=1.0):
    """[t v] of one forward over all of ids, at 32 tokens for one program."""
    row = np.zeros((1, 32), np.int32)
    row[0, : len(ids)] = ids
    logits = forward(glm5.params_of(model), row, cfg=model.cfg).logits[0, : len(ids)]
    return np.asarray(jax.nn.log_softmax(logits / temperature))


def test_text_does_not_depend_on_drafts_prefixes_or_pre_emption():
    """Every token is the trunk's likeliest."""
    model, own = foreseeing(), rows()
    asked = [own[i % 3] + own[(i + 1) % 3][: i % 4] for i in range(12)]
    made = engine(model, num_pages=6)
    replies = made.generate(asked, dataclasses.replace(GREEDY, max_tokens=NEW))
    assert made.num_preempted and made.stats.cached_tokens
    for prompt, reply in zip(asked, replies):
        want = logprobs(model, prompt + reply.ids)[len(prompt) - 1 : -1]
        chosen = want[np.arange(NEW), reply.ids]
        np.testing.assert_allclose(reply.logprobs, chosen, atol=1e-5)
        assert (want.max(-1) - chosen < 1e-5).all()
    assert made.num_free_pages == 6 - made.num_cached_pages


@pytest.mark.parametrize("num_top", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_returns_log_probs_of_the_trunk_for_drafted_tokens(num_top):
    model, own = foreseeing(), rows()
    sampling = dataclasses.replace(
        GREEDY, temperature=HOT, seed=1, top_logprobs=num_top, max_tokens=NEW
    )
    made = engine(model, num_pages=6)
    for prompt, reply in zip(own, made.generate(own, sampling)):
        want = logprobs(model, prompt + reply.ids, HOT)[len(prompt) - 1 : -1]
        np.testing.assert_allclose(reply.logprobs, want[np.arange(NEW), reply.ids], atol=1e-5)
        tops = [[value for _, value in top] for top in reply.top]
        np.testing.assert_allclose(tops, np.sort(want)[:, ::-1][:, :num_top], atol=1e-5)
    assert sum(made.stats.accepted[1:])


def exact(model, prompt, sampling):
    """Probabilities [v v v] of the three tokens behind a prompt."""
    v = model.cfg.vocab_size
    pairs = np.stack(np.meshgrid(np.arange(v), np.arange(v), indexing="ij"), -1).reshape(-1, 2)
    ids = np.concatenate([np.tile(prompt, (len(pairs), 1)), pairs], 1)
    logits = np.asarray(forward(glm5.params_of(model), ids, cfg=model.cfg).logits[:, -3:], float)
    weights = np.exp((logits - logits.max(-1, keepdims=True)) / sampling.temperature)
    if sampling.top_k:
        least = np.sort(weights, -1)[..., -sampling.top_k, None]
        weights = np.where(weights >= least, weights, 0)
    first, second, third = np.moveaxis(weights / weights.sum(-1, keepdims=True), 1, 0)
    first, second = first[0], second.reshape(v, v, v)[:, 0]
    return first[:, None, None] * second[:, :, None] * third.reshape(v, v, v)


@pytest.mark.slow
@pytest.mark.parametrize(
    "noise, temperature, top_k, least, most, total",
    [
        (1.0, 2.5, 0, 0.3, 0.4, 600),
        pytest.param(1.0, 2.5, 0, 0.3, 0.4, 3000, marks=pytest.mark.slow),
        pytest.param(0.0, 8.0, 9, 0.65, 0.8, 3000, marks=pytest.mark.slow),
    ],
)
def test_draws_from_the_models_distribution(noise, temperature, top_k, least, most, total):
    """Chi-square of three tokens behind a prompt, which drafts gave or did not."""
    model, prompt = foreseeing(12, noise), [1, 2, 3, 4]
    sampling = Sampling(temperature=temperature, top_k=top_k, max_tokens=4)
    made = engine(model, 2, max_num_seqs=8)  # few rows take few programs
    drawn = np.array([one.ids[:3] for one in made.generate([prompt] * total, sampling)])
    kept = np.array(made.stats.accepted)
    rate = kept @ (0, 1, 2) / kept.sum() / 2
    assert least < rate < most
    probs = exact(model, prompt, sampling)
    v = model.cfg.vocab_size
    counts = np.zeros((v, v, v))
    np.add.at(counts, tuple(drawn.T), 1)
    for axes in ((1, 2), (0, 2), (0, 1), (0,), (2,), ()):
        assert likely(counts.sum(axes).ravel(), probs.sum(axes).ravel(), total)
    # The test sees a distribution that is another.
    other = exact(model, prompt, dataclasses.replace(sampling, temperature=temperature / 2))
    assert not likely(counts.ravel(), other.ravel(), total)


def test_drafts_need_an_mtp_layer():
    model = foreseeing()
    cfg = dataclasses.replace(model.cfg, num_nextn_predict_layers=0)
    params = {k: v for k, v in glm5.params_of(model).items() if k != "mtp"}
    with pytest.raises(
        ValueError, match="num_speculative_tokens is 2, and the model has no MTP layer; use 0"
    ):
        engine(glm5.Glm5(cfg, params=params), 2)
