"""Tests that remat, offload and accumulation modes on eight devices do not change results."""

import dataclasses

import pytest

from glm5_jax.model import glm5
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.parallel.tree import flatten
from glm5_jax.training.gradients import gradient_function
from tests.mesh import cases
from tests.mesh.test_gradients import compare, name
from tests.mesh.traffic import traffic

AXES = {"fsdp": 2, "expert": 2, "tensor": 2}
COPIES = {"data": 2, "fsdp": 2, "context": 2}


def step_of(**changes):
    return dataclasses.replace(cases.STEP, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sparse", "dense"])
def test_offload_does_not_change_gradients(attention):
    mesh = make_mesh(fsdp=2, expert=2, context=2)
    compare(cases.config(attention), step_of(remat="offload"), mesh)


@pytest.mark.parametrize(
    ("mode", "axes"),
    [
        ("local", AXES),
        ("sharded", AXES),
        ("experts", AXES),
        ("sharded", COPIES),
        ("local", COPIES),
        ("local", {"expert": 4, "context": 2}),
    ],
    ids=name,
)
@pytest.mark.slow
def test_accumulation_modes_equal_one_device(mode, axes):
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
def test_accumulates_with_frozen_experts(mode):
    frozen = [
        path for path in flatten(glm5.axis_letters(cases.config("sparse"))) if "experts" in path
    ]
    step = step_of(rows_per_device=1, accumulate=mode)
    compare(cases.config("sparse"), step, make_mesh(AXES), frozen)


@pytest.mark.slow
def test_accumulates_with_int4_experts():
    step = step_of(rows_per_device=1, accumulate="local")
    compare(cases.config("sparse", int4_group=2), step, make_mesh(AXES))


def traffic_of(mode):
    """Returns {(collective, mesh axes): bytes} of a step's gradients in two microbatches."""
    cfg = cases.small("dense", index_topk=None)
    step, mesh = cases.step_of(cfg), make_mesh(AXES)
    step = dataclasses.replace(step, rows_per_device=1, accumulate=mode, remat="none")
    return traffic(
        gradient_function(cfg, step, mesh), glm5.abstract_params(cfg), cases.batch(), cases.RATES
    )


def test_gathers_weights_per_microbatch_or_per_step():
    sharded, local = traffic_of("sharded"), traffic_of("local")
    for kind in ("all_gather", "reduce_scatter"):
        assert sharded[kind, ("fsdp",)] == 2 * local[kind, ("fsdp",)] > 0, kind
