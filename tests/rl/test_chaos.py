"""All parts but the trainer as processes, each killed once, and each stopped once, while it takes batches."""

import contextlib
import json
import signal
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from glm5_jax.inference.client import ServerError
from glm5_jax.rl.orchestrator.client import OrchestratorClient
from tests.rl.fleet import Parts, told, until

pytestmark = pytest.mark.slow
BUFFER = dict(group=4, batch_groups=4, max_staleness=1, max_running=16)
VICTIMS = ("gateway", "orchestrator", "service", "engine")


def asked(url):
    with urllib.request.urlopen(url, timeout=2) as answer:
        return json.load(answer)


class Trainer:
    """Learns nothing, and gives the engine its weights as a real one does: now, or while it waits for a batch."""

    def __init__(self, orchestrator, engines):
        self.client, self.engines = OrchestratorClient(orchestrator, patience_s=60.0), engines
        self.step, self.groups, self.refreshed = 0, [], 0

    def begin(self):
        self.client.begin(0, 0)

    def give(self):
        for engine in self.engines:
            with contextlib.suppress(ServerError, TimeoutError):  # it is down
                told(engine, "/version", {"version": self.step}, seconds=1.0)
        self.client.push(self.step)

    def take(self):
        for _ in range(60):
            found = self.client.take(self.step, 1.0)
            if found is not None:
                return found
            with contextlib.suppress(OSError):
                if any(asked(f"{own}/weights")["version"] != self.step for own in self.engines):
                    self.give()
                    self.refreshed += 1
        raise AssertionError(self.client.blockers)

    def train(self):
        self.groups += self.take()
        self.client.mark_trained(self.step)
        self.step += 1
        self.give()


def test_each_part_is_killed_once_and_the_run_goes_on(tmp_path):
    """Nothing is trained on twice, nothing is left behind, and as many groups may begin as if nothing had been."""
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
        status = ended(client, gate)
    check(trainer, status, 1 + 2 * len(VICTIMS))
    assert trainer.refreshed  # nothing else would have given the new engine its weights


def ended(client, gate):
    """The orchestrator's status, once nothing is under way."""
    client.pause()
    until(lambda: client.status()["running"] == 0)
    until(lambda: asked(f"{gate}/server_info")["sessions"] == 0)
    # Records of groups that were trained on or dropped are deleted.
    most = BUFFER["group"] * client.status()["waiting"]
    until(lambda: asked(f"{gate}/server_info")["finished"] <= most)
    return client.status()


def check(trainer, status, steps):
    """Nothing was trained on twice, and as many groups may begin as if nothing had been."""
    assert status["step"] == status["version"] == trainer.step == steps
    assert status["num_admissible"] == 2 * BUFFER["batch_groups"] - status["waiting"]
    groups = trainer.groups
    assert len(groups) == 4 * trainer.step == len({group.group_id for group in groups})
    assert len({(group.task, group.number) for group in groups}) == len(groups)
    assert max(group.staleness for group in groups) <= 1


def test_who_hangs_holds_nobody_up(tmp_path):
    """Stopped, not dead: it keeps its connections, and answers nothing. An engine and a service are so for good."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as waker:
        parts = Parts(stack)
        engines = [parts.start(name, "engine", delay=0.02) for name in ("one", "two")]
        own = dict(reply_timeout_s=2.0, probe_interval_s=0.2, journal=str(tmp_path / "gateway"))
        gate = parts.start("gateway", "gateway", engine=",".join(engines), **own)
        own = dict(
            heartbeat_timeout_s=2.0, gateway_timeout_s=2.0, journal=str(tmp_path / "orchestrator")
        )
        orchestrator = parts.start("orchestrator", "orchestrator", gateway=gate, **own, **BUFFER)
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

        def stop(name, seconds=None):
            child = parts.processes[name]
            child.send_signal(signal.SIGSTOP)
            if seconds is not None:
                time.sleep(seconds)
                child.send_signal(signal.SIGCONT)

        for name, seconds in (("b", None), ("two", None), ("gateway", 5.0), ("orchestrator", 5.0)):
            until(lambda: client.status()["running"])
            waking = waker.submit(stop, name, seconds)
            for _ in range(3):
                trainer.train()
            waking.result()
        tasks = client.status()["tasks"]
        assert tasks["b"]["state"] == "lost"
        assert set(asked(f"{gate}/server_info")["loads"]) == {engines[0]}
        status = ended(client, gate)
    check(trainer, status, 13)
