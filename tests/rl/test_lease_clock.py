"""Leases of a clock that was days ahead and is then set back: they are replaced, and the run continues."""

import json
import time

import pytest

from glm5_jax.inference.client import Client, ServerError
from glm5_jax.rl.orchestrator.client import NO_TRAINER, OrchestratorClient
from glm5_jax.rl.orchestrator.group_buffer import BufferConfig, GroupBuffer
from glm5_jax.rl.orchestrator.server import Orchestrator
from tests.rl.fleet import ENGINE, Fleet, gateway, orchestrator_config

DAYS = 3 * 24 * 3600


@pytest.fixture
def clock(monkeypatch):
    """Returns a function that sets the time of day ahead, in seconds."""
    real, ahead_s = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s[0])

    def set_ahead(seconds):
        ahead_s[0] = seconds

    return set_ahead


def test_buffer_replaces_lease_after_clock_was_set_back():
    buffer = GroupBuffer(BufferConfig())
    now = 1_700_000_000_000
    buffer.begin(0, 0, min_lease=now + 1000 * DAYS)
    buffer.begin(0, 0, min_lease=now)
    assert buffer.lease == now
    buffer.begin(0, 0, min_lease=now - 5000)  # five seconds earlier still means the next lease
    assert buffer.lease == now + 1


def test_gateway_replaces_lease_after_clock_was_set_back(clock, engine):
    with gateway(engine) as url:

        def require_weights(lease, version):
            body = json.dumps({"lease": lease, "version": version}).encode()
            with Client(url).open("/weights", body) as answer:
                return json.load(answer)["lease"]

        clock(DAYS)
        future_lease = int(1e3 * time.time())
        assert require_weights(future_lease, 7) == future_lease
        clock(0)
        now = int(1e3 * time.time())
        assert require_weights(now, 0) == now
        assert require_weights(now - 1, 5) == now


def test_run_continues_after_clock_was_set_back(clock, stack, gate):
    clock(DAYS)
    fleet = Fleet(stack, gate).begin()
    fleet.train()
    clock(0)
    assert len(fleet.train(2)) == 8


def test_orchestrator_makes_trainer_begin_again(clock):
    with Orchestrator(orchestrator_config("http://127.0.0.1:9")).running() as url:
        clock(DAYS)
        ENGINE.version = 0
        client = OrchestratorClient(url, patience_s=1.0)
        client.begin(0, 0)
        lease = int(1e3 * time.time())
        clock(0)
        body = json.dumps({"lease": lease, "step": 0, "timeout_s": 0}).encode()
        with pytest.raises(ServerError) as raised:
            Client(url).open("/groups/take", body)
        assert raised.value.status == NO_TRAINER
        assert client.take(0, 0.0) is None


def test_replaces_lease_of_gateway_from_hours_ahead(clock, engine):
    """The clock is set back by hours, and of the journals only the gateway's is left."""
    with gateway(engine) as gateway_url:
        client = Client(gateway_url)
        clock(3 * 3600)
        old = int(1e3 * time.time())
        body = json.dumps({"lease": old, "version": 0}).encode()
        with client.open("/weights", body) as answer:
            assert json.load(answer)["lease"] == old
        clock(0)
        with Orchestrator(orchestrator_config(gateway_url)).running() as url:
            trainer = OrchestratorClient(url, patience_s=1.0)
            trainer.begin(0, 0)
            with client.open("/server_info") as answer:
                required = json.load(answer)["weights"]
            assert required["lease"] == old + 1
            assert trainer.take(0, 0.0) is None  # the trainer has the same lease
