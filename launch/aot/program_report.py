"""Reports a program for a pod: bytes by kind, FLOPs, collectives, and the minimum time on its chips."""

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

from glm5_jax.inference.serving_cost import BOUND, CLAIM, SERVED, TokenCost
from glm5_jax.parallel.program_hash import program_hash
from launch.aot.buffers import (
    find_large_buffers,
    parse_allocations,
    parse_memory_error,
    read_dump,
    temporary_bytes,
)
from launch.aot.hlo import Collective, axes_of, find_collectives
from launch.aot.programs import Program, bytes_on_device, replicated_bytes
from launch.aot.replication import find_replicated
from launch.pods import Pod
from pallas_kernels.cost import Cost

GB, GIB = 1e9, 2**30
# Bytes of an all-reduce inside a loop, above which it is a gradient that was not scattered.
OVERWEIGHT = 64e6
SHAPES = "no topology"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Collectives of one kind along the same axes of the mesh.

    Attributes:
      kind: kind of the collectives.
      axes: mesh axes along which they run.
      count: number of collectives in the program.
      runs: executions in one step, with the trip counts of loops.
      near_bytes: bytes that a device sends in one step over the links of its chip (TPU) or inside its host (GPU).
      far_bytes: bytes that a device sends in one step out of its TPU slice or GPU host.
      largest_bytes: bytes of the largest result on a device.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    runs: int
    near_bytes: int
    far_bytes: int
    largest_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Report of one program. Bytes are those of one device, FLOPs those of one device and one step.

    The attributes from compiling_seconds on, and options, are known only for a compiled program.

    Attributes:
      experiment: name of the experiment.
      program: name of the program.
      hash: hash of the lowered program.
      topology: name of the pod, `SHAPES` without one.
      mesh: sizes of the mesh axes.
      batch: rows, length of a row, and tokens of a batch.
      argument_bytes: bytes of the arguments, by kind.
      saved_activation_bytes: activations that a forward saves for its backward; None: not known.
      model_flops: FLOPs that the mathematics needs.
      parts: FLOPs of the program's matrix products, recomputation included, by part.
      gathered_weight_bytes: weights above a GiB that are unsharded on a device while they are used, by path.
      replicated: arrays above a GiB that every device holds in full.
      lowering_seconds: time of the lowering.
      max_cached_tokens: tokens that each row may have in pages; None: no cache.
      token_costs: minimum costs of tokens on chips of this kind, of programs that serve.
      options: XLA options that launchers set for the chip.
      compiling_seconds: time of the compilation.
      compiler_gib: peak memory of the compiler's process, in GiB.
      temporary_bytes: bytes that live between arguments and results, saved activations included.
      host_bytes: temporaries in the host's memory.
      unaliased_result_bytes: bytes of results that are not written into an argument's buffer.
      code_bytes: bytes of the program.
      available_bytes: memory of the chip.
      usable_bytes: share of it that JAX may use, in bytes; None: all.
      traffic: collectives by kind and axes.
      overweight: gradients that are all-reduced in full, one line each.
      seconds: minimum time of each resource, busy all the time: a bound, not a speed.
      utilisation: model_flops as a share of the chip's peak, if a step took only the bound.
      largest_buffers: (bytes, description) of the largest buffers, if the program does not fit.
    """

    experiment: str
    program: str
    hash: str
    topology: str
    mesh: dict[str, int]
    batch: dict[str, int]
    argument_bytes: dict[str, int]
    saved_activation_bytes: int | None
    model_flops: float
    parts: dict[str, int]
    gathered_weight_bytes: dict[str, int]
    replicated: dict[str, int]
    lowering_seconds: float
    max_cached_tokens: int | None = None
    token_costs: tuple[TokenCost, ...] = ()
    options: dict[str, str | bool] = dataclasses.field(default_factory=dict)
    compiling_seconds: float | None = None
    compiler_gib: float | None = None
    temporary_bytes: int | None = None
    host_bytes: int = 0
    unaliased_result_bytes: int = 0
    code_bytes: int = 0
    available_bytes: int | None = None
    usable_bytes: int | None = None
    traffic: tuple[Traffic, ...] = ()
    overweight: tuple[str, ...] = ()
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    utilisation: float | None = None
    largest_buffers: tuple[tuple[int, str], ...] = ()

    @property
    def used_bytes(self) -> int:
        """Bytes used on a device, without parts that are not known."""
        more = (self.temporary_bytes or 0) + self.unaliased_result_bytes + self.code_bytes
        return sum(self.argument_bytes.values()) + more

    @property
    def fits(self) -> bool | None:
        """Whether the program fits the device; None: not known, because nothing was compiled."""
        if self.available_bytes is None or self.temporary_bytes is None:
            return None
        return self.used_bytes <= (self.usable_bytes or self.available_bytes)


def summarize_traffic(collectives: Sequence[Collective], mesh) -> tuple[Traffic, ...]:
    """Groups the collectives of a program by kind and axes, sorted by bytes in descending order."""
    devices = list(mesh.devices.flat)
    tpu = devices[0].platform == "tpu"
    islands = tuple(
        (getattr(device, "slice_index", 0), *device.coords) if tpu else device.process_index
        for device in devices
    )
    by_kind_and_axes = collections.defaultdict(list)
    for collective in collectives:
        by_kind_and_axes[collective.kind, axes_of(collective, mesh, partly=True)].append(collective)
    rows = []
    for (kind, axes), members in by_kind_and_axes.items():
        near = far = 0
        for collective in members:
            times, out = collective.times or 1, leaving_bytes(collective, islands)
            if collective.between_slices:
                far += times * collective.moved
            elif tpu:
                near += times * out
            else:
                near, far = near + times * (collective.moved - out), far + times * out
        runs = sum(collective.times or 1 for collective in members)
        rows.append(
            Traffic(
                kind=kind,
                axes=axes,
                count=len(members),
                runs=runs,
                near_bytes=near,
                far_bytes=far,
                largest_bytes=max(collective.num_bytes for collective in members),
            )
        )
    return tuple(sorted(rows, key=lambda row: -(row.near_bytes + row.far_bytes)))


def scale_to_existing_rows(
    collective: Collective, mesh, expert_slices: int, crossing: float
) -> Collective:
    """Scales the bytes of an expert exchange from the room in its buffers to the rows that exist.

    With expert slices, each token crosses to a slice once and is distributed inside it (`model.expert_dispatch`). The buffers
    of the first exchange have room for all tokens, and a slice receives the share `crossing`. Those of the second have room
    for the tokens of all slices, and the experts of one slice receive one share.
    """
    if expert_slices == 1 or collective.kind != "ragged-all-to-all":
        return collective
    coordinates = np.unravel_index(np.array(collective.groups[0]), tuple(mesh.shape.values()))
    expert = coordinates[list(mesh.shape).index("expert")]
    # Compared by position, not by size, because the number of slices may equal the devices in one.
    if np.unique(expert // (mesh.shape["expert"] // expert_slices)).size > 1:
        return collective._replace(moved=round(collective.moved * crossing))
    return collective._replace(moved=collective.moved // expert_slices)


def leaving_bytes(collective: Collective, islands: Sequence) -> int:
    """Returns the minimum bytes that a device sends out of its island, which is a chip or a host.

    islands: island of each device of the mesh. Members of a group in the same island share the data that others send or
    receive, so it crosses the border once.
    """
    return _leaving_bytes(
        collective.kind, collective.moved, collective.groups, collective.pairs, islands
    )


@functools.lru_cache(maxsize=256)  # programs repeat the same few lists of a thousand devices
def _leaving_bytes(kind, moved, groups, pairs, islands) -> int:
    if pairs:
        return moved if any(islands[a] != islands[b] for a, b in pairs) else 0
    group_size = max(map(len, groups))
    max_members = max(
        max(collections.Counter(islands[i] for i in group).values()) for group in groups
    )
    if group_size == max_members:
        return 0
    copies = 1 if kind.endswith("all-to-all") else max_members
    return moved * (group_size - max_members) // ((group_size - 1) * copies)


def time_bounds(min_costs: Sequence[Cost], rows: Sequence[Traffic], pod: Pod) -> dict[str, float]:
    """Returns the minimum seconds of each resource of a device, at its peak all the time.

    The resources are: matrix products in their dtype (at the bfloat16 rate if the chip has none for it), memory, links in a
    slice or host, and the network outside it if its speed is published.
    """
    chip = pod.device
    near, far = (sum(getattr(row, where) for row in rows) for where in ("near_bytes", "far_bytes"))
    rate = chip.flops["bfloat16"]
    seconds = {
        "products": sum(cost.flops / chip.flops.get(cost.dtype, rate) for cost in min_costs),
        "memory": sum(cost.bytes for cost in min_costs) / chip.bandwidth,
        "links": near / (chip.link * chip.num_links),
    }
    if far and chip.network:
        seconds["network"] = far / chip.network
    return seconds


def find_overweight(collectives: Sequence[Collective]) -> tuple[str, ...]:
    """Returns the all-reduces of full gradients in loops over layers, where each device needs only its shard."""
    return tuple(
        f"all-reduce of {collective.num_bytes / 1e6:.0f} MB, {collective.times or 1} times"
        for collective in collectives
        if collective.kind == "all-reduce"
        and collective.in_loop
        and collective.num_bytes > OVERWEIGHT
    )


def report_of(
    experiment: str, topology: str, program: Program, mesh, pod: Pod | None, lowering_seconds: float
) -> tuple["Report", str | None]:
    """Compiles a program if its topology has a compiler. Returns its report and the compiled text (None: not compiled).

    lowering_seconds: time of the lowering. If the compiler refuses a program that does not fit, the report has its size.
    """
    # From the lowered program.
    sizes, tokens = {} if mesh is None else dict(mesh.shape), program.rows * program.length
    fields = {
        "experiment": experiment,
        "program": program.name,
        "hash": program_hash(program.lowered),
        "topology": topology,
        "mesh": sizes,
        "batch": {"rows": program.rows, "length": program.length, "tokens": tokens},
        "max_cached_tokens": program.max_cached_tokens,
        "argument_bytes": {
            k: sum(bytes_on_device(part).values()) for k, part in program.arguments.items()
        },
        "saved_activation_bytes": program.saved_activation_bytes,
        "model_flops": program.model_flops,
        "parts": {name: flops for name, flops in program.parts.items() if flops},
        "gathered_weight_bytes": _above(program.weight_bytes),
        "replicated": {} if mesh is None else _above(replicated_bytes(program.arguments)),
        "lowering_seconds": lowering_seconds,
    }
    if program.token_costs is not None:
        fields["token_costs"] = program.token_costs((pod.chip,) if pod else SERVED)
    if topology == SHAPES:
        return Report(**fields), None
    # From the compiled program, or from the error of a compiler that refuses it.
    compile_start = time.monotonic()
    fields["options"] = pod.options if pod else {}
    shortcuts = pod.shortcuts if pod else {}
    fields["available_bytes"] = int(pod.device.memory) if pod and pod.device.memory else None
    fields["usable_bytes"] = pod.usable_bytes if pod else None
    with tempfile.TemporaryDirectory() as folder:
        try:
            compiled = program.lowered.compile(
                compiler_options={**fields["options"], **shortcuts, "xla_dump_to": folder}
            )
        except jax.errors.JaxRuntimeError as error:
            limits = parse_memory_error(str(error))
            if limits is None:
                raise
            needed_bytes, fields["available_bytes"] = limits
            fields["usable_bytes"] = None
            fields["temporary_bytes"] = needed_bytes - sum(fields["argument_bytes"].values())
            largest = parse_allocations(str(error)) or _find_largest_buffers(folder)
            return Report(**fields, largest_buffers=tuple(largest)), None
        text, memory = compiled.as_text() or "", compiled.memory_analysis()
        fields["compiling_seconds"] = time.monotonic() - compile_start
        fields["compiler_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
        fields |= _memory(memory, temporary_bytes(folder))
        if Report(**fields).fits is False:
            fields["largest_buffers"] = tuple(_find_largest_buffers(folder))
    # From the compiled text, and bounds from the chip's peaks.
    if mesh is not None:
        collectives = [
            scale_to_existing_rows(collective, mesh, program.expert_slices, program.crossing)
            for collective in find_collectives(text, mesh)
        ]
        fields |= {
            "traffic": summarize_traffic(collectives, mesh),
            "overweight": find_overweight(collectives),
        }
        fields["replicated"] |= {
            f"{array.where} {array.what}": array.num_bytes
            for array in find_replicated(text, mesh, GIB)
        }
    if pod is not None:
        fields["seconds"] = time_bounds(program.min_costs, fields["traffic"], pod)
        ideal_seconds = program.model_flops / pod.device.flops["bfloat16"]
        fields["utilisation"] = ideal_seconds / max(fields["seconds"].values())
    return Report(**fields), text


def _memory(stats, temporaries: int | None) -> dict[str, int]:
    """Returns bytes of a compiled program; temporaries: from its dump; None: it came from jax's compilation cache."""
    return {
        "temporary_bytes": stats.temp_size_in_bytes if temporaries is None else temporaries,
        "host_bytes": stats.host_temp_size_in_bytes,
        "unaliased_result_bytes": stats.output_size_in_bytes - stats.alias_size_in_bytes,
        "code_bytes": stats.generated_code_size_in_bytes,
    }


