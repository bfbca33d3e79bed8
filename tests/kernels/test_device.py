"""Tests every Pallas form on this machine's accelerator: the same bits twice, and XLA's results.

    bash launch/test.sh device -- tests/kernels

Runs the sizes of the interpreted tests, then GLM-5's. Needs a jax for the accelerator.
"""

import pytest

from pallas_kernels import backends, bench
from pallas_kernels.cases import KERNELS, cases
from tests.kernels.implementations import implementation_names

pytestmark = pytest.mark.device

# Relative to the largest number. bfloat16 rounds to 0.004, and sums are rounded at other points.
TOLERANCE = 0.015
# Maximum share of selected positions that differ. Scores that differ by rounding only may swap. Hopper sums float8
# products in 14 bits, and more scores are equal.
PLACES, FLOAT8_PLACES = 1e-3, 0.15

PLACED = ("lightning_indexer", "top_k")

CASES = [(kernel, name) for kernel in KERNELS for name in cases(kernel)]


@pytest.mark.parametrize("size", ["small", "sizes"])
@pytest.mark.parametrize(("kernel", "name"), CASES)
def test_equals_xla_and_repeats_bits(kernel, name, size):
    form = backends.BACKEND_OF_PLATFORM.get(backends.platform())
    if form not in implementation_names(kernel):
        pytest.skip(f"{kernel} has no Pallas form for {backends.platform()}")
    if reason := backends.OPT_IN.get((kernel, form)):
        pytest.xfail(reason)
    case = cases(kernel)[name]
    report = bench.check(case, dict(getattr(case, size)), form)
    assert report["same_bits"]
    limit = TOLERANCE
    if kernel in PLACED:
        limit = FLOAT8_PLACES if "float8" in name else PLACES
    assert report["difference"] <= limit
