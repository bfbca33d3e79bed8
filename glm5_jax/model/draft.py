"""Speculative decoding with the shared MTP layer: draft a few tokens, verify all of them in one forward.

The draft is training's chain (mtp.py): step k joins the normed hidden state of step k - 1 with the
embedding of the token drafted before it. What differs is what a step sees. The MTP layer has one
cache with one entry per token, the state that step 1 computed from the *trunk's* hidden state, as
GLM-5 serves it. A draft step appends its own entry, which the next verification writes over with the
trunk's. So step k > 1 attends to trunk-derived entries, apart from the k - 1 newest, where training's
step k attends to entries of step k at every position (GLM-5.2 removes this mismatch by training on the
cache of step 1). Entries of the same token have the same distance to the query in both. Step 1 sees
exactly what it saw in training.

Rejection sampling makes the text lossless: distributed as `generate`'s, and equal to it when greedy.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from glm5_jax.config import RECURRENT_KINDS, ModelConfig
from glm5_jax.model.cache import Cache, init_cache
from glm5_jax.model.generate import prepare
from glm5_jax.model.glm5 import forward, forward_mtp
from glm5_jax.model.plan import Plan


class Speculated(NamedTuple):
    """tokens int[b, t + num_new], as of `generate`. accepted int[b, rounds]: how many tokens each
    verification added to a row, the one that it draws itself included; 0 once the row has ended."""

    tokens: np.ndarray
    accepted: np.ndarray


def speculate(
    params,
    prompts,
    cfg: ModelConfig,
    num_new: int,
    *,
    num_draft: int = 4,
    mask=None,
    temperature: float = 0.0,
    key=None,
    plan: Plan = Plan(),
) -> Speculated:
    """What `generate` does with these arguments, verifying num_draft drafted tokens at a time.

    num_draft: 4 in paper Table 2. Greedy text is that of `generate`, unless two logits tie within
    rounding: here a token's logits come out of a product of num_draft + 1 rows. A row accepts as much
    as it can, whatever the others do; one that has ended waits. Drafts run up to num_draft positions
    ahead of the text. ValueError if the model has no MTP layer, recurrent layers, or too few positions.
    """
    for name, value in (("num_new", num_new), ("num_draft", num_draft)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be positive")
    if not cfg.num_nextn_predict_layers:
        raise ValueError("the model has no MTP layer to draft with; use generate")
    if recurrent := sorted(set(cfg.layer_kinds) & set(RECURRENT_KINDS)):
        raise ValueError(
            f"the model has {', '.join(recurrent)} layers, whose state cannot give back the drafts that a "
            "verification refuses; use generate"
        )
    params, cfg, prompts, segments = prepare(params, prompts, cfg, mask, temperature, key)
    b, t = prompts.shape
    key, temperature = jax.random.key(0) if key is None else key, float(temperature)
    run = dict(cfg=cfg, plan=plan, num_draft=num_draft)
    capacity = t + num_new + num_draft
    caches = (init_cache(cfg, b, capacity), init_cache(cfg, b, capacity, num_layers=1))
    state = prefill(
        params, prompts, segments, caches, num_new, temperature, jax.random.fold_in(key, 0), **run
    )
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
    return Speculated(np.concatenate([prompts, new], 1), accepted)


class State(NamedTuple):
    """Between two verifications. All rows end at the same slot of the caches, short ones after more
    padding on the left: `Cache.length` is one for all of them.

    pending int[b]: the newest token, which the trunk has not seen; position int[b]: its place in its
    row; left int[b]: tokens still to come; drafts int[b k] after it, drawn from draft_probs [b k v].
    """

    trunk: Cache
    mtp: Cache
    pending: jax.Array
    position: jax.Array
    left: jax.Array
    drafts: jax.Array
    draft_probs: jax.Array


_STATIC = ("cfg", "plan", "num_draft")


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames="caches")
def prefill(
    params, prompts, segments, caches, num_new, temperature, key, *, cfg, plan, num_draft
) -> State:
    """Reads the prompts int[b t], draws the token behind each and drafts on."""
    b, t = prompts.shape
    trunk, mtp = caches
    out = forward(params, prompts, cfg, segment_ids=segments, cache=trunk, plan=plan)
    draw_key, draft_key = jax.random.split(key)
    first = _draw(draw_key, _probs(out.logits[:, -1], temperature))
    _, left = _cut(first[:, None], jnp.ones(b, jnp.int32), jnp.full(b, num_new), cfg)
    positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t))
    following = jnp.concatenate([prompts[:, 1:], first[:, None]], 1)
    count = jnp.full(b, t, jnp.int32)
    known = _Known(out.hidden, following, positions, segments, count)
    move = _Move(jnp.zeros_like(count), out.cache.length)
    mtp, drafts, draft_probs = _draft(
        params, known, mtp, move, temperature, draft_key, cfg, plan, num_draft
    )
    return State(out.cache, mtp, first, count, left, drafts, draft_probs)


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames="state")
def verify_round(params, state: State, temperature, key, *, cfg, plan, num_draft):
    """One verification and the next drafts: (state, tokens int[b k+1], how many of them count)."""
    verify_key, draft_key = jax.random.split(key)
    tokens = jnp.concatenate([state.pending[:, None], state.drafts], 1)
    ahead = jnp.arange(num_draft + 1, dtype=jnp.int32)
    positions = state.position[:, None] + ahead
    out = forward(params, tokens, cfg, positions=positions, cache=state.trunk, plan=plan)
    probs = _probs(out.logits, temperature)
    new, count = verify(verify_key, state.drafts, state.draft_probs, probs)
    count, left = _cut(new, count, state.left, cfg)
    position = state.position + count
    end = position.max()
    move = _Move(end - state.trunk.length - count, end)
    known = _Known(out.hidden, new, positions, None, count)
    mtp, drafts, draft_probs = _draft(
        params, known, state.mtp, move, temperature, draft_key, cfg, plan, num_draft
    )
    newest = _pick(new, count)
    state = State(
        _moved(out.cache, move),
        mtp,
        jnp.where(count > 0, newest, state.pending),
        position,
        left,
        drafts,
        draft_probs,
    )
    return state, new, count


class _Known(NamedTuple):
    """What the trunk has just computed: hidden [b t d] at positions int[b t], the tokens int[b t] that
    follow them, segments int[b t] (0: padding) or None, and count int[b]: how many belong to the text."""

    hidden: jax.Array
    following: jax.Array
    positions: jax.Array
    segments: jax.Array | None
    count: jax.Array


class _Move(NamedTuple):
    """by int[b]: slots that a row's entries move to the right (negative: left); length int[]: where all
    rows end then. What lies behind is written over before it is seen."""

    by: jax.Array
    length: jax.Array


def _draft(params, known: _Known, cache, move: _Move, temperature, key, cfg, plan, num_draft):
    """Step 1 at every place that the trunk has computed, later steps behind the last place alone:
    (the MTP layer's cache, drafts int[b k], their distributions [b k v])."""
    out = forward_mtp(
        params,
        known.hidden,
        known.following,
        cfg,
        positions=known.positions,
        segment_ids=known.segments,
        cache=cache,
        plan=plan,
    )
    keys = jax.random.split(key, num_draft)
    probs = _probs(_pick(out.logits, known.count), temperature)
    carry = _pick(out.hidden, known.count), _draw(keys[0], probs), _moved(out.cache, move)

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
            plan=plan,
        )
        probs = _probs(out.logits[:, 0], temperature)
        # The normed state is carried on, as in training.
        carry = out.hidden[:, 0], _draw(key, probs), out.cache
        return carry, (carry[1], probs)

    last = _pick(known.positions, known.count)
    positions = last + jnp.arange(1, num_draft, dtype=jnp.int32)[:, None]
    first = carry[1]
    carry, (tokens, more) = lax.scan(step, carry, (keys[1:], positions))
    tokens = jnp.concatenate([first[None], tokens]).T
    probs = jnp.concatenate([probs[None], more]).swapaxes(0, 1)
    return carry[2]._replace(length=move.length), tokens, probs  # forgets the drafts' own entries


