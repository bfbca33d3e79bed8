"""What the device does in a step: read tokens into pages and draw the next ones, in a few shapes compiled ahead.

The newest token and the length of a sequence stay on the device, in the slot that the sequence has been given:
a decode needs no number of the one before it, so it can be sent off before that has come back. Shapes are
buckets: numbers of rows, tokens and pages are rounded up, so that few programs serve all of them.

With a mesh, pages and slots are those of each group of devices that hold other sequences (data * fsdp * expert):
arrays begin with x, the groups.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from glm5_jax.config import ModelConfig
from glm5_jax.core.mesh import BATCH_AXES, Region
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.sampling import (
    Drawn,
    Row,
    Sampling,
    draw,
    keys_of,
    probabilities,
    rows as rows_of,
    told,
)
from glm5_jax.inference.scheduler import Limits
from glm5_jax.model.cache import LayerCache, PagedCache, init_pages
from glm5_jax.model.draft import verify
from glm5_jax.model.glm5 import forward, forward_mtp
from glm5_jax.model.plan import Plan

MAX_BIAS = 300  # as OpenAI's logit_bias


class Fresh(NamedTuple):
    """What the MTP layer has not read: `count` int32[x y] places behind each other, the last of which is that
    before the newest token. hidden [x y k+1 d] of the trunk there, and the tokens int32[x y k+1] that follow."""

    hidden: jax.Array
    tokens: jax.Array
    count: jax.Array


class Slots(NamedTuple):
    """What the device keeps of running sequences: newest int32[x y], the token drawn last; length int32[x y],
    tokens in their pages; rows: `Row` [x y ...], whose position is not kept; fresh: for drafts, or None. The
    last of y slots is nobody's."""

    newest: jax.Array
    length: jax.Array
    rows: Row
    fresh: Fresh | None


class Device(NamedTuple):
    """All that a step changes: pages [x * p z ...] of the layers and, for drafts, of the MTP layer; `Slots`."""

    layers: tuple[LayerCache, ...]
    mtp: LayerCache | None
    slots: Slots


# Of a decode: fewer cost as much or more (on a CPU one takes eight times as long as four), and other programs.
LEAST_ROWS = 8


class Reads(NamedTuple):
    """A prefill of b sequences for each group. tokens int32[x b t], of which `count` int32[x b] from `start`
    int32[x b] on are real; behind int32[x b]: the token behind them, -1 if it is drawn; tables int32[x b n]; slot
    int32[x b]; rows: `Row` [x b ...]."""

    tokens: np.ndarray
    start: np.ndarray
    count: np.ndarray
    behind: np.ndarray
    tables: np.ndarray
    slot: np.ndarray
    rows: Row


class Draws(NamedTuple):
    """A decode of b sequences for each group: tables int32[x b n], slot int32[x b], given int32[x b]: the token
    to read, -1 for the newest of the slot; limit int32[x b]: tokens that a sequence may have, 0 for no sequence."""

    tables: np.ndarray
    slot: np.ndarray
    given: np.ndarray
    limit: np.ndarray


class Drew(NamedTuple):
    """What a step drew: of each row [b k ...] tokens in order, of which the first `count` int32[b] are its reply's."""

    drawn: Drawn
    count: jax.Array


