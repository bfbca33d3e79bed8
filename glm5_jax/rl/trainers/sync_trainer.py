"""A stage that learns from its own attempts: sample, judge, credit, learn; then the same with the new weights."""

import asyncio
import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import jax
import numpy as np

from glm5_jax.checkpoint import models, store
from glm5_jax.data.conversation import Conversation, make_records
from glm5_jax.data.loader import Batch
from glm5_jax.data.record import TokenRecord
from glm5_jax.inference.engine import Engine
from glm5_jax.model import glm5
from glm5_jax.rl.algorithm.batch import lay_out
from glm5_jax.rl.algorithm.credit import credited, distilled
from glm5_jax.rl.config import RlConfig, Teacher
from glm5_jax.rl.rollouts.rollout import Rollouts, Tools, check_task
from glm5_jax.rl.trainers.mismatch_monitor import agreement
from glm5_jax.rl.trajectory import Group
from glm5_jax.rl.types import Attempt, Reward, Task, Verifier, used_tools
from glm5_jax.rl.weights.reshard import Reshard
from glm5_jax.runtime.coroutines import run_sync
from glm5_jax.training.stages import BatchSource, Stage
from glm5_jax.training.step import Step, make_step

MOST_EMPTY = 10  # batches in a row without anything to learn from


class TaskSource(Protocol):
    """Which tasks come next (`envs.task_mixture.TaskMixture`)."""

    def draw(self, count: int) -> list[Task]: ...

    def accept(self, task: Task) -> None: ...

    def drop(self, task: Task) -> None: ...

    def state(self) -> dict: ...

    def restore(self, state: Mapping) -> None: ...


@dataclasses.dataclass(frozen=True)
class World:
    """What a policy is put into. tasks: to learn from; held_out: by kind, to be evaluated on; verify: judges attempts;
    tools: answers their calls; texts: conversations whose replies are learnt as they stand, `RlConfig.texts` in every
    batch; judging: entered while attempts are judged; close: ends what these have started."""

    tasks: TaskSource
    held_out: Mapping[str, Sequence[Task]]
    verify: Verifier
    tools: Tools | None = None
    texts: Sequence[Conversation] = ()
    judging: Callable[[], AbstractAsyncContextManager] = contextlib.nullcontext
    close: Callable[[], None] = lambda: None


