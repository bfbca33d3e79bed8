"""The orchestrator with all parts as processes: more than a thousand rollouts at once.

    python -m tests.rl.test_orchestrator_load '{"delay": 0.05, "batches": 12}'

prints the rate of rollouts through orchestrator, gateway and services on this machine, and their memory.
"""

import collections
import contextlib
import json
import os
import sys
import time
import urllib.request

import pytest

from glm5_jax.rl.orchestrator.client import OrchestratorClient
from tests.rl.fleet import memory_bytes, num_sessions, process, until

pytestmark = pytest.mark.slow


def post_json(url, **body):
    """Posts a JSON body to an engine or an orchestrator, and returns the JSON of the response."""
    request = urllib.request.Request(url, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


WEIGHTS = {"a": 1.0, "b": 2.0, "c": 5.0}
GROUP, BATCH, BATCHES = 8, 48, 24


def load(delay, batches, running=160):
    """Takes batches of three services, and returns (samples, status, cpu).

    delay: mean time of one engine reply, in seconds; a rollout has two.
    samples: for each batch its seconds, rollouts in flight when it was ready, memory by process, and group counts by
    task.
    status: final status of the orchestrator.
    cpu: CPU seconds by process.
    """
    with contextlib.ExitStack() as stack:
        engine, _ = stack.enter_context(process("engine", delay=delay))
        gate, gate_child = stack.enter_context(process("gateway", engine=engine))
        buffer = dict(group=GROUP, batch_groups=BATCH, max_staleness=6, max_running=running)
        orchestrator, orchestrator_child = stack.enter_context(
            process(
                "orchestrator",
                gateway=gate,
                heartbeat_timeout_s=30.0,
                poll_interval_s=0.1,
                **buffer,
            )
        )
        children = {"orchestrator": orchestrator_child, "gateway": gate_child}
        for name, weight in WEIGHTS.items():
            options = dict(
                orchestrator=orchestrator,
                name=name,
                weight=weight,
                max_inflight=1400,
                rollout_timeout_s=240.0,
            )
            _, children[name] = stack.enter_context(
                process("service", heartbeat_interval_s=5.0, **options)
            )
        client = OrchestratorClient(orchestrator)
        until(lambda: client.status()["tasks"].keys() == WEIGHTS.keys(), 60)
        client.begin(0, 0)
        samples = []
        for step in range(batches):
            start = time.monotonic()
            until(lambda: client.status()["waiting"] >= BATCH, 300)
            num_in_flight = in_flight(client)
            groups = until(lambda: client.take(step, 60), 300)  # noqa: B023
            client.mark_trained(step)
            post_json(f"{engine}/version", version=step + 1)
            client.push(step + 1)
            memory = {name: memory_bytes(child) for name, child in children.items()}
            count = collections.Counter(group.task for group in groups)
            samples.append((time.monotonic() - start, num_in_flight, memory, count))
        status = client.status()
        cpu = {name: cpu_seconds(child) for name, child in children.items()}
        client.pause()
        until(lambda: client.status()["running"] == 0, 300)
        until(lambda: num_sessions(gate) == 0, 60)
    return samples, status, cpu


def cpu_seconds(child):
    """Returns the CPU seconds of a process so far."""
    with open(f"/proc/{child.pid}/stat") as file:
        user, system = file.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def show(samples, status, cpu):
    """Prints rates, memory and shares."""
    for seconds, num_in_flight, memory, count in samples:
        megabytes = {name: round(size / 2**20) for name, size in memory.items()}
        rate = f"{GROUP * BATCH / seconds:6.0f} rollouts/s, {num_in_flight:5} in flight"
        print(f"{rate}, MB {megabytes}, {dict(count)}")
    rollouts = sum(task["rollouts"] for task in status["tasks"].values())
    cpu_ms = {name: round(1e3 * seconds / rollouts, 2) for name, seconds in cpu.items()}
    print("ms of CPU per rollout", cpu_ms)
    accepted = {name: task["accepted_share"] for name, task in status["tasks"].items()}
    print("shares accepted", accepted)
    print("shares trained on", shares(samples))


def shares(samples):
    """Returns the share of each task in the groups of all batches."""
    count = sum((batch_count for *_, batch_count in samples), collections.Counter())
    return {name: count[name] / count.total() for name in WEIGHTS}


def test_runs_thousand_rollouts_of_three_services():
    """More than 1,000 rollouts run at once (GLM-5 4.1.1). Shares are within 2% of the weights, and memory is
    constant."""
    samples, status, cpu = load(delay=3.0, batches=BATCHES)
    show(samples, status, cpu)
    memory = [sizes for _, _, sizes, _ in samples]
    assert max(num_in_flight for _, num_in_flight, _, _ in samples) > 1000
    assert sum(count.total() for *_, count in samples) == BATCHES * BATCH
    expected = {name: weight / sum(WEIGHTS.values()) for name, weight in WEIGHTS.items()}
    accepted = {name: status["tasks"][name]["accepted_share"] for name in WEIGHTS}
    assert accepted == pytest.approx(expected, rel=0.02)
    assert shares(samples) == pytest.approx(expected, rel=0.02)
    for name in WEIGHTS:
        task = status["tasks"][name]
        assert task["failed"] == task["failures"] == 0
    for name in memory[0]:
        assert memory[-1][name] < 1.1 * memory[3][name], memory


def in_flight(client):
    """Returns the number of rollouts in flight of all tasks."""
    return sum(task["in_flight"] for task in client.status()["tasks"].values())


if __name__ == "__main__":
    show(*load(**json.loads(sys.argv[1])))
