"""Serves environments of the `verifiers` library (its v1 API) to an RL run.

A rollout is one episode of the environment: its own harness plays the task, and its tasks compute the rewards. All model
calls go to the rollout's session at the gateway, which records the samples that are trained on.

    share = VerifiersShare(verifiers="my_env")
    service = share.make_service(ServiceConfig(name="my_env", orchestrator="http://10.0.0.2:8100"), LoopConfig())
    asyncio.run(service.serve())

The library is no dependency of this project (`pip install verifiers`).
"""

import asyncio
import dataclasses
import importlib
import itertools
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from aiohttp import web

from glm5_jax.agents.loop import LoopConfig
from glm5_jax.data.sources import is_held_out
from glm5_jax.rl.orchestrator.task_service import (
    Outcome,
    RolloutRequest,
    ServiceConfig,
    TaskService,
)
from glm5_jax.rl.types import Message, Reward

# The library keeps variables with API_KEY in their name from the programs that it starts.
_KEY_VARIABLE = "GLM5_GATEWAY_API_KEY"
_MODEL = "policy"  # the gateway serves one model, whatever its name


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifiersShare:
    """Environment of the `verifiers` library and its share of the training data. Raises ValueError for values out of range.

    Attributes:
      verifiers: id of the taskset: an installed package, or one that the library ships.
      config: further fields of the environment's config, as {"agent": {"runtime": {"type": "docker"}}}. The library's own
        runtime is a hosted one, which needs an account.
      weight: weight of the set.
      name: name of its task service.
      held_out_fraction: share of the tasks that is held out for evaluation.
      max_tasks: number of tasks, from the first one on; None: all, which an endless taskset does not have.
    """

    verifiers: str = ""
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    weight: float = 1.0
    name: str = "verifiers"
    held_out_fraction: float = 0.1
    max_tasks: int | None = None

    def __post_init__(self):
        if not self.verifiers:
            raise ValueError("verifiers is empty; pass the id of a taskset")
        if not 0 <= self.held_out_fraction < 1:
            raise ValueError(
                f"held_out_fraction is {self.held_out_fraction}; it must be from 0 to below 1"
            )
        if self.max_tasks is not None and self.max_tasks < 1:
            raise ValueError(f"max_tasks is {self.max_tasks}; it must be at least 1")

    def load_environment(self) -> Any:
        """Returns the environment. Raises ValueError if it, or the library, is not installed or is invalid."""
        library = _library(self.verifiers)
        taskset = {**self.config.get("taskset", {}), "id": self.verifiers}
        try:
            fields = library.resolve_env_config({**self.config, "taskset": taskset})
            return library.load_environment(fields)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"the environment {self.verifiers!r} cannot be loaded: {type(error).__name__}: {error}"
            ) from error

    def load(self) -> tuple[list[Any], list[Any]]:
        """Returns the training tasks and the held-out tasks, split by a hash of their keys. Raises ValueError."""
        taskset = self.load_environment().taskset
        if self.max_tasks is None and not taskset.bounded:
            raise ValueError(f"{self.verifiers!r} has endless tasks; give max_tasks")
        parts: tuple[list[Any], list[Any]] = [], []
        for task in itertools.islice(taskset, self.max_tasks):
            parts[is_held_out(task.key, self.held_out_fraction)].append(task)
        if not parts[0]:
            raise ValueError(
                f"{self.verifiers!r} has no task to train on; lower held_out_fraction={self.held_out_fraction}"
            )
        return parts

    def make_service(self, config: ServiceConfig, loop: LoopConfig) -> "VerifiersService":
        """Returns the task service of this environment. loop: limits of an attempt."""
        return VerifiersService(config, self.load_environment(), *self.load(), loop)


class VerifiersService(TaskService):
    """Task service whose attempts are episodes of a `verifiers.v1.Env` with one agent.

    An episode with an error has no reward, except if a limit of the agent ended it.

    Args:
      environment: the environment.
      tasks, held_out: its tasks to train on, and those of evaluations.
      loop: limits on the tokens of a reply and on the time of an attempt. The environment limits the turns.
    """

    def __init__(
        self,
        config: ServiceConfig,
        environment: Any,
        tasks: Sequence[Any],
        held_out: Sequence[Any],
        loop: LoopConfig = LoopConfig(),
    ):
        super().__init__(config, len(tasks), len(held_out))
        self._environment, self._loop = environment, loop
        self._tasks, self._held_out = tuple(tasks), tuple(held_out)
        if self.api_key is not None:
            os.environ[_KEY_VARIABLE] = self.api_key

    async def lifespan(self, app: web.Application) -> AsyncIterator[None]:
        async with self._environment.serving():
            async for _ in super().lifespan(app):
                yield

    async def attempt(self, request: RolloutRequest, index: int) -> Outcome:
        task = (self._held_out if request.held_out else self._tasks)[index]
        [slot] = self._environment.slots(task, 1)
        try:
            async with asyncio.timeout(self._loop.timeout_s):
                episode = await self._environment.run_slot(slot, self._context(request))
        except TimeoutError:
            traces = slot.traces
            messages = _messages(traces[0]) if len(traces) == 1 else ()
            return Outcome(messages, Reward(0.0), {"ended_time": 1.0})
        return _outcome(episode)

    def _context(self, request: RolloutRequest) -> Any:
        """Returns the library's description of the policy: the session at the gateway."""
        library, clients = (
            _library(self.config.name),
            importlib.import_module("verifiers.v1.clients"),
        )
        client = library.EvalClientConfig(
            base_url=f"{request.base_url}/v1", api_key_var=_KEY_VARIABLE
        )
        # The gateway sets the temperature of all samples.
        sampling = library.SamplingConfig(max_tokens=self._loop.reply_tokens)
        return clients.ModelContext(model=_MODEL, client=client, sampling=sampling)


def _library(needed_by: str) -> ModuleType:
    """Returns the library's module. Raises ValueError if it is not installed."""
    try:
        return importlib.import_module("verifiers.v1")
    except ImportError as error:
        raise ValueError(
            f"{needed_by!r} needs the package verifiers, 0.4 or newer ({error}); run pip install verifiers"
        ) from error


def _outcome(episode: Any) -> Outcome:
    """Returns the outcome of an episode that has ended."""
    if len(episode.traces) != 1:
        error = episode.last_error
        why = (
            f"{len(episode.traces)} agents have run, and one is trained"
            if error is None
            else str(error)
        )
        return Outcome((), Reward(None, error=why))
    [trace] = episode.traces
    messages, metrics = _messages(trace), {"replies": float(trace.num_turns)}
    metrics |= {name: value for name, value in trace.metrics.items() if value is not None}
    if not episode.ok and not trace.is_truncated:
        error = episode.last_error or (trace.errors[-1] if trace.errors else None)
        return Outcome(messages, Reward(None, error=f"the episode has failed: {error}"), metrics)
    parts = {name: one.value for name, one in trace.rewards.items() if one is not None}
    return Outcome(messages, Reward(float(trace.reward), parts=parts), metrics)


def _messages(trace: Any) -> tuple[Message, ...]:
    """Returns the messages of an agent as JSON."""
    return tuple(one.model_dump(mode="json", exclude_none=True) for one in trace.messages)
