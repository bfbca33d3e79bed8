"""An agent: a model behind a chat API that is asked, calls tools, reads what they answer, and is asked again.

    async with ChatClient("http://127.0.0.1:8000") as client:
        agent = Agent(client, Toolbox({...}), TokenCounter(tokenizer))
        trace = await agent(task)
        reward = await verifier(task, trace.attempt)

A call that cannot be parsed ends the attempt by the policy's mistake, as in rollouts in the trainer's process
(`rl.rollout`), unless `LoopConfig.ends_on_broken_call` is false. What else a model does wrong is answered in words, and
it goes on: a tool that is none, fails or takes too long. A call that names nothing is no call but text, to a server too,
and so the reply. What the environment does wrong raises: `ServerError` of the server, which may be that it never
replied, `ToolError` of a tool.
"""

import asyncio
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_jax.agents.client import REFUSED, Chats
from glm5_jax.agents.context import Context, ContextConfig, Counter
from glm5_jax.data.conversation import read_json
from glm5_jax.inference.client import ServerError
from glm5_jax.rl.rollout import ToolError, Tools
from glm5_jax.rl.types import Attempt, Message, Task
from glm5_jax.text.messages import is_unparsed
from glm5_jax.text.tool_calls import ToolCall

# How a trace ends: with an answer, a reply that was cut off, or a limit of `LoopConfig` by its name; or with a call that
# cannot be parsed; or the server refuses to read what has become of the conversation.
ANSWER, CUT_OFF, TURNS, TOKENS, SECONDS = "answer", "length", "max_turns", "max_tokens", "seconds"
BROKEN_CALL, UNREAD = "broken_call", "refused"
SHOWN = 200  # characters of a call that cannot be read


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """Limits of an attempt. Construction refuses what is not positive (ValueError).

    Attributes:
      max_turns: replies.
      max_tokens: of the task, all replies that call and all results, discarded ones too; a reply gets what is left.
      reply_tokens: of one reply, None: what is left.
      seconds: for all of it.
      tool_seconds: that a tool may take.
      ends_on_broken_call: whether a call that cannot be parsed ends the attempt, which is then worth nothing; otherwise
        its result says what is wrong with it.
      context: what of it each request sends.
    """

    max_turns: int = 100  # not disclosed
    max_tokens: int = 202_752  # GLM-5 B.2: the context of HLE with tools
    reply_tokens: int | None = None
    seconds: float = 7200.0  # GLM-5 B.2: of Terminal-Bench 2.0
    tool_seconds: float = 60.0
    ends_on_broken_call: bool = True  # GLM-4.5 3.2
    context: ContextConfig = ContextConfig()

    def __post_init__(self):
        for name in ("max_turns", "max_tokens", "reply_tokens", "seconds", "tool_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}; it must be positive")


@dataclasses.dataclass(frozen=True)
class Trace:
    """What became of a task. messages: behind the task's, all replies and results as they came, whatever was sent of
    them later. ended: see `ANSWER` and what follows it; error: in words, if there is more to say. restarts: numbers of the replies that
    began from the task alone again. failures: of tools, for no fault that they know of in the call."""

    messages: tuple[Message, ...]
    ended: str
    error: str = ""
    restarts: tuple[int, ...] = ()
    failures: tuple[str, ...] = ()

    @property
    def attempt(self) -> Attempt:
        """What a verifier judges: whatever ends by itself, or by a mistake of its own, was not cut off."""
        stopped = self.ended in (ANSWER, BROKEN_CALL)
        return Attempt(self.messages, "stop" if stopped else "length", self.error)


@dataclasses.dataclass(frozen=True)
class Agent:
    """Attempts tasks, as many at once as are asked for. fields: of every request, such as the temperature."""

    client: Chats
    tools: Tools
    counter: Counter
    config: LoopConfig = LoopConfig()
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    async def __call__(self, task: Task) -> Trace:
        """An attempt. ValueError for a task that is too long; ServerError, ToolError."""
        return await self.begin(task).run()

    def begin(self, task: Task) -> "Course":
        """An attempt that is run by itself, by whoever may end it. ValueError for a task that is too long."""
        return Course(self, task)


