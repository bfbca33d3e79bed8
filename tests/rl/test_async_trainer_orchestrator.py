"""The asynchronous trainer with the real orchestrator, gateway and services, over HTTP, before a real engine: all parts but the
programs that they are."""

import contextlib
import dataclasses

import jax
import pytest

from glm5_jax.checkpoint import models
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.server import Server, ServerConfig
from glm5_jax.metrics.metrics_log import column, read
from glm5_jax.model import glm5
from glm5_jax.rl.config import RlConfig
from glm5_jax.rl.orchestrator.client import JsonClient, OrchestratorClient
from glm5_jax.rl.orchestrator.fair_share import shuffled_indices
from glm5_jax.rl.orchestrator.server import Orchestrator
from glm5_jax.rl.orchestrator.task_service import Outcome, TaskService
from glm5_jax.rl.trainers.sync_trainer import SyncRlTrainer, TaskSuite
from glm5_jax.rl.types import Attempt, Task
from glm5_jax.rl.weights.pusher import SyncConfig
from glm5_jax.rl.weights.weight_sync import NetworkPusher
from tests.rl import fleet
from tests.rl.small_stage import TOKENIZER, InTurn, likes_low_bytes, same, shared, weights
from tests.rl.test_async_trainer import (
    SHARED,
    STEPS,
    config_of,
    quick,  # noqa: F401
    run,
    schedule_of,
)

ENGINE = dataclasses.replace(SHARED["engine"], max_length=64)
KINDS = ("math", "words", "math")  # of three groups, where math has twice the weight
TASKS = {
    kind: [
        Task(id=f"{kind}{i}", kind=kind, messages=({"role": "user", "content": f"{kind[0]}{i}?"},))
        for i in range(5)
    ]
    for kind in KINDS
}


class Low(TaskService):
    """What a reply is worth is what `likes_low_bytes` says."""

    async def attempt(self, asked, place):
        task = TASKS[self.config.name][place]
        body = {"messages": task.messages, "chat_template_kwargs": {"enable_thinking": False}}
        async with JsonClient() as client:
            url = f"{asked.base_url}/v1/chat/completions"
            said = await client.request("POST", url, body, timeout_s=60)
        message = said["choices"][0]["message"]
        reward = await likes_low_bytes(task, Attempt(messages=(message,)))
        return Outcome((*task.messages, message), reward)


class System:
    """All that a trainer needs, until it is closed; the engine begins with other weights than the trainer's."""

    def __init__(self, stack, config, journal, names):
        self._config, self._engine, self._port = config, contextlib.ExitStack(), 0
        stack.callback(self.kill)
        self.engine = self.start()
        gate = stack.enter_context(fleet.gateway(self.engine, temperature=0.8, max_tokens=6))
        own = dict(group=4, batch_groups=3, max_staleness=config.max_staleness)
        orchestrator = Orchestrator(fleet.orchestrator_config(gate, journal=str(journal), **own))
        self.orchestrator = stack.enter_context(orchestrator.running())
        for name in names:
            weight = float(KINDS.count(name))
            service = Low(
                fleet.service_config(self.orchestrator, name, weight=weight), len(TASKS[name])
            )
            stack.enter_context(service.running())
            fleet.until(lambda: service.is_registered)  # noqa: B023

    def start(self):
        """The engine, always at the same URL."""
        config = self._config
        params = glm5.init_params(config.model, jax.random.key(7))
        model = glm5.Glm5(config.model, params=params)
        made = Engine(model, TOKENIZER, config.engine, version=2)
        server = Server(
            made, TOKENIZER, ServerConfig(port=self._port), models.make_weight_loader(model)
        )
        url = self._engine.enter_context(server.running())
        self._port = server.port
        return url

    def kill(self):
        self._engine.close()

    def pusher(self):
        sync = SyncConfig(timeout_s=10.0, load_timeout_s=60.0)
        return NetworkPusher(self._config.model, [self.engine], sync)


