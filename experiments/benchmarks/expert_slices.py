"""Counts rows that cross between slices on their way to experts, with a row per expert and with a row per slice.

    python -m experiments.benchmarks.expert_slices [--devices=64] [--preset=glm5]

Assumes a balanced router with independent choices, and uses only combinatorics (no device, a second). Counts per token
and way: rows that leave a slice, and rows that go to another device inside one. It compares
`--experiment.step.expert_slices=1` (each of a token's experts gets a row) with the number of slices (each slice gets
the token once, and forwards it inside). The table also has the rows of an all-gather over slices, which needs no plan
but sends every token everywhere. Bytes are those of a token's 16-bit row. Each layer has six ways: to the experts and
back, in the forward, recomputed and backward pass. Expected: docs/results/compilation.md.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from glm5_jax import presets
from glm5_jax.model.expert_dispatch import crossing_share
from glm5_jax.runtime.terminal import print_error

WAYS = 6


class Rows(NamedTuple):
    """Mean rows per token and way: to other slices, and to other devices of a slice."""

    across: float
    inside: float


def one_level(experts: int, chosen: int, devices: int, slices: int) -> Rows:
    """Returns the rows with one row for each expert."""
    elsewhere = chosen * (1 - 1 / devices)
    across = chosen * (1 - 1 / slices)
    return Rows(across, elsewhere - across)


def two_levels(experts: int, chosen: int, devices: int, slices: int) -> Rows:
    """Returns the rows with one row to each slice that has an expert of the token, and inside one for each expert."""
    across = (slices - 1) * crossing_share(experts, chosen, slices)
    return Rows(across, chosen * (1 - slices / devices))


def main(arguments: Sequence[str]) -> int:
    """Runs the program with these arguments. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks.expert_slices")
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--preset", default="glm5")
    options = parser.parse_args(arguments)
    try:
        cfg = presets.get(options.preset)
    except ValueError as error:
        print_error(error)
        return 2
    if options.devices < 2 or cfg.n_routed_experts % options.devices:
        print(
            f"error: --devices is {options.devices}; it must be at least 2 and divide the {cfg.n_routed_experts} experts",
            file=sys.stderr,
        )
        return 2
    table = Table(
        *("slices", "across: a row an expert", "once a slice", "fewer", "all-gather"),
        *("inside: a row an expert", "once a slice", "kB across saved per token and layer"),
        title=f"rows per token and way, {cfg.num_experts_per_tok} of {cfg.n_routed_experts} experts on {options.devices} "
        "devices",
    )
    slices = 2
    while options.devices % slices == 0:
        sizes = cfg.n_routed_experts, cfg.num_experts_per_tok, options.devices, slices
        plain, once = one_level(*sizes), two_levels(*sizes)
        saved = WAYS * 2 * cfg.hidden_size * (plain.across - once.across) / 1e3
        table.add_row(
            *(str(slices), f"{plain.across:.2f}", f"{once.across:.2f}"),
            *(f"{plain.across / once.across:.2f}x", f"{slices - 1}"),
            *(f"{plain.inside:.2f}", f"{once.inside:.2f}", f"{saved:.0f}"),
        )
        slices *= 2
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
