"""What it saves to learn while others sample: the asynchronous system against the same code that waits.

    python -m experiments.benchmarks.asynchronous [--updates=36] [--waiting=8] [--repetitions=2] [--scale=1] [--out=workdir/benchmarks]

Hub, gateway, two task services and two engines run as processes and this one trains, all of them as in every run of
experiments/rl_agentic.py, but that sleep stands for what would take machines (sleeping_fleet.py): environments answer after
log-normal times, engines write so many tokens a second in so many slots, an update and a push of weights take their time. Every
rollout meets the same in all arms. Arms take turns:

    waits        max_staleness=0: nobody samples while it learns, it does not learn while others sample
    learns on    as many steps old as the workload says
    drops        (long tails alone) at most 4 steps old and without pacing: what is older is dropped, as in GLM-5

Prints updates a second and the speed-up beside its bound, the same counted in discrete events in which nothing else takes time
(ideal_system.py); who is busy for which share of the time; how old what is learnt from was, and what was dropped. Then what of the
bound depends on the staleness that is allowed. Pictures: asynchronous.html in --out, where the programs' logs are too.

--updates are those of an arm that learns on, --waiting those of one that waits; --scale multiplies all seconds. About eleven
minutes, in which a core is less than half busy. Expected: experiments/LOG.md.
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

from experiments.benchmarks.ideal_system import Run, Span, Update, Workload, ideal, joined, used
from experiments.benchmarks.routing import spread
from experiments.benchmarks.sleeping_fleet import fleet
from glm5_jax.core import charts
from glm5_jax.rl.client import HubClient
from glm5_jax.training import report

SHORT = Workload("short tails", slots=20, tokens=(6, 18))
LONG = dataclasses.replace(SHORT, name="long tails", max_staleness=8, seconds=0.4, sigma=1.0)
WAITS, LEARNS, DROPS = "waits", "learns on", "drops"
BOUNDS = {SHORT.name: 2.9, LONG.name: 6.0}  # that the workloads have at least
# Targets: of the speed-up, its share of the bound, and the trainer's time without work.
SPEED_UPS, OF_BOUND, IDLE = {SHORT.name: 2.7, LONG.name: 5.0}, 0.95, 0.10
LONG_RUN = 300  # updates
STALENESS = (0, 1, 2, 3, 4, 6, 8, 12)
PATIENCE = 120.0  # seconds that a batch may take to come
SHOWN = 24.0  # seconds of the picture, at a scale of 1


def main(arguments: Sequence[str]) -> int:
    """Exit code of the program with these arguments."""
    parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks.asynchronous")
    parser.add_argument("--updates", type=int, default=36)
    parser.add_argument("--waiting", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("workdir/benchmarks"))
    options = parser.parse_args(arguments)
    try:
        found = {own.name: arms(own.scaled(options.scale)) for own in (SHORT, LONG)}
        least = {"updates": LONG.max_staleness + 2, "waiting": 2, "repetitions": 1}
        for name, fewest in least.items():
            if getattr(options, name) < fewest:
                raise ValueError(
                    f"--{name} is {getattr(options, name)}; it must be at least {fewest}"
                )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    folder = options.out / "asynchronous"
    shutil.rmtree(folder, ignore_errors=True)
    for seed in range(options.repetitions):
        for own in found.values():
            for name, arm in own.items():
                updates = options.waiting if name == WAITS else options.updates
                place = folder / f"{arm.workload.name}-{name}-{seed}".replace(" ", "-")
                arm.ideals.append(ideal(arm.workload, updates, seed))
                arm.runs.append(measure(arm.workload, updates, seed, place))
    console = Console(width=120)
    for own in found.values():
        print(described(own))
    console.print(speed_table(found), busy_table(found), age_table(found))
    print(verdict(found))
    console.print(staleness_table())
    print(f"pictures: {pictures(options.out, found, SHOWN * options.scale)}")
    return 0


@dataclasses.dataclass(frozen=True)
class Arm:
    """A workload and its runs, one for each seed, beside those of a system without overhead.

    first: updates that are left out, in which the system fills.
    """

    workload: Workload
    runs: list[Run] = dataclasses.field(default_factory=list)
    ideals: list[Run] = dataclasses.field(default_factory=list)

    @property
    def first(self) -> int:
        return self.workload.max_staleness + 1

    def rates(self, ideals: bool = False) -> list[float]:
        """Updates a second, by seed."""
        return [run.rate(self.first) for run in (self.ideals if ideals else self.runs)]

    def idle(self, run: Run) -> float:
        """The share of its time that the trainer neither learns nor pushes."""
        return 1 - run.rate(self.first) * (self.workload.learn + self.workload.push)


Found = dict[str, dict[str, Arm]]  # by workload and arm


def arms(workload: Workload) -> dict[str, Arm]:
    """Those of a workload."""
    found = {WAITS: workload.synchronous(), LEARNS: workload}
    if workload.max_staleness > 4:
        found[DROPS] = dataclasses.replace(workload, max_staleness=4, pacing=False)
    return {name: Arm(own) for name, own in found.items()}


def measure(workload: Workload, updates: int, seed: int, folder: pathlib.Path) -> Run:
    """A run of the real system; in the folder, which is new, is what its programs say."""
    with fleet(workload, seed, folder) as own:
        hub, found = HubClient(own.hub), Run([], [], [], [], [])
        began, spent = time.monotonic(), time.process_time()
        own.set_version(0)
        hub.begin(0, 0)
        # As `rl.asynchronous` does.
        for step in range(updates):
            asked = time.monotonic()
            groups = hub.take(step, PATIENCE)
            if groups is None:
                raise RuntimeError(f"no batch within {PATIENCE:g} s: {'; '.join(hub.hindered)}")
            came = time.monotonic()
            time.sleep(workload.learn)
            learnt = time.monotonic()
            hub.trained(step)
            time.sleep(workload.push)
            own.set_version(step + 1)
            hub.push(step + 1)
            found.updates.append(Update(asked, came, learnt, time.monotonic()))
            members = [m for g in groups for m in g.members[: len(g.baseline)]]
            found.ages.append([step - member.versions[0] for member in members])
            found.met.append([member.metrics["met"] for member in members])
        told = hub.status()["metrics"]
        trainer = (time.process_time() - spent) / (time.monotonic() - began)
        return dataclasses.replace(
            found,
            replies=own.replies(),
            answers=own.answers(),
            dropped=told["groups/stale"],
            padded=told["members/padded"],
            cores=own.cores() | {"trainer": trainer},
        )


def speed_ups(own: dict[str, Arm], name: str, ideals: bool = False) -> list[float]:
    """An arm's updates a second over those of the one that waits, by seed."""
    return [a / b for a, b in zip(own[name].rates(ideals), own[WAITS].rates(ideals))]


