"""What fills a device's memory: of a program that fits, and of one that the compiler refuses."""

import pathlib
import re
from typing import NamedTuple

from launch.hlo_text import Module, Place, elements, origin, parse, shape_bytes

_UNITS = {unit: 1024**power for power, unit in enumerate(("", "K", "M", "G", "T", "P", "E"))}
_SIZE = r"([\d.]+)([KMGTPE]?)i?B?"
_ALLOCATION = re.compile(rf"^\s*(?:\d+\. )?Size: {_SIZE}[ \t]*$(.*?)={{10,}}", re.M | re.S)
_WHAT = (r'op_name="((?:[^"\\]|\\.)*)"', r"XLA [lL]abel: (.*)", r"Subshape: (.*)", r"Shape: (.*)")
_REFUSED = (
    re.compile(rf"required for HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
    re.compile(rf"Requires {_SIZE}, has {_SIZE} available"),
)
_PEAK = re.compile(r"Live ranges at \d+ \(peak\):\n(.*?)(?:^  \S|\Z)", re.M | re.S)
_LIVE = re.compile(r"^\s+([\w.\-]+)\{([\d,]*)\}: (\d+) bytes", re.M)
# Not in HBM: what the host holds, and VMEM and the like of TPUs (whose layouts have tiles, T); 1 is HBM of a GPU.
_ELSEWHERE = re.compile(r"S\(5\)|T\(.*S\([1-9]\)")
# In other memories than the device's main one, such as VMEM and the host's, a color stands in between.
_TEMPORARIES = re.compile(r"^allocation \d+: size (\d+), preallocated-temp:", re.M)
_NO_BUFFER = ("tuple", "get-tuple-element", "bitcast", "parameter", "while", "conditional", "call")


class Buffer(NamedTuple):
    """An array in a device's memory. what: the op_name of what fills it, as jax calls it, else XLA's name."""

    num_bytes: int
    what: str
    shape: str


def largest_allocations(error_text: str) -> list[tuple[int, str]]:
    """(bytes, what) of the allocations that an error for want of memory lists, largest first.

    `error_text` is the message of jax's RESOURCE_EXHAUSTED error: of XLA:TPU while it compiles ("Largest
    program allocations in hbm") or of XLA:GPU while it runs ("Peak buffers"). Sizes have three digits.
    [] if it lists none: libtpu 0.0.42 does not, there `large_buffers` of the compiler's dump tells.
    """
    found = []
    for number, unit, text in _ALLOCATION.findall(error_text):
        named = (re.search(pattern, text) for pattern in _WHAT)
        what = next((match[1].strip() for match in named if match), "unknown")
        found.append((_bytes(number, unit), what))
    return sorted(found, reverse=True)


def needed_and_available(error_text: str) -> tuple[int, int] | None:
    """(bytes that the program needs, bytes of the device) of XLA:TPU's error; None if it says nothing of it.

    XLA:GPU compiles a program that does not fit, with a warning: compare `memory_analysis` instead.
    """
    for form in _REFUSED:
        found = form.search(error_text)
        if found:
            return _bytes(*found.group(1, 2)), _bytes(*found.group(3, 4))
    return None


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])


def temporaries(directory) -> int | None:
    """Bytes on a device of what lives between arguments and results of the program that `dumped` finds; None: not dumped.

    `memory_analysis` of XLA:TPU (libtpu 0.0.42) counts the gaps between these buffers twice: 62 GB where 41 are taken.
    """
    found = list(pathlib.Path(directory).glob("*after_optimizations-buffer-assignment.txt"))
    if not found:
        return None
    text = max(found, key=lambda file: file.stat().st_size).read_text()
    return sum(map(int, _TEMPORARIES.findall(text)))


def dumped(directory) -> tuple[str, str]:
    """The text and the live ranges of what was compiled with {"xla_dump_to": directory}, for `large_buffers`.

    XLA writes them for a program that it refuses as well. Of several programs, those of the longest text.
    FileNotFoundError if there are none: what jax takes from its compilation cache is not compiled.
    """
    ranges = list(pathlib.Path(directory).glob("*after_optimizations-live-range.txt"))
    if not ranges:
        raise FileNotFoundError(
            f"{directory} has no *after_optimizations-live-range.txt; compile with compiler_options="
            '{"xla_dump_to": directory} and without jax_enable_compilation_cache'
        )
    texts = {file.with_name(file.name.replace("-live-range", "")): file for file in ranges}
    text = max(texts, key=lambda file: file.stat().st_size)
    return text.read_text(), texts[text].read_text()


