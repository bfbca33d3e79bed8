"""The orchestrator with all parts as processes: more than a thousand rollouts at once.

    python -m tests.rl.test_orchestrator_load '{"delay": 0.05, "batches": 12}'

says how many rollouts a second go through orchestrator, gateway and services of this machine, and what memory they take.
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
from tests.rl.fleet import process, resident, sessions, until

pytestmark = pytest.mark.slow


def tell(url, **body):
    """POSTs to an engine or an orchestrator."""
    request = urllib.request.Request(url, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


WEIGHTS = {"a": 1.0, "b": 2.0, "c": 5.0}
GROUP, BATCH, BATCHES = 8, 48, 24


def load(delay, batches, running=160):
    """Batches of three services in front of an engine that takes `delay` seconds for a reply, of which a rollout has two:
    of each batch, seconds, rollouts in flight when it was there, memory of each process, and its groups by task; what
    the orchestrator tells at the end; and of each process, seconds of CPU."""
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
            _, children[name] = stack.enter_context(process("service", heartbeat=5.0, **options))
        client = OrchestratorClient(orchestrator)
        until(lambda: client.status()["tasks"].keys() == WEIGHTS.keys(), 60)
        client.begin(0, 0)
        found = []
        for step in range(batches):
            began = time.monotonic()
            until(lambda: client.status()["waiting"] >= BATCH, 300)
            most = in_flight(client)
            taken = until(lambda: client.take(step, 60), 300)  # noqa: B023
            client.mark_trained(step)
            tell(f"{engine}/version", version=step + 1)
            client.push(step + 1)
            memory = {name: resident(child) for name, child in children.items()}
            count = collections.Counter(one.task for one in taken)
            found.append((time.monotonic() - began, most, memory, count))
        told = client.status()
        cpu = {name: cpu_seconds(child) for name, child in children.items()}
        client.pause()
        until(lambda: client.status()["running"] == 0, 300)
        until(lambda: sessions(gate) == 0, 60)
    return found, told, cpu


def cpu_seconds(child):
    with open(f"/proc/{child.pid}/stat") as file:
        user, system = file.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def show(found, told, cpu):
    """Prints how it went, for people and the log."""
    for seconds, most, memory, count in found:
        megabytes = {name: round(own / 2**20) for name, own in memory.items()}
        rate = f"{GROUP * BATCH / seconds:6.0f} rollouts/s, {most:5} in flight"
        print(f"{rate}, MB {megabytes}, {dict(count)}")
    rollouts = sum(own["rollouts"] for own in told["tasks"].values())
    own = {name: round(1e3 * seconds / rollouts, 2) for name, seconds in cpu.items()}
    print("ms of CPU per rollout", own)
    print("shares accepted", {name: own["accepted_share"] for name, own in told["tasks"].items()})
    print("shares learnt from", shares(found))


def shares(found):
    """Of each task, its part of the groups of all batches."""
    count = sum((own for *_, own in found), collections.Counter())
    return {name: count[name] / count.total() for name in WEIGHTS}


def test_a_thousand_rollouts_of_three_services():
    """GLM-5 4.1.1: more than 1,000 rollouts at once; shares are the weights within 2% of each, and memory is flat."""
    found, told, cpu = load(delay=3.0, batches=BATCHES)
    show(found, told, cpu)
    memory = [own for _, _, own, _ in found]
    assert max(most for _, most, _, _ in found) > 1000
    assert sum(count.total() for *_, count in found) == BATCHES * BATCH
    want = {name: weight / sum(WEIGHTS.values()) for name, weight in WEIGHTS.items()}
    accepted = {name: told["tasks"][name]["accepted_share"] for name in WEIGHTS}
    assert accepted == pytest.approx(want, rel=0.02)
    assert shares(found) == pytest.approx(want, rel=0.02)
    for name in WEIGHTS:
        own = told["tasks"][name]
        assert own["failed"] == own["failures"] == 0
    for name in memory[0]:
        assert memory[-1][name] < 1.1 * memory[3][name], memory


def in_flight(client):
    return sum(own["in_flight"] for own in client.status()["tasks"].values())


if __name__ == "__main__":
    show(*load(**json.loads(sys.argv[1])))
