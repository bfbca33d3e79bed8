"""Compares glm5_jax with transformers on CPU: forward, train step, and the engine's prefill and decode, as ratios.

    bash launch/bench.sh [ROW...]

Takes about 20 minutes for all rows on 2 cores and needs about 8 GB. Both arms are processes with two threads, float32
and the same weights, which ours writes and transformers loads. For each row a quick trial finds transformers' fastest
variant. Then the arms take turns, and medians of wall and of process CPU time are compared. If the two differ much
between runs, or CPU time is far below twice the wall time, the machine was busy or the work not parallel.

Outputs are compared in the same run, twice:

- as they are: float32 rounding decides a choice between keys of nearly equal score, and one different key changes all
  later positions, so the share of positions that differ is printed with the largest difference;
- with transformers' choices instead of ours (teacher_forced_choices.py), where everything must agree, with the gap of
  each choice that we would have made differently.

Not tried: batched_mm in forward and train (12 s at 1,024 tokens, grouped_mm 0.4 s) and compiled at batch 8 in decode
(5 s a step), eager attention above 1,024 tokens (twice sdpa's time at 4,096), compiled eager experts (a loop with
run-time lengths, recompiled for each of them). Expected: the table in docs/results/cpu_and_kernels.md.
"""

import dataclasses
import json
import os
import pathlib
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

from experiments.benchmarks.glm5_arm import BASELINE
from experiments.benchmarks.measure import NEW_TOKENS, PROMPT, THREADS
from glm5_jax.runtime.console import ProgressBar
from glm5_jax.runtime.process import PipeWorker, WorkerError
from glm5_jax.training.flops import forward_flops, train_flops

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "workdir" / "benchmarks"
CALL_TIMEOUT_S = 1200  # torch.compile takes minutes on a busy machine


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """A comparison on tokens [b t].

    Attributes:
      kind: forward, train, prefill or decode.
      b, t: rows and tokens of a row.
      target: how many times faster than transformers we must be; None: for information.
      repeats: number of runs.
    """

    kind: str
    b: int
    t: int
    target: float | None
    repeats: int = 7

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.b if self.kind == 'decode' else self.t}"

    @property
    def tokens(self) -> int:
        """Tokens that one run processes."""
        return self.b * (NEW_TOKENS if self.kind == "decode" else self.t)

    @property
    def flops(self) -> float | None:
        """Model FLOPs of one run, for both arms; None for decoding, which is bound by memory."""
        counted = {"forward": forward_flops, "prefill": forward_flops, "train": train_flops}
        per_token = counted.get(self.kind)
        return per_token and per_token(BASELINE, self.t) * self.tokens

    def variants(self) -> list[str]:
        """Returns the variants to try with transformers."""
        if self.kind == "decode":
            ways = ["eager generate", "grouped_mm dynamic", "eager static", "grouped_mm static"]
            ways += ["grouped_mm compiled static"]
            ways += ["batched_mm compiled static"] if self.b == 1 else []
            return [f"sdpa {way}" for way in ways]
        ways = ["sdpa grouped_mm", "sdpa eager", "sdpa grouped_mm compiled"]
        return ways + (["eager eager", "eager grouped_mm"] if self.t <= 1024 else [])


ROWS = (
    ComparisonRow(kind="forward", b=1, t=512, target=None),
    ComparisonRow(kind="forward", b=1, t=1024, target=1.5),
    ComparisonRow(kind="forward", b=1, t=4096, target=3.5),
    ComparisonRow(kind="forward", b=1, t=8192, target=6.0, repeats=5),
    ComparisonRow(kind="train", b=1, t=512, target=1.0),
    ComparisonRow(kind="train", b=1, t=1024, target=1.2),
    ComparisonRow(kind="train", b=1, t=4096, target=2.5),
    ComparisonRow(kind="prefill", b=1, t=512, target=None),
    ComparisonRow(kind="prefill", b=1, t=4096, target=None),
    ComparisonRow(kind="decode", b=1, t=PROMPT, target=8.0),
    ComparisonRow(kind="decode", b=8, t=PROMPT, target=5.0),
)


