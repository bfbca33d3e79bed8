"""Measures the saving of routing a session to one data-parallel rank, whose cache holds its earlier turns.

    python -m experiments.benchmarks.routing [--tasks=64] [--attempts=8] [--doubts=0.3] [--seeds=3] [--out=workdir/benchmarks]

Records chats of a search agent (agent_traces.py) and replays them to eight ranks, 128 at once. Each rank has an
engine's scheduler, pages and prefix cache (replay.py). When three tenths of the chats have ended a rank is lost, and at
half of them it returns, empty. Arms, each with the same chats, names and tool durations:

    round robin, random     each request to another rank
    hashing                 the session's name on a ring of hashes, without bound or memory
    router                  rl.rollouts.router, as in the gateway
    infinite cache          one rank that never evicts anything

Prints computed prompt tokens, the share of an infinite cache's hits, sessions that moved, the balance of the ranks,
and the slopes of a request's computed tokens (least squares); then the same by the length of chats, the size of the
caches, the number of concurrent chats and the router's bound. Pictures: routing.html in --out.

Nothing is timed, and nothing depends on the machine. About seven minutes. Expected: docs/results/serving.md.
"""

import argparse
import dataclasses
import math
import pathlib
import sys
from collections.abc import Callable, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.agent_traces import Trace, TraceConfig, record_traces
from experiments.benchmarks.replay import (
    HashRouting,
    RandomRouting,
    ReplayConfig,
    ReplayedRequest,
    ReplayResult,
    RoundRobinRouting,
    RoutingPolicy,
    hit_rate,
    replay,
    skew,
    slopes,
)
from glm5_jax.metrics import charts, html_page
from glm5_jax.rl.rollouts.router import RouterConfig, SessionRouter
from glm5_jax.runtime.terminal import print_error
from glm5_jax.text.tokenizer import Tokenizer

ResultsByArm = dict[str, list[ReplayResult]]  # results of each arm, by seed
# Targets: factor of tokens saved against round robin, and share of an infinite cache's hits.
RATIO, OF_INFINITE = 5.0, 0.98
INFINITE = "infinite cache"
ARMS: dict[str, Callable[[ReplayConfig], RoutingPolicy]] = {
    "round robin": lambda config: RoundRobinRouting(config.names),
    "random": lambda config: RandomRouting(config.names, config.seed),
    "hashing": lambda config: HashRouting(config.names),
    "router": lambda config: SessionRouter(config.names),
    INFINITE: lambda config: RoundRobinRouting(config.names),
}
CACHES = (0.75, 1.0, 2.0, 4.0, 8.0, math.inf)
CONCURRENCY = (32, 64, 128, 256)
BOUNDS = (1.0, 1.05, 1.15, 1.25, 2.0)
LENGTHS = ((1, 8), (9, 12), (13, 20), (21, 99))  # turns of a chat
SHOWN_TURNS = 24


def run(
    traces: list[Trace], arm: str, config: ReplayConfig, routing: RoutingPolicy | None = None
) -> ReplayResult:
    """Returns the replay of an arm; routing: replaces the arm's routing policy."""
    if arm == INFINITE:
        max_batch = max(config.max_num_seqs, config.in_flight)
        config = dataclasses.replace(
            config, ranks=1, lost=None, cache=math.inf, max_num_seqs=max_batch
        )
    return replay(traces, routing or ARMS[arm](config), config)


