"""Groups of attempts at tasks: what the engine samples, token by token as it was sampled.

Attempts go in turns. All that are under way are answered together, then the tools that they called, then the
next turn; nothing depends on how long anything takes, so the same seed samples the same. Of what comes between
two replies only the new messages are encoded: nothing that was sampled is ever encoded again.
"""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from glm5_jax.core.coroutines import wait_for
from glm5_jax.data.record import TokenRecord
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import LENGTH, STOP, Completion
from glm5_jax.inference.sampling import Sampling
from glm5_jax.rl.types import Attempt, Message, Reward, Task
from glm5_jax.text.chat import render_chat
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.text.tool_calls import ToolCall, parse_reply


class ToolError(Exception):
    """A tool could not answer, for no fault of the call: the attempt is not judged."""


class Tools(Protocol):
    """Answers calls of the tools that a task offers. What is wrong with a call is part of the answer; ToolError for
    what is the environment's fault."""

    async def __call__(self, task: Task, call: ToolCall) -> str: ...


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How tasks are attempted. Construction refuses values out of range (ValueError).

    Attributes:
      prompts: tasks of a step; group: attempts at each.
      max_tokens: of a reply, reasoning included.
      max_turns: replies of an attempt; between two of them its tools answer.
      thinking: whether replies begin with reasoning, where a task does not say.
      variant: the chat layout.
      tool_seconds: that a tool may take.
    """

    prompts: int = 32  # GLM-5 3.2
    group: int = 32  # GLM-5 3.2
    max_tokens: int = 65_536  # GLM-4.5 3.2; GLM-5's is not disclosed
    max_turns: int = 16  # not disclosed
    thinking: bool = True
    variant: str = "glm5"
    tool_seconds: float = 60.0

    def __post_init__(self):
        for name in ("prompts", "group", "max_tokens", "max_turns", "tool_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")


@dataclasses.dataclass
class Group:
    """The attempts at a task, what was sampled for each, and, once they are judged, what each is worth."""

    task: Task
    attempts: list[Attempt]
    records: list[TokenRecord]
    rewards: list[Reward] = dataclasses.field(default_factory=list)


class Rollouts:
    """Attempts by an engine in this process. temperature: of the samples; top_p is 1, so that log-probs are those of
    what is sampled from."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        config: RolloutConfig,
        temperature: float,
        tools: Tools | None = None,
    ):
        self._engine, self._tokenizer, self._config = engine, tokenizer, config
        self._temperature, self._tools = temperature, tools

    def sample(
        self,
        tasks: Sequence[Task],
        seed: int | Sequence[int],
        *,
        group: int | None = None,
        name: str = "",
    ) -> list[Group]:
        """The attempts at each task, as many as group (default: the config's), drawn by seed. name: what the ids of
        groups begin with."""
        size = group or self._config.group
        more = self._config, self._tokenizer
        prompts = [_rendered(task, [], 0, *more) for task in tasks]
        courses = [
            [_Course(task, ids, *more) for _ in range(size)] for task, ids in zip(tasks, prompts)
        ]
        seeds = np.random.SeedSequence(seed).generate_state(len(tasks) * size, np.uint64)
        under_way = [course for own in courses for course in own]
        for course, own in zip(under_way, seeds.tolist()):
            course.seed = own >> 1
        for turn in range(self._config.max_turns):
            if not under_way:
                break
            self._reply(under_way)
            wait_for(self._use_tools(under_way, last=turn == self._config.max_turns - 1))
            under_way = [course for course in under_way if course.finish_reason is None]
        return [
            Group(
                task,
                [course.attempt() for course in own],
                [course.record(f"{name}{i}", f"{name}{i}-{j}") for j, course in enumerate(own)],
            )
            for i, (task, own) in enumerate(zip(tasks, courses))
        ]

    def _reply(self, under_way: list["_Course"]) -> None:
        prompts, samplings, asked = [], [], []
        for course in under_way:
            room = self._engine.max_length - len(course.ids)
            if room < 1:
                course.cut_off()
                continue
            most = min(room, self._config.max_tokens)
            # A draw depends on its place too: later turns may have the same seed.
            samplings.append(Sampling(most, self._temperature, seed=course.seed))
            prompts.append(course.ids)
            asked.append(course)
        for course, reply in zip(asked, self._engine.generate(prompts, samplings)):
            course.take(reply)

    async def _use_tools(self, courses: list["_Course"], last: bool) -> None:
        """Answers the calls of all that made some; those without a turn to go on are cut off."""
        calling = [course for course in courses if course.finish_reason is None]
        if last:
            for course in calling:
                course.cut_off()
            return
        answers = await asyncio.gather(
            *(self._answer(course.task, call) for course in calling for call in course.calls),
            return_exceptions=True,
        )
        answers = iter(answers)
        for course in calling:
            own = [next(answers) for _ in course.calls]
            failed = [answer for answer in own if isinstance(answer, BaseException)]
            if failed:
                course.fail(failed[0])
            else:
                course.go_on(own, self._engine.max_length)

    async def _answer(self, task: Task, call: ToolCall) -> str:
        async with asyncio.timeout(self._config.tool_seconds):
            return await self._tools(task, call)


