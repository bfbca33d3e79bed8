"""The scheduler under random programs, against a device that knows what every slot of every page holds."""

import collections
import zlib

import numpy as np
import pytest

from glm5_jax.inference.request import Handle, Request
from glm5_jax.inference.sampling import Sampling
from glm5_jax.inference.scheduler import Limits, Scheduler, Sequence

SIZE = 4


def following(ids):
    """The token behind ids, which depends on all of them."""
    return zlib.crc32(bytes(ids)) % 7


class Device:
    """Executes work in order, one step behind the host; what it draws follows from what the pages hold."""

    def __init__(self, scheduler, num_speculative_tokens, rng):
        self.scheduler, self.num_speculative_tokens, self.rng = (
            scheduler,
            num_speculative_tokens,
            rng,
        )
        self.pages = collections.defaultdict(dict)
        self.newest = {}
        self.flying = collections.deque()

    def launch(self, work):
        out = []
        for one in work.decodes:
            drawn = self._decode(one)
            if one.is_sampled:
                out.append((one, drawn))
        for one in work.prefills:
            sequence = one.sequence
            ids = sequence.ids[one.start : one.start + one.count]
            self._write(sequence.pages, one.start, ids)
            if one.is_sampled:
                end = one.start + one.count
                token = following(self._read(sequence.pages, end))
                self.newest[sequence.slot] = (end, [token])
                out.append((one, [token]))
        self.flying.append(out)

    def _decode(self, one):
        pages = one.sequence.pages
        if one.forced_token is not None:
            start, newest = one.sequence.num_computed_tokens - 1, one.forced_token
        else:
            start, [*_, newest] = self.newest[one.sequence.slot]
        self._write(pages, start, [newest])
        drawn = [following(self._read(pages, start + 1))]
        kept = self.rng.integers(self.num_speculative_tokens + 1)
        for i in range(self.num_speculative_tokens):
            at = start + 1 + i
            if at >= min(one.sequence.limit, len(pages) * SIZE):
                break
            token = drawn[-1] if i < kept else 99  # a draft that is refused leaves its traces
            self._write(pages, at, [token])
            if i < kept:
                drawn.append(following(self._read(pages, at + 1)))
        self.newest[one.sequence.slot] = (start + len(drawn), drawn)
        return drawn

    def _write(self, pages, start, ids):
        for i, token in enumerate(ids, start):
            self.pages[pages[i // SIZE]][i % SIZE] = token

    def _read(self, pages, end):
        return [self.pages[pages[i // SIZE]][i % SIZE] for i in range(end)]


def alone(request):
    ids = list(request.ids)
    for _ in range(request.sampling.max_tokens):
        ids.append(following(ids))
    return ids


def drive(scheduler, device, requests, rng, cancel=0.0, depth=1):
    """Serves all requests, some of which are cancelled; (request, its ids) of the others."""
    waiting, served = collections.deque(requests), []

    def ended(sequence):
        return sequence.handle.finish_reason is not None

    def end(sequence, reason):
        sequence.handle.append_output((), reason)
        scheduler.remove(sequence)

    def receive():
        for one, drawn in device.flying.popleft():
            sequence = one.sequence
            if ended(sequence):
                continue
            scheduler.update_from_output(one, drawn)
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
        while len(device.flying) > depth or (device.flying and not scheduler.sequences):
            receive()
        if not waiting and not scheduler.sequences:
            return served
    raise AssertionError("requests starve")


def requests(rng, count, most=30):
    """Prompts that share beginnings with each other."""
    stems = [rng.integers(0, 7, most).tolist() for _ in range(3)]
    found = []
    for _ in range(count):
        stem = stems[rng.integers(len(stems))][: rng.integers(most)]
        ids = [*stem, *rng.integers(0, 7, rng.integers(1, 6))]
        found.append(Request(ids, Sampling(max_tokens=int(rng.integers(1, 20)), seed=len(found))))
    return found


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
def test_what_comes_out_is_what_each_request_gives_alone(name, num_pages, seed):
    rng = np.random.default_rng(seed)
    limits = LIMITS[name]
    scheduler = Scheduler(num_pages, SIZE, limits)
    device = Device(scheduler, limits.num_speculative_tokens, rng)
    asked = requests(rng, 60)
    served = drive(scheduler, device, asked, rng, cancel=0.002)
    assert len(served) > 20
    for request, ids in served:
        assert ids == alone(request)
    # Nothing is held but by the prefixes, and nothing at all without them.
    assert scheduler.pool.num_free == num_pages - len(scheduler.prefixes)
    scheduler.prefixes.clear(0)
    assert scheduler.pool.num_free == num_pages


def test_few_pages_preempt_and_many_do_not():
    counts = []
    for num_pages in (14, 400):
        rng = np.random.default_rng(0)
        scheduler = Scheduler(num_pages, SIZE, LIMITS["plain"])
        drive(scheduler, Device(scheduler, 0, rng), requests(rng, 60), rng)
        counts.append(scheduler.num_preempted)
    assert counts[0] > 0 == counts[1]


@pytest.mark.parametrize("name", ["plain", "invariant", "drafts"])
def test_requests_of_the_same_prompt_read_it_once(name):
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 7, 33).tolist()
    asked = [Request(prompt, Sampling(max_tokens=5, seed=i)) for i in range(5)]
    limits = LIMITS[name]
    scheduler = Scheduler(100, SIZE, limits)
    device = Device(scheduler, limits.num_speculative_tokens, rng)
    read, launch = [], device.launch

    def counted(work):
        read.extend(one.count for one in work.prefills)
        launch(work)

    device.launch = counted
    drive(scheduler, device, asked, rng)
    # 32 tokens are whole pages, and whole chunks; for drafts, the token behind must be shared too.
    again = 1 if name != "drafts" else 1 + SIZE
    assert sum(read) == 33 + 4 * again


def test_chunks_of_one_prompt_lie_between_decodes_of_others():
    """A long prompt does not stop those who decode."""
    scheduler = Scheduler(100, SIZE, Limits(max_num_seqs=4, prefill_chunk=8, max_batched_tokens=8))
    device = Device(scheduler, 0, np.random.default_rng(0))
    for ids, most in (([1] * 3, 50), ([2] * 80, 2)):
        request = Request(ids, Sampling(max_tokens=most))
        scheduler.add(
            Sequence(
                handle=Handle(request),
                ids=list(ids),
                limit=len(ids) + most,
                seed=0,
                prefix_namespace=0,
            )
        )
    steps = []
    for _ in range(10):
        work = scheduler.schedule()
        steps.append((len(work.decodes), [one.count for one in work.prefills]))
        device.launch(work)
    assert steps[0] == (0, [3, 5]) and all(step == (1, [8]) for step in steps[1:9])


def test_refuses_limits_and_sequences_that_cannot_be():
    scheduler = Scheduler(3, SIZE, LIMITS["plain"])
    scheduler.check(12)
    with pytest.raises(ValueError, match="13 tokens, including the reply, exceed the 12"):
        scheduler.check(13)
    for words, options in {
        "max_num_seqs is 0": dict(max_num_seqs=0),
        "prefill_chunk is -1": dict(prefill_chunk=-1),
        "max_batched_tokens is 0": dict(max_batched_tokens=0),
        "num_speculative_tokens is -1": dict(num_speculative_tokens=-1),
        "use num_speculative_tokens=0 with batch_invariant": dict(
            num_speculative_tokens=2, batch_invariant=True
        ),
    }.items():
        with pytest.raises(ValueError, match=words):
            Limits(**options)
    with pytest.raises(ValueError, match="prefill_chunk 6 is no multiple of page_size 4"):
        Scheduler(8, SIZE, Limits(prefill_chunk=6, batch_invariant=True))
