"""Tests the engine against one request at a time: sampled tokens, log-probs, and independence of other requests."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx

from glm5_jax import presets
from glm5_jax.inference.constraints import ReplyRules
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
def light_model():
    """Returns a model that compiles fast, for tests that need separate programs."""
    return glm5.Glm5(one_layer(), rngs=nnx.Rngs(0))


def make_engine(seed=0, version=0, **options):
    options = dict(page_size=PAGE, num_pages=18, max_num_seqs=4, prefill_chunk=32) | options
    return Engine(model(seed), Tokenizer.default(), EngineConfig(**options), version=version)


def make_prompts(count, seed=0, max_length=40):
    """Returns prompts of random lengths, some with a common prefix."""
    rng = np.random.default_rng(seed)
    stem = rng.integers(0, CFG.vocab_size, max_length).tolist()
    prompts = []
    for _ in range(count):
        suffix = rng.integers(0, CFG.vocab_size, rng.integers(1, max_length // 2)).tolist()
        prompts.append(stem[: rng.integers(max_length // 2)] + suffix)
    return prompts


def logprobs(ids, temperature=1.0, seed=0):
    """Returns log-probs [t v] of one forward over all of ids, as the trainer computes them. All inputs are padded to 64
    tokens, to compile one program.
    """
    row = np.zeros((1, 64), np.int32)
    row[0, : len(ids)] = ids
    logits = forward(glm5.params_of(model(seed)), row, cfg=CFG).logits[0, : len(ids)]
    return np.asarray(jax.nn.log_softmax(logits / temperature))


def generate_single(ids, sampling, **options):
    """Returns the reply to a single request of a new engine, without cached pages."""
    return make_engine(**options).generate([ids], sampling)[0]


@pytest.fixture(scope="module")
def compiled():
    """Compiles the programs of `make_engine()` and of `logprobs`."""
    prompts = make_prompts(9)
    make_engine().generate(prompts, GREEDY)
    logprobs(prompts[0])


@pytest.mark.parametrize(
    "temperature, num_top", [(0.0, 0), (0.7, 0), pytest.param(0.7, 3, marks=pytest.mark.slow)]
)
@pytest.mark.usefixtures("compiled")
def test_returns_logprobs_of_trainer_forward(temperature, num_top):
    """num_top: number of the likeliest tokens to return, which needs separate programs."""
    sampling = dataclasses.replace(GREEDY, temperature=temperature, top_logprobs=num_top, seed=5)
    prompts = make_prompts(9)
    for prompt, reply in zip(prompts, make_engine().generate(prompts, sampling)):
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


def schedule(engine, prompts, samplings, rng):
    """Submits requests at random times and returns their completions."""
    handles, waiting = {}, list(range(len(prompts)))
    rng.shuffle(waiting)
    while waiting or not all(h.finish_reason for h in handles.values()):
        for _ in range(rng.integers(3)):
            if waiting:
                i = waiting.pop()
                handles[i] = engine.submit(Request(prompts[i], samplings[i]))
        engine.step()
    return [handles[i].completion for i in range(len(prompts))]


def mixed_samplings(count, rng):
    """Returns samplings, some of them greedy."""
    temperatures = rng.choice([0.0, 1.0], count)
    return [
        dataclasses.replace(GREEDY, temperature=float(temperature), seed=i)
        for i, temperature in enumerate(temperatures)
    ]


def score_gap(prompt, ours, theirs, sampling):
    """Returns the difference of the model's scores of the first two tokens in which the replies differ. Scores of
    sampled tokens include the noise of the draw.
    """
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
def test_replies_do_not_depend_on_other_requests(seed):
    """Covers batching, chunks, pages, prefixes and preemption. Tokens may differ only where two scores are nearly
    equal.
    """
    rng = np.random.default_rng(seed)
    prompts = make_prompts(14, seed)
    samplings = mixed_samplings(len(prompts), rng)
    engine = make_engine(
        max_batched_tokens=int(rng.integers(8, 40)), prefill_chunk=(32, 128)[seed % 2]
    )
    got = schedule(engine, prompts, samplings, rng)
    assert engine.num_preempted and engine.stats.cached_tokens
    for prompt, sampling, reply in zip(prompts, samplings, got):
        want = generate_single(prompt, sampling)
        if reply.ids != want.ids:
            assert score_gap(prompt, reply.ids, want.ids, sampling) < 1e-5
        else:
            np.testing.assert_allclose(reply.logprobs, want.logprobs, atol=1e-5)
    assert engine.num_free_pages == 18 - engine.num_cached_pages


@pytest.mark.slow  # test_eight_bit_caches covers it too
@pytest.mark.parametrize("seed", [0, 1])
def test_batch_invariant_replies_are_bitwise_equal(seed):
    rng = np.random.default_rng(seed)
    prompts = make_prompts(8, seed)
    samplings = mixed_samplings(len(prompts), rng)
    options = dict(batch_invariant=True, prefill_chunk=8)
    engine = make_engine(**options)
    got = schedule(engine, prompts, samplings, rng)
    assert engine.num_preempted and engine.stats.cached_tokens
    for prompt, sampling, reply in zip(prompts, samplings, got):
        want = generate_single(prompt, sampling, **options)
        assert reply._replace(cached_tokens=0) == want._replace(cached_tokens=0)


def test_launches_step_before_last_step_returns():
    """Also, the listener is called for every token and for the end."""
    engine, calls = make_engine(), []
    handle = engine.submit(
        Request(make_prompts(1)[0], GREEDY),
        lambda handle: calls.append(
            (len(handle.tokens), engine.stats.num_steps, handle.finish_reason)
        ),
    )
    while engine.step():
        pass
    assert calls == [*((n, n + 1, None) for n in range(1, 8)), (8, 8, "length")]
    assert handle.completion.finish_reason == "length"


@pytest.mark.parametrize("num_speculative_tokens", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_batches_short_prompts_in_prefill(num_speculative_tokens):
    """A chunk holds four prompts of at most 16 tokens. A longer prompt has its chunk to itself."""
    options = dict(
        min_prefill_bucket=16,
        prefill_chunk=64,
        max_num_seqs=9,
        num_pages=80,
        num_speculative_tokens=num_speculative_tokens,
    )
    cfg = light_model().cfg
    shape, limits = resolve_shapes(
        cfg, EngineConfig(page_size=PAGE, max_batched_tokens=1000, **options)
    )
    scheduler = Scheduler(shape.num_pages, PAGE, limits)
    prompts = np.random.default_rng(1).integers(0, cfg.vocab_size, (9, 25)).tolist()
    prompts[:8] = [ids[: 2 * i + 1] for i, ids in enumerate(prompts[:8])]
    for ids in prompts:
        scheduler.add(
            Sequence(
                handle=Handle(Request(ids, GREEDY)),
                ids=ids,
                limit=len(ids) + 8,
                seed=0,
                prefix_namespace=0,
            )
        )
    tokens_by_version = Runner(light_model(), shape, ExecutionConfig()).launch(
        [scheduler.schedule()]
    )
    assert [len(part.rows) for part in tokens_by_version] == [4, 4, 1]
    tokens = [
        (work.sequence.ids, int(part.output.sampled.tokens[row, 0]))
        for part in tokens_by_version
        for row, work in part.rows
    ]
    padded = np.array([ids + [0] * (25 - len(ids)) for ids in prompts])
    logits = np.asarray(forward(glm5.params_of(light_model()), padded, cfg=cfg).logits)
    assert tokens == [(ids, int(row[len(ids) - 1].argmax())) for ids, row in zip(prompts, logits)]


def test_ends_reply_for_each_reason():
    """Reasons: end token, stop ids, stop texts, length, deadline and cancellation."""
    engine, tokenizer = make_engine(), Tokenizer.default()
    prompt = make_prompts(1)[0]
    free = dataclasses.replace(GREEDY, max_tokens=20)
    ids = generate_single(prompt, free).ids
    third = ids[2]
    first = ids.index(third)

    def generate(**options):
        return engine.generate([prompt], dataclasses.replace(free, **options))[0]

    got = generate(stop_ids=(third,))
    assert (got.finish_reason, got.stopped_by, got.ids) == ("stop", third, ids[: first + 1])
    text = tokenizer.decode(ids)
    half = text[len(text) // 2 :][:3]
    got = generate(stop=("nowhere", half))
    assert (got.finish_reason, got.stopped_by) == ("stop", half)
    assert half in tokenizer.decode(got.ids) and half not in tokenizer.decode(got.ids[:-1])
    got = generate(max_tokens=3)
    assert (got.finish_reason, got.stopped_by, got.ids) == ("length", None, ids[:3])
    end = tokenizer.eos_ids[1]
    got = generate(logit_bias={end: 1000.0}, ignore_eos=False)
    assert (got.finish_reason, got.stopped_by, got.ids) == ("stop", end, [end])
    assert len(generate(logit_bias={end: 1000.0}).ids) == 20

    cancelled = engine.submit(Request(prompt, free))
    late = engine.submit(Request(prompt, free, timeout_s=1e-9))
    never_started = engine.submit(Request(prompt, free))
    never_started.cancel()
    for _ in range(4):
        engine.step()
    cancelled.cancel()
    while engine.step():
        pass
    assert late.completion.finish_reason == "deadline"
    assert never_started.completion.ids == []
    assert cancelled.completion.finish_reason == "cancelled"
    assert cancelled.completion.ids == ids[: len(cancelled.tokens)] != []
    assert engine.num_free_pages == 18 - engine.num_cached_pages


def test_rejects_invalid_requests():
    engine, v = make_engine(num_pages=8, max_length=48), CFG.vocab_size
    for expected_error, request in {
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
        with pytest.raises(ValueError, match=expected_error):
            engine.submit(request())
    # One invalid prompt rejects all prompts.
    with pytest.raises(ValueError, match="token id 999999"):
        engine.generate([[1, 2], [999999]], GREEDY)
    assert engine.stats.num_requests == 0 and not engine.step()


@pytest.mark.parametrize(
    "change",
    [
        dict(projections="gqa", attention="dense", index_topk=None),
        dict(layer_attention=("window", "full"), attention="dense", index_topk=None),
    ],
)
def test_rejects_models_without_paged_attention(change):
    cfg = dataclasses.replace(CFG, **change)
    model = glm5.Glm5(cfg, params=glm5.init_params(cfg, jax.random.key(0)))
    with pytest.raises(ValueError, match="serves only full attention"):
        Engine(model)


def test_pauses_resumes_and_drains():
    engine = make_engine()
    handle = engine.submit(Request(make_prompts(1)[0], GREEDY))
    engine.step()
    engine.pause()
    for _ in range(20):
        engine.step()
    count = len(handle.tokens)
    assert count < 8 and handle.finish_reason is None
    with pytest.raises(ValueError, match="resume it first"):
        engine.generate([[1]], GREEDY)
    engine.resume()
    engine.drain()
    assert handle.completion.finish_reason == "length"
    with pytest.raises(ValueError, match="drained"):
        engine.submit(Request([1]))


def start_requests(engine, prompts):
    """Returns handles of requests, of which some have started and the last has not."""
    handles = [engine.submit(Request(prompt, GREEDY)) for prompt in prompts]
    while len(handles[0].tokens) < 3:
        engine.step()
    assert handles[-1].cached_tokens is None
    return handles


def tokens_by_version(completion):
    """Returns the number of tokens that each version sampled, in order."""
    versions = completion.versions
    assert versions == sorted(versions)
    return {version: versions.count(version) for version in versions}


@pytest.mark.parametrize("policy", ["finish", "keep", "recompute"])
def test_updates_weights_during_replies(policy):
    prompts = make_prompts(6, 3)
    engine = make_engine()
    handles = start_requests(engine, prompts)
    engine.update_weights(glm5.params_of(model(1)), 7, policy)
    while engine.step():
        pass
    if policy == "finish":  # even for requests that were preempted
        assert all(len(tokens_by_version(handle.completion)) == 1 for handle in handles)
    first, last = handles[0].completion, handles[-1].completion
    # A request that had not started uses the new weights only, and no cached pages of the old weights.
    assert (
        tokens_by_version(last) == {7: 8}
        and last.ids == generate_single(prompts[-1], GREEDY, seed=1).ids
    )
    if policy == "finish":
        assert (
            tokens_by_version(first) == {0: 8}
            and first.ids == generate_single(prompts[0], GREEDY).ids
        )
        return
    count = tokens_by_version(first)[0]
    assert tokens_by_version(first) == {0: count, 7: 8 - count} and 3 <= count < 8
    before, after = first.ids[:count], first.ids[count:]
    assert before == generate_single(prompts[0], GREEDY).ids[:count]
    recomputed = generate_single(
        prompts[0] + before, dataclasses.replace(GREEDY, max_tokens=8 - count), seed=1
    )
    want = np.array(recomputed.logprobs)
    if policy == "recompute":
        assert after == recomputed.ids
        np.testing.assert_allclose(first.logprobs[count:], want, atol=1e-5)
    else:  # the next token still attends to latents of the old weights
        assert not np.allclose(first.logprobs[count], want[0], atol=1e-3)
    assert engine.version == 7


def test_rejects_weights_of_another_model():
    engine = make_engine()
    params = glm5.params_of(model())
    with pytest.raises(ValueError, match="policy is 'soon'; use one of finish, keep, recompute"):
        engine.update_weights(params, 1, "soon")
    with pytest.raises(ValueError, match="embed/weight is .*, not "):
        engine.update_weights(params | {"embed": {"weight": np.zeros((3, 3))}}, 1)
    with pytest.raises(ValueError, match="final_norm is missing"):
        engine.update_weights({k: v for k, v in params.items() if k != "final_norm"}, 1)
    assert engine.version == 0 and engine.generate([[1, 2]], GREEDY)[0].versions == [0] * 8


def test_replies_depend_on_seed():
    sampling = dataclasses.replace(GREEDY, temperature=1.0)
    prompt = make_prompts(1)[0]

    def draw(seed):
        return generate_single(prompt, dataclasses.replace(sampling, seed=seed)).ids

    assert draw(3) == draw(3) != draw(4)
    engine = make_engine()
    one, other = engine.generate([prompt] * 2, sampling)
    assert one.ids != other.ids  # each request has a different seed


@pytest.mark.parametrize(
    ("chunk", "scores_prompts"),
    [
        (32, False),
        pytest.param(32, True, marks=pytest.mark.slow),
        pytest.param(64, False, marks=pytest.mark.slow),
    ],
)
def test_compiles_nothing_after_warmup(chunk, scores_prompts):
    options = EngineConfig(
        page_size=PAGE,
        max_num_seqs=2,
        max_length=16,
        prefill_chunk=chunk,
        warms_prompt_logprobs=scores_prompts,
    )
    engine = Engine(light_model(), config=options)
    engine.warm()
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **more: "backend_compile" in name and compiled.append(name)
    )
    sampling = dataclasses.replace(GREEDY, temperature=1.0, top_p=0.5)
    likeliest = dataclasses.replace(GREEDY, top_logprobs=3)
    prompts = np.random.default_rng(0).integers(0, light_model().cfg.vocab_size, (6, 6)).tolist()
    engine.generate(prompts, [GREEDY] * 2 + [sampling] * 3 + [likeliest])
    limited = Request(prompts[0], GREEDY, rules=ReplyRules(thinking_budget=2, thinking_end=5))
    handle = engine.submit(limited)
    engine.generate(prompts[1:4], [GREEDY, sampling, likeliest])
    assert handle.completion.ids[2] == 5
    if scores_prompts:
        scored = dataclasses.replace(sampling, top_logprobs=1, prompt_logprobs=True)
        engine.submit(limited)
        engine.generate(prompts[1:4], [scored, GREEDY, scored])
    assert compiled == []
    jax.jit(lambda x: x * 2 + 1)(np.arange(3))
    assert compiled  # the listener works


@pytest.mark.slow
def test_frees_all_pages_after_ten_thousand_requests():
    rng = np.random.default_rng(0)
    engine, prompts = make_engine(), make_prompts(50, max_length=16)
    handles = []
    for number in range(10_000):
        max_tokens = int(rng.integers(1, 4))
        request = Request(prompts[number % 50], dataclasses.replace(GREEDY, max_tokens=max_tokens))
        handles.append(engine.submit(request))
        if rng.random() < 0.3:
            handles[rng.integers(max(0, number - 5), number + 1)].cancel()
        if number % 4 == 3:
            engine.step()
    while engine.step():
        pass
    reasons = [handle.finish_reason for handle in handles]
    assert set(reasons) == {"length", "cancelled"} and reasons.count("cancelled") > 1000
    assert engine.num_free_pages == 18 - engine.num_cached_pages
    engine.update_weights(glm5.params_of(model()), 1)
    assert engine.num_free_pages == 18 and engine.num_cached_pages == 0
