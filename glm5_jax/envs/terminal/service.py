"""Serves terminal tasks to an RL run: each rollout in a new sandbox, graded in another over the unchanged image.

tasks, held_out = load_tasks("folder/of/task/folders", held_out_fraction=0.1)
service = TerminalService(ServiceConfig(name="terminal", orchestrator="http://10.0.0.2:8100"), tasks, held_out, tokenizer)
asyncio.run(service.serve())
"""

import contextlib
import dataclasses
import logging
import pathlib
from collections.abc import AsyncIterator, Mapping, Sequence

from aiohttp import web

from glm5_jax.agents.client import ChatClient
from glm5_jax.agents.context import TokenCounter
from glm5_jax.agents.loop import LoopConfig, Trace
from glm5_jax.data.sources import is_held_out
from glm5_jax.envs.service import ChatService
from glm5_jax.envs.terminal.bash import BashConfig
from glm5_jax.envs.terminal.forms import forgeable_forms
from glm5_jax.envs.terminal.image import BuildConfig
from glm5_jax.envs.terminal.policy import AttemptConfig, Policy
from glm5_jax.envs.terminal.task import TaskLimits, TerminalTask, find_tasks, load_task
from glm5_jax.envs.terminal.trial import TrialRunner
from glm5_jax.rl.orchestrator.task_service import ServiceConfig
from glm5_jax.rl.types import Reward, Task
from glm5_jax.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def load_tasks(
    folder: str | pathlib.Path, held_out_fraction: float = 0.0
) -> tuple[list[TerminalTask], list[TerminalTask]]:
    """Returns the training tasks and the held-out tasks of a folder, split by a hash of the instruction.

    Raises TaskError.
    """
    parts = [], []
    for path in find_tasks(folder):
        task = load_task(path)
        parts[is_held_out(task.instruction, held_out_fraction)].append(task)
    return parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class TerminalShare:
    """Set of terminal tasks and its share of the training data. Raises ValueError for values out of range.

    Attributes:
      folder: folder of task folders in Harbor's format.
      weight: weight of the set.
      name: name of its task service.
      held_out_fraction: share of the tasks that is held out for evaluation.
      images: image name -> folder of a root file system, or "host".
      build: options for building images.
      bash: limits of commands.
      task_limits: maximum resources of tasks.
    """

    folder: str = ""
    weight: float = 1.0
    name: str = "terminal"
    held_out_fraction: float = 0.1
    images: Mapping[str, str] = dataclasses.field(default_factory=dict)
    build: BuildConfig = BuildConfig()
    bash: BashConfig = BashConfig()
    task_limits: TaskLimits = TaskLimits()

    def __post_init__(self):
        if not self.folder:
            raise ValueError("folder is empty; pass one that holds task folders")
        if not 0 <= self.held_out_fraction < 1:
            raise ValueError(
                f"held_out_fraction is {self.held_out_fraction}; it must be from 0 to below 1"
            )

    def load(self) -> tuple[list[TerminalTask], list[TerminalTask]]:
        """Returns the training tasks and the held-out tasks.

        Raises TaskError, and ValueError if there is no training task.
        """
        training, held_out = load_tasks(self.folder, self.held_out_fraction)
        if not training:
            raise ValueError(
                f"all tasks of {self.folder} are held out; add some, or lower held_out_fraction={self.held_out_fraction}"
            )
        return training, held_out

    def make_service(
        self,
        config: ServiceConfig,
        tokenizer: Tokenizer,
        loop: LoopConfig,
        *,
        variant: str = "glm5",
        thinking: bool = True,
    ) -> "TerminalService":
        """Returns the task service of these tasks.

        - tokenizer, variant: those of the gateway.
        - loop: limits of an attempt; commands have their own time limits.
        - thinking: whether replies begin with reasoning.
        """
        limits = AttemptConfig.from_loop(loop, self.bash, thinking)
        training, held_out = self.load()
        return TerminalService(
            config,
            training,
            held_out,
            tokenizer,
            limits,
            images=self.images,
            build=self.build,
            task_limits=self.task_limits,
            variant=variant,
        )


class TerminalService(ChatService):
    """Task service whose attempts at terminal tasks run `policy.Policy`, as an evaluation does.

    `max_inflight` of the service is the number of concurrent attempts, each with the processors and memory
    that its task needs. Raises ValueError without root, for a task whose rollout could exceed the service's
    time limit, and for an instruction that leaves no room for a reply.

    Args:
      tokenizer, variant: those of the gateway, to count the tokens of prompts.
      limits: limits of an attempt.
      images, build, task_limits: see `TrialRunner`.
    """

    def __init__(
        self,
        config: ServiceConfig,
        tasks: Sequence[TerminalTask],
        held_out: Sequence[TerminalTask],
        tokenizer: Tokenizer,
        limits: AttemptConfig = AttemptConfig(),
        *,
        images: Mapping[str, str] | None = None,
        build: BuildConfig = BuildConfig(),
        task_limits: TaskLimits = TaskLimits(),
        variant: str = "glm5",
    ):
        training, evaluation = (
            [limits.chat_task(task) for task in split] for split in (tasks, held_out)
        )
        counter = TokenCounter(tokenizer, variant)
        super().__init__(
            config, training, evaluation, counter, limits.max_tokens, limits.reply_timeout_s
        )
        for task in (*tasks, *held_out):
            task_limits.check(task)
            for form in forgeable_forms(task):
                log.warning("task %s: its reward can be forged: %s", task.name, form)
            # The tests may run twice, with and without the submission.
            timeout_s = min(limits.timeout_s, task.agent_timeout_s) + 2 * task.verifier_timeout_s
            timeout_s += task.build_timeout_s
            if timeout_s >= config.rollout_timeout_s:
                raise ValueError(
                    f"task {task.name!r} may take {timeout_s:g} s with its image and its tests, and a rollout has "
                    f"{config.rollout_timeout_s:g} s; raise rollout_timeout_s of the service, or leave the task out"
                )
        self._limits, self._trial_runner = limits, TrialRunner(images, task_limits, build)

    async def lifespan(self, app: web.Application) -> AsyncIterator[None]:
        async with self._trial_runner:
            async for _ in super().lifespan(app):
                yield

    async def work(self, task: Task, client: ChatClient) -> tuple[Trace | None, Reward]:
        traces: list[Trace] = []
        policy = Policy(
            lambda: contextlib.nullcontext(client),
            self._counter,
            self._limits,
            on_trace=lambda _, trace: traces.append(trace),
        )
        result = await self._trial_runner.run(task.data["task"], policy)
        reward = Reward(result.reward, result.parts, result.error or "")
        return (traces[0] if traces else None), reward
