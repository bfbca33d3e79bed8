"""Serves software engineering tasks to an RL run: each rollout works in a new sandbox, and is graded in others.

share = SweShare(dataset="DATASET", store="LAYERS")
service = share.make_service(ServiceConfig(name="swe", orchestrator="http://10.0.0.2:8100"), tokenizer, LoopConfig())
asyncio.run(service.serve())
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Sequence

from glm5_jax.agents.client import ChatClient
from glm5_jax.agents.context import TokenCounter
from glm5_jax.agents.loop import LoopConfig, Trace
from glm5_jax.data.sources import is_held_out
from glm5_jax.envs.service import ChatService
from glm5_jax.envs.swe.arms import time_limit
from glm5_jax.envs.swe.attempts import AttemptRunner, SweAttemptConfig, SwePolicy
from glm5_jax.envs.swe.builder import RuleBuilder
from glm5_jax.envs.swe.dataset import SweDataset
from glm5_jax.envs.swe.instance import AttemptReport, SweInstance
from glm5_jax.envs.swe.layers import LayerStore, SweLimits
from glm5_jax.envs.terminal.bash import BashConfig
from glm5_jax.rl.orchestrator.task_service import ServiceConfig
from glm5_jax.rl.types import Reward, Task
from glm5_jax.text.tokenizer import Tokenizer

# Of a grading: with and without the attempt's changes, if the first run gives no result.
_TEST_RUNS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweShare:
    """Dataset of software engineering tasks and its share of the training data. Raises ValueError for values out of range.

    Attributes:
      dataset: folder of the dataset, as experiments/build_environments.py writes it.
      weight: weight of the set.
      name: name of its task service.
      held_out_fraction: share of the instances that is held out for evaluation.
      store: folder of built environments; None: `layers` in the dataset.
      node_modules: folder in which npm installed test runners; None: projects of JavaScript get no reward.
      bash: limits of commands.
      limits: limits of sandboxes.
    """

    dataset: str = ""
    weight: float = 1.0
    name: str = "swe"
    held_out_fraction: float = 0.1
    store: str | None = None
    node_modules: str | None = None
    bash: BashConfig = BashConfig()
    limits: SweLimits = SweLimits()

    def __post_init__(self):
        if not self.dataset:
            raise ValueError("dataset is empty; pass one of experiments/build_environments.py")
        if not 0 <= self.held_out_fraction < 1:
            raise ValueError(
                f"held_out_fraction is {self.held_out_fraction}; it must be from 0 to below 1"
            )

    def load(self) -> tuple[list[SweInstance], list[SweInstance]]:
        """Returns the training instances and the held-out ones.

        Raises InstanceError, and ValueError if there is no training instance.
        """
        parts: tuple[list[SweInstance], list[SweInstance]] = [], []
        for name, instance in sorted(SweDataset(self.dataset).instances.items()):
            parts[is_held_out(name, self.held_out_fraction)].append(instance)
        if not parts[0]:
            raise ValueError(
                f"all instances of {self.dataset} are held out; add some, or lower held_out_fraction={self.held_out_fraction}"
            )
        return parts

    def make_runner(self) -> AttemptRunner:
        """Returns the runner of attempts at these instances."""
        dataset = SweDataset(self.dataset)
        store = LayerStore(self.store or dataset.folder / "layers", self.limits)
        modules = pathlib.Path(self.node_modules) if self.node_modules else None
        return AttemptRunner(dataset, RuleBuilder(store, modules))

    def make_service(
        self,
        config: ServiceConfig,
        tokenizer: Tokenizer,
        loop: LoopConfig,
        *,
        variant: str = "glm5",
        thinking: bool = True,
    ) -> "SweService":
        """Returns the task service of these instances.

        - tokenizer, variant: those of the gateway.
        - loop: limits of an attempt; commands have their own time limits.
        - thinking: whether replies begin with reasoning.
        """
        limits = SweAttemptConfig.from_loop(loop, self.bash, thinking)
        training, held_out = self.load()
        return SweService(
            config, self.make_runner(), training, held_out, tokenizer, limits, variant=variant
        )


class SweService(ChatService):
    """Task service whose attempts at instances run `attempts.SwePolicy`, as an evaluation does.

    Raises ValueError for an instance whose rollout could exceed the service's time limit, and for a statement that leaves no
    room for a reply.

    Args:
      runner: runner of attempts.
      instances, held_out: instances to train on, and those of evaluations.
      tokenizer, variant: those of the gateway, to count the tokens of prompts.
      limits: limits of an attempt.
    """

    def __init__(
        self,
        config: ServiceConfig,
        runner: AttemptRunner,
        instances: Sequence[SweInstance],
        held_out: Sequence[SweInstance],
        tokenizer: Tokenizer,
        limits: SweAttemptConfig = SweAttemptConfig(),
        *,
        variant: str = "glm5",
    ):
        training, evaluation = (
            [limits.instance_task(instance) for instance in split]
            for split in (instances, held_out)
        )
        counter = TokenCounter(tokenizer, variant)
        super().__init__(
            config, training, evaluation, counter, limits.max_tokens, limits.reply_timeout_s
        )
        for instance in (*instances, *held_out):
            timeout_s = limits.timeout_s + _TEST_RUNS * time_limit(instance.seconds)
            if timeout_s >= config.rollout_timeout_s:
                raise ValueError(
                    f"instance {instance.instance_id} may take {timeout_s:g} s with its tests, and a rollout has "
                    f"{config.rollout_timeout_s:g} s; raise rollout_timeout_s of the service, or leave it out"
                )
        self._limits, self._runner = limits, runner

    async def work(self, task: Task, client: ChatClient) -> tuple[Trace | None, Reward]:
        traces: list[Trace] = []
        policy = SwePolicy(
            lambda: contextlib.nullcontext(client),
            self._counter,
            self._limits,
            on_trace=lambda _, trace: traces.append(trace),
        )
        report = await self._runner.run(task.id, policy)
        return (traces[0] if traces else None), reward_of(report)


def reward_of(report: AttemptReport) -> Reward:
    """Returns the reward of a report, with the shares of both lists of tests as parts."""
    if report.reward is None:
        return Reward(None, {}, report.infra_reason or report.error or "no reward")
    shares = {"fail_to_pass": report.F2P.share, "pass_to_pass": report.P2P.share}
    has_lists = bool(report.F2P.success or report.F2P.failure)
    return Reward(report.reward, shares if has_lists else {}, report.error or "")
