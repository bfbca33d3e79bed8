"""What it saves to keep a session on one data-parallel rank, whose cache holds what it has said.

    python -m experiments.benchmarks.routing [--tasks=64] [--attempts=8] [--doubts=0.3] [--seeds=3] [--out=workdir/benchmarks]

Chats of an agent that searches are recorded (agent_traces.py) and played to eight ranks, 128 at once, each rank an engine's
scheduler, pages and prefix cache (replay.py). When three tenths of the chats have ended a rank is lost, and at half of them it
is there again, empty. Arms, each with the same chats, names and waits for tools:

    round robin, random     each request to another rank
    hashing                 the session's name on a ring of hashes, without bound or memory
    router                  rl.router, as the gateway has it
    infinite cache          one rank that never forgets anything

Prints tokens of prompts that were computed, what of an infinite cache's hits was found, sessions that moved, how evenly ranks were
filled, and what the tokens of a request grow with (least squares); then the same by the length of chats, the size of the caches,
the number of chats at once and the router's bound. Pictures: routing.html in --out.

Nothing is timed and nothing depends on the machine. About seven minutes. Expected: experiments/LOG.md.
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

from experiments.benchmarks.agent_traces import Trace, TraceConfig, record
from experiments.benchmarks.replay import (
    Anywhere,
    Asked,
    Hashing,
    Placing,
    ReplayConfig,
    Result,
    RoundRobin,
    hit_rate,
    replay,
    skew,
    slopes,
)
from glm5_jax.core import charts
from glm5_jax.rl.router import Router, RouterConfig
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training import report

Found = dict[str, list[Result]]  # results of each arm, by seed
# Targets: fewer tokens than round robin, share of an infinite cache's hits.
RATIO, OF_INFINITE = 5.0, 0.98
INFINITE = "infinite cache"
ARMS: dict[str, Callable[[ReplayConfig], Placing]] = {
    "round robin": lambda config: RoundRobin(config.names),
    "random": lambda config: Anywhere(config.names, config.seed),
    "hashing": lambda config: Hashing(config.names),
    "router": lambda config: Router(config.names),
    INFINITE: lambda config: RoundRobin(config.names),
}
CACHES = (0.75, 1.0, 2.0, 4.0, 8.0, math.inf)
AT_ONCE = (32, 64, 128, 256)
BOUNDS = (1.0, 1.05, 1.15, 1.25, 2.0)
LENGTHS = ((1, 8), (9, 12), (13, 20), (21, 99))  # turns of a chat
SHOWN_TURNS = 24


def run(
    traces: list[Trace], arm: str, config: ReplayConfig, placing: Placing | None = None
) -> Result:
    """A replay of an arm; placing: in place of the arm's own."""
    if arm == INFINITE:
        most = max(config.max_batch, config.in_flight)
        config = dataclasses.replace(config, ranks=1, lost=None, cache=math.inf, max_batch=most)
    return replay(traces, placing or ARMS[arm](config), config)


def main(arguments: Sequence[str]) -> int:
    """Exit code of the program with these arguments."""
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
        if (count := options.tasks * options.attempts) < 2 * max(AT_ONCE):
            raise ValueError(
                f"--tasks and --attempts make {count} chats; {max(AT_ONCE)} are played at once, so make twice as many"
            )
        traces = [
            record(
                TraceConfig(options.tasks, options.attempts, options.doubts, seed),
                Tokenizer.default(),
            )
            for seed in range(options.seeds)
        ]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(described(traces))
    found = {arm: [] for arm in ARMS}
    for seed, own in enumerate(traces):
        for arm in ARMS:
            found[arm].append(run(own, arm, dataclasses.replace(config, seed=seed)))
    console = Console(width=120)
    console.print(token_table(found), rank_table(found), length_table(traces, found))
    print(verdict(found, config))
    by_cache = by(traces[0], found[INFINITE][0], "cache", CACHES)
    console.print(sweep_table("size of the caches", by_cache))
    console.print(sweep_table("chats at once", by(traces[0], None, "in_flight", AT_ONCE)))
    console.print(bound_table(traces, config))
    print(f"pictures: {pictures(options.out, found, by_cache)}")
    return 0


