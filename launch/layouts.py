"""Compiles the layouts of experiments/README.md by the real compilers, and writes its tables.

    python -m launch.layouts [--only=PATTERN] [--stale | --again] [--results=experiments/layouts.jsonl]

A layout is an experiment, a pod and the fields that it takes there (`LAYOUTS`); each is compiled by `launch.compile` in a
process of its own (744B: up to 25 minutes of two cores and 12 GiB; GPUs: 6 GiB), those whose names match the regular expression
PATTERN. What --results holds already is not compiled anew, but with --again, or with --stale if its programs, which are lowered to
see that (half a minute each), or the compiler's options are other ones by now; each layout's reports are there as soon as they
are known. Printed, in Markdown, of what --results holds: a table of all layouts that train, one of those that serve, and the names
of those that do not fit. The exit code is 0 if all that was compiled fits, 3 if something does not, 2 for a mistake.
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

from glm5_jax.core.console import ProgressBar
from launch import pods
from launch.compile import NOT_FITTING

RESULTS = pathlib.Path("experiments/layouts.jsonl")


@dataclasses.dataclass(frozen=True)
class Layout:
    """name: unique; fields: flags of `launch.compile`, beside experiment and topology."""

    name: str
    experiment: str
    topology: str
    fields: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """Behind `python`."""
        where = f"--experiment=experiments/{self.experiment}", f"--topology={self.topology}"
        return ["-m", "launch.compile", *where, *self.fields]


def layout(name: str, experiment: str, topology: str, *words: str) -> Layout:
    """words: FIELD=VALUE of the experiment, or flags that begin with dashes."""
    fields = (word if word.startswith("--") else f"--experiment.{word}" for word in words)
    return Layout(name, experiment, topology, tuple(fields))


def _layouts() -> Iterator[Layout]:
    v5p, tpu7x, v6e, h200 = "v5p:8x8x16", "tpu7x:8x8x8", "4*v6e:16x16", "h200:1x128x8"
    for chip, pod, words in (
        ("v5p", v5p, ()),
        ("tpu7x", tpu7x, ()),
        ("v6e", v6e, ("step.remat=offload", "step.token_chunk=256", "step.rows_per_device=2")),
        ("h200", h200, ("mesh.fsdp=64", "mesh.expert=16", "step.expert_slices=2")),
    ):
        yield layout(f"4K {chip}", "pretrain.py:glm5", pod, *words)
        # The largest batch of the ramp, whose program is another.
        yield layout(f"4K 64M {chip}", "pretrain.py:glm5", pod, "batch.start=67108864", *words)
    # Where products are few for the rows that experts are sent, a token crosses to each host of H200 once.
    words = {
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
            yield layout(name, experiment, pod, *words.get(name, ()))
    yield layout("RL v5p", "rl_reasoning.py:glm5", v5p)
    eight_bits = "engine.index_cache=int8", "engine.latent_cache=fp8"
    shorter = "engine.max_length=131072", "engine.num_pages=2048"
    # What a decode has of a device; where tokens arrive there is room for as many of every device.
    fewer = "engine.token_chunk=160"
    for name, pod, *words in (
        ("v5p", "v5p:2x4x4", "mesh.expert=32"),
        ("tpu7x", "tpu7x:2x2x4", "mesh.expert=32"),
        ("v6e", "v6e:8x16", "mesh.expert=128", *eight_bits, *shorter, "engine.chunk=2048", fewer),
        ("h200", "h200:1x2x8", "mesh.expert=16"),
        ("W4A8 v5p", "v5p:2x2x2", "mesh.expert=8", *eight_bits, "--quantised"),
        ("W4A8 tpu7x", "tpu7x:2x2x1", "mesh.expert=8", *eight_bits, "--quantised"),
        (
            *("W4A8 v6e", "v6e:4x8", "mesh.expert=32", *eight_bits, *shorter),
            *("engine.chunk=1536", fewer, "--quantised"),
        ),
        ("W4A8 h200", "h200:1x1x4", "mesh.expert=4", *eight_bits, "--quantised"),
    ):
        yield layout(f"serve {name}", "serve.py:glm5", pod, *words)


LAYOUTS = tuple(_layouts())


def compiled(layout: Layout) -> list[dict]:
    """The reports of its programs. ValueError as of `run_compiler`."""
    return [json.loads(line) for line in run_compiler(layout, "--json")]


def hashes(layout: Layout) -> list[str]:
    """Of its programs, which are lowered and not compiled. ValueError as of `run_compiler`."""
    return run_compiler(layout, "--hash")


def run_compiler(layout: Layout, flag: str) -> list[str]:
    """Lines of `launch.compile`; ValueError with what it said, if it did not do that."""
    with tempfile.TemporaryFile("w+") as said:
        command = [sys.executable, *layout.command, flag]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=said, text=True, check=False)
        if done.returncode not in (0, NOT_FITTING):
            said.seek(0)
            last = said.read().strip().splitlines()[-1:]
            why = " ".join(last).removeprefix("error: ") or done.returncode
            if done.returncode < 0:
                why = f"killed by signal {-done.returncode}, for want of memory if nobody did it"
            raise ValueError(f"{shlex.join(layout.command)}: {why}")
    return done.stdout.splitlines()


def is_known(layout: Layout, known: Mapping[str, dict], stale: bool) -> bool:
    """Whether its reports are there, by the same command and, if stale is asked for, of the same programs and options."""
    row = known.get(layout.name, {})
    if row.get("command") != shlex.join(layout.command):
        return False
    if not stale:
        return True
    options = pods.parse(layout.topology).options
    if any(report["options"] != options for report in row["reports"]):
        return False
    return hashes(layout) == [report["hash"] for report in row["reports"]]


def read(file: pathlib.Path) -> dict[str, dict]:
    """{layout's name: {command, reports}}."""
    if not file.exists():
        return {}
    return {row.pop("layout"): row for row in map(json.loads, file.read_text().splitlines())}


def write(file: pathlib.Path, known: Mapping[str, dict]) -> None:
    """In the order of LAYOUTS, all at once."""
    lines = [
        json.dumps({"layout": own.name} | known[own.name]) for own in LAYOUTS if own.name in known
    ]
    new = file.with_name(f"{file.name}.{os.getpid()}")  # another process may write too
    new.write_text("".join(f"{line}\n" for line in lines))
    os.replace(new, file)


def _mesh(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)


def _memory(report: Mapping) -> list[str]:
    """What goes in, what lives in between, and the share of the chip's memory that is."""
    held, room = sum(report["held"].values()) / 1e9, report["available"] / 1e9
    more = sum(report[name] for name in ("temporaries", "not_reused", "code")) / 1e9
    return [f"{held:.1f}", f"{more:.1f}", f"{(held + more) / room:.0%} of {room:.0f}"]


def _bound(report: Mapping) -> list[str]:
    """Seconds by resource, the longest in bold."""
    found = report["seconds"]
    longest = max(found, key=found.get)
    told = (
        f"**{name} {value:.3g}**" if name == longest else f"{name} {value:.3g}"
        for name, value in found.items()
    )
    return [", ".join(told)]


def _sent(report: Mapping) -> list[str]:
    """GB that a device sends in a step: rows to and from experts, and all else, weights and gradients in the main."""
    sizes = {True: 0, False: 0}
    for row in report["traffic"]:
        sizes[row["kind"] == "ragged-all-to-all"] += row["near"] + row["far"]
    return [f"{sizes[True] / 1e9:,.4g} / {sizes[False] / 1e9:,.4g}"]


def _whole_sums(report: Mapping) -> str:
    """Gradients that are summed on every device, where each needs its part alone."""
    said = (line.removeprefix("all-reduce of ") for line in report["overweight"])
    return "; ".join(said) or "none"


def _settings(layout: Layout) -> str:
    words = (word.removeprefix("--experiment.").removeprefix("--") for word in layout.fields)
    return ", ".join(f"`{word}`" for word in words if not word.startswith("mesh."))


def _compiled(report: Mapping) -> list[str]:
    return [f"{report['compiling_seconds']:.0f} s, {report['compiler_gib']:.1f} GiB"]


def _training(own: Layout, report: Mapping) -> list[str]:
    parts, batch = report["parts"], report["batch"]
    taken = sum(parts.values())
    return [
        own.name,
        f"`{own.experiment}`",
        f"`{own.topology}`",
        _mesh(report["mesh"]),
        _settings(own),
        f"{batch['rows']:,} x {batch['length']:,}",
        *_memory(report),
        f"{report['model_flops'] / 1e15:.2f} / {taken / 1e15:.2f}",
        f"{parts.get('newton_schulz', 0) / taken:.2%}",
        *_sent(report),
        _whole_sums(report),
        *_bound(report),
        f"{report['utilisation']:.0%}",
        *_compiled(report),
    ]


def _serving(own: Layout, report: Mapping) -> list[str]:
    batch = report["batch"]
    return [
        own.name,
        f"`{own.topology}`",
        _mesh(report["mesh"]),
        _settings(own),
        report["program"],
        f"{batch['rows']:,} x {batch['length']:,} on up to {report['cached']:,}",
        *_memory(report),
        *_bound(report),
        *_compiled(report),
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


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(known: Mapping[str, dict]) -> str:
    """Both, of the layouts that fit, and the names of the others."""
    training, serving, others = [], [], []
    for own in LAYOUTS:
        for report in known.get(own.name, {}).get("reports", ()):
            if not report["fits"]:
                others.append(f"{own.name} ({report['program']}) does not fit.")
            elif report["program"] == "train step":
                training.append(_training(own, report))
            else:
                serving.append(_serving(own, report))
    return "\n\n".join([table(TRAINING, training), table(SERVING, serving), *others])


def main(argv: list[str]) -> int:
    """Exit code; the tables go to standard output."""
    values = flags.FlagValues()
    flags.DEFINE_string("only", "", "a regular expression of names", flag_values=values)
    flags.DEFINE_bool("again", False, "what is there already too", flag_values=values)
    flags.DEFINE_bool("stale", False, "what is of other programs too", flag_values=values)
    flags.DEFINE_string("results", str(RESULTS), "reports, a layout a line", flag_values=values)
    if {"-h", "--help"} & set(argv[1:]):
        print(__doc__)
        return 0
    try:
        if rest := values(argv)[1:]:
            raise ValueError(f"{rest[0]!r} is no flag of this program")
        try:
            wanted = re.compile(values.only)
        except re.error as error:
            raise ValueError(f"--only={values.only} is no regular expression: {error}") from None
        chosen = [own for own in LAYOUTS if wanted.search(own.name)]
        if not chosen:
            names = ", ".join(own.name for own in LAYOUTS)
            raise ValueError(f"--only={values.only} matches no layout; there are {names}")
        file = pathlib.Path(values.results)
        if not file.parent.is_dir():
            raise ValueError(f"--results={file} is in no folder; make {file.parent} first")
        known, fits = read(file), True
        with ProgressBar(len(chosen), unit="layout") as bar:
            for count, own in enumerate(chosen):
                bar.update(count, own.name)
                if values.again or not is_known(own, known, values.stale):
                    reports = compiled(own)
                    fits &= all(report["fits"] for report in reports)
                    # Read again: another process may have compiled others meanwhile.
                    known = read(file) | {
                        own.name: {"command": shlex.join(own.command), "reports": reports}
                    }
                    write(file, known)
                bar.update(count + 1, own.name)
    except (ValueError, flags.Error, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    print(tables(known))
    return 0 if fits else NOT_FITTING


if __name__ == "__main__":
    sys.exit(main(sys.argv))