def main(arguments: Sequence[str]) -> int:
    """Runs the program with these arguments. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks.routing")
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--attempts", type=int, default=8)
    parser.add_argument("--doubts", type=float, default=0.3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("workdir/benchmarks"))
    options = parser.parse_args(arguments)
    config = ReplayConfig()
    try:
        if options.seeds < 1:
            raise ValueError(f"--seeds is {options.seeds}; it must be at least 1")
        if (count := options.tasks * options.attempts) < 2 * max(CONCURRENCY):
            raise ValueError(
                f"--tasks and --attempts make {count} chats; {max(CONCURRENCY)} are played at once, so make twice as many"
            )
        traces = [
            record_traces(
                TraceConfig(
                    num_tasks=options.tasks,
                    attempts=options.attempts,
                    doubts=options.doubts,
                    seed=seed,
                ),
                Tokenizer.default(),
            )
            for seed in range(options.seeds)
        ]
    except ValueError as error:
        print_error(error)
        return 2
    # Replay every arm with every seed.
    print(describe(traces))
    results_by_arm = {arm: [] for arm in ARMS}
    for seed, seed_traces in enumerate(traces):
        for arm in ARMS:
            results_by_arm[arm].append(
                run(seed_traces, arm, dataclasses.replace(config, seed=seed))
            )
    console = Console(width=120)
    console.print(
        token_table(results_by_arm),
        rank_table(results_by_arm),
        length_table(traces, results_by_arm),
    )
    print(verdict(results_by_arm, config))
    # Vary one option at a time, with the first seed.
    by_cache = sweep(traces[0], results_by_arm[INFINITE][0], "cache", CACHES)
    console.print(sweep_table("size of the caches", by_cache))
    console.print(sweep_table("chats at once", sweep(traces[0], None, "in_flight", CONCURRENCY)))
    console.print(bound_table(traces, config))
    print(f"pictures: {pictures(options.out, results_by_arm, by_cache)}")
    return 0


def describe(traces: list[list[Trace]]) -> str:
    """Returns a description of the recorded chats."""
    chats = [trace for seed_traces in traces for trace in seed_traces]
    turns = [len(trace) for trace in chats]
    all_turns = [turn for trace in chats for turn in trace]
    ends = [len(trace[-1].prompt) + len(trace[-1].output) for trace in chats]
    low, middle, high = np.percentile(turns, (5, 50, 95))
    return (
        f"{len(traces)} times {len(traces[0])} chats; turns: mean {np.mean(turns):.1f}, median {middle:.0f}, 5% to 95% "
        f"{low:.0f} to {high:.0f}, most {max(turns)}; tokens: a chat's end {np.mean(ends):,.0f} (most {max(ends):,}), a prompt "
        f"{np.mean([len(turn.prompt) for turn in all_turns]):,.0f}, a reply {np.mean([len(turn.output) for turn in all_turns]):.0f}"
    )


def ratios(results_by_arm: ResultsByArm, arm: str) -> list[float]:
    """Returns round robin's computed tokens over an arm's, by seed."""
    return [
        base.read / result.read
        for base, result in zip(results_by_arm["round robin"], results_by_arm[arm])
    ]


def shares(results_by_arm: ResultsByArm, arm: str) -> list[float]:
    """Returns an arm's hit rate over an infinite cache's, by seed."""
    return [
        result.hit_rate / best.hit_rate
        for result, best in zip(results_by_arm[arm], results_by_arm[INFINITE])
    ]


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Returns the mean with the smallest and largest value."""
    if len(values) == 1:
        return f"{values[0]:{form}}"
    return f"{np.mean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def token_table(results_by_arm: ResultsByArm) -> Table:
    """Returns a table of computed and cached tokens by arm."""
    table = Table(
        *(
            "arm",
            "computed, M tokens",
            "fewer than round robin",
            "hit rate",
            "of an infinite cache's",
        ),
        *("for a new token", "for an earlier token"),
        title="tokens of prompts",
    )
    for arm, results in results_by_arm.items():
        fits = np.mean([slopes(result.requests) for result in results], 0)
        table.add_row(
            arm,
            spread([result.read / 1e6 for result in results]),
            spread(ratios(results_by_arm, arm)),
            spread([result.hit_rate for result in results], ".3f"),
            spread(shares(results_by_arm, arm), ".3f"),
            *(f"{fit:.4f}" for fit in fits[1:]),
        )
    return table


def rank_table(results_by_arm: ResultsByArm) -> Table:
    """Returns a table of the balance of the ranks by arm."""
    table = Table(
        *(
            "arm",
            "moved with the lost one",
            "others that moved",
            "before",
            "without one",
            "full again",
        ),
        "tokens instead of chats, before",
        title="what the fullest rank has over the mean, chats",
    )
    for arm, results in results_by_arm.items():
        if arm == INFINITE:
            continue
        table.add_row(
            arm,
            ", ".join(f"{result.moved} of {len(result.placed)}" for result in results),
            ", ".join(str(result.strayed) for result in results),
            *skews(results),
            f"{np.mean([skew(result.stretches[0], 'tokens') for result in results]):.2f}",
        )
    return table


