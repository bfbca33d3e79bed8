"""Tests of the analysis of compiled TPU and GPU programs whose contents are known by construction."""

import collections
import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from glm5_jax.parallel.mesh import AXES
from launch.aot.buffers import find_large_buffers, parse_memory_error, read_dump, temporary_bytes
from launch.aot.hlo import axes_of, find_collectives
from launch.aot.replication import find_replicated
from tests.kernels.offline import pod_of
from tests.pod.test_offline_compilers import mesh_of

pytestmark = pytest.mark.aot

MIB = 2**20
WIDTH, ROWS, LAYERS, ROUNDS = 1024, 256, 7, 5
TARGETS = ("v5p:2x2x2", "h200:1x8")
BOUNDED = {"xla_tpu_max_hbm_size_mib": "1500"}  # less than the program needs


def arrays(mesh, *layouts):
    return [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in layouts
    ]


@pytest.fixture(scope="module", params=[*TARGETS, "v6e:2x4"])
def scanned(request):
    """Returns (mesh, text) of a compiled gradient of layers that exchange rows in an inner loop."""
    mesh = mesh_of(request.param, dict(fsdp=2, expert=2, context=2))
    cut = P(None, "expert", "fsdp")

    def local(w, table, x):
        def exchange(h, _):
            h = lax.ppermute(h, "context", [(0, 1), (1, 0)])
            return lax.all_to_all(h, "context", 0, 0, tiled=True) @ table, None

        def layer(x, w):
            w = lax.all_gather(w.astype(jnp.bfloat16), "expert", axis=0, tiled=True)
            w = lax.all_gather(w, "fsdp", axis=1, tiled=True)
            h, _ = lax.scan(exchange, jnp.tanh(x @ w), None, length=ROUNDS)
            return x + h, None

        def loss(w):
            y, _ = lax.scan(jax.checkpoint(layer), x, w)
            return lax.psum(jnp.sum(y.astype(jnp.float32)), AXES)

        return jax.value_and_grad(loss)(w)

    def step(w, table, x):
        return jax.shard_map(
            local, mesh=mesh, in_specs=(cut, P(), P(AXES)), out_specs=(P(), cut), check_vma=False
        )(w, table, x)

    shapes = arrays(
        mesh,
        ((LAYERS, WIDTH, WIDTH), jnp.float32, cut),
        ((WIDTH, WIDTH), jnp.bfloat16, P()),
        ((8 * ROWS, WIDTH), jnp.bfloat16, P(AXES)),
    )
    options = pod_of(request.param).options
    return mesh, jax.jit(step).lower(*shapes).compile(compiler_options=options).as_text()


def test_counts_runs_and_bytes_of_collectives(scanned):
    mesh, text = scanned
    times, moved = collections.Counter(), collections.Counter()
    for one in find_collectives(text):
        key = one.kind, *axes_of(one, mesh)
        times[key] += one.times
        moved[key] += one.times * one.moved
    weight, rows = WIDTH * WIDTH * 2, ROWS * WIDTH * 2  # bytes in bf16
    exchanges = (
        2 * LAYERS * ROUNDS
    )  # forward, not recomputed because the inner loop is linear, and backward
    every = ("all-reduce", "fsdp", "expert", "context")
    assert moved.pop(every) <= 64  # the loss, and on some chips its gradient
    assert times.pop(every) <= 2
    assert times == {
        ("all-gather", "expert"): 2 * LAYERS,  # forward and backward
        ("all-gather", "fsdp"): 2 * LAYERS,
        ("reduce-scatter", "fsdp"): LAYERS,
        ("reduce-scatter", "expert"): LAYERS,
        ("collective-permute", "context"): exchanges,
        ("all-to-all", "context"): exchanges,
    }
    assert moved == {
        ("all-gather", "expert"): 2 * LAYERS * weight // 4,
        ("all-gather", "fsdp"): 2 * LAYERS * weight // 2,
        ("reduce-scatter", "fsdp"): LAYERS * weight // 2,
        ("reduce-scatter", "expert"): LAYERS * weight // 4,
        ("collective-permute", "context"): exchanges * rows,
        ("all-to-all", "context"): exchanges * rows // 2,
    }


def test_finds_replicated_table_and_no_sharded_weight(scanned):
    mesh, text = scanned
    replicated = {(one.where, one.what) for one in find_replicated(text, mesh, MIB)}
    assert {("parameter", "table"), ("loop", "table")} <= replicated
    assert "w" not in {what for _, what in replicated}


@pytest.mark.parametrize("target", TARGETS)
def test_names_largest_buffers_of_too_large_program(target, tmp_path):
    mesh, layers, width = mesh_of(target, {"fsdp": -1}), 12, 2048

    def saved(x, w):
        return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])

    shapes = arrays(
        mesh,
        ((6554, width), jnp.float32, P()),
        ((layers, width, width), jnp.float32, P()),
    )
    options = {"xla_dump_to": str(tmp_path)}
    lowered = jax.jit(jax.grad(saved, 1)).lower(*shapes)
    if target.startswith("h200"):  # XLA:GPU compiles programs that do not fit
        compiled = lowered.compile(compiler_options=options)
        assert temporary_bytes(tmp_path) == compiled.memory_analysis().temp_size_in_bytes
    else:
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as error:
            lowered.compile(compiler_options=options | BOUNDED)
        needed, available = parse_memory_error(str(error.value))
        assert available == pytest.approx(1500 * MIB, rel=0.01)
        assert needed == pytest.approx(2.17e9, rel=0.05)
        x, w = (s.dtype.itemsize * math.prod(s.shape) for s in shapes)
        assert temporary_bytes(tmp_path) + x + 2 * w == pytest.approx(needed, rel=0.01)
    text, ranges = read_dump(tmp_path)
    buffers = find_large_buffers(text, 150 * MIB, ranges)
    stacks = [b.what for b in buffers if b.shape == f"f32[{layers},6554,{width}]"]
    assert len(stacks) >= 2
    assert {what.rpartition("/")[2] for what in stacks} == {"tanh", "sub"}
    assert "w" in {b.what for b in buffers}
