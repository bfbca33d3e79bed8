"""FLOPs and bytes of a kernel call, and the least time that a chip needs for them.

FLOPs count a multiply-add as two, and only products that cannot be left out. Bytes count every input and output
once.
Work beyond these lowers an implementation's share of the roofline.

Each package has its formulas in `cost.py`, one function of the shapes per kernel. They give the costs of its
cases and the `CostEstimate` of its TPU kernels (`estimate`), which XLA and `glm5_jax.parallel.flops` read.
"""

from typing import NamedTuple

from jax.experimental import pallas as pl

from pallas_kernels.chips import Chip


class Cost(NamedTuple):
    """Unavoidable work of a call.

    Attributes:
      flops: FLOPs of matrix products in `dtype`.
      bytes: traffic of device memory.
      dtype: dtype of the products.
      transcendentals: number of exponentials, logarithms and similar functions.
    """

    flops: float
    bytes: float
    dtype: str = "bfloat16"
    transcendentals: float = 0


def sum_costs(*costs: Cost, bytes: float | None = None) -> Cost:
    """Returns the cost of a call that runs several kernels.

    bytes: traffic of the call, if intermediate results need not go through memory; None: the sum over kernels.
    """
    moved = sum(cost.bytes for cost in costs) if bytes is None else bytes
    return costs[0]._replace(
        flops=sum(cost.flops for cost in costs),
        bytes=moved,
        transcendentals=sum(cost.transcendentals for cost in costs),
    )


def estimate(cost: Cost, calls: int = 1) -> pl.CostEstimate:
    """Returns the estimate of one of `calls` equal calls that together cost `cost`.

    XLA's scheduler and FLOP counters read it.
    """
    return pl.CostEstimate(
        flops=round(cost.flops / calls),
        bytes_accessed=round(cost.bytes / calls),
        transcendentals=round(cost.transcendentals / calls),
    )


def visible_pairs(t: int, s: int, start: int | None) -> float:
    """Returns the number of (query, key) pairs that causality allows, for t queries and s keys.

    Documents are ignored. start: key index of query 0. None: known only at run time; then the mean over all
    positions of t
    queries among s keys, which is exact for all devices of a sequence that is split in s / t parts together.
    """
    if start is None:
        return t * (s + 1) / 2
    causal_queries = min(max(s - start, 0), t)  # queries that do not see all keys
    return (
        causal_queries * start
        + causal_queries * (causal_queries + 1) // 2
        + (t - causal_queries) * s
    )


def roofline_s(cost: Cost, chip: Chip) -> float | None:
    """Returns the seconds that the chip needs at its peaks, with products and memory traffic overlapped.

    None: the table has no rate for the dtype.
    """
    rate = chip.flops.get(cost.dtype)
    return max(cost.flops / rate, cost.bytes / chip.bandwidth) if rate else None
