"""Runs orchestrator and engine of the asynchronous trainer in its own process, without other programs or a clock.

    orchestrator = InProcessOrchestrator(config, suite, tokenizer)
    AsyncRlTrainer(config, workdir, orchestrator, orchestrator.pusher).run()

Each request for a batch samples all groups that may be outstanding by then. Samples are therefore as old as
`max_staleness` allows, and the same seed gives the same run, bit by bit. Used for comparisons, notebooks and tests.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_jax.data.record import TokenRecord
from glm5_jax.inference.engine import Engine
from glm5_jax.model import glm5
from glm5_jax.model.lora import without_adapters
from glm5_jax.rl.orchestrator.group_buffer import GroupBuffer, GroupTicket
from glm5_jax.rl.rollouts.rollout import Rollouts
from glm5_jax.rl.trainers.async_trainer import AsyncRlConfig
from glm5_jax.rl.trainers.sync_trainer import TaskSuite, judge, mean_reward
from glm5_jax.rl.trajectory import BatchGroup, Group, Trajectory, summarize_records
from glm5_jax.rl.types import Attempt, Reward, Task, has_used_tools
from glm5_jax.rl.weights.pusher import PushResult
from glm5_jax.rl.weights.reshard import ReshardPusher
from glm5_jax.runtime.coroutines import run_sync
from glm5_jax.text.tokenizer import Tokenizer


class InProcessOrchestrator:
    """Orchestrator in the trainer's process, an `async_trainer.GroupSource`; the suite has tasks, tools and verifier.

    Attributes:
      buffer: admits groups and releases batches.
      pusher: sends the trainer's weights to the engine, which the first push creates.
    """

    blockers: Sequence[str] = ()
    counts: Mapping[str, int] = {}

    def __init__(self, config: AsyncRlConfig, suite: TaskSuite, tokenizer: Tokenizer):
        self._config, self._suite, self._tokenizer = config, suite, tokenizer
        self.buffer, self.pusher = (
            GroupBuffer(config.make_buffer_config()),
            _Pusher(config, tokenizer),
        )

    def begin(self, step: int, version: int, checksum: str | None = None) -> None:
        self.buffer.begin(step, version, checksum)

    def take(self, step: int, timeout_s: float) -> list[BatchGroup] | None:
        """Returns the batch of `step`, which it samples now if necessary."""
        if room := self.buffer.num_admissible():
            tasks = self._suite.tasks.draw(room)
            self._sample(tasks, [self.buffer.admit(task.kind, 0) for task in tasks])
        groups = self.buffer.take(step)
        self.counts = self.buffer.batch_counts(step)
        return groups

    def mark_trained(self, step: int) -> None:
        self.buffer.mark_trained(step)

    def push(self, version: int, checksum: str | None = None) -> None:
        self.buffer.push(version, checksum)

    def evaluate(
        self,
        count: int,
        *,
        group: int,
        temperature: float,
        top_p: float,
        wait_s: float | None = None,
    ) -> dict[str, dict[str, Any]]:
        del wait_s  # it evaluates here
        results = {}
        rollouts = self._rollouts(temperature, top_p)
        for kind, tasks in self._suite.held_out.items():
            groups = rollouts.sample(tasks[:count], 0, group=group)
            run_sync(judge(groups, self._suite, self._config.reward_concurrency))
            results[kind] = {"reward": mean_reward(groups), "count": len(groups), "failed": 0}
        return results

    def sample_judged_groups(self, tasks: Sequence[Task], first: int) -> list[Group]:
        """Returns judged attempts at the tasks, sampled with the newest weights. first: number of earlier tasks."""
        config = self._config
        rollouts = self._rollouts(config.policy.temperature)
        groups = rollouts.sample(tasks, config.seed, first=first)
        run_sync(judge(groups, self._suite, config.reward_concurrency))
        return groups

    def _rollouts(self, temperature: float, top_p: float = 1.0) -> Rollouts:
        options = self._config.rollout, temperature, self._suite.tools
        return Rollouts(self.pusher.engine, self._tokenizer, *options, top_p=top_p)

    def _sample(self, tasks: Sequence[Task], tickets: Sequence[GroupTicket]) -> None:
        """Samples the tasks and fills the buffer. Seeds follow from the order, so every ticket must be a new one."""
        first = tickets[0].order
        if [ticket.order for ticket in tickets] != list(range(first, first + len(tickets))):
            raise ValueError("a group was dropped; let the verifier of the suite have no failures")
        for ticket, group in zip(tickets, self.sample_judged_groups(tasks, first)):
            members = zip(group.records, group.rewards, group.attempts, strict=True)
            self.buffer.put(
                ticket.group_id,
                [_make_trajectory(ticket, index, *m) for index, m in enumerate(members)],
            )


def _make_trajectory(
    ticket: GroupTicket,
    index: int,
    record: TokenRecord,
    reward: Reward,
    attempt: Attempt,
) -> Trajectory:
    name = f"{ticket.group_id}-{index}"
    record = dataclasses.replace(record, group_id=ticket.group_id, rollout_id=name)
    return Trajectory(
        rollout_id=name,
        group_id=ticket.group_id,
        task=ticket.task,
        number=ticket.number,
        reward=reward,
        summary=summarize_records((record,)),
        records=(record,),
        has_used_tools=has_used_tools(attempt.messages),
    )


class _Pusher:
    """Pusher to one engine, which the first push creates with its weights."""

    engine: Engine

    def __init__(self, config: AsyncRlConfig, tokenizer: Tokenizer):
        self._config, self._tokenizer = config, tokenizer
        self._reshard: ReshardPusher | None = None

    def push(self, params, version: int, *, rewind: bool = False) -> PushResult:
        if self._reshard is None:
            cfg = without_adapters(self._config.model)
            model = glm5.Glm5(cfg, params=params, param_dtype="float32")
            self.engine = Engine(model, self._tokenizer, self._config.engine, version=version)
            # The engine needs a copy of the weights, because the learner overwrites those that it was created with.
            self._reshard = ReshardPusher([self.engine])
        return self._reshard.push(params, version, rewind=rewind)

    def refresh(self, params, version: int) -> PushResult | None:
        return None if self._reshard is None else self._reshard.refresh(params, version)
