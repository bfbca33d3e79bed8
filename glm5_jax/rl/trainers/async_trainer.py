"""The trainer of the asynchronous system: it learns from groups that others sample while it learns (GLM-5 4.1.1).

It asks the hub for a batch, learns, says so, and every few updates gives the engines its weights. Nothing is known here
of tasks, tools and engines. With `max_staleness=0` it is the synchronous trainer: nobody samples while it learns.

While it waits, engines that were started anew get its weights, and those that a push has not reached: without any
that has them no batch would come, and without a batch no push.
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from glm5_jax.data.loader import Batch
from glm5_jax.data.record import TokenRecord
from glm5_jax.inference.client import ServerError
from glm5_jax.parallel import multihost
from glm5_jax.rl.algorithm.batch import lay_out
from glm5_jax.rl.algorithm.credit import credited_rollouts
from glm5_jax.rl.config import RlConfig
from glm5_jax.rl.orchestrator.client import heard_taken, told_taken
from glm5_jax.rl.orchestrator.group_repair import FAILED, LOST, STALE
from glm5_jax.rl.orchestrator.staleness import BufferConfig
from glm5_jax.rl.trajectory import Taken
from glm5_jax.rl.types import used_tools
from glm5_jax.rl.weights.pusher import NotPushed, Pushed, Pusher
from glm5_jax.runtime.preemption import PreemptionGuard
from glm5_jax.runtime.utilization import FOLDER, UtilizationRecorder
from glm5_jax.training.metrics import TrainingStopped
from glm5_jax.training.stages import BatchSource, Stage
from glm5_jax.training.step import Step, make_step, reset_optimizer

_log = logging.getLogger(__name__)
DROPPED = (FAILED, LOST, STALE, "cancelled")  # why groups are


class Hub(Protocol):
    """Where batches come from, as `rl.orchestrator.client.HubClient` says."""

    hindered: Sequence[str]
    counts: Mapping[str, int]

    def begin(self, step: int, version: int, checksum: str | None) -> None: ...

    def take(self, step: int, seconds: float) -> list[Taken] | None: ...

    def trained(self, step: int) -> None: ...

    def push(self, version: int, checksum: str | None) -> None: ...

    def evaluate(self, count: int) -> dict[str, dict]: ...


@dataclasses.dataclass(frozen=True)
class AsynchronousConfig(RlConfig):
    """Attributes:
    max_staleness, max_running, pacing: see `BufferConfig`; its group and batch are those of `rollout`.
    push_every: updates between two pushes of weights (K of GLM-5 4.1.1).
    new_moments: whether the optimiser begins anew behind each push (GLM-5 4.1.1).
    batch_seconds: that a batch may take to come; past them the run ends.
    refresh_seconds: that a batch is waited for between two looks whether all engines have the weights.
    """

    max_staleness: int = 4  # not disclosed
    max_running: int = 128  # GLM-5 4.1.1: more than 1,000 rollouts
    pacing: bool = True
    push_every: int = 1  # not disclosed
    new_moments: bool = True
    batch_seconds: float = 7200.0  # ours
    refresh_seconds: float = 10.0  # ours

    def __post_init__(self):
        super().__post_init__()
        for name in ("push_every", "batch_seconds", "refresh_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.max_staleness < self.push_every - 1:
            raise ValueError(
                f"max_staleness is {self.max_staleness} and push_every {self.push_every}: behind the update that comes "
                f"first no group could begin before the next push; use at least {self.push_every - 1}"
            )
        if self.learns != "rewards" or self.credit.pull == "reference":
            raise ValueError(
                f"learns is {self.learns!r} and credit.pull {self.credit.pull!r}; this trainer has no teachers"
            )
        self.buffer()

    @property
    def changeable_on_resume(self) -> tuple[str, ...]:
        return *super().changeable_on_resume, "batch_seconds", "refresh_seconds"

    def buffer(self) -> BufferConfig:
        """The hub's; ValueError if there can be none."""
        own = self.max_staleness, self.max_running, self.pacing
        return BufferConfig(self.rollout.group, self.rollout.prompts, *own)


