"""Which arrays of a compiled program every device holds as a whole."""

import functools
import operator
import re
from typing import NamedTuple

import numpy as np

from launch.hlo import axes_of, collective_of, iota, numbers
from launch.hlo_text import Instruction, Module, Place, Runs, elements, origin, parse, shape_bytes

GIB = 2**30

_SHARDING = re.compile(
    r"\bsharding=\{(?:(?P<whole>replicated)\}|devices=\[(?P<tiles>[\d,]+)\]"
    r"(?:<=\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?|(?P<listed>[\d,]+))"
    r"(?P<copies> last_tile_dim_replicate)?\})"
)
_DIFFERENT = ("partition-id", "replica-id", "infeed", "recv", "rng", "rng-get-and-update-state")
_THROUGH = ("copy", "optimization-barrier")
_CALLS = ("fusion", "call", "async-start", "fusion-start", "call-start")


class Replicated(NamedTuple):
    """An array that is the same on every device. where: "parameter", "output" or "loop" (carried by one)."""

    num_bytes: int
    where: str
    what: str


def replicated(hlo: str, mesh, at_least_bytes: int = GIB) -> list[Replicated]:
    """The parameters, outputs and values carried by loops that every device holds as a whole, largest first.

    The text of a compiled program is cut already: its shapes are those of one device, and only the
    entry's parameters keep a sharding. The rest follows from these and from the collectives, much as in
    XLA's HloReplicationAnalysis: each value has the mesh axes along which it may differ. A parameter
    differs along the axes that cut it, a result along those of its operands; an all-gather or all-reduce
    takes its axes away, other collectives add theirs; the number of a device differs along all. A value
    without such an axis is the same, and so the whole array, on every device.

    Everything listed is replicated. Not everything replicated is listed: not what comes from the number
    of a device, from a parameter without a sharding, or from groups that are no product of axes.
    """
    module = parse(hlo)
    flow, entry = _Flow(module, mesh), module.computations[module.entry]
    given = {p.name: flow.of_sharding(p.rest) for p in entry.parameters()}
    root, result = entry.instructions[entry.root], flow.run(module.entry, tuple(given.values()))
    found = [("parameter", module.entry, entry.instructions[n], v) for n, v in given.items()]
    found += [("output", module.entry, root, result)]
    found += [("loop", at, loop, state) for (at, _), (loop, state) in flow.loops.items()]
    outer = {loop.attribute("body"): (at, loop) for (at, _), (loop, _) in flow.loops.items()}
    out = {}
    for where, at, made, value in found:
        shapes = elements(made.shape)
        parts = value if isinstance(value, tuple) else (value,) * len(shapes)
        for i, (shape, differs) in enumerate(zip(shapes, parts)):
            size = shape_bytes(shape)
            if _join(differs) == 0 and size >= at_least_bytes:
                out[Replicated(size, where, _source(module, outer, at, made, i))] = None
    return sorted(out, reverse=True)


def _source(module: Module, outer: dict, at: str, made: Instruction, element: int) -> str:
    """Where a value comes from, in jax's words if it has them; out of all loops that only carry it."""
    name, index = made.name, element if made.shape.startswith("(") else None
    if made.opcode == "while":
        name = made.operands[0]
    while True:
        (at, *_), source, index = origin(module, Place(at, name), index)
        if source.opcode != "parameter" or index is None or at not in outer:
            return source.op_name or made.op_name or source.name
        at, loop = outer[at]
        name = loop.operands[0]


def _join(value) -> int:
    """All axes along which some part of a value may differ."""
    return (
        functools.reduce(operator.or_, map(_join, value), 0) if isinstance(value, tuple) else value
    )


def _either(one, other):
    if isinstance(one, tuple) and isinstance(other, tuple):
        return tuple(map(_either, one, other))
    return _join(one) | _join(other)


def _spread(value, more: int):
    return tuple(_spread(v, more) for v in value) if isinstance(value, tuple) else value | more


class _Flow:
    """The axes, as bits, along which values may differ; of a tuple, a tuple of them."""

    def __init__(self, module: Module, mesh):
        self.module, self.mesh = module, mesh
        self.bits = {a: 1 << i for i, (a, n) in enumerate(mesh.shape.items()) if n > 1}
        self.all = sum(self.bits.values())
        self.loops, self.known = {}, {}

    def run(self, name: str, arguments: tuple):
        """The value of a computation's root."""
        if (name, arguments) not in self.known:
            computation, values = self.module.computations[name], {}
            for instruction in computation.instructions.values():
                given = [values[operand] for operand in instruction.operands]
                values[instruction.name] = self.value(name, instruction, given, arguments)
            self.known[name, arguments] = values[computation.root]
        return self.known[name, arguments]

    def value(self, at: str, made: Instruction, given: list, arguments: tuple):
        code = made.opcode
        if code == "parameter":
            return arguments[int(made.arguments)]
        if code == "tuple":
            return tuple(given)
        if code == "get-tuple-element" and isinstance(given[0], tuple):
            return given[0][int(made.attribute("index"))]
        if code.endswith(("-done", "-update")) or code in _THROUGH:
            return given[0]
        if code in _DIFFERENT:
            return self.all
        if code == "while":
            return self.loop(at, made, given[0])
        if code in _CALLS:
            return self.run(made.called()[0][1], tuple(given))
        if code == "conditional":
            branches = [self.run(c, (v,)) for (_, c), v in zip(made.called(), given[1:])]
            return _spread(functools.reduce(_either, branches), _join(given[0]))
        one = collective_of(self.module, at, made, Runs(1, False), self.mesh)
        if one is None:
            return _join(tuple(given))
        axes = sum(self.bits[axis] for axis in axes_of(one, self.mesh))
        if one.between_slices:  # its operand is another instruction's, which may differ in any way
            given = [self.all]
        if one.kind not in ("all-gather", "all-reduce"):
            alone = (
                all(len(group) == 1 for group in one.groups) and one.kind != "collective-permute"
            )
            return _join(tuple(given)) | (axes if axes or alone else self.all)
        equal = tuple(_join(value) & ~axes for value in given)
        return equal if len(equal) > 1 else equal[0]

    def loop(self, at: str, made: Instruction, state):
        """The state of a while loop, whatever number of times it has run."""
        condition, body = made.attribute("condition"), made.attribute("body")
        while True:
            after = _either(state, self.run(body, (state,)))
            after = _spread(after, _join(self.run(condition, (after,))))
            if after == state:
                break
            state = after
        known = self.loops.get((at, made.name), (made, state))[1]
        self.loops[at, made.name] = made, _either(known, state)
        return state

    def of_sharding(self, text: str) -> int:
        """The axes that cut a parameter; all of them where the text has no sharding."""
        found = _SHARDING.search(text)
        if found is None:
            return self.all
        if found["whole"]:
            return 0
        tiles = numbers(found["tiles"])
        devices = iota(numbers(found["dims"]), numbers(found["order"])).ravel()
        if found["listed"]:
            devices = np.array(numbers(found["listed"]))
        tile = np.empty(len(devices), int)
        tile[devices] = np.arange(len(devices)) // (tiles[-1] if found["copies"] else 1)
        tile = tile.reshape(tuple(self.mesh.shape.values()))
        cut = (np.diff(tile, axis=i).any() for i in range(tile.ndim))
        return sum(self.bits.get(axis, 0) for axis, differs in zip(self.mesh.shape, cut) if differs)