def of_bound(own: dict[str, Arm], name: str) -> list[float]:
    """The share of the speed-up that there could be, by seed."""
    return [a / b for a, b in zip(speed_ups(own, name), speed_ups(own, name, ideals=True))]


def described(own: dict[str, Arm]) -> str:
    """A workload in words."""
    work, waits = own[LEARNS].workload, own[WAITS]
    long_run = [ideal(w, LONG_RUN).rate(w.max_staleness + 1) for w in (work, work.synchronous())]
    fewest, most = work.tokens
    return (
        f"{work.name}: {work.batch_groups} groups of {work.group}; {work.turns} turns, in each an environment takes "
        f"{work.seconds:g} s (median; log-normal, sigma {work.sigma:g}, {work.limit:g} s at most) and a reply {fewest} to {most} "
        f"tokens at {work.speed:g} a second, in {work.engines} x {work.slots} slots; an update {work.learn:g} s, a push "
        f"{work.push:g} s; at most {work.max_staleness} steps old. Who waits takes {1 / statistics.mean(waits.rates()):.2f} s for an "
        f"update. Bound in the long run ({LONG_RUN} updates): {long_run[0] / long_run[1]:.2f}"
    )


def speed_table(found: Found) -> Table:
    """Updates a second, beside the bound."""
    table = Table(
        *("workload", "arm", "updates a second", "without overhead", "share of it"),
        *("speed-up", "bound", "share of it"),
        title="speed",
    )
    for workload, own in found.items():
        for name, arm in own.items():
            rates, ideals = arm.rates(), arm.rates(ideals=True)
            row = [workload, name, spread(rates, ".3f"), spread(ideals, ".3f")]
            row.append(spread([a / b for a, b in zip(rates, ideals)], ".3f"))
            if name != WAITS:
                row.append(spread(speed_ups(own, name)))
                row.append(spread(speed_ups(own, name, ideals=True)))
                row.append(spread(of_bound(own, name), ".3f"))
            table.add_row(*row)
    return table


def busy_table(found: Found) -> Table:
    """Who has something to do for which share of the time."""
    table = Table(
        *("workload", "arm", "trainer learns or pushes", "waits for batches", "slots write"),
        *("any slot does", "any environment works", "environments at once", "cores"),
        title="busy shares of the time",
    )
    for workload, own in found.items():
        for name, arm in own.items():
            slots, rows = arm.workload.engines * arm.workload.slots, []
            for run in arm.runs:
                window = run.window(arm.first)
                spans = run.replies, joined(run.replies), joined(run.answers), run.answers
                write, *others = (used(one, window) for one in spans)
                trainer = 1 - arm.idle(run), run.waiting(arm.first)
                rows.append([*trainer, write / slots, *others, sum(run.cores.values())])
            *shares, at_once, cores = (statistics.mean(values) for values in zip(*rows))
            told = [f"{100 * share:.0f}%" for share in shares]
            table.add_row(workload, name, *told, f"{at_once:.1f}", f"{cores:.2f}")
    return table