def described(traces: list[list[Trace]]) -> str:
    """What was recorded, in words."""
    chats = [trace for own in traces for trace in own]
    turns = [len(trace) for trace in chats]
    asked = [turn for trace in chats for turn in trace]
    ends = [len(trace[-1].prompt) + len(trace[-1].output) for trace in chats]
    low, middle, high = np.percentile(turns, (5, 50, 95))
    return (
        f"{len(traces)} times {len(traces[0])} chats; turns: mean {np.mean(turns):.1f}, median {middle:.0f}, 5% to 95% "
        f"{low:.0f} to {high:.0f}, most {max(turns)}; tokens: a chat's end {np.mean(ends):,.0f} (most {max(ends):,}), a prompt "
        f"{np.mean([len(turn.prompt) for turn in asked]):,.0f}, a reply {np.mean([len(turn.output) for turn in asked]):.0f}"
    )


def ratios(found: Found, arm: str) -> list[float]:
    """Round robin's computed tokens over an arm's, by seed."""
    return [base.read / own.read for base, own in zip(found["round robin"], found[arm])]


def shares(found: Found, arm: str) -> list[float]:
    """An arm's hit rate over an infinite cache's, by seed."""
    return [own.hit_rate / best.hit_rate for own, best in zip(found[arm], found[INFINITE])]


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Mean, and the smallest and largest."""
    if len(values) == 1:
        return f"{values[0]:{form}}"
    return f"{np.mean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def token_table(found: Found) -> Table:
    """What the arms computed and found."""
    table = Table(
        *(
            "arm",
            "computed, M tokens",
            "fewer than round robin",
            "hit rate",
            "of an infinite cache's",
        ),
        *("for a new token", "for one said before"),
        title="tokens of prompts",
    )
    for arm, results in found.items():
        fits = np.mean([slopes(own.asked) for own in results], 0)
        table.add_row(
            arm,
            spread([own.read / 1e6 for own in results]),
            spread(ratios(found, arm)),
            spread([own.hit_rate for own in results], ".3f"),
            spread(shares(found, arm), ".3f"),
            *(f"{fit:.4f}" for fit in fits[1:]),
        )
    return table


def rank_table(found: Found) -> Table:
    """How the arms filled the ranks."""
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
    for arm, results in found.items():
        if arm == INFINITE:
            continue
        table.add_row(
            arm,
            ", ".join(f"{own.moved} of {len(own.placed)}" for own in results),
            ", ".join(str(own.strayed) for own in results),
            *skews(results),
            f"{np.mean([skew(own.stretches[0], 'tokens') for own in results]):.2f}",
        )
    return table


def skews(results: list[Result]) -> list[str]:
    """Mean of the fullest rank's chats over the mean rank's, by stretch."""
    found = np.array([[skew(looks) for looks in own.stretches] for own in results])
    # A rank that was never full again has no last stretch.
    means = [own[~np.isnan(own)].mean() if not np.isnan(own).all() else math.nan for own in found.T]
    return [f"{mean:.2f}" for mean in means]


def length_table(traces: list[list[Trace]], found: Found) -> Table:
    """Round robin against the router by the number of a chat's turns."""
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
            {chat for chat, trace in enumerate(own) if low <= len(trace) <= high} for own in traces
        ]
        if not (count := sum(map(len, chosen))):
            continue
        asked = {
            arm: [
                own
                for chats, result in zip(chosen, found[arm])
                for own in result.asked
                if own.chat in chats
            ]
            for arm in arms
        }
        base, own = (sum(one.read for one in asked[arm]) for arm in arms)
        row = f"{low} to {high}", str(count), f"{base / count:,.0f}", f"{own / count:,.0f}"
        table.add_row(*row, f"{base / own:.2f}", f"{hit_rate(asked['router']):.3f}")
    return table


def verdict(found: Found, config: ReplayConfig) -> str:
    """What of the targets is met by the router in all seeds."""
    results = found["router"]
    fewer, of_best = min(ratios(found, "router")), min(shares(found, "router"))
    bound = RouterConfig().bound
    moved = max(own.moved / math.ceil(bound * len(own.placed) / config.ranks) for own in results)
    strayed = sum(own.strayed for own in results)

    def said(met: bool) -> str:
        return "met" if met else "missed"

    return "\n".join(
        (
            f"fewer tokens than round robin: at least {fewer:.2f} times (target {RATIO:g}): {said(fewer >= RATIO)}",
            f"of an infinite cache's hits: at least {of_best:.4f} (target {OF_INFINITE:g}): {said(of_best >= OF_INFINITE)}",
            f"moved with the lost rank: at most {moved:.2f} of what a bound of {bound} allows, and {strayed} others: "
            f"{said(moved <= 1 and not strayed)}",
            f"the rank that was there again had {config.full} of the mean after {'; '.join(map(filled, results))}",
        )
    )


