"""Bytes that a program sends over links and over the network, and their minimum time, computed by hand."""

import math

import pytest

from glm5_jax.parallel.mesh import make_mesh
from launch.aot.hlo import Collective, axes_of, find_collectives
from launch.aot.program_report import (
    Traffic,
    leaving_bytes,
    scale_to_existing_rows,
    summarize_traffic,
    time_bounds,
)
from launch.pods import parse
from pallas_kernels.cost import Cost
from tests.launch.test_pods import devices_of

MB = 1_000_000


def mesh_of(pod: str, **axes):
    return make_mesh(axes, devices=devices_of(parse(pod)))


def over(kind, moved, groups=(), pairs=(), **more) -> Collective:
    return Collective(
        kind=kind,
        num_bytes=moved,
        times=1,
        in_loop=False,
        groups=groups,
        moved=moved,
        pairs=pairs,
        **more,
    )


# -- bytes that leave a chip, host or slice -------------------------------------------------------------------------

FOUR = (tuple(range(4)),)


@pytest.mark.parametrize(
    ("one", "islands", "out"),
    [
        (over("all-gather", 3 * MB, FOUR), (0, 0, 0, 0), 0),
        (over("all-gather", 3 * MB, FOUR), (0, 1, 2, 3), 3 * MB),
        # Two hosts of two: a host lacks two of four parts, and each of its devices receives one.
        (over("all-gather", 3 * MB, FOUR), (0, 0, 1, 1), 1 * MB),
        (over("reduce-scatter", 3 * MB, FOUR), (0, 0, 1, 1), 1 * MB),
        (over("all-reduce", 6 * MB, FOUR), (0, 0, 1, 1), 2 * MB),
        # Each device sends two of its three parts to the other host.
        (over("all-to-all", 3 * MB, FOUR), (0, 0, 1, 1), 2 * MB),
        (over("ragged-all-to-all", 3 * MB, FOUR), (0, 0, 1, 1), 2 * MB),
        (over("collective-permute", MB, pairs=((0, 1), (1, 0))), (0, 0, 1, 1), 0),
        (over("collective-permute", MB, pairs=((0, 1), (1, 2))), (0, 0, 1, 1), MB),
        (over("all-gather", MB, ((0, 1), (2, 3))), (0, 0, 1, 1), 0),
        (over("all-gather", MB, ((0, 2), (1, 3))), (0, 0, 1, 1), MB),
    ],
)
def test_island_receives_shared_bytes_once(one, islands, out):
    assert leaving_bytes(one, islands) == out


def test_gpus_of_host_send_rest_over_links():
    mesh = mesh_of("h200:2x8", fsdp=16)
    [row] = summarize_traffic([over("all-gather", 15 * MB, (tuple(range(16)),))], mesh)
    assert row == Traffic(
        kind="all-gather",
        axes=("fsdp",),
        count=1,
        runs=1,
        near_bytes=14 * MB,
        far_bytes=1 * MB,
        largest_bytes=15 * MB,
    )


def test_devices_of_tpu_chip_use_no_link():
    mesh = mesh_of("tpu7x:2x2x1", fsdp=8)
    [row] = summarize_traffic([over("all-gather", 7 * MB, (tuple(range(8)),))], mesh)
    assert (row.near_bytes, row.far_bytes) == (3 * MB, 0)
    [row] = summarize_traffic(
        [over("all-gather", 7 * MB, (tuple(range(8)),))], mesh_of("v5p:2x2x2", fsdp=8)
    )
    assert (row.near_bytes, row.far_bytes) == (7 * MB, 0)


def test_sums_runs_by_kind_and_axes():
    mesh = mesh_of("v5p:2x2x2", fsdp=4, expert=2)
    inside = tuple((i, i + 1) for i in range(0, 8, 2))
    collectives = [
        over("all-gather", MB, inside)._replace(times=5, in_loop=True),
        over("all-gather", 2 * MB, inside),
        over("all-reduce", MB, inside)._replace(times=None, in_loop=True),
    ]
    assert summarize_traffic(collectives, mesh) == (
        Traffic(
            kind="all-gather",
            axes=("expert",),
            count=2,
            runs=6,
            near_bytes=7 * MB,
            far_bytes=0,
            largest_bytes=2 * MB,
        ),
        Traffic(
            kind="all-reduce",
            axes=("expert",),
            count=1,
            runs=1,
            near_bytes=MB,
            far_bytes=0,
            largest_bytes=MB,
        ),
    )