def compare(
    row: ComparisonRow,
    ours: PipeWorker,
    theirs: PipeWorker,
    folder: pathlib.Path,
    say: Callable[[str], None],
) -> dict:
    """Measures one row. Returns medians in seconds, the fastest variant and the difference of outputs."""
    # Find transformers' fastest variant.
    case = {"kind": row.kind, "b": row.b, "t": row.t}
    theirs.call("clear", CALL_TIMEOUT_S)
    tried = {}
    for variant in row.variants():
        try:
            first = theirs.call("prepare", CALL_TIMEOUT_S, **case, variant=variant)
            runs = [
                theirs.call("measure", CALL_TIMEOUT_S, variant=variant)["wall"] for _ in range(2)
            ]
        except WorkerError as error:
            say(f"{row.name}: {variant} fails: {str(error).splitlines()[0]}")
            continue
        tried[variant] = min(runs)
        say(f"{row.name}: {variant} {min(runs) * 1e3:.1f} ms, first {first:.0f} s")
    if not tried:
        raise RuntimeError(f"{row.name}: transformers ran in no variant, see the reasons above")
    best = min(tried, key=tried.__getitem__)
    theirs.call("keep", CALL_TIMEOUT_S, variant=best)
    say(f"{row.name}: glm5_jax first {ours.call('prepare', CALL_TIMEOUT_S, **case):.0f} s")
    # Measure both arms in turns, then compare their outputs.
    times = {"ours": [], "theirs": []}
    for _ in range(row.repeats):
        times["ours"].append(ours.call("measure", CALL_TIMEOUT_S))
        times["theirs"].append(theirs.call("measure", CALL_TIMEOUT_S, variant=best))
    differences = {
        "difference": difference(row, *save_outputs(row, ours, theirs, folder / row.name))
    }
    if row.kind in ("forward", "train"):
        path = str(folder / f"{row.name}-choices.npz")
        theirs.call("choose", CALL_TIMEOUT_S, **case, variant="sdpa grouped_mm", choices=path)
        gaps = ours.call("follow", CALL_TIMEOUT_S, **case, choices=path)
        forced_difference = difference(
            row, *save_outputs(row, ours, theirs, folder / f"{row.name}-same")
        )
        differences["same_choices"] = f"{forced_difference}; {describe_gaps(gaps)}"
    result = {
        f"{arm}_{clock}": statistics.median(run[clock] for run in runs)
        for arm, runs in times.items()
        for clock in ("wall", "cpu")
    }
    return (
        result
        | differences
        | {
            "row": row.name,
            "variant": best,
            "tried": tried,
            "runs": times,
            "ratio": result["theirs_wall"] / result["ours_wall"],
            "cpu_ratio": result["theirs_cpu"] / result["ours_cpu"],
            "target": row.target,
            "flops": row.flops,
            "tokens_per_second": row.tokens / result["ours_wall"],
        }
    )


def save_outputs(
    row: ComparisonRow, ours: PipeWorker, theirs: PipeWorker, folder: pathlib.Path
) -> list[pathlib.Path]:
    """Returns files of both arms' last outputs."""
    folder.mkdir()
    paths = []
    for name, worker in (("ours", ours), ("theirs", theirs)):
        paths.append(folder / (name if row.kind == "train" else f"{name}.npy"))
        worker.call("save", CALL_TIMEOUT_S, path=str(paths[-1]))
    return paths


def describe_gaps(apart: dict[str, list]) -> str:
    """Returns a description of `teacher_forced_choices.ChoiceGap` over all layers."""
    words = []
    for kind, layers in apart.items():
        count, gap = sum(c for c, _ in layers), max(g for _, g in layers)
        words.append(f"{count} {kind} chosen otherwise" + (f" (gap {gap:.0e})" if count else ""))
    return ", ".join(words)


def difference(row: ComparisonRow, ours: pathlib.Path, theirs: pathlib.Path) -> str:
    """Returns a description of the difference of the outputs."""
    if row.kind == "train":
        a, b = gradients(ours), gradients(theirs)
        zeros = [name for name in a.keys() - b.keys() if a[name].any()]
        if zeros or b.keys() - a.keys():
            raise ValueError(f"gradients in one arm only: {zeros} {sorted(b.keys() - a.keys())}")
        apart = {k: float(np.max(np.abs(a[k] - b[k])) / np.max(np.abs(b[k]))) for k in b}
        worst = max(apart, key=apart.__getitem__)
        return f"{apart[worst]:.0e} of an array's maximum"
    a, b = np.load(ours), np.load(theirs)
    if row.kind in ("prefill", "decode"):
        return f"{int((a == b).sum())} of {a.size} tokens equal"
    apart = np.abs(a - b).max(-1)
    return f"{apart.max():.0e}, {np.mean(apart > 2e-4):.2%} of positions"


