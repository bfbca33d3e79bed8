"""The collectives of a compiled program: what they move, along which axes, and how often they run."""

import collections as containers
import functools
import math
import re
from typing import NamedTuple

import numpy as np

from launch.hlo_text import Instruction, Module, Runs, elements, parse, runs, shape_bytes

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

# What goes between slices of TPUs libtpu writes as what their hosts send and receive: the collective's kind, and of
# whom it is, as slices (from 1) x devices of one, or as 100,000 * slice + device.
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_MEETING = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_SLICES = re.compile(r'_xla_megascale_target="\{([\d,]+)\}x\{(\d+):(\d+)\}"')
_MEMBERS = re.compile(r"_xla_megascale_target=\{\{(.*?)\}\}")
_SLICE = 100_000


class Collective(NamedTuple):
    """One collective operation of a program, as one device runs it.

    num_bytes: of its result on one device, without padding.
    times: how often one execution of the program runs it, the product of the trip counts of the loops
        around it; None if a loop does not tell (then count it once).
    groups: the devices (in the order of the mesh) that take part together; () for a permutation.
    moved: bytes that one device sends into the network in one run, of n devices in a group
        all-gather          (n-1)/n of the result
        reduce-scatter      (n-1) times the result
        all-reduce          2(n-1)/n of the result: a reduce-scatter and an all-gather
        all-to-all          (n-1)/n of the result
        ragged-all-to-all   (n-1)/n of the smaller of operand and result: of rows that go to experts and come back one holds
                            those that exist, the other has room for the worst case; evenly, as it depends on the run
        collective-permute  the result
        which is what bandwidth-optimal algorithms send (Thakur, Rabenseifner, Gropp 2005, "Optimization of
        collective communication operations in MPICH"); a torus may route it over several links.
    pairs: (source, target) of a permutation.
    op_name: where jax made it, "jit(train)/while/body/psum"; "" if XLA made it.
    between_slices: whether the hosts of slices of TPUs carry it.
    """

    kind: str
    num_bytes: int
    times: int | None
    in_loop: bool
    groups: tuple[tuple[int, ...], ...]
    moved: int
    pairs: tuple[tuple[int, int], ...] = ()
    op_name: str = ""
    between_slices: bool = False


def collectives(hlo: str, mesh=None) -> list[Collective]:
    """All collectives of a compiled module's text (`compiled.as_text()`), in its order.

    The parts of an asynchronous collective count once, and so does a collective inside a fusion or in a
    computation that is started asynchronously. mesh: needed where it has several slices of TPUs, for each of which there
    is a program of its own. ValueError if the text is no module.
    """
    module = parse(hlo)
    often, starts = runs(module), _starts(module)
    found = (
        collective_of(module, at, i, often[at], mesh)
        for at, i in module.instructions()
        if "chain_id=" not in i.rest or at in starts
    )
    return [one for one in found if one]


def _starts(module: Module) -> set[str]:
    """The computations in which an asynchronous collective begins. libtpu writes one that goes on beside products, all with
    the same chain_id, into each of these and into the computation that ends it as well."""
    begun = 'custom_call_target="AsyncCollectiveStart"'
    return {at for at, instruction in module.instructions() if begun in instruction.rest}


def collective_of(
    module: Module, at: str, instruction: Instruction, often: Runs, mesh=None
) -> Collective | None:
    """The collective that an instruction of the computation `at` is; None if it is none."""
    if instruction.opcode == "recv":
        return _between_slices(module, at, instruction, often, mesh)
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
    sent = size
    if kind == "ragged-all-to-all":
        operand = module.computations[at].instructions[instruction.operands[0]]
        sent = min(size, operand.num_bytes)
    moved = _moved(kind, sent, n)
    return Collective(kind, size, *often, groups, moved, pairs, instruction.op_name)


def _between_slices(
    module: Module, at: str, received: Instruction, often: Runs, mesh
) -> Collective | None:
    """What the hosts of slices receive together; None if it is something else that a host sends."""
    transfer = _TRANSFER.search(received.rest)
    if transfer is None:
        return None
    kind = transfer[1].lower().replace("_", "-").replace("one-to-one", "collective-permute")
    if kind not in KINDS:
        raise ValueError(
            f"between slices of TPUs there is a {transfer[1]}, which is not known here"
        )
    members = _members(received.rest, mesh)
    groups, pairs = ((), members) if kind == "collective-permute" else (members, ())
    size = sent = shape_bytes(elements(received.shape)[0])
    if kind == "ragged-all-to-all":
        meeting = _MEETING.search(received.rest)[0]
        [rows] = (
            one
            for one in module.computations[at].instructions.values()
            if one.opcode == "send" and meeting in one.rest and 'operand_index="0"' in one.rest
        )
        sent = min(size, shape_bytes(elements(rows.shape)[0]))
    moved = _moved(kind, sent, max(map(len, members)))
    return Collective(kind, size, *often, groups, moved, pairs, received.op_name, True)