def test_computes_seconds_of_each_resource():
    rows = [
        Traffic(
            kind="all-gather",
            axes=("fsdp",),
            count=1,
            runs=1,
            near_bytes=6 * 10**11,
            far_bytes=0,
            largest_bytes=1,
        )
    ]
    costs = [Cost(459e12, 2.765e12), Cost(918e12, 0, "int8")]
    assert time_bounds(costs, rows, parse("v5p:2x2x1")) == pytest.approx(
        {"products": 2.0, "memory": 1.0, "links": 1.0}
    )
    far = [
        Traffic(
            kind="all-gather",
            axes=("fsdp",),
            count=1,
            runs=1,
            near_bytes=0,
            far_bytes=25 * 10**9,
            largest_bytes=1,
        )
    ] * 2
    bounds = time_bounds([Cost(918e12, 0)], far, parse("2*v6e:2x2"))
    assert bounds == pytest.approx({"products": 1.0, "memory": 0.0, "links": 0.0, "network": 4.0})


def test_counts_only_existing_rows():
    """Buffers between slices have room for all tokens, those inside a slice for the tokens that all slices may send."""
    mesh = make_mesh(expert=8)
    halves, pairs = ((0, 1, 2, 3), (4, 5, 6, 7)), tuple((i, i + 4) for i in range(4))
    inside = over("ragged-all-to-all", 6 * MB, halves)
    assert scale_to_existing_rows(inside, mesh, 2, 0.75).moved == 3 * MB
    for other in (
        over("all-gather", 6 * MB, halves),
        over("collective-permute", 6 * MB, pairs=((0, 1), (1, 0))),
    ):
        assert scale_to_existing_rows(other, mesh, 2, 0.5) == other
    assert scale_to_existing_rows(inside, mesh, 1, 0.5) == inside
    crossing = over("ragged-all-to-all", 6 * MB, pairs)
    assert scale_to_existing_rows(crossing, mesh, 2, 0.75)._replace(moved=6 * MB) == crossing
    assert scale_to_existing_rows(crossing, mesh, 2, 0.75).moved == 4.5 * MB
    square = make_mesh(fsdp=2, expert=4)
    within, across = ((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 2), (1, 3), (4, 6), (5, 7))
    assert (
        scale_to_existing_rows(over("ragged-all-to-all", 6 * MB, within), square, 2, 0.75).moved
        == 3 * MB
    )
    crossing = over("ragged-all-to-all", 6 * MB, across)
    assert scale_to_existing_rows(crossing, square, 2, 0.75).moved == 4.5 * MB


# -- several slices ------------------------------------------------------------------------------------------------

# As libtpu 0.0.42.1 writes it for 4*v6e:2x2: the data axis lies along two pairs of slices, fsdp along the other pairs
# and half of each slice.
TEXT = """HloModule jit_f, is_scheduled=true, num_partitions=4

ENTRY %main (param: bf16[1024,8192]) -> bf16[4096,8192] {
  %param = bf16[1024,8192]{1,0} parameter(0)
  %token = token[] after-all()
"""
LINE = """  %send.N = (SENT{1,0:T(8,128)(2,1)}, u32[], token[]) send(%param, %token), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="meet.N_0",ATTRIBUTES_xla_megascale_target=TARGET,_xla_megascale_transfer_type="TYPE"}
  %recv.N = (GOT{1,0:T(8,128)(2,1)}, u32[], token[]) recv(%token), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="meet.N_0",ATTRIBUTES_xla_megascale_target=TARGET,_xla_megascale_transfer_type="TYPE"}
"""
DATA = (
    "{{100000,300000},{100001,300001},{100003,300003},{100002,300002},"
    "{200000,400000},{200001,400001},{200003,400003},{200002,400002}}"
)
FSDP = DATA.replace("300", "x").replace("200", "300").replace("x", "200")
ALL = '"{1,2,3,4}x{0:3}"'
RAGGED = '_xla_megascale_ragged_operand_index="0",'


