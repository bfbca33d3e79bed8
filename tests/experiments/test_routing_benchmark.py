"""Arithmetic of the routing benchmark: recorded chats, ranks that replace engines without a device, and its report."""

import collections
import dataclasses
import functools
import math

import numpy as np
import pytest
from rich.console import Console

from experiments.benchmarks import routing
from experiments.benchmarks.agent_traces import TraceConfig, TraceTurn, record_traces
from experiments.benchmarks.replay import (
    HashRouting,
    Rank,
    RankSnapshot,
    ReplayConfig,
    ReplayedRequest,
    ReplayResult,
    RoundRobinRouting,
    replay,
    skew,
    slopes,
)
from glm5_jax.inference.request import TooLong
from glm5_jax.rl.rollouts.router import RouterConfig, SessionRouter
from glm5_jax.text.tokenizer import STOP_TOKENS, Tokenizer
from tests.inference.test_engine import CFG, GREEDY, PAGE, make_engine

TOKENIZER = Tokenizer.default()
# Few pages: 32 chats at a time on 4 ranks, whose caches hold all.
SMALL = ReplayConfig(
    ranks=4, in_flight=32, cache=20.0, page_size=4, tool_steps=3.0, prefill_chunk=64
)


@functools.cache
def recorded_chats():
    return record_traces(TraceConfig(num_tasks=8, attempts=2), TOKENIZER)


@functools.cache
def random_chats(count=128, shared=0):
    """Returns chats of 2 to 9 turns of random tokens, after `shared` tokens that all have."""
    draw = np.random.default_rng(0)
    stem, chats = draw.integers(0, 1000, shared).tolist(), []
    for _ in range(count):
        ids, turns = list(stem), []
        for _ in range(draw.integers(2, 10)):
            prompt = ids + draw.integers(0, 1000, draw.integers(1, 40)).tolist()
            output = draw.integers(0, 1000, draw.integers(1, 20)).tolist()
            turns.append(TraceTurn(tuple(prompt), tuple(output)))
            ids = prompt + output
        chats.append(tuple(turns))
    return chats


def test_recorded_chats_extend_prompts_and_end_with_answer():
    for number, trace in enumerate(recorded_chats()):
        for one, other in zip(trace, trace[1:]):
            before = one.prompt + one.output
            assert other.prompt[: len(before)] == before and len(other.prompt) > len(before)
        assert {turn.output[-1] for turn in trace} <= {
            TOKENIZER.special_ids[n] for n in STOP_TOKENS
        }
        text = TOKENIZER.decode(trace[0].prompt)
        assert text.startswith("[gMASK]<sop><|system|>") and text.endswith("<|assistant|><think>")
        written = TOKENIZER.decode(trace[-1].output)
        assert "</think>The answer is " in written and written.endswith("<|user|>")
        for turn in trace[:-1]:
            assert TOKENIZER.decode(turn.output).endswith("</tool_call><|observation|>")
        # Attempts at one task begin with the same tokens, and then differ.
        other = recorded_chats()[number ^ 1]
        assert trace[0].prompt == other[0].prompt and trace != other
    turns = [len(trace) for trace in recorded_chats()]
    assert min(turns) >= 5 and max(turns) > 2 * min(turns)


def test_recorded_chats_depend_only_on_seed():
    again = record_traces(TraceConfig(num_tasks=2, attempts=2), TOKENIZER)
    assert again == recorded_chats()[:4]
    other = record_traces(TraceConfig(num_tasks=2, attempts=2, seed=1), TOKENIZER)
    assert all(one != two for one, two in zip(again, other))


