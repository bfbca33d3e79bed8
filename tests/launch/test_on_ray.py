"""Roles on a Ray cluster of this machine: they restart, on another actor too, and end with the run."""

import importlib.util
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from glm5_jax.runtime.supervisor import RoleEvent, read_events
from launch import on_ray
from tests.contracts.source_tree import ROOT
from tests.runtime.test_process import ends, is_running
from tests.runtime.test_supervisor import event_names, get_arguments, until

SYSTEM = f"--experiment={ROOT}/tests/launch/small_system.py:tiny"


def test_names_installation_command_without_ray(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert on_ray.main(["on_ray", SYSTEM, f"--workdir={tmp_path}"]) == 2
    assert (
        capsys.readouterr().err
        == "error: Ray is not installed; pip install '.[ray]' in this repository\n"
    )


class Launched:
    """The small system on a separate cluster."""

    def __init__(self, folder: pathlib.Path, *flags: str):
        self.folder, self.log = folder / "run" / "roles", folder / "log"
        argv = [sys.executable, "-m", "launch.on_ray", SYSTEM, f"--workdir={folder}/run"]
        argv += [f"--experiment.lives={folder}/lives", *flags]
        with open(self.log, "w") as file:
            self.process = subprocess.Popen(argv, cwd=ROOT, stdout=file, stderr=file)

    def seen(self, role: str, what: str, times: int = 1) -> list[RoleEvent]:
        """Returns the events of that kind, once there are at least `times` of them."""

        def enough():
            events = [e for e in read_events(self.folder) if (e.role, e.what) == (role, what)]
            assert len(events) >= times or self.process.poll() is None, self.log.read_text()
            return events if len(events) >= times else None

        return until(enough, f"{times} times {role} {what}", 300.0)  # Ray takes its time


@pytest.fixture
def launch(tmp_path):
    """Starts the small system with some flags."""
    if importlib.util.find_spec("ray") is None:
        pytest.fail("Ray is not installed: bash launch/test.sh slow does it")
    started = []
    yield lambda *flags: started.append(Launched(tmp_path, *flags)) or started[-1]
    for one in started:
        one.process.kill()
        one.process.wait()


@pytest.mark.slow
def test_ray_places_and_restarts_roles(launch):
    flags = ["--experiment.deaths=1", "--experiment.seconds=8", "--experiment.engine_devices=2"]
    run = launch(*flags)
    [gateway] = run.seen("gateway", "ready")
    run.seen("train", "ready")
    os.kill(gateway.pid, signal.SIGKILL)
    again = run.seen("gateway", "ready", 2)[1]
    assert again.detail == gateway.detail, "at the same address"
    assert gateway.detail.startswith("http://127.0.0.1:")
    assert run.seen("train", "finished") and run.process.wait(300) == 0
    assert event_names(run.folder, "train").count("train started") == 2
    assert event_names(run.folder)[-2:] == ["engine stopped"] * 2


@pytest.mark.slow
def test_moves_role_of_lost_actor_and_updates_clients(launch):
    run = launch("--experiment.seconds=600")
    run.seen("train", "ready")
    [gateway] = run.seen("gateway", "ready")
    stat = pathlib.Path(f"/proc/{gateway.pid}/stat").read_text()
    os.kill(int(stat.rsplit(")", 1)[1].split()[1]), signal.SIGKILL)  # its actor
    assert ends(gateway.pid)
    elsewhere = run.seen("gateway", "ready", 2)[1]
    assert elsewhere.detail != gateway.detail
    orchestrator = run.seen("orchestrator", "ready", 2)[1]
    assert (
        run.seen("orchestrator", "moved")
        and get_arguments(orchestrator.detail)["arguments"][0] == elsewhere.detail
    )
    assert event_names(run.folder, "train") == ["train started", "train ready"], (
        "the orchestrator's address has not changed"
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ended_run_leaves_no_process(launch, number):
    run = launch("--experiment.seconds=600")
    run.seen("train", "ready")
    pids = {event.pid for event in read_events(run.folder)}
    assert len(pids) == 5 and all(map(is_running, pids))
    run.process.send_signal(number)
    assert run.process.wait(120) == (130 if number == signal.SIGTERM else -number)
    assert all(map(ends, pids))


@pytest.mark.slow
def test_refuses_more_than_cluster_has(launch, tmp_path):
    run = launch("--experiment.engine_memory=100000")
    assert run.process.wait(300) == 2
    message = "error: the roles ask for 200000 GiB of memory, the cluster has "
    assert (tmp_path / "log").read_text().splitlines()[-1].startswith(message)
