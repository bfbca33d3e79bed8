"""Runs scheduled work on the device.

`Runner` holds the weights, the pages and the page table of each sequence. `launch` turns the scheduler's work into
arrays and starts the programs of steps.py; the results arrive asynchronously.

Each device program is a command (commands.py). In an engine of several processes the first one sends its commands to
the runners of the others, so that all run the same programs in the same order.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence as List
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxtyping import PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.inference.commands import (
    BATCH_STRUCTURES,
    Command,
    LoadWeights,
    OpenWeights,
    ProgramName,
    ReadPages,
    RunStep,
    Send,
    WritePages,
)
from glm5_jax.inference.constraints import TokenRules, free_rules, token_rules
from glm5_jax.inference.engine_weights import EngineWeights, WeightsLost
from glm5_jax.inference.kv_transfer.pages import (
    PageContents,
    layout_of,
    read_pages,
    write_pages,
)
from glm5_jax.inference.page_tables import PageTables
from glm5_jax.inference.sampling import (
    MAX_TOP_LOGPROBS,
    AnyArray,
    Sampling,
    needs_truncation,
)
from glm5_jax.inference.scheduler import Decode, Prefill, ScheduledStep, Sequence
from glm5_jax.inference.shapes import EngineShapes
from glm5_jax.inference.step_arrays import (
    DecodeBatch,
    DeviceState,
    PrefillBatch,
    SamplingVariant,
    StepOutput,
)
from glm5_jax.inference.steps import Steps
from glm5_jax.model import glm5
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.parallel import multihost


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightSource:
    """Place of new weights, from which each process of an engine reads what its devices need.

    Attributes:
      fields: JSON object that says where they are, for the engine's `open_weights`.
    """

    fields: Mapping[str, Any]


OpenSource = Callable[[Mapping[str, Any]], PyTree]


class Runner:
    """Owns an engine's weights and pages on the device."""

    def __init__(
        self,
        model: glm5.Glm5,
        shape: EngineShapes,
        execution: ExecutionConfig,
        open_weights: OpenSource | None = None,
        send: Send | None = None,
    ):
        """Creates a runner with empty pages.

        Args:
          model: model, on its mesh if it has one.
          shape: sizes of the arrays on the device.
          execution: execution options.
          open_weights: opens the weights of a `WeightSource`, whose leaves may be `parallel.tree.Lazy`. Raises ValueError
            or OSError if it cannot. None: there is no source of weights.
          send: sends a command to the runners of the other processes; None: there are none, or this is one of them.
        """
        # `EngineWeights` converts experts to int4 once, not once per token.
        plain = dataclasses.replace(model.cfg, int4_group=None)
        self._cfg, self._shape, self._mesh, self._execution = (
            model.cfg,
            shape,
            model.mesh,
            execution,
        )
        self._steps = Steps(plain, shape, model.mesh, execution)
        self._tables = PageTables(shape, self.dp_size)
        self._open_source, self._send = open_weights, send
        self._opened: PyTree = None  # weights that `load_weights` loads
        self.weights = EngineWeights(model, execution)
        self._device = self._empty_state()
        # Rules that allow all tokens, for each number of rows.
        self._free_rules: dict[tuple[int, ...], TokenRules] = {}

    def _empty_state(self) -> DeviceState:
        state = self._steps.device(self._cfg.dtype)
        if self._mesh is not None:
            return state
        # Committed to the device like the weights. Otherwise the first call would compile another program than later
        # calls, which get committed pages.
        return jax.device_put(state, self._single_device)

    @property
    def _single_device(self) -> jax.sharding.Sharding:
        """Place of all arrays without a mesh."""
        [device] = set(jax.tree.leaves(self.weights.shardings))
        return device

    def free_pages(self) -> None:
        """Frees the device memory of pages and slots, whose contents are lost, until `allocate_pages`."""
        for array in jax.tree.leaves(self._device):
            array.delete()

    def allocate_pages(self) -> None:
        """Allocates empty pages and slots after `free_pages`."""
        self._device = self._empty_state()

    @property
    def dp_size(self) -> int:
        """Data-parallel size."""
        return self._steps.dp_size

    @property
    def has_followers(self) -> bool:
        """Whether commands are sent to other processes."""
        return self._send is not None

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

    def execute(self, command: Command, arrays: List[np.ndarray]) -> Any:
        """Runs the device program of a command in this process."""
        match command:
            case RunStep():
                return self._run_step(command, *arrays)
            case ReadPages():
                return read_pages(self._device, *arrays, self._replicated)
            case WritePages():
                return self._write_pages(*arrays)
            case OpenWeights(source=source):
                return self._open(source)
            case LoadWeights():
                return self._load()
        raise ValueError(f"{command} is no command of a device program")

    def _execute_in_all(self, command: Command, *arrays: np.ndarray) -> Any:
        """Runs a command in all processes of the engine."""
        if self._send is not None:
            self._send(command, arrays)
        return self.execute(command, arrays)

    def open_weights(self, params: PyTree | WeightSource) -> None:
        """Opens new weights for `load_weights`, in all processes of the engine.

        Raises ValueError or OSError, in all of them, if one cannot read them or they cannot replace the engine's.
        """
        if isinstance(params, WeightSource):
            self._execute_in_all(OpenWeights(source=dict(params.fields)))
        elif self._send is not None:
            raise ValueError("an engine of several processes takes weights as a WeightSource")
        else:
            self.weights.check(params)
            self._opened = params

    def load_weights(self) -> None:
        """Replaces the weights by those that were opened last; see `EngineWeights.load`."""
        self._execute_in_all(LoadWeights())

    def _open(self, source: Mapping[str, Any]) -> None:
        error, params, self._opened = None, None, None
        try:
            if self._open_source is None:
                raise ValueError("this engine has no source of weights")
            params = self._open_source(source)
            self.weights.check(params)
        except (ValueError, OSError) as raised:
            error = raised
        multihost.raise_on_all(error)
        self._opened = params

    def _load(self) -> None:
        params, self._opened = self._opened, None
        try:
            self.weights.load(params)
        except Exception as error:
            if jax.process_count() == 1 or isinstance(error, WeightsLost):
                raise
            # The other processes may have loaded them.
            raise WeightsLost(f"loading broke off: {type(error).__name__} {error}") from error

    def read_pages(self, dp_rank: int, pages: List[int]) -> PageContents:
        """Launches the read of at most `EngineShapes.pages_per_part` pages; returns their contents on the device, padded."""
        return self._execute_in_all(ReadPages(), self._global_pages(dp_rank, pages))

    @functools.cached_property
    def page_layout(self) -> str:
        """`layout_of` the pages."""
        return layout_of(self._contents)

    def check_pages(self, arrays: List[AnyArray]) -> None:
        """Raises ValueError unless arrays have the sizes of this engine's pages."""
        mine = jax.tree.leaves(self._contents)
        sizes = [[(a.shape[1:], a.dtype) for a in leaves] for leaves in (arrays, mine)]
        if sizes[0] != sizes[1]:
            raise ValueError("the pages have other sizes than those of this engine")

    def write_pages(self, dp_rank: int, pages: List[int], arrays: Iterable[np.ndarray]) -> None:
        """Launches the write of contents, as many as there are pages and at most `EngineShapes.pages_per_part`."""
        size = self._shape.pages_per_part
        resized = (_resize(array, size) for array in arrays)
        self._execute_in_all(WritePages(), self._global_pages(dp_rank, pages), *resized)

    @property
    def _contents(self) -> PageContents:
        """All pages on the device."""
        return PageContents(self._device.layers, self._device.mtp)

    def _write_pages(self, pages: np.ndarray, *leaves: np.ndarray) -> None:
        structure = jax.tree.structure(self._contents)
        contents = jax.tree.unflatten(structure, [self._replicate(leaf) for leaf in leaves])
        self._device = write_pages(self._device, contents, pages)

    @property
    def _replicated(self) -> NamedSharding | None:
        """Sharding of an array that each device of the mesh has in full; None: there is no mesh."""
        return None if self._mesh is None else NamedSharding(self._mesh, P())

    def _replicate(self, leaf: AnyArray) -> Any:
        """Returns an array on all devices of the mesh."""
        if self._replicated is None:
            return leaf
        if isinstance(leaf, np.ndarray):  # `device_put` would compare it with that of every process
            return jax.make_array_from_callback(leaf.shape, self._replicated, leaf.__getitem__)
        return jax.device_put(leaf, self._replicated)

    def _put(self, leaf: np.ndarray) -> jax.Array:
        """Returns an array on the device, or on all devices of the mesh."""
        if self._mesh is None:
            return jax.device_put(leaf, self._single_device)
        return self._replicate(leaf)

    def _global_pages(self, dp_rank: int, pages: List[int]) -> np.ndarray:
        """Returns a rank's page numbers among those of all ranks, padded to a fixed count with an invalid number."""
        numbers = np.full(self._shape.pages_per_part, self.dp_size * self._shape.num_pages)
        numbers[: len(pages)] = np.array(pages, int) + dp_rank * self._shape.num_pages
        return numbers.astype(np.int32)

    def compile_programs(
        self, scores_prompts: bool = True, moves_pages: bool = False
    ) -> Iterator[tuple[int, int]]:
        """Compiles all programs, one at a time.

        Yields the number of compiled programs and of all programs, first of none.
        scores_prompts: whether to compile those that compute log-probs of prompts.
        moves_pages: whether to compile those that move pages to other engines.
        """
        shape = self._shape
        widths = _all_buckets(shape.table_width, shape.max_pages)
        decodes = prefills = [SamplingVariant(), _FULL]
        if scores_prompts:
            prefills = [*prefills, _FULL._replace(scores_prompt=True)]
        calls = [
            functools.partial(self._dummy_decode, b, width, variant)
            for b in _all_buckets(shape.decode_rows, shape.max_num_seqs)
            for width in widths
            for variant in decodes
        ]
        calls += [
            functools.partial(self._dummy_prefill, b, t, width, variant)
            for t in _all_buckets(shape.prefill_tokens, shape.prefill_chunk)
            for b in _all_buckets(
                shape.prefill_rows, shape.max_prefill_rows if t <= shape.min_prefill_bucket else 1
            )
            for width in widths
            if width * shape.page_size >= t or width == widths[-1]
            for variant in prefills
        ]
        if moves_pages:
            calls.append(functools.partial(self._dummy_move))
        yield 0, len(calls)
        for done, call in enumerate(calls, 1):
            call()
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
        self._launch_step("decode", self._steps.dummy_decode(b, 0), width, variant)

    def _dummy_prefill(self, b: int, t: int, width: int, variant: SamplingVariant) -> None:
        self._launch_step("prefill", self._steps.dummy_prefill(b, t, 0), width, variant)

    def _dummy_move(self) -> None:
        contents = self.read_pages(0, [])
        self.write_pages(0, [], map(np.asarray, jax.tree.leaves(contents)))

    def _launch_step(
        self,
        program: ProgramName,
        batch: PrefillBatch | DecodeBatch,
        width: int,
        variant: SamplingVariant,
    ) -> StepOutput:
        """Launches a program in all processes. batch: its inputs, with page tables of no columns."""
        command = RunStep(
            program=program, variant=variant, width=width, has_rules=batch.rules is not None
        )
        changes = self._tables.take_changes()
        return self._execute_in_all(command, changes, *jax.tree.leaves(batch))

    def _run_step(self, command: RunStep, changes: np.ndarray, *leaves: np.ndarray) -> StepOutput:
        self._tables.apply(changes)
        structure = BATCH_STRUCTURES[command.program, command.has_rules]
        batch = jax.tree.unflatten(structure, leaves)
        batch = batch._replace(
            tables=self._tables.of_slots(batch.slot, command.width),
            rules=self._put_rules(batch, command.variant),
        )
        run = self._steps.prefill if command.program == "prefill" else self._steps.decode
        self._device, output = run(self.weights.params, self._device, batch, command.variant)
        return output

    def _put_rules(
        self, batch: PrefillBatch | DecodeBatch, variant: SamplingVariant
    ) -> TokenRules | None:
        """Returns the rules of a batch on the device. The full variant has rules always, in place of a variant for them."""
        if batch.rules is not None:
            return jax.tree.map(self._put, batch.rules)
        if variant == SamplingVariant():
            return None
        num_ranks, num_rows = batch.slot.shape
        size = num_ranks, num_rows
        if size not in self._free_rules:
            rules = free_rules(size, self._cfg.vocab_size)
            self._free_rules[size] = jax.tree.map(self._put, rules)
        return self._free_rules[size]

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
                max_pages = max(max_pages, self._tables.list_pages(dp_rank, sequence))
                if one.is_sampled:
                    rows.append((dp_rank * b + row, one))
        width = shape.table_width(max_pages)
        batch = DecodeBatch(
            tables=np.zeros((x, b, 0), np.int32),
            slot=slot,
            forced_token=forced_token,
            limit=limit,
            rules=self._rules(decodes, b, 1 + shape.num_speculative_tokens),
        )
        sequences = [one.sequence for of_rank in decodes for one in of_rank]
        variant = _variant(sequences, batch.rules is not None)
        return LaunchedBatch(rows, self._launch_step("decode", batch, width, variant))

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
                self._tables.restart(dp_rank, sequence)
                max_pages = max(max_pages, -(-end // shape.page_size))
                if one.is_sampled or sequence.handle.scores_prompt:
                    rows.append((dp_rank * b + row, one))
        # Launches the program.
        width = shape.table_width(max_pages)
        sequences = [one.sequence for of_rank in prefills for one in of_rank]
        scores_prompt = any(sequence.handle.scores_prompt for sequence in sequences)
        rules = self._rules(prefills, b, 1)
        batch = PrefillBatch(
            tokens=tokens,
            start=start,
            count=count,
            next_token=next_token,
            tables=np.zeros((x, b, 0), np.int32),
            slot=slot,
            rows=self._steps.sampling_rows(seeds, start, samplings),
            rules=rules,
        )
        variant = _variant(sequences, rules is not None or scores_prompt)
        variant = variant._replace(scores_prompt=scores_prompt)
        return LaunchedBatch(rows, self._launch_step("prefill", batch, width, variant))

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


def _resize(array: np.ndarray, count: int) -> np.ndarray:
    """Returns the first `count` pages, padded with zeros."""
    array = array[:count]
    return np.pad(array, ((0, count - len(array)), *[(0, 0)] * (array.ndim - 1)))


def _all_buckets(round_up, maximum: int) -> list[int]:
    """Returns all buckets up to that of `maximum`."""
    sizes, size = [], 0
    while size < maximum:
        size = round_up(size + 1)
        sizes.append(size)
    return sizes


# The variant of a batch with any option. A variant for each option would be as many programs, which the first request with
# the option would compile while all others wait.
_FULL = SamplingVariant(truncate=True, num_top=MAX_TOP_LOGPROBS)


def _variant(sequences: Iterable[Sequence], is_full: bool) -> SamplingVariant:
    """Returns the variant of a batch. is_full: whether it has rules or scores prompts."""
    samplings = [sequence.handle.request.sampling for sequence in sequences]
    if is_full or needs_truncation(samplings) or any(one.top_logprobs for one in samplings):
        return _FULL
    return SamplingVariant()
