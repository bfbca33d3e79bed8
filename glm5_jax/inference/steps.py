"""Compiled programs of an engine's step: prefill and decode over a paged cache.

1. `prefill` writes tokens of prompts into pages and draws the token after each.
2. `decode` draws the next token of each sequence. With an MTP layer it drafts tokens and verifies them.

The newest token and the length of a sequence stay on the device, in its slot. The host can thus launch a decode
before the tokens of the one before have arrived. Numbers of rows, tokens and pages are rounded up to buckets, so
that few programs serve all shapes.

With a mesh, each data-parallel rank (data * fsdp * expert) has its own pages and slots. Axis x is these ranks.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.inference.rejection_sampling import rejection_sample
from glm5_jax.inference.sampling import (
    AnyArray,
    SampledTokens,
    Sampling,
    SamplingParamsRow,
    draw,
    logprobs_of,
    param_rows,
    probabilities,
    row_keys,
    score_prompt,
)
from glm5_jax.inference.shapes import EngineShapes
from glm5_jax.inference.step_arrays import (
    DecodeBatch,
    DeviceState,
    PendingDraftInputs,
    PrefillBatch,
    SamplingVariant,
    SlotState,
    StepOutput,
)
from glm5_jax.model.cache import Cache, LayerCache, PagedCache, init_pages
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.glm5 import forward, forward_mtp
from glm5_jax.parallel.mesh import BATCH_AXES, Region


class Steps:
    """Programs of one model. Each consumes a `DeviceState` and returns the next one, without waiting."""

    def __init__(
        self,
        cfg: ModelConfig,
        shape: EngineShapes,
        mesh: jax.sharding.Mesh | None = None,
        execution: ExecutionConfig = ExecutionConfig(),
    ):
        self.cfg, self.shape, self._mesh, self._execution = cfg, shape, mesh, execution
        self.dp_size = self.dp_size_of(mesh)

    @staticmethod
    def dp_size_of(mesh: jax.sharding.Mesh | None) -> int:
        """Returns the data-parallel size of a mesh."""
        return 1 if mesh is None else Region.of(mesh).size(BATCH_AXES)

    def device(self, dtype: DTypeLike) -> DeviceState:
        """Returns empty pages, which have this dtype, and slots."""
        sharding = None if self._mesh is None else self._sharding
        return _make_empty(sharding)(self.cfg, self.shape, self.dp_size, jnp.dtype(dtype))

    def abstract_state(self, dtype: DTypeLike) -> DeviceState:
        """Returns `device` as shapes, with shardings on a mesh, whose chips need not be attached."""
        empty = functools.partial(empty_state, self.cfg, self.shape, self.dp_size, dtype)
        if self._mesh is None:
            return jax.eval_shape(empty)
        # The layout of pages depends on the chip.
        with jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh):
            shapes = jax.eval_shape(empty)
        sharding = self._sharding
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
        )

    @property
    def _sharding(self) -> NamedSharding:
        assert self._mesh is not None, "one device has no sharding"
        return NamedSharding(self._mesh, P(BATCH_AXES))

    def prefill(
        self, params: PyTree, device: DeviceState, batch: PrefillBatch, variant: SamplingVariant
    ) -> tuple[DeviceState, StepOutput]:
        """Returns the next state and the token after each prompt, as `StepOutput` [x*b 1 ...]."""
        function, static = self.program("prefill", variant)
        return function(params, device, batch, **static)

    def decode(
        self, params: PyTree, device: DeviceState, batch: DecodeBatch, variant: SamplingVariant
    ) -> tuple[DeviceState, StepOutput]:
        """Returns the next state and the next tokens, as `StepOutput` [x*b k+1 ...] with the accepted drafts."""
        function, static = self.program("decode", variant)
        return function(params, device, batch, **static)

    def program(self, name: str, variant: SamplingVariant) -> tuple[Callable, dict[str, Any]]:
        """Returns the jitted function of `prefill` or `decode`, and its keyword arguments.

        Its positional arguments are (params, device, batch).
        """
        static = dict(cfg=self.cfg, mesh=self._mesh, execution=self._execution, variant=variant)
        if name == "prefill":
            return _prefill, static
        if k := self.shape.num_speculative_tokens:
            return _speculate, static | {"num_speculative_tokens": k}
        return _decode, static | {"one_by_one": self.shape.batch_invariant}

    def sampling_rows(
        self, seeds: np.ndarray, positions: np.ndarray, samplings: list[list[Sampling]]
    ) -> SamplingParamsRow:
        """Returns the sampling parameters [x b ...] of the sequences."""
        flat = [sampling for of_rank in samplings for sampling in of_rank]
        rows = param_rows(flat, np.ravel(seeds), np.ravel(positions), self.shape.max_bias)
        return SamplingParamsRow(*(a.reshape(*np.shape(positions), *a.shape[1:]) for a in rows))

    def dummy_prefill(self, b: int, t: int, num_pages: int) -> PrefillBatch:
        """Returns a prefill without sequences, to compile one with b rows, t tokens and `num_pages` pages a row."""
        tables, unused, zeros = self._padding(b, num_pages)
        rows = self.sampling_rows(zeros, zeros, [[Sampling()] * b] * self.dp_size)
        return PrefillBatch(
            tokens=np.zeros((*zeros.shape, t), np.int32),
            start=zeros,
            count=zeros,
            next_token=zeros - 1,
            tables=tables,
            slot=unused,
            rows=rows,
        )

    def dummy_decode(self, b: int, num_pages: int) -> DecodeBatch:
        """Returns a decode without sequences, to compile one with b rows and `num_pages` pages a row."""
        tables, unused, zeros = self._padding(b, num_pages)
        return DecodeBatch(tables=tables, slot=unused, forced_token=zeros - 1, limit=zeros)

    def _padding(self, b: int, num_pages: int):
        """Returns tables [x b n], slots [x b] that are not in use, and zeros [x b]."""
        zeros = np.zeros((self.dp_size, b), np.int32)
        return np.zeros((*zeros.shape, num_pages), np.int32), zeros + self.shape.max_num_seqs, zeros


_STATIC = ("cfg", "mesh", "execution", "variant")


def empty_state(
    cfg: ModelConfig, shape: EngineShapes, dp_size: int, dtype: DTypeLike
) -> DeviceState:
    """Returns empty pages, which have this dtype, and slots of all data-parallel ranks."""
    x = dp_size

    def pages(**more):
        formats = {"index_cache": shape.index_cache, "latent_cache": shape.latent_cache}
        return init_pages(cfg, x * shape.num_pages, shape.page_size, dtype, **formats, **more)

    y = shape.max_num_seqs + 1
    rows = SamplingParamsRow(
        temperature=jnp.ones((x, y), jnp.float32),
        top_p=jnp.ones((x, y), jnp.float32),
        min_p=jnp.zeros((x, y), jnp.float32),
        top_k=jnp.zeros((x, y), jnp.int32),
        seed=jnp.zeros((x, y, 2), jnp.uint32),
        position=jnp.zeros((x, y), jnp.int32),
        bias_ids=jnp.full((x, y, shape.max_bias), -1, jnp.int32),
        bias=jnp.zeros((x, y, shape.max_bias), jnp.float32),
    )
    zeros = jnp.zeros((x, y), jnp.int32)
    mtp = pending = None
    if k := shape.num_speculative_tokens:
        [mtp] = pages(num_layers=1)
        hidden = jnp.zeros((x, y, k + 1, cfg.hidden_size), cfg.dtype)
        pending = PendingDraftInputs(hidden, jnp.zeros((x, y, k + 1), jnp.int32), zeros)
    return DeviceState(
        pages(), mtp, SlotState(newest=zeros, length=zeros, rows=rows, pending=pending)
    )


@functools.cache
def _make_empty(sharding):
    """Returns a compiled `empty_state` whose arrays have this sharding. Engines of equal shapes share it."""
    return jax.jit(empty_state, static_argnums=(0, 1, 2, 3), out_shardings=sharding)


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames="device")
def _prefill(params, device: DeviceState, batch: PrefillBatch, *, variant, **static):
    """Reads tokens into pages and draws the token after each row's last."""
    slot, batch = batch.slot, _flat(batch)
    segments = (jnp.arange(batch.tokens.shape[1]) < batch.count[:, None]).astype(jnp.int32)
    last = jnp.maximum(batch.count - 1, 0)[:, None]
    out = forward(
        params,
        jnp.asarray(batch.tokens),
        segment_ids=segments,
        cache=_paged_cache(device.layers, batch.tables, batch.start),
        logit_positions=None if variant.scores_prompt else last,
        **static,
    )
    end = jnp.asarray(batch.start + batch.count)
    logits, prompt = out.logits[:, 0], None
    if variant.scores_prompt:
        logits = jnp.take_along_axis(out.logits, last[..., None], 1)[:, 0]
        prompt = score_prompt(_following(batch), out.logits, variant.num_top)
    rows, mask = batch.rows._replace(position=end), batch.rules and batch.rules.mask
    sampled = _draw_next(logits, rows, mask, variant)
    mtp, pending = device.mtp, None
    if mtp is not None:
        mtp, pending = _prefill_mtp(
            params, device, batch, segments, out.hidden, sampled.tokens, **static
        )
    new = SlotState(newest=sampled.tokens, length=end, rows=batch.rows, pending=pending)
    new = jax.tree.map(lambda a: a.reshape(*slot.shape, *a.shape[1:]), new)
    slots = _put(device.slots, slot, new)
    output = _replicate(_single_tokens(sampled, prompt), static["mesh"])
    return DeviceState(_layers_of(out.cache), mtp, slots), output