class Asynchronous(Stage):
    """Learning from what a hub gives. Its engines are given weights by the pusher."""

    def __init__(
        self,
        config: AsynchronousConfig,
        workdir,
        hub: Hub,
        pusher: Pusher,
        step_maker: Callable[..., Step] = make_step,
        previous_stage: Stage | None = None,
    ):
        self._hub = hub if jax.process_count() == 1 else _OfPod(hub)
        self._pusher = pusher
        super().__init__(config, workdir, step_maker, previous_stage)

    def _make_step(self, step_maker: Callable[..., Step], **options) -> Step:
        return super()._make_step(step_maker, token_loss=self.config.token_loss, **options)

    def _open(self) -> BatchSource:
        rows = self._group, self._num_groups
        self._batches = Batches(self.config, self._hub, *rows, self._refresh)
        return self._batches

    def _rows(self, tokens_seen: int) -> int:
        return self.config.rows // self._num_groups

    def _describe_step(self) -> str:
        rollout = self.config.rollout
        return f"{rollout.prompts} tasks of {rollout.group} attempts per step, at most {self.config.max_staleness} steps old"

    def _train(self, stop: PreemptionGuard) -> None:
        first = jax.process_index() == 0
        path = self.workdir / FOLDER / "train.jsonl"
        doing = UtilizationRecorder(path, lambda: not self._batches.waiting)
        with doing if first else contextlib.nullcontext():
            super()._train(stop)

    def _begin(self, state: dict) -> None:
        """The engines have these weights before anything is sampled for them, those that a lost trainer made too."""
        done = self._batches.step = self._version = int(state["step"])
        self._params, self._early = state["params"], False
        with _stopping(), self._batches.waits():
            self._hub.begin(done, done, self._first_push(done).shown)

    def _first_push(self, version: int) -> Pushed:
        """Engines that were killed together with a trainer before this one are there again soon."""
        config = self.config
        for left in reversed(range(1 + int(config.batch_seconds // config.refresh_seconds))):
            try:
                return self._pusher.push(self._params, version, rewind=True)
            except NotPushed as error:
                if error.refused or not left:
                    raise
                _log.warning("%s", error)
                time.sleep(config.refresh_seconds)
        raise AssertionError("the last try has raised")

    def _update(self, state: dict, batch: Batch) -> tuple[dict, dict]:
        taken, config = self._batches, self.config
        if self._early:
            state = reset_optimizer(state)
        state, metrics = super()._update(state, batch)
        done = taken.step + 1
        told = dict(taken.metrics)
        with _stopping():
            # First, as a trainer that has been replaced learns here that it must not push anything.
            self._hub.trained(taken.step)
            pushed = self._push(state["params"], done) if done % config.push_every == 0 else None
            if pushed is not None:
                told["push"] = {"bytes": pushed.bytes, "lost": len(pushed.lost)}
                told["seconds"] = told["seconds"] | {"push": pushed.seconds}
                if config.new_moments:
                    state = reset_optimizer(state)
        taken.step, self._params, self._early = done, state["params"], False
        return state, metrics | told

    def _push(self, params, version: int, again: bool = False) -> Pushed | None:
        """Gives engines the weights; again: those that need them. None: it reached none, and is tried again while there is no
        batch."""
        push = self._pusher.refresh if again else self._pusher.push
        try:
            pushed = push(params, version)
        except NotPushed as error:
            _log.warning("%s", error)
            return None
        if pushed is not None:
            self._hub.push(version, pushed.shown)
            self._version = version
        return pushed

    def _refresh(self) -> None:
        """Nothing is sampled, perhaps, as no engine has the weights."""
        before, done = self._version, self._batches.step
        if self._push(self._params, done, again=True) and done != before:
            self._early = self.config.new_moments

    def _evaluate(self) -> Callable[[dict, int], dict[str, float]] | None:
        count = self.config.evaluation.tasks
        if not count:
            return None

        def evaluate(state, done):
            del state, done  # the engines have its weights, or those of the last push
            with _stopping(), self._batches.waits():
                found = self._hub.evaluate(count)
            rewards = {task: own["reward"] for task, own in found.items()}
            rewards = {task: reward for task, reward in rewards.items() if reward is not None}
            if not rewards:
                return {}
            whole = {"held_out/reward": float(np.mean(list(rewards.values())))}
            return whole | {f"held_out/{task}": reward for task, reward in rewards.items()}

        return evaluate


class Batches:
    """The hub's batches as the learner reads them, of each the part `group` of `num_groups` equal ones of its rows.

    Attributes:
      step: of the next one.
      records, metrics: of the last one.
      waiting: whether the trainer has nothing to do, as others are not done.
    """

    records: list[TokenRecord]
    waiting = False

    def __init__(
        self,
        config: AsynchronousConfig,
        hub: Hub,
        group: int = 0,
        num_groups: int = 1,
        refresh: Callable[[], None] = lambda: None,
    ):
        """refresh: called now and then while there is no batch."""
        self._config, self._hub, self._refresh, self.step = config, hub, refresh, 0
        self._group, self._num_groups = group, num_groups
        self.metrics: dict = {}

    def next(self, batch_size: int) -> Batch:
        """The batch of `step`; ValueError, with what hinders it, if it does not come in time."""
        config, began = self._config, time.perf_counter()
        try:
            with self.waits():
                groups = self._taken()
        except ServerError as error:
            raise ValueError(str(error)) from error
        if groups is None:
            why = "; ".join(self._hub.hindered) or "the hub does not say why"
            raise ValueError(f"no batch has come within {config.batch_seconds:g} s: {why}")
        waited = time.perf_counter() - began
        vocab_size = config.model.vocab_size
        self.records = credited_rollouts(groups, config.credit, vocab_size)
        if not self.records:
            # All are left out. The step is made, or hub and trainer would count differently; it has no gradient.
            whole = dataclasses.replace(config.credit, drop_flat=False)
            self.records = credited_rollouts(groups, whole, vocab_size)
        multiple = batch_size * self._num_groups
        batch, _ = lay_out(self.records, config.length, multiple, config.streams)
        self.metrics = told(groups, self.step, self._hub.counts)
        self.metrics["seconds"] = {"waiting": waited}
        rows = len(batch["token_ids"]) // self._num_groups
        own = slice(rows * self._group, rows * (self._group + 1))
        return {name: values[own] for name, values in batch.items()}

    def _taken(self) -> list[Taken] | None:
        left, most = self._config.batch_seconds, self._config.refresh_seconds
        while (groups := self._hub.take(self.step, min(left, most))) is None and left > most:
            left -= most
            self._refresh()
        return groups

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """See `waiting`."""
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False

    def state(self) -> dict:
        return {}  # the hub has it, and asks the trainer's step alone

    def check(self, state: dict) -> None:
        """`Hub.begin` says what does not fit."""

    def restore(self, state: dict) -> None:
        """See `state`."""

    def close(self) -> None:
        """The hub is others'."""


class _OfPod:
    """A hub that the first process of a pod asks, for all; its methods are those of `Hub`."""

    hindered: Sequence[str] = ()
    counts: Mapping[str, int] = {}

    def __init__(self, hub: Hub):
        self._hub = hub

    def begin(self, step: int, version: int, checksum: str | None) -> None:
        self._ask(lambda: self._hub.begin(step, version, checksum))

    def take(self, step: int, seconds: float) -> list[Taken] | None:
        def take():
            groups = self._hub.take(step, seconds)
            more = list(self._hub.hindered), dict(self._hub.counts)
            return groups and list(map(told_taken, groups)), *more

        groups, self.hindered, self.counts = self._ask(take)
        return groups and list(map(heard_taken, groups))

    def trained(self, step: int) -> None:
        self._ask(lambda: self._hub.trained(step))

    def push(self, version: int, checksum: str | None) -> None:
        self._ask(lambda: self._hub.push(version, checksum))

    def evaluate(self, count: int) -> dict[str, dict]:
        return self._ask(lambda: self._hub.evaluate(count))

    def _ask(self, what: Callable[[], Any]) -> Any:
        def ask():
            try:
                return what()
            except ServerError as error:
                raise ValueError(str(error)) from error

        try:
            return multihost.broadcast_from_first(ask)
        except ValueError as error:
            raise ServerError(str(error)) from error


def told(groups: Sequence[Taken], step: int, counts: Mapping[str, int]) -> dict:
    """Numbers of a batch: its groups, rewards by task and part, what was sampled, and how old it is; counts: the hub's
    since the batch before, of groups that were dropped and environments that failed."""
    rollouts: dict[str, list] = {}
    for group in groups:
        rollouts.setdefault(group.task, []).extend(group.members[: len(group.baseline)])
    members = [member for own in rollouts.values() for member in own]
    parts: dict[str, list[float]] = {}
    for member in members:
        for name, value in member.reward.parts.items():
            if value is not None:
                parts.setdefault(name, []).append(value)
    ages = [step - member.versions[0] for member in members]
    spans = [member.versions[1] - member.versions[0] for member in members]
    size = sum(len(group.members) for group in groups)
    ended = counts.get("attempts/ended", 0)  # 0: all had come before the last batch was given out
    failed = counts.get("attempts/failed", 0)
    return {
        # By which it can be checked that nothing is learnt twice.
        "group": {"order": np.array([group.order for group in groups])},
        "reward": {
            "mean": float(np.mean([member.reward.value for member in members])),
            **{
                task: float(np.mean([m.reward.value for m in own]))
                for task, own in rollouts.items()
            },
        },
        "reward_part": {name: float(np.mean(values)) for name, values in parts.items()},
        "share": {task: len(own) / len(members) for task, own in rollouts.items()},
        "rollout": {
            "tokens": float(np.mean([sum(r.loss_mask.sum() for r in m.records) for m in members])),
            "truncated": float(np.mean([m.records[-1].status == "truncated" for m in members])),
            "used_tools": float(np.mean([used_tools(m.messages) for m in members])),
            "flat_groups": float(np.mean([len(set(group.baseline)) < 2 for group in groups])),
            "padded": 1 - len(members) / size,
            **({"environment_errors": failed / ended} if ended else {}),
            "seconds": float(np.mean([member.seconds for member in members])),
        },
        "dropped": {why: float(counts.get(f"groups/{why}", 0)) for why in DROPPED},
        # Beside those of the step, which a dictionary would replace.
        "policy/staleness": float(max(ages)),
        "policy/staleness_mean": float(np.mean(ages)),
        "policy/version_span": float(max(spans)),
    }


@contextlib.contextmanager
def _stopping() -> Iterator[None]:
    """What servers cannot do ends the run as any other reason does, with its last checkpoint."""
    try:
        yield
    except (ServerError, NotPushed) as error:
        raise TrainingStopped(str(error)) from error
