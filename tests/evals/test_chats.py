"""A model in chats: replies in the order of the requests, their reasoning, and where they end."""

import jax
import numpy as np
import pytest

from glm5_jax.evals.chats import ChatPrompt, generate_answers
from glm5_jax.model import glm5
from glm5_jax.parallel.tree import flatten, unflatten
from glm5_jax.text.chat import render_chat
from glm5_jax.text.layouts import VARIANTS
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.text.tool_calls import parse_reply
from tests.model.small import one_layer

TOKENIZER = Tokenizer.default()
CFG = one_layer(num_nextn_predict_layers=0)


def token(text: str) -> int:
    """Returns the id of a marker or of a letter."""
    return TOKENIZER.special_ids.get(text) or TOKENIZER.encode(text)[0]


FOLLOWS = {"<think>": "x", "x": "y", "y": "</think>", "</think>": "z", "z": "<|user|>"}
FOLLOWS["<|user|>"] = "z"
# All batches have two rows as long as this one, so they share one program.
LONGEST = "a longer question than the others"


def params(follows=FOLLOWS):
    """Returns layers that add nothing, and a head that maps each token to the token that follows it."""
    rng = np.random.default_rng(0)
    flat = flatten(jax.tree.map(lambda x: np.zeros(x.shape, np.float32), glm5.abstract_params(CFG)))
    vocabulary = rng.standard_normal((CFG.vocab_size, CFG.hidden_size)).astype(np.float32)
    head = np.zeros((CFG.vocab_size, CFG.hidden_size), np.float32)
    for before, after in follows.items():
        head[token(after)] += vocabulary[token(before)]
    weights = {"embed/weight": vocabulary, "lm_head/weight": head.T}
    return unflatten(flat | weights | {"final_norm": np.ones(CFG.hidden_size, np.float32)})


def request(text, **options):
    return ChatPrompt(messages=({"role": "user", "content": text},), **options)


def generate(requests, follows=FOLLOWS):
    return generate_answers(
        params(follows), CFG, TOKENIZER, [request(LONGEST), *requests], 8, batch_size=2
    )


def test_replies_keep_order_of_requests():
    requests = [request(LONGEST), request("short", enable_thinking=False), request("third")]
    answers = generate(requests[1:])
    for expected, answer in zip(requests, answers):
        assert answer.prompt == expected.prompt(TOKENIZER)
        assert answer.reply.content == "z" and answer.reply.stopped_by == "<|user|>"
        assert answer.seconds > 0
    assert [TOKENIZER.decode(answer.ids) for answer in answers] == [
        "xy</think>z<|user|>",
        "z<|user|>",
        "xy</think>z<|user|>",
    ]
    assert [answer.num_reasoning for answer in answers] == [3, 0, 3]
    assert answers[0].reply.message == {
        "role": "assistant",
        "content": "z",
        "reasoning_content": "xy",
    }
    silent = {"role": "assistant", "content": "z", "reasoning_content": ""}
    assert answers[1].reply.message == silent


def test_counts_reply_that_is_cut_off_as_reasoning():
    _, answer = generate([request("q")], FOLLOWS | {"y": "x"})
    assert TOKENIZER.decode(answer.ids) == "xyxyxyxy"
    assert answer.num_reasoning == 8 and answer.reply.stopped_by is None


def test_next_prompt_holds_previous_reply():
    first = request("q", clear_thinking=False)
    _, answer = generate([first])
    messages = (*first.messages, answer.reply.message, {"role": "user", "content": "more"})
    prompt = ChatPrompt(messages=messages, clear_thinking=False).prompt(TOKENIZER)
    history = answer.prompt + answer.ids
    assert prompt[: len(history)] == history


@pytest.mark.parametrize(
    ("written", "content", "names"),
    [
        ("Close it with </think> so.", "Close it with </think> so.", []),
        ("<think>a</think>b</think>c", "b</think>c", []),
        ("So <tool_call></tool_call>", "So <tool_call></tool_call>", []),
        (
            "So<tool_call><arg_key>a</arg_key><arg_value>1",
            "So<tool_call><arg_key>a</arg_key><arg_value>1",
            [],
        ),
        (
            "<tool_call>f<arg_key>a</arg_key><arg_value>NaN</arg_value></tool_call><tool_call></tool_call>",
            "<tool_call></tool_call>",
            ["f"],
        ),
    ],
)
def test_rendered_reply_stays_in_its_turn(written, content, names):
    message = parse_reply(written, [{"name": "f"}], thinking=False).message
    assert [call["name"] for call in message.get("tool_calls", [])] == names
    question = {"role": "user", "content": "q"}
    for variant in VARIANTS:
        rendered = render_chat([question, message, question], TOKENIZER, variant=variant)
        [span] = [s for s in rendered.spans if (s.message, s.part) == (1, "content")]
        assert rendered.text[span.start : span.end].strip() == content
        assert rendered.ids.count(TOKENIZER.special_ids["<tool_call>"]) == len(names)


def test_rejects_prompt_too_long():
    with pytest.raises(ValueError, match="and 1024 new ones exceed the model's 1024 positions"):
        generate_answers({}, CFG, TOKENIZER, [request("q")], 1024)
    with pytest.raises(ValueError, match="0 rows"):
        generate_answers({}, CFG, TOKENIZER, [], 8)
