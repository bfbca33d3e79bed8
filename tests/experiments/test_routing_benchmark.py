"""What the routing benchmark reckons with: recorded chats, ranks that are engines without a device, what it makes of both."""

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
from tests.inference.test_engine import CFG, GREEDY, PAGE, engine

TOKENIZER = Tokenizer.default()
# Few pages: 32 chats at once on 4 ranks, whose caches hold all.
SMALL = ReplayConfig(
    ranks=4, in_flight=32, cache=20.0, page_size=4, tool_steps=3.0, prefill_chunk=64
)


@functools.cache
def recorded():
    return record_traces(TraceConfig(num_tasks=8, attempts=2), TOKENIZER)


@functools.cache
def made(count=128, shared=0):
    """Chats of 2 to 9 turns of random tokens, behind so many that all have."""
    draw = np.random.default_rng(0)
    stem, found = draw.integers(0, 1000, shared).tolist(), []
    for _ in range(count):
        ids, turns = list(stem), []
        for _ in range(draw.integers(2, 10)):
            prompt = ids + draw.integers(0, 1000, draw.integers(1, 40)).tolist()
            output = draw.integers(0, 1000, draw.integers(1, 20)).tolist()
            turns.append(TraceTurn(tuple(prompt), tuple(output)))
            ids = prompt + output
        found.append(tuple(turns))
    return found


def test_recorded_chats_go_on_from_what_was_said_and_end_with_the_answer():
    for number, trace in enumerate(recorded()):
        for one, other in zip(trace, trace[1:]):
            before = one.prompt + one.output
            assert other.prompt[: len(before)] == before and len(other.prompt) > len(before)
        assert {turn.output[-1] for turn in trace} <= {
            TOKENIZER.special_ids[n] for n in STOP_TOKENS
        }
        text = TOKENIZER.decode(trace[0].prompt)
        assert text.startswith("[gMASK]<sop><|system|>") and text.endswith("<|assistant|><think>")
        said = TOKENIZER.decode(trace[-1].output)
        assert "</think>The answer is " in said and said.endswith("<|user|>")
        for turn in trace[:-1]:
            assert TOKENIZER.decode(turn.output).endswith("</tool_call><|observation|>")
        # Attempts at one task begin alike, and part.
        other = recorded()[number ^ 1]
        assert trace[0].prompt == other[0].prompt and trace != other
    turns = [len(trace) for trace in recorded()]
    assert min(turns) >= 5 and max(turns) > 2 * min(turns)


def test_recorded_chats_depend_on_the_seed_alone():
    again = record_traces(TraceConfig(num_tasks=2, attempts=2), TOKENIZER)
    assert again == recorded()[:4]
    other = record_traces(TraceConfig(num_tasks=2, attempts=2, seed=1), TOKENIZER)
    assert all(one != two for one, two in zip(again, other))


@pytest.mark.slow
def test_a_rank_finds_and_computes_what_a_real_engine_does():
    """Five chats by turns, in pages for one and a half."""
    draw, real = np.random.default_rng(0), engine()
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


def test_an_infinite_cache_has_every_whole_page_that_was_computed_before():
    known, want = set(), 0
    traces = made(shared=10)
    result = routing.run(traces, routing.INFINITE, SMALL)
    # In the order of their ends, which is not quite that of their beginnings: chats share the stem alone.
    for asked in result.requests:
        prompt, output = traces[asked.chat][asked.turn]
        end = 0
        while end + PAGE < len(prompt) and prompt[: end + PAGE] in known:
            end += PAGE
        assert asked.cached == end or asked.turn == 0
        assert asked.read == len(prompt) - asked.cached
        ids = (prompt + output)[:-1]
        known.update(ids[:n] for n in range(PAGE, len(ids) + 1, PAGE))
        want += asked.new
    assert 0 < result.read - want < 5 * len(result.requests)


def test_the_router_computes_what_an_infinite_cache_does_where_nothing_is_shared_or_lost():
    calm = dataclasses.replace(SMALL, lost=None)
    best, own, base, any_rank = (
        routing.run(made(), arm, calm)
        for arm in (routing.INFINITE, "router", "round robin", "random")
    )
    assert own.read == best.read and own.hit_rate == best.hit_rate
    assert base.read > 1.5 * own.read and any_rank.read > 1.5 * own.read
    assert own.strayed == 0 and base.strayed > 100 and own.filled is None
    few = dataclasses.replace(calm, cache=0.5)
    assert routing.run(made(), "router", few).read > 1.2 * own.read


def test_a_lost_rank_costs_what_it_had_and_moves_no_others():
    calm, own = (
        routing.run(made(), "router", c) for c in (dataclasses.replace(SMALL, lost=None), SMALL)
    )
    assert 0 < own.moved <= math.ceil(RouterConfig().bound * 32 / 4) and own.strayed == 0
    assert collections.Counter(own.placed.values())[SMALL.names[2]] == own.moved
    assert len(own.placed) <= 32 and own.lost < own.added < own.filled
    # At most all that chats on it had, and what was begun there.
    longest = max(len(trace[-1].prompt) for trace in made())
    assert 0 < own.read - calm.read <= 2 * own.moved * longest
    without = [look for look in own.looks if own.lost < look.step < own.added]
    assert without and all(
        set(look.chats) == set(SMALL.names) - {SMALL.names[2]} for look in without
    )
    # Without memory chats go back to it when it is there again.
    back = replay(made(), HashRouting(SMALL.names), SMALL)
    assert back.strayed > 0 and back.read > own.read


