"""Runs scheduled work on the device.

`Runner` holds the weights, the pages and the page table of each sequence. `launch` turns the scheduler's work into
arrays and starts the programs of steps.py; the results arrive asynchronously.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxtyping import PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.inference.constraints import TokenRules, token_rules
from glm5_jax.inference.engine_weights import EngineWeights
from glm5_jax.inference.sampling import MAX_TOP_LOGPROBS, Sampling, needs_truncation
from glm5_jax.inference.scheduler import Decode, Prefill, ScheduledStep, Sequence
from glm5_jax.inference.shapes import EngineShapes
from glm5_jax.inference.step_arrays import (
    DecodeBatch,
    DeviceState,
    PrefillBatch,
    SamplingVariant,
    SlotState,
    StepOutput,
)
from glm5_jax.inference.steps import Steps
from glm5_jax.model import glm5
from glm5_jax.model.cache import LayerCache
from glm5_jax.model.execution import ExecutionConfig


class LaunchedBatch(NamedTuple):
    """Launched prefill or decode.

    Attributes:
      rows: (row of `output`, its work) of each sampled token and each scored part of a prompt.
      output: tokens that the device draws.
    """

    rows: list[tuple[int, Decode | Prefill]]
    output: StepOutput


class LaunchedStep(NamedTuple):
    """Batches of one step, and the version of the weights that computes them."""

    batches: list[LaunchedBatch]
    version: int


class KVState(NamedTuple):
    """Cache of one sequence, to move it to another engine with the same page size, formats and drafts.

    Attributes:
      layers: pages [n z ...] of the layers, in order.
      mtp: pages of the MTP layer; None without drafts.
      slots: state of its slot.
    """

    layers: tuple[LayerCache, ...]
    mtp: LayerCache | None
    slots: SlotState


class Computation(NamedTuple):
    """Inputs of an engine's forward.

    Attributes:
      params: weights in the form for computing, one entry per layer.
      cfg: config of these weights.
      shape: sizes of the arrays on the device.
      mesh: mesh of the weights; None: one device.
      execution: execution options.
    """

    params: PyTree
    cfg: ModelConfig
    shape: EngineShapes
    mesh: jax.sharding.Mesh | None
    execution: ExecutionConfig


class Runner:
    """Owns an engine's weights and pages on the device."""

    def __init__(self, model: glm5.Glm5, shape: EngineShapes, execution: ExecutionConfig):
        # `EngineWeights` converts experts to int4 once, not once per token.
        plain = dataclasses.replace(model.cfg, int4_group=None)
        self._cfg, self._shape, self._mesh, self._execution = (
            model.cfg,
            shape,
            model.mesh,
            execution,
        )
        self._steps = Steps(plain, shape, model.mesh, execution)
        size = (self.dp_size, shape.max_num_seqs + 1)
        self._tables = np.zeros((*size, shape.max_pages), np.int32)
        self._num_listed = np.zeros(size, int)  # pages of each slot that are in its table
        self.weights = EngineWeights(model, execution)
        self._device = self._steps.device(model.cfg.dtype)
        if model.mesh is None:
            # Committed to the device like the weights. Otherwise the first call would compile another program than
            # later calls, which get committed pages.
            [device] = set(jax.tree.leaves(self.weights.shardings))
            self._device = jax.device_put(self._device, device)

    @property
    def dp_size(self) -> int:
        """Data-parallel size."""
        return self._steps.dp_size

    @property
    def computation(self) -> Computation:
        """Inputs of the forward at this moment."""
        return Computation(
            params=self.weights.params,
            cfg=self._steps.cfg,
            shape=self._shape,
            mesh=self._mesh,
            execution=self._execution,
        )

    def launch(self, works: list[ScheduledStep]) -> list[LaunchedBatch]:
        """Launches the work of all data-parallel ranks without waiting for it."""
        batches = []
        if any(work.decodes for work in works):
            batches.append(self._decode([work.decodes for work in works]))
        # Short prompts are read together, longer ones one at a time on each rank.
        for is_short, max_rows in ((True, self._shape.max_prefill_rows), (False, 1)):
            of_ranks = [
                [
                    one
                    for one in work.prefills
                    if (one.count <= self._shape.min_prefill_bucket) == is_short
                ]
                for work in works
            ]
            for first in range(0, max(map(len, of_ranks)), max_rows):
                batches.append(
                    self._prefill([prefills[first : first + max_rows] for prefills in of_ranks])
                )
        for batch in batches:
            for array in jax.tree.leaves(batch.output):
                array.copy_to_host_async()
        return batches

    def fetch(self, dp_rank: int, sequence: Sequence) -> KVState:
        """Returns the cache of a sequence that has no work in flight."""
        pages = self._global_pages(dp_rank, sequence.pages)
        return _read_slot(self._device, pages, dp_rank, sequence.device_slot)

    def check(self, kv_state: KVState) -> None:
        """Raises ValueError unless a cache from another engine fits this one."""
        structure = jax.tree.structure(kv_state)
        pages = zip(*(jax.tree.leaves(tree[:2]) for tree in (kv_state, self._device)))
        is_same = structure == jax.tree.structure(KVState(**self._device._asdict()))
        if not is_same or any((a.shape[1:], a.dtype) != (b.shape[1:], b.dtype) for a, b in pages):
            raise ValueError(
                "the transfer comes from another kind of engine; model, page_size, num_speculative_tokens, "
                "index_cache and latent_cache must be the same"
            )

    def store(self, dp_rank: int, sequence: Sequence, kv_state: KVState) -> None:
        """Writes a cache into the pages and the slot of a sequence."""
        pages = self._global_pages(dp_rank, sequence.pages)
        if self._mesh is not None:
            kv_state = jax.device_put(kv_state, NamedSharding(self._mesh, P()))
        self._device = _write_slot(self._device, kv_state, pages, dp_rank, sequence.device_slot)
        self._num_listed[dp_rank, sequence.device_slot] = 0  # the slot was another sequence's
        self._list(dp_rank, sequence)

    def _global_pages(self, dp_rank: int, pages: list[int]) -> np.ndarray:
        """Returns a rank's page numbers among those of all ranks, padded to a bucket with an invalid number."""
        invalid = self.dp_size * self._shape.num_pages
        numbers = np.full(self._shape.table_width(len(pages)), invalid)
        numbers[: len(pages)] = np.array(pages) + dp_rank * self._shape.num_pages
        return numbers.astype(np.int32)

    def compile_programs(self) -> Iterator[tuple[int, int]]:
        """Compiles all programs for requests without top_logprobs and rules, one at a time.

        Yields the number of compiled programs and of all programs, first of none.
        """
        shape = self._shape
        widths = _all_buckets(shape.table_width, shape.max_pages)
        variants = [SamplingVariant(truncate) for truncate in (False, True)]
        calls = [
            (functools.partial(self._dummy_decode, b), width, variant)
            for b in _all_buckets(shape.decode_rows, shape.max_num_seqs)
            for width in widths
            for variant in variants
        ]
        calls += [
            (functools.partial(self._dummy_prefill, b, t), width, variant)
            for t in _all_buckets(shape.prefill_tokens, shape.prefill_chunk)
            for b in _all_buckets(
                shape.prefill_rows, shape.max_prefill_rows if t <= shape.min_prefill_bucket else 1
            )
            for width in widths
            if width * shape.page_size >= t or width == widths[-1]
            for variant in variants
        ]
        yield 0, len(calls)
        for done, (call, width, variant) in enumerate(calls, 1):
            call(width, variant)
            if done == len(calls):
                jax.block_until_ready(self._device)
            yield done, len(calls)

    def lower_dummy(self, name: str) -> tuple[jax.stages.Lowered, dict]:
        """Lowers the largest "prefill" or "decode" program without sequences; returns it and its arguments by kind."""
        shape = self._shape
        if name == "prefill":
            inputs = self._steps.dummy_prefill(1, shape.prefill_chunk, shape.max_pages)
        else:
            inputs = self._steps.dummy_decode(shape.max_num_seqs, shape.max_pages)
        arguments = {"weights": self.weights.params, "cache": self._device, "inputs": inputs}
        function, static = self._steps.program(name, SamplingVariant())
        return function.lower(*arguments.values(), **static), arguments

    def _dummy_decode(self, b: int, width: int, variant: SamplingVariant) -> None:
        self._run(self._steps.decode, self._steps.dummy_decode(b, width), variant)

    def _dummy_prefill(self, b: int, t: int, width: int, variant: SamplingVariant) -> None:
        self._run(self._steps.prefill, self._steps.dummy_prefill(b, t, width), variant)

    def _run(self, step, inputs, variant: SamplingVariant) -> StepOutput:
        self._device, output = step(self.weights.params, self._device, inputs, variant)
        return output

    def _decode(self, decodes: list[list[Decode]]) -> LaunchedBatch:
        """Launches one decode of all ranks."""
        shape, x = self._shape, len(decodes)
        b = shape.decode_rows(max(map(len, decodes)))
        slot = np.full((x, b), shape.max_num_seqs, np.int32)
        forced_token, limit = np.full((x, b), -1, np.int32), np.zeros((x, b), np.int32)
        rows, max_pages = [], 0
        for dp_rank, of_rank in enumerate(decodes):
            for row, one in enumerate(of_rank):
                sequence, at = one.sequence, (dp_rank, row)
                slot[at], limit[at] = sequence.device_slot, sequence.limit
                if one.forced_token is not None:
                    forced_token[at] = one.forced_token
                max_pages = max(max_pages, self._list(dp_rank, sequence))
                if one.is_sampled:
                    rows.append((dp_rank * b + row, one))
        width = shape.table_width(max_pages)
        batch = DecodeBatch(
            tables=self._tables[np.arange(x)[:, None], slot, :width],
            slot=slot,
            forced_token=forced_token,
            limit=limit,
            rules=self._rules(decodes, b, 1 + shape.num_speculative_tokens),
        )
        variant = _variant(one.sequence for of_rank in decodes for one in of_rank)
        return LaunchedBatch(rows, self._run(self._steps.decode, batch, variant))

    def _prefill(self, prefills: list[list[Prefill]]) -> LaunchedBatch:
        """Launches one prefill of all ranks."""
        # Arrays of the padded shape.
        shape, x = self._shape, len(prefills)
        b = shape.prefill_rows(max(map(len, prefills)))
        max_count = max(one.count for of_rank in prefills for one in of_rank)
        tokens = np.zeros((x, b, shape.prefill_tokens(max_count)), np.int32)
        start, count, next_token = np.zeros((3, x, b), np.int32)
        slot, seeds = np.full((x, b), shape.max_num_seqs, np.int32), np.zeros((x, b), np.uint64)
        samplings = [[Sampling()] * b for _ in prefills]
        rows, max_pages = [], 1
        # Fills them with the sequences' parts.
        for dp_rank, of_rank in enumerate(prefills):
            for row, one in enumerate(of_rank):
                sequence, end, at = one.sequence, one.start + one.count, (dp_rank, row)
                tokens[dp_rank, row, : one.count] = sequence.ids[one.start : end]
                start[at], count[at], slot[at] = one.start, one.count, sequence.device_slot
                next_token[at] = -1 if one.is_sampled else sequence.ids[end]
                samplings[dp_rank][row] = sequence.handle.request.sampling
                seeds[at] = sequence.seed
                self._num_listed[dp_rank, sequence.device_slot] = (
                    0  # the slot was another sequence's
                )
                self._list(dp_rank, sequence)
                max_pages = max(max_pages, -(-end // shape.page_size))
                if one.is_sampled or sequence.handle.scores_prompt:
                    rows.append((dp_rank * b + row, one))
        # Launches the program.
        width = shape.table_width(max_pages)
        batch = PrefillBatch(
            tokens=tokens,
            start=start,
            count=count,
            next_token=next_token,
            tables=self._tables[np.arange(x)[:, None], slot, :width],
            slot=slot,
            rows=self._steps.sampling_rows(seeds, start, samplings),
            rules=self._rules(prefills, b, 1),
        )
        sequences = [one.sequence for of_rank in prefills for one in of_rank]
        variant = _variant(sequences)._replace(
            scores_prompt=any(sequence.handle.scores_prompt for sequence in sequences)
        )
        return LaunchedBatch(rows, self._run(self._steps.prefill, batch, variant))

    def _rules(
        self, works: list[list[Decode]] | list[list[Prefill]], num_rows: int, step_tokens: int
    ) -> TokenRules | None:
        """Returns the rules of the sampled tokens of all ranks; None: there are none."""
        # The scheduler has already counted the tokens of this step as in flight.
        constraints = [
            [
                (one.sequence.constraint, one.sequence.num_in_flight - step_tokens)
                if one.is_sampled
                else (None, 0)
                for one in of_rank
            ]
            for of_rank in works
        ]
        return token_rules(constraints, num_rows, self._cfg.vocab_size, step_tokens)

    def _list(self, dp_rank: int, sequence: Sequence) -> int:
        """Adds a sequence's new pages to its table; returns their total number."""
        first, count = self._num_listed[dp_rank, sequence.device_slot], len(sequence.pages)
        if first < count:
            self._tables[dp_rank, sequence.device_slot, first:count] = sequence.pages[first:]
            self._num_listed[dp_rank, sequence.device_slot] = count
        return count


@jax.jit
def _read_slot(device: DeviceState, pages, dp_rank, slot) -> KVState:
    """Returns the cache of one sequence."""
    layers, mtp = jax.tree.map(
        lambda a: a.at[pages].get(mode="fill", fill_value=0), (device.layers, device.mtp)
    )
    return KVState(layers, mtp, jax.tree.map(lambda a: a[dp_rank, slot], device.slots))


@functools.partial(jax.jit, donate_argnames="device")
def _write_slot(device: DeviceState, kv_state: KVState, pages, dp_rank, slot) -> DeviceState:
    """Writes the cache of one sequence."""

    def put(a, new):
        # Another engine's table may be wider. Its entries after the sequence's pages are padding.
        count = min(len(pages), len(new))
        return a.at[pages[:count]].set(new[:count], mode="drop")

    layers, mtp = jax.tree.map(put, (device.layers, device.mtp), (kv_state.layers, kv_state.mtp))
    slots = jax.tree.map(lambda a, new: a.at[dp_rank, slot].set(new), device.slots, kv_state.slots)
    return DeviceState(layers, mtp, slots)


def _all_buckets(round_up, maximum: int) -> list[int]:
    """Returns all buckets up to that of `maximum`."""
    sizes, size = [], 0
    while size < maximum:
        size = round_up(size + 1)
        sizes.append(size)
    return sizes


def _variant(sequences: Iterable[Sequence]) -> SamplingVariant:
    """Returns the sampling options that a batch needs."""
    samplings = [sequence.handle.request.sampling for sequence in sequences]
    top = MAX_TOP_LOGPROBS if any(s.top_logprobs for s in samplings) else 0
    return SamplingVariant(needs_truncation(samplings), top)
