"""Rollouts in this process: samples groups of attempts at tasks from an engine, and keeps the sampled tokens.

Attempts advance in lockstep: the engine replies to all running ones, then the tools answer all calls, then the next turn
begins. The result does not depend on timing, so that the same seed samples the same. Between two replies only the new
messages are encoded; sampled text is never encoded again.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from glm5_jax.data.record import TokenRecord
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import LENGTH, STOP, Completion
from glm5_jax.inference.sampling import Sampling
from glm5_jax.rl.rollouts.sessions import (
    Session,
    SessionConfig,
    SessionError,
    TurnPlan,
    derive_seed,
)
from glm5_jax.rl.trajectory import Group
from glm5_jax.rl.types import Attempt, Message, Task
from glm5_jax.runtime.coroutines import run_sync
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.text.tool_calls import ToolCall, parse_reply


class ToolError(Exception):
    """Raised if a tool cannot answer a valid call. The attempt then gets no reward."""


class SamplingStopped(Exception):
    """Raised if a stop is requested while attempts are sampled."""


class Tools(Protocol):
    """Answers calls of a task's tools.

    The answer says what is wrong with an invalid call. Raises ToolError for a failure of the environment.
    """

    async def __call__(self, task: Task, call: ToolCall) -> str: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Options of rollouts. Raises ValueError for values out of range.

    Attributes:
      prompts: tasks of a step.
      group: attempts at each task.
      max_tokens: maximum length of a reply with its reasoning, in tokens.
      max_turns: maximum number of replies of an attempt; tools answer between two of them.
      thinking: whether replies begin with reasoning, if the task does not say.
      variant: chat layout.
      tool_timeout_s: time limit of a tool call, in seconds.
    """

    prompts: int = 32  # GLM-5 3.2
    group: int = 32  # GLM-5 3.2
    max_tokens: int = 65_536  # GLM-4.5 3.2; GLM-5's is not disclosed
    max_turns: int = 16  # not disclosed
    thinking: bool = True
    variant: str = "glm5"
    tool_timeout_s: float = 60.0

    def __post_init__(self):
        for name in ("prompts", "group", "max_tokens", "max_turns", "tool_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")