def age_table(found: Found) -> Table:
    """How old what was learnt from was, and what was not learnt from."""
    table = Table(
        *("workload", "arm", "steps old, mean", "most", "groups", "dropped", "copies of members"),
        "seconds of environments, mean",
        title="what was learnt from",
    )
    for workload, own in found.items():
        for name, arm in own.items():
            ages = [age for run in arm.runs for ages in run.ages[arm.first :] for age in ages]
            met = [m for run in arm.runs for one in run.met[arm.first :] for m in one]
            groups = arm.workload.batch_groups * sum(len(run.updates) for run in arm.runs)
            table.add_row(
                *(workload, name, f"{statistics.mean(ages):.2f}", f"{max(ages)}", f"{groups}"),
                *(
                    str(sum(getattr(run, what) for run in arm.runs))
                    for what in ("dropped", "padded")
                ),
                f"{statistics.mean(met):.2f}",
            )
    return table


def verdict(found: Found) -> str:
    """What of the targets is met in all repetitions by the arms that learn on."""

    def told(what: str, value: float, target: float, met: bool, form: str = ".2f") -> str:
        return f"  {what} {value:{form}} (target {target:g}): {'met' if met else 'missed'}"

    lines = []
    for workload, own in found.items():
        arm = own[LEARNS]
        bound = min(speed_ups(own, LEARNS, ideals=True))
        speed_up, share = min(speed_ups(own, LEARNS)), min(of_bound(own, LEARNS))
        idle = max(arm.idle(run) for run in arm.runs)
        target = SPEED_UPS[workload]
        lines += [
            f"{workload}, the worst of {len(arm.runs)} repetitions:",
            told("bound at least", bound, BOUNDS[workload], bound >= BOUNDS[workload]),
            told("speed-up at least", speed_up, target, speed_up >= target),
            told("share of the bound at least", share, OF_BOUND, share >= OF_BOUND, ".3f"),
            told("trainer idle at most", idle, IDLE, idle <= IDLE, ".3f"),
        ]
    return "\n".join(lines)


def staleness_table() -> Table:
    """The bound by the steps that may lie between sampling and learning: with every group learnt from, no more than one more
    than these, as only so many batches are ever outstanding."""
    table = Table("steps old at most", title=f"the bound, {LONG_RUN} updates without overhead")
    workloads = SHORT, LONG, dataclasses.replace(LONG, name=f"{LONG.name}, dropping", pacing=False)
    for own in workloads:
        table.add_column(f"{own.name}: speed-up")
        table.add_column("trainer idle")
    waits = [ideal(own.synchronous(), LONG_RUN).rate(1) for own in workloads]
    for most in STALENESS:
        row = [str(most)]
        for own, base in zip(workloads, waits):
            arm = Arm(dataclasses.replace(own, max_staleness=most))
            run = ideal(arm.workload, LONG_RUN)
            row += [f"{run.rate(arm.first) / base:.2f}", f"{100 * arm.idle(run):.0f}%"]
        table.add_row(*row)
    return table


def pictures(folder: pathlib.Path, found: Found, seconds: float) -> pathlib.Path:
    """Writes asynchronous.html, what all do in so many seconds, and returns its path."""
    figures = []
    for workload, own in found.items():
        rows, lines = {}, []
        for name, arm in own.items():
            run = arm.runs[0]
            zero = run.updates[arm.first - 1].pushed
            learns = [(own.came, own.pushed) for own in run.updates]
            writes, answers = joined(run.replies), joined(run.answers)
            parts = {"trainer works": learns, "an engine writes": writes}
            for what, spans in (parts | {"an environment answers": answers}).items():
                rows[f"{name}: {what}"] = [
                    (max(0.0, a - zero), min(b - zero, seconds))
                    for a, b in spans
                    if b > zero and a < zero + seconds
                ]
            moments = np.linspace(0, seconds, 400)
            lines.append((name, moments.tolist(), at_once(run.replies, zero + moments)))
        label = "seconds"
        figures.append(charts.span_chart(rows, x_label=label, y_label=workload, size=(7.0, 3.0)))
        figures.append(charts.line_chart(lines, x_label=label, y_label="Slots that write"))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "asynchronous.html"
    body = ["<h1>Asynchronous training</h1>", *(f"<figure>{own}</figure>" for own in figures)]
    path.write_text(report.page("Asynchronous training", body))
    return path


def at_once(spans: Sequence[Span], moments: np.ndarray) -> list[int]:
    """How many of the spans there are at each moment."""
    begins, ends = (np.sort(own) for own in np.array(spans).T)
    begun = np.searchsorted(begins, moments, "right")
    return (begun - np.searchsorted(ends, moments, "right")).tolist()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
