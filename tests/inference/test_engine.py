"""The engine against one request at a time: what it draws, its log-probs, and what they do not depend on."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx

from glm5_jax import presets
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import EngineConfig, Handle, Request
from glm5_jax.inference.runner import Runner
from glm5_jax.inference.sampling import Sampling
from glm5_jax.inference.scheduler import Scheduler, Sequence
from glm5_jax.inference.shapes import resolve_shapes
from glm5_jax.model import glm5
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.text.tokenizer import Tokenizer
from tests.model.small import one_layer

CFG = dataclasses.replace(
    presets.tiny(), num_hidden_layers=2, index_topk=12, max_position_embeddings=64
)
PAGE = 4
GREEDY = Sampling(max_tokens=8, temperature=0, ignore_eos=True)
forward = jax.jit(glm5.forward, static_argnames="cfg")


@functools.cache
def model(seed=0):
    return glm5.Glm5(CFG, rngs=nnx.Rngs(seed))


@functools.cache
def light():
    """A model that compiles fast, for what needs programs of its own."""
    return glm5.Glm5(one_layer(), rngs=nnx.Rngs(0))


def engine(seed=0, version=0, **options):
    options = dict(page_size=PAGE, num_pages=18, max_num_seqs=4, prefill_chunk=32) | options
    return Engine(model(seed), Tokenizer.default(), EngineConfig(**options), version=version)


def prompts(count, seed=0, most=40):
    """Of all lengths; some begin as others do."""
    rng = np.random.default_rng(seed)
    stem = rng.integers(0, CFG.vocab_size, most).tolist()
    found = []
    for _ in range(count):
        own = rng.integers(0, CFG.vocab_size, rng.integers(1, most // 2)).tolist()
        found.append(stem[: rng.integers(most // 2)] + own)
    return found


def logprobs(ids, temperature=1.0, seed=0):
    """[t v] of one forward over all of ids, as the trainer has them, at 64 tokens for one program."""
    row = np.zeros((1, 64), np.int32)
    row[0, : len(ids)] = ids
    logits = forward(glm5.params_of(model(seed)), row, cfg=CFG).logits[0, : len(ids)]
    return np.asarray(jax.nn.log_softmax(logits / temperature))


def alone(ids, sampling, **options):
    """What one request gives by itself, without anything cached."""
    return engine(**options).generate([ids], sampling)[0]


@pytest.mark.parametrize(
    "temperature, num_top", [(0.0, 0), (0.7, 0), pytest.param(0.7, 3, marks=pytest.mark.slow)]
)
def test_returns_log_probs_of_the_trainers_forward(temperature, num_top):
    """num_top: of so many of the likeliest tokens too, which takes other programs."""
    sampling = dataclasses.replace(GREEDY, temperature=temperature, top_logprobs=num_top, seed=5)
    asked = prompts(9)
    for prompt, reply in zip(asked, engine().generate(asked, sampling)):
        want = logprobs(prompt + reply.ids, temperature or 1.0)[len(prompt) - 1 : -1]
        chosen = want[np.arange(len(reply.ids)), reply.ids]
        np.testing.assert_allclose(reply.logprobs, chosen, atol=1e-5)
        if not temperature:
            assert (want.max(-1) - chosen < 1e-5).all()
        assert len(reply.top) == len(reply.ids)
        for row, top in zip(want, reply.top):
            assert [value for _, value in top] == pytest.approx(np.sort(row)[::-1][:num_top])
            assert [row[i] for i, _ in top] == pytest.approx([value for _, value in top])
        assert reply.finish_reason == "length" and reply.versions == [0] * len(reply.ids)


def schedule(made, asked, samplings, rng):
    """The completions of requests that come at random times."""
    handles, waiting = {}, list(range(len(asked)))
    rng.shuffle(waiting)
    while waiting or not all(h.finish_reason for h in handles.values()):
        for _ in range(rng.integers(3)):
            if waiting:
                i = waiting.pop()
                handles[i] = made.submit(Request(asked[i], samplings[i]))
        made.step()
    return [handles[i].completion for i in range(len(asked))]


def mixed(count, rng):
    """Samplings of which some are greedy."""
    temperatures = rng.choice([0.0, 1.0], count)
    return [
        dataclasses.replace(GREEDY, temperature=float(own), seed=i)
        for i, own in enumerate(temperatures)
    ]


def gap(prompt, ours, theirs, sampling):
    """How far apart the model holds the two tokens at which two replies part: of the scores that decide, which
    hold the noise of the draw."""
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b)
    scores = logprobs([*prompt, *ours[:at]], sampling.temperature or 1.0)[-1]
    if sampling.temperature:
        key = np.array([sampling.seed >> 32, sampling.seed & (2**32 - 1)], np.uint32)
        key = jax.random.fold_in(
            jax.random.wrap_key_data(key, impl="threefry2x32"), len(prompt) + at
        )
        scores = scores + np.asarray(jax.random.gumbel(key, scores.shape, np.float32))
    return abs(scores[ours[at]] - scores[theirs[at]])


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
def test_replies_do_not_depend_on_what_else_is_served(seed):
    """Batching, chunks, pages, prefixes and pre-emption: where a token differs, two were as good as equal."""
    rng = np.random.default_rng(seed)
    asked = prompts(14, seed)
    samplings = mixed(len(asked), rng)
    made = engine(max_batched_tokens=int(rng.integers(8, 40)), prefill_chunk=(32, 128)[seed % 2])
    got = schedule(made, asked, samplings, rng)
    assert made.num_preempted and made.stats.cached_tokens
    for prompt, sampling, own in zip(asked, samplings, got):
        want = alone(prompt, sampling)
        if own.ids != want.ids:
            assert gap(prompt, own.ids, want.ids, sampling) < 1e-5
        else:
            np.testing.assert_allclose(own.logprobs, want.logprobs, atol=1e-5)
    assert made.num_free_pages == 18 - made.num_cached_pages


@pytest.mark.slow  # pages of 8 bits show it by default
@pytest.mark.parametrize("seed", [0, 1])
def test_batch_invariant_replies_have_the_same_bits(seed):
    rng = np.random.default_rng(seed)
    asked = prompts(8, seed)
    samplings = mixed(len(asked), rng)
    options = dict(batch_invariant=True, prefill_chunk=8)
    made = engine(**options)
    got = schedule(made, asked, samplings, rng)
    assert made.num_preempted and made.stats.cached_tokens
    for prompt, sampling, own in zip(asked, samplings, got):
        want = alone(prompt, sampling, **options)
        assert own._replace(cached_tokens=0) == want._replace(cached_tokens=0)


def test_sends_work_before_that_of_the_last_step_has_come_back():
    """And calls the listener for every token and for the end."""
    made, calls = engine(), []
    handle = made.submit(
        Request(prompts(1)[0], GREEDY),
        lambda handle: calls.append(
            (len(handle.tokens), made.stats.num_steps, handle.finish_reason)
        ),
    )
    while made.step():
        pass
    assert calls == [*((n, n + 1, None) for n in range(1, 8)), (8, 8, "length")]
    assert handle.completion.finish_reason == "length"


@pytest.mark.parametrize("num_speculative_tokens", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_reads_short_prompts_at_once(num_speculative_tokens):
    """Those of at most 16 tokens, of which a chunk has room for four; a longer one by itself."""
    options = dict(
        min_prefill_bucket=16,
        prefill_chunk=64,
        max_num_seqs=9,
        num_pages=80,
        num_speculative_tokens=num_speculative_tokens,
    )
    cfg = light().cfg
    shape, limits = resolve_shapes(
        cfg, EngineConfig(page_size=PAGE, max_batched_tokens=1000, **options)
    )
    scheduler = Scheduler(shape.num_pages, PAGE, limits)
    asked = np.random.default_rng(1).integers(0, cfg.vocab_size, (9, 25)).tolist()
    asked[:8] = [ids[: 2 * i + 1] for i, ids in enumerate(asked[:8])]
    for ids in asked:
        scheduler.add(
            Sequence(
                handle=Handle(Request(ids, GREEDY)),
                ids=ids,
                limit=len(ids) + 8,
                seed=0,
                prefix_namespace=0,
            )
        )
    parts = Runner(light(), shape, ExecutionConfig()).launch([scheduler.schedule()])
    assert [len(part.rows) for part in parts] == [4, 4, 1]
    tokens = [
        (work.sequence.ids, int(part.output.sampled.tokens[row, 0]))
        for part in parts
        for row, work in part.rows
    ]
    padded = np.array([ids + [0] * (25 - len(ids)) for ids in asked])
    logits = np.asarray(forward(glm5.params_of(light()), padded, cfg=cfg).logits)
    assert tokens == [(ids, int(row[len(ids) - 1].argmax())) for ids, row in zip(asked, logits)]


def test_what_ends_a_reply():
    """Its own end token, ids and texts to stop at, its length, a deadline, and a cancellation."""
    made, tokenizer = engine(), Tokenizer.default()
    prompt = prompts(1)[0]
    free = dataclasses.replace(GREEDY, max_tokens=20)
    ids = alone(prompt, free).ids
    third = ids[2]
    first = ids.index(third)

    def ended(**options):
        return made.generate([prompt], dataclasses.replace(free, **options))[0]

    got = ended(stop_ids=(third,))
    assert (got.finish_reason, got.stopped_by, got.ids) == ("stop", third, ids[: first + 1])
    text = tokenizer.decode(ids)
    half = text[len(text) // 2 :][:3]
    got = ended(stop=("nowhere", half))
    assert (got.finish_reason, got.stopped_by) == ("stop", half)
    assert half in tokenizer.decode(got.ids) and half not in tokenizer.decode(got.ids[:-1])
    got = ended(max_tokens=3)
    assert (got.finish_reason, got.stopped_by, got.ids) == ("length", None, ids[:3])
    end = tokenizer.eos_ids[1]
    got = ended(logit_bias={end: 1000.0}, ignore_eos=False)
    assert (got.finish_reason, got.stopped_by, got.ids) == ("stop", end, [end])
    assert len(ended(logit_bias={end: 1000.0}).ids) == 20

    cancelled = made.submit(Request(prompt, free))
    late = made.submit(Request(prompt, free, timeout_s=1e-9))
    never_begun = made.submit(Request(prompt, free))
    never_begun.cancel()
    for _ in range(4):
        made.step()
    cancelled.cancel()
    while made.step():
        pass
    assert late.completion.finish_reason == "deadline"
    assert never_begun.completion.ids == []
    assert cancelled.completion.finish_reason == "cancelled"
    assert cancelled.completion.ids == ids[: len(cancelled.tokens)] != []
    assert made.num_free_pages == 18 - made.num_cached_pages


def test_refuses_requests_that_cannot_be_served():
    made, v = engine(num_pages=8, max_length=48), CFG.vocab_size
    for words, request in {
        "the prompt is empty": lambda: Request([]),
        "timeout_s is 0": lambda: Request([1], timeout_s=0),
        f"the prompt has the token id {v}": lambda: Request([1, v]),
        "logit_bias has the token id -1": lambda: Request([1], Sampling(logit_bias={-1: 1.0})),
        "the prompt has 48 tokens; with a reply at most 48": lambda: Request([1] * 48),
        "44 tokens and max_tokens 5 exceed the 48": lambda: Request(
            [1] * 44, Sampling(max_tokens=5)
        ),
        "exceed the 32 that the cache holds": lambda: Request([1] * 20, Sampling(max_tokens=13)),
    }.items():
        with pytest.raises(ValueError, match=words):
            made.submit(request())
    # Of several prompts none is begun.
    with pytest.raises(ValueError, match="token id 999999"):
        made.generate([[1, 2], [999999]], GREEDY)
    assert made.stats.num_requests == 0 and not made.step()


@pytest.mark.parametrize(
    "change",
    [
        dict(projections="gqa", attention="dense", index_topk=None),
        dict(layer_attention=("window", "full"), attention="dense", index_topk=None),
    ],
)
def test_models_that_pages_cannot_hold_are_refused(change):
    cfg = dataclasses.replace(CFG, **change)
    made = glm5.Glm5(cfg, params=glm5.init_params(cfg, jax.random.key(0)))
    with pytest.raises(ValueError, match="serves only full attention"):
        Engine(made)


def test_paused_resumed_and_drained():
    made = engine()
    handle = made.submit(Request(prompts(1)[0], GREEDY))
    made.step()
    made.pause()
    for _ in range(20):
        made.step()
    count = len(handle.tokens)
    assert count < 8 and handle.finish_reason is None
    with pytest.raises(ValueError, match="resume it first"):
        made.generate([[1]], GREEDY)
    made.resume()
    made.drain()
    assert handle.completion.finish_reason == "length"
    with pytest.raises(ValueError, match="drained"):
        made.submit(Request([1]))


def half_done(made, asked):
    """Handles of requests of which some have begun and one has not."""
    handles = [made.submit(Request(prompt, GREEDY)) for prompt in asked]
    while len(handles[0].tokens) < 3:
        made.step()
    assert handles[-1].cached_tokens is None
    return handles


def parts(completion):
    """How many tokens each version drew, in order."""
    versions = completion.versions
    assert versions == sorted(versions)
    return {version: versions.count(version) for version in versions}


@pytest.mark.parametrize("policy", ["finish", "keep", "recompute"])
def test_new_weights_in_the_middle_of_replies(policy):
    asked = prompts(6, 3)
    made = engine()
    handles = half_done(made, asked)
    made.update_weights(glm5.params_of(model(1)), 7, policy)
    while made.step():
        pass
    if policy == "finish":  # whatever had to give its pages back meanwhile
        assert all(len(parts(handle.completion)) == 1 for handle in handles)
    first, last = handles[0].completion, handles[-1].completion
    # What had not begun is the new weights' alone, and finds nothing of the old ones'.
    assert parts(last) == {7: 8} and last.ids == alone(asked[-1], GREEDY, seed=1).ids
    if policy == "finish":
        assert parts(first) == {0: 8} and first.ids == alone(asked[0], GREEDY).ids
        return
    count = parts(first)[0]
    assert parts(first) == {0: count, 7: 8 - count} and 3 <= count < 8
    before, after = first.ids[:count], first.ids[count:]
    assert before == alone(asked[0], GREEDY).ids[:count]
    anew = alone(asked[0] + before, dataclasses.replace(GREEDY, max_tokens=8 - count), seed=1)
    want = np.array(anew.logprobs)
    if policy == "recompute":
        assert after == anew.ids
        np.testing.assert_allclose(first.logprobs[count:], want, atol=1e-5)
    else:  # the first token drawn after it still stands on the old weights' latents
        assert not np.allclose(first.logprobs[count], want[0], atol=1e-3)
    assert made.version == 7


def test_weights_of_another_model_are_refused():
    made = engine()
    params = glm5.params_of(model())
    with pytest.raises(ValueError, match="policy is 'soon'; use one of finish, keep, recompute"):
        made.update_weights(params, 1, "soon")
    with pytest.raises(ValueError, match="embed/weight is .*, not "):
        made.update_weights(params | {"embed": {"weight": np.zeros((3, 3))}}, 1)
    with pytest.raises(ValueError, match="final_norm is missing"):
        made.update_weights({k: v for k, v in params.items() if k != "final_norm"}, 1)
    assert made.version == 0 and made.generate([[1, 2]], GREEDY)[0].versions == [0] * 8


def test_the_same_seed_draws_the_same_and_another_does_not():
    sampling = dataclasses.replace(GREEDY, temperature=1.0)
    prompt = prompts(1)[0]

    def drawn(seed):
        return alone(prompt, dataclasses.replace(sampling, seed=seed)).ids

    assert drawn(3) == drawn(3) != drawn(4)
    made = engine()
    one, other = made.generate([prompt] * 2, sampling)
    assert one.ids != other.ids  # each has a seed of its own


@pytest.mark.parametrize("chunk", [32, pytest.param(64, marks=pytest.mark.slow)])
def test_compiles_nothing_after_warming(chunk):
    made = Engine(
        light(),
        config=EngineConfig(page_size=PAGE, max_num_seqs=2, max_length=16, prefill_chunk=chunk),
    )
    made.warm()
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **more: "backend_compile" in name and compiled.append(name)
    )
    sampling = dataclasses.replace(GREEDY, temperature=1.0, top_p=0.5)
    asked = np.random.default_rng(0).integers(0, light().cfg.vocab_size, (5, 6)).tolist()
    made.generate(asked, [GREEDY] * 2 + [sampling] * 3)
    assert compiled == []
    jax.jit(lambda x: x * 2 + 1)(np.arange(3))
    assert compiled  # the listener listens


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_one_engine_reads_and_another_decodes(temperature):
    """Prompts' pages go over: the second engine, of another size, reads nothing again."""
    sampling = dataclasses.replace(GREEDY, temperature=temperature, seed=3)
    asked = prompts(6, 2)
    reads, decodes = engine(), engine(num_pages=60, max_num_seqs=1)
    handles = [reads.submit(Request(prompt, sampling)) for prompt in asked]
    for handle in handles:
        decodes.import_request(reads.export_request(handle))
    assert not reads.step() and reads.num_free_pages == 18 - reads.num_cached_pages
    while decodes.step():
        pass
    assert decodes.stats.read_tokens == 0
    for prompt, handle in zip(asked, handles):
        got, want = handle.completion, alone(prompt, sampling)
        assert got.ids == want.ids
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)
    assert decodes.num_free_pages == 60 - decodes.num_cached_pages
    assert decodes.num_cached_pages, "what was decoded there is known there"