class Rollouts:
    """Sampler of rollouts from an engine in this process.

    - temperature: temperature of the samples.
    - top_p: probability mass of the tokens that are sampled; 1 for samples to train on, whose log-probs are then those of
      the sampling distribution.
    - tools: answers tool calls; None: no task may have tools.
    - should_stop: returns whether a stop is requested, which ends the sampling.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        config: RolloutConfig,
        temperature: float,
        tools: Tools | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        *,
        top_p: float = 1.0,
    ):
        self._engine, self._tokenizer, self._config = engine, tokenizer, config
        self._temperature, self._top_p = temperature, top_p
        self._tools, self._should_stop = tools, should_stop

    def sample(
        self,
        tasks: Sequence[Task],
        seed: int,
        *,
        first: int = 0,
        group: int | None = None,
        name: str = "",
    ) -> list[Group]:
        """Samples a group of attempts at each task.

        - first: number of tasks before these; the index of a task is part of its seed.
        - group: attempts at each task; None: that of the config.
        - name: prefix of the group ids.

        Raises SamplingStopped if a stop is requested.
        """
        size = group or self._config.group
        running: list[_Episode] = []
        groups: list[list[_Episode]] = []
        for i, task in enumerate(tasks):
            episodes = [
                _Episode(task, derive_seed(seed, first + i, 0, j), self._config, self._tokenizer)
                for j in range(size)
            ]
            # All attempts at a task have the same first prompt.
            plan = episodes[0].make_plan()
            for episode in episodes:
                episode.plan = plan
            groups.append(episodes)
            running += episodes
        for turn in range(self._config.max_turns):
            if not running:
                break
            self._reply(running)
            run_sync(self._use_tools(running, is_last=turn == self._config.max_turns - 1))
            running = [episode for episode in running if episode.finish_reason is None]
        return [
            Group(
                task=task,
                attempts=[episode.attempt() for episode in episodes],
                records=[
                    episode.record(f"{name}{i}", f"{name}{i}-{j}")
                    for j, episode in enumerate(episodes)
                ],
            )
            for i, (task, episodes) in enumerate(zip(tasks, groups))
        ]

    def _reply(self, running: Sequence["_Episode"]) -> None:
        """Samples the next reply of all episodes; those without room for one are truncated."""
        prompts, samplings, episodes = [], [], []
        for episode in running:
            room = self._engine.max_length - len(episode.plan.ids)
            if room < 1:
                episode.truncate()
                continue
            samplings.append(
                Sampling(
                    max_tokens=min(room, self._config.max_tokens),
                    temperature=self._temperature,
                    top_p=self._top_p,
                    seed=episode.reply_seed(),
                )
            )
            prompts.append(episode.plan.ids)
            episodes.append(episode)
        completions = self._engine.generate(prompts, samplings, should_stop=self._should_stop)
        if self._should_stop():
            raise SamplingStopped
        for episode, completion in zip(episodes, completions):
            episode.add_reply(completion)

    async def _use_tools(self, episodes: Sequence["_Episode"], is_last: bool) -> None:
        """Answers the calls of all episodes. is_last: whether no turn is left, so that they are truncated instead."""
        calling = [episode for episode in episodes if episode.finish_reason is None]
        if is_last:
            for episode in calling:
                episode.truncate()
            return
        results = await asyncio.gather(
            *(self._answer(episode.task, call) for episode in calling for call in episode.calls),
            return_exceptions=True,
        )
        remaining = iter(results)
        for episode in calling:
            answers: list[str] = []
            error: BaseException | None = None
            for result in [next(remaining) for _ in episode.calls]:
                if isinstance(result, BaseException):
                    error = error or result
                else:
                    answers.append(result)
            if error is not None:
                episode.fail(error)
            else:
                episode.continue_turn(answers, self._engine.max_length)

    async def _answer(self, task: Task, call: ToolCall) -> str:
        if self._tools is None:
            raise ToolError(f"task {task.id!r} calls {call.name}, and there are no tools")
        async with asyncio.timeout(self._config.tool_timeout_s):
            return await self._tools(task, call)


def check_task(
    task: Task, tokenizer: Tokenizer, config: RolloutConfig, max_length: int, tools: Tools | None
) -> None:
    """Raises ValueError if a task cannot be attempted: it needs missing tools, or its prompt leaves no room.

    max_length: maximum length of a prompt with its reply, in tokens.
    """
    if task.tools and tools is None:
        raise ValueError(f"task {task.id!r} offers tools, and nobody answers them")
    try:
        count = len(_Episode(task, 0, config, tokenizer).make_plan().ids)
    except SessionError as error:
        raise ValueError(f"task {task.id!r}: {error}") from None
    if count >= max_length:
        raise ValueError(
            f"task {task.id!r} has a prompt of {count} tokens; at most {max_length - 1} leave room for a reply, or raise "
            "engine.max_length and length"
        )


class _Episode:
    """Attempt at a task while it runs.

    Attributes:
      task: task of the attempt.
      plan: prompt of the next reply.
      messages: messages after those of the task.
      calls: tool calls of the last reply that are not answered yet.
      finish_reason: "stop", "length" or "failed"; None: the attempt continues.
      error: why it failed, or by which mistake of the policy it ended; "" if neither.
    """

    plan: TurnPlan

    def __init__(self, task: Task, seed: int, config: RolloutConfig, tokenizer: Tokenizer):
        self.task, self._tokenizer = task, tokenizer
        self._thinking = config.thinking if task.thinking is None else task.thinking
        session_config = SessionConfig(variant=config.variant, max_turns=config.max_turns)
        self._session = Session(tokenizer, session_config, seed)
        self.messages: list[Message] = []
        self.calls: tuple[ToolCall, ...] = ()
        self.finish_reason: str | None = None
        self.error = ""

    def make_plan(self) -> TurnPlan:
        """Returns the prompt of a reply to all messages."""
        messages = [*self.task.messages, *self.messages]
        return self._session.plan(messages, self.task.tools, enable_thinking=self._thinking)

    def reply_seed(self) -> int:
        """Returns the seed of the next reply."""
        return self._session.reply_seed(self.plan)

    def add_reply(self, completion: Completion) -> None:
        """Adds a reply, which ends the attempt or calls tools."""
        if completion.finish_reason not in (STOP, LENGTH):
            self.fail(RuntimeError(f"the reply was {completion.finish_reason}"))
            return
        reply = parse_reply(
            completion.ids,
            self.task.tools,
            tokenizer=self._tokenizer,
            thinking=self._thinking,
        )
        turn = self._session.make_turn(
            self.plan,
            completion.ids,
            completion.logprobs,
            completion.versions,
            completion.finish_reason,
            reply.message,
        )
        self._session.add(turn)
        self.messages.append(reply.message)
        self.calls = tuple(reply.tool_calls)
        if completion.finish_reason == LENGTH:
            self.truncate()
        elif reply.problem:
            # As in GLM-4.5: a call that cannot be parsed ends the attempt.
            self.finish_reason, self.error = "stop", reply.problem
        elif not self.calls:
            # Complete calls are answered whatever marker follows them, because servers pass them to agents too.
            self.finish_reason = "stop"

    def continue_turn(self, answers: Sequence[str], max_length: int) -> None:
        """Adds the tools' answers and plans the next reply. Truncates if the prompt has max_length tokens or more."""
        self.messages += [{"role": "tool", "content": answer} for answer in answers]
        self.plan = self.make_plan()
        if len(self.plan.ids) >= max_length:
            self.truncate()
        self.calls = ()

    def truncate(self) -> None:
        """Ends the attempt because there is no room, or no turn, for another reply."""
        self.finish_reason = "length"

    def fail(self, error: BaseException) -> None:
        """Ends the attempt because of a failure of the environment."""
        self.finish_reason = "failed"
        self.error = f"{type(error).__name__}: {error}"

    def attempt(self) -> Attempt:
        """Returns the attempt, which has ended."""
        num_tokens = sum(len(turn.output) for turn in self._session.turns)
        return Attempt(
            messages=tuple(self.messages),
            finish_reason=self._final_reason,
            error=self.error,
            num_sampled_tokens=num_tokens,
        )

    def record(self, group_id: str, rollout_id: str) -> TokenRecord:
        """Returns the tokens of the attempt, which has ended."""
        status = {"stop": "completed", "length": "truncated", "failed": "failed"}
        fields: dict[str, Any] = {
            "group_id": group_id,
            "rollout_id": rollout_id,
            "task_id": self.task.id,
            "status": status[self._final_reason],
            "fail_reason": self.error,
        }
        if self._session.turns:
            [record] = self._session.records(**fields)
            return record
        # Nothing was sampled: the record is the prompt.
        zeros = np.zeros(len(self.plan.ids))
        return TokenRecord(
            token_ids=np.asarray(self.plan.ids),
            loss_mask=zeros,
            rollout_logp=zeros + np.nan,
            weight_version=zeros.astype(int) - 1,
            **fields,
        )

    @property
    def _final_reason(self) -> str:
        """Returns the finish reason of an attempt that has ended."""
        if self.finish_reason is None:
            raise RuntimeError(f"the attempt at task {self.task.id!r} has not ended")
        return self.finish_reason
