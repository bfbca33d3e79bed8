"""Finds arrays of a compiled program that every device holds in full."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

from glm5_jax.parallel.mesh import make_mesh
from launch.aot.replication import Replicated, find_replicated


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(fsdp=2, expert=2, context=2)


ROWS = P(("fsdp", "expert", "context"))


def compiled(mesh, local, in_specs, out_specs, *shapes):
    run = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, in_specs)
    ]
    return jax.jit(run).lower(*arrays).compile().as_text()


def replicated(text, mesh, limit=4096):
    return [
        (one.where, one.num_bytes, one.what.rpartition("/")[2])
        for one in find_replicated(text, mesh, limit)
    ]


def test_finds_unsharded_arguments_and_results(mesh):
    def local(table, part, x):
        return jnp.sin(table), part + 1, x + table[0, 0]

    specs = (P(), P("expert"), ROWS)
    text = compiled(mesh, local, specs, specs, (32, 64), (64, 64), (64, 128))
    size = 32 * 64 * 4
    assert replicated(text, mesh) == [("parameter", size, "table"), ("output", size, "sin")]
    assert replicated(text, mesh, size + 1) == []


def scanned(gather):
    """Returns a loop that carries the result of `gather` on a weight [64, 64], sharded over fsdp and expert."""

    def local(w, x):
        table = jnp.tanh(gather(w))

        def step(x, _):
            return jnp.tanh(x @ table), None

        return lax.scan(step, x, None, length=3)[0]

    return local


def both(w):
    return lax.all_gather(
        lax.all_gather(w, "fsdp", axis=0, tiled=True), "expert", axis=1, tiled=True
    )


def one_axis(w):
    return jnp.tile(lax.all_gather(w, "fsdp", axis=0, tiled=True), 2)


def numbered(w):
    return both(w) + lax.axis_index("context")


def summed(w):
    return jnp.tile(lax.psum(w, ("fsdp", "expert")), (2, 2))


def scattered(w):
    gathered = both(w)
    return jnp.tile(lax.psum_scatter(gathered, "context", tiled=True), (2, 1))


def exchanged(w):
    return lax.ppermute(both(w) + lax.axis_index("context"), "context", [(0, 1), (1, 0)])


@pytest.mark.parametrize(
    ("gather", "count"),
    [
        (both, True),
        (summed, True),
        (one_axis, False),
        (numbered, False),
        (scattered, False),
        (exchanged, False),
    ],
)
def test_finds_gathered_loop_values(mesh, gather, count):
    text = compiled(mesh, scanned(gather), (P("fsdp", "expert"), ROWS), ROWS, (64, 64), (64, 64))
    loops = [size for where, size, _ in replicated(text, mesh, 64 * 64 * 4) if where == "loop"]
    assert loops == [64 * 64 * 4] * count


TEXT = """\
HloModule jit_f, num_partitions=8

%outer (s: (s32[], f32[64])) -> (s32[], f32[64]) {{
  %s = (s32[], f32[64]{{0}}) parameter(0)
  ROOT %inner = (s32[], f32[64]{{0}}) while(%s), condition=%test, body=%body
}}

%body (t: (s32[], f32[64])) -> (s32[], f32[64]) {{
  %t = (s32[], f32[64]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[64]{{0}} get-tuple-element(%t), index=1
  %y = f32[64]{{0}} {operation}
  ROOT %u = (s32[], f32[64]{{0}}) tuple(%i, %y)
}}

%test (v: (s32[], f32[64])) -> pred[] {{
  %v = (s32[], f32[64]{{0}}) parameter(0)
  ROOT %go = pred[] constant(true)
}}

ENTRY %main (a: f32[64]) -> f32[64] {{
  %a = f32[64]{{0}} parameter(0){sharding}, metadata={{op_name="state['w']"}}
  %zero = s32[] constant(0)
  %init = (s32[], f32[64]{{0}}) tuple(%zero, %a)
  %loop = (s32[], f32[64]{{0}}) while(%init), condition=%test, body=%outer, metadata={{op_name="jit(f)/while"}}
  ROOT %end = f32[64]{{0}} get-tuple-element(%loop), index=1
}}
"""


@pytest.mark.parametrize(
    ("sharding", "operation", "where"),
    [
        (", sharding={replicated}", "negate(%x)", {"parameter", "loop", "output"}),
        (", sharding={devices=[2,4]<=[8] last_tile_dim_replicate}", "negate(%x)", set()),
        (
            ", sharding={devices=[1,8]<=[8] last_tile_dim_replicate}",
            "negate(%x)",
            {"parameter", "loop", "output"},
        ),
        (", sharding={devices=[8]0,1,2,3,4,5,6,7}", "negate(%x)", set()),
        ("", "negate(%x)", set()),
        (", sharding={replicated}", "partition-id()", {"parameter"}),
        # pairs of neighbours are a part of an axis
        (", sharding={replicated}", "all-to-all(%x), replica_groups=[4,2]<=[8]", {"parameter"}),
        (
            ", sharding={replicated}",
            "all-to-all(%x), replica_groups=[8,1]<=[8]",
            {"parameter", "loop", "output"},
        ),
        ("", "all-reduce(%x), replica_groups={}", set()),  # before the first run it differs
    ],
)
def test_follows_loop_values_through_runs(sharding, operation, where):
    mesh = AbstractMesh((2, 4), ("fsdp", "expert"))
    ones = find_replicated(TEXT.format(sharding=sharding, operation=operation), mesh, 256)
    assert {one.where for one in ones} == where
    assert {one.what for one in ones} <= {"state['w']", "jit(f)/while"}
    assert [one for one in ones if one.where == "loop"] == [
        Replicated(256, "loop", "state['w']")
    ] * ("loop" in where)


def test_finds_axes_of_parameter_in_any_order():
    mesh = AbstractMesh((2, 4), ("fsdp", "expert"))
    gathered = "all-gather(%a), replica_groups={groups}, dimensions={{0}}"
    for axis, groups in (("<=[2,4]T(1,0)", "[2,4]<=[8]"), ("<=[8]", "[4,2]<=[2,4]T(1,0)")):
        tiles = "[4,2]" if "T" in axis else "[2,4]"
        sharding = f", sharding={{devices={tiles}{axis} last_tile_dim_replicate}}"
        text = TEXT.format(sharding=sharding, operation="negate(%x)")
        for kind in (groups, "[4,2]<=[2,4]T(1,0)" if groups == "[2,4]<=[8]" else "[2,4]<=[8]"):
            ending = f"  ROOT %end = f32[64]{{0}} {gathered.format(groups=kind)}\n}}\n"
            arrays = find_replicated(text[: text.index("  ROOT %end")] + ending, mesh, 256)
            assert [one.where for one in arrays] == ["output"] * (kind == groups)
    assert np.prod(list(mesh.shape.values())) == 8