class Reinforcement(Stage):
    """Learning from attempts that an engine makes in this process, on the devices of the learner.

    Attributes:
      world: tasks, their verifier and their tools.
    """

    def __init__(
        self,
        config: RlConfig,
        workdir,
        world: World,
        known: Sequence[Task] = (),
        step_maker: Callable[..., Step] = make_step,
        previous_stage: Stage | None = None,
    ):
        """known: tasks that are checked before anything starts."""
        self.world, self._known, self._previous_stage = world, known, previous_stage
        super().__init__(config, workdir, step_maker, previous_stage)

    def _check(self) -> None:
        config = self.config
        if jax.process_count() > 1:
            raise ValueError(
                f"the engine of {config.name} runs in one process and this pod has {jax.process_count()}; start it "
                "in one, on all devices of a host"
            )
        if (longest := config.engine.max_length or config.length) > config.length:
            raise ValueError(
                f"engine.max_length is {longest} and length {config.length}; an attempt must fit a row"
            )
        self._engine_options = dataclasses.asdict(config.engine) | {"max_length": longest}
        taught = {teacher.origin for teacher in config.teachers}
        for task in self._known:
            if taught and not {task.origin, ""} & taught:
                raise ValueError(
                    f"task {task.id!r} is of origin {task.origin!r}, and there are teachers of {sorted(taught)}; add "
                    'one, or one of ""'
                )
        if bool(config.texts) != bool(self.world.texts):
            raise ValueError(
                f"texts is {config.texts} and there are {len(self.world.texts)} texts; give some, and how many of them "
                "a batch has"
            )
        self._texts = [
            record
            for text in self.world.texts
            for record in make_records(text, self.tokenizer, variant=config.chat_variant)
        ]
        if wrong := [len(record) for record in self._texts if len(record) > config.length]:
            raise ValueError(
                f"a text has {wrong[0]} tokens and a row {config.length}; raise length, or leave it out"
            )
        for task in (*self._known, *(t for tasks in self.world.held_out.values() for t in tasks)):
            check_task(task, self.tokenizer, config.rollout, longest, self.world.tools)
        self._check_verifier()

    def _check_verifier(self) -> None:
        """ValueError if nobody can judge a kind of task, as nothing would ever be learnt of it, in silence: of an attempt
        that says nothing there is something to say, unless what judges fails."""
        first = {task.kind: task for task in reversed(self._known)}
        groups = [Group(task, [Attempt(())], []) for task in first.values()]
        run_sync(judge(groups, self.world, self.config.judged_at_once))
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
        self._teachers = {}
        for teacher in config.teachers:
            if self._is_to_come(teacher):
                continue
            try:
                self._teachers[teacher.origin] = models.open_weights(
                    teacher.checkpoint, config.model, mesh=self._mesh, may_differ=config.may_differ
                )
            except ValueError as error:
                raise ValueError(
                    f"the teacher of {teacher.origin!r}: {error}; set its checkpoint in --experiment.teachers"
                ) from None
        self._attempts = Attempts(config, self.world, self._texts)
        return self._attempts

    def _is_to_come(self, teacher: Teacher) -> bool:
        """Whether it is a stage of the same run that has saved nothing yet, while the one before this has still to train."""
        if self._previous_stage is None or self._previous_stage.is_finished:
            return False
        path = pathlib.Path(teacher.checkpoint)
        its_run = path.parent == self._previous_stage.workdir.parent
        return its_run and store.latest_step(path) is None

    def _rows(self, tokens_seen: int) -> int:
        return self.config.rows

    def _describe_step(self) -> str:
        rollout = self.config.rollout
        return f"{rollout.prompts} tasks of {rollout.group} attempts per step"

    def _begin(self, state: dict) -> None:
        config, self._done = self.config, int(state["step"])
        model = glm5.Glm5(
            config.model,
            params=state["params"],
            param_dtype="float32",
            mesh=self._mesh,
        )
        self._engine = Engine(model, self.tokenizer, version=self._done, **self._engine_options)
        # Weights of its own: the learner writes over those that it was made with.
        self._pusher = Reshard([self._engine])
        self._pusher.push(state["params"], self._done)
        more = self.tokenizer, config.rollout
        tools = self.world.tools
        self._attempts.rollouts = Rollouts(self._engine, *more, config.policy.temperature, tools)
        self._examined = Rollouts(self._engine, *more, config.evaluation.temperature, tools)
        teachers = {origin: load() for origin, load in self._teachers.items()}

        def score(origin: str, batch: Batch) -> np.ndarray:
            params = teachers[origin if origin in teachers else ""]
            return np.asarray(self._step.score(params, self._place(batch)))

        self._attempts.score = score if teachers else None

    def _update(self, state: dict, batch: Batch) -> tuple[dict, dict]:
        told = self._agreement(state["params"])
        told["policy/staleness"] = staleness(self._attempts.records, self._done)
        state, metrics = super()._update(state, batch)
        self._done += 1
        self._pusher.push(state["params"], self._done)
        return state, metrics | self._attempts.metrics | told

    def _agreement(self, params) -> dict[str, float]:
        """How far the engine, which still has the weights that sampled the batch, agrees with the learner."""
        config, began = self.config, time.perf_counter()
        told = agreement(
            params,
            self._attempts.records,
            self._engine,
            config.model,
            config.agreement,
            execution=config.step.execution(),
            chunk=config.step.loss_chunk,
            temperature=config.policy.temperature,
            mesh=self._mesh,
        )
        return told and told | {"seconds/agreement": time.perf_counter() - began}

    def _evaluate(self) -> Callable[[dict, int], dict[str, float]] | None:
        config = self.config.evaluation
        held_out = {kind: tasks for kind, tasks in self.world.held_out.items() if tasks}
        if not (config.tasks and held_out):
            return None

        def evaluate(state, done):
            del state, done  # the engine has its weights
            found, made = {}, []
            for kind, tasks in held_out.items():
                groups = self._examined.sample(tasks[: config.tasks], 0, group=config.group)
                run_sync(judge(groups, self.world, self.config.judged_at_once))
                found[f"held_out/{kind}"] = mean_reward(groups)
                made += groups
            whole = {"held_out/reward": float(np.mean(list(found.values())))}
            parts = {f"held_out_part/{name}": value for name, value in _parts(made).items()}
            return whole | found | parts

        return evaluate


