"""Compiles the layouts of experiments/README.md with the real compilers and prints its tables.

    python -m launch.layouts [--only=PATTERN] [--stale | --again] [--results=experiments/layouts.jsonl]

A layout (`LAYOUTS`) is an experiment, a pod, and the config fields to set there. `launch.compile` compiles each in a separate
process (744B: up to 25 minutes of two cores and 12 GiB; GPUs: 6 GiB).

- Selection: layouts whose names match the regular expression PATTERN.
- Results that --results already has are reused. --again recompiles all. --stale recompiles layouts whose programs or
  compiler options have changed; for that, the programs are lowered (half a minute each).
- Each layout's reports are written to --results as soon as they are known.
- Output: from --results, in Markdown, a table of the training layouts, a table of the serving layouts, and the names of
  those that do not fit.

The exit code is 0 if all compiled programs fit, 3 if one does not, and 2 for a user's error.
"""

import dataclasses
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from absl import flags

from glm5_jax.runtime.console import ProgressBar
from glm5_jax.runtime.terminal import print_error
from launch import pods
from launch.compile import NOT_FITTING

RESULTS = pathlib.Path("experiments/layouts.jsonl")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of an experiment on a pod.

    Attributes:
      name: unique name.
      experiment: FILE.py:VARIANT in experiments/.
      topology: name of the pod.
      fields: other flags of `launch.compile`.
    """

    name: str
    experiment: str
    topology: str
    fields: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """Arguments of `python` that compile the layout."""
        where = f"--experiment=experiments/{self.experiment}", f"--topology={self.topology}"
        return ["-m", "launch.compile", *where, *self.fields]


def make_layout(name: str, experiment: str, topology: str, *words: str) -> Layout:
    """Returns a layout; words: FIELD=VALUE of the experiment, or flags that begin with dashes."""
    fields = (word if word.startswith("--") else f"--experiment.{word}" for word in words)
    return Layout(name=name, experiment=experiment, topology=topology, fields=tuple(fields))


def _layouts() -> Iterator[Layout]:
    v5p, tpu7x, v6e, h200 = "v5p:8x8x16", "tpu7x:8x8x8", "4*v6e:16x16", "h200:1x128x8"
    for chip, pod, fields in (
        ("v5p", v5p, ()),
        ("tpu7x", tpu7x, ()),
        ("v6e", v6e, ("step.remat=offload", "step.token_chunk=256", "step.rows_per_device=2")),
        ("h200", h200, ("mesh.fsdp=64", "mesh.expert=16", "step.expert_slices=2")),
    ):
        yield make_layout(f"4K {chip}", "pretrain.py:glm5", pod, *fields)
        # The largest batch of the ramp has another program.
        yield make_layout(
            f"4K 64M {chip}", "pretrain.py:glm5", pod, "batch.start=67108864", *fields
        )
    # These stages do few FLOPs for each row sent to experts. With expert slices, a token crosses to each H200 host once.
    fields_by_name = {
        "32K h200": ("mesh.fsdp=32", "mesh.expert=16", "step.expert_slices=2"),
        "DSA h200": ("step.expert_slices=8",),
        "SFT h200": ("step.expert_slices=8",),
    }
    for chip, pod in (("v5p", v5p), ("h200", h200)):
        for stage, experiment in (
            ("32K", "midtrain.py:glm5,32k"),
            ("128K", "midtrain.py:glm5,128k"),
            ("200K", "midtrain.py:glm5,200k"),
            ("warm-up", "dsa_warmup.py:glm5"),
            ("DSA", "dsa_sparse.py:glm5"),
            ("SFT", "sft.py:glm5,mixed"),
        ):
            name = f"{stage} {chip}"
            yield make_layout(name, experiment, pod, *fields_by_name.get(name, ()))
    yield make_layout("RL v5p", "rl_reasoning.py:glm5", v5p)
    eight_bits = "engine.index_cache=int8", "engine.latent_cache=fp8"
    shorter = "engine.max_length=131072", "engine.num_pages=2048"
    # Tokens of a decode on each device. The receiver of an expert exchange has room for this many from every device.
    smaller_decode = "engine.token_chunk=160"
    for name, pod, *fields in (
        ("v5p", "v5p:2x4x4", "mesh.expert=32"),
        ("tpu7x", "tpu7x:2x2x4", "mesh.expert=32"),
        (
            "v6e",
            "v6e:8x16",
            "mesh.expert=128",
            *eight_bits,
            *shorter,
            "engine.prefill_chunk=2048",
            smaller_decode,
        ),
        ("h200", "h200:1x2x8", "mesh.expert=16"),
        ("W4A8 v5p", "v5p:2x2x2", "mesh.expert=8", *eight_bits, "--quantised"),
        ("W4A8 tpu7x", "tpu7x:2x2x1", "mesh.expert=8", *eight_bits, "--quantised"),
        (
            *("W4A8 v6e", "v6e:4x8", "mesh.expert=32", *eight_bits, *shorter),
            *("engine.prefill_chunk=1536", smaller_decode, "--quantised"),
        ),
        ("W4A8 h200", "h200:1x1x4", "mesh.expert=4", *eight_bits, "--quantised"),
    ):
        yield make_layout(f"serve {name}", "serve.py:glm5", pod, *fields)


LAYOUTS = tuple(_layouts())


def compile_layout(layout: Layout) -> list[dict]:
    """Compiles a layout and returns the reports of its programs. Raises the errors of `run_compiler`."""
    return [json.loads(line) for line in run_compiler(layout, "--json")]


def lower_hashes(layout: Layout) -> list[str]:
    """Lowers a layout and returns the hashes of its programs. Raises the errors of `run_compiler`."""
    return run_compiler(layout, "--hash")


def run_compiler(layout: Layout, flag: str) -> list[str]:
    """Runs `launch.compile` and returns its lines. Raises ValueError with its error message if it fails."""
    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, *layout.command, flag]
        process = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, check=False
        )
        if process.returncode not in (0, NOT_FITTING):
            errors.seek(0)
            last_line = errors.read().strip().splitlines()[-1:]
            reason = " ".join(last_line).removeprefix("error: ") or process.returncode
            if process.returncode < 0:
                reason = f"killed by signal {-process.returncode}, out of memory unless someone killed it"
            raise ValueError(f"{shlex.join(layout.command)}: {reason}")
    return process.stdout.splitlines()


def is_known(layout: Layout, results: Mapping[str, dict], stale: bool) -> bool:
    """Returns whether the results have the layout's reports, by the same command.

    stale: also compare the programs and the compiler options.
    """
    row = results.get(layout.name, {})
    if row.get("command") != shlex.join(layout.command):
        return False
    if not stale:
        return True
    options = pods.parse(layout.topology).options
    if any(report["options"] != options for report in row["reports"]):
        return False
    return lower_hashes(layout) == [report["hash"] for report in row["reports"]]


def read(file: pathlib.Path) -> dict[str, dict]:
    """Returns the results of a file, {name of the layout: {command, reports}}."""
    if not file.exists():
        return {}
    return {row.pop("layout"): row for row in map(json.loads, file.read_text().splitlines())}


def write(file: pathlib.Path, results: Mapping[str, dict]) -> None:
    """Writes the results in the order of LAYOUTS, replacing the file atomically."""
    lines = [
        json.dumps({"layout": layout.name} | results[layout.name])
        for layout in LAYOUTS
        if layout.name in results
    ]
    temporary = file.with_name(f"{file.name}.{os.getpid()}")  # another process may write too
    temporary.write_text("".join(f"{line}\n" for line in lines))
    os.replace(temporary, file)


def _mesh(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)


def _memory(report: Mapping) -> list[str]:
    """Returns GB of arguments, GB of temporaries, and their share of the chip's memory."""
    arguments, available = (
        sum(report["argument_bytes"].values()) / 1e9,
        report["available_bytes"] / 1e9,
    )
    temporaries = (
        sum(report[name] for name in ("temporary_bytes", "unaliased_result_bytes", "code_bytes"))
        / 1e9
    )
    return [
        f"{arguments:.1f}",
        f"{temporaries:.1f}",
        f"{(arguments + temporaries) / available:.0%} of {available:.0f}",
    ]