class Course:
    """An attempt under way."""

    def __init__(self, agent: Agent, task: Task):
        self._agent, self._config, self._task = agent, agent.config, task
        self._context = Context(self._config.context, task, agent.counter)
        if self._context.total >= self._config.max_tokens:
            raise ValueError(
                f"task {task.id!r} has {self._context.total} tokens, and max_tokens is {self._config.max_tokens}; raise it"
            )
        self._messages: list[Message] = []
        self._failures: list[str] = []

    async def run(self) -> Trace:
        """To its end. ServerError, ToolError."""
        try:
            async with asyncio.timeout(self._config.seconds) as limit:
                return await self._run()
        except TimeoutError:
            if not limit.expired():
                raise
            return self.late()

    def late(self) -> Trace:
        """What has become of the task if its time is over now. ServerError if the server has had all of it for the first
        reply, of which nothing can be said."""
        if not self._messages:
            raise ServerError("no reply has come in all the time that the task has")
        return self.trace(SECONDS)

    async def _run(self) -> Trace:
        for turn in range(self._config.max_turns):
            if self._context.total >= self._config.max_tokens:
                return self.trace(TOKENS)
            try:
                choice = await self._ask()
            except ServerError as error:
                # Of the task alone that is no fault of the policy's, which has added all that came after.
                if turn and error.status in REFUSED:
                    return self.trace(UNREAD, str(error))
                raise
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
            results = await self._answer(calls, reply)
            self._messages += results
            self._context.add([reply, *results])
        return self.trace(TURNS)

    async def _ask(self) -> dict:
        left = self._config.max_tokens - self._context.total
        fields = dict(self._agent.fields, max_tokens=min(left, self._config.reply_tokens or left))
        if self._task.tools:
            fields["tools"] = list(self._task.tools)
        if self._task.thinking is not None:
            own = {"enable_thinking": self._task.thinking}
            fields["chat_template_kwargs"] = fields.get("chat_template_kwargs", {}) | own
        return await self._agent.client.chat(self._context.messages(), **fields)

    async def _answer(self, calls: Sequence[ToolCall], reply: Message) -> list[Message]:
        """The results in the order of the calls, which go side by side. ToolError of the first that has one, when all
        have ended."""
        answers = await asyncio.gather(*map(self._use, calls), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        ids = [call.get("id") for call in reply["tool_calls"]]
        return [
            {"role": "tool", "content": answer} | ({"tool_call_id": i} if i else {})
            for answer, i in zip(answers, ids)
        ]

    async def _use(self, call: ToolCall) -> str:
        if call.problem:
            return f"Error: {call.problem}"
        begun = time.monotonic()
        try:
            async with asyncio.timeout(self._config.tool_seconds) as limit:
                return await self._agent.tools(self._task, call)
        except ToolError:
            raise
        except Exception as error:
            if limit.expired():
                told = f"{call.name} gave no answer within {self._config.tool_seconds:g} s"
            else:
                told = f"{call.name} failed: {type(error).__name__}: {error}"
        self._failures.append(f"{told} (after {time.monotonic() - begun:.1f} s)")
        return f"Error: {told}"

    def trace(self, ended: str, error: str = "") -> Trace:
        """What has become of the task up to here."""
        restarts = tuple(self._context.restarts)
        return Trace(tuple(self._messages), ended, error, restarts, tuple(self._failures))


def _read(choice: Mapping[str, Any]) -> tuple[Message, list[ToolCall]]:
    """A reply as a message that any server reads again, and its calls. ServerError for what is none."""
    if choice.get("finish_reason") not in ("stop", "tool_calls", "length"):
        raise ServerError(f"the reply ended by {choice.get('finish_reason')!r}")
    # JSON can hold halves of characters, which no tokenizer encodes.
    text = json.dumps(choice["message"], ensure_ascii=False).encode("utf-8", "replace")
    message = json.loads(text)
    if message.get("reasoning"):  # as vLLM and OpenRouter call it
        message["reasoning_content"] = message.get("reasoning_content") or message["reasoning"]
    kept = {
        name: message[name]
        for name in ("content", "reasoning_content", "tool_calls")
        if message.get(name)
    }
    reply = {"role": "assistant", "content": None, **kept}
    if "</think>" in (reply["content"] or ""):
        reply.setdefault("reasoning_content", "")  # or content would be read as some
    if "tool_calls" not in reply:
        return reply, []
    calls = []
    try:
        for call in reply["tool_calls"]:
            function = call["function"]
            if not (isinstance(function["name"], str) and function["name"]):
                raise TypeError("it names no function")
            calls.append(_call(function["name"], function.get("arguments") or "{}"))
    except (TypeError, KeyError, AttributeError):
        raise ServerError(
            f"the reply has calls that are none: {reply['tool_calls']!r:.200}"
        ) from None
    reply["tool_calls"] = list(map(_make_sendable, reply["tool_calls"], calls))
    return reply, calls


def _make_sendable(sent: Mapping[str, Any], call: ToolCall) -> Mapping[str, Any]:
    """Returns a call of a reply in a form that servers accept in the next request.

    They refuse arguments that are no object, except the text of a call that they could not parse. The result of the call
    quotes what was written.
    """
    if call.problem is None or is_unparsed(call.text):
        return sent
    return {**sent, "function": {**sent["function"], "arguments": "{}"}}


def _call(name: str, arguments: str | Mapping) -> ToolCall:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if is_unparsed(text):
        return ToolCall(name, {}, f"the call cannot be parsed: {text[:SHOWN]}", text)
    try:
        value = read_json(text)
        problem = None if isinstance(value, dict) else "the arguments are no object"
    except ValueError as error:
        problem = str(error)
    if problem:
        return ToolCall(name, {}, f"{problem}: {text[:SHOWN]}", text)
    return ToolCall(name, value, None, text)
