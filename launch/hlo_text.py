"""Reading a compiled program (`compiled.as_text()`): its instructions, what calls what, how often loops run.

The text is that of one device: XLA has cut every array already. Read so far: what jax 0.10 gets from XLA:CPU,
XLA:GPU and libtpu 0.0.42. The grammar is that of HloModule::ToString (openxla/xla, hlo/ir/hlo_module.cc).
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


class Instruction(NamedTuple):
    """One line: `ROOT %name = shape opcode(rest`, where rest holds operands and attributes."""

    name: str
    shape: str
    opcode: str
    rest: str

    @property
    def arguments(self) -> str:
        """What stands between the parentheses."""
        depth = 1
        for found in re.finditer(r"[()]", self.rest):
            depth += 1 if found[0] == "(" else -1
            if depth == 0:
                return self.rest[: found.start()]
        return self.rest

    @property
    def operands(self) -> list[str]:
        return _NAME.findall(self.arguments)

    @property
    def op_name(self) -> str:
        """Where jax made it: "jit(train)/while/body/dot_general"; "" if XLA made it."""
        found = _OP_NAME.search(self.rest)
        return found[1] if found else ""

    @property
    def num_bytes(self) -> int:
        return shape_bytes(self.shape)

    def attribute(self, name: str) -> str:
        """The word behind `name=`, or ""."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.rest)
        return found[1] if found else ""

    def called(self) -> list[tuple[str, str]]:
        """(how, computation) of all that it calls; nothing for the second half of an asynchronous pair."""
        if self.opcode.endswith(("-done", "-update")):
            return []
        listed = [
            (how, n) for how, names in _CALLED_LIST.findall(self.rest) for n in names.split(",")
        ]
        return _CALLED.findall(self.rest) + [(how, n.strip().lstrip("%")) for how, n in listed]


class Computation(NamedTuple):
    """Its instructions by name, in their order (that of the schedule), and the name of its result."""

    instructions: dict[str, Instruction]
    root: str

    def parameters(self) -> list[Instruction]:
        """In their order."""
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return sorted(found, key=lambda i: int(i.arguments))


class Module(NamedTuple):
    """A program's computations by name, the name of its entry, and the devices that run it."""

    computations: dict[str, Computation]
    entry: str
    num_devices: int

    def instructions(self):
        """(computation's name, instruction) of the whole program, in the text's order."""
        for name, computation in self.computations.items():
            for instruction in computation.instructions.values():
                yield name, instruction


def parse(hlo: str) -> Module:
    """A module's text; ValueError if it has no entry."""
    computations, entry, name, root, found = {}, "", "", "", {}
    for line in hlo.splitlines():
        if line.startswith("}"):
            computations[name] = Computation(found, root)
        elif not line.startswith(" "):
            opened = _COMPUTATION.match(line)
            if opened:
                name, root, found = opened[2], "", {}
                entry = name if opened[1] else entry
        else:
            match = _INSTRUCTION.match(line)
            if match:
                found[match[2]] = Instruction(*match.group(2, 3, 4, 5))
                root = match[2] if match[1] else root
    if not entry:
        raise ValueError(f"no ENTRY computation in {hlo[:80]!r}; give compiled.as_text()")
    header = hlo.partition("\n")[0]
    return Module(computations, entry, math.prod(map(int, _DEVICES.findall(header))))