def skews(results: list[ReplayResult]) -> list[str]:
    """Returns the mean of the fullest rank's chats over the mean rank's, by stretch."""
    by_result = np.array([[skew(looks) for looks in result.stretches] for result in results])
    # A rank that was never full again has no last stretch.
    means = [
        stretch[~np.isnan(stretch)].mean() if not np.isnan(stretch).all() else math.nan
        for stretch in by_result.T
    ]
    return [f"{mean:.2f}" for mean in means]


def length_table(traces: list[list[Trace]], results_by_arm: ResultsByArm) -> Table:
    """Returns a table of round robin against the router by the number of a chat's turns."""
    arms = "round robin", "router"
    table = Table(
        *(
            "turns",
            "chats",
            *(f"{arm}, tokens a chat" for arm in arms),
            "fewer",
            "router, hit rate",
        ),
        title="by the length of a chat",
    )
    for low, high in LENGTHS:
        chosen = [
            {chat for chat, trace in enumerate(seed_traces) if low <= len(trace) <= high}
            for seed_traces in traces
        ]
        if not (count := sum(map(len, chosen))):
            continue
        requests = {
            arm: [
                request
                for chats, result in zip(chosen, results_by_arm[arm])
                for request in result.requests
                if request.chat in chats
            ]
            for arm in arms
        }
        base, routed = (sum(request.read for request in requests[arm]) for arm in arms)
        row = f"{low} to {high}", str(count), f"{base / count:,.0f}", f"{routed / count:,.0f}"
        table.add_row(*row, f"{base / routed:.2f}", f"{hit_rate(requests['router']):.3f}")
    return table


def verdict(results_by_arm: ResultsByArm, config: ReplayConfig) -> str:
    """Returns the targets that the router meets in all seeds."""
    results = results_by_arm["router"]
    fewer, of_best = min(ratios(results_by_arm, "router")), min(shares(results_by_arm, "router"))
    bound = RouterConfig().bound
    moved = max(
        result.moved / math.ceil(bound * len(result.placed) / config.ranks) for result in results
    )
    strayed = sum(result.strayed for result in results)

    def met_text(met: bool) -> str:
        return "met" if met else "missed"

    return "\n".join(
        (
            f"fewer tokens than round robin: at least {fewer:.2f} times (target {RATIO:g}): {met_text(fewer >= RATIO)}",
            f"of an infinite cache's hits: at least {of_best:.4f} (target {OF_INFINITE:g}): {met_text(of_best >= OF_INFINITE)}",
            f"moved with the lost rank: at most {moved:.2f} of what a bound of {bound} allows, and {strayed} others: "
            f"{met_text(moved <= 1 and not strayed)}",
            f"the rank that was there again had {config.full} of the mean after {'; '.join(map(refill_text, results))}",
        )
    )


def refill_text(result: ReplayResult) -> str:
    """Returns how long the returned rank took to be full, as text."""
    if result.added is None or result.filled is None:
        return "never"
    added, full = (
        next(look.ended for look in result.looks if look.step >= step)
        for step in (result.added, result.filled)
    )
    return f"{result.filled - result.added} steps, {full - added} new chats"


Sweep = dict[float, dict[str, tuple[float, float]]]


def sweep(traces: list[Trace], best: ReplayResult | None, field: str, values: Sequence) -> Sweep:
    """Returns {value: {arm: (fewer tokens than round robin, share of an infinite cache's hits)}} of one seed.

    best: result of the infinite cache, if the field does not change it; None: replays it.
    """
    by_value = {}
    for value in values:
        config = dataclasses.replace(ReplayConfig(), **{field: value})
        arms = {arm: [run(traces, arm, config)] for arm in ("round robin", "hashing", "router")}
        arms[INFINITE] = [best or run(traces, INFINITE, config)]
        by_value[value] = {arm: (ratios(arms, arm)[0], shares(arms, arm)[0]) for arm in arms}
    return by_value


