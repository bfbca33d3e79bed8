"""Which rank serves a session: the same for all of its turns, as its prefix is in that rank's cache (GLM-5 4.1.2).

Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, arXiv 1608.01350): a session goes to the next
rank on a ring that has room, where room is a little more than the mean; and first to a rank that is as far below it, as
one is that was lost and is there again. A session that is placed never moves unless its rank is lost, so that new ones
alone even out the load.
"""

import bisect
import dataclasses
import hashlib
import math
import re
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """Construction refuses values out of range (ValueError).

    Attributes:
      bound: sessions of a rank over the mean of all, at most; a rank with less than 2 - bound of it is filled first (1.15:
        0.85). GLM-5 does not disclose how it rebalances.
      points: of each rank on the ring.
    """

    bound: float = 1.15
    points: int = 128

    def __post_init__(self):
        if not self.bound >= 1:
            raise ValueError(f"bound is {self.bound}; below 1 there is no room for all sessions")
        if self.points < 1:
            raise ValueError(f"points is {self.points}; it must be at least 1")


class NoRank(Exception):
    """All ranks are lost."""


class Router:
    """Places sessions in flight on ranks. Nothing depends on when or in which process it runs.

    Attributes:
      loads: sessions in flight by rank, of the ranks that are there.
      placed: their ranks; without one are those whose ranks were all lost.
    """

    def __init__(self, ranks: Iterable[str], config: RouterConfig = RouterConfig()):
        self._config = config
        self._ring: list[tuple[int, str]] = []
        self.placed: dict[str, str] = {}
        self.loads: dict[str, int] = {}
        for rank in ranks:
            self.add(rank)

    def rank_of(self, session: str) -> str:
        """The session's rank, from now on if it is new. NoRank."""
        if session not in self.placed:
            self.placed[session] = rank = self._next(session)
            self.loads[rank] += 1
        return self.placed[session]

    def place(self, session: str, rank: str | None) -> str:
        """The session's rank: this one, where its prefix is, or another if that is not there. NoRank."""
        if session not in self.placed and rank in self.loads:
            self.placed[session] = rank
            self.loads[rank] += 1
        return self.rank_of(session)

    def release(self, session: str) -> None:
        """The session has ended; one that is not there has ended before."""
        rank = self.placed.pop(session, None)
        if rank is not None:
            self.loads[rank] -= 1

    def lose(self, rank: str) -> list[str]:
        """A rank is gone, and its sessions move; those that did. ValueError if there is none of the name."""
        if rank not in self.loads:
            raise ValueError(f"there is no rank {rank!r}; there are {sorted(self.loads)}")
        del self.loads[rank]
        self._ring = [point for point in self._ring if point[1] != rank]
        moved = [session for session, own in self.placed.items() if own == rank]
        for session in moved:
            del self.placed[session]
        if self.loads:
            for session in moved:
                self.rank_of(session)
        return moved

    def add(self, rank: str) -> None:
        """A rank is there, or there again: new sessions fill it. ValueError if it was there already."""
        if rank in self.loads:
            raise ValueError(f"rank {rank!r} is there already; lose it first")
        self.loads[rank] = 0
        for point in range(self._config.points):
            bisect.insort(self._ring, (_place(f"{rank}#{point}"), rank))

    def _next(self, session: str) -> str:
        if not self.loads:
            raise NoRank("all ranks are lost; add one")
        bound, mean = self._config.bound, (len(self.placed) + 1) / len(self.loads)
        emptiest = min(self.loads, key=lambda rank: (self.loads[rank], rank))
        if self.loads[emptiest] + 1 <= (2 - bound) * mean:
            return emptiest
        room = math.ceil(bound * mean)
        first = bisect.bisect(self._ring, (_place(session), ""))
        for point in range(len(self._ring)):
            rank = self._ring[(first + point) % len(self._ring)][1]
            if self.loads[rank] < room:
                return rank
        raise AssertionError("not all ranks can have more than the mean")


def _place(name: str) -> int:
    """On the ring; the same in every process, which `hash` is not."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def parse_rank(rank: str) -> tuple[str, int | None]:
    """Returns the URL of a rank, and its number among those that share it. A URL may have an @ of its own."""
    found = re.fullmatch(r"(.+)@(\d+)", rank)
    return (found[1], int(found[2])) if found else (rank, None)