def test_rejects_transfers_that_do_not_fit():
    reads = engine()
    transfer = reads.export_request(reads.submit(Request([1, 2, 3], GREEDY)))
    for other, words in (
        (engine(page_size=8), "page_size, num_speculative_tokens, .* must be the same"),
        (engine(version=3), "of version 0, this engine's is 3"),
        (engine(max_length=8), "may have 11 tokens, at most 8"),
    ):
        with pytest.raises(ValueError, match=words):
            other.import_request(transfer)
        assert not other.step()
    last = reads.submit(Request([1, 2, 3], dataclasses.replace(GREEDY, max_tokens=1)))
    with pytest.raises(ValueError, match="has ended"):
        reads.export_request(last)
    cancelled = reads.export_request(reads.submit(Request([1, 2, 3], GREEDY)))
    full = engine()
    full.import_request(cancelled)
    cancelled.sequence.handle.cancel()
    while full.step():
        pass
    assert cancelled.sequence.handle.finish_reason == "cancelled"
    assert full.num_free_pages == 18


@pytest.mark.slow
def test_ten_thousand_requests_with_cancels_leave_no_page_behind():
    rng = np.random.default_rng(0)
    made, asked = engine(), prompts(50, most=16)
    handles = []
    for number in range(10_000):
        most = int(rng.integers(1, 4))
        request = Request(asked[number % 50], dataclasses.replace(GREEDY, max_tokens=most))
        handles.append(made.submit(request))
        if rng.random() < 0.3:
            handles[rng.integers(max(0, number - 5), number + 1)].cancel()
        if number % 4 == 3:
            made.step()
    while made.step():
        pass
    reasons = [handle.finish_reason for handle in handles]
    assert set(reasons) == {"length", "cancelled"} and reasons.count("cancelled") > 1000
    assert made.num_free_pages == 18 - made.num_cached_pages
    made.update_weights(glm5.params_of(model()), 1)
    assert made.num_free_pages == 18 and made.num_cached_pages == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["finish", "keep", "recompute"])