def large_buffers(hlo: str, at_least_bytes: int, live_ranges: str | None = None) -> list[Buffer]:
    """The large arrays in the memory of a device while it runs a compiled program, largest first.

    With `live_ranges` (`dumped`) those that are alive when memory is fullest, without padding: together
    they are what fills it. From the text alone all arguments and results, whether they are alive together
    or not, equal ones once; neither libtpu 0.0.42 nor XLA:GPU gives `memory_analysis` the assignment.
    """
    module = parse(hlo)
    made = {i.name: (at, i) for at, i in module.instructions()}
    loops = [i for _, i in module.instructions() if i.opcode == "while"]
    bodies = {at: loop.attribute("body") for loop in loops for _, at in loop.called()}
    found = []
    for name, element in _alive(live_ranges) if live_ranges is not None else _results(module):
        at, instruction = made[name]
        shape = instruction.shape
        for index in element:
            shape = elements(shape)[index]
        size = shape_bytes(shape)
        if size < at_least_bytes or shape.startswith("(") or _ELSEWHERE.search(shape):
            continue  # what stands for a tuple is a table of addresses
        place = Place(at, name)
        if instruction.opcode == "parameter" and at in bodies:
            place = Place(bodies[at], module.computations[bodies[at]].root)
        what = _filled_by(module, place, *element[:1]) or name
        found.append(Buffer(size, what, shape.partition("{")[0]))
    return sorted(found if live_ranges is not None else set(found), reverse=True)


def _alive(live_ranges: str) -> list[tuple[str, list[int]]]:
    peak = _PEAK.search(live_ranges)
    if peak is None:
        raise ValueError(
            f"no live ranges at the peak in {live_ranges[:80]!r}; give a *-live-range.txt"
        )
    return [(name, [int(i) for i in at.split(",") if i]) for name, at, _ in _LIVE.findall(peak[1])]


def _results(module: Module):
    """(name, index in its tuple) of all arrays that have a buffer of their own."""
    fused = {c for _, i in module.instructions() if i.opcode == "fusion" for _, c in i.called()}
    for at, instruction in module.instructions():
        code = instruction.opcode
        entered = code == "parameter" and at == module.entry
        if (
            at in fused
            or (code in _NO_BUFFER and not entered)
            or code.endswith(("-start", "-update"))
        ):
            continue
        if not instruction.shape.startswith("("):
            yield instruction.name, []
        else:
            yield from ((instruction.name, [i]) for i in range(len(elements(instruction.shape))))


def _filled_by(module: Module, place: Place, element: int | None = None) -> str:
    """The op_name of what is in a buffer: of what the loop that carries it writes there, else of its own."""
    at, name, _ = place
    computation = module.computations[at].instructions
    own = computation[name]
    for user in computation.values():
        if user.opcode != "tuple" or f"%{name}" not in user.rest or name not in user.operands:
            continue
        for loop in computation.values():
            if loop.opcode == "while" and user.name in loop.operands:
                body = loop.attribute("body")
                root = Place(body, module.computations[body].root)
                written = _written(module, root, user.operands.index(name))
                if written:
                    return written
    if own.opcode in ("fusion", "tuple"):
        return _written(module, place, element) or own.op_name
    if own.op_name or not own.operands:
        return own.op_name
    source = own.operands[0]
    return f"{own.opcode} of {_filled_by(module, place._replace(name=source)) or source}"


def _written(module: Module, place: Place, element: int | None = None) -> str:
    """The op_name of a value, of a stack the one of what is put there; "" if it is only passed on."""
    place, writer, _ = origin(module, place, element)
    if writer.opcode != "dynamic-update-slice":
        return "" if writer.opcode == "parameter" else writer.op_name
    place, stored, carried = origin(module, place._replace(name=writer.operands[1]))
    if (
        stored.opcode == "parameter" and carried is not None
    ):  # what the loop carries is kept as well
        root = Place(place.at, module.computations[place.at].root)
        _, stored, _ = origin(module, root, carried)
    return stored.op_name or writer.op_name