def _following(batch: PrefillBatch):
    """Returns the token after each position, -1 if it is yet to be drawn."""
    is_last = jnp.arange(batch.tokens.shape[1]) == jnp.maximum(batch.count - 1, 0)[:, None]
    return jnp.where(is_last, batch.next_token[:, None], jnp.roll(batch.tokens, -1, axis=1))


def _prefill_mtp(
    params, device, batch: PrefillBatch, segments, hidden, drawn_tokens, *, cfg, mesh, execution
):
    """Returns the MTP layer's pages and its pending inputs [x*b ...] after a prefill.

    The last position is processed if the host knows the token after it. Otherwise the next decode processes it.
    """
    last = jnp.maximum(batch.count - 1, 0)
    following = _following(batch)
    known = (following >= 0) & (segments != 0)
    cache = _paged_cache((device.mtp,), batch.tables, batch.start)
    out = forward_mtp(
        params,
        hidden,
        jnp.maximum(following, 0),
        cfg,
        segment_ids=known.astype(jnp.int32),
        cache=cache,
        logit_positions=last[:, None],
        mesh=mesh,
        execution=execution,
    )
    k = device.slots.pending.tokens.shape[-1]
    newest = jnp.take_along_axis(hidden, last[:, None, None], 1)
    pending = PendingDraftInputs(
        jnp.pad(newest, ((0, 0), (0, k - 1), (0, 0))),
        jnp.pad(drawn_tokens[:, None], ((0, 0), (0, k - 1))),
        jnp.asarray(batch.next_token < 0).astype(jnp.int32),
    )
    return _layers_of(out.cache)[0], pending


