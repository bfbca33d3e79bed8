"""Serves agent tasks to an RL run: tasks, the tools that they offer, and the verifier of attempts.

Other services are subclasses of `ChatService`, such as that of terminal tasks (`terminal.service`).

    service = AgentService(
        ServiceConfig(name="search", orchestrator="http://10.0.0.2:8100", port=8201), tasks, held_out, toolbox, verifier, tokenizer
    )
    asyncio.run(service.serve())
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager

from aiohttp import web

from glm5_jax.agents.client import ChatClient
from glm5_jax.agents.context import CONTEXTS, ContextConfig, Counter, TokenCounter
from glm5_jax.agents.loop import ChatAgent, LoopConfig, Trace
from glm5_jax.rl.orchestrator.task_service import (
    Outcome,
    RolloutRequest,
    ServiceConfig,
    TaskService,
)
from glm5_jax.rl.programs.trainer import AgenticRlConfig
from glm5_jax.rl.rollouts.rollout import Tools
from glm5_jax.rl.types import Reward, Task, Verifier
from glm5_jax.text.tokenizer import Tokenizer


def make_loop_config(
    config: AgenticRlConfig, max_tokens: int, context: ContextConfig = CONTEXTS["everything"]
) -> LoopConfig:
    """Returns the limits of an attempt of a run.

    Args:
      max_tokens: token limit of an attempt.
      context: part of a conversation that each request sends.
    """
    rollout = config.rollout
    return LoopConfig(
        max_turns=rollout.max_turns,
        max_tokens=max_tokens,
        reply_tokens=rollout.max_tokens,
        timeout_s=config.agent_timeout_s,
        tool_timeout_s=rollout.tool_timeout_s,
        context=context,
    )


class ChatService(TaskService):
    """Task service whose attempts are chats with the policy. A subclass implements `work`.

    Raises ValueError for a task whose messages leave no room for a reply.

    Args:
      max_tokens: token limit of an attempt, as in `LoopConfig`.
      reply_timeout_s: time limit of one reply of the gateway, in seconds.
    """

    def __init__(
        self,
        config: ServiceConfig,
        tasks: Sequence[Task],
        held_out: Sequence[Task],
        counter: Counter,
        max_tokens: int,
        reply_timeout_s: float,
    ):
        super().__init__(config, len(tasks), len(held_out))
        self._tasks, self._held_out = tuple(tasks), tuple(held_out)
        self._counter, self._reply_timeout_s = counter, reply_timeout_s
        for task in (*self._tasks, *self._held_out):
            if (count := counter.prompt(task)) >= max_tokens:
                raise ValueError(
                    f"task {task.id!r} has {count} tokens, and max_tokens is {max_tokens}; raise it, or leave the "
                    "task out"
                )

    async def work(self, task: Task, client: ChatClient) -> tuple[Trace | None, Reward]:
        """Runs an attempt and returns its trace and its reward.

        The trace is None if it is not known. Exceptions count as failures of the environment.
        """
        raise NotImplementedError

    async def attempt(self, request: RolloutRequest, index: int) -> Outcome:
        """Runs an attempt at the task with this number, and returns its outcome with metrics of the agent."""
        task = (self._held_out if request.held_out else self._tasks)[index]
        client = ChatClient(
            request.base_url, api_key=self.api_key, timeout_s=self._reply_timeout_s, concurrency=1
        )
        async with client:
            trace, reward = await self.work(task, client)
        if trace is None:
            return Outcome(task.messages, reward)
        replies = sum(message["role"] == "assistant" for message in trace.messages)
        metrics = {
            "replies": replies,
            "tool_failures": len(trace.failures),
            "restarts": len(trace.restarts),
            f"ended_{trace.ended}": 1.0,
        }
        return Outcome((*task.messages, *trace.messages), reward, metrics)


class AgentService(ChatService):
    """Task service whose attempts run `agents.loop.ChatAgent`.

    Raises ValueError if the service's time limit would always end before the agent's.

    Args:
      tokenizer, variant: those of the gateway, to count the tokens of prompts.
      thinking: whether replies begin with reasoning, if a task does not say.
      judging: returns the context that is open while the service runs, such as the client of a judge.
    """

    def __init__(
        self,
        config: ServiceConfig,
        tasks: Sequence[Task],
        held_out: Sequence[Task],
        tools: Tools,
        verifier: Verifier,
        tokenizer: Tokenizer,
        loop: LoopConfig = LoopConfig(),
        *,
        variant: str = "glm5",
        thinking: bool = True,
        judging: Callable[[], AbstractAsyncContextManager] = contextlib.nullcontext,
    ):
        counter = TokenCounter(tokenizer, variant, thinking)
        # A reply may use the agent's full time limit.
        super().__init__(config, tasks, held_out, counter, loop.max_tokens, loop.timeout_s)
        if loop.timeout_s >= config.rollout_timeout_s:
            raise ValueError(
                f"an agent has {loop.timeout_s:g} s and a rollout with its verdict {config.rollout_timeout_s:g} s; raise rollout_timeout_s of "
                "the service, or slow attempts count as failures of the environment"
            )
        self._tools, self._verifier, self._loop = tools, verifier, loop
        self._judging = judging
        self._fields = {} if thinking else {"chat_template_kwargs": {"enable_thinking": False}}

    async def lifespan(self, app: web.Application) -> AsyncIterator[None]:
        async with self._judging():
            async for _ in super().lifespan(app):
                yield

    async def work(self, task: Task, client: ChatClient) -> tuple[Trace, Reward]:
        agent = ChatAgent(
            client=client,
            tools=self._tools,
            counter=self._counter,
            config=self._loop,
            fields=self._fields,
        )
        trace = await agent(task)
        return trace, await self._verifier(task, trace.attempt)