def sweep_table(title: str, by_value: Sweep) -> Table:
    """Returns a table with a row for each value."""
    table = Table("value", "hashing, fewer", "router, fewer", title=title)
    for arm in ("round robin", "hashing", "router"):
        table.add_column(f"{arm}, of infinite")
    for value, arms in by_value.items():
        row = [f"{arms[arm][0]:.2f}" for arm in ("hashing", "router")]
        row += [f"{arms[arm][1]:.3f}" for arm in ("round robin", "hashing", "router")]
        table.add_row(f"{value:g}", *row)
    return table


def bound_table(traces: list[list[Trace]], config: ReplayConfig) -> Table:
    """Returns a table of the router with other bounds."""
    table = Table(
        *(
            "bound",
            "computed, M tokens",
            "moved",
            "before",
            "without one",
            "full again",
            "full after",
        ),
        "elsewhere by names only",
        title="the router's bound",
    )
    for bound in BOUNDS:
        routing, results = RouterConfig(bound=bound), []
        for seed, seed_traces in enumerate(traces):
            router = SessionRouter(config.names, routing)
            seeded = dataclasses.replace(config, seed=seed)
            results.append(run(seed_traces, "router", seeded, router))
        table.add_row(
            f"{bound:g}",
            f"{np.mean([result.read for result in results]) / 1e6:.3f}",
            ", ".join(str(result.moved) for result in results),
            *skews(results),
            "; ".join(map(refill_text, results)),
            ", ".join(
                str(num_replaced(result, SessionRouter(config.names, routing)))
                for result in results
            ),
        )
    return table


def num_replaced(result: ReplayResult, router: SessionRouter) -> int:
    """Returns the number of chats in flight that a new router, in alphabetical order of names, puts on another rank."""
    return sum(router.route(name) != rank for name, rank in sorted(result.placed.items()))


def pictures(folder: pathlib.Path, results_by_arm: ResultsByArm, caches: Sweep) -> pathlib.Path:
    """Writes routing.html and returns its path."""
    sizes = [size for size in caches if math.isfinite(size)]
    figures = [
        charts.line_chart(
            [
                (name, *tokens_by_turn(results_by_arm[arm], field))
                for name, arm, field in (
                    ("round robin", "round robin", lambda request: request.read),
                    ("router", "router", lambda request: request.read),
                    ("new tokens", "router", lambda request: request.new),
                )
            ],
            x_label="turn",
            y_label="Tokens of a prompt that are computed",
        ),
        charts.line_chart(
            chats_of_ranks(results_by_arm["router"][0]), y_label="Chats in flight by rank"
        ),
        charts.line_chart(
            [
                (arm, sizes, [caches[size][arm][1] for size in sizes])
                for arm in ("round robin", "hashing", "router")
            ],
            x_label="tokens that a cache holds, over those of its chats at their ends",
            y_label="Hits, of an infinite cache's",
        ),
    ]
    return html_page.write(folder / "routing.html", "Routing", "", map(html_page.figure, figures))


def tokens_by_turn(
    results: list[ReplayResult], of: Callable[[ReplayedRequest], int]
) -> tuple[list, list]:
    """Returns (turns, mean of a number of their requests), without the first turn, which is all new."""
    sums: dict[int, list[int]] = {turn: [] for turn in range(1, SHOWN_TURNS)}
    for request in (request for result in results for request in result.requests):
        if request.turn in sums:
            sums[request.turn].append(of(request))
    turns = [turn for turn, values in sums.items() if values]
    return turns, [float(np.mean(sums[turn])) for turn in turns]


def chats_of_ranks(result: ReplayResult) -> list[charts.Series]:
    """Returns a line for each rank, over the engines' steps."""
    names = sorted({name for look in result.looks for name in look.chats})
    steps = [look.step for look in result.looks]
    return [
        (name.rpartition("@")[2], steps, [look.chats.get(name, math.nan) for look in result.looks])
        for name in names
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
