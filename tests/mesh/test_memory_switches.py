"""What a step keeps, where, and how often weights travel for it: on eight devices nothing of that changes a result."""

import dataclasses

import pytest

from glm5_jax.core.mesh import make_mesh
from glm5_jax.core.tree import flatten
from glm5_jax.model import glm5
from glm5_jax.training.step import gradient_function
from tests.mesh import cases
from tests.mesh.test_gradients import compare, name
from tests.mesh.traffic import traffic

AXES = {"fsdp": 2, "expert": 2, "tensor": 2}
COPIES = {"data": 2, "fsdp": 2, "context": 2}


def step_of(**changes):
    return dataclasses.replace(cases.STEP, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sparse", "dense"])
def test_a_layer_s_input_in_the_host_s_memory_gives_the_same_gradients(attention):
    """Of an emulated device that memory is its own."""
    mesh = make_mesh(fsdp=2, expert=2, context=2)
    compare(cases.config(attention), step_of(remat="offload"), mesh)


@pytest.mark.parametrize(
    ("mode", "axes"),
    [
        ("local", AXES),
        pytest.param("sharded", AXES, marks=pytest.mark.slow),
        pytest.param("experts", AXES, marks=pytest.mark.slow),
        pytest.param("sharded", COPIES, marks=pytest.mark.slow),
        pytest.param("local", COPIES, marks=pytest.mark.slow),
        pytest.param("local", {"expert": 4, "context": 2}, marks=pytest.mark.slow),
    ],
    ids=name,
)
def test_microbatches_add_up_to_the_batch_of_one_device(mode, axes):
    step = step_of(
        rows_per_device=1,
        accumulate=mode,
        remat="offload",
        reduce_dtype="float32",
        vocab_block=16,
    )
    compare(cases.config("sparse"), step, make_mesh(axes))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["experts", "local"])
def test_frozen_weights_are_whole_too(mode):
    frozen = [path for path in flatten(glm5.letters(cases.config("sparse"))) if "experts" in path]
    step = step_of(rows_per_device=1, accumulate=mode)
    compare(cases.config("sparse"), step, make_mesh(AXES), frozen)


@pytest.mark.slow
def test_whole_weights_of_experts_stand_for_int4():
    step = step_of(rows_per_device=1, accumulate="local")
    compare(cases.config("sparse", int4_group=2), step, make_mesh(AXES))


def sent(mode, rows_per_device):
    """{(collective, mesh axes): bytes} of a step's gradients."""
    cfg = cases.config("dense", num_hidden_layers=2, index_topk=None, indexer_types=None)
    step, mesh = cases.step_of(cfg), make_mesh(AXES)
    step = dataclasses.replace(step, rows_per_device=rows_per_device, accumulate=mode)
    return traffic(
        gradient_function(cfg, step, mesh), glm5.abstract(cfg), cases.batch(), cases.RATES
    )


def test_how_often_weights_and_gradients_travel():
    one, many = sent("sharded", 2), sent("sharded", 1)
    for kind in ("all_gather", "reduce_scatter"):
        assert many[kind, ("fsdp",)] == 2 * one[kind, ("fsdp",)], "for each microbatch anew"
        local = sent("local", 2)[kind, ("fsdp",)]
        assert local == sent("local", 1)[kind, ("fsdp",)], "once per step"
        assert local < one[kind, ("fsdp",)]
