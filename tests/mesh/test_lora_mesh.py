"""Adapters on meshes: eight devices compute the loss and gradients of one."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from glm5_jax.config import LoraConfig
from glm5_jax.model import glm5, lora
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.parallel.tree import flatten, map_with_path
from glm5_jax.training.gradients import gradient_function
from tests.mesh import cases
from tests.mesh.test_gradients import assert_shards, close

ALL = LoraConfig(rank=3, alpha=7.5, targets=("/(attn|mlp|shared|experts)/",))
LONG = [
    ({"fsdp": 2, "context": 2, "tensor": 2}, "sharded"),
    ({"data": 2, "expert": 4}, "sharded"),
    ({"fsdp": 2, "expert": 2, "tensor": 2}, "local"),
    ({"expert": 2, "context": 2, "tensor": 2}, "experts"),
]


@functools.cache
def params(cfg):
    """Weights of cases.params; the second matrix of each adapter is random, too."""
    noise = np.random.default_rng(2)

    def draw(path, x):
        return 0.1 * noise.standard_normal(x.shape, np.float32) if lora.is_adapter(path) else x

    return map_with_path(draw, cases.params(cfg))


def frozen_of(cfg):
    return [path for path in flatten(glm5.abstract_params(cfg)) if not lora.is_adapter(path)]


@functools.cache
def reference(cfg):
    run = jax.jit(gradient_function(cfg, step_of(cfg), frozen=frozen_of(cfg)))
    return jax.device_get(run(params(cfg), cases.batch(), cases.RATES))


def step_of(cfg, **changes):
    return dataclasses.replace(cases.step_of(cfg), remat="none", **changes)


def compare(cfg, step, mesh):
    shardings, frozen = glm5.param_shardings(cfg, mesh), frozen_of(cfg)
    run = jax.jit(gradient_function(cfg, step, mesh, frozen), out_shardings=(None, None, shardings))
    placed = jax.device_put(params(cfg), shardings)
    objective, _, gradients = run(placed, cases.batch(), cases.RATES)
    want_objective, _, want = reference(cfg)
    np.testing.assert_allclose(objective, want_objective, rtol=1e-5)
    for path, got in flatten(gradients).items():
        assert_shards(path, got, mesh)
        assert bool(np.any(got)) == lora.is_adapter(path), path
        close(path, got, flatten(want)[path])


@pytest.fixture(scope="module")
def layer():
    """One MoE layer; the gradients on one device are computed here."""
    cfg = cases.small("dense", index_topk=None, indexer_types=None, lora=ALL)
    reference(cfg)
    return cfg


@pytest.mark.slow
def test_agrees_with_one_device_on_fsdp_expert_and_tensor(layer):
    compare(layer, step_of(layer), make_mesh(fsdp=2, expert=2, tensor=2))


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "accumulate"), LONG)
def test_loss_and_gradients_equal_those_of_one_device(axes, accumulate):
    cfg = cases.config("sparse", lora=ALL)
    compare(cfg, step_of(cfg, accumulate=accumulate), make_mesh(axes))
