"""Config, weights and batch of the smallest model with every part of GLM-5 that divides over eight devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax import presets
from glm5_jax.model import glm5
from glm5_jax.parallel.sharding import sharding_of
from glm5_jax.training.gradients import Rates, gradient_function
from glm5_jax.training.step_config import StepConfig

ROWS, LENGTH = 8, 32
RATES = Rates(jnp.float32(0.3), jnp.float32(1e-3))
# The weights of small loss terms are raised, so that tests detect a missing one. Blocks are smaller than a shard.
STEP = StepConfig(
    balance_weight=0.01,
    z_weight=1e-3,
    index_weight=0.5,
    index_target="shared_layers",
    loss_chunk=100,
    query_block=8,
    gather_block=4,
)


@functools.cache
def config(attention: str = "sparse", **changes):
    """Returns a config of three layers whose sizes all differ; the last one shares a selection."""
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


def small(attention: str = "sparse", **changes):
    """Returns a config of one MoE layer without multi-token prediction, which compiles in seconds."""
    few = dict(num_hidden_layers=1, first_k_dense_replace=0)
    few |= dict(num_nextn_predict_layers=0, indexer_types=None)
    return config(attention, **few | changes)


def pair(attention: str = "sparse", **changes):
    """Returns a config of a dense layer and an MoE layer that shares its selection, without MTP."""
    few = dict(num_hidden_layers=2, num_nextn_predict_layers=0, indexer_types=("full", "shared"))
    return config(attention, **few | changes)


@functools.cache
def params(cfg):
    """Returns weights and biases so large that attention and routing are far from uniform."""
    drawn = glm5.init_params(cfg, jax.random.key(0))
    noise = np.random.default_rng(1)

    def spread(x):
        if x.ndim > 2 or x.shape[0] == cfg.vocab_size:
            return 8 * np.asarray(x)
        return np.asarray(x) + 0.1 * noise.standard_normal(x.shape, np.float32)

    return jax.tree.map(spread, drawn)


@functools.cache
def batch():
    """Returns a batch of packed documents with padding and with masked and weighted tokens."""
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
    """Returns STEP, without the indexers' loss if the model has none."""
    return STEP if cfg.index_topk else dataclasses.replace(STEP, index_weight=0.0)


@functools.cache
def reference(cfg, mtp_steps: int = STEP.mtp_steps):
    """Returns (objective, LossParts, gradients) of one device, without blocks of queries and remat."""
    changes = dict(query_block=LENGTH, gather_block=LENGTH, remat="none", mtp_steps=mtp_steps)
    step = dataclasses.replace(step_of(cfg), **changes)
    return jax.device_get(jax.jit(gradient_function(cfg, step))(params(cfg), batch(), RATES))


def shardings_of(letters, shapes, mesh):
    """Returns a tree of NamedShardings of weights declared with these letters."""
    return jax.tree.map(lambda names, x: sharding_of(x, names, mesh), letters, shapes)