def verify(key, drafts, draft_probs, probs):
    """Speculative sampling (Leviathan et al. 2023, algorithm 1): (tokens int[b k+1], count int[b]).

    drafts int[b k] were drawn from draft_probs [b k v]; probs [b k+1 v] are the model's, before each
    draft and behind the last. Draft i is kept with probability min(1, p / q), and the first that is not
    gives way to a draw from max(p - q, 0); if all are kept, one more is drawn from p. Whatever q is,
    each of the first `count` tokens is distributed as p; the tokens behind them mean nothing.
    """
    accept_key, draw_key = jax.random.split(key)
    chances = jnp.take_along_axis(probs[:, :-1], drafts[..., None], -1)[..., 0]
    proposed = jnp.take_along_axis(draft_probs, drafts[..., None], -1)[..., 0]
    kept = jax.random.uniform(accept_key, drafts.shape, probs.dtype) * proposed < chances
    count = jnp.cumprod(kept.astype(jnp.int32), 1).sum(1) + 1
    model = _pick(probs, count)
    rest = jnp.maximum(model - _pick(jnp.pad(draft_probs, ((0, 0), (0, 1), (0, 0))), count), 0)
    # Where p and q are equal but for rounding, nothing may be left.
    rest = jnp.where(rest.sum(-1, keepdims=True) > 0, rest, model)
    drawn = _draw(draw_key, rest)[:, None]
    tokens = jnp.pad(drafts, ((0, 0), (0, 1)))
    return jnp.where(jnp.arange(tokens.shape[1]) == count[:, None] - 1, drawn, tokens), count


