"""The asynchronous trainer with the real orchestrator, gateway and services over HTTP, and a real engine.

All parts run in one process.
"""

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
from tests.rl.small_stage import (
    TOKENIZER,
    SequentialTasks,
    all_equal,
    final_weights,
    reward_low_bytes,
    shared_train_step,
)
from tests.rl.test_async_trainer import (
    SHARED,
    STEPS,
    config_of,
    run,
    schedule_of,
    tokenizer_folder,  # noqa: F401
)

ENGINE = dataclasses.replace(SHARED["engine"], max_length=64)
KINDS = ("math", "words", "math")  # tasks of three consecutive groups: math has twice the weight
TASKS = {
    kind: [
        Task(id=f"{kind}{i}", kind=kind, messages=({"role": "user", "content": f"{kind[0]}{i}?"},))
        for i in range(5)
    ]
    for kind in KINDS
}


class LowBytesService(TaskService):
    """Service that rewards replies with `reward_low_bytes`."""

    async def attempt(self, request, index):
        task = TASKS[self.config.name][index]
        body = {"messages": task.messages, "chat_template_kwargs": {"enable_thinking": False}}
        async with JsonClient() as client:
            url = f"{request.base_url}/v1/chat/completions"
            response = await client.request("POST", url, body, timeout_s=60)
        message = response["choices"][0]["message"]
        reward = await reward_low_bytes(task, Attempt(messages=(message,)))
        return Outcome((*task.messages, message), reward)


class System:
    """Engine, gateway, orchestrator and services of a trainer. The engine starts with other weights than the trainer."""

    def __init__(self, stack, config, journal, names):
        self._config, self._engine, self._port = config, contextlib.ExitStack(), 0
        stack.callback(self.kill)
        self.engine = self.start()
        gate = stack.enter_context(fleet.gateway(self.engine, temperature=0.8, max_tokens=6))
        buffer = dict(group=4, batch_groups=3, max_staleness=config.max_staleness)
        orchestrator = Orchestrator(fleet.orchestrator_config(gate, journal=str(journal), **buffer))
        self.orchestrator = stack.enter_context(orchestrator.running())
        for name in names:
            weight = float(KINDS.count(name))
            service = LowBytesService(
                fleet.service_config(self.orchestrator, name, weight=weight), len(TASKS[name])
            )
            stack.enter_context(service.running())
            fleet.until(lambda: service.is_registered)  # noqa: B023

    def start(self):
        """Starts the engine, always at the same URL, and returns the URL."""
        config = self._config
        params = glm5.init_params(config.model, jax.random.key(7))
        model = glm5.Glm5(config.model, params=params)
        engine = Engine(model, TOKENIZER, config.engine, version=2)
        server = Server(
            engine, TOKENIZER, ServerConfig(port=self._port), models.make_weight_loader(model)
        )
        url = self._engine.enter_context(server.running())
        self._port = server.port
        return url

    def kill(self):
        """Stops the engine."""
        self._engine.close()

    def pusher(self):
        """Returns a pusher to the engine."""
        sync = SyncConfig(timeout_s=10.0, load_timeout_s=60.0)
        return NetworkPusher(self._config.model, [self.engine], sync)


