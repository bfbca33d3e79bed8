"""Reading a compiled program: its collectives, what they move, and which of them stand in a loop."""

import math
import re
from typing import NamedTuple

import numpy as np

KINDS = (
    "ragged-all-to-all",
    "all-to-all",
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "collective-permute",
)

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_CALLED = re.compile(r"(?:body|condition|calls|to_apply)=%?([\w.\-]+)")
_CALLED_LIST = re.compile(r"(?:branch_computations|called_computations|calls)=\{([^}]*)\}")
_BODY = re.compile(r"(?:body|condition)=%?([\w.\-]+)")
_COLLECTIVE = re.compile(rf" = (.*?) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d*)(?:e\d+m\d+\w*)?\[([\d,]*)\]")
_LISTED = re.compile(r"replica_groups=\{\{(.*?)\}\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


class Collective(NamedTuple):
    """One collective operation: num_bytes of its result on one device; the groups of devices (in the
    order of the mesh) that take part together, () for a permutation. A loop counts once."""

    kind: str
    num_bytes: int
    in_loop: bool
    groups: tuple[tuple[int, ...], ...]


def collectives(hlo: str) -> list[Collective]:
    """All collectives of a compiled module's text (`compiled.as_text()`), in its order."""
    found, calls, loops, name = [], {}, set(), ""
    for line in hlo.splitlines():
        opened = _COMPUTATION.match(line)
        if opened:
            name = opened[1]
            continue
        loops.update(_BODY.findall(line))
        inner = calls.setdefault(name, set())
        inner.update(_CALLED.findall(line))
        for names in _CALLED_LIST.findall(line):
            inner.update(n.strip().lstrip("%") for n in names.split(","))
        match = _COLLECTIVE.search(line)
        if match:
            shape, kind, start = match.groups()
            found.append((name, kind, _size(shape, kind, bool(start)), line))
    inside = set()
    while loops - inside:
        inside |= loops
        loops = set().union(*(calls.get(name, ()) for name in inside))
    return [
        _collective(kind, size, _groups(line), at, at in inside) for at, kind, size, line in found
    ]


def _collective(kind, size, groups, computation, in_loop) -> Collective:
    # XLA:TPU writes its fused reduce-scatter as a computation of that name around an all-reduce.
    if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
        kind, size = "reduce-scatter", size // max(1, len(groups[0]) if groups else 1)
    return Collective(kind, size, in_loop, groups)


def _size(shape: str, kind: str, started: bool) -> int:
    """Bytes of a result: an array or a tuple of them."""
    sizes = []
    for dtype, dims in _ARRAY.findall(shape):
        bits = 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype) or 0)
        sizes.append(math.prod(int(d) for d in dims.split(",") if d) * bits // 8)
    if not started or kind == "all-reduce":
        return sum(sizes)
    # What is started returns its operands as well; the smaller side of a reduce-scatter is the result.
    return min(sizes) if kind == "reduce-scatter" else max(sizes)


def _groups(line: str) -> tuple[tuple[int, ...], ...]:
    listed, iota = _LISTED.search(line), _IOTA.search(line)
    if listed:
        return tuple(tuple(map(int, g.split(","))) for g in listed[1].split("},{"))
    if iota is None:
        return ()
    shape, dims, order = ([int(n) for n in (part or "").split(",") if n] for part in iota.groups())
    devices = np.arange(math.prod(dims)).reshape(dims).transpose(order or range(len(dims)))
    return tuple(map(tuple, devices.reshape(shape).tolist()))


def groups_along(mesh, *axes: str) -> tuple[tuple[int, ...], ...]:
    """The groups of a collective over these mesh axes, as `Collective.groups` has them, sorted."""
    ids = np.arange(math.prod(mesh.shape.values())).reshape(tuple(mesh.shape.values()))
    dims = [mesh.axis_names.index(a) for a in axes]
    rest = [d for d in range(ids.ndim) if d not in dims]
    size = math.prod(mesh.shape[a] for a in axes)
    return tuple(sorted(map(tuple, ids.transpose(rest + dims).reshape(-1, size).tolist())))
