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
from glm5_jax.inference.sampling import Drawn, Row, draw
from glm5_jax.model.cache import LayerCache, PagedCache, init_cache
from glm5_jax.model.glm5 import forward
from glm5_jax.model.plan import Plan

# That a prefill has room for: each size is another program, and a smaller one saves little.
LEAST_TOKENS = 32


class Slots(NamedTuple):
    """What the device keeps of running sequences: newest int32[x y], the token drawn last; length int32[x y],
    tokens in their pages; rows: `Row` [x y ...], whose position is not kept. The last of y slots is nobody's."""

    newest: jax.Array
    length: jax.Array
    rows: Row


class Device(NamedTuple):
    """All that a step changes: layers' pages [x * p z ...] and `Slots`."""

    layers: tuple[LayerCache, ...]
    slots: Slots


class Reads(NamedTuple):
    """A prefill, a sequence for each group. tokens int32[x t], of which `count` int32[x] from `start` int32[x]
    on are real; tables int32[x n]; slot int32[x]; rows: `Row` [x ...]."""

    tokens: np.ndarray
    start: np.ndarray
    count: np.ndarray
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


class Variant(NamedTuple):
    """What a program does beside: cut and num_top as of `sampling.draw`."""

    cut: bool = False
    num_top: int = 0


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of what the device holds. num_pages and page_size: of each group; slots: of each group; max_pages: of a
    sequence; max_bias: tokens whose logits a request may change; invariant: rows are computed one by one, in one
    shape, so that a row's bits do not depend on the others."""

    num_pages: int
    page_size: int
    slots: int
    max_pages: int
    chunk: int
    max_bias: int
    invariant: bool = False

    def rows(self, count: int) -> int:
        """The bucket of a decode of so many sequences."""
        return self.slots if self.invariant else bucket(count, self.slots)

    def pages(self, count: int) -> int:
        """The bucket of tables of so many pages."""
        return self.max_pages if self.invariant else bucket(count, self.max_pages, 4, 4)

    def tokens(self, count: int) -> int:
        """The bucket of a prefill of so many tokens."""
        return self.chunk if self.invariant else bucket(count, self.chunk, LEAST_TOKENS)


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
        self.groups = 1 if mesh is None else Region.of(mesh).size(BATCH_AXES)

    def device(self, dtype) -> Device:
        """Empty pages and slots. dtype: of the pages."""
        shape, x = self.shape, self.groups

        def empty():
            layers = init_cache(self.cfg, x * shape.num_pages, shape.page_size, dtype).layers
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
            return Device(layers, Slots(none, none, rows))

        if self._mesh is None:
            return jax.jit(empty)()
        spread = NamedSharding(self._mesh, P(BATCH_AXES))
        return jax.jit(empty, out_shardings=spread)()

    def prefill(self, params, device: Device, reads: Reads, variant: Variant):
        """(Device, Drawn [x ...]): the token behind what is read."""
        return self._run(_prefill, params, device, reads, variant)

    def decode(self, params, device: Device, draws: Draws, variant: Variant):
        """(Device, Drawn [x * b ...]): the next token of every sequence."""
        invariant = self.shape.invariant
        return self._run(_decode, params, device, draws, variant, one_by_one=invariant)

    def _run(self, function, params, device, inputs, variant, **static):
        static |= dict(cfg=self.cfg, mesh=self._mesh, plan=self._plan, variant=variant)
        return function(params, device, inputs, **static)


_STATIC = ("cfg", "mesh", "plan", "variant")


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames="device")
def _prefill(params, device: Device, reads: Reads, *, cfg, mesh, plan, variant):
    segments = (jnp.arange(reads.tokens.shape[1]) < reads.count[:, None]).astype(jnp.int32)
    out = forward(
        params,
        reads.tokens,
        cfg,
        segment_ids=segments,
        cache=PagedCache(device.layers, reads.tables, reads.start),
        only=jnp.maximum(reads.count - 1, 0)[:, None],
        mesh=mesh,
        plan=plan,
    )
    end = reads.start + reads.count
    drawn = _draw(out.logits[:, 0], reads.rows, end, variant)
    slots = _put(device.slots, reads.slot, Slots(drawn.tokens, end, reads.rows))
    return Device(out.cache.layers, slots), drawn


@functools.partial(jax.jit, static_argnames=(*_STATIC, "one_by_one"), donate_argnames="device")
def _decode(params, device: Device, draws: Draws, *, cfg, mesh, plan, variant, one_by_one):
    x, b = draws.slot.shape
    own = jax.tree.map(lambda a: _at(a, draws.slot), device.slots)
    tokens = jnp.where(draws.given < 0, own.newest, draws.given)

    def advance(layers, args):
        tokens, length, tables, limit, rows = args
        real = (length < limit).astype(jnp.int32)[:, None]
        out = forward(
            params,
            tokens[:, None],
            cfg,
            segment_ids=real,
            cache=PagedCache(layers, tables, length),
            mesh=mesh,
            plan=plan,
        )
        return out.cache.layers, _draw(out.logits[:, 0], rows, length + 1, variant)

    args = (tokens, own.length, draws.tables, draws.limit, own.rows)
    if one_by_one:
        columns = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), args)
        layers, drawn = lax.scan(advance, device.layers, columns)
        drawn = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1).reshape(x * b, *a.shape[2:]), drawn)
    else:
        flat = jax.tree.map(lambda a: a.reshape(x * b, *a.shape[2:]), args)
        layers, drawn = advance(device.layers, flat)
    newest = drawn.tokens.reshape(x, b)
    slots = _put(device.slots, draws.slot, Slots(newest, own.length + 1, own.rows))
    return Device(layers, slots), drawn


def _draw(logits, rows: Row, position, variant: Variant) -> Drawn:
    rows = rows._replace(position=position)
    return draw(logits, rows, cut=variant.cut, num_top=variant.num_top)


def _at(values, slot):
    """[x b ...] of values [x y ...]."""
    return jax.vmap(lambda v, s: v[s])(values, slot)


def _put(slots: Slots, slot, new: Slots) -> Slots:
    """slots with those at slot int32[x ...] as in new [x ...]."""

    def put(values, new):
        return jax.vmap(lambda v, s, n: v.at[s].set(n))(values, slot, new)

    return jax.tree.map(put, slots, new)
