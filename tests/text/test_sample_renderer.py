"""Tests that rendering all samples of a conversation together gives the same tokens, in the time of one sample."""

import time

import pytest

from glm5_jax.text.layouts import VARIANTS
from glm5_jax.text.thinking import SampleRenderer, split_samples
from glm5_jax.text.tokenizer import Tokenizer
from tests.text.random_chats import Chats

TOKENIZER = Tokenizer.default()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("count", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_renders_samples_as_if_separate(variant, count):
    chats, num_turns = Chats(seed=variant), 0
    for _ in range(count):
        messages, tools = chats.messages(), chats.tools()
        if all(message["role"] != "assistant" for message in messages):
            continue
        for mode in ("interleaved", "turn_level"):
            renderer, samples = (
                SampleRenderer(TOKENIZER, tools, variant),
                split_samples(messages, mode),
            )
            for sample in (*samples, *reversed(samples)):
                ours, separate = renderer.render(sample), sample.render(TOKENIZER, tools, variant)
                assert ours[:3] == separate[:3]
                spans = [[s for s in rendered.spans if s.message in sample.trained_replies] for rendered in (ours, separate)]  # fmt: skip
                assert spans[0] == spans[1]
            num_turns += len(samples) > 1
    assert num_turns > count / 3


def test_renders_long_chat_in_linear_time():
    turn = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So.", "reasoning_content": "Well."},
    ]
    samples = split_samples(turn * 300, "interleaved")
    renderer, began = SampleRenderer(TOKENIZER), time.process_time()
    assert len(samples) == 300 and len(renderer.render(samples[-1]).ids) > 1500
    for sample in samples:
        renderer.render(sample)
    assert time.process_time() - began < 2  # ten times as long if each is rendered separately
