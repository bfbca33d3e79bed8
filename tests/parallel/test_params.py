"""Tests of declared weights: shapes from letters, values from paths and layer numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from glm5_jax.parallel.params import (
    Declare,
    NonTrainableBuffer,
    random_values,
    random_values_at_once,
    shapes_only,
    values_from,
)

SIZES = {"d": 6, "n": 3, "h": 5}
KEY = jax.random.key(3)


class Layer(nnx.Module):
    def __init__(self, declare):
        self.norm = declare.ones("norm", "d")
        self.bias = declare.zeros("bias", "d")
        self.up = declare.normal("up", "d f")
        self.load = declare.buffer("load", "d", jnp.float32)


class Model(nnx.Module):
    def __init__(self, make, layers=(2, 5), dtype="float32", extra=False):
        declare = Declare(sizes=SIZES, make=make, std=0.5, dtype=jnp.dtype(dtype))
        if extra:
            self.extra = declare.normal("extra", "d d")
        self.table = declare.normal("table", "n h")
        self.stack = Layer(declare.child("stack", f=4).stack(layers))


def values(*args, **kwargs):
    return nnx.to_pure_dict(nnx.state(Model(*args, **kwargs)))


def test_shapes_follow_letters():
    tree = values(shapes_only)
    assert tree["table"].shape == (3, 5)
    assert tree["stack"]["up"].shape == (2, 6, 4)
    assert tree["stack"]["norm"].shape == (2, 6)
    model = Model(shapes_only)
    assert model.stack.up.letters == "l d f" and model.table.letters == "n h"


def test_jitted_values_equal_values_at_once():
    jitted = jax.jit(lambda key: values(random_values(key)))(KEY)
    jax.tree.map(np.testing.assert_array_equal, values(random_values_at_once(KEY)), jitted)


def test_values_depend_on_path_layer_and_key_only():
    one = values(random_values_at_once(KEY))
    other = values(random_values_at_once(KEY), layers=(0, 5, 7), extra=True)
    np.testing.assert_array_equal(one["table"], other["table"])
    np.testing.assert_array_equal(one["stack"]["up"][1], other["stack"]["up"][1])
    assert (one["stack"]["up"][0] != one["stack"]["up"][1]).all()
    assert (other["extra"].reshape(-1)[:15] != one["table"].reshape(-1)).all()
    again = values(random_values_at_once(jax.random.key(4)))
    assert (again["table"] != one["table"]).all()


@pytest.mark.parametrize("make", [random_values, random_values_at_once])
def test_draws_normal_around_mean(make):
    declare = Declare(sizes={"d": 4000}, make=make(KEY), std=0.5, dtype=jnp.dtype("float32")).stack(
        (3,)
    )
    drawn = np.asarray(declare.normal_around("rate", "d", -4.6, 1.33)[...])
    assert drawn.shape == (1, 4000)
    assert abs(drawn.mean() + 4.6) < 0.1 and abs(drawn.std() - 1.33) < 0.1


@pytest.mark.parametrize("make", [random_values, random_values_at_once])
def test_initializes_constants_and_dtypes(make):
    tree = values(make(KEY), dtype="bfloat16")
    assert (tree["stack"]["norm"] == 1).all() and not tree["stack"]["bias"].any()
    assert tree["stack"]["load"].dtype == jnp.float32 and not tree["stack"]["load"].any()
    assert {tree["table"].dtype, tree["stack"]["norm"].dtype} == {jnp.dtype("bfloat16")}


def test_values_have_declared_std():
    declare = Declare(
        sizes={"d": 300}, make=random_values_at_once(KEY), std=0.5, dtype=jnp.dtype("float32")
    )
    value = np.asarray(declare.normal("w", "d d")[...])
    assert value.std() == pytest.approx(0.5, rel=0.02) and abs(value.mean()) < 0.01


def test_buffers_are_not_parameters():
    model = Model(random_values_at_once(KEY))
    assert isinstance(model.stack.load, NonTrainableBuffer)
    assert "load" not in nnx.to_pure_dict(nnx.state(model, nnx.Param))["stack"]


def test_values_from_tree_are_not_copied():
    tree = values(random_values_at_once(KEY))
    assert values(values_from(tree))["stack"]["up"] is tree["stack"]["up"]


def test_rejects_missing_or_misshapen_values():
    tree = values(random_values_at_once(KEY))
    with pytest.raises(ValueError, match="parameter table is missing from the tree"):
        values(values_from({"stack": tree["stack"]}))
    wrong = tree | {"table": jnp.ones((5, 3))}
    with pytest.raises(ValueError, match=r"parameter table has shape \(5, 3\), expected \(3, 5\)"):
        values(values_from(wrong))