def filled(result: Result) -> str:
    """How long it took the rank that was there again to be full, in words."""
    if result.filled is None:
        return "never"
    added, full = (
        next(look.ended for look in result.looks if look.step >= step)
        for step in (result.added, result.filled)
    )
    return f"{result.filled - result.added} steps, {full - added} new chats"


Sweep = dict[float, dict[str, tuple[float, float]]]


def by(traces: list[Trace], best: Result | None, field: str, values: Sequence) -> Sweep:
    """{value: {arm: (fewer tokens than round robin, share of an infinite cache's hits)}}, one seed. best: of the infinite
    cache, where the field leaves it as it is."""
    found = {}
    for value in values:
        config = dataclasses.replace(ReplayConfig(), **{field: value})
        arms = {arm: [run(traces, arm, config)] for arm in ("round robin", "hashing", "router")}
        arms[INFINITE] = [best or run(traces, INFINITE, config)]
        found[value] = {arm: (ratios(arms, arm)[0], shares(arms, arm)[0]) for arm in arms}
    return found


def sweep_table(title: str, found: Sweep) -> Table:
    """A row for each value."""
    table = Table("value", "hashing, fewer", "router, fewer", title=title)
    for arm in ("round robin", "hashing", "router"):
        table.add_column(f"{arm}, of infinite")
    for value, arms in found.items():
        row = [f"{arms[arm][0]:.2f}" for arm in ("hashing", "router")]
        row += [f"{arms[arm][1]:.3f}" for arm in ("round robin", "hashing", "router")]
        table.add_row(f"{value:g}", *row)
    return table


def bound_table(traces: list[list[Trace]], config: ReplayConfig) -> Table:
    """The router with other bounds."""
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
        "elsewhere by names alone",
        title="the router's bound",
    )
    for bound in BOUNDS:
        routing, results = RouterConfig(bound=bound), []
        for seed, own in enumerate(traces):
            placing = Router(config.names, routing)
            results.append(run(own, "router", dataclasses.replace(config, seed=seed), placing))
        table.add_row(
            f"{bound:g}",
            f"{np.mean([own.read for own in results]) / 1e6:.3f}",
            ", ".join(str(own.moved) for own in results),
            *skews(results),
            "; ".join(map(filled, results)),
            ", ".join(str(replaced(own, Router(config.names, routing))) for own in results),
        )
    return table


def replaced(result: Result, router: Router) -> int:
    """Chats in flight that are put on another rank by who knows their names alone, in alphabetical order."""
    return sum(router.rank_of(name) != rank for name, rank in sorted(result.placed.items()))


def pictures(folder: pathlib.Path, found: Found, caches: Sweep) -> pathlib.Path:
    """Writes routing.html, and returns its path."""
    sizes = [size for size in caches if math.isfinite(size)]
    drawn = [
        charts.line_chart(
            [
                (name, *tokens_by_turn(found[arm], of))
                for name, arm, of in (
                    ("round robin", "round robin", lambda own: own.read),
                    ("router", "router", lambda own: own.read),
                    ("new tokens", "router", lambda own: own.new),
                )
            ],
            x_label="turn",
            y_label="Tokens of a prompt that are computed",
        ),
        charts.line_chart(chats_of_ranks(found["router"][0]), y_label="Chats in flight by rank"),
        charts.line_chart(
            [
                (arm, sizes, [caches[size][arm][1] for size in sizes])
                for arm in ("round robin", "hashing", "router")
            ],
            x_label="tokens that a cache holds, over those of its chats at their ends",
            y_label="Hits, of an infinite cache's",
        ),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "routing.html"
    body = ["<h1>Routing</h1>", *(f"<figure>{drawing}</figure>" for drawing in drawn)]
    path.write_text(report.page("Routing", body))
    return path


def tokens_by_turn(results: list[Result], of: Callable[[Asked], int]) -> tuple[list, list]:
    """(turns, mean of a number of their requests), without the first, which is all new."""
    sums: dict[int, list[int]] = {turn: [] for turn in range(1, SHOWN_TURNS)}
    for asked in (own for result in results for own in result.asked):
        if asked.turn in sums:
            sums[asked.turn].append(of(asked))
    turns = [turn for turn, values in sums.items() if values]
    return turns, [float(np.mean(sums[turn])) for turn in turns]


def chats_of_ranks(result: Result) -> list[charts.Series]:
    """A line for each rank, over the engines' steps."""
    names = sorted({name for look in result.looks for name in look.chats})
    steps = [look.step for look in result.looks]
    return [
        (name.rpartition("@")[2], steps, [look.chats.get(name, math.nan) for look in result.looks])
        for name in names
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
