"""Trainer of the asynchronous system: trains on groups that engines sample at the same time (GLM-5 4.1.1).

Each step requests a batch from the orchestrator, updates the weights and reports the step. Every few updates the
weights are pushed to the engines. Tasks, tools and engines are unknown to the trainer. With `max_staleness=0` it is the
synchronous trainer, because no group is sampled during an update.

While waiting for a batch, the trainer also pushes its weights to engines that restarted or missed the last push.
Otherwise it would deadlock: no engine with current weights, hence no batch, hence no push.
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import msgspec
import numpy as np
from jaxtyping import PyTree

from glm5_jax.data.conversation import Conversation
from glm5_jax.data.loader import Batch, take_rows
from glm5_jax.data.record import TokenRecord
from glm5_jax.inference.client import ServerError
from glm5_jax.model.lora import merge_adapters
from glm5_jax.parallel import multihost
from glm5_jax.rl.algorithm.batch import pack_records
from glm5_jax.rl.algorithm.credit import (
    assign_batch_credit,
    make_batch_distillation_records,
)
from glm5_jax.rl.config import RlConfig
from glm5_jax.rl.orchestrator.client import (
    batch_group_from_json,
    batch_group_to_json,
    with_records,
)
from glm5_jax.rl.orchestrator.group_repair import FAILED, ROLLED_BACK, STALE
from glm5_jax.rl.orchestrator.staleness import BufferConfig
from glm5_jax.rl.rollouts.record_codec import encode_records
from glm5_jax.rl.trainers.sft_records import render_conversations, select_records
from glm5_jax.rl.trainers.teachers import (
    TeacherScorer,
    make_scorer,
    open_teachers,
)
from glm5_jax.rl.trajectory import BatchGroup, Trajectory
from glm5_jax.rl.weights.pusher import Pusher, PushFailed, PushResult
from glm5_jax.runtime.preemption import PreemptionGuard
from glm5_jax.runtime.utilization import FOLDER, UtilizationRecorder
from glm5_jax.training.metrics import TrainingStopped
from glm5_jax.training.stages import BatchSource, Stage
from glm5_jax.training.step import Step, make_step, reset_optimizer

_log = logging.getLogger(__name__)
STOP_POLL_INTERVAL_S = 5.0  # time between two looks for a requested stop, in a wait
DROP_REASONS = (FAILED, ROLLED_BACK, STALE, "cancelled")


class GroupSource(Protocol):
    """Source of batches; `rl.orchestrator.client.OrchestratorClient` documents its methods."""

    @property
    def blockers(self) -> Sequence[str]: ...

    @property
    def counts(self) -> Mapping[str, int]: ...

    def begin(self, step: int, version: int, checksum: str | None) -> None: ...

    def take(self, step: int, timeout_s: float) -> list[BatchGroup] | None: ...

    def mark_trained(self, step: int) -> None: ...

    def push(self, version: int, checksum: str | None) -> None: ...

    def evaluate(
        self, count: int, *, group: int, temperature: float, top_p: float, wait_s: float
    ) -> dict[str, dict] | None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class AsyncRlConfig(RlConfig):
    """Configuration of a run that trains while engines sample.

    Attributes:
      max_staleness, max_running, pacing: options of `BufferConfig`; `rollout` has those of groups and batches.
      push_every: updates between two pushes of weights (K in GLM-5 4.1.1).
      reset_optimizer: True resets the optimiser's moments after each push (GLM-5 4.1.1).
      batch_timeout_s: time limit of the wait for a batch, in seconds; then the run ends.
      refresh_interval_s: time between two checks that all engines have the weights, during the wait, in seconds.
    """

    max_staleness: int = 4  # not disclosed
    max_running: int = 128  # GLM-5 4.1.1: more than 1,000 rollouts
    pacing: bool = True
    push_every: int = 1  # not disclosed
    reset_optimizer: bool = True
    batch_timeout_s: float = 7200.0  # our choice
    refresh_interval_s: float = 10.0  # our choice

    def __post_init__(self):
        super().__post_init__()
        for name in ("push_every", "batch_timeout_s", "refresh_interval_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.max_staleness < self.push_every - 1:
            raise ValueError(
                f"max_staleness is {self.max_staleness}, too small for push_every={self.push_every}: after the first "
                f"update no group could start until the next push; use at least {self.push_every - 1}"
            )
        self.make_buffer_config()

    def origin_of(self, task: str) -> str:
        """Returns the origin of the tasks of a task service, which selects their teacher. task: name of the service."""
        del task
        return ""

    @property
    def changeable_on_resume(self) -> tuple[str, ...]:
        return *super().changeable_on_resume, "batch_timeout_s", "refresh_interval_s"

    @property
    def has_engine_processes(self) -> bool:
        return True

    def make_buffer_config(self) -> BufferConfig:
        """Returns the options of the orchestrator's buffer. Raises ValueError if they contradict each other."""
        return BufferConfig(
            group=self.rollout.group,
            batch_groups=self.rollout.prompts,
            max_staleness=self.max_staleness,
            max_running=self.max_running,
            pacing=self.pacing,
        )


