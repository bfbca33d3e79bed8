"""What is told of a program for a pod: bytes by kind, FLOPs, collectives, and the least time that its chips need."""

import collections
import dataclasses
import functools
import math
import resource
import tempfile
import time
from collections.abc import Sequence

import jax
import numpy as np

from glm5_jax.core.program_hash import program_hash
from glm5_jax.inference.serving_cost import BOUND, CLAIM, SERVED, TokenCost
from launch.buffers import (
    dumped,
    large_buffers,
    largest_allocations,
    needed_and_available,
    temporaries,
)
from launch.hlo import Collective, axes_of, collectives
from launch.pods import Pod
from launch.programs import Program, bytes_on_device, replicated
from launch.replication import replicated as whole_arrays
from pallas_kernels.cost import Cost

GB, GIB = 1e9, 2**30
OVERWEIGHT = (
    64e6  # bytes of a sum over devices inside a loop, above which a gradient was not scattered
)
SHAPES = "no topology"


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind along the same axes of the mesh.

    count: how many stand in the program; runs: how often they run in one step, loops multiplied out; near: bytes that a
    device sends in one step over the links of its chip (TPU) or of its host (GPU); far: those out of its slice of TPUs
    or its host of GPUs; largest: bytes of the largest result on a device.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    runs: int
    near: int
    far: int
    largest: int


@dataclasses.dataclass(frozen=True)
class Report:
    """One program. Bytes are those of one device, FLOPs those of one device and one step.

    held: by kind, of what goes in. kept: activations that a forward leaves to its backward (None: not known). model_flops:
    what the mathematics needs; parts: what the program's products take, recomputation among them. used_whole, replicated:
    weights while they are used, and arrays, that every device holds whole, above a GiB. cached: tokens that each row may
    have in pages; token_costs: of programs that serve, the least that tokens cost on chips of this kind. What follows is
    known of a compiled program alone. options: of XLA, that launchers set for the chip. temporaries: what lives in between,
    kept activations among them; of what the host's memory holds, on_host. not_reused: results that take no argument's place.
    code: the program itself. available: of the chip; usable: what of that JAX may take (None: all). seconds: the least that
    each resource needs, busy all the time: a bound, not a speed. utilisation: of the chip's peak by model_flops, if a step
    took no longer than that. largest: what takes most room, if it does not fit.
    """

    experiment: str
    program: str
    hash: str
    topology: str
    mesh: dict[str, int]
    batch: dict[str, int]
    held: dict[str, int]
    kept: int | None
    model_flops: float
    parts: dict[str, int]
    used_whole: dict[str, int]
    replicated: dict[str, int]
    lowering_seconds: float
    cached: int | None = None
    token_costs: tuple[TokenCost, ...] = ()
    options: dict[str, str | bool] = dataclasses.field(default_factory=dict)
    compiling_seconds: float | None = None
    compiler_gib: float | None = None
    temporaries: int | None = None
    on_host: int = 0
    not_reused: int = 0
    code: int = 0
    available: int | None = None
    usable: int | None = None
    traffic: tuple[Traffic, ...] = ()
    overweight: tuple[str, ...] = ()
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    utilisation: float | None = None
    largest: tuple[tuple[int, str], ...] = ()

    @property
    def used(self) -> int:
        """Bytes of a device, as far as they are known."""
        more = (self.temporaries or 0) + self.not_reused + self.code
        return sum(self.held.values()) + more

    @property
    def fits(self) -> bool | None:
        """None: not known, as nothing was compiled."""
        if self.available is None or self.temporaries is None:
            return None
        return self.used <= (self.usable or self.available)