class LikeOrchestrator(InTurn):
    """Tasks in the order in which the orchestrator lets groups of them begin."""

    def draw(self, count):
        self.drawn += count
        return [self.task(i) for i in range(self.drawn - count, self.drawn)]

    def task(self, order):
        kind, before = KINDS[order % 3], [KINDS[i % 3] for i in range(order)]
        own = TASKS[kind]
        epoch, place = divmod(before.count(kind), len(own))
        return own[shuffled_indices(0, kind, epoch, len(own))[place]]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_without_staleness_the_whole_system_learns_what_the_synchronous_trainer_does(
    quick,  # noqa: F811
    tmp_path,
):
    """Bit by bit: seeds follow from the orchestrator's order of groups, which without staleness is one of weights and names, and
    not from when services were registered or who answers first."""
    suite = TaskSuite(tasks=LikeOrchestrator(TASKS), held_out={}, verify=likes_low_bytes)
    known = [task for own in TASKS.values() for task in own]
    alone = RlConfig(name="sync", tokenizer=quick, **SHARED | {"engine": ENGINE})
    SyncRlTrainer(alone, tmp_path / "sync", suite, known, step_maker=shared).run()
    config = config_of(quick, max_staleness=0, reset_optimizer=False, engine=ENGINE)
    with contextlib.ExitStack() as stack:
        system = System(stack, config, tmp_path / "orchestrator", ("words", "math"))
        run(config, tmp_path / "run", OrchestratorClient(system.orchestrator), system.pusher())
    found = weights(tmp_path / "run")
    assert same(found, weights(tmp_path / "sync"))
    assert not same(
        found, weights(tmp_path / "run" / "checkpoints" / str(STEPS // 2))
    )  # they have moved
    one, other = read(tmp_path / "run"), read(tmp_path / "sync")
    steps = list(range(1, STEPS + 1))
    assert column(one, "loss/rl") == column(other, "loss/rl")
    for name in ("reward/mean", "reward/math", "reward/words"):  # added up in another order
        assert column(one, name)[0] == steps
        assert column(one, name)[1] == pytest.approx(column(other, name)[1], rel=1e-12)
    assert column(one, "policy/staleness")[1] == [0] * STEPS
    orders = [order for own in column(one, "group/order")[1] for order in own]
    assert orders == list(range(3 * STEPS))


class Hazard(OrchestratorClient):
    """Of an orchestrator whose only engine is killed before it is told of version 1, and before it gets version 2."""

    def __init__(self, system):
        super().__init__(system.orchestrator, patience_s=10.0)
        self._system = system
        self.killed, self.dead, self.groups = 0, False, []

    def kill(self):
        self._system.kill()
        self.killed, self.dead = self.killed + 1, True

    def start(self):
        self._system.start()
        self.dead = False

    def push(self, version, checksum):
        if version == 1 and not self.killed:
            self.kill()
            self.start()
        super().push(version, checksum)

    def mark_trained(self, step):
        super().mark_trained(step)
        if step == 1:
            self.kill()

    def take(self, step, seconds):
        if self.dead:
            self.start()
        found = super().take(step, seconds)
        self.groups += found or ()
        return found


@pytest.mark.slow
def test_a_run_whose_engines_are_all_started_anew_goes_on_with_what_it_has_learnt(
    quick,  # noqa: F811
    tmp_path,
):
    """Without staleness nothing is sampled before an engine has the trainer's weights, whatever those were that it was
    started with."""
    changes = {"schedule": schedule_of(3), "max_staleness": 0}
    more = dict(refresh_interval_s=0.3, batch_timeout_s=60.0, engine=ENGINE)
    config = config_of(quick, **more, **changes)
    with contextlib.ExitStack() as stack:
        system = System(stack, config, tmp_path / "orchestrator", ("math",))
        client = Hazard(system)
        run(config, tmp_path / "run", client, system.pusher())
    assert client.killed == 2 and len({group.group_id for group in client.groups}) == 9
    versions = [
        {int(own) for m in group.members for r in m.records for own in r.weight_version} - {-1}
        for group in client.groups
    ]
    assert versions == [{0}] * 3 + [{1}] * 3 + [{2}] * 3
