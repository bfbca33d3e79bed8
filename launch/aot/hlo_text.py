"""Parses a compiled program (`compiled.as_text()`): its instructions, its calls, and the trip counts of its loops.

The text is the program of one device, with arrays already partitioned. Supported are the texts that jax 0.10 gets from
XLA:CPU, XLA:GPU and libtpu 0.0.42. The grammar is that of HloModule::ToString (openxla/xla, hlo/ir/hlo_module.cc).
"""

import collections
import math
import re
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(r"\b(body|condition|calls|to_apply|\w+_computation)=%?([\w.\-]+)")
_CALLED_LIST = re.compile(r"\b(branch_computations|called_computations|calls)=\{([^}]*)\}")
_NAME = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"\b([a-z]+\d*)(?:e\d+m\d+\w*)?\[([\d,<=]*)\]")
_TRIPS = re.compile(r'"?known_trip_count"?:\{"?n"?:"?(\d+)')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_DEVICES = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")


class HloInstruction(NamedTuple):
    """Line of the text: `ROOT %name = shape opcode(rest`, where rest has the operands and attributes."""

    name: str
    shape: str
    opcode: str
    rest: str

    @property
    def arguments(self) -> str:
        """Text between the parentheses of the operands."""
        depth = 1
        for match in re.finditer(r"[()]", self.rest):
            depth += 1 if match[0] == "(" else -1
            if depth == 0:
                return self.rest[: match.start()]
        return self.rest

    @property
    def operands(self) -> list[str]:
        return _NAME.findall(self.arguments)

    @property
    def op_name(self) -> str:
        """jax's name of the operation, such as "jit(train)/while/body/dot_general"; "" if XLA created it."""
        match = _OP_NAME.search(self.rest)
        return match[1] if match else ""

    @property
    def num_bytes(self) -> int:
        return shape_bytes(self.shape)

    def attribute(self, name: str) -> str:
        """Returns the value of the attribute `name`, or ""."""
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.rest)
        return match[1] if match else ""

    def called(self) -> list[tuple[str, str]]:
        """Returns (attribute, computation) of its calls; [] for the second half of an asynchronous pair."""
        if self.opcode.endswith(("-done", "-update")):
            return []
        listed = [
            (how, n) for how, names in _CALLED_LIST.findall(self.rest) for n in names.split(",")
        ]
        return _CALLED.findall(self.rest) + [(how, n.strip().lstrip("%")) for how, n in listed]


class HloComputation(NamedTuple):
    """Instructions of a computation by name, in the order of the schedule, and the name of its result."""

    instructions: dict[str, HloInstruction]
    root: str

    def parameters(self) -> list[HloInstruction]:
        """Returns the parameters in order."""
        instructions = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return sorted(instructions, key=lambda i: int(i.arguments))


class HloModule(NamedTuple):
    """Computations of a program by name, the name of its entry, and the number of devices that run it."""

    computations: dict[str, HloComputation]
    entry: str
    num_devices: int

    def instructions(self):
        """Yields (name of the computation, instruction) for the full program, in the order of the text."""
        for name, computation in self.computations.items():
            for instruction in computation.instructions.values():
                yield name, instruction


def parse_hlo(hlo: str) -> HloModule:
    """Parses the text of a module. Raises ValueError if it has no entry."""
    computations, entry, name, root, instructions = {}, "", "", "", {}
    for line in hlo.splitlines():
        if line.startswith("}"):
            computations[name] = HloComputation(instructions, root)
        elif not line.startswith(" "):
            header = _COMPUTATION.match(line)
            if header:
                name, root, instructions = header[2], "", {}
                entry = name if header[1] else entry
        else:
            match = _INSTRUCTION.match(line)
            if match:
                instructions[match[2]] = HloInstruction(
                    name=match[2], shape=match[3], opcode=match[4], rest=match[5]
                )
                root = match[2] if match[1] else root
    if not entry:
        raise ValueError(f"no ENTRY computation in {hlo[:80]!r}; give compiled.as_text()")
    header = hlo.partition("\n")[0]
    return HloModule(computations, entry, math.prod(map(int, _DEVICES.findall(header))))


