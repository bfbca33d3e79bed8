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

from glm5_jax.data.record import TokenRecord
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import LENGTH, STOP, Completion
from glm5_jax.inference.sampling import Sampling
from glm5_jax.rl.rollouts.sessions import Plan, Session, SessionConfig, SessionError, seed_of
from glm5_jax.rl.trajectory import Group
from glm5_jax.rl.types import Attempt, Message, Task
from glm5_jax.runtime.coroutines import run_sync
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
        seed: int,
        *,
        first: int = 0,
        group: int | None = None,
        name: str = "",
    ) -> list[Group]:
        """The attempts at each task, as many as group (default: the config's), drawn by seed. first: how many tasks came
        before these, which draw otherwise; name: what the ids of groups begin with."""
        size = group or self._config.group
        under_way, courses = [], []
        for i, task in enumerate(tasks):
            own = [
                _Course(task, seed_of(seed, first + i, 0, j), self._config, self._tokenizer)
                for j in range(size)
            ]
            # All attempts begin alike.
            plan = own[0].planned()
            for course in own:
                course.plan = plan
            courses.append(own)
            under_way += own
        for turn in range(self._config.max_turns):
            if not under_way:
                break
            self._reply(under_way)
            run_sync(self._use_tools(under_way, last=turn == self._config.max_turns - 1))
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
            room = self._engine.max_length - len(course.plan.ids)
            if room < 1:
                course.cut_off()
                continue
            most = min(room, self._config.max_tokens)
            samplings.append(
                Sampling(max_tokens=most, temperature=self._temperature, seed=course.seed())
            )
            prompts.append(course.plan.ids)
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
    try:
        count = len(_Course(task, 0, config, tokenizer).planned().ids)
    except SessionError as error:
        raise ValueError(f"task {task.id!r}: {error}") from None
    if count >= max_length:
        raise ValueError(
            f"task {task.id!r} has a prompt of {count} tokens; at most {max_length - 1} leave room for a reply, or raise "
            "engine.max_length and length"
        )


class _Course:
    """An attempt under way. plan: what is read for the next reply; finish_reason: None while calls are to be answered or
    a reply is to come."""

    plan: Plan

    def __init__(self, task: Task, seed: int, config: RolloutConfig, tokenizer: Tokenizer):
        self.task, self._tokenizer = task, tokenizer
        self._thinks = config.thinking if task.thinking is None else task.thinking
        own = SessionConfig(config.variant, config.max_turns)
        self._session = Session(tokenizer, own, seed)
        self.messages: list[Message] = []
        self.calls: tuple[ToolCall, ...] = ()
        self.finish_reason: str | None = None
        self.error = ""

    def planned(self) -> Plan:
        """What is read for a reply to all messages."""
        said = [*self.task.messages, *self.messages]
        return self._session.plan(said, self.task.tools, enable_thinking=self._thinks)

    def seed(self) -> int:
        """Of the next reply."""
        return self._session.seed_of(self.plan)

    def take(self, reply: Completion) -> None:
        """A reply: the end, or calls."""
        if reply.finish_reason not in (STOP, LENGTH):
            self.fail(RuntimeError(f"the reply was {reply.finish_reason}"))
            return
        found = parse_reply(
            reply.ids,
            self.task.tools,
            tokenizer=self._tokenizer,
            thinking=self._thinks,
        )
        sampled = reply.ids, reply.logprobs, reply.versions
        more = reply.finish_reason, found.message
        self._session.add(self._session.answer(self.plan, *sampled, *more))
        self.messages.append(found.message)
        self.calls = found.tool_calls
        if reply.finish_reason == LENGTH:
            self.cut_off()
        elif found.problem:
            # As GLM-4.5 has it: a call that cannot be parsed ends the attempt.
            self.finish_reason, self.error = "stop", found.problem
        elif not self.calls:
            # Whole calls are answered whatever marker follows them, as servers pass them on to agents.
            self.finish_reason = "stop"

    def go_on(self, answers: Sequence[str], most: int) -> None:
        """What the tools answered, and the plan for the next reply; cut off if that leaves no room below most."""
        self.messages += [{"role": "tool", "content": answer} for answer in answers]
        self.plan = self.planned()
        if len(self.plan.ids) >= most:
            self.cut_off()
        self.calls = ()

    def cut_off(self) -> None:
        """There is no room, or no turn, to go on."""
        self.finish_reason = "length"

    def fail(self, error: BaseException) -> None:
        """The environment could not go on."""
        self.finish_reason = "failed"
        self.error = f"{type(error).__name__}: {error}"

    def attempt(self) -> Attempt:
        sampled = sum(len(turn.output) for turn in self._session.turns)
        return Attempt(tuple(self.messages), self.finish_reason, self.error, sampled)

    def record(self, group_id: str, rollout_id: str) -> TokenRecord:
        status = {"stop": "completed", "length": "truncated", "failed": "failed"}
        ids = {"group_id": group_id, "rollout_id": rollout_id, "task_id": self.task.id}
        more = ids | {"status": status[self.finish_reason], "fail_reason": self.error}
        if self._session.turns:
            [record] = self._session.records(**more)
            return record
        none = np.zeros(len(self.plan.ids))
        streams = {"rollout_logp": none + np.nan, "weight_version": none.astype(int) - 1}
        return TokenRecord(token_ids=self.plan.ids, loss_mask=none, **streams, **more)
