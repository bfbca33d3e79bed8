"""Reads the collectives of a compiled program."""

import time

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec as P

from glm5_jax.parallel.mesh import make_mesh
from launch.aot.hlo import Collective, axes_of, find_collectives, groups_along


def test_finds_collectives_of_compiled_program():
    mesh = make_mesh(fsdp=2, expert=4)

    def local(x):  # [2, 8]
        def layer(x, _):
            x, _ = lax.scan(lambda x, _: (x * lax.psum(x, "expert"), None), x, None, length=5)
            return x * lax.psum(x, "fsdp"), None

        x, _ = lax.scan(layer, x, None, length=3)
        x = lax.ppermute(x, "fsdp", [(0, 1), (1, 0)])
        return lax.all_to_all(x, "expert", 1, 0, tiled=True)

    rows = P(("fsdp", "expert"))
    run = jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows)
    text = jax.jit(run).lower(np.ones((16, 8), np.float32)).compile().as_text()
    collectives = {axes_of(c, mesh) + (c.kind,): c for c in find_collectives(text)}
    fsdp, expert = groups_along(mesh, "fsdp"), groups_along(mesh, "expert")
    swapped = tuple((i, (i + 4) % 8) for i in range(8))
    plain = {
        k: c._replace(op_name="", pairs=tuple(sorted(c.pairs))) for k, c in collectives.items()
    }
    assert plain == {
        ("expert", "all-reduce"): Collective(
            kind="all-reduce", num_bytes=64, times=15, in_loop=True, groups=expert, moved=96
        ),
        ("fsdp", "all-reduce"): Collective(
            kind="all-reduce", num_bytes=64, times=3, in_loop=True, groups=fsdp, moved=64
        ),
        ("fsdp", "collective-permute"): Collective(
            kind="collective-permute",
            num_bytes=64,
            times=1,
            in_loop=False,
            groups=(),
            moved=64,
            pairs=swapped,
        ),
        ("expert", "all-to-all"): Collective(
            kind="all-to-all", num_bytes=64, times=1, in_loop=False, groups=expert, moved=48
        ),
    }
    assert "while/body" in collectives["fsdp", "all-reduce"].op_name


TPU = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(f32[] %x, f32[] %y)
}

%all-reduce-scatter.1 (input: bf16[64,256]) -> bf16[16,256] {
  %all-reduce.7 = bf16[64,256]{1,0:T(8,128)(2,1)} all-reduce(%input), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %slice = bf16[16,256] dynamic-slice(%all-reduce.7, %start)
}

%body.2 (state: (s32[], bf16[64,256])) -> (s32[], bf16[64,256]) {
  %scattered = bf16[16,256]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
  %gathered = (bf16[16,256]{1,0}, bf16[64,256]{1,0}) all-gather-start(%scattered), replica_groups=[2,4]<=[8], dimensions={0}
  %done = bf16[64,256]{1,0} all-gather-done(%gathered)
  %sums = (f32[8]{0}, pred[4]{0}) all-reduce(%a, %b), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
}

