"""Lists the buffers of a device's memory, for programs that fit and for programs that the compiler refuses."""

import pathlib
import re
from typing import NamedTuple

from launch.aot.hlo_text import (
    HloModule,
    InstructionRef,
    find_origin,
    parse_hlo,
    shape_bytes,
    tuple_elements,
)

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
# Memory spaces other than HBM: the host's, and VMEM and others of TPUs (whose layouts have tiles, T); 1 is a GPU's HBM.
_ELSEWHERE = re.compile(r"S\(5\)|T\(.*S\([1-9]\)")
# Allocations outside the device's main memory, such as VMEM and the host's, have a color in between and do not match.
_TEMPORARIES = re.compile(r"^allocation \d+: size (\d+), preallocated-temp:", re.M)
_NO_BUFFER = ("tuple", "get-tuple-element", "bitcast", "parameter", "while", "conditional", "call")


class DeviceBuffer(NamedTuple):
    """Array in a device's memory; what: op_name of the instruction that fills it, or XLA's name without one."""

    num_bytes: int
    what: str
    shape: str


def parse_allocations(error_text: str) -> list[tuple[int, str]]:
    """Returns (bytes, description) of the allocations that an out-of-memory error lists, largest first.

    error_text: message of jax's RESOURCE_EXHAUSTED error, of XLA:TPU at compilation ("Largest program allocations in hbm")
    or of XLA:GPU at run time ("Peak buffers"). Sizes have three digits. [] if it lists none, as with libtpu 0.0.42; use
    `large_buffers` on the compiler's dump then.
    """
    allocations = []
    for number, unit, text in _ALLOCATION.findall(error_text):
        named = (re.search(pattern, text) for pattern in _WHAT)
        what = next((match[1].strip() for match in named if match), "unknown")
        allocations.append((_bytes(number, unit), what))
    return sorted(allocations, reverse=True)


def parse_memory_error(error_text: str) -> tuple[int, int] | None:
    """Returns (bytes that the program needs, bytes of the device) of XLA:TPU's error; None: it has no such numbers.

    XLA:GPU compiles programs that do not fit, with a warning: compare `memory_analysis` instead.
    """
    for form in _REFUSED:
        match = form.search(error_text)
        if match:
            return _bytes(*match.group(1, 2)), _bytes(*match.group(3, 4))
    return None


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])


def temporary_bytes(directory) -> int | None:
    """Returns the bytes of temporaries on a device, of the program that `read_dump` returns; None: there is no dump.

    `memory_analysis` of XLA:TPU (libtpu 0.0.42) counts the gaps between these buffers twice: 62 GB where 41 are used.
    """
    files = list(pathlib.Path(directory).glob("*after_optimizations-buffer-assignment.txt"))
    if not files:
        return None
    text = max(files, key=lambda file: file.stat().st_size).read_text()
    return sum(map(int, _TEMPORARIES.findall(text)))


def read_dump(directory) -> tuple[str, str]:
    """Returns the text and the live ranges of a program compiled with {"xla_dump_to": directory}, for `large_buffers`.

    XLA also writes them for a program that it refuses. With several programs, the one with the longest text is returned.
    Raises FileNotFoundError if there are none; a program from jax's compilation cache is not compiled and not dumped.
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


def find_large_buffers(
    hlo: str, min_bytes: int, live_ranges: str | None = None
) -> list[DeviceBuffer]:
    """Returns the large arrays in the memory of a device that runs a compiled program, largest first.

    With `live_ranges` (`read_dump`) these are the arrays that are alive at peak memory, without padding. Without them, these
    are all arguments and results, whether or not they are alive at the same time, and equal ones count once; neither libtpu
    0.0.42 nor XLA:GPU exposes the assignment in `memory_analysis`.
    """
    module = parse_hlo(hlo)
    producers = {i.name: (at, i) for at, i in module.instructions()}
    loops = [i for _, i in module.instructions() if i.opcode == "while"]
    bodies = {at: loop.attribute("body") for loop in loops for _, at in loop.called()}
    buffers = []
    for name, path in (
        _peak_buffers(live_ranges) if live_ranges is not None else _all_buffers(module)
    ):
        at, instruction = producers[name]
        shape = instruction.shape
        for index in path:
            shape = tuple_elements(shape)[index]
        size = shape_bytes(shape)
        if size < min_bytes or shape.startswith("(") or _ELSEWHERE.search(shape):
            continue  # the buffer of a tuple is a table of addresses
        ref = InstructionRef(at, name)
        if instruction.opcode == "parameter" and at in bodies:
            ref = InstructionRef(bodies[at], module.computations[bodies[at]].root)
        what = _producer_op_name(module, ref, *path[:1]) or name
        buffers.append(DeviceBuffer(size, what, shape.partition("{")[0]))
    return sorted(buffers if live_ranges is not None else set(buffers), reverse=True)


def _peak_buffers(live_ranges: str) -> list[tuple[str, list[int]]]:
    peak = _PEAK.search(live_ranges)
    if peak is None:
        raise ValueError(
            f"no live ranges at the peak in {live_ranges[:80]!r}; give a *-live-range.txt"
        )
    return [(name, [int(i) for i in at.split(",") if i]) for name, at, _ in _LIVE.findall(peak[1])]


def _all_buffers(module: HloModule):
    """Yields (name, index in its tuple) of all arrays with a separate buffer."""
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
            yield from (
                (instruction.name, [i]) for i in range(len(tuple_elements(instruction.shape)))
            )


def _producer_op_name(module: HloModule, ref: InstructionRef, element: int | None = None) -> str:
    """Returns the op_name of the instruction that fills a buffer; for loop carries, of the one in the loop body."""
    at, name, _ = ref
    computation = module.computations[at].instructions
    instruction = computation[name]
    for user in computation.values():
        if user.opcode != "tuple" or f"%{name}" not in user.rest or name not in user.operands:
            continue
        for loop in computation.values():
            if loop.opcode == "while" and user.name in loop.operands:
                body = loop.attribute("body")
                root = InstructionRef(body, module.computations[body].root)
                written = _stored_op_name(module, root, user.operands.index(name))
                if written:
                    return written
    if instruction.opcode in ("fusion", "tuple"):
        return _stored_op_name(module, ref, element) or instruction.op_name
    if instruction.op_name or not instruction.operands:
        return instruction.op_name
    source = instruction.operands[0]
    return (
        f"{instruction.opcode} of {_producer_op_name(module, ref._replace(name=source)) or source}"
    )


def _stored_op_name(module: HloModule, ref: InstructionRef, element: int | None = None) -> str:
    """Returns the op_name of a value, for a stack that of the stored value; "" if it is only passed on."""
    ref, writer, _ = find_origin(module, ref, element)
    if writer.opcode != "dynamic-update-slice":
        return "" if writer.opcode == "parameter" else writer.op_name
    ref, stored, carried = find_origin(module, ref._replace(name=writer.operands[1]))
    # The stored value may itself be carried by the loop.
    if stored.opcode == "parameter" and carried is not None:
        root = InstructionRef(ref.at, module.computations[ref.at].root)
        _, stored, _ = find_origin(module, root, carried)
    return stored.op_name or writer.op_name
