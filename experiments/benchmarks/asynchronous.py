"""Measures the speed-up of asynchronous over synchronous RL training, with the same code.

    python -m experiments.benchmarks.asynchronous [--updates=36] [--waiting=8] [--repetitions=2] [--scale=1] [--out=workdir/benchmarks]

Orchestrator, gateway, two task services and two engines run as processes, and this process trains, as in every run of
experiments/rl_agentic.py. Only the parts that would need accelerators or environments sleep instead
(simulated_fleet.py): environments answer after log-normal times, engines sample at a fixed speed in a fixed number of
slots, and an update and a push of weights take a fixed time. Every rollout has the same durations in all arms. Arms
take turns:

    waits        max_staleness=0: no sampling during updates, and no updates during sampling
    learns on    samples at most as old as the workload allows
    drops        (long tails only) at most 4 steps old and without pacing: older samples are dropped, as in GLM-5

Prints updates a second and the speed-up with its bound, from a discrete-event model in which nothing else takes time
(discrete_event_model.py); the busy shares of all programs; the age of the training samples, and the number of dropped
ones. Then the bound by the allowed staleness. Pictures: asynchronous.html in --out, which also has the programs' logs.

--updates is the number of updates of an arm that learns on, --waiting that of one that waits; --scale multiplies all
durations. Takes about eleven minutes, in which a core is less than half busy. Expected: docs/results/reinforcement_learning.md.
"""

import argparse
import dataclasses
import pathlib
import shutil
import statistics
import sys
import time
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.discrete_event_model import (
    Span,
    SystemRun,
    Update,
    Workload,
    ideal,
    mean_concurrency,
    merge_spans,
)
from experiments.benchmarks.routing import spread
from experiments.benchmarks.simulated_fleet import fleet
from glm5_jax.metrics import charts, html_page
from glm5_jax.rl.orchestrator.client import OrchestratorClient
from glm5_jax.runtime.terminal import print_error

SHORT = Workload(name="short tails", slots=20, tokens=(6, 18))
LONG = dataclasses.replace(
    SHORT, name="long tails", max_staleness=8, median_answer_s=0.4, sigma=1.0
)
WAITS, LEARNS, DROPS = "waits", "learns on", "drops"
BOUNDS = {SHORT.name: 2.9, LONG.name: 6.0}  # lower limits of the workloads' bounds
# Targets of the speed-up, its share of the bound, and the trainer's idle share.
SPEED_UPS, OF_BOUND, IDLE = {SHORT.name: 2.7, LONG.name: 5.0}, 0.95, 0.10
LONG_RUN = 300  # updates
STALENESS = (0, 1, 2, 3, 4, 6, 8, 12)
BATCH_TIMEOUT_S = 120.0
SHOWN_S = 24.0  # length of the picture at a scale of 1, in seconds


