"""Times the kernels at the shapes of GLM-5, and checks them first.

    python -m pallas_kernels.bench KERNEL [--case NAME] [--shape m=4096,d=1024] [--small]
    python -m pallas_kernels.bench all --json results.jsonl

Prints a line per case: the time of a call, its FLOP/s and bytes/s by `cost`, its share of the chip's floor, and
how many times longer XLA and each library on this machine take (torch, tokamax, jax's own). Every case is
run twice at its small sizes too, and must give the same bits; what it gives is compared with XLA's.
--full-check does the same at the sizes that are timed, which `dsa` beyond 16K tokens has no memory for.
`dsa` is one layer, sparse, whose baselines are dense: the ratios are what sparse attention saves.
`all` is for an hour with an accelerator: it needs no package but jax and numpy.

On a machine without an accelerator only XLA runs, and a line says so: interpreted kernels have no speed.
"""

import argparse
import datetime
import json
import pathlib
import statistics
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import baselines, chips, cost as costs, dispatch
from pallas_kernels.cases import COMPOSED, KERNELS, Case, cases, worst_difference

# Of a baseline's results from XLA's, as a share of the largest: bfloat16 rounds to 0.004.
DISAGREES = 0.03


class Timing(NamedTuple):
    """Seconds of one call: median over runs of `calls` calls each, and the fastest of them."""

    median: float
    best: float


RUNS = 7


def time_runs(spent, seconds: float) -> Timing:
    """Of RUNS runs in about so many seconds, fewer if a call is long; spent(calls): the seconds of so many."""
    spent(1)
    once = max(spent(1), 1e-6)
    runs = max(1, min(RUNS, int(seconds / once)))
    calls = max(1, min(1000, int(seconds / runs / once)))
    times = [spent(calls) / calls for _ in range(runs)]
    return Timing(statistics.median(times), min(times))


def repeated(function):
    """The program (inputs, calls) -> float32 that calls function(inputs) so often in one loop.

    Each call depends on the one before it, or XLA takes it out of the loop. A number of every result is added
    up behind a barrier, or XLA leaves out results that nothing reads, and computes no more of the others than that number.
    """

    def repeat(inputs, calls):
        def once(_, carry):
            tied, carry = lax.optimization_barrier((inputs, carry))
            results = jax.tree.leaves(lax.optimization_barrier(function(tied)))
            return carry + sum(x.reshape(-1)[0].astype(jnp.float32) for x in results)

        return lax.fori_loop(0, calls, once, jnp.zeros((), jnp.float32))

    return repeat


def clock(function, inputs):
    """The seconds that so many calls of function(inputs) take, which are the loop of one program."""

    run = jax.jit(repeated(function))

    def spent(calls: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(inputs, calls))
        return time.perf_counter() - start

    return spent


def check(case: Case, sizes, implementation, seed: int = 0) -> dict:
    """Runs a case twice and XLA once: {"same_bits": bool, "difference": from XLA's}."""
    inputs = jax.jit(lambda key: case.inputs(sizes, key))(jax.random.key(seed))
    run = jax.jit(lambda inputs: case.run(inputs, sizes, implementation))
    first, second = (jax.device_get(run(inputs)) for _ in range(2))
    same = all(map(has_same_bits, *map(jax.tree.leaves, (first, second))))
    expected = jax.device_get(jax.jit(lambda inputs: case.run(inputs, sizes, "ref"))(inputs))
    return {"same_bits": same, "difference": worst_difference(first, expected)}


def has_same_bits(a, b) -> bool:
    """Whether two arrays of one shape and type are equal to the bit; NaN equals the same NaN."""
    return np.array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def agrees(kernel: str, name: str, baseline: baselines.Baseline) -> float:
    """How far a baseline's results are from XLA's at the small sizes; selected places in any order."""
    case = cases(kernel)[name]
    inputs = jax.jit(lambda key: case.inputs(case.small, key))(jax.random.key(0))
    got = baselines.result_on_host(baseline, inputs, case.small)
    expected = jax.jit(lambda inputs: case.run(inputs, case.small, "ref"))(inputs)
    both = zip(got, jax.tree.leaves(jax.device_get(expected)))
    ordered = [[np.sort(x) if x.dtype.kind == "i" else x for x in pair] for pair in both]
    return max(worst_difference(*pair) for pair in ordered)


