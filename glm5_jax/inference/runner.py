"""From the scheduler's work to arrays: the model's weights, its pages, and which of them each sequence has."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

from glm5_jax.config import ModelConfig
from glm5_jax.core.console import ProgressBar
from glm5_jax.core.tree import flatten, is_compound, made, map_with_path, unflatten
from glm5_jax.inference.quantize import table
from glm5_jax.inference.sampling import MOST_TOP_LOGPROBS, Sampling, cuts
from glm5_jax.inference.scheduler import Decode, Prefill, Sequence, Work
from glm5_jax.inference.steps import (
    Device,
    Draws,
    Drew,
    Reads,
    Shape,
    Slots,
    Steps,
    Variant,
)
from glm5_jax.model import glm5
from glm5_jax.model.cache import LayerCache
from glm5_jax.model.plan import Plan
from glm5_jax.model.quant import settled
from glm5_jax.model.turned import Turned
from pallas_kernels.numerics import wide
from pallas_kernels.quantised import Int4, Int8

LOADED_BYTES = 2**28  # of new weights that are made at once, beside the old ones; ours


class WeightsLost(Exception):
    """New weights could not all be made once some of the old ones were gone: no forward is possible any more."""


class Part(NamedTuple):
    """Work that was sent off as one: each with its row in what the device draws."""

    rows: list[tuple[int, Decode | Prefill]]
    drew: Drew


class Carried(NamedTuple):
    """A sequence on its way from one engine to another: layers and mtp with its pages [n z ...] in order, and
    slots with what stood in its slot. Both engines have pages of one size and kind, and drafts or none."""

    layers: tuple[LayerCache, ...]
    mtp: LayerCache | None
    slots: Slots


class Computation(NamedTuple):
    """What an engine's forward depends on: weights in the form that they are computed with, layer by layer, and the config
    that goes with them."""

    params: dict
    cfg: ModelConfig
    shape: Shape
    mesh: jax.sharding.Mesh | None
    plan: Plan


class Runner:
    """Owner of what an engine has on the device."""

    def __init__(self, model: glm5.Glm5, shape: Shape, plan: Plan):
        # Experts become int4 once, not once per token.
        plain = dataclasses.replace(model.cfg, int4_group=None)
        self._cfg, self._shape, self._mesh, self._plan = model.cfg, shape, model.mesh, plan
        self._steps = Steps(plain, shape, model.mesh, plan)
        size = (self.groups, shape.slots + 1)
        self._tables = np.zeros((*size, shape.max_pages), np.int32)
        self._listed = np.zeros(size, int)  # pages of each slot that its table shows
        params = glm5.params_of(model)
        self._kinds = {path: _kind_of(leaf) for path, leaf in flatten(params).items()}
        self._shardings = flatten(_shardings_of(params, model, plan))
        self._device = self._steps.device(model.cfg.dtype)
        if model.mesh is None:
            # Bound to it like the weights: the first program would not be that of later calls, whose pages it returns.
            [device] = set(jax.tree.leaves(self._shardings))
            self._device = jax.device_put(self._device, device)
        self._params = None
        self.load(params)

    @property
    def groups(self) -> int:
        """Groups of devices that hold other sequences."""
        return self._steps.groups

    @property
    def computation(self) -> Computation:
        return Computation(self._params, self._steps.cfg, self._shape, self._mesh, self._plan)

    def check_params(self, params) -> None:
        """ValueError unless these can take the place of the weights that there are."""
        check_params(params, self._cfg)
        for path, leaf in flatten(params).items():
            kind, held = type(leaf) if is_compound(leaf) else None, self._kinds[path][0]
            if held is Turned and kind is None:
                raise ValueError(
                    f"the engine's weights are rotated, those that came are not ({path}); serve the model that is "
                    "trained, or one that was quantised with --plain"
                )
            if kind not in (None, held):
                raise ValueError(f"the weights are quantised otherwise than the engine's: {path}")

    def load(self, params) -> None:
        """Takes the weights that all later work is done with, a part at a time: what they replace is let go before
        the next part is made. Leaves may be `Lazy`; plain ones become what they replace is. ValueError if they are of
        another model or kind; WeightsLost if it breaks off once some are replaced."""
        self.check_params(params)
        flat, parts = flatten(params), []
        old = flatten(self._params)
        for paths in _in_parts(flat, jnp.dtype(self._cfg.dtype).itemsize):
            try:
                own = unflatten({path: self._kept(path, made(flat.pop(path))) for path in paths})
                own = jax.block_until_ready(self._computed(own))
            except Exception as error:
                if not parts:
                    raise
                raise WeightsLost(
                    f"loading broke off at {', '.join(paths)[:200]}: {type(error).__name__} {error}"
                ) from error
            parts.append(own)
            self._params = None
            for path in flatten(own):
                old.pop(path, None)
        self._params = _joined(parts)

    def _computed(self, params):
        where = None
        if self._mesh is not None:
            shapes = jax.eval_shape(functools.partial(computed, cfg=self._cfg), params)
            where = glm5.param_shardings(self._cfg, self._mesh, shapes, self._plan.replicated)
        return jax.jit(computed, static_argnames="cfg", out_shardings=where)(params, cfg=self._cfg)

    def _kept(self, path: str, leaf):
        """A leaf as the one that it replaces is: quantised, and where."""
        kind, group = self._kinds[path]
        if kind in (Int8, Int4) and not is_compound(leaf):
            leaf = table.quantised(path, leaf, flatten(glm5.letters(self._cfg))[path], group)
        return jax.tree.map(jax.device_put, leaf, self._shardings[path])

    def launch(self, works: list[Work]) -> list[Part]:
        """Sends off the work of all groups; nothing waits for it."""
        parts = []
        if any(work.decodes for work in works):
            parts.append(self._decode([work.decodes for work in works]))
        # Short ones are read together, others one of each group at a time.
        for short, most in ((True, self._shape.prompts), (False, 1)):
            own = [
                [one for one in work.prefills if (one.count <= self._shape.short_prompt) == short]
                for work in works
            ]
            for first in range(0, max(map(len, own)), most):
                parts.append(self._prefill([prefills[first : first + most] for prefills in own]))
        for part in parts:
            for array in jax.tree.leaves(part.drew):
                array.copy_to_host_async()
        return parts

    def fetch(self, group: int, sequence: Sequence) -> Carried:
        """What the device has of a sequence of which no work is under way."""
        pages = self._everywhere(group, sequence.pages)
        return _fetch(self._device, pages, group, sequence.slot)

    def check(self, carried: Carried) -> None:
        """ValueError unless what another engine fetched can be stored here."""
        own, theirs = self._device, jax.tree.structure(carried)
        pages = zip(*(jax.tree.leaves(tree[:2]) for tree in (carried, own)))
        alike = theirs == jax.tree.structure(Carried(*own))
        if not alike or any((a.shape[1:], a.dtype) != (b.shape[1:], b.dtype) for a, b in pages):
            raise ValueError(
                "the parcel is of another kind of engine; model, page_size, num_draft, index_cache and latent_cache "
                "must be the same"
            )

    def store(self, group: int, sequence: Sequence, carried: Carried) -> None:
        """Puts it into the pages and the slot that a sequence has been given here."""
        pages = self._everywhere(group, sequence.pages)
        if self._mesh is not None:
            carried = jax.device_put(carried, NamedSharding(self._mesh, P()))
        self._device = _store(self._device, carried, pages, group, sequence.slot)
        self._listed[group, sequence.slot] = 0  # the slot was another's
        self._list(group, sequence)

    def _everywhere(self, group: int, pages: list[int]) -> np.ndarray:
        """Numbers of a group's pages among all, as many as a bucket; behind them that of none."""
        found = np.full(self._shape.pages(len(pages)), self.groups * self._shape.num_pages)
        found[: len(pages)] = np.array(pages) + group * self._shape.num_pages
        return found.astype(np.int32)

    def warm(self, show: bool = False) -> None:
        """Compiles what requests without top_logprobs can need, so that none waits for it. show: a progress bar."""
        shape = self._shape
        widths = _sizes(shape.pages, shape.max_pages)
        variants = [Variant(cut) for cut in (False, True)]
        calls = [
            (functools.partial(self._idle_decode, b), width, variant)
            for b in _sizes(shape.rows, shape.slots)
            for width in widths
            for variant in variants
        ]
        calls += [
            (functools.partial(self._idle_prefill, b, t), width, variant)
            for t in _sizes(shape.tokens, shape.chunk)
            for b in _sizes(shape.rows_read, shape.prompts if t <= shape.short_prompt else 1)
            for width in widths
            if width * shape.page_size >= t or width == widths[-1]
            for variant in variants
        ]
        with ProgressBar(len(calls), unit="program") if show else contextlib.nullcontext() as bar:
            for done, (call, width, variant) in enumerate(calls, 1):
                call(width, variant)
                if bar:
                    bar.update(done, "compiled")
        jax.block_until_ready(self._device)

    def lower_idle(self, name: str) -> tuple[jax.stages.Lowered, dict]:
        """Lowers the largest program of a kind ("prefill" or "decode"), for no sequence; returns it with its arguments
        by kind."""
        shape = self._shape
        if name == "prefill":
            inputs = self._steps.idle_reads(1, shape.chunk, shape.max_pages)
        else:
            inputs = self._steps.idle_draws(shape.slots, shape.max_pages)
        held = {"weights": self._params, "cache": self._device, "inputs": inputs}
        function, static = self._steps.program(name, Variant())
        return function.lower(*held.values(), **static), held

    def _idle_decode(self, b: int, width: int, variant: Variant) -> None:
        self._run(self._steps.decode, self._steps.idle_draws(b, width), variant)

    def _idle_prefill(self, b: int, t: int, width: int, variant: Variant) -> None:
        self._run(self._steps.prefill, self._steps.idle_reads(b, t, width), variant)

    def _run(self, step, inputs, variant: Variant) -> Drew:
        self._device, drew = step(self._params, self._device, inputs, variant)
        return drew

    def _decode(self, decodes: list[list[Decode]]) -> Part:
        shape, x = self._shape, len(decodes)
        b = shape.rows(max(map(len, decodes)))
        slot = np.full((x, b), shape.slots, np.int32)
        given, limit = np.full((x, b), -1, np.int32), np.zeros((x, b), np.int32)
        where, widest = [], 0
        for group, own in enumerate(decodes):
            for row, one in enumerate(own):
                sequence = one.sequence
                slot[group, row], limit[group, row] = sequence.slot, sequence.limit
                if one.given is not None:
                    given[group, row] = one.given
                widest = max(widest, self._list(group, sequence))
                if one.draws:
                    where.append((group * b + row, one))
        width = shape.pages(widest)
        tables = self._tables[np.arange(x)[:, None], slot, :width]
        variant = _variant(one.sequence for own in decodes for one in own)
        draws = Draws(tables, slot, given, limit)
        return Part(where, self._run(self._steps.decode, draws, variant))

    def _prefill(self, prefills: list[list[Prefill]]) -> Part:
        shape, x = self._shape, len(prefills)
        b = shape.rows_read(max(map(len, prefills)))
        most = max(one.count for own in prefills for one in own)
        tokens = np.zeros((x, b, shape.tokens(most)), np.int32)
        start, count, behind = np.zeros((3, x, b), np.int32)
        slot, seeds = np.full((x, b), shape.slots, np.int32), np.zeros((x, b), np.uint64)
        samplings = [[Sampling()] * b for _ in prefills]
        where, widest = [], 1
        for group, own in enumerate(prefills):
            for row, one in enumerate(own):
                sequence, end, at = one.sequence, one.start + one.count, (group, row)
                tokens[group, row, : one.count] = sequence.ids[one.start : end]
                start[at], count[at], slot[at] = one.start, one.count, sequence.slot
                behind[at] = -1 if one.draws else sequence.ids[end]
                samplings[group][row], seeds[at] = sequence.handle.request.sampling, sequence.seed
                self._listed[group, sequence.slot] = 0  # the slot was another's
                self._list(group, sequence)
                widest = max(widest, -(-end // shape.page_size))
                if one.draws:
                    where.append((group * b + row, one))
        tables = self._tables[np.arange(x)[:, None], slot, : shape.pages(widest)]
        sampling = self._steps.drawn_by(seeds, start, samplings)
        reads = Reads(tokens, start, count, behind, tables, slot, sampling)
        variant = _variant(one.sequence for own in prefills for one in own)
        return Part(where, self._run(self._steps.prefill, reads, variant))

    def _list(self, group: int, sequence: Sequence) -> int:
        """Brings a sequence's table up to date; how many pages it has."""
        first, count = self._listed[group, sequence.slot], len(sequence.pages)
        if first < count:
            self._tables[group, sequence.slot, first:count] = sequence.pages[first:]
            self._listed[group, sequence.slot] = count
        return count


def check_params(params, cfg: ModelConfig) -> None:
    """ValueError if params are not those of a model of this config."""
    given, wanted = flatten(params), flatten(glm5.abstract(cfg))
    if odd := sorted(given.keys() ^ wanted.keys()):
        state = "missing" if odd[0] in wanted else "unknown"
        raise ValueError(f"the weights are of another model: {odd[0]} is {state}")
    for name, weight in given.items():
        if weight.shape != wanted[name].shape:
            raise ValueError(
                f"the weights are of another model: {name} is {weight.shape}, not {wanted[name].shape}"
            )


@jax.jit
def _fetch(device: Device, pages, group, slot) -> Carried:
    layers, mtp = jax.tree.map(
        lambda a: a.at[pages].get(mode="fill", fill_value=0), (device.layers, device.mtp)
    )
    return Carried(layers, mtp, jax.tree.map(lambda a: a[group, slot], device.slots))


@functools.partial(jax.jit, donate_argnames="device")
def _store(device: Device, carried: Carried, pages, group, slot) -> Device:
    def put(a, new):
        # Another engine's bucket may be wider: what lies behind the sequence's pages is nothing.
        count = min(len(pages), len(new))
        return a.at[pages[:count]].set(new[:count], mode="drop")

    layers, mtp = jax.tree.map(put, (device.layers, device.mtp), (carried.layers, carried.mtp))
    slots = jax.tree.map(lambda a, new: a.at[group, slot].set(new), device.slots, carried.slots)
    return Device(layers, mtp, slots)


def _kind_of(leaf) -> tuple[type | None, int | None]:
    """The class of a leaf, None of a plain one, and how many of its rows share a scale."""
    return type(leaf) if is_compound(leaf) else None, getattr(leaf, "group", None)


def _shardings_of(params, model: glm5.Glm5, plan: Plan):
    """Where a model's parameters are to be, each of them."""
    if model.mesh is not None:
        return glm5.param_shardings(model.cfg, model.mesh, params, plan.replicated)
    devices = {d for x in jax.tree.leaves(params) if isinstance(x, jax.Array) for d in x.devices()}
    device = min(devices or jax.devices(), key=lambda device: device.id)
    return jax.tree.map(lambda _: SingleDeviceSharding(device), params)


def _in_parts(flat: dict, itemsize: int) -> list[list[str]]:
    """Paths of leaves, in order, each part of LOADED_BYTES at most or one leaf."""
    parts, filled = [[]], 0
    for path, leaf in flat.items():
        size = math.prod(leaf.shape) * itemsize
        if parts[-1] and filled + size > LOADED_BYTES:
            parts.append([])
            filled = 0
        parts[-1].append(path)
        filled += size
    return parts


def _joined(parts: list):
    """One tree of several that have different leaves of it."""
    if isinstance(parts[0], dict):
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: _joined([part[name] for part in parts if name in part]) for name in names}
    return [_joined(list(own)) for own in zip(*parts)] if isinstance(parts[0], list) else parts[0]


def computed(params, cfg: ModelConfig):
    """Weights, or some of them, as an engine keeps them: each layer's apart, in the compute dtype, but for the router's, which
    is computed wide, experts as int4 where cfg says so."""
    dtype = jnp.dtype(cfg.dtype)
    params = map_with_path(
        # Always wide: a router that comes in another dtype than the last one would be other programs'.
        lambda path, w: w.astype(wide(w.dtype) if "router/" in path else dtype),
        settled(params, cfg),
    )
    return glm5.unstack(params, cfg)


def _sizes(bucket, most: int) -> list[int]:
    """All buckets up to that of `most`."""
    sizes, size = [], 0
    while size < most:
        size = bucket(size + 1)
        sizes.append(size)
    return sizes


def _variant(sequences: Iterable[Sequence]) -> Variant:
    samplings = [sequence.handle.request.sampling for sequence in sequences]
    top = MOST_TOP_LOGPROBS if any(s.top_logprobs for s in samplings) else 0
    return Variant(cuts(samplings), top)