class Variant(NamedTuple):
    """What a program does beside: cut and num_top as of `sampling.draw`."""

    cut: bool = False
    num_top: int = 0


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of what the device holds. num_pages and page_size: of each group; slots: of each group; max_pages: of a
    sequence; max_bias: tokens whose logits a request may change; short_prompt: tokens that a prefill has room for at least; num_draft: tokens that a decode drafts; invariant: rows are computed one by one, in one
    shape, so that a row's bits do not depend on the others. index_cache, latent_cache: as of `init_pages`."""

    num_pages: int
    page_size: int
    slots: int
    max_pages: int
    chunk: int
    max_bias: int
    short_prompt: int = 32
    num_draft: int = 0
    invariant: bool = False
    index_cache: str | None = None
    latent_cache: str | None = None

    def rows(self, count: int) -> int:
        """The bucket of a decode of so many sequences."""
        return self.slots if self.invariant else bucket(count, self.slots, LEAST_ROWS)

    @property
    def prompts(self) -> int:
        """Short prompts that are read at once, at most."""
        return 1 if self.invariant else max(1, min(self.slots, self.chunk // self.short_prompt))

    def rows_read(self, count: int) -> int:
        """The bucket of a prefill of so many sequences."""
        return bucket(count, self.prompts, 1, 4)

    def pages(self, count: int) -> int:
        """The bucket of tables of so many pages."""
        return self.max_pages if self.invariant else bucket(count, self.max_pages, 4, 4)

    def tokens(self, count: int) -> int:
        """The bucket of a prefill of so many tokens."""
        return self.chunk if self.invariant else bucket(count, self.chunk, self.short_prompt)


def sized(
    cfg: ModelConfig, options: EngineConfig, max_bias: int = MAX_BIAS
) -> tuple[Shape, Limits]:
    """What each group of devices of an engine with these options holds, and the most that it does in a step; ValueError
    for what no engine can serve."""
    most, page_size, drafts = options.max_batch, options.page_size, options.num_draft
    max_length = options.max_length or cfg.max_position_embeddings
    cfg.check_length(max_length)
    if cfg.projections != "mla" or {*cfg.layer_kinds} != {"full"}:
        raise ValueError(
            f"the model has {cfg.projections} projections and layers {sorted({*cfg.layer_kinds})}; an engine "
            "serves full attention (MLA) alone, use model.generate"
        )
    if min(page_size, options.short_prompt) < 1:
        sizes = f"page_size is {page_size}, short_prompt {options.short_prompt}"
        raise ValueError(f"{sizes}; both must be positive")
    if drafts and not cfg.num_nextn_predict_layers:
        raise ValueError(f"num_draft is {drafts}, and the model has no MTP layer; use 0")
    chunk, alike = options.chunk, options.batch_invariant
    limits = Limits(most, chunk, options.step_tokens or chunk, alike, drafts)
    max_pages = -(-max_length // page_size)
    num_pages = options.num_pages or most * max_pages
    kinds = options.short_prompt, drafts, alike, options.index_cache, options.latent_cache
    return Shape(num_pages, page_size, most, max_pages, chunk, max_bias, *kinds), limits


def bucket(count: int, most: int, least: int = 1, factor: int = 2) -> int:
    """The smallest of least, least * factor, ... that holds count; `most` where that is smaller."""
    size = least
    while size < count:
        size *= factor
    return min(size, most)


class Steps:
    """Programs of one model. They consume the `Device` they are given and return the next one; nothing waits."""

    def __init__(self, cfg: ModelConfig, shape: Shape, mesh=None, plan: Plan = Plan()):
        self.cfg, self.shape, self._mesh, self._plan = cfg, shape, mesh, plan
        self.groups = self.groups_of(mesh)

    @staticmethod
    def groups_of(mesh) -> int:
        """Groups of devices that hold other sequences."""
        return 1 if mesh is None else Region.of(mesh).size(BATCH_AXES)

    def device(self, dtype) -> Device:
        """Empty pages and slots. dtype: of the pages."""
        empty = functools.partial(self._empty, dtype)
        if self._mesh is None:
            return jax.jit(empty)()
        return jax.jit(empty, out_shardings=self._spread)()

    def abstract_device(self, dtype) -> Device:
        """The same as shapes, with shardings if there is a mesh, whose chips need not be here."""
        if self._mesh is None:
            return jax.eval_shape(functools.partial(self._empty, dtype))
        # In which form pages are held depends on the chip.
        with jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh):
            shapes = jax.eval_shape(functools.partial(self._empty, dtype))
        where = self._spread
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes
        )

    @property
    def _spread(self) -> NamedSharding:
        return NamedSharding(self._mesh, P(BATCH_AXES))

    def _empty(self, dtype) -> Device:
        shape, x = self.shape, self.groups

        def pages(**more):
            kept = {"index_cache": shape.index_cache, "latent_cache": shape.latent_cache}
            return init_pages(self.cfg, x * shape.num_pages, shape.page_size, dtype, **kept, **more)

        y = shape.slots + 1
        rows = Row(
            temperature=jnp.ones((x, y), jnp.float32),
            top_p=jnp.ones((x, y), jnp.float32),
            min_p=jnp.zeros((x, y), jnp.float32),
            top_k=jnp.zeros((x, y), jnp.int32),
            seed=jnp.zeros((x, y, 2), jnp.uint32),
            position=jnp.zeros((x, y), jnp.int32),
            bias_ids=jnp.full((x, y, shape.max_bias), -1, jnp.int32),
            bias=jnp.zeros((x, y, shape.max_bias), jnp.float32),
        )
        none = jnp.zeros((x, y), jnp.int32)
        mtp = fresh = None
        if k := shape.num_draft:
            [mtp] = pages(num_layers=1)
            hidden = jnp.zeros((x, y, k + 1, self.cfg.hidden_size), self.cfg.dtype)
            fresh = Fresh(hidden, jnp.zeros((x, y, k + 1), jnp.int32), none)
        return Device(pages(), mtp, Slots(none, none, rows, fresh))

    def prefill(self, params, device: Device, reads: Reads, variant: Variant):
        """(Device, Drew [x * b 1 ...]): the tokens behind what is read."""
        function, static = self.program("prefill", variant)
        return function(params, device, reads, **static)

    def decode(self, params, device: Device, draws: Draws, variant: Variant):
        """(Device, Drew [x * b k+1 ...]): the next token of every sequence, and those drafted that it keeps."""
        function, static = self.program("decode", variant)
        return function(params, device, draws, **static)

    def program(self, name: str, variant: Variant):
        """What `prefill` or `decode` calls with (params, device, inputs): the jitted function, and the rest of its
        arguments by name."""
        static = dict(cfg=self.cfg, mesh=self._mesh, plan=self._plan, variant=variant)
        if name == "prefill":
            return _prefill, static
        if k := self.shape.num_draft:
            return _speculate, static | {"num_draft": k}
        return _decode, static | {"one_by_one": self.shape.invariant}

    def drawn_by(self, seeds, positions, samplings: list[list[Sampling]]) -> Row:
        """`Row` [x b ...] of what each sequence is drawn by."""
        flat = [sampling for own in samplings for sampling in own]
        found = rows_of(flat, np.ravel(seeds), np.ravel(positions), self.shape.max_bias)
        return Row(*(a.reshape(*np.shape(positions), *a.shape[1:]) for a in found))

    def idle_reads(self, b: int, t: int, num_pages: int) -> Reads:
        """Of b sequences for each group that are none, with t tokens and so many pages: what a prefill of this shape
        is compiled with."""
        tables, nobody, none = self._nobody(b, num_pages)
        rows = self.drawn_by(none, none, [[Sampling()] * b] * self.groups)
        tokens = np.zeros((*none.shape, t), np.int32)
        return Reads(tokens, none, none, none - 1, tables, nobody, rows)

    def idle_draws(self, b: int, num_pages: int) -> Draws:
        """The same for a decode."""
        tables, nobody, none = self._nobody(b, num_pages)
        return Draws(tables, nobody, none - 1, none)

    def _nobody(self, b: int, num_pages: int):
        none = np.zeros((self.groups, b), np.int32)
        return np.zeros((*none.shape, num_pages), np.int32), none + self.shape.slots, none


_STATIC = ("cfg", "mesh", "plan", "variant")


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames="device")
def _prefill(params, device: Device, reads: Reads, *, variant, **static):
    where, reads = reads.slot, _flat(reads)
    segments = (jnp.arange(reads.tokens.shape[1]) < reads.count[:, None]).astype(jnp.int32)
    out = forward(
        params,
        reads.tokens,
        segment_ids=segments,
        cache=PagedCache(device.layers, reads.tables, reads.start),
        only=jnp.maximum(reads.count - 1, 0)[:, None],
        **static,
    )
    end = reads.start + reads.count
    drawn = draw(out.logits[:, 0], reads.rows._replace(position=end), **variant._asdict())
    mtp, fresh = device.mtp, None
    if mtp is not None:
        mtp, fresh = _read_ahead(
            params, device, reads, segments, out.hidden, drawn.tokens, **static
        )
    new = Slots(drawn.tokens, end, reads.rows, fresh)
    new = jax.tree.map(lambda a: a.reshape(*where.shape, *a.shape[1:]), new)
    return Device(out.cache.layers, mtp, _put(device.slots, where, new)), _drew(drawn)


