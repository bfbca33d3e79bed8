"""Serves many requests at once over a paged cache, with the forward that training uses.

    engine = Engine(model, tokenizer)
    handle = engine.submit(Request(ids, Sampling(max_tokens=100)))
    while engine.step():
        ...
    handle.completion

A step launches the next work before the results of the last step have arrived, so that host and device work at the
same time. One thread owns an engine. Any thread may read and cancel handles.
"""

import collections
import dataclasses
import functools
import heapq
import itertools
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from glm5_jax.inference.commands import Send
from glm5_jax.inference.constraints import ReplyConstraint
from glm5_jax.inference.engine_weights import EngineWeights, WeightsLost
from glm5_jax.inference.kv_transfer.pages import PrefixPages
from glm5_jax.inference.quantize.table import quantise_model
from glm5_jax.inference.request import (
    CANCELLED,
    DEADLINE,
    FAILED,
    LENGTH,
    Completion,
    EngineConfig,
    Handle,
    Paused,
    Request,
    Token,
)
from glm5_jax.inference.request_limits import check_request
from glm5_jax.inference.runner import (
    Computation,
    LaunchedStep,
    OpenSource,
    Runner,
    WeightSource,
)
from glm5_jax.inference.sampling import SampledTokens, Sampling
from glm5_jax.inference.scheduler import Decode, Prefill, Scheduler, Sequence as Running
from glm5_jax.inference.shapes import resolve_shapes
from glm5_jax.inference.stats import EngineStats
from glm5_jax.inference.step_arrays import StepOutput
from glm5_jax.inference.stop_checker import StopChecker
from glm5_jax.model import glm5
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.text.tokenizer import Tokenizer

FINISH, KEEP, RECOMPUTE = POLICIES = ("finish", "keep", "recompute")
MAX_STEPS_IN_FLIGHT = 1  # launched steps while the next one is prepared
_log = logging.getLogger(__name__)


class LiveRequest(NamedTuple):
    """State of a request in addition to its sequence: its rank and its stop conditions."""

    dp_rank: int
    stops: StopChecker


