"""Tests the scheduler in random programs against a simulated device that knows the contents of every page slot."""

import collections
import zlib

import numpy as np
import pytest

from glm5_jax.inference.request import Handle, Request
from glm5_jax.inference.sampling import Sampling
from glm5_jax.inference.scheduler import Limits, Scheduler, Sequence

SIZE = 4


def next_token(ids):
    """Returns the token after ids, which depends on all of them."""
    return zlib.crc32(bytes(ids)) % 7


class Device:
    """Executes work in order, one step after the host. Sampled tokens depend on the contents of the pages."""

    def __init__(self, scheduler, num_speculative_tokens, rng):
        self.scheduler, self.num_speculative_tokens, self.rng = (
            scheduler,
            num_speculative_tokens,
            rng,
        )
        self.pages = collections.defaultdict(dict)
        self.newest = {}
        self.in_flight = collections.deque()

    def launch(self, work):
        out = []
        for row in work.decodes:
            tokens = self._decode(row)
            if row.is_sampled:
                out.append((row, tokens))
        for row in work.prefills:
            sequence = row.sequence
            ids = sequence.ids[row.start : row.start + row.count]
            self._write(sequence.pages, row.start, ids)
            if row.is_sampled:
                end = row.start + row.count
                token = next_token(self._read(sequence.pages, end))
                self.newest[sequence.slot] = (end, [token])
                out.append((row, [token]))
        self.in_flight.append(out)

    def _decode(self, row):
        pages = row.sequence.pages
        if row.forced_token is not None:
            start, newest = row.sequence.num_computed_tokens - 1, row.forced_token
        else:
            start, [*_, newest] = self.newest[row.sequence.slot]
        self._write(pages, start, [newest])
        tokens = [next_token(self._read(pages, start + 1))]
        num_accepted = self.rng.integers(self.num_speculative_tokens + 1)
        for i in range(self.num_speculative_tokens):
            at = start + 1 + i
            if at >= min(row.sequence.limit, len(pages) * SIZE):
                break
            token = tokens[-1] if i < num_accepted else 99  # a rejected draft stays in the pages
            self._write(pages, at, [token])
            if i < num_accepted:
                tokens.append(next_token(self._read(pages, at + 1)))
        self.newest[row.sequence.slot] = (start + len(tokens), tokens)
        return tokens

    def _write(self, pages, start, ids):
        for i, token in enumerate(ids, start):
            self.pages[pages[i // SIZE]][i % SIZE] = token

    def _read(self, pages, end):
        return [self.pages[pages[i // SIZE]][i % SIZE] for i in range(end)]


def expected_ids(request):
    ids = list(request.ids)
    for _ in range(request.sampling.max_tokens):
        ids.append(next_token(ids))
    return ids


def drive(scheduler, device, requests, rng, cancel=0.0, depth=1):
    """Serves all requests, cancels some, and returns (request, ids) of the others."""
    waiting, served = collections.deque(requests), []

    def has_ended(sequence):
        return sequence.handle.finish_reason is not None

    def end(sequence, reason):
        sequence.handle.append_output((), reason)
        scheduler.remove(sequence)

    def receive():
        for row, tokens in device.in_flight.popleft():
            sequence = row.sequence
            if has_ended(sequence):
                continue
            scheduler.update_from_output(row, tokens)
            if len(sequence.ids) >= sequence.limit:
                end(sequence, "length")
                served.append((sequence.handle.request, sequence.ids[: sequence.limit]))

    for _ in range(100_000):
        while waiting and rng.random() < 0.5:
            request = waiting.popleft()
            limit = len(request.ids) + request.sampling.max_tokens
            scheduler.check(limit)
            sequence = Sequence(
                handle=Handle(request),
                ids=list(request.ids),
                limit=limit,
                seed=0,
                prefix_namespace=0,
            )
            scheduler.add(sequence)
        for sequence in scheduler.sequences:
            if rng.random() < cancel:
                end(sequence, "cancelled")
        device.launch(scheduler.schedule())
        while len(device.in_flight) > depth or (device.in_flight and not scheduler.sequences):
            receive()
        if not waiting and not scheduler.sequences:
            return served
    raise AssertionError("requests starve")


def requests(rng, count, max_length=30):
    """Returns requests whose prompts share prefixes."""
    stems = [rng.integers(0, 7, max_length).tolist() for _ in range(3)]
    made_requests = []
    for _ in range(count):
        stem = stems[rng.integers(len(stems))][: rng.integers(max_length)]
        ids = [*stem, *rng.integers(0, 7, rng.integers(1, 6))]
        made_requests.append(
            Request(ids, Sampling(max_tokens=int(rng.integers(1, 20)), seed=len(made_requests)))
        )
    return made_requests


LIMITS = {
    "plain": Limits(max_num_seqs=5, prefill_chunk=8, max_batched_tokens=12),
    "one": Limits(max_num_seqs=1, prefill_chunk=4, max_batched_tokens=4),
    "invariant": Limits(
        max_num_seqs=5, prefill_chunk=8, max_batched_tokens=12, batch_invariant=True
    ),
    "drafts": Limits(
        max_num_seqs=5, prefill_chunk=8, max_batched_tokens=12, num_speculative_tokens=3
    ),
}


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("num_pages", [14, 40])
@pytest.mark.parametrize("seed", range(3))
def test_ids_do_not_depend_on_other_requests(name, num_pages, seed):
    rng = np.random.default_rng(seed)
    limits = LIMITS[name]
    scheduler = Scheduler(num_pages, SIZE, limits)
    device = Device(scheduler, limits.num_speculative_tokens, rng)
    submitted = requests(rng, 60)
    served = drive(scheduler, device, submitted, rng, cancel=0.002)
    assert len(served) > 20
    for request, ids in served:
        assert ids == expected_ids(request)
    # Only the prefix cache holds pages.
    assert scheduler.pool.num_free == num_pages - len(scheduler.prefixes)
    scheduler.prefixes.clear(0)
    assert scheduler.pool.num_free == num_pages


def test_preempts_only_with_few_pages():
    counts = []
    for num_pages in (14, 400):
        rng = np.random.default_rng(0)
        scheduler = Scheduler(num_pages, SIZE, LIMITS["plain"])
        drive(scheduler, Device(scheduler, 0, rng), requests(rng, 60), rng)
        counts.append(scheduler.num_preempted)
    assert counts[0] > 0 == counts[1]


@pytest.mark.parametrize("name", ["plain", "invariant", "drafts"])
def test_prefills_shared_prompt_once(name):
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 7, 33).tolist()
    submitted = [Request(prompt, Sampling(max_tokens=5, seed=i)) for i in range(5)]
    limits = LIMITS[name]
    scheduler = Scheduler(100, SIZE, limits)
    device = Device(scheduler, limits.num_speculative_tokens, rng)
    read, launch = [], device.launch

    def launch_and_count(work):
        read.extend(row.count for row in work.prefills)
        launch(work)

    device.launch = launch_and_count
    drive(scheduler, device, submitted, rng)
    # 32 tokens fill pages and chunks exactly. With drafts, the token after them must be shared too.
    repeated = 1 if name != "drafts" else 1 + SIZE
    assert sum(read) == 33 + 4 * repeated


def test_interleaves_chunks_with_decodes():
    """A long prompt does not delay the decodes of other requests."""
    scheduler = Scheduler(100, SIZE, Limits(max_num_seqs=4, prefill_chunk=8, max_batched_tokens=8))
    device = Device(scheduler, 0, np.random.default_rng(0))
    for ids, max_tokens in (([1] * 3, 50), ([2] * 80, 2)):
        request = Request(ids, Sampling(max_tokens=max_tokens))
        scheduler.add(
            Sequence(
                handle=Handle(request),
                ids=list(ids),
                limit=len(ids) + max_tokens,
                seed=0,
                prefix_namespace=0,
            )
        )
    steps = []
    for _ in range(10):
        work = scheduler.schedule()
        steps.append((len(work.decodes), [row.count for row in work.prefills]))
        device.launch(work)
    assert steps[0] == (0, [3, 5]) and all(step == (1, [8]) for step in steps[1:9])


def test_rejects_invalid_limits_and_sequences():
    scheduler = Scheduler(3, SIZE, LIMITS["plain"])
    scheduler.check(12)
    with pytest.raises(ValueError, match="13 tokens, including the reply, exceed the 12"):
        scheduler.check(13)
    for expected_error, options in {
        "max_num_seqs is 0": dict(max_num_seqs=0),
        "prefill_chunk is -1": dict(prefill_chunk=-1),
        "max_batched_tokens is 0": dict(max_batched_tokens=0),
        "num_speculative_tokens is -1": dict(num_speculative_tokens=-1),
        "use num_speculative_tokens=0 with batch_invariant": dict(
            num_speculative_tokens=2, batch_invariant=True
        ),
    }.items():
        with pytest.raises(ValueError, match=expected_error):
            Limits(**options)
    with pytest.raises(ValueError, match="prefill_chunk 6 is no multiple of page_size 4"):
        Scheduler(8, SIZE, Limits(prefill_chunk=6, batch_invariant=True))
