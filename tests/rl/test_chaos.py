"""All parts but the trainer as processes, each killed or stopped once while the trainer takes batches."""

import contextlib
import json
import signal
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from glm5_jax.inference.client import ServerError
from glm5_jax.rl.orchestrator.client import OrchestratorClient
from tests.rl.fleet import Parts, post_json, until

pytestmark = pytest.mark.slow
BUFFER = dict(group=4, batch_groups=4, max_staleness=1, max_running=16)
VICTIMS = ("gateway", "orchestrator", "service", "engine")


def get_json(url):
    """Returns the JSON of a GET request."""
    with urllib.request.urlopen(url, timeout=2) as response:
        return json.load(response)


class Trainer:
    """Trains nothing, and updates the engines as a real trainer does: after a step, or while it waits for a batch."""

    def __init__(self, orchestrator, engines):
        self.client, self.engines = OrchestratorClient(orchestrator, patience_s=60.0), engines
        self.step, self.groups, self.refreshed = 0, [], 0

    def begin(self):
        self.client.begin(0, 0)

    def update_engines(self):
        """Sets the engines' weight version."""
        for engine in self.engines:
            with contextlib.suppress(ServerError, TimeoutError):  # it is down
                post_json(engine, "/version", {"version": self.step}, timeout_s=1.0)
        self.client.push(self.step)

    def take(self):
        """Returns the next batch. While it waits, it updates engines that restarted."""
        for _ in range(60):
            batch = self.client.take(self.step, 1.0)
            if batch is not None:
                return batch
            with contextlib.suppress(OSError):
                if any(
                    get_json(f"{engine}/weights")["version"] != self.step for engine in self.engines
                ):
                    self.update_engines()
                    self.refreshed += 1
        raise AssertionError(self.client.blockers)

    def train(self):
        self.groups += self.take()
        self.client.mark_trained(self.step)
        self.step += 1
        self.update_engines()


def test_run_continues_after_each_part_is_killed(tmp_path):
    """No group is trained on twice, no session is left, and as many groups may start as without the kills."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as killer:
        parts = Parts(stack)
        engine = parts.start("engine", "engine", delay=0.02)
        journal = str(tmp_path / "gateway")
        gate = parts.start(
            "gateway", "gateway", engine=engine, journal=journal, probe_interval_s=0.1
        )
        journal = str(tmp_path / "orchestrator")
        orchestrator = parts.start(
            "orchestrator", "orchestrator", gateway=gate, journal=journal, **BUFFER
        )
        parts.start("service", "service", orchestrator=orchestrator, name="sums", pause=0.05)
        trainer = Trainer(orchestrator, [engine])
        client = trainer.client
        until(lambda: client.status()["tasks"])
        trainer.begin()
        trainer.train()
        for name in VICTIMS:
            until(lambda: client.status()["running"])
            killing = killer.submit(parts.kill, name)
            trainer.train()
            killing.result()
            trainer.train()
        status = final_status(client, gate)
    check_groups(trainer, status, 1 + 2 * len(VICTIMS))
    assert trainer.refreshed  # nothing else updates the restarted engine


def final_status(client, gate):
    """Returns the orchestrator's status, after all rollouts have ended."""
    client.pause()
    until(lambda: client.status()["running"] == 0)
    until(lambda: get_json(f"{gate}/server_info")["sessions"] == 0)
    # Records of groups that were trained on or dropped are deleted.
    max_records = BUFFER["group"] * client.status()["waiting"]
    until(lambda: get_json(f"{gate}/server_info")["finished"] <= max_records)
    return client.status()


def check_groups(trainer, status, steps):
    """Checks that no group was trained on twice, and that as many groups may start as without failures."""
    assert status["step"] == status["version"] == trainer.step == steps
    assert status["num_admissible"] == 2 * BUFFER["batch_groups"] - status["waiting"]
    groups = trainer.groups
    assert len(groups) == 4 * trainer.step == len({group.group_id for group in groups})
    assert len({(group.task, group.number) for group in groups}) == len(groups)
    assert max(group.staleness for group in groups) <= 1


def test_run_continues_while_parts_hang(tmp_path):
    """A stopped process keeps its connections and answers nothing. An engine and a service stay stopped."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as waker:
        parts = Parts(stack)
        engines = [parts.start(name, "engine", delay=0.02) for name in ("one", "two")]
        options = dict(reply_timeout_s=2.0, probe_interval_s=0.2, journal=str(tmp_path / "gateway"))
        gate = parts.start("gateway", "gateway", engine=",".join(engines), **options)
        options = dict(
            heartbeat_timeout_s=2.0, gateway_timeout_s=2.0, journal=str(tmp_path / "orchestrator")
        )
        orchestrator = parts.start(
            "orchestrator", "orchestrator", gateway=gate, **options, **BUFFER
        )
        for name in "ab":
            parts.start(
                name,
                "service",
                orchestrator=orchestrator,
                name=name,
                pause=0.05,
                rollout_timeout_s=10.0,
            )
        trainer = Trainer(orchestrator, engines)
        client = trainer.client
        until(lambda: len(client.status()["tasks"]) == 2)
        trainer.begin()
        trainer.train()

        def pause(name, seconds=None):
            child = parts.processes[name]
            child.send_signal(signal.SIGSTOP)
            if seconds is not None:
                time.sleep(seconds)
                child.send_signal(signal.SIGCONT)

        for name, seconds in (("b", None), ("two", None), ("gateway", 5.0), ("orchestrator", 5.0)):
            until(lambda: client.status()["running"])
            waking = waker.submit(pause, name, seconds)
            for _ in range(3):
                trainer.train()
            waking.result()
        tasks = client.status()["tasks"]
        assert tasks["b"]["state"] == "lost"
        assert set(get_json(f"{gate}/server_info")["loads"]) == {engines[0]}
        status = final_status(client, gate)
    check_groups(trainer, status, 13)
