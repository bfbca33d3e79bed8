"""FLOPs and bytes of a kernel call, and the least time that a chip needs for them.

FLOPs count a multiply-add as two, of the products that cannot be left out; bytes count every input and
output once. What an implementation does beyond them shows in its share of the floor. Each package has its
formulas in `cost.py`, one function of the shapes for each kernel: of them its cases, and what XLA is told of
its TPU kernels (`estimate`), which is also what `glm5_jax.core.flops` counts.
"""

from typing import NamedTuple

from jax.experimental import pallas as pl

from pallas_kernels.chips import Chip


class Cost(NamedTuple):
    """flops: of matrix products in `dtype`; bytes: through device memory; transcendentals: exponentials,
    logarithms and their like."""

    flops: float
    bytes: float
    dtype: str = "bfloat16"
    transcendentals: float = 0


def together(*costs: Cost, bytes: float | None = None) -> Cost:
    """Of a call that takes several kernels; bytes: what it moves, if what lies between them need not move."""
    moved = sum(cost.bytes for cost in costs) if bytes is None else bytes
    return costs[0]._replace(
        flops=sum(cost.flops for cost in costs),
        bytes=moved,
        transcendentals=sum(cost.transcendentals for cost in costs),
    )


def estimate(cost: Cost, calls: int = 1) -> pl.CostEstimate:
    """What a kernel tells XLA's scheduler, and whoever counts the FLOPs of a program, of one of so many equal
    calls that cost as much together."""
    return pl.CostEstimate(
        flops=round(cost.flops / calls),
        bytes_accessed=round(cost.bytes / calls),
        transcendentals=round(cost.transcendentals / calls),
    )


def visible_pairs(t: int, s: int, start: int | None) -> float:
    """Pairs of one of t queries and one of s keys that causality lets meet, documents left out of account.

    start: key index of query 0. None: it is known only at run time, and the mean over the places that t queries
    can have among s keys counts, which is exact for all devices of a sequence cut in s / t together.
    """
    if start is None:
        return t * (s + 1) / 2
    free = min(max(s - start, 0), t)  # queries that do not see all keys
    return free * start + free * (free + 1) // 2 + (t - free) * s


def floor(cost: Cost, chip: Chip) -> float | None:
    """Seconds that the chip needs at its peaks, products and memory overlapped; None without a rate."""
    rate = chip.flops.get(cost.dtype)
    return max(cost.flops / rate, cost.bytes / chip.bandwidth) if rate else None