@pytest.mark.slow
def test_rank_reads_same_tokens_as_engine():
    """Five chats by turns, in pages for one and a half."""
    draw, real = np.random.default_rng(0), make_engine()
    config = ReplayConfig(page_size=PAGE, max_num_seqs=4, prefill_chunk=32)
    rank, read, cached = Rank(real.description["num_pages"], config), 0, collections.Counter()
    chats = [[] for _ in range(5)]
    for turn in range(3):
        for ids in chats[turn % 2 :] + chats[: turn % 2]:
            ids += draw.integers(0, CFG.vocab_size, draw.integers(3, 11)).tolist()
            [reply] = real.generate([ids], GREEDY)
            sequence, ended = rank.submit(TraceTurn(tuple(ids), tuple(reply.ids))), []
            while not ended:
                ended = rank.step()
            assert ended[0][0] is sequence
            assert sequence.handle.cached_tokens == reply.cached_tokens
            cached[reply.cached_tokens > 0] += 1
            read += ended[0][1]
            ids += reply.ids
    assert read == real.stats.read_tokens and cached[True] and cached[False] > 5
    with pytest.raises(TooLong):
        rank.submit(TraceTurn((1,) * 70, (2,) * 10))


def test_infinite_cache_has_every_computed_page():
    known, want = set(), 0
    traces = random_chats(shared=10)
    result = routing.run(traces, routing.INFINITE, SMALL)
    # Requests are in the order of their ends, not quite that of their starts; chats share only the stem.
    for request in result.requests:
        prompt, output = traces[request.chat][request.turn]
        end = 0
        while end + PAGE < len(prompt) and prompt[: end + PAGE] in known:
            end += PAGE
        assert request.cached == end or request.turn == 0
        assert request.read == len(prompt) - request.cached
        ids = (prompt + output)[:-1]
        known.update(ids[:n] for n in range(PAGE, len(ids) + 1, PAGE))
        want += request.new
    assert 0 < result.read - want < 5 * len(result.requests)


def test_router_equals_infinite_cache_without_loss():
    calm = dataclasses.replace(SMALL, lost=None)
    best, router, base, any_rank = (
        routing.run(random_chats(), arm, calm)
        for arm in (routing.INFINITE, "router", "round robin", "random")
    )
    assert router.read == best.read and router.hit_rate == best.hit_rate
    assert base.read > 1.5 * router.read and any_rank.read > 1.5 * router.read
    assert router.strayed == 0 and base.strayed > 100 and router.filled is None
    few = dataclasses.replace(calm, cache=0.5)
    assert routing.run(random_chats(), "router", few).read > 1.2 * router.read


def test_lost_rank_moves_only_its_chats():
    calm, broken = (
        routing.run(random_chats(), "router", c)
        for c in (dataclasses.replace(SMALL, lost=None), SMALL)
    )
    assert 0 < broken.moved <= math.ceil(RouterConfig().bound * 32 / 4) and broken.strayed == 0
    assert collections.Counter(broken.placed.values())[SMALL.names[2]] == broken.moved
    assert len(broken.placed) <= 32 and broken.lost < broken.added < broken.filled
    # At most the tokens of all chats on it, and of chats that began there.
    longest = max(len(trace[-1].prompt) for trace in random_chats())
    assert 0 < broken.read - calm.read <= 2 * broken.moved * longest
    without = [look for look in broken.looks if broken.lost < look.step < broken.added]
    assert without and all(
        set(look.chats) == set(SMALL.names) - {SMALL.names[2]} for look in without
    )
    # Without memory, chats return to it once it is back.
    back = replay(random_chats(), HashRouting(SMALL.names), SMALL)
    assert back.strayed > 0 and back.read > broken.read


@pytest.mark.slow
def test_every_arm_answers_every_request_once():
    want = sorted(
        (chat, turn) for chat, trace in enumerate(random_chats()) for turn in range(len(trace))
    )
    for arm in routing.ARMS:
        result = routing.run(random_chats(), arm, SMALL)
        assert sorted((request.chat, request.turn) for request in result.requests) == want
        assert routing.run(random_chats(), arm, SMALL) == result
    other = routing.run(random_chats(), "router", dataclasses.replace(SMALL, seed=1))
    assert other.placed.keys() != result.placed.keys()


def make_request(new, before, read, turn=1):
    return ReplayedRequest(0, turn, new + before, new, 0, read)


def test_slopes_separate_new_and_previous_tokens():
    draw = np.random.default_rng(0)
    pairs = draw.integers(1, 1000, (50, 2)).tolist()
    requests = [make_request(new, before, 30 + 2 * new + 0.25 * before) for new, before in pairs]
    first = make_request(1000, 0, 10**6, turn=0)  # all tokens are new, so it adds no information
    np.testing.assert_allclose(slopes([*requests, first]), (30, 2, 0.25), atol=1e-9)


