"""Tests that check_chats counts long chats in linear time, although the sample of each turn holds all earlier turns."""

import json
import time

import pytest

from glm5_jax.data.chat_data import filter_lines
from glm5_jax.data.conversation import make_records, parse_line
from glm5_jax.text.layouts import VARIANTS
from glm5_jax.text.thinking import MODES, SampleRenderer, split_samples
from glm5_jax.text.tokenizer import Tokenizer
from tests.text.random_chats import Chats

TOKENIZER = Tokenizer.default()


def chat(num_turns):
    return [
        message
        for i in range(num_turns)
        for message in (
            {"role": "user", "content": f"What is {i} and {i}?"},
            {"role": "assistant", "content": f"{2 * i}.", "reasoning_content": "Well."},
        )
    ]


@pytest.mark.parametrize("variant", VARIANTS)
def test_counts_tokens_as_rendered(variant):
    chats, num_samples = Chats(seed=variant), 0
    for _ in range(20):
        messages, tools = chats.messages(), chats.tools()
        if all(message["role"] != "assistant" for message in messages):
            continue
        for mode in ("interleaved", "turn_level"):
            renderer, results = (
                SampleRenderer(TOKENIZER, tools, variant),
                split_samples(messages, mode),
            )
            for sample in (*results, *reversed(results)):
                rendered = sample.render(TOKENIZER, tools, variant)
                assert renderer.count(sample) == (len(rendered.ids), sum(rendered.loss_mask))
            num_samples += len(results)
    assert num_samples > 20


@pytest.mark.parametrize("mode", MODES)
def test_counts_mistake_tokens_as_untrained(mode):
    messages = chat(4)
    messages[3] |= {"error": "it is 2"}
    line = json.dumps({"messages": messages, "mode": mode}).encode()
    [results] = filter_lines(
        [("line 1", line)], TOKENIZER, lambda place, reason: pytest.fail(reason)
    )
    expected = make_records(parse_line(line), TOKENIZER)
    assert results.counts == [(len(one), int(one.loss_mask.sum())) for one in expected]


def test_checks_chat_in_linear_time():
    spent = []
    for num_turns in (100, 800):
        line = json.dumps({"messages": chat(num_turns)}).encode()
        began = time.process_time()
        [results] = filter_lines(
            [("line 1", line)], TOKENIZER, lambda place, reason: pytest.fail(reason)
        )
        spent.append(time.process_time() - began)
        assert len(results.counts) == num_turns and results.counts[-1][0] > 15 * num_turns
    assert spent[1] < 20 * spent[0]  # 64 times as long if each sample is rendered with all turns