def shape_bytes(shape: str) -> int:
    """Returns the bytes of an array's or a tuple's shape, without the padding of its layout."""
    total = 0
    for dtype, dims in _ARRAY.findall(shape):
        bits = 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype) or 0)
        total += -(-math.prod(int(d.lstrip("<=")) for d in dims.split(",") if d) * bits // 8)
    return total


def tuple_elements(shape: str) -> list[str]:
    """Returns the shapes of a tuple's elements, or [shape] for an array."""
    if not shape.startswith("("):
        return [shape]
    parts, depth, begin = [], 0, 1
    for at, char in enumerate(shape):
        depth += (char in "([{") - (char in ")]}")
        if (char == "," and depth == 1) or depth == 0:
            parts.append(re.sub(r"/\*.*?\*/", "", shape[begin:at]).strip())
            begin = at + 1
    return [part for part in parts if part]


class Runs(NamedTuple):
    """Executions of a computation in one run of the program; times None: a trip count is not known."""

    times: int | None
    in_loop: bool


def count_runs(module: HloModule) -> dict[str, Runs]:
    """Returns the executions of each computation: products of the trip counts around it, summed over its callers.

    Every branch of a conditional counts as taken. A computation without callers counts once.
    """
    callers = collections.defaultdict(list)
    for at, instruction in module.instructions():
        for how, name in instruction.called():
            trips = count_trips(module, at, instruction) if how in ("body", "condition") else 1
            trips = trips + 1 if how == "condition" and trips is not None else trips
            callers[name].append((at, trips, how in ("body", "condition")))
    runs_by_name = {}

    def count(name: str) -> Runs:
        if name not in runs_by_name:
            calls = [(count(at), trips, loop) for at, trips, loop in callers[name]]
            unknown = any(outer.times is None or trips is None for outer, trips, _ in calls)
            times = sum(outer.times * trips for outer, trips, _ in calls) if not unknown else None
            in_loop = any(loop or outer.in_loop for outer, _, loop in calls)
            runs_by_name[name] = Runs(times if calls else 1, in_loop)
        return runs_by_name[name]

    return {name: count(name) for name in module.computations}


class InstructionRef(NamedTuple):
    """Reference to an instruction.

    Attributes:
      at: name of its computation.
      name: name of the instruction.
      bindings: references that the parameters of the computation stand for; None: its parameter is a loop's state.
    """

    at: str
    name: str
    bindings: list | None = None


def count_trips(module: HloModule, at: str, loop: HloInstruction) -> int | None:
    """Returns the trip count of a while loop in the computation `at`.

    XLA may state it. Otherwise it follows from a condition that compares a counter with a constant, where the counter starts
    at a constant and grows by one. None: the loop has another form.
    """
    noted = _TRIPS.search(loop.rest)
    if noted:
        return int(noted[1])
    roots = {how: InstructionRef(c, module.computations[c].root) for how, c in loop.called()}
    test, compare, _ = find_origin(module, roots["condition"])
    if compare.opcode != "compare":
        return None
    linear_sides = (_linear(module, test._replace(name=name)) for name in compare.operands)
    sides = [side for side in linear_sides if side is not None]
    direction = compare.attribute("direction")
    if direction in ("GT", "GE"):
        direction, sides = {"GT": "LT", "GE": "LE"}[direction], sides[::-1]
    if len(sides) < 2 or direction not in ("LT", "LE", "NE"):
        return None
    ends = []
    for (index, offset), growth in zip(sides, (1, 0)):
        if index is not None:
            begin = _linear(module, InstructionRef(at, loop.operands[0]), index)
            if (
                _linear(module, roots["body"], index) != (index, growth)
                or not begin
                or begin[0] is not None
            ):
                return None
            offset += begin[1]
        elif growth:
            return None
        ends.append(offset)
    return max(0, ends[1] - ends[0] + (direction == "LE"))


def find_origin(module: HloModule, ref: InstructionRef, element: int | None = None):
    """Returns (reference, instruction, element) that produces a value, through copies, tuples and fusions."""
    while True:
        computation = module.computations[ref.at]
        instruction = computation.instructions[ref.name]
        if instruction.opcode in ("copy", "bitcast", "convert", "reshape"):
            ref = ref._replace(name=instruction.operands[0])
        elif instruction.opcode == "get-tuple-element" and element is None:
            ref, element = (
                ref._replace(name=instruction.operands[0]),
                int(instruction.attribute("index")),
            )
        elif instruction.opcode == "tuple" and element is not None:
            ref, element = ref._replace(name=instruction.operands[element]), None
        elif instruction.opcode in ("fusion", "call"):
            inner = instruction.called()[0][1]
            bindings = [ref._replace(name=name) for name in instruction.operands]
            ref = InstructionRef(inner, module.computations[inner].root, bindings)
        elif instruction.opcode == "parameter" and ref.bindings is not None:
            ref = ref.bindings[int(instruction.arguments)]
        else:
            return ref, instruction, element


def _linear(
    module: HloModule, ref: InstructionRef, element: int | None = None
) -> tuple[int | None, int] | None:
    """Returns (index, offset) of an integer: element `index` of the loop state (None: no element) plus a constant.

    None: the integer has another form.
    """
    ref, instruction, element = find_origin(module, ref, element)
    if instruction.opcode == "parameter" and element is not None:
        return element, 0
    if instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.arguments):
        return None, int(instruction.arguments)
    if instruction.opcode not in ("add", "subtract"):
        return None
    left, right = (_linear(module, ref._replace(name=name)) for name in instruction.operands)
    if not left or not right or None not in (left[0], right[0]):
        return None
    if instruction.opcode == "subtract":
        return None if right[0] is not None else (left[0], left[1] - right[1])
    return (right[0] if left[0] is None else left[0]), left[1] + right[1]