def _paged_cache(layers: tuple[LayerCache, ...], tables: AnyArray, lengths: AnyArray) -> PagedCache:
    return PagedCache(layers, jnp.asarray(tables), jnp.asarray(lengths))


def _layers_of(cache: Cache | PagedCache | None) -> tuple[LayerCache, ...]:
    """Returns the pages of all layers after a forward over pages."""
    assert isinstance(cache, PagedCache)
    return cache.layers


@functools.partial(jax.jit, static_argnames=(*_STATIC, "one_by_one"), donate_argnames="device")
def _decode(params, device: DeviceState, batch: DecodeBatch, *, variant, one_by_one, **static):
    """Draws the next token of each sequence, row by row in one shape if `one_by_one`."""
    state = jax.tree.map(lambda a: _at(a, batch.slot), device.slots)
    tokens = jnp.where(batch.forced_token < 0, state.newest, batch.forced_token)

    def advance(layers, args):
        tokens, length, tables, limit, rows, mask = args
        out = forward(
            params,
            tokens[:, None],
            segment_ids=(length < limit).astype(jnp.int32)[:, None],
            cache=PagedCache(layers, tables, length),
            **static,
        )
        rows = rows._replace(position=length + 1)
        return _layers_of(out.cache), _draw_next(out.logits[:, 0], rows, mask, variant)

    mask = batch.rules and batch.rules.mask
    args = (tokens, state.length, batch.tables, batch.limit, state.rows, mask)
    if one_by_one:
        columns = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), args)
        layers, sampled = lax.scan(advance, device.layers, columns)
        sampled = _flat(jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), sampled))
    else:
        layers, sampled = advance(device.layers, _flat(args))
    newest = sampled.tokens.reshape(batch.slot.shape)
    new, count = state._replace(newest=newest, length=state.length + 1), None
    if batch.rules is not None:
        is_held = tokens == batch.rules.last_token
        new, count = _hold(is_held, state, new), 1 - is_held.reshape(-1).astype(jnp.int32)
    slots = _put(device.slots, batch.slot, new)
    output = _replicate(_single_tokens(sampled, count=count), static["mesh"])
    return DeviceState(layers, None, slots), output