def _members(text: str, mesh) -> tuple[tuple[int, ...], ...]:
    """The groups of devices of a mesh, or their pairs, between which hosts send."""
    slices = _by_slice(mesh, True)
    if found := _SLICES.search(text):
        chosen, (first, last) = numbers(found[1]), map(int, found.group(2, 3))
        return tuple(tuple(slices[s - 1][d] for s in chosen) for d in range(first, last + 1))
    listed = _numbers(_MEMBERS.search(text)[1].replace("->", ","))
    return tuple(tuple(slices[n // _SLICE - 1][n % _SLICE] for n in group) for group in listed)


def _in_all_slices(groups: tuple[tuple[int, ...], ...], mesh) -> tuple[tuple[int, ...], ...]:
    """The groups of a slice's own devices, of each slice."""
    slices = _by_slice(mesh, False)
    return tuple(tuple(own[n] for n in group) for own in slices for group in groups)


@functools.lru_cache(maxsize=8)
def _by_slice(mesh, by_id: bool) -> tuple[tuple[int, ...], ...]:
    """The places in a mesh of the devices of each slice, in their order in the mesh, as a slice's program counts them, or
    in that of their ids, as what goes between slices has it."""
    slices = containers.defaultdict(list)
    for place, device in enumerate(mesh.devices.flat):
        slices[getattr(device, "slice_index", 0)].append((device.id if by_id else place, place))
    return tuple(tuple(place for _, place in sorted(own)) for _, own in sorted(slices.items()))


def _moved(kind: str, num_bytes: int, n: int) -> int:
    if kind == "collective-permute":
        return num_bytes
    if kind == "reduce-scatter":
        return (n - 1) * num_bytes
    return (2 if kind == "all-reduce" else 1) * num_bytes * (n - 1) // n


def _result_bytes(collective: Instruction) -> int:
    """Bytes of the result; what is started returns its operands as well, (operands, result, ...)."""
    parts = elements(collective.shape)
    started = collective.opcode.endswith("-start")
    if started and (parts[0].startswith("(") or collective.opcode != "all-reduce-start"):
        return shape_bytes(parts[1])
    return shape_bytes(collective.shape)


def _numbers(listed: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, part.split(","))) for part in listed.split("},{"))


def _pairs(text: str) -> tuple[tuple[int, int], ...]:
    listed = _PAIRS.search(text)
    return _numbers(listed[1]) if listed else ()


def _groups(text: str) -> tuple[tuple[int, ...], ...]:
    listed, iota = _LISTED.search(text), _IOTA.search(text)
    if listed:
        return _numbers(listed[1])
    if iota:
        return _iota_groups(*iota.groups())
    if named := _NAMED.search(text):
        return _named_groups(*named.groups())
    said = _GROUPS.search(text)
    if said and said[1] != "{}":
        raise ValueError(f"replica_groups={said[1]} is in a form that is not known here")
    return ()


def numbers(listed: str | None) -> list[int]:
    """The numbers of "2,4"; none of None."""
    return [int(n) for n in (listed or "").split(",") if n]


def iota(dims: list[int], order: list[int]) -> np.ndarray:
    """XLA's short form of a list of devices, `<=[dims]T(order)`."""
    return np.arange(math.prod(dims)).reshape(dims).transpose(order or range(len(dims)))


@functools.lru_cache(maxsize=256)  # programs repeat the same few lists of a thousand devices
def _iota_groups(*parts: str | None) -> tuple[tuple[int, ...], ...]:
    shape, dims, order = map(numbers, parts)
    return tuple(map(tuple, iota(dims, order).reshape(shape).tolist()))


@functools.lru_cache(maxsize=256)
def _named_groups(axes: str, dims: str | None, order: str | None, chosen: str):
    """Of XLA's form by the axes of a mesh: 'a'=2,'b'=4 are all; device_ids, if they are not in order, are those of `iota`;
    chosen are 'a', or 'b':(2)2 for the part of b that has 2 before it."""
    sizes = {name: int(size) for name, size, _, _ in _AXIS.findall(axes)}
    parts: dict[str, set[tuple[int, int]]] = {}
    for name, _, before, size in _AXIS.findall(chosen):
        part = (int(before), int(before) * int(size)) if size else (1, sizes[name])
        parts.setdefault(name, set()).add(part)
    shape, together = [], []
    for name, size in sizes.items():
        own = parts.get(name, set())
        cuts = sorted({1, size, *(cut for part in own for cut in part)})
        for begin, end in zip(cuts, cuts[1:]):
            if any(first <= begin and end <= last for first, last in own):
                together.append(len(shape))
            shape.append(end // begin)
    ids = iota(numbers(dims), numbers(order)) if dims else np.arange(math.prod(shape))
    apart = [dim for dim in range(len(shape)) if dim not in together]
    size = math.prod(shape[dim] for dim in together)
    return tuple(
        map(tuple, ids.reshape(shape).transpose(apart + together).reshape(-1, size).tolist())
    )


def groups_along(mesh, *axes: str) -> tuple[tuple[int, ...], ...]:
    """The groups of a collective over these mesh axes, as `Collective.groups` has them, sorted."""
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
    """The mesh axes along which a collective runs, in the order of the mesh.

    Of a permutation, the axes in which a source and its target differ. () if the groups are no product
    of axes, or of single devices. partly: also those of which a group has a part, such as the devices of a slice.
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
    together = np.array(pairs or (groups if partly else groups[:1]), int).T  # [members, groups]
    at = np.unravel_index(together, sizes)
    axes = tuple(name for name, index in zip(names, at) if (index != index[:1]).any())
    found = tuple(sorted(tuple(sorted(group)) for group in groups))
    return axes if pairs or partly or found == _groups_along(shape, axes) else ()
