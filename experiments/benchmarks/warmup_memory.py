"""Measures the memory of a DSA warm-up step up to 32K tokens: is it linear in the tokens, apart from the weights?

    python -m experiments.benchmarks.warmup_memory

The indexers train on the attention probabilities of all heads, summed. The shortest way to that target, an array
[n t t] of them, would be quadratic. Two parts:

- ran: a model of one layer makes a warm-up step at 32,768 tokens on this CPU. Printed: the process's peak of resident
  memory during the step, above its memory before (weights, optimiser, batch, compiled program), next to the size of
  one float32 [n t t];
- compiled: the same step for one layer with GLM-5's widths, at 8K, 16K and 32K tokens, from shapes only. Printed: bytes
  of temporary memory by the compiler's account, and per further token, which is constant if memory is linear in the
  tokens and doubles from row to row if it is quadratic. Weights in the compute dtype are part of it and cancel in the
  difference.

Expected: 984 MB above weights and program, a 17th of one [n t t]; 12.2, 22.6 and 42.3 GB; linear. Three minutes.

Linux only: the peak is /proc's VmHWM, reset before the step.
"""

import dataclasses
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.measure import Clock, pin
from experiments.dsa_warmup import TRUNK, make_warmup_schedule
from glm5_jax import presets
from glm5_jax.config import ModelConfig
from glm5_jax.training.gradients import BATCH_KEYS
from glm5_jax.training.optimizer import OptimizerConfig
from glm5_jax.training.schedule import make_schedule
from glm5_jax.training.step import Step, make_step
from glm5_jax.training.step_config import StepConfig

RUN_LENGTH = 32_768
LENGTHS = (8192, 16_384, 32_768)


def miniature() -> ModelConfig:
    """Returns a model of one layer with four narrow heads."""
    return dataclasses.replace(
        presets.tiny(),
        vocab_size=256,
        hidden_size=32,
        num_hidden_layers=1,
        first_k_dense_replace=1,
        num_attention_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        intermediate_size=32,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=2048,
        num_nextn_predict_layers=0,
        max_position_embeddings=RUN_LENGTH,
        eos_token_id=(),
        pad_token_id=None,
        attention="dense",
    )


def one_layer() -> ModelConfig:
    """Returns GLM-5's first layer, with its embedding and output head."""
    return dataclasses.replace(
        presets.glm5(),
        num_hidden_layers=1,
        first_k_dense_replace=1,
        num_nextn_predict_layers=0,
        attention="dense",
    )


def warm_up(cfg: ModelConfig) -> Step:
    """Returns the step of experiments/dsa_warmup.py."""
    config = StepConfig(mtp_steps=0, index_weight=1.0)
    optimizer = OptimizerConfig(frozen=(TRUNK,), ns_dtype="float32")
    return make_step(cfg, config, optimizer, make_schedule(make_warmup_schedule(1000)))


def batch(t: int) -> dict[str, np.ndarray]:
    """Returns a batch of one row of t tokens, one document."""
    rows = {name: np.ones((1, t), np.int32) for name in BATCH_KEYS}
    rows |= {name: np.ones((1, t), np.float32) for name in ("loss_mask", "ce_weight")}
    ids = np.random.default_rng(0).integers(0, 256, (1, t), dtype=np.int32)
    return rows | {"token_ids": ids, "positions": np.arange(t, dtype=np.int32)[None]}


def resident_bytes(name: str) -> int:
    """Returns bytes of this process by a field of /proc/self/status: VmRSS now, VmHWM at its peak."""
    text = pathlib.Path("/proc/self/status").read_text()
    match = re.search(rf"^{name}:\s+(\d+) kB$", text, re.M)
    if match is None:
        raise ValueError(f"/proc/self/status has no field {name!r} in kB; use one such as VmRSS")
    return 1024 * int(match[1])


def run(cfg: ModelConfig, t: int) -> tuple[int, float]:
    """Returns (bytes of the peak above the memory before, CPU seconds) of one step at t tokens."""
    step = warm_up(cfg)
    state = jax.block_until_ready(step.initialise(jax.random.key(0)))
    placed = jax.device_put(batch(t))
    program = step.train.lower(state, placed).compile()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
    before, clock = resident_bytes("VmRSS"), Clock()
    _, metrics = jax.block_until_ready(program(state, placed))
    peak = resident_bytes("VmHWM") - before
    if not np.isfinite(metrics["loss"]["indexer"]):
        raise FloatingPointError(f"the indexers' loss is {metrics['loss']['indexer']}")
    return peak, clock.read()["cpu"]


def compiled_bytes(cfg: ModelConfig, t: int) -> int:
    """Returns bytes of temporary memory of a step at t tokens, without allocating anything."""
    step = warm_up(cfg)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch(t).items()}
    return step.train.lower(step.abstract, shapes).compile().memory_analysis().temp_size_in_bytes


def square_bytes(cfg: ModelConfig, t: int) -> int:
    """Returns bytes of one float32 [n t t]."""
    return cfg.num_attention_heads * t * t * jnp.dtype("float32").itemsize


def growth(bytes_by_length: dict[int, int]) -> dict[int, float]:
    """Returns bytes per further token, from each length to the next."""
    lengths = sorted(bytes_by_length)
    return {
        t: (bytes_by_length[t] - bytes_by_length[before]) / (t - before)
        for before, t in zip(lengths, lengths[1:])
    }


def main() -> int:
    """Prints both parts. Returns 1 if memory is not linear, else 0."""
    pin()
    jax.config.update("jax_platforms", "cpu")
    clock, cfg = Clock(), miniature()
    peak, seconds = run(cfg, RUN_LENGTH)
    full_square = square_bytes(cfg, RUN_LENGTH)
    print(
        f"ran at {RUN_LENGTH} tokens: peak {peak / 1e6:,.0f} MB above weights and program, 1/{full_square / peak:.0f} "
        f"of the {full_square / 1e6:,.0f} MB of one [n t t]; {seconds:.0f} s of CPU time"
    )
    cfg = one_layer()
    bytes_by_length = {t: compiled_bytes(cfg, t) for t in LENGTHS}
    slopes = growth(bytes_by_length)
    names = ("tokens", "temporary GB", "KB per further token", "GB of one [n t t]")
    table = Table(*names, title="A layer of GLM-5's widths, compiled")
    for t, size in bytes_by_length.items():
        slope = f"{slopes[t] / 1e3:.1f}" if t in slopes else ""
        table.add_row(str(t), f"{size / 1e9:.2f}", slope, f"{square_bytes(cfg, t) / 1e9:.1f}")
    Console().print(table)
    linear = max(slopes.values()) < 1.2 * min(slopes.values())
    print(f"linear in the tokens: {'yes' if linear else 'no'}; {clock.read()['cpu']:.0f} s in all")
    return 0 if linear else 1


if __name__ == "__main__":
    sys.exit(main())