def test_updates_weights_while_transfers_wait_for_room(policy):
    asked = prompts(4, 5)
    reads, decodes = engine(), engine(num_pages=60, max_num_seqs=1)
    handles = [reads.submit(Request(prompt, GREEDY)) for prompt in asked]
    for handle in handles:
        decodes.import_request(reads.export_request(handle))
    decodes.step()
    decodes.update_weights(glm5.params_of(model(1)), 1, policy)
    while decodes.step():
        pass
    last = handles[-1].completion
    assert last.finish_reason == "length" and len(last.ids) == 8
    assert parts(last) == (
        {0: 8} if policy == "finish" else {0: last.versions.count(0), 1: 8 - last.versions.count(0)}
    )
    before = last.versions.count(0)
    if policy == "recompute":
        sampling = dataclasses.replace(GREEDY, max_tokens=8 - before)
        assert last.ids[before:] == alone(asked[-1] + last.ids[:before], sampling, seed=1).ids
    if policy == "finish":
        assert last.ids == alone(asked[-1], GREEDY).ids
    assert decodes.num_free_pages == 60 - decodes.num_cached_pages
    # Pages that the new weights computed are shared; pages of the old weights are not.
    [again] = decodes.generate([[*asked[-1], *last.ids, 1]], GREEDY)
    if policy == "recompute":
        assert again.cached_tokens >= len(asked[-1]) // PAGE * PAGE
    if policy == "keep":
        assert again.cached_tokens == 0
    with pytest.raises(ValueError, match="resume it first"):
        reads.pause()
        reads.export_request(handles[0])