def _bound(report: Mapping) -> list[str]:
    """Returns minimum seconds by resource, the longest in bold."""
    seconds = report["seconds"]
    longest = max(seconds, key=seconds.get)
    parts = (
        f"**{name} {value:.3g}**" if name == longest else f"{name} {value:.3g}"
        for name, value in seconds.items()
    )
    return [", ".join(parts)]


def _sent_gb(report: Mapping) -> list[str]:
    """Returns GB that a device sends in a step: expert rows / the rest, which is mostly weights and gradients."""
    sizes = {True: 0, False: 0}
    for row in report["traffic"]:
        sizes[row["kind"] == "ragged-all-to-all"] += row["near_bytes"] + row["far_bytes"]
    return [f"{sizes[True] / 1e9:,.4g} / {sizes[False] / 1e9:,.4g}"]


def _whole_sums(report: Mapping) -> str:
    """Returns the gradients that are all-reduced although each device needs only its shard."""
    sums = (line.removeprefix("all-reduce of ") for line in report["overweight"])
    return "; ".join(sums) or "none"


def _settings(layout: Layout) -> str:
    fields = (field.removeprefix("--experiment.").removeprefix("--") for field in layout.fields)
    return ", ".join(f"`{field}`" for field in fields if not field.startswith("mesh."))