class Attempts:
    """Batches of what was attempted with the newest weights, as the learner reads them.

    Attributes:
      rollouts: makes attempts.
      score: the log-probs that the teacher of an origin gives to a batch's tokens; None: there is none.
      records, metrics: of the last batch.
    """

    rollouts: Rollouts
    score: Callable[[str, Batch], np.ndarray] | None
    records: list[TokenRecord]

    def __init__(self, config: RlConfig, world: World, texts: Sequence[TokenRecord] = ()):
        """texts: records of the world's."""
        self._config, self._world, self._texts = config, world, texts
        self._made = 0  # batches
        self.metrics: dict = {}

    def next(self, batch_size: int) -> Batch:
        """The next batch, whose rows are a multiple of batch_size; ValueError if nothing can be learnt from many."""
        for _ in range(MOST_EMPTY):
            groups = self._collect()
            if records := self._records(groups):
                first = (self._made - 1) * self._config.texts
                numbers = range(first, first + self._config.texts)
                records += [self._texts[i % len(self._texts)] for i in numbers]
                self.records = records
                if self.score is not None:
                    self.records = records = self._taught(groups, records, batch_size)
                config = self._config
                batch, _ = lay_out(records, config.length, batch_size, config.streams)
                return batch
        rewards = [reward for group in groups for reward in group.rewards]
        errors = [reward.error for reward in rewards if reward.value is None]
        why = f"of the last one's {len(rewards)} attempts {len(errors)} have no reward"
        if errors:
            why += f": {sorted(set(errors))[:3]}"
        if len(errors) < len(rewards):
            why += (
                "; the others are worth the same in all of their group, which credit.drop_flat leaves out; give tasks "
                "that are solved at times, or larger groups"
            )
        raise ValueError(f"{MOST_EMPTY} batches in a row had nothing to learn from; {why}")

    def state(self) -> dict:
        return {"made": self._made, "tasks": self._world.tasks.state()}

    def check(self, state: dict) -> None:
        """`restore` says what does not fit."""

    def restore(self, state: dict) -> None:
        self._made = state["made"]
        self._world.tasks.restore(state["tasks"])

    def close(self) -> None:
        self._world.close()

    def _collect(self) -> list[Group]:
        config, number = self._config, self._made
        self._made += 1
        began = time.perf_counter()
        count = config.rollout.prompts
        tasks = self._world.tasks.draw(count)
        groups = self.rollouts.sample(tasks, config.seed, first=number * count, name=f"{number}-")
        sampled = time.perf_counter()
        run_sync(judge(groups, self._world, config.judged_at_once))
        self.metrics = told(groups) | {
            "seconds": {"rollout": sampled - began, "judging": time.perf_counter() - sampled}
        }
        return groups

    def _records(self, groups: list[Group]):
        config, records = self._config, []
        for group in groups:
            if config.learns == "teachers":
                found = distilled([group], config.credit)
            else:
                found = credited([group], config.credit, config.model.vocab_size)
            (self._world.tasks.accept if found else self._world.tasks.drop)(group.task)
            records += found
        return records

    def _taught(
        self, groups: list[Group], records: list[TokenRecord], count: int
    ) -> list[TokenRecord]:
        """With ref_logp of the teacher of each one's task, which reads those of its tasks alone, so many rows at once: one
        program serves all batches."""
        length, began = self._config.length, time.perf_counter()
        origins = {group.task.id: group.task.origin for group in groups}
        read: dict[str, list[TokenRecord]] = {}
        for record in records:
            if record.ref_kl_weight is not None:  # a text has none
                read.setdefault(origins[record.task_id], []).append(record)
        taught = {}
        for origin, own in read.items():
            batch, rows = lay_out(own, length, count, ("token_ids",))
            for first in range(0, len(rows), count):
                part = {name: stream[first : first + count] for name, stream in batch.items()}
                for logp, placed in zip(self.score(origin, part), rows[first:]):
                    ends = np.cumsum([len(record) for record in placed])
                    for record, found in zip(placed, np.split(logp, ends)):
                        found = np.where(record.loss_mask, found, np.nan)
                        taught[id(record)] = dataclasses.replace(record, ref_logp=found)
        self.metrics["seconds"]["teachers"] = time.perf_counter() - began
        return [taught.get(id(record), record) for record in records]


