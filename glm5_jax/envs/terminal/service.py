"""Terminal tasks as a task service: each rollout in a sandbox of its own, judged in another over the pristine image.

tasks, held_out = load_tasks("folder/of/task/folders", held_out_fraction=0.1)
service = TerminalService(ServiceConfig(name="terminal", hub="http://10.0.0.2:8100"), tasks, held_out, tokenizer)
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
from glm5_jax.agents.loop import Trace
from glm5_jax.data.sources import held_out as is_held_out
from glm5_jax.envs.service import ChatService
from glm5_jax.envs.terminal.bash import BashConfig
from glm5_jax.envs.terminal.forms import forgeable
from glm5_jax.envs.terminal.policy import AttemptConfig, Policy
from glm5_jax.envs.terminal.task import TaskLimits, TerminalTask, find_tasks, load_task
from glm5_jax.envs.terminal.trial import Trials
from glm5_jax.rl.service import ServiceConfig
from glm5_jax.rl.types import Reward, Task
from glm5_jax.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def load_tasks(
    folder: str | pathlib.Path, held_out_fraction: float = 0.0
) -> tuple[list[TerminalTask], list[TerminalTask]]:
    """The tasks of a folder to learn from, and those held out, by a hash of what they ask; TaskError."""
    parts = [], []
    for place in find_tasks(folder):
        task = load_task(place)
        parts[is_held_out(task.instruction, held_out_fraction)].append(task)
    return parts


@dataclasses.dataclass(frozen=True)
class TerminalShare:
    """Terminal tasks, and how much of all that is learnt from they are to be. Construction refuses values out of range
    (ValueError).

    Attributes:
      folder: of task folders in Harbor's format.
      name: of their service.
      held_out_fraction: share of the tasks that is for evaluation.
      images: names of images and the root file systems that stand for them, or "host".
      bash: limits of commands.
      task_limits: what tasks may ask of the machine.
    """

    folder: str = ""
    weight: float = 1.0
    name: str = "terminal"
    held_out_fraction: float = 0.1
    images: Mapping[str, str] = dataclasses.field(default_factory=dict)
    bash: BashConfig = BashConfig()
    task_limits: TaskLimits = TaskLimits()

    def __post_init__(self):
        if not self.folder:
            raise ValueError("folder is empty; give one that holds task folders")
        if not 0 <= self.held_out_fraction < 1:
            raise ValueError(
                f"held_out_fraction is {self.held_out_fraction}; it must be from 0 to below 1"
            )

    def load(self) -> tuple[list[TerminalTask], list[TerminalTask]]:
        """The tasks to learn from, and those held out; TaskError, and ValueError if none is to learn from."""
        learnt, held_out = load_tasks(self.folder, self.held_out_fraction)
        if not learnt:
            raise ValueError(
                f"all tasks of {self.folder} are held out; add some, or lower held_out_fraction={self.held_out_fraction}"
            )
        return learnt, held_out


class TerminalService(ChatService):
    """Attempts terminal tasks by `policy.Policy`, as an evaluation does; `max_inflight` of the service says how many at
    once, each with the processors and memory that its task asks for. ValueError for a task whose rollout would come to no end
    in time, for an instruction that leaves no room for a reply, and without root.

    tokenizer, variant: those of the gateway, by which prompts are counted. images, task_limits: see `Trials`.
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
        task_limits: TaskLimits = TaskLimits(),
        variant: str = "glm5",
    ):
        asked = ([limits.asked(task) for task in own] for own in (tasks, held_out))
        counter = TokenCounter(tokenizer, variant)
        super().__init__(config, *asked, counter, limits.max_tokens, limits.reply_seconds)
        for task in (*tasks, *held_out):
            task_limits.check(task)
            for form in forgeable(task):
                log.warning("task %s: its reward can be forged: %s", task.name, form)
            # The tests may run twice, with the attempt's work and without.
            seconds = min(limits.seconds, task.agent_seconds) + 2 * task.verifier_seconds
            seconds += task.build_seconds
            if seconds >= config.seconds:
                raise ValueError(
                    f"task {task.name!r} may take {seconds:g} s with its image and its tests, and a rollout has "
                    f"{config.seconds:g} s; raise seconds of the service, or leave the task out"
                )
        self._limits, self._trials = limits, Trials(images, task_limits)

    async def opened(self, app: web.Application) -> AsyncIterator[None]:
        async with self._trials:
            async for _ in super().opened(app):
                yield

    async def work(self, task: Task, client: ChatClient) -> tuple[Trace | None, Reward]:
        traces: list[Trace] = []
        policy = Policy(
            lambda: contextlib.nullcontext(client),
            self._counter,
            self._limits,
            told=lambda _, trace: traces.append(trace),
        )
        result = await self._trials.run(task.data["task"], policy)
        reward = Reward(result.reward, result.parts, result.error or "")
        return (traces[0] if traces else None), reward
