"""Rows that cross between slices on their way to experts, a token's rows by themselves and once for each slice.

    python -m experiments.benchmarks.expert_slices [--devices=64] [--preset=glm5]

For a router that is balanced and whose choices are independent, from combinatorics alone (no device, a second), per token and way:
rows that leave a slice and rows that go to another device inside one, of `--experiment.step.expert_slices=1` (each of a token's
experts gets a row of its own) and of the slices' number (each slice gets the token once, and passes it on inside). Beside them
the rows of an all-gather over slices, which needs no plan but sends every token everywhere. Bytes are those of a token's 16-bit
row; there and back, forward, recomputed and backward, are six ways in each layer. Expected: experiments/LOG.md.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from glm5_jax import presets
from glm5_jax.model.dispatch import crossing_share

WAYS = 6


class Rows(NamedTuple):
    """Per token and way: rows to other slices and to other devices of a slice, on average."""

    across: float
    inside: float


def one_level(experts: int, chosen: int, devices: int, slices: int) -> Rows:
    """A row for each expert."""
    elsewhere = chosen * (1 - 1 / devices)
    across = chosen * (1 - 1 / slices)
    return Rows(across, elsewhere - across)


def two_levels(experts: int, chosen: int, devices: int, slices: int) -> Rows:
    """One to each slice that has an expert of the token; inside, a row for each expert."""
    across = (slices - 1) * crossing_share(experts, chosen, slices)
    return Rows(across, chosen * (1 - slices / devices))


def main(arguments: Sequence[str]) -> int:
    """Exit code of the program with these arguments."""
    parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks.expert_slices")
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--preset", default="glm5")
    options = parser.parse_args(arguments)
    try:
        cfg = presets.get(options.preset)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
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