async def judge(groups: Sequence[Group], world: World, at_once: int) -> None:
    """Gives every attempt its reward, so many at once."""
    turns = asyncio.Semaphore(at_once)

    async def one(task: Task, attempt: Attempt) -> Reward:
        if attempt.finish_reason == "failed":
            return Reward(None, error=attempt.error)
        async with turns:
            return await world.verify(task, attempt)

    async with world.judging():
        found = await asyncio.gather(
            *(asyncio.gather(*(one(g.task, attempt) for attempt in g.attempts)) for g in groups)
        )
    for group, rewards in zip(groups, found):
        group.rewards = list(rewards)


def told(groups: Sequence[Group]) -> dict:
    """Numbers of a batch: rewards by kind and part; lengths, how attempts ended, and how many of them replied to what a
    tool had answered."""
    by_kind: dict[str, list[Group]] = {}
    for group in groups:
        by_kind.setdefault(group.task.kind, []).append(group)
    attempts = [attempt for group in groups for attempt in group.attempts]
    rewards = [reward for group in groups for reward in group.rewards]
    lengths = [record.loss_mask.sum() for group in groups for record in group.records]
    flat = [len({r.value for r in group.rewards if r.value is not None}) < 2 for group in groups]
    return {
        "reward": {
            "mean": mean_reward(groups),
            **{kind: mean_reward(own) for kind, own in by_kind.items()},
        },
        "reward_part": _parts(groups),
        "rollout": {
            "tokens": float(np.mean(lengths)),
            "truncated": float(np.mean([a.finish_reason == "length" for a in attempts])),
            "environment_errors": float(np.mean([r.value is None for r in rewards])),
            "used_tools": float(np.mean([used_tools(a.messages) for a in attempts])),
            "flat_groups": float(np.mean(flat)),
        },
    }


def staleness(records: Iterable[TokenRecord], step: int) -> float:
    """By how many of a learner's steps the weights of the oldest token are behind; NaN if none was sampled."""
    versions = (record.weight_version for record in records if record.weight_version is not None)
    sampled = (own[own >= 0] for own in versions)
    return float(step - min((own.min() for own in sampled if len(own)), default=np.nan))


def _parts(groups: Sequence[Group]) -> dict[str, float]:
    """The mean of each part of the rewards, where there is one."""
    parts: dict[str, list[float]] = {}
    for group in groups:
        for reward in group.rewards:
            for name, value in reward.parts.items():
                if value is not None:
                    parts.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in parts.items()}


def mean_reward(groups: Sequence[Group]) -> float:
    """Of all rewards that there are; NaN without any."""
    values = [r.value for group in groups for r in group.rewards if r.value is not None]
    return float(np.mean(values)) if values else float("nan")
