"""Tests of the pieces of cross_entropy on Hopper: stretches of words, groups of rows, the contraction."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cross_entropy import Static, gpu, linear_cross_entropy
from tests.kernels.implementations import interpreted
from tests.kernels.offline import compile_for
from tests.oracles import cross_entropy

CUTS = {  # 3 blocks of rows and 5 tiles of words
    "shorter last stretch": {"MIN_BLOCKS": 7, "GROUP": 2},
    "one stretch of all words": {"MIN_BLOCKS": 1, "GROUP": 16},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CUTS)
def test_splits_rows_words_and_contraction(name, monkeypatch):
    """A contraction over 300 numbers takes 5 steps of a ring of 4."""
    d = 300
    for constant, value in CUTS[name].items():
        monkeypatch.setattr(gpu, constant, value)
    rng = np.random.default_rng(0)
    hidden, head = rng.standard_normal((300, d)), rng.standard_normal((d, 1100)) * d**-0.5
    hidden, head = (jnp.asarray(x, jnp.bfloat16) for x in (hidden, head))
    targets = rng.integers(0, 1100, 300).astype(np.int32)
    expected = cross_entropy.linear_cross_entropy(
        np.float64(hidden), np.float64(head), targets, np.ones(300)
    )
    nll, logz = jax.jit(
        lambda: linear_cross_entropy(hidden, head, targets, 1, implementation=interpreted("gpu"))
    )()
    np.testing.assert_allclose(-nll, expected["logp"], atol=1e-5)
    target_logits = np.einsum("md,dm->m", np.float64(hidden), np.float64(head)[:, targets])
    np.testing.assert_allclose(logz, target_logits - expected["logp"], atol=1e-5)


@pytest.mark.parametrize(("m", "v"), [(8192, 154880), (128, 154880), (640, 2048), (4224, 512)])
def test_plan_covers_every_block_once(m, v):
    plan = gpu.make_plan(m, v)
    blocks = jnp.arange(plan.row_blocks * plan.stretches)
    rows, stretches = jax.vmap(plan.locate)(blocks)
    seen = np.zeros((plan.row_blocks, plan.stretches), int)
    np.add.at(seen, (np.asarray(rows), np.asarray(stretches)), 1)
    assert (seen == 1).all()
    assert (plan.stretches - 1) * plan.stretch < plan.tiles <= plan.stretches * plan.stretch


def test_consecutive_blocks_share_inputs():
    """132 concurrent blocks of GLM-5 read 16 blocks of rows and 9 or 10 stretches of words."""
    plan = gpu.make_plan(8192, 154880)
    for first in range(0, 16 * plan.stretches - 132, 132):
        rows, stretches = jax.vmap(plan.locate)(first + jnp.arange(132))
        assert len(set(rows.tolist())) == 16
        assert len(set(stretches.tolist())) <= 10


@pytest.mark.slow
def test_backward_in_pieces_equals_oracle(monkeypatch):
    monkeypatch.setattr(gpu, "BACKWARD_ROWS", 4)
    rng = np.random.default_rng(1)
    hidden, head = rng.standard_normal((13, 6)), rng.standard_normal((6, 11))
    targets, weight = rng.integers(0, 11, 13).astype(np.int32), rng.random(13)
    expected = cross_entropy.linear_cross_entropy(hidden, head, targets, weight)

    def loss(hidden, head):
        named = dict(chunk=1, implementation=interpreted("gpu"))
        return jnp.sum(weight * linear_cross_entropy(hidden, head, targets, **named)[0])

    run = jax.jit(jax.grad(loss, (0, 1)))
    d_hidden, d_head = run(hidden.astype(np.float32), head.astype(np.float32))
    np.testing.assert_allclose(d_hidden, expected["d_hidden"], atol=1e-5)
    np.testing.assert_allclose(d_head, expected["d_weight"], atol=1e-5)


@pytest.mark.aot
def test_limits_memory_on_gpu():
    """The forward stores no logits.

    The backward stores the head's gradient in float32 and, for one piece of the rows, the logits in float32 and their
    gradient in bfloat16.
    """
    m, d, v = 8192, 6144, 154880
    rows = jax.ShapeDtypeStruct((m,), jnp.float32)
    hidden = jax.ShapeDtypeStruct((m, d), jnp.bfloat16)
    head = jax.ShapeDtypeStruct((d, v), jnp.bfloat16)
    targets = jax.ShapeDtypeStruct((m,), jnp.int32)
    static = Static(None, 1)

    def temporary(function, *shapes):
        compiled = compile_for("h200", functools.partial(function, static), *shapes)
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(gpu.forward, hidden, head, targets) < 2e7
    limit = 4 * d * v + 6 * gpu.BACKWARD_ROWS * v
    assert temporary(gpu.backward, (hidden, head, targets, rows), rows, rows) < limit
