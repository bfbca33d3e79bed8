"""What the real TPU and GPU compilers make of the train step, for chips that are not there."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from glm5_jax import presets
from glm5_jax.core.mesh import AXES, Region
from glm5_jax.core.sharding import gather, spec_of
from glm5_jax.core.tree import flatten
from glm5_jax.data.mixture import DataConfig
from glm5_jax.model import glm5
from glm5_jax.training.experiment import ExperimentConfig, MeshConfig
from glm5_jax.training.schedule import BatchRampConfig
from launch import compile as pod
from launch.hlo import collectives, groups_along
from tests.mesh import cases
from tests.pod.test_lowering import long_context, pretraining

pytestmark = pytest.mark.aot

MB = 1e6
V5P_MEMORY = 95.74e9  # bytes that libtpu reports for one chip
COMPILERS = {"v5p": "libtpu", "h200": "jax_cuda13_plugin"}


def mesh_of(target: str, axes: dict[str, int]):
    package = COMPILERS[target.partition(":")[0]]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; bash launch/test.sh aot installs it")
    return pod.topology_mesh(target, axes)


def summed_in_full(found, limit: float = 64 * MB):
    """All-reduces above the limit inside a loop: a weight's gradient that is not scattered."""
    return [c for c in found if c.kind == "all-reduce" and c.in_loop and c.num_bytes > limit]


@pytest.mark.parametrize(
    ("target", "platform", "attention"),
    [("v5p:2x2x2", "tpu", "sparse"), ("h200:1x8", "cuda", "dense")],
)
def test_a_small_step_compiles_and_rows_travel_raggedly(target, platform, attention):
    config = ExperimentConfig(
        model=cases.config(attention),
        mesh=MeshConfig(fsdp=2, expert=2, context=2),
        data=DataConfig(sequence_length=cases.LENGTH),
        batch=BatchRampConfig(start=256, end=256, ramp_tokens=0, multiple=256),
        step=cases.STEP,
    )
    mesh = mesh_of(target, dataclasses.asdict(config.mesh))
    compiled = pod.lower_step(config, mesh, platform).lowered.compile()
    exchanges = [c for c in collectives(compiled.as_text()) if c.kind == "ragged-all-to-all"]
    # Of each body (MoE layers, MTP): out and back, forward, recomputed and backward.
    assert len(exchanges) >= 10
    assert {tuple(sorted(c.groups)) for c in exchanges} == {groups_along(mesh, "expert")}
    assert "temporaries" in pod.describe_compiled(compiled)


HEAVY = ("moe_layers/attn/o", "dense_layers/mlp/down", "moe_layers/experts/down", "embed/weight")


@pytest.mark.parametrize("make", [pretraining, long_context])
def test_gradients_of_full_sized_weights_are_scattered(make):
    """The weights whose last dimension is cut, used by a scanned layer on 1,024 chips."""
    mesh = mesh_of("v5p:8x8x16", dataclasses.asdict(make().mesh))
    found = collectives(compile_scan(mesh, HEAVY, gather).as_text())
    assert not summed_in_full(found)
    assert {c.kind for c in found if c.in_loop} >= {"all-gather", "reduce-scatter"}


def test_the_limit_catches_a_weight_that_is_gathered_in_the_wrong_order():
    mesh = mesh_of("v5p:8x8x16", dataclasses.asdict(pretraining().mesh))

    def leading_first(w, letters, spec, region, dtype):
        w = region.all_gather(w.astype(dtype), ("expert",), 0)
        return region.all_gather(w, ("fsdp",), 2)

    found = collectives(compile_scan(mesh, HEAVY[:1], leading_first).as_text())
    assert summed_in_full(found)


def compile_scan(mesh, paths, bring):
    """The gradient of two scanned layers that multiply with these weights of GLM-5."""
    cfg, region = presets.glm5(), Region.of(mesh)
    letters = {p: flatten(glm5.letters(cfg))[p].removeprefix("l ") for p in paths}
    shapes = {p: flatten(glm5.abstract(cfg))[p].shape for p in paths}
    shapes = {p: (2, *shapes[p][-len(letters[p].split()) :]) for p in paths}
    specs = {p: spec_of(f"l {letters[p]}", shapes[p], mesh.shape) for p in paths}

    def local(weights, x):
        def layer(x, weights):
            for path, w in weights.items():
                spec = P(*specs[path][1:])
                w = bring(w, letters[path], spec, region, jnp.bfloat16)
                h = jnp.einsum("td,...d->t...", x, w)
                x = x + jnp.einsum("t...,...d->td", jnp.tanh(h), w)
            return x, None

        x, _ = lax.scan(layer, x, weights)
        return lax.psum(jnp.sum(x.astype(jnp.float32)), AXES)

    def loss(weights, x):
        return jax.shard_map(
            local, mesh=mesh, in_specs=(specs, P(AXES)), out_specs=P(), check_vma=False
        )(weights, x)

    def array(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    weights = {p: array(shapes[p], jnp.float32, specs[p]) for p in paths}
    x = array((mesh.size * 256, cfg.hidden_size), jnp.bfloat16, P(AXES))
    shardings = {p: NamedSharding(mesh, specs[p]) for p in paths}
    return jax.jit(jax.grad(loss), out_shardings=shardings).lower(weights, x).compile()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("make", [pretraining, long_context])
def test_the_whole_step_fits_a_v5p(make):
    """744B parameters on 1,024 chips, with room to spare; 10 GB of memory and minutes of compiling."""
    config = make()
    mesh = mesh_of("v5p:8x8x16", dataclasses.asdict(config.mesh))
    compiled = pod.lower_step(config, mesh).lowered.compile()
    print(pod.describe_compiled(compiled))
    memory = compiled.memory_analysis()
    used = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    assert memory.alias_size_in_bytes > 0.99 * memory.argument_size_in_bytes, "state is not reused"
    assert used < 0.95 * V5P_MEMORY
    assert not summed_in_full(collectives(compiled.as_text()))


def test_compilers_are_found_by_their_packages():
    for package in COMPILERS.values():
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; bash launch/test.sh aot installs it")
    assert np.prod(list(mesh_of("v5p:2x2x2", {"fsdp": -1}).shape.values())) == 8
    assert mesh_of("h200:2x8", {"fsdp": -1}).size == 16