class AsyncRlTrainer(Stage[AsyncRlConfig]):
    """Trains on the batches of an orchestrator, and pushes weights to its engines.

    conversations: conversations for supervised training; every batch has `RlConfig.sft_rows` of their records.
    """

    def __init__(
        self,
        config: AsyncRlConfig,
        workdir,
        orchestrator: GroupSource,
        pusher: Pusher,
        step_maker: Callable[..., Step] = make_step,
        previous_stage: Stage | None = None,
        conversations: Sequence[Conversation] = (),
    ):
        self._conversations, self._previous_stage = conversations, previous_stage
        self._orchestrator = (
            orchestrator if jax.process_count() == 1 else FirstProcessClient(orchestrator)
        )
        self._pusher = pusher
        super().__init__(config, workdir, step_maker, previous_stage)

    def _make_step(self, step_maker: Callable[..., Step], **options) -> Step:
        return super()._make_step(step_maker, token_loss=self.config.token_loss, **options)

    def _check(self) -> None:
        self._sft_records = render_conversations(self._conversations, self.config, self.tokenizer)

    def _open(self) -> BatchSource:
        config, rows = self.config, (self._group, self._num_groups)
        teachers = open_teachers(config, self._mesh, self._previous_stage)
        self._batches = OrchestratorBatches(
            config,
            self._orchestrator,
            *rows,
            refresh=self._refresh,
            sft_records=self._sft_records,
            teachers=make_scorer(config, teachers, self.score),
        )
        return self._batches

    def _rows(self, tokens_seen: int) -> int:
        return self.config.rows // self._num_groups

    def _describe_step(self) -> str:
        rollout = self.config.rollout
        return f"{rollout.prompts} tasks of {rollout.group} attempts per step, at most {self.config.max_staleness} steps old"

    def _train(self, stop: PreemptionGuard) -> None:
        self._batches.should_stop = lambda: multihost.any_process(stop)
        first = jax.process_index() == 0
        path = self.workdir / FOLDER / "train.jsonl"
        recorder = UtilizationRecorder(path, lambda: not self._batches.is_waiting)
        with recorder if first else contextlib.nullcontext():
            super()._train(stop)

    def _begin(self, state: dict) -> None:
        """Pushes the weights to the engines before any sampling.

        The push rewinds engines that hold later weights of a trainer that has died.
        """
        done = self._batches.step = self._version = int(state["step"])
        self._params = self._pushed_params(state["params"])
        self._should_reset_moments = False
        with _as_training_stopped(), self._batches.idle():
            if (pushed := self._first_push(done)) is not None:
                self._orchestrator.begin(done, done, pushed.engine_checksum)

    def _pushed_params(self, params: PyTree) -> PyTree:
        """Returns the weights that the pusher takes: those of a model without adapters."""
        return merge_adapters(params, self.config.model)

    def _first_push(self, version: int) -> PushResult | None:
        """Pushes the weights, and retries while engines that were killed together with the last trainer restart.

        Returns None if a stop is requested meanwhile.
        """
        config = self.config
        for retries_left in reversed(
            range(1 + int(config.batch_timeout_s // config.refresh_interval_s))
        ):
            try:
                return self._pusher.push(self._params, version, rewind=True)
            except PushFailed as error:
                if error.is_refused or not retries_left:
                    raise
                _log.warning("%s", error)
            end = time.monotonic() + config.refresh_interval_s
            while time.monotonic() < end:
                if self._batches.should_stop():
                    return None
                time.sleep(min(STOP_POLL_INTERVAL_S, config.refresh_interval_s))
        raise AssertionError("the last try has raised")

    def _update(self, state: dict, batch: Batch) -> tuple[dict, dict]:
        batches, config = self._batches, self.config
        if self._should_reset_moments:
            state = reset_optimizer(state)
        state, metrics = super()._update(state, batch)
        done, params = batches.step + 1, self._pushed_params(state["params"])
        rl_metrics = dict(batches.metrics)
        with _as_training_stopped():
            pushed = self._report_and_push(params, done)
            if pushed is not None:
                rl_metrics["push"] = {
                    "bytes": pushed.sent_bytes,
                    "lost": len(pushed.failed_engines),
                }
                rl_metrics["seconds"] = rl_metrics["seconds"] | {"push": pushed.duration_s}
                if config.reset_optimizer:
                    state = reset_optimizer(state)
        batches.step, self._params, self._should_reset_moments = done, params, False
        return state, metrics | rl_metrics

    def _report_and_push(self, params, done: int) -> PushResult | None:
        """Reports the step to the orchestrator, and pushes the weights if it is time. Returns the push, None without one.

        During a stop the orchestrator may have stopped first. Then the next trainer reports and pushes when it begins.
        """
        try:
            # Before the push, because this call fails if another trainer has replaced this one. It then must not push.
            self._orchestrator.mark_trained(self._batches.step)
            # A push takes time that a stop may not have; the next trainer pushes when it begins.
            should_push = done % self.config.push_every == 0 and not self._batches.should_stop()
            return self._push(params, done) if should_push else None
        except ServerError as error:
            if not self._batches.should_stop():
                raise
            _log.warning("step %d is saved without a report: %s", done, error)
            return None

    def _push(self, params, version: int, only_missing: bool = False) -> PushResult | None:
        """Pushes the weights to the engines, or with only_missing to those that lack them.

        Returns None if no engine took them, or none lacked them. A failed push is repeated while there is no batch.
        """
        push = self._pusher.refresh if only_missing else self._pusher.push
        try:
            pushed = push(params, version)
        except PushFailed as error:
            _log.warning("%s", error)
            return None
        if pushed is not None:
            self._orchestrator.push(version, pushed.engine_checksum)
            self._version = version
        return pushed

    def _refresh(self) -> None:
        """Pushes the weights to engines without them, since their lack may be the reason why no batch arrives."""
        before, done = self._version, self._batches.step
        if self._push(self._params, done, only_missing=True) and done != before:
            self._should_reset_moments = self.config.reset_optimizer

    def _evaluate(self) -> Callable[[dict, int], dict[str, float]] | None:
        if not self.config.evaluation.tasks:
            return None

        def evaluate(state, done):
            del state, done  # the engines have these weights, or those of the last push
            with _as_training_stopped(), self._batches.idle():
                results = self._evaluate_until_stop()
            rewards = {task: result["reward"] for task, result in results.items()}
            rewards = {task: reward for task, reward in rewards.items() if reward is not None}
            if not rewards:
                return {}
            mean = {"held_out/reward": float(np.mean(list(rewards.values())))}
            return mean | {f"held_out/{task}": reward for task, reward in rewards.items()}

        return evaluate

    def _evaluate_until_stop(self) -> Mapping[str, dict]:
        """Returns the orchestrator's evaluation; empty if a stop is requested before its end."""
        config = self.config.evaluation
        while True:
            results = self._orchestrator.evaluate(
                config.tasks,
                group=config.group,
                temperature=config.temperature,
                top_p=config.top_p,
                wait_s=STOP_POLL_INTERVAL_S,
            )
            if results is not None:
                return results
            if self._batches.should_stop():
                return {}


class OrchestratorBatches:
    """Batches of the orchestrator, as rows for the learner; a `training.stages.BatchSource`.

    Attributes:
      step: number of the next batch.
      records: records of the last batch.
      metrics: metrics of the last batch.
      is_waiting: True while the trainer has nothing to do, because the orchestrator has no batch for it.
      should_stop: returns whether a process was asked to stop; all processes call it together.
    """

    records: list[TokenRecord]
    is_waiting = False

    def __init__(
        self,
        config: AsyncRlConfig,
        orchestrator: GroupSource,
        group: int = 0,
        num_groups: int = 1,
        refresh: Callable[[], None] = lambda: None,
        sft_records: Sequence[TokenRecord] = (),
        teachers: TeacherScorer | None = None,
    ):
        """Creates the source of one process of a pod.

        Args:
          group, num_groups: the process gets part `group` of `num_groups` equal parts of a batch's rows.
          refresh: called at intervals during the wait for a batch.
          sft_records: records of which every batch has `RlConfig.sft_rows`.
          teachers: teachers of the attempts; None: no teachers.
        """
        self._sft_records, self._teachers = sft_records, teachers
        self._config, self._orchestrator, self._refresh = config, orchestrator, refresh
        self._group, self._num_groups = group, num_groups
        self.step = 0
        self.metrics: dict[str, Any] = {}
        self.should_stop: Callable[[], bool] = lambda: False

    def next(self, batch_size: int) -> Batch | None:
        """Returns the batch of `step`; None if a stop is requested while it waits.

        Raises ValueError, with the blockers, if the batch does not arrive in time.
        """
        config, began = self._config, time.perf_counter()
        try:
            with self.idle():
                groups = self._wait_for_groups()
        except ServerError as error:
            if self.should_stop():
                return None
            raise ValueError(str(error)) from error
        if groups is None and self.should_stop():
            return None
        if groups is None:
            why = "; ".join(self._orchestrator.blockers) or "the orchestrator does not say why"
            raise ValueError(f"no batch has arrived within {config.batch_timeout_s:g} s: {why}")
        waited = time.perf_counter() - began
        self.metrics = batch_metrics(groups, self.step, self._orchestrator.counts)
        self.metrics["seconds"] = {"waiting": waited}
        self.records = self._credit(groups)
        if config.sft_rows:
            self.records += select_records(self._sft_records, self.step, config.sft_rows)
        multiple = batch_size * self._num_groups
        if self._teachers is not None:
            began = time.perf_counter()
            origins = {group.group_id: config.origin_of(group.task) for group in groups}
            self.records = self._teachers.add_logprobs(self.records, origins, multiple)
            self.metrics["seconds"]["teachers"] = time.perf_counter() - began
        batch, _ = pack_records(self.records, config.length, multiple, config.streams)
        return take_rows(batch, self._group, self._num_groups)

    def _credit(self, groups: Sequence[BatchGroup]) -> list[TokenRecord]:
        """Returns the records of groups with the streams that the learner reads."""
        config, vocab_size = self._config, self._config.model.vocab_size
        if config.objective == "teachers":
            return make_batch_distillation_records(groups, config.credit)
        if records := assign_batch_credit(groups, config.credit, vocab_size):
            return records
        # All groups were dropped. The step is still made, without a gradient, because otherwise orchestrator and
        # trainer would count steps differently.
        keep_all = dataclasses.replace(config.credit, drop_zero_variance_groups=False)
        return assign_batch_credit(groups, keep_all, vocab_size)

    def _wait_for_groups(self) -> list[BatchGroup] | None:
        """Returns the groups of the batch; None after batch_timeout_s, and if a stop is requested."""
        left, interval = self._config.batch_timeout_s, self._config.refresh_interval_s
        while True:
            groups = self._orchestrator.take(self.step, min(left, interval))
            if groups is not None or left <= interval or self.should_stop():
                return groups
            left -= interval
            self._refresh()

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """Sets `is_waiting` for the duration of the context."""
        self.is_waiting = True
        try:
            yield
        finally:
            self.is_waiting = False

    def state(self) -> dict:
        return {}  # the orchestrator's journal has the state; it needs only the trainer's step

    def check(self, state: dict) -> None:
        """Does nothing, because `GroupSource.begin` checks the trainer's step."""

    def restore(self, state: dict) -> None:
        """Does nothing, because `state` is empty."""

    def close(self) -> None:
        """Does nothing, because the orchestrator belongs to another program."""


class FirstProcessClient:
    """`GroupSource` of a pod: its first process sends the requests and broadcasts the replies, with token records as bytes."""

    blockers: Sequence[str] = ()
    counts: Mapping[str, int] = {}

    def __init__(self, orchestrator: GroupSource):
        self._orchestrator = orchestrator

    def begin(self, step: int, version: int, checksum: str | None) -> None:
        self._run_on_first(lambda: self._orchestrator.begin(step, version, checksum))

    def take(self, step: int, timeout_s: float) -> list[BatchGroup] | None:
        def take() -> bytes:
            groups = self._orchestrator.take(step, timeout_s)
            members = {m.rollout_id: m for group in groups or () for m in group.members}
            return msgspec.msgpack.encode(
                {
                    "groups": groups and [batch_group_to_json(group) for group in groups],
                    "records": {name: encode_records(m.records) for name, m in members.items()},
                    "blockers": list(self._orchestrator.blockers),
                    "counts": dict(self._orchestrator.counts),
                }
            )

        reply = msgspec.msgpack.decode(
            self._run_on_first(take, multihost.broadcast_bytes_from_first)
        )
        self.blockers, self.counts = reply["blockers"], reply["counts"]
        groups = reply["groups"]
        if groups is None:
            return None
        return with_records([batch_group_from_json(group) for group in groups], reply["records"])

    def mark_trained(self, step: int) -> None:
        self._run_on_first(lambda: self._orchestrator.mark_trained(step))

    def push(self, version: int, checksum: str | None) -> None:
        self._run_on_first(lambda: self._orchestrator.push(version, checksum))

    def evaluate(
        self, count: int, *, group: int, temperature: float, top_p: float, wait_s: float
    ) -> dict[str, dict] | None:
        return self._run_on_first(
            lambda: self._orchestrator.evaluate(
                count, group=group, temperature=temperature, top_p=top_p, wait_s=wait_s
            )
        )

    def _run_on_first(
        self,
        request: Callable[[], Any],
        broadcast: Callable[[Callable[[], Any]], Any] = multihost.broadcast_from_first,
    ) -> Any:
        """Returns the result of request in the first process to all. Raises ServerError in all if it fails."""

        def run():
            # A broadcast passes on ValueError only.
            try:
                return request()
            except ServerError as error:
                raise ValueError(str(error)) from error

        try:
            return broadcast(run)
        except ValueError as error:
            raise ServerError(str(error)) from error


def batch_metrics(
    groups: Sequence[BatchGroup], step: int, counts: Mapping[str, int]
) -> dict[str, Any]:
    """Returns the metrics of a batch: groups, rewards by task and part, lengths, endings and staleness.

    counts: numbers of dropped groups and failed environments that the orchestrator counted since the last batch.
    """
    # Members without their copies.
    by_task: dict[str, list[Trajectory]] = {}
    for group in groups:
        by_task.setdefault(group.task, []).extend(group.members[: len(group.baseline)])
    members = [member for task_members in by_task.values() for member in task_members]
    num_with_copies = sum(len(group.members) for group in groups)
    # Rewards by part.
    parts: dict[str, list[float]] = {}
    for member in members:
        for name, value in member.reward.parts.items():
            if value is not None:
                parts.setdefault(name, []).append(value)
    # Versions of the sampling weights.
    versions = [member.versions for member in members]
    ages = [step - sampled[0] for sampled in versions]
    spans = [sampled[-1] - sampled[0] for sampled in versions]
    summaries = [member.summary for member in members if member.summary is not None]
    # 0 if no attempt has ended since the last batch was released.
    num_ended = counts.get("attempts/ended", 0)
    num_failed = counts.get("attempts/failed", 0)
    return {
        # Shows that no group is trained on twice.
        "group": {"order": np.array([group.order for group in groups])},
        "reward": {
            "mean": _mean_reward(members),
            **{task: _mean_reward(task_members) for task, task_members in by_task.items()},
        },
        "reward_part": {name: float(np.mean(values)) for name, values in parts.items()},
        "share": {task: len(task_members) / len(members) for task, task_members in by_task.items()},
        "rollout": {
            "tokens": float(np.mean([summary.num_trained_tokens for summary in summaries])),
            "truncated": float(np.mean([summary.is_truncated for summary in summaries])),
            "used_tools": float(np.mean([member.has_used_tools for member in members])),
            "zero_variance_groups": float(
                np.mean([len(set(group.baseline)) < 2 for group in groups])
            ),
            "padded": 1 - len(members) / num_with_copies,
            **({"environment_errors": num_failed / num_ended} if num_ended else {}),
            "seconds": float(np.mean([member.duration_s for member in members])),
        },
        "dropped": {reason: float(counts.get(f"groups/{reason}", 0)) for reason in DROP_REASONS},
        # With a slash, because a nested "policy" would replace the metrics of the step.
        "policy/staleness": float(max(ages)),
        "policy/staleness_mean": float(np.mean(ages)),
        "policy/version_span": float(max(spans)),
    }


def _mean_reward(members: Sequence[Trajectory]) -> float:
    return float(np.mean([m.reward.value for m in members if m.reward.value is not None]))


@contextlib.contextmanager
def _as_training_stopped() -> Iterator[None]:
    """Turns failures of servers into TrainingStopped, so that the run ends with its last checkpoint."""
    try:
        yield
    except (ServerError, PushFailed) as error:
        raise TrainingStopped(str(error)) from error
