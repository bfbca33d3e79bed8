"""Samples of one conversation laid out together: the same tokens as each by itself, in the time of one of them."""

import time

import pytest

from glm5_jax.text.layouts import VARIANTS
from glm5_jax.text.thinking import SampleRenderer, split_samples
from glm5_jax.text.tokenizer import Tokenizer
from tests.text.random_chats import Chats

TOKENIZER = Tokenizer.default()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("count", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_lays_samples_out_as_each_by_itself(variant, count):
    chats, num_turns = Chats(seed=variant), 0
    for _ in range(count):
        messages, tools = chats.messages(), chats.tools()
        if all(message["role"] != "assistant" for message in messages):
            continue
        for mode in ("interleaved", "turn_level"):
            renderer, found = (
                SampleRenderer(TOKENIZER, tools, variant),
                split_samples(messages, mode),
            )
            for sample in (*found, *reversed(found)):
                ours, alone = renderer.render(sample), sample.render(TOKENIZER, tools, variant)
                assert ours[:3] == alone[:3]
                spans = [[s for s in one.spans if s.message in sample.trained_replies] for one in (ours, alone)]  # fmt: skip
                assert spans[0] == spans[1]
            num_turns += len(found) > 1
    assert num_turns > count / 3


def test_lays_out_a_long_chat_in_the_time_of_its_tokens():
    turn = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So.", "reasoning_content": "Well."},
    ]
    found = split_samples(turn * 300, "interleaved")
    renderer, began = SampleRenderer(TOKENIZER), time.process_time()
    assert len(found) == 300 and len(renderer.render(found[-1]).ids) > 1500
    for sample in found:
        renderer.render(sample)
    assert time.process_time() - began < 2  # ten times as long if each is laid out by itself
