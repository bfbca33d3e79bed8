"""Runs an agent: a model at a chat API that calls tools and receives their results until it answers.

    async with ChatClient("http://127.0.0.1:8000") as client:
        agent = Agent(client, Toolbox({...}), TokenCounter(tokenizer))
        trace = await agent(task)
        reward = await verifier(task, trace.attempt)

Errors:

- A call that cannot be parsed ends the attempt as the policy's mistake, as in rollouts in the trainer's process
  (`rl.rollouts.rollout`), unless `LoopConfig.ends_on_broken_call` is false.
- For other mistakes of the model the tool result is an error message, and the attempt continues: an unknown tool, or one
  that fails or takes too long.
- A call without a name is text, for servers too, and hence the final reply.
- Errors of the environment raise: `ServerError` for the server, also if it never replied, and `ToolError` for a tool.
"""

import asyncio
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_jax.agents.client import REFUSED, ChatBackend
from glm5_jax.agents.context import Context, ContextConfig, Counter
from glm5_jax.data.conversation import read_json
from glm5_jax.inference.client import ServerError
from glm5_jax.rl.rollouts.rollout import ToolError, Tools
from glm5_jax.rl.types import Attempt, Message, Task
from glm5_jax.text.messages import is_unparsed
from glm5_jax.text.tool_calls import ToolCall

