"""The embedding and the cross-entropy by parts of the vocabulary are those of the whole."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.model import glm5, vocabulary
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.parallel.flops import count_flops, jaxprs_of
from glm5_jax.parallel.mesh import Region
from tests.model import small

V, D, BLOCK = 60, 16, 16  # 60 tokens in parts of at most 16 are four of 15


@functools.cache
def tables(tied: bool):
    cfg = small.one_layer(vocab_size=V, tie_word_embeddings=tied)
    draw = np.random.default_rng(0)
    names = {"embed": (V, D)} | ({} if tied else {"lm_head": (D, V)})
    params = {
        k: {"weight": jnp.asarray(draw.standard_normal(s), jnp.float32)} for k, s in names.items()
    }
    return cfg, params


def parts(tied: bool, block: int | None):
    cfg, params = tables(tied)
    execution = ExecutionConfig(vocab_block=block)
    weights, tokens = (
        glm5.WeightGatherer(cfg, Region(), execution),
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
def test_parts_give_what_the_whole_gives_gradients_included(tied):
    (whole, args), (cut, _) = parts(tied, None), parts(tied, BLOCK)
    (_, want), want_gradients = jax.jit(jax.value_and_grad(whole, (0, 1), has_aux=True))(*args)
    (_, found), gradients = jax.jit(jax.value_and_grad(cut, (0, 1), has_aux=True))(*args)
    np.testing.assert_array_equal(found[0], want[0])
    for one, other in zip(
        jax.tree.leaves((found, gradients)), jax.tree.leaves((want, want_gradients))
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)


def test_no_mask_is_kept_that_is_as_wide_as_the_rows():
    """Of a part of the vocabulary a backward needs a number of each token, not of each of its row's values."""
    loss, args = parts(False, BLOCK)
    jaxpr = jax.make_jaxpr(jax.grad(lambda *args: loss(*args)[0], (0, 1)))(*args)
    stacks = {v.aval.shape for eqn in jaxpr.eqns for v in eqn.outvars if v.aval.ndim == 4}
    assert not {shape for shape in stacks if shape[0] == V // 15 and shape[-1] == D}, stacks


def test_tokens_beyond_the_vocabulary_have_no_row():
    """Not the last one's, as a gather would give without being told."""
    cfg, params = tables(False)
    weights = glm5.WeightGatherer(cfg, Region(), ExecutionConfig())
    assert jnp.isnan(vocabulary.embed(params, weights, jnp.array([V]))).all()


@pytest.mark.parametrize("block", [None, BLOCK])
def test_a_frequent_token_is_learnt_from_each_time(block):
    """A sum in bfloat16 stays at 256 when ones are added to it."""
    cfg, params = tables(False)
    cfg = dataclasses.replace(cfg, dtype="bfloat16")
    tokens, weights = (
        jnp.full((4096,), 7),
        glm5.WeightGatherer(cfg, Region(), ExecutionConfig(vocab_block=block)),
    )

    def total(table):
        return jnp.sum(vocabulary.embed({"embed": {"weight": table}}, weights, tokens, block))

    gradient = jax.jit(jax.grad(total))(params["embed"]["weight"])
    np.testing.assert_array_equal(gradient[7], np.full(D, 4096))
    assert not np.any(np.delete(gradient, 7, 0))


def test_what_many_parts_ask_of_a_hidden_state_is_summed_wide():
    """256, and then 59 times 1, of parts of one token each: the backward pass goes through them from the last."""
    cfg, _ = tables(False)
    cfg = dataclasses.replace(cfg, dtype="bfloat16")
    execution = ExecutionConfig(vocab_block=1)
    column = jnp.ones((D, V)).at[:, -1].set(256.0)
    params = {"lm_head": {"weight": column}}
    weights, hidden = glm5.WeightGatherer(cfg, Region(), execution), jnp.zeros((1, D), jnp.bfloat16)

    def logz(hidden):
        return jnp.sum(
            V * vocabulary.cross_entropy(params, weights, hidden, jnp.array([0]), 1, execution)[1]
        )

    gradient = jax.jit(jax.grad(logz))(hidden)
    np.testing.assert_allclose(gradient.astype(float), 256 + V - 1, rtol=4e-3)


def test_nothing_is_looked_up_in_or_multiplied_with_the_whole_vocabulary():
    cut, args = parts(False, BLOCK)
    jaxpr = jax.make_jaxpr(jax.grad(lambda *own: cut(*own)[0], (0, 1)))(*args).jaxpr
    used = [set(shape) for shape in operands(jaxpr, "dot_general", "gather", "scatter-add")]
    assert any({15, D} == own for own in used) and not any(V in own for own in used)


def operands(jaxpr, *names: str):
    """Shapes of what these primitives take and give, in a jaxpr and in those within it."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in names:
            yield from (v.aval.shape for v in (*eqn.invars, *eqn.outvars))
        for inner in jaxprs_of(eqn.params):
            yield from operands(inner, *names)


def test_the_backward_multiplies_no_more_than_that_of_the_whole():
    (whole, args), (cut, _) = parts(False, None), parts(False, BLOCK)

    def products(loss):
        return count_flops(jax.grad(lambda *own: loss(*own)[0], (0, 1)), *args)

    assert products(cut) == products(whole) > 0


def test_parts_cannot_be_smaller_than_what_devices_hold_together():
    cfg, params = tables(False)
    weights = glm5.WeightGatherer(cfg, Region(), ExecutionConfig())
    own = {"embed": {"weight": params["embed"]["weight"][:15]}}  # of four devices
    with pytest.raises(ValueError, match="vocab_block is 3; the vocabulary has 4 shards"):
        vocabulary.embed(own, weights, jnp.arange(4), 3)
    with pytest.raises(
        ValueError, match="equal parts of 32003 tokens on 1 devices have 1 or 32003"
    ):
        vocabulary.num_parts(32_003, 1, 16_384)
