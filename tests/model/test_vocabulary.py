"""Tests that embedding and cross-entropy over parts of the vocabulary equal those over all of it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.model import vocabulary
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.weight_gathering import WeightGatherer
from glm5_jax.parallel.flops import count_flops, jaxprs_of
from glm5_jax.parallel.mesh import Region
from tests.model import small

V, D, BLOCK = 60, 16, 16  # 60 tokens in parts of at most 16 are four of 15


@functools.cache
def params_of(tied: bool):
    cfg = small.one_layer(vocab_size=V, tie_word_embeddings=tied)
    draw = np.random.default_rng(0)
    names = {"embed": (V, D)} | ({} if tied else {"lm_head": (D, V)})
    params = {
        k: {"weight": jnp.asarray(draw.standard_normal(s), jnp.float32)} for k, s in names.items()
    }
    return cfg, params


def loss_with_vocab_block(tied: bool, block: int | None):
    cfg, params = params_of(tied)
    execution = ExecutionConfig(vocab_block=block)
    weights, tokens = (
        WeightGatherer(cfg, Region(), execution),
        jnp.arange(70).reshape(5, 14) % V,
    )

    def loss(params, hidden):
        x = vocabulary.embed(params, weights, tokens, execution.vocab_block)
        rows = (hidden + x).reshape(-1, D)
        nll, logz = vocabulary.cross_entropy(
            params, weights, rows, tokens.reshape(-1), 7, execution
        )
        return jnp.sum(nll * jnp.arange(70)) + jnp.sum(logz**2), (x, nll, logz)

    return loss, (params, jnp.ones((5, 14, D)))


@pytest.mark.parametrize("tied", [False, True])
def test_vocabulary_parts_equal_full_vocabulary(tied):
    results = []
    for block in (BLOCK, None):
        loss, args = loss_with_vocab_block(tied, block)
        (_, outputs), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(*args)
        results.append((outputs, gradients))
    (got, _), (want, _) = results
    np.testing.assert_array_equal(got[0], want[0])
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


def test_stores_no_mask_per_hidden_value():
    """For each part of the vocabulary the backward stores one number per token, not one per hidden value."""
    loss, args = loss_with_vocab_block(False, BLOCK)
    jaxpr = jax.make_jaxpr(jax.grad(lambda *args: loss(*args)[0], (0, 1)))(*args)
    stacks = {v.aval.shape for eqn in jaxpr.eqns for v in eqn.outvars if v.aval.ndim == 4}
    assert not {shape for shape in stacks if shape[0] == V // 15 and shape[-1] == D}, stacks


def test_embeds_invalid_token_as_nan():
    cfg, params = params_of(False)
    weights = WeightGatherer(cfg, Region(), ExecutionConfig())
    assert jnp.isnan(vocabulary.embed(params, weights, jnp.array([V]))).all()


@pytest.mark.parametrize("block", [None, BLOCK])
def test_sums_embedding_gradient_in_float32(block):
    """A bfloat16 sum of ones would stop growing at 256."""
    cfg, params = params_of(False)
    cfg = dataclasses.replace(cfg, dtype="bfloat16")
    tokens, weights = (
        jnp.full((4096,), 7),
        WeightGatherer(cfg, Region(), ExecutionConfig(vocab_block=block)),
    )

    def total(table):
        return jnp.sum(vocabulary.embed({"embed": {"weight": table}}, weights, tokens, block))

    gradient = jax.jit(jax.grad(total))(params["embed"]["weight"])
    np.testing.assert_array_equal(gradient[7], np.full(D, 4096))
    assert not np.any(np.delete(gradient, 7, 0))


def test_sums_hidden_gradient_in_float32():
    """The backward adds 59 ones to 256, one part of the vocabulary after another."""
    cfg, _ = params_of(False)
    cfg = dataclasses.replace(cfg, dtype="bfloat16")
    execution = ExecutionConfig(vocab_block=1)
    column = jnp.ones((D, V)).at[:, -1].set(256.0)
    params = {"lm_head": {"weight": column}}
    weights, hidden = WeightGatherer(cfg, Region(), execution), jnp.zeros((1, D), jnp.bfloat16)

    def logz(hidden):
        return jnp.sum(
            V * vocabulary.cross_entropy(params, weights, hidden, jnp.array([0]), 1, execution)[1]
        )

    gradient = jax.jit(jax.grad(logz))(hidden)
    np.testing.assert_allclose(gradient.astype(float), 256 + V - 1, rtol=4e-3)


def test_never_uses_full_vocabulary_table():
    loss, args = loss_with_vocab_block(False, BLOCK)
    jaxpr = jax.make_jaxpr(jax.grad(lambda *x: loss(*x)[0], (0, 1)))(*args).jaxpr
    used = [set(shape) for shape in operands(jaxpr, "dot_general", "gather", "scatter-add")]
    assert {15, D} in used and not any(V in sizes for sizes in used)


def operands(jaxpr, *names: str):
    """Yields the shapes of the inputs and outputs of these primitives in a jaxpr, at any depth."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in names:
            yield from (v.aval.shape for v in (*eqn.invars, *eqn.outvars))
        for inner in jaxprs_of(eqn.params):
            yield from operands(inner, *names)


def test_parts_need_no_extra_flops():
    def flops(block):
        loss, args = loss_with_vocab_block(False, block)
        return count_flops(jax.grad(lambda *x: loss(*x)[0], (0, 1)), *args)

    assert flops(BLOCK) == flops(None) > 0


def test_rejects_too_small_vocab_block():
    cfg, params = params_of(False)
    weights = WeightGatherer(cfg, Region(), ExecutionConfig())
    shard = {"embed": {"weight": params["embed"]["weight"][:15]}}  # one of four devices
    with pytest.raises(ValueError, match="vocab_block is 3; the vocabulary has 4 shards"):
        vocabulary.embed(shard, weights, jnp.arange(4), 3)
    with pytest.raises(
        ValueError, match="equal parts of 32003 tokens on 1 devices have 1 or 32003"
    ):
        vocabulary.num_parts(32_003, 1, 16_384)
