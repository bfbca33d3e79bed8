"""Benchmark and test cases: every kernel at the shapes of GLM-5.

Every package has a `cases.py` with `CASES`, a dict of `Case` by name. The offline compilation test and
`pallas_kernels.bench` run all of them.
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
    "summed_attention_probs",
    "grouped_matmul",
    "w4a8_matmul",
    "mla_prologue",
    "cross_entropy",
    "gated_delta",
    "scatter_rows",
)


# Compositions of kernels, which are timed like kernels.
COMPOSED = ("dsa",)


class Case(NamedTuple):
    """One call of a public function.

    Attributes:
      sizes: sizes by name; the command line can change them.
      inputs: inputs(sizes, key) returns a dict of arrays. It uses only jax, so `jax.eval_shape` gives their
        shapes.
      run: run(inputs, sizes, implementation) makes the call. Its result is timed and compared with that of "xla".
      cost: cost(sizes) returns the unavoidable work.
      small: sizes that any machine can run under an interpreter.
    """

    sizes: Mapping[str, int]
    inputs: Callable[[Mapping[str, int], Any], dict[str, Any]]
    run: Callable[[dict[str, Any], Mapping[str, int], Any], Any]
    cost: Callable[[Mapping[str, int]], Cost]
    small: Mapping[str, int]


def worst_difference(got, expected) -> float:
    """Returns the largest difference of two trees of arrays, as a share of each array's largest value.

    For integers it is the share of entries that differ.
    """

    def difference(a, b):
        a, b = (np.asarray(x) for x in (a, b))
        if np.issubdtype(b.dtype, np.integer):
            return float(np.mean(a != b))
        a, b = (np.where(np.isinf(x), 0, x) for x in (a.astype(np.float64), b.astype(np.float64)))
        return float(np.max(np.abs(a - b), initial=0) / max(np.max(np.abs(b), initial=0), 1e-30))

    return max(
        difference(a, b)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    )


def cases(kernel: str) -> dict[str, Case]:
    """Returns the cases of one kernel by name. Raises ValueError with the list of kernels if the name is unknown."""
    if kernel not in KERNELS + COMPOSED:
        raise ValueError(f"no kernel {kernel!r}; use one of {', '.join(KERNELS + COMPOSED)}")
    module = kernel if kernel in COMPOSED else f"{kernel}.cases"
    return importlib.import_module(f"pallas_kernels.{module}").CASES
