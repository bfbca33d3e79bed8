"""Tests writers: a model at a chat API, recorded replies, and rules."""

import asyncio
import json
from typing import Any

import pytest

from glm5_jax.agents.writers import (
    ChatWriter,
    RecordedWriter,
    RecordingWriter,
    RuleWriter,
    WriterError,
    WriterPrompt,
    request_hash,
)

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
PROMPT = WriterPrompt(kind="count", text="How many?", data={"n": 3})


class ScriptedChat:
    """Chat API that gives prepared replies."""

    def __init__(self, *replies: Any, finish_reason: str = "stop"):
        self.replies, self.finish_reason = list(replies), finish_reason
        self.requests: list[list[dict]] = []

    async def chat(self, messages, **fields) -> dict:
        self.requests.append(list(messages))
        message = {"role": "assistant", "content": self.replies.pop(0)}
        return {"message": message, "finish_reason": self.finish_reason}


def ask(writer, prompt=PROMPT, schema=SCHEMA):
    return asyncio.run(writer.ask(prompt, schema))


def test_asks_model_again_until_reply_fits_schema():
    chat = ScriptedChat("three", '{"n": "3"}', '{"n": 3}')
    assert ask(ChatWriter(client=chat)) == {"n": 3}
    assert len(chat.requests) == 3
    assert json.dumps(SCHEMA, sort_keys=True) in chat.requests[0][0]["content"]
    assert chat.requests[0][1] == {"role": "user", "content": "How many?"}


def test_raises_after_max_attempts():
    with pytest.raises(
        WriterError, match="no valid reply to count in 2 attempts: .*'n' is a required"
    ):
        ask(ChatWriter(client=ScriptedChat("{}", "{}"), attempts=2))
    with pytest.raises(WriterError, match="it ended by 'length'"):
        ask(ChatWriter(client=ScriptedChat('{"n": 3}', finish_reason="length"), attempts=1))


@pytest.mark.parametrize("content", [[{"type": "text", "text": '{"n": 3}'}], {"n": 3}, 3, True])
def test_asks_again_after_content_that_is_no_text(content):
    assert ask(ChatWriter(client=ScriptedChat(content, '{"n": 3}'))) == {"n": 3}


def test_replays_recorded_replies(tmp_path):
    path = tmp_path / "replies.jsonl"
    recording = RecordingWriter(RuleWriter({"count": lambda data: {"n": data["n"]}}), path)
    second = WriterPrompt(kind="count", text="How many?", data={"n": 4}, attempt=1)
    assert [ask(recording), ask(recording, second)] == [{"n": 3}, {"n": 4}]
    recorded = RecordedWriter(path)
    assert [ask(recorded), ask(recorded, second)] == [{"n": 3}, {"n": 4}]
    with pytest.raises(WriterError, match="has no reply to count [0-9a-f]{12}; record it"):
        ask(recorded, WriterPrompt(kind="count", text="How much?"))


def test_rejects_recorded_reply_that_does_not_fit(tmp_path):
    row = {"request": request_hash(PROMPT, SCHEMA), "reply": {"n": "x"}}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(
        WriterError, match="the reply [0-9a-f]{12} is invalid: n: 'x' is not of type"
    ):
        ask(RecordedWriter(tmp_path / "a.jsonl"))


def test_rejects_record_without_reply(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"request": "x"}\n')
    with pytest.raises(ValueError, match="a.jsonl, row 1 lacks request or reply"):
        RecordedWriter(tmp_path / "a.jsonl")


def test_rejects_prompt_without_rule():
    with pytest.raises(WriterError, match="no rule for 'count'; known are size"):
        ask(RuleWriter({"size": lambda data: {}}))
    with pytest.raises(WriterError, match="the rule for count gives no valid answer"):
        ask(RuleWriter({"count": lambda data: {}}))


def test_hashes_text_attempt_and_schema():
    hashes = {
        request_hash(prompt, schema)
        for prompt in (
            PROMPT,
            WriterPrompt(kind="count", text="x"),
            WriterPrompt(kind="count", text="x", attempt=1),
        )
        for schema in (SCHEMA, {"type": "object"})
    }
    assert len(hashes) == 6