def main(arguments: Sequence[str]) -> int:
    """Runs the program with these arguments. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks.asynchronous")
    parser.add_argument("--updates", type=int, default=36)
    parser.add_argument("--waiting", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("workdir/benchmarks"))
    options = parser.parse_args(arguments)
    try:
        arms_by_workload = {work.name: arms(work.scaled(options.scale)) for work in (SHORT, LONG)}
        minimums = {"updates": LONG.max_staleness + 2, "waiting": 2, "repetitions": 1}
        for name, minimum in minimums.items():
            if getattr(options, name) < minimum:
                raise ValueError(
                    f"--{name} is {getattr(options, name)}; it must be at least {minimum}"
                )
    except ValueError as error:
        print_error(error)
        return 2
    folder = options.out / "asynchronous"
    shutil.rmtree(folder, ignore_errors=True)
    for seed in range(options.repetitions):
        for workload_arms in arms_by_workload.values():
            for name, arm in workload_arms.items():
                updates = options.waiting if name == WAITS else options.updates
                run_folder = folder / f"{arm.workload.name}-{name}-{seed}".replace(" ", "-")
                arm.ideals.append(ideal(arm.workload, updates, seed))
                arm.runs.append(measure(arm.workload, updates, seed, run_folder))
    console = Console(width=120)
    for workload_arms in arms_by_workload.values():
        print(describe(workload_arms))
    console.print(
        speed_table(arms_by_workload), busy_table(arms_by_workload), age_table(arms_by_workload)
    )
    print(verdict(arms_by_workload))
    console.print(staleness_table())
    print(f"pictures: {pictures(options.out, arms_by_workload, SHOWN_S * options.scale)}")
    return 0


@dataclasses.dataclass(frozen=True)
class WorkloadArm:
    """A workload with its runs, one for each seed, and those of a system without overhead.

    Attributes:
      workload: durations and sizes.
      runs, ideals: runs of the real system and of the model.
    """

    workload: Workload
    runs: list[SystemRun] = dataclasses.field(default_factory=list)
    ideals: list[SystemRun] = dataclasses.field(default_factory=list)

    @property
    def first(self) -> int:
        """Number of first updates to leave out, in which the system fills."""
        return self.workload.max_staleness + 1

    def rates(self, ideals: bool = False) -> list[float]:
        """Returns updates per second, by seed."""
        return [run.rate(self.first) for run in (self.ideals if ideals else self.runs)]

    def idle(self, run: SystemRun) -> float:
        """Returns the share of its time in which the trainer neither updates nor pushes."""
        return 1 - run.rate(self.first) * (self.workload.update_s + self.workload.push_s)


ArmsByWorkload = dict[str, dict[str, WorkloadArm]]  # by workload and arm


def arms(workload: Workload) -> dict[str, WorkloadArm]:
    """Returns the arms of a workload by name."""
    workloads = {WAITS: workload.synchronous(), LEARNS: workload}
    if workload.max_staleness > 4:
        workloads[DROPS] = dataclasses.replace(workload, max_staleness=4, pacing=False)
    return {name: WorkloadArm(work) for name, work in workloads.items()}


def measure(workload: Workload, updates: int, seed: int, folder: pathlib.Path) -> SystemRun:
    """Returns a run of the real system. The folder, which is new, gets the programs' logs."""
    with fleet(workload, seed, folder) as programs:
        orchestrator = OrchestratorClient(programs.orchestrator)
        run = SystemRun(updates=[], replies=[], answers=[], ages=[], met=[])
        began, spent = time.monotonic(), time.process_time()
        programs.set_version(0)
        orchestrator.begin(0, 0)
        # The same calls as in `rl.trainers.async_trainer`.
        for step in range(updates):
            requested = time.monotonic()
            groups = orchestrator.take(step, BATCH_TIMEOUT_S)
            if groups is None:
                raise RuntimeError(
                    f"no batch within {BATCH_TIMEOUT_S:g} s: {'; '.join(orchestrator.blockers)}"
                )
            received = time.monotonic()
            time.sleep(workload.update_s)
            updated = time.monotonic()
            orchestrator.mark_trained(step)
            time.sleep(workload.push_s)
            programs.set_version(step + 1)
            orchestrator.push(step + 1)
            run.updates.append(Update(requested, received, updated, time.monotonic()))
            members = [m for g in groups for m in g.members[: len(g.baseline)]]
            run.ages.append([step - member.versions[0] for member in members])
            run.met.append([member.metrics["met"] for member in members])
        orchestrator_metrics = orchestrator.status()["metrics"]
        trainer = (time.process_time() - spent) / (time.monotonic() - began)
        return dataclasses.replace(
            run,
            replies=programs.replies(),
            answers=programs.answers(),
            dropped=orchestrator_metrics["groups/stale"],
            padded=orchestrator_metrics["members/padded"],
            cores=programs.cores() | {"trainer": trainer},
        )


def speed_ups(
    workload_arms: dict[str, WorkloadArm], name: str, ideals: bool = False
) -> list[float]:
    """Returns an arm's updates per second over those of the one that waits, by seed."""
    return [
        a / b for a, b in zip(workload_arms[name].rates(ideals), workload_arms[WAITS].rates(ideals))
    ]


def shares_of_bound(workload_arms: dict[str, WorkloadArm], name: str) -> list[float]:
    """Returns the share of the possible speed-up, by seed."""
    return [
        a / b
        for a, b in zip(speed_ups(workload_arms, name), speed_ups(workload_arms, name, ideals=True))
    ]


