"""Plain cached decoding: one prefill, then one token per step for all rows together.

It writes samples during training, runs in tests, and is the reference of the serving engine.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.model.cache import Cache, init_cache
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.glm5 import forward, unstack
from glm5_jax.model.quant import with_int4_experts


def generate(
    params: PyTree,
    prompts: Int[ArrayLike, "b t"],
    cfg: ModelConfig,
    num_new: int,
    *,
    mask: Int[ArrayLike, "b t"] | None = None,
    temperature: float = 0.0,
    key: Array | None = None,
    prefill_chunk: int | None = None,
    capacity: int | None = None,
    execution: ExecutionConfig = ExecutionConfig(),
) -> Int[np.ndarray, "b t+num_new"]:
    """Continues prompts by num_new tokens and returns both.

    A row that has produced one of cfg.eos_token_id continues with cfg.pad_token_id, if both are set.

    Args:
      mask: 0 on the left padding of shorter prompts; None: no padding.
      temperature: 0 is greedy; otherwise tokens are drawn with key.
      prefill_chunk: tokens that enter the cache at a time; None: the full prompt.
      capacity: number of tokens that the cache holds; None: t + num_new.

    Raises ValueError if capacity is too small, the temperature is negative, or a key is missing.
    """
    params, cfg, prompts, segments = prepare(params, prompts, cfg, mask, temperature, key)
    b, t = prompts.shape
    slots = t + num_new if capacity is None else capacity
    if slots < t + num_new:
        raise ValueError(f"capacity {slots} is below prompt {t} + {num_new} new tokens")
    # Prefill.
    cache = init_cache(cfg, b, slots)
    chunk = prefill_chunk or t
    for first in range(0, t, chunk):
        part = slice(first, first + chunk)
        logits, cache = advance(params, prompts[:, part], segments[:, part], cache, cfg, execution)
    # Decode.
    out, ended = [prompts], np.zeros(b, bool)
    for i in range(num_new):
        if temperature:
            assert key is not None, "prepare raises for a temperature without a key"
            token = jax.random.categorical(
                jax.random.fold_in(key, i), logits / temperature, axis=-1
            )
        else:
            token = jnp.argmax(logits, axis=-1)
        token = np.asarray(token, prompts.dtype)
        if cfg.pad_token_id is not None:
            token = np.where(ended, cfg.pad_token_id, token)
            ended |= np.isin(token, cfg.eos_token_id)
        out.append(token[:, None])
        if ended.all():
            out.append(np.full((b, num_new - i - 1), cfg.pad_token_id, prompts.dtype))
            break
        if i + 1 < num_new:
            ones = np.ones((b, 1), np.int32)
            logits, cache = advance(params, token[:, None], ones, cache, cfg, execution)
    return np.concatenate(out, axis=1)


def prepare(
    params: PyTree,
    prompts: Int[ArrayLike, "b t"],
    cfg: ModelConfig,
    mask: Int[ArrayLike, "b t"] | None,
    temperature: float,
    key: Array | None,
) -> tuple[PyTree, ModelConfig, Int[np.ndarray, "b t"], Int[np.ndarray, "b t"]]:
    """Prepares the arguments of `generate`: returns (unstacked params, config to run them, prompts, segments).

    Raises ValueError if the temperature is negative, or positive without a key.
    """
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; it must be 0 (greedy) or positive")
    if temperature and key is None:
        raise ValueError(f"temperature {temperature} needs a key; pass key= or temperature=0")
    prompts = np.asarray(prompts)
    segments = np.ones(prompts.shape, np.int32) if mask is None else np.asarray(mask, np.int32)
    # Experts become int4 once, instead of once per token.
    prepared_cfg = dataclasses.replace(cfg, int4_group=None)
    return unstack_for_decoding(params, cfg), prepared_cfg, prompts, segments


@functools.partial(jax.jit, static_argnames="cfg")
def unstack_for_decoding(params: PyTree, cfg: ModelConfig) -> PyTree:
    """Returns the weights layer by layer, with int4 experts where cfg says so, for decoding on one device.

    The forward then takes a config with int4_group None.
    """
    return unstack(with_int4_experts(params, cfg), cfg)


@functools.partial(jax.jit, static_argnames=("cfg", "execution"), donate_argnames="cache")
def advance(
    params: PyTree,
    tokens: Int[Array, "b t"],
    segments: Int[Array, "b t"],
    cache: Cache,
    cfg: ModelConfig,
    execution: ExecutionConfig,
) -> tuple[Float[Array, "b v"], Cache]:
    """Appends tokens to the cache and returns (logits after the last one, cache)."""
    out = forward(params, tokens, cfg, segment_ids=segments, cache=cache, execution=execution)
    assert isinstance(out.cache, Cache)
    return out.logits[:, -1], out.cache
