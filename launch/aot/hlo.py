"""Finds the collectives of a compiled program: their bytes, their mesh axes, and how often they run."""

import collections
import functools
import math
import re
from typing import NamedTuple

import numpy as np

from launch.aot.hlo_text import (
    HloInstruction,
    HloModule,
    Runs,
    count_runs,
    parse_hlo,
    shape_bytes,
    tuple_elements,
)

KINDS = (
    "ragged-all-to-all",
    "all-to-all",
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "collective-permute",
)

_LISTED = re.compile(r"replica_groups=\{\{(.*?)\}\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(
    r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{(.*?)\}"
)
_AXIS = re.compile(r"'(\w+)'(?:=(\d+)|:\((\d+)\)(\d+))?")
_GROUPS = re.compile(r"replica_groups=(\S+?)(?:,\s|,?$)", re.M)
_PAIRS = re.compile(r"source_target_pairs=\{\{(.*?)\}\}")

# libtpu writes a collective between TPU slices as send and receive of their hosts. The attributes have its kind and its
# members, as slices (from 1) x devices of a slice, or as 100,000 * slice + device.
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_SLICES = re.compile(r'_xla_megascale_target="\{([\d,]+)\}x\{(\d+):(\d+)\}"')
_MEMBERS = re.compile(r"_xla_megascale_target=\{\{(.*?)\}\}")
_SLICE = 100_000


class Collective(NamedTuple):
    """Collective operation of a program, on one device.

    Attributes:
      kind: one of `KINDS`.
      num_bytes: bytes of its result on one device, without padding.
      times: executions in one run of the program, the product of the trip counts of the loops around it; None: a trip
        count is not known (count it once).
      in_loop: whether it is inside a loop.
      groups: groups of devices, by position in the mesh; () for a permutation.
      moved: bytes that one device sends in one execution, in groups of n devices:
        all-gather          (n-1)/n of the result
        reduce-scatter      (n-1) times the result
        all-reduce          2(n-1)/n of the result: a reduce-scatter and an all-gather
        all-to-all          (n-1)/n of the result
        ragged-all-to-all   (n-1)/n of the smaller of operand and result: in an expert exchange one holds the existing rows,
                            the other has room for the worst case; an even distribution is assumed, as it depends on the
                            run
        collective-permute  the result
        Bandwidth-optimal algorithms send this much (Thakur, Rabenseifner, Gropp 2005, "Optimization of collective
        communication operations in MPICH"); a torus may route it over several links.
      pairs: (source, target) of a permutation.
      op_name: jax's name of the operation, such as "jit(train)/while/body/psum"; "" if XLA created it.
      between_slices: whether the hosts of TPU slices carry it.
    """

    kind: str
    num_bytes: int
    times: int | None
    in_loop: bool
    groups: tuple[tuple[int, ...], ...]
    moved: int
    pairs: tuple[tuple[int, ...], ...] = ()
    op_name: str = ""
    between_slices: bool = False


def find_collectives(hlo: str, mesh=None) -> list[Collective]:
    """Returns all collectives of a compiled module's text (`compiled.as_text()`), in its order.

    The parts of an asynchronous collective count once, as does a collective inside a fusion or in a computation that is
    started asynchronously.

    mesh: needed for several TPU slices, because each slice has a separate program. Raises ValueError for invalid text.
    """
    module = parse_hlo(hlo)
    run_counts, starts = count_runs(module), _start_computations(module)
    matches = (
        collective_of(module, at, i, run_counts[at], mesh)
        for at, i in module.instructions()
        if "chain_id=" not in i.rest or at in starts
    )
    return [collective for collective in matches if collective]


def _start_computations(module: HloModule) -> set[str]:
    """Returns the computations in which an asynchronous collective starts.

    libtpu repeats a collective that overlaps with matrix products, with one chain_id, in each of these computations and in
    the one that ends it.
    """
    begun = 'custom_call_target="AsyncCollectiveStart"'
    return {at for at, instruction in module.instructions() if begun in instruction.rest}


def collective_of(
    module: HloModule, at: str, instruction: HloInstruction, runs: Runs, mesh=None
) -> Collective | None:
    """Returns the collective of an instruction in the computation `at`; None: it is not a collective."""
    if instruction.opcode == "recv":
        return _between_slices(module, at, instruction, runs, mesh)
    kind = instruction.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    groups, pairs = _groups(instruction.rest), _pairs(instruction.rest)
    if not groups and kind != "collective-permute":  # XLA writes {} for all devices
        groups = (tuple(range(module.num_devices)),)
    if mesh is not None and module.num_devices < mesh.size:
        groups, pairs = _in_all_slices(groups, mesh), _in_all_slices(pairs, mesh)
    size, n = _result_bytes(instruction), max(map(len, groups), default=1)
    # XLA:TPU writes its fused reduce-scatter as a computation of that name around an all-reduce.
    if kind == "all-reduce" and at.startswith("all-reduce-scatter"):
        kind, size = "reduce-scatter", size // n
    sent_bytes = size
    if kind == "ragged-all-to-all":
        operand = module.computations[at].instructions[instruction.operands[0]]
        sent_bytes = min(size, operand.num_bytes)
    moved = _moved_bytes(kind, sent_bytes, n)
    return Collective(
        kind=kind,
        num_bytes=size,
        times=runs.times,
        in_loop=runs.in_loop,
        groups=groups,
        moved=moved,
        pairs=pairs,
        op_name=instruction.op_name,
    )


