"""Times the kernels at the shapes of GLM-5, after checking them.

    python -m pallas_kernels.bench KERNEL [--case NAME] [--shape m=4096,d=1024] [--small]
    python -m pallas_kernels.bench all --json results.jsonl

Each case prints one line: time of a call, FLOP/s and bytes/s by `cost`, share of the chip's roofline, and the
time of XLA and of each installed library (torch, tokamax, jax's own) as a multiple of the kernel's.

Checks: every case also runs twice at its small sizes. Both runs must give the same bits, and the result is
compared with XLA's. --full-check repeats this at the timed sizes; `dsa` above 16K tokens lacks the memory for
it.

`dsa` is one sparse layer with dense baselines: the ratios are what sparse attention saves.
`all` is meant for one hour on an accelerator. It needs only jax, jaxtyping and numpy.

Without an accelerator only XLA runs, and a line says so, because the speed of interpreted kernels means nothing.
"""

import argparse
import datetime
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import backends, baselines, chips, cost as costs
from pallas_kernels.cases import COMPOSED, KERNELS, Case, cases, worst_difference

# Accepted difference of a baseline from XLA, as a share of the largest value: bfloat16 rounds to 0.004.
MAX_BASELINE_DIFFERENCE = 0.03


class Timing(NamedTuple):
    """Time of one call in seconds: median and minimum over runs of several calls each."""

    median_s: float
    best_s: float


RUNS = 7


def time_runs(time_calls: Callable[[int], float], budget_s: float) -> Timing:
    """Times up to RUNS runs within about `budget_s` seconds; a long call gets fewer runs.

    time_calls(n) returns the seconds that n calls take.
    """
    time_calls(1)
    call_s = max(time_calls(1), 1e-6)
    runs = max(1, min(RUNS, int(budget_s / call_s)))
    calls = max(1, min(1000, int(budget_s / runs / call_s)))
    times_s = [time_calls(calls) / calls for _ in range(runs)]
    return Timing(statistics.median(times_s), min(times_s))


def repeat_in_loop(function: Callable) -> Callable:
    """Returns a program (inputs, calls) -> float32 that calls function(inputs) `calls` times in one loop.

    Each call depends on the one before it; otherwise XLA moves it out of the loop. One number of every result is
    added up after a barrier; otherwise XLA drops results that nothing reads, and computes only that number of the
    others.
    """

    def repeat(inputs, calls):
        def once(_, carry):
            tied, carry = lax.optimization_barrier((inputs, carry))
            results = jax.tree.leaves(lax.optimization_barrier(function(tied)))
            return carry + sum(x.reshape(-1)[0].astype(jnp.float32) for x in results)

        return lax.fori_loop(0, calls, once, jnp.zeros((), jnp.float32))

    return repeat


def make_timer(function: Callable, inputs) -> Callable[[int], float]:
    """Returns a function (calls) -> seconds that times a program which loops over function(inputs)."""

    run = jax.jit(repeat_in_loop(function))

    def time_calls(calls: int) -> float:
        start_s = time.perf_counter()
        jax.block_until_ready(run(inputs, calls))
        return time.perf_counter() - start_s

    return time_calls


def check(
    case: Case,
    sizes: Mapping[str, int],
    implementation: str | backends.Implementation,
    seed: int = 0,
) -> dict:
    """Runs a case twice and XLA once.

    Returns {"same_bits": whether both runs agree to the bit, "difference": difference from XLA}.
    """
    inputs = jax.jit(lambda key: case.inputs(sizes, key))(jax.random.key(seed))
    run = jax.jit(lambda inputs: case.run(inputs, sizes, implementation))
    first, second = (jax.device_get(run(inputs)) for _ in range(2))
    same = all(map(has_same_bits, *map(jax.tree.leaves, (first, second))))
    expected = jax.device_get(jax.jit(lambda inputs: case.run(inputs, sizes, "xla"))(inputs))
    return {"same_bits": same, "difference": worst_difference(first, expected)}


