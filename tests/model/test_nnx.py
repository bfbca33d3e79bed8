"""Tests that a model follows NNX: abstract and jitted creation, NNX's optimiser, Optax chains, `display` and `split`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from glm5_jax.model import glm5
from glm5_jax.model.glm5 import Glm5
from glm5_jax.parallel import tree
from glm5_jax.parallel.params import NonTrainableBuffer
from tests.model.small import one_layer

TOKENS = jnp.arange(32, dtype=jnp.int32).reshape(2, 16)
CFG = one_layer(first_k_dense_replace=0, num_nextn_predict_layers=0)  # one layer of experts


def create() -> Glm5:
    """Returns a new model of one layer."""
    return Glm5(CFG, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def model():
    return create()


def loss(model):
    """Returns the mean next-token loss."""
    targets = jnp.roll(TOKENS, -1, axis=1)
    return optax.softmax_cross_entropy_with_integer_labels(model(TOKENS), targets).mean()


def test_eval_shape_creates_abstract_model():
    abstract = nnx.eval_shape(create)
    leaves = tree.flatten(glm5.params_of(abstract))
    expected = tree.flatten(glm5.abstract_params(CFG))
    assert {p: x.shape for p, x in leaves.items()} == {p: x.shape for p, x in expected.items()}
    assert not any(isinstance(x, jax.Array) for x in leaves.values())


@pytest.mark.slow
def test_jit_creates_same_weights(model):
    jitted = tree.flatten(glm5.params_of(nnx.jit(create)()))
    for path, value in tree.flatten(glm5.params_of(model)).items():
        np.testing.assert_allclose(jitted[path], value, rtol=1e-6, err_msg=path)


def test_evaluates_shape_of_loss():
    out = nnx.eval_shape(lambda: loss(create()))
    assert (out.shape, out.dtype) == ((), jnp.float32)


@pytest.mark.slow
def test_trains_with_nnx_optimizer():
    trained = create()
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, weight_decay=0.1))
    optimizer = nnx.Optimizer(trained, chain, wrt=nnx.Param)
    buffers = jax.tree.map(np.asarray, nnx.state(trained, NonTrainableBuffer))

    @nnx.jit
    def train_step(model, optimizer):
        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    losses = [float(train_step(trained, optimizer)) for _ in range(8)]
    assert losses[-1] < losses[0] - 0.1
    assert jax.tree.leaves(buffers)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(trained, NonTrainableBuffer), buffers)


def test_splits_and_merges(model):
    graph, state = nnx.split(model)
    merged = nnx.merge(graph, jax.tree.map(lambda x: x, state))
    assert merged.cfg == CFG and dataclasses.is_dataclass(merged.cfg)
    np.testing.assert_array_equal(merged(TOKENS), model(TOKENS))


def test_displays_weights(model, capsys):
    nnx.display(model)
    shown = capsys.readouterr().out
    assert "q_a" in shown and "letters=" in shown