def _between_slices(
    module: HloModule, at: str, received: HloInstruction, runs: Runs, mesh
) -> Collective | None:
    """Returns the collective between slices of a receive instruction; None: it is another transfer of a host."""
    transfer = _TRANSFER.search(received.rest)
    if transfer is None:
        return None
    kind = transfer[1].lower().replace("_", "-").replace("one-to-one", "collective-permute")
    if kind not in KINDS:
        raise ValueError(f"between slices of TPUs there is a {transfer[1]}, which is not supported")
    members = _members(received.rest, mesh)
    groups, pairs = ((), members) if kind == "collective-permute" else (members, ())
    size = sent_bytes = shape_bytes(tuple_elements(received.shape)[0])
    if kind == "ragged-all-to-all":
        rendezvous = _RENDEZVOUS.search(received.rest)
        if rendezvous is None:
            raise ValueError(f"{received.name} names no rendezvous of hosts: {received.rest}")
        [rows] = (
            send
            for send in module.computations[at].instructions.values()
            if send.opcode == "send"
            and rendezvous[0] in send.rest
            and 'operand_index="0"' in send.rest
        )
        sent_bytes = min(size, shape_bytes(tuple_elements(rows.shape)[0]))
    moved = _moved_bytes(kind, sent_bytes, max(map(len, members)))
    return Collective(
        kind=kind,
        num_bytes=size,
        times=runs.times,
        in_loop=runs.in_loop,
        groups=groups,
        moved=moved,
        pairs=pairs,
        op_name=received.op_name,
        between_slices=True,
    )