def _read_ahead(params, device, reads: Reads, segments, hidden, drawn, *, cfg, mesh, plan):
    """(the MTP layer's pages, Fresh [x * b ...]) after a prefill. The last place is read when the token behind it is
    known to the host: a decode reads what is drawn."""
    last = jnp.maximum(reads.count - 1, 0)
    places = jnp.arange(reads.tokens.shape[1])
    following = jnp.where(
        places == last[:, None],
        reads.behind[:, None],
        jnp.roll(reads.tokens, -1, axis=1),
    )
    known = (following >= 0) & (segments != 0)
    cache = PagedCache((device.mtp,), reads.tables, reads.start)
    out = forward_mtp(
        params,
        hidden,
        jnp.maximum(following, 0),
        cfg,
        segment_ids=known.astype(jnp.int32),
        cache=cache,
        only=last[:, None],
        mesh=mesh,
        plan=plan,
    )
    k = device.slots.fresh.tokens.shape[-1]
    newest = jnp.take_along_axis(hidden, last[:, None, None], 1)
    fresh = Fresh(
        jnp.pad(newest, ((0, 0), (0, k - 1), (0, 0))),
        jnp.pad(drawn[:, None], ((0, 0), (0, k - 1))),
        (reads.behind < 0).astype(jnp.int32),
    )
    return out.cache.layers[0], fresh


