"""Asks for text in a schema: from a model at a chat API, from a record of replies, or from rules.

async with ChatClient(url) as client:
    writer = RecordingWriter(ChatWriter(client), "replies.jsonl")
    value = await writer.ask(WriterPrompt(kind="clarity", text="..."), schema)

A stage names the kind of each prompt, and passes the data of its prompt, so that rules can answer without a model.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jsonschema
from jsonschema.exceptions import best_match

from glm5_jax.agents.client import ChatBackend
from glm5_jax.data.conversation import read_json
from glm5_jax.inference.client import ServerError
from glm5_jax.runtime.files import read_lines


class WriterError(RuntimeError):
    """Raised if a writer has no valid reply; a stage drops the item, with this as the reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriterPrompt:
    """Request to a writer.

    Attributes:
      kind: name of the request, such as "clarity".
      text: prompt of a model.
      data: values in the text, for rules.
      attempt: number of the request among equal ones, for several votes.
    """

    kind: str
    text: str
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    attempt: int = 0


class Writer(Protocol):
    """Source of replies in a schema."""

    async def ask(self, prompt: WriterPrompt, schema: Mapping) -> Any:
        """Returns a value of the JSON schema. Raises WriterError."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatWriter:
    """Writer that is a model at a chat API.

    Attributes:
      client: chat API of the model.
      fields: fields of every request.
      attempts: maximum number of requests for a valid reply.
    """

    client: ChatBackend
    fields: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"max_tokens": 4096})
    attempts: int = 3

    async def ask(self, prompt: WriterPrompt, schema: Mapping) -> Any:
        """Returns the JSON value of the reply. Raises WriterError after the last attempt."""
        instruction = (
            "Answer with one JSON value and nothing else, no fence around it. It must fit this JSON schema:\n"
            + json.dumps(schema, sort_keys=True)
        )
        messages = [
            {"role": "system", "content": instruction},
            {"role": "user", "content": prompt.text},
        ]
        problem = ""
        for _ in range(self.attempts):
            try:
                choice = await self.client.chat(messages, **self.fields)
                if choice.get("finish_reason") != "stop":
                    raise ValueError(f"it ended by {choice.get('finish_reason')!r}")
                content = choice["message"].get("content")
                if not isinstance(content, str | None):  # such as a list of parts
                    raise ValueError(f"its content is {content!r:.200}, which is no text")
                return check_reply(read_json(content or ""), schema)
            except (ServerError, ValueError) as error:
                problem = str(error)
        raise WriterError(f"no valid reply to {prompt.kind} in {self.attempts} attempts: {problem}")


class RecordedWriter:
    """Writer that replays a JSON-lines file of {"request": hash, "reply": value}."""

    def __init__(self, path: str | os.PathLike):
        self._path = path
        self._replies: dict[str, Any] = {}
        for line in read_lines(path):
            row = read_json(line.content)
            if not isinstance(row, dict) or not {"request", "reply"} <= row.keys():
                raise ValueError(
                    f"{path}, row {line.number} lacks request or reply; record it again"
                )
            self._replies[row["request"]] = row["reply"]

    async def ask(self, prompt: WriterPrompt, schema: Mapping) -> Any:
        """Returns the recorded reply. Raises WriterError if there is none, or if the schema has changed."""
        key = request_hash(prompt, schema)
        if key not in self._replies:
            raise WriterError(
                f"{self._path} has no reply to {prompt.kind} {key[:12]}; record it with a server"
            )
        try:
            return check_reply(self._replies[key], schema)
        except ValueError as error:
            raise WriterError(f"{self._path}: the reply {key[:12]} is invalid: {error}") from None


class RecordingWriter:
    """Writer that passes requests on, and appends each reply to a file for `RecordedWriter`."""

    def __init__(self, writer: Writer, path: str | os.PathLike):
        self._writer, self._path = writer, pathlib.Path(path)

    async def ask(self, prompt: WriterPrompt, schema: Mapping) -> Any:
        """Returns the reply of the other writer, after it is on disk."""
        reply = await self._writer.ask(prompt, schema)
        row = {"request": request_hash(prompt, schema), "kind": prompt.kind, "reply": reply}
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row, sort_keys=True) + "\n")
        return reply


class RuleWriter:
    """Writer without a model: a function of the prompt's data for each kind of prompt."""

    def __init__(self, rules: Mapping[str, Callable[[Mapping[str, Any]], Any]]):
        self._rules = rules

    async def ask(self, prompt: WriterPrompt, schema: Mapping) -> Any:
        """Returns what the rule says. Raises WriterError if the kind has no rule, or the rule no valid answer."""
        if prompt.kind not in self._rules:
            raise WriterError(f"no rule for {prompt.kind!r}; known are {', '.join(self._rules)}")
        try:
            return check_reply(self._rules[prompt.kind](prompt.data), schema)
        except ValueError as error:
            raise WriterError(
                f"the rule for {prompt.kind} gives no valid answer: {error}"
            ) from None


def request_hash(prompt: WriterPrompt, schema: Mapping) -> str:
    """Returns the sha256 of a request; the data of a prompt are in its text."""
    request = [prompt.kind, prompt.text, prompt.attempt, schema]
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def check_reply(value: Any, schema: Mapping) -> Any:
    """Returns a reply that fits the schema. Raises ValueError otherwise."""
    error = best_match(jsonschema.Draft202012Validator(schema).iter_errors(value))
    if error is not None:
        path = ".".join(map(str, error.absolute_path))
        raise ValueError(f"{path or 'the reply'}: {error.message[:200]}")
    return value