# Reasons why a trace ends: an answer, a reply that was cut off, a limit of `LoopConfig`, a call that cannot be parsed, or
# a server that rejects the conversation.
ANSWER, CUT_OFF, TURNS, TOKENS, TIMEOUT = "answer", "length", "max_turns", "max_tokens", "timeout"
BROKEN_CALL, REJECTED = "broken_call", "refused"
MAX_QUOTED = 200  # characters of a broken call that an error quotes


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Limits of an attempt. Raises ValueError if a limit is not positive.

    Attributes:
      max_turns: maximum number of replies.
      max_tokens: maximum tokens of the task, all replies with calls and all results, discarded ones included; a reply
        gets at most the rest.
      reply_tokens: maximum tokens of one reply; None: the rest of max_tokens.
      timeout_s: time limit of the attempt, in seconds.
      tool_timeout_s: time limit of a tool call, in seconds.
      ends_on_broken_call: whether a call that cannot be parsed ends the attempt, without a reward; otherwise its result
        is an error message.
      context: selection of the messages that each request sends.
    """

    max_turns: int = 100  # not disclosed
    max_tokens: int = 202_752  # GLM-5 B.2: the context of HLE with tools
    reply_tokens: int | None = None
    timeout_s: float = 7200.0  # GLM-5 B.2: of Terminal-Bench 2.0
    tool_timeout_s: float = 60.0
    ends_on_broken_call: bool = True  # GLM-4.5 3.2
    context: ContextConfig = ContextConfig()

    def __post_init__(self):
        for name in ("max_turns", "max_tokens", "reply_tokens", "timeout_s", "tool_timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}; it must be positive")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """Result of an attempt.

    Attributes:
      messages: all replies and results after the task's messages, also those that later requests left out.
      ended: reason of the end, one of `ANSWER` and the constants after it.
      error: details of the end; empty: none.
      restarts: numbers of the replies before which the context was reset to the task.
      failures: failures of tools that are not mistakes in the call.
    """

    messages: tuple[Message, ...]
    ended: str
    error: str = ""
    restarts: tuple[int, ...] = ()
    failures: tuple[str, ...] = ()

    @property
    def attempt(self) -> Attempt:
        """The attempt for a verifier. It counts as cut off unless the policy ended it, by an answer or a broken call."""
        stopped = self.ended in (ANSWER, BROKEN_CALL)
        return Attempt(
            messages=self.messages, finish_reason="stop" if stopped else "length", error=self.error
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatAgent:
    """Agent that attempts tasks, concurrently if needed.

    Attributes:
      client: chat API of the model.
      tools: tools that reply to calls.
      counter: counter of the tokens of messages.
      config: limits.
      fields: fields of every request, such as the temperature.
    """

    client: ChatBackend
    tools: Tools
    counter: Counter
    config: LoopConfig = LoopConfig()
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    async def __call__(self, task: Task) -> Trace:
        """Runs an attempt. Raises ValueError if the task is too long, ServerError and ToolError."""
        return await self.begin(task).run()

    def begin(self, task: Task) -> "ChatEpisode":
        """Returns an attempt that the caller runs and may end. Raises ValueError if the task is too long."""
        return ChatEpisode(self, task)


class ChatEpisode:
    """Running attempt."""

    def __init__(self, agent: ChatAgent, task: Task):
        self._agent, self._config, self._task = agent, agent.config, task
        self._context = Context(self._config.context, task, agent.counter)
        if self._context.total >= self._config.max_tokens:
            raise ValueError(
                f"task {task.id!r} has {self._context.total} tokens, and max_tokens is {self._config.max_tokens}; raise it"
            )
        self._messages: list[Message] = []
        self._failures: list[str] = []

    async def run(self) -> Trace:
        """Runs the attempt to its end. Raises ServerError and ToolError."""
        try:
            async with asyncio.timeout(self._config.timeout_s) as limit:
                return await self._run()
        except TimeoutError:
            if not limit.expired():
                raise
            return self.end_by_timeout()

    def end_by_timeout(self) -> Trace:
        """Returns the trace of an attempt whose time is over.

        Raises ServerError if even the first reply is missing, because then the server took all of the time.
        """
        if not self._messages:
            raise ServerError("no reply has arrived within the time limit of the task")
        return self.trace(TIMEOUT)

    async def _run(self) -> Trace:
        for turn in range(self._config.max_turns):
            if self._context.total >= self._config.max_tokens:
                return self.trace(TOKENS)
            try:
                choice = await self._ask()
            except ServerError as error:
                # A rejected first request is not the policy's fault. Later ones hold the policy's messages.
                if turn and error.status in REFUSED:
                    return self.trace(REJECTED, str(error))
                raise
            # A reply: the end, or calls to run.
            reply, calls = _read(choice)
            self._messages.append(reply)
            if choice["finish_reason"] == "length":
                return self.trace(CUT_OFF)
            if not calls:
                return self.trace(ANSWER)
            problem = next((call.problem for call in calls if call.problem), None)
            if problem and self._config.ends_on_broken_call:
                return self.trace(BROKEN_CALL, problem)
            if turn == self._config.max_turns - 1:
                break
            results = await self._run_calls(calls, reply)
            self._messages += results
            self._context.add([reply, *results])
        return self.trace(TURNS)

    async def _ask(self) -> dict:
        remaining = self._config.max_tokens - self._context.total
        fields = dict(
            self._agent.fields, max_tokens=min(remaining, self._config.reply_tokens or remaining)
        )
        if self._task.tools:
            fields["tools"] = list(self._task.tools)
        if self._task.thinking is not None:
            option = {"enable_thinking": self._task.thinking}
            fields["chat_template_kwargs"] = fields.get("chat_template_kwargs", {}) | option
        return await self._agent.client.chat(self._context.messages(), **fields)

    async def _run_calls(self, calls: Sequence[ToolCall], reply: Message) -> list[Message]:
        """Runs the calls concurrently, and returns their results in order.

        Raises the first ToolError after all calls have ended.
        """
        results = await asyncio.gather(*map(self._run_call, calls), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        ids = [call.get("id") for call in reply["tool_calls"]]
        return [
            {"role": "tool", "content": result} | ({"tool_call_id": i} if i else {})
            for result, i in zip(results, ids)
        ]

    async def _run_call(self, call: ToolCall) -> str:
        if call.problem:
            return f"Error: {call.problem}"
        start = time.monotonic()
        try:
            async with asyncio.timeout(self._config.tool_timeout_s) as limit:
                return await self._agent.tools(self._task, call)
        except ToolError:
            raise
        except Exception as error:
            if limit.expired():
                reason = f"{call.name} gave no result within {self._config.tool_timeout_s:g} s"
            else:
                reason = f"{call.name} failed: {type(error).__name__}: {error}"
        self._failures.append(f"{reason} (after {time.monotonic() - start:.1f} s)")
        return f"Error: {reason}"

    def trace(self, ended: str, error: str = "") -> Trace:
        """Returns the trace of the attempt so far."""
        restarts = tuple(self._context.restarts)
        return Trace(
            messages=tuple(self._messages),
            ended=ended,
            error=error,
            restarts=restarts,
            failures=tuple(self._failures),
        )


def _read(choice: Mapping[str, Any]) -> tuple[Message, list[ToolCall]]:
    """Returns a reply as a message that every server accepts, and its calls. Raises ServerError if it is invalid."""
    if choice.get("finish_reason") not in ("stop", "tool_calls", "length"):
        raise ServerError(f"the reply ended by {choice.get('finish_reason')!r}")
    # JSON can hold unpaired surrogates, which no tokenizer encodes.
    text = json.dumps(choice["message"], ensure_ascii=False).encode("utf-8", "replace")
    message = json.loads(text)
    if message.get("reasoning"):  # as vLLM and OpenRouter call it
        message["reasoning_content"] = message.get("reasoning_content") or message["reasoning"]
    for name in ("content", "reasoning_content"):
        if not isinstance(message.get(name), str | None):
            raise ServerError(f"the reply has {name} {message[name]!r:.200}, which is no text")
    fields = {
        name: message[name]
        for name in ("content", "reasoning_content", "tool_calls")
        if message.get(name)
    }
    reply = {"role": "assistant", "content": None, **fields}
    if "</think>" in (reply["content"] or ""):
        reply.setdefault("reasoning_content", "")  # otherwise content would be parsed as reasoning
    if "tool_calls" not in reply:
        return reply, []
    calls = []
    try:
        for call in reply["tool_calls"]:
            function = call["function"]
            if not (isinstance(function["name"], str) and function["name"]):
                raise TypeError("it names no function")
            if not isinstance(call.get("id"), str | None):
                raise TypeError("its id is no text")
            if call.get("type") not in ("function", None):
                raise TypeError("it is no call of a function")
            calls.append(_call(function["name"], function.get("arguments") or "{}"))
    except (TypeError, KeyError, AttributeError):
        raise ServerError(f"the reply has invalid calls: {reply['tool_calls']!r:.200}") from None
    reply["tool_calls"] = list(map(_make_sendable, reply["tool_calls"], calls))
    return reply, calls


def _make_sendable(sent: Mapping[str, Any], call: ToolCall) -> Mapping[str, Any]:
    """Returns a call of a reply in a form that servers accept in the next request.

    They reject fields that only some servers send, such as `index`. They reject arguments that are not an object, except
    the text of a call that they could not parse. The result of the call quotes the original text.
    """
    is_accepted = call.problem is None or is_unparsed(call.text)
    function = {"name": call.name, "arguments": call.text if is_accepted else "{}"}
    id_ = {"id": sent["id"]} if sent.get("id") else {}
    return {**id_, "type": "function", "function": function}


def _call(name: str, arguments: str | Mapping) -> ToolCall:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if is_unparsed(text):
        return ToolCall(name, {}, f"the call cannot be parsed: {text[:MAX_QUOTED]}", text)
    try:
        value = read_json(text)
        problem = None if isinstance(value, dict) else "the arguments are not an object"
    except ValueError as error:
        problem = str(error)
    if problem:
        return ToolCall(name, {}, f"{problem}: {text[:MAX_QUOTED]}", text)
    return ToolCall(name, value, None, text)
