"""Tests of token dispatch on one device against a loop over experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.model.expert_dispatch import invert, permute, routed_experts, sort_by_expert
from glm5_jax.parallel.flops import count_flops
from glm5_jax.parallel.mesh import Region
from tests.kernels.expert_problem import D, E, F, gradients, weights
from tests.kernels.implementations import in_tiers
from tests.oracles import experts as oracle


def test_sorts_tokens_by_expert():
    ids = np.array([3, 1, 3, 0, 1, 1], np.int32)
    order, inverse, counts = sort_by_expert(jnp.asarray(ids), E)
    assert order.tolist() == [3, 1, 4, 5, 0, 2]  # stable
    assert ids[order].tolist() == sorted(ids)
    assert inverse.tolist() == np.argsort(order).tolist() == invert(order).tolist()
    assert counts.tolist() == [1, 3, 0, 2, 0]


def test_permute_sums_gradients_of_repeated_rows():
    """Every source row is used twice, so its gradient is a sum of two."""
    rng = np.random.default_rng(4)
    x, dy = rng.standard_normal((3, 2)).astype(np.float32), rng.standard_normal((6, 2))
    source = np.array([2, 0, 1, 1, 0, 2])
    targets = np.array([[1, 4], [2, 3], [0, 5]])
    y, pull = jax.vjp(lambda x: permute(x, jnp.asarray(source), jnp.asarray(targets)), x)
    np.testing.assert_array_equal(y, x[source])
    expected = np.zeros_like(x)
    np.add.at(expected, source, dy.astype(np.float32))
    np.testing.assert_allclose(pull(jnp.asarray(dy, jnp.float32))[0], expected, rtol=1e-6)


def random_routing(rows, seed=5, a=2):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, D)).astype(np.float32)
    ids = np.stack([rng.permutation(E)[:a] for _ in range(rows)]).astype(np.int32)
    combine = rng.random((rows, a)).astype(np.float32)
    return x, ids, combine


def dense_reference(w, x, ids, combine):
    dense = oracle.scatter_weights(ids, combine, E)
    outs = [oracle.swiglu(x, *(w[k][e].T for k in ("gate", "up", "down"))) for e in range(E)]
    return sum(dense[:, e, None] * outs[e] for e in range(E))


@functools.partial(jax.jit, static_argnames="chunk")
def dispatch(w, x, ids, combine, dy=None, chunk=None):
    """Returns y and the gradients of w, x and combine."""

    def run(w, x, combine):
        return routed_experts(w, x, ids, combine, Region(), chunk)

    y, pull = jax.vjp(run, w, x, combine)
    return y, *pull(jnp.ones_like(y) if dy is None else dy)


@pytest.mark.parametrize(
    "rows,chunk", in_tiers([(13, 5)], [(12, None), (12, 4), (12, 500), (1, None)])
)
def test_routed_experts_and_gradients_equal_oracle(rows, chunk):
    x, ids, combine = random_routing(rows)
    dy = np.random.default_rng(6).standard_normal(x.shape).astype(np.float32)
    y, dw, dx, dcombine = dispatch(weights(), x, ids, combine, dy, chunk)
    np.testing.assert_allclose(y, dense_reference(weights(), x, ids, combine), atol=1e-4)
    expected = {k: np.zeros(v.shape) for k, v in weights().items()}
    expected_dx, expected_dcombine = np.zeros(x.shape), np.zeros(combine.shape)
    for (row, choice), e in np.ndenumerate(ids):
        expert = (weights()[k][e] for k in ("gate", "up", "down"))
        out, back, *parts = gradients(x[[row]], combine[row, choice] * dy[[row]], *expert)
        expected_dx[row] += back[0]
        expected_dcombine[row, choice] = np.sum(out * dy[row])
        for key, part in zip(("gate", "up", "down"), parts):
            expected[key][e] += part
    np.testing.assert_allclose(dx, expected_dx, atol=1e-4)
    np.testing.assert_allclose(dcombine, expected_dcombine, atol=1e-3)
    for key, value in expected.items():
        np.testing.assert_allclose(dw[key], value, atol=1e-3)


def test_drops_no_token_of_single_expert():
    x, ids, combine = random_routing(200, a=1)
    ids = np.full_like(ids, 3)
    y = dispatch(weights(), x, ids, combine)[0]
    np.testing.assert_allclose(y, dense_reference(weights(), x, ids, combine), atol=1e-4)


def test_multiplies_selected_experts_only():
    x, ids, combine = random_routing(1)
    flops = count_flops(dispatch, weights(), x, ids, combine)
    backward = 2  # products per product of the forward
    assert flops < (1 + backward) * 2 * ids.size * 3 * D * F * 1.2
