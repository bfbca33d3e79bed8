"""Plain cached decoding: prefill once, then one token at a time, all rows in step.

For samples during training, for tests and as the reference of the serving engine.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.config import ModelConfig
from glm5_jax.model.cache import init_cache
from glm5_jax.model.glm5 import forward, unstack
from glm5_jax.model.plan import Plan
from glm5_jax.model.quant import settled


def generate(
    params,
    prompts,
    cfg: ModelConfig,
    num_new: int,
    *,
    mask=None,
    temperature: float = 0.0,
    key=None,
    prefill_chunk: int | None = None,
    capacity: int | None = None,
    plan: Plan = Plan(),
) -> np.ndarray:
    """int[b, t + num_new]: prompts int[b t] continued by num_new tokens.

    mask [b t] is 0 on the left padding of shorter prompts. temperature 0 is greedy, otherwise key
    draws. prefill_chunk tokens enter the cache at a time (default: the whole prompt). A row that has
    produced one of cfg.eos_token_id goes on with cfg.pad_token_id (if both are set).
    capacity: tokens the cache holds (default: what is needed).
    """
    params, cfg, prompts, segments = prepare(params, prompts, cfg, mask, temperature, key)
    b, t = prompts.shape
    capacity = capacity or t + num_new
    if capacity < t + num_new:
        raise ValueError(f"capacity {capacity} is below prompt {t} + {num_new} new tokens")
    cache = init_cache(cfg, b, capacity)
    chunk = prefill_chunk or t
    for first in range(0, t, chunk):
        part = slice(first, first + chunk)
        logits, cache = advance(params, prompts[:, part], segments[:, part], cache, cfg, plan)
    out, ended = [prompts], np.zeros(b, bool)
    for i in range(num_new):
        if temperature:
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
            logits, cache = advance(params, token[:, None], ones, cache, cfg, plan)
    return np.concatenate(out, axis=1)


def prepare(params, prompts, cfg: ModelConfig, mask, temperature, key):
    """(params layer by layer, the config that computes with them, prompts, their segments) of
    `generate`'s arguments; ValueError for a negative temperature, or one without a key."""
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; it must be 0 (greedy) or positive")
    if temperature and key is None:
        raise ValueError(f"temperature {temperature} needs a key; pass key= or temperature=0")
    prompts = np.asarray(prompts)
    segments = np.ones(prompts.shape, np.int32) if mask is None else np.asarray(mask, np.int32)
    # Experts become int4 once, not once per token.
    plain = dataclasses.replace(cfg, int4_group=None)
    return layers_of(params, cfg), plain, prompts, segments


@functools.partial(jax.jit, static_argnames="cfg")
def layers_of(params, cfg: ModelConfig):
    """The weights layer by layer, experts as int4 where cfg says so: for decoding on one device, with
    int4_group None."""
    return unstack(settled(params, cfg), cfg)


@functools.partial(jax.jit, static_argnames=("cfg", "plan"), donate_argnames="cache")
def advance(params, tokens, segments, cache, cfg, plan):
    """Logits [b v] after the last of these tokens, and the cache that holds them."""
    out = forward(params, tokens, cfg, segment_ids=segments, cache=cache, plan=plan)
    return out.logits[:, -1], out.cache