def shape_bytes(shape: str) -> int:
    """Bytes of an array's or a tuple's shape, without the padding of its layout."""
    total = 0
    for dtype, dims in _ARRAY.findall(shape):
        bits = 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype) or 0)
        total += -(-math.prod(int(d.lstrip("<=")) for d in dims.split(",") if d) * bits // 8)
    return total


def elements(shape: str) -> list[str]:
    """The shapes of a tuple's elements; [shape] of an array."""
    if not shape.startswith("("):
        return [shape]
    found, depth, begin = [], 0, 1
    for at, char in enumerate(shape):
        depth += (char in "([{") - (char in ")]}")
        if (char == "," and depth == 1) or depth == 0:
            found.append(re.sub(r"/\*.*?\*/", "", shape[begin:at]).strip())
            begin = at + 1
    return [part for part in found if part]


class Runs(NamedTuple):
    """How often one execution of the program runs a computation; times is None if a loop does not tell."""

    times: int | None
    in_loop: bool


def runs(module: Module) -> dict[str, Runs]:
    """Per computation: the product of the trip counts of the loops around it, added up over its callers.

    Every branch of a conditional counts as taken. A computation that nothing calls counts once.
    """
    callers = collections.defaultdict(list)
    for at, instruction in module.instructions():
        for how, name in instruction.called():
            trips = trip_count(module, at, instruction) if how in ("body", "condition") else 1
            trips = trips + 1 if how == "condition" and trips is not None else trips
            callers[name].append((at, trips, how in ("body", "condition")))
    known = {}

    def count(name: str) -> Runs:
        if name not in known:
            calls = [(count(at), trips, loop) for at, trips, loop in callers[name]]
            unknown = any(outer.times is None or trips is None for outer, trips, _ in calls)
            times = sum(outer.times * trips for outer, trips, _ in calls) if not unknown else None
            in_loop = any(loop or outer.in_loop for outer, _, loop in calls)
            known[name] = Runs(times if calls else 1, in_loop)
        return known[name]

    return {name: count(name) for name in module.computations}


class Place(NamedTuple):
    """An instruction in a computation whose parameters stand for other places, or (None) for a loop's state."""

    at: str
    name: str
    bindings: list | None = None


def trip_count(module: Module, at: str, loop: Instruction) -> int | None:
    """How often a while loop in the computation `at` runs its body.

    XLA notes it; otherwise it follows from a condition that compares a counter, which begins with a
    constant and grows by one, with a constant. None if the loop has another form.
    """
    noted = _TRIPS.search(loop.rest)
    if noted:
        return int(noted[1])
    roots = {how: Place(c, module.computations[c].root) for how, c in loop.called()}
    test, compare, _ = origin(module, roots["condition"])
    if compare.opcode != "compare":
        return None
    sides = [_linear(module, test._replace(name=name)) for name in compare.operands]
    direction = compare.attribute("direction")
    if direction in ("GT", "GE"):
        direction, sides = {"GT": "LT", "GE": "LE"}[direction], sides[::-1]
    if None in sides or direction not in ("LT", "LE", "NE"):
        return None
    ends = []
    for (index, offset), growth in zip(sides, (1, 0)):
        if index is not None:
            begin = _linear(module, Place(at, loop.operands[0]), index)
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


def origin(module: Module, place: Place, element: int | None = None):
    """(place, instruction, element) where a value is made, behind copies, tuples and the walls of fusions."""
    while True:
        computation = module.computations[place.at]
        made = computation.instructions[place.name]
        if made.opcode in ("copy", "bitcast", "convert", "reshape"):
            place = place._replace(name=made.operands[0])
        elif made.opcode == "get-tuple-element" and element is None:
            place, element = place._replace(name=made.operands[0]), int(made.attribute("index"))
        elif made.opcode == "tuple" and element is not None:
            place, element = place._replace(name=made.operands[element]), None
        elif made.opcode in ("fusion", "call"):
            inner = made.called()[0][1]
            given = [place._replace(name=name) for name in made.operands]
            place = Place(inner, module.computations[inner].root, given)
        elif made.opcode == "parameter" and place.bindings is not None:
            place = place.bindings[int(made.arguments)]
        else:
            return place, made, element


def _linear(
    module: Module, place: Place, element: int | None = None
) -> tuple[int | None, int] | None:
    """(index, offset) of an integer that is the loop state's element `index` (None: nothing) plus a constant."""
    place, made, element = origin(module, place, element)
    if made.opcode == "parameter" and element is not None:
        return element, 0
    if made.opcode == "constant" and re.fullmatch(r"-?\d+", made.arguments):
        return None, int(made.arguments)
    if made.opcode not in ("add", "subtract"):
        return None
    left, right = (_linear(module, place._replace(name=name)) for name in made.operands)
    if not left or not right or None not in (left[0], right[0]):
        return None
    if made.opcode == "subtract":
        return None if right[0] is not None else (left[0], left[1] - right[1])
    return (right[0] if left[0] is None else left[0]), left[1] + right[1]
