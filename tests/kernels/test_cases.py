"""Tests that the calls at GLM-5's shapes lower for their chips, and that their costs are lower bounds."""

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from glm5_jax.parallel.flops import REST, count_flops, work_by_scope
from pallas_kernels import backends
from pallas_kernels.cases import COMPOSED, KERNELS, cases
from tests.kernels.implementations import implementation_names, marks

CHIPS = {"tpu": ("tpu", "TPU v5p"), "gpu": ("cuda", "NVIDIA H200")}
QUICK = {  # one case of each kernel; the others are for the slow tier
    "cross_entropy": "forward",
    "flash_mla": "decode",
    "gated_delta": "forward",
    "grouped_matmul": "forward",
    "summed_attention_probs": "forward",
    "index_scores": "forward",
    "indexer_kl": "forward",
    "lightning_indexer": "decode",
    "mla_prologue": "prefill",
    "sparse_flash_attention": "forward_uniform",
    "sparse_indexer_kl": "forward",
    "top_k": "decode",
    "w4a8_matmul": "dense",
    "scatter_rows": "chunk",
}
LOWERED = [
    pytest.param(
        kernel, case, form, id=f"{kernel}-{case}-{form}", marks=marks(case != QUICK[kernel])
    )
    for kernel in KERNELS
    for form in CHIPS
    if form in implementation_names(kernel)
    for case in cases(kernel)
]


def registers(jaxpr) -> list[tuple[int, int]]:
    """Returns for each Hopper kernel its warpgroups and the sum of their registers per lane."""
    counts = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "mpmd_map" and hasattr(eqn.params["meshes"][0], "num_threads"):
            warpgroups = eqn.params["meshes"][0].num_threads or 1
            counts += [(warpgroups, sum(register_limits(body, warpgroups))) for body in inner(eqn)]
        else:
            counts += [pair for body in inner(eqn) for pair in registers(body)]
    return counts


def register_limits(jaxpr, warpgroups: int) -> list[int]:
    """Returns the limit that `set_max_registers` sets for each warpgroup.

    If two branches set one, the second branch belongs to one warpgroup.
    """
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "set_max_registers_p":
            number = eqn.params["n"] if "n" in eqn.params else int(eqn.invars[0].val)
            return [number] * warpgroups
        bodies = [body for body in inner(eqn) if register_limits(body, warpgroups)]
        if len(bodies) == 2:
            return register_limits(bodies[0], warpgroups - 1) + register_limits(bodies[1], 1)
        if bodies:
            return register_limits(bodies[0], warpgroups)
    return []


def inner(eqn) -> list:
    """Returns the jaxprs of an equation."""
    leaves = jax.tree.leaves(tuple(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns"))
    return [getattr(leaf, "jaxpr", leaf) for leaf in leaves if hasattr(leaf, "eqns")]


@pytest.mark.parametrize(("kernel", "name", "form"), LOWERED)
def test_lowers_at_full_size(kernel, name, form):
    """Checks layouts, blocks and scratch memory; test_offline runs the chip's compiler."""
    case = cases(kernel)[name]
    platform, kind = CHIPS[form]
    chip = AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    mesh = AbstractMesh((1,), ("one",), axis_types=(AxisType.Auto,), abstract_device=chip)
    shapes = jax.eval_shape(lambda key: case.inputs(case.sizes, key), jax.random.key(0))
    with jax.sharding.use_abstract_mesh(mesh):
        how = form if (kernel, form) in backends.OPT_IN else "auto"
        traced = jax.jit(lambda arrays: case.run(arrays, case.sizes, how)).trace(shapes)
        lowered = traced.lower(lowering_platforms=(platform,)).as_text()
    assert {"tpu": "tpu_custom_call", "gpu": "mosaic_gpu"}[form] in lowered
    if form == "tpu":  # the cost estimates of the kernels are the formulas of the case
        estimated, cost = work_by_scope(traced.jaxpr, while_trips=1)[REST], case.cost(case.sizes)
        assert estimated.kernel_bytes > 0
        # A position that is known at run time counts as the mean one, which is half of the last.
        assert 0.49 * cost.flops <= estimated.flops <= 1.1 * cost.flops
    kernels = registers(traced.jaxpr.jaxpr)
    assert bool(kernels) == (form == "gpu")
    for warpgroups, num_registers in kernels:
        # A block cannot get more registers than it starts with; a request for more would hang.
        assert num_registers <= warpgroups * (min(240, 512 // warpgroups) // 8 * 8)


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        pytest.param(kernel, case, id=f"{kernel}-{case}", marks=marks(QUICK.get(kernel) != case))
        for kernel in KERNELS + COMPOSED
        for case in cases(kernel)
    ],
)
def test_costs_are_lower_bounds(kernel, name):
    """XLA's form omits no product. A kernel moves at least its results."""
    case = cases(kernel)[name]
    shapes = jax.eval_shape(lambda key: case.inputs(case.small, key), jax.random.key(0))

    def run(arrays):
        return case.run(arrays, case.small, "xla")

    cost = case.cost(case.small)
    trips = case.small["e"] + case.small["m"] if "e" in case.small else None
    assert 0 <= cost.flops <= count_flops(run, shapes, while_trips=trips)
    assert (cost.flops > 0) == (kernel not in ("top_k", "scatter_rows"))
    results = jax.eval_shape(run, shapes)
    result_bytes, moved = (
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
        for tree in (results, (shapes, results))
    )
    assert result_bytes <= cost.bytes <= 4 * moved