def _members(text: str, mesh) -> tuple[tuple[int, ...], ...]:
    """Returns the groups, or pairs, of mesh devices between which hosts transfer data."""
    slices = _by_slice(mesh, True)
    if match := _SLICES.search(text):
        chosen, (first, last) = parse_numbers(match[1]), map(int, match.group(2, 3))
        return tuple(tuple(slices[s - 1][d] for s in chosen) for d in range(first, last + 1))
    listed = _MEMBERS.search(text)
    if listed is None:
        raise ValueError(f"a transfer between slices names no members: {text}")
    groups = _numbers(listed[1].replace("->", ","))
    return tuple(tuple(slices[n // _SLICE - 1][n % _SLICE] for n in group) for group in groups)


def _in_all_slices(groups: tuple[tuple[int, ...], ...], mesh) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of one slice's devices, repeated for each slice with positions in the mesh."""
    slices = _by_slice(mesh, False)
    return tuple(
        tuple(slice_devices[n] for n in group) for slice_devices in slices for group in groups
    )


@functools.lru_cache(maxsize=8)
def _by_slice(mesh, by_id: bool) -> tuple[tuple[int, ...], ...]:
    """Returns the positions in a mesh of the devices of each slice.

    by_id: order by device id, as in collectives between slices; False: mesh order, as in a slice's program.
    """
    slices = collections.defaultdict(list)
    for index, device in enumerate(mesh.devices.flat):
        slices[getattr(device, "slice_index", 0)].append((device.id if by_id else index, index))
    return tuple(
        tuple(index for _, index in sorted(members)) for _, members in sorted(slices.items())
    )


def _moved_bytes(kind: str, num_bytes: int, n: int) -> int:
    if kind == "collective-permute":
        return num_bytes
    if kind == "reduce-scatter":
        return (n - 1) * num_bytes
    return (2 if kind == "all-reduce" else 1) * num_bytes * (n - 1) // n


def _result_bytes(collective: HloInstruction) -> int:
    """Returns the bytes of the result. A -start instruction returns (operands, result, ...)."""
    parts = tuple_elements(collective.shape)
    started = collective.opcode.endswith("-start")
    if started and (parts[0].startswith("(") or collective.opcode != "all-reduce-start"):
        return shape_bytes(parts[1])
    return shape_bytes(collective.shape)


def _numbers(listed: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, part.split(","))) for part in listed.split("},{"))


def _pairs(text: str) -> tuple[tuple[int, ...], ...]:
    listed = _PAIRS.search(text)
    return _numbers(listed[1]) if listed else ()


def _groups(text: str) -> tuple[tuple[int, ...], ...]:
    listed, iota_form = _LISTED.search(text), _IOTA.search(text)
    if listed:
        return _numbers(listed[1])
    if iota_form:
        return _iota_groups(*iota_form.groups())
    if named := _NAMED.search(text):
        return _named_groups(*named.groups())
    match = _GROUPS.search(text)
    if match and match[1] != "{}":
        raise ValueError(f"replica_groups={match[1]} has an unsupported form")
    return ()


def parse_numbers(listed: str | None) -> list[int]:
    """Returns the numbers of a text such as "2,4"; [] for None."""
    return [int(n) for n in (listed or "").split(",") if n]


def expand_iota(dims: list[int], order: list[int]) -> np.ndarray:
    """Returns the device ids of XLA's short form `<=[dims]T(order)`."""
    return np.arange(math.prod(dims)).reshape(dims).transpose(order or range(len(dims)))


@functools.lru_cache(maxsize=256)  # programs repeat the same few lists of a thousand devices
def _iota_groups(*parts: str | None) -> tuple[tuple[int, ...], ...]:
    shape, dims, order = map(parse_numbers, parts)
    return tuple(map(tuple, expand_iota(dims, order).reshape(shape).tolist()))


@functools.lru_cache(maxsize=256)
def _named_groups(axes: str, dims: str | None, order: str | None, chosen: str):
    """Returns the groups of XLA's form by mesh axes.

    axes: all axes, such as 'a'=2,'b'=4. dims, order: device ids as in `expand_iota`; None: in order.
    chosen: axes of the groups: 'a', or 'b':(2)2 for the factor of b with 2 before it.
    """
    sizes = {name: int(size) for name, size, _, _ in _AXIS.findall(axes)}
    parts: dict[str, set[tuple[int, int]]] = {}
    for name, _, before, size in _AXIS.findall(chosen):
        part = (int(before), int(before) * int(size)) if size else (1, sizes[name])
        parts.setdefault(name, set()).add(part)
    shape, group_dims = [], []
    for name, size in sizes.items():
        named_parts = parts.get(name, set())
        cuts = sorted({1, size, *(cut for part in named_parts for cut in part)})
        for begin, end in zip(cuts, cuts[1:]):
            if any(first <= begin and end <= last for first, last in named_parts):
                group_dims.append(len(shape))
            shape.append(end // begin)
    ids = (
        expand_iota(parse_numbers(dims), parse_numbers(order))
        if dims
        else np.arange(math.prod(shape))
    )
    other_dims = [dim for dim in range(len(shape)) if dim not in group_dims]
    size = math.prod(shape[dim] for dim in group_dims)
    return tuple(
        map(tuple, ids.reshape(shape).transpose(other_dims + group_dims).reshape(-1, size).tolist())
    )


def groups_along(mesh, *axes: str) -> tuple[tuple[int, ...], ...]:
    """Returns the sorted groups of a collective over these mesh axes, as in `Collective.groups`."""
    return _groups_along(tuple(mesh.shape.items()), axes)


@functools.lru_cache(maxsize=256)
def _groups_along(shape: tuple[tuple[str, int], ...], axes) -> tuple[tuple[int, ...], ...]:
    names, sizes = zip(*shape)
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    dims = [names.index(a) for a in axes]
    rest = [d for d in range(ids.ndim) if d not in dims]
    size = math.prod(sizes[d] for d in dims)
    return tuple(sorted(map(tuple, ids.transpose(rest + dims).reshape(-1, size).tolist())))


def axes_of(collective: Collective, mesh, partly: bool = False) -> tuple[str, ...]:
    """Returns the mesh axes along which a collective runs, in mesh order.

    For a permutation these are the axes in which a source and its target differ. () if the groups are not a product of
    axes, or have single devices.

    partly: also return axes of which a group has a part, such as the devices of a slice.
    """
    return _axes(collective.groups, collective.pairs, tuple(mesh.shape.items()), partly)


@functools.lru_cache(maxsize=256)
def _axes(groups, pairs, shape: tuple[tuple[str, int], ...], partly: bool) -> tuple[str, ...]:
    names, sizes = zip(*shape)
    last = max((max(members) for members in pairs or groups), default=0)
    if last >= math.prod(sizes):
        raise ValueError(
            f"a collective of device {last} and a mesh of {math.prod(sizes)} devices; "
            "give the mesh that the program was compiled for"
        )
    members = np.array(pairs or (groups if partly else groups[:1]), int).T  # [members, groups]
    coordinates = np.unravel_index(members, sizes)
    axes = tuple(name for name, index in zip(names, coordinates) if (index != index[:1]).any())
    sorted_groups = tuple(sorted(tuple(sorted(group)) for group in groups))
    return axes if pairs or partly or sorted_groups == _groups_along(shape, axes) else ()
