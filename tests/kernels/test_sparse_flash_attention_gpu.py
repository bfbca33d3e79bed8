"""Tests of sparse attention on Hopper: unsorted lists, split rows, rings of tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.sparse_flash_attention import gpu, sparse_flash_attention
from tests.kernels.implementations import interpreted, race_checked

SCALE, VALUES = 0.3, 70
RNG = np.random.default_rng(0)


def problem(t, s, n, k, x=80):
    """Returns q, latents and unsorted topk of one batch row; query 1 has few rows."""
    topk = np.stack([RNG.permutation(s)[:k] for _ in range(t)])
    topk[:, 3::5] = -1
    topk[1:2, 2:] = -1
    shapes = ((1, t, n, x), (1, s, x))
    arrays = (RNG.standard_normal(shape).astype(np.float32) for shape in shapes)
    return *map(jnp.asarray, arrays), jnp.asarray(topk[None], jnp.int32)


def run(implementation, q, latents, topk):
    """Returns ((out, lse), (dq, dlatents)) of a nonlinear loss."""

    def loss(q, latents):
        out, lse, _ = sparse_flash_attention(
            q, latents, topk, scale=SCALE, value_dim=VALUES, implementation=implementation
        )
        return jnp.sum(jnp.sin(out)), (out, lse)

    (_, outcome), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(q, latents)
    return outcome, gradients


def assert_close(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.slow
def test_accepts_unsorted_lists():
    """Rings of 2 hold 3 tiles forward and 5 backward; a union may hold more than these 3 queries."""
    arrays = problem(t=3, s=150, n=40, k=130)
    ours = run(race_checked("gpu"), *arrays)
    assert_close(ours, run("xla", *arrays))
    assert not compat.has_races("gpu")


@pytest.mark.slow
def test_splits_rows_of_few_queries():
    """One query's 4 tiles are two pieces of 2, of which one may be empty; without rows the output is zero."""
    q, latents, topk = problem(t=1, s=300, n=64, k=256)
    assert gpu.num_pieces(1, 256) == 2

    def forward(implementation, topk):
        return jax.jit(
            lambda topk: sparse_flash_attention(
                q, latents, topk, scale=SCALE, value_dim=VALUES, implementation=implementation
            )
        )(topk)

    for selection in (topk, topk.at[..., 100:].set(-1), jnp.full_like(topk, -1)):
        assert_close(forward(interpreted("gpu"), selection), forward("xla", selection))


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
def test_sparse_attention_names_unsupported_input(heads, x, y, dtype, reason):
    q, latents = (jax.ShapeDtypeStruct((1, 2, *shape), dtype) for shape in ((heads, x), (x,)))
    message = gpu.unsupported_reason(q, latents, None, y)
    assert message == reason or reason in message