def has_same_bits(a: jax.Array, b: jax.Array) -> bool:
    """Returns whether two arrays of one shape and type are equal to the bit; NaN equals the same NaN."""
    return np.array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def baseline_difference(kernel: str, name: str, baseline: baselines.Baseline) -> float:
    """Returns the difference of a baseline from XLA at the small sizes; selected indices may be in any order."""
    case = cases(kernel)[name]
    inputs = jax.jit(lambda key: case.inputs(case.small, key))(jax.random.key(0))
    got = baselines.result_on_host(baseline, inputs, case.small)
    expected = jax.jit(lambda inputs: case.run(inputs, case.small, "xla"))(inputs)
    pairs = zip(got, jax.tree.leaves(jax.device_get(expected)))
    ordered = [[np.sort(x) if x.dtype.kind == "i" else x for x in pair] for pair in pairs]
    return max(worst_difference(*pair) for pair in ordered)


def measure(
    kernel: str, name: str, sizes: Mapping[str, int], budget_s: float, full_check: bool = False
) -> dict:
    """Returns the figures of one line: of the Pallas form for this platform, of XLA, and of libraries."""
    case = cases(kernel)[name]
    sizes = {**case.sizes, **sizes}
    best = backends.BACKEND_OF_PLATFORM.get(backends.platform(), "xla")
    record = {"kernel": kernel, "case": name, "sizes": sizes, "device": backends.device_kind()}
    record |= {"date": datetime.date.today().isoformat(), "jax": jax.__version__, "errors": {}}
    inputs = jax.jit(lambda key: case.inputs(sizes, key))(jax.random.key(0))

    def try_timing(run_name, create_timer):
        try:
            return time_runs(create_timer(), budget_s)
        except Exception as error:  # any library may fail; the others are still timed
            record["errors"][run_name] = format_error(error)

    def make_case_timer(implementation):
        return make_timer(lambda x: case.run(x, sizes, implementation), inputs)

    # Time XLA and the Pallas form.
    xla = try_timing("XLA", lambda: make_case_timer("xla"))
    ours = try_timing(best, lambda: make_case_timer(best)) if best != "xla" else None
    # Check the Pallas form at the small sizes, and on request at the timed ones.
    if ours:
        for check_sizes, check_name in ((case.small, "check"), (sizes, "full_check")):
            if check_sizes is sizes and not full_check:
                continue
            try:
                checked = check(case, dict(check_sizes), best)
            except Exception as error:  # the remaining cases are still worth the device time
                record["errors"][check_name] = format_error(error)
            else:
                record |= {check_name: checked} if check_sizes is sizes else checked
    # Time the libraries.
    record["libraries"] = {}
    for run_name, baseline in baselines.available_baselines(kernel, name).items():
        record["libraries"][run_name] = time_baseline(
            kernel, name, baseline, inputs, sizes, try_timing, run_name
        )
    # Compare with the roofline and with XLA.
    timing = ours or xla
    if timing is None:
        return record
    cost, chip = case.cost(sizes), chips.find_chip(record["device"])
    record |= {"implementation": best if ours else "xla", "seconds": timing.median_s}
    record |= {"best_seconds": timing.best_s, "tflops": cost.flops / timing.median_s / 1e12}
    record |= {"gb_per_s": cost.bytes / timing.median_s / 1e9}
    roofline_s = costs.roofline_s(cost, chip) if chip else None
    if roofline_s:
        record["share_of_roofline"] = roofline_s / timing.median_s
    if ours and xla:
        record["times_xla"] = xla.median_s / ours.median_s
    return record


def format_error(error: Exception) -> str:
    """Returns an exception as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def time_baseline(kernel, name, baseline, inputs, sizes, try_timing, run_name) -> float | None:
    """Returns the median seconds of a baseline, or None with the reason in the record's errors."""

    def make_baseline_timer():
        difference = baseline_difference(kernel, name, baseline) if baseline.same else 0
        if difference > MAX_BASELINE_DIFFERENCE:
            raise ValueError(f"its results differ from XLA's by {difference:.1e}")
        if baseline.library == "torch":
            return baselines.torch_calls().make_timer(baseline.run, inputs, sizes)
        return make_timer(lambda x: baseline.run(x, sizes), inputs)

    timing = try_timing(run_name, make_baseline_timer)
    return timing.median_s if timing else None


