"""Tests that every kernel's `ref`, its definition, and XLA's form give the same results and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backends
from pallas_kernels.cases import KERNELS, cases
from tests.kernels.implementations import marks

WITH_BOTH = [kernel for kernel in KERNELS if backends.is_written(kernel, "xla")]
QUICK = {"backward", "swiglu_backward", "backward_local", "decode_int8", "decode_drafts", "prefill"}


def tolerance_of(dtype, name: str) -> float:
    """Returns the largest difference, as a share of the largest number.

    bfloat16 results differ by one rounding. Of float32 results, XLA's gradients sum terms that it has rounded to
    the inputs' bfloat16.
    """
    if dtype == jnp.bfloat16:
        return 0.015
    return 0.003 if "backward" in name else 1e-5


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        pytest.param(kernel, name, id=f"{kernel}-{name}", marks=marks(name not in QUICK))
        for kernel in WITH_BOTH
        for name in cases(kernel)
    ],
)
def test_ref_equals_xla(kernel, name):
    case = cases(kernel)[name]
    inputs = case.inputs(case.small, jax.random.key(0))

    def run(inputs, implementation):
        return case.run(inputs, case.small, implementation)

    got, want = (jax.jit(run, static_argnums=1)(inputs, form) for form in ("ref", "xla"))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if jnp.issubdtype(x.dtype, jnp.integer):
            np.testing.assert_array_equal(x, y)
            continue
        tolerance = tolerance_of(x.dtype, name)
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_array_equal(np.isfinite(x), np.isfinite(y))
        x, y = np.where(np.isfinite(x), x, 0), np.where(np.isfinite(y), y, 0)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.abs(y).max())