@pytest.mark.slow
def test_every_request_is_answered_once_in_every_arm():
    want = sorted((chat, turn) for chat, trace in enumerate(made()) for turn in range(len(trace)))
    for arm in routing.ARMS:
        found = routing.run(made(), arm, SMALL)
        assert sorted((own.chat, own.turn) for own in found.requests) == want
        assert routing.run(made(), arm, SMALL) == found
    other = routing.run(made(), "router", dataclasses.replace(SMALL, seed=1))
    assert other.placed.keys() != found.placed.keys()


def asked(new, before, read, turn=1):
    return ReplayedRequest(0, turn, new + before, new, 0, read)


def test_slopes_tell_new_tokens_from_those_said_before():
    draw = np.random.default_rng(0)
    pairs = draw.integers(1, 1000, (50, 2)).tolist()
    given = [asked(new, before, 30 + 2 * new + 0.25 * before) for new, before in pairs]
    first = asked(1000, 0, 10**6, turn=0)  # all new: says nothing
    np.testing.assert_allclose(slopes([*given, first]), (30, 2, 0.25), atol=1e-9)


def test_a_request_of_the_router_grows_with_what_is_new_alone():
    calm = dataclasses.replace(SMALL, lost=None)
    own = slopes(routing.run(made(), "router", calm).requests)
    for got, want, off in zip(own, (1 + (PAGE - 1) / 2, 1, 0), (0.4, 0.02, 0.004)):
        assert got == pytest.approx(want, abs=off)
    assert slopes(routing.run(made(), "round robin", calm).requests)[2] > 0.2


def test_skew_and_stretches():
    looks = [
        RankSnapshot(step, 0, {"a": a, "b": b}, {"a": 1, "b": 3})
        for step, a, b in ((0, 3, 1), (20, 2, 2), (40, 4, 0), (60, 1, 1))
    ]
    assert skew(looks) == pytest.approx((1.5 + 1 + 2 + 1) / 4)
    assert skew(looks, "tokens") == 1.5 and math.isnan(skew([]))
    result = ReplayResult(looks=looks, lost=20, added=40, filled=60)
    assert [[look.step for look in own] for own in result.stretches] == [[0], [20], [60]]
    assert [len(own) for own in ReplayResult(looks=looks).stretches] == [4, 0, 0]


def test_names_alone_put_few_elsewhere():
    names = [f"s{i}" for i in range(200)]
    router = SessionRouter(SMALL.names)
    result = ReplayResult(placed={name: router.route(name) for name in reversed(names)})
    assert 0 < routing.num_replaced(result, SessionRouter(SMALL.names)) < 100
    wide = SessionRouter(SMALL.names, RouterConfig(bound=100.0))
    result = ReplayResult(placed={name: wide.route(name) for name in reversed(names)})
    assert routing.num_replaced(result, SessionRouter(SMALL.names, RouterConfig(bound=100.0))) == 0


@pytest.mark.slow
def test_tables_and_pictures(tmp_path, capsys):
    traces = [made()]
    found = {arm: [routing.run(made(), arm, SMALL)] for arm in routing.ARMS}
    console = Console(width=160)
    console.print(routing.token_table(found), routing.rank_table(found))
    console.print(routing.length_table(traces, found))
    text = capsys.readouterr().out
    own, base = found["router"][0], found["round robin"][0]
    assert f"{base.read / own.read:.2f}" in text and f"{own.moved} of {len(own.placed)}" in text
    told = routing.verdict(found, SMALL)
    assert f"at least {base.read / own.read:.2f} times (target 5): missed" in told
    assert "and 0 others: met" in told and "new chats" in told
    sweep = {1.0: {arm: (1.0, 0.5) for arm in found}, math.inf: {arm: (2.0, 0.6) for arm in found}}
    console.print(routing.sweep_table("caches", sweep))
    assert "inf" in capsys.readouterr().out
    page = routing.pictures(tmp_path, found, sweep).read_text()
    assert page.count("<svg") == 3 and "round robin" in page


def test_two_ways_to_count_round_robin():
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
def test_what_cannot_be_replayed(fields, words):
    with pytest.raises(ValueError, match=words):
        ReplayConfig(**fields)


@pytest.mark.parametrize(
    "words, said",
    [
        (["--tasks=1"], "make 8 chats; 256 are played at once"),
        (["--seeds=0"], "--seeds is 0"),
        (["--tasks=64", "--doubts=1"], "doubts is 1.0"),
    ],
)
def test_what_the_command_refuses(words, said, capsys):
    assert routing.main(words) == 2
    assert said in capsys.readouterr().err
