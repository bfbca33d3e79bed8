"""Attempts at tasks by a model with a chat API, as groups that a verifier judges.

    rollouts = ChatRollouts(client, toolbox, counter, LoopConfig(), group=8)
    groups = rollouts.sample(tasks)

The attempts have no token records, so they are for evaluation and selection of tasks, not for training.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_jax.agents.client import ChatClient
from glm5_jax.agents.context import Counter
from glm5_jax.agents.loop import ChatAgent, LoopConfig
from glm5_jax.inference.client import ServerError
from glm5_jax.rl.rollouts.rollout import ToolError, Tools
from glm5_jax.rl.trajectory import Group
from glm5_jax.rl.types import Attempt, Task
from glm5_jax.runtime.coroutines import run_sync


class ChatRollouts:
    """Sampler of groups of attempts from a chat API.

    Args:
      client: client of the server, whose concurrency limits the attempts that run at once.
      tools, counter, loop: see `ChatAgent`.
      group: attempts at each task.
      fields: fields of every request, such as the temperature.
    """

    def __init__(
        self,
        client: ChatClient,
        tools: Tools,
        counter: Counter,
        loop: LoopConfig,
        *,
        group: int,
        fields: Mapping[str, Any],
    ):
        self._client, self._group = client, group
        self._agent = ChatAgent(
            client=client, tools=tools, counter=counter, config=loop, fields=fields
        )

    def sample(self, tasks: Sequence[Task]) -> list[Group]:
        """Returns a group of attempts at each task. An attempt has failed if the server or a tool has."""
        return run_sync(self._sample(tasks))

    async def _sample(self, tasks: Sequence[Task]) -> list[Group]:
        async with self._client:
            attempts = await asyncio.gather(
                *(self._attempt(task) for task in tasks for _ in range(self._group))
            )
        starts = range(0, len(attempts), self._group)
        return [
            Group(task=task, attempts=attempts[start : start + self._group], records=[])
            for task, start in zip(tasks, starts, strict=True)
        ]

    async def _attempt(self, task: Task) -> Attempt:
        try:
            return (await self._agent(task)).attempt
        except (ServerError, ToolError) as error:
            why = f"{type(error).__name__}: {error}"
            return Attempt(messages=(), finish_reason="failed", error=why)
