"""SwiGLU of rows sorted by expert against a loop over experts."""

import functools

import jax
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import grouped_swiglu
from tests.kernels.expert_problem import D, gradients, weights
from tests.oracles import experts as oracle


def swiglu(x, sizes, w, **named):
    return grouped_swiglu(x, sizes, w["gate"], w["up"], w["down"], **named)


def loop(x, dy, sizes):
    """(y, dx, dw) of rows sorted by expert, one expert after the other; zeros behind the last."""
    w, first = weights(), 0
    y, dx = np.zeros(x.shape), np.zeros(x.shape)
    dw = {k: np.zeros(v.shape) for k, v in w.items()}
    for e, size in enumerate(sizes):
        rows = slice(first, first + size)
        y[rows], dx[rows], dw["gate"][e], dw["up"][e], dw["down"][e] = gradients(
            x[rows], dy[rows], w["gate"][e], w["up"][e], w["down"][e]
        )
        first += size
    return y, dx, dw


ROWS = 140  # on one expert they are several rounds of a block's capacity
SIZES = {
    "uneven": (27, 1, 53, 12, 47),
    "empty experts": (0, 70, 0, 70, 0),
    "all on the first": (ROWS, 0, 0, 0, 0),
    "all on the last": (0, 0, 0, 0, ROWS),
    "rows without an owner": (3, 0, 4, 50, 1),
    "no row at all": (0, 0, 0, 0, 0),
}


@pytest.fixture(scope="module")
def x_dy():
    return np.random.default_rng(1).standard_normal((2, ROWS, D)).astype(np.float32)


@jax.jit
def grouped(x, dy, sizes, w):
    y, pull = jax.vjp(lambda x, w: swiglu(x, sizes, w), x, w)
    return y, *pull(dy)


@pytest.mark.parametrize("name", SIZES)
def test_forward_and_gradients_are_those_of_the_loop(name, x_dy):
    sizes = SIZES[name]
    y, dx, dw = grouped(*x_dy, np.asarray(sizes, np.int32), weights())
    expected = loop(*x_dy, sizes)
    np.testing.assert_allclose(y, expected[0], atol=1e-4)
    assert not y[sum(sizes) :].any() and not dx[sum(sizes) :].any()
    np.testing.assert_allclose(dx, expected[1], atol=1e-4)
    for key, value in expected[2].items():
        np.testing.assert_allclose(dw[key], value, atol=1e-3)


def test_the_loop_is_the_oracle(x_dy):
    x = x_dy[0][:3]
    w = {k: v[1] for k, v in weights().items()}
    expected = oracle.swiglu(x, w["gate"].T, w["up"].T, w["down"].T)
    np.testing.assert_allclose(loop(x, x, (0, 3, 0, 0, 0))[0], expected, atol=1e-5)


@pytest.mark.parametrize("expected_rows", [1, 4000])
def test_how_many_rows_are_expected_changes_nothing(expected_rows, x_dy):
    sizes = SIZES["uneven"]
    run = jax.jit(functools.partial(swiglu, expected_rows=expected_rows))
    got = run(x_dy[0], np.asarray(sizes, np.int32), weights())
    np.testing.assert_allclose(got, loop(*x_dy, sizes)[0], atol=1e-4)
