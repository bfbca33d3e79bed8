"""Tests that int4 experts quantized on their shards equal those of one device."""

import dataclasses

import pytest

from glm5_jax.parallel.mesh import make_mesh
from tests.mesh import cases
from tests.mesh.test_gradients import compare, name

SMALL = cases.small("dense", int4_group=2, index_topk=None)
STEP = dataclasses.replace(cases.step_of(SMALL), remat="none")


@pytest.mark.slow
def test_int4_experts_on_mesh_equal_one_device():
    compare(SMALL, STEP, make_mesh(fsdp=2, expert=2, tensor=2))


@pytest.mark.slow
def test_accumulates_int4_experts_on_mesh():
    step = dataclasses.replace(STEP, rows_per_device=1, accumulate="local", reduce_dtype="float32")
    compare(SMALL, step, make_mesh(data=2, fsdp=2, context=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [
        {"fsdp": 2, "expert": 2, "context": 2},
        {"expert": 2, "context": 2, "tensor": 2},
        {"data": 2, "fsdp": 4},
    ],
    ids=name,
)
def test_int4_gradients_on_mesh_equal_one_device(axes):
    few = dict(num_hidden_layers=2, index_topk=None, indexer_types=None)
    cfg = cases.config("dense", int4_group=2, **few)
    compare(cfg, cases.step_of(cfg), make_mesh(axes))