@functools.partial(
    jax.jit, static_argnames=(*_STATIC, "num_speculative_tokens"), donate_argnames="device"
)
def _speculate(
    params, device: DeviceState, batch: DecodeBatch, *, variant, num_speculative_tokens, **static
):
    """Drafts tokens with the MTP layer, verifies them in one forward and keeps the accepted ones."""
    state = _flat(jax.tree.map(lambda a: _at(a, batch.slot), device.slots))
    tables, limit, rules = _flat((batch.tables, batch.limit, batch.rules))
    mtp, drafts, draft_probs = _draft(
        params, device.mtp, state, tables, limit, num_speculative_tokens, variant.truncate, **static
    )
    # Verifies the newest token and all drafts in one forward.
    tokens = jnp.concatenate([state.newest[:, None], drafts], 1)
    positions = state.length[:, None] + jnp.arange(num_speculative_tokens + 1)
    out = forward(
        params,
        tokens,
        segment_ids=(positions < limit[:, None]).astype(jnp.int32),
        cache=PagedCache(device.layers, tables, state.length),
        **static,
    )
    rows = _repeat_rows(state.rows, positions + 1)
    logits = out.logits.reshape(-1, out.logits.shape[-1])
    mask = None if rules is None else _mask_first(rules.mask, num_speculative_tokens + 1)
    probs = probabilities(logits, rows, variant.truncate, mask).reshape(out.logits.shape)
    keys = row_keys(state.rows._replace(position=state.length + 1))
    new, count = jax.vmap(_verify)(keys, drafts, draft_probs, probs)
    # A token needs logits, which exist only for positions within the limit.
    count = jnp.clip(count, 0, jnp.maximum(limit - 1 - state.length, 0))
    is_held = None
    if rules is not None:
        is_held = state.newest == rules.last_token
        # The rules of later tokens depend on these, so a step ends before them.
        is_last = new == rules.last_token[:, None]
        last = jnp.where(is_last, jnp.arange(new.shape[1]), new.shape[1]).min(axis=1)
        count = jnp.minimum(count, jnp.minimum(rules.max_tokens, last + 1))
        count = jnp.where(is_held, 0, count)
    sampled = logprobs_of(new.reshape(-1), logits, rows, variant.num_top)
    # Updates the slots; what the MTP layer has yet to process are the accepted tokens.
    newest = jnp.take_along_axis(new, jnp.maximum(count - 1, 0)[:, None], 1)[:, 0]
    after = SlotState(
        newest=newest,
        length=state.length + count,
        rows=state.rows,
        pending=PendingDraftInputs(out.hidden, new, count),
    )
    after = after if is_held is None else _hold(is_held, state, after)
    x, b = batch.slot.shape
    after = jax.tree.map(lambda a: a.reshape(x, b, *a.shape[1:]), after)
    slots = _put(device.slots, batch.slot, after)
    sampled = jax.tree.map(
        lambda a: a.reshape(x * b, num_speculative_tokens + 1, *a.shape[1:]), sampled
    )
    output = _replicate(StepOutput(sampled, count), static["mesh"])
    return DeviceState(_layers_of(out.cache), mtp, slots), output