def check_task(
    task: Task, tokenizer: Tokenizer, config: RolloutConfig, max_length: int, tools: Tools | None
) -> None:
    """ValueError if a task cannot be attempted: tools without anybody who answers, a prompt without room."""
    if task.tools and tools is None:
        raise ValueError(f"task {task.id!r} offers tools, and nobody answers them")
    count = len(_rendered(task, [], 0, config, tokenizer))
    if count >= max_length:
        raise ValueError(
            f"task {task.id!r} has a prompt of {count} tokens; at most {max_length - 1} leave room for a reply, or raise "
            "engine.max_length and length"
        )


class _Course:
    """An attempt under way. ids: so far, to begin with the prompt; seed: of its draws; finish_reason: None while calls
    are to be answered or a reply is to come."""

    def __init__(self, task: Task, ids: list[int], config: RolloutConfig, tokenizer: Tokenizer):
        self.task, self.ids, self._config, self._tokenizer = task, ids, config, tokenizer
        self.messages: list[Message] = []
        self.calls: tuple[ToolCall, ...] = ()
        self.seed = 0
        self.finish_reason: str | None = None
        self.error = ""
        self._sampled: list[tuple[int, Completion]] = []  # where each reply begins
        self._spans: list[tuple[int, int, str]] = []

    def take(self, reply: Completion) -> None:
        """A reply: the end, or calls."""
        self._sampled.append((len(self.ids), reply))
        self.ids = self.ids + reply.ids
        found = parse_reply(
            reply.ids,
            self.task.tools or None,
            tokenizer=self._tokenizer,
            thinking=_thinks(self.task, self._config),
        )
        self.messages.append(found.message)
        self.calls = found.tool_calls if self.task.tools else ()
        if reply.finish_reason == LENGTH:
            self.cut_off()
        elif reply.finish_reason != STOP:
            self.fail(RuntimeError(f"the reply was {reply.finish_reason}"))
        elif problems := [call.problem for call in self.calls if call.problem]:
            # As GLM-4.5 has it: a call that cannot be read ends the attempt.
            self.finish_reason, self.error = "stop", problems[0]
        elif not self.calls or found.stopped_by != "<|observation|>":
            self.finish_reason = "stop"

    def go_on(self, answers: Sequence[str], most: int) -> None:
        """What the tools answered, and the prompt for the next reply; cut off if that leaves no room below most."""
        first = len(self.task.messages) + len(self.messages)
        self.messages += [{"role": "tool", "content": answer} for answer in answers]
        # The marker of the next turn is what the reply stopped with.
        new = _rendered(self.task, self.messages, first, self._config, self._tokenizer)[1:]
        if len(self.ids) + len(new) >= most:
            self.cut_off()
            return
        self._spans.append((len(self.ids), len(self.ids) + len(new), "result"))
        self.ids = self.ids + new
        self.calls = ()

    def cut_off(self) -> None:
        """There is no room, or no turn, to go on."""
        self.finish_reason = "length"

    def fail(self, error: BaseException) -> None:
        """The environment could not go on."""
        self.finish_reason = "failed"
        self.error = f"{type(error).__name__}: {error}"

    def attempt(self) -> Attempt:
        sampled = sum(len(reply.ids) for _, reply in self._sampled)
        return Attempt(tuple(self.messages), self.finish_reason, self.error, sampled)

    def record(self, group_id: str, rollout_id: str) -> TokenRecord:
        t = len(self.ids)
        logp, version = np.full(t, np.nan, np.float32), np.full(t, -1, np.int32)
        for first, reply in self._sampled:
            here = slice(first, first + len(reply.ids))
            logp[here], version[here] = reply.logprobs, reply.versions
        status = {"stop": "completed", "length": "truncated", "failed": "failed"}
        return TokenRecord(
            self.ids,
            ~np.isnan(logp),
            rollout_logp=logp,
            weight_version=version,
            group_id=group_id,
            rollout_id=rollout_id,
            task_id=self.task.id,
            status=status[self.finish_reason],
            fail_reason=self.error,
            spans=tuple(self._spans),
        )


def _rendered(
    task: Task,
    messages: Sequence[Message],
    first: int,
    config: RolloutConfig,
    tokenizer: Tokenizer,
) -> list[int]:
    """The ids of a task's messages and these behind them, from the one numbered first on, as a prompt."""
    return render_chat(
        [*task.messages, *messages],
        tokenizer,
        tools=task.tools or None,
        enable_thinking=_thinks(task, config),
        clear_thinking=False,
        variant=config.variant,
        first=first,
    ).ids


def _thinks(task: Task, config: RolloutConfig) -> bool:
    return config.thinking if task.thinking is None else task.thinking
