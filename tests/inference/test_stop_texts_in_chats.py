"""Tests stop texts in chats, whose content has no blanks at its edges: the content contains no part of a stop text."""

import pytest
from hypothesis import given, settings, strategies as st

from glm5_jax.inference.protocol import ParsedRequest
from glm5_jax.inference.replies import Chats, Origin
from glm5_jax.inference.request import Handle, Request, Token
from glm5_jax.inference.sampling import Sampling
from glm5_jax.inference.stop_checker import StopChecker
from glm5_jax.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.default()
LOOK = {"type": "function", "function": {"name": "look"}}


def read_content(text, stop, thinking=False, is_streamed=False):
    """Returns the content of a chat whose model writes `text`, and whether it was stopped."""
    close = TOKENIZER.special_ids["</think>"] if thinking else None
    sampling = Sampling(stop=stop, stop_after=close, stop_skips_blanks=True)
    stops = StopChecker(sampling, 10_000, tokenizer=TOKENIZER)
    handle = Handle(Request([1], sampling))
    parsed = ParsedRequest(requests=(handle.request,), tools=(LOOK,), thinking=thinking)
    chats = Chats(parsed, [handle], Origin("m", 0), TOKENIZER)
    content, end = "", None
    ids = TOKENIZER.encode(text, parse_special=True)
    for i, token in enumerate(ids):
        end = stops.feed(token)
        last = (None, None) if i < len(ids) - 1 else ("length", None)
        handle.append_output([Token(token, -1.0, 0)], *(end or last))
        if is_streamed:
            for chunk in chats.piece(0):
                content += chunk["choices"][0]["delta"].get("content") or ""
        if end:
            break
    if not is_streamed:
        content = chats.complete()["choices"][0]["message"]["content"]
    return content or "", end is not None


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("text", "stop", "content"),
    [
        ("It rains.\nObservation:\nyes", "\nObservation:\n", "It rains."),
        ("It rains. END ", "END ", "It rains."),
        ("\n\nQ: why", "\n\nQ", "Q: why"),  # blanks before the content do not belong to it
        ("a\n\nQ: why", "\n\nQ", "a"),
        ("a\n\nb", "\n\n", "a"),
        ("a", "\n\n", "a"),
        ("xaa\n\n", "a\n", "xa"),
        ("Q is Q", "\n\nQ", "Q is Q"),
        ("It is a<tool_call>look<arg_key>k</arg_key><arg_value>a \nb", "a \n", "It is a"),
    ],
)
def test_removes_stop_text_from_content(text, stop, content, is_streamed):
    assert read_content(text, (stop,), is_streamed=is_streamed)[0].rstrip() == content
    content_after_reasoning = read_content(
        f"why\n</think>{text}", (stop,), thinking=True, is_streamed=is_streamed
    )[0]
    assert content_after_reasoning.rstrip() == content


@given(
    text=st.text("ab \n", max_size=12),
    stop=st.text("ab \n", min_size=1, max_size=4),
    is_streamed=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_content_ends_before_first_stop(text, stop, is_streamed):
    content, is_stopped = read_content(text, (stop,), is_streamed=is_streamed)
    assert is_stopped == (stop in text.lstrip())
    assert content.rstrip() == text.lstrip().partition(stop)[0].rstrip()
