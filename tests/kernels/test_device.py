"""Every Pallas form on the accelerator of this machine: equal bits twice, and XLA's results.

    bash launch/test.sh device -- tests/kernels

Sizes of the interpreted tests first, then GLM-5's. Needs a jax for the accelerator in the environment.
"""

import pytest

from pallas_kernels import backends, bench
from pallas_kernels.cases import KERNELS, cases
from tests.kernels.implementations import written

pytestmark = pytest.mark.device

# Of the largest number. bfloat16 rounds to 0.004, and sums of such numbers are rounded at other places.
TOLERANCE = 0.015
# Share of selected places that may differ. Scores that are equal but for rounding change places; Hopper's float8
# products are summed in 14 bits, so that many more are equal.
PLACES, FLOAT8_PLACES = 1e-3, 0.15

PLACED = ("lightning_indexer", "top_k")

CASES = [(kernel, name) for kernel in KERNELS for name in cases(kernel)]


@pytest.mark.parametrize("size", ["small", "sizes"])
@pytest.mark.parametrize(("kernel", "name"), CASES)
def test_equals_xla_and_itself(kernel, name, size):
    form = backends.BACKEND_OF_PLATFORM.get(backends.platform())
    if form not in written(kernel):
        pytest.skip(f"{kernel} has no Pallas form for {backends.platform()}")
    if reason := backends.OPT_IN.get((kernel, form)):
        pytest.xfail(reason)
    case = cases(kernel)[name]
    found = bench.check(case, dict(getattr(case, size)), form)
    assert found["same_bits"]
    limit = TOLERANCE
    if kernel in PLACED:
        limit = FLOAT8_PLACES if "float8" in name else PLACES
    assert found["difference"] <= limit