def describe(workload_arms: dict[str, WorkloadArm]) -> str:
    """Returns a description of a workload."""
    work, waits = workload_arms[LEARNS].workload, workload_arms[WAITS]
    long_run = [ideal(w, LONG_RUN).rate(w.max_staleness + 1) for w in (work, work.synchronous())]
    lowest, highest = work.tokens
    return (
        f"{work.name}: {work.batch_groups} groups of {work.group}; {work.turns} turns, in each an environment takes "
        f"{work.median_answer_s:g} s (median; log-normal, sigma {work.sigma:g}, {work.max_answer_s:g} s at most) and a reply {lowest} to {highest} "
        f"tokens at {work.speed:g} a second, in {work.engines} x {work.slots} slots; an update {work.update_s:g} s, a push "
        f"{work.push_s:g} s; at most {work.max_staleness} steps old. Arm '{WAITS}' takes {1 / statistics.mean(waits.rates()):.2f} s for an "
        f"update. Bound in the long run ({LONG_RUN} updates): {long_run[0] / long_run[1]:.2f}"
    )


def speed_table(arms_by_workload: ArmsByWorkload) -> Table:
    """Returns a table of updates per second with the bound."""
    table = Table(
        *("workload", "arm", "updates a second", "without overhead", "share of it"),
        *("speed-up", "bound", "share of it"),
        title="speed",
    )
    for workload, workload_arms in arms_by_workload.items():
        for name, arm in workload_arms.items():
            rates, ideals = arm.rates(), arm.rates(ideals=True)
            row = [workload, name, spread(rates, ".3f"), spread(ideals, ".3f")]
            row.append(spread([a / b for a, b in zip(rates, ideals)], ".3f"))
            if name != WAITS:
                row.append(spread(speed_ups(workload_arms, name)))
                row.append(spread(speed_ups(workload_arms, name, ideals=True)))
                row.append(spread(shares_of_bound(workload_arms, name), ".3f"))
            table.add_row(*row)
    return table


def busy_table(arms_by_workload: ArmsByWorkload) -> Table:
    """Returns a table of the busy shares of all programs."""
    table = Table(
        *("workload", "arm", "trainer learns or pushes", "waits for batches", "slots write"),
        *("any slot does", "any environment works", "environments at once", "cores"),
        title="busy shares of the time",
    )
    for workload, workload_arms in arms_by_workload.items():
        for name, arm in workload_arms.items():
            slots, rows = arm.workload.engines * arm.workload.slots, []
            for run in arm.runs:
                window = run.window(arm.first)
                spans = run.replies, merge_spans(run.replies), merge_spans(run.answers), run.answers
                write, *others = (mean_concurrency(kind, window) for kind in spans)
                trainer = 1 - arm.idle(run), run.waiting(arm.first)
                rows.append([*trainer, write / slots, *others, sum(run.cores.values())])
            *shares, concurrency, cores = (statistics.mean(values) for values in zip(*rows))
            percents = [f"{100 * share:.0f}%" for share in shares]
            table.add_row(workload, name, *percents, f"{concurrency:.1f}", f"{cores:.2f}")
    return table


def age_table(arms_by_workload: ArmsByWorkload) -> Table:
    """Returns a table of the ages of trained samples and of the samples that were not trained on."""
    table = Table(
        *("workload", "arm", "steps old, mean", "most", "groups", "dropped", "copies of members"),
        "seconds of environments, mean",
        title="training samples",
    )
    for workload, workload_arms in arms_by_workload.items():
        for name, arm in workload_arms.items():
            ages = [age for run in arm.runs for ages in run.ages[arm.first :] for age in ages]
            met = [m for run in arm.runs for update_met in run.met[arm.first :] for m in update_met]
            groups = arm.workload.batch_groups * sum(len(run.updates) for run in arm.runs)
            table.add_row(
                *(workload, name, f"{statistics.mean(ages):.2f}", f"{max(ages)}", f"{groups}"),
                *(
                    str(sum(getattr(run, field) for run in arm.runs))
                    for field in ("dropped", "padded")
                ),
                f"{statistics.mean(met):.2f}",
            )
    return table


