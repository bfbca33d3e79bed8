"""Finds the length from which sparse attention is faster than dense, in our forward.

    python -m experiments.benchmarks.sparse_crossover [LENGTH...]

Runs the first two layers of the baseline model of `glm5_arm.py` (one of them with experts) at batch 1, in float32 with
two threads, both ways in turns, for 1K to 32K tokens in about 10 minutes. Both include the projections and the experts.
Sparse includes scoring and selecting keys. For each length it prints

- the medians of time and their ratio, and the length where the ratio passes 1;
- FLOPs of the attention after selection, counted from the jaxpr: sparse ones double with the length;
- bytes of temporary memory by the compiler's account, and per further token: constant if linear.

Expected: docs/results/cpu_and_kernels.md.
"""

import dataclasses
import math
import statistics
import sys

import jax
import jax.numpy as jnp
from jaxtyping import PyTree
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.glm5_arm import BASELINE
from experiments.benchmarks.measure import Clock, lengths, pin, tokens
from glm5_jax.config import ModelConfig
from glm5_jax.model import glm5
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.mla import Keys, Queries, mla
from glm5_jax.parallel.flops import count_flops

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
SPARSE = dataclasses.replace(BASELINE, num_hidden_layers=2)
DENSE = dataclasses.replace(SPARSE, attention="dense")


@dataclasses.dataclass(frozen=True)
class CrossoverMeasurement:
    """One way at one length: seconds, FLOPs of attention in all layers, bytes of temporaries."""

    seconds: float
    flops: int
    memory: int


def measure(t: int, params: PyTree) -> dict[str, CrossoverMeasurement]:
    """Returns the measurements of both ways at t tokens, in turns."""
    x = jnp.asarray(tokens(1, t))
    compiled = {}
    for way, cfg in (("dense", DENSE), ("sparse", SPARSE)):

        def hidden(params, x, cfg=cfg):
            return glm5.forward(params, x, cfg).hidden

        compiled[way] = jax.jit(hidden).lower(params, x).compile()
        compiled[way](params, x).block_until_ready()
    times = {"dense": [], "sparse": []}
    for _ in range(7 if t <= 8192 else 3):
        for way, run in compiled.items():
            clock = Clock()
            run(params, x).block_until_ready()
            times[way].append(clock.read()["wall"])
    return {
        way: CrossoverMeasurement(
            statistics.median(times[way]),
            attention_flops(t, DENSE if way == "dense" else SPARSE),
            compiled[way].memory_analysis().temp_size_in_bytes,
        )
        for way in compiled
    }


def attention_flops(t: int, cfg: ModelConfig) -> int:
    """Returns FLOPs of `mla` in all layers at t tokens, for an existing selection."""

    def array(*shape, dtype=cfg.dtype):
        return jax.ShapeDtypeStruct((1, t, *shape), dtype)

    n, h, r = cfg.num_attention_heads, cfg.qk_nope_head_dim, cfg.qk_rope_head_dim
    assert cfg.index_topk is not None, "the models of both arms have an indexer"
    sparse = cfg.attention == "sparse" and t > cfg.index_topk
    topk = array(cfg.index_topk, dtype="int32") if sparse else None
    layer = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype),
        glm5.abstract_params(cfg)["dense_layers"]["attn"],
    )

    def attend(w, q, latent, topk):
        queries = Queries(q, 0, None)
        return mla(w, queries, Keys(latent, None), cfg, ExecutionConfig(), topk).y

    latent = array(cfg.kv_lora_rank + r)
    per_layer = count_flops(attend, layer, array(n, h + r), latent, topk)
    return cfg.num_hidden_layers * per_layer


def crossover(ratios: dict[int, float]) -> str:
    """Returns the length from which dense/sparse stays above 1, interpolated between two lengths by their logarithms."""
    known = sorted(ratios)
    below = [t for t in known if ratios[t] <= 1]
    if not below:
        return f"below {known[0]} tokens"
    above = [t for t in known if t > below[-1]]
    if not above:
        return f"above {known[-1]} tokens"
    a, b = below[-1], above[0]
    share = -math.log(ratios[a]) / (math.log(ratios[b]) - math.log(ratios[a]))
    return f"at about {round(a * (b / a) ** share, -2):.0f} tokens"


def main(arguments: list[str]) -> None:
    """Prints the table. arguments: lengths in tokens (none: LENGTHS)."""
    chosen = lengths(arguments, LENGTHS)
    pin()
    jax.config.update("jax_platforms", "cpu")
    params = glm5.init_params(SPARSE, jax.random.key(0))
    names = ("tokens", "dense ms", "sparse ms", "dense / sparse", "dense GFLOP", "sparse GFLOP")
    names += ("dense MB", "sparse MB", "bytes per further token")
    table = Table(*names, title="attention GFLOP: after selection; MB: temporary memory")
    ratios, before = {}, None
    for t in chosen:
        ways = measure(t, params)
        dense, sparse = ways["dense"], ways["sparse"]
        ratios[t] = dense.seconds / sparse.seconds
        slope = f"{(sparse.memory - before[1]) / (t - before[0]):.0f}" if before else ""
        before = (t, sparse.memory)
        row = [str(t), f"{dense.seconds * 1e3:.0f}", f"{sparse.seconds * 1e3:.0f}"]
        row += [f"{ratios[t]:.2f}", f"{dense.flops / 1e9:.1f}", f"{sparse.flops / 1e9:.1f}"]
        row += [f"{dense.memory / 1e6:.0f}", f"{sparse.memory / 1e6:.0f}", slope]
        table.add_row(*row)
        print(f"| {' | '.join(row)} |", flush=True)
    Console().print(table)
    print(f"sparse is faster than dense from: {crossover(ratios)}")


if __name__ == "__main__":
    main(sys.argv[1:])