def traffic(found: Sequence[Collective], mesh) -> tuple[Traffic, ...]:
    """All collectives of a program, those of one kind along the same axes together, most bytes first."""
    devices = list(mesh.devices.flat)
    tpu = devices[0].platform == "tpu"
    islands = tuple(
        (getattr(device, "slice_index", 0), *device.coords) if tpu else device.process_index
        for device in devices
    )
    groups = collections.defaultdict(list)
    for one in found:
        groups[one.kind, axes_of(one, mesh, partly=True)].append(one)
    rows = []
    for (kind, axes), own in groups.items():
        near = far = 0
        for one in own:
            times, out = one.times or 1, leaving(one, islands)
            if one.between_slices:
                far += times * one.moved
            elif tpu:
                near += times * out
            else:
                near, far = near + times * (one.moved - out), far + times * out
        often = sum(one.times or 1 for one in own)
        rows.append(
            Traffic(kind, axes, len(own), often, near, far, max(one.num_bytes for one in own))
        )
    return tuple(sorted(rows, key=lambda row: -(row.near + row.far)))


def filled(one: Collective, mesh, expert_slices: int, crossing: float) -> Collective:
    """With the rows that exist. Where tokens cross to each slice once and are dealt out inside (`model.dispatch`), operand
    and result of the first way have room for all tokens, of which a slice is sent the share `crossing`, and those of the
    second for what all slices may send, of which the experts of one take a share."""
    if expert_slices == 1 or one.kind != "ragged-all-to-all":
        return one
    places = np.unravel_index(np.array(one.groups[0]), tuple(mesh.shape.values()))
    expert = places[list(mesh.shape).index("expert")]
    # By where they are and not by how many: there may be as many slices as devices in one.
    if np.unique(expert // (mesh.shape["expert"] // expert_slices)).size > 1:
        return one._replace(moved=round(one.moved * crossing))
    return one._replace(moved=one.moved // expert_slices)


def leaving(one: Collective, islands: Sequence) -> int:
    """Bytes that a device sends out of its island, a chip or a host, at least; islands: of all devices of the mesh. Members
    of a group in the same island share what the others are sent, or send: each brings it in once."""
    return _leaving(one.kind, one.moved, one.groups, one.pairs, islands)


@functools.lru_cache(maxsize=256)  # programs repeat the same few lists of a thousand devices
def _leaving(kind, moved, groups, pairs, islands) -> int:
    if pairs:
        return moved if any(islands[a] != islands[b] for a, b in pairs) else 0
    n = max(map(len, groups))
    m = max(max(collections.Counter(islands[i] for i in group).values()) for group in groups)
    if n == m:
        return 0
    once = 1 if kind.endswith("all-to-all") else m
    return moved * (n - m) // ((n - 1) * once)


def bounds(least: Sequence[Cost], rows: Sequence[Traffic], pod: Pod) -> dict[str, float]:
    """Seconds that each resource of a device needs at least, at its peak all the time: products in their dtype (in that of
    bfloat16 where the chip has no rate of it), memory, links in a slice or host, and the network beyond it where it is
    published."""
    chip = pod.device
    near, far = (sum(getattr(row, where) for row in rows) for where in ("near", "far"))
    rate = chip.flops["bfloat16"]
    found = {
        "products": sum(cost.flops / chip.flops.get(cost.dtype, rate) for cost in least),
        "memory": sum(cost.bytes for cost in least) / chip.bandwidth,
        "links": near / (chip.link * chip.num_links),
    }
    if far and chip.network:
        found["network"] = far / chip.network
    return found


def overweight(found: Sequence[Collective]) -> tuple[str, ...]:
    """Sums over devices of whole gradients, layer by layer, where each device should get its part alone."""
    return tuple(
        f"all-reduce of {one.num_bytes / 1e6:.0f} MB, {one.times or 1} times"
        for one in found
        if one.kind == "all-reduce" and one.in_loop and one.num_bytes > OVERWEIGHT
    )


def report_of(
    experiment: str, topology: str, program: Program, mesh, pod: Pod | None, seconds: float
) -> tuple["Report", str | None]:
    """The report of a program, compiled if its topology has a compiler, and the compiled text.

    seconds: that lowering took. Where the compiler refuses a program as it does not fit, the report says so.
    """
    sizes, tokens = {} if mesh is None else dict(mesh.shape), program.rows * program.length
    known = {
        "experiment": experiment,
        "program": program.name,
        "hash": program_hash(program.lowered),
        "topology": topology,
        "mesh": sizes,
        "batch": {"rows": program.rows, "length": program.length, "tokens": tokens},
        "cached": program.cached,
        "held": {k: sum(bytes_on_device(part).values()) for k, part in program.arguments.items()},
        "kept": program.kept,
        "model_flops": program.model_flops,
        "parts": {name: flops for name, flops in program.parts.items() if flops},
        "used_whole": {path: size for path, size in program.used.items() if size > GIB},
        "replicated": {} if mesh is None else _above(replicated(program.arguments)),
        "lowering_seconds": seconds,
    }
    if program.token_costs is not None:
        known["token_costs"] = program.token_costs((pod.chip,) if pod else SERVED)
    if topology == SHAPES:
        return Report(**known), None
    began = time.monotonic()
    known["options"] = pod.options if pod else {}
    shortcuts = pod.shortcuts if pod else {}
    known["available"] = int(pod.device.memory) if pod and pod.device.memory else None
    known["usable"] = pod.usable if pod else None
    with tempfile.TemporaryDirectory() as folder:
        try:
            compiled = program.lowered.compile(
                compiler_options={**known["options"], **shortcuts, "xla_dump_to": folder}
            )
        except jax.errors.JaxRuntimeError as error:
            needed = needed_and_available(str(error))
            if needed is None:
                raise
            size, known["available"] = needed
            known["usable"] = None
            known["temporaries"] = size - sum(known["held"].values())
            largest = largest_allocations(str(error)) or _largest(folder)
            return Report(**known, largest=tuple(largest)), None
        text, memory = compiled.as_text(), compiled.memory_analysis()
        known["compiling_seconds"] = time.monotonic() - began
        known["compiler_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
        known |= _memory(memory, temporaries(folder))
        if Report(**known).fits is False:
            known["largest"] = tuple(_largest(folder))
    if mesh is not None:
        found = [
            filled(one, mesh, program.expert_slices, program.crossing)
            for one in collectives(text, mesh)
        ]
        known |= {"traffic": traffic(found, mesh), "overweight": overweight(found)}
        known["replicated"] |= {
            f"{one.where} {one.what}": one.num_bytes for one in whole_arrays(text, mesh, GIB)
        }
    if pod is not None:
        known["seconds"] = bounds(program.least, known["traffic"], pod)
        needed = program.model_flops / pod.device.flops["bfloat16"]
        known["utilisation"] = needed / max(known["seconds"].values())
    return Report(**known), text


def _memory(stats, temporaries: int | None) -> dict[str, int]:
    """Bytes of a compiled program; temporaries: as it was dumped (None: it came from jax's compilation cache)."""
    return {
        "temporaries": stats.temp_size_in_bytes if temporaries is None else temporaries,
        "on_host": stats.host_temp_size_in_bytes,
        "not_reused": stats.output_size_in_bytes - stats.alias_size_in_bytes,
        "code": stats.generated_code_size_in_bytes,
    }


def _largest(folder: str) -> list[tuple[int, str]]:
    """Of what was dumped there, what is in memory when it is fullest; none if nothing was."""
    try:
        text, ranges = dumped(folder)
    except FileNotFoundError:
        return []
    found = large_buffers(text, GIB // 4, ranges)
    return [(one.num_bytes, f"{one.what} {one.shape}") for one in found[:20]]


def _above(sizes: dict[str, int]) -> dict[str, int]:
    return {path: size for path, size in sizes.items() if size > GIB}


def _tera(count: float) -> str:
    return f"{count / 1e12:,.1f}" if count > 1e11 else f"{count / 1e12:.2g}"


def described(report: Report) -> str:
    """For people."""
    return "\n".join(_lines(report))


def _costs_of_tokens(costs: Sequence[TokenCost]):
    """Lines of the least that tokens cost."""
    what = "prompts read" if costs[0].stage == "prefill" else "sequences decoded"
    yield (
        f"  tokens       chip-seconds for a million, {costs[0].batch:,} {what} at once, in bf16 but for W4A8: {BOUND} ({CLAIM})"
    )
    for cost in costs:
        forms = ", ".join(f"{name} {seconds:,.0f}" for name, seconds in cost.totals.items())
        saved = "" if cost.saved is None else f": {cost.saved:.0%} less"
        yield f"    {cost.chip:<8}{cost.length:>9,} tokens each  {forms}{saved}"


def _lines(report: Report):
    size, batch = math.prod(report.mesh.values()), report.batch
    shape = ", ".join(f"{a} {n}" for a, n in report.mesh.items() if n > 1) or "one of each axis"
    yield f"{report.experiment}: {report.program} on {size:,} devices of {report.topology}, {shape}"
    behind = f", each with up to {report.cached:,} in its pages" if report.cached else ""
    yield (
        f"  batch        {batch['rows']:,} rows of {batch['length']:,} tokens, {batch['tokens'] / size:,.6g} tokens per device"
        + behind
    )
    yield f"  program      {report.hash}, lowered in {report.lowering_seconds:.0f} s"
    if report.compiling_seconds is not None:
        yield f"  compiled     in {report.compiling_seconds:.0f} s, {report.compiler_gib:.1f} GiB of memory"
    if report.options:
        yield (
            f"  options      {len(report.options)} of launch/xla_flags.py, which gke.py sets, and slurm.py and machines.py with --chip"
        )
    yield "  GB per device"
    for kind, count in report.held.items():
        yield f"    {kind:<24}{count / GB:8.3f}"
    if report.temporaries is not None:
        yield f"    {'temporaries':<24}{report.temporaries / GB:8.3f}"
    if report.kept is not None:
        among = "of them " if report.temporaries is not None else ""
        yield f"    {among + 'kept activations':<24}{report.kept / GB:8.3f}"
    for name in ("not_reused", "code", "on_host"):
        if getattr(report, name):
            what = {"not_reused": "results", "code": "program", "on_host": "(in the host's memory)"}
            yield f"    {what[name]:<24}{getattr(report, name) / GB:8.3f}"
    if report.fits is not None:
        share = report.used / report.available
        yield f"    {'together':<24}{report.used / GB:8.3f}  {share:.0%} of {report.available / GB:.2f}"
        if report.usable not in (None, report.available):
            yield f"    {'(JAX may take)':<24}{report.usable / GB:8.3f}"
    total = sum(report.parts.values())
    yield (
        f"  TFLOP        {_tera(report.model_flops)} that the mathematics needs of a device in a step"
        + (f", {_tera(total)} that the program takes" if total else "")
    )
    for name, flops in sorted(report.parts.items(), key=lambda part: -part[1]):
        yield f"    {name:<24}{_tera(flops):>10}  {flops / total:7.2%}"
    if report.seconds:
        bound = max(report.seconds.values())
        told = ", ".join(f"{name} {value:.2f}" for name, value in report.seconds.items())
        yield f"  bound        {bound:.2f} s a step, each resource busy all the time (a bound, not a speed): {told}"
        yield f"  utilisation  {report.utilisation:.0%} of the chips' bf16 peak by what the mathematics needs, at most"
    if report.token_costs:
        yield from _costs_of_tokens(report.token_costs)
    for row in report.traffic:
        along = " x ".join(row.axes) or "one device"
        yield (
            f"    {row.kind:<20}{along:<18}{row.count:>4} in the program, {row.runs:>7,} a step, "
            f"{row.near / GB:10.3f} GB sent near, {row.far / GB:8.3f} far, largest {row.largest / 1e6:,.1f} MB"
        )
    for line in report.overweight:
        yield f"  not scattered: {line}"
    if not report.replicated and report.mesh:
        yield "  whole on every device: no array above 1 GiB"
    for label, arrays in (
        ("whole on every device", report.replicated),
        ("whole while it is used", report.used_whole),
    ):
        for path, count in arrays.items():
            yield f"  {label}: {path}, {count / GIB:.2f} GiB"
    if report.fits is False:
        yield "  it does not fit; the largest buffers:"
        for count, what in report.largest:
            yield f"    {count / GB:8.3f} GB  {what}"
