"""Experts become int4 on the shards that hold them, which gives what one device gives."""

import pytest

from glm5_jax.core.mesh import make_mesh
from tests.mesh import cases
from tests.mesh.test_gradients import compare, name


@pytest.mark.parametrize(
    "axes",
    [
        {"fsdp": 2, "expert": 2, "context": 2},
        pytest.param({"expert": 2, "context": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "fsdp": 4}, marks=pytest.mark.slow),
    ],
    ids=name,
)
def test_loss_and_gradients_equal_those_of_one_device(axes):
    few = dict(num_hidden_layers=2, index_topk=None, indexer_types=None)
    cfg = cases.config("dense", int4_group=2, **few)
    compare(cfg, cases.step_of(cfg), make_mesh(axes))