def format_line(record: dict) -> str:
    """Returns the printed line of a record."""
    head = f"{record['kernel']:24}{record['case']:20}"
    errors = "; ".join(
        f"{run_name} failed: {error}" for run_name, error in record["errors"].items()
    )
    if "seconds" not in record:
        return f"{head}{errors}"
    text = f"{head}{record['implementation']:5}{record['seconds'] * 1e3:10.3f} ms"
    text += f"{record['tflops']:9.2f} TFLOP/s{record['gb_per_s']:9.1f} GB/s"
    if "share_of_roofline" in record:
        text += f"  {record['share_of_roofline']:.0%} of the roofline"
    if "times_xla" in record:
        text += f"  {record['times_xla']:.2f}x XLA"
    for run_name, seconds in record["libraries"].items():
        if seconds:
            text += f"  {seconds / record['seconds']:.2f}x {run_name}"
    if "difference" in record:
        bits = "same bits twice" if record["same_bits"] else "BITS DIFFER BETWEEN RUNS"
        text += f"  {bits}, {record['difference']:.1e} from XLA"
    if "full_check" in record:
        bits = "same bits twice" if record["full_check"]["same_bits"] else "BITS DIFFER"
        text += f"  full size: {bits}, {record['full_check']['difference']:.1e} from XLA"
    return f"{text}  {errors}".rstrip()


def parse_sizes(text: str) -> dict[str, int]:
    """Parses "m=4096" into {"m": 4096}. Raises ValueError if the text has another form."""
    pairs = [part.partition("=") for part in text.split(",") if part]
    wrong = [name for name, _, value in pairs if not value.isdigit() or int(value) < 1]
    if wrong:
        raise ValueError(
            f"--shape {text!r}: {', '.join(wrong)} needs a positive integer, as in m=4096"
        )
    return {name: int(value) for name, _, value in pairs}


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark. Returns 1 if a check or a timing failed, else 0."""
    # Parse and validate the arguments.
    description = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser("python -m pallas_kernels.bench", description=description)
    parser.add_argument("kernel", choices=["all", *KERNELS, *COMPOSED])
    parser.add_argument("--case", help="run only this case")
    parser.add_argument("--shape", default="", help="sizes to change, as in m=4096,d=1024")
    parser.add_argument("--small", action="store_true", help="use the small sizes of the tests")
    parser.add_argument("--full-check", action="store_true", help="also check at the timed sizes")
    parser.add_argument("--seconds", type=float, default=1.0, help="time budget of each timing")
    parser.add_argument("--json", type=pathlib.Path, help="append every record to this file")
    args = parser.parse_args(argv)
    kernels = KERNELS + COMPOSED if args.kernel == "all" else [args.kernel]
    plan = [(k, c) for k in kernels for c in cases(k) if args.case in (None, c)]
    if not plan:
        parser.error(f"no case {args.case!r}; {args.kernel} has {', '.join(cases(kernels[0]))}")
    try:
        changed = parse_sizes(args.shape)
    except ValueError as error:
        parser.error(str(error))
    for kernel, name in plan:
        unknown = sorted(set(changed) - set(cases(kernel)[name].sizes))
        if unknown:
            parser.error(f"{kernel} {name} has no size {unknown[0]!r}: {cases(kernel)[name].sizes}")
    if args.json:
        try:
            args.json.open("a").close()
        except OSError as error:
            parser.error(f"--json: {error}")
    # Run the cases.
    print(f"{backends.device_kind()}, jax {jax.__version__}, {datetime.date.today()}")
    if backends.platform() not in backends.BACKEND_OF_PLATFORM:
        print("No accelerator: these are the times of XLA on this machine, not of the kernels.")
    failed = False
    for kernel, name in plan:
        sizes = dict(cases(kernel)[name].small) if args.small else {}
        record = measure(kernel, name, sizes | changed, args.seconds, args.full_check)
        checks = [record, record.get("full_check", {})]
        unchecked = {"check", "full_check"} & set(record["errors"])
        unchecked = unchecked or not all(checked.get("same_bits", True) for checked in checks)
        failed = failed or unchecked or "seconds" not in record
        print(format_line(record), flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(record) + "\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
