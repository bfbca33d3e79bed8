"""What is compiled, checked and timed: each kernel at the shapes of GLM-5.

Every package has a `cases.py` with `CASES`, a dict of `Case` by name. The offline compilation test and
`pallas_kernels.bench` run over all of them.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_kernels.cost import Cost

KERNELS = (
    "lightning_indexer",
    "sparse_flash_attention",
    "top_k",
    "index_scores",
    "indexer_kl",
    "sparse_indexer_kl",
    "flash_mla",
    "head_probs",
    "grouped_matmul",
    "w4a8_matmul",
    "mla_prologue",
    "cross_entropy",
    "gated_delta",
    "write_rows",
)


# What is put together from kernels, and timed as they are.
COMPOSED = ("dsa",)


class Case(NamedTuple):
    """One call of a public function.

    sizes: named sizes, which the command line may change. inputs(sizes, key): dict of arrays, made by
    jax alone, so that their shapes can be had without making them. run(inputs, sizes, implementation):
    the call, whose result is timed and compared with that of "ref". cost(sizes): what it cannot do
    without. small: sizes at which any machine can run it under an interpreter.
    """

    sizes: Mapping[str, int]
    inputs: Callable[[Mapping[str, int], Any], dict[str, Any]]
    run: Callable[[dict[str, Any], Mapping[str, int], Any], Any]
    cost: Callable[[Mapping[str, int]], Cost]
    small: Mapping[str, int]


def worst_difference(got, expected) -> float:
    """Largest difference of two trees of arrays, as a share of each array's largest value; integers
    count the share of entries that differ."""

    def of(a, b):
        a, b = (np.asarray(x) for x in (a, b))
        if np.issubdtype(b.dtype, np.integer):
            return float(np.mean(a != b))
        a, b = (np.where(np.isinf(x), 0, x) for x in (a.astype(np.float64), b.astype(np.float64)))
        return float(np.max(np.abs(a - b), initial=0) / max(np.max(np.abs(b), initial=0), 1e-30))

    return max(
        of(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    )


def cases(kernel: str) -> dict[str, Case]:
    """The cases of one kernel by name; ValueError with the list of kernels if there is no such one."""
    if kernel not in KERNELS + COMPOSED:
        raise ValueError(f"no kernel {kernel!r}; use one of {', '.join(KERNELS + COMPOSED)}")
    module = kernel if kernel in COMPOSED else f"{kernel}.cases"
    return importlib.import_module(f"pallas_kernels.{module}").CASES