def measure(kernel: str, name: str, sizes, seconds: float, full_check: bool = False) -> dict:
    """Returns one line's figures: of the Pallas form for this platform, of XLA, and of libraries."""
    case = cases(kernel)[name]
    sizes = dict(case.sizes) | sizes
    best = dispatch.OF_PLATFORM.get(dispatch.platform(), "ref")
    found = {"kernel": kernel, "case": name, "sizes": sizes, "device": dispatch.device_kind()}
    found |= {"date": datetime.date.today().isoformat(), "jax": jax.__version__, "errors": {}}
    inputs = jax.jit(lambda key: case.inputs(sizes, key))(jax.random.key(0))

    def timed(who, spent):
        try:
            return time_runs(spent(), seconds)
        except Exception as error:  # of whatever library it is: the others are timed nevertheless
            found["errors"][who] = told(error)

    def of(implementation):
        return clock(lambda x: case.run(x, sizes, implementation), inputs)

    xla = timed("XLA", lambda: of("ref"))
    ours = timed(best, lambda: of(best)) if best != "ref" else None
    if ours:
        for of, name_of in ((case.small, "check"), (sizes, "full_check")):
            if of is sizes and not full_check:
                continue
            try:
                checked = check(case, dict(of), best)
            except Exception as error:  # the cases that follow are worth the device's time
                found["errors"][name_of] = told(error)
            else:
                found |= {name_of: checked} if of is sizes else checked
    found["libraries"] = {}
    for who, baseline in baselines.present(kernel, name).items():
        found["libraries"][who] = time_baseline(kernel, name, baseline, inputs, sizes, timed, who)
    spent = ours or xla
    if spent is None:
        return found
    cost, chip = case.cost(sizes), chips.chip_of(found["device"])
    found |= {"implementation": best if ours else "ref", "seconds": spent.median}
    found |= {"best_seconds": spent.best, "tflops": cost.flops / spent.median / 1e12}
    found |= {"gb_per_s": cost.bytes / spent.median / 1e9}
    least = costs.floor(cost, chip) if chip else None
    if least:
        found["share_of_floor"] = least / spent.median
    if ours and xla:
        found["times_xla"] = xla.median / ours.median
    return found


def told(error: Exception) -> str:
    """One line of an error."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def time_baseline(kernel, name, baseline, inputs, sizes, timed, who) -> float | None:
    """Its median seconds, or None with the reason among the errors."""

    def spent():
        if baseline.same and (difference := agrees(kernel, name, baseline)) > DISAGREES:
            raise ValueError(f"its results differ from XLA's by {difference:.1e}")
        if baseline.library == "torch":
            return baselines.torch_calls().clock(baseline.run, inputs, sizes)
        return clock(lambda x: baseline.run(x, sizes), inputs)

    found = timed(who, spent)
    return found.median if found else None


def line(found: dict) -> str:
    """One printed line."""
    head = f"{found['kernel']:24}{found['case']:20}"
    errors = "; ".join(f"{who} failed: {what}" for who, what in found["errors"].items())
    if "seconds" not in found:
        return f"{head}{errors}"
    text = f"{head}{found['implementation']:5}{found['seconds'] * 1e3:10.3f} ms"
    text += f"{found['tflops']:9.2f} TFLOP/s{found['gb_per_s']:9.1f} GB/s"
    if "share_of_floor" in found:
        text += f"  {found['share_of_floor']:.0%} of the floor"
    if "times_xla" in found:
        text += f"  {found['times_xla']:.2f}x XLA"
    for who, seconds in found["libraries"].items():
        if seconds:
            text += f"  {seconds / found['seconds']:.2f}x {who}"
    if "difference" in found:
        bits = "same bits twice" if found["same_bits"] else "BITS DIFFER BETWEEN RUNS"
        text += f"  {bits}, {found['difference']:.1e} from XLA"
    if "full_check" in found:
        bits = "same bits twice" if found["full_check"]["same_bits"] else "BITS DIFFER"
        text += f"  full size: {bits}, {found['full_check']['difference']:.1e} from XLA"
    return f"{text}  {errors}".rstrip()


def parse_sizes(text: str) -> dict[str, int]:
    """{"m": 4096} of "m=4096"; ValueError if it is not that."""
    pairs = [part.partition("=") for part in text.split(",") if part]
    wrong = [name for name, _, value in pairs if not value.isdigit() or int(value) < 1]
    if wrong:
        raise ValueError(
            f"--shape {text!r}: {', '.join(wrong)} needs a positive integer, as in m=4096"
        )
    return {name: int(value) for name, _, value in pairs}


def main(argv=None) -> int:
    description = __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser("python -m pallas_kernels.bench", description=description)
    parser.add_argument("kernel", choices=["all", *KERNELS, *COMPOSED])
    parser.add_argument("--case", help="only this case")
    parser.add_argument("--shape", default="", help="sizes to change, as in m=4096,d=1024")
    parser.add_argument("--small", action="store_true", help="the sizes of the tests")
    parser.add_argument("--full-check", action="store_true", help="also compare at these sizes")
    parser.add_argument("--seconds", type=float, default=1.0, help="to spend on each timing")
    parser.add_argument("--json", type=pathlib.Path, help="also append every line to this file")
    args = parser.parse_args(argv)
    wanted = KERNELS + COMPOSED if args.kernel == "all" else [args.kernel]
    plan = [(k, c) for k in wanted for c in cases(k) if args.case in (None, c)]
    if not plan:
        parser.error(f"no case {args.case!r}; {args.kernel} has {', '.join(cases(wanted[0]))}")
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
    print(f"{dispatch.device_kind()}, jax {jax.__version__}, {datetime.date.today()}")
    if dispatch.platform() not in dispatch.OF_PLATFORM:
        print("No accelerator: these are the times of XLA on this machine, not of the kernels.")
    failed = False
    for kernel, name in plan:
        sizes = dict(cases(kernel)[name].small) if args.small else {}
        found = measure(kernel, name, sizes | changed, args.seconds, args.full_check)
        checks = [found, found.get("full_check", {})]
        unchecked = {"check", "full_check"} & set(found["errors"])
        unchecked = unchecked or not all(checked.get("same_bits", True) for checked in checks)
        failed = failed or unchecked or "seconds" not in found
        print(line(found), flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(found) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
