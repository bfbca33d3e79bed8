"""Reading the collectives of a compiled program."""

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from glm5_jax.core.mesh import make_mesh
from launch.hlo import Collective, collectives, groups_along


def test_collectives_of_a_program_that_is_compiled_here():
    mesh = make_mesh(fsdp=2, expert=4)

    def local(x):  # [2, 8]
        def layer(x, _):
            return x * lax.psum(x, "fsdp"), None

        x, _ = lax.scan(layer, x, None, length=3)
        return lax.all_to_all(x, "expert", 1, 0, tiled=True)

    rows = P(("fsdp", "expert"))
    run = jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows)
    found = collectives(jax.jit(run).lower(np.ones((16, 8), np.float32)).compile().as_text())
    assert found == [
        Collective("all-reduce", 64, True, groups_along(mesh, "fsdp")),
        Collective("all-to-all", 64, False, groups_along(mesh, "expert")),
    ]


TPU = """\
HloModule jit_step, is_scheduled=true

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
  %loop = (s32[], bf16[64,256]{1,0}) while(%init), condition=%condition.2, body=%body.2
  %rows = bf16[32,1,256]{2,1,0} ragged-all-to-all(%x, %y, %o, %s, %p, %r), replica_groups={{0,1},{2,3}}
  %moved = u8[16]{0} collective-permute(%z), source_target_pairs={{0,1},{1,0}}
}
"""


def test_collectives_of_a_tpu_program():
    fours, pairs = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))
    assert collectives(TPU) == [
        Collective("reduce-scatter", 16 * 256 * 2, True, fours),
        Collective("all-gather", 64 * 256 * 2, True, fours),
        Collective("all-reduce", 8 * 4 + 4, True, pairs),
        Collective("ragged-all-to-all", 32 * 256 * 2, False, ((0, 1), (2, 3))),
        Collective("collective-permute", 16, False, ()),
    ]


def test_groups_along_an_axis():
    mesh = make_mesh(fsdp=2, expert=4)
    assert groups_along(mesh, "expert") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert groups_along(mesh, "fsdp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert groups_along(mesh, "fsdp", "expert") == (tuple(range(8)),)
    assert groups_along(mesh, "tensor") == tuple((i,) for i in range(8))
