"""A trainer that is stopped while no batch arrives saves what it has trained, and the next one goes on from there."""

import os
import signal
import time

import pytest

from glm5_jax.checkpoint.store import latest_step
from glm5_jax.inference.client import ServerError
from glm5_jax.rl.orchestrator.client import OrchestratorClient
from glm5_jax.runtime.http_server import find_free_port
from glm5_jax.training.loop import TrainConfig
from tests.rl.test_async_trainer import (  # noqa: F401
    RecordingOrchestrator,
    config_of,
    run,
    schedule_of,
    tokenizer_folder,
)


class StoppedOrchestrator(RecordingOrchestrator):
    """Orchestrator that is stopped together with the trainer before step `stop_at`.

    - loses_report: whether the stop comes after the batch, so that the step cannot be reported.
    """

    def __init__(self, config, stop_at: int, loses_report: bool):
        super().__init__(config)
        self.stop_at, self.loses_report, self.is_stopped = stop_at, loses_report, False

    def take(self, step, seconds):
        if step < self.stop_at:
            return super().take(step, seconds)
        groups = super().take(step, seconds) if self.loses_report else None
        self.is_stopped = True
        os.kill(os.getpid(), signal.SIGTERM)
        return groups

    def mark_trained(self, step):
        if self.is_stopped:
            raise ServerError("no server answers")
        super().mark_trained(step)


@pytest.mark.slow
@pytest.mark.parametrize("loses_report", [False, True], ids=["no batch", "no report"])
def test_saves_steps_when_orchestrator_stops_too(loses_report, tokenizer_folder, tmp_path):  # noqa: F811
    train = TrainConfig(eval_interval=0, save_interval=0)
    config = config_of(tokenizer_folder, schedule=schedule_of(4), max_staleness=0, train=train)
    orchestrator = StoppedOrchestrator(config, 2, loses_report)
    run(config, tmp_path / "run", orchestrator)
    assert latest_step(tmp_path / "run") == 2 + loses_report
    resumed = run(config, tmp_path / "run")
    assert resumed.starts == [(2 + loses_report, 2 + loses_report)]
    assert latest_step(tmp_path / "run") == 4


def test_client_does_not_repeat_requests_after_stop():
    client = OrchestratorClient(f"http://127.0.0.1:{find_free_port('127.0.0.1')}", patience_s=60.0)
    client.should_stop = lambda: True
    began = time.monotonic()
    with pytest.raises(ServerError):
        client.status()
    assert time.monotonic() - began < 30