def _compiler_usage(report: Mapping) -> list[str]:
    return [f"{report['compiling_seconds']:.0f} s, {report['compiler_gib']:.1f} GiB"]


def _training(layout: Layout, report: Mapping) -> list[str]:
    parts, batch = report["parts"], report["batch"]
    total_flops = sum(parts.values())
    return [
        layout.name,
        f"`{layout.experiment}`",
        f"`{layout.topology}`",
        _mesh(report["mesh"]),
        _settings(layout),
        f"{batch['rows']:,} x {batch['length']:,}",
        *_memory(report),
        f"{report['model_flops'] / 1e15:.2f} / {total_flops / 1e15:.2f}",
        f"{parts.get('newton_schulz', 0) / total_flops:.2%}",
        *_sent_gb(report),
        _whole_sums(report),
        *_bound(report),
        f"{report['utilisation']:.0%}",
        *_compiler_usage(report),
    ]


def _serving(layout: Layout, report: Mapping) -> list[str]:
    batch = report["batch"]
    return [
        layout.name,
        f"`{layout.topology}`",
        _mesh(report["mesh"]),
        _settings(layout),
        report["program"],
        f"{batch['rows']:,} x {batch['length']:,} on up to {report['max_cached_tokens']:,}",
        *_memory(report),
        *_bound(report),
        *_compiler_usage(report),
    ]


TRAINING = (
    *("layout", "experiment", "pod", "mesh", "fields", "rows x tokens", "GB in", "GB between"),
    *("memory", "PFLOP needed / taken", "Newton-Schulz", "GB sent: rows / rest", "summed whole"),
    *("least seconds a step", "utilisation", "compiled"),
)
SERVING = (
    *("layout", "pod", "mesh", "fields", "program", "rows x tokens", "GB in", "GB between"),
    *("memory", "least seconds a step", "compiled"),
)


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_tables(results: Mapping[str, dict]) -> str:
    """Returns both tables, of the layouts that fit, and the names of the others."""
    training, serving, others = [], [], []
    for layout in LAYOUTS:
        for report in results.get(layout.name, {}).get("reports", ()):
            if not report["fits"]:
                others.append(f"{layout.name} ({report['program']}) does not fit.")
            elif report["program"] == "train step":
                training.append(_training(layout, report))
            else:
                serving.append(_serving(layout, report))
    return "\n\n".join([format_table(TRAINING, training), format_table(SERVING, serving), *others])


def main(argv: list[str]) -> int:
    """Compiles the selected layouts, prints the tables and returns the exit code."""
    values = flags.FlagValues()
    flags.DEFINE_string("only", "", "regular expression of names", flag_values=values)
    flags.DEFINE_bool("again", False, "recompile all", flag_values=values)
    flags.DEFINE_bool("stale", False, "recompile changed programs", flag_values=values)
    flags.DEFINE_string("results", str(RESULTS), "file of reports", flag_values=values)
    if {"-h", "--help"} & set(argv[1:]):
        print(__doc__)
        return 0
    try:
        if rest := values(argv)[1:]:
            raise ValueError(f"{rest[0]!r} is not a flag of this program")
        try:
            pattern = re.compile(values.only)
        except re.error as error:
            raise ValueError(f"--only={values.only} is not a regular expression: {error}") from None
        layouts = [layout for layout in LAYOUTS if pattern.search(layout.name)]
        if not layouts:
            names = ", ".join(layout.name for layout in LAYOUTS)
            raise ValueError(f"--only={values.only} matches no layout; there are {names}")
        file = pathlib.Path(values.results)
        if not file.parent.is_dir():
            raise ValueError(f"--results={file} has no folder; make {file.parent} first")
        results, fits = read(file), True
        with ProgressBar(len(layouts), unit="layout") as bar:
            for count, layout in enumerate(layouts):
                bar.update(count, layout.name)
                if values.again or not is_known(layout, results, values.stale):
                    reports = compile_layout(layout)
                    fits &= all(report["fits"] for report in reports)
                    # Read the file again, because another process may have added layouts.
                    results = read(file) | {
                        layout.name: {
                            "command": shlex.join(layout.command),
                            "reports": reports,
                        }
                    }
                    write(file, results)
                bar.update(count + 1, layout.name)
    except (ValueError, flags.Error, OSError) as error:
        print_error(error)
        return 2
    print(format_tables(results))
    return 0 if fits else NOT_FITTING


if __name__ == "__main__":
    sys.exit(main(sys.argv))
