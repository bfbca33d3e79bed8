"""Routes sessions to ranks: all turns of a session go to one rank, whose cache holds its prefix (GLM-5 4.1.2).

Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, arXiv 1608.01350): a session goes to the next rank
on a ring that has room, where room is slightly more than the mean load. Ranks whose load is far below the mean, such as
one that was lost and has returned, are filled first. A session moves only if its rank is lost, so that only new sessions
even out the load.
"""

import bisect
import dataclasses
import hashlib
import math
import re
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Options of the router. Raises ValueError for values out of range.

    Attributes:
      bound: maximum ratio of a rank's sessions to the mean of all ranks. A rank with less than 2 - bound of the mean is
        filled first (1.15: 0.85). GLM-5 does not disclose how it rebalances.
      points: number of points of each rank on the ring.
    """

    bound: float = 1.15
    points: int = 128

    def __post_init__(self):
        if not self.bound >= 1:
            raise ValueError(f"bound is {self.bound}; below 1 there is no room for all sessions")
        if self.points < 1:
            raise ValueError(f"points is {self.points}; it must be at least 1")


class NoRankError(Exception):
    """Raised if all ranks are lost."""


class SessionRouter:
    """Assigns running sessions to ranks. The assignment does not depend on time or on the process.

    Attributes:
      loads: number of running sessions by rank, for the ranks that are available.
      rank_by_session: rank of each session. A session is missing if it lost its rank and no other one was available.
    """

    def __init__(self, ranks: Iterable[str], config: RouterConfig = RouterConfig()):
        self._config = config
        self._ring: list[tuple[int, str]] = []
        self.rank_by_session: dict[str, str] = {}
        self.loads: dict[str, int] = {}
        for rank in ranks:
            self.add(rank)

    def route(self, session: str) -> str:
        """Returns the rank of a session, and assigns one to a new session. Raises NoRankError."""
        if session not in self.rank_by_session:
            self.rank_by_session[session] = rank = self._next(session)
            self.loads[rank] += 1
        return self.rank_by_session[session]

    def restore(self, session: str, rank: str | None) -> str:
        """Assigns a session to the rank whose cache has its prefix, and returns the rank.

        If that rank is not available, the session is routed like a new one. Raises NoRankError.
        """
        if session not in self.rank_by_session and rank is not None and rank in self.loads:
            self.rank_by_session[session] = rank
            self.loads[rank] += 1
        return self.route(session)

    def release(self, session: str) -> None:
        """Removes a session that has ended; an unknown one is ignored."""
        rank = self.rank_by_session.pop(session, None)
        if rank is not None:
            self.loads[rank] -= 1

    def remove(self, rank: str) -> list[str]:
        """Removes a lost rank, routes its sessions again, and returns them. Raises ValueError for an unknown rank."""
        if rank not in self.loads:
            raise ValueError(f"there is no rank {rank!r}; there are {sorted(self.loads)}")
        del self.loads[rank]
        self._ring = [point for point in self._ring if point[1] != rank]
        moved = [session for session, other in self.rank_by_session.items() if other == rank]
        for session in moved:
            del self.rank_by_session[session]
        if self.loads:
            for session in moved:
                self.route(session)
        return moved

    def add(self, rank: str) -> None:
        """Adds a rank, which new sessions fill. Raises ValueError if the rank is available already."""
        if rank in self.loads:
            raise ValueError(f"rank {rank!r} is there already; remove it first")
        self.loads[rank] = 0
        for point in range(self._config.points):
            bisect.insort(self._ring, (_ring_position(f"{rank}#{point}"), rank))

    def _next(self, session: str) -> str:
        """Returns the rank for a new session."""
        if not self.loads:
            raise NoRankError("all ranks are lost; add one")
        bound, mean = self._config.bound, (len(self.rank_by_session) + 1) / len(self.loads)
        emptiest = min(self.loads, key=lambda rank: (self.loads[rank], rank))
        if self.loads[emptiest] + 1 <= (2 - bound) * mean:
            return emptiest
        capacity = math.ceil(bound * mean)
        first = bisect.bisect(self._ring, (_ring_position(session), ""))
        for point in range(len(self._ring)):
            rank = self._ring[(first + point) % len(self._ring)][1]
            if self.loads[rank] < capacity:
                return rank
        raise AssertionError("not all ranks can have more than the mean")


def _ring_position(name: str) -> int:
    """Returns a hash of the name that is the same in every process, unlike `hash`."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def parse_rank(rank: str) -> tuple[str, int | None]:
    """Returns the URL of a rank, and its number among the ranks of the URL. The URL itself may have an @."""
    match = re.fullmatch(r"(.+)@(\d+)", rank)
    return (match[1], int(match[2])) if match else (rank, None)
