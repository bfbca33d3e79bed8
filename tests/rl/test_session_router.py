"""Sessions stay where their prefix is; ranks that come and go move as few as they can."""

import collections
import math
import random

import pytest

from glm5_jax.rl.rollouts.router import NoRankError, RouterConfig, SessionRouter

RANKS = [f"http://10.0.0.{i // 4}:8000@{i % 4}" for i in range(8)]
BOUND = RouterConfig().bound


def placed(router, count=1000):
    return {f"s{i}": router.route(f"s{i}") for i in range(count)}


def test_a_session_stays_whatever_comes_and_goes():
    router = SessionRouter(RANKS)
    before = placed(router)
    for i in range(0, 1000, 3):
        router.release(f"s{i}")
    for i in range(1000, 1500):
        router.route(f"s{i}")
    assert all(router.route(s) == rank for s, rank in before.items() if int(s[1:]) % 3)
    assert sum(router.loads.values()) == 1500 - 334


def test_no_rank_has_more_than_the_bound_allows_at_any_time():
    router, draw, alive = SessionRouter(RANKS), random.Random(0), []
    for i in range(4000):
        if alive and draw.random() < 0.4:
            router.release(alive.pop(draw.randrange(len(alive))))
        # One agent's sessions have names that differ in little.
        alive.append(f"agent-{i}")
        rank = router.route(alive[-1])
        assert router.loads[rank] <= math.ceil(BOUND * len(alive) / len(RANKS))
    assert min(router.loads.values()) > 0.5 * len(alive) / len(RANKS)


@pytest.mark.parametrize("lost", range(8))
def test_a_lost_rank_moves_its_own_sessions_alone(lost):
    router = SessionRouter(RANKS)
    before = placed(router)
    moved = router.remove(RANKS[lost])
    assert set(moved) == {s for s, rank in before.items() if rank == RANKS[lost]}
    assert len(moved) <= math.ceil(BOUND * 1000 / 8)
    after = placed(router)
    assert all(after[s] == rank for s, rank in before.items() if s not in moved)
    assert RANKS[lost] not in after.values()
    assert max(router.loads.values()) <= math.ceil(BOUND * 1000 / 7)


def test_a_rank_that_is_there_again_is_filled_by_new_sessions():
    router = SessionRouter(RANKS)
    placed(router)
    router.remove(RANKS[3])
    before = placed(router)
    router.add(RANKS[3])
    assert placed(router) == before
    for i in range(1000):  # sessions end, others begin
        router.release(f"s{i}")
        router.route(f"t{i}")
    assert router.loads[RANKS[3]] > 0.85 * 1000 / 8


def test_a_rank_that_is_far_below_the_mean_is_filled_first():
    """The first sessions that begin go to it, up to 0.85 of the mean; then it has its share of the others."""
    router = SessionRouter(RANKS)
    placed(router)
    router.remove(RANKS[3])
    router.add(RANKS[3])
    for i in range(106):
        router.release(f"s{i}")
        assert router.route(f"t{i}") == RANKS[3]
    others = collections.Counter(router.route(f"u{i}") for i in range(40))
    assert 0 < others[RANKS[3]] < 30


def test_a_session_that_was_on_a_rank_before_is_there_again():
    router = SessionRouter(RANKS)
    before = placed(router)
    again = SessionRouter(RANKS[1:])
    for session in reversed(before):
        again.restore(session, before[session])
    kept = {s: rank for s, rank in before.items() if rank != RANKS[0]}
    assert kept.items() <= again.rank_by_session.items() and len(again.rank_by_session) == 1000
    assert again.loads == dict(collections.Counter(again.rank_by_session.values()))
    assert again.restore("s7", RANKS[5]) == again.rank_by_session["s7"] == before["s7"]
    assert again.restore("new", None) in RANKS[1:]


def test_without_load_a_rank_more_moves_its_share_of_names():
    config = RouterConfig(bound=100.0)
    few, more = SessionRouter(RANKS[:7], config), SessionRouter(RANKS, config)
    one, two = placed(few, 4000), placed(more, 4000)
    moved = [s for s in one if one[s] != two[s]]
    assert {two[s] for s in moved} == {RANKS[7]} and 0.06 < len(moved) / 4000 < 0.19
    assert max(collections.Counter(two.values()).values()) < 1.5 * 4000 / 8


def test_places_are_the_same_in_every_process():
    found = [RANKS.index(SessionRouter(RANKS).route(f"s{i}")) for i in range(8)]
    assert found == [2, 7, 5, 5, 0, 2, 2, 1]


def test_ranks_that_are_not_there():
    router = SessionRouter(RANKS[:1])
    with pytest.raises(ValueError, match="no rank 'x'; there are"):
        router.remove("x")
    with pytest.raises(ValueError, match="there already"):
        router.add(RANKS[0])
    router.route("s")
    assert router.remove(RANKS[0]) == ["s"]
    with pytest.raises(NoRankError, match="add one"):
        router.route("s")
    router.add(RANKS[1])
    assert router.route("s") == RANKS[1]
    router.release("nobody")
    with pytest.raises(ValueError, match="bound is 0.9"):
        RouterConfig(bound=0.9)
