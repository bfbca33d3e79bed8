"""Tests rendering of later messages of a chat, which has the same tokens as the end of the complete chat."""

import pytest

from glm5_jax.text.chat import begins_in_thinking, render_chat
from glm5_jax.text.layouts import VARIANTS
from glm5_jax.text.messages import ChatError
from glm5_jax.text.tokenizer import Tokenizer
from tests.text.random_chats import Chats

TOKENIZER = Tokenizer.default()


@pytest.mark.parametrize("variant", [name for name in VARIANTS if VARIANTS[name].keeps_reasoning])
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_rest_equals_end_of_complete_chat(variant, thinking, count):
    chats, differs = Chats(seed=3), 0
    for _ in range(count):
        messages, tools = chats.messages(), chats.tools()
        options = {"clear_thinking": False, "enable_thinking": thinking, "variant": variant}
        rendered = render_chat(messages, TOKENIZER, tools=tools, **options)
        before = -1
        for first in range(len(messages) + 1):
            rest = render_chat(messages, TOKENIZER, tools=tools, first=first, **options)
            assert rendered.text.endswith(rest.text) and len(rest.text) <= len(rendered.text)
            assert rendered.ids[len(rendered.ids) - len(rest.ids) :] == rest.ids
            size = len(rest.ids)
            assert rendered.loss_mask[len(rendered.ids) - size :] == rest.loss_mask
            differs += before >= 0 and size < before
            before = size
        assert rest.text.startswith("<|assistant|>")
    assert differs > count


def test_renders_tool_result_after_call():
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {"a": 2}}]},
        {"role": "tool", "content": "4"},
    ]
    rest = render_chat(messages, TOKENIZER, clear_thinking=False, first=2)
    assert rest.text == "<|observation|><tool_response>4</tool_response><|assistant|><think>"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("thinking", [True, False])
def test_continues_content_as_in_finished_reply(variant, thinking):
    chats, options = Chats(seed=5), {"enable_thinking": thinking, "variant": variant}
    for _ in range(20):
        messages, tools = chats.messages(), chats.tools()
        reply = {"role": "assistant", "content": "To be", "reasoning_content": "I think."}
        chat = [*messages, {"role": "user", "content": "Say."}, reply]
        partial = render_chat(chat, TOKENIZER, tools=tools, continue_final=True, **options)
        finished = [*chat[:-1], {**reply, "content": "To be or not."}]
        closed = render_chat(finished, tools=tools, add_generation_prompt=False, **options).text
        assert closed == partial.text + " or not."
        assert TOKENIZER.decode(partial.ids) == partial.text


@pytest.mark.parametrize("variant", VARIANTS)
def test_continues_reasoning_without_content(variant):
    user = {"role": "user", "content": "2+2?"}
    reply = {"role": "assistant", "content": "", "reasoning_content": "Two and"}
    text = render_chat([user, reply], continue_final=True, variant=variant).text
    assert text.endswith("<think>Two and") and begins_in_thinking(reply, False)
    empty = {"role": "assistant", "content": ""}
    for thinking in (True, False):
        options = {"enable_thinking": thinking, "variant": variant}
        prompt = render_chat([user], **options).text
        assert render_chat([user, empty], continue_final=True, **options).text == prompt
        assert begins_in_thinking(empty, thinking) == thinking


def test_rejects_continuing_user_message_or_call():
    user = {"role": "user", "content": "2+2?"}
    call = {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {}}]}
    for messages, words in (
        ([user], "message 0 has role 'user'"),
        ([user, call], "has tool_calls"),
    ):
        with pytest.raises(ChatError, match=words):
            render_chat(messages, continue_final=True)