def test_router_requests_grow_only_with_new_tokens():
    calm = dataclasses.replace(SMALL, lost=None)
    fitted = slopes(routing.run(random_chats(), "router", calm).requests)
    for got, want, off in zip(fitted, (1 + (PAGE - 1) / 2, 1, 0), (0.4, 0.02, 0.004)):
        assert got == pytest.approx(want, abs=off)
    assert slopes(routing.run(random_chats(), "round robin", calm).requests)[2] > 0.2


def test_computes_skew_and_stretches():
    looks = [
        RankSnapshot(step, 0, {"a": a, "b": b}, {"a": 1, "b": 3})
        for step, a, b in ((0, 3, 1), (20, 2, 2), (40, 4, 0), (60, 1, 1))
    ]
    assert skew(looks) == pytest.approx((1.5 + 1 + 2 + 1) / 4)
    assert skew(looks, "tokens") == 1.5 and math.isnan(skew([]))
    result = ReplayResult(looks=looks, lost=20, added=40, filled=60)
    assert [[look.step for look in part] for part in result.stretches] == [[0], [20], [60]]
    assert [len(part) for part in ReplayResult(looks=looks).stretches] == [4, 0, 0]


def test_names_place_most_sessions_on_same_rank():
    names = [f"s{i}" for i in range(200)]
    router = SessionRouter(SMALL.names)
    result = ReplayResult(placed={name: router.route(name) for name in reversed(names)})
    assert 0 < routing.num_replaced(result, SessionRouter(SMALL.names)) < 100
    wide = SessionRouter(SMALL.names, RouterConfig(bound=100.0))
    result = ReplayResult(placed={name: wide.route(name) for name in reversed(names)})
    assert routing.num_replaced(result, SessionRouter(SMALL.names, RouterConfig(bound=100.0))) == 0


@pytest.mark.slow
def test_prints_tables_and_pictures(tmp_path, capsys):
    traces = [random_chats()]
    results = {arm: [routing.run(random_chats(), arm, SMALL)] for arm in routing.ARMS}
    console = Console(width=160)
    console.print(routing.token_table(results), routing.rank_table(results))
    console.print(routing.length_table(traces, results))
    text = capsys.readouterr().out
    router, base = results["router"][0], results["round robin"][0]
    assert (
        f"{base.read / router.read:.2f}" in text
        and f"{router.moved} of {len(router.placed)}" in text
    )
    verdict = routing.verdict(results, SMALL)
    assert f"at least {base.read / router.read:.2f} times (target 5): missed" in verdict
    assert "and 0 others: met" in verdict and "new chats" in verdict
    sweep = {
        1.0: {arm: (1.0, 0.5) for arm in results},
        math.inf: {arm: (2.0, 0.6) for arm in results},
    }
    console.print(routing.sweep_table("caches", sweep))
    assert "inf" in capsys.readouterr().out
    page = routing.pictures(tmp_path, results, sweep).read_text()
    assert page.count("<svg") == 3 and "round robin" in page


def test_round_robin_counts_requests():
    placing = RoundRobinRouting("abc")
    assert [placing.route("s") for _ in range(4)] == list("abca")
    assert placing.remove("b") == [] and {placing.route("s") for _ in range(4)} == set("ac")
    placing.add("b")
    assert {placing.route("s") for _ in range(3)} == set("abc")


@pytest.mark.parametrize(
    "fields, words",
    [
        (dict(cache=0), "cache is 0"),
        (dict(lost=0.5, added=0.4), "lost at 0.5 and returns at 0.4"),
        (dict(ranks=1), "use lost=None"),
    ],
)
def test_rejects_invalid_replay(fields, words):
    with pytest.raises(ValueError, match=words):
        ReplayConfig(**fields)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--tasks=1"], "make 8 chats; 256 are played at once"),
        (["--seeds=0"], "--seeds is 0"),
        (["--tasks=64", "--doubts=1"], "doubts is 1.0"),
    ],
)
def test_command_rejects_invalid_arguments(words, message, capsys):
    assert routing.main(words) == 2
    assert message in capsys.readouterr().err