class OrchestratorOrder(SequentialTasks):
    """Task source in the order in which the orchestrator starts groups."""

    def draw(self, count):
        self.num_drawn += count
        return [self.task(i) for i in range(self.num_drawn - count, self.num_drawn)]

    def task(self, order):
        """Returns the task of the `order`-th group."""
        kind, earlier = KINDS[order % 3], [KINDS[i % 3] for i in range(order)]
        tasks = TASKS[kind]
        epoch, index = divmod(earlier.count(kind), len(tasks))
        return tasks[shuffled_indices(0, kind, epoch, len(tasks))[index]]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_system_without_staleness_equals_sync_trainer(
    tokenizer_folder,  # noqa: F811
    tmp_path,
):
    """The weights are equal bit by bit, because seeds follow from the orchestrator's order of groups. Without
    staleness the order depends on weights and names, not on the time of registrations or responses."""
    suite = TaskSuite(tasks=OrchestratorOrder(TASKS), held_out={}, verify=reward_low_bytes)
    known = [task for tasks in TASKS.values() for task in tasks]
    sync_config = RlConfig(name="sync", tokenizer=tokenizer_folder, **SHARED | {"engine": ENGINE})
    SyncRlTrainer(sync_config, tmp_path / "sync", suite, known, step_maker=shared_train_step).run()
    config = config_of(tokenizer_folder, max_staleness=0, reset_optimizer=False, engine=ENGINE)
    with contextlib.ExitStack() as stack:
        system = System(stack, config, tmp_path / "orchestrator", ("words", "math"))
        run(config, tmp_path / "run", OrchestratorClient(system.orchestrator), system.pusher())
    async_weights = final_weights(tmp_path / "run")
    assert all_equal(async_weights, final_weights(tmp_path / "sync"))
    halfway = final_weights(tmp_path / "run" / "checkpoints" / str(STEPS // 2))
    assert not all_equal(async_weights, halfway)
    async_rows, sync_rows = read(tmp_path / "run"), read(tmp_path / "sync")
    steps = list(range(1, STEPS + 1))
    assert column(async_rows, "loss/rl") == column(sync_rows, "loss/rl")
    for name in ("reward/mean", "reward/math", "reward/words"):  # summed in another order
        assert column(async_rows, name)[0] == steps
        assert column(async_rows, name)[1] == pytest.approx(column(sync_rows, name)[1], rel=1e-12)
    assert column(async_rows, "policy/staleness")[1] == [0] * STEPS
    orders = [order for batch in column(async_rows, "group/order")[1] for order in batch]
    assert orders == list(range(3 * STEPS))


class EngineKillingClient(OrchestratorClient):
    """Client whose only engine is killed before it gets version 1, and again before version 2."""

    def __init__(self, system):
        super().__init__(system.orchestrator, patience_s=10.0)
        self._system = system
        self.num_kills, self.is_down, self.groups = 0, False, []

    def kill(self):
        """Stops the engine."""
        self._system.kill()
        self.num_kills, self.is_down = self.num_kills + 1, True

    def start(self):
        """Starts the engine again."""
        self._system.start()
        self.is_down = False

    def push(self, version, checksum):
        if version == 1 and not self.num_kills:
            self.kill()
            self.start()
        super().push(version, checksum)

    def mark_trained(self, step):
        super().mark_trained(step)
        if step == 1:
            self.kill()

    def take(self, step, timeout_s):
        if self.is_down:
            self.start()
        batch = super().take(step, timeout_s)
        self.groups += batch or ()
        return batch


@pytest.mark.slow
def test_run_continues_after_engines_restart(
    tokenizer_folder,  # noqa: F811
    tmp_path,
):
    """Without staleness nothing is sampled before an engine has the trainer's weights, whatever weights it started
    with."""
    changes = {"schedule": schedule_of(3), "max_staleness": 0}
    options = dict(refresh_interval_s=0.3, batch_timeout_s=60.0, engine=ENGINE)
    config = config_of(tokenizer_folder, **options, **changes)
    with contextlib.ExitStack() as stack:
        system = System(stack, config, tmp_path / "orchestrator", ("math",))
        client = EngineKillingClient(system)
        run(config, tmp_path / "run", client, system.pusher())
    assert client.num_kills == 2 and len({group.group_id for group in client.groups}) == 9
    versions = [
        {
            int(version)
            for member in group.members
            for record in member.records
            for version in record.weight_version
        }
        - {-1}
        for group in client.groups
    ]
    assert versions == [{0}] * 3 + [{1}] * 3 + [{2}] * 3