def _draft(
    params, mtp, state: SlotState, tables, limit, num_speculative_tokens, truncate, **static
):
    """Returns the MTP layer's pages, drafts int32[b k] and their distributions float32[b k v]."""
    pending, rows = state.pending, state.rows
    assert pending is not None, "an engine with drafts keeps the MTP layer's inputs"
    start = state.length - pending.count

    def advance(mtp, hidden, tokens, start, count):
        positions = jnp.arange(tokens.shape[1])
        real = (positions < count[:, None]) & (start[:, None] + positions < limit[:, None])
        last = jnp.maximum(count - 1, 0)[:, None]
        out = forward_mtp(
            params,
            hidden,
            tokens,
            segment_ids=real.astype(jnp.int32),
            cache=PagedCache((mtp,), tables, start),
            logit_positions=last,
            **static,
        )
        hidden = jnp.take_along_axis(out.hidden, last[..., None], 1)
        return _layers_of(out.cache)[0], hidden, out.logits[:, 0]

    def choose(logits, ahead):
        probs = probabilities(logits, rows, truncate)
        keys = row_keys(rows._replace(position=state.length + 1 + ahead))
        # Drafts need other random numbers than the rest of the sampling at this position.
        keys = jax.vmap(lambda key: jax.random.fold_in(key, _DRAFT))(keys)
        return jax.vmap(jax.random.categorical)(keys, jnp.log(probs)).astype(jnp.int32), probs

    mtp, hidden, logits = advance(mtp, pending.hidden, pending.tokens, start, pending.count)
    token, probs = choose(logits, 0)
    ones = jnp.ones_like(state.length)

    def step(carry, ahead):
        mtp, hidden, token = carry
        mtp, hidden, logits = advance(mtp, hidden, token[:, None], state.length + ahead - 1, ones)
        token, probs = choose(logits, ahead)
        return (mtp, hidden, token), (token, probs)

    (mtp, *_), (tokens, more) = lax.scan(
        step, (mtp, hidden, token), jnp.arange(1, num_speculative_tokens)
    )
    tokens = jnp.concatenate([token[None], tokens]).T
    return mtp, tokens, jnp.concatenate([probs[None], more]).swapaxes(0, 1)


# Folded into the keys of drafts. Splitting a key gives those folded with 0 and 1, and verification splits the key
# of the same position.
_DRAFT = 2


def _mask_first(mask, count: int):
    """Returns the masks [b*k w] of k tokens of each row, of which only the first has one."""
    free = jnp.full((len(mask), count - 1, mask.shape[-1]), 2**32 - 1, jnp.uint32)
    return jnp.concatenate([mask[:, None], free], 1).reshape(-1, mask.shape[-1])


def _verify(key, drafts, draft_probs, probs):
    """Returns the tokens of one row after verification, and how many of them count."""
    tokens, count = rejection_sample(key, drafts[None], draft_probs[None], probs[None])
    return tokens[0], count[0]


def _repeat_rows(rows: SamplingParamsRow, positions) -> SamplingParamsRow:
    """Repeats sampling parameters [b ...] for positions int32[b k]; returns them as [b*k ...]."""
    count = positions.shape[1]
    rows = jax.tree.map(lambda a: jnp.repeat(a, count, axis=0), rows)
    return rows._replace(position=positions.reshape(-1))


def _draw_next(logits, rows: SamplingParamsRow, mask, variant: SamplingVariant) -> SampledTokens:
    return draw(logits, rows, mask=mask, truncate=variant.truncate, num_top=variant.num_top)


def _single_tokens(
    sampled: SampledTokens, prompt: SampledTokens | None = None, count=None
) -> StepOutput:
    """Returns the output of a step with one token for each row, or as many as `count`."""
    tokens = jax.tree.map(lambda a: a[:, None], sampled)
    return StepOutput(tokens, jnp.ones_like(sampled.tokens) if count is None else count, prompt)


def _replicate(output: StepOutput, mesh) -> StepOutput:
    """Returns a step's output with all of it on each device, so that the first process of a pod can read it."""
    return (
        output if mesh is None else lax.with_sharding_constraint(output, NamedSharding(mesh, P()))
    )


def _hold(is_held, old: SlotState, new: SlotState) -> SlotState:
    """Returns the old state of rows that are held, and the new state of the others."""

    def select(old, new):
        return jnp.where(
            is_held.reshape(is_held.shape + (1,) * (new.ndim - is_held.ndim)), old, new
        )

    return jax.tree.map(select, old, new)


def _flat(tree):
    """Reshapes [x b ...] to [x*b ...]."""
    return jax.tree.map(lambda a: a.reshape(a.shape[0] * a.shape[1], *a.shape[2:]), tree)


def _at(values, slot):
    """Gathers [x b ...] at slots int32[x b] of values [x y ...]."""
    return jax.vmap(lambda v, s: v[s])(values, slot)


def _put(slots: SlotState, slot, new: SlotState) -> SlotState:
    """Scatters new [x b ...] to slots int32[x b]."""

    def put(values, new):
        return jax.vmap(lambda v, s, n: v.at[s].set(n))(values, slot, new)

    return jax.tree.map(put, slots, new)
