"""Finds the arrays of a compiled program that are replicated on every device."""

import functools
import operator
import re
from typing import NamedTuple

import numpy as np

from launch.aot.hlo import axes_of, collective_of, expand_iota, parse_numbers
from launch.aot.hlo_text import (
    HloInstruction,
    HloModule,
    InstructionRef,
    Runs,
    find_origin,
    parse_hlo,
    shape_bytes,
    tuple_elements,
)

GIB = 2**30

_SHARDING = re.compile(
    r"\bsharding=\{(?:(?P<full>replicated)\}|devices=\[(?P<tiles>[\d,]+)\]"
    r"(?:<=\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?|(?P<listed>[\d,]+))"
    r"(?P<copies> last_tile_dim_replicate)?\})"
)
_DIFFERENT = ("partition-id", "replica-id", "infeed", "recv", "rng", "rng-get-and-update-state")
_THROUGH = ("copy", "optimization-barrier")
_CALLS = ("fusion", "call", "async-start", "fusion-start", "call-start")


class Replicated(NamedTuple):
    """Array that is the same on every device; where: "parameter", "output" or "loop" (carried by a loop)."""

    num_bytes: int
    where: str
    what: str


def find_replicated(hlo: str, mesh, min_bytes: int = GIB) -> list[Replicated]:
    """Returns the replicated parameters, outputs and loop-carried values, largest first.

    The text of a compiled program is already partitioned: its shapes are those of one device, and only the entry's
    parameters have a sharding. The rest follows from these and from the collectives, similar to XLA's
    HloReplicationAnalysis. Each value has a set of mesh axes along which it may differ:
    - A parameter differs along the axes that shard it, and a result along those of its operands.
    - An all-gather or all-reduce removes its axes; other collectives add theirs.
    - The id of a device differs along all axes.
    A value without such an axis is the same on every device, which therefore has the full array.

    Every listed array is replicated, but the list may be incomplete. Arrays are missed that depend on a device id, on a
    parameter without a sharding, or on groups that are not a product of axes.
    """
    module = parse_hlo(hlo)
    flow, entry = _Flow(module, mesh), module.computations[module.entry]
    parameters = {p.name: flow.of_sharding(p.rest) for p in entry.parameters()}
    result = flow.run(module.entry, tuple(parameters.values()))
    root = entry.instructions[entry.root]
    candidates = [
        ("parameter", module.entry, entry.instructions[n], v) for n, v in parameters.items()
    ]
    candidates += [("output", module.entry, root, result)]
    candidates += [("loop", at, loop, state) for (at, _), (loop, state) in flow.loops.items()]
    outer = {loop.attribute("body"): (at, loop) for (at, _), (loop, _) in flow.loops.items()}
    arrays = {}
    for where, at, instruction, value in candidates:
        shapes = tuple_elements(instruction.shape)
        parts = value if isinstance(value, tuple) else (value,) * len(shapes)
        for i, (shape, differs) in enumerate(zip(shapes, parts)):
            size = shape_bytes(shape)
            if _join(differs) == 0 and size >= min_bytes:
                arrays[Replicated(size, where, _source(module, outer, at, instruction, i))] = None
    return sorted(arrays, reverse=True)


def _source(
    module: HloModule, outer: dict, at: str, instruction: HloInstruction, element: int
) -> str:
    """Returns the op_name, or else the XLA name, of the producer of a value, outside of loops that only carry it."""
    name, index = instruction.name, element if instruction.shape.startswith("(") else None
    if instruction.opcode == "while":
        name = instruction.operands[0]
    while True:
        (at, *_), source, index = find_origin(module, InstructionRef(at, name), index)
        if source.opcode != "parameter" or index is None or at not in outer:
            return source.op_name or instruction.op_name or source.name
        at, loop = outer[at]
        name = loop.operands[0]


def _join(value) -> int:
    """Returns all axes along which some part of a value may differ."""
    return (
        functools.reduce(operator.or_, map(_join, value), 0) if isinstance(value, tuple) else value
    )


