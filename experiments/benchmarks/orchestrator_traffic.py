"""Measures the bytes through the orchestrator and its memory, with a thousand rollouts in flight.

    python -m experiments.benchmarks.orchestrator_traffic [--batches=4] [--tokens=500] [--turns=4] [--out=workdir/benchmarks]

Orchestrator, gateway, two task services and an engine run as processes (simulated_fleet.py), with journals, as in every run
of experiments/rl_agentic.py; environments and engine sleep. 125 groups of 8 rollouts are in flight. A rollout has
`--turns` replies of `--tokens` tokens. This process takes the batches like a trainer.

Prints the bytes of HTTP bodies by peer, and peak and final memory of the orchestrator. Takes one to two minutes on two
cores. Expected: docs/results/reinforcement_learning.md.
"""

import argparse
import json
import pathlib
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

from experiments.benchmarks.discrete_event_model import Workload
from experiments.benchmarks.simulated_fleet import fleet
from glm5_jax.inference.client import Client
from glm5_jax.rl.orchestrator.client import OrchestratorClient
from glm5_jax.runtime.terminal import print_error

GROUP, BATCH_GROUPS, MAX_STALENESS = 8, 25, 4  # 125 groups of 8 are in flight
BATCH_TIMEOUT_S = 900.0


def main(arguments: Sequence[str]) -> int:
    """Runs the program with these arguments. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks.orchestrator_traffic")
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("workdir/benchmarks"))
    options = parser.parse_args(arguments)
    try:
        if options.batches < 1:
            raise ValueError(f"--batches is {options.batches}; it must be at least 1")
        workload = make_workload(options.turns, options.tokens)
    except ValueError as error:
        print_error(error)
        return 2
    folder = options.out / "orchestrator_traffic"
    shutil.rmtree(folder, ignore_errors=True)
    print(describe(measure(workload, options.batches, folder)))
    return 0


def make_workload(turns: int, tokens: int) -> Workload:
    """Returns the workload: environments answer within seconds, and an engine has a slot for each rollout."""
    return Workload(
        name="traffic",
        group=GROUP,
        batch_groups=BATCH_GROUPS,
        max_staleness=MAX_STALENESS,
        turns=turns,
        tokens=(tokens, tokens),
        median_answer_s=2.0,
        engines=1,
        slots=(MAX_STALENESS + 1) * BATCH_GROUPS * GROUP,
        speed=tokens / 2.0,
    )


def measure(workload: Workload, num_batches: int, folder: pathlib.Path) -> dict[str, Any]:
    """Returns the orchestrator's traffic and memory after these batches, with the tokens that they trained on."""
    num_tokens, max_in_flight = 0, 0
    with fleet(workload, 0, folder) as programs:
        orchestrator = OrchestratorClient(programs.orchestrator)
        programs.set_version(0)
        orchestrator.begin(0, 0)
        began = time.monotonic()
        for step in range(num_batches):
            max_in_flight = max(max_in_flight, _num_in_flight(orchestrator))
            groups = orchestrator.take(step, BATCH_TIMEOUT_S)
            if groups is None:
                raise RuntimeError(f"no batch: {'; '.join(orchestrator.blockers)}")
            records = [record for g in groups for m in g.members for record in m.records]
            num_tokens += sum(len(record) for record in records)
            orchestrator.mark_trained(step)
            programs.set_version(step + 1)
            orchestrator.push(step + 1)
            max_in_flight = max(max_in_flight, _num_in_flight(orchestrator))
        seconds = time.monotonic() - began
        with Client(programs.orchestrator, direct=True).open("/traffic") as response:
            traffic = json.load(response)
        cores = programs.cores()
    return traffic | {
        "batches": num_batches,
        "rollouts": num_batches * workload.batch_groups * workload.group,
        "tokens": num_tokens,
        "in_flight": max_in_flight,
        "seconds": seconds,
        "cores": cores,
    }


def _num_in_flight(orchestrator: OrchestratorClient) -> int:
    return sum(task["in_flight"] for task in orchestrator.status()["tasks"].values())


def describe(result: dict[str, Any]) -> str:
    """Returns the result as text."""
    rollouts = result["rollouts"]
    lines = [
        f"{result['batches']} batches of {rollouts // result['batches']} rollouts, {result['tokens']:,} tokens, in "
        f"{result['seconds']:.0f} s; at most {result['in_flight']} rollouts in flight"
    ]
    for peer, count in sorted(result["bytes"].items()):
        lines.append(
            f"{peer:>16}: {count / 1e6:9.2f} MB, {count / rollouts:9.0f} bytes per rollout taken"
        )
    total = sum(result["bytes"].values())
    lines.append(f"{'all':>16}: {total / 1e6:9.2f} MB, {total / rollouts:9.0f} bytes")
    lines.append(
        f"memory: {result['peak_mb']:.0f} MB at most, {result['memory_mb']:.0f} at the end"
    )
    cores = ", ".join(f"{name} {share:.2f}" for name, share in result["cores"].items())
    lines.append(f"cores kept busy: {cores}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