def between(kind, target, sent, got, attributes=""):
    """Returns the collectives of a program in which slices send and receive these numbers of rows of 16 KB."""
    words = {
        "SENT": f"bf16[{sent},8192]",
        "GOT": f"bf16[{got},8192]",
        "TARGET": target,
        "TYPE": kind,
        "ATTRIBUTES": attributes,
    }
    line = LINE
    for word, value in words.items():
        line = line.replace(word, value)
    text = TEXT + line + "  ROOT %out = bf16[1024,8192]{1,0} copy(%param)\n}\n"
    return find_collectives(text, mesh_of("4*v6e:2x2", data=2, fsdp=8))


@pytest.mark.parametrize(
    ("kind", "target", "sent", "got", "moved", "axes", "attributes"),
    [
        ("ALL_REDUCE", DATA, 4, 4, 4, ("data",), ""),
        ("ALL_GATHER", FSDP, 4, 8, 4, ("fsdp",), ""),
        ("REDUCE_SCATTER", FSDP, 8, 4, 4, ("fsdp",), ""),
        ("ALL_TO_ALL", FSDP, 4, 4, 2, ("fsdp",), ""),
        ("RAGGED_ALL_TO_ALL", FSDP, 4, 16, 2, ("fsdp",), RAGGED),
        ("RAGGED_ALL_TO_ALL", FSDP, 16, 4, 2, ("fsdp",), RAGGED),
        ("ONE_TO_ONE", "{{100000->300000},{300000->100000}}", 4, 4, 4, ("data",), ""),
        ("ALL_REDUCE", ALL, 4, 4, 6, ("data", "fsdp"), ""),
    ],
)
def test_reads_host_transfers_as_collectives(kind, target, sent, got, moved, axes, attributes):
    [one] = between(kind, target, sent, got, attributes)
    mesh = mesh_of("4*v6e:2x2", data=2, fsdp=8)
    assert one.between_slices and one.num_bytes == got * 16_384 and one.moved == moved * 16_384
    assert axes_of(one, mesh, partly=True) == axes
    [row] = summarize_traffic([one], mesh)
    assert (row.near_bytes, row.far_bytes) == (0, one.moved)


def test_rejects_unknown_transfer():
    with pytest.raises(ValueError, match="between slices of TPUs there is a BROADCAST"):
        between("BROADCAST", ALL, 4, 4)


def test_repeats_groups_for_every_slice():
    line = "  ROOT %g = bf16[4096,8192]{1,0} all-gather(%param), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}\n}\n"
    mesh = mesh_of("4*v6e:2x2", data=2, fsdp=8)
    [one] = find_collectives(TEXT + line, mesh)
    assert one.groups == tuple(tuple(range(i, i + 4)) for i in range(0, 16, 4))
    assert axes_of(one, mesh) == () and axes_of(one, mesh, partly=True) == ("fsdp",)
    [row] = summarize_traffic([one], mesh)
    assert (row.near_bytes, row.far_bytes) == (3 * 1024 * 16_384, 0)


def test_counts_asynchronous_gather_once():
    """libtpu lists it where it begins, where it continues and where it ends."""
    part = """%NAME (p: bf16[256,8]) -> bf16[1024,8] {
  %p = bf16[256,8]{1,0} parameter(0)
  %g = bf16[1024,8]{1,0} all-gather(%p), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %end = bf16[1024,8]{1,0} WHAT
}

"""
    begins = part.replace("NAME", "a").replace(
        "WHAT", 'custom-call(%g), custom_call_target="AsyncCollectiveStart"'
    )
    requires_checkpoint = part.replace("NAME", "b").replace("WHAT", "copy(%g)")
    ends = part.replace("NAME", "c").replace(
        "WHAT", 'custom-call(%g), custom_call_target="AsyncCollectiveDone"'
    )
    main = """ENTRY %main (p: bf16[256,8]) -> bf16[1024,8] {
  %p = bf16[256,8]{1,0} parameter(0)
  %x = bf16[1024,8]{1,0} fusion(%p), kind=kCustom, calls=%a
  %y = bf16[1024,8]{1,0} fusion(%p), kind=kOutput, calls=%b
  ROOT %z = bf16[1024,8]{1,0} fusion(%p), kind=kCustom, calls=%c
}
"""
    [one] = find_collectives(
        "HloModule m, num_partitions=4\n\n" + begins + requires_checkpoint + ends + main
    )
    assert (one.times, one.moved) == (1, math.prod((1024, 8, 2)) * 3 // 4)