class Engine:
    """Inference engine of one model.

    Attributes:
      cfg: config of the model.
      version: version of its weights, set by `update_weights`.
      max_length: maximum tokens of a prompt and its reply.
      paused: whether no work is launched.
      is_drained: whether requests are refused.
      stats: counters since the start.
    """

    def __init__(
        self,
        model: glm5.Glm5,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig = EngineConfig(),
        *,
        version: int = 0,
        execution: ExecutionConfig = ExecutionConfig(),
        open_weights: OpenSource | None = None,
        send: Send | None = None,
    ):
        """Creates the engine and its pages. Raises ValueError for options that the model does not support.

        Args:
          model: model, on its mesh if it has one.
          tokenizer: tokenizer for stop texts and end tokens; None: no stop texts, end tokens of the model's config.
          config: options.
          version: version of the weights.
          execution: execution options that the engine's options do not set.
          open_weights: opens a `WeightSource` for `update_weights`, see `Runner`; None: there is no source of weights.
          send: sends a command to the other processes of the engine (`followers.follower.Follower`); None: it has one process.
        """
        model = quantise_model(model, config.quantization)
        cfg = model.cfg
        if model.mesh is not None and model.mesh.is_multi_process and send is None:
            raise ValueError("the mesh spans several processes; connect them (inference/followers)")
        self._shape, limits = resolve_shapes(cfg, config)
        max_length = config.max_length or cfg.max_position_embeddings
        self.cfg, self._tokenizer, self.max_length = cfg, tokenizer, max_length
        self._warmed = config.warms_prompt_logprobs, config.moves_pages
        self._runner = Runner(model, self._shape, config.execution(execution), open_weights, send)
        self._schedulers = [
            Scheduler(self._shape.num_pages, config.page_size, limits)
            for _ in range(self._runner.dp_size)
        ]
        self._in_flight: collections.deque[LaunchedStep] = collections.deque()
        self._live: dict[Running, LiveRequest] = {}
        self._cancelled: collections.deque[Running] = collections.deque()
        self._deadlines: list[tuple[float, int, weakref.ref]] = []
        self._numbers = itertools.count()
        self._eos_ids = frozenset(tokenizer.eos_ids if tokenizer else cfg.eos_token_id)
        self._seeds = np.random.default_rng(config.seed)
        self.paused = self.is_drained = self.is_asleep = False
        self.version = version
        self.stats = EngineStats(accepted=[0] * (config.num_speculative_tokens + 1))

    def submit(
        self,
        request: Request,
        listener: Callable[[Handle], None] | None = None,
        submitted_at: float | None = None,
    ) -> Handle:
        """Queues a request. listener, submitted_at: see `Handle`. Raises ValueError if it can never be served."""
        if self.is_drained:
            raise ValueError("the engine is drained and takes no requests; create another")
        if self.is_asleep:
            raise ValueError("the engine is asleep; call wake_up() first")
        limit = self.check(request)
        handle, sampling = Handle(request, listener, submitted_at), request.sampling
        seed = sampling.seed if sampling.seed is not None else int(self._seeds.integers(2**63))
        sequence = Running(
            handle=handle,
            ids=list(request.ids),
            limit=limit,
            seed=seed,
            prefix_namespace=self.version,
            constraint=request.rules and ReplyConstraint(request.rules, self.cfg.vocab_size),
        )
        dp_rank = request.dp_rank
        if dp_rank is None:
            dp_rank = self._choose_rank(sequence.ids, sequence.prefix_namespace)
        stops = StopChecker(sampling, limit - len(request.ids), self._eos_ids, self._tokenizer)
        self._live[sequence] = LiveRequest(dp_rank, stops)
        self._watch(sequence)
        self._schedulers[dp_rank].add(sequence)
        self.stats.num_requests += 1
        self.stats.prompt_tokens += len(request.ids)
        return handle

    @property
    def weights(self) -> EngineWeights:
        """Weights on the devices."""
        return self._runner.weights

    def check(self, request: Request) -> int:
        """Returns the maximum tokens of a request, including its prompt. Any thread may call it.

        Raises ValueError if the request can never be served.
        """
        limit = check_request(
            request,
            cfg=self.cfg,
            shape=self._shape,
            max_length=self.max_length,
            dp_size=self.dp_size,
            has_tokenizer=self._tokenizer is not None,
        )
        self._schedulers[0].check(limit)
        return limit

    def step(self) -> bool:
        """Launches the next work and processes arrived results. Returns whether requests are left."""
        began = time.perf_counter()
        self._expire_requests()
        batches = []
        if not self.paused:
            works = [scheduler.schedule() for scheduler in self._schedulers]
            self.stats.read_tokens += sum(one.count for work in works for one in work.prefills)
            batches = self._runner.launch(works)
        if batches:
            if self._in_flight:
                # A step's last batch finishes last.
                last = self._in_flight[-1].batches[-1].output.count
                is_ready = last.is_ready()  # pyright: ignore[reportAttributeAccessIssue]
                self.stats.num_overlapped += not is_ready
            self._in_flight.append(LaunchedStep(batches, self.version))
            self.stats.num_steps += 1
        self.stats.host_seconds += time.perf_counter() - began
        while len(self._in_flight) > (MAX_STEPS_IN_FLIGHT if batches else 0):
            self._receive()
        return bool(self._live)

    def count_prefix(self, ids: Sequence[int]) -> int:
        """Returns the number of pages of a prompt's prefix that are cached by the rank with the most."""
        return max(self._count_prefixes(list(ids)))

    def read_prefix(self, ids: Sequence[int], start: int) -> PrefixPages | None:
        """Returns cached pages of a prompt's prefix from page `start` on, for `write_prefix` of another engine.

        There are at most `EngineShapes.pages_per_part`, which are still on their way to the host. None: no such page is
        cached (yet).
        """
        ids = list(ids)
        counts = self._count_prefixes(ids)
        dp_rank = counts.index(max(counts))
        if counts[dp_rank] <= start:
            return None
        scheduler = self._schedulers[dp_rank]
        held = scheduler.hold_prefix(ids, self.version)
        pages = held[start : start + self._shape.pages_per_part]
        arrays = jax.tree.leaves(self._runner.read_pages(dp_rank, pages))
        scheduler.pool.drop(held)  # programs that write into them run later
        for array in arrays:
            array.copy_to_host_async()
        return PrefixPages(start, len(pages), self.page_layout, arrays)

    def write_prefix(
        self, ids: Sequence[int], part: PrefixPages, version: int, dp_rank: int | None = None
    ) -> int:
        """Adds pages of a prompt's prefix that another engine has computed to the cached prefixes.

        Returns the number of added pages: fewer than there are if some are cached already; none if there is no room, the
        pages before them are not cached (any more), or the weights have another version. Raises ValueError for pages of
        another kind of engine.

        Args:
          ids: token ids of the prompt.
          part: its pages.
          version: version of the weights that computed them.
          dp_rank: data-parallel rank that will serve the prompt; None: the engine chooses.
        """
        if part.layout != self.page_layout:
            raise ValueError(
                "the pages come from another kind of engine; model, page_size, num_speculative_tokens, index_cache and "
                "latent_cache must be the same"
            )
        self._runner.check_pages(part.arrays)
        if version != self.version or self.is_asleep:
            return 0
        ids, num_added, size = list(ids), 0, self._shape.pages_per_part
        if dp_rank is None:
            dp_rank = self._choose_rank(ids, version)
        for start in range(part.start, part.start + part.count, size):
            count = min(size, part.start + part.count - start)
            first, pages = self._schedulers[dp_rank].add_prefix(ids, version, start, count)
            if pages:
                begin = first - part.start
                arrays = (np.asarray(a)[begin : begin + len(pages)] for a in part.arrays)
                self._runner.write_pages(dp_rank, pages, arrays)
            num_added += len(pages)
        self.stats.received_tokens += num_added * self._shape.page_size
        return num_added

    def _count_prefixes(self, ids: list[int]) -> list[int]:
        return [scheduler.count_prefix(ids, self.version) for scheduler in self._schedulers]

    def _drain_steps(self) -> None:
        """Processes all launched steps."""
        while self._in_flight:
            self._receive()

    def compile_programs(self) -> Iterator[tuple[int, int]]:
        """Compiles all programs, one at a time; see `EngineConfig.warms_prompt_logprobs` and `moves_pages`.

        Yields the number of compiled programs and of all programs, first of none.
        """
        yield from self._runner.compile_programs(*self._warmed)

    def warm(self) -> None:
        """Compiles all programs of `compile_programs`."""
        collections.deque(self.compile_programs(), maxlen=0)

    def generate(
        self,
        prompts: Iterable[Sequence[int]],
        sampling: Sampling | Sequence[Sampling] = Sampling(),
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> list[Completion]:
        """Returns the replies to prompts of token ids.

        - sampling: parameters of all prompts, or of each.
        - should_stop: called after each step; once it returns True, the remaining requests are cancelled.

        Raises ValueError, before any work, if a request cannot be served.
        """
        prompts = list(prompts)
        if isinstance(sampling, Sampling):
            sampling = [sampling] * len(prompts)
        if len(sampling) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts came with {len(sampling)} samplings")
        if self.paused:
            raise ValueError("the engine is paused; resume it first")
        requests = [Request(ids, one) for ids, one in zip(prompts, sampling)]
        for request in requests:
            self.check(request)
        handles = [self.submit(request) for request in requests]
        while self.step():
            if should_stop():
                for handle in handles:
                    handle.cancel()
        return [handle.completion for handle in handles]

    def pause(self) -> None:
        """Stops launching work. The next step processes what was launched."""
        self.paused = True

    def resume(self) -> None:
        """Launches work again after `pause`."""
        self.paused = False

    def sleep(self) -> None:
        """Frees the device memory of the pages until `wake_up`, for a trainer on the same devices.

        Prefixes are cleared, and the weights stay. Raises ValueError if requests are unfinished, and for an engine of
        several processes.
        """
        if self._live or self.has_followers:
            raise ValueError(
                f"{len(self._live)} requests are unfinished, or the engine has several processes; only an idle engine of "
                "one process sleeps"
            )
        if not self.is_asleep:
            self._drain_steps()
            for scheduler in self._schedulers:
                scheduler.prefixes.clear(self.version)
            self._runner.free_pages()
            self.is_asleep = True

    def wake_up(self) -> None:
        """Allocates the pages again after `sleep`."""
        if self.is_asleep:
            self._runner.allocate_pages()
            self.is_asleep = False

    def fail(self) -> None:
        """Ends all requests as failed, without using the device, and refuses new ones."""
        self.is_drained = True
        for sequence in list(self._live):
            self._end(sequence, FAILED)

    def drain(self) -> None:
        """Completes all requests and refuses new ones."""
        self.is_drained, self.paused = True, False
        while self.step():
            pass

    def update_weights(
        self, params: PyTree | WeightSource, version: int, policy: str = FINISH
    ) -> None:
        """Replaces the weights. All later tokens have the new version.

        Prefixes of the old weights are cleared. Raises ValueError for another tree, other shapes or an unknown policy;
        the engine is then unchanged. Raises WeightsLost if loading fails midway; the engine has then failed.

        Args:
          params: tree as of `glm5.params_of`, whose leaves may be `parallel.tree.Lazy`, or a source that each process of
            the engine opens; plain weights are quantised if those that they replace are.
          version: version of the new weights.
          policy: treatment of running requests:
            "finish" completes them with the old weights and starts no others meanwhile;
            "keep" continues from the cache of the old weights;
            "recompute" computes their cache again with the new weights.
        """
        if policy not in POLICIES:
            raise ValueError(f"policy is {policy!r}; use one of {', '.join(POLICIES)}")
        if policy == FINISH and self.paused and self._num_started:
            raise Paused("the engine is paused, so no request finishes; use keep or recompute")
        self._runner.open_weights(params)
        if policy == FINISH:
            self._finish()
        try:
            self._runner.load_weights()
        except WeightsLost:
            self.fail()
            raise
        for scheduler in self._schedulers:
            scheduler.on_weights_updated(self.version, version, policy == RECOMPUTE)
        self.version = version

    @property
    def has_followers(self) -> bool:
        """Whether the engine has several processes, so that `update_weights` takes only a `WeightSource`."""
        return self._runner.has_followers

    @property
    def computation(self) -> Computation:
        """Inputs of the forward at this moment, to compute the same elsewhere."""
        return self._runner.computation

    @property
    def description(self) -> dict:
        """Sizes and limits of the engine as JSON values."""
        return {**dataclasses.asdict(self._shape), "max_length": self.max_length}

    @property
    def page_layout(self) -> str:
        """Text that is equal for engines that can exchange pages (`kv_transfer.pages.layout_of`)."""
        return self._runner.page_layout

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._shape.page_size

    @property
    def dp_size(self) -> int:
        """Data-parallel size. Each rank has its own pages and prefixes."""
        return len(self._schedulers)

    @property
    def num_free_pages(self) -> int:
        """Number of free pages of all ranks, without those of prefixes that could be evicted."""
        return sum(scheduler.pool.num_free for scheduler in self._schedulers)

    @property
    def num_cached_pages(self) -> int:
        """Number of pages that hold prefixes."""
        return sum(len(scheduler.prefixes) for scheduler in self._schedulers)

    @property
    def num_running(self) -> int:
        """Number of requests with pages."""
        return sum(len(scheduler.running) for scheduler in self._schedulers)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for pages."""
        return sum(scheduler.num_waiting for scheduler in self._schedulers)

    @property
    def num_preempted(self) -> int:
        """Number of preemptions."""
        return sum(scheduler.num_preempted for scheduler in self._schedulers)

    @property
    def _num_started(self) -> int:
        """Number of requests that have, or had, pages. Preempted ones count, because they must end as well."""
        return sum(one.num_started for one in self._schedulers)

    def _choose_rank(self, ids: list[int], namespace: int | None) -> int:
        """Returns the rank with the longest cached prefix, of equal ones the least loaded."""

        def merit(dp_rank: int) -> tuple[int, int]:
            scheduler = self._schedulers[dp_rank]
            num_cached = scheduler.count_prefix(ids, namespace)
            return num_cached, -sum(one.total for one in scheduler.sequences)

        ranks = range(len(self._schedulers))
        return 0 if len(ranks) == 1 else max(ranks, key=merit)

    def _watch(self, sequence: Running) -> None:
        """Registers a sequence for cancellation and its time limit."""
        # A deque may be appended to from any thread.
        sequence.handle.cancel_callback = functools.partial(self._cancelled.append, sequence)
        if (timeout_s := sequence.handle.request.timeout_s) is not None:
            deadline = sequence.handle.submitted_at + timeout_s
            # A weak reference, because most requests end long before their deadline.
            entry = (deadline, next(self._numbers), weakref.ref(sequence))
            heapq.heappush(self._deadlines, entry)

    def _expire_requests(self) -> None:
        """Ends requests that are cancelled or past their time limit."""
        while self._cancelled:
            sequence = self._cancelled.popleft()
            if sequence in self._live:
                self._end(sequence, CANCELLED)
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            *_, late = heapq.heappop(self._deadlines)
            if (sequence := late()) in self._live:
                self._end(sequence, DEADLINE)

    def _receive(self) -> None:
        """Waits for the oldest launched step and processes its tokens."""
        # Waits for the device.
        step, began = self._in_flight.popleft(), time.perf_counter()
        batches = [(one.rows, jax.tree.map(np.asarray, one.output)) for one in step.batches]
        ready = time.perf_counter()
        self.stats.waiting_seconds += ready - began
        # Hands the tokens to their requests.
        for rows, output in batches:
            for row, work in rows:
                if work.sequence in self._live:
                    try:
                        self._take(work, output, row, step.version)
                    except (KeyboardInterrupt, SystemExit):
                        raise
                    except BaseException:  # of this request only; native code may have panicked
                        _log.exception("a request has failed")
                        if work.sequence in self._live:
                            self._end(work.sequence, FAILED)
        self.stats.host_seconds += time.perf_counter() - ready

    def _take(self, work: Decode | Prefill, output: StepOutput, row: int, version: int) -> None:
        """Appends a row's tokens to its sequence, up to the end of the reply."""
        sequence, sampling = work.sequence, work.sequence.handle.request.sampling
        live, handle, sampled = self._live[sequence], sequence.handle, output.sampled
        if isinstance(work, Prefill) and handle.scores_prompt:
            assert output.prompt is not None, "the program of such a prefill scores prompts"
            _append_prompt(handle, work, output.prompt, row, version)
        if not work.is_sampled:
            return
        count = int(output.count[row])
        ids, logprobs = (a[row, :count].tolist() for a in (sampled.tokens, sampled.logprobs))
        self._schedulers[live.dp_rank].update_from_output(work, ids)
        if not count:
            return
        _check_numbers(logprobs)
        if isinstance(work, Decode) and self._shape.num_speculative_tokens:
            self.stats.accepted[count - 1] += 1
        if sampling.max_tokens == 0:
            self._end(sequence, LENGTH)
            return
        # Tokens with their log-probs, until one ends the reply.
        tokens, end = [], None
        for i, (token, logprob) in enumerate(zip(ids, logprobs)):
            top = sampled.top_at(row, i, sampling.top_logprobs)
            tokens.append(Token(token, logprob, version, top))
            end = live.stops.feed(token)
            if end:
                break
        self.stats.new_tokens += len(tokens)
        if end:
            self._end(sequence, *end, tokens)
            return
        if sequence.constraint:
            sequence.constraint.accept(token.id for token in tokens)
        handle.append_output(tokens, None)

    def _end(
        self,
        sequence: Running,
        reason: str,
        stopped_by: int | str | None = None,
        tokens: Iterable[Token] = (),
    ) -> None:
        """Ends a request with its last tokens and frees its pages."""
        live, handle = self._live.pop(sequence), sequence.handle
        self._schedulers[live.dp_rank].remove(sequence)
        self.stats.cached_tokens += handle.cached_tokens or 0
        handle.append_output(tokens, reason, stopped_by)

    def _finish(self) -> None:
        """Completes all started requests without starting others."""
        for scheduler in self._schedulers:
            scheduler.is_admitting = False
        while self._in_flight or self._num_started:
            self.step()
        for scheduler in self._schedulers:
            scheduler.is_admitting = True


def _check_numbers(logprobs: Iterable[float]) -> None:
    """Raises ArithmeticError for a log-prob that is no number, because its token is as good as none."""
    if any(map(math.isnan, logprobs)):
        raise ArithmeticError(
            "the model's log-probs are no numbers; its weights are damaged, or overflow in their dtype"
        )


def _append_prompt(
    handle: Handle, work: Prefill, scored: SampledTokens, row: int, version: int
) -> None:
    """Appends the log-probs of the prompt that a prefill has computed, unless they are there already."""
    ids, num_top = handle.request.ids, handle.request.sampling.top_logprobs
    if work.start != len(handle.prompt_tokens):
        return  # the sequence was preempted, and this part is computed again
    end = min(work.start + work.count, len(ids) - 1)
    for i, token in enumerate(ids[work.start + 1 : end + 1]):
        _check_numbers(scored.logprobs[row, i : i + 1].tolist())
        top = scored.top_at(row, i, num_top)
        handle.prompt_tokens.append(Token(token, float(scored.logprobs[row, i]), version, top))
