"""FLOPs and bytes of a kernel call, and the least time that a chip needs for them.

FLOPs count a multiply-add as two, of the products that cannot be left out; bytes count every input and
output once. What an implementation does beyond them shows in its share of the floor.
"""

import dataclasses
from typing import NamedTuple


class Cost(NamedTuple):
    """flops: of matrix products in `dtype`; bytes: through device memory."""

    flops: float
    bytes: float
    dtype: str = "bfloat16"


@dataclasses.dataclass(frozen=True)
class Chip:
    """Dense peaks of one chip in FLOP/s by dtype, and bytes/s of its memory (makers' data sheets)."""

    flops: dict[str, float]
    bandwidth: float


# H200: NVIDIA data sheet without sparsity, float32 as tensor cores take it (tf32). TPUs: Google's table.
CHIPS = {
    "H200": Chip(
        {"bfloat16": 989e12, "int8": 1979e12, "float8": 1979e12, "float32": 494e12}, 4.8e12
    ),
    "v5p": Chip({"bfloat16": 459e12, "int8": 918e12}, 2.77e12),
    "v6e": Chip({"bfloat16": 918e12, "int8": 1836e12}, 1.64e12),
    "v7x": Chip({"bfloat16": 2307e12, "float8": 4614e12}, 7.38e12),
}
# The names that runtimes give them. A TPU7x device is one of a chip's two halves.
KINDS = {"H200": "H200", "TPU v5p": "v5p", "TPU v5": "v5p", "TPU v6": "v6e", "TPU7x": "v7x"}


def chip_of(device_kind: str) -> Chip | None:
    """The data sheet of a chip by the name that its runtime gives it; None if it is not in the table."""
    for name, chip in KINDS.items():
        if name in device_kind:
            return CHIPS[chip]
    return None


def floor(cost: Cost, chip: Chip) -> float | None:
    """Seconds that the chip needs at its peaks, products and memory overlapped; None without a rate."""
    rate = chip.flops.get(cost.dtype)
    return max(cost.flops / rate, cost.bytes / chip.bandwidth) if rate else None
