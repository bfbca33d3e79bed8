"""All parts but the trainer as processes, each killed once while it takes batches."""

import contextlib
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from glm5_jax.inference.client import ServerError
from glm5_jax.rl.client import HubClient
from tests.rl.fleet import Parts, told, until

BUFFER = dict(group=4, batch_groups=4, max_staleness=1, max_running=16)
VICTIMS = ("gateway", "hub", "service", "engine")


def asked(url):
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


class Trainer:
    """Learns nothing, and gives the engine its weights as a real one does: now, or while it waits for a batch."""

    def __init__(self, hub, engine):
        self.client, self.engine = HubClient(hub, patience=60.0), engine
        self.step, self.groups, self.refreshed = 0, [], 0

    def begin(self):
        self.client.begin(0, 0)

    def give(self):
        with contextlib.suppress(ServerError):  # it is down
            told(self.engine, "/version", {"version": self.step})
            self.client.push(self.step)

    def take(self):
        for _ in range(60):
            found = self.client.take(self.step, 1.0)
            if found is not None:
                return found
            with contextlib.suppress(OSError):
                if asked(f"{self.engine}/weights")["version"] != self.step:
                    self.give()
                    self.refreshed += 1
        raise AssertionError(self.client.hindered)

    def train(self):
        self.groups += self.take()
        self.client.trained(self.step)
        self.step += 1
        self.give()


def test_each_part_is_killed_once_and_the_run_goes_on(tmp_path):
    """Nothing is trained on twice, nothing is left behind, and as many groups may begin as if nothing had been."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as killer:
        parts = Parts(stack)
        engine = parts.start("engine", "engine", delay=0.02)
        journal = str(tmp_path / "gateway")
        gate = parts.start("gateway", "gateway", engine=engine, journal=journal, probe_seconds=0.1)
        journal = str(tmp_path / "hub")
        hub = parts.start("hub", "hub", gateway=gate, journal=journal, **BUFFER)
        parts.start("service", "service", hub=hub, name="sums", pause=0.05)
        trainer = Trainer(hub, engine)
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
        client.pause()
        until(lambda: client.status()["running"] == 0)
        until(lambda: asked(f"{gate}/server_info")["sessions"] == 0)
        status = client.status()
    assert status["step"] == status["version"] == trainer.step == 1 + 2 * len(VICTIMS)
    assert status["room"] == 2 * BUFFER["batch_groups"] - status["waiting"]
    assert trainer.refreshed  # nothing else would have given the new engine its weights
    groups = trainer.groups
    assert len(groups) == 4 * trainer.step == len({group.group_id for group in groups})
    assert len({group.number for group in groups}) == len(groups)
    assert max(group.staleness for group in groups) <= 1
