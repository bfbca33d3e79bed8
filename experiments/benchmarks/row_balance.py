"""Computes how long the devices of a long-context step wait for the slowest, with rows as loaded and assigned by cost.

    python -m experiments.benchmarks.row_balance [--batches=4] [--seed=0]

Rows of 202,752 tokens are packed best-fit from documents of random lengths, for the batches of GLM-5's 200K stages in
experiments: 128 ranks of 8 chips, 2 microbatches of a row. All numbers are ours:

- chats: log-normal lengths with a median of 4,096 tokens;
- agents: log-normal lengths with a median of 24,576 tokens;
- mid-training: the 200K stage of data/long_context.py, two thirds of the rows one long document, the rest short ones.

The cost of a row is that of its documents in training/flops.py. As in training/row_balancing.py, a step waits in each
microbatch for its costliest rank. Prints, dense and sparse: the costliest row over the mean; the cost of a step over
that of a step with equal ranks, with rows as loaded, assigned among 8 ranks (as each process of a pod could do), and
assigned among all (`--experiment.step.balance_rows=true`); the reduction of a step that is bound by its FLOPs.

These are FLOPs, not times. They hold where kernels skip keys of other documents (flash_mla on TPU and GPU, the
lightning indexer on GPU); elsewhere all rows cost the same. Takes a minute. Expected: docs/results/compilation.md.
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
from glm5_jax.training import flops, row_balancing

LENGTH = 202_752
UNIT = 64  # lengths are multiples of it, so that packing takes a 64th of the time
OPEN_ROWS = 8  # as in experiments/sft.py
RANKS, MICROBATCHES, HOST = 128, 2, 8
SHORT = (1024, 1.2)  # median and sigma of mid-training's short documents
Row = list[int]  # tokens of each of its documents


def packed_rows(count: int, median: float, sigma: float, draw: np.random.Generator) -> list[Row]:
    """Returns rows of documents with log-normal lengths, at most a row's."""

    def documents():
        while True:
            tokens = draw.lognormal(np.log(median), sigma)
            yield plain_record(np.zeros(round(min(max(tokens, 2 * UNIT), LENGTH) / UNIT), np.int32))

    # Enough documents for `count` rows.
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
    """Returns rows of the last stage, whose sources are packed separately: long documents fill at least half a row."""
    shares = STAGES[LENGTH]
    kinds = draw.random(count)
    short = iter(
        packed_rows(
            int((kinds >= shares.long + shares.interleaved + shares.recall).sum()), *SHORT, draw
        )
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
    "chats": lambda count, draw: packed_rows(count, 4096, 1.5, draw),
    "agents": lambda count, draw: packed_rows(count, 24_576, 1.0, draw),
    "mid-training": mid_training,
}


def row_cost(cfg: ModelConfig, row: Row, mtp_steps: int, indexers: bool) -> float:
    """Returns FLOPs of a row's training step; padding costs as much as a document's first token."""
    of = functools.partial(_document, cfg, mtp_steps, indexers)
    return sum(map(of, row)) + (LENGTH - sum(row)) * of(1)


@functools.cache
def _document(cfg: ModelConfig, mtp_steps: int, indexers: bool, tokens: int) -> float:
    return tokens * flops.train_flops(cfg, tokens, mtp_steps, trains_indexers=indexers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WaitFactors:
    """Costs of batches relative to equal ones.

    Attributes:
      rows: costliest row over the mean.
      unbalanced, hosts, balanced: cost of steps over that with equal ranks, with rows as loaded, assigned within hosts and
        assigned among all ranks.
    """

    rows: float
    unbalanced: float
    hosts: float
    balanced: float


def compute_waits(
    costs: np.ndarray, ranks: int = RANKS, microbatches: int = MICROBATCHES, host: int = HOST
) -> WaitFactors:
    """Returns the wait factors of costs [batches b]; host: number of ranks among which rows of a host are assigned."""
    equal_cost = costs.sum() / ranks
    assign = jax.jit(row_balancing.assign_rows, static_argnums=(1, 2))
    step = jax.jit(row_balancing.step_cost, static_argnums=(1, 2))

    def total(batches):
        return (
            sum(float(step(np.float32(batch), ranks, microbatches)) for batch in batches)
            / equal_cost
        )

    def order(costs, ranks):
        return costs[np.asarray(assign(np.float32(costs), ranks, microbatches))]

    by_host = costs.reshape(len(costs), ranks // host, -1)
    hosts = np.stack([np.concatenate([order(part, host) for part in batch]) for batch in by_host])
    balanced = np.stack([order(batch, ranks) for batch in costs])
    return WaitFactors(
        rows=float(costs.max() / costs.mean()),
        unbalanced=total(costs),
        hosts=total(hosts),
        balanced=total(balanced),
    )


def main(arguments: Sequence[str]) -> int:
    """Runs the program with these arguments. Returns the exit code."""
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
        documents = make(rows, np.random.default_rng(options.seed))
        for attention, indexers in (("dense", False), ("sparse", True)):
            cfg = dataclasses.replace(presets.glm5(), attention=attention)
            costs = np.array([row_cost(cfg, row, 3, indexers) for row in documents])
            factors = compute_waits(costs.reshape(options.batches, -1))
            table.add_row(
                *(
                    name,
                    f"{np.mean(list(map(len, documents))):.1f}",
                    attention,
                    f"{factors.rows:.2f}",
                ),
                *(f"{x:.3f}" for x in (factors.unbalanced, factors.hosts, factors.balanced)),
                f"{1 - factors.balanced / factors.unbalanced:.1%}",
            )
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
