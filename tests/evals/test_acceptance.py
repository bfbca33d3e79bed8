"""Accepted length counts tokens per verification step, and reaches its bounds where it must."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from glm5_jax.data.mixture import DataConfig, document_ids
from glm5_jax.data.sources import SourceConfig, is_held_out
from glm5_jax.evals import acceptance
from glm5_jax.evals.acceptance import AcceptanceConfig, accepted_length, held_out_prompts
from glm5_jax.model import glm5
from glm5_jax.parallel.tree import flatten, unflatten
from glm5_jax.text.tokenizer import Tokenizer
from tests.model.small import one_layer

CONFIG = AcceptanceConfig(num_speculative_tokens=2, num_prompts=3, new_tokens=9)
CFG = one_layer(vocab_size=32)
PROMPTS = np.array([[3, 1, 4], [1, 5, 9], [2, 6, 5]])


def test_what_is_counted():
    """The first token is the prompt's; a step begun with no more than two to go is left out."""
    accepted = np.array([[3, 1, 1, 2, 1, 0], [1, 3, 3, 1, 0, 0], [2, 3, 3, 0, 0, 0]])
    found = acceptance.count(accepted, CONFIG)
    np.testing.assert_array_equal(found.steps, [4, 3, 3])  # 8 5 4 3 to go; 8 7 4; 8 6 3
    np.testing.assert_array_equal(found.tokens, [7, 7, 8])
    assert found.length == 22 / 10
    assert found.accept_rates == (7 / 10, 5 / 10)
    assert found.length == pytest.approx(1 + sum(found.accept_rates))
    assert 7 / 4 <= found.low < found.length < found.high <= 8 / 3


def test_the_interval_is_over_prompts():
    """Prompts that are alike leave no doubt, however their steps differ."""
    found = acceptance.count(np.tile([3, 1, 1, 3], (50, 1)), CONFIG)
    assert found.low == found.length == found.high == 2
    mixed = np.concatenate([np.tile([1] * 8, (50, 1)), np.tile([3, 3, 2, 0, 0, 0, 0, 0], (50, 1))])
    found, fewer = (acceptance.count(rows, CONFIG) for rows in (mixed, mixed[::5]))
    assert fewer.length == found.length
    assert fewer.high - fewer.low > 1.5 * (found.high - found.low)


def test_texts_that_end_at_once_are_refused():
    with pytest.raises(ValueError, match="every text ended before a verification could be counted"):
        acceptance.count(np.zeros((3, 0), int), CONFIG)


@functools.cache
def foreseeing():
    """A trunk and an MTP layer that both say what follows a token from that token alone."""
    draw = np.random.default_rng(0)
    shapes = flatten(glm5.abstract_params(CFG))
    params = unflatten(
        {
            path: np.ones(x.shape, np.float32)
            if "norm" in path
            else 0.1 * draw.standard_normal(x.shape).astype(np.float32)
            for path, x in shapes.items()
        }
    )
    block = params["mtp"]["block"]
    for part in (params["dense_layers"]["mlp"], block["experts"], block["shared"]):
        part["down"][:] = 0
    for part in (params["dense_layers"], block):
        part["attn"]["o"][:] = 0
    params["mtp"]["eh_proj"][:] = np.eye(2 * CFG.hidden_size, CFG.hidden_size)
    return params


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_perfect_drafts_are_all_kept(temperature):
    config = dataclasses.replace(CONFIG, temperature=temperature)
    found = accepted_length(foreseeing(), CFG, PROMPTS, config)
    assert found.length == found.low == found.high == 3.0
    assert found.accept_rates == (1.0, 1.0)
    assert found.steps.sum() == 3 * 2


def test_drafts_of_the_opposite_are_none():
    params = jax.tree.map(np.array, foreseeing())
    params["mtp"]["eh_proj"] *= -1
    found = accepted_length(params, CFG, PROMPTS, CONFIG)
    assert found.length == found.low == found.high == 1.0
    assert found.accept_rates == (0.0, 0.0)


def test_without_mtp_it_is_one():
    cfg = dataclasses.replace(CFG, num_nextn_predict_layers=0)
    found = accepted_length({}, cfg, PROMPTS, CONFIG)
    assert (found.length, found.low, found.high, found.accept_rates) == (1.0, 1.0, 1.0, ())


@pytest.fixture
def corpus(tmp_path):
    """Twenty files of numbered words; which are held out is a hash's choice."""
    texts = [" ".join(f"w{i} {n}" for n in range(300)) for i in range(20)]
    for i, text in enumerate(texts):
        (tmp_path / f"{i:02}.txt").write_text(text)
    source = SourceConfig(kind="text", path=str(tmp_path / "*.txt"))
    return DataConfig(sources=(source,), held_out_fraction=0.5), source, texts


def test_prompts_are_pieces_of_held_out_documents(corpus):
    data, source, texts = corpus
    tokenizer, config = Tokenizer.default(), AcceptanceConfig(num_prompts=6, prompt_tokens=40)
    prompts = held_out_prompts(data, source, tokenizer, config)
    np.testing.assert_array_equal(prompts, held_out_prompts(data, source, tokenizer, config))
    assert prompts.shape == (6, 40)
    documents = [document_ids(text, tokenizer) for text in texts if is_held_out(text, 0.5)]
    homes = [
        i
        for prompt in prompts.tolist()
        for i, ids in enumerate(documents)
        if any(ids[s : s + 40] == prompt for s in range(len(ids)))
    ]
    assert len(homes) == 6  # each inside of one document
    assert len(set(homes)) > 3  # and they are spread over them
    many = dataclasses.replace(config, num_prompts=10_000)
    with pytest.raises(ValueError, match="pieces of 40 tokens; num_prompts is 10000"):
        held_out_prompts(data, source, tokenizer, many)


@pytest.mark.parametrize(
    "fields,message",
    [
        (dict(num_speculative_tokens=0), "num_speculative_tokens is 0; it must be positive"),
        (dict(num_prompts=0), "num_prompts is 0; it must be positive"),
        (dict(new_tokens=5), "new_tokens is 5: .* use at least 6"),
    ],
)
def test_what_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        AcceptanceConfig(**fields)
