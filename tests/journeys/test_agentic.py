"""Agentic RL with all its programs as processes: they overlap, and a run whose programs are killed still completes."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from glm5_jax.metrics.metrics_log import column, read
from glm5_jax.runtime.supervisor import read_events
from glm5_jax.runtime.utilization import read_utilization
from tests.contracts.source_tree import ROOT
from tests.journeys import agentic_system
from tests.journeys.agentic_system import PROGRAMS
from tests.journeys.test_pod import UNCACHED, processes_of
from tests.rl.test_async_trainer import CHARTS
from tests.runtime.test_process import ends

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
FILE = agentic_system.__file__
STEPS = 12
KILLS = 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    agentic_system.save(folder)
    return folder


def start(program, workdir, checkpoint, *flags, env=None):
    words = [f"--experiment={FILE}:small", f"--experiment.checkpoint={checkpoint}", *flags]
    return subprocess.Popen(
        [sys.executable, "-m", program, *words, f"--workdir={workdir}"],
        cwd=ROOT,
        env=os.environ | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def pids(workdir):
    """Returns the running process of each program."""
    running = {}
    for event in read_events(workdir / "roles"):
        name = f"{event.role}-{event.index}"
        if event.what == "started":
            running[name] = event.pid
        elif event.what in ("died", "stopped", "finished", "moved", "failed"):
            running.pop(name, None)
    return running


def admission_orders(workdir):
    """Returns the admission numbers of the groups of each step."""
    steps, groups = column(read(workdir), "group/order")
    return dict(zip(steps, groups))


def check_completed_run(workdir, steps=STEPS):
    orders_of_step = admission_orders(workdir)
    assert list(orders_of_step) == list(range(1, steps + 1))
    orders = [order for step_orders in orders_of_step.values() for order in step_orders]
    assert len(orders) == 2 * steps and len(set(orders)) == len(orders), (
        "a group was trained on twice"
    )
    assert max(column(read(workdir), "policy/staleness")[1]) <= 2
    assert not pids(workdir)


def overlapping(first, second):
    """Returns the share of the busy seconds of the first program in which the second is busy too."""
    both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in first.spans for c, d in second.spans)
    return both / sum(b - a for a, b in first.spans)


# Replies take about as long as a step, which no saving makes longer: an engine would generate meanwhile in any case.
EVEN = {
    "rollout.max_tokens": 64,
    "engine.max_num_seqs": 1,
    "train.save_interval": 100,
    "schedule.total_steps": 2 * STEPS,
}


@pytest.mark.parametrize("staleness", [2, 0])
def test_trains_while_engines_sample(checkpoint, tmp_path, staleness):
    """Nearly all the time; without staleness, which is the control, nearly never."""
    workdir, steps = tmp_path / "run", EVEN["schedule.total_steps"]
    changes = EVEN | {"max_staleness": staleness}
    flags = [f"--experiment.{name}={value}" for name, value in changes.items()]
    process = start("launch.run", workdir, checkpoint, *flags)
    wait_for_step(process, workdir, 2)
    compiled = time.time()
    out = process.communicate(timeout=600)[0]
    assert "train-0 finished" in out and f"after {steps} steps" in out, out
    check_completed_run(workdir, steps)
    lives = read_utilization(workdir)
    assert len({life.pid for life in lives}) == len(PROGRAMS) == len(lives)
    since = {life.name: life for life in read_utilization(workdir, compiled)}
    share = overlapping(since["train"], since["engine-0"])
    print(f"staleness {staleness}: engines generate in {share:.0%} of the trainer's busy time")
    assert share > 0.5 if staleness else share < 0.25
    page = (workdir / "report" / "index.html").read_text()
    assert all(f'"title":"{chart}"' in page for chart in CHARTS) and "<td>idle</td>" in page
    assert ">Busy intervals of each program</text>" in page
    for life in lives:
        assert f">{life.name} {life.pid}</text>" in page
        assert f"<td>{life.name}</td><td>{life.pid}</td>" in page
    again = start("launch.run", workdir, checkpoint, *flags).communicate(timeout=100)[0]
    assert f"after {steps} steps" in again and "started" not in again


def test_stopped_run_resumes(checkpoint, tmp_path):
    workdir = tmp_path / "run"
    process = start("launch.local", workdir, checkpoint)
    wait_for_step(process, workdir, 4)
    before = list(pids(workdir).values())
    process.send_signal(signal.SIGTERM)
    out = process.communicate(timeout=100)[0]
    assert process.returncode == 130 and "goes on from there" in out
    assert all(ends(pid) for pid in before)
    out = start("launch.local", workdir, checkpoint).communicate(timeout=600)[0]
    assert "train-0 finished" in out, out
    check_completed_run(workdir)


def test_run_completes_after_kills_of_every_program(checkpoint, tmp_path):
    """Kills one program after the other at random moments, until all have died several times."""
    workdir, draw = tmp_path / "run", random.Random(0)
    steps = 4 * STEPS
    flags = [f"--experiment.schedule.total_steps={steps}", "--experiment.batch_timeout_s=600"]
    process = start("launch.local", workdir, checkpoint, *flags)
    wait_for_step(process, workdir, 1)
    killed = []
    while len(killed) < KILLS:
        assert process.poll() is None, (killed, process.communicate()[0])
        time.sleep(draw.uniform(0, 6))
        name = PROGRAMS[len(killed) % len(PROGRAMS)]
        if (pid := pids(workdir).get(name)) is not None:
            os.kill(pid, signal.SIGKILL)
            killed.append(name)
    out = process.communicate(timeout=900)[0]
    assert process.returncode == 0, out
    died = [e for e in read_events(workdir / "roles") if e.what == "died"]
    assert len(died) >= KILLS and {f"{e.role}-{e.index}" for e in died} >= set(PROGRAMS)
    check_completed_run(workdir, steps)


def test_run_completes_after_kills_of_engine_of_two_processes(checkpoint, tmp_path):
    """Each process is killed once. Sessions go on, and the new processes get the newest weights."""
    workdir = tmp_path / "run"
    cluster = {"engine_hosts": 2, "engine_devices": 2, "ranks": 4, "devices": 1}
    flags = [f"--experiment.cluster.{name}={value}" for name, value in cluster.items()]
    process = start("launch.local", workdir, checkpoint, *flags, env=UNCACHED)
    for number, step in ((1, 2), (0, 5)):
        wait_for_step(process, workdir, step, 900)
        engine = processes_of(workdir)
        assert len(engine) == 2
        os.kill(engine[number], signal.SIGKILL)
        assert all(ends(pid) for pid in engine)
    out = process.communicate(timeout=900)[0]
    assert process.returncode == 0, out
    died = [e.role for e in read_events(workdir / "roles") if e.what == "died"]
    assert died.count("engine") == 2
    check_completed_run(workdir)


def wait_for_step(process, workdir, step, seconds=300):
    until = time.monotonic() + seconds
    while max(admission_orders(workdir), default=0) < step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.1)
