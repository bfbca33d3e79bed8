"""Trainer of on-policy RL in one process: samples attempts, judges them, assigns credit, updates the weights, repeats.

The engine runs in the trainer's process, on the devices of the learner. They take turns: the pages of the engine are
freed during an update, and the new weights move from the learner's arrays to the engine's in device memory.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import jax
import numpy as np

from glm5_jax.data.conversation import Conversation
from glm5_jax.data.loader import Batch
from glm5_jax.data.record import TokenRecord
from glm5_jax.inference.engine import Engine
from glm5_jax.model import glm5
from glm5_jax.model.lora import merge_adapters, without_adapters
from glm5_jax.rl.algorithm.batch import pack_records
from glm5_jax.rl.algorithm.credit import assign_credit, make_distillation_records
from glm5_jax.rl.config import RlConfig
from glm5_jax.rl.rollouts.rollout import Rollouts, SamplingStopped, Tools, check_task
from glm5_jax.rl.trainers.mismatch_monitor import check_mismatch
from glm5_jax.rl.trainers.sft_records import render_conversations, select_records
from glm5_jax.rl.trainers.teachers import TeacherScorer, make_scorer, open_teachers
from glm5_jax.rl.trajectory import Group
from glm5_jax.rl.types import Attempt, Reward, Task, Verifier, has_used_tools
from glm5_jax.rl.weights.reshard import ReshardPusher
from glm5_jax.runtime.coroutines import run_sync
from glm5_jax.runtime.preemption import PreemptionGuard
from glm5_jax.training.stages import BatchSource, Stage
from glm5_jax.training.step import Step, make_step

MAX_EMPTY_BATCHES = 10  # in a row, without a record to train on


class TaskSource(Protocol):
    """Source of training tasks; `envs.task_mixture.TaskMixture` documents its methods."""

    def draw(self, count: int) -> list[Task]: ...

    def accept(self, task: Task) -> None: ...

    def drop(self, task: Task) -> None: ...

    def state(self) -> dict: ...

    def restore(self, state: Mapping) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSuite:
    """Tasks of a run, with their verifier and tools.

    Attributes:
      tasks: source of training tasks.
      held_out: tasks for evaluation, by kind.
      verify: judge of attempts.
      tools: runs the policy's tool calls; None: no tools.
      conversations: conversations for supervised training; every batch has `RlConfig.sft_rows` of their records.
      judging: context that is open while attempts are judged.
      close: releases the resources of the others.
    """

    tasks: TaskSource
    held_out: Mapping[str, Sequence[Task]]
    verify: Verifier
    tools: Tools | None = None
    conversations: Sequence[Conversation] = ()
    judging: Callable[[], AbstractAsyncContextManager] = contextlib.nullcontext
    close: Callable[[], None] = lambda: None


class SyncRlTrainer(Stage[RlConfig]):
    """Trains on attempts that an engine in the same process makes, on the devices of the learner.

    Attributes:
      suite: tasks with their verifier and tools.
    """

    def __init__(
        self,
        config: RlConfig,
        workdir,
        suite: TaskSuite,
        checked_tasks: Sequence[Task] = (),
        step_maker: Callable[..., Step] = make_step,
        previous_stage: Stage | None = None,
    ):
        """Creates the stage. checked_tasks: tasks that are checked before anything starts."""
        self.suite, self._checked_tasks, self._previous_stage = suite, checked_tasks, previous_stage
        super().__init__(config, workdir, step_maker, previous_stage)

    def _check(self) -> None:
        """Raises ValueError if processes, lengths, teachers, conversations, tasks or verifier do not fit the config."""
        config = self.config
        if jax.process_count() > 1:
            raise ValueError(
                f"the engine of {config.name} runs in one process and this pod has {jax.process_count()}; start it "
                "in one, on all devices of a host, or give --experiment.engine_placement=separate"
            )
        # Lengths.
        if (longest := config.engine.max_length or config.length) > config.length:
            raise ValueError(
                f"engine.max_length is {longest} and length {config.length}; an attempt must fit a row"
            )
        self._engine_config = dataclasses.replace(config.engine, max_length=longest)
        # Teachers.
        origins = {teacher.origin for teacher in config.teachers}
        for task in self._checked_tasks:
            if origins and not {task.origin, ""} & origins:
                raise ValueError(
                    f"task {task.id!r} is of origin {task.origin!r}, and there are teachers of {sorted(origins)}; add "
                    'one, or one of ""'
                )
        # Conversations.
        self._sft_records = render_conversations(self.suite.conversations, config, self.tokenizer)
        # Tasks.
        for task in (
            *self._checked_tasks,
            *(t for tasks in self.suite.held_out.values() for t in tasks),
        ):
            check_task(task, self.tokenizer, config.rollout, longest, self.suite.tools)
        self._check_verifier()

    def _check_verifier(self) -> None:
        """Raises ValueError if no verifier can judge a kind of task.

        Otherwise training would silently learn nothing from that kind. An attempt without messages has a reward unless
        the verifier itself fails.
        """
        first = {task.kind: task for task in reversed(self._checked_tasks)}
        groups = [
            Group(task=task, attempts=[Attempt(messages=())], records=[]) for task in first.values()
        ]
        run_sync(judge(groups, self.suite, self.config.reward_concurrency))
        for group in groups:
            [reward] = group.rewards
            if reward.value is None:
                raise ValueError(
                    f"task {group.task.id!r} of kind {group.task.kind!r} cannot be judged: {reward.error}"
                )

    def _make_step(self, step_maker: Callable[..., Step], **options) -> Step:
        return super()._make_step(step_maker, token_loss=self.config.token_loss, **options)

    def _open(self) -> BatchSource:
        config = self.config
        teachers = open_teachers(config, self._mesh, self._previous_stage)
        scorer = make_scorer(config, teachers, self.score)
        self._rollout_source = RolloutSource(config, self.suite, self._sft_records, scorer)
        return self._rollout_source

    def _rows(self, tokens_seen: int) -> int:
        return self.config.rows

    def _describe_step(self) -> str:
        rollout = self.config.rollout
        return f"{rollout.prompts} tasks of {rollout.group} attempts per step"

    def _begin(self, state: dict) -> None:
        config, self._done = self.config, int(state["step"])
        params = merge_adapters(state["params"], config.model)
        model = glm5.Glm5(
            without_adapters(config.model),
            params=params,
            param_dtype="float32",
            mesh=self._mesh,
        )
        self._engine = Engine(model, self.tokenizer, self._engine_config, version=self._done)
        # The engine needs a copy of the weights, because the learner overwrites those that it was created with.
        self._pusher = ReshardPusher([self._engine])
        self._pusher.push(params, self._done)
        self._rollout_source.rollouts = self._make_rollouts(config.policy.temperature)
        evaluation = config.evaluation
        self._eval_rollouts = self._make_rollouts(evaluation.temperature, evaluation.top_p)

    def _make_rollouts(self, temperature: float, top_p: float = 1.0) -> Rollouts:
        """Returns the sampler from the engine, which a requested stop ends."""
        stop, options = self._stop, (self.tokenizer, self.config.rollout, temperature)
        return Rollouts(self._engine, *options, self.suite.tools, lambda: bool(stop), top_p=top_p)

    def _train(self, stop: PreemptionGuard) -> None:
        self._stop = stop
        super()._train(stop)

    def _update(self, state: dict, batch: Batch) -> tuple[dict, dict]:
        rl_metrics = self._check_mismatch(state["params"])
        rl_metrics["policy/staleness"] = compute_staleness(self._rollout_source.records, self._done)
        # Engine and learner take turns on the devices: the update has the memory of the pages.
        self._engine.sleep()
        state, metrics = super()._update(state, batch)
        self._done += 1
        self._pusher.push(merge_adapters(state["params"], self.config.model), self._done)
        self._engine.wake_up()
        return state, metrics | self._rollout_source.metrics | rl_metrics

    def _check_mismatch(self, params) -> dict[str, float]:
        """Returns the mismatch metrics of engine and learner; the engine still has the weights that sampled the batch."""
        config, began = self.config, time.perf_counter()
        metrics = check_mismatch(
            params,
            self._rollout_source.records,
            self._engine,
            config.model,
            config.mismatch,
            execution=config.step.execution(),
            chunk=config.step.loss_chunk,
            temperature=config.policy.temperature,
            mesh=self._mesh,
        )
        return metrics and metrics | {"seconds/mismatch": time.perf_counter() - began}

    def _evaluate(self) -> Callable[[dict, int], dict[str, float]] | None:
        config = self.config.evaluation
        held_out = {kind: tasks for kind, tasks in self.suite.held_out.items() if tasks}
        if not (config.tasks and held_out):
            return None

        def evaluate(state, done):
            del state, done  # the engine has these weights
            rewards, all_groups = {}, []
            for kind, tasks in held_out.items():
                try:
                    groups = self._eval_rollouts.sample(
                        tasks[: config.tasks], 0, group=config.group
                    )
                except SamplingStopped:
                    return {}
                run_sync(judge(groups, self.suite, self.config.reward_concurrency))
                rewards[f"held_out/{kind}"] = mean_reward(groups)
                all_groups += groups
            mean = {"held_out/reward": float(np.mean(list(rewards.values())))}
            parts = {
                f"held_out_part/{name}": value for name, value in _mean_parts(all_groups).items()
            }
            return mean | rewards | parts

        return evaluate


class RolloutSource:
    """Batches of judged attempts by the newest weights, as rows for the learner; a `training.stages.BatchSource`.

    Attributes:
      rollouts: samples attempts.
      records: records of the last batch.
      metrics: metrics of the last batch.
    """

    rollouts: Rollouts
    records: list[TokenRecord]

    def __init__(
        self,
        config: RlConfig,
        suite: TaskSuite,
        sft_records: Sequence[TokenRecord] = (),
        teachers: TeacherScorer | None = None,
    ):
        """Creates the source.

        Args:
          sft_records: records of the suite's conversations.
          teachers: teachers of the attempts; None: no teachers.
        """
        self._config, self._suite, self._sft_records = config, suite, sft_records
        self._teachers = teachers
        self._num_batches = 0
        self.metrics: dict[str, Any] = {}

    def next(self, batch_size: int) -> Batch | None:
        """Returns the next batch, whose number of rows is a multiple of batch_size; None if a stop is requested.

        Raises ValueError if `MAX_EMPTY_BATCHES` batches in a row have no record to train on.
        """
        config, before = self._config, self.state()
        rewards: list[Reward] = []
        for _ in range(MAX_EMPTY_BATCHES):
            try:
                groups = self._sample_groups()
            except SamplingStopped:
                self.restore(before)  # the next run draws these tasks again
                return None
            if records := self._credit(groups):
                if config.sft_rows:
                    number = self._num_batches - 1
                    records += select_records(self._sft_records, number, config.sft_rows)
                if self._teachers is not None:
                    began = time.perf_counter()
                    origins = {r.group_id: g.task.origin for g in groups for r in g.records}
                    records = self._teachers.add_logprobs(records, origins, batch_size)
                    self.metrics["seconds"]["teachers"] = time.perf_counter() - began
                self.records = records
                batch, _ = pack_records(records, config.length, batch_size, config.streams)
                return batch
            rewards = [reward for group in groups for reward in group.rewards]
        raise ValueError(
            f"{MAX_EMPTY_BATCHES} batches in a row had nothing to train on; {_explain_empty(rewards)}"
        )

    def state(self) -> dict:
        return {"made": self._num_batches, "tasks": self._suite.tasks.state()}

    def check(self, state: dict) -> None:
        """Does nothing, because `restore` raises for a state that does not fit."""

    def restore(self, state: dict) -> None:
        self._num_batches = state["made"]
        self._suite.tasks.restore(state["tasks"])

    def close(self) -> None:
        self._suite.close()

    def _sample_groups(self) -> list[Group]:
        """Samples and judges the attempts of the next batch."""
        config, number = self._config, self._num_batches
        self._num_batches += 1
        began = time.perf_counter()
        count = config.rollout.prompts
        tasks = self._suite.tasks.draw(count)
        groups = self.rollouts.sample(tasks, config.seed, first=number * count, name=f"{number}-")
        sampled = time.perf_counter()
        run_sync(judge(groups, self._suite, config.reward_concurrency))
        self.metrics = batch_metrics(groups) | {
            "seconds": {"rollout": sampled - began, "judging": time.perf_counter() - sampled}
        }
        return groups

    def _credit(self, groups: list[Group]) -> list[TokenRecord]:
        """Returns the records to train on. Accepts the tasks that have some, and drops the others."""
        config, records = self._config, []
        for group in groups:
            if config.objective == "teachers":
                credited = make_distillation_records([group], config.credit)
            else:
                credited = assign_credit([group], config.credit, config.model.vocab_size)
            (self._suite.tasks.accept if credited else self._suite.tasks.drop)(group.task)
            records += credited
        return records


def _explain_empty(rewards: Sequence[Reward]) -> str:
    """Returns why attempts with these rewards left nothing to train on."""
    errors = [reward.error for reward in rewards if reward.value is None]
    reason = f"{len(errors)} of the last batch's {len(rewards)} attempts have no reward"
    if errors:
        reason += f": {sorted(set(errors))[:3]}"
    if len(errors) < len(rewards):
        reason += (
            "; the rewards of the others are equal within each group, which credit.drop_zero_variance_groups leaves "
            "out; give tasks that are solved at times, or larger groups"
        )
    return reason


async def judge(groups: Sequence[Group], suite: TaskSuite, concurrency: int) -> None:
    """Sets the rewards of all groups. At most `concurrency` attempts are judged at once."""
    semaphore = asyncio.Semaphore(concurrency)

    async def judge_attempt(task: Task, attempt: Attempt) -> Reward:
        if attempt.finish_reason == "failed":
            return Reward(None, error=attempt.error)
        async with semaphore:
            return await suite.verify(task, attempt)

    async with suite.judging():
        rewards_by_group = await asyncio.gather(
            *(
                asyncio.gather(*(judge_attempt(group.task, attempt) for attempt in group.attempts))
                for group in groups
            )
        )
    for group, rewards in zip(groups, rewards_by_group):
        group.rewards = list(rewards)


def batch_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    """Returns the metrics of a batch: rewards by kind and part, lengths, endings and shares of attempts and groups."""
    by_kind: dict[str, list[Group]] = {}
    for group in groups:
        by_kind.setdefault(group.task.kind, []).append(group)
    attempts = [attempt for group in groups for attempt in group.attempts]
    rewards = [reward for group in groups for reward in group.rewards]
    lengths = [record.loss_mask.sum() for group in groups for record in group.records]
    has_zero_variance = [
        len({r.value for r in group.rewards if r.value is not None}) < 2 for group in groups
    ]
    return {
        "reward": {
            "mean": mean_reward(groups),
            **{kind: mean_reward(kind_groups) for kind, kind_groups in by_kind.items()},
        },
        "reward_part": _mean_parts(groups),
        "rollout": {
            "tokens": float(np.mean(lengths)),
            "truncated": float(np.mean([a.finish_reason == "length" for a in attempts])),
            "environment_errors": float(np.mean([r.value is None for r in rewards])),
            # Attempts with a reply after a tool's result.
            "used_tools": float(np.mean([has_used_tools(a.messages) for a in attempts])),
            "zero_variance_groups": float(np.mean(has_zero_variance)),
        },
    }


def compute_staleness(records: Iterable[TokenRecord], step: int) -> float:
    """Returns the age of the oldest token's weights in learner steps; NaN if no token was sampled."""
    versions = (record.weight_version for record in records if record.weight_version is not None)
    sampled = (v[v >= 0] for v in versions)
    return float(step - min((v.min() for v in sampled if len(v)), default=np.nan))


def _mean_parts(groups: Sequence[Group]) -> dict[str, float]:
    """Returns the mean of each part of the rewards, over the rewards that have it."""
    parts: dict[str, list[float]] = {}
    for group in groups:
        for reward in group.rewards:
            for name, value in reward.parts.items():
                if value is not None:
                    parts.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in parts.items()}


def mean_reward(groups: Sequence[Group]) -> float:
    """Returns the mean over all attempts that have a reward; NaN without any."""
    values = [r.value for group in groups for r in group.rewards if r.value is not None]
    return float(np.mean(values)) if values else float("nan")