@functools.partial(jax.jit, static_argnames=(*_STATIC, "one_by_one"), donate_argnames="device")
def _decode(params, device: Device, draws: Draws, *, variant, one_by_one, **static):
    own = jax.tree.map(lambda a: _at(a, draws.slot), device.slots)
    tokens = jnp.where(draws.given < 0, own.newest, draws.given)

    def advance(layers, args):
        tokens, length, tables, limit, rows = args
        out = forward(
            params,
            tokens[:, None],
            segment_ids=(length < limit).astype(jnp.int32)[:, None],
            cache=PagedCache(layers, tables, length),
            **static,
        )
        rows = rows._replace(position=length + 1)
        return out.cache.layers, draw(out.logits[:, 0], rows, **variant._asdict())

    args = (tokens, own.length, draws.tables, draws.limit, own.rows)
    if one_by_one:
        columns = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), args)
        layers, drawn = lax.scan(advance, device.layers, columns)
        drawn = _flat(jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), drawn))
    else:
        layers, drawn = advance(device.layers, _flat(args))
    newest = drawn.tokens.reshape(draws.slot.shape)
    slots = _put(device.slots, draws.slot, own._replace(newest=newest, length=own.length + 1))
    return Device(layers, None, slots), _drew(drawn)


@functools.partial(jax.jit, static_argnames=(*_STATIC, "num_draft"), donate_argnames="device")
def _speculate(params, device: Device, draws: Draws, *, variant, num_draft, **static):
    own = _flat(jax.tree.map(lambda a: _at(a, draws.slot), device.slots))
    tables, limit = _flat((draws.tables, draws.limit))
    mtp, drafts, draft_probs = _draft(
        params, device.mtp, own, tables, limit, num_draft, variant.cut, **static
    )
    tokens = jnp.concatenate([own.newest[:, None], drafts], 1)
    places = own.length[:, None] + jnp.arange(num_draft + 1)
    out = forward(
        params,
        tokens,
        segment_ids=(places < limit[:, None]).astype(jnp.int32),
        cache=PagedCache(device.layers, tables, own.length),
        **static,
    )
    rows = _each(own.rows, places + 1)
    logits = out.logits.reshape(-1, out.logits.shape[-1])
    probs = probabilities(logits, rows, variant.cut).reshape(out.logits.shape)
    keys = keys_of(own.rows._replace(position=own.length + 1))
    new, count = jax.vmap(_verify)(keys, drafts, draft_probs, probs)
    # A token needs the logits of a place that was read.
    count = jnp.clip(count, 0, jnp.maximum(limit - 1 - own.length, 0))
    drawn = told(new.reshape(-1), logits, rows, variant.num_top)
    newest = jnp.take_along_axis(new, jnp.maximum(count - 1, 0)[:, None], 1)[:, 0]
    after = Slots(newest, own.length + count, own.rows, Fresh(out.hidden, new, count))
    x, b = draws.slot.shape
    after = jax.tree.map(lambda a: a.reshape(x, b, *a.shape[1:]), after)
    slots = _put(device.slots, draws.slot, after)
    drawn = jax.tree.map(lambda a: a.reshape(x * b, num_draft + 1, *a.shape[1:]), drawn)
    return Device(out.cache.layers, mtp, slots), Drew(drawn, count)


