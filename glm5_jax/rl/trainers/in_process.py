"""A hub and its engine in the trainer's own process: what learns while others sample, without others and without a clock.

    hub = InProcess(config, world, tokenizer)
    Asynchronous(config, workdir, hub, hub.pusher).run()

Whenever a batch is asked for, all groups are sampled that may be outstanding by then, so that samples are as old as
`max_staleness` lets them be, and the same seed is the same run, bit by bit. For comparisons, notebooks and tests.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from glm5_jax.data.record import TokenRecord
from glm5_jax.inference.engine import Engine
from glm5_jax.model import glm5
from glm5_jax.rl.orchestrator.group_buffer import Admitted, Buffer
from glm5_jax.rl.rollouts.rollout import Rollouts
from glm5_jax.rl.trainers.async_trainer import AsynchronousConfig
from glm5_jax.rl.trainers.sync_trainer import World, judge, mean_reward
from glm5_jax.rl.trajectory import Group, Taken, Trajectory
from glm5_jax.rl.types import Attempt, Message, Reward, Task
from glm5_jax.rl.weights.pusher import Pushed
from glm5_jax.rl.weights.reshard import Reshard
from glm5_jax.runtime.coroutines import run_sync
from glm5_jax.text.tokenizer import Tokenizer


class InProcess:
    """A hub, as `asynchronous.Hub` says; its tasks, tools and verifier are the world's.

    Attributes:
      buffer: decides what may begin, and what is given out.
      pusher: takes the trainer's weights to the engine, which begins with the first.
    """

    hindered = ()
    counts: Mapping[str, int] = {}

    def __init__(self, config: AsynchronousConfig, world: World, tokenizer: Tokenizer):
        self._config, self._world, self._tokenizer = config, world, tokenizer
        self.buffer, self.pusher = Buffer(config.buffer()), _Pusher(config, tokenizer)

    def begin(self, step: int, version: int, checksum: str | None = None) -> None:
        self.buffer.begin(step, version, checksum)

    def take(self, step: int, seconds: float) -> list[Taken] | None:
        """See `Hub`; a batch is there as soon as it is asked for."""
        if room := self.buffer.room():
            tasks = self._world.tasks.draw(room)
            self._sample(tasks, [self.buffer.admit(task.kind, 0) for task in tasks])
        found = self.buffer.take(step)
        self.counts = self.buffer.counted(step)
        return found

    def trained(self, step: int) -> None:
        self.buffer.trained(step)

    def push(self, version: int, checksum: str | None = None) -> None:
        self.buffer.push(version, checksum)

    def evaluate(self, count: int) -> dict[str, dict]:
        found, own = {}, self._config.evaluation
        rollouts = self._rollouts(own.temperature)
        for kind, tasks in self._world.held_out.items():
            groups = rollouts.sample(tasks[:count], 0, group=own.group)
            run_sync(judge(groups, self._world, self._config.judged_at_once))
            found[kind] = {"reward": mean_reward(groups), "count": len(groups), "failed": 0}
        return found

    def attempts(self, tasks: Sequence[Task], first: int) -> list[Group]:
        """Judged attempts at the tasks, by the newest weights. first: how many tasks came before these."""
        config = self._config
        rollouts = self._rollouts(config.policy.temperature)
        groups = rollouts.sample(tasks, config.seed, first=first)
        run_sync(judge(groups, self._world, config.judged_at_once))
        return groups

    def _rollouts(self, temperature: float) -> Rollouts:
        more = self._config.rollout, temperature, self._world.tools
        return Rollouts(self.pusher.engine, self._tokenizer, *more)

    def _sample(self, tasks: Sequence[Task], admitted: Sequence[Admitted]) -> None:
        """All at once: seeds follow from the order, in which groups stand that have not been admitted before."""
        first = admitted[0].order
        if [own.order for own in admitted] != list(range(first, first + len(admitted))):
            raise ValueError("a group was dropped; let the verifier of the world have no failures")
        for own, group in zip(admitted, self.attempts(tasks, first)):
            members = zip(group.records, group.rewards, group.attempts, strict=True)
            asked = group.task.messages
            self.buffer.put(
                own.group_id,
                [_trajectory(own, place, asked, *each) for place, each in enumerate(members)],
            )


def _trajectory(
    own: Admitted,
    place: int,
    asked: tuple[Message, ...],
    record: TokenRecord,
    reward: Reward,
    attempt: Attempt,
) -> Trajectory:
    name = f"{own.group_id}-{place}"
    record = dataclasses.replace(record, group_id=own.group_id, rollout_id=name)
    messages = (*asked, *attempt.messages)
    return Trajectory(name, own.group_id, own.task, own.number, messages, reward, (record,))


class _Pusher:
    """Weights to an engine that is made for the first of them."""

    engine: Engine

    def __init__(self, config: AsynchronousConfig, tokenizer: Tokenizer):
        self._config, self._tokenizer = config, tokenizer
        self._reshard: Reshard | None = None

    def push(self, params, version: int, *, rewind: bool = False) -> Pushed:
        if self._reshard is None:
            model = glm5.Glm5(self._config.model, params=params, param_dtype="float32")
            options = dataclasses.asdict(self._config.engine)
            self.engine = Engine(model, self._tokenizer, version=version, **options)
            # Weights of its own: the learner writes over those that it was made with.
            self._reshard = Reshard([self.engine])
        return self._reshard.push(params, version, rewind=rewind)

    def refresh(self, params, version: int) -> Pushed | None:
        return self._reshard.refresh(params, version)
