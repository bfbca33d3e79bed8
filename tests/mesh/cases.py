"""The smallest model that has every part of GLM-5 and divides over eight devices, and its batch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax import presets
from glm5_jax.core.sharding import sharding_of
from glm5_jax.model import glm5
from glm5_jax.training.step import Rates, StepConfig, gradient_function

ROWS, LENGTH = 8, 32
RATES = Rates(jnp.float32(0.3), jnp.float32(1e-3))
# Weights of the small terms are raised, so that a lost one shows; blocks are smaller than a shard.
STEP = StepConfig(
    balance_weight=0.01,
    z_weight=1e-3,
    index_weight=0.5,
    index_target="served",
    loss_chunk=100,
    query_block=8,
    gather_block=4,
)


@functools.cache
def config(attention: str = "sparse", **changes):
    """Three layers of pairwise different sizes, the last one with a shared selection."""
    cfg = dataclasses.replace(
        presets.tiny(),
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=3,
        q_lora_rank=40,
        kv_lora_rank=24,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=10,
        intermediate_size=48,
        moe_intermediate_size=8,
        n_group=2,
        index_head_dim=12,
        index_topk=11,
        indexer_types=("full", "full", "shared"),
        eos_token_id=(),
        pad_token_id=None,
        attention=attention,
    )
    return dataclasses.replace(cfg, **changes)


@functools.cache
def params(cfg):
    """Weights large enough that attention and routing are far from uniform, biases included."""
    drawn = glm5.init_params(cfg, jax.random.key(0))
    noise = np.random.default_rng(1)

    def spread(x):
        if x.ndim > 2 or x.shape[0] == cfg.vocab_size:
            return 8 * np.asarray(x)
        return np.asarray(x) + 0.1 * noise.standard_normal(x.shape, np.float32)

    return jax.tree.map(spread, drawn)


@functools.cache
def batch():
    """Packed documents of several lengths, padding, masked and weighted tokens."""
    draw = np.random.default_rng(0)
    segments = np.ones((ROWS, LENGTH), np.int32)
    segments[:, 20:] = 2
    segments[3, 5:] += 1
    segments[0, 27:] = 0
    begins = np.diff(segments, axis=1, prepend=-1) != 0
    index = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), segments.shape)
    start = np.maximum.accumulate(np.where(begins, index, 0), axis=1)
    mask = (segments > 0) & ~begins & (draw.random(segments.shape) < 0.8)
    return {
        "token_ids": draw.integers(0, 64, segments.shape, dtype=np.int32),
        "segment_ids": segments,
        "positions": index - start,
        "loss_mask": mask.astype(np.float32),
        "ce_weight": draw.uniform(0.5, 1.5, segments.shape).astype(np.float32),
    }


def step_of(cfg):
    """STEP, without the indexers' loss where there are none."""
    return STEP if cfg.index_topk else dataclasses.replace(STEP, index_weight=0.0)


@functools.cache
def reference(cfg):
    """(objective, LossParts, gradients) on one device."""
    return jax.device_get(
        jax.jit(gradient_function(cfg, step_of(cfg)))(params(cfg), batch(), RATES)
    )


def shardings_of(letters, shapes, mesh):
    """Tree of NamedShardings of weights declared with these letters."""
    return jax.tree.map(lambda own, x: sharding_of(x, own, mesh), letters, shapes)
