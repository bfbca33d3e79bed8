"""Tests that windows, linear attention and grouped queries on eight devices equal one device."""

import jax
import numpy as np
import pytest

from glm5_jax.model import glm5
from glm5_jax.parallel.mesh import make_mesh
from tests.mesh import cases
from tests.mesh.test_gradients import compare

PLAIN = dict(
    index_topk=None,
    indexer_types=None,
    first_k_dense_replace=2,
    num_nextn_predict_layers=0,
    sliding_window=6,
)
GROUPED = PLAIN | dict(projections="gqa", num_key_value_heads=2)
CASES = [
    # Each device has two heads of a recurrent layer over the whole sequence.
    (PLAIN, ("gdn", "simple_gdn", "window"), {"expert": 2, "context": 2, "tensor": 2}),
    (GROUPED, ("window", "gdn", "full"), {"fsdp": 2, "expert": 2, "context": 2}),
    (PLAIN, ("simple_gdn", "window", "gdn"), {"context": 8}),
    (PLAIN, ("gdn", "gdn", "simple_gdn"), {"data": 2, "fsdp": 4}),
    (GROUPED, ("gdn", "full", "simple_gdn"), {"expert": 8}),
    (GROUPED, ("simple_gdn", "window", "window"), {"context": 2, "tensor": 4}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "kinds", "axes"), CASES)
def test_ablations_on_mesh_equal_one_device(fields, kinds, axes):
    # Float64, because the norm of a head's output magnifies rounding where the output is small.
    with jax.enable_x64(True):
        cfg = cases.config("dense", **fields, layer_attention=kinds, dtype="float64")
        compare(cfg, cases.step_of(cfg), make_mesh(axes))


def test_rejects_heads_that_do_not_divide_over_mesh():
    fields = PLAIN | dict(num_attention_heads=6, layer_attention=("simple_gdn",) * 3)
    cfg, tokens = cases.config("dense", **fields), np.ones((8, 32), np.int32)
    with pytest.raises(ValueError, match="6 attention heads do not divide .* context . tensor = 4"):
        mesh = make_mesh(context=2, tensor=2, data=2)
        jax.eval_shape(lambda p: glm5.forward(p, tokens, cfg, mesh=mesh), glm5.abstract_params(cfg))
