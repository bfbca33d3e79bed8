"""Computes lower bounds of GLM-5's cost per token by length and chip: dense attention in bf16 against DSA with W4A8.

    python -m experiments.benchmarks.serving_bound [LENGTH...] [--batch=128] [--json]

These are bounds from peak rates, never speeds: chip-seconds for a million tokens if every component reached its chip's
peak rate or bandwidth, chips never waited and nothing was sent between them (`inference.serving_cost`). Needs no
accelerator and takes seconds. Columns, for prompts of LENGTH tokens (default: 8K, 32K, 128K, 200K), with 128K tokens
or one prompt prefilled at once, and for decoding BATCH sequences at once at that length:

    dense      attention over all keys, weights and caches in bf16; prompts with keys and values expanded
    DSA        indexers and 2048 selected keys, all in bf16
    DSA W4A8   the same with int4 experts, int8 products and pages in 8 bits (the format that the chip multiplies)
    saved      share of dense that DSA W4A8 saves
    attention  factor by which DSA reduces the FLOPs of a prompt's attention, indexers' scores included

--json prints the same, with every component. Expected: docs/results/serving.md.
"""

import dataclasses
import json
import sys

from rich.console import Console
from rich.table import Table

from experiments.arguments import Parser
from glm5_jax import presets
from glm5_jax.config import ModelConfig
from glm5_jax.inference.serving_cost import BOUND, CLAIM, SERVED, TokenCost, arms, flops, prefill
from glm5_jax.runtime.terminal import print_error
from pallas_kernels.chips import CHIPS

LENGTHS = (8192, 32768, 131_072, 202_752)
BATCH = 128  # ours
TOKENS = 131_072  # prompt tokens prefilled at once, ours: enough that reading weights costs almost nothing
WIDTH = 120  # columns of the table, also without a terminal
TITLE = f"Chip-seconds for a million tokens: {BOUND}"
ATTENTION = "They claim 1.5 to 2 times less attention compute, too."


@dataclasses.dataclass(frozen=True)
class Bound:
    """Bounds of one length on one chip.

    Attributes:
      prefill, decode: cost of both stages.
      attention: FLOPs of a prompt's dense attention over those of scores and sparse attention.
    """

    prefill: TokenCost
    decode: TokenCost
    attention: float

    @classmethod
    def of(cls, cfg: ModelConfig, chip: str, length: int, batch: int) -> "Bound":
        """Returns the bounds on the chip of this name."""
        count = max(1, TOKENS // max(1, length))
        dense, sparse = (
            flops(prefill(cfg, arms(CHIPS[chip])[arm], length), "scores", "attention")
            for arm in ("dense", "DSA")
        )
        return cls(
            TokenCost.of(cfg, chip, "prefill", length, count),
            TokenCost.of(cfg, chip, "decode", length, batch),
            dense / sparse,
        )

    @property
    def stages(self) -> tuple[TokenCost, TokenCost]:
        """Costs in the order of the table."""
        return self.prefill, self.decode

    def row(self) -> list[str]:
        """Returns the cells of the table's row."""
        out = [f"{self.decode.length:,}", self.decode.chip]
        for cost in self.stages:
            out += [f"{seconds:,.0f}" for seconds in cost.totals.values()]
            out.append(f"{cost.saved:.0%}")
        return [*out, f"{self.attention:.1f}x"]

    def to_json(self) -> dict:
        """Returns the bounds as a JSON object."""
        saved = {cost.stage: cost.saved for cost in self.stages}
        return dataclasses.asdict(self) | {"saved": saved}


def notes() -> list[str]:
    """Returns the notes below the table."""
    lacking = [name for name in SERVED if "int8" not in CHIPS[name].flops]
    return [
        f"{CLAIM[0].upper()}{CLAIM[1:]}. {ATTENTION}",
        *(f"{name}: no int8 rate is published; int8 products count at bf16's." for name in lacking),
    ]


def main(arguments: list[str]) -> int:
    """Runs the program with these arguments. Returns the exit code."""
    parser = Parser("experiments.benchmarks.serving_bound", __doc__)
    parser.add_argument("lengths", nargs="*", type=int, metavar="LENGTH")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--json", action="store_true")
    try:
        options = parser.parse_args(arguments)
        cfg, batch = presets.glm5(), options.batch
        lengths = options.lengths or LENGTHS
        bounds = [Bound.of(cfg, chip, length, batch) for length in lengths for chip in SERVED]
    except ValueError as error:
        print_error(error)
        return 2
    if options.json:
        rows = [bound.to_json() for bound in bounds]
        print(json.dumps({"what": TITLE, "notes": notes(), "rows": rows}))
        return 0
    names = [
        f"{cost.stage}\n{arm}" for cost in bounds[0].stages for arm in (*cost.seconds, "saved")
    ]
    table = Table(
        "tokens", "chip", *names, "attention\nFLOPs", title=f"{TITLE}; {batch} decode at once"
    )
    for bound in bounds:
        table.add_row(*bound.row())
    Console(width=WIDTH).print(table)
    print("\n".join(notes()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