def verdict(arms_by_workload: ArmsByWorkload) -> str:
    """Returns the targets that the arms that learn on meet in all repetitions."""

    def line(quantity: str, value: float, target: float, met: bool, form: str = ".2f") -> str:
        return f"  {quantity} {value:{form}} (target {target:g}): {'met' if met else 'missed'}"

    lines = []
    for workload, workload_arms in arms_by_workload.items():
        arm = workload_arms[LEARNS]
        bound = min(speed_ups(workload_arms, LEARNS, ideals=True))
        speed_up = min(speed_ups(workload_arms, LEARNS))
        share = min(shares_of_bound(workload_arms, LEARNS))
        idle = max(arm.idle(run) for run in arm.runs)
        target = SPEED_UPS[workload]
        lines += [
            f"{workload}, the worst of {len(arm.runs)} repetitions:",
            line("bound at least", bound, BOUNDS[workload], bound >= BOUNDS[workload]),
            line("speed-up at least", speed_up, target, speed_up >= target),
            line("share of the bound at least", share, OF_BOUND, share >= OF_BOUND, ".3f"),
            line("trainer idle at most", idle, IDLE, idle <= IDLE, ".3f"),
        ]
    return "\n".join(lines)


def staleness_table() -> Table:
    """Returns a table of the bound by the allowed steps between sampling and training.

    If every group is trained on, samples are at most one step older, because only that many batches are ever outstanding.
    """
    table = Table("steps old at most", title=f"the bound, {LONG_RUN} updates without overhead")
    workloads = SHORT, LONG, dataclasses.replace(LONG, name=f"{LONG.name}, dropping", pacing=False)
    for work in workloads:
        table.add_column(f"{work.name}: speed-up")
        table.add_column("trainer idle")
    waits = [ideal(work.synchronous(), LONG_RUN).rate(1) for work in workloads]
    for max_staleness in STALENESS:
        row = [str(max_staleness)]
        for work, base in zip(workloads, waits):
            arm = WorkloadArm(dataclasses.replace(work, max_staleness=max_staleness))
            run = ideal(arm.workload, LONG_RUN)
            row += [f"{run.rate(arm.first) / base:.2f}", f"{100 * arm.idle(run):.0f}%"]
        table.add_row(*row)
    return table


def pictures(
    folder: pathlib.Path, arms_by_workload: ArmsByWorkload, seconds: float
) -> pathlib.Path:
    """Writes asynchronous.html, a timeline of all programs over `seconds` seconds, and returns its path."""
    figures = []
    for workload, workload_arms in arms_by_workload.items():
        rows, lines = {}, []
        for name, arm in workload_arms.items():
            run = arm.runs[0]
            zero = run.updates[arm.first - 1].pushed
            learns = [(update.received, update.pushed) for update in run.updates]
            writes, answers = merge_spans(run.replies), merge_spans(run.answers)
            parts = {"trainer works": learns, "an engine writes": writes}
            for what, spans in (parts | {"an environment answers": answers}).items():
                rows[f"{name}: {what}"] = [
                    (max(0.0, a - zero), min(b - zero, seconds))
                    for a, b in spans
                    if b > zero and a < zero + seconds
                ]
            moments = np.linspace(0, seconds, 400)
            lines.append((name, moments.tolist(), concurrency(run.replies, zero + moments)))
        label = "seconds"
        figures.append(charts.span_chart(rows, x_label=label, y_label=workload, size=(7.0, 3.0)))
        figures.append(charts.line_chart(lines, x_label=label, y_label="Slots that write"))
    path, title = folder / "asynchronous.html", "Asynchronous training"
    return html_page.write(path, title, "", map(html_page.figure, figures))


def concurrency(spans: Sequence[Span], moments: np.ndarray) -> list[int]:
    """Returns the number of spans at each moment."""
    begins, ends = (np.sort(times) for times in np.array(spans).T)
    num_started = np.searchsorted(begins, moments, "right")
    return (num_started - np.searchsorted(ends, moments, "right")).tolist()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
