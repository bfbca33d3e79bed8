"""How long the devices of a long-context step wait for the slowest, with rows as they come and dealt by their cost.

    python -m experiments.benchmarks.row_balance [--batches=4] [--seed=0]

Rows of 202,752 tokens, packed best-fit of documents whose lengths are drawn here (all numbers ours: chats, log-normal with a
median of 4,096 tokens; agents, one of 24,576; mid-training as data/long_context.py has its 200K stage, two thirds of the rows
one long document and the rest short ones), for the batches of GLM-5's 200K stages in experiments: 128 ranks of 8 chips, 2
microbatches of a row. A row costs what training/flops.py says of its documents; as in training/balance.py, a step waits in
each microbatch for its costliest rank. Prints, dense and sparse: the costliest row over the mean; what a step waits over
what it would with all ranks alike, as rows come, dealt among 8 ranks alone (what the processes of a pod could do by themselves)
and dealt among all (`--experiment.step.balance_rows=true`); how much shorter a step that is bound by its FLOPs becomes.

These are FLOPs, not times: they hold where kernels leave out keys of other documents (flash_mla on TPU and GPU, the
lightning indexer on GPU), and a row costs the same as any other elsewhere. A minute. Expected: experiments/LOG.md.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from glm5_jax import presets
from glm5_jax.config import ModelConfig
from glm5_jax.data.long_context import STAGES
from glm5_jax.data.packing import pack
from glm5_jax.data.record import plain_record
from glm5_jax.training import balance, flops

LENGTH = 202_752
UNIT = 64  # documents are whole units, which packs as many tokens in a 64th of the time
OPEN_ROWS = 8  # as experiments/sft.py has it
RANKS, MICROBATCHES, HOST = 128, 2, 8
SHORT = (1024, 1.2)  # median and sigma of mid-training's short documents
Row = list[int]  # tokens of its documents


def packed(count: int, median: float, sigma: float, draw: np.random.Generator) -> list[Row]:
    """Rows of documents with log-normal lengths, at most a row's."""

    def documents():
        while True:
            tokens = draw.lognormal(np.log(median), sigma)
            yield plain_record(np.zeros(round(min(max(tokens, 2 * UNIT), LENGTH) / UNIT), np.int32))

    # Enough of them, of which rows are taken while they last.
    mean = min(median * np.exp(sigma**2 / 2), LENGTH / 2)
    records = [r for r, _ in zip(documents(), range(int(3 * (count + OPEN_ROWS) * LENGTH / mean)))]
    rows = pack(
        records,
        LENGTH // UNIT,
        packing="best_fit",
        streams=("loss_mask",),
        open_rows=OPEN_ROWS,
    )
    return [
        (UNIT * np.bincount(row["segment_ids"])[1:]).tolist() for row, _ in zip(rows, range(count))
    ]


def mid_training(count: int, draw: np.random.Generator) -> list[Row]:
    """Rows of the last stage, whose sources are packed by themselves: long documents fill at least half a row."""
    shares = STAGES[LENGTH]
    kinds = draw.random(count)
    short = iter(
        packed(int((kinds >= shares.long + shares.interleaved + shares.recall).sum()), *SHORT, draw)
    )
    rows = []
    for kind in kinds:
        if kind < shares.long:
            rows.append([int(draw.integers(LENGTH // 2, LENGTH + 1))])
        elif kind < shares.long + shares.interleaved + shares.recall:
            rows.append([LENGTH])
        else:
            rows.append(next(short))
    return rows


LENGTHS: dict[str, Callable[[int, np.random.Generator], list[Row]]] = {
    "chats": lambda count, draw: packed(count, 4096, 1.5, draw),
    "agents": lambda count, draw: packed(count, 24_576, 1.0, draw),
    "mid-training": mid_training,
}


def row_cost(cfg: ModelConfig, row: Row, mtp_steps: int, indexers: bool) -> float:
    """FLOPs of a row's training step; padding costs what a document's first token does."""
    of = functools.partial(_document, cfg, mtp_steps, indexers)
    return sum(map(of, row)) + (LENGTH - sum(row)) * of(1)


@functools.cache
def _document(cfg: ModelConfig, mtp_steps: int, indexers: bool, tokens: int) -> float:
    return tokens * flops.train_flops(cfg, tokens, mtp_steps, indexers=indexers)


@dataclasses.dataclass(frozen=True)
class Waits:
    """Of some batches: the costliest row over the mean, and what steps wait over what they would, all ranks alike."""

    rows: float
    given: float
    hosts: float
    dealt: float


def waits(
    costs: np.ndarray, ranks: int = RANKS, microbatches: int = MICROBATCHES, host: int = HOST
) -> Waits:
    """costs [batches b]; host: ranks that are dealt to by themselves."""
    alike = costs.sum() / ranks
    deal = jax.jit(balance.deal, static_argnums=(1, 2))
    step = jax.jit(balance.step_cost, static_argnums=(1, 2))

    def total(batches):
        return sum(float(step(np.float32(batch), ranks, microbatches)) for batch in batches) / alike

    def order(costs, ranks):
        return costs[np.asarray(deal(np.float32(costs), ranks, microbatches))]

    own = costs.reshape(len(costs), ranks // host, -1)
    hosts = np.stack([np.concatenate([order(part, host) for part in batch]) for batch in own])
    dealt = np.stack([order(batch, ranks) for batch in costs])
    return Waits(float(costs.max() / costs.mean()), total(costs), total(hosts), total(dealt))


def main(arguments: Sequence[str]) -> int:
    """Exit code of the program with these arguments."""
    parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks.row_balance")
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.batches < 1:
        print(f"error: --batches is {options.batches}; it must be at least 1", file=sys.stderr)
        return 2
    rows = options.batches * RANKS * MICROBATCHES
    table = Table(
        *("lengths", "documents a row", "attention", "costliest row over mean"),
        *("as they come", f"among {HOST} ranks", "among all", "step shorter by"),
        title=f"cost of a step over that of one whose {RANKS} ranks are alike, {options.batches} batches of "
        f"{RANKS * MICROBATCHES} rows",
    )
    for name, make in LENGTHS.items():
        made = make(rows, np.random.default_rng(options.seed))
        for attention, indexers in (("dense", False), ("sparse", True)):
            cfg = dataclasses.replace(presets.glm5(), attention=attention)
            costs = np.array([row_cost(cfg, row, 3, indexers) for row in made])
            found = waits(costs.reshape(options.batches, -1))
            table.add_row(
                *(name, f"{np.mean(list(map(len, made))):.1f}", attention, f"{found.rows:.2f}"),
                *(f"{x:.3f}" for x in (found.given, found.hosts, found.dealt)),
                f"{1 - found.dealt / found.given:.1%}",
            )
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