def _either(first, second):
    if isinstance(first, tuple) and isinstance(second, tuple):
        return tuple(map(_either, first, second))
    return _join(first) | _join(second)


def _spread(value, more: int):
    return tuple(_spread(v, more) for v in value) if isinstance(value, tuple) else value | more


class _Flow:
    """Data flow of the axes, as bits, along which values may differ; the value of a tuple is a tuple of axes."""

    def __init__(self, module: HloModule, mesh):
        self.module, self.mesh = module, mesh
        self.bits = {a: 1 << i for i, (a, n) in enumerate(mesh.shape.items()) if n > 1}
        self.all = sum(self.bits.values())
        self.loops, self.known = {}, {}

    def run(self, name: str, arguments: tuple):
        """Returns the axes of a computation's root."""
        if (name, arguments) not in self.known:
            computation, values = self.module.computations[name], {}
            for instruction in computation.instructions.values():
                operands = [values[operand] for operand in instruction.operands]
                values[instruction.name] = self.value(name, instruction, operands, arguments)
            self.known[name, arguments] = values[computation.root]
        return self.known[name, arguments]

    def value(self, at: str, instruction: HloInstruction, operands: list, arguments: tuple):
        code = instruction.opcode
        if code == "parameter":
            return arguments[int(instruction.arguments)]
        if code == "tuple":
            return tuple(operands)
        if code == "get-tuple-element" and isinstance(operands[0], tuple):
            return operands[0][int(instruction.attribute("index"))]
        if code.endswith(("-done", "-update")) or code in _THROUGH:
            return operands[0]
        if code in _DIFFERENT:
            return self.all
        if code == "while":
            return self.loop(at, instruction, operands[0])
        if code in _CALLS:
            return self.run(instruction.called()[0][1], tuple(operands))
        if code == "conditional":
            branches = [self.run(c, (v,)) for (_, c), v in zip(instruction.called(), operands[1:])]
            return _spread(functools.reduce(_either, branches), _join(operands[0]))
        collective = collective_of(self.module, at, instruction, Runs(1, False), self.mesh)
        if collective is None:
            return _join(tuple(operands))
        axes = sum(self.bits[axis] for axis in axes_of(collective, self.mesh))
        # Its operand is that of another instruction, which may differ along all axes.
        if collective.between_slices:
            operands = [self.all]
        if collective.kind not in ("all-gather", "all-reduce"):
            is_single = (
                all(len(group) == 1 for group in collective.groups)
                and collective.kind != "collective-permute"
            )
            return _join(tuple(operands)) | (axes if axes or is_single else self.all)
        equal = tuple(_join(value) & ~axes for value in operands)
        return equal[0] if len(equal) == 1 else equal

    def loop(self, at: str, instruction: HloInstruction, state):
        """Returns the axes of a while loop's state after any number of iterations."""
        condition, body = instruction.attribute("condition"), instruction.attribute("body")
        while True:
            after = _either(state, self.run(body, (state,)))
            after = _spread(after, _join(self.run(condition, (after,))))
            if after == state:
                break
            state = after
        previous = self.loops.get((at, instruction.name), (instruction, state))[1]
        self.loops[at, instruction.name] = instruction, _either(previous, state)
        return state

    def of_sharding(self, text: str) -> int:
        """Returns the axes that shard a parameter; all axes if the text has no sharding."""
        match = _SHARDING.search(text)
        if match is None:
            return self.all
        if match["full"]:
            return 0
        tiles = parse_numbers(match["tiles"])
        devices = expand_iota(parse_numbers(match["dims"]), parse_numbers(match["order"])).ravel()
        if match["listed"]:
            devices = np.array(parse_numbers(match["listed"]))
        tile = np.empty(len(devices), int)
        tile[devices] = np.arange(len(devices)) // (tiles[-1] if match["copies"] else 1)
        tile = tile.reshape(tuple(self.mesh.shape.values()))
        cut = (np.diff(tile, axis=i).any() for i in range(tile.ndim))
        return sum(self.bits.get(axis, 0) for axis, differs in zip(self.mesh.shape, cut) if differs)
