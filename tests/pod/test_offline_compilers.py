"""Tests of the train step compiled by the TPU and GPU compilers, without the chips."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from glm5_jax import presets
from glm5_jax.data.mixture import DataConfig
from glm5_jax.model import glm5
from glm5_jax.parallel.mesh import AXES, Region
from glm5_jax.parallel.sharding import gather, spec_of
from glm5_jax.parallel.tree import flatten
from glm5_jax.training.experiment import MeshConfig
from glm5_jax.training.pretraining import ExperimentConfig
from glm5_jax.training.schedule import BatchRampConfig
from launch import compile as command, pods
from launch.aot import programs as pod
from launch.aot.hlo import find_collectives, groups_along
from launch.aot.program_report import describe, report_of
from tests.kernels.offline import pod_of
from tests.mesh import cases
from tests.pod.test_lowering import long_context, pretraining

pytestmark = pytest.mark.aot

MB = 1e6


def mesh_of(target: str, axes: dict[str, int]):
    return pods.make_pod_mesh(pod_of(target), axes)


def full_gradient_sums(collectives, limit: float = 64 * MB):
    """Returns large all-reduces inside a loop, which are gradients of weights that are not scattered."""
    return [c for c in collectives if c.kind == "all-reduce" and c.in_loop and c.num_bytes > limit]


@pytest.mark.parametrize(
    ("target", "attention"),
    [
        ("v5p:2x2x2", "sparse"),
        ("v5e:2x4", "sparse"),
        ("v6e:2x4", "dense"),
        ("tpu7x:2x2x1", "sparse"),
        ("h100:1x8", "sparse"),
        ("h200:1x8", "dense"),
    ],
)
def test_small_step_compiles_with_ragged_exchange(target, attention):
    config = ExperimentConfig(
        model=cases.config(attention),
        mesh=MeshConfig(fsdp=2, expert=2, context=2),
        data=DataConfig(sequence_length=cases.LENGTH),
        batch=BatchRampConfig(start=256, end=256, ramp_tokens=0, multiple=256),
        step=cases.STEP,
    )
    mesh = mesh_of(target, dataclasses.asdict(config.mesh))
    program = pod.lower_step(config, mesh, pod_of(target).platform)
    report, text = report_of("small", target, program, mesh, pod_of(target), 0.0)
    exchanges = [c for c in find_collectives(text) if c.kind == "ragged-all-to-all"]
    # Each body (MoE layers, MTP) sends and returns rows in forward, recomputation and backward.
    assert len(exchanges) >= 10
    assert {tuple(sorted(c.groups)) for c in exchanges} == {groups_along(mesh, "expert")}
    assert report.fits and not report.overweight and not report.replicated
    [rows] = [row for row in report.traffic if row.kind == "ragged-all-to-all"]
    assert rows.axes == ("expert",) and not rows.far_bytes and rows.count == len(exchanges)
    # Two layers and three MTP steps, which may be recomputed twice. XLA:GPU unrolls such short loops.
    assert 5 * 6 <= rows.runs <= 2 * 6 + 3 * 8, "the trips of layer loops are not counted"
    assert {"products", "memory", "links"} == report.seconds.keys()
    assert (
        0 < report.saved_activation_bytes < report.temporary_bytes + report.argument_bytes["batch"]
    )


def test_reports_largest_buffers_if_program_does_not_fit(capsys):
    """Eight of GLM-5's layers do not fit on four chips of 16 GB."""
    # Skips if the compiler is missing. With fsdp=4 XLA would store the weights of all experts in host memory.
    mesh_of("v5e:2x2", {"expert": 4})
    arguments = [
        "compile",
        "--experiment=experiments/pretrain.py:glm5",
        "--experiment.model.num_hidden_layers=8",
        "--experiment.mesh.fsdp=1",
        "--experiment.mesh.expert=4",
        "--experiment.batch.start=16384",
        "--experiment.batch.end=16384",
        "--experiment.batch.multiple=16384",
        "--topology=v5e:2x2",
    ]
    assert command.main(arguments) == command.NOT_FITTING
    out = capsys.readouterr().out
    assert "it does not fit; the largest buffers:" in out and "experts" in out


HEAVY = ("moe_layers/attn/o", "dense_layers/mlp/down", "moe_layers/experts/down", "embed/weight")


@pytest.mark.parametrize("make", [pretraining, long_context])
def test_scatters_gradients_of_full_size_weights(make):
    """A scanned layer on 1,024 chips uses weights whose last dimension is sharded."""
    mesh = mesh_of("v5p:8x8x16", dataclasses.asdict(make().mesh))
    collectives = find_collectives(compile_scan(mesh, HEAVY, gather).as_text())
    assert not full_gradient_sums(collectives)
    assert {c.kind for c in collectives if c.in_loop} >= {"all-gather", "reduce-scatter"}


def test_detects_weight_gathered_in_wrong_order():
    mesh = mesh_of("v5p:8x8x16", dataclasses.asdict(pretraining().mesh))

    def leading_first(w, letters, spec, region, dtype):
        w = region.all_gather(w.astype(dtype), ("expert",), 0)
        return region.all_gather(w, ("fsdp",), 2)

    collectives = find_collectives(compile_scan(mesh, HEAVY[:1], leading_first).as_text())
    assert full_gradient_sums(collectives)


def compile_scan(mesh, paths, bring):
    """Compiles the gradient of two scanned layers that multiply by these weights of GLM-5."""
    cfg, region = presets.glm5(), Region.of(mesh)
    letters = {p: flatten(glm5.axis_letters(cfg))[p].removeprefix("l ") for p in paths}
    shapes = {p: flatten(glm5.abstract_params(cfg))[p].shape for p in paths}
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
def test_full_step_fits_v5p(make):
    """744B parameters fit on 1,024 chips. Compiling takes 10 GB of memory and minutes."""
    config = make()
    mesh = mesh_of("v5p:8x8x16", dataclasses.asdict(config.mesh))
    program = pod.lower_step(config, mesh)
    report, text = report_of(config.name, "v5p:8x8x16", program, mesh, pod_of("v5p:8x8x16"), 0.0)
    print(describe(report))
    assert report.unaliased_result_bytes < 0.01 * sum(report.argument_bytes.values()), (
        "state is not reused"
    )
    assert report.used_bytes < 0.95 * report.available_bytes
    assert not report.replicated
    # Only parts of the vocabulary and some weights of long contexts are all-reduced, a small share of the traffic.
    summed = sum(
        one.moved * (one.times or 1) for one in full_gradient_sums(find_collectives(text, mesh))
    )
    assert summed < 0.01 * sum(row.near_bytes + row.far_bytes for row in report.traffic)