%condition.2 (state: (s32[], bf16[64,256])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: bf16[64,256]) -> bf16[64,256] {
  %y = bf16[96,1,256]{2,1,0} parameter(0)
  %loop = (s32[], bf16[64,256]{1,0}) while(%init), condition=%condition.2, body=%body.2, backend_config={"known_trip_count":{"n":"75"}}
  %rows = bf16[32,1,256]{2,1,0} ragged-all-to-all(%y, %x, %o, %s, %p, %r), replica_groups={{0,1},{2,3}}
  %moved = u8[16]{0} collective-permute(%z), source_target_pairs={{0,1},{1,0}}
  %all = f32[6]{0} all-reduce(%z), replica_groups={}, to_apply=%add, metadata={op_name="jit(step)/psum"}
}
"""


def test_finds_collectives_of_tpu_program():
    fours, pairs = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))
    part, full, everyone = 16 * 256 * 2, 64 * 256 * 2, (tuple(range(8)),)
    assert find_collectives(TPU) == [
        Collective(
            kind="reduce-scatter",
            num_bytes=part,
            times=75,
            in_loop=True,
            groups=fours,
            moved=3 * part,
        ),
        Collective(
            kind="all-gather",
            num_bytes=full,
            times=75,
            in_loop=True,
            groups=fours,
            moved=full * 3 // 4,
        ),
        Collective(
            kind="all-reduce",
            num_bytes=8 * 4 + 4,
            times=75,
            in_loop=True,
            groups=pairs,
            moved=8 * 4 + 4,
        ),
        Collective(
            kind="ragged-all-to-all",
            num_bytes=32 * 512,
            times=1,
            in_loop=False,
            groups=((0, 1), (2, 3)),
            moved=16 * 512,
        ),
        Collective(
            kind="collective-permute",
            num_bytes=16,
            times=1,
            in_loop=False,
            groups=(),
            moved=16,
            pairs=((0, 1), (1, 0)),
        ),
        Collective(
            kind="all-reduce",
            num_bytes=24,
            times=1,
            in_loop=False,
            groups=everyone,
            moved=2 * 24 * 7 // 8,
            pairs=(),
            op_name="jit(step)/psum",
        ),
    ]


def test_counts_only_existing_rows_of_ragged_exchange():
    forward, back = (
        next(c for c in find_collectives(text) if c.kind == "ragged-all-to-all")
        for text in (TPU.replace("%y = bf16[96,", "%y = bf16[8,"), TPU)
    )
    assert (forward.moved, back.moved) == (8 * 512 // 2, 32 * 512 // 2)


STARTED = """\
HloModule jit_step, num_partitions=4

%wrapped (p: f32[64]) -> f32[16] {{
  %p = f32[64]{{0}} parameter(0)
  ROOT %rs = f32[16]{{0}} reduce-scatter(%p), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}, to_apply=%add
}}

