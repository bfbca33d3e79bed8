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


def test_counts_steps_and_tokens():
    """The first token belongs to the prompt. A step that begins with at most two tokens to go is left out."""
    accepted = np.array([[3, 1, 1, 2, 1, 0], [1, 3, 3, 1, 0, 0], [2, 3, 3, 0, 0, 0]])
    result = acceptance.count(accepted, CONFIG)
    np.testing.assert_array_equal(result.steps, [4, 3, 3])  # 8 5 4 3 to go; 8 7 4; 8 6 3
    np.testing.assert_array_equal(result.tokens, [7, 7, 8])
    assert result.length == 22 / 10
    assert result.accept_rates == (7 / 10, 5 / 10)
    assert result.length == pytest.approx(1 + sum(result.accept_rates))
    assert 7 / 4 <= result.low < result.length < result.high <= 8 / 3


def test_interval_is_over_prompts():
    """Equal prompts give no uncertainty, however their steps differ."""
    result = acceptance.count(np.tile([3, 1, 1, 3], (50, 1)), CONFIG)
    assert result.low == result.length == result.high == 2
    mixed = np.concatenate([np.tile([1] * 8, (50, 1)), np.tile([3, 3, 2, 0, 0, 0, 0, 0], (50, 1))])
    result, fewer = (acceptance.count(rows, CONFIG) for rows in (mixed, mixed[::5]))
    assert fewer.length == result.length
    assert fewer.high - fewer.low > 1.5 * (result.high - result.low)


def test_rejects_texts_that_end_at_once():
    with pytest.raises(ValueError, match="every text ended before a verification could be counted"):
        acceptance.count(np.zeros((3, 0), int), CONFIG)


@functools.cache
def perfect_params():
    """Returns a trunk and an MTP layer that both predict the next token from the current one."""
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
def test_accepts_all_perfect_drafts(temperature):
    config = dataclasses.replace(CONFIG, temperature=temperature)
    result = accepted_length(perfect_params(), CFG, PROMPTS, config)
    assert result.length == result.low == result.high == 3.0
    assert result.accept_rates == (1.0, 1.0)
    assert result.steps.sum() == 3 * 2


def test_accepts_no_opposite_drafts():
    params = jax.tree.map(np.array, perfect_params())
    params["mtp"]["eh_proj"] *= -1
    result = accepted_length(params, CFG, PROMPTS, CONFIG)
    assert result.length == result.low == result.high == 1.0
    assert result.accept_rates == (0.0, 0.0)


def test_length_is_one_without_mtp():
    cfg = dataclasses.replace(CFG, num_nextn_predict_layers=0)
    result = accepted_length({}, cfg, PROMPTS, CONFIG)
    assert (result.length, result.low, result.high, result.accept_rates) == (1.0, 1.0, 1.0, ())


@pytest.fixture
def corpus(tmp_path):
    """Twenty files of numbered words, split by hash."""
    texts = [" ".join(f"w{i} {n}" for n in range(300)) for i in range(20)]
    for i, text in enumerate(texts):
        (tmp_path / f"{i:02}.txt").write_text(text)
    source = SourceConfig(kind="text", path=str(tmp_path / "*.txt"))
    return DataConfig(sources=(source,), held_out_fraction=0.5), source, texts


def test_prompts_are_parts_of_held_out_documents(corpus):
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
def test_rejects_invalid_config(fields, message):
    with pytest.raises(ValueError, match=message):
        AcceptanceConfig(**fields)
