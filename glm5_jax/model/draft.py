"""Speculative decoding with the shared MTP layer: drafts a few tokens and verifies all in one forward.

The draft is the chain of training (mtp.py): step k joins the normed hidden state of step k - 1 with the
embedding of the token drafted before it. Drafting and training differ in the keys that a step attends to:

- As GLM-5 is served, the MTP layer has one cache with one entry per token. That entry is what step 1
  computed from the *trunk's* hidden state.
- A draft step appends an entry, which the next verification overwrites with the trunk's.
- So step k > 1 attends to trunk-derived entries, except for the k - 1 newest. In training, step k attends to
  entries of step k at every position. (GLM-5.2 removes this mismatch by training on the cache of step 1.)
- Entries of the same token have the same distance to the query in both. Step 1 attends to the same
  entries as in training.

Rejection sampling makes the text lossless: it has the distribution of `generate`'s text, and equals it
when greedy.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int, PyTree

from glm5_jax.config import RECURRENT_KINDS, ModelConfig
from glm5_jax.model.cache import Cache, init_cache
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.generate import prepare
from glm5_jax.model.glm5 import forward, forward_mtp


class SpeculativeOutput(NamedTuple):
    """Result of `speculate`.

    Attributes:
      tokens: prompts and their continuations, as `generate` returns them.
      accepted: number of tokens that each verification added to a row, including the one that it
        draws itself; 0 once the row has ended.
    """

    tokens: Int[np.ndarray, "b t+num_new"]
    accepted: Int[np.ndarray, "b rounds"]


def speculate(
    params: PyTree,
    prompts: Int[ArrayLike, "b t"],
    cfg: ModelConfig,
    num_new: int,
    *,
    num_speculative_tokens: int = 4,
    mask: Int[ArrayLike, "b t"] | None = None,
    temperature: float = 0.0,
    key: Array | None = None,
    execution: ExecutionConfig = ExecutionConfig(),
) -> SpeculativeOutput:
    """Decodes like `generate`, but verifies num_speculative_tokens drafted tokens at a time.

    - Greedy text equals that of `generate`, unless two logits tie within rounding: logits come out of a
      product of num_speculative_tokens + 1 rows.
    - Rows accept independently of each other; a row that has ended waits for the others.
    - Drafts run up to num_speculative_tokens positions ahead of the text.

    num_speculative_tokens: drafted tokens per verification (4 in paper Table 2). The other arguments are those of
    `generate`.

    Raises ValueError if the model has no MTP layer, has recurrent layers, or has too few positions.
    """
    for name, value in (("num_new", num_new), ("num_speculative_tokens", num_speculative_tokens)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be positive")
    if not cfg.num_nextn_predict_layers:
        raise ValueError("the model has no MTP layer to draft with; use generate")
    if recurrent := sorted(set(cfg.layer_kinds) & set(RECURRENT_KINDS)):
        raise ValueError(
            f"the model has {', '.join(recurrent)} layers, whose state cannot be rolled back when a "
            "verification rejects drafts; use generate"
        )
    params, cfg, prompts, segments = prepare(params, prompts, cfg, mask, temperature, key)
    b, t = prompts.shape
    key, temperature = jax.random.key(0) if key is None else key, float(temperature)
    run = dict(cfg=cfg, execution=execution, num_speculative_tokens=num_speculative_tokens)
    capacity = t + num_new + num_speculative_tokens
    caches = (init_cache(cfg, b, capacity), init_cache(cfg, b, capacity, num_layers=1))
    state = prefill(
        params, prompts, segments, caches, num_new, temperature, jax.random.fold_in(key, 0), **run
    )
    # Verify until every row has ended.
    new = np.full((b, num_new), cfg.pad_token_id or 0, prompts.dtype)
    new[:, 0] = state.pending
    filled, accepted = np.ones(b, int), []
    while np.any(state.left):
        round_key = jax.random.fold_in(key, len(accepted) + 1)
        state, tokens, count = verify_round(params, state, temperature, round_key, **run)
        tokens, count = np.asarray(tokens), np.asarray(count)
        for row, (start, n) in enumerate(zip(filled, count)):
            new[row, start : start + n] = tokens[row, :n]
        filled += count
        accepted.append(count)
    accepted = np.stack(accepted, 1) if accepted else np.zeros((b, 0), int)
    return SpeculativeOutput(tokens=np.concatenate([prompts, new], 1), accepted=accepted)


class DraftState(NamedTuple):
    """State between two verifications.

    All rows end at the same slot of the caches: short rows have more padding on the left, because
    `Cache.length` is one for all rows.

    Attributes:
      trunk, mtp: caches of the trunk and of the MTP layer.
      pending: newest token of each row, which the trunk has not read.
      position: position of the newest token in its row.
      left: number of tokens that the row may still take.
      drafts: drafted tokens after it.
      draft_probs: distributions that the drafts were drawn from.
    """

    trunk: Cache
    mtp: Cache
    pending: Int[Array, " b"]
    position: Int[Array, " b"]
    left: Int[Array, " b"]
    drafts: Int[Array, "b k"]
    draft_probs: Float[Array, "b k v"]


_STATIC = ("cfg", "execution", "num_speculative_tokens")


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames="caches")
def prefill(
    params: PyTree,
    prompts: Int[Array, "b t"],
    segments: Int[Array, "b t"],
    caches: tuple[Cache, Cache],
    num_new: int,
    temperature: float | Float[Array, ""],
    key: Array,
    *,
    cfg: ModelConfig,
    execution: ExecutionConfig,
    num_speculative_tokens: int,
) -> DraftState:
    """Reads the prompts, draws the token after each, and drafts the following ones.

    caches: empty caches of the trunk and of the MTP layer.
    """
    b, t = prompts.shape
    trunk, mtp = caches
    out = forward(params, prompts, cfg, segment_ids=segments, cache=trunk, execution=execution)
    draw_key, draft_key = jax.random.split(key)
    first = _draw(draw_key, _probs(out.logits[:, -1], temperature))
    _, left = _truncate(first[:, None], jnp.ones(b, jnp.int32), jnp.full(b, num_new), cfg)
    positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t))
    following = jnp.concatenate([prompts[:, 1:], first[:, None]], 1)
    count = jnp.full(b, t, jnp.int32)
    verified = _Verified(out.hidden, following, positions, segments, count)
    shift = _Shift(jnp.zeros_like(count), out.cache.length)
    mtp, drafts, draft_probs = _draft(
        params, verified, mtp, shift, temperature, draft_key, cfg, execution, num_speculative_tokens
    )
    return DraftState(
        trunk=out.cache,
        mtp=mtp,
        pending=first,
        position=count,
        left=left,
        drafts=drafts,
        draft_probs=draft_probs,
    )


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames="state")
def verify_round(
    params: PyTree,
    state: DraftState,
    temperature: float | Float[Array, ""],
    key: Array,
    *,
    cfg: ModelConfig,
    execution: ExecutionConfig,
    num_speculative_tokens: int,
) -> tuple[DraftState, Int[Array, "b k+1"], Int[Array, " b"]]:
    """Verifies the drafts and drafts again; returns (state, tokens, number of valid tokens per row)."""
    verify_key, draft_key = jax.random.split(key)
    tokens = jnp.concatenate([state.pending[:, None], state.drafts], 1)
    offsets = jnp.arange(num_speculative_tokens + 1, dtype=jnp.int32)
    positions = state.position[:, None] + offsets
    out = forward(params, tokens, cfg, positions=positions, cache=state.trunk, execution=execution)
    probs = _probs(out.logits, temperature)
    new, count = verify(verify_key, state.drafts, state.draft_probs, probs)
    count, left = _truncate(new, count, state.left, cfg)
    # Rows have accepted different numbers of tokens: shift their entries so that all end at one slot.
    position = state.position + count
    end = position.max()
    shift = _Shift(end - state.trunk.length - count, end)
    verified = _Verified(out.hidden, new, positions, None, count)
    mtp, drafts, draft_probs = _draft(
        params,
        verified,
        state.mtp,
        shift,
        temperature,
        draft_key,
        cfg,
        execution,
        num_speculative_tokens,
    )
    newest = _pick(new, count)
    state = DraftState(
        trunk=_shift_rows(out.cache, shift),
        mtp=mtp,
        pending=jnp.where(count > 0, newest, state.pending),
        position=position,
        left=left,
        drafts=drafts,
        draft_probs=draft_probs,
    )
    return state, new, count


class _Verified(NamedTuple):
    """Tokens that the trunk has just read.

    Attributes:
      hidden: hidden states [b t d].
      following: tokens int[b t] after each position.
      positions: positions int[b t].
      segments: segment ids int[b t], 0 for padding; None: no padding.
      count: number of positions int[b] that belong to the text.
    """

    hidden: jax.Array
    following: jax.Array
    positions: jax.Array
    segments: jax.Array | None
    count: jax.Array


class _Shift(NamedTuple):
    """Shift of the rows' entries in a cache.

    Attributes:
      by: number of slots int[b] to the right; negative: to the left.
      length: length int[] of the cache afterwards. Slots after it are overwritten before they are read.
    """

    by: jax.Array
    length: jax.Array


def _draft(
    params,
    verified: _Verified,
    cache,
    shift: _Shift,
    temperature,
    key,
    cfg,
    execution,
    num_speculative_tokens,
):
    """Drafts num_speculative_tokens tokens; returns (MTP cache, drafts int[b k], their distributions [b k v]).

    Step 1 runs at every position that the trunk has read, later steps only after the last one.
    """
    out = forward_mtp(
        params,
        verified.hidden,
        verified.following,
        cfg,
        positions=verified.positions,
        segment_ids=verified.segments,
        cache=cache,
        execution=execution,
    )
    keys = jax.random.split(key, num_speculative_tokens)
    probs = _probs(_pick(out.logits, verified.count), temperature)
    carry = _pick(out.hidden, verified.count), _draw(keys[0], probs), _shift_rows(out.cache, shift)

    def step(carry, xs):
        hidden, token, cache = carry
        key, position = xs
        out = forward_mtp(
            params,
            hidden[:, None],
            token[:, None],
            cfg,
            positions=position[:, None],
            cache=cache,
            execution=execution,
        )
        probs = _probs(out.logits[:, 0], temperature)
        # The normed state is passed on, as in training.
        carry = out.hidden[:, 0], _draw(key, probs), out.cache
        return carry, (carry[1], probs)

    last = _pick(verified.positions, verified.count)
    positions = last + jnp.arange(1, num_speculative_tokens, dtype=jnp.int32)[:, None]
    first = carry[1]
    carry, (tokens, more) = lax.scan(step, carry, (keys[1:], positions))
    tokens = jnp.concatenate([first[None], tokens]).T
    probs = jnp.concatenate([probs[None], more]).swapaxes(0, 1)
    return carry[2]._replace(length=shift.length), tokens, probs  # without the drafts' entries


def verify(
    key: Array,
    drafts: Int[Array, "b k"],
    draft_probs: Float[Array, "b k v"],
    probs: Float[Array, "b k+1 v"],
) -> tuple[Int[Array, "b k+1"], Int[Array, " b"]]:
    """Accepts or rejects drafts by speculative sampling; returns (tokens, number of valid tokens per row).

    Source: Leviathan et al. 2023, algorithm 1. drafts were drawn from q = draft_probs; p = probs are the model's
    distributions, before each draft and after the last.

    - A draft is accepted with probability min(1, p / q).
    - The first rejected draft is replaced by a draw from max(p - q, 0).
    - If all are accepted, one more token is drawn from p.

    For every q, each of the first `count` tokens has the distribution p. The tokens after them are undefined.
    """
    accept_key, draw_key = jax.random.split(key)
    chances = jnp.take_along_axis(probs[:, :-1], drafts[..., None], -1)[..., 0]
    proposed = jnp.take_along_axis(draft_probs, drafts[..., None], -1)[..., 0]
    accepted = jax.random.uniform(accept_key, drafts.shape, probs.dtype) * proposed < chances
    count = jnp.cumprod(accepted.astype(jnp.int32), 1).sum(1) + 1
    model = _pick(probs, count)
    residual = jnp.maximum(model - _pick(jnp.pad(draft_probs, ((0, 0), (0, 1), (0, 0))), count), 0)
    # If p and q differ only by rounding, max(p - q, 0) may be zero everywhere.
    residual = jnp.where(residual.sum(-1, keepdims=True) > 0, residual, model)
    drawn = _draw(draw_key, residual)[:, None]
    tokens = jnp.pad(drafts, ((0, 0), (0, 1)))
    return jnp.where(jnp.arange(tokens.shape[1]) == count[:, None] - 1, drawn, tokens), count


def _probs(logits, temperature):
    """Returns the distribution [... v] of a token; temperature 0 puts all of it on the best token."""
    best = jax.nn.one_hot(jnp.argmax(logits, -1), logits.shape[-1], dtype=logits.dtype)
    soft = jax.nn.softmax(logits / jnp.where(temperature > 0, temperature, 1), -1)
    return jnp.where(temperature > 0, soft, best)


def _draw(key, weights):
    """Draws a token for each row, with probability in proportion to weights [b v]."""
    return jax.random.categorical(key, jnp.log(weights), axis=-1).astype(jnp.int32)


def _pick(x, count):
    """Returns x [b t ...] at the last of the first `count` int[b] positions."""
    at = jnp.maximum(count - 1, 0).reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.take_along_axis(x, at, 1)[:, 0]


def _truncate(tokens, count, left, cfg):
    """Limits count to the tokens that a row may take; returns (count, left).

    A row takes at most `left` tokens and ends with an end token, as in `generate`.
    """
    count = jnp.minimum(count, left)
    left = left - count
    if cfg.pad_token_id is None:
        return count, left
    index = jnp.arange(tokens.shape[1])
    ends = jnp.isin(tokens, jnp.array(cfg.eos_token_id, tokens.dtype)) & (index < count[:, None])
    ended = ends.any(1)
    return jnp.where(ended, jnp.argmax(ends, 1) + 1, count), jnp.where(ended, 0, left)


def _shift_rows(cache: Cache, shift: _Shift) -> Cache:
    slots = jnp.arange(cache.segments.shape[1])
    source = slots - shift.by[:, None]
    at = jnp.clip(source, 0, slots[-1])

    def take(x):
        return jnp.take_along_axis(x, at.reshape(*at.shape, *(1,) * (x.ndim - 2)), 1)

    segments = jnp.where(source >= 0, take(cache.segments), 0)
    return Cache(layers=jax.tree.map(take, cache.layers), segments=segments, length=shift.length)