def gradients(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns all arrays of a HuggingFace folder."""
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


COLUMNS = ("row", "ours ms (CPU)", "transformers ms (CPU)", "its variant", "ratio (CPU)", "target")
COLUMNS += ("met", "tok/s", "GFLOP/s", "outputs differ by", "with the same choices")


def cells(result: dict) -> list[str]:
    """Returns a row of the table as text."""
    scale = 1e3 / (NEW_TOKENS if result["row"].startswith("decode") else 1)
    ours, theirs = (
        f"{result[arm + '_wall'] * scale:.{digits}f} ({result[arm + '_cpu'] * scale:.{digits}f})"
        for arm in ("ours", "theirs")
        for digits in ([2] if scale < 1e3 else [0])
    )
    target = result["target"]
    rate = result["flops"] and result["flops"] / result["ours_wall"] / 1e9
    return [
        result["row"],
        ours,
        theirs,
        result["variant"],
        f"{result['ratio']:.2f} ({result['cpu_ratio']:.2f})",
        f"{target}" if target else "",
        "" if not target else "yes" if result["ratio"] >= target else "no",
        f"{result['tokens_per_second']:.0f}",
        f"{rate:.0f}" if rate else "",
        result["difference"],
        result.get("same_choices", ""),
    ]


def markdown(results: list[dict], about: str) -> str:
    """Returns the table for docs/results/cpu_and_kernels.md."""
    rows = [COLUMNS, ["---"] * len(COLUMNS), *map(cells, results)]
    return "\n".join([about, "", *(f"| {' | '.join(row)} |" for row in rows)])


def rich_table(results: list[dict]) -> Table:
    """Returns the table for the terminal."""
    table = Table(*COLUMNS, title="glm5_jax against transformers; decode: per step of all rows")
    for result in results:
        table.add_row(*cells(result))
    return table


def main(arguments: list[str]) -> None:
    """Runs the comparison. arguments: the Python that has torch, then names of rows (none: all)."""
    python, *names = arguments
    known = {row.name: row for row in ROWS}
    unknown = sorted(set(names) - known.keys())
    if unknown:
        sys.exit(f"no row {', '.join(unknown)}; there are {', '.join(known)}")
    rows = [known[name] for name in names or known]

    def arm(python, module):
        return PipeWorker([python, "-m", f"experiments.benchmarks.{module}"], cwd=ROOT)

    results, load = [], os.getloadavg()[0]
    with (
        arm(sys.executable, "glm5_arm") as ours,
        arm(python, "transformers_arm") as theirs,
        tempfile.TemporaryDirectory() as folder,
        ProgressBar(len(rows), unit="row") as bar,
    ):
        weights = os.path.join(folder, "weights")
        ours.call("export", CALL_TIMEOUT_S, folder=weights)
        theirs.call("load", CALL_TIMEOUT_S, folder=weights)
        peaks = [worker.call("gemm", CALL_TIMEOUT_S) / 1e9 for worker in (ours, theirs)]
        for done, row in enumerate(rows, 1):
            results.append(compare(row, ours, theirs, pathlib.Path(folder), bar.print))
            bar.update(done, f"{row.name} {results[-1]['ratio']:.2f}x")
    about = (
        f"{platform.processor() or platform.machine()}, {THREADS} threads, "
        f"load {load:.1f} at the start and {os.getloadavg()[0]:.1f} at the end; "
        f"2048 x 2048 matmul {peaks[0]:.0f} GFLOP/s in jax, {peaks[1]:.0f} in torch. "
        f"Medians of {min(r.repeats for r in rows)} to {max(r.repeats for r in rows)} runs."
    )
    Console().print(rich_table(results))
    text = markdown(results, about)
    print(text)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "transformers_cpu.md").write_text(text + "\n")
    report = {"about": about, "rows": results}
    (RESULTS / "transformers_cpu.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"also in {RESULTS}")


if __name__ == "__main__":
    main(sys.argv[1:])