def _find_largest_buffers(folder: str) -> list[tuple[int, str]]:
    """Returns (bytes, description) of the largest buffers at peak memory, from a dump; [] without one."""
    try:
        text, ranges = read_dump(folder)
    except FileNotFoundError:
        return []
    buffers = find_large_buffers(text, GIB // 4, ranges)
    return [(buffer.num_bytes, f"{buffer.what} {buffer.shape}") for buffer in buffers[:20]]


def _above(sizes: dict[str, int]) -> dict[str, int]:
    return {path: size for path, size in sizes.items() if size > GIB}


def _tera(count: float) -> str:
    return f"{count / 1e12:,.1f}" if count > 1e11 else f"{count / 1e12:.2g}"


def describe(report: Report) -> str:
    """Returns the report as text."""
    return "\n".join(_lines(report))


def _costs_of_tokens(costs: Sequence[TokenCost]):
    """Yields lines with the minimum costs of tokens."""
    work = "prompts read" if costs[0].stage == "prefill" else "sequences decoded"
    yield (
        f"  tokens       chip-seconds for a million, {costs[0].batch:,} {work} at once, in bf16 but for W4A8: {BOUND} ({CLAIM})"
    )
    for cost in costs:
        text = ", ".join(f"{name} {seconds:,.0f}" for name, seconds in cost.totals.items())
        saved = "" if cost.saved is None else f": {cost.saved:.0%} less"
        yield f"    {cost.chip:<8}{cost.length:>9,} tokens each  {text}{saved}"


def _lines(report: Report):
    """Yields the lines of a report."""
    # Program, batch and compilation.
    size, batch = math.prod(report.mesh.values()), report.batch
    shape = ", ".join(f"{a} {n}" for a, n in report.mesh.items() if n > 1) or "one of each axis"
    yield f"{report.experiment}: {report.program} on {size:,} devices of {report.topology}, {shape}"
    cache_text = (
        f", each with up to {report.max_cached_tokens:,} in its pages"
        if report.max_cached_tokens
        else ""
    )
    yield (
        f"  batch        {batch['rows']:,} rows of {batch['length']:,} tokens, {batch['tokens'] / size:,.6g} tokens per device"
        + cache_text
    )
    yield f"  program      {report.hash}, lowered in {report.lowering_seconds:.0f} s"
    if report.compiling_seconds is not None:
        yield f"  compiled     in {report.compiling_seconds:.0f} s, {report.compiler_gib:.1f} GiB of memory"
    if report.options:
        yield (
            f"  options      {len(report.options)} of launch/xla_flags.py, which gke.py sets, and slurm.py and ssh_commands.py with --chip"
        )
    # Memory.
    yield "  GB per device"
    for kind, count in report.argument_bytes.items():
        yield f"    {kind:<24}{count / GB:8.3f}"
    if report.temporary_bytes is not None:
        yield f"    {'temporaries':<24}{report.temporary_bytes / GB:8.3f}"
    if report.saved_activation_bytes is not None:
        prefix = "of them " if report.temporary_bytes is not None else ""
        yield f"    {prefix + 'saved activations':<24}{report.saved_activation_bytes / GB:8.3f}"
    for name in ("unaliased_result_bytes", "code_bytes", "host_bytes"):
        if getattr(report, name):
            what = {
                "unaliased_result_bytes": "results",
                "code_bytes": "program",
                "host_bytes": "(in the host's memory)",
            }
            yield f"    {what[name]:<24}{getattr(report, name) / GB:8.3f}"
    if report.fits is not None and report.available_bytes is not None:
        share = report.used_bytes / report.available_bytes
        yield f"    {'together':<24}{report.used_bytes / GB:8.3f}  {share:.0%} of {report.available_bytes / GB:.2f}"
        if report.usable_bytes not in (None, report.available_bytes):
            yield f"    {'(JAX may take)':<24}{report.usable_bytes / GB:8.3f}"
    # FLOPs, time bounds and token costs.
    total = sum(report.parts.values())
    yield (
        f"  TFLOP        {_tera(report.model_flops)} that the mathematics needs of a device in a step"
        + (f", {_tera(total)} that the program takes" if total else "")
    )
    for name, flops in sorted(report.parts.items(), key=lambda part: -part[1]):
        yield f"    {name:<24}{_tera(flops):>10}  {flops / total:7.2%}"
    if report.seconds:
        bound = max(report.seconds.values())
        text = ", ".join(f"{name} {value:.2f}" for name, value in report.seconds.items())
        yield f"  bound        {bound:.2f} s a step, each resource busy all the time (a bound, not a speed): {text}"
        yield f"  utilisation  {report.utilisation:.0%} of the chips' bf16 peak by what the mathematics needs, at most"
    if report.token_costs:
        yield from _costs_of_tokens(report.token_costs)
    # Collectives, and weights that are not sharded.
    for row in report.traffic:
        axes = " x ".join(row.axes) or "one device"
        yield (
            f"    {row.kind:<20}{axes:<18}{row.count:>4} in the program, {row.runs:>7,} a step, "
            f"{row.near_bytes / GB:10.3f} GB sent near, {row.far_bytes / GB:8.3f} far, largest {row.largest_bytes / 1e6:,.1f} MB"
        )
    for line in report.overweight:
        yield f"  not scattered: {line}"
    if not report.replicated and report.mesh:
        yield "  whole on every device: no array above 1 GiB"
    for label, arrays in (
        ("whole on every device", report.replicated),
        ("whole while it is used", report.gathered_weight_bytes),
    ):
        for path, count in arrays.items():
            yield f"  {label}: {path}, {count / GIB:.2f} GiB"
    if report.fits is False:
        yield "  it does not fit; the largest buffers:"
        for count, what in report.largest_buffers:
            yield f"    {count / GB:8.3f} GB  {what}"
