"""Sessions stay on the rank of their prefix, and as few as possible move when ranks are added or removed."""

import collections
import math
import random

import pytest

from glm5_jax.rl.rollouts.router import NoRankError, RouterConfig, SessionRouter

RANKS = [f"http://10.0.0.{i // 4}:8000@{i % 4}" for i in range(8)]
BOUND = RouterConfig().bound


def route_all(router, count=1000):
    """Returns the rank of each of `count` sessions."""
    return {f"s{i}": router.route(f"s{i}") for i in range(count)}


def test_session_stays_on_rank_while_others_change():
    router = SessionRouter(RANKS)
    before = route_all(router)
    for i in range(0, 1000, 3):
        router.release(f"s{i}")
    for i in range(1000, 1500):
        router.route(f"s{i}")
    assert all(
        router.route(session) == rank for session, rank in before.items() if int(session[1:]) % 3
    )
    assert sum(router.loads.values()) == 1500 - 334


def test_rank_never_exceeds_load_bound():
    router, rng, open_sessions = SessionRouter(RANKS), random.Random(0), []
    for i in range(4000):
        if open_sessions and rng.random() < 0.4:
            router.release(open_sessions.pop(rng.randrange(len(open_sessions))))
        # Names of one agent's sessions are similar.
        open_sessions.append(f"agent-{i}")
        rank = router.route(open_sessions[-1])
        assert router.loads[rank] <= math.ceil(BOUND * len(open_sessions) / len(RANKS))
    assert min(router.loads.values()) > 0.5 * len(open_sessions) / len(RANKS)


@pytest.mark.parametrize("lost", range(8))
def test_lost_rank_moves_only_its_sessions(lost):
    router = SessionRouter(RANKS)
    before = route_all(router)
    moved = router.remove(RANKS[lost])
    assert set(moved) == {session for session, rank in before.items() if rank == RANKS[lost]}
    assert len(moved) <= math.ceil(BOUND * 1000 / 8)
    after = route_all(router)
    assert all(after[session] == rank for session, rank in before.items() if session not in moved)
    assert RANKS[lost] not in after.values()
    assert max(router.loads.values()) <= math.ceil(BOUND * 1000 / 7)


def test_new_sessions_fill_rank_that_returned():
    router = SessionRouter(RANKS)
    route_all(router)
    router.remove(RANKS[3])
    before = route_all(router)
    router.add(RANKS[3])
    assert route_all(router) == before
    for i in range(1000):  # sessions end, others begin
        router.release(f"s{i}")
        router.route(f"t{i}")
    assert router.loads[RANKS[3]] > 0.85 * 1000 / 8


def test_fills_rank_far_below_mean_first():
    """The first new sessions go to it, up to 0.85 of the mean; then it gets its share of the others."""
    router = SessionRouter(RANKS)
    route_all(router)
    router.remove(RANKS[3])
    router.add(RANKS[3])
    for i in range(106):
        router.release(f"s{i}")
        assert router.route(f"t{i}") == RANKS[3]
    others = collections.Counter(router.route(f"u{i}") for i in range(40))
    assert 0 < others[RANKS[3]] < 30


def test_restores_sessions_to_their_ranks():
    router = SessionRouter(RANKS)
    before = route_all(router)
    restored = SessionRouter(RANKS[1:])
    for session in reversed(before):
        restored.restore(session, before[session])
    unmoved = {session: rank for session, rank in before.items() if rank != RANKS[0]}
    assert (
        unmoved.items() <= restored.rank_by_session.items()
        and len(restored.rank_by_session) == 1000
    )
    assert restored.loads == dict(collections.Counter(restored.rank_by_session.values()))
    assert restored.restore("s7", RANKS[5]) == restored.rank_by_session["s7"] == before["s7"]
    assert restored.restore("new", None) in RANKS[1:]


def test_additional_rank_moves_its_share_of_idle_sessions():
    config = RouterConfig(bound=100.0)
    smaller, larger = SessionRouter(RANKS[:7], config), SessionRouter(RANKS, config)
    before, after = route_all(smaller, 4000), route_all(larger, 4000)
    moved = [session for session in before if before[session] != after[session]]
    assert {after[session] for session in moved} == {RANKS[7]} and 0.06 < len(moved) / 4000 < 0.19
    assert max(collections.Counter(after.values()).values()) < 1.5 * 4000 / 8


def test_placement_is_equal_in_every_process():
    indices = [RANKS.index(SessionRouter(RANKS).route(f"s{i}")) for i in range(8)]
    assert indices == [2, 7, 5, 5, 0, 2, 2, 1]


def test_rejects_unknown_duplicate_and_missing_ranks():
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
