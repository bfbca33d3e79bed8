"""Tests reasoning_effort of chats: levels are folded as z.ai does, and errors name the invalid field."""

import pytest

from glm5_jax.inference.protocol import Reader
from glm5_jax.runtime.http_server import ApiError
from glm5_jax.text.chat import render_chat
from glm5_jax.text.layouts import VARIANTS
from glm5_jax.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.default()
HI = [{"role": "user", "content": "hi"}]
LEVELS = {"low": "high", "medium": "high", "high": "high", "xhigh": "max", "max": "max"}


def chat(variant="glm5", **body):
    return Reader(TOKENIZER, model="m", variant=variant).chat({"messages": HI, **body}, 0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_folds_levels_of_effort(variant):
    """In layouts without an effort line, the field changes nothing."""
    for effort, level in LEVELS.items():
        line = {"reasoning_effort": level} if VARIANTS[variant].has_effort_line else {}
        want = render_chat(HI, TOKENIZER, variant=variant, **line).ids
        parsed = chat(variant, reasoning_effort=effort)
        assert list(parsed.requests[0].ids) == want and parsed.thinking, effort
    assert chat(variant, reasoning_effort=None) == chat(variant)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("effort", ["none", "minimal"])
def test_effort_of_none_disables_thinking(variant, effort):
    want = render_chat(HI, TOKENIZER, variant=variant, enable_thinking=False).ids
    parsed = chat(variant, reasoning_effort=effort)
    assert list(parsed.requests[0].ids) == want and not parsed.thinking
    off = {"thinking": {"type": "disabled"}}
    assert chat(variant, reasoning_effort=effort, **off) == parsed == chat(variant, **off)


@pytest.mark.parametrize(
    "body, param",
    [
        (dict(reasoning_effort="off"), "reasoning_effort"),
        (dict(reasoning_effort=3), "reasoning_effort"),
        (dict(reasoning_effort="none", thinking={"type": "enabled"}), "reasoning_effort"),
        (
            dict(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}),
            "reasoning_effort",
        ),
        (dict(stop=""), "stop"),
        (dict(stop=["a", ""]), "stop"),
        (dict(tools=[{"type": "function"}]), "tools"),
        (dict(messages=[{"role": "wizard", "content": "x"}]), "messages"),
    ],
)
def test_errors_name_field(body, param):
    with pytest.raises(ApiError) as caught:
        chat(**body)
    assert caught.value.status == 400 and caught.value.param == param