def _probs(logits, temperature):
    """Distribution [... v] of a token; temperature 0: all of it on the best one."""
    best = jax.nn.one_hot(jnp.argmax(logits, -1), logits.shape[-1], dtype=logits.dtype)
    soft = jax.nn.softmax(logits / jnp.where(temperature > 0, temperature, 1), -1)
    return jnp.where(temperature > 0, soft, best)


def _draw(key, weights):
    """A token of each row, with probability in proportion to weights [b v]."""
    return jax.random.categorical(key, jnp.log(weights), axis=-1).astype(jnp.int32)


def _pick(x, count):
    """x [b t ...] at the last of the first `count` int[b] places."""
    at = jnp.maximum(count - 1, 0).reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.take_along_axis(x, at, 1)[:, 0]


def _cut(tokens, count, left, cfg):
    """(count, left) of rows that may take `left` more tokens and end with an end token, as `generate`
    ends them."""
    count = jnp.minimum(count, left)
    left = left - count
    if cfg.pad_token_id is None:
        return count, left
    place = jnp.arange(tokens.shape[1])
    ends = jnp.isin(tokens, jnp.array(cfg.eos_token_id, tokens.dtype)) & (place < count[:, None])
    ended = ends.any(1)
    return jnp.where(ended, jnp.argmax(ends, 1) + 1, count), jnp.where(ended, 0, left)


def _moved(cache: Cache, move: _Move) -> Cache:
    slots = jnp.arange(cache.segments.shape[1])
    source = slots - move.by[:, None]
    at = jnp.clip(source, 0, slots[-1])

    def take(x):
        return jnp.take_along_axis(x, at.reshape(*at.shape, *(1,) * (x.ndim - 2)), 1)

    segments = jnp.where(source >= 0, take(cache.segments), 0)
    return Cache(jax.tree.map(take, cache.layers), segments, move.length)
