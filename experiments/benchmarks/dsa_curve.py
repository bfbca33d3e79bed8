"""Measures the speed-up of sparse over dense attention by length: one layer of `pallas_kernels.dsa`, on this CPU.

    python -m experiments.benchmarks.dsa_curve [LENGTH...]

Has GLM-5's ratios of FLOPs in miniature (8 heads of 64, latents of 128 + 16, 4 index heads of 32, 256 selected keys),
in float32, from projected queries and cached latents to the heads' outputs, for 1K to 32K tokens in about 20 minutes.
There are two settings: one CPU device with two threads and one sequence, and a mesh of two CPU devices with a sequence
each. In each, dense and sparse take turns. Prints medians of wall time, the ratios of wall and of CPU time, and the
length where the ratio of wall times passes 1.

Expected: docs/results/cpu_and_kernels.md.
"""

import functools
import statistics
import sys

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.measure import THREADS, Clock, lengths, pin
from experiments.benchmarks.sparse_crossover import crossover
from pallas_kernels import dsa

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
REPLICATED = ("k_b", "v_b")  # weights, which every device holds
SETTINGS = ("one device", f"mesh of {THREADS}")


def inputs(t: int, rows: int) -> dict[str, jax.Array]:
    """Returns the inputs of both ways at t tokens; each row is a sequence, sampled separately."""
    sizes = dsa.MINIATURE | {"t": t}
    draw = jax.jit(lambda key: dsa.inputs(sizes, key, jnp.float32))
    drawn = [draw(jax.random.key(row)) for row in range(rows)]
    return {
        name: x
        if name in REPLICATED
        else jnp.concatenate([row_inputs[name] for row_inputs in drawn])
        for name, x in drawn[0].items()
    }


def compile_ways(
    t: int, setting: str
) -> tuple[dict[str, jax.stages.Compiled], dict[str, jax.Array]]:
    """Returns ({"dense", "sparse"}: compiled program, its input) at t tokens."""
    sizes = dsa.MINIATURE | {"t": t}
    is_single = setting == SETTINGS[0]
    x = inputs(t, 1 if is_single else THREADS)
    specs = {name: P() if name in REPLICATED else P("data") for name in x}
    if not is_single:
        mesh = jax.make_mesh((THREADS,), ("data",))
        x = jax.device_put(x, {name: jax.NamedSharding(mesh, spec) for name, spec in specs.items()})
    programs = {}
    for way, attend in (("dense", dsa.dense), ("sparse", dsa.sparse)):
        run = functools.partial(attend, sizes=sizes)
        if not is_single:
            run = jax.shard_map(
                run, mesh=mesh, in_specs=(specs,), out_specs=P("data"), check_vma=False
            )
        programs[way] = jax.jit(run).lower(x).compile()
    return programs, x


def measure(t: int, setting: str) -> dict[str, dict[str, float]]:
    """Returns {"dense", "sparse"}: {"wall", "cpu"}, median seconds of the two ways in turns."""
    programs, x = compile_ways(t, setting)
    times = {way: [] for way in programs}
    for turn in range(8 if t <= 8192 else 4):
        for way, run in programs.items():
            clock = Clock()
            run(x).block_until_ready()
            if turn:  # the first run also pays for first touches of memory
                times[way].append(clock.read())
    return {
        way: {name: statistics.median(one[name] for one in runs) for name in ("wall", "cpu")}
        for way, runs in times.items()
    }


def main(arguments: list[str]) -> None:
    """Prints the table. arguments: lengths in tokens (none: LENGTHS)."""
    chosen = lengths(arguments, LENGTHS)
    pin()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", THREADS)
    names = ("setting", "tokens", "dense ms", "sparse ms", "dense / sparse", "the same in CPU time")
    table, lines = Table(*names), []
    for setting in SETTINGS:
        ratios = {}
        for t in chosen:
            times = measure(t, setting)
            ratio = {n: times["dense"][n] / times["sparse"][n] for n in ("wall", "cpu")}
            ratios[t] = ratio["wall"]
            row = [setting, str(t), *(f"{times[way]['wall'] * 1e3:.0f}" for way in times)]
            row += [f"{ratio[n]:.2f}" for n in ratio]
            table.add_row(*row)
            print(f"| {' | '.join(row)} |", flush=True)
        lines.append(f"{setting}: sparse is faster than dense from: {crossover(ratios)}")
    Console().print(table)
    print("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