def _draft(params, mtp, own: Slots, tables, limit, num_draft, cut, **static):
    """(the MTP layer's pages, drafts int32[b k], what they were drawn from float32[b k v])."""
    fresh, rows = own.fresh, own.rows
    start = own.length - fresh.count

    def advance(mtp, hidden, tokens, start, count):
        places = jnp.arange(tokens.shape[1])
        real = (places < count[:, None]) & (start[:, None] + places < limit[:, None])
        last = jnp.maximum(count - 1, 0)[:, None]
        out = forward_mtp(
            params,
            hidden,
            tokens,
            segment_ids=real.astype(jnp.int32),
            cache=PagedCache((mtp,), tables, start),
            only=last,
            **static,
        )
        hidden = jnp.take_along_axis(out.hidden, last[..., None], 1)
        return out.cache.layers[0], hidden, out.logits[:, 0]

    def choose(logits, ahead):
        probs = probabilities(logits, rows, cut)
        keys = keys_of(rows._replace(position=own.length + 1 + ahead))
        # Another number than that of any other draw in this place.
        keys = jax.vmap(lambda key: jax.random.fold_in(key, _DRAFT))(keys)
        return jax.vmap(jax.random.categorical)(keys, jnp.log(probs)).astype(jnp.int32), probs

    mtp, hidden, logits = advance(mtp, fresh.hidden, fresh.tokens, start, fresh.count)
    token, probs = choose(logits, 0)
    ones = jnp.ones_like(own.length)

    def step(carry, ahead):
        mtp, hidden, token = carry
        mtp, hidden, logits = advance(mtp, hidden, token[:, None], own.length + ahead - 1, ones)
        token, probs = choose(logits, ahead)
        return (mtp, hidden, token), (token, probs)

    (mtp, *_), (tokens, more) = lax.scan(step, (mtp, hidden, token), jnp.arange(1, num_draft))
    tokens = jnp.concatenate([token[None], tokens]).T
    return mtp, tokens, jnp.concatenate([probs[None], more]).swapaxes(0, 1)


# Keys that are split hold those folded with 0 and 1; verification splits the one of the same place.
_DRAFT = 2


def _verify(key, drafts, draft_probs, probs):
    tokens, count = verify(key, drafts[None], draft_probs[None], probs[None])
    return tokens[0], count[0]


def _each(rows: Row, positions) -> Row:
    """`Row` [b ...] for all of positions int32[b k], as [b * k ...]."""
    count = positions.shape[1]
    rows = jax.tree.map(lambda a: jnp.repeat(a, count, axis=0), rows)
    return rows._replace(position=positions.reshape(-1))


def _drew(drawn: Drawn) -> Drew:
    """One token for each row."""
    return Drew(jax.tree.map(lambda a: a[:, None], drawn), jnp.ones_like(drawn.tokens))


def _flat(tree):
    """[x b ...] as [x * b ...]."""
    return jax.tree.map(lambda a: a.reshape(a.shape[0] * a.shape[1], *a.shape[2:]), tree)


def _at(values, slot):
    """[x b ...] of values [x y ...]."""
    return jax.vmap(lambda v, s: v[s])(values, slot)


def _put(slots: Slots, slot, new: Slots) -> Slots:
    """slots with those at slot int32[x ...] as in new [x ...]."""

    def put(values, new):
        return jax.vmap(lambda v, s, n: v.at[s].set(n))(values, slot, new)

    return jax.tree.map(put, slots, new)
