"""What only the Hopper form does: lists in any order, cut for many multiprocessors, rings of tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.sparse_flash_attention import gpu, sparse_flash_attention
from tests.kernels.implementations import interpreted, watched

SCALE, VALUES = 0.3, 70
RNG = np.random.default_rng(0)


def problem(t, s, n, k, x=80):
    """q, latents and topk of one row; query 1 has few rows, and the lists are in no order."""
    topk = np.stack([RNG.permutation(s)[:k] for _ in range(t)])
    topk[:, 3::5] = -1
    topk[1:2, 2:] = -1
    shapes = ((1, t, n, x), (1, s, x))
    arrays = (RNG.standard_normal(shape).astype(np.float32) for shape in shapes)
    return *map(jnp.asarray, arrays), jnp.asarray(topk[None], jnp.int32)


def run(implementation, q, latents, topk):
    """(out, lse), (dq, dlatents) of a loss that weighs every number of out differently."""

    def loss(q, latents):
        out, lse, _ = sparse_flash_attention(
            q, latents, topk, scale=SCALE, value_dim=VALUES, implementation=implementation
        )
        return jnp.sum(jnp.sin(out)), (out, lse)

    (_, outcome), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(q, latents)
    return outcome, gradients


def agree(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.slow
def test_lists_in_any_order_and_rings_that_turn():
    """130 rows are 3 tiles forward and 5 backward, in rings of 2; 3 queries are fewer than a union has."""
    arrays = problem(t=3, s=150, n=40, k=130)
    ours = run(watched("gpu"), *arrays)
    agree(ours, run("ref", *arrays))
    assert not compat.has_races("gpu")


@pytest.mark.slow
def test_few_queries_are_cut():
    """4 tiles of one query as two pieces of 2, one of them without rows; no rows at all are zeros."""
    q, latents, topk = problem(t=1, s=300, n=64, k=256)
    assert gpu.num_pieces(1, 256) == 2

    def forward(implementation, topk):
        return jax.jit(
            lambda topk: sparse_flash_attention(
                q, latents, topk, scale=SCALE, value_dim=VALUES, implementation=implementation
            )
        )(topk)

    for chosen in (topk, topk.at[..., 100:].set(-1), jnp.full_like(topk, -1)):
        agree(forward(interpreted("gpu"), chosen), forward("ref", chosen))


@pytest.mark.parametrize(
    ("heads", "x", "y", "dtype", "reason"),
    [
        (64, 576, 512, jnp.bfloat16, None),
        (65, 576, 512, jnp.bfloat16, "65 heads; at most 64"),
        (64, 640, 512, jnp.bfloat16, "latents of 640 columns; at most 576"),
        (64, 576, 576, jnp.bfloat16, "values of 576 columns; at most 512"),
        (64, 576, 512, jnp.float16, "q is float16"),
    ],
)
def test_says_what_it_cannot_take(heads, x, y, dtype, reason):
    q, latents = (jax.ShapeDtypeStruct((1, 2, *shape), dtype) for shape in ((heads, x), (x,)))
    found = gpu.unsupported_reason(q, latents, None, y)
    assert found == reason or reason in found
