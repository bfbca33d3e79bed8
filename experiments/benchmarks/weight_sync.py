"""Measures bytes and seconds of a weight push in every way, and the share of weights that a step changes.

    python -m experiments.benchmarks.weight_sync

A model of 91 million parameters, 182 MB for an engine in bfloat16, is pushed to an engine on the same device, to two
servers on this machine through a folder, and over the network to one of them and to both, which pass shards on. Then the changes of optimiser steps are
pushed, as in reinforcement learning: AdamW from a reset, at rates of 1e-6 (slime's recipes) and ten times as much.
Trainer and servers share one process and its cores. Weights and tokens are random. The distance of a number to the
next bfloat16 does not depend on training, but a batch here touches few rows of the embedding.

Expected: docs/results/training.md. Three minutes.
"""

import dataclasses
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from glm5_jax import presets
from glm5_jax.checkpoint import models
from glm5_jax.checkpoint.engine_dtypes import transfer_dtypes
from glm5_jax.checkpoint.hf_export import named_tensors
from glm5_jax.config import ModelConfig
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.server import Server, ServerConfig
from glm5_jax.model import glm5
from glm5_jax.rl.config import adam_optimizer_config, policy_step_config
from glm5_jax.rl.weights.pusher import PushResult, SyncConfig
from glm5_jax.rl.weights.reshard import ReshardPusher
from glm5_jax.rl.weights.weight_sync import NetworkPusher, SharedStoragePusher
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.gradients import BATCH_KEYS
from glm5_jax.training.step import make_step, reset_optimizer

ROWS, LENGTH = 4, 256
PLAN = ((1e-6, (1, 4, 16)), (1e-5, (1, 4)))  # learning rates, and numbers of steps before a push


def model() -> ModelConfig:
    """Returns a model of two MoE layers after a dense one."""
    return dataclasses.replace(
        presets.tiny(),
        vocab_size=32_768,
        hidden_size=512,
        num_hidden_layers=3,
        intermediate_size=2048,
        moe_intermediate_size=1024,
        n_routed_experts=16,
        num_nextn_predict_layers=0,
        max_position_embeddings=1024,
        eos_token_id=(),
        pad_token_id=None,
        dtype="bfloat16",
    )


def main(cfg: ModelConfig | None = None, plan: tuple = PLAN) -> int:
    """Prints both tables. Returns the exit code."""
    cfg, console = cfg or model(), Console()
    params = glm5.init_params(cfg, jax.random.key(0))
    zero_params = jax.tree.map(jnp.zeros_like, params)
    config = EngineConfig(page_size=16, max_num_seqs=1, prefill_chunk=16, max_length=64)

    def engine() -> Engine:
        return Engine(glm5.Glm5(cfg, params=zero_params), Tokenizer.default(), config)

    def server() -> Server:
        load = models.make_weight_loader(glm5.Glm5(cfg, params=zero_params))
        return Server(engine(), Tokenizer.default(), ServerConfig(port=0), load)

    table = Table("way", "engines", "MB from trainer", "MB per engine", "seconds")
    with (
        server().running() as one,
        server().running() as two,
        tempfile.TemporaryDirectory() as disk,
    ):
        urls, delta = [one, two], SyncConfig(delta=True)
        ways = {
            "reshard": ReshardPusher([engine()]),
            "shared storage": SharedStoragePusher(cfg, disk, urls),
            "network to one": NetworkPusher(cfg, urls[:1]),
            "network": (network := NetworkPusher(cfg, urls, delta)),
        }
        for number, (name, pusher) in enumerate(ways.items(), 1):
            for attempt in range(2):  # the first one compiles
                result = pusher.push(params, 2 * number + attempt)
                params = jax.tree.map(lambda x: x * 1.01, params)
            _row(table, name, result)
        console.print(table)
        changes = Table("rate", "steps", "numbers changed", "tensors changed", "MB", "of all", "s")
        for rate, counts in plan:
            _after_steps(changes, cfg, params, network, rate, counts)
        console.print(changes)
    return 0


def _row(table: Table, name: str, result: PushResult) -> None:
    received = max(ack.sent_bytes for ack in result.acks)
    cells = f"{result.sent_bytes / 1e6:.1f}", f"{received / 1e6:.1f}", f"{result.duration_s:.2f}"
    table.add_row(name, str(len(result.acks)), *cells)


def _after_steps(
    table: Table, cfg: ModelConfig, params, network: NetworkPusher, rate: float, counts
) -> None:
    """Pushes all weights, then the changes after each number of steps, each time from a reset optimiser."""
    optimizer = dataclasses.replace(adam_optimizer_config(), frozen=("indexer/",))
    step = make_step(cfg, policy_step_config(), optimizer, lambda _: rate)
    state = step.initialise(jax.random.key(1), jax.tree.map(jnp.copy, params))
    rng, version = np.random.default_rng(0), 100 * round(1e6 * rate)
    network.push(state["params"], version)
    before = dict(named_tensors(state["params"], cfg, transfer_dtypes(cfg)))
    for count in counts:
        for _ in range(count):
            state, _ = step.train(state, batch(cfg, rng))
        version += count
        result = network.push(state["params"], version)
        after = dict(named_tensors(state["params"], cfg, transfer_dtypes(cfg)))
        differ = {n: np.count_nonzero(after[n] != before[n]) for n in after}
        share = sum(differ.values()) / sum(x.size for x in after.values())
        several = f"{np.count_nonzero([*differ.values()])} of {len(differ)}"
        sent, full_bytes = result.acks[0].sent_bytes, result.full_bytes
        cells = f"{rate:g}", str(count), f"{share:.2%}", several, f"{sent / 1e6:.2f}"
        table.add_row(*cells, f"{sent / full_bytes:.2%}", f"{result.duration_s:.2f}")
        before, state = after, reset_optimizer(state)


def batch(cfg: ModelConfig, draw: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns random tokens [b t]."""
    size = ROWS, LENGTH
    index = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), size)
    ones = np.ones(size, np.float32)
    tokens = draw.integers(0, cfg.vocab_size, size, dtype=np.int32)
    return dict(zip(BATCH_KEYS, (tokens, np.ones(size, np.int32), index, ones * (index > 0), ones)))


if __name__ == "__main__":
    sys.exit(main())