ENTRY %main (x: f32[64]) -> f32[64] {{
  %x = f32[64]{{0}} parameter(0)
  {begun}
  {ended}
}}
"""


@pytest.mark.parametrize(
    ("begun", "ended", "kind", "num_bytes"),
    [
        (
            "%s = ((f32[64]{0}), f32[16]{0}, s32[]) async-start(%x), calls=%wrapped",
            "%d = f32[16]{0} async-done(%s), calls=%wrapped",
            "reduce-scatter",
            64,
        ),
        (
            "%s = (f32[64]{0}, f32[256]{0}) all-gather-start(%x), replica_groups={{0,1,2,3}}",
            "%d = f32[256]{0} all-gather-done(%s)",
            "all-gather",
            1024,
        ),
        (
            "%s = ((f32[64], f32[4]), (f32[256], f32[16])) all-gather-start(%x, %y), replica_groups={}",
            "%d = (f32[256], f32[16]) all-gather-done(%s)",
            "all-gather",
            1024 + 64,
        ),
        (
            "%s = (f32[64]{0}, f32[4]{0}) all-reduce-start(%x, %y), replica_groups=[1,4]<=[4]",
            "%d = (f32[64]{0}, f32[4]{0}) all-reduce-done(%s)",
            "all-reduce",
            256 + 16,
        ),
        (
            "%s = ((f32[64]), f32[16], s32[]) reduce-scatter-start(%x), replica_groups={{0,1,2,3}}",
            "%d = f32[16] reduce-scatter-done(%s)",
            "reduce-scatter",
            64,
        ),
        (
            "%s = (f32[64], f32[64], u32[], u32[]) collective-permute-start(%x), "
            "source_target_pairs={{0,1},{1,0}}",
            "%d = f32[64] collective-permute-done(%s)",
            "collective-permute",
            256,
        ),
    ],
)
def test_counts_asynchronous_collective_once(begun, ended, kind, num_bytes):
    text = STARTED.format(begun=begun, ended=ended)
    if kind != "reduce-scatter" or "async" not in begun:
        text = text.replace("reduce-scatter(%p)", "slice(%p)")
    (collective,) = find_collectives(text)
    assert (collective.kind, collective.num_bytes, collective.times) == (kind, num_bytes, 1)


def test_rejects_groups_of_unknown_form():
    with pytest.raises(ValueError, match="replica_groups=ring.* has an unsupported form"):
        find_collectives(sum_program("ring['a'=2,'b'=2]{b}"))


def sum_program(groups: str) -> str:
    """Returns a program with one sum over these groups."""
    line = f"%s = f32[64]{{0}} all-reduce(%p), replica_groups={groups}, use_global_device_ids=true, to_apply=%add"
    text = STARTED.format(begun=line, ended="%d = f32[64]{0} copy(%s)")
    return text.replace("reduce-scatter(%p)", "slice(%p)")


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=1,'b'=2,'c'=4] {'b','c'}", (tuple(range(8)),)),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=4] {'a','b':(2)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        # As libtpu writes it: numbers of devices are those of [2, 2, 2] with its first two dimensions exchanged.
        (
            "mesh['a'=2,'b'=2,'c'=2], device_ids=([2,2,2]T(1,0,2)) {'b'}",
            ((0, 4), (1, 5), (2, 6), (3, 7)),
        ),
        ("mesh['a'=4,'b'=2], device_ids=([8]) {'b'}", ((0, 1), (2, 3), (4, 5), (6, 7))),
    ],
)
def test_reads_groups_by_mesh_axes(text, groups):
    [collective] = find_collectives(sum_program(text))
    assert tuple(sorted(tuple(sorted(group)) for group in collective.groups)) == groups


def test_lists_groups_along_axis():
    mesh = make_mesh(fsdp=2, expert=4)
    assert groups_along(mesh, "expert") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert groups_along(mesh, "fsdp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert groups_along(mesh, "fsdp", "expert") == (tuple(range(8)),)
    assert groups_along(mesh, "tensor") == tuple((i,) for i in range(8))


def over(groups, pairs=()):
    return Collective(
        kind="all-gather", num_bytes=8, times=1, in_loop=False, groups=groups, moved=8, pairs=pairs
    )


def test_finds_axes_of_collective():
    mesh = AbstractMesh((2, 4, 3), ("fsdp", "expert", "context"))
    for axes in (("fsdp",), ("expert",), ("fsdp", "context"), ("fsdp", "expert", "context")):
        groups = groups_along(mesh, *axes)
        assert axes_of(over(groups), mesh) == axes
        assert axes_of(over(tuple(group[::-1] for group in groups[::-1])), mesh) == axes
    assert axes_of(over(groups_along(mesh)), mesh) == ()
    halves = tuple((i, i + 3) for i in range(0, 24) if i % 6 < 3)  # two by two of expert
    assert axes_of(over(halves), mesh) == ()
    assert axes_of(over(groups_along(mesh, "fsdp")[:-1]), mesh) == ()
    with pytest.raises(ValueError, match="device 23 and a mesh of 8 devices"):
        axes_of(over(groups_along(mesh, "fsdp")), make_mesh(fsdp=8))


def test_finds_axes_of_permutation():
    mesh = AbstractMesh((2, 4, 3), ("fsdp", "expert", "context"))
    ids = np.arange(24).reshape(2, 4, 3)

    def roll_ids(*axes):
        return tuple(zip(ids.ravel().tolist(), np.roll(ids, 1, axes).ravel().tolist()))

    assert axes_of(over((), roll_ids(1)), mesh) == ("expert",)
    assert axes_of(over((), roll_ids(0, 2)), mesh) == ("fsdp", "context")
    assert axes_of(over((), ((5, 5), (4, 4))), mesh) == ()


def test_finds_axes_of_many_collectives_quickly():
    mesh = AbstractMesh((16, 64, 2), ("fsdp", "expert", "context"))
    names = [("fsdp",), ("expert",), ("context",), ("fsdp", "expert"), ("fsdp", "context")]
    many = [over(groups_along(mesh, *names[i % 5])) for i in range(500)]
    began = time.process_time()
    assert [axes_of(one, mesh) for one in many] == [names[i % 5] for i in range(500)]
    assert time.process_time() - began < 5
